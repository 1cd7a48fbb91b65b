"""Replicas: each has the engine that the server assembles, on links of its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgspec

from stanchion.adapters.bus.local import LocalBus
from stanchion.adapters.store.memory.state import MemoryState
from stanchion.core.faults import WorkflowFaults
from stanchion.core.model import Run, WorkflowId, WorkflowSource, split_name
from stanchion.core.plan import Plan, link
from stanchion.core.settings import Settings
from stanchion.core.workflow import Workflow
from stanchion.gateway import make_app
from stanchion.ports.bus import Bus, Disposition, Retry
from stanchion.ports.records import OutboxRow
from stanchion.services.context import Backends
from stanchion.services.engine import Engine, Terms
from stanchion.services.gate_answers import GateFull
from stanchion.services.leasing import Leasing, Outcome
from stanchion.services.plans import Linker
from stanchion.services.renewal import Lease
from stanchion.services.topic_limits import LeaseCall
from stanchion.services.work import Stopwatch
from stanchion.sim.bus import BusPort, BusServer
from stanchion.sim.cadence import CadenceRecord
from stanchion.sim.ledger import Ledger
from stanchion.sim.lock_ledger import ObservedHold
from stanchion.sim.loop import LoopClock, Process
from stanchion.sim.network import SimLink, Weather, hang_up
from stanchion.sim.oracle import EscalationRecord
from stanchion.sim.servers import (
    LockPort,
    LockServer,
    SimLocks,
    SimStore,
    StorePort,
    StoreServer,
)
from stanchion.sim.workflows import share
from stanchion.transport.messages import HttpReply, NoReply

if TYPE_CHECKING:
    from stanchion.sim.workload import Callers

__all__ = [
    "NO_MUTANT",
    "Mutant",
    "Replica",
    "SeededEntropy",
    "SimContext",
    "linked_once",
    "plan_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimContext:
    """The servers and recorders that all replicas of a world share."""

    seed: int
    store: StoreServer
    locks: LockServer
    bus: BusServer | None
    """``None``: each replica has a local bus, which ends with its process."""
    ledger: Ledger
    faults: Counter[str]
    terms: Terms
    linker: Linker
    store_port: type[StorePort] = StorePort
    lock_port: type[LockPort] = LockPort
    bus_port: type[BusPort] = BusPort


_HALF: Final = 0.5


class Replica:
    """One replica, from start to end. After a crash it is replaced by another."""

    def __init__(self, place: SimContext, name: str, weather: Weather) -> None:
        self.process = Process(name)
        chance = Random(f"{place.seed}/{name}")  # noqa: S311 - to be foreseen is the point
        self.links = [
            SimLink(
                self.process,
                server,
                Random(chance.random()),  # noqa: S311 - likewise
                place.faults,
                weather,
            )
            for server in (place.store, place.locks, place.bus or place.store)
        ]
        self.inflight: dict[asyncio.Future[HttpReply | NoReply], None] = {}
        self.is_leaving = False
        self._place = place
        self._ledger = place.ledger
        self.process.context.copy().run(self._build, chance)
        self._task = self.process.spawn(self._run(), name="engine")

    def _build(self, chance: Random) -> None:
        place = self._place
        to_store, to_locks, to_bus = self.links
        # The clock is right at the start, and drifts from then on.
        self.clock = LoopClock(drift=chance.uniform(-0.01, 0.01), start=place.store.clock.now())
        place.ledger.clocks[self.process.name] = self.clock
        self.cadence = CadenceRecord(
            place.ledger.history,
            self.process,
            self.clock,
            to_store,
            hears_bells=place.bus is not None,
            is_leaving=lambda: self.is_leaving,
            is_leased=place.ledger.jobs.is_leased,
        )
        place.ledger.cadences[self.process.name] = self.cadence
        self.store = place.store_port(to_store, place.store, place.ledger)
        self.bus_port: BusPort | None = None
        bus: Bus = LocalBus(self.store.port, self.clock)
        if place.bus is not None:
            bus = self.bus_port = place.bus_port(to_bus, place.bus)
            self.bus_port.on_answer = partial(place.ledger.answered, self.process)
            self.bus_port.on_bell = self.cadence.heard
        locks = place.lock_port(to_locks, place.locks, place.ledger.locks)
        # An embedded server settles results, and so do half of the replicas, beside others that
        # accept them first: the store must be safe whichever way each of them takes.
        locks.is_local = (
            place.bus is None or share(place.seed, self.process.name, "settles") < _HALF
        )
        self.engine = Engine(
            self.process.name,
            Backends(
                store=self.store.port,
                locks=locks,
                bus=bus,
                clock=self.clock,
                entropy=SeededEntropy(f"{place.seed}/{self.process.name}/entropy"),
            ),
            terms=place.terms,
            linker=place.linker,
            # Measured time would make a history differ from its replay.
            stopwatch=Stopwatch(processor_s=lambda: 0.0, wall_s=lambda: 0.0),
        )
        self.services = self.engine.services
        self.app = make_app(self.services)
        store = place.ledger.store
        self.escalation = EscalationRecord(
            place.ledger.history,
            self.process,
            self.clock,
            self.services.escalating,
            lambda: store.real.state.documents.get("escalation", {}).get("latch"),
        )
        self._watch_counts()
        self._watch_scheduler()
        self._watch_calls()
        self._watch(self.engine.leasing)
        # Of a batch, each step: its answers are counted also if the caller leaves before the last.
        gate = self.services.gate
        for service, verb in (
            (gate, "start"),
            (gate.batches, "_refuse_rows"),
            (gate.batches, "_start_rows"),
            (gate.reruns, "rerun"),
            (gate, "submit"),
        ):
            self._time(service, verb)

    @property
    def is_up(self) -> bool:
        """Whether it accepts connections. A paused replica does: the kernel accepts them."""
        return not self.process.is_dead and not self.is_leaving

    def crash(self) -> None:
        """End at once, as in a power cut."""
        if self.process.is_dead:
            return
        self.process.kill()
        if self.bus_port is not None:
            self.bus_port.leave()
        hang_up(self)

    async def leave(self) -> None:
        """Drain and close, as after SIGTERM."""
        self.is_leaving, since = True, self.cadence.drains()
        self.app.drain()
        self._task.cancel()
        await asyncio.wait([self._task])
        await self.engine.close()
        self.app.close()
        self.cadence.drained(since)
        self.crash()

    def metric_sum(self, name: str) -> float:
        """The sum of a metric over all labels; 0 if it does not exist."""
        name = f"stanchion_{name}"
        return sum(
            sample.value
            for family in self.services.registry.restricted_registry([name]).collect()
            for sample in family.samples
            if sample.name == name
        )

    async def _run(self) -> None:
        await self.services.settings.look()
        await self.engine.run()

    def _time(self, service: object, verb: str) -> None:
        """Report every answer of the gate and its duration to the ledger."""
        ledger, process = self._ledger, self.process
        cadence = self.cadence
        really: Callable[..., Awaitable[object]] = getattr(service, verb)

        async def timed(*arguments: Any, **how: Any) -> object:  # noqa: ANN401 - passed on
            began_s, pauses = asyncio.get_running_loop().time(), process.pauses
            tenant = getattr(arguments[0], "tenant", arguments[0])
            rows = len(arguments[1]) if verb.endswith("_rows") else 0
            with cadence.asks_gate(tenant, rows) as asked_at:
                answer = await really(*arguments, **how)
            took_s = asyncio.get_running_loop().time() - began_s
            if isinstance(answer, list):
                # Rows that a full tenant is refused are one step, the others the next: each is
                # answered in time.
                took_s /= 2
            for each in answer if isinstance(answer, list) else [answer]:
                ledger.gated(process, each, took_s if pauses == process.pauses else 0.0)
                batch_asked_at = asked_at if isinstance(answer, list) else None
                cadence.gated(tenant, each, batch_asked_at=batch_asked_at)
                if isinstance(each, GateFull):
                    ledger.told_full(tenant, asked_at_s=began_s)
            return answer

        vars(service)[verb] = timed

    def _watch_counts(self) -> None:
        """Report what the replica counts for escalation."""
        service, record = self.services.escalating, self.escalation
        really, look = service.count, service.look
        observe = service._observe  # noqa: SLF001 - the step in which the level changes

        def count(**counts: int) -> None:
            record.counted(counts)
            really(**counts)

        async def compared() -> None:
            await look()
            record.compare()

        def observed(*counts: int, **named: int) -> None:
            observe(*counts, **named)
            record.compare()  # at once: what follows may wait for the store

        vars(service)["_observe"] = observed
        vars(service)["count"] = count
        vars(service)["look"] = compared

    def _watch_scheduler(self) -> None:
        """Report the requests of workers that wait in this replica."""
        scheduler, cadence = self.services.scheduler, self.cadence
        lease, revoked = scheduler.lease, scheduler.revoked

        async def leased(worker_id: str, topics: Any, **how: Any) -> object:  # noqa: ANN401 - passed on
            with cadence.waits_for_jobs(topics):
                return await lease(worker_id, topics, **how)

        async def watched(worker_id: str, leases: Any, **how: Any) -> object:  # noqa: ANN401 - likewise
            lost: dict[Any, object] = {}
            with cadence.watches(leases, lost):
                found = await revoked(worker_id, leases, **how)
                lost.update(found)
            return found

        limits, settings = self.services.limits, self.services.settings
        look, patch = limits.lease, settings.patch

        async def looked(call: LeaseCall) -> object:
            with cadence.looks_for_jobs():
                return await look(call)

        async def patched(*arguments: Any, **how: Any) -> object:  # noqa: ANN401 - likewise
            found = await patch(*arguments, **how)
            is_wrong = isinstance(found, Settings) and settings.current != found
            said = f"{self.process.name} has changed the settings, and does not act by them"
            cadence.history.check("settings are in force everywhere", [said] if is_wrong else [])
            return found

        vars(settings)["patch"] = patched
        vars(limits)["lease"] = looked
        vars(scheduler)["lease"] = leased
        vars(scheduler)["revoked"] = watched

    def _watch_calls(self) -> None:
        """Report the calls to advance runs that are put off."""
        calls, cadence = vars(self.engine)["_calls"], self.cadence
        handle = calls.handle

        async def handled(row: OutboxRow) -> Disposition:
            said: Disposition = await handle(row)
            if isinstance(said, Retry) and said.delay_ms:
                cadence.puts_off(row.run_id)
            return said

        vars(calls)["handle"] = handled

    def _watch(self, leasing: Leasing) -> None:
        """Report every lease of this replica to the ledger."""
        really, ledger, process = leasing.hold, self._ledger, self.process
        cadence = self.cadence

        @asynccontextmanager
        async def hold(name: str, **how: Any) -> AsyncIterator[Outcome]:  # noqa: ANN401 - passed on
            since_s = asyncio.get_running_loop().time()
            # As it tells its operators: the metric, and the classes that the settings name.
            closes = self.services.settings.current.escalation.closes
            is_closed = how["risk"] in closes and self.metric_sum("escalation_level") > 0
            async with really(name, **how) as outcome:
                if not isinstance(outcome, Lease):
                    yield outcome
                    return
                held = ObservedHold(process, outcome, how["policy"], since_s, is_closed, self.clock)
                ledger.locks.holding(held)
                is_done = False
                try:
                    yield outcome
                    is_done = outcome.lost is None
                finally:
                    ledger.locks.let_go(held)
                    cadence.left(name, is_done=is_done)

        vars(leasing)["hold"] = hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A deliberate defect: parts of the world that are replaced."""

    name: str = ""
    says: str = ""
    profile: str = "mixed"
    """The profile of days that can detect it."""
    store: type[SimStore] = SimStore
    locks: type[SimLocks] = SimLocks
    store_port: type[StorePort] = StorePort
    lock_port: type[LockPort] = LockPort
    bus_port: type[BusPort] = BusPort
    on_replica: Callable[[Replica], None] = lambda _replica: None
    on_callers: Callable[[Callers], None] = lambda _callers: None
    applied: Callable[[], AbstractContextManager[None]] = nullcontext


