"""Reruns: a new run made from a finished one.

A rerun is admitted like any other run and has its own id, slot and timeline. What it keeps of the
old run is chosen by ``RerunOptions``:

* Without options nothing is kept: the same versions with the same input, from the beginning.
* ``from_step`` repeats that step, all steps that depend on it, and all steps that had not
  succeeded. It keeps the results of all others, and failures that the workflow accepts
  (``on_failure: continue``).
* ``only: failed_items`` repeats the items that did not succeed, all steps that had not succeeded,
  and all steps that depend on either. The other items and steps keep their results, and so do
  failures of whole steps that the workflow accepts.
* ``input`` replaces the input, and ``version: newest`` takes the newest versions. Both begin at the
  beginning, because a result that is kept would belong to another input or another workflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from stanchion.core.faults import Fault
from stanchion.core.json_value import JsonObject
from stanchion.core.model import Instant, Item, ItemKey, Run, RunId, Step, StepId, StepStatus

if TYPE_CHECKING:
    from stanchion.core.plan import Plan, PlannedStep


class RerunVersion(StrEnum):
    """The versions of the workflows that a rerun uses."""

    SAME = "same"
    NEWEST = "newest"


class RerunOnly(StrEnum):
    """The part of a run that is repeated."""

    FAILED_ITEMS = "failed_items"


class RerunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a rerun repeats, and with what."""

    from_step: StepId | None = None
    version: RerunVersion = RerunVersion.SAME
    input: JsonObject | None = None
    only: RerunOnly | None = None

    @property
    def keeps_nothing(self) -> bool:
        """Whether nothing of the old run is kept."""
        return self.from_step is None and self.only is None

    def fault(self) -> Fault | None:
        """The member that another one excludes."""
        keeps = f"only '{self.only}'" if self.only else "from_step"
        if self.only is not None and self.from_step is not None:
            return Fault(
                "from_step", f"leave it out with {keeps}, which chooses the steps by itself"
            )
        if self.keeps_nothing:
            return None
        if self.version is not RerunVersion.SAME:
            return Fault(
                "version", f"must be 'same' with {keeps}, which keeps results of that version"
            )
        if self.input is not None:
            return Fault(
                "input", f"leave it out with {keeps}, which keeps results of the old input"
            )
        return None

    def fingerprinted(self) -> JsonObject:
        """What tells this request from others with the same idempotency key.

        Members at their default are left out, except ``from_step``, which was always there.
        """
        body: JsonObject = {"from_step": self.from_step}
        if self.version is not RerunVersion.SAME:
            body["version"] = str(self.version)
        if self.input is not None:
            body["input"] = self.input
        if self.only is not None:
            body["only"] = str(self.only)
        return body


class RerunRefused(msgspec.Struct, frozen=True):
    """Why this run cannot be rerun in this way."""

    code: str
    message: str


class RerunAction(StrEnum):
    """What a rerun does with a step."""

    REUSED = "reused"
    RUNS_AGAIN = "runs_again"
    SKIPPED = "skipped"
    """It was skipped, and stays so."""


class RerunStep(msgspec.Struct, frozen=True):
    """What a rerun does with one step, and with the items of a for-each."""

    action: RerunAction
    items_reused: int | None = None
    items_run_again: int | None = None
    """``None`` also for a for-each that runs wholly again: its list may be another one."""


class _Kept(msgspec.Struct, frozen=True):
    steps: frozenset[StepId] = frozenset()
    """Steps that keep their results."""
    partly: frozenset[StepId] = frozenset()
    """For-each steps that run again and keep the items that succeeded."""


def rerun(
    plan: Plan,
    old: Run,
    options: RerunOptions,
    *,
    run_id: RunId,
    now: Instant,
    items: Mapping[ItemKey, Item],
) -> Run | RerunRefused:
    """Make the new run of the same versions, in status ``pending``: ``Started`` starts it.

    ``items``: those of the old run that ``items_to_keep`` returned. The new run has the ones that
    it keeps.
    """
    kept = _kept(plan, old, options)
    if isinstance(kept, RerunRefused):
        return kept
    return Run(
        id=run_id,
        tenant=old.tenant,
        workflow_id=old.workflow_id,
        workflow_version=old.workflow_version,
        workflow_source=old.workflow_source,
        uses=old.uses,
        input=old.input if options.input is None else options.input,
        created_at=now,
        risk=old.risk,
        holds_slot=old.holds_slot,
        rerun_of=old.id,
        labels=old.labels,
        steps={step_id: state for step_id, state in old.steps.items() if step_id in kept.steps},
        items={
            key: _reused(item)
            for key, item in items.items()
            if key.step_id in kept.steps
            or (key.step_id in kept.partly and item.status is StepStatus.SUCCEEDED)
        },
    )


