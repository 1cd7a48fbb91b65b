"""Commits: a transition becomes true once, entirely, and only on what its writer read."""

from __future__ import annotations

import asyncio
from collections import Counter

from msgspec.structs import replace

from stanchion.core.events import Approved, AttemptSucceeded, CancelRequested
from stanchion.core.model import Instant, RunId, RunStatus, Stamp, StepId, StepStatus
from stanchion.core.run import decide
from stanchion.core.transition import DispatchJob, Transition
from stanchion.ports.records import (
    Commit,
    CommitConflict,
    Committed,
    Gone,
    JobState,
    JobView,
    PostAnswer,
    StaleFence,
)
from stanchion.ports.store import Store
from tests.contract.builders import (
    ACME,
    FOR_EACH,
    ONE_JOB,
    TWO_JOBS,
    accept,
    advance,
    cancel,
    commit_of,
    held,
    lease,
    lease_one,
    loaded,
    nothing,
    result_of,
    start,
)


async def test_a_commit_makes_the_transition_true(store: Store) -> None:
    run_id = await start(store, TWO_JOBS)
    before = await loaded(store, run_id)
    first = await lease_one(store)
    event = AttemptSucceeded(job_id=first.job.id, step_id=first.job.step_id, output={"a": [1, 2.5]})
    transition = decide(TWO_JOBS, before.run, event, await store.now())
    await store.commit(commit_of(before, transition))
    after = (await loaded(store, run_id)).run
    assert after.steps == before.run.steps | transition.steps
    assert after.step(StepId("first")).status is StepStatus.SUCCEEDED
    assert after.step(StepId("first")).output == {"a": [1, 2.5]}
    assert after.step(StepId("second")).status is StepStatus.RUNNING


async def test_a_commit_leaves_the_rest_of_the_run_alone(store: Store) -> None:
    run_id = await start(store, TWO_JOBS)
    before = await loaded(store, run_id)
    answer = await store.commit(commit_of(before, nothing(before)))
    assert isinstance(answer, Committed)
    assert (await loaded(store, run_id)).run == replace(before.run, stamp=answer.stamp)


async def test_a_commit_gives_the_run_the_writers_nonce_and_the_next_version(
    store: Store,
) -> None:
    before = await loaded(store, await start(store))
    answer = await store.commit(commit_of(before, nothing(before), chosen="mine"))
    assert answer == Committed(Stamp(before.run.stamp.version + 1, "mine"))
    assert (await loaded(store, before.run.id)).run.stamp == Stamp(2, "mine")


async def test_a_commit_of_an_unknown_run_is_gone(store: Store) -> None:
    known = await loaded(store, await start(store))
    unknown = RunId(known.run.id[:-1] + ("0" if known.run.id[-1] != "0" else "1"))
    lost = replace(commit_of(known, nothing(known)), run_id=unknown)
    assert await store.commit(lost) == Gone()


async def test_a_commit_of_what_cannot_be_a_run_is_gone(store: Store) -> None:
    for odd in ("", "nonsense", "zz" * 12, "{}"):
        lost = Commit(
            run_id=RunId(odd),
            transition=Transition(status=RunStatus.RUNNING),
            read=Stamp(1, "n"),
            nonce="m",
            fence=None,
        )
        assert await store.commit(lost) == Gone()


async def test_the_same_commit_sent_twice_succeeds_twice_and_happens_once(store: Store) -> None:
    before = await loaded(store, await start(store))
    commit = commit_of(before, nothing(before, say="once"))
    first = await store.commit(commit)
    assert await store.commit(commit) == first
    lines = [entry.what for entry in (await store.timeline(before.run.id)).items]
    assert lines.count("once") == 1
    assert (await loaded(store, before.run.id)).run.stamp.version == 2


async def test_a_repeated_commit_succeeds_though_a_higher_fence_is_known(store: Store) -> None:
    before = await loaded(store, await start(store))
    commit = commit_of(before, nothing(before), fence=5)
    first = await store.commit(commit)
    assert await store.commit(replace(commit, fence=4)) == first


