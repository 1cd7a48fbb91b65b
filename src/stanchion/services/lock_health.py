"""Lock health: one caller finds out that the lock store is away, the others are told.

A lock store that hangs costs whoever asks first one bounded wait. From then on asking is refused at
once, so that failing open is not failing slow, until a probe in the background has succeeded. Each
refusal is still a failure of its own to whoever it meets, and is counted as one.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from stanchion.ports.clock import Clock
from stanchion.ports.errors import sentence
from stanchion.ports.locks import Locks

__all__ = ["LockHealth"]

PROBE_EVERY_S: Final = 1.0
CALL_MAX_S: Final = 1.0
ORPHANS_MAX: Final = 1_000


class LockHealth:
    """Whether the lock store is worth asking, and what to tidy up once it is again."""

    def __init__(self, locks: Locks, clock: Clock) -> None:
        self._locks = locks
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._orphans: dict[str, str] = {}
        self.error: str | None = None
        """Why the lock store is not asked now; ``None`` if it is."""

    def failed(self, error: str) -> None:
        """A call failed: nobody asks any more until a probe succeeds."""
        self.error = error
        self._work()

    def orphaned(self, name: str, token: str) -> None:
        """A lease that nobody holds may be at the store: let go of it as soon as the store answers.

        It would expire by itself. This only spares the next one the wait.
        """
        if len(self._orphans) < ORPHANS_MAX:
            # By token: many callers may have been after one name, and one of them has it.
            self._orphans[token] = name
            self._work()

    async def close(self) -> None:
        """Stop working in the background."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _work(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._recover(), name="lock-health")

    async def _recover(self) -> None:
        """Probe until the store answers, and let go of what was left behind."""
        while self.error is not None or self._orphans:
            if self.error is None:
                await self._release_orphan()
            else:
                await self._clock.sleep(PROBE_EVERY_S)
                await self._probe()

    async def _probe(self) -> None:
        try:
            async with asyncio.timeout(CALL_MAX_S):
                await self._locks.ping()
        except Exception as error:  # noqa: BLE001 - a probe that died would refuse for ever
            self.error = sentence(error)
        else:
            self.error = None

    async def _release_orphan(self) -> None:
        """One try: a lease that cannot be let go expires, and says nothing about health."""
        token, name = self._orphans.popitem()
        with suppress(Exception):
            async with asyncio.timeout(CALL_MAX_S):
                await self._locks.release(name, token, within_ms=round(CALL_MAX_S * 1000))
