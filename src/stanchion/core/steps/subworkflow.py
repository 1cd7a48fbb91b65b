"""Sub-workflow steps: another workflow inside this run.

It has no run and no slot of its own. The step starts when its needs are met, and its inner steps
run as namespaced steps of the run. It ends when they have ended (see ``core.run``): failed if one
of them failed, else with the output of the inner workflow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stanchion.core.expression import ExpressionError
from stanchion.core.model import Failure, OnChildren, Step, StepStatus

if TYPE_CHECKING:
    from stanchion.core.draft import Draft
    from stanchion.core.model import StepId
    from stanchion.core.plan import Body, PlannedStep


def start(draft: Draft, step: PlannedStep) -> None:
    """Check the input against the schema of the inner workflow, and start its steps."""
    assert step.body is not None
    fault = _input_fault(draft, step)
    if fault is not None:
        draft.end(step, StepStatus.FAILED, error=fault)
        return
    draft.begin(step, Step(status=StepStatus.RUNNING, attempt=1, wait=OnChildren()))
    draft.note("subworkflow_started", step.id)
    draft.unsettled.extend(step.body.steps)


def _input_fault(draft: Draft, step: PlannedStep) -> Failure | None:
    assert step.input is not None
    assert step.body is not None
    try:
        return input_fault(draft, step.id, step.body, draft.evaluate(step, step.input))
    except ExpressionError as error:
        return Failure("expression_error", f"input: {error}", step.id)


def input_fault(draft: Draft, step_id: StepId, body: Body, given: object) -> Failure | None:
    """Why the inner workflow does not accept this input. Raises ``ExpressionError``."""
    if not isinstance(given, dict):
        return Failure("invalid_input", "input: an object is needed", step_id)
    if body.schema is not None:
        draft.spend(body.schema.work(given))
        faults = body.schema.faults(given)
        if faults:
            message = "; ".join(f"{fault.path}: {fault.message}" for fault in faults[:3])
            return Failure("invalid_input", message, step_id)
    return None
