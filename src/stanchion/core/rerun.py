"""Reruns: a new run made from a finished one.

A rerun is admitted like any other run and has its own id, slot and timeline. It uses the same input
and the same versions of the same workflows. A rerun from a given step repeats that step, all steps
that depend on it, and all steps that had not succeeded; it keeps the results of all others, and
failures that the workflow accepts (``on_failure: continue``).
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
    """Why this run cannot be rerun from the given step."""

    code: str
    message: str


def rerun(
    plan: Plan, old: Run, *, run_id: RunId, now: Instant, from_step: StepId | None = None
) -> Run | RerunRefused:
    """Make the new run, in status ``pending``: the event ``Started`` starts it."""
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
            if step_id not in again and plan.steps[step_id].is_satisfied_by(state.status)
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
        labels=old.labels,
        steps=kept,
    )


def _refusal(plan: Plan, old: Run, from_step: StepId) -> RerunRefused | None:
    step = plan.steps.get(from_step)
    if step is None:
        return RerunRefused("unknown_step", f"the run has no step '{from_step}'")
    for need in _needs(plan, step):
        status = old.step(need).status
        if not plan.steps[need].is_satisfied_by(status):
            message = f"'{from_step}' builds on '{need}', which is {status}: rerun from there"
            return RerunRefused("needs_unfinished", message)
    return None


def _needs(plan: Plan, step: PlannedStep) -> Iterable[StepId]:
    """The direct needs of the step and of the sub-workflow steps around it."""
    around: PlannedStep | None = step
    while around is not None:
        yield from around.needs
        around = None if around.parent is None else plan.steps[around.parent]


def _built_on(plan: Plan, from_step: StepId) -> frozenset[StepId]:
    """The step, its inner steps, its dependants, and the same for the sub-workflow around it.

    Of the sub-workflow around it only the inner steps that depend on the step are repeated.
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
