"""Step kinds: one file each.

A kind is two functions. ``start`` is called when the step's needs are met and its condition holds;
``handle`` is called for every event that names the step. Both write what follows into the draft;
``handle`` says why if the event changes nothing. Adding a kind is adding a file and a line here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from stanchion.core.steps import approval, delay, foreach, job, subworkflow
from stanchion.core.transition import Ignored
from stanchion.core.workflow import (
    ApprovalSpec,
    DelaySpec,
    ForEachSpec,
    JobSpec,
    SubworkflowSpec,
)

if TYPE_CHECKING:
    from stanchion.core.draft import Draft
    from stanchion.core.events import Event
    from stanchion.core.plan import PlannedStep

__all__ = ["handle", "start"]


def start(draft: Draft, step: PlannedStep) -> None:
    """Set a pending step going."""
    spec = step.spec
    match spec:
        case JobSpec():
            job.start(draft, step)
        case ForEachSpec():
            foreach.start(draft, step)
        case ApprovalSpec():
            approval.start(draft, step)
        case DelaySpec():
            delay.start(draft, step, spec)
        case SubworkflowSpec():
            subworkflow.start(draft, step)
        case _:
            assert_never(spec)


def handle(draft: Draft, step: PlannedStep, event: Event) -> Ignored | None:
    """Let an event that names an active step have its effect."""
    spec = step.spec
    match spec:
        case JobSpec():
            return job.handle(draft, step, event)
        case ForEachSpec():
            return foreach.handle(draft, step, event)
        case ApprovalSpec():
            return approval.handle(draft, step, event)
        case DelaySpec():
            return delay.handle(draft, step, event)
        case SubworkflowSpec():
            return Ignored.NOT_WAITING_FOR_IT  # its inside has steps of its own
        case _:
            assert_never(spec)
