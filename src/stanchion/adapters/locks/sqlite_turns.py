"""Locks in a SQLite file that can be waited for in line, across processes.

Nobody can ring another process's bell through a file. So whoever waits looks: often when first in
line, less often behind. To look takes no lock, and holds up nobody who writes.
"""

from __future__ import annotations

import asyncio
from typing import Final

from stanchion.adapters.locks.sqlite import SqliteLocks, take
from stanchion.adapters.sqlite.database import Database, read_statements
from stanchion.adapters.sqlite.opening import open_for_reading
from stanchion.adapters.sqlite.thread import WorkerThread, read_together
from stanchion.adapters.system import SystemEntropy
from stanchion.core.model import Instant
from stanchion.core.retry import BoundedJitter, backoff_ms
from stanchion.ports.clock import Clock
from stanchion.ports.errors import BackendError
from stanchion.ports.locks import AcquireAnswer, Granted, Held, TooLate
from stanchion.ports.turns import Place

__all__ = ["SqliteTurns"]

_SQL = read_statements(__package__, "sqlite_turns.sql")
_ENTROPY: Final = SystemEntropy()
_LOOK_MS: Final = 6
_LOOK_MS_MAX: Final = 48
_QUEUE_MAX: Final = 10_000


class SqliteTurns(SqliteLocks):
    """See ``ports.turns.Turns``. Made by ``open``."""

    def __init__(self, thread: WorkerThread[Database], clock: Clock, timeout_s: float) -> None:
        super().__init__(thread, clock, timeout_s)
        self._opening_window = asyncio.Lock()
        self._window: WorkerThread[Database] | None = None
        """A connection that only looks, made when somebody waits for the first time."""

    async def acquire(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, floor: int = 0
    ) -> AcquireAnswer:
        not_after = Instant(self._clock.now() + within_ms)

        def act(db: Database) -> AcquireAnswer:
            now = db.now()
            if now > not_after:
                return TooLate()
            first = db.first(_SQL["first_in_line"], name=name, now=now)
            if first is None:
                return take(db, name, token, ttl_ms, floor)
            first_token, ticket_ends_at = first
            is_free = db.first(_SQL["holder"], name=name, now=now) is None
            if first_token != token and is_free:
                return Held(ticket_ends_at - now)
            answer = take(db, name, token, ttl_ms, floor)
            if isinstance(answer, Granted):
                db.run(_SQL["leave"], name=name, token=token)
            return answer

        return await self._call(act, within_ms)

    async def join(self, name: str, token: str, *, ticket_ms: int, within_ms: int) -> Place:
        def act(db: Database) -> Place:
            now = db.now()
            db.run(_SQL["drop_late"], now=now)
            db.run(_SQL["join"], name=name, token=token, expires_at=now + ticket_ms)
            place = _place(db, name, token)
            assert place is not None
            return place

        return await self._call(act, within_ms)

    async def bell(self, name: str, token: str, *, at_most_ms: int) -> bool:
        loop = asyncio.get_running_loop()
        until = loop.time() + at_most_ms / 1000
        ahead = 0
        while (left_s := until - loop.time()) > 0:
            await asyncio.sleep(min(left_s, _pause_s(ahead)))
            try:
                window = await self._look_out()
                place = await window.call(
                    lambda db: _place(db, name, token), wait_s=min(left_s, self._timeout_s)
                )
            except BackendError:
                continue
            if place is not None and place.look_again_in_ms == 0:
                return True
            ahead = _LOOK_MS_MAX if place is None else place.ahead
        return False

    async def leave(self, name: str, token: str, *, within_ms: int) -> None:
        await self._call(lambda db: db.run(_SQL["leave"], name=name, token=token), within_ms)

    async def close(self) -> None:
        if self._window is not None:
            await self._window.close()
        await super().close()

    async def _look_out(self) -> WorkerThread[Database]:
        async with self._opening_window:
            if self._window is None:
                path = await self._call(lambda db: db.path)
                busy_ms = round(self._timeout_s * 1000)
                self._window = await WorkerThread.open(
                    f"{path} (turns)",
                    lambda: Database(open_for_reading(path, busy_ms=busy_ms), path, self._clock),
                    read_together,
                    lambda db: db.connection.close(),
                    queue_max=_QUEUE_MAX,
                )
        return self._window


def _pause_s(ahead: int) -> float:
    """How long until the next look. Whoever is far behind has time."""
    delay_ms = min(_LOOK_MS_MAX, _LOOK_MS * (1 + ahead))
    rhythm = BoundedJitter(delay_ms, delay_ms // 2)
    return backoff_ms(rhythm, 1, _ENTROPY.unit()) / 1000


def _place(db: Database, name: str, token: str) -> Place | None:
    """Where the token stands; nowhere, if its ticket ran out."""
    now = db.now()
    found = db.first(_SQL["place"], name=name, token=token, now=now)
    if found is None:
        return None
    ahead, first_ends_at, lock_ends_at = found
    if lock_ends_at > now:
        return Place(ahead, lock_ends_at - now)
    return Place(ahead, first_ends_at - now if ahead else 0)
