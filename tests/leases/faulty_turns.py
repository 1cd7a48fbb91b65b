"""Turns whose calls can be made to go wrong, at the port."""

from __future__ import annotations

import asyncio

from stanchion.adapters.locks.memory import MemoryLocks, MemoryTurns
from stanchion.ports.clock import Clock
from stanchion.ports.turns import Place
from tests.services.faulty_locks import FaultyLocks

__all__ = ["FaultyTurns"]


class FaultyTurns(FaultyLocks):
    """In-memory turns with a script of faults for each verb; when it runs out, all is well."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.calm = MemoryTurns(clock)
        """The same, without the faults."""
        self.real = self.calm

        self._delay_s = 0.0

    def deliver_joins_late(self) -> None:
        """From now on a ticket takes a while to arrive, whether or not anybody waits for it."""
        self._delay_s = 0.5

    async def join(self, name: str, token: str, *, ticket_ms: int, within_ms: int) -> Place:
        async def arrive() -> Place:
            await asyncio.sleep(self._delay_s)
            return await self.calm.join(name, token, ticket_ms=ticket_ms, within_ms=within_ms)

        return await self._call(
            "join", lambda: asyncio.shield(asyncio.create_task(arrive())), late=Place(0, 0)
        )

    async def bell(self, name: str, token: str, *, at_most_ms: int) -> bool:
        return await self._call(
            "bell", lambda: self.calm.bell(name, token, at_most_ms=at_most_ms), late=False
        )

    async def leave(self, name: str, token: str, *, within_ms: int) -> None:
        await self._call(
            "leave", lambda: self.calm.leave(name, token, within_ms=within_ms), late=None
        )

    async def release_silently(self, name: str, token: str) -> None:
        """Let go of a name, and let the bell get lost."""
        await MemoryLocks.release(self.calm, name, token, within_ms=1_000)

    async def waiting(self, name: str) -> int:
        """How many stand in line."""
        place = await self.calm.join(name, "counter", ticket_ms=1, within_ms=1)
        await self.calm.leave(name, "counter", within_ms=1)
        return place.ahead
