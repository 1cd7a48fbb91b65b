"""The outbox: whoever has something in the inbox is asked for again and again until it is empty."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from stanchion.core.events import CancelRequested
from stanchion.core.model import RunId, TenantId
from stanchion.ports.records import OutboxRow
from stanchion.ports.store import Store
from tests.contract.builders import (
    ACME,
    ONE_JOB,
    accept,
    advance,
    commit_of,
    lease_one,
    loaded,
    nothing,
    start,
)
from tests.contract.harness import LONG_MS, Harness


async def test_an_empty_outbox_gives_nothing(store: Store) -> None:
    assert await store.take_outbox(limit=10, hold_ms=1_000) == ()
    assert await store.outbox_size() == 0


async def test_a_run_has_one_row_however_much_is_in_its_inbox(store: Store) -> None:
    run_id = await _posted(store, "a", "b", "c")
    assert await store.outbox_size() == 1
    assert await store.take_outbox(limit=10, hold_ms=1_000) == (OutboxRow(run_id, ACME, 3),)


async def test_a_taken_row_is_not_due_until_its_hold_is_over(
    store: Store, harness: Harness
) -> None:
    run_id = await _posted(store, "a")
    await store.take_outbox(limit=10, hold_ms=harness.short_ms)
    assert await store.take_outbox(limit=10, hold_ms=harness.short_ms) == ()
    assert await store.outbox_size() == 1
    await harness.pass_time(harness.short_ms)
    assert await store.take_outbox(limit=10, hold_ms=1_000) == (OutboxRow(run_id, ACME, 1),)


async def test_a_row_without_a_hold_is_given_once_a_call(store: Store) -> None:
    runs = [await _posted(store, "a"), await _posted(store, "a")]
    for _ in range(2):
        taken = await store.take_outbox(limit=10, hold_ms=0)
        assert sorted(row.run_id for row in taken) == sorted(runs)


async def test_what_comes_in_makes_a_held_row_due_at_once(store: Store) -> None:
    run_id = await _posted(store, "a")
    await store.take_outbox(limit=10, hold_ms=LONG_MS)
    await store.post(run_id, CancelRequested(), entry_id="b")
    assert await store.take_outbox(limit=10, hold_ms=LONG_MS) == (OutboxRow(run_id, ACME, 2),)


async def test_rows_come_earliest_first_and_no_more_than_asked_for(
    store: Store, harness: Harness
) -> None:
    runs = [await start(store) for _ in range(3)]
    for place in (1, 2, 0):
        await store.post(runs[place], CancelRequested(), entry_id="a")
        await harness.pass_time(2)
    first = await store.take_outbox(limit=2, hold_ms=LONG_MS)
    second = await store.take_outbox(limit=2, hold_ms=LONG_MS)
    assert [row.run_id for row in (*first, *second)] == [runs[1], runs[2], runs[0]]
    assert len(first) == 2


async def test_rows_of_all_tenants_are_taken(store: Store) -> None:
    tenants = [TenantId(f"tenant-{number}") for number in range(10)]
    for tenant in tenants:
        run_id = await start(store, tenant=tenant)
        await store.post(run_id, CancelRequested(), entry_id="a")
    rows = await store.take_outbox(limit=100, hold_ms=1_000)
    assert sorted(row.tenant for row in rows) == tenants
    assert await store.outbox_size() == 10


async def test_rows_taken_by_many_at_once_are_taken_once(store: Store) -> None:
    await store.put_tenant(ACME, replace(await store.tenant(ACME), max_concurrent_runs=None))
    runs = [await _posted(store, "a") for _ in range(20)]
    answers = await asyncio.gather(
        *(store.take_outbox(limit=3, hold_ms=LONG_MS) for _ in range(20))
    )
    taken = [row.run_id for answer in answers for row in answer]
    assert sorted(taken) == sorted(runs)


async def test_a_confirmed_row_stays_while_something_is_in_the_inbox(store: Store) -> None:
    await _posted(store, "a")
    rows = await store.take_outbox(limit=10, hold_ms=LONG_MS)
    await store.confirm_outbox(rows)
    assert await store.outbox_size() == 1


async def test_a_row_whose_inbox_is_empty_is_gone_and_confirming_it_is_no_error(
    store: Store,
) -> None:
    run_id = await start(store)
    await accept(store, await lease_one(store))
    rows = await store.take_outbox(limit=10, hold_ms=LONG_MS)
    await advance(store, ONE_JOB, run_id)
    await store.confirm_outbox(rows)
    await store.confirm_outbox(rows)
    assert await store.outbox_size() == 0


async def test_confirming_an_old_row_does_not_remove_a_new_one(store: Store) -> None:
    run_id = await _posted(store, "a")
    (old,) = await store.take_outbox(limit=10, hold_ms=LONG_MS)
    await _apply(store, run_id, "a")
    await store.post(run_id, CancelRequested(), entry_id="b")
    await store.confirm_outbox([old])
    (new,) = await store.take_outbox(limit=10, hold_ms=LONG_MS)
    assert new.run_id == run_id
    assert new.number > old.number


async def test_confirming_what_is_not_there_is_no_error(store: Store) -> None:
    await store.confirm_outbox([])
    await store.confirm_outbox([OutboxRow(RunId("nonsense"), ACME, 1)])
    await store.confirm_outbox([OutboxRow(await start(store), ACME, 1)])


async def test_a_deferred_row_is_due_later(store: Store, harness: Harness) -> None:
    run_id = await _posted(store, "a")
    (row,) = await store.take_outbox(limit=10, hold_ms=0)
    await store.defer_outbox(row, delay_ms=harness.short_ms)
    assert await store.take_outbox(limit=10, hold_ms=0) == ()
    await harness.pass_time(harness.short_ms)
    assert await store.take_outbox(limit=10, hold_ms=0) == (OutboxRow(run_id, ACME, 1),)


async def test_a_row_may_be_deferred_to_before_the_end_of_its_hold(
    store: Store, harness: Harness
) -> None:
    run_id = await _posted(store, "a")
    (row,) = await store.take_outbox(limit=10, hold_ms=LONG_MS)
    await store.defer_outbox(row, delay_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    assert await store.take_outbox(limit=10, hold_ms=0) == (OutboxRow(run_id, ACME, 1),)


async def test_what_came_in_meanwhile_is_not_deferred(store: Store) -> None:
    run_id = await _posted(store, "a")
    (row,) = await store.take_outbox(limit=10, hold_ms=LONG_MS)
    await store.post(run_id, CancelRequested(), entry_id="b")
    await store.defer_outbox(row, delay_ms=LONG_MS)
    assert await store.take_outbox(limit=10, hold_ms=0) == (OutboxRow(run_id, ACME, 2),)


async def test_deferring_a_row_that_is_gone_does_not_bring_it_back(store: Store) -> None:
    run_id = await _posted(store, "a")
    (row,) = await store.take_outbox(limit=10, hold_ms=LONG_MS)
    await _apply(store, run_id, "a")
    await store.defer_outbox(row, delay_ms=0)
    assert await store.outbox_size() == 0
    await store.defer_outbox(OutboxRow(RunId("nonsense"), ACME, 1), delay_ms=0)
    assert await store.outbox_size() == 0


async def _posted(store: Store, *names: str) -> RunId:
    run_id = await start(store)
    for name in names:
        await store.post(run_id, CancelRequested(), entry_id=name)
    return run_id


async def _apply(store: Store, run_id: RunId, *names: str) -> None:
    found = await loaded(store, run_id)
    await store.commit(commit_of(found, nothing(found), applied=names))
