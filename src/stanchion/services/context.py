"""The context of a replica: its backends, its counters, and the rules in force."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stanchion.core.lease import LeaseOverride, LeasePolicy
from stanchion.core.model import Risk
from stanchion.core.retry import Backoff
from stanchion.ports.bus import Bus
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.ports.locks import Locks
from stanchion.ports.store import Store
from stanchion.services.signals import EngineSignals

__all__ = ["Backends", "ReplicaContext", "Rules"]


@dataclass(frozen=True, kw_only=True)
class Backends:
    """A replica's connections to the world. The services never ask what is behind them."""

    store: Store
    locks: Locks | None
    bus: Bus
    clock: Clock
    entropy: Entropy


@dataclass(frozen=True, kw_only=True)
class ReplicaContext(Backends):
    """What every service of the engine works with: the backends and the engine's counters."""

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
