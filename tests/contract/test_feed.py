"""The feed: what happened to all of a tenant's runs, in the order of commits."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from stanchion.core.model import Instant, make_run_id
from stanchion.core.transition import TimelineEntry, Transition
from stanchion.ports.records import Admission, BadCursor, Tenant
from stanchion.ports.store import Store
from tests.contract.builders import (
    ACME,
    GLOBEX,
    WITHIN_MS,
    admission,
    cancel,
    commit_of,
    loaded,
    nothing,
    start,
)


async def test_a_tenant_to_whom_nothing_happened_has_an_empty_feed(store: Store) -> None:
    assert await store.feed(ACME, after=None) == ()
    assert await store.feed(ACME, after=await store.feed_position(ACME)) == ()


async def test_an_admission_is_in_the_feed(store: Store) -> None:
    wanted = admission(await store.now())
    await store.admit(wanted, within_ms=WITHIN_MS)
    (entry,) = await store.feed(ACME, after=None)
    assert entry.run_id == wanted.run.id
    assert entry.entries == wanted.transition.timeline


async def test_a_commits_lines_are_one_entry(store: Store) -> None:
    run_id = await start(store)
    await cancel(store, run_id)
    _, ended = await store.feed(ACME, after=None)
    assert ended.run_id == run_id
    assert ended.entries[-1].what == "run_cancelled"
    assert ended.entries == (await store.timeline(run_id)).items[-len(ended.entries) :]


async def test_a_commit_without_lines_is_not_in_the_feed(store: Store) -> None:
    run_id = await start(store)
    found = await loaded(store, run_id)
    await store.commit(commit_of(found, nothing(found)))
    assert len(await store.feed(ACME, after=None)) == 1


async def test_a_commit_sent_twice_is_in_the_feed_once(store: Store) -> None:
    found = await loaded(store, await start(store))
    commit = commit_of(found, nothing(found, say="once"))
    await store.commit(commit)
    await store.commit(commit)
    assert len(await store.feed(ACME, after=None)) == 2


async def test_a_feed_goes_on_after_a_position(store: Store) -> None:
    runs = [await start(store) for _ in range(5)]
    entries = await store.feed(ACME, after=None)
    assert [entry.run_id for entry in entries] == runs
    for place, entry in enumerate(entries):
        rest = await store.feed(ACME, after=entry.position)
        assert [each.run_id for each in rest] == runs[place + 1 :]


async def test_a_feed_is_read_in_portions(store: Store) -> None:
    runs = [await start(store) for _ in range(7)]
    read = []
    position = None
    while portion := await store.feed(ACME, after=position, limit=3):
        assert len(portion) <= 3
        read += [entry.run_id for entry in portion]
        position = portion[-1].position
    assert read == runs


async def test_after_the_present_end_comes_only_what_is_new(store: Store) -> None:
    await start(store)
    position = await store.feed_position(ACME)
    assert await store.feed(ACME, after=position) == ()
    run_id = await start(store)
    assert [entry.run_id for entry in await store.feed(ACME, after=position)] == [run_id]


async def test_the_end_of_an_empty_feed_is_a_position_too(store: Store) -> None:
    position = await store.feed_position(ACME)
    run_id = await start(store)
    assert [entry.run_id for entry in await store.feed(ACME, after=position)] == [run_id]


async def test_the_position_of_the_last_entry_is_the_end(store: Store) -> None:
    await start(store)
    (entry,) = await store.feed(ACME, after=None)
    assert await store.feed_position(ACME) == entry.position


async def test_feeds_are_their_tenants_own(store: Store) -> None:
    await start(store)
    run_id = await start(store, tenant=GLOBEX)
    assert [entry.run_id for entry in await store.feed(GLOBEX, after=None)] == [run_id]


async def test_commits_of_many_runs_at_once_are_all_in_the_feed(store: Store) -> None:
    runs = [await start(store) for _ in range(8)]
    position = await store.feed_position(ACME)
    await asyncio.gather(*(cancel(store, run_id) for run_id in runs))
    entries = await store.feed(ACME, after=position)
    assert sorted(entry.run_id for entry in entries) == sorted(runs)
    assert len({entry.position for entry in entries}) == 8


async def test_a_feed_keeps_the_newest_thousands_and_tells_that_others_are_gone(
    store: Store,
) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=None))
    empty = await store.feed_position(ACME)
    early = await start(store)
    (at_first,) = await store.feed(ACME, after=empty)
    first = admission(await store.now())
    many = [_another(first, number) for number in range(11_200)]
    for begin in range(0, 11_200, 1_000):
        portion = many[begin : begin + 1_000]
        await asyncio.gather(*(store.admit(each, within_ms=WITHIN_MS) for each in portion))
    await store.purge(finished_before=Instant(0), limit=1)
    newest = await store.feed(ACME, after=None, limit=20_000)
    assert 10_000 <= len(newest) <= 11_000
    assert newest[-1].position == await store.feed_position(ACME)
    assert early not in {each.run_id for each in newest}
    assert not any(each.is_after_gap for each in [at_first, *newest])
    for gone in (empty, at_first.position):
        after_gap, follows = await store.feed(ACME, after=gone, limit=2)
        assert after_gap == replace(newest[0], is_after_gap=True)
        assert follows == newest[1]
    for kept in (newest[0], newest[5_000]):
        place = newest.index(kept) + 1
        assert (await store.feed(ACME, after=kept.position, limit=2)) == newest[place : place + 2]


def _another(admitted: Admission, number: int) -> Admission:
    """The same run under another id, without the work of deciding it again."""
    run_id = make_run_id(ACME, admitted.run.created_at, number)
    line = TimelineEntry(admitted.run.created_at, "run_started", "test")
    return replace(
        admitted,
        run=replace(admitted.run, id=run_id),
        transition=Transition(status=admitted.run.status, timeline=(line,)),
    )


async def test_a_bad_position_is_said_to_be_bad(store: Store) -> None:
    await start(store)
    for bad in ("", "nonsense", "-", "*", "é"):
        with pytest.raises(BadCursor):
            await store.feed(ACME, after=bad)
