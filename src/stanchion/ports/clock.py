"""Clocks: the time of day, and a reading that only ever rises."""

from __future__ import annotations

from typing import Protocol

from stanchion.core.lease import Moment
from stanchion.core.model import Instant

__all__ = ["Clock"]


class Clock(Protocol):
    """Time, as an argument to everything that needs it."""

    def now(self) -> Instant:
        """Milliseconds since the epoch. May step in either direction."""

    def moment(self) -> Moment:
        """Milliseconds since some start. Never steps back, and counts while the machine sleeps."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""
