"""Runs: how an event changes a run.

``decide`` takes the plan, the run as read, an event and the time, and returns the changes as a
``Transition``. It is deterministic: two replicas that read the same run and handle the same event
decide the same change, so it does not matter which one commits it.

The rules:

* A step starts when every step it needs has succeeded or was skipped, and its ``when`` is true. If
  ``when`` is false the step is skipped; if it raises, the step fails.
* A step that failed, timed out or was cancelled cancels every step that depends on it. All other
  steps go on, so that their results do not depend on the order of events.
* With ``on_failure: continue``, steps that need a step start also when it failed or timed out.
* A sub-workflow step ends when all its inner steps have ended, a run when all its steps have. It
  fails if one of them failed or timed out, unless that one has ``on_failure: continue``; its error
  is that of the first such step in file order.
* Cancelling a run, or its timeout, ends every unfinished step at once.
* A queued run can only time out or be cancelled. It starts when the store has promoted it.
* An active step waits for one named thing. An event about anything else changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, assert_never

import msgspec

from stanchion.core.draft import INPUT_BYTES_PER_WORK, DecisionTooLong, Draft, size_of
from stanchion.core.events import (
    Approved,
    AttemptFailed,
    AttemptSucceeded,
    CancelRequested,
    Event,
    JobDied,
    JobDiscarded,
    JobReplayed,
    JobReturned,
    Promoted,
    Rejected,
    Started,
    Timer,
    TimerFired,
    TimerKind,
)
from stanchion.core.expression import WORK_MAX, EvaluationBudget, ExpressionError
from stanchion.core.limits import BEGUN_BYTES_MAX
from stanchion.core.model import (
    Failure,
    Instant,
    OnJob,
    Run,
    RunStatus,
    Stamp,
    Step,
    StepId,
    StepStatus,
    job_id,
)
from stanchion.core.queue import QUEUE_TIMEOUT, QUEUE_TIMER
from stanchion.core.rerun import outer_steps
from stanchion.core.steps import approval, delay, foreach, job, subworkflow
from stanchion.core.transition import (
    ClearTimer,
    DispatchJob,
    Effect,
    Ignored,
    RevokeJob,
    SetTimer,
    StopRun,
    StopStep,
    TimelineEntry,
    Transition,
)
from stanchion.core.workflow import (
    ApprovalSpec,
    DelaySpec,
    ForEachSpec,
    ForEachWorkflowSpec,
    JobSpec,
    SubworkflowSpec,
)

if TYPE_CHECKING:
    from stanchion.core.draft import ItemDraft
    from stanchion.core.json_value import JsonObject, JsonValue
    from stanchion.core.plan import Body, Plan, PlannedStep

_replace: Final = msgspec.structs.replace

__all__ = [
    "DecisionTooLong",
    "begins_with_jobs",
    "decide",
    "decide_all",
    "evolve",
    "items_to_read",
    "queued_line",
    "queued_run",
    "revokes_jobs",
    "start_like",
    "start_model",
    "start_with",
    "starts_are_alike",
    "works_like",
]


def decide(plan: Plan, run: Run, event: Event, now: Instant) -> Transition:
    """Decide on one event: ``decide_all`` for a single one."""
    return decide_all(plan, run, (event,), now)


def decide_all(
    plan: Plan,
    run: Run,
    events: Iterable[Event],
    now: Instant,
    *,
    work_max: int | None = None,
) -> Transition:
    """Apply events to a run, one after the other, and return the changes as one transition.

    It may stop before the last event if the transition has become very large: ``ignored`` has an
    entry for each event that was handled, which includes at least the first.

    Raises ``DecisionTooLong`` beyond ``work_max`` (in the units of ``EvaluationBudget``). The
    caller on the event loop, which must not be blocked for long, then decides again in a thread.
    """
    draft = Draft(plan, run, now, work_max=work_max)
    ignored: list[Ignored | None] = []
    for event in events:
        ignored.append(_apply(draft, event))
        if draft.is_large:
            break
    if None in ignored and not draft.status.is_finished:
        _show_status(draft)
    return draft.transition(tuple(ignored))


def starts_are_alike(plan: Plan, made: Transition) -> bool:
    """Whether ``start_like`` may make other first transitions of this plan from this one.

    They must differ in nothing but the inputs of jobs: all steps that need no other step are jobs
    without a condition, and all of them were dispatched.
    """
    return (
        begins_with_jobs(plan)
        and made.status is RunStatus.RUNNING
        and all(isinstance(state.wait, OnJob) for state in made.steps.values())
    )


def begins_with_jobs(plan: Plan) -> bool:
    """Whether all steps of the plan that need no other step are jobs without a condition."""
    for step_id in plan.body.steps:
        step = plan.steps[step_id]
        is_job = isinstance(step.spec, JobSpec) and step.input is not None
        if not step.needs and not (is_job and step.condition is None and not _reads_steps(step)):
            return False
    return True


def _reads_steps(step: PlannedStep) -> bool:
    return step.input is not None and "steps" in step.input.uses


def start_model(plan: Plan, made: Transition) -> Transition | None:
    """What ``start_like`` needs of a run's first transition; ``None`` if it cannot be used."""
    if not starts_are_alike(plan, made):
        return None
    effects = (
        DispatchJob(_replace(each.job, input=None)) if isinstance(each, DispatchJob) else each
        for each in made.effects
    )
    return _replace(made, effects=tuple(effects))


