"""Durability: what was acknowledged is there when the store is opened again.

Over every store but memory, which keeps nothing by its nature.
"""

from __future__ import annotations

from stanchion.core.admission import Full, Replayed
from stanchion.core.events import CancelRequested
from stanchion.core.model import RunStatus, StepId
from stanchion.ports.records import (
    Accepted,
    Committed,
    Document,
    JobState,
    Tenant,
)
from stanchion.ports.store import Store
from tests.contract.builders import (
    ACME,
    DELAY,
    FOR_EACH,
    ONE_JOB,
    TOPIC,
    WITHIN_MS,
    accept,
    admission,
    advance,
    cancel,
    commit_of,
    lease,
    lease_one,
    loaded,
    nothing,
    result_of,
    start,
    workflow,
)
from tests.contract.harness import Harness


async def test_an_admitted_run_survives(durable_store: Store, harness: Harness) -> None:
    await durable_store.put_tenant(ACME, Tenant(max_concurrent_runs=1))
    run_id = await start(durable_store, FOR_EACH, run_input={"items": ["a", "b"]}, key="k")
    before = await loaded(durable_store, run_id)
    items = await durable_store.load_items(run_id, {StepId("each"): [0, 1]})
    timeline = await durable_store.timeline(run_id)
    store = await harness.reopen()
    assert await loaded(store, run_id) == before
    assert await store.load_items(run_id, {StepId("each"): [0, 1]}) == items
    assert await store.timeline(run_id) == timeline
    assert await store.active_runs(ACME) == 1
    assert await store.ready_topics() == {TOPIC: 2}
    assert [each.id for each in (await store.list_runs(ACME)).items] == [run_id]


async def test_a_key_and_a_cap_survive(durable_store: Store, harness: Harness) -> None:
    await durable_store.put_tenant(ACME, Tenant(max_concurrent_runs=1))
    run_id = await start(durable_store, key="k")
    store = await harness.reopen()
    again = admission(await store.now(), key="k")
    assert await store.admit(again, within_ms=WITHIN_MS) == Replayed(run_id)
    other = admission(await store.now())
    assert await store.admit(other, within_ms=WITHIN_MS) == Full(1, 1)


async def test_a_lease_survives(durable_store: Store, harness: Harness) -> None:
    run_id = await start(durable_store)
    leased = await lease_one(durable_store)
    store = await harness.reopen()
    assert await lease(store) == ()
    view = await store.job(leased.job.id)
    assert view is not None
    assert (view.state, view.fence) == (JobState.LEASED, leased.fence)
    assert view.expires_at == leased.expires_at
    assert await accept(store, leased) == Accepted(leased.job.id, run_id)


async def test_an_accepted_result_survives(durable_store: Store, harness: Harness) -> None:
    run_id = await start(durable_store)
    leased = await lease_one(durable_store)
    await accept(durable_store, leased, {"answer": 42})
    store = await harness.reopen()
    assert await store.accept([result_of(leased)]) == (
        Accepted(leased.job.id, run_id, repeated=True),
    )
    assert [row.run_id for row in await store.take_outbox(limit=9, hold_ms=9)] == [run_id]
    await advance(store, ONE_JOB, run_id)
    assert (await loaded(store, run_id)).run.output == {"step": {"answer": 42}}


async def test_a_commit_survives(durable_store: Store, harness: Harness) -> None:
    found = await loaded(durable_store, await start(durable_store))
    commit = commit_of(found, nothing(found, say="said"), fence=7)
    answer = await durable_store.commit(commit)
    assert isinstance(answer, Committed)
    store = await harness.reopen()
    run = (await loaded(store, found.run.id)).run
    assert (run.stamp, run.fence) == (answer.stamp, 7)
    assert await store.commit(commit) == answer
    assert (await store.timeline(found.run.id)).items[-1].what == "said"


async def test_a_timer_survives(durable_store: Store, harness: Harness) -> None:
    run_id = await start(durable_store, DELAY)
    store = await harness.reopen()
    await harness.pass_time(110)
    assert await store.fire_timers(limit=10) == (run_id,)


async def test_the_end_of_a_run_survives(durable_store: Store, harness: Harness) -> None:
    run_id = await start(durable_store)
    await cancel(durable_store, run_id)
    store = await harness.reopen()
    assert (await loaded(store, run_id)).run.status is RunStatus.CANCELLED
    assert await store.active_runs(ACME) == 0
    assert (await store.audit_slots(limit=1_000)).drifts == ()


async def test_a_posted_event_and_a_dead_letter_survive(
    durable_store: Store, harness: Harness
) -> None:
    run_id = await start(durable_store)
    for name in ("a", "b"):
        await durable_store.post(run_id, CancelRequested(), entry_id=name)
    letter = await durable_store.write_dead_letter(run_id, "a", cause="poison")
    await durable_store.count_failure(run_id, "b")
    store = await harness.reopen()
    assert (await store.list_dead_letters(ACME)).items == (letter,)
    assert [entry.id for entry in (await loaded(store, run_id)).inbox] == ["b"]
    assert await store.count_failure(run_id, "b") == 2
    assert await store.outbox_size() == 1


async def test_a_feed_goes_on_where_it_was(durable_store: Store, harness: Harness) -> None:
    await start(durable_store)
    position = await durable_store.feed_position(ACME)
    store = await harness.reopen()
    assert await store.feed_position(ACME) == position
    run_id = await start(store)
    assert [entry.run_id for entry in await store.feed(ACME, after=position)] == [run_id]


async def test_definitions_tenants_and_documents_survive(
    durable_store: Store, harness: Harness
) -> None:
    definition = workflow("flow")
    await durable_store.put_workflow(ACME, definition)
    await durable_store.put_tenant(ACME, Tenant(max_concurrent_runs=3))
    await durable_store.put_document("settings", "global", {"a": 1}, read=0)
    store = await harness.reopen()
    stored = await store.workflow(ACME, definition.id)
    assert stored is not None
    assert stored.workflow == definition
    assert await store.tenant(ACME) == Tenant(max_concurrent_runs=3)
    assert await store.document("settings", "global") == Document({"a": 1}, 1)
    assert await store.put_workflow(ACME, definition) == 1
