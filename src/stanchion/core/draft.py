"""Drafts: the working copy of a run during one decision.

A draft records changes on top of the run that was read and never modifies the run. The step kinds
write into it; at the end it becomes a transition. Reading one step is one dictionary lookup,
independent of the size of the run.
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
    ItemFailure,
    ItemKey,
    OnDecision,
    OnDelay,
    OnJob,
    OnRetry,
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
    RevokeJob,
    SetTimer,
    StopRun,
    StopStep,
    TimelineEntry,
    Transition,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stanchion.core.expression import Expression, Template
    from stanchion.core.json_value import JsonObject, JsonValue
    from stanchion.core.plan import Plan, PlannedStep


def size_of(output: JsonValue) -> int:
    """The size of an output as JSON, in bytes."""
    return len(msgspec.json.encode(output))


def _weight(step: Step) -> int:
    """The share of a step in the size of all outputs as a JSON list: its bytes and a comma."""
    if step.output is None and not step.output_bytes:
        return 0
    return (step.output_bytes or size_of(step.output)) + 1


def _shown(step: Step) -> JsonObject:
    """A step as expressions see it. Its members are ``expression.STEP_FIELDS``."""
    error: JsonObject | None = None
    if step.error is not None and step.status.is_finished:
        error = _reason(step.error)
    failures: list[JsonValue] = [
        {"index": failed.index, "error": _reason(failed.error)} for failed in step.failures
    ]
    return {"status": str(step.status), "output": step.output, "error": error, "failures": failures}


def _reason(error: Failure) -> JsonObject:
    return {"code": error.code, "message": error.message}


class _Done(NamedTuple):
    """The output of a step, the size of all of it, and the failed items of a for-each."""

    output: JsonValue
    output_bytes: int
    failures: tuple[ItemFailure, ...] = ()


_NOTHING: Final = _Done(None, 0)


INPUT_BYTES_PER_WORK: Final = 64
"""Bytes of an input whose encoding takes as long as one unit of work."""
INPUTS_TOO_LARGE: Final = (
    "the inputs of the jobs that begin together are too large: more than"
    f" {limits.EVENT_INPUT_BYTES_MAX} bytes"
)


class DecisionTooLong(Exception):
    """The decision exceeds ``work_max``. The caller may decide again with a higher limit."""


class _Decision:
    """What all drafts of one decision share."""

    def __init__(self, work_max: int | None) -> None:
        self.effects: list[Effect] = []
        self.timeline: list[TimelineEntry] = []
        self.work_left = limits.EVENT_WORK_MAX
        """Of the event, in the units of ``EvaluationBudget``."""
        self.input_bytes_left = limits.EVENT_INPUT_BYTES_MAX
        self.inputs_taken = 0
        """How many jobs and items have begun in the event."""
        self.begun_bytes = 0
        """The inputs that the transition writes."""
        self.work_done = 0
        self.work_max = float("inf") if work_max is None else work_max


class _States(dict[StepId, Step]):
    """The states of all steps; those without an entry are in the initial state."""

    __slots__ = ()

    def __missing__(self, _step_id: StepId) -> Step:
        return _UNTOUCHED


class Draft:
    """The working copy of one decision: reads fall through to the run, writes stay here."""

    root: StepId | None = None
    """The parent of the outermost steps: ``None``, or in an item its for-each step."""
    index: int | None = None
    """In an item, its index."""

    def __init__(
        self,
        plan: Plan,
        run: Run,
        now: Instant,
        *,
        work_max: int | None = None,
        decision: _Decision | None = None,
    ) -> None:
        """Start without changes, as a decision of its own unless one is given.

        ``work_max`` limits the work of this decision, in the units of ``EvaluationBudget``: beyond
        it, methods that evaluate raise ``DecisionTooLong``.
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
        """Steps that just ended or became reachable, and whose consequences are not applied yet."""
        self._steps: dict[StepId, Step] = {}
        """The steps that changed."""
        self.states = _States(run.steps if decision is None else ())
        """The current state of every step, in an item of its steps. To be changed with ``put``."""
        self._items: dict[ItemKey, Item] = {}
        self._decision = _Decision(work_max) if decision is None else decision
        self._effects = self._decision.effects
        self._timeline = self._decision.timeline
        self._inputs: dict[StepId | None, JsonObject] = {None: run.input}
        self._outputs_weight: int | None = None
        """The sum of ``_weight`` over all steps. ``None`` until ``_excess`` first needs it."""

    @property
    def is_large(self) -> bool:
        """Whether the decision is so large that further events should wait for the next one."""
        changes = max(len(self._effects), len(self._items))
        return (
            self._decision.work_done >= limits.EVENT_WORK_MAX
            or changes >= limits.RUN_ITEMS_MAX
            or not self.has_room(limits.INPUT_BYTES_MAX)
        )

    @property
    def work_left(self) -> int:
        """The work that is left to the current event."""
        return self._decision.work_left

    @property
    def input_bytes_left(self) -> int:
        """How large the inputs of further jobs of the current event may be together."""
        return self._decision.input_bytes_left

    @property
    def inputs_taken(self) -> int:
        """How many inputs of jobs and items the current event has had so far."""
        return self._decision.inputs_taken

    def begin_event(self, actor: str) -> None:
        """Begin the next event of the batch. Each event has the full work limit."""
        self.actor = actor
        self._decision.work_left = limits.EVENT_WORK_MAX
        self._decision.input_bytes_left = limits.EVENT_INPUT_BYTES_MAX
        self._decision.inputs_taken = 0

    # ── Reading ──────────────────────────────────────────────────────────────────────────────────

    def step(self, step_id: StepId) -> Step:
        """The current state of the step."""
        return self.states[step_id]

    def steps_so_far(self) -> Iterable[tuple[StepId, Step]]:
        """Every step that has left its initial state, with its current state."""
        return self.states.items()

    def item(self, key: ItemKey) -> Item:
        """The current state of the item. It must be one that ``items_to_read`` returned."""
        changed = self._items.get(key)
        return self.run.items[key] if changed is None else changed

    def of_item(self, step: PlannedStep, index: int, item: Item) -> ItemDraft:
        """A working copy of one item of a for-each with a workflow."""
        assert step.item_plan is not None
        draft = ItemDraft(step.item_plan, self.run, self.now, decision=self._decision)
        draft.enter(step.id, index, item)
        draft.actor = self.actor
        return draft

    def has_item(self, key: ItemKey) -> bool:
        """Whether the state of the item is known to this decision."""
        return key in self._items or key in self.run.items

    def evaluate(self, step: PlannedStep, expression: Expression | Template) -> JsonValue:
        """Evaluate an expression or a template of a step, in the scope of that step."""
        return self.evaluate_in(step.parent, step.visible, expression)

    def evaluate_in(
        self,
        parent: StepId | None,
        visible: Mapping[str, StepId],
        expression: Expression | Template,
        extra: Mapping[str, JsonValue] = MappingProxyType({}),
        budget: EvaluationBudget | None = None,
    ) -> JsonValue:
        """Evaluate an expression in the scope of a workflow (the run's, or a sub-workflow's).

        ``extra`` holds names besides ``input`` and ``steps``. Several evaluations may share a
        budget. Raises ``ExpressionError``, or ``DecisionTooLong`` beyond ``work_max``.
        """
        scope: dict[str, JsonValue] = dict(extra)
        if "input" in expression.uses:
            scope["input"] = self.scope_input(parent)
        if "steps" in expression.uses:
            scope["steps"] = {
                name: _shown(self.states[visible[name]])
                for name in expression.references
                if name in visible
            }
        decision = self._decision
        if budget is None:
            budget = EvaluationBudget(work=min(WORK_MAX, decision.work_left))
        else:
            budget.work_left = min(budget.work_left, decision.work_left)
        here = min(budget.work_left, decision.work_max - decision.work_done)
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
            decision.work_left -= done
            decision.work_done += done

    def has_room(self, size: int) -> bool:
        """Whether the transition may write inputs of so many bytes more. A single one always."""
        begun_bytes = self._decision.begun_bytes
        return not begun_bytes or begun_bytes + size <= limits.BEGUN_BYTES_MAX

    def write_input(self, size: int) -> None:
        """Count an input that the transition writes, with a job or an item."""
        self._decision.begun_bytes += size

    def take_input(self, value: JsonValue) -> int:
        """Count the input of a job or item that begins; its size. Raises ``BudgetSpent``."""
        decision, size = self._decision, size_of(value)
        self.count_work(size // INPUT_BYTES_PER_WORK)
        decision.input_bytes_left -= size
        decision.inputs_taken += 1
        if decision.input_bytes_left < 0:
            raise BudgetSpent(INPUTS_TOO_LARGE)
        return size

    def spend(self, units: int) -> None:
        """Charge work other than expressions to the event. Raises ``BudgetSpent``."""
        if units > self._decision.work_left:
            raise BudgetSpent("too much work: one event sets off too many checks of large inputs")
        self._decision.work_left -= units
        self.count_work(units)

    def count_work(self, units: int) -> None:
        """Charge work to the decision but not to the event. Raises ``DecisionTooLong``."""
        self._decision.work_done += units
        if self._decision.work_done > self._decision.work_max:
            raise DecisionTooLong

    def scope_input(self, parent: StepId | None) -> JsonObject:
        """The value of ``input`` below a sub-workflow step; for ``None``, the input of the run.

        It is rendered again instead of stored: the values it reads can no longer change.
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
        """Set the state of a step."""
        if self._outputs_weight is not None:
            self._outputs_weight += _weight(step) - _weight(self.states[step_id])
        self._steps[step_id] = self.states[step_id] = step

    def put_item(self, key: ItemKey, item: Item) -> None:
        """Set the state of an item."""
        self._items[key] = item

    def then(self, *effects: Effect) -> None:
        """Add effects to the transition."""
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
        """Add an entry to the timeline."""
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
        """The instant ``seconds`` from now."""
        return Instant(self.now + round(seconds * 1000))

    def begin(self, step: PlannedStep, state: Step) -> None:
        """Put a step into its first active state, and set the timer of its time limit."""
        self.put(step.id, msgspec.structs.replace(state, started_at=self.now))
        if step.timeout_s is not None:
            self.then(SetTimer(self.timeout_of(step.id), self.after(step.timeout_s)))

    def timeout_of(self, step_id: StepId) -> Timer:
        """The timer of the step's time limit."""
        return Timer(TimerKind.STEP_TIMEOUT, step_id, self.index)

    def end(
        self,
        step: PlannedStep,
        status: StepStatus,
        *,
        output: JsonValue = None,
        error: Failure | None = None,
        failures: tuple[ItemFailure, ...] = (),
        remark: str | None = None,
    ) -> None:
        """End a step that has no open jobs, active or not. ``remark`` goes into the timeline.

        A step whose output exceeds the size left for the run fails, and is not retried.
        """
        if self.states[step.id].status.is_active and step.timeout_s is not None:
            self.then(ClearTimer(self.timeout_of(step.id)))
        output_bytes = 0 if output is None else size_of(output)
        if failures:
            output_bytes += len(msgspec.json.encode(failures))
        if output_bytes and (excess := self._excess(step.id, output_bytes)) is not None:
            self._end(step, StepStatus.FAILED, error=excess)
            return
        done = _Done(output, output_bytes, failures)
        self._end(step, status, done=done, error=error, remark=remark)

    def _excess(self, step_id: StepId, output_bytes: int) -> Failure | None:
        """The failure of the step if its output exceeds the size left for the run."""
        if self._outputs_weight is None:
            self._outputs_weight = sum(map(_weight, self.states.values()))
        # The size as a JSON list: a comma or a bracket after each output, one bracket before them.
        size = self._outputs_weight + output_bytes + 2
        if size <= limits.RUN_OUTPUT_BYTES_MAX:
            return None
        message = (
            f"the outputs of the run's steps together would be {size} bytes;"
            f" at most {limits.RUN_OUTPUT_BYTES_MAX} are allowed"
        )
        return Failure("output_too_large", message, step_id)

    def abandon(self, step: PlannedStep, status: StepStatus, error: Failure) -> None:
        """End a step that may have open jobs: revoke them and clear its timers."""
        self.stop(step.id)
        self._end(step, status, error=error)

    def stop(self, step_id: StepId) -> None:
        """Revoke the open jobs of a step that is about to end, and clear its timers."""
        self.then(StopStep(step_id))

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
        """End every unfinished step inside a sub-workflow step that ended."""
        inside = list(step.body.steps) if step.body is not None else []
        while inside:
            child = self.plan.steps[inside.pop()]
            before = self.states[child.id].status
            if not before.is_finished:
                if before.is_active:
                    self.stop(child.id)
                self._close(child.id, status_inside(status, before))
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
        before = self.states[step_id]
        wait = before.wait
        self.put(
            step_id,
            msgspec.structs.replace(
                before,
                status=status,
                wait=None,
                question=wait.message if isinstance(wait, OnDecision) else None,
                output=done.output,
                output_bytes=done.output_bytes,
                failures=done.failures,
                error=error,
                finished_at=self.now,
            ),
        )

    def finish(
        self, status: RunStatus, *, output: JsonValue = None, error: Failure | None = None
    ) -> None:
        """End the run: close every unfinished step, revoke all jobs, clear all timers."""
        self.close_all(status, output=output, error=error)
        self.then(StopRun())
        self.note(f"run_{status}", detail=None if error is None else error.message)

    def close_all(
        self, status: RunStatus, *, output: JsonValue = None, error: Failure | None = None
    ) -> None:
        """Set the status and result, and close every unfinished step."""
        for step_id in self.plan.steps:
            before = self.states[step_id].status
            if not before.is_finished:
                self._close(step_id, status_inside(StepStatus(status), before))
        self.unsettled.clear()
        self.status = status
        self.output = output
        self.error = error
        self.finished_at = self.now

    def transition(self, ignored: tuple[Ignored | None, ...]) -> Transition:
        """The changes as a transition."""
        before = self.run.steps
        return Transition(
            status=self.status,
            output=self.output,
            error=self.error,
            finished_at=self.finished_at,
            # Two events of one batch may cancel out: a job died and was replayed.
            steps={
                step_id: step
                for step_id, step in self._steps.items()
                if step != before.get(step_id, _UNTOUCHED)
            },
            items=self._items,
            effects=tuple(self._effects),
            timeline=tuple(self._timeline),
            ignored=ignored,
        )


class ItemDraft(Draft):
    """The working copy of one item of a for-each with a workflow, inside that of its run.

    Its steps are those of the item. Effects, timeline and work are those of the run's decision.
    """

    _item: Item

    def enter(self, step_id: StepId, index: int, item: Item) -> None:
        """Begin with the item as it was read."""
        self.root = step_id
        self.index = index
        self.status = RunStatus.RUNNING
        self.output = self.error = self.finished_at = None
        self._item = item
        assert isinstance(item.input, dict), "checked when the item began"
        self._inputs = {step_id: item.input}
        self.states = _States(item.steps)

    def note(
        self,
        what: str,
        step_id: StepId | None = None,
        *,
        item: int | None = None,
        attempt: int | None = None,
        detail: str | None = None,
    ) -> None:
        """Add an entry about this item to the timeline."""
        del item
        super().note(what, step_id, item=self.index, attempt=attempt, detail=detail)

    def stop(self, step_id: StepId) -> None:
        """Revoke the open job of a step of this item only, and clear its timers."""
        state = self.states[step_id]
        if self.plan.steps[step_id].timeout_s is not None:
            self.then(ClearTimer(self.timeout_of(step_id)))
        match state.wait:
            case OnJob(job_id):
                self.then(RevokeJob(job_id))
            case OnRetry():
                self.then(ClearTimer(Timer(TimerKind.RETRY, step_id, self.index, state.attempt)))
            case OnDelay():
                self.then(ClearTimer(Timer(TimerKind.DELAY, step_id, self.index)))
            case _:
                pass

    def finish(
        self, status: RunStatus, *, output: JsonValue = None, error: Failure | None = None
    ) -> None:
        """End the item: close every unfinished step, revoke their jobs, clear their timers."""
        for step_id in self.plan.steps:
            if self.states[step_id].status.is_active:
                self.stop(step_id)
        self.close_all(status, output=output, error=error)
        super().note(
            f"item_{status}",
            self.root,
            item=self.index,
            detail=None if error is None else error.message,
        )

    def changed_item(self) -> Item:
        """The item after the decision."""
        status = StepStatus(self.status)
        steps = dict(self.states)
        if not status.is_finished:
            return msgspec.structs.replace(self._item, status=status, attempt=1, steps=steps)
        return msgspec.structs.replace(
            self._item,
            status=status,
            attempt=1,
            output=self.output,
            error=self.error,
            input=msgspec.UNSET,
            steps={
                step_id: msgspec.structs.replace(step, output=None, output_bytes=0)
                for step_id, step in steps.items()
            },
        )

    def _excess(self, step_id: StepId, output_bytes: int) -> Failure | None:
        size = sum(_weight(step) for _, step in self.steps_so_far()) + output_bytes + 2
        if size <= limits.ITEM_OUTPUT_BYTES_MAX:
            return None
        message = (
            f"the outputs of the item's steps together would be {size} bytes;"
            f" at most {limits.ITEM_OUTPUT_BYTES_MAX} are allowed"
        )
        return Failure("output_too_large", message, step_id)


_UNTOUCHED: Final = Step()


def status_inside(around: StepStatus, before: StepStatus) -> StepStatus:
    """The final status of an unfinished step or item when the run or step around it ends.

    If the outer step was skipped, so is the inner one. If the outer one timed out, active inner
    steps timed out. In all other cases the inner step is cancelled.
    """
    if around is StepStatus.SKIPPED:
        return StepStatus.SKIPPED
    if around is StepStatus.TIMED_OUT and before.is_active:
        return StepStatus.TIMED_OUT
    return StepStatus.CANCELLED
