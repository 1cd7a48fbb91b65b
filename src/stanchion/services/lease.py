"""A lease in hand: what a body is given, and what it may ask of it."""

from __future__ import annotations

from stanchion.core import lease as rules
from stanchion.core.lease import Continuing, FenceCause, Fenced, Holding, LeaseLost, Trust
from stanchion.ports.clock import Clock

__all__ = ["Lease"]


class Lease:
    """The right to work on a name, as long as it is trusted."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        *,
        fence: int | None = None,
        trust: Trust | None = None,
        is_degraded: bool = False,
    ) -> None:
        self.name = name
        self.fence = fence
        """To be sent with every write; ``None`` if there is only the local mutex."""
        self.is_degraded = is_degraded
        """The lock store failed and policy let the work go on: a race with others is possible."""
        self.trust = trust
        """As the keeper last saw it; ``None`` if there is only the local mutex."""
        self._clock = clock

    @property
    def lost(self) -> FenceCause | None:
        """Why the lease is not trusted any more, at this very moment; ``None`` while it is."""
        match None if self.trust is None else rules.tick(self.trust, self._clock.moment()):
            case None | Holding():
                return None
            case Continuing(cause=cause) | Fenced(cause=cause):
                return cause

    def check(self) -> None:
        """Go on only if the lease is trusted at this very moment. Raises ``LeaseLost``."""
        cause = self.lost
        if cause is not None:
            raise LeaseLost(self.name, cause)
