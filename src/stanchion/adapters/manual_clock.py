"""A clock that stands still until it is told to go on. For tests, ours and yours.

>>> clock = ManualClock()
>>> before = clock.now()
>>> clock.advance(250)
>>> clock.now() - before
250
"""

from __future__ import annotations

import asyncio
import heapq
from itertools import count
from typing import Final

from stanchion.core.lease import Moment
from stanchion.core.model import Instant

__all__ = ["ManualClock"]

_MS_PER_S: Final = 1_000
_START: Final = Instant(1_700_000_000_000)


class ManualClock:
    """Time passes when ``advance`` is called, and sleepers whose time has come wake up."""

    def __init__(self, start: Instant = _START) -> None:
        self._now = start
        self._moment = Moment(0)
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()

    def now(self) -> Instant:
        return self._now

    def moment(self) -> Moment:
        return self._moment

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock has been advanced so far. Without time to wait, let others run."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        due = self._moment + seconds * _MS_PER_S
        heapq.heappush(self._sleepers, (due, next(self._order), woken))
        await woken

    def advance(self, by_ms: int) -> None:
        """Let time pass. Sleepers wake in the order of their times, once their tasks get to run."""
        if by_ms < 0:
            raise ValueError(
                "time does not run backwards; use step() for a clock that was set back"
            )
        self._now = Instant(self._now + by_ms)
        self._moment = Moment(self._moment + by_ms)
        while self._sleepers and self._sleepers[0][0] <= self._moment:
            _, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)

    def step(self, by_ms: int) -> None:
        """Set the time of day, forwards or back. No time passes: the moment and sleepers stay."""
        self._now = Instant(self._now + by_ms)

    @property
    def sleepers(self) -> int:
        """How many wait for time to pass."""
        return sum(not woken.done() for _, _, woken in self._sleepers)
