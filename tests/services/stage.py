"""The stage: replicas over one store, one lock store and one bus, with workers, in virtual time.

    one, two = world.add(), world.add()
    world.work(one, "agent.plan", lambda job: {"queries": ["a", "b"]})
    run_id = await world.start(one, "research", {"question": "why?"})
    assert await world.ended(run_id) == "succeeded"

Each replica is a whole engine, as the server makes it. What differs is behind its ports: every
replica has its own lines to the store, the lock store and the bus, and each line can go bad.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final, TypeAlias

from msgspec.structs import replace

from stanchion.adapters.bus.local import BellListeners, LocalBus
from stanchion.adapters.locks.memory import MemoryLocks
from stanchion.adapters.store.memory import MemoryStore
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.lease import DEFAULT_POLICIES, LeaseOverride, OnRenewalLost
from stanchion.core.model import Failure, Risk, Run, RunId, StepId, TenantId, Topic, WorkflowId
from stanchion.core.workflow import JobSpec, StepSpec, Workflow
from stanchion.ports.errors import BackendError
from stanchion.ports.records import (
    Acceptance,
    Accepted,
    LeasedJob,
    Result,
    Tenant,
)
from stanchion.services.context import Backends
from stanchion.services.engine import DEFAULT_TERMS, Engine, Terms
from stanchion.services.gate_answers import RunStarted
from stanchion.services.leasing import Lease
from stanchion.services.plans import Linker, link_here
from stanchion.sim.loop import LoopClock
from tests.services.faulty_locks import Fault
from tests.services.faulty_store import FaultyStore, OnCall
from tests.services.lines import BusLine, LockLine
from tests.services.seeded import SeededEntropy
from tests.services.virtual import in_virtual_time

__all__ = ["ACME", "GLOBEX", "Replica", "World", "job", "virtual", "workflow"]

ACME: Final = TenantId("acme")
GLOBEX: Final = TenantId("globex")
LOCK_VERBS: Final = ("acquire", "renew", "release", "inspect", "ping")

Work: TypeAlias = Callable[[LeasedJob], JsonValue | Failure]


def workflow(name: str, **steps: StepSpec) -> Workflow:
    return Workflow(id=WorkflowId(name), steps={StepId(each): steps[each] for each in steps})


def under_lease(definition: Workflow) -> Workflow:
    """The workflow with a policy by which results need the run's lease."""
    policy = LeaseOverride(on_renewal_lost=OnRenewalLost.FENCE)
    return replace(definition, lock_policy=policy)


def job(topic: str, *needs: str) -> JobSpec:
    return JobSpec(topic=Topic(topic), needs=tuple(map(StepId, needs)))


class Replica:
    """One engine and its lines."""

    def __init__(self, engine: Engine, store: FaultyStore, locks: LockLine, bus: BusLine) -> None:
        self.engine = engine
        self.services = engine.services
        self.leasing = engine.leasing
        self.inbox = engine.services.inbox
        self.scheduler = engine.services.scheduler
        self.waiters = engine.services.waiters
        self.store = store
        self.locks = locks
        self.bus = bus
        self.task = asyncio.create_task(engine.run())

    def metric(self, name: str, **labels: str) -> float:
        """What one of its counters says."""
        value = self.services.registry.get_sample_value(f"stanchion_{name}", labels)
        assert value is not None, name
        return value

    def on_call(self, hook: OnCall) -> None:
        """Have every call to a backend told, before it is sent and once it is done."""
        self.store.on_call = self.locks.on_call = hook

    async def ask_locks(self) -> None:
        """Ask for a lease, as results do twice a second."""
        policy = DEFAULT_POLICIES[Risk.LOW]
        async with self.leasing.hold("any", risk=Risk.LOW, policy=policy) as held:
            assert isinstance(held, Lease)
        self.locks.calls.clear()

    def locks_away(self, is_away: bool = True) -> None:
        self.locks.always(Fault.ERROR if is_away else Fault.NONE, *LOCK_VERBS)

    def kill(self) -> None:
        """End it as a power cut does: no clean-up of its own reaches anybody."""
        self.store.cut()
        self.locks.always(Fault.HANG, *LOCK_VERBS)
        self.bus.is_away = True
        self.task.cancel()


