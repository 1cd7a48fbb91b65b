"""Timers: they raise an event in their run's inbox once their time has come."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from stanchion.core.events import Timer, TimerFired, TimerKind
from stanchion.core.model import Instant, RunId, StepId, TenantId
from stanchion.core.transition import ClearTimer, Effect, SetTimer, StopRun, StopStep
from stanchion.ports.records import Committed, InboxEntry
from stanchion.ports.store import Store
from tests.contract.builders import (
    DELAY,
    advance,
    cancel,
    commit_of,
    loaded,
    nothing,
    start,
)
from tests.contract.harness import LONG_MS, Harness

_STEP = StepId("step")
_OTHER = StepId("step-beside")
_TIMEOUT = Timer(TimerKind.STEP_TIMEOUT, _STEP)


async def test_a_timer_that_is_not_due_stays(store: Store) -> None:
    await start(store)
    assert await store.fire_timers(limit=10) == ()


async def test_a_due_timer_becomes_an_entry_in_its_runs_inbox(
    store: Store, harness: Harness
) -> None:
    run_id = await start(store)
    due = Instant(await store.now() + harness.short_ms)
    await _change(store, run_id, SetTimer(_TIMEOUT, due))
    assert await store.fire_timers(limit=10) == ()
    await harness.pass_time(harness.short_ms)
    assert await store.fire_timers(limit=10) == (run_id,)
    fired = InboxEntry(f"timer:{_TIMEOUT.key}#{due}", TimerFired(timer=_TIMEOUT))
    assert (await loaded(store, run_id)).inbox == (fired,)


async def test_a_fired_timer_has_an_outbox_row_due_at_once(store: Store) -> None:
    run_id = await start(store)
    await _change(store, run_id, SetTimer(_TIMEOUT, await store.now()))
    await store.fire_timers(limit=10)
    assert [row.run_id for row in await store.take_outbox(limit=10, hold_ms=1_000)] == [run_id]


async def test_a_timer_fires_once(store: Store) -> None:
    run_id = await start(store)
    await _change(store, run_id, SetTimer(_TIMEOUT, await store.now()))
    assert await store.fire_timers(limit=10) == (run_id,)
    assert await store.fire_timers(limit=10) == ()
    assert len((await loaded(store, run_id)).inbox) == 1


async def test_timers_fired_by_many_at_once_fire_once(store: Store) -> None:
    run_id = await start(store)
    now = await store.now()
    await _change(store, run_id, *(SetTimer(_retry(n), now) for n in range(20)))
    answers = await asyncio.gather(*(store.fire_timers(limit=7) for _ in range(10)))
    assert sum(map(len, answers)) == 20
    assert len((await loaded(store, run_id)).inbox) == 20


async def test_timers_fire_earliest_first_and_no_more_than_asked_for(store: Store) -> None:
    run_id = await start(store)
    now = await store.now()
    order = [3, 0, 4, 1, 2]
    await _change(store, run_id, *(SetTimer(_retry(n), Instant(now - 100 + 10 * n)) for n in order))
    assert len(await store.fire_timers(limit=2)) == 2
    assert len(await store.fire_timers(limit=2)) == 2
    assert len(await store.fire_timers(limit=2)) == 1
    inbox = (await loaded(store, run_id)).inbox
    fired = [entry.event for entry in inbox]
    assert fired == [TimerFired(timer=_retry(n)) for n in range(5)]


async def test_timers_of_all_tenants_fire(store: Store) -> None:
    runs = []
    for number in range(10):
        run_id = await start(store, tenant=TenantId(f"tenant-{number}"))
        await _change(store, run_id, SetTimer(_TIMEOUT, await store.now()))
        runs.append(run_id)
    assert sorted(await store.fire_timers(limit=100)) == sorted(runs)


async def test_a_timer_set_again_has_the_new_time_only(store: Store) -> None:
    run_id = await start(store)
    now = await store.now()
    await _change(store, run_id, SetTimer(_TIMEOUT, now))
    await _change(store, run_id, SetTimer(_TIMEOUT, Instant(now + LONG_MS)))
    assert await store.fire_timers(limit=10) == ()


async def test_a_cleared_timer_does_not_fire(store: Store) -> None:
    run_id = await start(store)
    now = await store.now()
    await _change(store, run_id, SetTimer(_TIMEOUT, now), SetTimer(_retry(1), now))
    await _change(store, run_id, ClearTimer(_TIMEOUT))
    await store.fire_timers(limit=10)
    fired = [entry.event for entry in (await loaded(store, run_id)).inbox]
    assert fired == [TimerFired(timer=_retry(1))]


async def test_clearing_a_timer_that_is_not_set_changes_nothing(store: Store) -> None:
    run_id = await start(store)
    await _change(store, run_id, ClearTimer(_TIMEOUT))
    assert await store.fire_timers(limit=10) == ()


async def test_effects_are_carried_out_in_their_order(store: Store) -> None:
    run_id = await start(store)
    now = await store.now()
    await _change(store, run_id, SetTimer(_TIMEOUT, now), ClearTimer(_TIMEOUT))
    assert await store.fire_timers(limit=10) == ()
    await _change(store, run_id, StopStep(_STEP), SetTimer(_TIMEOUT, now))
    assert await store.fire_timers(limit=10) == (run_id,)


async def test_stopping_a_step_forgets_its_timers_and_those_of_its_items(store: Store) -> None:
    run_id = await start(store)
    now = await store.now()
    others = Timer(TimerKind.STEP_TIMEOUT, _OTHER)
    timers = (_TIMEOUT, _retry(1), Timer(TimerKind.RETRY, _STEP, 3, 1), others)
    await _change(store, run_id, *(SetTimer(timer, now) for timer in timers))
    await _change(store, run_id, StopStep(_STEP))
    await store.fire_timers(limit=10)
    fired = [entry.event for entry in (await loaded(store, run_id)).inbox]
    assert fired == [TimerFired(timer=others)]


async def test_stopping_the_run_forgets_all_its_timers(store: Store) -> None:
    run_id, other = await start(store), await start(store)
    now = await store.now()
    await _change(store, run_id, SetTimer(_TIMEOUT, now), SetTimer(_retry(1), now))
    await _change(store, other, SetTimer(_TIMEOUT, now))
    await _change(store, run_id, StopRun())
    assert await store.fire_timers(limit=10) == (other,)


async def test_a_finished_run_has_no_timers(store: Store, harness: Harness) -> None:
    run_id = await start(store, DELAY)
    await cancel(store, run_id, DELAY)
    await harness.pass_time(150)
    assert await store.fire_timers(limit=10) == ()


async def test_a_timer_may_fire_again_after_it_was_set_again(store: Store) -> None:
    run_id = await start(store)
    now = await store.now()
    await _change(store, run_id, SetTimer(_TIMEOUT, Instant(now - 2)))
    await store.fire_timers(limit=10)
    await _change(store, run_id, SetTimer(_TIMEOUT, Instant(now - 1)))
    assert await store.fire_timers(limit=10) == (run_id,)
    assert len((await loaded(store, run_id)).inbox) == 2


async def test_a_delay_lasts_until_its_timer_fired(store: Store, harness: Harness) -> None:
    run_id = await start(store, DELAY)
    await harness.pass_time(110)
    assert await store.fire_timers(limit=10) == (run_id,)
    await advance(store, DELAY, run_id)
    assert (await loaded(store, run_id)).run.status.is_finished


def _retry(attempt: int) -> Timer:
    return Timer(TimerKind.RETRY, _STEP, None, attempt)


async def _change(store: Store, run_id: RunId, *effects: Effect) -> None:
    found = await loaded(store, run_id)
    answer = await store.commit(commit_of(found, replace(nothing(found), effects=effects)))
    assert isinstance(answer, Committed)
