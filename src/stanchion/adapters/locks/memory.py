"""Locks in memory: for one process, its tests and the simulator."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace

from stanchion.core.lease import next_fence
from stanchion.core.model import Instant
from stanchion.ports.clock import Clock
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


@dataclass(slots=True)
class _Holder:
    token: str
    fence: int
    expires_at: Instant
    acquired_at: Instant
    renewals: int = 0


class MemoryLocks:
    """See ``ports.locks.Locks``."""

    is_local = True

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._holders: dict[str, _Holder] = {}
        self._fences: dict[str, int] = {}
        """The last fence of every name, held or not."""
        self._notes: dict[str, LockNote] = {}

    async def acquire(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, floor: int = 0
    ) -> AcquireAnswer:
        if within_ms < 0:
            return AcquireTooLate()
        now = self._clock.now()
        holder = self._present(name)
        if holder is not None and holder.token != token:
            return Held(holder.expires_at - now)
        if holder is not None and holder.fence > floor:
            holder.expires_at = Instant(now + ttl_ms)
            return Granted(holder.fence)
        fence = next_fence(self._fences.get(name, 0), floor, now * 1_000)
        self._fences[name] = fence
        self._holders[name] = _Holder(token, fence, Instant(now + ttl_ms), now)
        return Granted(fence)

    async def renew(
        self,
        name: str,
        token: str,
        *,
        ttl_ms: int,
        within_ms: int,  # noqa: ARG002 - there is no server to wait for
    ) -> Renewed | NotOwned:
        holder = self._present(name)
        if holder is None or holder.token != token:
            return NotOwned()
        holder.expires_at = Instant(self._clock.now() + ttl_ms)
        holder.renewals += 1
        return Renewed()

    async def release(
        self,
        name: str,
        token: str,
        *,
        within_ms: int,  # noqa: ARG002 - there is no server to wait for
    ) -> LockReleased | NotOwned:
        holder = self._present(name)
        if holder is None or holder.token != token:
            return NotOwned()
        del self._holders[name]
        return LockReleased()

    async def inspect(self, name: str) -> LockView | None:
        holder = self._present(name)
        if holder is None:
            return None
        now = self._clock.now()
        return LockView(
            name,
            holder.fence,
            holder.expires_at - now,
            holder_of(holder.token),
            holder.acquired_at,
            holder.renewals,
        )

    async def list(self, prefix: str = "", *, limit: int = 1000) -> Sequence[LockView]:
        views = [
            await self.inspect(name) for name in sorted(self._holders) if name.startswith(prefix)
        ]
        return [view for view in views if view is not None][:limit]

    async def hold(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, note: LockNote
    ) -> AcquireAnswer:
        answer = await self.acquire(name, token, ttl_ms=ttl_ms, within_ms=within_ms)
        if isinstance(answer, Granted):
            self._notes[note.id] = replace(note, fence=answer.fence)
        return answer

    async def force_release(self, name: str) -> bool:
        return self._present(name) is not None and self._holders.pop(name, None) is not None

    async def release_by_hand(self, name: str, *, note: LockNote) -> bool:
        holder = self._present(name)
        if holder is None:
            return False
        self._notes[note.id] = replace(note, fence=holder.fence)
        return await self.force_release(name)

    async def notes(self, *, limit: int = 100) -> Sequence[LockNote]:
        return list(self._notes.values())[:limit]

    async def drop_notes(self, notes: Sequence[LockNote]) -> None:
        for note in notes:
            self._notes.pop(note.id, None)

    async def ping(self) -> None:
        """Always answers: there is no server."""

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    def _present(self, name: str) -> _Holder | None:
        """The current holder; ``None`` if the lock is free or its term has ended."""
        holder = self._holders.get(name)
        if holder is not None and holder.expires_at <= self._clock.now():
            del self._holders[name]
            return None
        return holder


_Line: TypeAlias = dict[str, Instant]
"""When the ticket of each token ends, in order of arrival."""


class MemoryTurns(MemoryLocks):
    """See ``ports.turns.Turns``."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._lines: dict[str, _Line] = {}
        self._bells: dict[str, asyncio.Event] = {}

    async def acquire(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, floor: int = 0
    ) -> AcquireAnswer:
        first = self._first(name)
        if first not in {None, token} and self._present(name) is None:
            return Held(self._lines[name][first] - self._clock.now())
        answer = await super().acquire(name, token, ttl_ms=ttl_ms, within_ms=within_ms, floor=floor)
        if isinstance(answer, Granted):
            self._drop(name, token)
            self._bells.pop(token, None)
        return answer

    async def release(self, name: str, token: str, *, within_ms: int) -> LockReleased | NotOwned:
        answer = await super().release(name, token, within_ms=within_ms)
        self._ring_if_free(name)
        return answer

    async def force_release(self, name: str) -> bool:
        was_held = await super().force_release(name)
        self._ring_if_free(name)
        return was_held

    async def join(
        self,
        name: str,
        token: str,
        *,
        ticket_ms: int,
        within_ms: int,  # noqa: ARG002 - there is no server to wait for
    ) -> Place:
        self._bells.setdefault(token, asyncio.Event())
        self._first(name)  # Removes expired tickets, including that of this token.
        now = self._clock.now()
        line = self._lines.setdefault(name, {})
        line[token] = Instant(now + ticket_ms)
        tokens = list(line)
        ahead, holder = tokens.index(token), self._present(name)
        if holder is not None:
            return Place(ahead, holder.expires_at - now)
        return Place(ahead, line[tokens[0]] - now if ahead else 0)

    async def bell(
        self,
        name: str,  # noqa: ARG002 - the token says enough
        token: str,
        *,
        at_most_ms: int,
    ) -> bool:
        bell = self._bells[token]
        try:
            async with asyncio.timeout(at_most_ms / 1000):
                await bell.wait()
        except TimeoutError:
            return False
        bell.clear()
        return True

    async def leave(
        self,
        name: str,
        token: str,
        *,
        within_ms: int,  # noqa: ARG002 - there is no server to wait for
    ) -> None:
        self._drop(name, token)
        self._bells.pop(token, None)
        self._ring_if_free(name)

    def _first(self, name: str) -> str | None:
        """The first waiter, after removing expired tickets."""
        line, now = self._lines.get(name, {}), self._clock.now()
        for token in [token for token, ends_at in line.items() if ends_at <= now]:
            self._drop(name, token)
        return next(iter(line), None)

    def _drop(self, name: str, token: str) -> None:
        line = self._lines.get(name)
        if line is not None and line.pop(token, None) is not None and not line:
            del self._lines[name]

    def _ring_if_free(self, name: str) -> None:
        first = self._first(name)
        if first is not None and self._present(name) is None:
            self._bells[first].set()
