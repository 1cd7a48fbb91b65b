"""Calls in one transaction leave and answer the same as one by one, whatever their order.

Simulated days check this too, but most of their calls are polls, and of a run seldom two are close
together. Here the calls are drawn at random, with what the core decides, and many concern few runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from types import ModuleType
from typing import Final, cast

import pytest
from msgspec.structs import replace

from stanchion.adapters.store.sqlite import admission as gate
from stanchion.adapters.store.sqlite import jobs, runs
from stanchion.adapters.system import ManualClock
from stanchion.core.admission import Admitted, Queued, Verdict
from stanchion.core.budget import BudgetLimit, BudgetWindow
from stanchion.core.events import CancelRequested, Event
from stanchion.core.model import (
    Failure,
    Instant,
    Risk,
    RunId,
    TenantId,
    Topic,
    WorkflowSource,
    place_of,
)
from stanchion.core.plan import Plan
from stanchion.core.queue import OnFull, QueueRequest
from stanchion.core.run import decide_all, items_to_read
from stanchion.ports.records import (
    Admission,
    Commit,
    JobLease,
    LeasedJob,
    Loaded,
    Result,
    Tenant,
    result_event,
)
from stanchion.ports.store import Store
from stanchion.sim.batches import SqlitePair
from tests.contract.builders import (
    ACME,
    APPROVAL,
    BOUNDED,
    DELAY,
    FOR_EACH,
    GLOBEX,
    ONE_JOB,
    SIDE_BY_SIDE,
    TWO_JOBS,
    WITHIN_MS,
    admission,
    commit_of,
    same_ids,
)

STORIES: Final = 20
CALLS: Final = 250
PLANS: Final = (ONE_JOB, TWO_JOBS, SIDE_BY_SIDE, BOUNDED, DELAY, APPROVAL, FOR_EACH)
FREE, FULL = TenantId("free"), TenantId("full")
TENANTS: Final = {
    ACME: Tenant(max_concurrent_runs=4, on_full=OnFull.QUEUE, queue_max=3),
    GLOBEX: Tenant(max_concurrent_runs=6, budgets={"tokens": BudgetLimit(20, BudgetWindow.TOTAL)}),
    FREE: Tenant(max_concurrent_runs=None, job_rate_per_s=50),
    FULL: Tenant(max_concurrent_runs=2),
}
TOPICS: Final = [Topic(each) for each in ("work", "left", "right")]


class _Story:
    """Calls on two stores, drawn at random."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(f"story {seed}")
        self.clock = ManualClock()
        self.pair = SqlitePair(self.clock, seed=f"batches {seed}")
        self.store = cast("Store", self.pair)
        self.differences: list[str] = []
        self.pair.compare = lambda said: self.differences.extend([] if said is None else [said])
        self.plans: dict[RunId, Plan] = {}
        self.leased: list[LeasedJob] = []
        self.seen: dict[RunId, Loaded] = {}
        """Runs as they were read at some time."""
        self.asked = admission(self.clock.now())
        """The last start."""

    async def tell(self) -> str | None:
        """Make the calls; return the first difference."""
        for tenant, config in TENANTS.items():
            await self.store.put_tenant(tenant, config)
        verbs: dict[Callable[[], Awaitable[object]], int] = {
            self._admit: 14,
            self._lease: 3,
            self._accept: 9,
            self._settle: 9,
            self._apply: 9,
            self._cancel: 4,
            self._post: 1,
            self._renew: 1,
            self._tick: 1,
            self._keep_house: 1,
        }
        for verb in self.chance.choices([*verbs], [*verbs.values()], k=CALLS):
            await verb()
            if self.chance.random() < 0.3:
                self.clock.advance(self.chance.randint(1, 40))
            if self.differences:
                return self.differences[0]
        self.pair.write_batch()
        return next(iter(self.differences), None)

    # ── What callers do ──────────────────────────────────────────────────────────────────────────

    async def _admit(self) -> None:
        several = [self._admission() for _ in range(self.chance.choice((1, 1, 1, 3)))]
        if len(several) == 1:
            verdicts: tuple[Verdict, ...] = (
                await self.store.admit(several[0], within_ms=WITHIN_MS),
            )
        else:
            several = [each for each in several if each.run.tenant == several[0].run.tenant]
            verdicts = await self.store.admit_many(several, within_ms=WITHIN_MS)
        for wanted, verdict in zip(several, verdicts, strict=True):
            is_begun = isinstance(verdict, Admitted | Queued) and verdict.run_id == wanted.run.id
            if not is_begun:
                self.plans.pop(wanted.run.id, None)

    def _admission(self) -> Admission:
        chance, plan, before = self.chance, self.chance.choice(PLANS), self.asked
        if chance.random() < 0.1 and before.run.id in self.plans:
            return before  # sent again
        tenant = chance.choice([*TENANTS])
        wanted = admission(
            self.clock.now(),
            plan,
            tenant=tenant,
            run_input={"say": "hello", "items": [*range(chance.choice((0, 2, 20)))]},
            key=chance.choice((None, before.key, f"key-{chance.randint(1, 99)}")),
            labels=chance.choice((None, {"team": "red"})),
            rerun_of=chance.choice((None, None, *list(self.plans)[:2])),
            risk=chance.choice((Risk.STANDARD, Risk.HIGH)),
            queue=QueueRequest(priority=chance.randint(1, 3)) if tenant == ACME else None,
            is_rate_limited=tenant == FREE and chance.random() < 0.1,
        )
        if chance.random() < 0.3:
            wanted = replace(wanted, run=replace(wanted.run, workflow_source=WorkflowSource.SHARED))
        if tenant == GLOBEX:
            wanted = replace(wanted, budget={"tokens": chance.randint(0, 4)})
        self.plans[wanted.run.id] = plan
        self.asked = wanted
        return wanted

    async def _cancel(self) -> None:
        """End a run by a commit that has nothing to do with its inbox."""
        found = await self._some_run()
        if found is not None:
            await self.store.commit(await self._decided(found, [CancelRequested()]))

    async def _post(self) -> None:
        found = await self._some_run()
        if found is not None:
            entry = f"cancel:{self.chance.randint(1, 2)}"
            await self.store.post(found.run.id, CancelRequested(), entry_id=entry)

    # ── What workers do ──────────────────────────────────────────────────────────────────────────

    async def _lease(self) -> None:
        self.leased += await self.store.lease_jobs(
            f"worker-{self.chance.randint(1, 2)}",
            self.chance.sample(TOPICS, self.chance.randint(1, 3)),
            max_jobs=self.chance.randint(1, 6),
            ttl_ms=self.chance.choice((30, 3_000, 3_000)),
        )

    async def _renew(self) -> None:
        some = self.chance.sample(self.leased, min(2, len(self.leased)))
        leases = [JobLease(each.job.id, each.fence, usage=self._usage()) for each in some]
        await self.store.renew_jobs(leases, ttl_ms=2_000)

    async def _accept(self) -> None:
        if results := self._results():
            await self.store.accept(results, row_due_in_ms=self.chance.choice((0, 50)))

    async def _settle(self) -> None:
        results = self._results()
        if not results:
            return
        run_id = place_of(results[0].job_id).run_id
        results = [each for each in results if place_of(each.job_id).run_id == run_id]
        found = await self._load(run_id)
        if found is None:
            return
        events: list[Event] = []
        for each in results:
            place = place_of(each.job_id)
            events.append(result_event(each, place.step_id, place.item))
        await self.store.settle(results, await self._decided(found, events))

    def _results(self) -> list[Result]:
        """Results of some leases, which may be late, or have been sent before."""
        chance = self.chance
        some = chance.sample(self.leased, min(chance.randint(1, 2), len(self.leased)))
        for each in some:
            if chance.random() < 0.9:
                self.leased.remove(each)
        error = Failure("broken", "of itself") if chance.random() < 0.2 else None
        return [
            Result(
                job_id=each.job.id,
                fence=each.fence,
                worker_id="worker-1",
                output="done",
                error=error,
                usage=self._usage(),
            )
            for each in some
        ]

    def _usage(self) -> dict[str, int]:
        return {"tokens": self.chance.randint(1, 3)} if self.chance.random() < 0.1 else {}

    # ── What replicas do ─────────────────────────────────────────────────────────────────────────

    async def _apply(self) -> None:
        """Commit what is in the inbox of a run."""
        waiting = [each for each in [*self.plans][-12:] if self.chance.random() < 0.5]
        for run_id in waiting:
            found = await self._load(run_id)
            if found is not None and found.inbox:
                events = [each.event for each in found.inbox]
                applied = [each.id for each in found.inbox]
                await self.store.commit(await self._decided(found, events, applied))
                return

    async def _tick(self) -> None:
        match self.chance.randint(1, 4):
            case 1:
                await self.store.fire_timers(limit=20)
            case 2:
                await self.store.expire_jobs(limit=20, max_deliveries=2)
            case 3:
                rows = await self.store.take_outbox(limit=10, hold_ms=100)
                await self.store.confirm_outbox(rows)
            case _:
                await self.store.promote(ACME)

    async def _keep_house(self) -> None:
        match self.chance.randint(1, 4):
            case 1:
                cap = self.chance.randint(2, 5)
                await self.store.put_tenant(ACME, replace(TENANTS[ACME], max_concurrent_runs=cap))
            case 2:
                await self.store.audit_slots(limit=10)
            case 3:
                before = Instant(self.clock.now() - 400)
                await self.store.purge(finished_before=before, limit=3)
            case _:
                for letter in (await self.store.list_dead_letters(None)).items[:1]:
                    await self.store.replay_dead_letter(letter.id, actor="operator")

    # ── Decisions ────────────────────────────────────────────────────────────────────────────────

    async def _some_run(self) -> Loaded | None:
        recent = [*self.plans][-8:]
        return await self._load(self.chance.choice(recent)) if recent else None

    async def _load(self, run_id: RunId) -> Loaded | None:
        """The run, now and then as it was before."""
        if run_id in self.seen and self.chance.random() < 0.1:
            return self.seen[run_id]
        found = await self.store.load(run_id)
        if found is None:
            self.plans.pop(run_id, None)
        else:
            self.seen[run_id] = found
        return found

    async def _decided(
        self, found: Loaded, events: Sequence[Event], applied: Sequence[str] = ()
    ) -> Commit:
        plan, run = self.plans[found.run.id], found.run
        items = await self.store.load_items(run.id, items_to_read(plan, run, events))
        transition = decide_all(plan, replace(run, items=items), events, self.clock.now())
        nonce = f"{self.chance.getrandbits(64):016x}"
        return commit_of(found, transition, applied=applied, chosen=nonce)


def _tell(seed: int) -> str | None:
    same_ids(seed)
    return asyncio.run(_Story(seed).tell())


@pytest.mark.parametrize("seed", range(STORIES))
def test_calls_together_are_as_one_by_one(seed: int) -> None:
    assert _tell(seed) is None


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (gate, "pending_key"),
        (gate, "pending_run"),
        (gate, "slots_pending"),
        (jobs, "pending_job"),
        (jobs, "pending_run"),
        (runs, "pending_inbox"),
        (runs, "pending_job"),
        (runs, "pending_run"),
        (runs, "slot_freed"),
    ],
    ids=lambda value: getattr(value, "__name__", value).rpartition(".")[2],
)
def test_a_method_that_overlooks_pending_rows_is_found_out(
    module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_whom: object) -> object:
        return 0 if name == "slots_pending" else object()

    monkeypatch.setattr(module, name, nothing)
    assert any(_tell(seed) is not None for seed in range(STORIES))
