"""Workers that wait for jobs: woken at once, one at a time, in turn, and never forgotten."""

from __future__ import annotations

import asyncio

import pytest

from stanchion.core.model import TenantId, Topic
from stanchion.core.workflow import ForEachSpec
from stanchion.ports.bus import Bell
from stanchion.services.scheduler import JobBatch
from tests.services.faulty_locks import Fault
from tests.services.stage import ACME, GLOBEX, Replica, World, job, virtual, workflow

ONE = workflow("one", step=job("work"))
FAN = workflow(
    "fan", each=ForEachSpec(for_each="${input.items}", topic=Topic("work"), input="${item}")
)


def waiting(
    replica: Replica,
    *topics: str,
    worker: str = "worker",
    max_jobs: int = 1,
    wait_s: float = 60,
    tenant: TenantId | None = None,
) -> asyncio.Task[JobBatch]:
    """A worker's long poll."""
    return asyncio.create_task(
        replica.scheduler.lease(
            worker,
            [Topic(topic) for topic in topics or ("work",)],
            max_jobs=max_jobs,
            wait_s=wait_s,
            tenant=tenant,
        )
    )


def asked(replica: Replica) -> int:
    """How often workers' requests reached the store."""
    return replica.store.calls["lease_jobs"]


# ── Bells ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("at", [0, 1])
@virtual
async def test_a_waiting_worker_has_a_new_job_at_once(world: World, at: int) -> None:
    replicas = [world.add(), world.add()]
    await world.define(ONE)
    poll = waiting(replicas[at])
    await asyncio.sleep(7.3)
    began = world.clock.moment()
    await world.start(replicas[0], "one")
    handed = await poll
    assert world.clock.moment() - began < 50
    assert len(handed.jobs) == 1
    assert 7_300 <= handed.waited_ms <= 7_350


@virtual
async def test_a_waiting_worker_has_the_next_steps_job_at_once(world: World) -> None:
    one, two = world.add(), world.add()
    await world.define(workflow("two", first=job("work"), second=job("play", "first")))
    await world.start(one, "two")
    leased = await world.lease(one, "work")
    poll = waiting(two, "play")
    await asyncio.sleep(7.3)
    began = world.clock.moment()
    await world.report(one, *leased)
    assert len((await poll).jobs) == 1
    assert world.clock.moment() - began < 50


