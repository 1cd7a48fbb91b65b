"""Budgets: reserved with the slot, charged once for what was used, settled when the run ends."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping

from msgspec.structs import replace

from stanchion.core.admission import Admitted, Full, Queued, Replayed, Verdict
from stanchion.core.budget import (
    BudgetLimit,
    BudgetStanding,
    BudgetWindow,
    OverBudget,
    window_end,
    window_start,
)
from stanchion.core.events import Promoted
from stanchion.core.model import Instant, RunId, Stamp, TenantId
from stanchion.core.plan import Plan
from stanchion.core.queue import OnFull, QueueRequest
from stanchion.core.run import decide_all
from stanchion.ports.records import (
    Accepted,
    Committed,
    JobLease,
    LeasedJob,
    Renewals,
    Result,
    ResultRefused,
    SettleMissed,
    Tenant,
    result_event,
)
from stanchion.ports.store import Store
from tests.contract.builders import (
    ACME,
    FOR_EACH,
    GLOBEX,
    ONE_JOB,
    SIDE_BY_SIDE,
    WITHIN_MS,
    WORKER,
    admission,
    advance,
    cancel,
    commit_of,
    lease,
    lease_one,
    loaded,
)
from tests.contract.harness import LONG_MS, Harness, ServerHarness


def _tenant(limit: int = 100, window: BudgetWindow = BudgetWindow.TOTAL, **more: int) -> Tenant:
    names = {"tokens": limit, **more}
    return Tenant(
        max_concurrent_runs=None,
        budgets={name: BudgetLimit(amount, window) for name, amount in names.items()},
    )


async def _admit(
    store: Store,
    budget: Mapping[str, int],
    *,
    plan: Plan = ONE_JOB,
    tenant: TenantId = ACME,
    key: str | None = None,
) -> tuple[Verdict, RunId]:
    wanted = admission(await store.now(), plan, tenant=tenant, key=key)
    wanted = replace(wanted, budget=dict(budget))
    return await store.admit(wanted, within_ms=WITHIN_MS), wanted.run.id


async def _start(store: Store, budget: Mapping[str, int], *, plan: Plan = ONE_JOB) -> RunId:
    verdict, run_id = await _admit(store, budget, plan=plan)
    assert verdict == Admitted(run_id)
    return run_id


async def _counts(store: Store, name: str = "tokens", tenant: TenantId = ACME) -> tuple[int, int]:
    """What is used and what is reserved."""
    standing = (await store.budgets(tenant))[name]
    return standing.used, standing.reserved


async def _renew(store: Store, leased: LeasedJob, usage: Mapping[str, int]) -> Renewals:
    told = JobLease(leased.job.id, leased.fence, usage=dict(usage))
    return await store.renew_jobs([told], ttl_ms=LONG_MS)


def _result(leased: LeasedJob, usage: Mapping[str, int]) -> Result:
    return Result(
        job_id=leased.job.id, fence=leased.fence, worker_id=WORKER, output=1, usage=dict(usage)
    )


async def test_a_tenant_without_budgets_has_none(store: Store) -> None:
    assert await store.budgets(ACME) == {}
    await _start(store, {"tokens": 10**12})
    leased = await lease_one(store)
    assert (await _renew(store, leased, {"tokens": 5})).renewed == (leased.job.id,)
    assert await store.budgets(ACME) == {}


async def test_a_run_reserves_until_it_ends_and_then_keeps_what_it_used(store: Store) -> None:
    await store.put_tenant(ACME, _tenant(100, calls=7))
    run_id = await _start(store, {"tokens": 60, "others": 5})
    assert await store.budgets(ACME) == {
        "tokens": BudgetStanding(100, BudgetWindow.TOTAL, 0, 60, None),
        "calls": BudgetStanding(7, BudgetWindow.TOTAL, 0, 0, None),
    }
    leased = await lease_one(store)
    await _renew(store, leased, {"tokens": 25, "calls": 2, "others": 9})
    assert await _counts(store) == (25, 35)
    assert await _counts(store, "calls") == (2, 0)
    assert isinstance((await store.accept([_result(leased, {"tokens": 30})]))[0], Accepted)
    assert await _counts(store) == (30, 30)
    await advance(store, ONE_JOB, run_id)
    assert await _counts(store) == (30, 0)


async def test_over_the_limit_is_refused_and_leaves_nothing_behind(store: Store) -> None:
    await store.put_tenant(ACME, _tenant(100))
    await _start(store, {"tokens": 60})
    refused, run_id = await _admit(store, {"tokens": 41}, key="k")
    assert refused == OverBudget("tokens", 100, 0, 60, None, 41)
    assert await store.load(run_id) is None
    assert await _counts(store) == (0, 60)
    await _start(store, {"tokens": 40})
    assert await _counts(store) == (0, 100)
    assert (await _admit(store, {"tokens": 1}, key="k"))[0] == OverBudget(
        "tokens", 100, 0, 100, None, 1
    )
    # A run that reserves nothing is not refused, and another tenant has budgets of its own.
    await _start(store, {})
    assert isinstance((await _admit(store, {"tokens": 500}, tenant=GLOBEX))[0], Admitted)


async def test_the_first_budget_by_name_is_named_and_comes_before_the_cap(store: Store) -> None:
    await store.put_tenant(ACME, replace(_tenant(10, calls=10), max_concurrent_runs=0))
    assert (await _admit(store, {"tokens": 11, "calls": 11}))[0] == OverBudget(
        "calls", 10, 0, 0, None, 11
    )
    assert (await _admit(store, {"tokens": 10, "calls": 10}))[0] == Full(0, 0)
    assert await _counts(store) == (0, 0)


async def test_replays_and_repeats_do_not_reserve_again(store: Store) -> None:
    await store.put_tenant(ACME, _tenant(100))
    wanted = replace(admission(await store.now(), key="k"), budget={"tokens": 60})
    for _ in range(2):
        assert await store.admit(wanted, within_ms=WITHIN_MS) == Admitted(wanted.run.id)
    assert (await _admit(store, {"tokens": 60}, key="k"))[0] == Replayed(wanted.run.id)
    assert await _counts(store) == (0, 60)


async def test_of_a_hundred_callers_as_many_are_admitted_as_there_is_room_for(store: Store) -> None:
    await store.put_tenant(ACME, _tenant(100))
    told = await asyncio.gather(*(_admit(store, {"tokens": 30}) for _ in range(100)))
    assert Counter(type(verdict) for verdict, _ in told) == {Admitted: 3, OverBudget: 97}
    assert await _counts(store) == (0, 90)


async def test_usage_counts_by_its_maximum_for_each_job_and_fence(
    store: Store, harness: Harness
) -> None:
    await store.put_tenant(ACME, _tenant(100))
    run_id = await _start(store, {"tokens": 50})
    first = await lease_one(store, ttl_ms=harness.short_ms)
    told = [10, 10, 7, 15]
    for amount in told:
        lease_of = JobLease(first.job.id, first.fence, usage={"tokens": amount})
        await store.renew_jobs([lease_of], ttl_ms=harness.short_ms)
    assert await _counts(store) == (15, 35)
    await harness.pass_time(harness.short_ms)
    await store.expire_jobs(limit=10, max_deliveries=5)
    # The worker of the dead delivery adds nothing any more, and the next one begins at zero.
    assert (await _renew(store, first, {"tokens": 90})).lost == (first.job.id,)
    assert isinstance((await store.accept([_result(first, {"tokens": 90})]))[0], ResultRefused)
    second = await lease_one(store)
    assert second.fence > first.fence
    await _renew(store, second, {"tokens": 4})
    assert await _counts(store) == (19, 31)
    for _ in range(2):  # the repeat of an accepted result has no effect
        (answer,) = await store.accept([_result(second, {"tokens": 6})])
        assert isinstance(answer, Accepted)
    assert await _counts(store) == (21, 29)
    await advance(store, ONE_JOB, run_id)
    assert await _counts(store) == (21, 0)


async def test_a_job_keeps_no_usage_of_budgets_that_its_run_has_not(
    store: Store, harness: Harness
) -> None:
    await store.put_tenant(GLOBEX, _tenant(100))
    verdict, _ = await _admit(store, {"tokens": 50}, tenant=GLOBEX)
    assert isinstance(verdict, Admitted)
    await _start(store, {"tokens": 50})  # of a tenant without budgets
    for leased in await lease(store, max_jobs=2):
        for number in range(20):
            names = {f"name-{number}-{each}": 1 for each in range(15)}
            renewed = await _renew(store, leased, {"tokens": number, **names})
            assert renewed.renewed == (leased.job.id,)
        assert await harness.job_size(leased.job.id) < 300
    assert await _counts(store, tenant=GLOBEX) == (19, 31)


async def test_what_is_used_beyond_a_reservation_counts(store: Store) -> None:
    await store.put_tenant(ACME, _tenant(100))
    run_id = await _start(store, {"tokens": 10}, plan=SIDE_BY_SIDE)
    left, right = await lease_one(store, "left"), await lease_one(store, "right")
    await _renew(store, left, {"tokens": 8})
    await store.accept([_result(right, {"tokens": 85})])
    assert await _counts(store) == (93, 0)
    assert isinstance((await _admit(store, {"tokens": 8}))[0], OverBudget)
    await cancel(store, run_id, SIDE_BY_SIDE)
    assert await _counts(store) == (93, 0)
    await _start(store, {"tokens": 7})


async def test_a_cancel_keeps_what_was_accepted_and_returns_the_rest(store: Store) -> None:
    await store.put_tenant(ACME, _tenant(100))
    run_id = await _start(store, {"tokens": 80}, plan=SIDE_BY_SIDE)
    left, right = await lease_one(store, "left"), await lease_one(store, "right")
    await _renew(store, left, {"tokens": 20})
    await store.accept([_result(right, {"tokens": 11})])  # accepted, not applied
    await cancel(store, run_id, SIDE_BY_SIDE)
    assert await _counts(store) == (31, 0)
    await _renew(store, left, {"tokens": 50})
    assert isinstance((await store.accept([_result(left, {"tokens": 50})]))[0], ResultRefused)
    assert await _counts(store) == (31, 0)


async def test_a_run_that_ends_as_it_begins_holds_nothing(store: Store) -> None:
    await store.put_tenant(ACME, _tenant(100))
    now = await store.now()
    for amount, expected in ((100, Admitted), (101, OverBudget)):
        wanted = admission(now, FOR_EACH, run_input={"items": []})
        wanted = replace(wanted, budget={"tokens": amount})
        assert isinstance(await store.admit(wanted, within_ms=WITHIN_MS), expected)
    assert await _counts(store) == (0, 0)


async def test_a_run_without_a_reservation_or_a_slot_is_charged(store: Store) -> None:
    await store.put_tenant(ACME, _tenant(100))
    wanted = admission(await store.now(), holds_slot=False)
    await store.admit(wanted, within_ms=WITHIN_MS)
    await _start(store, {})
    for leased in await lease(store, max_jobs=2):
        await store.accept([_result(leased, {"tokens": 3})])
    assert await _counts(store) == (6, 0)


async def test_a_new_limit_applies_at_once_and_keeps_what_is_counted(store: Store) -> None:
    await store.put_tenant(ACME, _tenant(100))
    await _start(store, {"tokens": 60})
    await store.put_tenant(ACME, _tenant(50))
    assert (await _admit(store, {"tokens": 0}))[0] == OverBudget("tokens", 50, 0, 60, None, 0)
    await store.delete_tenant(ACME)
    assert await store.budgets(ACME) == {}
    await store.put_tenant(ACME, _tenant(70))
    assert (await _admit(store, {"tokens": 11}))[0] == OverBudget("tokens", 70, 0, 60, None, 11)


async def test_another_window_begins_anew_and_earlier_runs_are_not_charged_to_it(
    store: Store,
) -> None:
    await store.put_tenant(ACME, _tenant(100))
    earlier = await _start(store, {"tokens": 60})
    leased = await lease_one(store)
    await _renew(store, leased, {"tokens": 5})
    for window in (BudgetWindow.MONTH, BudgetWindow.TOTAL):
        await store.put_tenant(ACME, _tenant(100, window))
        assert await _counts(store) == (0, 0)
        await _start(store, {"tokens": 100})
        assert await _counts(store) == (0, 100)
    await _renew(store, leased, {"tokens": 50})
    await store.accept([_result(leased, {"tokens": 70})])
    await advance(store, ONE_JOB, earlier)
    assert await _counts(store) == (0, 100)


async def test_every_store_shows_the_end_of_the_window(store: Store) -> None:
    for window in BudgetWindow:
        await store.put_tenant(ACME, _tenant(1, window))
        now = await store.now()
        ends = window_end(window, window_start(window, now))
        standing = (await store.budgets(ACME))["tokens"]
        verdict, _ = await _admit(store, {"tokens": 2})
        if await store.now() >= (ends or Instant(2**62)):
            continue  # a window has just ended
        assert standing == BudgetStanding(1, window, 0, 0, ends)
        assert verdict == OverBudget("tokens", 1, 0, 0, ends, 2)


async def test_a_window_ends_by_the_clock_of_the_store(store: Store, harness: Harness) -> None:
    hour_ms = 3_600_000
    if isinstance(harness, ServerHarness):
        return  # its clock cannot be set: see tests/adapters/test_redis_store.py
    await store.put_tenant(ACME, _tenant(100, BudgetWindow.HOUR))
    await harness.pass_time(hour_ms - await store.now() % hour_ms)
    earlier = await _start(store, {"tokens": 70})
    leased = await lease_one(store, ttl_ms=2 * hour_ms)
    renewal = JobLease(leased.job.id, leased.fence, usage={"tokens": 80})
    await store.renew_jobs([renewal], ttl_ms=2 * hour_ms)
    await harness.pass_time(hour_ms - 1)
    assert isinstance((await _admit(store, {"tokens": 21}))[0], OverBudget)
    await harness.pass_time(1)
    assert await _counts(store) == (0, 0)
    await _start(store, {"tokens": 90})
    # What the earlier run uses now is of its own window.
    assert isinstance((await store.accept([_result(leased, {"tokens": 99})]))[0], Accepted)
    await advance(store, ONE_JOB, earlier)
    assert await _counts(store) == (0, 90)


async def test_a_settle_charges_its_results_before_the_run_ends(store: Store) -> None:
    await store.put_tenant(ACME, _tenant(100))
    run_id = await _start(store, {"tokens": 50})
    leased = await lease_one(store)
    await _renew(store, leased, {"tokens": 10})
    result = _result(leased, {"tokens": 35})
    found = await loaded(store, run_id)
    event = result_event(result, leased.job.step_id)
    transition = decide_all(ONE_JOB, found.run, [event], await store.now())
    missed = commit_of(replace(found, run=replace(found.run, stamp=Stamp(9, "x"))), transition)
    assert isinstance(await store.settle([result], missed), SettleMissed)
    assert await _counts(store) == (10, 40)
    commit = commit_of(found, transition)
    for _ in range(2):  # repeating it is safe
        assert isinstance(await store.settle([result], commit), Committed)
        assert await _counts(store) == (35, 0)


async def test_a_run_reserves_when_it_is_queued_and_returns_it_when_it_ends(store: Store) -> None:
    config = replace(_tenant(100), max_concurrent_runs=1, on_full=OnFull.QUEUE)
    await store.put_tenant(ACME, config)
    first = await _start(store, {"tokens": 30})
    waiting: list[RunId] = []
    for _ in range(2):
        wanted = admission(await store.now(), queue=QueueRequest())
        wanted = replace(wanted, budget={"tokens": 35})
        assert isinstance(await store.admit(wanted, within_ms=WITHIN_MS), Queued)
        waiting.append(wanted.run.id)
    assert await _counts(store) == (0, 100)
    assert isinstance((await _admit(store, {"tokens": 1}))[0], OverBudget)
    await cancel(store, waiting[1])
    assert await _counts(store) == (0, 65)
    await cancel(store, first)  # the other one is promoted
    assert await _counts(store) == (0, 35)
    await advance(store, ONE_JOB, waiting[0], Promoted())
    leased, *_ = await lease(store, max_jobs=2)
    await store.accept([_result(leased, {"tokens": 40})])
    assert await _counts(store) == (40, 0)


async def test_at_any_time_a_budget_is_the_sum_over_the_runs(store: Store) -> None:
    """A random walk, compared with sums that are added up one by one."""
    limit, chance = 200, random.Random(11)
    await store.put_tenant(ACME, _tenant(limit, BudgetWindow.TOTAL))
    reserved: dict[RunId, int] = {}
    used: Counter[RunId] = Counter()
    ended: set[RunId] = set()
    held: dict[RunId, tuple[LeasedJob, int]] = {}

    def committed() -> int:
        return sum(
            used[each] if each in ended else max(reserved[each], used[each]) for each in reserved
        )

    for _ in range(70):
        run_id = chance.choice(list(held)) if held else None
        match chance.choice(["start", "start", "renew", "renew", "accept", "cancel"]):
            case "start":
                asked = chance.randrange(60)
                verdict, started = await _admit(store, {"tokens": asked})
                assert isinstance(verdict, Admitted) is (committed() + asked <= limit)
                if isinstance(verdict, Admitted):
                    reserved[started] = asked
                    held[started] = (await lease_one(store), 0)
            case "renew" if run_id is not None:
                leased, before = held[run_id]
                told = chance.randrange(60)
                await _renew(store, leased, {"tokens": told})
                used[run_id] += max(0, told - before)
                held[run_id] = (leased, max(told, before))
            case "accept" if run_id is not None:
                leased, before = held.pop(run_id)
                told = chance.randrange(60)
                await store.accept([_result(leased, {"tokens": told})])
                used[run_id] += max(0, told - before)
                await advance(store, ONE_JOB, run_id)
                ended.add(run_id)
            case "cancel" if run_id is not None:
                held.pop(run_id)
                await cancel(store, run_id)
                ended.add(run_id)
            case _:
                continue
        assert await _counts(store) == (used.total(), committed() - used.total())
    assert used.total() > limit, "the walk was to use more than it may reserve"
