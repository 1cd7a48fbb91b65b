"""Summaries of replicas: each is replaced by its replica only, and expires without it."""

from __future__ import annotations

import pytest

from stanchion.core.json_value import JsonValue
from stanchion.core.upgrade import LEVEL
from stanchion.ports.store import Store
from tests.contract.builders import STRANGE_VALUES, assert_same
from tests.contract.harness import LONG_MS, Harness


async def test_the_last_summary_of_each_replica_is_read_with_the_stores_time(
    store: Store, harness: Harness
) -> None:
    began = await store.now()
    await store.report_replica("b", {"n": 1}, keep_ms=LONG_MS)
    first = await store.report_replica("a", {"n": 2}, keep_ms=LONG_MS)
    await harness.pass_time(5)
    second = await store.report_replica("b", {"n": 3}, keep_ms=LONG_MS)
    read = await store.replica_summaries()
    assert [(each.replica, each.summary) for each in read.summaries] == [
        ("a", {"n": 2}),
        ("b", {"n": 3}),
    ]
    assert [each.seen_at for each in read.summaries] == [first, second]
    assert began <= first < second <= read.at


async def test_without_a_report_there_is_nothing(store: Store) -> None:
    assert (await store.replica_summaries()).summaries == ()


async def test_a_report_removes_summaries_that_are_too_old(store: Store, harness: Harness) -> None:
    await store.report_replica("old", {}, keep_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    await store.report_replica("new", {}, keep_ms=LONG_MS)
    kept = (await store.replica_summaries()).summaries
    assert [each.replica for each in kept] == ["new", "old"]
    await store.report_replica("new", {}, keep_ms=harness.short_ms)
    kept = (await store.replica_summaries()).summaries
    assert [each.replica for each in kept] == ["new"]


async def test_a_replica_that_stops_removes_its_summary_only(store: Store) -> None:
    for name in ("a", "b"):
        await store.report_replica(name, {}, keep_ms=LONG_MS)
    assert await store.remove_replica("a") is True
    assert await store.remove_replica("a") is False
    kept = (await store.replica_summaries()).summaries
    assert [each.replica for each in kept] == ["b"]


async def test_a_new_store_has_the_level_of_its_version_which_never_falls(store: Store) -> None:
    assert await store.level() == LEVEL
    assert await store.raise_level(1) == LEVEL
    assert await store.raise_level(LEVEL) == LEVEL
    assert await store.level() == LEVEL


@pytest.mark.parametrize("value", STRANGE_VALUES, ids=lambda value: repr(value)[:30])
async def test_a_summary_comes_back_as_it_was(store: Store, value: JsonValue) -> None:
    await store.report_replica("a", value, keep_ms=LONG_MS)
    (found,) = (await store.replica_summaries()).summaries
    assert_same(found.summary, value)
