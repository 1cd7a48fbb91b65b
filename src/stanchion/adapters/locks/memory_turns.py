"""Locks in memory that can be waited for in line."""

from __future__ import annotations

import asyncio
from typing import TypeAlias

from stanchion.adapters.locks.memory import MemoryLocks
from stanchion.core.model import Instant
from stanchion.ports.clock import Clock
from stanchion.ports.locks import AcquireAnswer, Granted, Held, NotOwned, Released
from stanchion.ports.turns import Place

__all__ = ["MemoryTurns"]

_Line: TypeAlias = dict[str, Instant]
"""The end of every ticket by its token, in order of arrival."""


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

    async def release(self, name: str, token: str, *, within_ms: int) -> Released | NotOwned:
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
        within_ms: int,  # noqa: ARG002 - there is nobody to wait for
    ) -> Place:
        self._bells.setdefault(token, asyncio.Event())
        self._first(name)  # Whoever was late has lost their place, this token too.
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
        within_ms: int,  # noqa: ARG002 - there is nobody to wait for
    ) -> None:
        self._drop(name, token)
        self._bells.pop(token, None)
        self._ring_if_free(name)

    def _first(self, name: str) -> str | None:
        """Who is first in line, without those whose tickets ran out."""
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
