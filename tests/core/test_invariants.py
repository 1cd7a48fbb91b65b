"""The invariants can fail: each of them, on a run that was bent on purpose."""

from __future__ import annotations

import msgspec
import pytest

from stanchion.core import invariants
from stanchion.core.events import CancelRequested, Timer, TimerKind
from stanchion.core.model import (
    Failure,
    Instant,
    Item,
    ItemCounts,
    ItemKey,
    JobId,
    OnDecision,
    OnJob,
    Run,
    RunId,
    RunStatus,
    Step,
    StepId,
    StepStatus,
    Topic,
    WorkflowId,
)
from stanchion.core.plan import Plan
from stanchion.core.run import decide, evolve
from stanchion.core.transition import SetTimer, Transition
from stanchion.core.workflow import (
    DelaySpec,
    ForEachSpec,
    JobSpec,
    StepSpec,
    SubworkflowSpec,
    Workflow,
)
from tests.core.world import START, World, pending_run, planned

A, B, C, CX = StepId("a"), StepId("b"), StepId("c"), StepId("c.x")
RUNNING = Step(status=StepStatus.RUNNING, attempt=1, wait=OnJob(JobId("r1:a@1")))
AT_ONCE = ForEachSpec(topic=Topic("work"), for_each="${input.list}").at_once
ENDED = Step(status=StepStatus.SUCCEEDED, attempt=1, finished_at=START)


def plan() -> Plan:
    inner = Workflow(id=WorkflowId("inner"), steps={StepId("x"): DelaySpec(delay_s=1)})
    steps: dict[StepId, StepSpec] = {
        A: JobSpec(topic=Topic("work")),
        B: ForEachSpec(topic=Topic("work"), needs=(A,), for_each="${input.list}"),
        C: SubworkflowSpec(workflow=inner.id, needs=(B,)),
    }
    return planned(Workflow(id=WorkflowId("w"), steps=steps), {inner.id: inner})


def bent(steps: dict[StepId, Step] | None = None, **changes: object) -> Run:
    """The run as it is after its start, with something changed that no rule leads to."""
    run = World.started(plan(), {"list": [1, 2]}).run
    return msgspec.structs.replace(run, **changes, steps=run.steps | (steps or {}))


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (bent({StepId("q"): ENDED}), "step 'q' is not in the plan"),
        (bent({A: Step()}), "step 'a': could begin and did not"),
        (bent({A: Step()}), "an unfinished run waits for nothing"),
        (
            bent(status=RunStatus.WAITING),
            "the run is waiting, its steps are ['pending', 'running']",
        ),
        (bent(finished_at=START), "an unfinished run has an end or an error"),
        (bent(error=Failure("x", "y")), "an unfinished run has an end or an error"),
        (
            bent({A: msgspec.structs.replace(RUNNING, wait=OnDecision())}),
            "step 'a': is running and waits for OnDecision(message=None, due=None)",
        ),
        (
            bent({A: msgspec.structs.replace(ENDED, wait=OnDecision())}),
            "step 'a': is succeeded and still waits",
        ),
        (bent({A: msgspec.structs.replace(RUNNING, attempt=2)}), "step 'a': is in attempt 2 of 1"),
        (
            bent({A: msgspec.structs.replace(ENDED, finished_at=None)}),
            "step 'a': ended without a time",
        ),
        (
            bent({A: msgspec.structs.replace(ENDED, status=StepStatus.FAILED)}),
            "step 'a': is failed with error None",
        ),
        (
            bent({A: msgspec.structs.replace(ENDED, error=Failure("x", "y"))}),
            "step 'a': is succeeded with error Failure(code='x', message='y', step=None)",
        ),
        (bent({B: RUNNING}), "step 'b': began before its needs were met"),
        (bent({CX: RUNNING}), "step 'c.x': is active inside a step that is not"),
        (
            bent({B: Step(items=ItemCounts(total=1, succeeded=2))}),
            (
                "step 'b': has impossible item counts "
                "ItemCounts(total=1, succeeded=2, failed=0, waiting=0, output_bytes=0,"
                " pending=0, reused='')"
            ),
        ),
        (
            bent({B: msgspec.structs.replace(RUNNING, items=ItemCounts(total=1, failed=1))}),
            "step 'b': has no item left to wait for",
        ),
        (
            bent({B: msgspec.structs.replace(RUNNING, items=ItemCounts(total=AT_ONCE + 1))}),
            f"step 'b': has {AT_ONCE + 1} items out and 0 pending; {AT_ONCE} may be out",
        ),
        (
            bent({B: Step(items=ItemCounts(total=2))}, items={ItemKey(B, 1): Item(attempt=2)}),
            "step 'b': has item 1 in attempt 2",
        ),
        (bent(status=RunStatus.FAILED), "a finished run has unfinished steps"),
        (bent(status=RunStatus.FAILED), "a finished run has no end"),
        (bent(status=RunStatus.FAILED), "the run is failed with error None"),
        (bent(status=RunStatus.SUCCEEDED), "the run succeeded and its step 'a' is running"),
    ],
)
def test_a_bent_run_is_noticed(run: Run, sentence: str) -> None:
    assert sentence in invariants.of_run(plan(), run)


