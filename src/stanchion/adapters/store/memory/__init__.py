"""The store in memory: the simplest implementation of the contract.

Every method runs without yielding to the event loop, so each is atomic; nothing is durable. Tests
compare the other stores with it, and the simulator uses it.
"""

from __future__ import annotations

from typing import Final

from stanchion.adapters.store.memory.definitions import (
    MemoryDefinitions,
    MemoryDocuments,
    MemoryReplicas,
    MemoryTenants,
)
from stanchion.adapters.store.memory.housekeeping import (
    MemoryAuditLog,
    MemoryHousekeeping,
    MemoryOutbox,
    MemoryReceiptBatches,
)
from stanchion.adapters.store.memory.jobs import MemoryJobs, MemoryTokens
from stanchion.adapters.store.memory.runs import MemoryRuns
from stanchion.adapters.store.memory.state import MemoryState
from stanchion.ports.clock import Clock

__all__ = ["MemoryStore"]

_DAY_MS: Final = 86_400_000
_AUDIT_TTL_MS: Final = 90 * _DAY_MS


class MemoryStore(
    MemoryRuns,
    MemoryJobs,
    MemoryTokens,
    MemoryOutbox,
    MemoryDefinitions,
    MemoryTenants,
    MemoryDocuments,
    MemoryReplicas,
    MemoryHousekeeping,
    MemoryAuditLog,
    MemoryReceiptBatches,
):
    """See ``ports.store.Store``. ``key_ttl_ms``: how long a key is kept after its run ended.

    ``audit_ttl_ms``: how long an audit entry is kept.
    """

    def __init__(
        self, clock: Clock, key_ttl_ms: int = _DAY_MS, *, audit_ttl_ms: int = _AUDIT_TTL_MS
    ) -> None:
        super().__init__(MemoryState(clock, key_ttl_ms, audit_ttl_ms))
