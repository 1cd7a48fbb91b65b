"""Job steps: work for one worker, attempted as often as the retry policy allows.

``dispatch`` and ``advance`` handle one attempt, for job steps and for items of a for-each: it is
dispatched, then succeeds, or fails and is retried, or becomes a dead letter that can be replayed
or discarded.

A transition writes large inputs for a few jobs only. The first attempts of the others wait like
retries, for timers that are due at once, and each of these begins as many jobs as one transition
may write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar, assert_never

import msgspec

from stanchion.core.draft import size_of
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
from stanchion.core.expression import ExpressionError
from stanchion.core.model import (
    Failure,
    Instant,
    Item,
    Job,
    JobTrace,
    OnJob,
    OnReplay,
    OnRetry,
    Step,
    StepStatus,
    job_id,
)
from stanchion.core.retry import backoff_ms, sample_from
from stanchion.core.transition import DispatchJob, Ignored, SetTimer
from stanchion.core.workflow import ForEachSpec, JobSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from stanchion.core.draft import Draft
    from stanchion.core.json_value import JsonValue
    from stanchion.core.plan import PlannedStep

_DISPATCHING: Final = (JobSpec, ForEachSpec)
ITEMS_TRACED: Final = 20
"""Items of a for-each that have spans; a trace of thousands cannot be read."""


def start(draft: Draft, step: PlannedStep) -> None:
    """Render the input and dispatch the first attempt, in a later transition if it is large."""
    try:
        work = _work(draft, step)
        size = draft.take_input(work)
    except ExpressionError as error:
        draft.end(
            step, StepStatus.FAILED, error=Failure("expression_error", f"input: {error}", step.id)
        )
        return
    state = draft.states[step.id]
    if draft.has_room(size):
        draft.write_input(size)
        state = dispatch(draft, step, draft.index, state, work)
    else:
        draft.then(SetTimer(_retry_timer(step, draft.index, state), draft.now))
        state = msgspec.structs.replace(state, status=StepStatus.WAITING, wait=OnRetry(draft.now))
    draft.begin(step, state)


def handle(draft: Draft, step: PlannedStep, event: Event) -> Ignored | None:
    """Apply the result of the job."""
    state = advance(
        draft, step, draft.index, draft.states[step.id], event, lambda: _work(draft, step)
    )
    if isinstance(state, Ignored):
        return state
    if state.status.is_finished:
        draft.end(step, state.status, output=state.output, error=state.error)
    else:
        draft.put(step.id, state)
    return None


def _work(draft: Draft, step: PlannedStep) -> JsonValue:
    assert step.input is not None
    return draft.evaluate(step, step.input)


_State = TypeVar("_State", Step, Item)


def dispatch(
    draft: Draft, step: PlannedStep, item: int | None, state: _State, work: JsonValue
) -> _State:
    """Dispatch the next attempt with ``work`` as input, under a new job id."""
    return _send(draft, step, item, state, work, attempt=state.attempt + 1, number=1)


def advance(
    draft: Draft,
    step: PlannedStep,
    item: int | None,
    state: _State,
    event: Event,
    work: Callable[[], JsonValue],
) -> _State | Ignored:
    """The state of a step or item after an event, or why the event changes nothing.

    ``work`` renders the input again. The value is the same each time, because the steps that it
    reads had ended before the first attempt.
    """
    match event:
        case AttemptSucceeded(job_id=about, output=output) if state.wait == OnJob(about):
            return msgspec.structs.replace(
                state, status=StepStatus.SUCCEEDED, wait=None, output=output, error=None
            )
        case AttemptFailed(job_id=about) if state.wait == OnJob(about):
            return _failed(draft, step, item, state, event)
        case JobDied(job_id=about, dispatch=number, deliveries=deliveries) if (
            state.wait == OnJob(about) and state.dispatch == number
        ):
            often = "once" if deliveries == 1 else f"{deliveries} times"
            draft.note(
                "job_died",
                step.id,
                item=item,
                attempt=state.attempt,
                detail=f"delivered {often} without a result",
            )
            return msgspec.structs.replace(state, status=StepStatus.WAITING, wait=OnReplay(about))
        case JobReplayed(job_id=about, dispatch=number) if (
            state.wait == OnReplay(about) and state.dispatch == number
        ):
            given = _written(draft, work())
            number = state.dispatch + 1
            return _send(draft, step, item, state, given, attempt=state.attempt, number=number)
        case JobDiscarded(job_id=about, dispatch=number) if (
            state.wait == OnReplay(about) and state.dispatch == number
        ):
            draft.note("job_discarded", step.id, item=item, attempt=state.attempt)
            message = f"its job became a dead letter, which {event.actor} discarded"
            return msgspec.structs.replace(
                state,
                status=StepStatus.FAILED,
                wait=None,
                error=Failure("dead_letter_discarded", message, step.id),
            )
        case TimerFired(timer=timer) if timer == _retry_timer(step, item, state) and isinstance(
            state.wait, OnRetry
        ):
            return dispatch(draft, step, item, state, _written(draft, work()))
        case (
            AttemptSucceeded()
            | AttemptFailed()
            | JobDied()
            | JobDiscarded()
            | JobReplayed()
            | JobReturned()
            | TimerFired()
            | Approved()
            | Rejected()
            | Started()
            | Promoted()
            | CancelRequested()
        ):
            return Ignored.NOT_WAITING_FOR_IT
        case _:
            assert_never(event)


def _written(draft: Draft, work: JsonValue) -> JsonValue:
    """The input, counted."""
    draft.write_input(size_of(work))
    return work


def _send(
    draft: Draft,
    step: PlannedStep,
    item: int | None,
    state: _State,
    work: JsonValue,
    *,
    attempt: int,
    number: int,
) -> _State:
    spec = step.spec
    assert isinstance(spec, _DISPATCHING)
    job = Job(
        id=job_id(draft.run.id, step.id, item, attempt),
        run_id=draft.run.id,
        tenant=draft.run.tenant,
        step_id=step.id,
        item=item,
        topic=spec.topic,
        attempt=attempt,
        input=work,
        dispatch=number,
        max_deliveries=step.max_deliveries,
        attempt_timeout_ms=(
            None if spec.attempt_timeout_s is None else round(spec.attempt_timeout_s * 1000)
        ),
        trace=None if draft.run.traceparent is None else _trace(draft, item),
    )
    draft.then(DispatchJob(job))
    draft.note("job_dispatched", step.id, item=item, attempt=attempt)
    return msgspec.structs.replace(
        state, status=StepStatus.RUNNING, attempt=attempt, dispatch=number, wait=OnJob(job.id)
    )


def _trace(draft: Draft, item: int | None) -> JobTrace:
    parent = draft.run.traceparent
    assert parent is not None
    if item is not None and item >= ITEMS_TRACED:
        parent = f"{parent[:-2]}00"
    return JobTrace(parent, draft.now)


def _failed(
    draft: Draft, step: PlannedStep, item: int | None, state: _State, event: AttemptFailed
) -> _State:
    spec = step.spec
    assert isinstance(spec, JobSpec | ForEachSpec)
    draft.note("job_failed", step.id, item=item, attempt=state.attempt, detail=event.error.message)
    if event.final or state.attempt >= spec.retry.max_attempts:
        return msgspec.structs.replace(
            state, status=StepStatus.FAILED, wait=None, error=_at(step, event.error)
        )
    # The jitter is a hash of run, place and attempt: deciding the same failure twice gives the same
    # delay, and items that fail together are not retried together.
    place = step.id if item is None else f"{step.id}[{item}]"
    sample = sample_from(draft.run.id, place, state.attempt)
    due = Instant(draft.now + backoff_ms(spec.retry.backoff, state.attempt, sample))
    draft.then(SetTimer(_retry_timer(step, item, state), due))
    return msgspec.structs.replace(
        state, status=StepStatus.WAITING, wait=OnRetry(due), error=_at(step, event.error)
    )


def _retry_timer(step: PlannedStep, item: int | None, state: Step | Item) -> Timer:
    return Timer(TimerKind.RETRY, step.id, item, state.attempt)


def _at(step: PlannedStep, error: Failure) -> Failure:
    return Failure(error.code, error.message, step.id)
