"""A browser for the tests of the console: found on the machine, or fetched by ``make test``.

``python -m tests.console.browser`` looks for one, gets one if there is none (Playwright's download,
or the distribution's package where it runs as root), and says what it found. It never fails:
without a browser the browser tests are skipped, and ``--report`` says so loudly at the end.

``STANCHION_TEST_BROWSER`` names the program to use; empty, it means none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

__all__ = ["Browser", "find", "open_browser"]

VARIABLE: Final = "STANCHION_TEST_BROWSER"
NAMES: Final = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)
PACKAGES: Final = ("chromium-headless-shell", "chromium")
_GET_S_MAX: Final = 300
_VERSION_S_MAX: Final = 60

Browser = Any
"""Playwright's browser: the types are not there where the package is not."""


def find() -> Path | None:
    """The browser to test with, if there is one that runs."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return Path(given) if given else None
    for name in NAMES:
        found = shutil.which(name)
        if found is not None and _runs(Path(found)):
            return Path(found)
    own = _playwrights_own()
    return own if own is not None and _runs(own) else None


def _runs(program: Path) -> bool:
    """Whether the program starts at all: a download may lack the libraries that it needs."""
    try:
        answer = subprocess.run(
            [program, "--version"], capture_output=True, timeout=_VERSION_S_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0


def _playwrights_own() -> Path | None:
    home = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache/ms-playwright")
    found = sorted(home.glob("chromium*/*/*headless*shell")) + sorted(
        home.glob("chromium*/*/chrome")
    )
    return found[-1] if found else None


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser for as long as the block lasts."""
    # Imported here: the checks of this module's users do without the driver.
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    program = find()
    assert program is not None, "there is no browser: see find()"
    with sync_playwright() as driver:
        # Without its sandbox: it needs rights that a container does not give. All pages are ours.
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


# ── Getting one ──────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    """Find a browser or get one; with ``--report`` only say whether there is one."""
    found = find()
    if found is None and "--report" not in sys.argv and os.environ.get(VARIABLE) is None:
        _get()
        found = find()
    if found is not None:
        if "--report" not in sys.argv:
            print(f"browser tests run with {found}")
        return
    line = "*" * 88
    print(
        f"{line}\n* There is no browser on this machine, and none could be fetched.\n"
        "* THE BROWSER TESTS OF THE CONSOLE DO NOT RUN.\n"
        "* Install chromium or google-chrome, or set STANCHION_TEST_BROWSER to the path of one.\n"
        f"{line}"
    )


def _get() -> None:
    """Try Playwright's own download, then the distribution's packages."""
    print("no browser found; fetching one")
    if _try([sys.executable, "-m", "playwright", "install", "--only-shell", "chromium"]):
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        _try(["apt-get", "--quiet", "--quiet", "update"])
        for package in PACKAGES:
            if _try(["apt-get", "--quiet", "--quiet", "--yes", "install", package]):
                return


def _try(command: list[str]) -> bool:
    print("+", *command, flush=True)
    variables = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        answer = subprocess.run(
            command,
            check=False,
            timeout=_GET_S_MAX,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"  {type(error).__name__}")
        return False
    if answer.returncode != 0:
        lines = answer.stderr.decode(errors="replace").strip().splitlines()
        told = [line for line in lines if "rror" in line or line.startswith("E:")] or lines
        print(f"  failed: {' '.join(told[:1])}")
    return answer.returncode == 0


if __name__ == "__main__":
    main()
