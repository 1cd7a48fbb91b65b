"""A backend is away: what can go on goes on, what waits is not lost, and all of it comes back."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from msgspec.structs import replace

from stanchion.core.model import Risk, RunId, StepId, Topic
from stanchion.core.workflow import DelaySpec, ForEachSpec
from stanchion.ports.bus import Retry
from stanchion.ports.errors import BackendError
from stanchion.services.engine import Terms
from stanchion.services.outbox import POLL_S, TIMERS_MAX
from tests.services.faulty_locks import Fault
from tests.services.stage import GLOBEX, Replica, World, job, under_lease, virtual, workflow

OPEN = (Risk.LOW, Risk.STANDARD)
CLOSED = (Risk.HIGH, Risk.CRITICAL)
ONE = workflow("one", step=job("work"))
FAN = workflow(
    "fan", each=ForEachSpec(for_each="${input.items}", topic=Topic("work"), input="${item}")
)
PAUSE = workflow("pause", cool=DelaySpec(delay_s=5), then=job("work", "cool"))
RECOVERED_S = 10.0


async def _assert_each_item_once(world: World, run_id: RunId, items: int) -> None:
    told = Counter(await world.told(run_id))
    once = [told[f"item_succeeded each[{item}] work-worker"] for item in range(items)]
    assert once == [1] * items


# ── The lock store ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", [Fault.ERROR, Fault.HANG])
@pytest.mark.parametrize("risk", OPEN)
@virtual
async def test_without_locks_the_mild_classes_go_on_and_duplicates_are_bounded(
    world: World, risk: Risk, how: Fault
) -> None:
    one, two = world.add(), world.add()
    await world.define(under_lease(replace(FAN, risk=risk)))
    for replica in (one, two):
        replica.locks.always(how, "acquire", "renew", "release", "ping")
    run_id = await world.start(one, "fan", {"items": list(range(40))})
    for replica in (one, two, one, two):
        world.work(replica, "work", max_jobs=2)
    assert await world.ended(run_id, within_s=6) == "succeeded"
    await _assert_each_item_once(world, run_id, 40)
    fallbacks = [each.metric("workflow_lock_fallback_total", risk=risk) for each in (one, two)]
    assert min(fallbacks) >= 1
    # Both were at it at once: the commit found out, and each time one of the two went on.
    conflicts = sum(each.metric("commit_conflicts_total") for each in (one, two))
    tries = sum(each.store.calls["items_at"] for each in (one, two))
    assert conflicts <= tries / 2
    missed = sum(
        each.metric("settle_misses_total", cause=cause)
        for each in (one, two)
        for cause in ("changed", "inbox")
    )
    assert conflicts + missed >= 1 or how is Fault.HANG
    for replica in (one, two):
        replica.locks_away(is_away=False)
    await world.assert_nothing_left()


@pytest.mark.parametrize("risk", CLOSED)
@virtual
async def test_without_locks_the_strict_classes_wait_and_finish_when_they_are_back(
    world: World, risk: Risk
) -> None:
    one, two = world.add(), world.add()
    await world.define(replace(ONE, risk=risk))
    run_id = await world.start(one, "one")
    leased = await world.lease(one, "work")
    one.locks_away()
    two.locks_away()
    await world.report(one, *leased)
    assert await world.ended(run_id, within_s=30) == "running"

    answers = sorted(each for replica in (one, two) for each in replica.bus.answers)
    delays = [each.disposition.delay_ms for each in answers if isinstance(each.disposition, Retry)]
    assert len(answers) == len(delays) == pytest.approx(30, abs=4)
    assert 800 <= min(delays) < 950
    assert 1_050 < max(delays) <= 1_200
    assert sum(each.metric("backend_error_retries_total") for each in (one, two)) == len(delays)
    for each in (one, two):
        assert each.metric("workflow_lock_fallback_total", risk=risk) == 0
        assert each.metric("lock_busy_retries_total") == 0
        assert each.store.calls["commit"] == each.store.calls["count_failure"] == 0

    one.locks_away(is_away=False)
    two.locks_away(is_away=False)
    assert await world.ended(run_id, within_s=4) == "succeeded"
    await world.assert_nothing_left()


@virtual
async def test_runs_that_wait_for_the_lock_store_do_not_stop_the_timers_of_others(
    world: World,
) -> None:
    one = world.add()
    await world.define(replace(ONE, risk=Risk.HIGH))
    await world.define(PAUSE, tenant=GLOBEX)
    waiting = [await world.start(one, "one") for _ in range(TIMERS_MAX + 10)]
    leased = await world.lease(one, "work", max_jobs=len(waiting))
    one.locks_away()
    await world.report(one, *leased)
    await asyncio.sleep(1)
    assert await one.bus.pending() == len(waiting)
    run_id = await world.start(one, "pause", tenant=GLOBEX)
    world.work(one, "work")
    assert await world.ended(run_id, within_s=7) == "succeeded"
    calls = one.store.calls["fire_timers"]
    await asyncio.sleep(10)
    assert one.store.calls["fire_timers"] - calls <= 10 / POLL_S
    one.locks_away(is_away=False)
    for each in waiting:
        assert await world.ended(each, within_s=RECOVERED_S) == "succeeded"


@pytest.mark.parametrize("risk", [Risk.STANDARD, Risk.HIGH])
@virtual
async def test_a_lease_lost_in_the_middle_stops_the_strict_classes_and_not_the_mild(
    world: World, risk: Risk
) -> None:
    one = world.add(terms=Terms(run_lease_ttl_ms=3_000))
    await world.define(replace(ONE, risk=risk))
    run_id = await world.start(one, "one")
    leased = await world.lease(one, "work")
    await world.report(one, *leased)
    # The lease was had, and then nobody could be asked; the store takes its time.
    one.store.each_way_s = 2
    await asyncio.sleep(0)
    one.locks.always(Fault.ERROR, "renew", "release", "ping")
    await asyncio.sleep(12)
    one.store.each_way_s = 0.001
    fenced = risk is Risk.HIGH
    assert one.metric("workflow_run_lock_abandoned_total", risk=risk) == (1 if fenced else 0)
    assert (await world.run(run_id)).status == ("running" if fenced else "succeeded")
    one.locks_away(is_away=False)
    assert await world.ended(run_id, within_s=RECOVERED_S) == "succeeded"
    await asyncio.sleep(3)
    await world.assert_nothing_left()


@virtual
async def test_fallbacks_and_collisions_close_a_class_that_was_open(world: World) -> None:
    one, two = world.add(), world.add()
    await world.define(FAN, replace(ONE, risk=Risk.LOW))
    await one.services.settings.patch(
        {"escalation": {"window_s": 60, "dwell_s": 60}}, actor="operator"
    )
    for replica in (one, two):
        replica.locks_away()
        for _ in range(2):
            world.work(replica, "work", max_jobs=2)
    runs = []
    for _ in range(16):
        runs.append(await world.start(one, "fan", {"items": list(range(10))}))
        await asyncio.sleep(5)
    escalating = [replica.services.escalating for replica in (one, two)]
    assert all(each.closes(Risk.STANDARD) for each in escalating)
    assert not any(each.closes(Risk.LOW) for each in escalating)
    assert one.metric("escalation_level") == 1
    # What is closed waits; what stays open does not.
    waits = await world.start(one, "fan", {"items": [1]})
    goes_on = await world.start(one, "one")
    assert await world.ended(goes_on, within_s=5) == "succeeded"
    assert await world.ended(waits, within_s=5) == "running"
    for replica in (one, two):
        replica.locks_away(is_away=False)
    for run_id in (*runs, waits):
        assert await world.ended(run_id, within_s=RECOVERED_S) == "succeeded"
    await world.assert_nothing_left()


# ── The store ────────────────────────────────────────────────────────────────────────────────────


@virtual
async def test_a_caller_is_told_when_the_store_is_away(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    run_id = await world.start(one, "one")
    (leased,) = await world.lease(one, "work")
    one.store.away()
    with pytest.raises(BackendError):
        await world.report(one, leased)
    with pytest.raises(BackendError):
        await one.inbox.cancel(run_id, reason=None, actor="caller")
    with pytest.raises(BackendError):
        await one.inbox.decide(run_id, StepId("step"), approve=True, comment=None, actor="reviewer")
    with pytest.raises(BackendError):
        await world.lease(one, "work")
    with pytest.raises(BackendError):
        await one.scheduler.renew("w", [])
    with pytest.raises(BackendError):
        await one.waiters.finished(run_id, within_s=10)
    one.store.back()
    await world.report(one, leased)
    assert await world.ended(run_id, within_s=1) == "succeeded"


@virtual
async def test_a_result_taken_just_before_the_store_went_away_is_applied_when_it_is_back(
    world: World,
) -> None:
    one = world.add()
    await world.define(under_lease(ONE))
    run_id = await world.start(one, "one")
    leased = await world.lease(one, "work")
    await world.report(one, *leased)
    one.store.away()
    await asyncio.sleep(3)
    assert (await world.run(run_id)).status == "running"
    one.store.back()
    assert await world.ended(run_id, within_s=RECOVERED_S) == "succeeded"
    await world.assert_nothing_left()


@pytest.mark.parametrize("how", [Fault.ERROR, Fault.HANG, Fault.LOST_REPLY])
@pytest.mark.parametrize("begins_ms", [95, 300, 333])
@virtual
async def test_nothing_is_lost_while_the_store_is_away(
    world: World, how: Fault, begins_ms: int, caplog: pytest.LogCaptureFixture
) -> None:
    terms = Terms(job_lease_ttl_ms=4_000, run_lease_ttl_ms=6_000)
    one, two = world.add(terms=terms), world.add(terms=terms)
    await world.define(FAN, PAUSE)
    fan = await world.start(one, "fan", {"items": list(range(60))})
    pause = await world.start(two, "pause")
    for replica in (one, two, one, two):
        world.work(replica, "work", takes_s=0.04, max_jobs=2)
    await asyncio.sleep(begins_ms / 1000)
    assert (await world.run(fan)).status == "running"
    for replica in (one, two):
        replica.store.away(how)
    await asyncio.sleep(3)
    for replica in (one, two):
        replica.store.back()
    assert await world.ended(fan, within_s=RECOVERED_S) == "succeeded"
    await _assert_each_item_once(world, fan, 60)
    assert await world.ended(pause, within_s=RECOVERED_S) == "succeeded"
    await asyncio.sleep(6)
    await world.assert_nothing_left()
    assert "loop_failed" not in caplog.messages, "an outage is not a bug"


@virtual
async def test_one_replicas_bad_line_does_not_hold_up_the_others(world: World) -> None:
    one, two = world.add(shares_calls=False), world.add(shares_calls=False)
    await world.define(under_lease(ONE))
    run_id = await world.start(one, "one")
    leased = await world.lease(one, "work")
    await world.report(one, *leased)
    one.store.away(Fault.HANG)
    assert await world.ended(run_id, within_s=3) == "succeeded"
    assert two.metric("runs_finished_total", status="succeeded") == 1


# ── The bus ──────────────────────────────────────────────────────────────────────────────────────


async def _delayed(world: World, replica: Replica) -> float:
    """How long a run takes that needs a timer and a busy lock overcome."""
    run_id = await world.start(replica, "pause")
    await world.locks.acquire(f"run/{run_id}", "another's", ttl_ms=7_000, within_ms=10)
    began = world.clock.moment()
    assert await world.ended(run_id, within_s=20) == "succeeded"
    return (world.clock.moment() - began) / 1000


@virtual
async def test_without_a_bus_runs_still_finish_and_afterwards_it_is_used_again(
    world: World,
) -> None:
    one, two = world.add(), world.add()
    await world.define(PAUSE)
    world.work(one, "work")
    world.work(two, "work")
    with_bus_s = await _delayed(world, one)
    assert one.bus.published + two.bus.published > 0

    for replica in (one, two):
        replica.bus.is_away = True
        replica.bus.published = 0
    began = world.clock.moment()
    runs = [await world.start(one, "pause") for _ in range(5)]
    without_bus_s = await _delayed(world, two)
    assert without_bus_s <= with_bus_s + 3
    for run_id in runs:
        assert await world.ended(run_id, within_s=5) == "succeeded"
    await asyncio.sleep(30 - (world.clock.moment() - began) / 1000)
    assert one.bus.published + two.bus.published == 0

    for replica in (one, two):
        replica.bus.is_away = False
    await asyncio.sleep(2)
    await _delayed(world, one)
    assert one.bus.published + two.bus.published > 0
    for replica in (one, two):
        assert replica.metric("dead_letters_total") == 0
        assert replica.store.calls["count_failure"] == 0
    await world.assert_nothing_left()


@virtual
async def test_a_busy_run_is_tried_again_at_its_pace_without_a_bus(world: World) -> None:
    one = world.add()
    await world.define(under_lease(ONE))
    run_id = await world.start(one, "one")
    await world.locks.acquire(f"run/{run_id}", "another's", ttl_ms=60_000, within_ms=10)
    one.bus.is_away = True
    await world.report(one, *await world.lease(one, "work"))
    await asyncio.sleep(50)
    # Each try waits its half second, and for whoever looks at the outbox: not less, not five.
    assert 50 / 1.0 <= one.metric("lock_busy_retries_total") <= 50 / 0.4
    assert await world.ended(run_id, within_s=12) == "succeeded"
