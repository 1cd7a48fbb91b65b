"""Schedules on several replicas: one run for each tick, through kills, pauses and full tenants."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from stanchion.core.audit import AuditEntry
from stanchion.core.model import Instant, RunId, TenantId, WorkflowId
from stanchion.core.schedule import (
    SCHEDULES_BYTES_MAX,
    SCHEDULES_MAX,
    CatchUp,
    MissedTick,
    Overlap,
    Schedule,
    ScheduleSpec,
    TickOutcome,
    next_ticks,
    waiting_tick,
)
from stanchion.ports.records import RunFilter, Tenant
from stanchion.services import schedules as module
from stanchion.services.gate_answers import RunStarted
from stanchion.services.schedules import READ_S, TooManySchedules
from tests.services.stage import ACME, Replica, World, job, virtual, workflow

ONE = workflow("one", step=job("work"))
AUDIT = AuditEntry(action="schedule.put", actor="test", subject="schedule/s", tenant=ACME)
LOCKED = Tenant(admission={"strategy": "lock"})


async def put(one: Replica, **members: Any) -> Schedule:  # noqa: ANN401 - of any member
    spec = ScheduleSpec(workflow_id=WorkflowId("one"), **({"every_s": 60} | members))
    assert await one.services.schedules.faults(ACME, spec) == []
    return await one.services.schedules.put(ACME, "s", spec, AUDIT)


async def stored(world: World) -> Schedule:
    found = await world.replicas[-1].services.schedules.get(ACME, "s")
    assert found is not None
    return found


async def runs(world: World) -> list[str]:
    page = await world.store.list_runs(ACME, only=RunFilter(), limit=1_000)
    return [each.id for each in page.items]


@virtual
async def test_two_replicas_start_one_run_a_tick(world: World) -> None:
    one, _two = world.add(), world.add()
    await world.define(ONE)
    world.work(one, "work")
    await put(one)
    await asyncio.sleep(60 * 5 + 5)
    schedule = await stored(world)
    assert len(await runs(world)) == len(schedule.runs) == 5
    assert {each.run_id for each in schedule.runs} == set(await runs(world))
    ticks = [each.tick for each in schedule.runs]
    assert {(a - b) for a, b in pairwise(ticks)} == {60_000}
    assert schedule.missed == ()
    run = await world.run(schedule.runs[0].run_id)
    # Its author may not approve what it asks for.
    assert run.starter == "test"


@virtual
async def test_a_replica_that_was_killed_in_the_moment_of_a_tick_loses_and_doubles_none(
    world: World,
) -> None:
    doomed, other = world.add(), world.add()
    await world.define(ONE)
    world.work(other, "work")
    await put(doomed)
    killed = False

    def kill(call: str, is_done: bool) -> None:
        nonlocal killed
        if call == "admit" and is_done and not killed:
            killed = True
            doomed.kill()  # the run is admitted, and its schedule's document is not written

    doomed.on_call(kill)
    await asyncio.sleep(60 * 3 + 5)
    schedule = await stored(world)
    assert len(await runs(world)) == len(schedule.runs) == 3


@virtual
async def test_a_tick_whose_try_had_no_answer_is_not_missed_if_it_has_a_run(world: World) -> None:
    doomed = world.add()
    await world.define(ONE)
    await put(doomed, overlap=Overlap.ALLOW)
    since = (await stored(world)).since

    def kill(call: str, is_done: bool) -> None:
        if call == "admit" and is_done:
            doomed.kill()

    doomed.on_call(kill)
    await asyncio.sleep(60 * 3 + 5)  # two more ticks pass before another replica looks
    world.add()
    await asyncio.sleep(10)  # it leaves the tick to the other replica for five seconds
    schedule = await stored(world)
    first, second, third = (Instant(since + count * 60_000) for count in (1, 2, 3))
    assert [each.tick for each in schedule.runs] == [third, first]
    assert [each.tick for each in schedule.missed] == [second]
    assert ticks(world.replicas[-1]) == {"started": 2, "late": 1}
    assert {each.run_id for each in schedule.runs} == set(await runs(world))


@virtual
async def test_a_run_that_starts_after_its_tick_was_given_up_is_recorded(world: World) -> None:
    slow = world.add()
    await world.define(ONE)
    await world.store.put_tenant(ACME, Tenant(max_concurrent_runs=0))
    await put(slow, overlap=Overlap.ALLOW)
    await asyncio.sleep(125)  # the first tick was refused, and is missed
    schedule = await stored(world)
    (missed,) = schedule.missed
    await world.store.put_tenant(ACME, Tenant(max_concurrent_runs=10))
    service, name = slow.services.schedules, (ACME, "s")
    await service._record(name, missed.tick, RunId("r1"))  # noqa: SLF001 - as after a pause
    await service._record(name, missed.tick, RunId("r1"))  # noqa: SLF001 - likewise
    schedule = await stored(world)
    assert schedule.missed == ()
    assert schedule.missed_total == 0
    assert [each.tick for each in schedule.runs].count(missed.tick) == 1
    assert ticks(slow) == {"refused": 1, "started": len(schedule.runs)}


@virtual
@pytest.mark.parametrize("is_admitted", [True, False])
async def test_a_tick_that_a_dead_replica_tried_is_listed_when_the_schedule_changes(
    world: World, is_admitted: bool
) -> None:
    doomed = world.add()
    await world.define(ONE)
    await put(doomed)
    tick = Instant((await stored(world)).since + 60_000)

    def kill(call: str, is_done: bool) -> None:
        if call == "admit" and is_done is is_admitted:
            doomed.kill()

    doomed.on_call(kill)
    await asyncio.sleep(61)
    await put(world.add(), paused=True)  # within the time that the tick is left to the dead one
    schedule = await stored(world)
    assert [each.run_id for each in schedule.runs] == await runs(world)
    assert len(schedule.runs) == is_admitted
    ticks = [each.tick for each in schedule.runs] + [each.tick for each in schedule.missed]
    assert ticks == [tick]


@virtual
async def test_two_replicas_do_not_both_take_over_the_tick_of_a_dead_one(world: World) -> None:
    """Found by the simulator (mixed, day 52038): one was refused, the other had its run."""
    dead = world.add()
    await world.define(ONE)
    await put(dead, every_s=5, overlap=Overlap.ALLOW)
    await world.store.put_tenant(ACME, Tenant(max_concurrent_runs=0))
    dead.on_call(lambda call, _is_done: dead.kill() if call == "admit" else None)
    await asyncio.sleep(6)
    refused, doomed = world.add(), world.add()

    async def make_room() -> None:
        await asyncio.sleep(1)  # the other one is refused meanwhile
        await world.store.put_tenant(ACME, Tenant(max_concurrent_runs=10))

    def kill(call: str, is_done: bool) -> None:
        if call == "admit" and is_done:
            doomed.kill()  # the run is admitted, and its schedule's document is not written

    doomed.store.script("admit", make_room)
    doomed.on_call(kill)
    await asyncio.sleep(12)
    schedule = await refused.services.schedules.get(ACME, "s")
    assert schedule is not None
    assert len(schedule.runs) == len(await runs(world)) > 0


@virtual
async def test_a_paused_replica_with_an_old_view_starts_nothing_twice(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    world.work(one, "work")
    await put(one, overlap=Overlap.ALLOW)
    old = await stored(world)
    await asyncio.sleep(60 * 3 + 5)
    assert len(await runs(world)) == 3
    # Days later the keys of these runs are forgotten, and a replica still has the old document.
    accounts = world.store._state.accounts  # noqa: SLF001 - as after a day
    for account in accounts.values():
        account.keys.clear()
    name, tick = (ACME, "s"), Instant(old.since + 60_000)
    await one.services.schedules._start(name, old, 1, tick)  # noqa: SLF001 - as after a long pause
    assert len(await runs(world)) == 3


@virtual
async def test_a_full_tenant_refuses_a_tick_until_the_next_and_it_is_listed(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    await put(one, overlap=Overlap.ALLOW)
    await world.store.put_tenant(ACME, Tenant(max_concurrent_runs=0))
    await asyncio.sleep(60 + 30)
    refused = await stored(world)
    tick = Instant(refused.since + 60_000)
    assert waiting_tick(refused) == MissedTick(tick, "the tenant was full: 0 runs")
    await world.store.put_tenant(ACME, Tenant(max_concurrent_runs=1))
    await asyncio.sleep(10)
    first = await stored(world)
    assert (len(first.runs), first.missed) == (1, ())  # late, and not lost
    assert waiting_tick(first) is None
    await asyncio.sleep(120)
    schedule = await stored(world)
    assert len(schedule.runs) == 1
    assert [each.reason for each in schedule.missed] == ["the tenant was full: 1 run"]


@virtual
async def test_the_next_starts_are_those_that_will_come(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    schedule, name = await put(one), (ACME, "s")
    later = Instant(schedule.since + 5 * 60_000)  # of a clock that was set back since
    shown = one.services.schedules.next_starts(name, replace(schedule, handled=later), 2)
    assert shown == (later + 60_000, later + 120_000)


@virtual
async def test_schedules_with_the_same_expression_each_have_their_own_next_starts(
    world: World,
) -> None:
    one = world.add()
    await world.define(ONE)
    for cron in ("0 0 * 2 1#5", "*/7 * * * *", "30 4 * * *"):
        schedule = await put(one, cron=cron, every_s=None)
        for zone in ("UTC", "Europe/Berlin"):
            spec = replace(schedule.spec, timezone=zone)
            for handled_ms in (0, 90_000, 40 * 86_400_000, 3_600_000, 12 * 365 * 86_400_000):
                late = Instant(schedule.since + handled_ms)
                each = replace(schedule, spec=spec, handled=late)
                shown = one.services.schedules.next_starts((ACME, "s"), each, 3)
                assert list(shown) == next_ticks(each, max(late, world.clock.now()), 3)


@virtual
async def test_overlap_skips_or_holds_one_back(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    await put(one, overlap=Overlap.QUEUE)
    await asyncio.sleep(60 * 4 + 5)
    held = await stored(world)
    assert len(held.runs) == 1
    assert len(held.missed) == 2  # the second tick is held back
    world.work(one, "work")
    await asyncio.sleep(10)
    assert len((await stored(world)).runs) == 2


@virtual
async def test_a_tick_that_was_held_back_and_is_refused_does_not_stop_the_schedule(
    world: World,
) -> None:
    one = world.add()
    await world.define(ONE)
    await put(one, overlap=Overlap.QUEUE)
    await asyncio.sleep(60 * 2 + 5)
    held = await stored(world)
    assert (len(held.runs), held.missed) == (1, ())
    full = "the tenant was full: 0 runs"
    await world.store.put_tenant(ACME, Tenant(max_concurrent_runs=0))
    world.work(one, "work")
    await asyncio.sleep(20)
    told = waiting_tick(await stored(world))
    assert told is not None
    assert told.reason == full
    await asyncio.sleep(60 * 2)
    stopped = await stored(world)
    assert len(stopped.runs) == 1
    assert [each.reason for each in stopped.missed] == [full] * 2
    await world.store.put_tenant(ACME, Tenant(max_concurrent_runs=5))
    await asyncio.sleep(10)
    assert len((await stored(world)).runs) == 2


@virtual
async def test_a_tick_does_not_overlap_a_run_that_was_allowed_to_overlap_others(
    world: World,
) -> None:
    one = world.add()
    await world.define(ONE)
    await put(one, overlap=Overlap.ALLOW)
    await asyncio.sleep(60 * 2 + 5)
    newest, older = (await stored(world)).runs
    await put(one, overlap=Overlap.SKIP)
    await one.inbox.cancel(newest.run_id, reason=None, actor="caller")
    await asyncio.sleep(65)
    schedule = await stored(world)
    assert schedule.runs == (newest, older)
    assert [each.reason for each in schedule.missed] == [
        f"the run of an earlier tick is unfinished: {older.run_id}"
    ]
    await one.inbox.cancel(older.run_id, reason=None, actor="caller")
    await asyncio.sleep(60)
    assert len((await stored(world)).runs) == 3


@virtual
async def test_what_passed_while_no_replica_ran_is_caught_up(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    await put(one, catch_up=CatchUp.ALL, overlap=Overlap.ALLOW)
    one.kill()
    await asyncio.sleep(60 * 5 + 5)
    assert await runs(world) == []
    world.add()
    await asyncio.sleep(20)
    schedule = await stored(world)
    assert len(schedule.runs) == 5
    assert schedule.missed == ()


@virtual
async def test_storing_the_same_schedule_again_does_not_put_its_ticks_off(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    world.work(one, "work")
    first = await put(one)
    for _ in range(5):
        await asyncio.sleep(30)
        assert await put(one) == await stored(world)
    schedule = await stored(world)
    assert (schedule.generation, len(schedule.runs)) == (first.generation, 2)


@virtual
async def test_a_change_is_seen_by_other_replicas_and_a_pause_stops_it(world: World) -> None:
    one, two = world.add(), world.add()
    await world.define(ONE)
    world.work(one, "work")
    first = await put(one)
    await asyncio.sleep(60 + 5)
    again = await put(two, paused=True)
    assert again.generation > first.generation
    await asyncio.sleep(60 * 3)
    assert len(await runs(world)) == 1
    await put(one)
    await asyncio.sleep(60 + 5)
    assert len((await stored(world)).runs) == 2
    assert await two.services.schedules.delete(ACME, "s", AUDIT)
    await asyncio.sleep(60 * 3)
    assert len(await runs(world)) == 2


@pytest.mark.parametrize("is_mute", [False, True])
@virtual
async def test_a_schedule_that_is_to_run_sooner_does_not_wait_for_its_old_tick(
    world: World, is_mute: bool
) -> None:
    one, two = world.add(), world.add()
    await world.define(ONE)
    world.work(one, "work")
    await put(one, every_s=3_600)
    await asyncio.sleep(20)
    for each in (one, two):
        each.bus.is_mute = is_mute
    await put(one, every_s=60)
    # The replica that was asked does not start it either.
    one.kill()
    world.work(two, "work")
    await asyncio.sleep(60 + (6 if is_mute else 2))
    assert len(await runs(world)) == 1


@pytest.mark.parametrize("before", [{"every_s": 3_600}, {"paused": True}])
@virtual
async def test_a_schedule_that_was_removed_and_made_again_is_not_taken_for_the_old_one(
    world: World, before: dict[str, Any]
) -> None:
    one, two = world.add(), world.add()
    await world.define(ONE)
    await put(one, **before)
    await asyncio.sleep(20)
    for each in (one, two):
        each.bus.is_mute = True
    assert await one.services.schedules.delete(ACME, "s", AUDIT)
    # Its document has the revision of the old one again, and the other replica has seen neither.
    made = await put(one, every_s=60)
    one.kill()
    world.work(two, "work")
    await asyncio.sleep(60 + 6)
    schedule = await stored(world)
    assert len(schedule.runs) == 1
    assert (schedule.generation, schedule.spec) == (made.generation, made.spec)


@virtual
async def test_a_schedule_that_is_made_again_by_an_earlier_clock_has_runs(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    world.work(one, "work")
    await put(one)
    await asyncio.sleep(65)
    assert len((await stored(world)).runs) == 1
    assert await one.services.schedules.delete(ACME, "s", AUDIT)
    world.clock.step_ms -= 3_600_000
    await put(one)
    await asyncio.sleep(65)
    schedule = await stored(world)
    assert (len(schedule.runs), schedule.missed) == (1, ())
    assert len(await runs(world)) == 2


@virtual
async def test_a_tenant_has_a_bounded_number_of_schedules(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    service = one.services.schedules
    spec = ScheduleSpec(workflow_id=WorkflowId("one"), every_s=86_400)
    for number in range(SCHEDULES_MAX):
        await service.put(ACME, f"s{number}", spec, AUDIT)
    for _ in range(2):  # also when it was read again
        with pytest.raises(TooManySchedules, match="at most 500 schedules"):
            await service.put(ACME, "one-more", spec, AUDIT)
        await asyncio.sleep(10)
    await service.put(ACME, "s0", replace(spec, every_s=3_600), AUDIT)
    await service.put(TenantId("other"), "s0", spec, AUDIT)
    assert await service.delete(ACME, "s1", AUDIT)
    large = replace(spec, input={"text": "x" * SCHEDULES_BYTES_MAX})
    with pytest.raises(TooManySchedules, match="bytes together"):
        await service.put(ACME, "s0", large, AUDIT)
    await service.put(ACME, "one-more", spec, AUDIT)


@virtual
async def test_a_triggered_run_is_listed_and_holds_no_tick_back(world: World) -> None:
    one, two = world.add(), world.add()
    await world.define(ONE)
    await put(one, overlap=Overlap.SKIP)
    started = await two.services.gate.start(ACME, WorkflowId("one"), {}, key=None, actor="test")
    assert isinstance(started, RunStarted)
    for replica in (two, one):  # a caller that repeats its request is answered by another replica
        await replica.services.schedules.list_triggered(ACME, "s", started.run_id)
    await asyncio.sleep(60 + 5)
    schedule = await stored(world)
    assert [each.run_id for each in schedule.triggered] == [started.run_id]
    assert len(schedule.runs) == 1  # although no worker has finished the triggered run
    assert schedule.missed == ()
    await one.services.schedules.list_triggered(ACME, "gone", started.run_id)


@virtual
async def test_a_tenant_whose_starts_wait_for_a_lock_holds_up_no_other_tenants_ticks(
    world: World,
) -> None:
    one = world.add()
    await world.define(ONE)
    await world.define(ONE, tenant=TenantId("slow"))
    await one.services.gate.tenants.put(TenantId("slow"), LOCKED)
    await world.locks.acquire("admission/slow", "operator", ttl_ms=600_000, within_ms=1_000)
    spec = ScheduleSpec(workflow_id=WorkflowId("one"), every_s=5, overlap=Overlap.ALLOW)
    for number in range(10):  # each waits two seconds for the lock
        await one.services.schedules.put(TenantId("slow"), f"s{number}", spec, AUDIT)
    await put(one, every_s=5, overlap=Overlap.ALLOW)
    await asyncio.sleep(5 * 8 + 2)
    schedule = await stored(world)
    assert (len(schedule.runs), schedule.missed) == (8, ())
    await world.locks.release("admission/slow", "operator", within_ms=1_000)
    await asyncio.sleep(20)
    assert (await one.services.schedules.list(TenantId("slow")))[0][1].runs != ()


@virtual
async def test_many_tenants_whose_starts_wait_hold_up_no_other_tenants_ticks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CONCURRENT_MAX", 2)
    one = world.add()
    await world.define(ONE)
    spec = ScheduleSpec(workflow_id=WorkflowId("one"), every_s=5, overlap=Overlap.ALLOW)
    for slow in (TenantId("slow-1"), TenantId("slow-2")):
        await world.define(ONE, tenant=slow)
        await one.services.gate.tenants.put(slow, LOCKED)
        await world.locks.acquire(f"admission/{slow}", "operator", ttl_ms=600_000, within_ms=1_000)
        for number in range(20):  # each waits two seconds for the lock
            await one.services.schedules.put(slow, f"s{number}", spec, AUDIT)
    await put(one, every_s=15, overlap=Overlap.ALLOW)
    await asyncio.sleep(15 + 5)
    schedule = await stored(world)
    assert (len(schedule.runs), schedule.missed) == (1, ())


@virtual
async def test_a_tenant_that_is_being_handled_is_left_when_the_replica_stops(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    await one.services.gate.tenants.put(ACME, LOCKED)
    await world.locks.acquire("admission/acme", "operator", ttl_ms=600_000, within_ms=1_000)
    await put(one, every_s=5)
    await asyncio.sleep(6)
    (handling,) = one.services.schedules._handling.values()  # noqa: SLF001 - what is under way
    one.task.cancel()
    await asyncio.wait([one.task, handling])
    assert handling.cancelled()
    await world.locks.release("admission/acme", "operator", within_ms=1_000)


@virtual
async def test_callers_that_list_schedules_at_once_share_a_read(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    await put(one, input={"say": ["hello"]})
    await asyncio.sleep(READ_S)
    one.store.calls.clear()
    lists = await asyncio.gather(*(one.services.schedules.list(ACME) for _ in range(50)))
    assert one.store.calls["list_documents"] == 1
    assert all(bytes(rows[0][1].spec.input) == b'{"say":["hello"]}' for rows in lists)


@virtual
async def test_a_list_of_schedules_begins_after_a_name_and_ends_at_a_limit(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    spec = ScheduleSpec(workflow_id=WorkflowId("one"), every_s=60)
    for each in "abcd":
        await one.services.schedules.put(ACME, each, spec, AUDIT)
    found = await one.services.schedules.list(ACME, after=(ACME, "a"), limit=2)
    assert [name for name, _ in found] == [(ACME, "b"), (ACME, "c")]
    assert await one.services.schedules.list(TenantId("other")) == []


def ticks(*replicas: Replica) -> dict[str, float]:
    """How many ticks ended in which way, by all replicas together."""
    counted = {
        str(outcome): sum(
            each.metric("schedule_ticks_total", tenant=ACME, outcome=outcome) for each in replicas
        )
        for outcome in TickOutcome
    }
    return {outcome: count for outcome, count in counted.items() if count}


@virtual
async def test_every_tick_is_counted_once_by_what_became_of_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = world.add(), world.add()
    await world.define(ONE)
    schedule = await put(one)  # its first run never ends
    await asyncio.sleep(60 * 3 + 5)
    assert ticks(one, two) == {"started": 1, "skipped": 2}
    logged = [line for line in caplog.records if line.getMessage() == "schedule_missed"]
    second = datetime.fromtimestamp((schedule.since + 120_000) / 1_000, UTC)
    assert logged[0].fields["tick"] == second.isoformat(timespec="milliseconds")[:-6] + "Z"  # type: ignore[attr-defined] # what it says
    assert len(logged) == 2

    await world.store.put_tenant(ACME, Tenant(max_concurrent_runs=0))
    await put(one, overlap=Overlap.ALLOW)
    await asyncio.sleep(60 * 2 + 5)
    assert ticks(one, two) == {"started": 1, "skipped": 2, "refused": 1}
    await put(one, overlap=Overlap.ALLOW, jitter_s=1)
    assert ticks(one, two) == {"started": 1, "skipped": 2, "refused": 2}
    assert (await stored(world)).missed_total == 4


@virtual
async def test_the_counters_of_a_tenant_with_schedules_begin_at_zero(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    await put(one)
    await asyncio.sleep(READ_S + 1)
    assert one.metric("schedule_ticks_total", tenant=ACME, outcome="refused") == 0


@virtual
async def test_a_schedule_that_cannot_be_read_holds_up_no_other_one(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    one = world.add()
    await world.define(ONE)
    await world.store.put_tenant(ACME, Tenant(max_concurrent_runs=None))
    schedule = await put(one, overlap=Overlap.ALLOW)
    newer: Any = msgspec.to_builtins(schedule)
    newer["spec"]["overlap"] = "replace"  # a value of a later version
    await world.store.put_document("schedule", f"{ACME}/a", newer, read=0)
    await asyncio.sleep(60 * 3 + 10)
    assert len((await stored(world)).runs) == 3
    found = await one.services.schedules.list(ACME, limit=1)
    assert [name for name, _ in found] == [(ACME, "s")]
    lines = [line for line in caplog.records if line.getMessage() == "schedule_failed"]
    assert lines
    assert len(lines) <= 200 // 5, "it is tried again now and then, not at every look"
    assert lines[0].fields["schedule"] == "a"  # type: ignore[attr-defined] # what it says
    # Storing it again makes a new one of it.
    assert await one.services.schedules.get(ACME, "a") is None
    await one.services.schedules.put(ACME, "a", schedule.spec, AUDIT)
    await asyncio.sleep(60 + 5)
    repaired = await one.services.schedules.get(ACME, "a")
    assert repaired is not None
    assert len(repaired.runs) == 1


@virtual
async def test_a_schedule_whose_start_fails_is_tried_again_later(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    one = world.add()
    await world.define(ONE)
    await world.store.put_tenant(ACME, Tenant(max_concurrent_runs=None))
    spec = ScheduleSpec(workflow_id=WorkflowId("one"), every_s=60, overlap=Overlap.ALLOW)
    await one.services.schedules.put(ACME, "a", spec, AUDIT)
    await put(one, overlap=Overlap.ALLOW)
    start = one.services.gate.start

    async def broken(*given: Any, **more: Any) -> Any:  # noqa: ANN401 - as the gate has them
        if more["tick"].schedule_id == "a":
            raise RuntimeError("a bug")
        return await start(*given, **more)

    one.services.gate.start = broken  # type: ignore[method-assign] # a defect of the gate
    await asyncio.sleep(60 * 3 + 10)
    assert len((await stored(world)).runs) == 3
    lines = [line for line in caplog.records if line.getMessage() == "schedule_failed"]
    assert 3 <= len(lines) <= 200 // 5


@virtual
@pytest.mark.parametrize("value", [{"plan": {}}, {"spec": None}, ["x"], "x"])
async def test_a_document_that_is_no_schedule_holds_up_no_schedule(
    world: World,
    value: Any,  # noqa: ANN401 - anything
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = world.add()
    await world.define(ONE)
    await world.store.put_tenant(ACME, Tenant(max_concurrent_runs=None))
    await put(one, overlap=Overlap.ALLOW)
    await world.store.put_document("schedule", f"{ACME}/a", value, read=0)
    await asyncio.sleep(60 * 3 + 10)
    assert len((await stored(world)).runs) == 3
    lines = {line.getMessage() for line in caplog.records}
    assert "schedule_failed" in lines
    assert "loop_failed" not in lines
    await put(one, overlap=Overlap.SKIP)
    assert (await stored(world)).spec.overlap is Overlap.SKIP