def start_like(
    plan: Plan,
    made: Transition,
    run: Run,
    *,
    actor: str | None = None,
    work_max: int | None = None,
) -> Transition | None:
    """The first transition of a run, from that of another run of the plan.

    The same as ``decide_all`` returns for it at the time of its creation. Both are new runs with
    the same ``traceparent``, and neither is a rerun. ``actor`` started this one, if it is not the
    one who started the other. ``None`` if the run must be decided by itself, because an expression
    fails or is costly.
    """
    works = works_like(plan, made, run.input, work_max=work_max)
    return None if works is None else start_with(made, run, works, actor=actor)


def works_like(
    plan: Plan, made: Transition, given: JsonObject, *, work_max: int | None = None
) -> tuple[JsonValue, ...] | None:
    """The inputs of the jobs of ``start_like``, in the order in which they are dispatched."""
    scope: dict[str, JsonValue] = {"input": given}
    # Less than a decision allows: what exceeds it is decided again.
    budget = EvaluationBudget(work=WORK_MAX if work_max is None else min(WORK_MAX, work_max))
    bytes_max = BEGUN_BYTES_MAX
    if work_max is not None:
        bytes_max = min(bytes_max, work_max * INPUT_BYTES_PER_WORK)
    works: list[JsonValue] = []
    for effect in made.effects:
        if isinstance(effect, DispatchJob):
            template = plan.steps[effect.job.step_id].input
            assert template is not None
            try:
                works.append(template.evaluate(scope, budget))
            except ExpressionError:
                return None
            bytes_max -= size_of(works[-1])
            if bytes_max < 0:
                return None
    return tuple(works)


def start_with(
    made: Transition, run: Run, works: Iterable[JsonValue], *, actor: str | None = None
) -> Transition:
    """The transition of ``start_like`` with these inputs of its jobs."""
    first, now = made.timeline[0], run.created_at
    later_ms = now - first.at
    timeline = made.timeline
    if later_ms or actor not in {None, first.actor}:
        timeline = tuple(
            _replace(each, at=now, actor=each.actor if actor is None else actor)
            for each in timeline
        )
    steps, effects, left = dict[StepId, Step](), list[Effect](), iter(works)
    for effect in made.effects:
        if isinstance(effect, SetTimer):
            due = Instant(effect.due + later_ms)
            effects.append(SetTimer(effect.timer, due) if later_ms else effect)
            continue
        assert isinstance(effect, DispatchJob), "nothing else begins"
        sent = effect.job
        new_id = job_id(run.id, sent.step_id, None, sent.attempt)
        job = _replace(sent, id=new_id, run_id=run.id, tenant=run.tenant, input=next(left))
        effects.append(DispatchJob(job))
        began = made.steps[sent.step_id]
        steps[sent.step_id] = _replace(began, wait=OnJob(new_id), started_at=now)
    return _replace(made, steps=steps, effects=tuple(effects), timeline=timeline)


