"""Mutants: what a deliberate defect changes about the world. The list is in ``mutants``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stanchion.sim.bus import BusPort
from stanchion.sim.servers import LockPort, Locksmith, Shelved, StorePort

if TYPE_CHECKING:
    from stanchion.sim.replica import Replica
    from stanchion.sim.workload import Callers

__all__ = ["NO_MUTANT", "Mutant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """Parts of the world that are not as they should be."""

    name: str = ""
    says: str = ""
    profile: str = "mixed"
    """The kind of days on which it can show."""
    store: type[Shelved] = Shelved
    locks: type[Locksmith] = Locksmith
    store_port: type[StorePort] = StorePort
    lock_port: type[LockPort] = LockPort
    bus_port: type[BusPort] = BusPort
    on_replica: Callable[[Replica], None] = lambda _replica: None
    on_callers: Callable[[Callers], None] = lambda _callers: None
    applied: Callable[[], AbstractContextManager[None]] = nullcontext


NO_MUTANT: Final = Mutant()