async def test_a_second_writer_with_the_same_read_conflicts(store: Store) -> None:
    before = await loaded(store, await start(store))
    await store.commit(commit_of(before, nothing(before)))
    late = commit_of(before, nothing(before, say="late"))
    assert await store.commit(late) == CommitConflict()
    assert "late" not in [line.what for line in (await store.timeline(before.run.id)).items]


async def test_of_many_writers_with_the_same_read_one_commits(store: Store) -> None:
    before = await loaded(store, await start(store))
    commits = [commit_of(before, nothing(before, say=f"writer {n}")) for n in range(50)]
    answers = await asyncio.gather(*map(store.commit, commits))
    assert Counter(map(type, answers)) == {Committed: 1, CommitConflict: 49}
    (winner,) = (n for n, answer in enumerate(answers) if isinstance(answer, Committed))
    lines = [line.what for line in (await store.timeline(before.run.id)).items]
    assert [line for line in lines if line.startswith("writer")] == [f"writer {winner}"]


async def test_the_version_alone_is_not_enough(store: Store) -> None:
    before = await loaded(store, await start(store))
    other_history = replace(
        commit_of(before, nothing(before)), read=Stamp(before.run.stamp.version, "other")
    )
    assert await store.commit(other_history) == CommitConflict()


async def test_the_nonce_alone_is_not_enough(store: Store) -> None:
    before = await loaded(store, await start(store))
    ahead = replace(commit_of(before, nothing(before)), read=Stamp(7, before.run.stamp.nonce))
    assert await store.commit(ahead) == CommitConflict()


async def test_after_a_conflict_the_writer_loads_and_succeeds(store: Store) -> None:
    before = await loaded(store, await start(store))
    await store.commit(commit_of(before, nothing(before)))
    assert await store.commit(commit_of(before, nothing(before))) == CommitConflict()
    again = await loaded(store, before.run.id)
    assert isinstance(await store.commit(commit_of(again, nothing(again))), Committed)


# ── Fences ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_fresh_run_has_seen_no_fence(store: Store) -> None:
    assert (await loaded(store, await start(store))).run.fence == 0


async def test_a_run_remembers_the_highest_fence_that_wrote(store: Store) -> None:
    run_id = await start(store)
    micros = 1_786_000_000_123_457  # as large as real ones: it must come back to the last digit
    for fence in (micros, micros, micros + 1):
        found = await loaded(store, run_id)
        assert isinstance(
            await store.commit(commit_of(found, nothing(found), fence=fence)), Committed
        )
        assert (await loaded(store, run_id)).run.fence == fence


async def test_a_fenced_writer_cannot_commit(store: Store) -> None:
    before = await loaded(store, await start(store))
    await store.commit(commit_of(before, nothing(before), fence=8))
    now = await loaded(store, before.run.id)
    assert await store.commit(commit_of(now, nothing(now), fence=7)) == StaleFence(8)
    assert (await loaded(store, before.run.id)).run.stamp == now.run.stamp


async def test_a_stale_fence_is_said_before_a_conflict(store: Store) -> None:
    before = await loaded(store, await start(store))
    await store.commit(commit_of(before, nothing(before), fence=8))
    assert await store.commit(commit_of(before, nothing(before), fence=7)) == StaleFence(8)


async def test_an_unleased_writer_is_held_to_compare_and_set_alone(store: Store) -> None:
    before = await loaded(store, await start(store))
    await store.commit(commit_of(before, nothing(before), fence=8))
    now = await loaded(store, before.run.id)
    assert isinstance(await store.commit(commit_of(now, nothing(now), fence=None)), Committed)
    assert await store.commit(commit_of(now, nothing(now), fence=None)) == CommitConflict()


async def test_an_unleased_writer_does_not_lower_the_fence(store: Store) -> None:
    before = await loaded(store, await start(store))
    await store.commit(commit_of(before, nothing(before), fence=8))
    now = await loaded(store, before.run.id)
    await store.commit(commit_of(now, nothing(now), fence=None))
    assert (await loaded(store, before.run.id)).run.fence == 8


