"""Admission: whether a run may begin, decided and carried out in one step."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

from msgspec.structs import replace

from stanchion.core.admission import (
    Admitted,
    Full,
    NoQueue,
    Queued,
    QueueFull,
    RateExceeded,
    Refused,
    StaleDefinition,
    TickTaken,
    TooLate,
    Verdict,
)
from stanchion.core.budget import BudgetLimit, BudgetWindow, OverBudget
from stanchion.core.events import Timer, TimerKind
from stanchion.core.model import Instant, RunStatus, TenantId, WorkflowId, shared_name
from stanchion.core.queue import OnFull, QueueRequest
from stanchion.core.schedule import TickMark
from stanchion.core.transition import SetTimer, StopRun
from stanchion.ports.errors import BackendTimeout
from stanchion.ports.records import Admission, JobState, StartTerms, Tenant
from stanchion.ports.store import Store
from tests.contract.builders import (
    ACME,
    FOR_EACH,
    GLOBEX,
    ONE_JOB,
    WITHIN_MS,
    admission,
    cancel,
    finish,
    job_of,
    jobs_of,
    lease,
    loaded,
    start,
    workflow,
)
from tests.contract.harness import Harness


async def test_an_admitted_run_is_there_as_it_was_decided(store: Store) -> None:
    wanted = admission(await store.now(), FOR_EACH, run_input={"items": ["a", "b"]})
    assert await store.admit(wanted, within_ms=WITHIN_MS) == Admitted(wanted.run.id)
    found = await loaded(store, wanted.run.id)
    assert found.run == replace(wanted.run, items={})
    assert found.inbox == ()


async def test_an_admitted_run_has_its_items_beside_it(store: Store) -> None:
    wanted = admission(await store.now(), FOR_EACH, run_input={"items": ["a", "b"]})
    await store.admit(wanted, within_ms=WITHIN_MS)
    items = await store.load_items(wanted.run.id, {next(iter(wanted.run.steps)): range(5)})
    assert items == wanted.transition.items
    assert len(items) == 2


async def test_an_admitted_run_has_its_first_jobs_out(store: Store) -> None:
    wanted = admission(await store.now(), FOR_EACH, run_input={"items": ["a", "b"]})
    await store.admit(wanted, within_ms=WITHIN_MS)
    leased = await lease(store, max_jobs=10)
    assert [each.job for each in leased] == jobs_of(wanted)


async def test_an_admitted_run_has_its_timers_set(store: Store, harness: Harness) -> None:
    wanted = admission(await store.now())
    timer = next(each for each in wanted.transition.effects if isinstance(each, SetTimer))
    soon = SetTimer(timer.timer, Instant(await store.now() + harness.short_ms))
    wanted = replace(wanted, transition=replace(wanted.transition, effects=(soon,)))
    await store.admit(wanted, within_ms=WITHIN_MS)
    await harness.pass_time(harness.short_ms)
    assert await store.fire_timers(limit=10) == (wanted.run.id,)


async def test_an_admitted_run_has_its_timeline(store: Store) -> None:
    wanted = admission(await store.now())
    await store.admit(wanted, within_ms=WITHIN_MS)
    page = await store.timeline(wanted.run.id)
    assert page.items == wanted.transition.timeline
    assert page.cursor is None


async def test_an_admitted_run_holds_a_slot(store: Store) -> None:
    await start(store)
    assert await store.active_runs(ACME) == 1
    assert await store.active_runs(GLOBEX) == 0


async def test_a_fresh_run_waits_for_nobody_to_advance_it(store: Store) -> None:
    await start(store)
    assert await store.outbox_size() == 0


async def test_a_run_that_ends_as_it_begins_holds_no_slot(store: Store) -> None:
    wanted = admission(await store.now(), FOR_EACH, run_input={"items": []})
    assert wanted.run.status is RunStatus.SUCCEEDED
    await store.admit(wanted, within_ms=WITHIN_MS)
    assert await store.active_runs(ACME) == 0
    assert (await loaded(store, wanted.run.id)).run.status is RunStatus.SUCCEEDED
    assert (await store.audit_slots(limit=1_000)).drifts == ()


async def test_a_run_that_ends_as_it_begins_leaves_nothing_out(store: Store) -> None:
    now = await store.now()
    wanted = admission(now)
    effects = (*wanted.transition.effects, SetTimer(Timer(TimerKind.DELAY), now), StopRun())
    await store.admit(
        replace(wanted, transition=replace(wanted.transition, effects=effects)),
        within_ms=WITHIN_MS,
    )
    assert await store.fire_timers(limit=10) == ()
    assert await lease(store) == ()
    view = await store.job(job_of(wanted).id)
    assert view is not None
    assert view.state is JobState.REVOKED


async def test_a_full_tenant_admits_nothing_more(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=2))
    await start(store)
    await start(store)
    refused = admission(await store.now())
    assert await store.admit(refused, within_ms=WITHIN_MS) == Full(2, 2)
    assert await store.load(refused.run.id) is None


async def test_a_refusal_leaves_nothing_behind(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=0))
    refused = admission(await store.now(), key="k")
    assert await store.admit(refused, within_ms=WITHIN_MS) == Full(0, 0)
    assert await store.load(refused.run.id) is None
    assert await store.job(job_of(refused).id) is None
    assert await store.ready_topics() == {}
    assert (await store.timeline(refused.run.id)).items == ()
    assert (await store.list_runs(ACME)).items == ()
    assert await store.feed(ACME, after=None) == ()
    assert await store.active_runs(ACME) == 0


async def test_an_unconfigured_tenant_has_the_default_cap(store: Store) -> None:
    for _ in range(10):
        await start(store)
    refused = admission(await store.now())
    assert await store.admit(refused, within_ms=WITHIN_MS) == Full(10, 10)


async def test_a_tenant_without_a_cap_is_never_full(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=None))
    for _ in range(12):
        await start(store)
    assert await store.active_runs(ACME) == 12


async def test_a_raised_cap_holds_for_the_next_admission(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=1))
    await start(store)
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=2))
    await start(store)
    assert await store.active_runs(ACME) == 2


async def test_a_lowered_cap_holds_for_the_next_admission(store: Store) -> None:
    await start(store)
    await start(store)
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=1))
    refused = admission(await store.now())
    assert await store.admit(refused, within_ms=WITHIN_MS) == Full(1, 2)


async def test_a_full_tenant_does_not_hinder_another(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=1))
    await start(store)
    await start(store, tenant=GLOBEX)
    assert await store.active_runs(GLOBEX) == 1


async def test_a_finished_run_makes_room(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=1))
    await cancel(store, await start(store))
    await start(store)


async def test_a_run_without_a_slot_passes_a_full_tenant(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=1))
    await start(store)
    slotless = admission(await store.now(), holds_slot=False)
    assert await store.admit(slotless, within_ms=WITHIN_MS) == Admitted(slotless.run.id)
    assert await store.active_runs(ACME) == 1


async def test_a_run_without_a_slot_frees_none_when_it_ends(store: Store) -> None:
    await start(store)
    slotless = admission(await store.now(), holds_slot=False)
    await store.admit(slotless, within_ms=WITHIN_MS)
    await cancel(store, slotless.run.id)
    assert await store.active_runs(ACME) == 1


async def test_of_a_thousand_callers_at_once_two_get_the_two_slots(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=2))
    now = await store.now()
    wanted = [admission(now) for _ in range(1_000)]
    verdicts = await asyncio.gather(*(store.admit(each, within_ms=WITHIN_MS) for each in wanted))
    assert Counter(map(type, verdicts)) == {Admitted: 2, Full: 998}
    assert {each for each in verdicts if isinstance(each, Full)} == {Full(2, 2)}
    assert await store.active_runs(ACME) == 2
    assert len((await store.list_runs(ACME)).items) == 2


async def test_callers_of_many_tenants_at_once_get_each_tenant_its_slots(store: Store) -> None:
    tenants = [TenantId(f"tenant-{number}") for number in range(20)]
    for tenant in tenants:
        await store.put_tenant(tenant, Tenant(max_concurrent_runs=2))
    now = await store.now()
    wanted = [admission(now, tenant=tenant) for tenant in tenants for _ in range(10)]
    verdicts = await asyncio.gather(*(store.admit(each, within_ms=WITHIN_MS) for each in wanted))
    assert Counter(map(type, verdicts)) == {Admitted: 40, Full: 160}
    assert [await store.active_runs(tenant) for tenant in tenants] == [2] * 20


# ── Sent twice ───────────────────────────────────────────────────────────────────────────────────


async def test_the_same_admission_sent_twice_is_admitted_once(store: Store) -> None:
    wanted = admission(await store.now())
    assert await store.admit(wanted, within_ms=WITHIN_MS) == Admitted(wanted.run.id)
    assert await store.admit(wanted, within_ms=WITHIN_MS) == Admitted(wanted.run.id)
    assert await store.active_runs(ACME) == 1
    assert await store.ready_topics() == {job_of(wanted).topic: 1}
    assert len((await store.list_runs(ACME)).items) == 1
    assert len(await store.feed(ACME, after=None)) == 1


async def test_the_same_admission_sent_again_is_admitted_though_the_tenant_is_full(
    store: Store,
) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=1))
    wanted = admission(await store.now(), key="k")
    assert await store.admit(wanted, within_ms=WITHIN_MS) == Admitted(wanted.run.id)
    assert await store.admit(wanted, within_ms=WITHIN_MS) == Admitted(wanted.run.id)


async def test_the_same_admission_sent_again_does_not_undo_what_happened_since(
    store: Store,
) -> None:
    wanted = admission(await store.now())
    await store.admit(wanted, within_ms=WITHIN_MS)
    await finish(store, ONE_JOB, wanted.run.id)
    assert await store.admit(wanted, within_ms=WITHIN_MS) == Admitted(wanted.run.id)
    assert (await loaded(store, wanted.run.id)).run.status is RunStatus.SUCCEEDED
    assert await store.active_runs(ACME) == 0
    view = await store.job(job_of(wanted).id)
    assert view is not None
    assert view.state is JobState.FINISHED


# ── Too late ─────────────────────────────────────────────────────────────────────────────────────


async def test_an_admission_executed_after_its_time_changes_nothing(store: Store) -> None:
    late = admission(await store.now(), key="k")
    await _admit_a_second_too_late(store, late)
    assert await store.load(late.run.id) is None
    assert await store.active_runs(ACME) == 0
    again = admission(await store.now(), key="k")
    assert await store.admit(again, within_ms=WITHIN_MS) == Admitted(again.run.id)


async def _admit_a_second_too_late(store: Store, late: Admission) -> None:
    try:
        assert await store.admit(late, within_ms=-1_000) == TooLate()
    except BackendTimeout:
        return  # an adapter may say at once that there is no time left


# ── Definitions ──────────────────────────────────────────────────────────────────────────────────


async def test_a_run_of_the_newest_definition_is_admitted(store: Store) -> None:
    await store.put_workflow(ACME, workflow("one-job"))
    wanted = admission(await store.now(), definitions={WorkflowId("one-job"): 1})
    assert await store.admit(wanted, within_ms=WITHIN_MS) == Admitted(wanted.run.id)


async def test_a_run_of_an_older_definition_is_refused(store: Store) -> None:
    await store.put_workflow(ACME, workflow("one-job"))
    stale = admission(await store.now(), definitions={WorkflowId("one-job"): 1})
    await store.put_workflow(ACME, replace(workflow("one-job"), timeout_s=5.0))
    assert await store.admit(stale, within_ms=WITHIN_MS) == StaleDefinition()
    assert await store.load(stale.run.id) is None


async def test_a_run_with_an_older_definition_inside_is_refused(store: Store) -> None:
    await store.put_workflow(ACME, workflow("outer"))
    await store.put_workflow(ACME, workflow("inner"))
    await store.put_workflow(ACME, replace(workflow("inner"), timeout_s=5.0))
    both = {WorkflowId("outer"): 1, WorkflowId("inner"): 1}
    stale = admission(await store.now(), definitions=both)
    assert await store.admit(stale, within_ms=WITHIN_MS) == StaleDefinition()


async def test_a_definition_is_current_only_for_its_own_tenant(store: Store) -> None:
    await store.put_workflow(GLOBEX, workflow("one-job"))
    stale = admission(await store.now(), definitions={WorkflowId("one-job"): 1})
    assert await store.admit(stale, within_ms=WITHIN_MS) == StaleDefinition()


async def test_a_stale_definition_is_said_before_a_full_tenant(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=0))
    stale = admission(await store.now(), definitions={WorkflowId("one-job"): 1})
    assert await store.admit(stale, within_ms=WITHIN_MS) == StaleDefinition()


# ── Rate ─────────────────────────────────────────────────────────────────────────────────────────


async def test_more_than_the_rate_and_its_burst_is_throttled(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(job_rate_per_s=2.0))
    verdicts = await asyncio.gather(*(_submit(store) for _ in range(3)))
    assert Counter(verdicts) == {Admitted: 2, RateExceeded: 1}


async def test_a_rate_below_one_has_a_burst_of_one(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(job_rate_per_s=0.001))
    assert [await _submit(store), await _submit(store)] == [Admitted, RateExceeded]


async def test_a_throttled_tenant_may_go_on_after_a_while(store: Store, harness: Harness) -> None:
    await store.put_tenant(ACME, Tenant(job_rate_per_s=1_000 / harness.short_ms))
    while await _submit(store) is Admitted:
        pass
    await harness.pass_time(harness.short_ms)
    assert await _submit(store) is Admitted


async def test_the_rate_does_not_touch_what_is_not_limited_by_it(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(job_rate_per_s=0.001))
    await start(store)
    await start(store)
    assert [await _submit(store), await _submit(store)] == [Admitted, RateExceeded]


async def test_a_refusal_uses_up_none_of_the_rate(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=0, job_rate_per_s=0.001))
    wanted = admission(await store.now(), is_rate_limited=True)
    assert await store.admit(wanted, within_ms=WITHIN_MS) == Full(0, 0)
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=1, job_rate_per_s=0.001))
    assert await store.admit(wanted, within_ms=WITHIN_MS) == Admitted(wanted.run.id)


async def test_without_a_rate_nothing_is_throttled(store: Store) -> None:
    assert {await _submit(store) for _ in range(20)} == {Admitted}


async def test_one_tenants_rate_is_not_anothers(store: Store) -> None:
    for tenant in (ACME, GLOBEX):
        await store.put_tenant(tenant, Tenant(job_rate_per_s=0.001))
    assert [await _submit(store), await _submit(store, GLOBEX)] == [Admitted, Admitted]


async def test_a_burst_at_once_stays_within_the_rate(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(job_rate_per_s=3.0))
    began = await store.now()
    verdicts = await asyncio.gather(*(_submit(store) for _ in range(50)))
    took_s = (await store.now() - began) / 1_000
    assert 3 <= Counter(verdicts)[Admitted] <= 3 + math.ceil(3 * took_s)


async def _submit(store: Store, tenant: TenantId = ACME) -> type[object]:
    wanted = admission(await store.now(), tenant=tenant, holds_slot=False, is_rate_limited=True)
    return type(await store.admit(wanted, within_ms=WITHIN_MS))


# ── Ticks of schedules ───────────────────────────────────────────────────────────────────────────


async def test_a_tick_is_admitted_once_and_the_mark_never_falls(store: Store) -> None:
    async def admit(
        generation: int, tick: int, *, schedule: str = "s", tenant: TenantId = ACME
    ) -> Verdict:
        wanted = admission(await store.now(), tenant=tenant)
        mark = TickMark(schedule, generation, Instant(tick))
        return await store.admit(replace(wanted, tick=mark), within_ms=WITHIN_MS)

    assert isinstance(await admit(9, 1_000), Admitted)
    for generation, tick in ((9, 1_000), (9, 999), (8, 5_000)):
        assert await admit(generation, tick) == TickTaken(9, 1_000)
    assert isinstance(await admit(9, 1_001), Admitted)
    assert isinstance(await admit(10, 2), Admitted)
    assert await admit(9, 9_999_999_999_999) == TickTaken(10, 2)
    # Another schedule, and the same of another tenant, have marks of their own.
    assert isinstance(await admit(1, 1, schedule="t"), Admitted)
    assert isinstance(await admit(1, 1, tenant=GLOBEX), Admitted)


async def test_of_many_at_once_one_gets_the_tick(store: Store) -> None:
    mark = TickMark("s", 1, Instant(7))
    wanted = [replace(admission(await store.now()), tick=mark) for _ in range(20)]
    verdicts = await asyncio.gather(*(store.admit(each, within_ms=WITHIN_MS) for each in wanted))
    assert Counter(type(each) for each in verdicts) == {Admitted: 1, TickTaken: 19}


async def test_a_refused_tick_leaves_the_mark_as_it_was(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=0))
    wanted = replace(admission(await store.now()), tick=TickMark("s", 1, Instant(7)))
    assert await store.admit(wanted, within_ms=WITHIN_MS) == Full(0, 0)
    await store.put_tenant(ACME, Tenant())
    assert await store.admit(wanted, within_ms=WITHIN_MS) == Admitted(wanted.run.id)
    # The same request again is the same run.
    assert await store.admit(wanted, within_ms=WITHIN_MS) == Admitted(wanted.run.id)


# ── Checks without an admission ──────────────────────────────────────────────────────────────────

_TOKENS = {"tokens": BudgetLimit(10, BudgetWindow.TOTAL)}
_CHECKS: dict[str, tuple[Tenant, StartTerms, Refused | None]] = {
    "free": (Tenant(max_concurrent_runs=2), StartTerms(), None),
    "uncapped": (Tenant(max_concurrent_runs=None), StartTerms(), None),
    "full": (Tenant(max_concurrent_runs=1), StartTerms(), Full(1, 1)),
    "above": (Tenant(max_concurrent_runs=0), StartTerms(), Full(0, 1)),
    "stale": (
        Tenant(max_concurrent_runs=1),
        StartTerms({WorkflowId("one-job"): 7}),
        StaleDefinition(),
    ),
    "over-budget": (
        Tenant(max_concurrent_runs=1, budgets=_TOKENS),
        StartTerms(budget={"tokens": 11}),
        OverBudget("tokens", 10, 0, 0, None, 11),
    ),
    "in-budget": (
        Tenant(max_concurrent_runs=1, budgets=_TOKENS),
        StartTerms(budget={"tokens": 10}),
        Full(1, 1),
    ),
    "queued": (Tenant(max_concurrent_runs=1, on_full=OnFull.QUEUE), StartTerms(), None),
    "queue-full": (
        Tenant(max_concurrent_runs=1, on_full=OnFull.QUEUE, queue_max=1),
        StartTerms(),
        QueueFull(1, 1, 1),
    ),
    "rejects": (
        Tenant(max_concurrent_runs=1, on_full=OnFull.QUEUE),
        StartTerms(on_full=OnFull.REJECT),
        Full(1, 1),
    ),
    "no-queue": (Tenant(), StartTerms(on_full=OnFull.QUEUE), NoQueue()),
}
"""By tenant, which has one run: its configuration, the terms of a start, and its refusal."""


async def test_a_check_tells_what_an_admission_would_and_changes_nothing(store: Store) -> None:
    for name, (config, terms, refused) in _CHECKS.items():
        tenant = TenantId(name)
        await start(store, tenant=tenant)
        await store.put_tenant(tenant, config)
        if config.queue_max == 1:
            waiting = admission(await store.now(), tenant=tenant, queue=QueueRequest())
            assert await store.admit(waiting, within_ms=WITHIN_MS) == Queued(waiting.run.id, 1)
        # Terms of several starts are checked together, and keys of none are known.
        checked = await store.check_starts(tenant, [terms, StartTerms(), terms], ["new"])
        assert checked.refused[::2] == (refused, refused), name
        assert len(checked.refused) == 3
        assert checked.known == {}
        assert await store.active_runs(tenant) == 1
        assert await store.queued_runs(tenant) == int(config.queue_max == 1)
        wanted = admission(
            await store.now(),
            tenant=tenant,
            definitions=terms.definitions,
            queue=QueueRequest(on_full=terms.on_full),
        )
        verdict = await store.admit(replace(wanted, budget=terms.budget), within_ms=WITHIN_MS)
        assert (None if isinstance(verdict, Admitted | Queued) else verdict) == refused, name


async def test_a_check_compares_shared_versions_and_pins(store: Store) -> None:
    first, second = (StartTerms({shared_name(WorkflowId("one-job")): each}) for each in (1, 2))
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=0))
    for timeout_s in (1.0, 2.0):
        await store.put_shared_workflow(replace(workflow("one-job"), timeout_s=timeout_s))
    checked = await store.check_starts(ACME, [first, second], [])
    assert checked.refused == (StaleDefinition(), Full(0, 0))
    pins = {WorkflowId("one-job"): 1}
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=0, workflows=pins))
    checked = await store.check_starts(ACME, [first, second], [])
    assert checked.refused == (Full(0, 0), StaleDefinition())
