"""The store in memory: the contract in its plainest form.

Every verb runs from beginning to end without giving up the event loop, so each is indivisible by
itself; nothing is durable. It is what the other stores are compared with, and what the simulator
runs on.
"""

from __future__ import annotations

from typing import Final

from stanchion.adapters.store.memory.definitions import (
    MemoryDefinitions,
    MemoryDocuments,
    MemoryTenants,
)
from stanchion.adapters.store.memory.housekeeping import MemoryHousekeeping, MemoryOutbox
from stanchion.adapters.store.memory.jobs import MemoryJobs
from stanchion.adapters.store.memory.runs import MemoryRuns
from stanchion.adapters.store.memory.state import MemoryState
from stanchion.ports.clock import Clock

__all__ = ["MemoryStore"]

_DAY_MS: Final = 86_400_000


class MemoryStore(
    MemoryRuns,
    MemoryJobs,
    MemoryOutbox,
    MemoryDefinitions,
    MemoryTenants,
    MemoryDocuments,
    MemoryHousekeeping,
):
    """See ``ports.store.Store``. ``key_ttl_ms``: how long a key is known after its run ended."""

    def __init__(self, clock: Clock, key_ttl_ms: int = _DAY_MS) -> None:
        super().__init__(MemoryState(clock, key_ttl_ms))