async def test_a_refused_commit_does_not_raise_the_fence(store: Store) -> None:
    before = await loaded(store, await start(store))
    await store.commit(commit_of(before, nothing(before), fence=3))
    assert await store.commit(commit_of(before, nothing(before), fence=9)) == CommitConflict()
    assert (await loaded(store, before.run.id)).run.fence == 3


# ── What changes with it ─────────────────────────────────────────────────────────────────────────


async def test_a_commit_takes_the_entries_that_it_applied_out_of_the_inbox(store: Store) -> None:
    run_id = await start(store)
    step = StepId("step")
    for name in ("a", "b", "c"):
        await store.post(run_id, Approved(step_id=step, comment=name), entry_id=name)
    found = await loaded(store, run_id)
    await store.commit(commit_of(found, nothing(found), applied=["a", "c", "not there"]))
    assert [entry.id for entry in (await loaded(store, run_id)).inbox] == ["b"]


async def test_a_refused_commit_leaves_the_inbox_alone(store: Store) -> None:
    run_id = await start(store)
    await store.post(run_id, CancelRequested(), entry_id="a")
    found = await loaded(store, run_id)
    stale = replace(commit_of(found, nothing(found), applied=["a"]), read=Stamp(9, "x"))
    assert await store.commit(stale) == CommitConflict()
    assert [entry.id for entry in (await loaded(store, run_id)).inbox] == ["a"]


async def test_a_commit_that_empties_the_inbox_removes_the_outbox_row(store: Store) -> None:
    run_id = await start(store)
    await store.post(run_id, CancelRequested(), entry_id="a")
    found = await loaded(store, run_id)
    await store.commit(commit_of(found, nothing(found), applied=["a"]))
    assert await store.outbox_size() == 0


async def test_a_commit_that_leaves_something_in_the_inbox_leaves_the_outbox_row(
    store: Store,
) -> None:
    run_id = await start(store)
    for name in ("a", "b"):
        await store.post(run_id, CancelRequested(), entry_id=name)
    found = await loaded(store, run_id)
    await store.commit(commit_of(found, nothing(found), applied=["a"]))
    assert [row.run_id for row in await store.take_outbox(limit=9, hold_ms=9_000)] == [run_id]


async def test_what_arrived_after_the_read_survives_the_commit(store: Store) -> None:
    run_id = await start(store)
    await store.post(run_id, CancelRequested(), entry_id="a")
    found = await loaded(store, run_id)
    await store.post(run_id, CancelRequested(), entry_id="b")
    answer = await store.commit(commit_of(found, nothing(found), applied=["a"]))
    assert isinstance(answer, Committed)
    assert [entry.id for entry in (await loaded(store, run_id)).inbox] == ["b"]
    assert await store.outbox_size() == 1


async def test_a_commit_sends_its_jobs_out(store: Store) -> None:
    run_id = await start(store, TWO_JOBS)
    await accept(store, await lease_one(store))
    await advance(store, TWO_JOBS, run_id)
    assert (await lease_one(store)).job.step_id == "second"


async def test_a_job_that_is_out_already_is_not_sent_out_again(store: Store) -> None:
    run_id = await start(store)
    leased = await lease_one(store)
    found = await loaded(store, run_id)
    again = replace(nothing(found), effects=(DispatchJob(leased.job),))
    await store.commit(commit_of(found, again))
    assert await store.ready_topics() == {}
    assert await lease(store) == ()
    view = await store.job(leased.job.id)
    assert view is not None
    assert (view.state, view.fence) == (JobState.LEASED, leased.fence)


async def test_a_commit_changes_the_items_that_it_names_and_no_others(store: Store) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": ["a", "b", "c"]})
    each = StepId("each")
    before = await store.load_items(run_id, {each: range(3)})
    leased = await lease(store, max_jobs=3)
    await store.accept([result_of(leased[1], "B")])
    await advance(store, FOR_EACH, run_id)
    after = await store.load_items(run_id, {each: range(3)})
    changed = [key.item for key in after if after[key] != before[key]]
    assert changed == [1]
    assert [item.output for item in after.values()] == [None, "B", None]


