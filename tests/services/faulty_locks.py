"""Locks whose calls can be made to go wrong, at the port and in every way a real one does."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import TypeVar

from stanchion.adapters.locks.memory import MemoryLocks
from stanchion.ports.clock import Clock
from stanchion.ports.errors import BackendUnavailable
from stanchion.ports.locks import (
    AcquireAnswer,
    AcquireTooLate,
    LockNote,
    LockReleased,
    LockView,
    NotOwned,
    Renewed,
)

_Answer = TypeVar("_Answer")


class Fault(StrEnum):
    """What can happen to a call."""

    NONE = "none"
    BUG = "bug"
    """An exception that no adapter should raise."""
    ERROR = "error"
    """Refused before anything was done."""
    HANG = "hang"
    """Never answered, never done."""
    LOST_REPLY = "lost reply"
    """Done, but the answer is lost."""
    LATE = "late"
    """Executed by the server after its deadline: nothing is done."""
    NOT_OWNED = "not owned"
    """The server says that the lease is another's."""
    SLOW = "slow"
    """Answered after half a second."""


class FaultyLocks:
    """In-memory locks with a script of faults for each verb; when it runs out, all is well."""

    is_local = False

    def __init__(self, clock: Clock) -> None:
        self.real = MemoryLocks(clock)
        self.calls: Counter[str] = Counter()
        self._scripts: defaultdict[str, deque[Fault]] = defaultdict(deque)
        self._always: dict[str, Fault] = {}

    def script(self, verb: str, *faults: Fault) -> None:
        """The next calls of a verb end like this."""
        self._scripts[verb].extend(faults)

    def always(self, fault: Fault, *verbs: str) -> None:
        """From now on all calls of these verbs end like this."""
        for verb in verbs:
            self._always[verb] = fault

    async def acquire(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, floor: int = 0
    ) -> AcquireAnswer:
        return await self._call(
            "acquire",
            lambda: self.real.acquire(name, token, ttl_ms=ttl_ms, within_ms=within_ms, floor=floor),
            late=AcquireTooLate(),
        )

    async def renew(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int
    ) -> Renewed | NotOwned:
        return await self._call(
            "renew",
            lambda: self.real.renew(name, token, ttl_ms=ttl_ms, within_ms=within_ms),
            late=NotOwned(),
        )

    async def release(self, name: str, token: str, *, within_ms: int) -> LockReleased | NotOwned:
        return await self._call(
            "release",
            lambda: self.real.release(name, token, within_ms=within_ms),
            late=NotOwned(),
        )

    async def inspect(self, name: str) -> LockView | None:
        return await self._call("inspect", lambda: self.real.inspect(name), late=None)

    async def list(self, prefix: str = "", *, limit: int = 1000) -> Sequence[LockView]:
        return await self.real.list(prefix, limit=limit)

    async def force_release(self, name: str) -> bool:
        return await self.real.force_release(name)

    async def hold(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, note: LockNote
    ) -> AcquireAnswer:
        return await self._call(
            "acquire",
            lambda: self.real.hold(name, token, ttl_ms=ttl_ms, within_ms=within_ms, note=note),
            late=AcquireTooLate(),
        )

    async def release_by_hand(self, name: str, *, note: LockNote) -> bool:
        return await self.real.release_by_hand(name, note=note)

    async def notes(self, *, limit: int = 100) -> Sequence[LockNote]:
        return await self.real.notes(limit=limit)

    async def drop_notes(self, notes: Sequence[LockNote]) -> None:
        await self.real.drop_notes(notes)

    async def ping(self) -> None:
        await self._call("ping", self.real.ping, late=None)

    async def close(self) -> None:
        await self.real.close()

    async def _call(
        self, verb: str, really: Callable[[], Awaitable[_Answer]], *, late: _Answer
    ) -> _Answer:
        self.calls[verb] += 1
        script = self._scripts[verb]
        fault = script.popleft() if script else self._always.get(verb, Fault.NONE)
        match fault:
            case Fault.NONE:
                return await really()
            case Fault.BUG:
                raise ValueError("a bug in the adapter")
            case Fault.ERROR:
                raise BackendUnavailable("connection refused")
            case Fault.HANG:
                await asyncio.Event().wait()
                raise AssertionError("unreachable")
            case Fault.LOST_REPLY:
                await really()
                await asyncio.Event().wait()
                raise AssertionError("unreachable")
            case Fault.SLOW:
                await asyncio.sleep(0.5)
                return await really()
            case Fault.LATE | Fault.NOT_OWNED:
                return late