def queued_run(before: Run, *, wait_ms: int) -> tuple[Run, Transition]:
    """The run in its tenant's queue, and the transition that puts it there.

    ``before`` is the run before its first decision, which is made after its promotion. A rerun
    already has the steps and items that it keeps.
    """
    due = Instant(before.created_at + wait_ms)
    transition = Transition(
        status=RunStatus.QUEUED,
        steps=before.steps,
        items=before.items,
        effects=(SetTimer(QUEUE_TIMER, due),),
        timeline=(queued_line(before),),
    )
    return msgspec.structs.replace(before, status=RunStatus.QUEUED), transition


def queued_line(before: Run) -> TimelineEntry:
    """The first line in the timeline of a run that must wait."""
    return TimelineEntry(before.created_at, "run_queued", before.starter or "system")


def items_to_read(plan: Plan, run: Run, events: Iterable[Event]) -> Mapping[StepId, Sequence[int]]:
    """The items of for-each steps that a decision on these events reads.

    Usually those that the events name, and the pending ones that may be dispatched in their place.
    If the events can be the last ones of a step, all of its items: their outputs become the output
    of the step. If a rerun begins that was queued, the items that it may keep.
    """
    named: dict[StepId, set[int]] = {}
    more: set[StepId] = set()
    wanted: dict[StepId, Sequence[int]] = {}
    for event in events:
        if run.rerun_of is not None and isinstance(event, Promoted):
            wanted |= _items_kept(plan, run)
        place = _item_of(event)
        if place is not None:
            step_id = plan.item_steps.get(place[0], place[0])
            named.setdefault(step_id, set()).add(place[1])
        elif isinstance(event, TimerFired) and event.timer.kind is TimerKind.ITEMS:
            assert event.timer.step_id is not None
            named.setdefault(event.timer.step_id, set())
            more.add(event.timer.step_id)
    for step_id, indexes in named.items():
        counts = run.step(step_id).items
        if counts is not None:
            # Each event can end an item, and each end begins pending ones.
            has_workflow = plan.steps[step_id].item_plan is not None
            is_short = foreach.is_short(plan.steps[step_id], counts)
            at_most = len(indexes)
            if is_short and not has_workflow:
                at_most *= foreach.BEGUN_BY_END_MAX
            if step_id in more:
                at_most += foreach.BEGUN_AT_ONCE_MAX
            first = len(counts.to_run) - counts.pending
            following = counts.to_run[first : first + min(counts.pending, at_most)]
            # An item with a workflow can end in the decision that begins it.
            ended = len(indexes) + (len(following) if has_workflow else 0)
            wanted[step_id] = (
                range(counts.total)
                if ended >= counts.unfinished
                else sorted(indexes.union(following))
            )
    return wanted


def _items_kept(plan: Plan, run: Run) -> dict[StepId, Sequence[int]]:
    """The items that a rerun may have of for-each steps that begin when it begins."""
    draft = Draft(plan, run, run.created_at, work_max=_LISTS_WORK_MAX)
    return {
        step.id: range(foreach.items_max(draft, step))
        for step in plan.steps.values()
        if isinstance(step.spec, ForEachSpec | ForEachWorkflowSpec)
        and step.id not in run.steps
        and all(need in run.steps for outer in outer_steps(plan, step) for need in outer.needs)
    }


_LISTS_WORK_MAX: Final = 15_000
"""Work to find how many items there are, up to 15 ms; beyond it, there may be any number."""


