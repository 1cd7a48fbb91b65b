"""Delay steps: wait for a timer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stanchion.core.events import Event, Timer, TimerFired, TimerKind
from stanchion.core.model import OnDelay, Step, StepStatus
from stanchion.core.transition import Ignored, SetTimer

if TYPE_CHECKING:
    from stanchion.core.draft import Draft
    from stanchion.core.plan import PlannedStep
    from stanchion.core.workflow import DelaySpec


def start(draft: Draft, step: PlannedStep, spec: DelaySpec) -> None:
    """Set the timer. A delay of zero is a timer that is due at once."""
    due = draft.after(spec.delay_s)
    draft.begin(step, Step(status=StepStatus.WAITING, attempt=1, wait=OnDelay(due)))
    draft.then(SetTimer(Timer(TimerKind.DELAY, step.id, draft.index), due))
    draft.note("delay_started", step.id, detail=f"{spec.delay_s:g} s")


def handle(draft: Draft, step: PlannedStep, event: Event) -> Ignored | None:
    """End the step when its timer fires."""
    if isinstance(event, TimerFired) and event.timer.kind is TimerKind.DELAY:
        draft.end(step, StepStatus.SUCCEEDED)
        return None
    return Ignored.NOT_WAITING_FOR_IT
