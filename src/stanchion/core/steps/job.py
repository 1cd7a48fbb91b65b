"""Job steps: work for one worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stanchion.core.expression import ExpressionError
from stanchion.core.model import Failure, StepStatus
from stanchion.core.steps import attempt
from stanchion.core.transition import Ignored

if TYPE_CHECKING:
    from stanchion.core.draft import Draft
    from stanchion.core.events import Event
    from stanchion.core.json_value import JsonValue
    from stanchion.core.plan import PlannedStep

__all__ = ["handle", "start"]


def start(draft: Draft, step: PlannedStep) -> None:
    """Render the input and send the first attempt out."""
    try:
        work = _work(draft, step)
    except ExpressionError as error:
        draft.end(
            step,
            StepStatus.FAILED,
            error=Failure("expression_error", f"input: {error}", step.id),
        )
        return
    draft.begin(step, attempt.dispatch(draft, step, None, draft.step(step.id), work))


def handle(draft: Draft, step: PlannedStep, event: Event) -> Ignored | None:
    """Take the job's result."""
    state = attempt.advance(
        draft, step, None, draft.step(step.id), event, lambda: _work(draft, step)
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
