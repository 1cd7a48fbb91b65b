"""More at once than fits into one look: it is taken in several, and nothing is left over."""

from __future__ import annotations

import asyncio

import pytest

from stanchion.core.events import CancelRequested
from stanchion.core.model import RunId, RunStatus, StepId, TenantId, Topic
from stanchion.core.queue import OnFull
from stanchion.core.workflow import DelaySpec, ForEachSpec, JobSpec
from stanchion.ports.records import Tenant
from stanchion.services.advance import NUDGED_MAX, Advancer
from stanchion.services.outbox import POLL_S, TIMERS_MAX
from tests.services.stage import ACME, World, job, under_lease, virtual, workflow

ONE = workflow("one", step=job("work"))
PAUSE = workflow("pause", cool=DelaySpec(delay_s=60))
FAN = workflow(
    "fan", each=ForEachSpec(for_each="${input.items}", topic=Topic("work"), input="${item}")
)


@virtual
async def test_results_beyond_what_one_commit_takes_are_applied_in_the_same_hold(
    world: World,
) -> None:
    one = world.add()
    await world.define(FAN)
    run_id = await world.start(one, "fan", {"items": list(range(1_000))})
    # They are dispatched in pieces of 250: each further piece is due at once.
    await asyncio.sleep(1.5)
    jobs = await world.lease(one, "work", max_jobs=1_000)
    assert len(jobs) == 1_000
    commits, holds = one.store.calls["commit"], one.locks.calls["acquire"]
    assert commits == 3
    await world.report(one, *jobs)
    assert await world.ended(run_id, within_s=1) == "succeeded"
    assert (await world.run(run_id)).output == {"each": ["done"] * 1_000}
    assert one.store.calls["commit"] == commits + 2
    assert one.locks.calls["acquire"] == holds + 1
    await world.assert_nothing_left()


@pytest.mark.parametrize(("has_bus", "within_s"), [(True, 0.45), (False, 1.0)])
@virtual
async def test_timers_that_are_due_together_are_all_fired_together(
    world: World, has_bus: bool, within_s: float
) -> None:
    one = world.add(each_way_s=0)
    await world.define(PAUSE)
    one.bus.is_away = not has_bus
    began = world.clock.moment()
    runs = [await world.start(one, "pause") for _ in range(1_100)]
    assert world.clock.moment() == began
    one.store.each_way_s = 0.001
    await asyncio.sleep(60 + within_s)
    assert {(await world.run(run_id)).status for run_id in runs} == {"succeeded"}
    await world.assert_nothing_left()


@virtual
async def test_commits_that_write_much_come_to_the_store_one_at_a_time(world: World) -> None:
    one, quiet = world.add(each_way_s=0), TenantId("quiet")
    copy = JobSpec(topic=Topic("work"), input="${input}", needs=(StepId("cool"),))
    await world.define(workflow("copy", cool=DelaySpec(delay_s=60), copy=copy))
    await world.define(PAUSE, tenant=quiet)
    for _ in range(20):
        await world.start(one, "copy", {"doc": "x" * 200_000})
    late = await world.start(one, "pause", tenant=quiet)
    under_way: list[int] = [0]

    def heard(verb: str, is_done: bool) -> None:
        if verb in {"commit", "settle"}:
            under_way.append(under_way[-1] + (-1 if is_done else 1))

    one.store.on_call = heard
    one.store.each_way_s = 0.010
    await asyncio.sleep(60 + POLL_S + 0.15)
    assert (await world.run(late)).status == "succeeded"
    await asyncio.sleep(2)
    assert len(await world.lease(one, "work", max_jobs=100)) == 20
    # One of the loud tenant, and that of the quiet one.
    assert max(under_way) == 2


@virtual
async def test_what_is_due_beyond_one_look_does_not_line_up_at_a_bus_without_turns(
    world: World,
) -> None:
    one = world.add(each_way_s=0)
    one.bus.has_turns = False
    await world.define(PAUSE)
    runs = [await world.start(one, "pause") for _ in range(1_100)]
    one.store.each_way_s = 0.001
    await asyncio.sleep(60 + 0.45)
    assert {(await world.run(run_id)).status for run_id in runs} == {"succeeded"}
    assert one.bus.published == 0
    # Once nothing is left over, the bus gets the rows again.
    last = await world.start(one, "pause")
    assert await world.ended(last, within_s=61) == "succeeded"
    assert one.bus.published == 1
    await world.assert_nothing_left()