def test_a_run_that_has_not_begun_is_fine() -> None:
    assert invariants.of_run(plan(), pending_run(plan())) == []


def change(
    steps: dict[StepId, Step] | None = None, items: dict[ItemKey, Item] | None = None
) -> Transition:
    return Transition(
        status=RunStatus.RUNNING, ignored=(None,), steps=steps or {}, items=items or {}
    )


FINISHED = bent(status=RunStatus.CANCELLED, finished_at=START)


@pytest.mark.parametrize(
    ("before", "transition", "sentence"),
    [
        (FINISHED, change(), "a finished run changed"),
        (
            bent(),
            msgspec.structs.replace(change(steps={A: ENDED}), ignored=()),
            "an ignored event had an effect",
        ),
        (bent({A: ENDED}), change(steps={A: RUNNING}), "step 'a' changed after its end"),
        (bent(), change(steps={A: Step()}), "step 'a' lost an attempt"),
        (
            bent({A: RUNNING}),
            change(steps={A: RUNNING}),
            "step 'a' is in the delta without a change",
        ),
        (
            bent(items={ItemKey(B, 0): Item(status=StepStatus.FAILED)}),
            change(items={ItemKey(B, 0): Item()}),
            "item ItemKey(step_id='b', item=0) changed after its end",
        ),
        (
            bent(),
            Transition(status=RunStatus.CANCELLED, ignored=(None,)),
            "an end without a time",
        ),
    ],
)
def test_a_change_that_goes_back_is_noticed(
    before: Run, transition: Transition, sentence: str
) -> None:
    after = evolve(before, transition)
    assert sentence in invariants.of_transition(before, transition, after)


def test_a_true_transition_is_fine() -> None:
    run = World.started(plan(), {"list": [1]}).run
    transition = decide(plan(), run, CancelRequested(actor="reviewer"), START)
    assert invariants.of_transition(run, transition, evolve(run, transition)) == []


def test_work_that_is_missing_or_too_much_is_noticed() -> None:
    world = World.started(plan(), {"list": [1, 2]})
    stray = Timer(TimerKind.DELAY, CX)
    assert invariants.of_work(
        world.plan, world.run, [], open_jobs=[JobId("other")], timers=[stray]
    ) == [
        "job 'r1:a@1' is waited for and not out",
        "job 'other' is out and not waited for",
        "timer 'run_timeout:@0' is not set",
        "timer 'delay:c.x@0' is set for nothing",
    ]


def test_slots_are_unfinished_runs_that_hold_one() -> None:
    runs = [bent(), bent(id=RunId("r2")), FINISHED, bent(holds_slot=False)]
    assert invariants.of_slots(counted=2, runs=runs) == []
    assert invariants.of_slots(counted=3, runs=runs) == ["3 slots are held for 2 unfinished runs"]


def test_timers_have_names_that_tell_them_apart() -> None:
    keys = [
        Timer(TimerKind.RUN_TIMEOUT).key,
        Timer(TimerKind.RETRY, A, None, 1).key,
        Timer(TimerKind.RETRY, A, 3, 1).key,
        SetTimer(Timer(TimerKind.RETRY, A, 3, 2), Instant(0)).timer.key,
    ]
    assert keys == ["run_timeout:@0", "retry:a@1", "retry:a[3]@1", "retry:a[3]@2"]
