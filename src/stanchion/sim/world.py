"""The world: replicas, servers, workers and callers of one simulated day.

``play`` runs a scenario until all faults are undone and all runs have ended, and returns the
violations. Everything runs in one process on one virtual loop, without threads, sockets or the
clock of the machine; the seed is the only source of randomness.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter, defaultdict
from contextlib import suppress
from random import Random
from typing import Any, Final
from zlib import crc32

import msgspec
from msgspec.structs import replace

from stanchion.core.audit import AuditEntry
from stanchion.core.json_value import JsonObject
from stanchion.core.model import OnDecision, RunId, TenantId
from stanchion.core.retry import WorkAllowance
from stanchion.core.topic_limits import TopicLimit
from stanchion.ports.errors import BackendError
from stanchion.ports.records import Tenant
from stanchion.services.engine import Terms
from stanchion.sim.batches import SqlitePair
from stanchion.sim.budget_ledger import BudgetLedger
from stanchion.sim.bus import BusServer
from stanchion.sim.ending import check_end, check_looked_after, is_escalated, tell_unfinished
from stanchion.sim.history import History, bugs_told, quiet
from stanchion.sim.injector import FaultInjector
from stanchion.sim.lease_users import LeaseUsers
from stanchion.sim.ledger import Ledger
from stanchion.sim.leftovers import check_processes
from stanchion.sim.lock_ledger import LockLedger
from stanchion.sim.loop import LoopClock, Process, VirtualLoop
from stanchion.sim.meaning import MeaningRecord
from stanchion.sim.network import BAD_WEATHER, CLEAR, HttpServer, Network, SimLink
from stanchion.sim.operators import Operators
from stanchion.sim.oracle import RateRecord
from stanchion.sim.replica import NO_MUTANT, Mutant, Replica, SimContext, linked_once, plan_of
from stanchion.sim.scenario import Ask, Scenario, Then
from stanchion.sim.servers import LockServer, SimStore, StoreServer, at_once
from stanchion.sim.subscribers import Subscribers
from stanchion.sim.twin import TwinStore
from stanchion.sim.workflows import WORKFLOWS, changed
from stanchion.sim.workload import (
    CAPS,
    JOB_RATES,
    LIMITS,
    PINS,
    Callers,
    Hands,
    budgets_of,
    configured,
    queueing,
)

HEAL_S_MAX: Final = 240.0
"""All runs must end within this time after the last fault."""
QUICK_TO_ESCALATE: Final[JsonObject] = {
    "escalation": {
        "fallbacks_per_s": 0.2,
        "window_s": 5,
        "dwell_s": 6,
        "probes_min": 2,
        "closes": ["standard", "low"],
    }
}
"""With longer times an outage would have to last longer than most of these days."""
OPERATOR_EVERY_S: Final = 2.0
_KEPT_S: Final = 30 * 24 * 3_600.0
_BULK_S_MAX: Final = 60.0
"""Bulk actions that have not ended so long after the last fault are stopped."""
_RECOVERY_S_MAX: Final = 120.0
"""Within this time escalation ends: the longest dwell time and what is heard from others."""
_EXPLAINED: Final = 8
"""Runs that are explained at a time."""
_DISCARDS: Final = 2
"""One in this many dead letters of jobs is discarded; the others are replayed."""
_UNBOUNDED_WORK: Final = WorkAllowance(share=1.0, burst_s=1e6)
"""Unlimited: measured processor time would make refusals differ between runs of a seed."""


_SETTLED: Final = AuditEntry(action="dead_letter.settle", actor="operator", subject="dead_letter")


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a day."""

    scenario: Scenario
    broken: tuple[str, ...]
    digest: str
    simulated_s: float
    faults: dict[str, int]
    checks: dict[str, int]
    runs: int
    lines: tuple[str, ...]


def play(scenario: Scenario, mutant: Mutant = NO_MUTANT) -> Verdict:
    """Run one day."""
    world: World | None = None

    async def main() -> Verdict:
        nonlocal world
        world = World(scenario, mutant)
        return await world.day()

    loop = VirtualLoop()
    loop.set_exception_handler(lambda loop, context: _raised(loop, context, world))
    # Garbage collection runs ``finally`` blocks of dropped coroutines, at a time that is not
    # deterministic.
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        with quiet(), mutant.applied():
            try:
                return loop.run_until_complete(main())
            finally:
                loop.dissolve()
    finally:
        if was_collecting:
            gc.enable()


def _raised(loop: asyncio.AbstractEventLoop, context: dict[str, Any], world: World | None) -> None:
    """Record an uncaught exception of a callback or a task."""
    assert isinstance(loop, VirtualLoop)
    if world is not None and not loop.is_over:
        said = f"{context.get('message')} {context.get('exception')!r}"
        world.history.check("no error of our own", [said])