@pytest.mark.parametrize("has_turns", [True, False])
@virtual
async def test_a_timer_of_another_tenant_does_not_wait_behind_thousands(
    world: World, has_turns: bool
) -> None:
    one, quiet = world.add(each_way_s=0), TenantId("quiet")
    one.bus.has_turns = has_turns
    await world.define(PAUSE)
    await world.define(PAUSE, tenant=quiet)
    crowd = [await world.start(one, "pause") for _ in range(2_000)]
    await asyncio.sleep(0.001)
    late = await world.start(one, "pause", tenant=quiet)
    one.store.each_way_s = 0.01
    await asyncio.sleep(60 + POLL_S + 0.15)
    assert (await world.run(late)).status == "succeeded"
    ended = [(await world.run(run_id)).status for run_id in crowd].count(RunStatus.SUCCEEDED)
    assert ended < len(crowd)  # they are still under way
    await asyncio.sleep(10)
    assert {(await world.run(run_id)).status for run_id in crowd} == {"succeeded"}
    await world.assert_nothing_left()


@virtual
async def test_a_timer_does_not_wait_until_the_calls_of_another_tenant_have_ended(
    world: World,
) -> None:
    one, quiet = world.add(each_way_s=0), TenantId("quiet")
    await world.define(ONE)
    await world.define(PAUSE, tenant=quiet)
    late = await world.start(one, "pause", tenant=quiet)
    crowd = [await world.start(one, "one") for _ in range(3_000)]
    await asyncio.sleep(58)
    one.store.each_way_s = 0.1
    for run_id in crowd:
        await world.store.post(run_id, CancelRequested(actor="test"), entry_id="cancel")
    await asyncio.sleep(6)
    assert await one.bus.pending() > 2 * TIMERS_MAX
    assert (await world.run(late)).status == "succeeded"


@virtual
async def test_a_replica_that_was_behind_does_not_hurry_while_the_store_is_away(
    world: World,
) -> None:
    one = world.add(each_way_s=0)
    await world.define(PAUSE)
    runs = [await world.start(one, "pause") for _ in range(2 * TIMERS_MAX)]
    one.store.each_way_s = 0.01
    await asyncio.sleep(60.25)  # some have fired, and more are due
    assert RunStatus.SUCCEEDED not in {(await world.run(run_id)).status for run_id in runs[-9:]}
    one.store.away()
    tries = one.store.calls["fire_timers"]
    await asyncio.sleep(5)
    assert one.store.calls["fire_timers"] - tries <= 5 / POLL_S + 1
    one.store.back()
    await asyncio.sleep(10)
    assert {(await world.run(run_id)).status for run_id in runs} == {"succeeded"}


@virtual
async def test_a_call_that_is_still_being_handled_is_not_handled_twice(world: World) -> None:
    one = world.add()
    await world.define(under_lease(ONE))
    run_id = await world.start(one, "one")
    leased = await world.lease(one, "work")
    # The row is due, published, held for five seconds, due again, and published again.
    one.store.script("load", lambda: asyncio.sleep(8))
    await world.report(one, *leased)
    assert await world.ended(run_id, within_s=10) == "succeeded"
    assert one.bus.published == 2
    assert one.metric("duplicate_publishes_total") == 1
    assert one.store.calls["commit"] == 1
    assert one.locks.calls["acquire"] == 1
    await world.assert_nothing_left()


@virtual
async def test_runs_that_a_raised_cap_promotes_are_not_all_decided_on_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, nudged = world.add(), list[RunId]()
    await world.define(PAUSE)
    await world.store.put_tenant(
        ACME, Tenant(max_concurrent_runs=1, on_full=OnFull.QUEUE, queue_max=300)
    )
    runs = [await world.start(one, "pause") for _ in range(300)]
    nudge = Advancer.nudge

    def note(advancer: Advancer, run_id: RunId) -> None:
        nudged.append(run_id)
        nudge(advancer, run_id)

    monkeypatch.setattr(Advancer, "nudge", note)
    # The replica that raises the cap goes on no further: decisions promote the others.
    await world.store.put_tenant(ACME, Tenant(max_concurrent_runs=None, on_full=OnFull.QUEUE))
    await asyncio.sleep(5)
    assert await world.store.queued_runs(ACME) == 0
    assert 0 < len(nudged) <= 3 * NUDGED_MAX
    await asyncio.sleep(60)
    assert {(await world.run(run_id)).status for run_id in runs} == {"succeeded"}
    await world.assert_nothing_left()
