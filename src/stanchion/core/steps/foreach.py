"""For-each steps: the same work for every item of a list.

Items are stored separately from their step. The step keeps counts, so the result of one item costs
the same for ten items as for ten thousand; only the last result reads all items, to collect their
outputs in the order of the list. Items of a step that ended early are not changed.

Only ``parallel`` items are dispatched at first, or a thousand: one step of the store must not write
ten thousand jobs while others wait. The others are pending, and each item that ends dispatches the
next one of the list. A rerun of failed items keeps the others: they have
ended before the step starts. The inputs of all items are rendered when the step
starts. They are stored with the items until those end, because rendering the input of one item can
need the whole list: evaluating it again for each item would cost the square of their number.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import msgspec

from stanchion.core import limits
from stanchion.core.draft import size_of
from stanchion.core.events import (
    AttemptFailed,
    AttemptSucceeded,
    Event,
    JobDied,
    JobDiscarded,
    JobReplayed,
    TimerFired,
    TimerKind,
)
from stanchion.core.expression import WORK_MAX, EvaluationBudget, ExpressionError
from stanchion.core.model import (
    Failure,
    Item,
    ItemCounts,
    ItemFailure,
    ItemKey,
    OnItems,
    Step,
    StepStatus,
    bits_of,
)
from stanchion.core.steps.job import advance, dispatch
from stanchion.core.transition import Ignored
from stanchion.core.workflow import ForEachSpec, OnFailure

if TYPE_CHECKING:
    from stanchion.core.draft import Draft
    from stanchion.core.json_value import JsonObject, JsonValue
    from stanchion.core.plan import PlannedStep

__all__ = ["handle", "start"]


def start(draft: Draft, step: PlannedStep) -> None:
    """Evaluate the list, render every item's input, and dispatch as many items as allowed."""
    spec = step.spec
    assert isinstance(spec, ForEachSpec)
    try:
        values = _values(draft, step)
        budget = _budget(len(values))
        kept = _kept(draft, step, len(values))
        works = {
            index: _work(draft, step, values, index, budget)
            for index in range(len(values))
            if index not in kept
        }
    except ExpressionError as error:
        failure = Failure("expression_error", str(error), step.id)
        draft.end(step, StepStatus.FAILED, error=failure)
        return
    at_once = min(spec.at_once, len(works))
    counts = ItemCounts(
        total=len(values),
        succeeded=len(kept),
        output_bytes=sum(size_of(item.output) for item in kept.values()),
        pending=len(works) - at_once,
        reused=bits_of(kept),
    )
    draft.begin(
        step,
        Step(
            status=StepStatus.RUNNING,
            attempt=1,
            wait=OnItems(),
            items=counts,
        ),
    )
    draft.count_work(len(values) * _ITEM_WORK)
    again = f": {len(kept)} reused, {len(works)} to run" if kept else ""
    draft.note("items_started", step.id, detail=f"{len(values)} items{again}")
    for order, (index, work) in enumerate(works.items()):
        item = Item() if not counts.pending else Item(input=work)
        if order < at_once:
            item = dispatch(draft, step, index, item, work)
        draft.put_item(ItemKey(step.id, index), item)
    if not works:
        _gather(draft, step, counts)


def _kept(draft: Draft, step: PlannedStep, total: int) -> dict[int, Item]:
    """The items that a rerun keeps, by index. Only a run that has not started has any."""
    if not draft.run.items:
        return {}
    keys = (ItemKey(step.id, index) for index in range(total))
    return {key.item: draft.run.items[key] for key in keys if key in draft.run.items}


_ITEM_WORK: Final = 30
"""The work of starting an item besides its expressions: 4 µs."""


def handle(draft: Draft, step: PlannedStep, event: Event) -> Ignored | None:
    """Apply the result of one item."""
    state = draft.step(step.id)
    assert state.items is not None
    index = _index(event)
    if index is None or not 0 <= index < state.items.total:
        return Ignored.NOT_WAITING_FOR_IT
    key = ItemKey(step.id, index)
    before = draft.item(key)
    after = advance(
        draft,
        step,
        index,
        before,
        event,
        lambda: _input_of(draft, step, index, before),
    )
    if isinstance(after, Ignored):
        return after
    if after.status.is_finished:
        after = msgspec.structs.replace(after, input=msgspec.UNSET)
    draft.put_item(key, after)
    if after.status is StepStatus.SUCCEEDED:
        draft.note("item_succeeded", step.id, item=index, attempt=after.attempt)
    _count(draft, step, before, after)
    return None


