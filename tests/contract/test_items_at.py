"""Items, read in one step with a look at the run that they belong to."""

from __future__ import annotations

from stanchion.core.json_value import JsonValue
from stanchion.core.model import ItemKey, RunId, Stamp, StepId, StepStatus
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


async def test_many_items_are_read_as_they_were_written_and_changed(store: Store) -> None:
    values: list[JsonValue] = [f"item {index}" for index in range(600)]
    run_id = await start(store, FOR_EACH, run_input={"items": values})
    before = await store.load_items(run_id, {EACH: range(700)})
    assert list(before) == [ItemKey(EACH, index) for index in range(600)]
    statuses = [item.status for item in before.values()]
    assert statuses == [StepStatus.RUNNING] * 250 + [StepStatus.PENDING] * 350
    assert [item.input for item in before.values()] == values
    for leased in await lease(store, max_jobs=20):
        await store.accept([result_of(leased, "done")])
    await advance(store, FOR_EACH, run_id)
    after = await store.load_items(run_id, {EACH: range(700)})
    changed = {key.item: item for key, item in after.items() if item != before[key]}
    assert list(changed) == [*range(20), *range(250, 290)]
    assert all(changed[index].output == "done" for index in range(20))
    assert all(changed[index].status is StepStatus.RUNNING for index in range(250, 290))
    # In any order, across the places where a store may divide them.
    some = await store.load_items(run_id, {EACH: [511, 3, 599, 256, 255, 512, 600, 3]})
    assert some == {ItemKey(EACH, n): after[ItemKey(EACH, n)] for n in (3, 255, 256, 511, 512, 599)}


async def test_large_and_strange_inputs_of_pending_items_are_read_as_they_were_written(
    store: Store,
) -> None:
    values: list[JsonValue] = [f"item {index}" for index in range(700)]
    values[300:310] = ["line\nbreak\r\n", "\u2028\x00", "", None, [], {}, 0.1, "é", '"', "\\n"]
    values[520:530] = ["x" * 20_000] * 10
    run_id = await start(store, FOR_EACH, run_input={"items": values})
    found = await store.load_items(run_id, {EACH: range(700)})
    assert [item.input for item in found.values()] == values


async def test_an_item_that_is_written_twice_in_many_has_its_last_state(store: Store) -> None:
    """Twenty items that follow each other change together, and some of them again."""
    run_id = await start(store, FOR_EACH, run_input={"items": list(range(40))})
    leases = await lease(store, max_jobs=40)
    await store.accept([result_of(each, "first") for each in leases[:30]])
    await advance(store, FOR_EACH, run_id)
    found = await store.load_items(run_id, {EACH: range(40)})
    outputs = [item.output for item in found.values()]
    assert outputs == ["first"] * 30 + [None] * 10
    await store.accept([result_of(each, "second") for each in leases[30:]])
    await advance(store, FOR_EACH, run_id)
    run = (await loaded(store, run_id)).run
    assert run.steps[EACH].output == ["first"] * 30 + ["second"] * 10
