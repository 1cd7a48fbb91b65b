"""Invariants: what must hold for every run and tenant at all times.

Each function returns the violations as sentences; an empty list means that all hold. Tests call
them after every transition, the simulator after every step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from stanchion.core.events import Timer, TimerKind
from stanchion.core.model import (
    ItemKey,
    JobId,
    OnChildren,
    OnDecision,
    OnDelay,
    OnItems,
    OnJob,
    OnReplay,
    OnRetry,
    Run,
    RunStatus,
    Step,
    StepId,
    StepStatus,
)
from stanchion.core.queue import QUEUE_TIMER
from stanchion.core.steps import foreach
from stanchion.core.workflow import (
    ApprovalSpec,
    DelaySpec,
    ForEachSpec,
    ForEachWorkflowSpec,
    JobSpec,
    SubworkflowSpec,
)

if TYPE_CHECKING:
    from stanchion.core.model import Item, Wait
    from stanchion.core.plan import Plan, PlannedStep
    from stanchion.core.transition import Transition

_NOT_BEGUN = frozenset({RunStatus.QUEUED, RunStatus.PENDING})
_WAITS: dict[type[object], tuple[type[object], ...]] = {
    JobSpec: (OnJob, OnRetry, OnReplay),
    ForEachSpec: (OnItems,),
    ForEachWorkflowSpec: (OnItems,),
    ApprovalSpec: (OnDecision,),
    DelaySpec: (OnDelay,),
    SubworkflowSpec: (OnChildren,),
}


def of_run(plan: Plan, run: Run) -> list[str]:
    """Check that the run is in a reachable state, and has ended or waits for a named thing."""
    broken = [
        f"step '{step_id}' is not in the plan" for step_id in run.steps if step_id not in plan.steps
    ]
    for step in plan.steps.values():
        broken += [f"step '{step.id}': {fault}" for fault in _of_step(plan, run, step)]
    states = [run.step(step_id).status for step_id in plan.steps]
    if run.status.is_finished:
        broken += _of_finished(plan, run, states)
    elif run.status not in _NOT_BEGUN:
        if not any(status.is_active for status in states):
            broken.append("an unfinished run waits for nothing")
        tops = [run.step(step_id).status for step_id in plan.body.steps]
        if (run.status is RunStatus.RUNNING) != (StepStatus.RUNNING in tops):
            broken.append(f"the run is {run.status}, its steps are {sorted(map(str, set(tops)))}")
        if run.finished_at is not None or run.error is not None:
            broken.append("an unfinished run has an end or an error")
    return broken


def of_transition(before: Run, transition: Transition, after: Run) -> list[str]:
    """Check that ended steps do not change, attempts only rise, and no history is rewritten."""
    broken: list[str] = []
    if before.status.is_finished and (transition.steps or transition.effects or before != after):
        broken.append("a finished run changed")
    if transition.changes_nothing and (
        transition.steps or transition.items or transition.effects or transition.timeline
    ):
        broken.append("an ignored event had an effect")
    for step_id, now in transition.steps.items():
        was = before.step(step_id)
        if was.status.is_finished and was != now:
            broken.append(f"step '{step_id}' changed after its end")
        if now.attempt < was.attempt:
            broken.append(f"step '{step_id}' lost an attempt")
        if was == now:
            broken.append(f"step '{step_id}' is in the delta without a change")
    for key, item in transition.items.items():
        known = before.items.get(key)
        if known is not None and known.status.is_finished and known != item:
            broken.append(f"item {key} changed after its end")
    if after.status.is_finished and after.finished_at is None:
        broken.append("an end without a time")
    return broken


def of_work(
    plan: Plan,
    run: Run,
    items: Iterable[tuple[ItemKey, Item]],
    *,
    open_jobs: Collection[JobId],
    timers: Collection[Timer],
) -> list[str]:
    """Check that exactly the jobs and timers exist for which steps wait."""
    jobs: set[JobId] = set()
    clocks: set[Timer] = set()
    active = {step.id for step in plan.steps.values() if run.step(step.id).status.is_active}
    for step_id in active:
        step, state = plan.steps[step_id], run.step(step_id)
        _expect(step_id, None, state.attempt, state.wait, jobs, clocks)
        if step.timeout_s is not None:
            clocks.add(Timer(TimerKind.STEP_TIMEOUT, step_id))
        if state.items and foreach.is_short(step, state.items):
            clocks.add(foreach.more_items(step))
    for key, item in items:
        if key.step_id in active:
            _expect(key.step_id, key.item, item.attempt, item.wait, jobs, clocks)
            _expect_inside(plan.steps[key.step_id], key.item, item, jobs, clocks)
    if run.status is RunStatus.QUEUED:
        clocks.add(QUEUE_TIMER)
    elif run.status is RunStatus.PENDING and QUEUE_TIMER in timers:
        clocks.add(QUEUE_TIMER)  # cleared by the first decision after the promotion
    elif not run.status.is_finished and run.status is not RunStatus.PENDING:
        clocks.add(Timer(TimerKind.RUN_TIMEOUT))
    return [
        *(f"job '{job}' is waited for and not out" for job in sorted(jobs - set(open_jobs))),
        *(f"job '{job}' is out and not waited for" for job in sorted(set(open_jobs) - jobs)),
        *(f"timer '{timer.key}' is not set" for timer in clocks - set(timers)),
        *(f"timer '{timer.key}' is set for nothing" for timer in set(timers) - clocks),
    ]


def of_slots(*, counted: int, runs: Iterable[Run]) -> list[str]:
    """Check that the slots a tenant uses are as many as its unfinished runs that do not wait."""
    active = sum(run.holds_slot and run.status.uses_slot for run in runs)
    return [] if counted == active else [f"{counted} slots are held for {active} unfinished runs"]


def _expect_inside(
    step: PlannedStep, index: int, item: Item, jobs: set[JobId], timers: set[Timer]
) -> None:
    """What the steps of an item with a workflow wait for."""
    if step.item_plan is None or not item.status.is_active:
        return
    if step.item_timeout_s is not None:
        timers.add(Timer(TimerKind.STEP_TIMEOUT, step.id, index))
    for step_id, state in item.steps.items():
        if state.status.is_active:
            _expect(step_id, index, state.attempt, state.wait, jobs, timers)
            if step.item_plan.steps[step_id].timeout_s is not None:
                timers.add(Timer(TimerKind.STEP_TIMEOUT, step_id, index))


def _expect(
    step_id: StepId,
    item: int | None,
    attempt: int,
    wait: Wait | None,
    jobs: set[JobId],
    timers: set[Timer],
) -> None:
    match wait:
        case OnJob(job_id=job_id):
            jobs.add(job_id)
        case OnRetry():
            timers.add(Timer(TimerKind.RETRY, step_id, item, attempt))
        case OnDelay():
            timers.add(Timer(TimerKind.DELAY, step_id, item))
        case OnDecision(due=due) if due is not None:
            timers.add(Timer(TimerKind.DECISION, step_id, item))
        case _:
            pass


def _of_step(plan: Plan, run: Run, step: PlannedStep) -> Iterable[str]:
    state = run.step(step.id)
    if state.status.is_active:
        if not isinstance(state.wait, _WAITS[type(step.spec)]):
            yield f"is {state.status} and waits for {state.wait}"
        if any(not plan.steps[need].is_satisfied_by(run.step(need).status) for need in step.needs):
            yield "began before its needs were met"
        if step.parent is not None and not run.step(step.parent).status.is_active:
            yield "is active inside a step that is not"
    elif state.wait is not None:
        yield f"is {state.status} and still waits"
    if state.status is StepStatus.PENDING and _could_begin(run, step):
        yield "could begin and did not"
    if state.status.is_finished and state.finished_at is None:
        yield "ended without a time"
    if (state.status is StepStatus.FAILED and state.error is None) or (
        state.status is StepStatus.SUCCEEDED and state.error is not None
    ):
        yield f"is {state.status} with error {state.error}"
    if isinstance(step.spec, JobSpec) and state.attempt > step.spec.retry.max_attempts:
        yield f"is in attempt {state.attempt} of {step.spec.retry.max_attempts}"
    yield from _of_items(run, step, state)


def _of_items(run: Run, step: PlannedStep, state: Step) -> Iterable[str]:
    if state.items is None:
        return
    counts = state.items
    if min(counts.succeeded, counts.failed, counts.waiting, counts.running, counts.pending) < 0:
        yield f"has impossible item counts {counts}"
    if state.status.is_active and counts.unfinished == 0:
        yield "has no item left to wait for"
    spec = step.spec
    assert isinstance(spec, ForEachSpec | ForEachWorkflowSpec)
    out = counts.unfinished - counts.pending
    at_once = spec.at_once
    # Fewer items may be out: a timer begins the next ones, see ``of_work``.
    if state.status.is_active and out > at_once:
        yield f"has {out} items out and {counts.pending} pending; {at_once} may be out"
    for key, item in run.items.items():
        if key.step_id == step.id:
            yield from _of_item(step, key.item, item)


def _of_item(step: PlannedStep, index: int, item: Item) -> Iterable[str]:
    if isinstance(step.spec, ForEachSpec) and item.attempt > step.spec.retry.max_attempts:
        yield f"has item {index} in attempt {item.attempt}"
    if step.item_plan is None:
        return
    for step_id, state in item.steps.items():
        inner = step.item_plan.steps[step_id]
        if state.status.is_active and not item.status.is_active:
            yield f"has '{step_id}' active in item {index}, which is {item.status}"
        if state.status.is_active is (state.wait is None):
            yield f"has '{step_id}' {state.status} in item {index}, waiting for {state.wait}"
        if isinstance(inner.spec, JobSpec) and state.attempt > inner.spec.retry.max_attempts:
            yield f"has '{step_id}' of item {index} in attempt {state.attempt}"
    if item.status.is_active and not any(each.status.is_active for each in item.steps.values()):
        yield f"has item {index} {item.status}, which waits for nothing"


def _could_begin(run: Run, step: PlannedStep) -> bool:
    opened = (
        run.status not in _NOT_BEGUN and not run.status.is_finished
        if step.parent is None
        else run.step(step.parent).status.is_active
    )
    return opened and all(run.step(need).status.is_finished for need in step.needs)


def _of_finished(plan: Plan, run: Run, states: list[StepStatus]) -> Iterable[str]:
    if not all(status.is_finished for status in states):
        yield "a finished run has unfinished steps"
    if run.finished_at is None:
        yield "a finished run has no end"
    if (run.error is None) != (run.status is RunStatus.SUCCEEDED):
        yield f"the run is {run.status} with error {run.error}"
    if run.status is RunStatus.SUCCEEDED:
        for step in plan.steps.values():
            # Inner steps of a sub-workflow step that did not succeed may have any status.
            around = StepStatus.SUCCEEDED if step.parent is None else run.step(step.parent).status
            status = run.step(step.id).status
            if around is StepStatus.SUCCEEDED and not step.is_satisfied_by(status):
                yield f"the run succeeded and its step '{step.id}' is {status}"