def _apply(draft: Draft, event: Event) -> Ignored | None:
    if draft.status.is_finished:
        return Ignored.RUN_FINISHED
    draft.begin_event(event.actor)
    match event:
        # Results first: there are more of them than of all other events.
        case (
            AttemptSucceeded()
            | AttemptFailed()
            | JobDied()
            | JobDiscarded()
            | JobReplayed()
            | Approved()
            | Rejected()
        ):
            ignored = _handle(draft, event.step_id, event)
        case Started():
            ignored = _start(draft)
        case Promoted():
            draft.begin_event(draft.run.starter or event.actor)
            ignored = _start(draft)
            if ignored is None:
                draft.then(ClearTimer(QUEUE_TIMER))
        case CancelRequested():
            reason = event.reason or f"cancelled by {event.actor}"
            draft.finish(RunStatus.CANCELLED, error=Failure("cancelled", reason))
            ignored = None
        case TimerFired(timer=Timer(kind=TimerKind.RUN_TIMEOUT)):
            message = f"not finished within {draft.plan.timeout_s:g} s"
            draft.finish(RunStatus.TIMED_OUT, error=Failure("run_timeout", message))
            ignored = None
        case TimerFired(timer=Timer(kind=TimerKind.QUEUE)):
            ignored = _leave_queue(draft, event.due)
        case TimerFired(timer=timer):
            ignored = _handle(draft, timer.step_id, event)
        case JobReturned():
            ignored = _note_return(draft, event)
        case _:
            assert_never(event)
    _settle(draft)
    return ignored


def _start(draft: Draft) -> Ignored | None:
    if draft.status is not RunStatus.PENDING:
        return Ignored.ALREADY_STARTED
    draft.status = RunStatus.RUNNING
    _note_start(draft)
    draft.then(SetTimer(Timer(TimerKind.RUN_TIMEOUT), draft.after(draft.plan.timeout_s)))
    draft.unsettled.extend(draft.plan.body.steps)
    return None


def _leave_queue(draft: Draft, due: Instant | None) -> Ignored | None:
    """End a run that has waited too long, unless it was promoted meanwhile."""
    if draft.status is not RunStatus.QUEUED:
        return Ignored.NOT_WAITING_FOR_IT
    message = "no slot was free within the tenant's queue_wait_s"
    if due is not None:
        # The value of the setting when the run was queued, which the timer was set by.
        message += f" of {(due - draft.run.created_at) / 1000:g} s"
    draft.finish(RunStatus.TIMED_OUT, error=Failure(QUEUE_TIMEOUT, message))
    return None


def _note_start(draft: Draft) -> None:
    """Write to the timeline that the run started and, of a rerun, what it keeps."""
    run = draft.run
    if run.rerun_of is None:
        draft.note("run_started")
        return
    again = len(draft.plan.steps) - len(run.steps)
    detail = f"rerun of {run.rerun_of}: {len(run.steps)} steps reused, {again} to run"
    draft.note("run_started", detail=detail)
    for step_id, step in run.steps.items():
        items = "" if step.items is None else f" with {step.items.total} items"
        draft.note("step_reused", step_id, detail=f"{step.status} in {run.rerun_of}{items}")
    for key, item in run.items.items():
        draft.put_item(key, item)


def _handle(draft: Draft, step_id: StepId | None, event: Event) -> Ignored | None:
    step = None if step_id is None else _step_of(draft, step_id)
    if step is None:
        return Ignored.UNKNOWN_STEP
    if not draft.states[step.id].status.is_active:
        return Ignored.NOT_WAITING_FOR_IT
    if step.id != step_id:
        return foreach.handle_inside(draft, step, event, _handle_inside)
    if isinstance(event, TimerFired) and event.timer == draft.timeout_of(step.id):
        return _time_out(draft, step)
    return _handle_event(draft, step, event)


def _step_of(draft: Draft, step_id: StepId) -> PlannedStep | None:
    """The step, or the for-each step whose items have it."""
    step = draft.plan.steps.get(step_id)
    if step is None and (around := draft.plan.item_steps.get(step_id)) is not None:
        step = draft.plan.steps[around]
    return step


def _handle_inside(draft: ItemDraft, event: Event | None) -> Ignored | None:
    """Apply an event to the item that it names, or start the item, and do all that follows."""
    ignored = None
    if event is None:
        draft.unsettled.extend(draft.plan.body.steps)
    else:
        ignored = _handle(draft, _step_named_by(event), event)
    _settle(draft)
    if not draft.status.is_finished:
        _show_status(draft)
    return ignored


