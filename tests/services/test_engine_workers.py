"""Workers die: their jobs go to others, and a job that kills all of them waits for an operator."""

from __future__ import annotations

import asyncio

import pytest

from stanchion.core.model import JobId, RunStatus, StepId, StepStatus, TenantId, Topic
from stanchion.core.workflow import JobSpec
from stanchion.ports.bus import Bell
from stanchion.ports.records import (
    Accepted,
    DeadLetterKind,
    JobLease,
    JobState,
    LeasedJob,
    LostReason,
    RejectedCode,
    Result,
    ResultRefused,
)
from stanchion.services.engine import Terms
from tests.services.faulty_locks import Fault
from tests.services.stage import Replica, World, job, virtual, workflow

TTL_MS = 60_000
RECONCILE_MS = 1_000
ONE = workflow("one", step=job("work"))
ACME, OTHER = TenantId("acme"), TenantId("other")


async def _die(world: World, replica: Replica, times: int) -> None:
    """Have so many workers take the job and never come back."""
    for _ in range(times):
        assert await world.lease(replica, "work", wait_s=60)
        await asyncio.sleep(TTL_MS / 1000)


@virtual
async def test_to_check_the_tenant_of_a_renewal_or_result_no_job_is_read(world: World) -> None:
    one, other = world.add(), world.add()
    await world.define(ONE)
    await world.start(one, "one")
    (leased,) = await world.lease(one, "work")
    held = JobLease(leased.job.id, leased.fence)
    own = leased.job.tenant
    assert (await other.scheduler.renew("worker", [held], tenant=own)).renewed == (leased.job.id,)
    result = Result(job_id=leased.job.id, fence=leased.fence, worker_id="worker")
    (accepted,) = await other.inbox.results([result], tenant=own)
    assert isinstance(accepted, Accepted)
    assert (one.store.calls["job"], other.store.calls["job"]) == (0, 0)


@pytest.mark.parametrize("replicas", [1, 2])
@virtual
async def test_a_dead_workers_job_is_offered_again_in_time_without_spending_an_attempt(
    world: World, replicas: int
) -> None:
    engines = [world.add() for _ in range(replicas)]
    one, other = engines[0], engines[-1]
    await world.define(ONE)
    run_id = await world.start(one, "one")
    (dead,) = await world.lease(one, "work")
    died_at = world.clock.moment()
    (leased,) = await world.lease(other, "work", wait_s=120)
    assert TTL_MS <= world.clock.moment() - died_at <= TTL_MS + RECONCILE_MS + 100
    assert (leased.job.id, leased.job.attempt) == (dead.job.id, 1)
    assert leased.fence > dead.fence
    assert sum(each.metric("scheduler_job_lock_abandoned_total") for each in engines) == 1

    answers = await world.report(one, dead)
    assert answers == (ResultRefused(dead.job.id, RejectedCode.STALE_FENCE),)
    assert one.metric("results_rejected_total", code="stale_fence") == 1
    assert (await world.run(run_id)).status is RunStatus.RUNNING

    await world.report(other, leased)
    assert await world.ended(run_id) == "succeeded"
    assert (await world.run(run_id)).step(StepId("step")).attempt == 1
    (late,) = await world.report(one, dead)
    assert late == ResultRefused(dead.job.id, RejectedCode.ALREADY_FINISHED)
    assert one.metric("results_rejected_total", code="already_finished") == 1
    await world.assert_nothing_left()


