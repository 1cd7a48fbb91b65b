"""The gatehouse: gates of several replicas before one store and one lock store, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry

from stanchion.adapters.store.memory import MemoryStore
from stanchion.core.events import CancelRequested
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.model import Risk, Run, RunId, StepId, TenantId, Topic, WorkflowId
from stanchion.core.plan import Plan
from stanchion.core.queue import ANY_PLACE, QueueRequest
from stanchion.core.run import decide
from stanchion.core.settings import Settings, patched
from stanchion.core.workflow import JobSpec, StepSpec, SubworkflowSpec, Workflow
from stanchion.ports.bus import Bell, Handler
from stanchion.ports.records import Commit, Committed, OutboxRow, Tenant
from stanchion.services.context import ReplicaContext
from stanchion.services.gate import Gate
from stanchion.services.gate_answers import GateFailed, GateFull, Pacing, RunStarted, StartAnswer
from stanchion.services.lease_signals import LeaseErrors
from stanchion.services.plans import Plans
from stanchion.services.settings import TenantConfigs
from stanchion.services.signals import AdmissionSignals, EngineSignals, TenantLabels
from stanchion.services.work import Decider, Stopwatch, TenantWorkBudget
from stanchion.sim.loop import LoopClock
from tests.services.faulty_locks import FaultyLocks
from tests.services.faulty_store import FaultyStore
from tests.services.seeded import SeededEntropy
from tests.services.virtual import in_virtual_time

__all__ = [
    "ACME",
    "GLOBEX",
    "PLAIN",
    "Bells",
    "Gatehouse",
    "House",
    "below",
    "job",
    "never",
    "tally",
    "virtual",
    "workflow",
]

ACME: Final = TenantId("acme")
GLOBEX: Final = TenantId("globex")
PLAIN: Final = WorkflowId("plain")


async def never() -> None:
    """A call that is under way for ever."""
    await asyncio.Event().wait()


class Bells:
    """A bus that only rings, and remembers."""

    has_turns = True

    def __init__(self) -> None:
        self.rung: list[tuple[Bell, str]] = []
        self.is_mute = False
        self._ears: list[tuple[Bell, Callable[[str], None]]] = []

    def ring(self, bell: Bell, note: str = "") -> None:
        self.rung.append((bell, note))
        for wanted, hear in [] if self.is_mute else self._ears:
            if wanted is bell:
                hear(note)

    def listen(self, bell: Bell, hear: Callable[[str], None]) -> Callable[[], None]:
        ear = (bell, hear)
        self._ears.append(ear)
        return lambda: self._ears.remove(ear)

    @property
    def listening(self) -> int:
        return len(self._ears)

    async def publish(self, calls: Sequence[OutboxRow]) -> int:
        raise AssertionError(calls)

    async def consume(self, handle: Handler, *, at_once_max: int) -> None:
        raise AssertionError(handle, at_once_max)

    async def pending(self) -> int:
        return 0

    async def backlog(self) -> int:
        return 0

    async def ping(self) -> None:
        """It is here."""

    async def close(self) -> None:
        """There is nothing to let go of."""


class House:
    """One replica's gate, and its lines to the store and the lock store."""

    def __init__(self, gates: Gatehouse, seed: int, *, has_locks: bool) -> None:
        self.settings = Settings()
        self.store = FaultyStore(gates.store)
        self.locks = FaultyLocks(gates.clock)
        self.locks.real = gates.locks.real
        self.bells = Bells()
        self.registry = CollectorRegistry()
        self.admitted: list[tuple[Run, Plan]] = []
        self.processor_s = 0.0
        self.are_short = True
        """Whether starts may go to the store together, as those with short inputs do."""
        labels = TenantLabels(2, workflows_max=2)
        entropy = SeededEntropy(seed)
        self.pacing = Pacing(gates.clock, entropy)
        self.work = TenantWorkBudget(
            self.registry,
            clock=gates.clock,
            entropy=entropy,
            labels=labels,
            stopwatch=Stopwatch(
                processor_s=lambda: self.processor_s, wall_s=lambda: self.processor_s
            ),
        )
        self.gate = Gate(
            ReplicaContext(
                store=self.store.port,
                locks=self.locks if has_locks else None,
                bus=self.bells,
                clock=gates.clock,
                entropy=entropy,
                signals=EngineSignals(self.registry, gates.clock, labels=labels),
            ),
            plans=Plans(self.store.port),
            settings=lambda: self.settings,
            pacing=self.pacing,
            signals=AdmissionSignals(
                self.registry,
                labels=labels,
                errors=LeaseErrors(self.registry),
                clock=gates.clock,
            ),
            decider=Decider(self.work, None),
            on_admitted=lambda run, plan: self.admitted.append((run, plan)),
        )

    def patch(self, change: JsonValue) -> None:
        """Change the settings of this replica alone."""
        settings = patched(self.settings, change, run_lease_ttl_ms=30_000)
        assert isinstance(settings, Settings), settings
        self.settings = settings

    async def start(
        self,
        workflow_id: WorkflowId = PLAIN,
        given: JsonObject | None = None,
        *,
        tenant: TenantId = ACME,
        key: str | None = None,
        queue: QueueRequest = ANY_PLACE,
    ) -> StartAnswer:
        return await self.gate.start(
            tenant,
            workflow_id,
            given or {},
            key=key,
            actor="caller",
            queue=queue,
            is_short=self.are_short,
        )

    async def started(self, *, tenant: TenantId = ACME, key: str | None = None) -> RunId:
        """Start a run that nothing stands in the way of."""
        answer = await self.start(tenant=tenant, key=key)
        assert isinstance(answer, RunStarted), answer
        return answer.run_id

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"stanchion_{name}", labels)


