"""Dead letters: what was tried as often as is allowed, kept for somebody to look at and replay."""

from __future__ import annotations

import asyncio

import pytest

from stanchion.core.events import (
    Approved,
    CancelRequested,
    JobDiscarded,
    JobReplayed,
    Timer,
    TimerFired,
    TimerKind,
)
from stanchion.core.model import RunId, RunStatus, StepId, TenantId, WorkflowId
from stanchion.core.workflow import JobSpec, Workflow
from stanchion.ports.records import (
    BadCursor,
    DeadLetter,
    DeadLetterKind,
    InboxEntry,
    JobState,
    LeasedJob,
    PostAnswer,
    RejectedCode,
    ResultRefused,
)
from stanchion.ports.store import Store
from tests.contract.builders import (
    ACME,
    FOR_EACH,
    GLOBEX,
    ONE_JOB,
    TOPIC,
    accept,
    advance,
    cancel,
    lease,
    lease_one,
    loaded,
    planned,
    start,
)
from tests.contract.harness import Harness

_STEP = StepId("step")


async def test_a_dead_job_is_a_dead_letter(store: Store) -> None:
    run_id = await start(store)
    before = await store.now()
    died = await _die(store)
    (letter,) = (await store.list_dead_letters(ACME)).items
    assert letter.id == f"job:{died.job.id}#1"
    assert letter.kind is DeadLetterKind.JOB
    assert (letter.tenant, letter.run_id, letter.step_id) == (ACME, run_id, _STEP)
    assert letter.job == died.job
    assert letter.event is None
    assert letter.cause
    assert before <= letter.at <= await store.now()


async def test_a_run_with_a_dead_job_waits_and_keeps_its_slot(store: Store) -> None:
    run_id = await start(store)
    await _die(store)
    await advance(store, ONE_JOB, run_id)
    assert (await loaded(store, run_id)).run.status is RunStatus.WAITING
    assert await store.active_runs(ACME) == 1


async def test_a_replayed_job_is_told_to_its_run(store: Store) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": ["a"]})
    died = await _die(store)
    await advance(store, FOR_EACH, run_id)
    (letter,) = (await store.list_dead_letters(ACME)).items
    assert await store.replay_dead_letter(letter.id, actor="operator") == letter
    replayed = JobReplayed(
        job_id=died.job.id, step_id=died.job.step_id, item=0, dispatch=1, actor="operator"
    )
    assert (await loaded(store, run_id)).inbox == (
        InboxEntry(f"replayed:{died.job.id}#1", replayed),
    )
    assert [row.run_id for row in await store.take_outbox(limit=9, hold_ms=9)] == [run_id]


async def test_a_replayed_job_is_ready_again_and_its_deliveries_begin_anew(store: Store) -> None:
    run_id = await start(store)
    died = await _die(store)
    await advance(store, ONE_JOB, run_id)
    await store.replay_dead_letter(f"job:{died.job.id}#1", actor="operator")
    await advance(store, ONE_JOB, run_id)
    view = await store.job(died.job.id)
    assert view is not None
    assert (view.state, view.deliveries, view.job.dispatch) == (JobState.READY, 0, 2)
    leased = await lease_one(store)
    assert leased.job.id == died.job.id
    assert leased.deliveries == 1
    assert leased.fence > died.fence


async def test_a_result_from_before_the_replay_is_rejected(store: Store) -> None:
    run_id = await start(store)
    died = await _die(store)
    await store.replay_dead_letter(f"job:{died.job.id}#1", actor="operator")
    await advance(store, ONE_JOB, run_id)
    assert await accept(store, died) == ResultRefused(died.job.id, RejectedCode.STALE_FENCE)
    await lease_one(store)
    assert await accept(store, died) == ResultRefused(died.job.id, RejectedCode.STALE_FENCE)


async def test_a_replayed_job_can_be_finished(store: Store) -> None:
    run_id = await start(store)
    died = await _die(store)
    await store.replay_dead_letter(f"job:{died.job.id}#1", actor="operator")
    await advance(store, ONE_JOB, run_id)
    await accept(store, await lease_one(store))
    await advance(store, ONE_JOB, run_id)
    assert (await loaded(store, run_id)).run.status is RunStatus.SUCCEEDED
    assert await store.active_runs(ACME) == 0


