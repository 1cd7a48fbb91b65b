"""Approval steps: a person decides, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stanchion.core.events import Approved, Event, Rejected
from stanchion.core.model import Failure, OnDecision, Step, StepStatus
from stanchion.core.transition import Ignored
from stanchion.core.workflow import ApprovalSpec

if TYPE_CHECKING:
    from stanchion.core.draft import Draft
    from stanchion.core.json_value import JsonValue
    from stanchion.core.plan import PlannedStep

__all__ = ["handle", "start"]


def start(draft: Draft, step: PlannedStep) -> None:
    """Wait for a decision."""
    draft.begin(step, Step(status=StepStatus.WAITING, attempt=1, wait=OnDecision()))
    assert isinstance(step.spec, ApprovalSpec)
    draft.note("approval_requested", step.id, detail=step.spec.message)


def handle(draft: Draft, step: PlannedStep, event: Event) -> Ignored | None:
    """Apply the decision. The output of an approval holds its actor and comment."""
    match event:
        case Approved():
            output: JsonValue = {"approved": True, "by": event.actor, "comment": event.comment}
            draft.end(step, StepStatus.SUCCEEDED, output=output, remark=event.comment)
        case Rejected():
            message = f"rejected by {event.actor}"
            if event.comment:
                message = f"{message}: {event.comment}"
            draft.end(step, StepStatus.FAILED, error=Failure("rejected", message, step.id))
        case _:
            return Ignored.NOT_WAITING_FOR_IT
    return None
