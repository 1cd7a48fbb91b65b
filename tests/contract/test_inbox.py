"""The inbox: what was accepted for a run and is not applied yet, in the order of arrival."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from stanchion.core.events import (
    Approved,
    AttemptFailed,
    AttemptSucceeded,
    CancelRequested,
    Event,
    JobDied,
    JobReplayed,
    Rejected,
    Started,
    Timer,
    TimerFired,
    TimerKind,
)
from stanchion.core.model import Failure, JobId, RunId, StepId
from stanchion.ports.records import InboxEntry, PostAnswer
from stanchion.ports.store import Store
from tests.contract.builders import ONE_JOB, accept, advance, lease_one, loaded, start

_STEP = StepId("step")
_EVENTS: list[Event] = [
    Started(actor="me"),
    AttemptSucceeded(job_id=JobId("j"), step_id=_STEP, output={"a": [1, 2.5, None, True]}),
    AttemptFailed(job_id=JobId("j"), step_id=_STEP, item=3, error=Failure("c", "m"), final=True),
    JobDied(job_id=JobId("j"), step_id=_STEP, dispatch=2, deliveries=5),
    JobReplayed(job_id=JobId("j"), step_id=_STEP, dispatch=2, actor="operator"),
    TimerFired(timer=Timer(TimerKind.RETRY, _STEP, 7, 2)),
    Approved(step_id=_STEP, comment="good"),
    Rejected(step_id=_STEP, comment='Grüße "und" \\ mehr\n'),
    CancelRequested(reason="enough"),
]


async def test_a_posted_event_lies_in_the_inbox(store: Store) -> None:
    run_id = await start(store)
    event = CancelRequested(reason="enough", actor="someone")
    assert await store.post(run_id, event, entry_id="e1") is PostAnswer.POSTED
    assert (await loaded(store, run_id)).inbox == (InboxEntry("e1", event),)


@pytest.mark.parametrize("event", _EVENTS, ids=lambda event: type(event).__name__)
async def test_every_kind_of_event_comes_back_as_it_was(store: Store, event: Event) -> None:
    run_id = await start(store)
    await store.post(run_id, event, entry_id="e1")
    assert (await loaded(store, run_id)).inbox == (InboxEntry("e1", event),)


async def test_a_posted_event_has_an_outbox_row_due_at_once(store: Store) -> None:
    run_id = await start(store)
    await store.post(run_id, CancelRequested(), entry_id="e1")
    (row,) = await store.take_outbox(limit=10, hold_ms=1_000)
    assert row.run_id == run_id


async def test_an_entry_is_posted_once(store: Store) -> None:
    run_id = await start(store)
    await store.post(run_id, CancelRequested(reason="first"), entry_id="e1")
    again = await store.post(run_id, CancelRequested(reason="second"), entry_id="e1")
    assert again is PostAnswer.REPEATED
    (entry,) = (await loaded(store, run_id)).inbox
    assert entry.event == CancelRequested(reason="first")
    (row,) = await store.take_outbox(limit=10, hold_ms=1_000)
    assert row.number == 1


async def test_an_entry_posted_many_times_at_once_is_posted_once(store: Store) -> None:
    run_id = await start(store)
    answers = await asyncio.gather(
        *(store.post(run_id, CancelRequested(), entry_id="e1") for _ in range(20))
    )
    assert Counter(answers) == {PostAnswer.POSTED: 1, PostAnswer.REPEATED: 19}


async def test_nothing_is_posted_to_an_unknown_run(store: Store) -> None:
    run_id = await start(store)
    for odd in ("", "nonsense", run_id[:-2] + "zz"):
        posted = await store.post(RunId(odd), CancelRequested(), entry_id="e1")
        assert posted is PostAnswer.UNKNOWN
    assert await store.outbox_size() == 0


async def test_entries_are_in_the_order_of_their_arrival(store: Store) -> None:
    run_id = await start(store)
    names = [f"entry-{(7 * number) % 20}" for number in range(20)]
    for name in names:
        await store.post(run_id, CancelRequested(), entry_id=name)
    assert [entry.id for entry in (await loaded(store, run_id)).inbox] == names


async def test_entries_of_different_origins_are_in_the_order_of_their_arrival(
    store: Store,
) -> None:
    run_id = await start(store)
    leased = await lease_one(store)
    await store.post(run_id, CancelRequested(), entry_id="z")
    await accept(store, leased)
    await store.post(run_id, CancelRequested(), entry_id="a")
    ids = [entry.id for entry in (await loaded(store, run_id)).inbox]
    assert ids == ["z", f"result:{leased.job.id}#{leased.fence}", "a"]


async def test_an_applied_entry_may_be_posted_anew(store: Store) -> None:
    run_id = await start(store)
    late = Approved(step_id=_STEP)
    await store.post(run_id, late, entry_id="e1")
    await advance(store, ONE_JOB, run_id)
    assert await store.post(run_id, late, entry_id="e1") is PostAnswer.POSTED


async def test_runs_have_inboxes_of_their_own(store: Store) -> None:
    first, second = await start(store), await start(store)
    await store.post(first, CancelRequested(), entry_id="e1")
    assert await store.post(second, CancelRequested(), entry_id="e1") is PostAnswer.POSTED
    assert len((await loaded(store, first)).inbox) == 1


async def test_failures_of_an_entry_are_counted(store: Store) -> None:
    run_id = await start(store)
    await store.post(run_id, CancelRequested(), entry_id="e1")
    await store.post(run_id, CancelRequested(), entry_id="e2")
    assert [await store.count_failure(run_id, "e1") for _ in range(3)] == [1, 2, 3]
    assert await store.count_failure(run_id, "e2") == 1


async def test_failures_counted_at_once_are_all_counted(store: Store) -> None:
    run_id = await start(store)
    await store.post(run_id, CancelRequested(), entry_id="e1")
    counts = await asyncio.gather(*(store.count_failure(run_id, "e1") for _ in range(20)))
    assert sorted(counts) == list(range(1, 21))


async def test_the_count_of_failures_goes_with_its_entry(store: Store) -> None:
    run_id = await start(store)
    late = Approved(step_id=_STEP)
    await store.post(run_id, late, entry_id="e1")
    await store.count_failure(run_id, "e1")
    await advance(store, ONE_JOB, run_id)
    assert await store.count_failure(run_id, "e1") == 0
    await store.post(run_id, late, entry_id="e1")
    assert await store.count_failure(run_id, "e1") == 1


async def test_failures_of_what_is_not_there_are_not_counted(store: Store) -> None:
    run_id = await start(store)
    assert await store.count_failure(run_id, "e1") == 0
    assert await store.count_failure(RunId("nonsense"), "e1") == 0
    await store.post(run_id, CancelRequested(), entry_id="e1")
    assert await store.count_failure(run_id, "e1") == 1
