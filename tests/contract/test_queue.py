"""The queue: who waits for a slot, who gets the next one, and that it happens in one step."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from msgspec.structs import replace

from stanchion.core.admission import (
    Admitted,
    Full,
    Mismatch,
    NoQueue,
    Queued,
    QueueFull,
    Replayed,
    Verdict,
)
from stanchion.core.events import CancelRequested, Promoted, TimerFired
from stanchion.core.json_value import JsonObject
from stanchion.core.model import (
    Instant,
    Item,
    ItemKey,
    RunId,
    RunStatus,
    Stamp,
    StepStatus,
    TenantId,
    place_of,
)
from stanchion.core.queue import (
    KEYS_COUNTED_MAX,
    PROMOTED_AT_ONCE_MAX,
    QUEUE_TIMEOUT,
    QUEUE_TIMER,
    FairQueue,
    OnFull,
    QueuePlace,
    QueueRequest,
)
from stanchion.core.schedule import TickMark
from stanchion.ports.records import (
    Admission,
    CommitConflict,
    Committed,
    InboxEntry,
    Loaded,
    OldestWaits,
    PostAnswer,
    RunFilter,
    StartTerms,
    Tenant,
)
from stanchion.ports.store import Store
from tests.contract.builders import (
    ACME,
    FOR_EACH,
    GLOBEX,
    ONE_JOB,
    WITHIN_MS,
    admission,
    advance,
    cancel,
    commit_of,
    finish,
    jobs_of,
    lease,
    loaded,
    nothing,
    start,
)
from tests.contract.harness import LONG_MS, Harness

CAP_1 = Tenant(max_concurrent_runs=1, on_full=OnFull.QUEUE)
ROOMY = replace(CAP_1, queue_max=1_000)


async def _ask(
    store: Store,
    priority: int = 5,
    fairness_key: str = "",
    *,
    on_full: OnFull | None = None,
    key: str | None = None,
    tenant: TenantId = ACME,
) -> tuple[Admission, Verdict]:
    request = QueueRequest(priority, fairness_key, on_full)
    wanted = admission(await store.now(), key=key, tenant=tenant, queue=request)
    return wanted, await store.admit(wanted, within_ms=WITHIN_MS)


async def _wait(store: Store, priority: int = 5, fairness_key: str = "") -> RunId:
    """A run that is queued."""
    wanted, verdict = await _ask(store, priority, fairness_key)
    assert isinstance(verdict, Queued), verdict
    return wanted.run.id


async def _position(store: Store, run_id: RunId) -> int | None:
    place = await store.queue_place(run_id)
    return None if place is None else place.position


async def _full(store: Store, config: Tenant = CAP_1) -> RunId:
    """A tenant that queues, and the run that has its only slot."""
    await store.put_tenant(ACME, config)
    return await start(store)


async def _end(store: Store, run_id: RunId) -> tuple[RunId, ...]:
    """End a run; returns those that were promoted."""
    answer = await advance(store, ONE_JOB, run_id, CancelRequested(actor="test"))
    assert isinstance(answer, Committed)
    return answer.promoted


async def _served(store: Store, first: RunId, count: int) -> list[RunId]:
    """The order in which waiting runs get the only slot."""
    order, at = [], first
    for _ in range(count):
        (at,) = await _end(store, at)
        order.append(at)
    return order


async def test_a_run_waits_without_a_slot_and_without_jobs(store: Store) -> None:
    await _full(store)
    await lease(store)
    wanted, verdict = await _ask(store)
    assert verdict == Queued(wanted.run.id, 1)
    found = await loaded(store, wanted.run.id)
    assert wanted.before is not None
    assert found == Loaded(replace(wanted.before, status=RunStatus.QUEUED), ())
    assert await store.active_runs(ACME) == 1
    assert await store.queued_runs(ACME) == 1
    assert await lease(store) == ()
    lines = (await store.timeline(wanted.run.id)).items
    assert [line.what for line in lines] == ["run_queued"]
    listed = await store.list_runs(ACME, only=RunFilter(statuses=(RunStatus.QUEUED,)))
    assert [run.id for run in listed.items] == [wanted.run.id]
    (standing,) = (await store.list_standings(seen_since=await store.now())).items
    assert (standing.active, standing.queued) == (1, 1)
    assert await store.standings([ACME]) == (standing,)
    facts = await store.run_facts(wanted.run.id)
    assert facts is not None
    assert facts.place == QueuePlace(1, 5, "")
    assert [timer.timer for timer in facts.timers] == [QUEUE_TIMER]
    assert facts.timers[0].due == wanted.run.created_at + 300_000
    assert (await store.audit_slots(limit=10)).drifts == ()


async def test_the_oldest_waits_are_those_of_the_first_queued_run_and_of_the_first_ready_job(
    store: Store,
) -> None:
    assert await store.oldest_waits(None) == OldestWaits()
    first = await _full(store)
    other = await start(store, tenant=GLOBEX)
    waits = [await _wait(store, priority) for priority in (0, 9, 5)]
    created = [(await loaded(store, each)).run.created_at for each in waits]
    for tenant in (ACME, None):
        found = await store.oldest_waits(tenant)
        assert found.queued in waits, "whatever its priority"
        assert (await loaded(store, found.queued)).run.created_at == min(created)
        runs = [place_of(job_id).run_id for job_id in found.ready]
        assert first in runs
        assert set(runs) <= {first, other} if tenant is None else runs == [first]
    of_other = await store.oldest_waits(GLOBEX)
    assert of_other.queued is None
    assert [place_of(job_id).run_id for job_id in of_other.ready] == [other]
    assert await store.oldest_waits(TenantId("nobody")) == OldestWaits()
    await start(store, tenant=GLOBEX)
    assert (await store.oldest_waits(GLOBEX)).ready == of_other.ready
    assert len(await lease(store, max_jobs=10)) == 3
    found = await store.oldest_waits(None)
    assert found.ready == ()
    for run_id in waits:
        await advance(store, ONE_JOB, run_id, CancelRequested(actor="test"))
    assert await store.oldest_waits(None) == OldestWaits()


async def test_the_step_that_frees_a_slot_promotes_the_next_run(store: Store) -> None:
    first = await _full(store)
    waits, behind = await _wait(store), await _wait(store)
    assert [await _position(store, each) for each in (waits, behind)] == [1, 2]
    before = await loaded(store, waits)
    assert await _end(store, first) == (waits,)
    assert await store.active_runs(ACME) == 1
    assert await store.queued_runs(ACME) == 1
    assert [await _position(store, each) for each in (waits, behind)] == [None, 1]
    listed = await store.list_runs(ACME, only=RunFilter(statuses=(RunStatus.PENDING,)))
    assert [(run.id, run.status) for run in listed.items] == [(waits, RunStatus.PENDING)]
    (row,) = await store.take_outbox(limit=10, hold_ms=1_000)
    assert (row.run_id, row.tenant) == (waits, ACME)
    await store.confirm_outbox([row])
    assert await store.outbox_size() == 1  # until the run has begun
    found = await loaded(store, waits)
    stamp = Stamp(before.run.stamp.version + 1, f"+{before.run.stamp.nonce}")
    assert found.run == replace(before.run, status=RunStatus.PENDING, stamp=stamp)
    assert found.inbox == (InboxEntry("promoted", Promoted()),)
    assert await store.outbox_size() == 1
    assert (await store.audit_slots(limit=10)).drifts == ()


async def test_a_promoted_run_begins_by_its_first_decision(store: Store) -> None:
    first = await _full(store)
    waits = await _wait(store)
    await _end(store, first)
    answer = await advance(store, ONE_JOB, waits)
    assert isinstance(answer, Committed)
    found = await loaded(store, waits)
    assert (found.run.status, found.inbox) == (RunStatus.RUNNING, ())
    assert await store.outbox_size() == 0
    facts = await store.run_facts(waits)
    assert facts is not None
    assert QUEUE_TIMER not in [timer.timer for timer in facts.timers]
    await finish(store, ONE_JOB, waits)
    assert await store.active_runs(ACME) == 0
    lines = [line.what for line in (await store.timeline(waits)).items]
    assert lines[:2] == ["run_queued", "run_started"]


async def test_a_promotion_survives_a_row_that_is_confirmed_or_an_entry_that_dies(
    store: Store,
) -> None:
    first = await _full(store)
    waits = await _wait(store)
    assert await store.post(waits, Promoted(), entry_id="odd") is PostAnswer.POSTED
    (row,) = await store.take_outbox(limit=10, hold_ms=1_000)
    await _end(store, first)
    assert await store.write_dead_letter(waits, "odd", cause="test") is not None
    await store.confirm_outbox([row])
    assert await store.outbox_size() == 1
    assert [entry.id for entry in (await loaded(store, waits)).inbox] == ["promoted"]


async def test_a_promoted_run_that_was_read_is_not_due_again_before_its_time(
    store: Store, harness: Harness
) -> None:
    first = await _full(store)
    waits = await _wait(store)
    await _end(store, first)
    (row,) = await store.take_outbox(limit=10, hold_ms=LONG_MS)
    assert [entry.id for entry in (await loaded(store, waits)).inbox] == ["promoted"]
    assert await store.take_outbox(limit=10, hold_ms=LONG_MS) == ()
    # Its lock was contended.
    await store.defer_outbox(row, delay_ms=harness.short_ms)
    assert await store.take_outbox(limit=10, hold_ms=LONG_MS) == ()
    await harness.pass_time(harness.short_ms)
    assert await store.take_outbox(limit=10, hold_ms=LONG_MS) == (row,)
    await advance(store, ONE_JOB, waits)
    assert await store.outbox_size() == 0


async def test_keys_take_turns_below_strict_priorities(store: Store) -> None:
    first = await _full(store)
    asked = [(5, "a"), (5, "a"), (5, "a"), (5, "b"), (7, "z"), (5, "c"), (5, "b"), (0, "")]
    runs = [await _wait(store, priority, key) for priority, key in asked]
    expected = [runs[at] for at in (4, 0, 3, 5, 1, 6, 2, 7)]
    positions = [await _position(store, run_id) for run_id in expected]
    assert positions == list(range(1, 9))
    assert await _served(store, first, 8) == expected


async def test_a_key_that_comes_back_joins_at_the_tail(store: Store) -> None:
    first = await _full(store)
    a1, b1, c1 = [await _wait(store, 5, key) for key in "abc"]
    (at,) = await _end(store, first)
    assert at == a1
    a2 = await _wait(store, 5, "a")
    b2 = await _wait(store, 5, "b")
    assert await _position(store, a2) == 3
    assert await _served(store, at, 4) == [b1, c1, a2, b2]


async def test_the_order_is_that_of_the_model(store: Store) -> None:
    chance = random.Random(11)
    first = await _full(store)
    model, waiting = FairQueue(), list[RunId]()
    at: RunId | None = first
    for _ in range(60):
        what = chance.random()
        if what < 0.5:
            request = QueueRequest(chance.choice((3, 5, 5)), chance.choice(("", "a", "b", "1:b")))
            wanted, verdict = await _ask(store, request.priority, request.fairness_key)
            if at is None:
                assert verdict == Admitted(wanted.run.id)
                at = wanted.run.id
            else:
                model.add(wanted.run.id, request)
                assert verdict == Queued(wanted.run.id, model.position(wanted.run.id) or 0)
                waiting.append(wanted.run.id)
        elif what < 0.65 and len(model):
            gone = chance.choice(list(model))
            model.remove(gone)
            assert await _end(store, gone) == ()
        elif at is not None:
            promoted = await _end(store, at)
            at = model.take()
            assert promoted == (() if at is None else (at,))
        assert await store.queued_runs(ACME) == len(model)
    for run_id in waiting:
        assert await store.queue_place(run_id) == model.place(run_id)
    assert (await store.audit_slots(limit=10)).drifts == ()


async def test_positions_among_many_keys_are_those_of_the_model(store: Store) -> None:
    await _full(store, ROOMY)
    model = FairQueue()
    keys = [*map(str, range(KEYS_COUNTED_MAX + 30)), "3", "3", "4", "a", "3"]
    for number, key in enumerate(keys):
        request = QueueRequest(4 if number % 9 == 8 else 5, key)
        wanted, verdict = await _ask(store, request.priority, request.fairness_key)
        model.add(wanted.run.id, request)
        assert verdict == Queued(wanted.run.id, model.position(wanted.run.id) or 0)
    for run_id in model:
        assert await store.queue_place(run_id) == model.place(run_id)


async def test_a_start_does_not_overtake_those_that_wait(store: Store, harness: Harness) -> None:
    first = await _full(store)
    waits = await _wait(store)
    await harness.tamper_slots(ACME, -1)  # a slot that no step has noticed
    wanted, verdict = await _ask(store, 9)
    assert verdict == Queued(wanted.run.id, 1)
    assert (await loaded(store, waits)).run.status is RunStatus.PENDING
    assert first


@pytest.mark.parametrize(
    ("config", "promoted"),
    [
        (replace(CAP_1, max_concurrent_runs=3), 2),
        (replace(CAP_1, max_concurrent_runs=None), 4),
        (Tenant(max_concurrent_runs=2), 1),
        (replace(CAP_1, max_concurrent_runs=0), 0),
        (None, 4),
    ],
)
async def test_a_raised_cap_promotes_in_the_same_step(
    store: Store, config: Tenant | None, promoted: int
) -> None:
    await _full(store)
    runs = [await _wait(store) for _ in range(4)]
    if config is None:
        await store.delete_tenant(ACME)
    else:
        await store.put_tenant(ACME, config)
    statuses = [(await loaded(store, run_id)).run.status for run_id in runs]
    assert statuses == [RunStatus.PENDING] * promoted + [RunStatus.QUEUED] * (4 - promoted)
    assert await store.active_runs(ACME) == 1 + promoted
    assert await store.queued_runs(ACME) == 4 - promoted


async def _many_wait(store: Store, count: int) -> list[RunId]:
    """Runs that are queued, in their order."""
    waiting: list[RunId] = []
    while len(waiting) < count:
        now, some = await store.now(), min(store.admissions_max, count - len(waiting))
        wanted = [admission(now, queue=QueueRequest()) for _ in range(some)]
        verdicts = await store.admit_many(wanted, within_ms=WITHIN_MS)
        assert all(isinstance(each, Queued) for each in verdicts)
        waiting += [each.run.id for each in wanted]
    return waiting


async def test_one_step_promotes_a_bounded_number_and_the_next_step_goes_on(store: Store) -> None:
    first = await _full(store, ROOMY)
    waiting = await _many_wait(store, 201)
    await store.put_tenant(ACME, replace(ROOMY, max_concurrent_runs=None))
    left = 101
    assert await store.queued_runs(ACME) == left
    assert await store.promote(ACME) == tuple(waiting[-left:-1])
    assert await store.active_runs(ACME) == len(waiting)
    assert await store.promote(ACME) == tuple(waiting[-1:])
    assert await store.promote(ACME) == ()
    assert await store.promote(GLOBEX) == ()
    assert first


async def test_slots_that_are_left_after_a_crash_are_given_away_by_the_next_decision(
    store: Store,
) -> None:
    await _full(store, ROOMY)
    waiting = await _many_wait(store, PROMOTED_AT_ONCE_MAX + 2)
    cap = PROMOTED_AT_ONCE_MAX + 2
    await store.put_tenant(ACME, replace(ROOMY, max_concurrent_runs=cap))
    # The replica that changed the cap is gone. Another one decides on a promoted run.
    answer = await advance(store, ONE_JOB, waiting[7])
    assert isinstance(answer, Committed)
    assert answer.promoted == (waiting[-2],)
    again = await advance(store, ONE_JOB, waiting[8])
    assert isinstance(again, Committed)
    assert again.promoted == ()
    assert await _position(store, waiting[-1]) == 1


@pytest.mark.parametrize("is_batch", [False, True])
async def test_a_start_does_not_overtake_those_that_are_not_promoted_yet(
    store: Store, *, is_batch: bool
) -> None:
    await _full(store, ROOMY)
    waiting = await _many_wait(store, 2 * PROMOTED_AT_ONCE_MAX + 3)
    cap = 2 * PROMOTED_AT_ONCE_MAX + 3
    config = replace(ROOMY, max_concurrent_runs=cap, queue_max=2)
    await store.put_tenant(ACME, config)
    # A hundred slots and more are free, and all of them are promised. One that rejects is full.
    terms = StartTerms(on_full=OnFull.REJECT)
    checked = await store.check_starts(ACME, [terms, StartTerms()], ())
    assert checked.refused == (Full(cap, cap), None)
    wanted = [admission(await store.now(), queue=QueueRequest()) for _ in range(2)]
    verdicts = (
        await store.admit_many(wanted, within_ms=WITHIN_MS)
        if is_batch
        else [await store.admit(each, within_ms=WITHIN_MS) for each in wanted]
    )
    last, full = verdicts
    # The first of them promotes; without a batch the second does too.
    assert last == Queued(wanted[0].run.id, 4)
    assert full == QueueFull(cap, cap, 2)
    assert await store.queued_runs(ACME) == (4 if is_batch else 2)
    assert (await store.check_starts(ACME, [StartTerms()], ())).refused == (QueueFull(cap, cap, 2),)
    while await store.promote(ACME):
        pass
    assert await store.active_runs(ACME) == cap
    assert [await _position(store, each) for each in (waiting[-1], wanted[0].run.id)] == [1, 2]


async def test_an_audit_that_finds_a_leaked_slot_promotes(store: Store, harness: Harness) -> None:
    first = await _full(store)
    waits, behind = await _wait(store), await _wait(store)
    await harness.tamper_slots(ACME, 1)
    assert await _end(store, first) == ()
    await store.audit_slots(limit=10, repair=False)
    assert await _position(store, waits) == 1
    await store.audit_slots(limit=10)
    assert await _position(store, waits) is None
    assert await _position(store, behind) == 1
    assert await store.active_runs(ACME) == 1


async def test_a_time_out_does_not_win_against_a_promotion(store: Store, harness: Harness) -> None:
    config = replace(CAP_1, queue_wait_s=harness.short_ms / 1000)
    first = await _full(store, config)
    late, saved = await _wait(store), await _wait(store)
    await harness.pass_time(harness.short_ms)
    assert set(await store.fire_timers(limit=10)) == {late, saved}
    read = await loaded(store, saved)
    assert await _end(store, first) == (late,)
    assert await advance(store, ONE_JOB, late) == Committed((await loaded(store, late)).run.stamp)
    assert (await loaded(store, late)).run.status is RunStatus.RUNNING
    # The other one was read while it waited, and is promoted before its time-out is written.
    assert await _end(store, late) == (saved,)
    ended = replace(nothing(read), status=RunStatus.TIMED_OUT, finished_at=await store.now())
    assert isinstance(await store.commit(commit_of(read, ended)), CommitConflict)
    await advance(store, ONE_JOB, saved)
    assert (await loaded(store, saved)).run.status is RunStatus.RUNNING


async def test_a_run_that_waits_too_long_times_out_and_frees_its_key(
    store: Store, harness: Harness
) -> None:
    config = replace(CAP_1, queue_wait_s=harness.short_ms / 1000)
    first = await _full(store, config)
    wanted, verdict = await _ask(store, key="k")
    behind = await _wait(store)
    assert isinstance(verdict, Queued)
    _, again = await _ask(store, key="k")
    assert again == Replayed(wanted.run.id)
    await harness.pass_time(harness.short_ms)
    await store.fire_timers(limit=10)
    answer = await advance(store, ONE_JOB, wanted.run.id)
    assert isinstance(answer, Committed)
    assert answer.promoted == ()
    run = (await loaded(store, wanted.run.id)).run
    assert run.status is RunStatus.TIMED_OUT
    assert run.error is not None
    assert run.error.code == QUEUE_TIMEOUT
    assert await store.queued_runs(ACME) == 1
    assert await store.active_runs(ACME) == 1
    other, verdict = await _ask(store, key="k")
    assert verdict == Queued(other.run.id, 2)
    assert await _served(store, first, 2) == [behind, other.run.id]
    assert (await store.audit_slots(limit=10)).drifts == ()


async def test_a_cancelled_run_leaves_the_queue_and_keeps_its_key(store: Store) -> None:
    first = await _full(store)
    wanted, _ = await _ask(store, key="k")
    behind = await _wait(store)
    await cancel(store, wanted.run.id)
    assert await _position(store, wanted.run.id) is None
    assert await _position(store, behind) == 1
    assert await store.active_runs(ACME) == 1
    assert (await _ask(store, key="k"))[1] == Replayed(wanted.run.id)
    assert await _served(store, first, 1) == [behind]


async def test_a_promoted_run_that_is_cancelled_frees_its_slot(store: Store) -> None:
    first = await _full(store)
    waits, behind = await _wait(store), await _wait(store)
    assert await _end(store, first) == (waits,)
    assert await _end(store, waits) == (behind,)
    assert await store.active_runs(ACME) == 1


async def test_a_full_queue_and_a_start_that_will_not_wait_are_refused(store: Store) -> None:
    await _full(store, replace(CAP_1, queue_max=1))
    assert (await _ask(store, on_full=OnFull.REJECT))[1] == Full(1, 1)
    await _wait(store)
    assert (await _ask(store))[1] == QueueFull(1, 1, 1)
    assert await store.queued_runs(ACME) == 1
    # Without the run as it would wait, nothing can wait.
    plain = admission(await store.now())
    assert await store.admit(plain, within_ms=WITHIN_MS) == Full(1, 1)
    # A tenant that rejects, full or not.
    assert (await _ask(store, on_full=OnFull.QUEUE, tenant=GLOBEX))[1] == NoQueue()


async def test_a_repeated_call_and_a_repeated_commit_do_it_once(store: Store) -> None:
    first = await _full(store)
    wanted, verdict = await _ask(store, key="k")
    assert await store.admit(wanted, within_ms=WITHIN_MS) == verdict
    assert await store.queued_runs(ACME) == 1
    assert (await _ask(store, key="k"))[1] == Replayed(wanted.run.id)
    request = admission(await store.now(), FOR_EACH, key="k", run_input={"items": []})
    assert await store.admit(request, within_ms=WITHIN_MS) == Mismatch()
    found = await loaded(store, first)
    ended = replace(nothing(found), status=RunStatus.CANCELLED, finished_at=await store.now())
    commit = commit_of(found, ended)
    answer = await store.commit(commit)
    assert isinstance(answer, Committed)
    assert answer.promoted == (wanted.run.id,)
    assert isinstance(await store.commit(commit), Committed)
    assert await store.admit(wanted, within_ms=WITHIN_MS) == Admitted(wanted.run.id)
    assert await store.active_runs(ACME) == 1


async def test_a_tick_is_taken_by_a_run_that_waits(store: Store) -> None:
    await _full(store)
    wanted = admission(await store.now(), queue=QueueRequest())
    wanted = replace(wanted, tick=TickMark("nightly", 1, Instant(7)))
    assert isinstance(await store.admit(wanted, within_ms=WITHIN_MS), Queued)
    other = replace(admission(await store.now(), queue=QueueRequest()), tick=wanted.tick)
    assert not isinstance(await store.admit(other, within_ms=WITHIN_MS), Queued)


async def test_a_waiting_rerun_keeps_steps_and_items(store: Store) -> None:
    first = await _full(store)
    wanted = admission(
        await store.now(), FOR_EACH, run_input={"items": ["a", "b"]}, queue=QueueRequest()
    )
    assert wanted.before is not None
    before = replace(wanted.before, steps=wanted.run.steps, items=dict(wanted.transition.items))
    await store.admit(replace(wanted, before=before), within_ms=WITHIN_MS)
    (step_id,) = wanted.run.steps
    assert (await loaded(store, wanted.run.id)).run.steps == wanted.run.steps
    items = await store.load_items(wanted.run.id, {step_id: range(5)})
    assert items == wanted.transition.items
    assert jobs_of(wanted)
    assert await _end(store, first) == (wanted.run.id,)


async def test_a_promoted_rerun_runs_the_items_that_it_does_not_keep(store: Store) -> None:
    first = await _full(store)
    given: JsonObject = {"items": ["a", "b", "c"]}
    wanted = admission(
        await store.now(), FOR_EACH, run_input=given, rerun_of=first, queue=QueueRequest()
    )
    assert wanted.before is not None
    (step_id,) = wanted.run.steps
    done = Item(status=StepStatus.SUCCEEDED, attempt=1, output="B")
    before = replace(wanted.before, items={ItemKey(step_id, 1): done})
    await store.admit(replace(wanted, before=before), within_ms=WITHIN_MS)
    assert await _end(store, first) == (wanted.run.id,)
    assert isinstance(await advance(store, FOR_EACH, wanted.run.id), Committed)
    items = await store.load_items(wanted.run.id, {step_id: range(5)})
    assert items[ItemKey(step_id, 1)] == done
    assert sorted(each.job.item or 0 for each in await lease(store, max_jobs=5)) == [0, 2]


async def test_racing_starts_and_ends_lose_no_run_and_no_slot(store: Store) -> None:
    await store.put_tenant(ACME, replace(CAP_1, max_concurrent_runs=2))
    asked = await asyncio.gather(*(_ask(store, at % 3, str(at % 2)) for at in range(12)))
    running = [wanted.run.id for wanted, verdict in asked if isinstance(verdict, Admitted)]
    assert len(running) == 2
    seen = list(running)
    while running:
        ended = await asyncio.gather(*(_end(store, run_id) for run_id in running))
        running = list(itertools.chain(*ended))
        seen += running
        assert await store.active_runs(ACME) == len(running) <= 2
    assert sorted(seen) == sorted(wanted.run.id for wanted, _ in asked)
    assert await store.queued_runs(ACME) == 0
    assert TimerFired(timer=QUEUE_TIMER).timer.key == "queue:@0"
