"""Timers: they raise an event in their run's inbox once their time has come."""

from __future__ import annotations

import asyncio
import itertools

from msgspec.structs import replace

from stanchion.core.events import Timer, TimerFired, TimerKind
from stanchion.core.model import Instant, RunId, StepId, TenantId, shard_of_tenant
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
    fired = InboxEntry(f"timer:{_TIMEOUT.key}#{due}", TimerFired(timer=_TIMEOUT, due=due))
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
    assert fired == [TimerFired(timer=_retry(n), due=Instant(now - 100 + 10 * n)) for n in range(5)]


async def test_timers_of_all_tenants_fire(store: Store) -> None:
    runs = []
    for number in range(10):
        run_id = await start(store, tenant=TenantId(f"tenant-{number}"))
        await _change(store, run_id, SetTimer(_TIMEOUT, await store.now()))
        runs.append(run_id)
    assert sorted(await store.fire_timers(limit=100)) == sorted(runs)


async def test_a_tenant_with_many_due_timers_does_not_delay_the_one_of_another(
    store: Store,
) -> None:
    loud, quiet = _tenants_of_one_shard(2)
    now = await store.now()
    crowd = [await _with_timers(store, loud, *[Instant(now - 500)] * 20) for _ in range(3)]
    late = await _with_timers(store, quiet, Instant(now - 1))
    assert late in await store.fire_timers(limit=8)
    # Nothing of the crowd is lost, and nothing fires twice.
    left = [run_id for _ in range(10) for run_id in await store.fire_timers(limit=8)]
    assert set(left) <= set(crowd)
    inboxes = [(await loaded(store, run_id)).inbox for run_id in [*crowd, late]]
    assert [len(inbox) for inbox in inboxes] == [20, 20, 20, 1]
    assert await store.fire_timers(limit=8) == ()


async def test_tenants_with_due_timers_take_turns(store: Store) -> None:
    tenants = _tenants_of_one_shard(6)
    now = await store.now()
    runs = [
        await _with_timers(store, tenant, *[Instant(now - 100 + number)] * 20)
        for number, tenant in enumerate(tenants)
    ]
    seen = [run_id for _ in range(4) for run_id in await store.fire_timers(limit=4)]
    assert set(seen) == set(runs)


async def test_a_tenant_takes_its_turn_also_beside_tenants_of_many_other_shards(
    store: Store,
) -> None:
    by_shard: dict[int, list[TenantId]] = {}
    for number in range(100):
        tenant = TenantId(f"tenant-{number:03}")
        by_shard.setdefault(shard_of_tenant(tenant), []).append(tenant)
    (first, quiet, *_), *more = sorted(by_shard.values(), key=len, reverse=True)
    others = [each[0] for each in more[:19]]
    now = await store.now()
    for loud in (first, *others):
        await _with_timers(store, loud, *[Instant(now - 500)] * 20)
    late = await _with_timers(store, quiet, Instant(now - 1))
    looks = (len(others) + 2) // 6 + 2  # a quarter of each look is for the earliest
    assert late in [run_id for _ in range(looks) for run_id in await store.fire_timers(limit=8)]


async def test_tenants_whose_timers_were_cleared_do_not_hide_those_of_others(store: Store) -> None:
    *idle, loud, quiet = _tenants_of_one_shard(12)
    now = await store.now()
    for tenant in idle:
        run_id = await _with_timers(store, tenant, Instant(now - 1_000))
        await _change(store, run_id, StopRun())
    await _with_timers(store, loud, *[Instant(now - 500)] * 20)
    late = await _with_timers(store, quiet, Instant(now - 1))
    assert late in await store.fire_timers(limit=8)


async def test_a_replaced_timer_fires_in_its_turn_at_its_new_time_only(store: Store) -> None:
    loud, quiet = _tenants_of_one_shard(2)
    now = await store.now()
    run_id = await _with_timers(store, quiet, Instant(now - 700))
    await _change(store, run_id, SetTimer(_retry(0), Instant(now + LONG_MS)))
    crowd = await _with_timers(store, loud, *[Instant(now - 500)] * 20)
    fired = [each for _ in range(10) for each in await store.fire_timers(limit=8)]
    assert fired == [crowd] * 20
    await _change(store, run_id, SetTimer(_retry(0), Instant(now - 1)))
    assert await store.fire_timers(limit=8) == (run_id,)


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
    assert fired == [TimerFired(timer=_retry(1), due=now)]


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
    assert fired == [TimerFired(timer=others, due=now)]


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


def _tenants_of_one_shard(count: int) -> list[TenantId]:
    names = (TenantId(f"tenant-{number}") for number in itertools.count())
    first = next(names)
    same = (each for each in names if shard_of_tenant(each) == shard_of_tenant(first))
    return [first, *itertools.islice(same, count - 1)]


async def _with_timers(store: Store, tenant: TenantId, *due: Instant) -> RunId:
    run_id = await start(store, tenant=tenant)
    await _change(store, run_id, *(SetTimer(_retry(n), at) for n, at in enumerate(due)))
    return run_id


async def _change(store: Store, run_id: RunId, *effects: Effect) -> None:
    found = await loaded(store, run_id)
    answer = await store.commit(commit_of(found, replace(nothing(found), effects=effects)))
    assert isinstance(answer, Committed)
