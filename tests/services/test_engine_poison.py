"""An event that we cannot handle: tried so often, then put aside with its cause, and mendable."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

import pytest

from stanchion.core.events import AttemptFailed
from stanchion.core.faults import WorkflowFaults
from stanchion.core.model import Failure, RunId, StepId, WorkflowId, WorkflowSource
from stanchion.core.plan import Plan
from stanchion.core.workflow import Workflow
from stanchion.ports.bus import Ack, Dead, Retry
from stanchion.ports.records import Commit, DeadLetterKind, LeasedJob
from stanchion.services.engine import Terms
from stanchion.services.plans import link_here
from tests.services.faulty_locks import Fault
from tests.services.stage import GLOBEX, Replica, World, job, under_lease, virtual, workflow

BAD = workflow("bad", step=job("work"))
GOOD = workflow("good", step=job("work"))
THREE = workflow("three", left=job("left"), right=job("right"), other=job("other"))


class Linking:
    """Links every workflow but one, until it is repaired."""

    def __init__(self) -> None:
        self.is_broken = True

    async def __call__(
        self, given: Workflow, others: Mapping[WorkflowId, Workflow], source: WorkflowSource
    ) -> Plan | WorkflowFaults:
        if given.id == BAD.id and self.is_broken:
            raise KeyError("no such colour")
        return await link_here(given, others, source)


async def _poisoned(world: World, linking: Linking, terms: Terms) -> tuple[Replica, RunId]:
    """A run that a replica began which is no more, with its result at one that cannot link it."""
    first, two = world.add(shares_calls=False), world.add(linker=linking, terms=terms)
    await world.define(BAD, GOOD)
    run_id = await world.start(first, "bad")
    leased = await world.lease(first, "work")
    first.kill()
    await world.report(two, *leased)
    return two, run_id


@pytest.mark.parametrize("failures_max", [1, 5])
@virtual
async def test_a_poison_event_is_tried_so_often_then_put_aside_and_replayed_once(
    world: World, failures_max: int
) -> None:
    linking = Linking()
    replica, run_id = await _poisoned(world, linking, Terms(poison_failures_max=failures_max))
    await asyncio.sleep(60)
    assert replica.store.calls["count_failure"] == failures_max
    (letter,) = (await world.store.list_dead_letters(None)).items
    assert (letter.kind, letter.run_id, letter.step_id) == (
        DeadLetterKind.EVENT,
        run_id,
        StepId("step"),
    )
    assert letter.cause == "KeyError: 'no such colour'"
    assert replica.metric("dead_letters_total") == 1
    assert (await world.run(run_id)).status == "running"
    assert await world.store.outbox_size() == 0

    linking.is_broken = False
    assert await replica.inbox.replay(letter.id, actor="operator") == letter
    assert await replica.inbox.replay(letter.id, actor="operator") is None
    assert await world.ended(run_id, within_s=1) == "succeeded"
    assert (await world.told(run_id)).count("step_succeeded step work-worker") == 1
    await world.assert_nothing_left()


@virtual
async def test_an_event_that_is_replayed_unmended_is_tried_anew_and_put_aside_again(
    world: World,
) -> None:
    linking = Linking()
    replica, run_id = await _poisoned(world, linking, Terms(poison_failures_max=3))
    await asyncio.sleep(60)
    (letter,) = (await world.store.list_dead_letters(None)).items
    await replica.inbox.replay(letter.id, actor="operator")
    await asyncio.sleep(60)
    (again,) = (await world.store.list_dead_letters(None)).items
    assert (again.id, again.event) == (letter.id, letter.event)
    assert replica.store.calls["count_failure"] == 6
    linking.is_broken = False
    await replica.inbox.replay(letter.id, actor="operator")
    assert await world.ended(run_id, within_s=1) == "succeeded"


@virtual
async def test_tries_are_further_and_further_apart_and_end_with_a_word_to_the_bus(
    world: World,
) -> None:
    replica, _ = await _poisoned(world, Linking(), Terms())
    await asyncio.sleep(60)
    *retries, last = [each.disposition for each in replica.bus.answers]
    delays = [each.delay_ms for each in retries if isinstance(each, Retry)]
    assert len(delays) == len(retries) == 3, "the first try was not the bus's"
    assert all(1 <= delay <= 1 + 200 * 2**tries for tries, delay in enumerate(delays, start=1))
    assert last == Dead("KeyError: 'no such colour'")


@virtual
async def test_runs_of_others_do_not_notice(world: World) -> None:
    replica, _ = await _poisoned(world, Linking(), Terms())
    await world.define(GOOD, tenant=GLOBEX)
    world.work(replica, "work")
    for _ in range(40):
        await asyncio.sleep(0.1)
        began = world.clock.moment()
        run_id = await world.start(replica, "good", tenant=GLOBEX)
        assert await world.ended(run_id, within_s=1) == "succeeded"
        assert world.clock.moment() - began <= 100


@virtual
async def test_an_outage_in_between_is_not_counted_against_the_event(world: World) -> None:
    linking = Linking()
    replica, run_id = await _poisoned(world, linking, Terms())
    await asyncio.sleep(0.5)
    counted = replica.store.calls["count_failure"]
    assert 1 <= counted < 5
    replica.store.always(Fault.ERROR, "load")
    await asyncio.sleep(30)
    assert replica.store.calls["count_failure"] == counted
    assert replica.metric("backend_error_retries_total") == pytest.approx(30, abs=3)
    replica.store.always(Fault.NONE, "load")
    linking.is_broken = False
    assert await world.ended(run_id, within_s=10) == "succeeded"
    await world.assert_nothing_left()


# ── One bad entry among good ones ────────────────────────────────────────────────────────────────


async def _one_bad_among_three(world: World) -> tuple[Replica, RunId, LeasedJob]:
    """Three entries that become known at once; the second makes the decision fail."""
    one = world.add()
    await world.define(THREE)
    run_id = await world.start(one, "three")
    ((left,), (right,), (other,)) = [
        await world.lease(one, topic) for topic in ("left", "right", "other")
    ]
    await world.locks.acquire(f"run/{run_id}", "another's", ttl_ms=3_000, within_ms=10)
    await world.report(one, left)
    bad = AttemptFailed(job_id=right.job.id, step_id=StepId("right"), error=cast("Failure", None))
    await world.store.post(run_id, bad, entry_id="bad")
    await world.report(one, other)
    return one, run_id, right


@virtual
async def test_what_came_before_a_bad_entry_is_applied_at_once_and_what_came_after_in_time(
    world: World,
) -> None:
    one, run_id, right = await _one_bad_among_three(world)
    await asyncio.sleep(3.8)
    run = await world.run(run_id)
    assert run.step(StepId("left")).status == "succeeded"
    assert run.step(StepId("other")).status == "running"
    await asyncio.sleep(20)
    assert (await world.run(run_id)).step(StepId("other")).status == "succeeded"
    (letter,) = (await world.store.list_dead_letters(None)).items
    assert letter.id == f"event:{run_id}:bad"
    assert letter.step_id == StepId("right")
    assert letter.cause.startswith("AttributeError: ")
    assert one.store.calls["count_failure"] == 5
    # The run is not stuck: its worker's own result is still good.
    await world.report(one, right)
    assert await world.ended(run_id, within_s=1) == "succeeded"


@virtual
async def test_a_bad_entry_can_be_cancelled_away(world: World) -> None:
    one, run_id, _ = await _one_bad_among_three(world)
    await asyncio.sleep(3.8)
    await one.inbox.cancel(run_id, reason=None, actor="caller")
    assert await world.ended(run_id, within_s=20) == "cancelled"


# ── Other faults of our own ──────────────────────────────────────────────────────────────────────


@virtual
async def test_an_event_that_the_store_cannot_take_is_put_aside_and_no_other(world: World) -> None:
    one = world.add()
    await world.define(THREE)
    run_id = await world.start(one, "three")
    leased = [job for topic in ("left", "right", "other") for job in await world.lease(one, topic)]
    one.store.chokes_on = lambda given: isinstance(given, Commit) and "odd" in repr(given)
    results = zip(leased, ("even", "odd", "even"), strict=True)
    await asyncio.gather(*(world.report(one, job, output=output) for job, output in results))
    await asyncio.sleep(60)
    run = await world.run(run_id)
    statuses = [run.step(StepId(each)).status for each in ("left", "right", "other")]
    assert statuses == ["succeeded", "running", "succeeded"]
    (letter,) = (await world.store.list_dead_letters(None)).items
    assert (letter.step_id, letter.cause) == ("right", "ValueError: cannot be written")
    assert one.store.calls["count_failure"] == 5
    one.store.chokes_on = lambda _given: False
    await one.inbox.replay(letter.id, actor="operator")
    assert await world.ended(run_id, within_s=1) == "succeeded"
    await world.assert_nothing_left()


@virtual
async def test_a_bug_outside_of_any_event_is_retried_and_spends_nothing(world: World) -> None:
    one = world.add()
    await world.define(under_lease(GOOD))
    run_id = await world.start(one, "good")
    leased = await world.lease(one, "work")
    one.store.script("load", *[Fault.BUG] * 10)
    await world.report(one, *leased)
    assert await world.ended(run_id, within_s=10) == "succeeded"
    assert one.store.calls["count_failure"] == 0
    assert isinstance(one.bus.answers[-1].disposition, Ack)
    await world.assert_nothing_left()