class World:
    """What replicas share, and those who use them."""

    def __init__(self) -> None:
        self.clock = LoopClock()
        self.store = MemoryStore(self.clock)
        self.locks = MemoryLocks(self.clock)
        self.replicas: list[Replica] = []
        self.completions: list[Accepted] = []
        """Every result that was taken, and was not taken before."""
        self._calls = LocalBus(self.store, self.clock)
        self._listeners = BellListeners()
        self._workers: list[asyncio.Task[None]] = []
        self._seeds = count(1)

    # ── Replicas ─────────────────────────────────────────────────────────────────────────────────

    def add(
        self,
        *,
        terms: Terms = DEFAULT_TERMS,
        linker: Linker = link_here,
        shares_calls: bool = True,
        each_way_s: float | None = None,
        locks_are_local: bool = False,
    ) -> Replica:
        """Start a replica. One that does not share calls has a queue that dies with it."""
        number = len(self.replicas) + 1
        store = FaultyStore(self.store)
        if each_way_s is not None:
            store.each_way_s = each_way_s
        locks = LockLine(self.clock, self.locks)
        locks.is_local = locks_are_local
        calls = self._calls if shares_calls else LocalBus(store.port, self.clock)
        bus = BusLine(calls, self._listeners)
        engine = Engine(
            f"replica-{number}",
            Backends(
                store=store.port,
                locks=locks,
                bus=bus,
                clock=self.clock,
                entropy=SeededEntropy(next(self._seeds)),
            ),
            terms=terms,
            linker=linker,
        )
        replica = Replica(engine, store, locks, bus)
        self.replicas.append(replica)
        return replica

    # ── Workflows and runs ───────────────────────────────────────────────────────────────────────

    async def define(self, *workflows: Workflow, tenant: TenantId = ACME) -> None:
        await self.store.put_tenant(tenant, Tenant(max_concurrent_runs=None))
        for each in workflows:
            await self.store.put_workflow(tenant, each)

    async def start(
        self,
        replica: Replica,
        name: str,
        run_input: JsonObject | None = None,
        *,
        tenant: TenantId = ACME,
    ) -> RunId:
        """Begin a run that nothing stands in the way of."""
        answer = await replica.services.gate.start(
            tenant, WorkflowId(name), run_input or {}, key=None, actor="caller"
        )
        assert isinstance(answer, RunStarted), answer
        return answer.run_id

    async def run(self, run_id: RunId) -> Run:
        """The run, as the store has it."""
        loaded = await self.store.load(run_id)
        assert loaded is not None
        return loaded.run

    async def ended(self, run_id: RunId, *, within_s: float = 120) -> str:
        """How the run ended, once it has; how it stands if it has not in that time."""
        for _ in range(round(within_s / 0.01)):
            status = (await self.run(run_id)).status
            if status.is_finished:
                return status
            await asyncio.sleep(0.01)
        return (await self.run(run_id)).status

    async def told(self, run_id: RunId) -> list[str]:
        """The run's timeline, a word for each line: what, where, by whom."""
        page = await self.store.timeline(run_id, limit=1_000)
        assert page.cursor is None
        return [
            " ".join(
                (
                    line.what,
                    (line.step or "-") + ("" if line.item is None else f"[{line.item}]"),
                    line.actor,
                )
            )
            for line in page.items
        ]

    async def assert_nothing_left(self, tenant: TenantId = ACME) -> None:
        """No slot, no row, no job, no dead letter; and no lock, once the last holder has left."""
        await asyncio.sleep(1)
        assert await self.store.active_runs(tenant) == 0
        assert await self.store.outbox_size() == 0
        assert await self.store.ready_topics() == {}
        assert (await self.store.list_dead_letters(None)).items == ()
        assert (await self.store.audit_slots(limit=1_000)).drifts == ()
        assert await self.locks.list() == []

    # ── Workers ──────────────────────────────────────────────────────────────────────────────────

    def work(
        self,
        replica: Replica,
        topic: str,
        do: Work = lambda job: job.job.input,
        *,
        takes_s: float = 0.01,
        max_jobs: int = 1,
    ) -> None:
        """Have a worker for a topic, at a replica; its name is the topic's."""
        task = asyncio.create_task(self._work(replica, topic, do, takes_s, max_jobs))
        self._workers.append(task)

    async def lease(
        self, replica: Replica, topic: str, *, max_jobs: int = 1, wait_s: float = 30.0
    ) -> tuple[LeasedJob, ...]:
        """Be a worker that asks for jobs."""
        handed = await replica.scheduler.lease(
            f"{topic}-worker", [Topic(topic)], max_jobs=max_jobs, wait_s=wait_s
        )
        return handed.jobs

    async def report(
        self, replica: Replica, *jobs: LeasedJob, output: JsonValue | Failure = "done"
    ) -> tuple[Acceptance, ...]:
        """Be a worker that has done its jobs."""
        results = [_result(each, output) for each in jobs]
        answers = await replica.inbox.results(results)
        self._note(answers)
        return answers

    async def _work(
        self, replica: Replica, topic: str, do: Work, takes_s: float, max_jobs: int
    ) -> None:
        while True:
            try:
                jobs = await self.lease(replica, topic, max_jobs=max_jobs)
            except BackendError:
                await asyncio.sleep(0.2)
                continue
            await asyncio.sleep(takes_s)
            results = [_result(each, do(each)) for each in jobs]
            while results:
                try:
                    self._note(await replica.inbox.results(results))
                    break
                except BackendError:
                    await asyncio.sleep(0.2)

    def _note(self, answers: Sequence[Acceptance]) -> None:
        for answer in answers:
            if isinstance(answer, Accepted) and not answer.repeated:
                self.completions.append(answer)


def _result(leased: LeasedJob, output: JsonValue | Failure) -> Result:
    return Result(
        job_id=leased.job.id,
        fence=leased.fence,
        worker_id=f"{leased.job.topic}-worker",
        output=None if isinstance(output, Failure) else output,
        error=output if isinstance(output, Failure) else None,
    )


virtual = in_virtual_time(World)
