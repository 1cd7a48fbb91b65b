"""The queue: who is next, where a run stands, and how it leaves."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from stanchion.core import invariants
from stanchion.core.admission import Admitted, Facts, Full, NoQueue, Queued, QueueFull, judge
from stanchion.core.events import CancelRequested, Promoted, Started, TimerFired
from stanchion.core.model import (
    Instant,
    Run,
    RunId,
    RunStatus,
    StepId,
    TenantId,
    Topic,
    WorkflowId,
)
from stanchion.core.plan import Plan, link
from stanchion.core.queue import (
    KEYS_COUNTED_MAX,
    QUEUE_TIMEOUT,
    QUEUE_TIMER,
    FairQueue,
    OnFull,
    QueueRequest,
    SlotUse,
    estimate_s,
    frees_key,
)
from stanchion.core.run import decide, decide_all, evolve, queued_run
from stanchion.core.transition import ClearTimer, DispatchJob, Ignored, SetTimer
from stanchion.core.workflow import JobSpec, Workflow
from stanchion.ports.records import Tenant

NOW = Instant(1_000_000)
WAIT_MS = 5_000


def _plan() -> Plan:
    only = JobSpec(topic=Topic("work"))
    plan = link(Workflow(id=WorkflowId("one"), steps={StepId("only"): only}), {})
    assert isinstance(plan, Plan)
    return plan


PLAN = _plan()
BEFORE = Run(
    id=RunId("r1"),
    tenant=TenantId("acme"),
    workflow_id=WorkflowId("one"),
    workflow_version=1,
    input={},
    created_at=NOW,
    starter="ann",
)
WAITING, QUEUEING = queued_run(BEFORE, wait_ms=WAIT_MS)
PROMOTED = replace(WAITING, status=RunStatus.PENDING)


def _queue(*asked: tuple[str, int, str]) -> FairQueue:
    queue = FairQueue()
    for run_id, priority, key in asked:
        queue.add(RunId(run_id), QueueRequest(priority, key))
    return queue


def _drained(queue: FairQueue) -> str:
    return "".join(iter(lambda: queue.take() or "", ""))


def test_priorities_are_strict_and_keys_take_turns() -> None:
    queue = _queue(("a", 5, "x"), ("b", 5, "x"), ("c", 5, "y"), ("d", 9, "x"), ("e", 0, "z"))
    assert [queue.position(RunId(each)) for each in "dacbe"] == [1, 2, 3, 4, 5]
    assert _drained(queue) == "dacbe"
    assert (len(queue), queue.take()) == (0, None)


def test_a_key_that_comes_back_joins_at_the_tail() -> None:
    queue = _queue(("a", 5, "x"), ("b", 5, "y"), ("c", 5, "z"))
    assert queue.take() == "a"
    queue.add(RunId("d"), QueueRequest(5, "x"))
    assert _drained(queue) == "bcd"


def test_a_run_that_leaves_changes_no_other_turn() -> None:
    queue = _queue(("a", 5, "x"), ("b", 5, "y"), ("c", 5, "x"), ("d", 5, "y"))
    assert queue.remove(RunId("a"))
    assert not queue.remove(RunId("a"))
    assert RunId("a") not in queue
    assert queue.position(RunId("a")) is None
    assert _drained(queue) == "cbd"


@pytest.mark.parametrize("seed", range(20))
def test_a_position_is_the_number_of_turns_until_it_is_taken(seed: int) -> None:
    chance = random.Random(seed)
    queue = FairQueue()
    for number in range(12):
        queue.add(RunId(str(number)), QueueRequest(chance.choice((4, 5)), chance.choice("abc")))
        if chance.random() < 0.3:
            queue.take()
    positions = {run_id: queue.position(run_id) for run_id in queue}
    taken = iter(queue.take, None)
    assert {run_id: place for place, run_id in enumerate(taken, 1)} == positions


def test_among_many_keys_a_position_is_the_last_possible_one() -> None:
    queue = FairQueue()
    for number in range(KEYS_COUNTED_MAX + 20):
        queue.add(RunId(f"first-{number}"), QueueRequest(5, str(number)))
    for number in (3, 4, 3):
        queue.add(RunId(f"more-{number}-{len(queue)}"), QueueRequest(5, str(number)))
    queue.add(RunId("urgent"), QueueRequest(6, ""))
    positions = {run_id: queue.position(run_id) for run_id in queue}
    taken = {run_id: place for place, run_id in enumerate(iter(queue.take, None), 1)}
    for run_id, place in taken.items():
        told = positions[run_id]
        assert told is not None
        assert place <= told <= len(taken)
        assert told == place or not run_id.startswith("first")


def _judged(**facts: object) -> object:
    known = {
        "run_id": RunId("new"),
        "now": NOW,
        "not_after": NOW,
        "limit": 1,
        "active": 1,
        "on_full": OnFull.QUEUE,
        "queue_max": 2,
    }
    return judge(Facts(**(known | facts)))  # type: ignore[arg-type]  # facts by name


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, Queued(RunId("new"))),
        ({"queued": 2}, QueueFull(1, 1, 2)),
        ({"asked_on_full": OnFull.REJECT}, Full(1, 1)),
        ({"on_full": OnFull.REJECT}, Full(1, 1)),
        ({"on_full": OnFull.REJECT, "asked_on_full": OnFull.QUEUE, "active": 0}, NoQueue()),
        ({"asked_on_full": OnFull.QUEUE}, Queued(RunId("new"))),
        ({"takes_slot": False}, Admitted(RunId("new"))),
        ({"active": 0}, Admitted(RunId("new"))),
        ({"exists": True, "position": 3}, Queued(RunId("new"), 3)),
        ({"exists": True}, Admitted(RunId("new"))),
    ],
)
def test_what_a_full_tenant_answers(facts: dict[str, object], expected: object) -> None:
    assert _judged(**facts) == expected


def test_a_queued_run_waits_for_its_timer_alone() -> None:
    assert (WAITING.status, WAITING.status.uses_slot) == (RunStatus.QUEUED, False)
    assert QUEUEING.effects == (SetTimer(QUEUE_TIMER, Instant(NOW + WAIT_MS)),)
    assert [(line.what, line.actor) for line in QUEUEING.timeline] == [("run_queued", "ann")]
    assert invariants.of_run(PLAN, WAITING) == []
    assert invariants.of_work(PLAN, WAITING, [], open_jobs=[], timers=[QUEUE_TIMER]) == []
    assert invariants.of_work(PLAN, WAITING, [], open_jobs=[], timers=[]) != []
    assert invariants.of_work(PLAN, PROMOTED, [], open_jobs=[], timers=[QUEUE_TIMER]) == []
    assert invariants.of_slots(counted=1, runs=[WAITING, PROMOTED]) == []


def test_a_promoted_run_begins_and_its_time_counts_from_then() -> None:
    later = Instant(NOW + 4_000)
    transition = decide(PLAN, PROMOTED, Promoted(), later)
    assert transition.status is RunStatus.RUNNING
    assert ClearTimer(QUEUE_TIMER) in transition.effects
    assert any(isinstance(effect, DispatchJob) for effect in transition.effects)
    timeout = next(each for each in transition.effects if isinstance(each, SetTimer))
    assert timeout.due == later + PLAN.timeout_s * 1000
    assert {line.actor for line in transition.timeline} == {"ann"}
    again = decide(PLAN, evolve(PROMOTED, transition), Promoted(), later)
    assert again.ignored == (Ignored.ALREADY_STARTED,)


def test_a_time_out_ends_a_run_that_waits_and_no_other() -> None:
    fired = TimerFired(timer=QUEUE_TIMER, due=Instant(NOW + WAIT_MS))
    ended = decide(PLAN, WAITING, fired, Instant(NOW + WAIT_MS + 230))
    assert (ended.status, ended.error is not None) == (RunStatus.TIMED_OUT, True)
    assert ended.error is not None
    assert (ended.error.code, ended.error.message) == (
        QUEUE_TIMEOUT,
        "no slot was free within the tenant's queue_wait_s of 5 s",
    )
    older = decide(PLAN, WAITING, TimerFired(timer=QUEUE_TIMER), Instant(NOW + WAIT_MS)).error
    assert older is not None
    assert older.message == "no slot was free within the tenant's queue_wait_s"
    assert frees_key(ended)
    both = decide_all(PLAN, PROMOTED, (fired, Promoted()), NOW)
    assert both.ignored == (Ignored.NOT_WAITING_FOR_IT, None)
    assert (both.status, frees_key(both)) == (RunStatus.RUNNING, False)


def test_a_run_that_waits_is_cancelled_and_not_started() -> None:
    assert decide(PLAN, WAITING, CancelRequested(), NOW).status is RunStatus.CANCELLED
    assert decide(PLAN, WAITING, Started(), NOW).ignored == (Ignored.ALREADY_STARTED,)
    assert not frees_key(decide(PLAN, WAITING, CancelRequested(), NOW))


@pytest.mark.parametrize(
    ("ended_s", "held_s", "position", "now_s", "expected"),
    [
        ([], [90], 1, 100, None),
        ([(80, 90)], [90], 1, 100, None),
        ([(70, 80), (80, 90)], [], 1, 100, None),  # nothing holds a slot: its cap is 0
        # One slot, and runs of ten seconds that waited for each other.
        ([(70, 80), (70, 90)], [70], 1, 91, 9.0),
        ([(70, 90), (70, 80)], [70], 3, 91, 29.0),
        # After an idle time, runs do not seem slow.
        ([(0, 10), (40, 50)], [700], 1, 700, 10.0),
        ([(0, 10), (40, 50)], [700], 2, 704, 16.0),
        # A run that takes longer than usual takes as much longer again.
        ([(70, 80), (70, 90)], [70], 1, 120, 20.0),
        # Two slots that were taken one after the other.
        ([(0, 10), (2, 12)], [100, 105], 1, 106, 4.0),
        ([(0, 10), (2, 12)], [100, 105], 2, 106, 9.0),
        ([(0, 10), (2, 12)], [100, 105], 3, 106, 14.0),
        ([(90, 90), (90, 90)], [90], 5, 90, 0.0),
        ([(90, 89), (90, 90)], [95], 1, 90, 0.0),  # the time of day was set back
        ([(each, each + 1) for each in range(100)], [99], 2, 100, 2.0),
    ],
)
def test_an_estimate_is_made_from_the_last_runs_and_those_under_way(
    ended_s: list[tuple[int, int]],
    held_s: list[int],
    position: int,
    now_s: int,
    expected: float | None,
) -> None:
    ended = [SlotUse(Instant(began * 1000), Instant(end * 1000)) for began, end in ended_s]
    held = [Instant(each * 1000) for each in held_s]
    slots = max(1, len(held))
    now = Instant(now_s * 1000)
    assert estimate_s(ended, held, slots=slots, position=position, now=now) == expected


def test_an_estimate_is_made_from_the_last_twenty_ends() -> None:
    slow = SlotUse(Instant(0), Instant(1_000_000))
    quick = [SlotUse(Instant(at), Instant(at + 1_000)) for at in range(1_000_000, 1_020_000, 1_000)]
    now = Instant(1_020_000)
    assert estimate_s([slow, *quick], [now], slots=1, position=1, now=now) == 1.0
    assert estimate_s([slow, *quick[1:]], [now], slots=1, position=1, now=now) == 51.0


def test_an_estimate_for_many_slots_does_not_look_at_each() -> None:
    ended = [SlotUse(Instant(0), Instant(10_000)), SlotUse(Instant(0), Instant(30_000))]
    held = [Instant(40_000)] * 100
    assert estimate_s(ended, held, slots=400, position=200, now=Instant(40_000)) == 10.0


@pytest.mark.parametrize(
    "wrong",
    [{"queue_max": 0}, {"queue_max": 10_001}, {"queue_wait_s": 0.0}, {"queue_wait_s": 1e9}],
)
def test_a_queue_has_bounds(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Tenant(**wrong)  # type: ignore[arg-type]  # members by name
    assert Tenant(queue_wait_s=1.5).queue_wait_ms == 1_500