NO_MUTANT: Final = Mutant()


class SeededEntropy:
    """See ``ports.entropy``."""

    def __init__(self, seed: str) -> None:
        self._random = Random(seed)  # noqa: S311 - to be foreseen is the point

    def unit(self) -> float:
        return self._random.random()

    def token(self) -> str:
        return f"{self._random.getrandbits(128):032x}"


_LINKED: dict[tuple[bytes, ...], Plan | WorkflowFaults] = {}
_ENCODE: Final = msgspec.json.Encoder().encode


async def linked_once(
    workflow: Workflow, others: Mapping[WorkflowId, Workflow], source: WorkflowSource
) -> Plan | WorkflowFaults:
    """The plan of a workflow and its sub-workflows, cached."""
    return _linked(workflow, others, source)


def plan_of(state: MemoryState, run: Run) -> Plan | None:
    """The plan of a run; ``None`` if the store does not have its workflows."""
    if run.workflow_id.startswith("job/"):
        return None
    own = state.peek(run.tenant).workflows
    found: dict[WorkflowId, Workflow] = {}
    try:
        for name, number in run.definitions.items():
            source, workflow_id = split_name(name)
            versions = own if source is WorkflowSource.OWN else state.shared
            found[name] = versions[workflow_id][number - 1].workflow
    except (KeyError, IndexError):
        return None  # Lost in a failover.
    plan = _linked(found[run.workflow_name], found, run.workflow_source)
    return plan if isinstance(plan, Plan) else None


def _linked(
    workflow: Workflow, others: Mapping[WorkflowId, Workflow], source: WorkflowSource
) -> Plan | WorkflowFaults:
    # The names belong to the key: the same workflow may be one's own and shared.
    key = (_ENCODE(workflow), source.encode(), *map(_ENCODE, sorted(others.items())))
    if key not in _LINKED:
        _LINKED[key] = link(workflow, others, source=source)
    return _LINKED[key]
