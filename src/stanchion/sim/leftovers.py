"""What must not be left in a process when its work is done.

Places of limiters, shared reads, waiting callers, mutexes, releases and deadlines are found by
walking the objects of a replica. The replicas go on polling, so an entry counts as left only if the
same one is there on several looks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from stanchion.gateway.load import Load
from stanchion.ports.errors import BackendError
from stanchion.services.admission_lock import SharedLock, SoleLock
from stanchion.services.admit import Admitter
from stanchion.services.leasing import Leasing
from stanchion.services.limiter import CoalescedRead, SharedChecks, SingleFlight, TenantLimiter
from stanchion.services.renewal import LockHealth, Renewer
from stanchion.services.waiters import RunWaiters
from stanchion.services.work import TenantExecutor
from stanchion.sim.loop import VirtualLoop

if TYPE_CHECKING:
    from stanchion.sim.replica import Replica
    from stanchion.sim.world import World

_LOOKS: Final = 3
_LOOK_EVERY_S: Final = 0.71
_MINE: Final = "stanchion."
_NOT_WALKED: Final = ("stanchion.sim", "stanchion.core", "stanchion.adapters", "stanchion.wire")


def _members(*names: str) -> Callable[[Any], Iterator[tuple[str, object]]]:
    def entries(of: Any) -> Iterator[tuple[str, object]]:  # noqa: ANN401 - one of the classes below
        for name in names:
            kept = getattr(of, name)
            pairs: Iterable[tuple[object, object]] = (
                kept.items() if isinstance(kept, dict) else ((each, each) for each in kept)
            )
            for key, value in pairs:
                yield f"{type(of).__name__}.{name}[{key!r}]", value

    return entries


def _checks(of: SharedChecks) -> Iterator[tuple[str, object]]:
    """Full tenants stay known; their waiting callers do not."""
    for tenant, waiting in vars(of)["_full"].items():
        if waiting.callers or waiting.task is not None:
            yield f"SharedChecks of {tenant}", waiting.task


def _deadlines(of: Admitter) -> Iterator[tuple[str, object]]:
    for each in vars(vars(of)["_deadlines"])["_all"]:
        yield "a deadline of the gate", each


def _load(of: Load) -> Iterator[tuple[str, object]]:
    for kind, tenants in vars(of)["_tenants"].items():
        for tenant, count in tenants.items():
            if tenant in _CALLING:
                yield f"Load.{kind}[{tenant}]", count


_CALLING: Final = frozenset({"acme", "globex", "quiet"})
"""Tenants whose callers have gone. Workers go on asking."""
_KEPT: Final[MappingProxyType[type, Callable[[Any], Iterator[tuple[str, object]]]]] = (
    MappingProxyType(
        {
            TenantLimiter: _members("_queues"),
            CoalescedRead: _members("_waiting"),
            SingleFlight: _members("_next", "_under_way"),
            RunWaiters: _members("_watched", "_tenants"),
            Leasing: _members("held"),
            Renewer: _members("_releases"),
            LockHealth: _members("_orphans"),
            SharedLock: _members("_releases"),
            SoleLock: _members("_mutexes", "_callers"),
            Admitter: _deadlines,
            SharedChecks: _checks,
            Load: _load,
        }
    )
)


async def check_processes(world: World, asking: list[asyncio.Task[None]]) -> None:
    """Check that no entry stays in any replica, once callers have gone and runs have ended."""
    replicas = [each for each in world.replicas if each.is_up and not each.process.is_paused]
    kept = {replica.process.name: _ReplicaEntries(replica) for replica in replicas}
    left = {name: each.look() for name, each in kept.items()}
    for _ in range(_LOOKS):
        await asyncio.sleep(_LOOK_EVERY_S)
        for name, each in kept.items():
            left[name] &= each.look()
    for name, entries in left.items():
        world.history.check(
            "nothing is left in a process", [f"{name}: {entry}" for entry, _ in sorted(entries)]
        )
    said = [] if world.users is None else world.users.left()
    world.history.check("nothing is left in a process", said)
    # The loop reports an exception only when its task is collected, which is after the day.
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    ended = (task for task in asking if task.done() and not task.cancelled())
    raised_to_callers = [error for task in ended if (error := task.exception()) is not None]
    world.history.check("no error of our own", [repr(each) for each in raised_to_callers])
    for process in loop.processes:
        raised = [each for each in process.errors() if not isinstance(each, BackendError)]
        world.history.check("no error of our own", [f"{process.name}: {e!r}" for e in raised])


class _ReplicaEntries:
    """The objects of a replica that keep entries."""

    def __init__(self, replica: Replica) -> None:
        self._objects = list(_walked([replica.engine, replica.services, replica.app]))

    def look(self) -> set[tuple[str, int]]:
        """The entries that are there now, each with the identity of its value."""
        return {
            (name, id(value)) for each in self._objects for name, value in _KEPT[type(each)](each)
        }


def _walked(roots: list[object]) -> Iterator[object]:
    """Every object that keeps entries, as far as it can be reached through services."""
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        parts = _parts_of(type(one))  # type: ignore[arg-type] # a class is hashable
        if parts is None or id(one) in seen:
            continue
        seen.add(id(one))
        if type(one) in _KEPT:
            yield one
        waiting.extend(parts(one))


@cache
def _parts_of(kind: type) -> Callable[[Any], Iterable[object]] | None:
    """What lists the parts of objects of a type; ``None`` if they have none.

    Found once a type: most objects that a replica refers to are texts, numbers and functions.
    """
    if issubclass(kind, dict):
        return lambda one: one.values() if len(one) <= _SMALL else ()
    if issubclass(kind, list | tuple):
        return lambda one: one if len(one) <= _SMALL else ()
    if issubclass(kind, TenantExecutor) or not kind.__module__.startswith(_MINE):
        # A bound method leads to its object.
        return (lambda one: (one.__self__,)) if hasattr(kind, "__self__") else None
    if kind.__module__.startswith(_NOT_WALKED):
        return None
    slots = getattr(kind, "__slots__", ())

    def members(one: Any) -> Iterator[object]:  # noqa: ANN401 - of any class of ours
        yield from getattr(one, "__dict__", {}).values()
        yield from (getattr(one, name) for name in slots if hasattr(one, name))

    return members


_SMALL: Final = 100