def _note_return(draft: Draft, event: JobReturned) -> Ignored | None:
    """Write to the timeline that a worker lost the job. Nothing else changes."""
    around = draft.plan.item_steps.get(event.step_id, event.step_id)
    if not draft.states[around].status.is_active:
        return Ignored.NOT_WAITING_FOR_IT
    draft.note(
        "job_returned",
        event.step_id,
        item=event.item,
        detail=f"its lease ran out without a result (delivery {event.deliveries}): offered again",
    )
    return None


def _time_out(draft: Draft, step: PlannedStep) -> Ignored | None:
    if step.timeout_s is None:
        return Ignored.NOT_WAITING_FOR_IT
    message = f"not finished within {step.timeout_s:g} s"
    draft.abandon(step, StepStatus.TIMED_OUT, Failure("step_timeout", message, step.id))
    return None


# ── Step kinds ────────────────────────────────────────────────────────────────────────────────────


def _start_step(draft: Draft, step: PlannedStep) -> None:
    """Start a pending step whose needs are met and whose condition holds."""
    spec = step.spec
    match spec:
        case JobSpec():
            job.start(draft, step)
        case ForEachSpec() | ForEachWorkflowSpec():
            foreach.start(draft, step, _handle_inside)
        case ApprovalSpec():
            approval.start(draft, step)
        case DelaySpec():
            delay.start(draft, step, spec)
        case SubworkflowSpec():
            subworkflow.start(draft, step)
        case _:
            assert_never(spec)


def _handle_event(draft: Draft, step: PlannedStep, event: Event) -> Ignored | None:
    """Apply an event to the active step it names. Returns the reason if it changes nothing."""
    spec = step.spec
    match spec:
        case JobSpec():
            return job.handle(draft, step, event)
        case ForEachSpec() | ForEachWorkflowSpec():
            return foreach.handle(draft, step, event, _handle_inside)
        case ApprovalSpec():
            return approval.handle(draft, step, event)
        case DelaySpec():
            return delay.handle(draft, step, event)
        case SubworkflowSpec():
            return Ignored.NOT_WAITING_FOR_IT  # its inner steps handle events
        case _:
            assert_never(spec)


# ── Consequences of a change ─────────────────────────────────────────────────────────────────────


def _settle(draft: Draft) -> None:
    """Start every step that can start and end every step that has ended, until none is left."""
    while draft.unsettled:
        step = draft.plan.steps[draft.unsettled.popleft()]
        if draft.states[step.id].status.is_finished:
            draft.unsettled.extend(step.dependants)
            _close_around(draft, step.parent)
        else:
            _consider(draft, step)


def _consider(draft: Draft, step: PlannedStep) -> None:
    """Start, skip or cancel a pending step if all steps it needs have ended."""
    if draft.states[step.id].status is not StepStatus.PENDING:
        return
    error: Failure | None = None
    for need in step.needs:
        status = draft.states[need].status
        if not status.is_finished:
            return
        if not (status.satisfies_needs or draft.plan.steps[need].is_satisfied_by(status)):
            error = error or Failure("upstream_failed", f"'{need}' has {_words(status)}", step.id)
    if error is not None:
        draft.end(step, StepStatus.CANCELLED, error=error)
        return
    if step.condition is not None:
        try:
            holds = draft.evaluate(step, step.condition)
        except ExpressionError as wrong:
            failure = Failure("expression_error", f"when: {wrong}", step.id)
            draft.end(step, StepStatus.FAILED, error=failure)
            return
        if not holds:
            draft.end(step, StepStatus.SKIPPED)
            return
    _start_step(draft, step)


