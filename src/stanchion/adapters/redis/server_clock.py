"""The server's clock, as far as it can be known from here.

A request that must not be executed too late carries a time of the *server's* clock. We know that
clock from samples: we asked at ``sent``, the answer came at ``received``, so the server read its
clock somewhere in between. Each sample gives an interval in which the difference between the two
clocks lies; several samples overlap, and the overlap is narrow even if some answers were slow.

We use the lower end. A deadline made from it is never later than the caller's patience, at most
early by the time one good answer takes. If the intervals do not overlap, a clock was set: the
newest sample counts alone.
"""

from __future__ import annotations

import math
from typing import Final

from stanchion.core.model import Instant

__all__ = ["ServerClock"]

_DRIFT: Final = 0.000_5
"""How much faster or slower the server's clock may run than ours: far more than any real one."""


class ServerClock:
    """An estimate. All local times are seconds of one clock that never steps back."""

    def __init__(self) -> None:
        self._low_s = -math.inf
        self._high_s = math.inf
        self._sampled_at = -math.inf

    def observe(self, server_us: int, sent: float, received: float) -> None:
        """Learn from one sample."""
        low, high = server_us / 1e6 - received, server_us / 1e6 - sent
        widened = (received - self._sampled_at) * _DRIFT if self.is_known else 0.0
        known_low, known_high = self._low_s - widened, self._high_s + widened
        if low <= known_high and known_low <= high:
            low, high = max(low, known_low), min(high, known_high)
        self._low_s, self._high_s, self._sampled_at = low, high, received

    @property
    def is_known(self) -> bool:
        """Whether there was a sample."""
        return math.isfinite(self._low_s)

    def age_s(self, at: float) -> float:
        """How long ago the last sample was taken."""
        return at - self._sampled_at

    def instant(self, at: float) -> Instant:
        """What the server's clock shows at a local time, or a little less."""
        widened = self.age_s(at) * _DRIFT
        return Instant(math.floor((at + self._low_s - widened) * 1000))
