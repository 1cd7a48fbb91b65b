"""Install the peers' packages, separate from ours, in ``reports/peers``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from bench.serving import ROOT

__all__ = ["PYTHON", "RESTATE", "TEMPORAL", "install", "missing"]

HOME: Final = ROOT / "reports" / "peers"
PYTHON: Final = HOME / "venv" / "bin" / "python"
TEMPORAL: Final = HOME / "venv" / "bin" / "temporal"
RESTATE_PACKAGE: Final = "@restatedev/restate-server@1.7.12"


def _restate_binary() -> Path:
    packages = HOME / "node_modules" / "@restatedev"
    return next(packages.glob("restate-server-*/bin/restate-server"), packages / "restate-server")


RESTATE: Final = _restate_binary()


def missing(*files: Path) -> str:
    """Return why a peer cannot be measured; empty if it can."""
    if all(file.is_file() for file in files):
        return ""
    return "not installed: python -m bench.peers install"


def install() -> int:
    """Install all peers; return the exit code."""
    npm = shutil.which("npm")
    if npm is None:
        print("npm is not there: Restate's server comes from its registry", file=sys.stderr)
        return 1
    HOME.mkdir(parents=True, exist_ok=True)
    requirements = Path(__file__).with_name("requirements.txt")
    commands = (
        [sys.executable, "-m", "venv", str(HOME / "venv")],
        [str(PYTHON), "-m", "pip", "install", "--quiet", "--requirement", str(requirements)],
        [npm, "install", "--silent", "--prefix", str(HOME), RESTATE_PACKAGE],
    )
    # Opt out of a dependency's install telemetry.
    environment = {**os.environ, "SCARF_ANALYTICS": "false"}
    for command in commands:
        print("$", *command)
        code = subprocess.run(command, env=environment, check=False).returncode  # noqa: S603 - as above
        if code:
            return code
    return 0
