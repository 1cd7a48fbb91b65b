"""Services: what one replica has to offer, to whoever speaks for it."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from stanchion.ports.bus import Bus
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.ports.locks import Locks
from stanchion.ports.store import Store
from stanchion.services.escalating import Escalating
from stanchion.services.gate import Gate
from stanchion.services.inbox import Inbox
from stanchion.services.plans import Plans
from stanchion.services.scheduler import Scheduler
from stanchion.services.settings import SettingsKeeper
from stanchion.services.watching import Watching
from stanchion.services.work import TenantExecutor, TenantWorkBudget

__all__ = ["Services"]


@dataclass(frozen=True, kw_only=True)
class Services:
    """Born whole, in ``assemble``."""

    store: Store
    locks: Locks | None
    bus: Bus
    clock: Clock
    entropy: Entropy
    plans: Plans
    gate: Gate
    inbox: Inbox
    scheduler: Scheduler
    watching: Watching
    settings: SettingsKeeper
    escalating: Escalating
    registry: CollectorRegistry
    work: TenantWorkBudget
    executor: TenantExecutor
