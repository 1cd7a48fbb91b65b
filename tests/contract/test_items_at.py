"""Items, read in one step with a look at the run that they belong to."""

from __future__ import annotations

from stanchion.core.model import ItemKey, RunId, Stamp, StepId
from stanchion.ports.store import Store
from tests.contract.builders import FOR_EACH, advance, lease, loaded, result_of, start

EACH = StepId("each")


async def test_items_come_with_the_run_that_was_read(store: Store) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": ["a", "b"]})
    stamp = (await loaded(store, run_id)).run.stamp
    found = await store.items_at(run_id, stamp, {EACH: [0, 1, 7]})
    assert found is not None
    assert found == await store.load_items(run_id, {EACH: [0, 1]})
    assert list(found) == [ItemKey(EACH, 0), ItemKey(EACH, 1)]
    assert await store.items_at(run_id, stamp, {}) == {}


async def test_items_of_a_run_that_has_moved_on_are_not_given(store: Store) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": ["a", "b"]})
    stamp = (await loaded(store, run_id)).run.stamp
    leased = await lease(store, max_jobs=2)
    await store.accept([result_of(leased[0], "A")])
    # An event in the inbox is not a change of the run.
    assert await store.items_at(run_id, stamp, {EACH: [0]}) is not None
    await advance(store, FOR_EACH, run_id)
    assert await store.items_at(run_id, stamp, {EACH: [0]}) is None


async def test_items_of_another_history_of_the_same_version_are_not_given(store: Store) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": ["a"]})
    stamp = (await loaded(store, run_id)).run.stamp
    assert await store.items_at(run_id, Stamp(stamp.version, "other"), {EACH: [0]}) is None
    assert await store.items_at(run_id, Stamp(stamp.version + 1, stamp.nonce), {EACH: [0]}) is None


async def test_an_unknown_run_is_at_no_stamp(store: Store) -> None:
    assert await store.items_at(RunId("nonsense"), Stamp(1, "one"), {EACH: [0]}) is None
