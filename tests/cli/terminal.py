"""The command line on a pseudo-terminal: what a person sees, colours and all."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["Seen", "on_terminal", "plain_environment", "snapshot"]

ROWS, COLUMNS = 40, 100
_AT_MOST_S = 60.0
_IN_2026 = (
    "import runpy; from stanchion.cli import text; text.this_year = lambda: '2026';"
    "runpy.run_module('stanchion', run_name='__main__', alter_sys=True)"
)
"""``python -m stanchion`` in the year of all fixtures: times of another year are longer."""


class Seen(NamedTuple):
    """How a command ended, and everything that reached the terminal; ``␛`` is an escape."""

    code: int
    text: str


def plain_environment(**more: str) -> dict[str, str]:
    """This process's environment, without what would change how a command behaves or looks.

    Nor without bytecode, which an installed command has.
    """
    looks = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_")
    ours = ("STANCHION_", "_STANCHION_", "PYTHONDONTWRITEBYTECODE", *looks)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {"TERM": "xterm-256color", "LANG": "C.UTF-8"} | more


def on_terminal(
    *args: str,
    env: Mapping[str, str] | None = None,
    interrupt_when: Callable[[str], bool] | None = None,
    columns: int = COLUMNS,
) -> Seen:
    """Run a command with its output on a terminal of 100 columns, or as many as are given.

    ``interrupt_when`` looks at what was seen so far: when it says so, Ctrl-C is pressed, once.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", _IN_2026, *args],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=plain_environment(**(env or {})),
    )
    os.close(theirs)
    seen = b""
    too_long = threading.Timer(_AT_MOST_S, process.kill)
    too_long.start()
    try:
        while chunk := _read(ours):
            seen += chunk
            if interrupt_when is not None and interrupt_when(seen.decode(errors="replace")):
                interrupt_when = None
                process.send_signal(signal.SIGINT)
        code = process.wait(timeout=20)
    finally:
        too_long.cancel()
        process.kill()
        process.wait()
        os.close(ours)
    text = seen.decode(errors="replace").replace("\r\n", "\n").replace("\x1b", "␛")
    return Seen(code, text)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65_536)
    except OSError:  # Linux says so when the other side is closed.
        return b""


SNAPSHOTS = Path(__file__).parent / "snapshots"


def snapshot(name: str, text: str) -> str:
    """What was seen when it was last looked at. STANCHION_TEST_SNAPSHOTS=write looks anew."""
    file = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("STANCHION_TEST_SNAPSHOTS") == "write":
        SNAPSHOTS.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return file.read_text(encoding="utf-8")
