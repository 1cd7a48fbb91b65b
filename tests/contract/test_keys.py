"""Idempotency keys: the same request makes one run, and a refusal makes none."""

from __future__ import annotations

import asyncio
from collections import Counter

from stanchion.core.admission import (
    Admitted,
    Full,
    Mismatch,
    Replayed,
    StaleDefinition,
    judge_key,
)
from stanchion.core.model import WorkflowId
from stanchion.ports.records import StartTerms, Tenant
from stanchion.ports.store import Store
from tests.contract.builders import (
    ACME,
    FOR_EACH,
    GLOBEX,
    TWO_JOBS,
    WITHIN_MS,
    admission,
    cancel,
    start,
)
from tests.contract.harness import Harness


async def test_a_used_key_gives_the_run_it_made(store: Store) -> None:
    run_id = await start(store, key="k")
    again = admission(await store.now(), key="k")
    assert await store.admit(again, within_ms=WITHIN_MS) == Replayed(run_id)
    assert await store.load(again.run.id) is None
    assert await store.active_runs(ACME) == 1


async def test_a_replay_is_answered_though_the_tenant_is_full(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=1))
    run_id = await start(store, key="k")
    again = admission(await store.now(), key="k")
    assert await store.admit(again, within_ms=WITHIN_MS) == Replayed(run_id)


async def test_a_replay_is_answered_though_the_definition_changed(store: Store) -> None:
    run_id = await start(store, key="k")
    again = admission(await store.now(), key="k", definitions={WorkflowId("one-job"): 7})
    assert await store.admit(again, within_ms=WITHIN_MS) == Replayed(run_id)


async def test_the_same_key_fifty_times_at_once_makes_one_run(store: Store) -> None:
    now = await store.now()
    wanted = [admission(now, key="k") for _ in range(50)]
    verdicts = await asyncio.gather(*(store.admit(each, within_ms=WITHIN_MS) for each in wanted))
    assert Counter(map(type, verdicts)) == {Admitted: 1, Replayed: 49}
    (admitted,) = (each for each in verdicts if isinstance(each, Admitted))
    assert {each.run_id for each in verdicts if isinstance(each, Replayed)} == {admitted.run_id}
    assert await store.active_runs(ACME) == 1


async def test_a_used_key_with_another_payload_is_a_mismatch(store: Store) -> None:
    await start(store, key="k")
    other = admission(await store.now(), key="k", run_input={"say": "something else"})
    assert await store.admit(other, within_ms=WITHIN_MS) == Mismatch()
    assert await store.load(other.run.id) is None


async def test_a_used_key_with_another_workflow_is_a_mismatch(store: Store) -> None:
    await start(store, key="k")
    other = admission(await store.now(), TWO_JOBS, key="k")
    assert await store.admit(other, within_ms=WITHIN_MS) == Mismatch()


async def test_a_mismatch_is_said_before_a_full_tenant(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=1))
    await start(store, key="k")
    other = admission(await store.now(), key="k", run_input={"say": "something else"})
    assert await store.admit(other, within_ms=WITHIN_MS) == Mismatch()


async def test_a_mismatch_leaves_the_key_as_it_was(store: Store) -> None:
    run_id = await start(store, key="k")
    other = admission(await store.now(), key="k", run_input={"say": "something else"})
    await store.admit(other, within_ms=WITHIN_MS)
    again = admission(await store.now(), key="k")
    assert await store.admit(again, within_ms=WITHIN_MS) == Replayed(run_id)


async def test_a_key_used_in_a_refusal_succeeds_once_there_is_room(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=1))
    first = await start(store)
    refused = admission(await store.now(), key="k")
    assert await store.admit(refused, within_ms=WITHIN_MS) == Full(1, 1)
    await cancel(store, first)
    retried = admission(await store.now(), key="k")
    assert await store.admit(retried, within_ms=WITHIN_MS) == Admitted(retried.run.id)


async def test_a_key_used_in_a_refusal_may_come_back_with_another_payload(store: Store) -> None:
    stale = admission(await store.now(), key="k", definitions={WorkflowId("one-job"): 7})
    assert await store.admit(stale, within_ms=WITHIN_MS) == StaleDefinition()
    other = admission(await store.now(), key="k", run_input={"say": "something else"})
    assert await store.admit(other, within_ms=WITHIN_MS) == Admitted(other.run.id)


async def test_the_same_key_of_two_tenants_makes_two_runs(store: Store) -> None:
    first = await start(store, key="k")
    second = await start(store, key="k", tenant=GLOBEX)
    assert first != second


