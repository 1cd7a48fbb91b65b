"""The clock port: wall time and monotonic time."""

from __future__ import annotations

from typing import Protocol

from stanchion.core.lease import Moment
from stanchion.core.model import Instant


class Clock(Protocol):
    """A source of time. Passed as an argument, so that tests and the simulator control it."""

    def now(self) -> Instant:
        """Milliseconds since the Unix epoch. May step in either direction."""

    def moment(self) -> Moment:
        """Monotonic milliseconds that also count while the machine is suspended."""

    async def sleep(self, seconds: float) -> None:
        """Wait for ``seconds``."""
