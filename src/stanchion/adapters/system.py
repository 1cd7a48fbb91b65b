"""The clock and the randomness of this machine, and a clock that tests set by hand."""

from __future__ import annotations

import asyncio
import heapq
import os
import threading
import time
import weakref
from itertools import count
from typing import Final

from stanchion.core.lease import Moment
from stanchion.core.model import Instant

__all__ = ["ManualClock", "SystemClock", "SystemEntropy"]


_NS_PER_MS: Final = 1_000_000

# CLOCK_MONOTONIC stops while a Linux machine is suspended: a holder that slept through its lease
# would wake up trusting it. CLOCK_BOOTTIME counts on. Elsewhere the monotonic clock does so itself.
_RISING: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """Time as this machine has it."""

    def now(self) -> Instant:
        return Instant(time.time_ns() // _NS_PER_MS)

    def moment(self) -> Moment:
        return Moment(time.clock_gettime_ns(_RISING) // _NS_PER_MS)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


_UNIT_BITS: Final = 53
"""As many as a float has digits: every value below one is hit exactly, and one itself never."""
_UNIT_BYTES: Final = 8
_TOKEN_BYTES: Final = 16
_STOCK_BYTES: Final = 4096
"""Fetched at once: asking the system for sixteen bytes costs as much as asking for all of these."""


class SystemEntropy:
    """Unpredictable random values. Threads may share one; a forked child draws its own."""

    def __init__(self) -> None:
        self._stock = b""
        self._used = 0
        self._drawing = threading.Lock()
        # A child that was forked has the same stock, and must not give out the same tokens.
        mine = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _renew(mine()))

    def unit(self) -> float:
        bits = int.from_bytes(self._draw(_UNIT_BYTES), "big") >> (8 * _UNIT_BYTES - _UNIT_BITS)
        return bits / (1 << _UNIT_BITS)

    def token(self) -> str:
        return self._draw(_TOKEN_BYTES).hex()

    def _draw(self, size: int) -> bytes:
        with self._drawing:
            start, end = self._used, self._used + size
            if end > len(self._stock):
                self._stock = os.urandom(_STOCK_BYTES)
                start, end = 0, size
            self._used = end
            return self._stock[start:end]

    def renew(self) -> None:
        """Discard the stock: threads that were drawing from it do not exist in the forked child."""
        self._drawing = threading.Lock()
        self._stock = b""
        self._used = 0


def _renew(entropy: SystemEntropy | None) -> None:
    if entropy is not None:
        entropy.renew()


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
