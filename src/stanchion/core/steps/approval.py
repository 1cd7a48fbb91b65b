"""Approval steps: a person decides, once, or the time for it ends.

``rule_against`` and ``data_faults`` check a decision before it goes into the run's inbox. One that
is in the inbox is applied if the step still waits for it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, assert_never

import msgspec

from stanchion.core.events import Approved, Event, Rejected, Timer, TimerFired, TimerKind
from stanchion.core.expression import ExpressionError
from stanchion.core.faults import Fault
from stanchion.core.limits import APPROVAL_MESSAGE_CHARS_MAX
from stanchion.core.model import Failure, OnDecision, PendingApproval, Step, StepStatus
from stanchion.core.transition import ClearTimer, CloseApproval, Ignored, OpenApproval, SetTimer
from stanchion.core.workflow import ApprovalSpec, OnDecisionTimeout

if TYPE_CHECKING:
    from stanchion.core.draft import Draft
    from stanchion.core.json_value import JsonValue
    from stanchion.core.model import Run
    from stanchion.core.plan import PlannedStep

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def start(draft: Draft, step: PlannedStep) -> None:
    """Render the message and wait for a decision."""
    spec = step.spec
    assert isinstance(spec, ApprovalSpec)
    try:
        message = None if step.input is None else _text(draft.evaluate(step, step.input))
    except ExpressionError as error:
        failure = Failure("expression_error", f"message: {error}", step.id)
        draft.end(step, StepStatus.FAILED, error=failure)
        return
    due = None if spec.decision_timeout_s is None else draft.after(spec.decision_timeout_s)
    wait = OnDecision(message, due)
    draft.begin(step, Step(status=StepStatus.WAITING, attempt=1, wait=wait))
    if due is not None:
        draft.then(SetTimer(_timer(step), due))
    run = draft.run
    limits_s = [each for each in (spec.decision_timeout_s, step.timeout_s) if each is not None]
    pending = PendingApproval(
        run_id=run.id,
        step_id=step.id,
        tenant=run.tenant,
        workflow_id=run.workflow_id,
        since=draft.now,
        expires_at=draft.after(min(limits_s)) if limits_s else None,
        message=message,
        data_schema=spec.data_schema,
        not_by_starter=spec.not_by_starter,
        starter=run.starter,
        labels=run.labels or None,
    )
    draft.then(OpenApproval(pending))
    draft.note("approval_requested", step.id, detail=message)


def handle(draft: Draft, step: PlannedStep, event: Event) -> Ignored | None:
    """Apply the decision, or that of ``on_timeout`` when the timer fires."""
    match event:
        case Approved():
            _stop_waiting(draft, step)
            _approve(draft, step, event.actor, event.comment, event.data)
        case Rejected():
            _stop_waiting(draft, step)
            message = f"rejected by {event.actor}"
            if event.comment:
                message = f"{message}: {event.comment}"
            _reject(draft, step, event.actor, event.comment, event.data, message)
        case TimerFired() if event.timer.kind is TimerKind.DECISION:
            _time_out(draft, step, event.actor)
        case _:
            return Ignored.NOT_WAITING_FOR_IT
    return None


def rule_against(step: PlannedStep, run: Run, actor: str) -> str | None:
    """The rule of the step that keeps this actor from deciding; ``None`` if there is none."""
    assert isinstance(step.spec, ApprovalSpec)
    if not step.spec.not_by_starter:
        return None
    if run.starter is None:
        return f"not_by_starter: step '{step.id}' cannot be decided: who started the run is unknown"
    # Names are for people, who take "Kim" and "kim" for one person.
    if run.starter.casefold() == actor.casefold():
        return f"not_by_starter: '{actor}' started the run and cannot decide step '{step.id}'"
    return None


def data_faults(step: PlannedStep, data: JsonValue, *, approve: bool) -> tuple[Fault, ...]:
    """The faults of the data of a decision. A rejection needs no data."""
    if step.data_schema is None or (data is None and not approve):
        return ()
    faults = step.data_schema.faults(data, ("data",))
    return (Fault("data", "missing"),) if faults and data is None else faults


def _time_out(draft: Draft, step: PlannedStep, actor: str) -> None:
    spec = step.spec
    assert isinstance(spec, ApprovalSpec)
    draft.then(CloseApproval(step.id))
    said = f"no decision within {spec.decision_timeout_s or 0:g} s"
    match spec.on_timeout or OnDecisionTimeout.REJECT:
        case OnDecisionTimeout.APPROVE:
            _approve(draft, step, actor, said, None)
        case OnDecisionTimeout.REJECT:
            _reject(draft, step, actor, said, None, f"rejected: {said}")
        case OnDecisionTimeout.FAIL:
            draft.end(step, StepStatus.FAILED, error=Failure("decision_timeout", said, step.id))
        case _ as never:
            assert_never(never)


def _approve(
    draft: Draft, step: PlannedStep, actor: str, comment: str | None, data: JsonValue
) -> None:
    output: JsonValue = {"approved": True, "by": actor, "comment": comment, "data": data}
    draft.end(step, StepStatus.SUCCEEDED, output=output, remark=comment)


def _reject(
    draft: Draft, step: PlannedStep, actor: str, comment: str | None, data: JsonValue, message: str
) -> None:
    output: JsonValue = {"approved": False, "by": actor, "comment": comment, "data": data}
    failure = Failure("rejected", message, step.id)
    draft.end(step, StepStatus.FAILED, output=output, error=failure)


def _stop_waiting(draft: Draft, step: PlannedStep) -> None:
    draft.then(CloseApproval(step.id))
    wait = draft.step(step.id).wait
    if isinstance(wait, OnDecision) and wait.due is not None:
        draft.then(ClearTimer(_timer(step)))


def _timer(step: PlannedStep) -> Timer:
    return Timer(TimerKind.DECISION, step.id)


def _text(rendered: JsonValue) -> str:
    """A rendered message as text for people: bounded, and without control characters."""
    text = rendered if isinstance(rendered, str) else msgspec.json.encode(rendered).decode()
    if len(text) > APPROVAL_MESSAGE_CHARS_MAX:
        text = f"{text[: APPROVAL_MESSAGE_CHARS_MAX - 1]}…"
    return _CONTROL.sub("\ufffd", text)
