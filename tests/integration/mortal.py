"""Real servers that kill themselves at a chosen point of a change. See ``test_audit_kill``.

    python -m tests.integration.mortal        # orders are lines of JSON on standard input

The program imports a server once and forks a child for each order, so that a server is ready in a
fraction of a second. The child is ``stanchion serve`` on a SQLite file. Its hook counts the points
of every change: before each statement that writes a row, before the commit, and right after it.
While the file ``armed`` exists, it names a change and the point at which the process sends SIGKILL
to itself: ``put_tenant 3``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import apsw
import msgspec

from stanchion import assemble, console
from stanchion.cli.app import app

__all__ = ["Order"]

_LOADED: Final = (assemble, console)
"""Imported here, so that the children have them."""
_WRITES: Final = ("INSERT", "UPDATE", "DELETE", "REPLACE", "--")
"""The text of a statement inside a trigger begins with a comment."""


class Order(msgspec.Struct, frozen=True):
    """A server to start."""

    flags: list[str]
    log: str
    armed: str


def main() -> None:
    """Start a server for each order, and say how it ended."""
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        pid = os.fork()
        if pid == 0:
            _serve(order)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201 - that is its answer


def _serve(order: Order) -> None:
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    apsw.connection_hooks.append(_hook(order))
    try:
        app.main(["serve", *order.flags], standalone_mode=False)
    finally:
        os._exit(1)  # never back into the loop of the parent


class _Points:
    """Counts the points of the change that ``armed`` names."""

    def __init__(self, armed: Path) -> None:
        self._armed = armed
        self._counts: Counter[str] = Counter()

    def __call__(self) -> None:
        """One more point: die here, if it is the one."""
        with suppress(FileNotFoundError):
            change = self._armed.read_text()
            self._counts[change] += 1
            if change.endswith(f" {self._counts[change]}"):
                os.kill(os.getpid(), signal.SIGKILL)


def _hook(order: Order) -> Callable[[apsw.Connection], None]:
    pass_point = _Points(Path(order.armed))

    def on_connection(connection: apsw.Connection) -> None:
        written = 0

        def trace(event: dict[str, Any]) -> None:
            nonlocal written
            text = str(event.get("sql") or "").lstrip().upper()
            is_begun = event["code"] == apsw.SQLITE_TRACE_STMT
            is_commit = text.startswith("COMMIT") and connection.total_changes() > written
            if is_commit or (is_begun and text.startswith(_WRITES)):
                pass_point()
            if is_commit and not is_begun:
                written = connection.total_changes()

        if not connection.readonly("main"):
            connection.trace_v2(apsw.SQLITE_TRACE_STMT | apsw.SQLITE_TRACE_PROFILE, trace)

    return on_connection


if __name__ == "__main__":
    main()
