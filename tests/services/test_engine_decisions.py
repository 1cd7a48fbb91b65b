"""Cancelling, approving and rejecting: what is told to whom, also when two come at once."""

from __future__ import annotations

import asyncio

import pytest

from stanchion.core.events import Approved, Rejected
from stanchion.core.model import RunId, RunStatus, StepId, StepStatus
from stanchion.core.workflow import ApprovalSpec
from stanchion.services.inbox import (
    Conflicting,
    DecisionForbidden,
    InvalidData,
    RunChange,
    UnknownTarget,
)
from tests.services.stage import Replica, World, job, virtual, workflow

REVIEW = StepId("review")
REVIEWED = workflow("reviewed", review=ApprovalSpec(), work=job("work", "review"))
ONE = workflow("one", step=job("work"))


async def decide(
    replica: Replica, run_id: RunId, *, approve: bool, step: str = REVIEW
) -> RunChange | UnknownTarget | Conflicting:
    decided = await replica.inbox.decide(
        run_id, StepId(step), approve=approve, comment=None, actor="reviewer"
    )
    assert not isinstance(decided, DecisionForbidden | InvalidData)
    return decided


async def held(world: World, run_id: RunId, for_s: float) -> None:
    """Another has the run, for a while."""
    ttl_ms = round(for_s * 1000)
    await world.locks.acquire(f"run/{run_id}", "another's", ttl_ms=ttl_ms, within_ms=10)


# ── Cancelling ───────────────────────────────────────────────────────────────────────────────────


@virtual
async def test_a_cancel_is_applied_at_once_and_again_without_conflict(world: World) -> None:
    one, two = world.add(), world.add()
    await world.define(ONE)
    run_id = await world.start(one, "one")
    cancelled = RunChange(run_id, RunStatus.CANCELLED, applied=True)
    assert await one.inbox.cancel(run_id, reason="enough", actor="caller") == cancelled
    assert await two.inbox.cancel(run_id, reason=None, actor="caller") == cancelled
    error = (await world.run(run_id)).error
    assert error is not None
    assert error.message == "enough"
    assert await world.store.ready_topics() == {}
    await world.assert_nothing_left()


@virtual
async def test_a_cancel_of_a_busy_run_is_recorded_and_applied_when_the_run_is_free(
    world: World,
) -> None:
    one = world.add()
    await world.define(ONE)
    run_id = await world.start(one, "one")
    await held(world, run_id, 3)
    answer = await one.inbox.cancel(run_id, reason=None, actor="caller")
    assert answer == RunChange(run_id, RunStatus.RUNNING, applied=False)
    assert await world.ended(run_id, within_s=4) == "cancelled"
    await world.assert_nothing_left()


@virtual
async def test_a_run_that_has_ended_otherwise_or_never_was_cannot_be_cancelled(
    world: World,
) -> None:
    one = world.add()
    await world.define(ONE)
    world.work(one, "work")
    run_id = await world.start(one, "one")
    assert await world.ended(run_id) == "succeeded"
    answer = await one.inbox.cancel(run_id, reason=None, actor="caller")
    assert answer == Conflicting(f"run '{run_id}' has ended: succeeded")
    missing = RunId("00-missing")
    unknown = UnknownTarget("run '00-missing'")
    assert await one.inbox.cancel(missing, reason=None, actor="caller") == unknown


