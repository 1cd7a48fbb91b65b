"""Settling: results and the transition that applies them are written in one step, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from msgspec.structs import replace

from stanchion.core.admission import Queued
from stanchion.core.events import CancelRequested
from stanchion.core.model import JobId, RunId, RunStatus, StepId, StepStatus, place_of
from stanchion.core.plan import Plan
from stanchion.core.queue import OnFull, QueueRequest
from stanchion.core.run import decide_all, items_to_read
from stanchion.ports.records import (
    Accepted,
    Commit,
    CommitConflict,
    Committed,
    JobState,
    JobView,
    LeasedJob,
    Loaded,
    PostAnswer,
    RejectedCode,
    Result,
    ResultRefused,
    SettleAnswer,
    SettleMiss,
    SettleMissed,
    StaleFence,
    Tenant,
    result_event,
)
from stanchion.ports.store import Store
from tests.contract.builders import (
    ACME,
    FOR_EACH,
    ONE_JOB,
    SIDE_BY_SIDE,
    TWO_JOBS,
    WITHIN_MS,
    WORKER,
    accept,
    admission,
    advance,
    cancel,
    commit_of,
    held,
    lease,
    lease_one,
    loaded,
    nonce,
    result_of,
    start,
)
from tests.contract.harness import LONG_MS


async def _commit(
    store: Store,
    plan: Plan,
    found: Loaded,
    results: Sequence[Result],
    *,
    fence: int | None = None,
) -> Commit:
    """The commit that applies these results to the run as it was read."""
    places = [place_of(each.job_id) for each in results]
    events = [
        result_event(each, place.step_id, place.item)
        for each, place in zip(results, places, strict=True)
    ]
    items = await store.load_items(found.run.id, items_to_read(plan, found.run, events))
    run = replace(found.run, items=items)
    return commit_of(found, decide_all(plan, run, events, await store.now()), fence=fence)


async def _settle(
    store: Store, plan: Plan, run_id: RunId, *leased: LeasedJob, fence: int | None = None
) -> SettleAnswer:
    results = [result_of(each) for each in leased]
    found = await loaded(store, run_id)
    return await store.settle(results, await _commit(store, plan, found, results, fence=fence))


async def _state_of(store: Store, leased: LeasedJob) -> JobView:
    view = await store.job(leased.job.id)
    assert view is not None
    return view


async def test_a_settled_result_leaves_the_same_as_one_accepted_and_committed(
    store: Store,
) -> None:
    runs = [await start(store, TWO_JOBS) for _ in range(2)]
    jobs = {each.job.run_id: each for each in await lease(store, max_jobs=2)}
    settled, committed = runs
    assert isinstance(await _settle(store, TWO_JOBS, settled, jobs[settled]), Committed)
    await accept(store, jobs[committed])
    await advance(store, TWO_JOBS, committed)

    one, other = [await loaded(store, run_id) for run_id in runs]
    assert one.inbox == other.inbox == ()
    assert one.run.status is other.run.status
    assert one.run.stamp.version == other.run.stamp.version
    assert one.run.steps.keys() == other.run.steps.keys()
    for step_id, step in one.run.steps.items():
        twin = other.run.steps[step_id]
        assert (step.status, step.output, step.attempt) == (twin.status, twin.output, twin.attempt)
    lines = [(await store.timeline(run_id)).items for run_id in runs]
    assert [(line.what, line.step) for line in lines[0]] == [
        (line.what, line.step) for line in lines[1]
    ]
    for job in jobs.values():
        view = await _state_of(store, job)
        assert (view.state, view.worker_id, view.expires_at) == (JobState.FINISHED, WORKER, None)
        assert view.fence == job.fence
    assert await store.outbox_size() == 0
    assert await store.expire_jobs(limit=10, max_deliveries=5) == ()
    following = await lease(store, max_jobs=5)
    assert {each.job.step_id for each in following} == {StepId("second")}
    assert len(following) == 2


async def test_a_run_that_ends_by_settling_frees_its_slot(store: Store) -> None:
    run_id = await start(store)
    assert isinstance(await _settle(store, ONE_JOB, run_id, await lease_one(store)), Committed)
    assert (await loaded(store, run_id)).run.status is RunStatus.SUCCEEDED
    assert await store.active_runs(ACME) == 0


async def test_the_results_of_one_run_settle_together(store: Store) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": [1, 2, 3]})
    jobs = await lease(store, max_jobs=3)
    assert isinstance(await _settle(store, FOR_EACH, run_id, *jobs), Committed)
    run = (await loaded(store, run_id)).run
    assert (run.status, run.output) == (RunStatus.SUCCEEDED, {"each": ["done"] * 3})
    assert [(await _state_of(store, each)).state for each in jobs] == [JobState.FINISHED] * 3


async def test_hundreds_of_jobs_are_leased_settled_and_revoked_in_one_step_each(
    store: Store,
) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": list(range(1_400))})
    jobs: tuple[LeasedJob, ...] = ()
    for items in (range(250), range(250, 750), range(750, 1_400)):
        if jobs:
            assert isinstance(await _settle(store, FOR_EACH, run_id, *jobs), Committed)
            assert (await _state_of(store, jobs[-1])).state is JobState.FINISHED
        jobs = await lease(store, max_jobs=700)
        assert [each.job.item for each in jobs] == [*items]
        assert [each.job.input for each in jobs] == [*items]
        assert await lease(store) == ()
    renewed = await store.renew_jobs([held(each) for each in jobs], ttl_ms=LONG_MS)
    assert len(renewed.renewed) == 650
    await cancel(store, run_id, FOR_EACH)
    states = {(await _state_of(store, each)).state for each in jobs}
    assert states == {JobState.REVOKED}
    renewed = await store.renew_jobs([held(each) for each in jobs], ttl_ms=LONG_MS)
    assert renewed.renewed == ()


async def test_a_settled_result_that_is_sent_again_is_repeated(store: Store) -> None:
    run_id = await start(store, TWO_JOBS)
    job = await lease_one(store)
    await _settle(store, TWO_JOBS, run_id, job)
    assert await accept(store, job) == Accepted(job.job.id, run_id, repeated=True)
    (other,) = await store.accept([replace(result_of(job), fence=job.fence - 1)])
    assert other == ResultRefused(job.job.id, RejectedCode.ALREADY_FINISHED)
    assert (await loaded(store, run_id)).inbox == ()


async def test_repeating_a_settle_is_safe(store: Store) -> None:
    run_id = await start(store, TWO_JOBS)
    results = [result_of(await lease_one(store))]
    commit = await _commit(store, TWO_JOBS, await loaded(store, run_id), results)
    first = await store.settle(results, commit)
    assert isinstance(first, Committed)
    assert await store.settle(results, commit) == first
    assert (await loaded(store, run_id)).run.stamp == first.stamp
    assert len(await lease(store, max_jobs=5)) == 1


# ── Misses: nothing is written ───────────────────────────────────────────────────────────────────


async def _with_an_entry(store: Store, run_id: RunId, _jobs: Sequence[LeasedJob]) -> None:
    await store.post(run_id, CancelRequested(actor="test"), entry_id="cancel")


async def _with_a_result(store: Store, _run_id: RunId, jobs: Sequence[LeasedJob]) -> None:
    await accept(store, jobs[1])


async def _changed(store: Store, run_id: RunId, _jobs: Sequence[LeasedJob]) -> None:
    found = await loaded(store, run_id)
    unchanged = decide_all(SIDE_BY_SIDE, found.run, (), await store.now())
    await store.commit(commit_of(found, unchanged))


async def _written_above(store: Store, run_id: RunId, _jobs: Sequence[LeasedJob]) -> None:
    found = await loaded(store, run_id)
    unchanged = decide_all(SIDE_BY_SIDE, found.run, (), await store.now())
    await store.commit(commit_of(found, unchanged, fence=9))


async def _undisturbed(_store: Store, _run_id: RunId, _jobs: Sequence[LeasedJob]) -> None:
    pass


def _as_they_are(results: list[Result]) -> list[Result]:
    return results


def _by_another(results: list[Result]) -> list[Result]:
    return [results[0], replace(results[1], fence=results[1].fence - 1)]


def _twice(results: list[Result]) -> list[Result]:
    return [results[0], results[0]]


def _unknown(results: list[Result]) -> list[Result]:
    return [results[0], replace(results[1], job_id=JobId(f"{results[1].job_id}9"))]


@pytest.mark.parametrize(
    ("disturb", "send", "cause"),
    [
        (_with_an_entry, _as_they_are, SettleMiss.INBOX),
        (_with_a_result, lambda results: results[:1], SettleMiss.INBOX),
        (_changed, _as_they_are, SettleMiss.CHANGED),
        (_written_above, _as_they_are, SettleMiss.STALE_FENCE),
        (_undisturbed, _by_another, SettleMiss.JOB),
        (_undisturbed, _twice, SettleMiss.JOB),
        (_undisturbed, _unknown, SettleMiss.JOB),
    ],
    ids=["an entry", "a result", "changed", "stale fence", "another's", "twice", "unknown"],
)
async def test_a_miss_writes_nothing(
    store: Store,
    disturb: Callable[[Store, RunId, Sequence[LeasedJob]], Awaitable[None]],
    send: Callable[[list[Result]], list[Result]],
    cause: SettleMiss,
) -> None:
    run_id = await start(store, SIDE_BY_SIDE)
    jobs = [await lease_one(store, topic) for topic in ("left", "right")]
    results = [result_of(each) for each in jobs]
    read = await loaded(store, run_id)
    commit = await _commit(store, SIDE_BY_SIDE, read, results, fence=5)
    await disturb(store, run_id, jobs)
    before, rows = await loaded(store, run_id), await store.outbox_size()
    views = [await _state_of(store, each) for each in jobs]

    assert await store.settle(send(results), commit) == SettleMissed(cause)

    assert await loaded(store, run_id) == before
    assert [await _state_of(store, each) for each in jobs] == views
    assert await store.outbox_size() == rows
    assert not (await store.renew_jobs([held(jobs[0])], ttl_ms=LONG_MS)).lost
    # The usual way is open.
    assert isinstance((await store.accept(results[:1]))[0], Accepted)


async def test_a_result_of_another_runs_job_is_a_miss(store: Store) -> None:
    mine, other = [await start(store) for _ in range(2)]
    jobs = {each.job.run_id: each for each in await lease(store, max_jobs=2)}
    commit = await _commit(store, ONE_JOB, await loaded(store, mine), [result_of(jobs[mine])])
    answer = await store.settle([result_of(jobs[mine]), result_of(jobs[other])], commit)
    assert answer == SettleMissed(SettleMiss.JOB)
    assert (await _state_of(store, jobs[other])).state is JobState.LEASED
    assert (await loaded(store, mine)).run.status is RunStatus.RUNNING


async def test_a_settle_of_an_unknown_run_is_a_miss(store: Store) -> None:
    run_id = await start(store)
    job = await lease_one(store)
    commit = await _commit(store, ONE_JOB, await loaded(store, run_id), [result_of(job)])
    unknown = RunId(run_id[:-1] + ("0" if run_id[-1] != "0" else "1"))
    stray = replace(result_of(job), job_id=JobId(job.job.id.replace(run_id, unknown)))
    answer = await store.settle([stray], replace(commit, run_id=unknown))
    assert answer == SettleMissed(SettleMiss.GONE)


async def test_a_lost_lease_cannot_settle(store: Store) -> None:
    run_id = await start(store, TWO_JOBS)
    job = await lease_one(store)
    await advance(store, TWO_JOBS, run_id, CancelRequested(actor="test"))
    assert await _settle(store, TWO_JOBS, run_id, job) == SettleMissed(SettleMiss.JOB)
    (refused,) = await store.accept([result_of(job)])
    assert refused == ResultRefused(job.job.id, RejectedCode.STALE_FENCE)


async def test_the_fence_of_a_settle_counts_for_later_commits(store: Store) -> None:
    run_id = await start(store, TWO_JOBS)
    assert isinstance(
        await _settle(store, TWO_JOBS, run_id, await lease_one(store), fence=7), Committed
    )
    found = await loaded(store, run_id)
    unchanged = decide_all(TWO_JOBS, found.run, (), await store.now())
    assert await store.commit(commit_of(found, unchanged, fence=6)) == StaleFence(7)


# ── At the same moment ───────────────────────────────────────────────────────────────────────────


async def test_of_settles_that_come_together_one_is_written(store: Store) -> None:
    run_id = await start(store, SIDE_BY_SIDE)
    jobs = [await lease_one(store, topic) for topic in ("left", "right")]
    read = await loaded(store, run_id)
    results = [result_of(each) for each in jobs]
    commits = [await _commit(store, SIDE_BY_SIDE, read, [each]) for each in results]
    answers = await asyncio.gather(
        *(store.settle([each], commit) for each, commit in zip(results, commits, strict=True))
    )
    assert [type(each) for each in answers].count(Committed) == 1
    states = [(await _state_of(store, each)).state for each in jobs]
    for answer, state in zip(answers, states, strict=True):
        assert state is (JobState.FINISHED if isinstance(answer, Committed) else JobState.LEASED)
    assert SettleMissed(SettleMiss.CHANGED) in answers


async def test_a_settle_sees_a_result_that_was_accepted_just_before(store: Store) -> None:
    run_id = await start(store, SIDE_BY_SIDE)
    left, right = [await lease_one(store, topic) for topic in ("left", "right")]
    commit = await _commit(store, SIDE_BY_SIDE, await loaded(store, run_id), [result_of(right)])
    accepted, settled = await asyncio.gather(
        store.accept([result_of(left)]), store.settle([result_of(right)], commit)
    )
    assert accepted == (Accepted(left.job.id, run_id),)
    assert settled == SettleMissed(SettleMiss.INBOX)
    assert len((await loaded(store, run_id)).inbox) == 1


async def _cancelling(store: Store, plan: Plan, run_id: RunId) -> Commit:
    """The commit of a cancel that is in the inbox, decided without reading the inbox."""
    event = CancelRequested(actor="test")
    assert await store.post(run_id, event, entry_id="cancel") is PostAnswer.POSTED
    found = await loaded(store, run_id)
    transition = decide_all(plan, found.run, [event], await store.now())
    return commit_of(found, transition, applied=["cancel"])


async def test_a_settle_applies_the_only_entry_of_the_inbox(store: Store) -> None:
    run_id = await start(store, ONE_JOB)
    job = await lease_one(store)
    assert isinstance(await store.settle([], await _cancelling(store, ONE_JOB, run_id)), Committed)
    found = await loaded(store, run_id)
    assert (found.run.status, found.inbox) == (RunStatus.CANCELLED, ())
    assert (await _state_of(store, job)).state is JobState.REVOKED
    assert await store.outbox_size() == 0


async def test_a_settle_without_results_overtakes_no_other_entry(store: Store) -> None:
    run_id = await start(store, SIDE_BY_SIDE)
    left = await lease_one(store, "left")
    await accept(store, left)
    commit = await _cancelling(store, SIDE_BY_SIDE, run_id)
    assert await store.settle([], commit) == SettleMissed(SettleMiss.INBOX)
    found = await loaded(store, run_id)
    assert (found.run.status, len(found.inbox)) == (RunStatus.RUNNING, 2)
    # Those that it applies are the only ones that it may find.
    other = replace(commit, applied=("another",))
    assert await store.settle([], other) == SettleMissed(SettleMiss.INBOX)


async def test_of_a_result_and_a_cancel_at_once_neither_overtakes_the_other(store: Store) -> None:
    run_id = await start(store, SIDE_BY_SIDE)
    left = await lease_one(store, "left")
    commit = await _cancelling(store, SIDE_BY_SIDE, run_id)
    (accepted,), settled = await asyncio.gather(
        store.accept([result_of(left)]), store.settle([], commit)
    )
    # Whichever the store executed first.
    assert isinstance(settled, Committed) is isinstance(accepted, ResultRefused)
    assert isinstance(accepted, Accepted) is (settled == SettleMissed(SettleMiss.INBOX))


async def test_a_commit_sees_a_settle_just_before_it(store: Store) -> None:
    run_id = await start(store, TWO_JOBS)
    job = await lease_one(store)
    read = await loaded(store, run_id)
    unchanged = decide_all(TWO_JOBS, read.run, (), await store.now())
    settled, committed = await asyncio.gather(
        store.settle([result_of(job)], await _commit(store, TWO_JOBS, read, [result_of(job)])),
        store.commit(commit_of(read, unchanged, chosen=nonce())),
    )
    assert isinstance(settled, Committed)
    assert committed == CommitConflict()
    step = (await loaded(store, run_id)).run.step(StepId("first"))
    assert step.status is StepStatus.SUCCEEDED


async def test_a_settled_end_gives_its_slot_to_the_next_run_that_waits(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=1, on_full=OnFull.QUEUE))
    run_id = await start(store)
    waiting = admission(await store.now(), queue=QueueRequest())
    verdict = await store.admit(waiting, within_ms=WITHIN_MS)
    assert verdict == Queued(waiting.run.id, 1)
    answer = await _settle(store, ONE_JOB, run_id, await lease_one(store))
    assert isinstance(answer, Committed)
    assert answer.promoted == (waiting.run.id,)
    assert (await loaded(store, waiting.run.id)).run.status is RunStatus.PENDING
    assert await store.active_runs(ACME) == 1
    assert isinstance(await advance(store, ONE_JOB, waiting.run.id), Committed)
    assert (await lease_one(store)).job.run_id == waiting.run.id