async def test_a_replayed_job_can_die_again_as_another_letter(store: Store) -> None:
    run_id = await start(store)
    died = await _die(store)
    await store.replay_dead_letter(f"job:{died.job.id}#1", actor="operator")
    await advance(store, ONE_JOB, run_id)
    await _die(store)
    (letter,) = (await store.list_dead_letters(ACME)).items
    assert letter.id == f"job:{died.job.id}#2"
    await advance(store, ONE_JOB, run_id)
    assert (await loaded(store, run_id)).run.status is RunStatus.WAITING


async def test_a_letter_is_replayed_once(store: Store) -> None:
    run_id = await start(store)
    died = await _die(store)
    letter_id = f"job:{died.job.id}#1"
    answers = await asyncio.gather(
        *(store.replay_dead_letter(letter_id, actor="operator") for _ in range(10))
    )
    assert sum(answer is not None for answer in answers) == 1
    assert len((await loaded(store, run_id)).inbox) == 2  # that it died, and that it was replayed
    assert (await store.list_dead_letters(ACME)).items == ()


async def test_an_unknown_letter_is_not_replayed(store: Store) -> None:
    run_id = await start(store)
    for odd in ("", "nonsense", f"job:{run_id}:step@1#1", f"event:{run_id}:x", "job:", "event:zz"):
        assert await store.replay_dead_letter(odd, actor="operator") is None


async def test_the_letter_of_a_finished_run_is_only_taken_out(store: Store) -> None:
    run_id = await start(store)
    died = await _die(store)
    await cancel(store, run_id)
    letter = await store.replay_dead_letter(f"job:{died.job.id}#1", actor="operator")
    assert letter is not None
    assert (await store.list_dead_letters(ACME)).items == ()
    assert (await loaded(store, run_id)).inbox == ()
    assert await store.outbox_size() == 0


@pytest.mark.parametrize(("own", "usual"), [(2, 5), (2, 1)])
async def test_a_jobs_own_limit_of_deliveries_counts_instead_of_the_usual_one(
    store: Store, own: int, usual: int
) -> None:
    spec = JobSpec(topic=TOPIC)
    plan = planned(Workflow(id=WorkflowId("own-limit"), steps={_STEP: spec}, max_deliveries=own))
    run_id = await start(store, plan)
    for delivery in (1, 2):
        leased = await lease_one(store, ttl_ms=0)
        assert leased.job.max_deliveries == own
        (expired,) = await store.expire_jobs(limit=10, max_deliveries=usual)
        assert (expired.deliveries, expired.is_dead) == (delivery, delivery == own)
    (letter,) = (await store.list_dead_letters(ACME)).items
    assert letter.job is not None
    assert letter.job.max_deliveries == own
    # The limit stays with the job when it is replayed.
    await advance(store, plan, run_id)
    await store.replay_dead_letter(letter.id, actor="operator")
    await advance(store, plan, run_id)
    assert (await lease_one(store)).job.max_deliveries == own


async def test_a_discarded_job_is_told_to_its_run_and_its_item_fails(store: Store) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": ["a"]})
    died = await _die(store)
    (letter,) = (await store.list_dead_letters(ACME)).items
    assert await store.discard_dead_letter(letter.id, actor="operator") == letter
    discarded = JobDiscarded(
        job_id=died.job.id, step_id=died.job.step_id, item=0, dispatch=1, actor="operator"
    )
    # Before the run has heard that the job died: both are applied in their order.
    entry = InboxEntry(f"discarded:{died.job.id}#1", discarded)
    assert (await loaded(store, run_id)).inbox[-1] == entry
    assert [row.run_id for row in await store.take_outbox(limit=9, hold_ms=9)] == [run_id]
    await advance(store, FOR_EACH, run_id)
    run = (await loaded(store, run_id)).run
    assert run.status is RunStatus.FAILED
    assert await store.active_runs(ACME) == 0


async def test_a_letter_is_discarded_or_replayed_and_only_once(store: Store) -> None:
    run_id = await start(store)
    died = await _die(store)
    letter_id = f"job:{died.job.id}#1"
    answers = await asyncio.gather(
        *(store.discard_dead_letter(letter_id, actor="operator") for _ in range(5)),
        *(store.replay_dead_letter(letter_id, actor="operator") for _ in range(5)),
    )
    assert sum(answer is not None for answer in answers) == 1
    assert len((await loaded(store, run_id)).inbox) == 2
    assert (await store.list_dead_letters(ACME)).items == ()


async def test_an_unknown_letter_is_not_discarded(store: Store) -> None:
    run_id = await start(store)
    for odd in ("", "nonsense", f"job:{run_id}:step@1#1", f"event:{run_id}:x", "job:", "event:zz"):
        assert await store.discard_dead_letter(odd, actor="operator") is None