@virtual
async def test_one_bell_wakes_one_worker(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    polls = [waiting(one, worker=f"worker-{number}") for number in range(50)]
    await asyncio.sleep(0.5)
    before = asked(one)
    await world.start(one, "one")
    await asyncio.sleep(0.2)
    assert [len(poll.result().jobs) for poll in polls if poll.done()] == [1]
    assert polls[0].done(), "the first in line goes first"
    # The one that got all it had asked for passes the bell on; the next finds nothing, and so on:
    # at most one look for each, and none twice.
    assert asked(one) - before <= 50


@virtual
async def test_a_worker_that_got_less_than_it_has_room_for_keeps_the_bell(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    polls = [waiting(one, worker=f"worker-{number}", max_jobs=2) for number in range(5)]
    await asyncio.sleep(0.5)
    before = asked(one)
    await world.start(one, "one")
    await asyncio.sleep(0.2)
    assert [len(poll.result().jobs) for poll in polls if poll.done()] == [1]
    assert asked(one) - before == 1


@virtual
async def test_one_bell_for_many_jobs_is_passed_on_until_all_are_handed_out(world: World) -> None:
    one = world.add()
    await world.define(FAN)
    polls = [waiting(one, worker=f"worker-{number}", max_jobs=2) for number in range(6)]
    await asyncio.sleep(0.5)
    await world.start(one, "fan", {"items": list(range(9))})
    await asyncio.sleep(0.1)
    assert [len(poll.result().jobs) for poll in polls if poll.done()] == [2, 2, 2, 2, 1]
    assert not polls[5].done()


@virtual
async def test_a_bell_for_other_topics_wakes_nobody(world: World) -> None:
    one = world.add()
    poll = waiting(one, "work")
    await asyncio.sleep(0.5)
    before = asked(one)
    one.bus.ring(Bell.READY, "play")
    await asyncio.sleep(0.1)
    assert asked(one) == before
    assert not poll.done()


@virtual
async def test_a_worker_of_one_tenant_does_not_swallow_anothers_bell(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    theirs = waiting(one, tenant=GLOBEX)
    anybodys = waiting(one)
    await asyncio.sleep(0.5)
    await world.start(one, "one")
    await asyncio.sleep(0.1)
    assert len((await anybodys).jobs) == 1
    assert not theirs.done()


@virtual
async def test_a_bell_passes_the_many_workers_of_another_tenant_in_one_step(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    theirs = [waiting(one, tenant=GLOBEX) for _ in range(50)]
    own = waiting(one, tenant=ACME)
    await asyncio.sleep(0.5)
    before = asked(one)
    await world.start(one, "one")
    assert len((await own).jobs) == 1
    assert asked(one) - before == 2
    # A job of theirs is a bell of its own.
    await world.define(ONE, tenant=GLOBEX)
    await world.start(one, "one", tenant=GLOBEX)
    await asyncio.sleep(0.1)
    assert sum(each.done() for each in theirs) == 1


@virtual
async def test_a_bell_reaches_its_worker_past_those_who_wait_for_other_topics_too(
    world: World,
) -> None:
    one = world.add()
    await world.define(ONE)
    theirs = waiting(one, "work", "play", tenant=GLOBEX)
    other = waiting(one, "play")
    right = waiting(one, "work")
    await asyncio.sleep(0.5)
    await world.start(one, "one")
    await asyncio.sleep(0.1)
    assert right.done()
    assert not theirs.done()
    assert not other.done()


@pytest.mark.parametrize("after_ms", range(5))
@virtual
async def test_a_worker_that_leaves_with_a_bell_in_its_hand_passes_it_on(
    world: World, after_ms: int
) -> None:
    one = world.add()
    await world.define(FAN)
    leaves = waiting(one)
    stays = waiting(one, worker="another")
    await asyncio.sleep(0.5)
    # Two jobs: the one that leaves may take one along, but not the news of the other.
    await world.start(one, "fan", {"items": [1, 2]})
    await asyncio.sleep(after_ms / 1000)
    leaves.cancel()
    await asyncio.sleep(0.1)
    assert stays.done()


@virtual
async def test_a_worker_whose_look_failed_passes_the_bell_on(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    fails = waiting(one)
    waits = waiting(one, worker="another")
    await asyncio.sleep(0.5)
    one.store.script("lease_jobs", Fault.ERROR)
    await world.start(one, "one")
    await asyncio.sleep(0.1)
    assert fails.exception() is not None
    assert waits.done()


@virtual
async def test_a_lost_bell_costs_a_second_at_most(world: World) -> None:
    one, two = world.add(), world.add()
    await world.define(ONE)
    one.bus.is_mute = two.bus.is_mute = True
    for pause_s in (0.1, 0.45, 0.8):
        poll = waiting(two)
        await asyncio.sleep(pause_s)
        began = world.clock.moment()
        await world.start(one, "one")
        await poll
        assert world.clock.moment() - began <= 1_050


@virtual
async def test_bells_are_heard_again_after_the_poll_met_a_bug(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    one.store.script("ready_topics", Fault.BUG)
    poll = waiting(one)
    await asyncio.sleep(5.3)
    began = world.clock.moment()
    await world.start(one, "one")
    await poll
    assert world.clock.moment() - began < 50


@virtual
async def test_nobody_asks_the_store_while_nobody_waits(world: World) -> None:
    one = world.add()
    await asyncio.sleep(60)
    assert one.store.calls["ready_topics"] == 0
    poll = waiting(one)
    await asyncio.sleep(10)
    assert not poll.done()
    assert 9 <= one.store.calls["ready_topics"] <= 10
    assert asked(one) == 1


# ── The end of a wait ────────────────────────────────────────────────────────────────────────────


@virtual
async def test_a_wait_ends_when_its_time_is_over(world: World) -> None:
    one = world.add()
    began = world.clock.moment()
    handed = await waiting(one, wait_s=3)
    assert handed.jobs == ()
    assert 3_000 <= world.clock.moment() - began <= 3_050
    assert await waiting(one, wait_s=0) == JobBatch((), 0)


@virtual
async def test_draining_ends_every_wait_and_lets_none_begin(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    polls = [waiting(one) for _ in range(20)]
    await asyncio.sleep(5)
    one.engine.drain()
    began = world.clock.moment()
    assert [(await poll).jobs for poll in polls] == [()] * 20
    assert (await waiting(one)).jobs == ()
    assert world.clock.moment() - began < 50
    await world.start(one, "one")
    assert len((await waiting(one)).jobs) == 1, "what is there is still handed out"


# ── Fairness ─────────────────────────────────────────────────────────────────────────────────────


@virtual
async def test_a_tenants_first_job_waits_one_round_behind_anothers_backlog(world: World) -> None:
    one = world.add(each_way_s=0)
    await world.define(FAN)
    await world.define(ONE, tenant=GLOBEX)
    await world.start(one, "fan", {"items": list(range(10_000))})
    order: list[TenantId] = []

    async def work() -> None:
        while True:
            handed = await one.scheduler.lease("w", [Topic("work")], max_jobs=1, wait_s=60)
            order.extend(leased.job.tenant for leased in handed.jobs)
            await asyncio.sleep(0.1)

    workers = [asyncio.create_task(work()) for _ in range(4)]
    await asyncio.sleep(1.05)
    handed_before = len(order)
    assert handed_before >= 30
    await world.start(one, "one", tenant=GLOBEX)
    await asyncio.sleep(0.2)
    place = order.index(GLOBEX)
    for worker in workers:
        worker.cancel()
    assert place - handed_before <= 1
    assert order.count(ACME) == len(order) - 1
