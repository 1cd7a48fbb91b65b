"""Jobs: handed out in turn, held for a while, and offered again."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from stanchion.core.events import AttemptFailed, JobDied, Timer, TimerFired, TimerKind
from stanchion.core.json_value import JsonValue
from stanchion.core.model import (
    JobId,
    JobTrace,
    RunId,
    StepId,
    TenantId,
    Topic,
    shard_of_tenant,
)
from stanchion.core.plan import Plan
from stanchion.core.retry import Fixed
from stanchion.core.transition import DispatchJob, Effect, RevokeJob, SetTimer, StopStep
from stanchion.core.workflow import JobSpec, RetrySpec
from stanchion.ports.records import (
    Accepted,
    Committed,
    ExpiredJob,
    JobLease,
    JobState,
    JobView,
    LeasedJob,
    LostReason,
    RejectedCode,
    Renewals,
    ResultRefused,
)
from stanchion.ports.store import Store
from tests.contract.builders import (
    ACME,
    FOR_EACH,
    GLOBEX,
    ONE_JOB,
    SIDE_BY_SIDE,
    TOPIC,
    TWO_JOBS,
    WITHIN_MS,
    WORKER,
    accept,
    admission,
    advance,
    cancel,
    commit_of,
    held,
    lease,
    lease_one,
    loaded,
    nothing,
    planned,
    start,
    workflow,
)
from tests.contract.harness import LONG_MS, Harness


async def test_a_fresh_job_is_ready(store: Store) -> None:
    run_id = await start(store)
    view = await store.job(JobId(f"{run_id}:step@1"))
    assert view is not None
    assert view == JobView(view.job, JobState.READY, 0, 0)
    assert (view.job.run_id, view.job.tenant, view.job.topic) == (run_id, ACME, TOPIC)
    assert view.job.input == {"said": "hello"}


async def test_an_unknown_job_is_not_there(store: Store) -> None:
    run_id = await start(store)
    for odd in ("", "nonsense", f"{run_id}:step@2", f"{run_id}:other@1", run_id):
        assert await store.job(JobId(odd)) is None


async def test_nothing_is_leased_when_nothing_is_ready(store: Store) -> None:
    assert await lease(store, max_jobs=10) == ()


async def test_a_leased_job_is_the_workers_for_the_term(store: Store) -> None:
    await start(store)
    before = await store.now()
    leased = await lease_one(store)
    after = await store.now()
    assert before + LONG_MS <= leased.expires_at <= after + LONG_MS
    assert leased.deliveries == 1
    assert leased.fence >= before * 1_000  # the store's clock, in microseconds
    assert await store.job(leased.job.id) == JobView(
        leased.job, JobState.LEASED, leased.fence, 1, WORKER, leased.expires_at
    )


async def test_a_leased_job_is_not_handed_out_again(store: Store) -> None:
    await start(store)
    await lease_one(store)
    assert await lease(store, max_jobs=10) == ()


async def test_no_more_jobs_are_leased_than_asked_for(store: Store) -> None:
    await start(store, FOR_EACH, run_input={"items": list(range(5))})
    assert len(await lease(store, max_jobs=3)) == 3
    assert len(await lease(store, max_jobs=3)) == 2


async def test_a_call_for_no_jobs_leases_none(store: Store) -> None:
    await start(store)
    assert await lease(store, max_jobs=0) == ()
    assert await store.ready_topics() == {TOPIC: 1}


async def test_a_topic_named_twice_is_one_topic(store: Store) -> None:
    await start(store, FOR_EACH, run_input={"items": [0, 1, 2]})
    leased = await lease(store, TOPIC, TOPIC, max_jobs=5)
    assert [each.job.item for each in leased] == [0, 1, 2]


async def test_only_the_topics_asked_for_are_leased(store: Store) -> None:
    await start(store, SIDE_BY_SIDE)
    assert await lease(store, "middle", max_jobs=10) == ()
    (leased,) = await lease(store, "left", "middle", max_jobs=10)
    assert leased.job.topic == "left"


async def test_no_topics_lease_nothing(store: Store) -> None:
    await start(store)
    assert await store.lease_jobs(WORKER, [], max_jobs=5, ttl_ms=1_000) == ()


async def test_only_the_tenant_asked_for_is_served(store: Store) -> None:
    await start(store)
    run_id = await start(store, tenant=GLOBEX)
    leased = await lease(store, max_jobs=10, tenant=GLOBEX)
    assert [each.job.run_id for each in leased] == [run_id]
    assert await lease(store, max_jobs=10, tenant=TenantId("initech")) == ()


async def test_within_a_tenant_and_topic_the_oldest_job_comes_first(store: Store) -> None:
    first = await start(store, FOR_EACH, run_input={"items": [0, 1, 2]})
    second = await start(store)
    leased = await lease(store, max_jobs=10)
    order = [(each.job.run_id, each.job.item) for each in leased]
    assert order == [(first, 0), (first, 1), (first, 2), (second, None)]


async def test_ready_jobs_are_counted_by_topic(store: Store) -> None:
    await start(store, SIDE_BY_SIDE)
    await start(store, SIDE_BY_SIDE, tenant=GLOBEX)
    await start(store)
    assert await store.ready_topics() == {"left": 2, "right": 2, TOPIC: 1}
    await lease(store, "left", max_jobs=2)
    assert await store.ready_topics() == {"right": 2, TOPIC: 1}


async def test_callers_at_once_never_get_the_same_job(store: Store) -> None:
    await start(store, FOR_EACH, run_input={"items": list(range(100))})
    answers = await asyncio.gather(*(lease(store, max_jobs=3) for _ in range(50)))
    jobs = [leased.job.id for answer in answers for leased in answer]
    assert len(jobs) == len(set(jobs)) == 100


# ── Fairness ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_tenant_with_one_job_is_served_within_one_round_behind_a_thousand(
    store: Store,
) -> None:
    for _ in range(4):
        await start(store, FOR_EACH, run_input={"items": list(range(250))})
    await lease(store, max_jobs=5)
    run_id = await start(store, tenant=GLOBEX)
    leased = [*await lease(store), *await lease(store)]
    assert run_id in {each.job.run_id for each in leased}
    assert await store.ready_topics() == {TOPIC: 1_001 - 7}


async def test_a_round_in_one_call_has_a_job_of_every_tenant(store: Store) -> None:
    tenants = [TenantId(f"tenant-{number}") for number in range(8)]
    for tenant in tenants:
        await start(store, FOR_EACH, run_input={"items": [1, 2, 3]}, tenant=tenant)
    for _ in range(3):
        leased = await lease(store, max_jobs=8)
        assert sorted(each.job.tenant for each in leased) == tenants


async def test_tenants_take_turns_from_call_to_call(store: Store) -> None:
    tenants = _tenants_in_shards_of_their_own(5)
    for tenant in tenants:
        await start(store, FOR_EACH, run_input={"items": [1, 2, 3]}, tenant=tenant)
    for _ in range(3):
        leased = [await lease_one(store) for _ in tenants]
        assert sorted(each.job.tenant for each in leased) == sorted(tenants)


async def test_tenants_of_one_shard_take_turns_as_well(store: Store) -> None:
    tenants = _tenants_in_one_shard(5)
    for tenant in tenants:
        await start(store, FOR_EACH, run_input={"items": [1, 2, 3]}, tenant=tenant)
    for _ in range(3):
        leased = [await lease_one(store) for _ in tenants]
        assert sorted(each.job.tenant for each in leased) == sorted(tenants)


async def test_a_tenant_that_comes_back_waits_for_its_turn(store: Store) -> None:
    await start(store, FOR_EACH, run_input={"items": [1, 2, 3]})
    await start(store, FOR_EACH, run_input={"items": [1, 2, 3]}, tenant=GLOBEX)
    served = [(await lease_one(store)).job.tenant for _ in range(6)]
    assert served in ([ACME, GLOBEX] * 3, [GLOBEX, ACME] * 3)


async def test_topics_take_turns_within_a_call(store: Store) -> None:
    for _ in range(3):
        await start(store, SIDE_BY_SIDE)
    for _ in range(3):
        leased = await lease(store, "left", "right", max_jobs=2)
        assert sorted(each.job.topic for each in leased) == ["left", "right"]


async def test_topics_take_turns_from_call_to_call(store: Store) -> None:
    for _ in range(3):
        await start(store, SIDE_BY_SIDE)
    for _ in range(3):
        leased = [await lease_one(store, "left", "right") for _ in range(2)]
        assert sorted(each.job.topic for each in leased) == ["left", "right"]


def _tenants_in_shards_of_their_own(count: int) -> list[TenantId]:
    by_shard: dict[int, TenantId] = {}
    for number in range(1_000):
        tenant = TenantId(f"tenant-{number}")
        by_shard.setdefault(shard_of_tenant(tenant), tenant)
    return list(by_shard.values())[:count]


def _tenants_in_one_shard(count: int) -> list[TenantId]:
    tenants = (TenantId(f"tenant-{number}") for number in range(10_000))
    return [tenant for tenant in tenants if shard_of_tenant(tenant) == 7][:count]


# ── Renewal ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_renewed_lease_outlives_its_first_term(store: Store, harness: Harness) -> None:
    await start(store)
    leased = await lease_one(store, ttl_ms=harness.short_ms)
    renewals = await store.renew_jobs([held(leased)], ttl_ms=LONG_MS)
    assert renewals == Renewals((leased.job.id,), ())
    await harness.pass_time(harness.short_ms)
    assert await store.expire_jobs(limit=10, max_deliveries=5) == ()
    view = await store.job(leased.job.id)
    assert view is not None
    assert view.expires_at is not None
    assert view.expires_at > leased.expires_at
    assert (view.state, view.fence, view.deliveries) == (JobState.LEASED, leased.fence, 1)


async def test_a_lease_that_ran_out_is_lost_though_nobody_noticed(
    store: Store, harness: Harness
) -> None:
    await start(store)
    leased = await lease_one(store, ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    assert await store.renew_jobs([held(leased)], ttl_ms=LONG_MS) == Renewals((), (leased.job.id,))
    assert len(await store.expire_jobs(limit=10, max_deliveries=5)) == 1


async def test_a_lease_under_another_fence_is_lost(store: Store) -> None:
    await start(store)
    leased = await lease_one(store)
    for fence in (leased.fence - 1, leased.fence + 1, 0):
        renewals = await store.renew_jobs([JobLease(leased.job.id, fence)], ttl_ms=LONG_MS)
        assert renewals == Renewals((), (leased.job.id,))


async def test_a_lease_of_an_unknown_job_is_lost(store: Store) -> None:
    renewals = await store.renew_jobs([JobLease(JobId("nonsense"), 1)], ttl_ms=LONG_MS)
    assert renewals == Renewals((), (JobId("nonsense"),))


async def test_a_lease_of_a_finished_job_is_lost(store: Store) -> None:
    await start(store)
    leased = await lease_one(store)
    await accept(store, leased)
    assert await store.renew_jobs([held(leased)], ttl_ms=LONG_MS) == Renewals((), (leased.job.id,))


async def test_each_lease_is_renewed_or_lost_on_its_own(store: Store) -> None:
    await start(store, FOR_EACH, run_input={"items": [0, 1, 2, 3]})
    await start(store, tenant=GLOBEX)
    leased = await lease(store, max_jobs=5)
    await accept(store, leased[1])
    await accept(store, leased[3])
    renewals = await store.renew_jobs([held(each) for each in leased], ttl_ms=LONG_MS)
    names = [each.job.id for each in leased]
    assert renewals == Renewals((names[0], names[2], names[4]), (names[1], names[3]))


async def test_no_leases_renew_nothing(store: Store) -> None:
    assert await store.renew_jobs([], ttl_ms=LONG_MS) == Renewals((), ())


async def test_a_lease_of_another_tenants_job_is_lost_like_one_of_no_job(store: Store) -> None:
    await start(store)
    await start(store, tenant=GLOBEX)
    mine, foreign = await _one_of_each(store)
    ghost = JobLease(JobId(f"{mine.job.run_id}:ghost@1"), 1)
    odd = JobLease(JobId("nonsense"), 1)
    asked = [odd, held(foreign), ghost, held(mine), held(foreign)]
    renewals = await store.renew_jobs(asked, ttl_ms=2 * LONG_MS, tenant=ACME)
    lost = (odd.job_id, foreign.job.id, ghost.job_id, foreign.job.id)
    assert renewals == Renewals((mine.job.id,), lost)
    view = await store.job(foreign.job.id)
    assert view is not None
    assert view.expires_at == foreign.expires_at
    assert (await store.renew_jobs([held(foreign)], ttl_ms=1, tenant=GLOBEX)).lost == ()


# ── Lost leases ──────────────────────────────────────────────────────────────────────────────────


async def test_a_lease_that_holds_is_not_lost(store: Store) -> None:
    await start(store)
    leased = await lease_one(store)
    assert await store.lost_leases([held(leased)]) == {}
    assert await store.lost_leases([held(leased)], tenant=ACME) == {}
    assert await store.lost_leases([]) == {}


async def test_a_lease_of_a_cancelled_run_is_lost_because_of_that(store: Store) -> None:
    run_id = await start(store)
    leased = await lease_one(store)
    await cancel(store, run_id)
    assert await store.lost_leases([held(leased)]) == {leased.job.id: LostReason.CANCELLED}
    assert await store.lost_leases([held(leased)], tenant=ACME) == {
        leased.job.id: LostReason.CANCELLED
    }


async def test_a_lease_of_a_run_that_took_too_long_is_lost_because_of_that(store: Store) -> None:
    run_id = await start(store)
    leased = await lease_one(store)
    await advance(store, ONE_JOB, run_id, TimerFired(timer=Timer(TimerKind.RUN_TIMEOUT)))
    assert await store.lost_leases([held(leased)]) == {leased.job.id: LostReason.TIMED_OUT}


async def test_a_lease_of_a_step_that_took_too_long_is_lost_because_of_that(store: Store) -> None:
    run_id = await start(store, SIDE_BY_SIDE)
    left, right = await lease(store, "left", "right", max_jobs=2)
    found = await loaded(store, run_id)
    stop = replace(nothing(found), effects=(StopStep(left.job.step_id),))
    await store.commit(commit_of(found, stop))
    assert await store.lost_leases([held(left), held(right)]) == {left.job.id: LostReason.TIMED_OUT}


async def test_an_expired_lease_is_lost_until_another_has_the_job(
    store: Store, harness: Harness
) -> None:
    await start(store)
    leased = await lease_one(store, ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    expired = {leased.job.id: LostReason.EXPIRED}
    assert await store.lost_leases([held(leased)]) == expired
    await store.expire_jobs(limit=10, max_deliveries=5)
    assert await store.lost_leases([held(leased)]) == expired
    again = await lease_one(store, ttl_ms=harness.short_ms)
    stale = {leased.job.id: LostReason.STALE_FENCE}
    assert await store.lost_leases([held(leased)]) == stale
    assert await store.lost_leases([held(again)]) == {}
    await harness.pass_time(harness.short_ms)
    await store.expire_jobs(limit=10, max_deliveries=2)
    assert await store.lost_leases([held(again)]) == expired
    assert await store.lost_leases([held(leased)]) == stale


async def test_a_lease_whose_result_was_accepted_is_finished(store: Store) -> None:
    await start(store)
    leased = await lease_one(store)
    await accept(store, leased)
    assert await store.lost_leases([held(leased)]) == {leased.job.id: LostReason.FINISHED}
    older = JobLease(leased.job.id, leased.fence - 1)
    assert await store.lost_leases([older]) == {leased.job.id: LostReason.STALE_FENCE}


async def test_a_lease_of_no_job_or_of_another_tenants_is_unknown(store: Store) -> None:
    run_id = await start(store)
    leased = await lease_one(store)
    ghost = JobLease(JobId(f"{run_id}:ghost@1"), 1)
    odd = JobLease(JobId("nonsense"), 1)
    unknown = LostReason.UNKNOWN_JOB
    assert await store.lost_leases([ghost, odd]) == {ghost.job_id: unknown, odd.job_id: unknown}
    assert await store.lost_leases([held(leased)], tenant=GLOBEX) == {leased.job.id: unknown}
    await cancel(store, run_id)
    assert await store.lost_leases([held(leased)], tenant=GLOBEX) == {leased.job.id: unknown}


async def test_to_ask_for_lost_leases_changes_nothing(store: Store) -> None:
    await start(store)
    leased = await lease_one(store)
    before = await store.job(leased.job.id)
    await store.lost_leases([replace(held(leased), progress="half")])
    assert await store.job(leased.job.id) == before


# ── Progress ─────────────────────────────────────────────────────────────────────────────────────


async def test_progress_comes_with_a_renewal_and_is_shown(store: Store) -> None:
    run_id = await start(store)
    leased = await lease_one(store)
    assert await store.progress(run_id, [leased.job.id]) == {}
    for said in ({"done": 1, "of": [2.5, None, "ü"]}, "half", 0, False):
        renewals = await store.renew_jobs([replace(held(leased), progress=said)], ttl_ms=LONG_MS)
        assert renewals.renewed == (leased.job.id,)
        assert await _progress(store, leased) == said
        # A renewal without news leaves it as it was.
        await store.renew_jobs([held(leased)], ttl_ms=LONG_MS)
        assert await _progress(store, leased) == said


async def test_progress_of_a_lost_lease_is_not_taken(store: Store) -> None:
    await start(store)
    leased = await lease_one(store)
    for wrong in (
        JobLease(leased.job.id, leased.fence - 1, "stale"),
        JobLease(JobId("nonsense"), 1, "odd"),
    ):
        await store.renew_jobs([wrong], ttl_ms=LONG_MS)
    await store.renew_jobs([replace(held(leased), progress="no")], ttl_ms=LONG_MS, tenant=GLOBEX)
    assert await _progress(store, leased) is None


async def test_progress_ends_with_the_lease(store: Store, harness: Harness) -> None:
    run_id = await start(store)
    leased = await lease_one(store)
    await store.renew_jobs([replace(held(leased), progress="half")], ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    assert await store.expire_jobs(limit=10, max_deliveries=5)
    assert await _progress(store, leased) is None
    again = await lease_one(store)
    assert await _progress(store, again) is None
    await store.renew_jobs([replace(held(again), progress="most")], ttl_ms=LONG_MS)
    await accept(store, again)
    assert await _progress(store, again) is None
    second = await start(store)
    leased = await lease_one(store)
    await store.renew_jobs([replace(held(leased), progress="half")], ttl_ms=LONG_MS)
    await cancel(store, second)
    assert await _progress(store, leased) is None
    assert await store.progress(run_id, [leased.job.id]) == {}


async def test_progress_is_asked_for_job_by_job(store: Store) -> None:
    run_id = await start(store, SIDE_BY_SIDE)
    other = await start(store)
    left, right = await lease(store, "left", "right", max_jobs=2)
    theirs = await lease_one(store)
    for each in (left, theirs):
        await store.renew_jobs([replace(held(each), progress=each.job.id)], ttl_ms=LONG_MS)
    names = [left.job.id, right.job.id, theirs.job.id, JobId("nonsense")]
    assert await store.progress(run_id, names) == {left.job.id: left.job.id}
    assert await store.progress(other, names) == {theirs.job.id: theirs.job.id}
    assert await store.progress(RunId("nonsense"), names) == {}
    assert await store.progress(run_id, []) == {}


async def _one_of_each(store: Store) -> tuple[LeasedJob, LeasedJob]:
    (mine,) = await lease(store, tenant=ACME)
    (foreign,) = await lease(store, tenant=GLOBEX)
    return mine, foreign


async def _progress(store: Store, leased: LeasedJob) -> JsonValue:
    """What both ways of asking say."""
    view = await store.job(leased.job.id)
    assert view is not None
    found = await store.progress(leased.job.run_id, [leased.job.id])
    assert found.get(leased.job.id) == view.progress
    return view.progress


# ── Expiry ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_lease_that_stands_is_not_expired(store: Store) -> None:
    await start(store)
    await lease_one(store)
    assert await store.expire_jobs(limit=10, max_deliveries=5) == ()


async def test_an_expired_job_is_ready_again(store: Store, harness: Harness) -> None:
    run_id = await start(store)
    leased = await lease_one(store, ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    expired = await store.expire_jobs(limit=10, max_deliveries=5)
    assert expired == (ExpiredJob(leased.job.id, run_id, ACME, TOPIC, 1, is_dead=False),)
    assert await store.job(leased.job.id) == JobView(leased.job, JobState.READY, leased.fence, 1)
    assert await store.expire_jobs(limit=10, max_deliveries=5) == ()
    assert (await loaded(store, run_id)).inbox == ()


async def test_an_expired_job_is_leased_again_with_a_higher_fence(
    store: Store, harness: Harness
) -> None:
    await start(store)
    first = await lease_one(store, ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    await store.expire_jobs(limit=10, max_deliveries=5)
    second = await lease_one(store)
    assert second.job == first.job
    assert second.fence > first.fence
    assert second.deliveries == 2


async def test_fences_rise_though_no_time_passes(store: Store) -> None:
    await start(store)
    fences = []
    for _ in range(5):
        leased = await lease_one(store, ttl_ms=0)
        fences.append(leased.fence)
        await store.expire_jobs(limit=10, max_deliveries=100)
    assert fences == sorted(set(fences))


async def test_an_expired_job_goes_to_the_end_of_its_tenants_queue(
    store: Store, harness: Harness
) -> None:
    await start(store, FOR_EACH, run_input={"items": [0, 1, 2]})
    await lease_one(store, ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    await store.expire_jobs(limit=10, max_deliveries=5)
    assert [each.job.item for each in await lease(store, max_jobs=3)] == [1, 2, 0]


async def test_leases_expire_earliest_first_and_no_more_than_asked_for(
    store: Store, harness: Harness
) -> None:
    await start(store, FOR_EACH, run_input={"items": [0, 1, 2]})
    leased = await lease(store, max_jobs=3)
    for place in (1, 2, 0):
        await store.renew_jobs([held(leased[place])], ttl_ms=0)
        await harness.pass_time(2)
    first = await store.expire_jobs(limit=2, max_deliveries=5)
    second = await store.expire_jobs(limit=2, max_deliveries=5)
    expected = [leased[place].job.id for place in (1, 2, 0)]
    assert [each.job_id for each in (*first, *second)] == expected
    assert len(first) == 2


async def test_leases_of_all_tenants_expire(store: Store, harness: Harness) -> None:
    tenants = [TenantId(f"tenant-{number}") for number in range(10)]
    for tenant in tenants:
        await start(store, tenant=tenant)
    await lease(store, max_jobs=10, ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    expired = await store.expire_jobs(limit=100, max_deliveries=5)
    assert sorted(each.tenant for each in expired) == tenants


async def test_a_job_delivered_as_often_as_is_allowed_is_dead(
    store: Store, harness: Harness
) -> None:
    run_id = await start(store)
    fence = 0
    for delivery in (1, 2, 3):
        leased = await lease_one(store, ttl_ms=0)
        fence = leased.fence
        (expired,) = await store.expire_jobs(limit=10, max_deliveries=3)
        assert expired.deliveries == delivery
        assert expired.is_dead == (delivery == 3)
    assert await lease(store) == ()
    view = await store.job(JobId(f"{run_id}:step@1"))
    assert view is not None
    assert view == JobView(view.job, JobState.DEAD, fence, 3)
    assert harness.name  # the case needs no time to pass: a term of nothing is over at once


async def test_a_dead_job_is_told_to_its_run(store: Store) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": ["a"]})
    leased = await lease_one(store, ttl_ms=0)
    await store.expire_jobs(limit=10, max_deliveries=1)
    (entry,) = (await loaded(store, run_id)).inbox
    assert entry.id == f"died:{leased.job.id}#1"
    assert entry.event == JobDied(
        job_id=leased.job.id, step_id=leased.job.step_id, item=0, dispatch=1, deliveries=1
    )
    (row,) = await store.take_outbox(limit=10, hold_ms=1_000)
    assert row.run_id == run_id


async def test_expiry_noticed_by_many_at_once_is_noticed_once(store: Store) -> None:
    await start(store, FOR_EACH, run_input={"items": list(range(20))})
    await lease(store, max_jobs=20, ttl_ms=0)
    answers = await asyncio.gather(
        *(store.expire_jobs(limit=7, max_deliveries=5) for _ in range(10))
    )
    expired = [each.job_id for answer in answers for each in answer]
    assert len(expired) == len(set(expired)) == 20


# ── Revocation ───────────────────────────────────────────────────────────────────────────────────


async def test_a_revoked_job_is_neither_handed_out_nor_expired(
    store: Store, harness: Harness
) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": ["a", "b"]})
    await lease_one(store, ttl_ms=harness.short_ms)
    await cancel(store, run_id, FOR_EACH)
    await harness.pass_time(harness.short_ms)
    assert await store.expire_jobs(limit=10, max_deliveries=5) == ()
    assert await lease(store, max_jobs=10) == ()
    assert await store.ready_topics() == {}


async def test_a_revoked_job_does_not_hold_up_the_next_ones(store: Store) -> None:
    first = await start(store)
    second = await start(store)
    await cancel(store, first)
    assert (await lease_one(store)).job.run_id == second


async def test_stopping_a_step_revokes_its_open_jobs_and_no_others(store: Store) -> None:
    run_id = await start(store, SIDE_BY_SIDE)
    await _stop(store, run_id, "lef")
    assert await store.ready_topics() == {"left": 1, "right": 1}
    await _stop(store, run_id, "left")
    assert await store.ready_topics() == {"right": 1}
    assert await lease(store, "left") == ()
    revoked = await store.job(JobId(f"{run_id}:left@1"))
    assert revoked is not None
    assert revoked.state is JobState.REVOKED


async def test_stopping_a_step_revokes_the_jobs_of_its_items_ready_and_leased(
    store: Store, harness: Harness
) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": [0, 1, 2]})
    leased = await lease(store, max_jobs=2, ttl_ms=harness.short_ms)
    await accept(store, leased[1])
    await _stop(store, run_id, "each")
    states = [await store.job(JobId(f"{run_id}:each[{item}]@1")) for item in range(3)]
    assert [view and view.state for view in states] == [
        JobState.REVOKED,
        JobState.FINISHED,
        JobState.REVOKED,
    ]
    assert await store.renew_jobs([held(leased[0])], ttl_ms=1) == Renewals((), (leased[0].job.id,))
    await harness.pass_time(harness.short_ms)
    assert await store.expire_jobs(limit=10, max_deliveries=5) == ()


async def test_stopping_comes_before_or_after_sending_out_as_the_transition_says(
    store: Store,
) -> None:
    run_id = await start(store)
    found = await loaded(store, run_id)
    first = await lease_one(store)
    second = replace(first.job, id=JobId(f"{run_id}:step@2"), attempt=2)
    third = replace(first.job, id=JobId(f"{run_id}:step@3"), attempt=3)
    stop = StopStep(first.job.step_id)
    effects = (DispatchJob(third), stop, DispatchJob(second))
    await store.commit(commit_of(found, replace(nothing(found), effects=effects)))
    states = [await store.job(job.id) for job in (first.job, second, third)]
    assert [view and view.state for view in states] == [
        JobState.REVOKED,
        JobState.READY,
        JobState.REVOKED,
    ]
    assert [each.job for each in await lease(store, max_jobs=5)] == [second]


async def test_a_step_is_stopped_with_the_steps_inside_it_and_a_job_alone(store: Store) -> None:
    run_id = await start(store)
    found, first = await loaded(store, run_id), await lease_one(store)
    places = [("each", 0), ("each.x", 0), ("each.x", 1), ("each.x.y", 0), ("each-x", 0), ("eac", 0)]
    jobs = [
        replace(first.job, id=JobId(f"{run_id}:{step}[{item}]@1"), step_id=StepId(step), item=item)
        for step, item in places
    ]
    now = await store.now()
    timers = [Timer(TimerKind.STEP_TIMEOUT, each.step_id, each.item) for each in jobs]
    sent = (*map(DispatchJob, jobs), *(SetTimer(timer, now) for timer in timers))
    await store.commit(commit_of(found, replace(nothing(found), effects=sent)))

    async def change(*effects: Effect) -> list[str]:
        found = await loaded(store, run_id)
        await store.commit(commit_of(found, replace(nothing(found), effects=effects)))
        views = [await store.job(each.id) for each in jobs]
        return [str(view and view.state) for view in views]

    revoked = await change(RevokeJob(jobs[1].id), RevokeJob(JobId(f"{run_id}:none@1")))
    assert revoked == ["ready", "revoked", *["ready"] * 4]
    stopped = await change(StopStep(StepId("each")))
    assert stopped == [*["revoked"] * 4, "ready", "ready"]
    await store.fire_timers(limit=10)
    inbox = (await loaded(store, run_id)).inbox
    fired = [each.event.timer for each in inbox if isinstance(each.event, TimerFired)]
    assert {timer.key for timer in fired} == {timer.key for timer in timers[4:]}


async def test_a_dead_job_stays_dead_when_its_run_ends(store: Store) -> None:
    run_id = await start(store)
    leased = await lease_one(store, ttl_ms=0)
    await store.expire_jobs(limit=10, max_deliveries=1)
    await cancel(store, run_id)
    view = await store.job(leased.job.id)
    assert view is not None
    assert view.state is JobState.DEAD


async def test_a_finished_job_stays_finished_when_its_run_ends(store: Store) -> None:
    run_id = await start(store, TWO_JOBS)
    leased = await lease_one(store)
    await accept(store, leased)
    await advance(store, TWO_JOBS, run_id)
    await cancel(store, run_id, TWO_JOBS)
    view = await store.job(leased.job.id)
    assert view is not None
    assert view == JobView(leased.job, JobState.FINISHED, leased.fence, 1, WORKER)


async def _stop(store: Store, run_id: RunId, step: str) -> None:
    found = await loaded(store, run_id)
    stop = replace(nothing(found), effects=(StopStep(StepId(step)),))
    assert isinstance(await store.commit(commit_of(found, stop)), Committed)


async def test_topics_are_told_apart_whatever_characters_they_have(store: Store) -> None:
    await start(store, SIDE_BY_SIDE)
    assert await store.lease_jobs(WORKER, [Topic("left*")], max_jobs=5, ttl_ms=1_000) == ()
    assert await store.lease_jobs(WORKER, [Topic("LEFT")], max_jobs=5, ttl_ms=1_000) == ()


# ── The time of an attempt ───────────────────────────────────────────────────────────────────────


def timed(timeout_ms: int, *, attempts: int = 1) -> Plan:
    spec = JobSpec(
        topic=TOPIC,
        attempt_timeout_s=timeout_ms / 1000,
        retry=RetrySpec(max_attempts=attempts, backoff=Fixed(0)),
    )
    return planned(workflow("timed", step=spec))


async def test_an_attempt_that_takes_too_long_is_revoked_and_has_failed(
    store: Store, harness: Harness
) -> None:
    plan = timed(harness.short_ms, attempts=2)
    run_id = await start(store, plan)
    leased = await lease_one(store)
    assert await store.expire_jobs(limit=10, max_deliveries=5) == ()
    await harness.pass_time(harness.short_ms)
    # Until that is noticed the lease holds, like any other that is going to be revoked.
    renewals = await store.renew_jobs([held(leased)], ttl_ms=LONG_MS)
    assert renewals == Renewals((leased.job.id,), ())
    [expired] = await store.expire_jobs(limit=10, max_deliveries=1)
    assert expired == ExpiredJob(
        leased.job.id, run_id, ACME, TOPIC, 1, is_dead=False, is_timed_out=True
    )
    assert await store.expire_jobs(limit=10, max_deliveries=1) == ()
    assert await store.lost_leases([held(leased)]) == {leased.job.id: LostReason.TIMED_OUT}
    renewals = await store.renew_jobs([held(leased)], ttl_ms=LONG_MS)
    assert renewals == Renewals((), (leased.job.id,))
    view = await store.job(leased.job.id)
    assert view is not None
    assert (view.state, view.worker_id, view.expires_at) == (JobState.REVOKED, None, None)
    [row] = await store.take_outbox(limit=10, hold_ms=LONG_MS)
    assert row.run_id == run_id
    [entry] = (await loaded(store, run_id)).inbox
    assert isinstance(entry.event, AttemptFailed)
    assert (entry.event.error.code, entry.event.final) == ("attempt_timeout", False)
    refused = await accept(store, leased)
    assert isinstance(refused, ResultRefused)
    assert refused.code is RejectedCode.STALE_FENCE

    await advance(store, plan, run_id)
    await harness.pass_time(1)
    await store.fire_timers(limit=10)
    await advance(store, plan, run_id)
    second = await lease_one(store)
    assert second.job.attempt == 2
    assert second.job.attempt_timeout_ms == harness.short_ms


async def test_the_time_of_an_attempt_begins_with_its_first_lease(
    store: Store, harness: Harness
) -> None:
    await start(store, timed(harness.short_ms))
    await harness.pass_time(4 * harness.short_ms)
    assert await store.expire_jobs(limit=10, max_deliveries=5) == ()
    leased = await lease_one(store)
    assert isinstance(await accept(store, leased), Accepted)
    await harness.pass_time(harness.short_ms)
    assert await store.expire_jobs(limit=10, max_deliveries=5) == ()


async def test_the_time_of_an_attempt_goes_on_through_redeliveries(
    store: Store, harness: Harness
) -> None:
    run_id = await start(store, timed(4 * harness.short_ms))
    await lease_one(store, ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    [returned] = await store.expire_jobs(limit=10, max_deliveries=5)
    assert not returned.is_timed_out
    again = await lease_one(store)
    assert again.deliveries == 2
    assert (await store.renew_jobs([held(again)], ttl_ms=LONG_MS)).renewed == (again.job.id,)
    # Four since the first lease, three since the second.
    await harness.pass_time(3 * harness.short_ms)
    [expired] = await store.expire_jobs(limit=10, max_deliveries=5)
    assert (expired.is_timed_out, expired.deliveries) == (True, 2)
    assert len((await loaded(store, run_id)).inbox) == 1


async def test_an_attempt_runs_out_of_time_while_its_job_is_ready_again(
    store: Store, harness: Harness
) -> None:
    plan = timed(4 * harness.short_ms)
    run_id = await start(store, plan)
    leased = await lease_one(store, ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    [returned] = await store.expire_jobs(limit=10, max_deliveries=5)
    assert not returned.is_timed_out
    assert await store.ready_topics() == {TOPIC: 1}
    await harness.pass_time(4 * harness.short_ms)
    [expired] = await store.expire_jobs(limit=10, max_deliveries=5)
    assert (expired.job_id, expired.is_timed_out) == (leased.job.id, True)
    assert await lease(store) == ()
    assert await store.ready_topics() == {}
    await advance(store, plan, run_id)
    assert (await loaded(store, run_id)).run.status == "failed"


async def test_a_job_that_is_ready_again_is_revoked_with_its_run(
    store: Store, harness: Harness
) -> None:
    plan = timed(4 * harness.short_ms)
    run_id = await start(store, plan)
    await lease_one(store, ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    await store.expire_jobs(limit=10, max_deliveries=5)
    await cancel(store, run_id, plan)
    await harness.pass_time(4 * harness.short_ms)
    assert await store.expire_jobs(limit=10, max_deliveries=5) == ()
    assert await lease(store) == ()


async def test_a_replayed_attempt_has_all_its_time_again(store: Store, harness: Harness) -> None:
    plan = timed(4 * harness.short_ms)
    run_id = await start(store, plan)
    await lease_one(store, ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    [died] = await store.expire_jobs(limit=10, max_deliveries=1)
    assert died.is_dead
    await advance(store, plan, run_id)
    await harness.pass_time(4 * harness.short_ms)
    assert await store.expire_jobs(limit=10, max_deliveries=1) == ()
    [letter] = (await store.list_dead_letters(None)).items
    await store.replay_dead_letter(letter.id, actor="operator")
    await advance(store, plan, run_id)
    again = await lease_one(store)
    assert await store.expire_jobs(limit=10, max_deliveries=1) == ()
    await harness.pass_time(4 * harness.short_ms)
    [expired] = await store.expire_jobs(limit=10, max_deliveries=1)
    assert (expired.job_id, expired.is_timed_out) == (again.job.id, True)


async def test_a_run_and_its_jobs_keep_their_trace_context(store: Store) -> None:
    traced = f"00-{'ab' * 16}-{'cd' * 8}-01"
    wanted = admission(await store.now(), TWO_JOBS, traceparent=traced)
    await store.admit(wanted, within_ms=WITHIN_MS)
    assert (await loaded(store, wanted.run.id)).run.traceparent == traced
    first = await lease_one(store)
    assert first.job.trace == JobTrace(traced, wanted.run.created_at)
    view = await store.job(first.job.id)
    assert view is not None
    assert view.job == first.job
    assert isinstance(await accept(store, first), Accepted)
    await advance(store, TWO_JOBS, wanted.run.id)
    second = await lease_one(store)
    assert second.job.trace is not None
    assert second.job.trace.parent == traced
    assert second.job.trace.dispatched_at >= first.job.trace.dispatched_at
    assert isinstance(await accept(store, second), Accepted)

    await start(store)
    assert (await lease_one(store)).job.trace is None


async def test_an_attempt_is_over_however_few_jobs_one_call_looks_at(
    store: Store, harness: Harness
) -> None:
    plan = timed(4 * harness.short_ms, attempts=2)
    await start(store, plan)
    await start(store, plan)
    # The lease of the second ends before the attempt of the first does, so it is ended first.
    first = await lease_one(store)
    second = await lease_one(store, ttl_ms=harness.short_ms)
    await harness.pass_time(5 * harness.short_ms)
    expired = [
        each for _ in range(3) for each in await store.expire_jobs(limit=1, max_deliveries=1)
    ]
    assert [(each.job_id, each.is_timed_out, each.is_dead) for each in expired] == [
        (second.job.id, True, False),
        (first.job.id, True, False),
    ]
    assert (await store.list_dead_letters(ACME)).items == ()