@virtual
async def test_a_cancel_that_comes_behind_the_last_result_is_told_so(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    run_id = await world.start(one, "one")
    leased = await world.lease(one, "work")
    await held(world, run_id, 1)
    await world.report(one, *leased)
    await asyncio.sleep(0.01)
    # Both lie in the inbox when the run is free, the result first.
    one.store.script("post", lambda: world.locks.force_release(f"run/{run_id}"))
    answer = await one.inbox.cancel(run_id, reason=None, actor="caller")
    assert await world.ended(run_id) == "succeeded"
    assert answer == Conflicting(f"run '{run_id}' has ended: succeeded")


# ── Approving and rejecting ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("approve", [True, False])
@virtual
async def test_a_decision_is_applied_once_and_stands(world: World, approve: bool) -> None:
    one, two = world.add(), world.add()
    await world.define(REVIEWED)
    run_id = await world.start(one, "reviewed")
    status = RunStatus.RUNNING if approve else RunStatus.FAILED
    taken = RunChange(run_id, status, applied=True)
    said, otherwise = ("approved", "rejected") if approve else ("rejected", "approved")
    assert await decide(one, run_id, approve=approve) == taken
    assert await decide(two, run_id, approve=approve) == taken
    for replica in (one, two):
        answer = await decide(replica, run_id, approve=not approve)
        assert answer == Conflicting(f"step 'review' was {said} before"), otherwise
    told = [line for line in await world.told(run_id) if line.endswith("review reviewer")]
    assert len(told) == 1


@virtual
async def test_a_decision_about_what_cannot_be_decided_is_refused(world: World) -> None:
    one = world.add()
    later = workflow("later", work=job("work"), review=ApprovalSpec(needs=(StepId("work"),)))
    await world.define(later)
    run_id = await world.start(one, "later")
    assert await decide(one, RunId("00-missing"), approve=True) == UnknownTarget("run '00-missing'")
    no_step = UnknownTarget(f"step 'nowhere' of run '{run_id}'")
    assert await decide(one, run_id, approve=True, step="nowhere") == no_step
    no_approval = Conflicting("step 'work' is not an approval")
    assert await decide(one, run_id, approve=True, step="work") == no_approval
    too_early = Conflicting("step 'review' does not wait for a decision yet")
    assert await decide(one, run_id, approve=True) == too_early
    await one.inbox.cancel(run_id, reason=None, actor="caller")
    too_late = Conflicting("step 'review' has ended without a decision: cancelled")
    assert await decide(one, run_id, approve=True) == too_late


@virtual
async def test_a_decision_about_a_busy_run_is_recorded_and_binds(world: World) -> None:
    one, two = world.add(), world.add()
    await world.define(REVIEWED)
    run_id = await world.start(one, "reviewed")
    await held(world, run_id, 3)
    recorded = RunChange(run_id, RunStatus.WAITING, applied=False)
    assert await decide(one, run_id, approve=False) == recorded
    assert await decide(two, run_id, approve=False) == recorded
    conflict = Conflicting("step 'review' was rejected before")
    assert await decide(two, run_id, approve=True) == conflict
    assert await world.ended(run_id, within_s=5) == "failed"


@pytest.mark.parametrize("apart_ms", range(12))
@virtual
async def test_of_two_opposite_decisions_exactly_one_wins(world: World, apart_ms: int) -> None:
    one, two = world.add(), world.add()
    await world.define(REVIEWED)
    run_id = await world.start(one, "reviewed")

    async def reject() -> RunChange | UnknownTarget | Conflicting:
        await asyncio.sleep(apart_ms / 1000)
        return await decide(two, run_id, approve=False)

    answers = await asyncio.gather(decide(one, run_id, approve=True), reject())
    await asyncio.sleep(2)
    state = (await world.run(run_id)).step(REVIEW)
    winner = 0 if state.status is StepStatus.SUCCEEDED else 1
    assert isinstance(answers[winner], RunChange)
    assert isinstance(answers[1 - winner], Conflicting)
    told = [line for line in await world.told(run_id) if line.endswith("review reviewer")]
    assert len(told) == 1


@virtual
async def test_a_decision_that_another_replica_applied_meanwhile_is_judged_by_its_outcome(
    world: World,
) -> None:
    one, two = world.add(), world.add()
    await world.define(REVIEWED)
    run_id = await world.start(one, "reviewed")
    one.store.script("post", lambda: decide(two, run_id, approve=True))
    answer = await decide(one, run_id, approve=False)
    assert answer == Conflicting("step 'review' was approved before")
    assert (await world.run(run_id)).step(REVIEW).status is StepStatus.SUCCEEDED


@virtual
async def test_an_entry_of_a_decision_is_applied_by_whoever_comes_next(world: World) -> None:
    """The replica that took it died before it applied it."""
    one = world.add()
    await world.define(REVIEWED)
    run_id = await world.start(one, "reviewed")
    event = Approved(step_id=REVIEW, actor="reviewer")
    await world.store.post(run_id, event, entry_id="decision:review")
    await asyncio.sleep(1)
    assert (await world.run(run_id)).step(REVIEW).status is StepStatus.SUCCEEDED


@virtual
async def test_a_decision_that_came_too_late_itself_says_nothing_about_the_next(
    world: World,
) -> None:
    one, two = world.add(), world.add()
    await world.define(REVIEWED)
    run_id = await world.start(one, "reviewed")
    late = Rejected(step_id=REVIEW, actor="another")

    async def approved_and_then_rejected() -> None:
        await decide(two, run_id, approve=True)
        await world.store.post(run_id, late, entry_id=f"decision:{REVIEW}")

    # Found waiting, and then everything happens at once: an approval, and a rejection behind it.
    one.store.script("post", approved_and_then_rejected)
    answer = await decide(one, run_id, approve=True)
    assert isinstance(answer, RunChange), answer
    assert (await world.run(run_id)).step(REVIEW).status is StepStatus.SUCCEEDED