def _retention_ms(scenario: Scenario) -> int:
    seconds = _KEPT_S if scenario.retention_s is None else scenario.retention_s
    return round(seconds * 1_000)


class World:
    """All processes and servers of a day."""

    def __init__(self, scenario: Scenario, mutant: Mutant) -> None:
        profile = scenario.profile
        self.scenario = scenario
        self.history = History()
        self.chance = Random(f"world {scenario.seed}")  # noqa: S311 - to be foreseen is the point
        # Of its own, so that these draws do not change the rest of the day.
        self._asking = Random(f"why {scenario.seed}")  # noqa: S311 - likewise
        self._limiting = Random(f"limits {scenario.seed}")  # noqa: S311 - likewise
        self._is_limited = False
        is_twin = profile.is_sqlite and mutant.store is SimStore
        self.store = StoreServer(LoopClock(), TwinStore if is_twin else mutant.store)
        if isinstance(self.store.real, TwinStore):
            self.store.real.compare = self._compare_twins
            if isinstance(self.store.real.lead, SqlitePair):
                self.store.real.lead.compare = self._compare_batch
        self.locks = LockServer(LoopClock(), mutant.locks)
        self.bus = (
            None
            if profile.is_embedded
            else BusServer(Random(f"bus {scenario.seed}"), self.history.faults)  # noqa: S311 - likewise
        )
        tallies: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.ledger = Ledger(
            history=self.history,
            store=self.store,
            plan_of=lambda run: plan_of(self.store.real.state, run),
            run_ttl_ms=profile.run_ttl_ms,
            locks=LockLedger(self.history, self.locks, tallies),
            budgets=BudgetLedger(self.history, self.store),
            tallies=tallies,
            limits=LIMITS,
            job_ttl_ms=profile.job_ttl_ms,
            retention_ms=_retention_ms(scenario),
        )
        self.meaning = MeaningRecord(self.ledger, scenario.seed)
        self.meaning.watch()
        RateRecord(self.ledger, JOB_RATES).watch()
        self.weather = BAD_WEATHER if scenario.is_stormy else CLEAR
        self._place = SimContext(
            seed=scenario.seed,
            store=self.store,
            locks=self.locks,
            bus=self.bus,
            ledger=self.ledger,
            faults=self.history.faults,
            terms=Terms(
                tenant_work=_UNBOUNDED_WORK,
                run_lease_ttl_ms=profile.run_ttl_ms,
                job_lease_ttl_ms=profile.job_ttl_ms,
                max_deliveries=scenario.max_deliveries,
                retention_ms=_retention_ms(scenario),
            ),
            linker=linked_once,
            store_port=mutant.store_port,
            lock_port=mutant.lock_port,
            bus_port=mutant.bus_port,
        )
        self._mutant = mutant
        self._born: Counter[str] = Counter()
        self.replicas: list[Replica] = []
        self.workers: list[Hands] = []
        self.callers: list[Callers] = []
        self.operators = Operators(self)
        self.users = None if profile.is_embedded else LeaseUsers(self)
        self.user_links: list[SimLink] = []
        self.subscribers = None if profile.store_loses else Subscribers(self)
        self.is_healing = False

    def _compare_twins(self, difference: str | None) -> None:
        said = () if difference is None else (difference,)
        self.history.check("both stores answer the same", said)

    def _compare_batch(self, difference: str | None) -> None:
        said = () if difference is None else (difference,)
        self.history.check("calls together are as one by one", said)

    # ── Who there is ─────────────────────────────────────────────────────────────────────────────

    def add_replica(self, number: int) -> Replica:
        """Start a replica, which replaces the one with the same number."""
        self._born[f"replica-{number}"] += 1
        name = f"replica-{number}.{self._born[f'replica-{number}']}"
        is_embedded = self.scenario.profile.is_embedded
        if is_embedded:
            # A single server has its locks in memory and its store in a file.
            self.locks.forget()
            self.ledger.locks.lost()
        weather = CLEAR if is_embedded else self.weather
        replica = Replica(self._place, name, weather)
        self._mutant.on_replica(replica)
        if number < len(self.replicas):
            self.replicas[number] = replica
        else:
            self.replicas.append(replica)
        return replica

    def add_worker(self, number: int) -> Hands:
        """Start a worker, which replaces the one with the same number."""
        self._born[f"worker-{number}"] += 1
        name = f"worker-{number}.{self._born[f'worker-{number}']}"
        hands = Hands(name, self.scenario.seed, self.network_of(Process(name)), self.ledger)
        if number < len(self.workers):
            self.workers[number] = hands
        else:
            self.workers.append(hands)
        return hands

    def up(self) -> list[HttpServer]:
        """The replicas that accept connections."""
        return [replica for replica in self.replicas if replica.is_up]

    def network_of(self, process: Process) -> Network:
        """The way of a caller, worker or subscriber to the replicas."""
        chance = Random(f"{self.scenario.seed}/{process.name}/network")  # noqa: S311 - to be foreseen
        return Network(process, self.up, chance, self.history.faults, self.weather)

    # ── The day ──────────────────────────────────────────────────────────────────────────────────

    async def day(self) -> Verdict:
        """Run the day until all runs have ended."""
        with bugs_told(self.history, self.ledger.log.logged):
            self._found()
            asking = await self._work_and_suffer()
            if not self.history.broken:
                await self._heal(asking)
        loop = asyncio.get_running_loop()
        return Verdict(
            scenario=self.scenario,
            broken=tuple(self.history.broken),
            digest=self.history.digest,
            simulated_s=loop.time(),
            faults=dict(sorted(self.history.faults.items())),
            checks=dict(sorted(self.history.checks.items())),
            runs=len(self.ledger.runs),
            lines=tuple(self.history.lines),
        )

    def _found(self) -> None:
        for tenant, cap in CAPS.items():
            factor = self.scenario.profile.cap_factor
            config = configured(tenant, cap=cap * factor, budgets=budgets_of(tenant, factor))
            config = replace(config, workflows=PINS.get(tenant, {}))
            if self.scenario.profile.queues:
                config = queueing(config)
            at_once(self.store.real.put_tenant(TenantId(tenant), config))
        for workflow in WORKFLOWS:
            # Of two shared versions, tenants may pin the older one.
            for version in (workflow, changed(workflow, 0)):
                at_once(self.store.real.put_shared_workflow(version))
            at_once(self.store.real.put_workflow(TenantId("acme"), workflow))
        for limit in LIMITS:
            document = msgspec.to_builtins(limit)
            at_once(self.store.real.put_document("limit", limit.id, document, read=None))
        for number in range(self.scenario.replicas):
            self.add_replica(number)
        for number in range(self.scenario.workers):
            self.add_worker(number)
        is_other_day = self.chance.random() < 0.5  # noqa: PLR2004 - every other day
        if is_other_day or self.scenario.profile.is_quick_to_escalate:
            self.replicas[0].process.begin(
                self.replicas[0].services.settings.patch(QUICK_TO_ESCALATE, actor="operator")
            )
        for number in range(2):
            network = self.network_of(Process(f"callers-{number}"))
            callers = Callers(network, self.scenario.seed, self.ledger, self.history)
            callers.queues = self.scenario.profile.queues
            self._mutant.on_callers(callers)
            self.callers.append(callers)

    async def _work_and_suffer(self) -> list[asyncio.Task[None]]:
        loop = asyncio.get_running_loop()
        injector = FaultInjector(self)
        asking: list[asyncio.Task[None]] = []
        for number, ask in enumerate(self.scenario.asks):
            callers = self.callers[number % len(self.callers)]
            loop.call_at(ask.at_s, callers.begin, ask, asking)
        self.operators.begin()
        if self.users is not None:
            self.users.begin()
        if self.subscribers is not None:
            self.subscribers.begin()
        for fault in self.scenario.faults:
            loop.call_at(fault.at_s, injector.do, fault)
        until_s = self.scenario.profile.day_s
        while loop.time() < until_s and not self.history.broken:
            await self.history.go_on(min(OPERATOR_EVERY_S, until_s - loop.time()))
            self._explain()
            if self.bus is not None and not self.bus.is_down:
                self.bus.sync()
            if self.chance.random() < 0.3:  # noqa: PLR2004 - now and then
                self._operate()
        injector.end()
        return asking

    async def _heal(self, asking: list[asyncio.Task[None]]) -> None:
        """Undo all faults, and check that every run is owned soon and ends in time."""
        loop = asyncio.get_running_loop()
        profile = self.scenario.profile
        self.history.tell("healed")
        self.is_healing = True
        for hands in self.workers:
            hands.is_quick = True
        if self.users is not None:
            self.users.end()
        until_s = loop.time() + HEAL_S_MAX + 6 * profile.job_ttl_ms / 1000
        # A lease may just have been granted to a process that has ended.
        bound_s = loop.time() + (profile.job_ttl_ms + profile.run_ttl_ms) / 1000 + 3
        is_bound_checked = False
        while loop.time() < until_s and not self.history.broken:
            await self.history.go_on(1)
            self._explain()
            self._operate(for_good=True)
            if not is_bound_checked and loop.time() > bound_s:
                is_bound_checked = True
                check_looked_after(self)
                self.operators.end_schedules()
            if loop.time() > bound_s + _BULK_S_MAX:
                self.operators.stop_bulks()
            if is_bound_checked and all(task.done() for task in asking) and self._is_all_ended():
                break
        else:
            if not self.history.broken:  # a day that is broken ends early
                tell_unfinished(self)
        # An announcement of another replica's level lapses after half a minute.
        until_s = loop.time() + _RECOVERY_S_MAX
        while is_escalated(self) and loop.time() < until_s and not self.history.broken:
            await self.history.go_on(1)
        if not self.history.broken:
            await self._start_one_more()
            await asyncio.sleep(4)
            check_end(self)
            if self.subscribers is not None:
                await self.subscribers.check_end()
            await check_processes(self, asking)

    async def _start_one_more(self) -> None:
        """Check that the deployment works: a new run starts at once, and ends."""
        at_once(self.store.real.put_tenant(TenantId("acme"), Tenant(max_concurrent_runs=1)))
        callers, said = self.callers[0], "no answer"
        ask = Ask(
            at_s=0,
            tenant="acme",
            workflow="three",
            key="after",
            copies=1,
            then=Then.WAIT,
            after_s=0,
        )
        asking: list[asyncio.Task[None]] = []
        callers.begin(ask, asking)
        await asyncio.wait(asking, timeout=60)
        for run_id in callers.started.get("after", {}):
            file = self.store.real.state.runs.get(RunId(run_id))
            said = "it is not there" if file is None else str(file.run.status)
        is_ended = said in {"succeeded", "failed"}
        self.history.check("the world works again", [] if is_ended else [f"a new run: {said}"])

    def _is_all_ended(self) -> bool:
        state = self.store.real.state
        runs = state.runs.values()
        return self.operators.is_done() and all(file.run.status.is_finished for file in runs)

    def _explain(self) -> None:
        """Ask why some runs do not go on: the answer is compared with their next change."""
        state = self.store.real.state
        for run_id in self._asking.sample(list(state.runs), min(_EXPLAINED, len(state.runs))):
            if state.runs[run_id].run.status.is_finished and run_id in self.ledger.explained:
                continue  # it never changes
            facts = at_once(self.store.real.run_facts(run_id))
            assert facts is not None
            self.ledger.explain(facts)
        self.ledger.name_waits(at_once(self.store.real.oldest_waits(None)))

    def _operate(self, *, for_good: bool = False) -> None:
        """Act as the operators: decide on approvals, replay or discard dead letters."""
        state = self.store.real.state
        for run_id, file in list(state.runs.items()):
            if file.run.status.is_finished:
                continue
            for step_id, step in file.run.steps.items():
                if isinstance(step.wait, OnDecision):
                    verb = "approve" if for_good or self.chance.random() < 0.7 else "reject"  # noqa: PLR2004 - mostly
                    callers = self.chance.choice(self.callers)
                    callers.process.begin(callers.decide(file.run.tenant, run_id, step_id, verb))
        up = [each for each in self.replicas if each.is_up and not each.process.is_paused]
        if up and not for_good and self._limiting.random() < 0.2:  # noqa: PLR2004 - now and then
            limit = replace(LIMITS[0], max_running=self._limiting.choice((1, 2, 4)))
            replica = self._limiting.choice(up)
            replica.process.begin(self._set_limit(replica, limit))
        if up and for_good and self._is_limited:  # one job at a time does not end a day in time
            replica = up[0]
            replica.process.begin(self._set_limit(replica, LIMITS[0]))
        for letter_id in list(state.letters):
            if up:
                replica = self.chance.choice(up)
                replica.process.begin(self._settle_letter(replica, letter_id))

    async def _set_limit(self, replica: Replica, limit: TopicLimit) -> None:
        is_low = limit.max_running in {1, 2}
        self._is_limited = self._is_limited or is_low  # also if there is no answer
        with suppress(BackendError):
            entry = AuditEntry(action="limit.put", actor="admin", subject=f"limit/{limit.id}")
            await replica.services.limits.put(limit, entry)
            self.history.tell(f"person limits {limit.id} to {limit.max_running}")
            self._is_limited = is_low

    async def _settle_letter(self, replica: Replica, letter_id: str) -> None:
        # Chosen by the id, so that a repeat after an error does the same. Events are not
        # discarded: without its result a run does not end.
        is_discard = letter_id.startswith("job:") and crc32(letter_id.encode()) % _DISCARDS == 0
        verb = "discards" if is_discard else "replays"
        inbox = replica.services.inbox
        with suppress(BackendError):
            settle = inbox.discard if is_discard else inbox.replay
            letter = await settle(letter_id, actor="operator", audit=_SETTLED)
            self.history.tell(f"person {verb} {letter_id}: {letter is not None}")