def items_to_keep(
    plan: Plan, old: Run, options: RerunOptions
) -> Mapping[StepId, Sequence[int]] | RerunRefused:
    """The items that the rerun may keep, or why there can be no rerun."""
    kept = _kept(plan, old, options)
    if isinstance(kept, RerunRefused):
        return kept
    counts = {step_id: old.step(step_id).items for step_id in kept.steps | kept.partly}
    return {step_id: range(each.total) for step_id, each in counts.items() if each is not None}


def unfinished(old: Run) -> RerunRefused:
    """The refusal to rerun a run that has not ended."""
    return RerunRefused("run_unfinished", f"run '{old.id}' is still {old.status}")


def preview(plan: Plan, old: Run, new: Run) -> dict[StepId, RerunStep]:
    """What the new run, which has not started, does with each step of its plan."""
    reused: dict[StepId, int] = {}
    for key in new.items:
        reused[key.step_id] = reused.get(key.step_id, 0) + 1
    return {step_id: _preview(step_id, old, new, reused.get(step_id)) for step_id in plan.steps}


def _preview(step_id: StepId, old: Run, new: Run, items_reused: int | None) -> RerunStep:
    state = new.steps.get(step_id)
    if state is None:
        counts = None if items_reused is None else old.step(step_id).items
        left = None if counts is None or items_reused is None else counts.total - items_reused
        return RerunStep(RerunAction.RUNS_AGAIN, items_reused, left)
    if state.status is StepStatus.SKIPPED:
        return RerunStep(RerunAction.SKIPPED)
    if state.items is None:
        return RerunStep(RerunAction.REUSED)
    return RerunStep(RerunAction.REUSED, state.items.total, 0)


def _reused(item: Item) -> Item:
    """The item in the new run: as it was, and without a job, which only the old run has."""
    return msgspec.structs.replace(item, dispatch=0, wait=None, input=msgspec.UNSET, steps={})


# ── What is kept ─────────────────────────────────────────────────────────────────────────────────


def _kept(plan: Plan, old: Run, options: RerunOptions) -> _Kept | RerunRefused:
    if not old.status.is_finished:
        return unfinished(old)
    if options.keeps_nothing:
        return _Kept()
    if options.from_step is not None:
        refusal = _refusal(plan, old, options.from_step)
        if refusal is not None:
            return refusal
        return _Kept(_all_but(plan, old, _built_on(plan, [(options.from_step, True)])))
    return _but_failed_items(plan, old)


def _all_but(plan: Plan, old: Run, again: frozenset[StepId]) -> frozenset[StepId]:
    """The steps with a result that steps that need them accept, without those in ``again``."""
    return frozenset(
        step_id
        for step_id, state in old.steps.items()
        if step_id not in again and plan.steps[step_id].is_satisfied_by(state.status)
    )


def _but_failed_items(plan: Plan, old: Run) -> _Kept | RerunRefused:
    partly = {step_id for step_id in plan.steps if _has_failed_items(old.step(step_id))}
    if not partly:
        message = f"run '{old.id}' has no item of a for-each step that did not succeed"
        return RerunRefused("no_failed_items", message)
    again = partly | {
        step_id
        for step_id, step in plan.steps.items()
        if not step.is_satisfied_by(old.step(step_id).status)
    }
    # A for-each that depends on a step that runs again may get another list: all of it runs again.
    around = {outer for step_id in again for outer in outer_steps(plan, plan.steps[step_id])}
    later = [(each, True) for outer in around for each in outer.dependants]
    built_on = _built_on(plan, later)
    whole = _built_on(plan, [(step_id, False) for step_id in again])
    return _Kept(_all_but(plan, old, whole), frozenset(partly - built_on))


def _has_failed_items(state: Step) -> bool:
    return state.items is not None and state.items.succeeded < state.items.total


def _refusal(plan: Plan, old: Run, from_step: StepId) -> RerunRefused | None:
    step = plan.steps.get(from_step)
    if step is None:
        return RerunRefused("unknown_step", f"the run has no step '{from_step}'")
    for need in (need for outer in outer_steps(plan, step) for need in outer.needs):
        status = old.step(need).status
        if not plan.steps[need].is_satisfied_by(status):
            message = f"'{from_step}' builds on '{need}', which is {status}: rerun from there"
            return RerunRefused("needs_unfinished", message)
    return None


def outer_steps(plan: Plan, step: PlannedStep) -> Iterable[PlannedStep]:
    """The step and the sub-workflow steps around it."""
    around: PlannedStep | None = step
    while around is not None:
        yield around
        around = None if around.parent is None else plan.steps[around.parent]


def _built_on(plan: Plan, first: Iterable[tuple[StepId, bool]]) -> frozenset[StepId]:
    """The steps, their dependants, and the same for the sub-workflows around them.

    Each of the first steps says whether its inner steps are repeated with it. Of a sub-workflow
    around a step only the inner steps that depend on that step are repeated.
    """
    again: set[StepId] = set()
    queue = list(first)
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
