"""Drafts: a run while a decision is being made.

A draft lays changes over the run that was read and never touches the run itself. The step kinds
write into it; at the end it is turned into a transition. Looking at one step costs one look-up,
whatever the size of the run.
"""

from __future__ import annotations

from collections import deque
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from stanchion.core import limits
from stanchion.core.events import Timer, TimerKind
from stanchion.core.expression import WORK_MAX, BudgetSpent, EvaluationBudget
from stanchion.core.model import (
    Failure,
    Instant,
    Item,
    ItemKey,
    Run,
    RunStatus,
    Step,
    StepId,
    StepStatus,
)
from stanchion.core.transition import (
    ClearTimer,
    Effect,
    Ignored,
    SetTimer,
    StopRun,
    StopStep,
    TimelineEntry,
    Transition,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from stanchion.core.expression import Expression
    from stanchion.core.json_value import JsonObject, JsonValue
    from stanchion.core.plan import Plan, PlannedStep
    from stanchion.core.template import Template

__all__ = ["DecisionTooLong", "Draft"]


def size_of(output: JsonValue) -> int:
    """The bytes of an output as JSON."""
    return len(msgspec.json.encode(output))


def _weight(step: Step) -> int:
    """What a step's output adds to the size of all of them: its bytes and a comma."""
    if step.output is None:
        return 0
    return (step.output_bytes or size_of(step.output)) + 1


class _Done(NamedTuple):
    """What a step has put out, and how large it is."""

    output: JsonValue
    output_bytes: int


_NOTHING: Final = _Done(None, 0)


class DecisionTooLong(Exception):
    """The decision takes more work than was allowed here. It can be made anew where it may."""


class Draft:
    """The working copy of one decision: reads fall through to the run, writes stay here."""

    def __init__(self, plan: Plan, run: Run, now: Instant, *, work_max: int | None = None) -> None:
        """Begin with nothing changed.

        With more work than ``work_max`` (units of ``cel.budget``) it raises ``DecisionTooLong``.
        """
        self.plan = plan
        self.run = run
        self.now = now
        self.actor = "system"
        self.status = run.status
        self.output: JsonValue = run.output
        self.error: Failure | None = run.error
        self.finished_at: Instant | None = run.finished_at
        self.unsettled: deque[StepId] = deque()
        """Steps that have just ended or come into reach: what follows is still to be worked out."""
        self._steps: dict[StepId, Step] = {}
        self._items: dict[ItemKey, Item] = {}
        self._effects: list[Effect] = []
        self._timeline: list[TimelineEntry] = []
        self._inputs: dict[StepId | None, JsonObject] = {None: run.input}
        self._work_left = limits.EVENT_WORK_MAX
        self._work_done = 0
        self._work_max = float("inf") if work_max is None else work_max
        self._outputs_weight: int | None = None
        """Of all steps' outputs together, once somebody has asked: see ``_weight``."""

    @property
    def is_large(self) -> bool:
        """Whether so much has been worked out and asked for that the rest should wait its turn."""
        return (
            self._work_done >= limits.EVENT_WORK_MAX or len(self._effects) >= limits.RUN_ITEMS_MAX
        )

    def begin_event(self, actor: str) -> None:
        """Go on to the next event. What it may work does not depend on those before it."""
        self.actor = actor
        self._work_left = limits.EVENT_WORK_MAX

    # ── Reading ──────────────────────────────────────────────────────────────────────────────────

    def step(self, step_id: StepId) -> Step:
        """The step as it is now."""
        changed = self._steps.get(step_id)
        return self.run.step(step_id) if changed is None else changed

    def every_step(self) -> Iterator[Step]:
        """All steps that something has happened to, as they are now."""
        return iter((self.run.steps | self._steps).values())

    def item(self, key: ItemKey) -> Item:
        """The item as it is now. It must be among those that ``items_to_read`` named."""
        changed = self._items.get(key)
        return self.run.items[key] if changed is None else changed

    def evaluate(self, step: PlannedStep, expression: Expression | Template) -> JsonValue:
        """Work out an expression or a template of a step, in the scope of that step."""
        return self.evaluate_in(step.parent, step.visible, expression)

    def evaluate_in(
        self,
        parent: StepId | None,
        visible: Mapping[str, StepId],
        expression: Expression | Template,
        extra: Mapping[str, JsonValue] = MappingProxyType({}),
        budget: EvaluationBudget | None = None,
    ) -> JsonValue:
        """Work out an expression in the scope of a workflow (the run's, or a sub-workflow's).

        ``extra`` are names beyond ``input`` and ``steps``; several evaluations may share a budget.
        """
        scope: dict[str, JsonValue] = dict(extra)
        if "input" in expression.uses:
            scope["input"] = self.scope_input(parent)
        if "steps" in expression.uses:
            scope["steps"] = {
                name: {"status": str(step.status), "output": step.output}
                for name, step in (
                    (name, self.step(visible[name]))
                    for name in expression.references
                    if name in visible
                )
            }
        if budget is None:
            budget = EvaluationBudget(work=min(WORK_MAX, self._work_left))
        else:
            budget.work_left = min(budget.work_left, self._work_left)
        here = min(budget.work_left, self._work_max - self._work_done)
        cut = budget.work_left - int(here)
        budget.work_left -= cut
        before = budget.work_left
        try:
            return expression.evaluate(scope, budget)
        except BudgetSpent:
            if cut:
                raise DecisionTooLong from None
            raise
        finally:
            done = before - max(0, budget.work_left)
            budget.work_left += cut
            self._work_left -= done
            self._work_done += done

    def spend(self, units: int) -> None:
        """Count work that is no expression among that of the event, or raise ``BudgetSpent``."""
        if units > self._work_left:
            raise BudgetSpent("too much work: one event sets off too many checks of large inputs")
        self._work_left -= units
        self.toil(units)

    def toil(self, units: int) -> None:
        """Count work that has a limit of its own. Raises ``DecisionTooLong``."""
        self._work_done += units
        if self._work_done > self._work_max:
            raise DecisionTooLong

    def scope_input(self, parent: StepId | None) -> JsonObject:
        """What ``input`` means below a sub-workflow step; for ``None``, the run's own input.

        It is worked out again instead of stored: what it is made of can no longer change.
        """
        known = self._inputs.get(parent)
        if known is None:
            assert parent is not None
            step = self.plan.steps[parent]
            assert step.input is not None
            rendered = self.evaluate(step, step.input)
            assert isinstance(rendered, dict), "checked when the sub-workflow began"
            known = self._inputs[parent] = rendered
        return known

    # ── Writing ──────────────────────────────────────────────────────────────────────────────────

    def put(self, step_id: StepId, step: Step) -> None:
        """Change a step."""
        if self._outputs_weight is not None:
            self._outputs_weight += _weight(step) - _weight(self.step(step_id))
        self._steps[step_id] = step

    def put_item(self, key: ItemKey, item: Item) -> None:
        """Change an item."""
        self._items[key] = item

    def then(self, *effects: Effect) -> None:
        """Ask for effects."""
        self._effects.extend(effects)

    def note(
        self,
        what: str,
        step_id: StepId | None = None,
        *,
        item: int | None = None,
        attempt: int | None = None,
        detail: str | None = None,
    ) -> None:
        """Write a line into the timeline."""
        self._timeline.append(
            TimelineEntry(
                at=self.now,
                what=what,
                actor=self.actor,
                step=step_id,
                item=item,
                attempt=attempt,
                detail=detail,
            )
        )

    def after(self, seconds: float) -> Instant:
        """The instant so many seconds from now."""
        return Instant(self.now + round(seconds * 1000))

    def begin(self, step: PlannedStep, state: Step) -> None:
        """Set a step going, and its time limit with it."""
        self.put(step.id, msgspec.structs.replace(state, started_at=self.now))
        if step.timeout_s is not None:
            self.then(SetTimer(_timeout_of(step.id), self.after(step.timeout_s)))

    def end(
        self,
        step: PlannedStep,
        status: StepStatus,
        *,
        output: JsonValue = None,
        error: Failure | None = None,
        remark: str | None = None,
    ) -> None:
        """End a step that has no work out, begun or not. A remark goes into the timeline.

        A step whose output is more than the run may still have fails: to try it again is no help.
        """
        if self.step(step.id).status.is_active and step.timeout_s is not None:
            self.then(ClearTimer(_timeout_of(step.id)))
        output_bytes = 0 if output is None else size_of(output)
        if output_bytes and (excess := self._excess(step.id, output_bytes)) is not None:
            self._end(step, StepStatus.FAILED, error=excess)
            return
        done = _Done(output, output_bytes)
        self._end(step, status, done=done, error=error, remark=remark)

    def _excess(self, step_id: StepId, output_bytes: int) -> Failure | None:
        """The failure of a step with so large an output, if the run may not have it as well."""
        if self._outputs_weight is None:
            self._outputs_weight = sum(map(_weight, self.every_step()))
        # As a JSON list: a comma or a bracket after each, and one bracket before them.
        size = self._outputs_weight + output_bytes + 2
        if size <= limits.RUN_OUTPUT_BYTES_MAX:
            return None
        message = (
            f"the outputs of the run's steps together would be {size} bytes;"
            f" at most {limits.RUN_OUTPUT_BYTES_MAX} are allowed"
        )
        return Failure("output_too_large", message, step_id)

    def abandon(self, step: PlannedStep, status: StepStatus, error: Failure) -> None:
        """End a step that may have work out: revoke its jobs, forget its timers."""
        self.then(StopStep(step.id))
        self._end(step, status, error=error)

    def _end(
        self,
        step: PlannedStep,
        status: StepStatus,
        *,
        done: _Done = _NOTHING,
        error: Failure | None = None,
        remark: str | None = None,
    ) -> None:
        self._close(step.id, status, done=done, error=error)
        self._close_below(step, status)
        self.note(f"step_{status}", step.id, detail=remark if error is None else error.message)
        self.unsettled.append(step.id)

    def _close_below(self, step: PlannedStep, status: StepStatus) -> None:
        """What is inside a step that ended otherwise than by its inside ends with it."""
        inside = list(step.body.steps) if step.body is not None else []
        while inside:
            child = self.plan.steps[inside.pop()]
            before = self.step(child.id).status
            if not before.is_finished:
                if before.is_active:
                    self.then(StopStep(child.id))
                self._close(child.id, _inside(status, before))
            if child.body is not None:
                inside.extend(child.body.steps)

    def _close(
        self,
        step_id: StepId,
        status: StepStatus,
        *,
        done: _Done = _NOTHING,
        error: Failure | None = None,
    ) -> None:
        self.put(
            step_id,
            msgspec.structs.replace(
                self.step(step_id),
                status=status,
                wait=None,
                output=done.output,
                output_bytes=done.output_bytes,
                error=error,
                finished_at=self.now,
            ),
        )

    def finish(
        self, status: RunStatus, *, output: JsonValue = None, error: Failure | None = None
    ) -> None:
        """End the run: nothing of it stays out, and nothing about it changes any more."""
        for step_id in self.plan.steps:
            before = self.step(step_id).status
            if not before.is_finished:
                self._close(step_id, _inside(StepStatus(status), before))
        self.unsettled.clear()
        self.status = status
        self.output = output
        self.error = error
        self.finished_at = self.now
        self.then(StopRun())
        self.note(f"run_{status}", detail=None if error is None else error.message)

    def transition(self, ignored: tuple[Ignored | None, ...]) -> Transition:
        """What has changed, as a value."""
        return Transition(
            status=self.status,
            output=self.output,
            error=self.error,
            finished_at=self.finished_at,
            # Two events may undo each other: a job died, and was replayed before anybody looked.
            steps={
                step_id: step
                for step_id, step in self._steps.items()
                if step != self.run.step(step_id)
            },
            items=self._items,
            effects=tuple(self._effects),
            timeline=tuple(self._timeline),
            ignored=ignored,
        )


def _timeout_of(step_id: StepId) -> Timer:
    return Timer(TimerKind.STEP_TIMEOUT, step_id)


def _inside(around: StepStatus, before: StepStatus) -> StepStatus:
    """How an unfinished step ends when that which it is part of ends.

    Skipping skips all of it. Time that ran out did so for what was under way. Whatever else ends,
    the steps in it that had not ended are cancelled.
    """
    if around is StepStatus.SKIPPED:
        return StepStatus.SKIPPED
    if around is StepStatus.TIMED_OUT and before.is_active:
        return StepStatus.TIMED_OUT
    return StepStatus.CANCELLED
