"""Context: what every service of a replica is given.

``ReplicaContext`` holds the backends (store, locks, bus, clock, entropy) and the engine's metrics.
``Rules`` is the view of the settings in force; services query it at each use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stanchion.core.lease import LeaseOverride, LeasePolicy
from stanchion.core.model import Risk
from stanchion.core.retry import Backoff
from stanchion.ports.bus import Bus
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.ports.locks import OperatorLocks
from stanchion.ports.store import Store
from stanchion.services.signals import EngineSignals


@dataclass(frozen=True, kw_only=True)
class Backends:
    """A replica's ports. Services do not know which adapters implement them."""

    store: Store
    locks: OperatorLocks | None
    bus: Bus
    clock: Clock
    entropy: Entropy


@dataclass(frozen=True, kw_only=True)
class ReplicaContext(Backends):
    """The backends and the engine's metrics."""

    signals: EngineSignals
    replica: str = ""
    """The name of this replica."""


class Rules(Protocol):
    """The settings in force. They change while the replica runs, so results are not kept."""

    def lease_policy(self, risk: Risk, override: LeaseOverride | None) -> LeasePolicy:
        """What a run of this class does when its lease is unavailable or lost."""

    def closes(self, risk: Risk) -> bool:
        """Whether escalation makes the class fail closed now."""

    def lock_busy(self) -> Backoff:
        """When to retry a run whose lease another replica holds."""

    def backend_error(self) -> Backoff:
        """When to retry after the store or the lock store was unavailable."""
