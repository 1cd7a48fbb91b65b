"""Fault injection: applies the faults of a scenario, and undoes them at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from stanchion.core.budget import BudgetWindow
from stanchion.core.json_value import JsonObject
from stanchion.core.model import Run, RunId, TenantId
from stanchion.core.settings import Settings, settings_document
from stanchion.ports.errors import BackendError
from stanchion.ports.records import Commit
from stanchion.sim import invariants as must
from stanchion.sim.ledger import Ambush, Trap
from stanchion.sim.lock_ledger import ObservedHold
from stanchion.sim.loop import Process, VirtualLoop
from stanchion.sim.network import CLEAR, SimLink
from stanchion.sim.scenario import FaultKind, PlannedFault
from stanchion.sim.workflows import WORKFLOWS, changed, file_of
from stanchion.sim.workload import CAPS, budgets_of, configured, queueing

if TYPE_CHECKING:
    from stanchion.sim.replica import Replica
    from stanchion.sim.world import World

STEP_MS_MAX: Final = 4_000
_OTHER_WINDOW: Final = {"acme": BudgetWindow.HOUR, "globex": BudgetWindow.TOTAL}
BEHIND_MS_MAX: Final = 600_000
REPLICATION_LAG_S_MAX: Final = 4.0
_HALF: Final = 0.5
_AMBUSHES: Final = 0.7
"""The share of faults that wait for a critical moment, of those that can."""

PATCHES: Final[tuple[JsonObject, ...]] = (
    {"lock_busy": {"kind": "fixed"}},
    {"lock_busy": {"kind": "jitter", "delay_ms": 500, "jitter_ms": 200}},
    {"lock_busy": {"delay_ms": 300, "jitter_ms": 100, "backend_error_delay_ms": 700}},
    {"policies": {"standard": {"on_lock_error": "fail_closed"}}},
    {"policies": {"standard": {"on_lock_error": "fail_open"}}},
    {"policies": {"low": {"on_renewal_lost": "fence", "renewal_failures_max": 1}}},
    {"admission": {"strategy": "lock"}},
    {"admission": {"strategy": "atomic"}},
    {"admission": {"strategy": "lock", "lock_wait_s": 1, "lock_ttl_s": 2}},
    {"escalation": {"fallbacks_per_s": 0.5, "window_s": 3, "dwell_s": 4, "probes_min": 1}},
)


class FaultInjector:
    """Applies the faults of a scenario."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._history = world.history
        self._undo: dict[int, Callable[[], None]] = {}
        self._number = 0
        self._is_over = False

    def do(self, fault: PlannedFault) -> None:
        """Apply a fault, and undo it after its duration."""
        if self._is_over or self._history.broken:
            return
        undo = self._begin(fault)
        if undo is None:
            return
        self._history.faults[str(fault.kind)] += 1
        self._history.tell(f"fault  {fault.kind} (#{fault.target}, {fault.lasts_s:.1f} s)")
        self._end_after(fault.lasts_s, undo)

    def end(self) -> None:
        """Undo all faults."""
        self._is_over = True
        for number in list(self._undo):
            self._end_one(number)
        world = self._world
        if world.bus is not None:
            world.bus.is_kind = True
        world.weather = CLEAR
        for replica in world.replicas:
            for link in replica.links:
                link.weather = CLEAR
        for link in world.user_links:
            link.weather = CLEAR
        networks = [each.network for each in world.workers]
        for network in (*networks, *(each.network for each in world.callers)):
            network.weather = CLEAR
        world.ledger.history.tell("faults end")

    def _end_after(self, seconds: float, undo: Callable[[], None]) -> None:
        """Undo a fault after ``seconds``, or in ``end``."""
        self._number += 1
        self._undo[self._number] = undo
        asyncio.get_running_loop().call_later(seconds, self._end_one, self._number)

    def _end_one(self, number: int) -> None:
        undo = self._undo.pop(number, None)
        if undo is not None:
            undo()

    # ── One fault each. Answers how it ends; ``None`` if it cannot befall anybody now. ───────────

    def _begin(self, fault: PlannedFault) -> Callable[[], None] | None:  # noqa: C901, PLR0912 - one case a kind
        world = self._world
        replicas, workers = world.replicas, world.workers
        number = fault.target % len(replicas)
        replica = replicas[number]
        hands = workers[fault.target % len(workers)]
        match fault.kind:
            case FaultKind.PAUSE_REPLICA:
                if fault.amount < _AMBUSHES:
                    return self._ambush(fault)
                return self._pause(replica.process)
            case FaultKind.CRASH_REPLICA:
                return self._crash_replica(replica, number)
            case FaultKind.DRAIN_REPLICA:
                return self._drain_replica(replica, number)
            case FaultKind.STEP_REPLICA:
                replica.clock.step_ms += round(STEP_MS_MAX * (2 * fault.amount - 1))
                return _nothing
            case FaultKind.PAUSE_WORKER:
                return self._pause(hands.process)
            case FaultKind.CRASH_WORKER:
                return self._crash_worker(
                    fault.target % len(workers), is_drained=fault.amount > _HALF
                )
            case FaultKind.SLOW_WORKER:
                hands.slowness = 1 + 8 * fault.amount
                return lambda: setattr(hands, "slowness", 1.0)
            case FaultKind.CUT_WORKER:
                hands.network.is_cut = True
                return lambda: setattr(hands.network, "is_cut", False)
            case FaultKind.CUT_CALLER:
                network = world.callers[fault.target % len(world.callers)].network
                network.is_cut = True
                return lambda: setattr(network, "is_cut", False)
            case FaultKind.CUT | FaultKind.CUT_THERE | FaultKind.CUT_BACK | FaultKind.SLOW:
                return self._link(fault, replica)
            case FaultKind.PAUSE_STORE:
                return self._pause(world.store.process)
            case FaultKind.CRASH_STORE:
                world.store.is_down = True
                return lambda: setattr(world.store, "is_down", False)
            case FaultKind.FAIL_OVER:
                return self._fail_over(fault)
            case FaultKind.PAUSE_LOCKS:
                return self._pause(world.locks.process)
            case FaultKind.CRASH_LOCKS | FaultKind.EMPTY_LOCKS | FaultKind.REPLACE_LOCKS:
                return self._locks(fault)
            case FaultKind.FORCE_RELEASE:
                return self._force_release(replica)
            case FaultKind.CRASH_BUS:
                return self._crash_bus()
            case FaultKind.PAUSE_BUS:
                return None if world.bus is None else self._pause(world.bus.process)
            case FaultKind.CAP:
                return self._cap(fault, replica)
            case FaultKind.SETTINGS:
                return self._settings(fault, replica)
            case FaultKind.WORKFLOW:
                return self._workflow(fault, replica)
            case FaultKind.CRASH_BULK:
                return self._crash_bulk(fault)
            case FaultKind.ORDER:
                return self._order(fault, replica)

    def _ambush(self, fault: PlannedFault) -> Callable[[], None]:
        """Pause the next replica between reading a run and writing it."""

        def spring(process: Process, _run_id: RunId, _hold: ObservedHold) -> bool:
            resume = self._pause(process)
            if resume is not None:
                self._history.tell(f"fault  {process.name} is paused in the middle of a hold")
                self._end_after(fault.lasts_s, resume)
            return True

        return self._lie_in_wait(spring)

    def _lie_in_wait(self, spring: Ambush) -> Callable[[], None]:
        ambushes = self._world.ledger.ambushes
        ambushes.append(spring)

        def leave() -> None:
            if spring in ambushes:
                ambushes.remove(spring)

        return leave

    def _pause(self, process: Process) -> Callable[[], None] | None:
        if process.is_paused or process.is_dead:
            return None
        process.pause()
        for replica in self._world.replicas:
            for link in replica.links:
                if link.server.process is process:
                    link.server_stands_still()
        for link in self._world.user_links:
            if link.server.process is process:
                link.server_stands_still()

        def resume() -> None:
            if not process.is_dead:
                loop = asyncio.get_running_loop()
                assert isinstance(loop, VirtualLoop)
                loop.resume(process)

        return resume

    def _crash_replica(self, replica: Replica, number: int) -> Callable[[], None] | None:
        if not replica.is_up:
            return None
        replica.crash()
        return lambda: _drop(self._world.add_replica(number))

    def _drain_replica(self, replica: Replica, number: int) -> Callable[[], None] | None:
        if not replica.is_up or replica.process.is_paused:
            return None
        replica.process.begin(replica.leave(), name="leave")

        def replace() -> None:
            replica.crash()  # If it has not ended by itself.
            _drop(self._world.add_replica(number))

        return replace

    def _crash_bulk(self, fault: PlannedFault) -> Callable[[], None]:
        """Crash the next replica that has taken runs of a bulk action, a moment later."""
        waiting, loop = self._world.ledger.bulks.on_taken, asyncio.get_running_loop()

        def crash(process: Process) -> None:
            for number, replica in enumerate(self._world.replicas):
                back = self._crash_replica(replica, number) if replica.process is process else None
                if back is not None:
                    self._history.tell(f"fault  {process.name} crashes in a bulk action")
                    self._end_after(fault.lasts_s, back)

        def spring(process: Process) -> bool:
            if not self._is_over:
                loop.call_later(0.2 * fault.amount, crash, process)
            return True

        waiting.append(spring)
        return _nothing

    def _order(self, fault: PlannedFault, replica: Replica) -> Callable[[], None] | None:
        if not replica.is_up:
            return None
        order = self._world.operators.order(replica, fault.target, fault.lasts_s)
        replica.process.begin(order)
        return _nothing

    def _crash_worker(self, number: int, *, is_drained: bool) -> Callable[[], None] | None:
        hands = self._world.workers[number]
        if hands.process.is_dead:
            return None
        if is_drained:
            hands.drain()
        else:
            hands.process.kill()

        def replace() -> None:
            hands.process.kill()  # If it has not ended by itself.
            _drop(self._world.add_worker(number))

        return replace

    def _link(self, fault: PlannedFault, replica: Replica) -> Callable[[], None]:
        links: list[SimLink] = (
            replica.links if fault.amount > 0.8 else [replica.links[fault.target % 3]]  # noqa: PLR2004 - some
        )
        for link in links:
            if fault.kind in {FaultKind.CUT, FaultKind.CUT_THERE}:
                link.cut_there = True
            if fault.kind in {FaultKind.CUT, FaultKind.CUT_BACK}:
                link.cut_back = True
            if fault.kind is FaultKind.SLOW:
                link.slow_s = 0.05 + 0.9 * fault.amount**2

        return lambda: _mend(links)

    def _fail_over(self, fault: PlannedFault) -> Callable[[], None]:
        """Copy the store just before a commit, and fail over to the copy a little later.

        In the worst case the lock server is down as well, and a commit on the lost state is delayed
        until after the failover.
        """
        world = self._world
        is_worst = fault.amount < _AMBUSHES

        def copy(_link: SimLink, _commit: Commit) -> bool:
            world.store.replicate()
            before = dict(world.ledger.runs)
            if is_worst:
                world.locks.is_down = True
                self._end_after(6, lambda: setattr(world.locks, "is_down", False))
                leave = self._set_trap(lambda link, commit: delay(link, commit, before))
                self._end_after(REPLICATION_LAG_S_MAX, leave)
            lag_s = REPLICATION_LAG_S_MAX if is_worst else fault.amount
            self._end_after(lag_s, self._lose)
            return True

        def delay(link: SimLink, commit: Commit, before: dict[RunId, Run]) -> bool:
            if before.get(commit.run_id) == world.ledger.runs.get(commit.run_id):
                return False
            link.slow_s = 1.5 + 3 * fault.amount
            asyncio.get_running_loop().call_soon(_mend, [link])
            self._lose()
            return True

        return self._set_trap(copy)

    def _set_trap(self, trap: Trap) -> Callable[[], None]:
        traps = self._world.ledger.traps
        traps.append(trap)
        return lambda: traps.remove(trap) if trap in traps else None

    def _lose(self) -> None:
        store = self._world.store
        if not store.fail_over():
            return
        store.is_down = True
        self._world.ledger.failed_over()
        self._history.tell("fault  the last writes of the store are lost")
        self._end_after(0.1, lambda: setattr(store, "is_down", False))

    def _locks(self, fault: PlannedFault) -> Callable[[], None]:
        locks = self._world.locks
        locks.is_down = True

        def back() -> None:
            if fault.kind is not FaultKind.CRASH_LOCKS:
                is_behind = fault.kind is FaultKind.REPLACE_LOCKS
                behind_ms = round(BEHIND_MS_MAX * fault.amount) if is_behind else 0
                locks.forget(behind_ms=behind_ms)
                self._world.ledger.locks.lost()
            locks.is_down = False

        return back

    def _crash_bus(self) -> Callable[[], None] | None:
        bus = self._world.bus
        if bus is None or bus.is_down:
            return None
        bus.crash()
        return bus.restart

    def _force_release(self, replica: Replica) -> Callable[[], None] | None:
        """Release the lock of a replica whose link to the store is slow, as an operator would."""
        locks = replica.services.locks
        if not replica.is_up or locks is None:
            return None

        async def release(name: str) -> None:
            with suppress(BackendError):
                await locks.force_release(name)

        def spring(process: Process, run_id: RunId, _hold: ObservedHold) -> bool:
            for each in self._world.replicas:
                if each.process is process:
                    each.links[0].slow_s = 0.7
                    self._end_after(5, partial(_mend, [each.links[0]]))
            if replica.is_up:
                replica.process.begin(release(f"run/{run_id}"))
            return True

        return self._lie_in_wait(spring)

    # ── Changes by operators ─────────────────────────────────────────────────────────────────────

    def _cap(self, fault: PlannedFault, replica: Replica) -> Callable[[], None] | None:
        tenant = ("acme", "globex")[fault.target % 2]
        cap = round(5 * fault.amount)
        # Every other time the window of its budget changes as well: another one begins.
        window = _OTHER_WINDOW[tenant] if fault.target // 2 % 2 else None

        async def put(cap: int, window: BudgetWindow | None = None) -> None:
            with suppress(BackendError):
                config = configured(tenant, cap=cap, budgets=budgets_of(tenant, 1, window))
                if self._world.scenario.profile.queues:
                    config = queueing(config)
                await replica.services.gate.tenants.put(TenantId(tenant), config)

        if not replica.is_up:
            return None
        replica.process.begin(put(cap, window))
        return lambda: replica.process.begin(put(CAPS[tenant]))

    def _settings(self, fault: PlannedFault, replica: Replica) -> Callable[[], None] | None:
        patch = PATCHES[fault.target % len(PATCHES)]
        if not replica.is_up:
            return None

        async def change() -> None:
            with suppress(BackendError):
                settings = await replica.services.settings.patch(patch, actor="operator")
                assert isinstance(settings, Settings), settings
                said = must.patch_is_applied(patch, settings_document(settings))
                self._history.check("an acknowledged change is in force", said)

        replica.process.begin(change())
        return _nothing

    def _workflow(self, fault: PlannedFault, replica: Replica) -> Callable[[], None] | None:
        workflow = WORKFLOWS[fault.target % len(WORKFLOWS)]
        if not replica.is_up:
            return None

        async def put_shared() -> None:
            with suppress(BackendError):
                version = changed(workflow, 1 + fault.target)
                await replica.services.store.put_shared_workflow(version)

        if fault.target % 3 == 0:
            replica.process.begin(put_shared())
        else:
            # From now on, what globex started from the shared workflow has an own twin.
            tenant = "acme" if fault.target % 3 == 1 else "globex"
            callers = self._world.callers[fault.target % len(self._world.callers)]
            text = file_of(workflow.id, more_s=2.0 + fault.target)
            callers.process.begin(callers.apply(tenant, text))
        return _nothing


def _mend(links: Iterable[SimLink]) -> None:
    for link in links:
        link.cut_there = link.cut_back = False
        link.slow_s = 0.0


def _nothing() -> None:
    """Undo nothing: the fault ends by itself."""


def _drop(_made: object) -> None:
    """Ignore a result."""