async def test_the_discarded_letter_of_a_finished_run_is_only_taken_out(store: Store) -> None:
    run_id = await start(store)
    died = await _die(store)
    await cancel(store, run_id)
    assert await store.discard_dead_letter(f"job:{died.job.id}#1", actor="operator") is not None
    assert (await store.list_dead_letters(ACME)).items == ()
    assert (await loaded(store, run_id)).inbox == ()
    assert await store.outbox_size() == 0


async def test_the_event_of_a_discarded_letter_is_dropped(store: Store) -> None:
    run_id = await start(store)
    await store.post(run_id, CancelRequested(), entry_id="e1")
    letter = await store.write_dead_letter(run_id, "e1", cause="poison")
    assert letter is not None
    assert await store.discard_dead_letter(letter.id, actor="operator") == letter
    assert (await store.list_dead_letters(None)).items == ()
    assert (await loaded(store, run_id)).inbox == ()
    assert await store.outbox_size() == 0
    assert await store.replay_dead_letter(letter.id, actor="operator") is None


# ── Entries that cannot be applied ───────────────────────────────────────────────────────────────


async def test_a_buried_entry_is_a_dead_letter(store: Store) -> None:
    run_id = await start(store)
    event = Approved(step_id=_STEP, comment="poison")
    await store.post(run_id, event, entry_id="e1")
    letter = await store.write_dead_letter(run_id, "e1", cause="failed 10 times")
    assert letter is not None
    assert letter == DeadLetter(
        id=f"event:{run_id}:e1",
        kind=DeadLetterKind.EVENT,
        tenant=ACME,
        run_id=run_id,
        step_id=_STEP,
        cause="failed 10 times",
        at=letter.at,
        event=event,
    )
    assert (await store.list_dead_letters(ACME)).items == (letter,)
    assert letter.at <= await store.now()


async def test_a_buried_entry_leaves_the_inbox_and_the_others_stay(store: Store) -> None:
    run_id = await start(store)
    for name in ("a", "b", "c"):
        await store.post(run_id, CancelRequested(), entry_id=name)
    await store.write_dead_letter(run_id, "b", cause="poison")
    assert [entry.id for entry in (await loaded(store, run_id)).inbox] == ["a", "c"]
    assert await store.outbox_size() == 1


async def test_the_outbox_row_goes_with_the_last_entry(store: Store) -> None:
    run_id = await start(store)
    await store.post(run_id, CancelRequested(), entry_id="a")
    await store.write_dead_letter(run_id, "a", cause="poison")
    assert await store.outbox_size() == 0


async def test_a_letter_names_the_step_that_its_event_is_about(store: Store) -> None:
    run_id = await start(store)
    timer = Timer(TimerKind.RETRY, _STEP, None, 1)
    await store.post(run_id, TimerFired(timer=timer), entry_id="timer")
    await store.post(run_id, CancelRequested(), entry_id="cancel")
    letters = [
        await store.write_dead_letter(run_id, name, cause="poison") for name in ("timer", "cancel")
    ]
    assert [letter and letter.step_id for letter in letters] == [_STEP, None]


async def test_what_is_not_in_the_inbox_is_not_buried(store: Store) -> None:
    run_id = await start(store)
    assert await store.write_dead_letter(run_id, "e1", cause="poison") is None
    assert await store.write_dead_letter(RunId("nonsense"), "e1", cause="poison") is None
    assert (await store.list_dead_letters(None)).items == ()


async def test_a_buried_entry_is_replayed_as_it_was(store: Store) -> None:
    run_id = await start(store)
    event = Approved(step_id=_STEP, comment="poison", actor="someone")
    entry_id = "odd:id#1:{x}"
    await store.post(run_id, event, entry_id=entry_id)
    letter = await store.write_dead_letter(run_id, entry_id, cause="poison")
    assert letter is not None
    assert await store.replay_dead_letter(letter.id, actor="operator") == letter
    assert (await loaded(store, run_id)).inbox == (InboxEntry(entry_id, event),)
    assert [row.run_id for row in await store.take_outbox(limit=9, hold_ms=9)] == [run_id]
    assert await store.replay_dead_letter(letter.id, actor="operator") is None


