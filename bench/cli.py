"""Start-up time of the command line.

Measures whole processes. ``run list`` calls a server that answers at once.
"""

from __future__ import annotations

import subprocess
import sys

from bench.row import Row, best_of
from stanchion.wire import runs
from tests.cli.scripted import Said, running_script
from tests.cli.terminal import on_terminal, plain_environment

__all__ = ["rows"]

ROUNDS = 15


def rows() -> list[Row]:
    """Start each command repeatedly."""
    with running_script() as server:
        server.says(Said(runs.RunList(())))
        listing = ("run", "list", "--url", server.url)
        times = {
            "stanchion --help": _started_ms("--help"),
            "stanchion run list -o json": _started_ms(*listing, "-o", "json"),
            "stanchion run list on a terminal": _on_terminal_ms(*listing),
        }
    return [Row(name, ms, "ms", "< 150", ms < 150) for name, ms in times.items()]


def _started_ms(*args: str) -> float:
    command = [sys.executable, "-m", "stanchion", *args]
    environment = plain_environment()

    def once() -> None:
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)  # noqa: S603 - our own

    return best_of(ROUNDS, once) * 1000


def _on_terminal_ms(*args: str) -> float:
    def once() -> None:
        assert on_terminal(*args).code == 0

    return best_of(ROUNDS, once) * 1000
