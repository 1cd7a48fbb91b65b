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

_NS_PER_MS: Final = 1_000_000

# CLOCK_MONOTONIC stops while a Linux machine is suspended: after the suspension a holder would
# trust an expired lease. CLOCK_BOOTTIME goes on; so does the monotonic clock of other systems.
_RISING: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """The clocks of this machine."""

    def now(self) -> Instant:
        return Instant(time.time_ns() // _NS_PER_MS)

    def moment(self) -> Moment:
        return Moment(time.clock_gettime_ns(_RISING) // _NS_PER_MS)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


_UNIT_BITS: Final = 53
"""The precision of a float: every value below 1.0 is exact, and 1.0 itself is never returned."""
_UNIT_BYTES: Final = 8
_TOKEN_BYTES: Final = 16
_STOCK_BYTES: Final = 4096
"""Bytes fetched at once: a system call for sixteen bytes costs as much as one for all of these."""


class SystemEntropy:
    """Unpredictable random values. Safe for threads and for forked processes."""

    def __init__(self) -> None:
        self._stock = b""
        self._used = 0
        self._drawing = threading.Lock()
        # A forked child has a copy of the buffer, and must not return the same tokens.
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
        """Discard the buffer and its lock, which a thread of the parent may have held."""
        self._drawing = threading.Lock()
        self._stock = b""
        self._used = 0


def _renew(entropy: SystemEntropy | None) -> None:
    if entropy is not None:
        entropy.renew()


_MS_PER_S: Final = 1_000
_START: Final = Instant(1_700_000_000_000)


class ManualClock:
    """A clock for tests: time passes only in ``advance``, which wakes sleepers that are due."""

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
        """Wait until the clock was advanced by ``seconds``. Yields once if that is not positive."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        due = self._moment + seconds * _MS_PER_S
        heapq.heappush(self._sleepers, (due, next(self._order), woken))
        await woken

    def advance(self, by_ms: int) -> None:
        """Let time pass. Sleepers are woken in the order of their times."""
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
        """Set the wall clock, forwards or back. Monotonic time and sleepers are not affected."""
        self._now = Instant(self._now + by_ms)

    @property
    def sleepers(self) -> int:
        """The number of sleeping callers."""
        return sum(not woken.done() for _, _, woken in self._sleepers)
