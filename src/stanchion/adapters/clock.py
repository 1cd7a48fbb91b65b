"""The machine's clock."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from stanchion.core.lease import Moment
from stanchion.core.model import Instant

__all__ = ["SystemClock"]

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