def _close_around(draft: Draft, parent: StepId | None) -> None:
    """End the sub-workflow step or the run whose last inner step has just ended."""
    around = None if parent is None or parent == draft.root else draft.plan.steps[parent]
    body = draft.plan.body if around is None else around.body
    assert body is not None
    if around is not None and not draft.states[around.id].status.is_active:
        return
    for step_id in body.steps:
        if not draft.states[step_id].status.is_finished:
            return
    outcome = _outcome(draft, parent, body, [draft.states[step_id] for step_id in body.steps])
    if isinstance(outcome, Failure):
        if around is None:
            draft.finish(RunStatus.FAILED, error=outcome)
        else:
            draft.end(around, StepStatus.FAILED, error=outcome)
    elif around is None:
        draft.finish(RunStatus.SUCCEEDED, output=outcome.value)
    else:
        draft.end(around, StepStatus.SUCCEEDED, output=outcome.value)


class _Given(msgspec.Struct, frozen=True):
    value: JsonValue


def _outcome(
    draft: Draft, parent: StepId | None, body: Body, states: Sequence[Step]
) -> _Given | Failure:
    for step_id, state in zip(body.steps, states, strict=True):
        if state.status.is_failure and not draft.plan.steps[step_id].is_satisfied_by(state.status):
            assert state.error is not None
            return state.error
    if body.output is None:
        return _Given({name: draft.states[leaf].output for name, leaf in body.leaves.items()})
    try:
        return _Given(draft.evaluate_in(parent, body.visible, body.output))
    except ExpressionError as error:
        return Failure("expression_error", f"output: {error}", parent)


def _show_status(draft: Draft) -> None:
    """Set ``running`` or ``waiting`` on the run and on sub-workflow steps, by their inner steps."""
    active = {step_id: state for step_id, state in draft.steps_so_far() if state.status.is_active}
    moving: set[StepId | None] = set()
    # Inner steps come after the step around them.
    for step in reversed([step for step in draft.plan.steps.values() if step.id in active]):
        state = active[step.id]
        if step.body is not None:
            status = StepStatus.RUNNING if step.id in moving else StepStatus.WAITING
            if state.status is not status:
                draft.put(step.id, msgspec.structs.replace(state, status=status))
        else:
            status = state.status
        if status is StepStatus.RUNNING:
            moving.add(step.parent)
    draft.status = RunStatus.RUNNING if draft.root in moving else RunStatus.WAITING


def _item_of(event: Event) -> tuple[StepId, int] | None:
    match event:
        case AttemptSucceeded() | AttemptFailed() | JobDied() | JobDiscarded() | JobReplayed() if (
            event.item is not None
        ):
            return event.step_id, event.item
        case TimerFired(timer=Timer(step_id=step_id, item=item)) if (
            step_id is not None and item is not None
        ):
            return step_id, item
        case _:
            return None


def _step_named_by(event: Event) -> StepId | None:
    match event:
        case TimerFired(timer=timer):
            return timer.step_id
        case Started() | Promoted() | CancelRequested():
            return None
        case _:
            return event.step_id


def _words(status: StepStatus) -> str:
    return {StepStatus.CANCELLED: "been cancelled", StepStatus.TIMED_OUT: "timed out"}.get(
        status, str(status)
    )


def revokes_jobs(transition: Transition) -> bool:
    """Whether the transition may take a job from a worker that has it."""
    kinds = set(map(type, transition.effects))
    return not kinds.isdisjoint(_REVOKING) or (
        StopRun in kinds and transition.status in _STOPPED_WITH_WORK_LEFT
    )


_REVOKING: Final = frozenset({StopStep, RevokeJob})
# A run that ends in another way waits for all its jobs first.
_STOPPED_WITH_WORK_LEFT: Final = frozenset({RunStatus.CANCELLED, RunStatus.TIMED_OUT})


def evolve(
    run: Run,
    transition: Transition,
    *,
    stamp: Stamp | None = None,
    fence: int | None = None,
) -> Run:
    """The run after the transition, with this stamp and fence.

    Only the store can tell the next stamp and fence: unless given, they stay as read.
    """
    return msgspec.structs.replace(
        run,
        stamp=run.stamp if stamp is None else stamp,
        fence=run.fence if fence is None else fence,
        status=transition.status,
        output=transition.output,
        error=transition.error,
        finished_at=transition.finished_at,
        steps=run.steps | transition.steps,
        items=run.items | transition.items,
    )
