"""Parts: what every service of the engine works with, and the rules it goes by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stanchion.core.lease_policy import LeaseOverride, LeasePolicy
from stanchion.core.model import Risk
from stanchion.core.retry import Backoff
from stanchion.ports.bus import Bus
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.ports.locks import Locks
from stanchion.ports.store import Store
from stanchion.services.engine_signals import EngineSignals

__all__ = ["Parts", "Rules"]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A replica's connections to the world, and its counters."""

    store: Store
    locks: Locks | None
    bus: Bus
    clock: Clock
    entropy: Entropy
    signals: EngineSignals


class Rules(Protocol):
    """What settings say now. Asked again each time: they change while the replica runs."""

    def lease_policy(self, risk: Risk, override: LeaseOverride | None) -> LeasePolicy:
        """What a run of this class does when its lease cannot be had or is lost."""

    def closes(self, risk: Risk) -> bool:
        """Whether escalation keeps the class from going on without a lock."""

    def lock_busy(self) -> Backoff:
        """When to come again to a run that another has."""

    def backend_error(self) -> Backoff:
        """When to come again after a lock store or a store was away."""