class Gatehouse:
    """What the replicas share."""

    def __init__(self) -> None:
        self.clock = LoopClock()
        self.store: MemoryStore = MemoryStore(self.clock)
        self.locks = FaultyLocks(self.clock)
        self.houses: list[House] = []

    def add(self, *, strategy: str = "atomic", has_locks: bool = True) -> House:
        house = House(self, len(self.houses) + 1, has_locks=has_locks)
        house.patch({"admission": {"strategy": strategy}})
        self.houses.append(house)
        return house

    async def define(
        self, cap: int | None = 2, *, tenant: TenantId = ACME, override: JsonObject | None = None
    ) -> None:
        """A tenant with a cap, and with a workflow of one job."""
        await self.configure(cap, tenant=tenant, override=override)
        await self.store.put_workflow(tenant, workflow("plain", work=job("work")))

    async def configure(
        self, cap: int | None = 2, *, tenant: TenantId = ACME, override: JsonObject | None = None
    ) -> None:
        config = Tenant(max_concurrent_runs=cap, admission=override)
        if self.houses:
            await self.houses[0].gate.tenants.put(tenant, config)
        else:
            await TenantConfigs(self.store, clock=self.clock).put(tenant, config)

    async def run(self, run_id: RunId) -> Run:
        loaded = await self.store.load(run_id)
        assert loaded is not None
        return loaded.run

    async def cancel(self, house: House, run_id: RunId) -> None:
        """End a run now, as an engine would."""
        run = await self.run(run_id)
        plan = next(plan for admitted, plan in house.admitted if admitted.id == run_id)
        transition = decide(plan, run, CancelRequested(actor="caller"), self.clock.now())
        commit = Commit(
            run_id=run_id, transition=transition, read=run.stamp, nonce="end", fence=None
        )
        assert isinstance(await self.store.commit(commit), Committed)

    async def locked(self) -> list[str]:
        return [view.name for view in await self.locks.real.list()]


def workflow(name: str, *, risk: Risk = Risk.STANDARD, **steps: StepSpec) -> Workflow:
    return Workflow(
        id=WorkflowId(name), risk=risk, steps={StepId(each): steps[each] for each in steps}
    )


def job(topic: str) -> JobSpec:
    return JobSpec(topic=Topic(topic), input="${input}")


def below(name: str) -> SubworkflowSpec:
    return SubworkflowSpec(workflow=WorkflowId(name))


def tally(answers: Sequence[StartAnswer]) -> Counter[str]:
    """How many answers there were of each kind."""

    def name(answer: StartAnswer) -> str:
        match answer:
            case RunStarted():
                return "replayed" if answer.replayed else "admitted"
            case GateFull():
                return "full"
            case GateFailed():
                return str(answer.code)
            case _:
                return type(answer).__name__

    return Counter(map(name, answers))


virtual = in_virtual_time(Gatehouse)
