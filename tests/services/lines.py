"""One replica's lines to the lock store and to the bus. Each can go bad for it alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

from stanchion.adapters.bus.local import BellListeners, LocalBus
from stanchion.adapters.locks.memory import MemoryLocks
from stanchion.core.model import RunId
from stanchion.ports.bus import Bell, Disposition, Handler
from stanchion.ports.clock import Clock
from stanchion.ports.errors import BackendUnavailable
from stanchion.ports.records import OutboxRow
from tests.services.faulty_locks import FaultyLocks
from tests.services.faulty_store import OnCall

__all__ = ["Answer", "BusLine", "LockLine"]

_Answer = TypeVar("_Answer")


class Answer(NamedTuple):
    """What became of a call, and when."""

    at_s: float
    run_id: RunId
    disposition: Disposition


class LockLine(FaultyLocks):
    """One replica's line to the lock store."""

    def __init__(self, clock: Clock, shared: MemoryLocks) -> None:
        super().__init__(clock)
        self.real = shared
        self.on_call: OnCall = lambda _verb, _is_done: None

    async def _call(
        self, verb: str, really: Callable[[], Awaitable[_Answer]], *, late: _Answer
    ) -> _Answer:
        self.on_call(verb, False)
        answer = await super()._call(verb, really, late=late)
        self.on_call(verb, True)
        return answer


class BusLine:
    """One replica's line to the bus: bells reach everybody, calls whoever shares the queue."""

    def __init__(self, calls: LocalBus, listeners: BellListeners) -> None:
        self._calls = calls
        self._listeners = listeners
        self.has_turns = calls.has_turns
        self.is_away = False
        self.is_mute = False
        """Bells that this replica rings are lost."""
        self.published = 0
        self.answers: list[Answer] = []
        """What this replica made of the calls it was handed."""
        self._handle: Handler | None = None

    async def publish(self, calls: Sequence[OutboxRow]) -> int:
        await self.ping()
        self.published += len(calls)
        return await self._calls.publish(calls)

    async def consume(self, handle: Handler, *, at_once_max: int) -> None:
        self._handle = handle
        await self._calls.consume(self.call, at_once_max=at_once_max)

    async def call(self, row: OutboxRow) -> Disposition:
        """Hand a call to the replica, as the bus does."""
        assert self._handle is not None
        disposition = await self._handle(row)
        at_s = asyncio.get_running_loop().time()
        self.answers.append(Answer(at_s, row.run_id, disposition))
        return disposition

    def ring(self, bell: Bell, note: str = "") -> None:
        if not (self.is_away or self.is_mute):
            self._listeners.hear(bell, note)

    def listen(self, bell: Bell, hear: Callable[[str], None]) -> Callable[[], None]:
        return self._listeners.listen(bell, hear)

    async def pending(self) -> int:
        await self.ping()
        return await self._calls.pending()

    async def backlog(self) -> int:
        await self.ping()
        return await self._calls.backlog()

    async def ping(self) -> None:
        if self.is_away:
            raise BackendUnavailable("the bus is away")

    async def close(self) -> None:
        """The queue is the others' too."""