async def test_a_buried_entry_begins_its_count_of_failures_anew(store: Store) -> None:
    run_id = await start(store)
    await store.post(run_id, CancelRequested(), entry_id="e1")
    await store.count_failure(run_id, "e1")
    letter = await store.write_dead_letter(run_id, "e1", cause="poison")
    assert letter is not None
    await store.replay_dead_letter(letter.id, actor="operator")
    assert await store.count_failure(run_id, "e1") == 1


async def test_a_buried_entry_does_not_keep_an_equal_one_from_being_posted(store: Store) -> None:
    run_id = await start(store)
    await store.post(run_id, CancelRequested(), entry_id="e1")
    await store.write_dead_letter(run_id, "e1", cause="poison")
    posted = await store.post(run_id, CancelRequested(), entry_id="e1")
    assert posted is PostAnswer.POSTED


# ── Listing ──────────────────────────────────────────────────────────────────────────────────────


async def test_letters_are_listed_oldest_first_in_pages(store: Store) -> None:
    run_id = await start(store)
    names = [f"e{(3 * number) % 7}" for number in range(7)]
    for name in names:
        await store.post(run_id, CancelRequested(), entry_id=name)
        await store.write_dead_letter(run_id, name, cause=name)
    listed: list[str] = []
    cursor = None
    for expected in (3, 3, 1):
        page = await store.list_dead_letters(ACME, cursor=cursor, limit=3)
        assert len(page.items) == expected
        listed += [letter.cause for letter in page.items]
        cursor = page.cursor
    assert listed == names
    assert cursor is None


async def test_a_letter_that_is_written_again_is_the_newest(store: Store, harness: Harness) -> None:
    run_id = await start(store)
    for name in ("a", "b", "a"):
        await store.post(run_id, CancelRequested(), entry_id=name)
        await store.write_dead_letter(run_id, name, cause=name)
        await harness.pass_time(2)
    for tenant in (ACME, None):
        first = await store.list_dead_letters(tenant, limit=1)
        second = await store.list_dead_letters(tenant, cursor=first.cursor, limit=1)
        assert [letter.cause for letter in (*first.items, *second.items)] == ["b", "a"]
        assert second.cursor is None


async def test_a_page_that_holds_all_letters_is_the_last(store: Store) -> None:
    run_id = await start(store)
    for name in ("a", "b"):
        await store.post(run_id, CancelRequested(), entry_id=name)
        await store.write_dead_letter(run_id, name, cause="poison")
    for tenant in (ACME, None):
        assert (await store.list_dead_letters(tenant, limit=2)).cursor is None
        assert (await store.list_dead_letters(tenant, limit=1)).cursor is not None


async def test_letters_are_listed_for_one_tenant_or_for_all(store: Store) -> None:
    for tenant in (ACME, GLOBEX):
        await start(store, tenant=tenant)
    for leased in await lease(store, max_jobs=2, ttl_ms=0):
        assert leased.deliveries == 1
    await store.expire_jobs(limit=10, max_deliveries=1)
    (own,) = (await store.list_dead_letters(GLOBEX)).items
    assert own.tenant == GLOBEX
    everyones = (await store.list_dead_letters(None)).items
    assert sorted(letter.tenant for letter in everyones) == [ACME, GLOBEX]
    assert (await store.list_dead_letters(TenantId("initech"))).items == ()


async def test_letters_of_all_tenants_are_listed_oldest_first_in_pages(
    store: Store, harness: Harness
) -> None:
    tenants = [TenantId(f"tenant-{number}") for number in range(7)]
    for tenant in tenants:
        run_id = await start(store, tenant=tenant)
        await store.post(run_id, CancelRequested(), entry_id="a")
        await store.write_dead_letter(run_id, "a", cause="poison")
        await harness.pass_time(2)
    listed: list[TenantId] = []
    cursor = None
    for _ in range(10):
        page = await store.list_dead_letters(None, cursor=cursor, limit=3)
        assert len(page.items) <= 3
        listed += [letter.tenant for letter in page.items]
        cursor = page.cursor
        if cursor is None:
            break
    assert listed == tenants


async def test_a_bad_cursor_is_said_to_be_bad(store: Store) -> None:
    with pytest.raises(BadCursor):
        await store.list_dead_letters(ACME, cursor="nonsense")
    with pytest.raises(BadCursor):
        await store.list_dead_letters(None, cursor="nonsense")


async def _die(store: Store) -> LeasedJob:
    leased = await lease_one(store, ttl_ms=0)
    (expired,) = await store.expire_jobs(limit=10, max_deliveries=1)
    assert expired.is_dead
    return leased