async def test_two_keys_make_two_runs(store: Store) -> None:
    await start(store, key="k")
    await start(store, key="l")
    assert await store.active_runs(ACME) == 2


async def test_without_a_key_equal_requests_make_a_run_each(store: Store) -> None:
    await start(store)
    await start(store)
    assert await store.active_runs(ACME) == 2


async def test_a_key_is_known_while_its_run_goes_on_however_long(harness: Harness) -> None:
    store = await harness.open_store(key_ttl_ms=harness.short_ms)
    run_id = await start(store, key="k")
    await harness.pass_time(2 * harness.short_ms)
    again = admission(await store.now(), key="k")
    assert await store.admit(again, within_ms=WITHIN_MS) == Replayed(run_id)


async def test_a_key_is_known_for_a_while_after_its_run_ended(store: Store) -> None:
    run_id = await start(store, key="k")
    await cancel(store, run_id)
    again = admission(await store.now(), key="k")
    assert await store.admit(again, within_ms=WITHIN_MS) == Replayed(run_id)


async def test_a_key_is_forgotten_a_while_after_its_run_ended(harness: Harness) -> None:
    store = await harness.open_store(key_ttl_ms=harness.short_ms)
    await cancel(store, await start(store, key="k"))
    await harness.pass_time(harness.short_ms)
    anew = admission(await store.now(), key="k", run_input={"say": "something else"})
    assert await store.admit(anew, within_ms=WITHIN_MS) == Admitted(anew.run.id)


async def test_a_key_ages_from_the_end_of_its_run_and_not_from_its_beginning(
    harness: Harness,
) -> None:
    store = await harness.open_store(key_ttl_ms=4 * harness.short_ms)
    run_id = await start(store, key="k")
    await harness.pass_time(4 * harness.short_ms)
    await cancel(store, run_id)
    again = admission(await store.now(), key="k")
    assert await store.admit(again, within_ms=WITHIN_MS) == Replayed(run_id)


async def test_the_key_of_a_run_that_ended_as_it_began_is_known_and_ages(
    harness: Harness,
) -> None:
    store = await harness.open_store(key_ttl_ms=harness.short_ms)
    run_id = await start(store, FOR_EACH, run_input={"items": []}, key="k")
    again = admission(await store.now(), FOR_EACH, run_input={"items": []}, key="k")
    assert await store.admit(again, within_ms=WITHIN_MS) == Replayed(run_id)
    await harness.pass_time(harness.short_ms)
    assert await store.admit(again, within_ms=WITHIN_MS) == Admitted(again.run.id)


async def test_a_key_taken_anew_stands_for_the_new_run(harness: Harness) -> None:
    store = await harness.open_store(key_ttl_ms=harness.short_ms)
    await cancel(store, await start(store, key="k"))
    await harness.pass_time(harness.short_ms)
    second = await start(store, key="k")
    again = admission(await store.now(), key="k")
    assert await store.admit(again, within_ms=WITHIN_MS) == Replayed(second)


async def test_a_key_with_odd_characters_is_a_key_like_any_other(store: Store) -> None:
    odd = "a:b{c}d e\n*?[]\\ü€"
    run_id = await start(store, key=odd)
    again = admission(await store.now(), key=odd)
    assert await store.admit(again, within_ms=WITHIN_MS) == Replayed(run_id)


async def test_many_keys_are_looked_up_together_while_the_tenant_is_full(harness: Harness) -> None:
    store = await harness.open_store(key_ttl_ms=harness.short_ms)
    odd = "a:b{c}d e\n*?[]\\ü€"
    await cancel(store, await start(store, key="aged"))
    await start(store, tenant=GLOBEX, key="of another")
    await harness.pass_time(harness.short_ms)
    mine = {key: await start(store, key=key) for key in ("k", odd)}
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=1))
    asked = ["aged", "of another", *(f"new {each}" for each in range(2_500)), "k", odd, "k"]
    checked = await store.check_starts(ACME, [StartTerms()], asked)
    assert checked.refused == (Full(1, 2),)
    assert {key: record.run_id for key, record in checked.known.items()} == mine
    (mark,) = {record.fingerprint for record in checked.known.values()}
    assert judge_key(checked.known["k"], mark) == Replayed(mine["k"])
    assert judge_key(checked.known["k"], "other") == Mismatch()
    assert mark == admission(await store.now()).fingerprint
