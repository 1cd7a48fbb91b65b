"""Settling: a result and what follows from it are one store step where that is safe."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import pytest
from msgspec.structs import replace

from stanchion.adapters.system import ManualClock
from stanchion.core.audit import AuditEntry
from stanchion.core.events import CancelRequested
from stanchion.core.lease import LeaseOverride, OnLockError
from stanchion.core.model import (
    Instant,
    ItemCounts,
    OnItems,
    Risk,
    Run,
    RunId,
    RunStatus,
    Step,
    StepId,
    StepStatus,
    Topic,
)
from stanchion.core.queue import QueueRequest
from stanchion.core.transition import Transition
from stanchion.core.workflow import ForEachSpec, Workflow
from stanchion.ports.bus import Ack
from stanchion.ports.errors import BackendUnavailable
from stanchion.ports.locks import AcquireAnswer, Granted
from stanchion.ports.records import (
    Accepted,
    AlikeStart,
    AlikeStarts,
    Commit,
    Committed,
    OutboxRow,
    RejectedCode,
    Result,
    ResultRefused,
)
from stanchion.services import run_cache
from stanchion.services.advance import LEASED_MS
from stanchion.services.leasing import PROVEN_MS
from stanchion.services.lock_audit import RunNotMarked
from stanchion.services.log import LOGGER
from stanchion.services.run_cache import RunCache
from tests.contract.builders import ONE_JOB, admission
from tests.services.faulty_locks import Fault
from tests.services.stage import ACME, GLOBEX, Replica, World, job, under_lease, virtual, workflow

STEPS = workflow("steps", one=job("work"), two=job("work", "one"), three=job("work", "two"))
SIDE_BY_SIDE = workflow("sides", one=job("work"), left=job("work", "one"), right=job("work", "one"))
ITEMS = workflow("items", each=ForEachSpec(for_each="${input.items}", topic=Topic("work")))
CHANGES = ("settle", "accept", "load", "commit", "items_at")


def _steps(replica: Replica) -> Counter[str]:
    """How often each verb that changes a run, or reads it to change it, was called."""
    return Counter({verb: replica.store.calls[verb] for verb in CHANGES}) + Counter()


async def _leased(
    world: World,
    replica: Replica,
    definition: Workflow = STEPS,
    items: int = 0,
) -> RunId:
    await world.define(definition)
    return await world.start(replica, definition.id, {"items": list(range(items))})


def _is_calm(replica: Replica) -> bool:
    """Nothing that escalation counts has happened, and no entry was blamed."""
    return (
        replica.metric("commit_conflicts_total") == 0
        and replica.metric("duplicate_completions_total") == 0
        and replica.store.calls["count_failure"] == 0
    )


@virtual
async def test_a_three_step_run_takes_three_settles_and_nothing_else(world: World) -> None:
    one = world.add(locks_are_local=True)
    run_id = await _leased(world, one)
    for _ in range(3):
        (leased,) = await world.lease(one, "work")
        assert await world.report(one, leased) == (Accepted(leased.job.id, run_id),)
    assert _steps(one) == {"settle": 3}
    assert (await world.run(run_id)).status == "succeeded"
    assert one.metric("results_settled_total") == 3
    await world.assert_nothing_left()


@virtual
async def test_while_the_lock_store_must_be_asked_a_result_is_accepted_first(world: World) -> None:
    one = world.add()
    run_id = await _leased(world, one, under_lease(STEPS))
    one.locks.always(Fault.SLOW, "acquire")
    (leased,) = await world.lease(one, "work")
    await world.report(one, leased)
    assert _steps(one) == {"accept": 1}
    loaded = await world.store.load(run_id)
    assert loaded is not None
    assert len(loaded.inbox) == 1


@virtual
async def test_a_class_that_goes_on_without_the_lock_store_settles(world: World) -> None:
    one = world.add()
    run_id = await _leased(world, one, under_lease(STEPS))
    one.locks_away()
    for number in range(3):
        (leased,) = await world.lease(one, "work")
        await world.report(one, leased)
        await asyncio.sleep(0.1)
        assert one.store.calls["settle"] == number  # the first one finds the lock store away
    assert await world.ended(run_id) == "succeeded"
    assert one.metric("workflow_lock_fallback_total", risk="standard") == 3


@virtual
async def test_a_class_that_fails_closed_accepts_and_waits(world: World) -> None:
    one = world.add()
    run_id = await _leased(world, one, replace(STEPS, risk=Risk.HIGH))
    (leased,) = await world.lease(one, "work")
    one.locks_away()
    assert await world.report(one, leased) == (Accepted(leased.job.id, run_id),)
    await asyncio.sleep(0.1)
    assert _steps(one) == {"accept": 1}
    one.locks_away(False)
    assert (await world.lease(one, "work"))[0].job.step_id == "two"


@virtual
async def test_a_run_that_is_held_by_hand_takes_the_result_and_stays(world: World) -> None:
    one = world.add(locks_are_local=True)
    run_id = await _leased(world, one, under_lease(STEPS))
    (leased,) = await world.lease(one, "work")
    held = await world.locks.acquire(f"run/{run_id}", "hand", ttl_ms=5_000, within_ms=1_000)
    assert isinstance(held, Granted)
    before = (await world.run(run_id)).stamp
    assert await world.report(one, leased) == (Accepted(leased.job.id, run_id),)
    assert _steps(one) == {"accept": 1}
    assert (await world.run(run_id)).stamp == before
    assert (await world.lease(one, "work"))[0].job.step_id == "two"


# ── Without the lease ────────────────────────────────────────────────────────────────────────────


async def _hold(replica: Replica, run_id: RunId, *, ttl_ms: int) -> AcquireAnswer | RunNotMarked:
    """Hold the lease of a run by hand, at this replica."""
    assert replica.services.lock_audit is not None
    audit = AuditEntry(actor="ops", action="lease.hold", subject=f"run/{run_id}")
    return await replica.services.lock_audit.hold(f"run/{run_id}", ttl_ms=ttl_ms, audit=audit)


async def _first_step(world: World, replica: Replica, definition: Workflow = STEPS) -> RunId:
    """Begin a run, and apply its first result under a lease."""
    run_id = await _leased(world, replica, definition)
    (leased,) = await world.lease(replica, "work")
    await world.report(replica, leased)
    await asyncio.sleep(0.1)
    assert (await world.run(run_id)).step(StepId("one")).status == "succeeded"
    return run_id


@virtual
async def test_a_mild_class_settles_without_the_lease(world: World) -> None:
    one = world.add()
    await one.ask_locks()
    run_id = await _leased(world, one)
    for _ in range(3):
        (leased,) = await world.lease(one, "work")
        assert await world.report(one, leased) == (Accepted(leased.job.id, run_id),)
    assert (await world.run(run_id)).status == "succeeded"
    assert _steps(one) == {"settle": 3}
    assert one.locks.calls["acquire"] == 0


@virtual
async def test_a_result_on_another_replica_takes_a_read_and_a_settle(world: World) -> None:
    one, two = world.add(), world.add()
    run_id = await _leased(world, one)
    for replica in (two, one, two):
        (leased,) = await world.lease(replica, "work")
        await replica.ask_locks()
        assert await world.report(replica, leased) == (Accepted(leased.job.id, run_id),)
    assert (await world.run(run_id)).status == "succeeded"
    # The job of the next step tells each of them that what it remembers is out of date.
    assert (_steps(one), _steps(two)) == ({"load": 1, "settle": 1}, {"load": 2, "settle": 2})
    assert all(map(_is_calm, (one, two)))


@virtual
async def test_replicas_that_compete_for_a_run_read_it_again_once(world: World) -> None:
    one, two = world.add(), world.add()
    await one.ask_locks()
    run_id = await _leased(world, one, SIDE_BY_SIDE)
    (first,) = await world.lease(one, "work")
    await world.report(one, first)
    left, right = await world.lease(one, "work", max_jobs=2)
    await two.ask_locks()
    await world.report(two, left)
    one.store.calls.clear()
    await one.ask_locks()
    assert await world.report(one, right) == (Accepted(right.job.id, run_id),)
    assert (await world.run(run_id)).status == "succeeded"
    assert _steps(one) == {"settle": 2, "load": 1}
    assert one.metric("settle_misses_total", cause="changed") == 1
    assert all(map(_is_calm, (one, two)))


@virtual
async def test_a_run_that_changes_again_after_it_was_read_is_advanced_under_its_lease(
    world: World,
) -> None:
    one, two = world.add(), world.add()
    await one.ask_locks()
    await two.ask_locks()
    run_id = await _leased(world, one, ITEMS, items=2)
    mine, theirs = await world.lease(two, "work", max_jobs=2)
    two.store.script("settle", lambda: world.report(one, theirs))
    assert await world.report(two, mine) == (Accepted(mine.job.id, run_id),)
    assert await world.ended(run_id) == "succeeded"
    assert two.store.calls["settle"] == two.store.calls["accept"] == 1
    assert two.locks.calls["acquire"] == 1
    assert all(map(_is_calm, (one, two)))


@virtual
async def test_a_repeated_result_of_a_run_that_has_ended_asks_for_no_lease(world: World) -> None:
    one = world.add()
    await one.ask_locks()
    run_id = await _leased(world, one, workflow("short", one=job("work")))
    (leased,) = await world.lease(one, "work")
    again = Result(job_id=leased.job.id, fence=leased.fence, worker_id="worker")
    assert await one.inbox.results([again]) == (Accepted(again.job_id, run_id),)
    assert (await world.run(run_id)).status == "succeeded"
    one.store.calls.clear()
    assert await one.inbox.results([again]) == (Accepted(again.job_id, run_id, repeated=True),)
    await asyncio.sleep(0.1)
    assert _steps(one) == {"load": 1, "accept": 1}
    assert one.locks.calls["acquire"] == 0


@virtual
async def test_a_call_that_arrives_while_results_are_settled_is_handled_with_the_same_lease(
    world: World,
) -> None:
    one = world.add(locks_are_local=True)
    run_id = await _leased(world, one)
    (leased,) = await world.lease(one, "work")
    called: list[asyncio.Task[object]] = []

    def call(verb: str, is_done: bool) -> None:
        if verb == "settle" and is_done:
            row = OutboxRow(run_id, ACME, number=1)
            called.append(asyncio.create_task(one.bus.call(row)))

    one.on_call(call)
    await world.report(one, leased)
    assert [await each for each in called] == [Ack()]
    assert _steps(one) == {"settle": 1, "load": 1}
    assert one.locks.calls["acquire"] == 1


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(
    ("definition", "is_free"),
    [
        (replace(STEPS, risk=Risk.LOW), True),
        (replace(STEPS, risk=Risk.HIGH), False),
        (under_lease(STEPS), False),
        (replace(STEPS, lock_policy=LeaseOverride(on_lock_error=OnLockError.FAIL_CLOSED)), False),
    ],
)
@virtual
async def test_policy_says_whether_a_result_needs_the_lease(
    world: World, definition: Workflow, is_free: bool, is_known: bool
) -> None:
    one, two = world.add(), world.add()
    await one.ask_locks()
    await two.ask_locks()
    await _leased(world, one, definition)
    (leased,) = await world.lease(one, "work")
    at = one if is_known else two
    await world.report(at, leased)
    assert (at.store.calls["settle"], at.store.calls["accept"]) == (is_free, not is_free)
    (_second,) = await world.lease(one, "work")
    assert at.locks.calls["acquire"] == (not is_free)


@virtual
async def test_a_lock_store_that_has_just_gone_away_is_noticed_by_the_next_new_run(
    world: World,
) -> None:
    one = world.add()
    for _ in range(2):
        await _leased(world, one)
    await one.ask_locks()
    one.locks_away()
    first, second = await world.lease(one, "work", max_jobs=2)
    await world.report(one, first)
    assert one.metric("workflow_lock_fallback_total", risk="standard") == 0
    await asyncio.sleep(PROVEN_MS / 1000)
    await world.report(one, second)
    await asyncio.sleep(0.1)
    assert one.metric("workflow_lock_fallback_total", risk="standard") == 1


@virtual
async def test_on_a_quiet_replica_the_first_result_of_a_run_asks_for_its_lease(
    world: World,
) -> None:
    one = world.add()
    needs = {"one": [], "two": ["one"], "three": ["two"], "four": ["three"]}
    steps = {each: job("work", *needed) for each, needed in needs.items()}
    await _leased(world, one, workflow("four", **steps))

    async def reported(after_s: float) -> int:
        await asyncio.sleep(after_s)
        await world.report(one, *await world.lease(one, "work"))
        await asyncio.sleep(0.1)
        return one.locks.calls["acquire"]

    assert [await reported(after_s) for after_s in (0, 1, 20, LEASED_MS / 1000)] == [1, 1, 1, 2]


@virtual
async def test_on_a_busy_replica_one_of_many_runs_asks_for_its_lease(world: World) -> None:
    one = world.add()
    for number in range(1, 4):
        await _leased(world, one)
        for _ in range(3):
            await world.report(one, *await world.lease(one, "work"))
            await asyncio.sleep(0.001)
        assert one.locks.calls["acquire"] == number
        await _leased(world, one)
        await world.report(one, *await world.lease(one, "work"))
        assert one.locks.calls["acquire"] == number
        await asyncio.sleep(PROVEN_MS / 1000)


@virtual
async def test_a_run_that_is_held_by_hand_moves_on_no_replica(world: World) -> None:
    one, two = world.add(), world.add()
    run_id = await _leased(world, one, SIDE_BY_SIDE)
    (first,) = await world.lease(one, "work")
    await world.report(one, first)
    left, right = await world.lease(one, "work", max_jobs=2)
    assert isinstance(await _hold(two, run_id, ttl_ms=5_000), Granted)
    before = await world.run(run_id)
    # The first remembers the run as it was before the hold, the second reads it.
    assert await world.report(one, left) == (Accepted(left.job.id, run_id),)
    assert await world.report(two, right) == (Accepted(right.job.id, run_id),)
    await asyncio.sleep(1)
    assert await world.run(run_id) == before
    assert await world.ended(run_id, within_s=6) == "succeeded"
    assert not (await world.run(run_id)).stamp.is_held_by_hand


@pytest.mark.parametrize("away", ["load", "commit"])
@virtual
async def test_a_run_is_not_held_by_hand_while_the_hold_cannot_be_written_to_it(
    world: World, away: str
) -> None:
    one, two = world.add(), world.add()
    run_id = await _leased(world, one)
    two.store.always(Fault.ERROR, away)
    assert await _hold(two, run_id, ttl_ms=5_000) == RunNotMarked()
    two.store.always(Fault.NONE, away)
    # Results of it are settled, so the lock must not be shown as held, nor the hold as done.
    assert await two.locks.inspect(f"run/{run_id}") is None
    assert two.services.lock_audit is not None
    await two.services.lock_audit.move()
    assert (await world.store.list_audit()).items == ()


@virtual
async def test_a_hold_by_hand_counts_with_a_lower_fence_than_the_runs(world: World) -> None:
    one = world.add()
    run_id = await _leased(world, one)
    run = await world.run(run_id)
    unchanged = Transition(status=run.status)
    high = Commit(run_id=run_id, transition=unchanged, read=run.stamp, nonce="high", fence=10**18)
    assert isinstance(await world.store.commit(high), Committed)
    answer = await _hold(one, run_id, ttl_ms=5_000)
    assert isinstance(answer, Granted)
    assert answer.fence < 10**18
    assert (await world.run(run_id)).stamp.is_held_by_hand


@virtual
async def test_a_hold_by_hand_outlasts_an_outage_of_the_lock_store(world: World) -> None:
    one = world.add()
    run_id = await _first_step(world, one)
    (leased,) = await world.lease(one, "work")
    assert isinstance(await _hold(one, run_id, ttl_ms=60_000), Granted)
    one.locks_away()
    await world.report(one, leased)
    (leased,) = await world.lease(one, "work")  # its class goes on while nobody can be asked
    one.locks_away(is_away=False)
    await asyncio.sleep(5)
    await one.ask_locks()
    before = await world.run(run_id)
    await world.report(one, leased)
    await asyncio.sleep(1)
    assert await world.run(run_id) == before
    assert await world.ended(run_id, within_s=60) == "succeeded"


@virtual
async def test_a_hold_that_was_neither_written_nor_given_back_counts_later(world: World) -> None:
    one, two = world.add(), world.add()
    run_id = await _first_step(world, one)
    (leased,) = await world.lease(one, "work")
    two.store.away()
    two.locks.always(Fault.ERROR, "release")
    assert await _hold(two, run_id, ttl_ms=60_000) == RunNotMarked()
    two.store.back()
    two.locks.always(Fault.NONE, "release")
    await asyncio.sleep(10)
    before = await world.run(run_id)
    await world.report(one, leased)
    await asyncio.sleep(1)
    assert await world.run(run_id) == before
    assert await world.ended(run_id, within_s=60) == "running"  # at its next step
    assert (await world.lease(one, "work"))[0].job.step_id == "three"


@virtual
async def test_a_hold_wins_against_results_that_settle_all_the_time(world: World) -> None:
    one, two = world.add(), world.add(each_way_s=0.01)
    run_id = await _leased(world, one, ITEMS, items=1_000)
    for _ in range(8):
        world.work(one, "work", takes_s=0.001)
    await asyncio.sleep(0.5)
    assert isinstance(await _hold(two, run_id, ttl_ms=5_000), Granted)
    before = await world.run(run_id)
    assert before.stamp.is_held_by_hand
    await asyncio.sleep(1)
    assert await world.run(run_id) == before
    assert await world.ended(run_id) == "succeeded"
    await world.assert_nothing_left()


@virtual
async def test_a_hold_that_cannot_be_written_leaves_nothing(world: World) -> None:
    one, two = world.add(), world.add()
    run_id = await _first_step(world, one)
    (leased,) = await world.lease(one, "work")
    for replica in (one, two):
        replica.store.always(Fault.ERROR, "commit")
    assert await _hold(two, run_id, ttl_ms=5_000) == RunNotMarked()
    await world.report(one, leased)
    await asyncio.sleep(4)
    for replica in (one, two):
        replica.store.always(Fault.NONE, "commit")
    world.work(one, "work")
    assert await world.ended(run_id) == "succeeded"
    assert one.store.calls["count_failure"] == two.store.calls["count_failure"] == 0
    await world.assert_nothing_left()


@virtual
async def test_a_run_of_a_killed_replica_moves_within_five_seconds(
    world: World,
) -> None:
    one, two = world.add(), world.add()
    run_id = await _first_step(world, one)
    (leased,) = await world.lease(two, "work")
    one.kill()
    killed_at = world.clock.moment()
    await world.report(two, leased)
    (following,) = await world.lease(two, "work")
    assert (following.job.run_id, following.job.step_id) == (run_id, "three")
    assert world.clock.moment() - killed_at < 5_000


# ── Misses and failures ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.LOST_REPLY, Fault.BUG])
@virtual
async def test_an_unanswered_settle_is_followed_by_accept_and_is_no_duplicate(
    world: World, fault: Fault
) -> None:
    one = world.add(locks_are_local=True)
    run_id = await _leased(world, one)
    (leased,) = await world.lease(one, "work")
    one.store.script("settle", fault)
    assert await world.report(one, leased) == (Accepted(leased.job.id, run_id),)
    assert one.store.calls["accept"] == 1
    assert (await world.lease(one, "work"))[0].job.step_id == "two"
    assert _is_calm(one)


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.BUG])
@virtual
async def test_only_an_error_of_our_own_is_logged_when_results_are_settled(
    world: World, fault: Fault
) -> None:
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[method-assign,assignment]  # shorter than a class
    LOGGER.addHandler(handler)
    try:
        one = world.add(locks_are_local=True)
        await _leased(world, one)
        (leased,) = await world.lease(one, "work")
        one.store.script("settle", fault)
        await world.report(one, leased)
    finally:
        LOGGER.removeHandler(handler)
    logged = [line.getMessage() for line in lines if line.levelno >= logging.WARNING]
    assert logged == (["settle_failed"] if fault is Fault.BUG else [])


@virtual
async def test_if_neither_is_answered_the_worker_is_told_to_send_it_again(world: World) -> None:
    one = world.add(locks_are_local=True)
    await _leased(world, one)
    (leased,) = await world.lease(one, "work")
    one.store.script("settle", Fault.ERROR)
    one.store.script("accept", Fault.ERROR)
    with pytest.raises(BackendUnavailable):
        await world.report(one, leased)
    assert isinstance((await world.report(one, leased))[0], Accepted)
    assert _is_calm(one)


@virtual
async def test_an_event_that_waits_is_not_overtaken(world: World) -> None:
    one = world.add(locks_are_local=True)
    run_id = await _leased(world, one)
    (leased,) = await world.lease(one, "work")
    one.store.script(
        "settle",
        lambda: world.store.post(run_id, CancelRequested(actor="test"), entry_id="cancel"),
    )
    assert await world.report(one, leased) == (Accepted(leased.job.id, run_id),)
    assert await world.ended(run_id) == "cancelled"
    assert one.metric("settle_misses_total", cause="inbox") == 1
    assert _is_calm(one)


@virtual
async def test_a_run_that_another_replica_has_changed_is_read_again(world: World) -> None:
    one, two = (world.add(locks_are_local=True) for _ in range(2))
    run_id = await _leased(world, one)
    (first,) = await world.lease(one, "work")
    await world.report(two, first)  # does not know the run, and reads it
    (second,) = await world.lease(one, "work")
    assert await world.report(one, second) == (Accepted(second.job.id, run_id),)
    (third,) = await world.lease(one, "work")
    await world.report(one, third)
    assert await world.ended(run_id) == "succeeded"
    assert _steps(one) == {"load": 1, "settle": 2}
    assert all(map(_is_calm, (one, two)))


@virtual
async def test_results_that_arrive_meanwhile_are_settled_together_afterwards(world: World) -> None:
    one = world.add(locks_are_local=True)
    run_id = await _leased(world, one, ITEMS, items=10)
    jobs = await world.lease(one, "work", max_jobs=10)
    under_way = most = 0

    def count(verb: str, is_done: bool) -> None:
        nonlocal under_way, most
        if verb == "settle":
            under_way += -1 if is_done else 1
            most = max(most, under_way)

    one.on_call(count)
    answers = await asyncio.gather(*(world.report(one, each) for each in jobs))
    assert answers == [(Accepted(each.job.id, run_id),) for each in jobs]
    assert most == 1
    # All came before the turn began, so one step was enough.
    assert _steps(one) == {"settle": 1, "items_at": 1}
    assert (await world.run(run_id)).status == "succeeded"


@virtual
async def test_one_bad_result_of_a_request_does_not_hold_up_the_others(world: World) -> None:
    one = world.add(locks_are_local=True)
    run_id = await _leased(world, one, ITEMS, items=2)
    good, bad = await world.lease(one, "work", max_jobs=2)
    answers = await world.report(one, good, replace(bad, fence=bad.fence - 1))
    refused = ResultRefused(bad.job.id, RejectedCode.STALE_FENCE)
    assert answers == (Accepted(good.job.id, run_id), refused)
    assert one.metric("settle_misses_total", cause="job") == 1
    await world.report(one, bad)
    assert await world.ended(run_id) == "succeeded"
    assert _is_calm(one)


@virtual
async def test_another_tenants_result_is_unknown(world: World) -> None:
    one = world.add(locks_are_local=True)
    await _leased(world, one)
    (leased,) = await world.lease(one, "work")
    result = Result(job_id=leased.job.id, fence=leased.fence, worker_id="stranger")
    answers = await one.inbox.results([result], tenant=GLOBEX)
    assert answers == (ResultRefused(leased.job.id, RejectedCode.UNKNOWN_JOB),)
    assert one.store.calls["settle"] == 0


@virtual
async def test_another_tenants_result_is_unknown_while_the_run_is_read_again(world: World) -> None:
    one = world.add()
    three = workflow("three", a=job("work"), b=job("work"), c=job("work"))
    run_id = await _leased(world, one, under_lease(three))
    first, second, third = await world.lease(one, "work", max_jobs=3)
    stolen = Result(job_id=third.job.id, fence=third.fence, worker_id="stranger")
    sent: list[asyncio.Task[object]] = []

    async def change() -> None:
        run = await world.run(run_id)
        same = Transition(status=run.status)
        written = Commit(run_id=run_id, transition=same, read=run.stamp, nonce="n", fence=None)
        assert isinstance(await world.store.commit(written), Committed)

    async def steal() -> None:
        sent.append(asyncio.create_task(one.inbox.results([stolen], tenant=GLOBEX)))
        await asyncio.sleep(0.01)

    one.store.script("commit", change, steal)  # a conflict: the run is forgotten, and read again
    await world.report(one, first)
    await asyncio.sleep(1)
    assert await sent[0] == (ResultRefused(third.job.id, RejectedCode.UNKNOWN_JOB),)
    await world.report(one, second, third)
    assert await world.ended(run_id) == "succeeded"


def test_the_memory_of_runs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, now = RunCache(ManualClock()), Instant(1_700_000_000_000)
    runs = [admission(now, run_input={"say": "x" * 1_000}).run for _ in range(30)]
    monkeypatch.setattr(run_cache, "RUNS_KEPT", 10)
    for run in runs[:15]:
        cache.put(run, ONE_JOB)
    assert [cache.get(run.id) is not None for run in runs[:15]] == [False] * 5 + [True] * 10
    monkeypatch.setattr(run_cache, "RUNS_KEPT_BYTES_MAX", 5_000)
    cache.put(runs[15], ONE_JOB)
    assert 1 <= sum(cache.get(run.id) is not None for run in runs) <= 4
    monkeypatch.setattr(run_cache, "RUN_KEPT_BYTES_MAX", 500)
    cache.put(runs[15], ONE_JOB)
    assert cache.get(runs[15].id) is None


def test_a_run_that_has_not_changed_for_a_minute_is_forgotten() -> None:
    clock, now = ManualClock(), Instant(1_700_000_000_000)
    cache = RunCache(clock)
    idle, busy = (admission(now, run_input={"say": each}).run for each in ("a", "b"))
    cache.put(idle, ONE_JOB)
    cache.put(busy, ONE_JOB)
    clock.advance(run_cache.RUN_KEPT_MS // 2)
    cache.put(busy, ONE_JOB)
    assert cache.forget_idle() == []
    clock.advance(run_cache.RUN_KEPT_MS // 2)
    assert cache.forget_idle() == [idle.id]
    assert cache.get(idle.id) is None
    assert cache.get(busy.id) is not None


@virtual
async def test_a_result_of_a_run_that_was_forgotten_is_read_and_settled(world: World) -> None:
    one = world.add(locks_are_local=True)
    await _leased(world, one)
    await asyncio.sleep(run_cache.RUN_KEPT_MS / 1_000)
    one.engine.forget_idle()
    (leased,) = await world.lease(one, "work")
    one.store.calls.clear()
    result = Result(job_id=leased.job.id, fence=leased.fence, worker_id="worker")
    (answer,) = await one.inbox.results([result])
    assert isinstance(answer, Accepted)
    (_second,) = await world.lease(one, "work")
    assert _steps(one) == {"load": 1, "settle": 1}


def test_runs_that_begin_alike_are_remembered_as_if_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = Instant(1_700_000_000_000)
    said = ["a", "b", "c" * 1_000, "d"]  # the memory of a long one is measured
    made = [
        admission(now, run_input={"say": each}, key=f"key-{place}", queue=QueueRequest())
        for place, each in enumerate(said)
    ]
    stamp = made[0].run.stamp
    wanted = [
        replace(each, run=replace(each.run, stamp=stamp), before=replace(each.before, stamp=stamp))
        for each in made
        if each.before is not None
    ]
    starts = AlikeStarts(wanted[0], [AlikeStart.of(each) for each in wanted])
    assert [*starts] == wanted
    cache = RunCache(ManualClock())
    cache.put_alike(starts, ONE_JOB)
    known = [cache.get(each.run.id) for each in wanted]
    assert [each and each.run for each in known] == [each.run for each in wanted]
    monkeypatch.setattr(run_cache, "RUNS_KEPT", 2)
    cache.put_alike(starts[:1], ONE_JOB)  # again: it counts once
    assert [cache.get(each.run.id) is not None for each in wanted] == [True, False, False, True]
    cache.put_alike(starts[1:3], ONE_JOB)
    assert [cache.get(each.run.id) is not None for each in wanted] == [False, True, True, False]


def test_a_large_run_is_kept_while_many_of_its_items_are_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, now = RunCache(ManualClock()), Instant(1_700_000_000_000)
    small = admission(now, run_input={"say": "x"}).run
    cache.put(small, ONE_JOB)

    def wide(unfinished: int) -> Run:
        run = admission(now, run_input={"items": list(range(10_000))}).run
        counts = ItemCounts(total=10_000, succeeded=10_000 - unfinished)
        step = Step(status=StepStatus.RUNNING, attempt=1, wait=OnItems(), items=counts)
        return replace(run, status=RunStatus.RUNNING, steps={StepId("each"): step})

    few, *many = wide(99), *(wide(100) for _ in range(3))
    cache.put(few, ONE_JOB)
    assert cache.get(few.id) is None
    # A list of 10,000 numbers takes some 500 kB.
    monkeypatch.setattr(run_cache, "WIDE_RUNS_KEPT_BYTES_MAX", 1_200_000)
    for run in many:
        cache.put(run, ONE_JOB)
    assert [cache.get(run.id) is not None for run in many] == [False, True, True]
    assert cache.get(small.id) is not None, "the large ones displace no small one"
    cache.put(replace(many[1], steps=few.steps), ONE_JOB)
    assert cache.get(many[1].id) is None
    monkeypatch.setattr(run_cache, "WIDE_RUN_KEPT_BYTES_MAX", 100_000)
    cache.put(many[2], ONE_JOB)
    assert cache.get(many[2].id) is None


@virtual
async def test_the_items_of_a_large_input_are_settled_without_reading_the_run(world: World) -> None:
    one = world.add(locks_are_local=True)
    await _leased(world, one, ITEMS, items=2_000)
    jobs = await world.lease(one, "work", max_jobs=20)
    one.store.calls.clear()
    await world.report(one, *jobs)
    assert _steps(one) == {"settle": 1, "items_at": 1}
