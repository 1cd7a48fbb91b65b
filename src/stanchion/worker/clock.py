"""Time, as a worker needs it: how long ago, and wake me up later."""

from __future__ import annotations

import asyncio
import time
from typing import Final, Protocol

from stanchion.core.lease import Moment

__all__ = ["BootClock", "Clock"]

_NS_PER_MS: Final = 1_000_000

# CLOCK_MONOTONIC stops while a Linux machine is suspended: a worker that slept through its leases
# would wake up trusting them. CLOCK_BOOTTIME counts on. Elsewhere the monotonic clock does so too.
_RISING: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """What leases are counted on."""

    def moment(self) -> Moment:
        """Milliseconds that never step back and count on while the machine sleeps."""

    async def sleep(self, seconds: float) -> None: ...


class BootClock:
    """This machine's clock. All of its processes read the same time."""

    def moment(self) -> Moment:
        return Moment(time.clock_gettime_ns(_RISING) // _NS_PER_MS)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