@virtual
async def test_a_worker_that_renews_keeps_its_job(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    run_id = await world.start(one, "one")
    (leased,) = await world.lease(one, "work")
    for _ in range(9):
        await asyncio.sleep(TTL_MS / 3000)
        renewals = await one.scheduler.renew("w", [JobLease(leased.job.id, leased.fence)])
        assert renewals.renewed == (leased.job.id,)
    await world.report(one, leased)
    assert await world.ended(run_id) == "succeeded"
    assert one.metric("scheduler_job_lock_abandoned_total") == 0


@virtual
async def test_a_job_that_kills_five_workers_is_a_dead_letter_until_it_is_replayed(
    world: World,
) -> None:
    one = world.add()
    await world.define(ONE)
    run_id = await world.start(one, "one")
    await _die(world, one, 5)
    # Bounded: without a count of deliveries the job would never be dead.
    async with asyncio.timeout(70):
        while not (await world.store.list_dead_letters(None)).items:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    assert (await world.run(run_id)).status is RunStatus.WAITING, "told at once"
    assert await world.lease(one, "work", wait_s=10) == ()

    run = await world.run(run_id)
    assert run.status is RunStatus.WAITING
    assert run.step(StepId("step")).status is StepStatus.WAITING
    (letter,) = (await world.store.list_dead_letters(None)).items
    assert (letter.kind, letter.run_id, letter.step_id) == (
        DeadLetterKind.JOB,
        run_id,
        StepId("step"),
    )
    assert letter.cause == "delivered 5 times, and no worker finished it"
    assert one.metric("dead_letters_total") == 1
    assert one.metric("scheduler_job_lock_abandoned_total") == 5
    assert await world.store.outbox_size() == 0

    waiting = asyncio.create_task(world.lease(one, "work"))
    await asyncio.sleep(2.5)
    replayed_at = world.clock.moment()
    assert await one.inbox.replay(letter.id, actor="operator") == letter
    assert await one.inbox.replay(letter.id, actor="operator") is None
    leased = await waiting
    assert world.clock.moment() - replayed_at < 100
    await world.report(one, *leased)
    assert await world.ended(run_id) == "succeeded"
    assert "job_dispatched step operator" in await world.told(run_id)
    assert (await world.run(run_id)).step(StepId("step")).attempt == 1
    await world.assert_nothing_left()


@virtual
async def test_how_often_a_job_is_handed_out_is_the_deployments_choice(world: World) -> None:
    one = world.add(terms=Terms(max_deliveries=2, job_lease_ttl_ms=1_000))
    await world.define(ONE)
    run_id = await world.start(one, "one")
    for _ in range(2):
        assert await world.lease(one, "work")
        await asyncio.sleep(1)
    await asyncio.sleep(2)
    assert (await world.run(run_id)).status is RunStatus.WAITING
    assert len((await world.store.list_dead_letters(None)).items) == 1


@virtual
async def test_a_cancelled_runs_worker_is_told_when_it_renews(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    run_id = await world.start(one, "one")
    (leased,) = await world.lease(one, "work")
    await one.inbox.cancel(run_id, reason=None, actor="caller")
    lease = JobLease(leased.job.id, leased.fence)
    assert (await one.scheduler.renew("w", [lease])).lost == (leased.job.id,)
    assert await one.scheduler.lost([lease]) == {leased.job.id: LostReason.CANCELLED}
    view = await world.store.job(leased.job.id)
    assert view is not None
    assert view.state is JobState.REVOKED
    await world.assert_nothing_left()


# ── Calls that wait until a lease is lost ────────────────────────────────────────────────────────


def _watching(
    replica: Replica, *leased: LeasedJob, within_s: float = 20
) -> asyncio.Task[dict[JobId, LostReason]]:
    leases = [JobLease(each.job.id, each.fence) for each in leased]
    return asyncio.create_task(replica.scheduler.revoked("work-worker", leases, within_s=within_s))


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(("has_bus", "within_ms"), [(True, 50), (False, 1_100)])
@virtual
async def test_a_held_call_tells_of_a_cancel_at_once(
    world: World, at: int, has_bus: bool, within_ms: int
) -> None:
    replicas = [world.add(), world.add()]
    await world.define(ONE)
    run_id = await world.start(replicas[0], "one")
    (leased,) = await world.lease(replicas[at], "work")
    watching = _watching(replicas[at], leased)
    await asyncio.sleep(7.3)
    for replica in replicas:
        replica.bus.is_away = not has_bus
    began = world.clock.moment()
    await replicas[0].inbox.cancel(run_id, reason=None, actor="caller")
    assert await watching == {leased.job.id: LostReason.CANCELLED}
    assert world.clock.moment() - began <= within_ms


@virtual
async def test_a_worker_is_listed_with_the_jobs_whose_leases_it_has(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    run_ids = [await world.start(one, "one") for _ in range(3)]
    cancelled, renewed, expires = [(await world.lease(one, "work"))[0] for _ in run_ids]

    def jobs() -> list[int]:
        return [worker.jobs for worker in one.scheduler.workers()]

    assert jobs() == [3]
    watching = _watching(one, cancelled)
    await asyncio.sleep(1)
    await one.inbox.cancel(cancelled.job.run_id, reason=None, actor="caller")
    await watching
    assert jobs() == [2]
    await asyncio.sleep(50)
    await one.scheduler.renew("work-worker", [JobLease(renewed.job.id, renewed.fence)])
    await asyncio.sleep(20)  # the worker still calls, but has not renewed the other lease
    assert jobs() == [1], expires


@virtual
async def test_a_held_call_tells_of_a_time_out(world: World) -> None:
    one = world.add()
    slow = JobSpec(topic=Topic("work"), timeout_s=5)
    await world.define(workflow("slow", step=slow))
    await world.start(one, "slow")
    (leased,) = await world.lease(one, "work")
    assert await _watching(one, leased) == {leased.job.id: LostReason.TIMED_OUT}
    assert 5_000 <= world.clock.moment() <= 6_500


@virtual
async def test_a_held_call_tells_of_a_lease_that_another_has(world: World) -> None:
    one = world.add(terms=Terms(job_lease_ttl_ms=3_000))
    await world.define(ONE)
    await world.start(one, "one")
    (leased,) = await world.lease(one, "work")
    assert await _watching(one, leased) == {leased.job.id: LostReason.EXPIRED}
    assert world.clock.moment() <= 4_100


@virtual
async def test_a_held_call_does_not_end_with_a_result_of_its_own(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    first, second = [await world.start(one, "one") for _ in range(2)]
    leased = await world.lease(one, "work", max_jobs=2)
    watching = _watching(one, *leased)
    await asyncio.sleep(1)
    await world.report(one, leased[0])
    assert await world.ended(first) == "succeeded"
    await asyncio.sleep(3)
    assert not watching.done()
    calls = one.store.calls["lost_leases"]
    await asyncio.sleep(3)
    assert one.store.calls["lost_leases"] - calls <= 4, "it is not asked about again"
    await one.inbox.cancel(second, reason=None, actor="caller")
    assert await watching == {leased[1].job.id: LostReason.CANCELLED}


@virtual
async def test_a_held_call_without_news_ends_after_its_time_or_when_the_server_drains(
    world: World,
) -> None:
    one = world.add()
    await world.define(ONE)
    await world.start(one, "one")
    (leased,) = await world.lease(one, "work")
    began = world.clock.moment()
    assert await _watching(one, leased, within_s=7) == {}
    assert world.clock.moment() - began in range(6_990, 7_010)
    watching = _watching(one, leased)
    await asyncio.sleep(1)
    one.scheduler.drain()
    assert await watching == {}
    assert await _watching(one, leased) == {}
    assert world.clock.moment() - began in range(7_990, 8_020)


@virtual
async def test_a_held_call_survives_an_outage_of_the_store(world: World) -> None:
    one, two = world.add(), world.add()
    await world.define(ONE)
    run_id = await world.start(one, "one")
    (leased,) = await world.lease(two, "work")
    watching = _watching(two, leased)
    two.store.always(Fault.ERROR, "lost_leases")
    await one.inbox.cancel(run_id, reason=None, actor="caller")
    await asyncio.sleep(5)
    assert not watching.done()
    two.store.always(Fault.NONE, "lost_leases")
    await asyncio.sleep(1.1)
    assert watching.result() == {leased.job.id: LostReason.CANCELLED}


@virtual
async def test_a_run_that_ends_well_rings_no_bell_for_revoked_jobs(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    rung: list[str] = []
    one.bus.listen(Bell.REVOKED, rung.append)
    run_id = await world.start(one, "one")
    await world.report(one, *await world.lease(one, "work"))
    assert await world.ended(run_id) == "succeeded"
    assert rung == []
    other = await world.start(one, "one")
    await one.inbox.cancel(other, reason=None, actor="caller")
    assert rung == [other]


# ── Many topics ──────────────────────────────────────────────────────────────────────────────────


class _Compared(str):
    """A topic that counts how often it is compared with another."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other: object) -> bool:
        _Compared.compared += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


@virtual
async def test_a_bell_costs_the_same_however_many_topics_others_wait_for(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    many = tuple(Topic(_Compared(f"other.{number}")) for number in range(1_000))
    waits = [
        asyncio.create_task(
            one.scheduler.lease(f"w{number}", many, max_jobs=1, wait_s=60, tenant=OTHER)
        )
        for number in range(20)
    ]
    await asyncio.sleep(0.1)
    _Compared.compared = 0
    one.bus.ring(Bell.READY, "work")
    await asyncio.sleep(0)
    assert _Compared.compared < len(waits)
    for wait in waits:
        wait.cancel()
    await asyncio.wait(waits)


@virtual
async def test_what_is_remembered_of_the_topics_of_workers_is_bounded(world: World) -> None:
    one = world.add()

    async def ask(worker_id: str, tenant: TenantId, *topics: str) -> None:
        named = tuple(map(Topic, topics))
        await one.scheduler.lease(worker_id, named, max_jobs=1, wait_s=0, tenant=tenant)

    def topics(tenant: TenantId) -> dict[str, set[Topic]]:
        seen = one.scheduler.workers()
        return {each.worker_id: set(each.topics) for each in seen if each.tenant == tenant}

    await ask("modest", ACME, "work")
    for number in range(30):
        await ask("restless", OTHER, *(f"t{number}.{each}" for each in range(100)))
    assert len(topics(OTHER)["restless"]) == 1_000
    assert "t29.99" in topics(OTHER)["restless"]
    for number in range(30):
        await ask(f"w{number}", OTHER, *(f"t.{number}.{each}" for each in range(1_000)))
    assert sum(map(len, topics(OTHER).values())) == 10_000
    assert len(topics(OTHER)["w29"]) == 1_000
    assert topics(OTHER)["w0"] == set()
    for tenant in map(TenantId, ("third", "fourth")):
        for number in range(10):
            await ask(f"w{number}", tenant, *(f"t.{number}.{each}" for each in range(1_000)))
    assert sum(len(each.topics) for each in one.scheduler.workers()) <= 20_000
    assert topics(ACME) == {"modest": {"work"}}
