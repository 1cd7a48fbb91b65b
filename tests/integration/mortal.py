"""Real servers that kill themselves at a chosen point of a change. See ``test_audit_kill``.

    python -m tests.integration.mortal        # orders are lines of JSON on standard input

The program imports a server once and forks a child for each order, so that a server is ready in a
fraction of a second. The child is ``stanchion serve``. Hooks count the points of a change. On
SQLite these are before each statement that writes a row, before the commit, and right after it. On
Redis a script is indivisible: they are before each script that writes an audit entry or a note of
one, when it was sent, and when it was answered. While the file ``armed`` exists, it names a change
and the point at which the process sends SIGKILL to itself: ``put_tenant 3``.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, Final

import apsw
import msgspec

from stanchion import assemble, console
from stanchion.adapters.locks.redis import RedisLocks
from stanchion.adapters.store.redis import RedisStore
from stanchion.cli.app import app

__all__ = ["Order"]

_LOADED: Final = (assemble, console)
"""Imported here, so that the children have them."""
_WRITES: Final = ("INSERT", "UPDATE", "DELETE", "REPLACE", "--")
"""The text of a statement inside a trigger begins with a comment."""
_SENT_S: Final = 0.001
"""After so long a request is on its way; its answer may be, too."""


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
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    points = _Points(Path(order.armed))
    apsw.connection_hooks.append(lambda connection: _watch(connection, points))
    _interrupt(RedisStore, points)
    _interrupt(RedisLocks, points)
    try:
        app.main(["serve", *order.flags], standalone_mode=False)
    finally:
        os._exit(1)  # never back into the loop of the parent


class _Points:
    """Counts the points of the change that ``armed`` names."""

    def __init__(self, armed: Path) -> None:
        self._armed = armed
        self._counts: Counter[str] = Counter()

    def __call__(self, name: str | None = None) -> None:
        """One more point: die here, if it is the one by its number or by its name."""
        with suppress(FileNotFoundError):
            change = self._armed.read_text()
            self._counts[change] += 1
            if change.endswith((f" {self._counts[change]}", f" {name}")):
                os.kill(os.getpid(), signal.SIGKILL)


def _watch(connection: apsw.Connection, points: _Points) -> None:
    """Count the statements of a connection that write, and its commits."""
    written = 0

    def trace(event: dict[str, Any]) -> None:
        nonlocal written
        text = str(event.get("sql") or "").lstrip().upper()
        is_begun = event["code"] == apsw.SQLITE_TRACE_STMT
        is_commit = text.startswith("COMMIT") and connection.total_changes() > written
        if is_commit:
            points("commit" if is_begun else "committed")
        elif is_begun and text.startswith(_WRITES):
            points()
        if is_commit and not is_begun:
            written = connection.total_changes()

    if not connection.readonly("main"):
        connection.trace_v2(apsw.SQLITE_TRACE_STMT | apsw.SQLITE_TRACE_PROFILE, trace)


def _interrupt(adapter: type, points: _Points) -> None:
    """Count the points of the calls of an adapter that write an audit entry or a note."""
    for name, verb in inspect.getmembers(adapter, inspect.iscoroutinefunction):
        is_verb = not isinstance(inspect.getattr_static(adapter, name), classmethod)
        if is_verb and not name.startswith("_"):
            setattr(adapter, name, _interrupted(verb, points))


def _interrupted(
    verb: Callable[..., Coroutine[Any, Any, Any]], points: _Points
) -> Callable[..., Coroutine[Any, Any, Any]]:
    @wraps(verb)
    async def call(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - as the verb has them
        given = [*arguments[1:2], *named.values()]
        audited = [getattr(each, "audit", None) for each in given]
        is_about = named.get("audit") or named.get("note") or any(audited)
        if not is_about and verb.__name__ not in {"add_audit", "drop_notes"}:
            return await verb(*arguments, **named)
        points()
        under_way = asyncio.ensure_future(verb(*arguments, **named))
        await asyncio.wait([under_way], timeout=_SENT_S)
        points()
        answer = await under_way
        points()
        return answer

    return call


if __name__ == "__main__":
    main()
