"""Locks in a SQLite file: for several processes of one machine, without a server.

Every call is one transaction, which waits for those of other processes, but not longer than the
caller waits. Terms are counted by the clock of the machine, which all processes share.

A grant is written to the operating system without a sync to disk. A process that is killed loses
nothing. If the machine crashes, the last grants may be lost together with their holders; fences
still rise, because they follow the clock.

``SqliteTurns`` adds a queue of waiters. A file cannot notify another process, so a waiter polls:
often when it is first in the queue, less often behind. A poll takes no lock and does not delay
writers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Final, Self, TypeVar

from msgspec.structs import replace

from stanchion.adapters.sqlite.database import Database, Row, read_statements
from stanchion.adapters.sqlite.opening import (
    open_for_reading,
    open_for_writing,
    read_schema,
    resolved,
)
from stanchion.adapters.sqlite.thread import WorkerThread, read_together, write_together
from stanchion.adapters.system import SystemEntropy
from stanchion.core.lease import next_fence
from stanchion.core.model import Instant
from stanchion.core.retry import BoundedJitter, backoff_ms
from stanchion.ports.clock import Clock
from stanchion.ports.errors import BackendError
from stanchion.ports.locks import (
    AcquireAnswer,
    AcquireTooLate,
    Granted,
    Held,
    LockNote,
    LockReleased,
    LockView,
    NotOwned,
    Renewed,
    holder_of,
)
from stanchion.ports.turns import Place

_SQL = read_statements(__package__, "sqlite.sql")
_SCHEMA: Final = read_schema(b"STLK", __package__, "sqlite_migrations")
_Answer = TypeVar("_Answer")
_TIMEOUT_S: Final = 2.0
_QUEUE_MAX: Final = 10_000
_MS_PER_S: Final = 1_000
_US_PER_MS: Final = 1_000
_LAST_LETTER: Final = "\U0010ffff"
_FORGET_AFTER_MS: Final = 86_400_000
"""Far longer than any clock is set back."""
_FORGET_AT_ONCE: Final = 4
"""More than one, so that a large file shrinks again."""


class SqliteLocks:
    """See ``ports.locks.Locks``. Made by ``open``."""

    is_local = False

    def __init__(self, thread: WorkerThread[Database], clock: Clock, timeout_s: float) -> None:
        self._thread = thread
        self._clock = clock
        self._timeout_s = timeout_s

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        *,
        clock: Clock,
        timeout_s: float = _TIMEOUT_S,
        queue_max: int = _QUEUE_MAX,
    ) -> Self:
        """Open the file, or create it. Any number of processes may have it open.

        ``timeout_s``: how long a caller waits at most. ``queue_max``: how many callers may wait.
        """
        where = resolved(path)
        busy_ms = round(timeout_s * _MS_PER_S)

        def make() -> Database:
            connection = open_for_writing(where, _SCHEMA, sync="NORMAL", busy_ms=busy_ms)
            return Database(connection, where, clock)

        thread = await WorkerThread.open(
            f"{where} (locks)",
            make,
            write_together,
            lambda db: db.connection.close(),
            queue_max=queue_max,
        )
        return cls(thread, clock, timeout_s)

    async def acquire(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, floor: int = 0
    ) -> AcquireAnswer:
        not_after = Instant(self._clock.now() + within_ms)

        def act(db: Database) -> AcquireAnswer:
            if db.now() > not_after:
                return AcquireTooLate()
            return take(db, name, token, ttl_ms, floor)

        return await self._call(act, within_ms)

    async def renew(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int
    ) -> Renewed | NotOwned:
        def act(db: Database) -> Renewed | NotOwned:
            now = db.now()
            renewed = db.changed(
                _SQL["renew"], name=name, token=token, now=now, expires_at=now + ttl_ms
            )
            return Renewed() if renewed else NotOwned()

        return await self._call(act, within_ms)

    async def release(self, name: str, token: str, *, within_ms: int) -> LockReleased | NotOwned:
        def act(db: Database) -> LockReleased | NotOwned:
            stood = db.changed(_SQL["release"], name=name, token=token, now=db.now())
            return LockReleased() if stood else NotOwned()

        return await self._call(act, within_ms)

    async def inspect(self, name: str) -> LockView | None:
        def act(db: Database) -> LockView | None:
            found = db.first(_SQL["show_lock"], name=name)
            view = None if found is None else _view(found, db.now())
            return view if view is not None and view.expires_in_ms > 0 else None

        return await self._call(act)

    async def list(self, prefix: str = "", *, limit: int = 1000) -> Sequence[LockView]:
        def act(db: Database) -> Sequence[LockView]:
            now = db.now()
            rows = db.every(
                _SQL["list_locks"], first=prefix, last=prefix + _LAST_LETTER, now=now, limit=limit
            )
            return [_view(row, now) for row in rows]

        return await self._call(act)

    async def hold(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, note: LockNote
    ) -> AcquireAnswer:
        not_after = Instant(self._clock.now() + within_ms)

        def act(db: Database) -> AcquireAnswer:
            if db.now() > not_after:
                return AcquireTooLate()
            answer = take(db, name, token, ttl_ms, 0)
            if isinstance(answer, Granted):
                _write_note(db, replace(note, fence=answer.fence))
            return answer

        return await self._call(act, within_ms)

    async def force_release(self, name: str) -> bool:
        return await self._call(
            lambda db: bool(db.changed(_SQL["force_release"], name=name, now=db.now()))
        )

    async def release_by_hand(self, name: str, *, note: LockNote) -> bool:
        def act(db: Database) -> bool:
            found = db.first(_SQL["read_lock"], name=name)
            is_released = bool(db.changed(_SQL["force_release"], name=name, now=db.now()))
            if is_released and found is not None:
                _write_note(db, replace(note, fence=found[1]))
            return is_released

        return await self._call(act)

    async def notes(self, *, limit: int = 100) -> Sequence[LockNote]:
        return await self._call(
            lambda db: [LockNote(*row) for row in db.every(_SQL["list_notes"], limit=limit)]
        )

    async def drop_notes(self, notes: Sequence[LockNote]) -> None:
        ids = [{"id": note.id} for note in notes]
        await self._call(lambda db: db.run_each(_SQL["drop_note"], ids))

    async def ping(self) -> None:
        await self._call(lambda db: db.first(_SQL["read_lock"], name=""))

    async def close(self) -> None:
        await self._thread.close()

    async def _call(
        self, act: Callable[[Database], _Answer], within_ms: int | None = None
    ) -> _Answer:
        wait_s = self._timeout_s if within_ms is None else within_ms / _MS_PER_S
        return await self._thread.call(act, wait_s=min(wait_s, self._timeout_s))


def _write_note(db: Database, note: LockNote) -> None:
    db.run(_SQL["write_note"], id=note.id, name=note.name, text=note.text, fence=note.fence)


def take(db: Database, name: str, token: str, ttl_ms: int, floor: int) -> AcquireAnswer:
    """Take a lock that is free or that the token has already. Call it inside a transaction."""
    now = db.now()
    found = db.first(_SQL["read_lock"], name=name)
    holder, fence, expires_at = ("", 0, 0) if found is None else found
    is_held = expires_at > now
    if is_held and holder != token:
        return Held(expires_at - now)
    if is_held and fence > floor:
        # The current holder repeats a call whose answer was lost: it gets the same fence.
        db.run(_SQL["grant_again"], name=name, expires_at=now + ttl_ms)
        return Granted(fence)
    fence = next_fence(fence, floor, now * _US_PER_MS)
    db.run(
        _SQL["grant"], name=name, token=token, fence=fence, expires_at=now + ttl_ms, acquired_at=now
    )
    if found is None:
        db.run(_SQL["forget"], before=now - _FORGET_AFTER_MS, limit=_FORGET_AT_ONCE)
    return Granted(fence)


def _view(row: Row, now: Instant) -> LockView:
    name, token, fence, expires_at, acquired_at, renewals = row
    return LockView(name, fence, expires_at - now, holder_of(token), acquired_at, renewals)


_TURN_SQL = read_statements(__package__, "sqlite_turns.sql")
_ENTROPY: Final = SystemEntropy()
_LOOK_MS: Final = 6
_LOOK_MS_MAX: Final = 48


class SqliteTurns(SqliteLocks):
    """See ``ports.turns.Turns``. Made by ``open``."""

    def __init__(self, thread: WorkerThread[Database], clock: Clock, timeout_s: float) -> None:
        super().__init__(thread, clock, timeout_s)
        self._opening_window = asyncio.Lock()
        self._window: WorkerThread[Database] | None = None
        """A connection for reading only, opened when a caller waits for the first time."""

    async def acquire(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, floor: int = 0
    ) -> AcquireAnswer:
        not_after = Instant(self._clock.now() + within_ms)

        def act(db: Database) -> AcquireAnswer:
            now = db.now()
            if now > not_after:
                return AcquireTooLate()
            first = db.first(_TURN_SQL["first_in_line"], name=name, now=now)
            if first is None:
                return take(db, name, token, ttl_ms, floor)
            first_token, ticket_ends_at = first
            is_free = db.first(_TURN_SQL["holder"], name=name, now=now) is None
            if first_token != token and is_free:
                return Held(ticket_ends_at - now)
            answer = take(db, name, token, ttl_ms, floor)
            if isinstance(answer, Granted):
                db.run(_TURN_SQL["leave"], name=name, token=token)
            return answer

        return await self._call(act, within_ms)

    async def join(self, name: str, token: str, *, ticket_ms: int, within_ms: int) -> Place:
        def act(db: Database) -> Place:
            now = db.now()
            db.run(_TURN_SQL["drop_late"], now=now)
            db.run(_TURN_SQL["join"], name=name, token=token, expires_at=now + ticket_ms)
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
        await self._call(lambda db: db.run(_TURN_SQL["leave"], name=name, token=token), within_ms)

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
    """The pause until the next poll: longer for a waiter further back in the queue."""
    delay_ms = min(_LOOK_MS_MAX, _LOOK_MS * (1 + ahead))
    rhythm = BoundedJitter(delay_ms, delay_ms // 2)
    return backoff_ms(rhythm, 1, _ENTROPY.unit()) / 1000


def _place(db: Database, name: str, token: str) -> Place | None:
    """The place of the token in the queue; ``None`` if its ticket expired."""
    now = db.now()
    found = db.first(_TURN_SQL["place"], name=name, token=token, now=now)
    if found is None:
        return None
    ahead, first_ends_at, lock_ends_at = found
    if lock_ends_at > now:
        return Place(ahead, lock_ends_at - now)
    return Place(ahead, first_ends_at - now if ahead else 0)