def _count(draft: Draft, step: PlannedStep, before: Item, after: Item) -> None:
    """Update the counts after a change of one item, and do what follows when it has ended."""
    state = draft.step(step.id)
    assert state.items is not None
    succeeded = after.status is StepStatus.SUCCEEDED
    starts_next = after.status.is_finished and state.items.pending > 0
    counts = ItemCounts(
        total=state.items.total,
        succeeded=state.items.succeeded + succeeded,
        failed=state.items.failed + (after.status is StepStatus.FAILED),
        waiting=state.items.waiting
        + (after.status is StepStatus.WAITING)
        - (before.status is StepStatus.WAITING),
        output_bytes=state.items.output_bytes + (size_of(after.output) if succeeded else 0),
        pending=state.items.pending - starts_next,
        reused=state.items.reused,
    )
    status = StepStatus.RUNNING if counts.running else StepStatus.WAITING
    draft.put(step.id, msgspec.structs.replace(state, status=status, items=counts))
    # The size as a JSON list: a comma between two outputs, and the brackets. A failed item is null.
    size = counts.output_bytes + counts.succeeded + 1 + len("null,") * counts.failed
    if size > limits.FOR_EACH_OUTPUT_BYTES_MAX:
        message = (
            f"the items' outputs together are {size} bytes;"
            f" at most {limits.FOR_EACH_OUTPUT_BYTES_MAX} are allowed"
        )
        draft.abandon(step, StepStatus.FAILED, Failure("output_too_large", message, step.id))
    elif counts.unfinished == 0:
        _gather(draft, step, counts)
    elif starts_next:
        index = counts.to_run[len(counts.to_run) - state.items.pending]
        item = draft.item(ItemKey(step.id, index))
        work = _input_of(draft, step, index, item)
        draft.put_item(ItemKey(step.id, index), dispatch(draft, step, index, item, work))


def _gather(draft: Draft, step: PlannedStep, counts: ItemCounts) -> None:
    """End the step when all its items have ended."""
    spec = step.spec
    assert isinstance(spec, ForEachSpec)
    items = [draft.item(ItemKey(step.id, index)) for index in range(counts.total)]
    failed = (ItemFailure(n, item.error) for n, item in enumerate(items) if item.error is not None)
    failures = tuple(itertools.islice(failed, limits.ITEM_FAILURES_MAX))
    if failures and spec.on_item_failure is OnFailure.FAIL:
        first = failures[0]
        message = (
            f"{counts.failed} of {counts.total} items failed;"
            f" item {first.index}: {first.error.message}"
        )
        error = Failure("items_failed", message, step.id)
        draft.end(step, StepStatus.FAILED, error=error, failures=failures)
        return
    remark = f"{counts.failed} of {counts.total} items failed" if failures else None
    output: JsonValue = [item.output for item in items]
    draft.end(step, StepStatus.SUCCEEDED, output=output, failures=failures, remark=remark)


def _index(event: Event) -> int | None:
    match event:
        case AttemptSucceeded() | AttemptFailed() | JobDied() | JobDiscarded() | JobReplayed():
            return event.item
        case TimerFired(timer=timer) if timer.kind is TimerKind.RETRY:
            return timer.item
        case _:
            return None


def _values(draft: Draft, step: PlannedStep) -> list[JsonValue]:
    assert step.items is not None
    values = draft.evaluate(step, step.items)
    if not isinstance(values, list):
        kind = type(values).__name__
        reason = f"for_each: a list is needed, this is {_KINDS.get(kind, kind)}"
        raise ExpressionError(reason)
    if len(values) > limits.FOR_EACH_ITEMS_MAX:
        reason = f"for_each: {len(values)} items; at most {limits.FOR_EACH_ITEMS_MAX} are allowed"
        raise ExpressionError(reason)
    before = sum(state.items.total for state in draft.every_step() if state.items is not None)
    if before + len(values) > limits.RUN_ITEMS_MAX and draft.step(step.id).items is None:
        reason = (
            f"for_each: {len(values)} items; with those of the run's other steps, at most"
            f" {limits.RUN_ITEMS_MAX} are allowed"
        )
        raise ExpressionError(reason)
    return values


_KINDS = {
    "dict": "an object",
    "str": "a string",
    "NoneType": "null",
    "bool": "a boolean",
    "int": "a number",
    "float": "a number",
}


def _budget(items: int) -> EvaluationBudget:
    """One budget for all items, so that the number of items does not multiply the limit."""
    return EvaluationBudget(
        work=max(WORK_MAX, items * limits.FOR_EACH_WORK_PER_ITEM),
        size=limits.FOR_EACH_INPUT_SIZE_MAX,
    )


def _input_of(draft: Draft, step: PlannedStep, index: int, item: Item) -> JsonValue:
    """The input of an item, as stored with it or else rendered again: both are equal."""
    if item.input is not msgspec.UNSET:
        return item.input
    return _work(draft, step, _values(draft, step), index)


def _work(
    draft: Draft,
    step: PlannedStep,
    values: list[JsonValue],
    index: int,
    budget: EvaluationBudget | None = None,
) -> JsonValue:
    assert step.input is not None
    extra: JsonObject = {"item": values[index], "index": index}
    try:
        return draft.evaluate_in(step.parent, step.visible, step.input, extra, budget)
    except ExpressionError as error:
        reason = f"input of item {index}: {error}"
        raise ExpressionError(reason) from error