async def test_items_that_are_not_there_are_left_out(store: Store) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": ["a", "b"]})
    found = await store.load_items(run_id, {StepId("each"): [1, 7], StepId("other"): [0]})
    assert [(key.step_id, key.item) for key in found] == [("each", 1)]
    assert await store.load_items(run_id, {}) == {}


async def test_an_unknown_run_has_no_items(store: Store) -> None:
    assert await store.load_items(RunId("nonsense"), {StepId("each"): [0]}) == {}


async def test_an_unknown_run_is_not_loaded(store: Store) -> None:
    assert await store.load(RunId("nonsense")) is None


# ── The end of a run ─────────────────────────────────────────────────────────────────────────────


async def test_a_commit_that_ends_the_run_frees_its_slot(store: Store) -> None:
    run_id = await start(store)
    await cancel(store, run_id)
    assert await store.active_runs(ACME) == 0


async def test_a_commit_that_does_not_end_the_run_keeps_its_slot(store: Store) -> None:
    before = await loaded(store, await start(store))
    await store.commit(commit_of(before, nothing(before)))
    assert await store.active_runs(ACME) == 1


async def test_a_slot_is_freed_once_however_often_the_end_is_sent(store: Store) -> None:
    await start(store)
    found = await loaded(store, await start(store))
    over = decide(ONE_JOB, found.run, CancelRequested(), await store.now())
    commit = commit_of(found, over)
    await asyncio.gather(*(store.commit(commit) for _ in range(10)))
    assert await store.active_runs(ACME) == 1


async def test_a_commit_on_a_finished_run_frees_no_second_slot(store: Store) -> None:
    await start(store)
    run_id = await start(store)
    await cancel(store, run_id)
    over = await loaded(store, run_id)
    await store.commit(commit_of(over, nothing(over)))
    assert await store.active_runs(ACME) == 1
    assert (await store.audit_slots(limit=1_000)).drifts == ()


async def test_a_commit_on_a_finished_run_does_not_end_it_again(store: Store) -> None:
    run_id = await start(store)
    await cancel(store, run_id)
    over = await loaded(store, run_id)
    await store.commit(commit_of(over, nothing(over)))
    again = await loaded(store, run_id)
    assert again.run == replace(over.run, stamp=again.run.stamp)
    assert await store.purge(finished_before=Instant(await store.now() + 1_000), limit=10) == 1
    assert await store.purge(finished_before=Instant(await store.now() + 1_000), limit=10) == 0


async def test_the_end_of_a_run_revokes_its_jobs(store: Store) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": ["a", "b"]})
    leased = await lease_one(store)
    await cancel(store, run_id, FOR_EACH)
    view = await store.job(leased.job.id)
    assert view == JobView(leased.job, JobState.REVOKED, leased.fence, 1)
    assert await lease(store) == ()
    assert (await store.renew_jobs([held(leased)], ttl_ms=1_000)).lost == (leased.job.id,)


async def test_the_end_of_a_run_empties_its_inbox_and_removes_its_outbox_row(
    store: Store,
) -> None:
    run_id = await start(store)
    await store.post(run_id, Approved(step_id=StepId("step")), entry_id="a")
    found = await loaded(store, run_id)
    over = decide(ONE_JOB, found.run, CancelRequested(), await store.now())
    await store.commit(commit_of(found, over))
    assert (await loaded(store, run_id)).inbox == ()
    assert await store.outbox_size() == 0


async def test_the_end_of_a_run_is_kept_as_it_was_decided(store: Store) -> None:
    run_id = await start(store)
    await accept(store, await lease_one(store), {"answer": 42})
    await advance(store, ONE_JOB, run_id)
    run = (await loaded(store, run_id)).run
    assert run.status is RunStatus.SUCCEEDED
    assert run.output == {"step": {"answer": 42}}
    assert isinstance(run.finished_at, int)
    assert Instant(run.created_at) <= run.finished_at


async def test_nothing_can_be_posted_to_a_finished_run(store: Store) -> None:
    run_id = await start(store)
    await cancel(store, run_id)
    posted = await store.post(run_id, CancelRequested(), entry_id="a")
    assert posted is PostAnswer.FINISHED
    assert (await loaded(store, run_id)).inbox == ()
    assert await store.outbox_size() == 0
