"""Reruns: a new run made from a finished one.

A rerun is a run of its own: it passes the gate, has its own id, slot and timeline. It uses the same
input and the same versions of the same workflows. From a given step, it keeps what had succeeded or
was skipped elsewhere, and does again: that step, all that builds on it, and all that had not ended
well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stanchion.core.model import Instant, Run, RunId, StepId

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stanchion.core.plan import Plan, PlannedStep

__all__ = ["RerunRefused", "rerun"]


class RerunRefused(msgspec.Struct, frozen=True):
    """Why this run cannot be done again in this way."""

    code: str
    message: str


def rerun(
    plan: Plan, old: Run, *, run_id: RunId, now: Instant, from_step: StepId | None = None
) -> Run | RerunRefused:
    """Make the new run, still pending: deciding ``Started`` on it sets it going."""
    if not old.status.is_finished:
        return RerunRefused("run_unfinished", f"run '{old.id}' is still {old.status}")
    if from_step is None:
        kept = {}
    else:
        refusal = _refusal(plan, old, from_step)
        if refusal is not None:
            return refusal
        again = _built_on(plan, from_step)
        kept = {
            step_id: state
            for step_id, state in old.steps.items()
            if state.status.satisfies_needs and step_id not in again
        }
    return Run(
        id=run_id,
        tenant=old.tenant,
        workflow_id=old.workflow_id,
        workflow_version=old.workflow_version,
        uses=old.uses,
        input=old.input,
        created_at=now,
        risk=old.risk,
        holds_slot=old.holds_slot,
        rerun_of=old.id,
        steps=kept,
    )


def _refusal(plan: Plan, old: Run, from_step: StepId) -> RerunRefused | None:
    step = plan.steps.get(from_step)
    if step is None:
        return RerunRefused("unknown_step", f"the run has no step '{from_step}'")
    for need in _needs(plan, step):
        status = old.step(need).status
        if not status.satisfies_needs:
            message = f"'{from_step}' builds on '{need}', which is {status}: rerun from there"
            return RerunRefused("needs_unfinished", message)
    return None


def _needs(plan: Plan, step: PlannedStep) -> Iterable[StepId]:
    """What the step and the sub-workflow steps around it need directly."""
    around: PlannedStep | None = step
    while around is not None:
        yield from around.needs
        around = None if around.parent is None else plan.steps[around.parent]


def _built_on(plan: Plan, from_step: StepId) -> frozenset[StepId]:
    """The step, its inside, all that needs it, and the same for the sub-workflow around it.

    The step around is done again only as far as it must be: its other inner steps are kept.
    """
    again: set[StepId] = set()
    queue = [(from_step, True)]
    while queue:
        step_id, with_inside = queue.pop()
        step = plan.steps[step_id]
        if step_id not in again:
            again.add(step_id)
            queue.extend((later, True) for later in step.dependants)
            if step.parent is not None:
                queue.append((step.parent, False))
        if with_inside and step.body is not None:
            queue.extend((inner, True) for inner in step.body.steps if inner not in again)
    return frozenset(again)
