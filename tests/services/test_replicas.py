"""Replicas report what they are, and know which of them do not report."""

from __future__ import annotations

import asyncio

from stanchion import __version__
from stanchion.core.model import TenantId, Topic
from stanchion.ports.records import JobLease
from stanchion.services.replicas import SeenWorker
from tests.services.faulty_locks import Fault
from tests.services.stage import ACME, Replica, World, job, virtual, workflow

ONE = workflow("one", step=job("work"))


async def _workers(replica: Replica, of: str) -> list[SeenWorker]:
    """The workers that one replica has seen, as another knows them."""
    view = await replica.services.replicas.read()
    (seen,) = [each for each in view.replicas if each.replica == of]
    return list(seen.summary.workers)


@virtual
async def test_each_replica_reports_itself_and_reads_all(world: World) -> None:
    one = world.add()
    await asyncio.sleep(5)
    two = world.add()
    two.services.replicas.contribute("figures", lambda: {"n": 7})
    await asyncio.sleep(4)
    view = await one.services.replicas.read()
    first, second = view.replicas
    assert (first.replica, second.replica) == ("replica-1", "replica-2")
    assert first.summary.version == second.summary.version == __version__
    assert 5_000 <= second.summary.started_at - first.summary.started_at <= 5_010
    assert 0 <= view.at - second.seen_at <= 3_100
    assert second.summary.parts["figures"] == {"n": 7}
    assert (second.summary.store, second.summary.locks, second.summary.bus) == ("ok", "ok", "ok")
    assert view.missing == ()


@virtual
async def test_a_slow_answer_of_the_store_is_no_difference_of_clocks(world: World) -> None:
    one = world.add(each_way_s=0.8)
    await asyncio.sleep(10)
    (seen,) = (await one.services.replicas.read()).replicas
    assert abs(seen.summary.clock_offset_ms) <= 2


@virtual
async def test_since_when_a_backend_is_away_is_by_the_stores_clock_once_it_was_read(
    world: World,
) -> None:
    one = world.add()
    one.store.always(Fault.HANG, "now", "report_replica")
    at = world.clock.now()
    await one.services.replicas.read()
    world.clock.step_ms += 3_600_000
    await asyncio.sleep(3)
    since = one.services.replicas.down_since("store")
    assert since is not None
    assert at <= since <= at + 3_000


@virtual
async def test_a_replica_that_is_killed_is_missing_and_later_forgotten(world: World) -> None:
    one, two = world.add(), world.add()
    await asyncio.sleep(1)
    two.kill()
    await asyncio.sleep(14)
    assert (await one.services.replicas.read()).missing == ()
    await asyncio.sleep(3)
    assert (await one.services.replicas.read()).missing == ("replica-2",)
    await asyncio.sleep(600)
    view = await one.services.replicas.read()
    assert [each.replica for each in view.replicas] == ["replica-1"]


@virtual
async def test_a_replica_that_stops_in_order_is_removed(world: World) -> None:
    one, two = world.add(), world.add()
    await asyncio.sleep(1)
    two.task.cancel()
    await two.engine.close()
    view = await one.services.replicas.read()
    assert [each.replica for each in view.replicas] == ["replica-1"]


@virtual
async def test_an_idle_replica_writes_once_in_three_seconds(world: World) -> None:
    one = world.add()
    await asyncio.sleep(30)
    assert 9 <= one.store.calls["report_replica"] <= 10


@virtual
async def test_a_lock_store_that_is_down_is_reported_by_its_replica(world: World) -> None:
    one, two = world.add(), world.add()
    two.locks.always(Fault.ERROR, "inspect")
    await asyncio.sleep(4)
    first, second = (await one.services.replicas.read()).replicas
    assert (first.summary.locks, second.summary.locks) == ("ok", "unavailable")


@virtual
async def test_workers_are_reported_with_topics_and_leases(world: World) -> None:
    one, two = world.add(), world.add()
    await world.define(ONE)
    await world.start(one, "one")
    scheduler = two.scheduler
    handed = await scheduler.lease(
        "w", [Topic("work"), Topic("other")], max_jobs=1, wait_s=0, tenant=ACME, version="1.2"
    )
    (leased,) = handed.jobs
    await asyncio.sleep(4)
    (worker,) = await _workers(one, "replica-2")
    assert (worker.worker_id, worker.tenant, worker.version) == ("w", ACME, "1.2")
    assert (worker.topics, worker.jobs) == ((Topic("other"), Topic("work")), 1)
    assert world.clock.now() - worker.last_seen_at >= 4_000

    await scheduler.renew("w", [JobLease(leased.job.id, leased.fence)], tenant=ACME)
    await scheduler.finished("w", [JobLease(leased.job.id, leased.fence)], tenant=ACME)
    await asyncio.sleep(4)
    (worker,) = await _workers(one, "replica-2")
    assert worker.jobs == 0
    assert world.clock.now() - worker.last_seen_at <= 4_100

    # One that waits for jobs is seen all the time.
    waiting = asyncio.create_task(scheduler.lease("v", [Topic("x")], max_jobs=1, wait_s=60))
    await asyncio.sleep(40)
    (view,) = [each for each in await _workers(one, "replica-2") if each.worker_id == "v"]
    assert world.clock.now() - view.last_seen_at <= 3_100
    waiting.cancel()
    await asyncio.sleep(700)
    assert await _workers(one, "replica-2") == []


@virtual
async def test_the_last_five_hundred_workers_of_a_tenant_are_remembered(world: World) -> None:
    one = world.add()
    for number in range(501):
        await one.scheduler.lease(f"w-{number}", [Topic("q")], max_jobs=1, wait_s=0, tenant=ACME)
    known = {each.worker_id for each in one.scheduler.workers()}
    assert known == {f"w-{number}" for number in range(1, 501)}


@virtual
async def test_a_tenant_with_many_workers_displaces_no_other_tenants(world: World) -> None:
    one = world.add()
    quiet, loud = TenantId("quiet"), TenantId("loud")
    await one.scheduler.lease("q", [Topic("q")], max_jobs=1, wait_s=0, tenant=quiet)
    for number in range(600):
        topics = [Topic(f"{'t' * 150}-{number}-{each}") for each in range(20)]
        await one.scheduler.lease(f"w-{number}", topics, max_jobs=1, wait_s=0, tenant=loud)
    (only,) = (await one.services.replicas.read()).replicas
    assert "q" in [each.worker_id for each in only.summary.workers]
    assert "q" in [each.topic for each in only.summary.topics]
    assert only.summary.left_out > 0
    assert len(only.summary.workers) < 100
