"""For-each steps: the same work for every item of a list.

Items are stored separately from their step. The step keeps counts, so the result of one item costs
the same for ten items as for ten thousand; only the last result reads all items, to collect their
outputs in the order of the list. Items of a step that ended early are not changed.

At most ``parallel`` items are out at a time, or a thousand. One step of the store must not write so
many jobs while others wait: the first event dispatches 250 of them. The others are pending. Each
item that ends dispatches the next one of the list, or two while fewer are out than allowed; a timer
that is due at once dispatches 250 more. A rerun of failed items keeps the others: they have ended
before the step starts. The inputs of all items are rendered when the step starts. They are stored
with the items until those end, because rendering the input of one item can need the whole list:
evaluating it again for each item would cost the square of their number. If they are larger together
than one transition may write, none is stored at first: each time the timer fires, as many inputs as
fit are rendered, and their items dispatched or stored.

An item with a workflow has the state of the workflow's steps in itself, so that the result of one
of them reads and writes one item. ``ItemDraft`` lets the rules of ``core.run`` work on it as on a
run. Such an item can end in the decision that begins it, if all its steps are skipped or fail at
once: then the next one begins, and if it was not read, a timer that is due at once begins it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from stanchion.core import limits
from stanchion.core.draft import DecisionTooLong, size_of
from stanchion.core.events import (
    AttemptFailed,
    AttemptSucceeded,
    Event,
    JobDied,
    JobDiscarded,
    JobReplayed,
    Timer,
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
    RunStatus,
    Step,
    StepStatus,
    bits_of,
)
from stanchion.core.steps.job import advance, dispatch
from stanchion.core.steps.subworkflow import input_fault
from stanchion.core.transition import ClearTimer, Ignored, SetTimer
from stanchion.core.workflow import ForEachSpec, ForEachWorkflowSpec, OnFailure

if TYPE_CHECKING:
    from stanchion.core.draft import Draft, ItemDraft
    from stanchion.core.json_value import JsonObject, JsonValue
    from stanchion.core.plan import PlannedStep

Inside: TypeAlias = "Callable[[ItemDraft, Event | None], Ignored | None]"
"""Applies an event to an item with a workflow, or starts it, and does all that follows in it."""

TOO_MANY_ITEMS: Final = "too_many_items"
"""The code of a step with more items than allowed, by themselves or by their steps."""
BEGUN_AT_ONCE_MAX: Final = 250
"""Items, or jobs of items with a workflow, that begin in one event. A timer that is due at once
begins the others."""
BEGUN_BY_END_MAX: Final = 2
"""Items that begin when one ends: results of fast jobs begin the others before the timer does."""


def start(draft: Draft, step: PlannedStep, inside: Inside) -> None:
    """Evaluate the list, render every item's input, and begin as many items as allowed."""
    spec = step.spec
    assert isinstance(spec, ForEachSpec | ForEachWorkflowSpec)
    try:
        values = _values(draft, step)
        budget = _budget(len(values))
        kept = _kept(draft, step, len(values))
        # Before the inputs are rendered: a decision that is too long for the event loop ends here.
        draft.count_work(len(values) * _ITEM_WORK)
        works: dict[int, JsonValue] = {}
        sizes: list[int] = []
        for index in range(len(values)):
            if index not in kept:
                works[index] = _work(draft, step, values, index, budget)
                sizes.append(draft.take_input(works[index]))
    except ExpressionError as error:
        code = TOO_MANY_ITEMS if isinstance(error, _TooManyItems) else "expression_error"
        draft.end(step, StepStatus.FAILED, error=Failure(code, str(error), step.id))
        return
    has_workflow = step.item_plan is not None
    at_once = 0 if has_workflow else _fitting(draft, sizes[: min(spec.at_once, BEGUN_AT_ONCE_MAX)])
    is_stored = has_workflow or draft.has_room(sum(sizes))
    counts = ItemCounts(
        total=len(values),
        succeeded=len(kept),
        output_bytes=sum(size_of(item.output) for item in kept.values()),
        pending=len(works) - at_once,
        reused=bits_of(kept),
    )
    draft.begin(step, Step(status=StepStatus.RUNNING, attempt=1, wait=OnItems(), items=counts))
    again = f": {len(kept)} reused, {len(works)} to run" if kept else ""
    draft.note("items_started", step.id, detail=f"{len(values)} items{again}")
    for order, (index, work) in enumerate(works.items()):
        item = Item(input=work) if counts.pending and is_stored else Item()
        if order < at_once:
            item = dispatch(draft, step, index, item, work)
        draft.put_item(ItemKey(step.id, index), item)
    if not works:
        _gather(draft, step, counts)
    elif has_workflow:
        _go_on(draft, step, inside)
    elif is_short(step, counts):
        draft.then(SetTimer(more_items(step), draft.now))


def items_max(draft: Draft, step: PlannedStep) -> int:
    """How many items the step has if it starts; the most that it can have if that takes long."""
    try:
        return len(_values(draft, step))
    except ExpressionError:
        return 0
    except DecisionTooLong:
        return limits.FOR_EACH_ITEMS_MAX


def _fitting(draft: Draft, sizes: Iterable[int]) -> int:
    """How many jobs with inputs of these sizes the transition may begin. Counts their inputs."""
    count = 0
    for size in sizes:
        if not draft.has_room(size):
            break
        draft.write_input(size)
        count += 1
    return count


def _kept(draft: Draft, step: PlannedStep, total: int) -> dict[int, Item]:
    """The items that a rerun keeps, by index. Only a run that has not started has any."""
    if not draft.run.items:
        return {}
    keys = (ItemKey(step.id, index) for index in range(total))
    return {key.item: draft.run.items[key] for key in keys if key in draft.run.items}


_ITEM_WORK: Final = 30
"""The work of starting an item besides its expressions: 4 µs."""


def handle(draft: Draft, step: PlannedStep, event: Event, inside: Inside) -> Ignored | None:
    """Apply an event that names the step: the result of an item, or a timer."""
    state = draft.step(step.id)
    assert state.items is not None
    if step.item_plan is not None:
        return _handle_timer(draft, step, event, inside)
    if isinstance(event, TimerFired) and event.timer == more_items(step):
        return _dispatch_more(draft, step)
    index = _index(event)
    if index is None or not 0 <= index < state.items.total:
        return Ignored.NOT_WAITING_FOR_IT
    key = ItemKey(step.id, index)
    before = draft.item(key)
    after = advance(
        draft, step, index, before, event, lambda: _input_of(draft, step, index, before)
    )
    if isinstance(after, Ignored):
        return after
    is_finished = after.status.is_finished
    if is_finished and after.input is not msgspec.UNSET:
        after = msgspec.structs.replace(after, input=msgspec.UNSET)
    draft.put_item(key, after)
    if after.status is StepStatus.SUCCEEDED:
        draft.note("item_succeeded", step.id, item=index, attempt=after.attempt)
    elif after.error is not None and is_finished:
        # A failed attempt alone does not tell: another one may follow it.
        draft.note(
            "item_failed",
            step.id,
            item=index,
            attempt=after.attempt,
            detail=after.error.message,
        )
    following: dict[int, JsonValue] = {}
    if is_finished:
        at_most = min(BEGUN_BY_END_MAX, _room(step, state.items, ended=1))
        for another in _following(draft, step, state.items, at_most):
            work = draft.item(ItemKey(step.id, another)).input
            if work is msgspec.UNSET:
                break  # rendered by the timer, many at a time
            draft.write_input(size_of(work))
            following[another] = work
    counts = _count(draft, step, before, after, begun=len(following))
    if is_finished and not _ended(draft, step, counts):
        _dispatch(draft, step, following, has_timer=is_short(step, state.items))
    return None


def _dispatch_more(draft: Draft, step: PlannedStep) -> Ignored | None:
    """Dispatch pending items, because their timer fired."""
    state = draft.step(step.id)
    assert state.items is not None
    at_most = min(BEGUN_AT_ONCE_MAX, _room(step, state.items))
    if at_most <= 0:
        return Ignored.NOT_WAITING_FOR_IT
    begun: dict[int, JsonValue] = {}
    values: list[JsonValue] | None = None
    budget = _budget(state.items.total)
    for index in _following(draft, step, state.items, BEGUN_AT_ONCE_MAX):
        work, is_stored = draft.item(ItemKey(step.id, index)).input, True
        if work is msgspec.UNSET:
            values = _values(draft, step) if values is None else values
            work, is_stored = _work(draft, step, values, index, budget), False
        if len(begun) >= at_most and is_stored:
            continue
        size = size_of(work)
        if not draft.has_room(size):
            break
        draft.write_input(size)
        if len(begun) < at_most:
            begun[index] = work
        else:  # the next ones begin when others end: that should not need the list again
            draft.put_item(ItemKey(step.id, index), Item(input=work))
    counts = msgspec.structs.replace(state.items, pending=state.items.pending - len(begun))
    draft.put(step.id, msgspec.structs.replace(state, status=StepStatus.RUNNING, items=counts))
    _dispatch(draft, step, begun, has_timer=False)
    return None


def _following(draft: Draft, step: PlannedStep, counts: ItemCounts, at_most: int) -> list[int]:
    """The next pending items, up to the first that was not read."""
    first = len(counts.to_run) - counts.pending
    some = counts.to_run[first : first + at_most]
    return [*itertools.takewhile(lambda index: draft.has_item(ItemKey(step.id, index)), some)]


def _dispatch(
    draft: Draft, step: PlannedStep, works: Mapping[int, JsonValue], *, has_timer: bool
) -> None:
    """Dispatch pending items. The timer, set by now or not, is set while more may begin."""
    for index, work in works.items():
        key = ItemKey(step.id, index)
        draft.put_item(key, dispatch(draft, step, index, draft.item(key), work))
    counts = draft.step(step.id).items
    assert counts is not None
    needs_timer = is_short(step, counts)
    if needs_timer and not has_timer:
        draft.then(SetTimer(more_items(step), draft.now))
    elif has_timer and not needs_timer:
        draft.then(ClearTimer(more_items(step)))


def _count(
    draft: Draft, step: PlannedStep, before: Item, after: Item, *, begun: int = 0
) -> ItemCounts:
    """Update the counts after a change of one item; ``begun``: how many pending ones begin."""
    state = draft.step(step.id)
    assert state.items is not None
    succeeded = after.status is StepStatus.SUCCEEDED
    counts = ItemCounts(
        total=state.items.total,
        succeeded=state.items.succeeded + succeeded,
        failed=state.items.failed + after.status.is_failure,
        waiting=state.items.waiting
        + (after.status is StepStatus.WAITING)
        - (before.status is StepStatus.WAITING),
        output_bytes=state.items.output_bytes + (size_of(after.output) if succeeded else 0),
        pending=state.items.pending - begun,
        reused=state.items.reused,
    )
    status = StepStatus.RUNNING if counts.running else StepStatus.WAITING
    draft.put(step.id, msgspec.structs.replace(state, status=status, items=counts))
    return counts


def _ended(draft: Draft, step: PlannedStep, counts: ItemCounts) -> bool:
    """End the step if all its items have ended or their outputs are too large together."""
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
    else:
        return False
    return True


# ── Items with a workflow ────────────────────────────────────────────────────────────────────────


def _go_on(draft: Draft, step: PlannedStep, inside: Inside, *, has_timer: bool = False) -> None:
    """End the step if its items have ended, or else begin as many pending ones as may be out.

    ``has_timer``: whether the timer for more items is set.
    """
    inputs_before = draft.inputs_taken
    for begun in range(BEGUN_AT_ONCE_MAX + 1):
        counts = draft.step(step.id).items
        assert counts is not None
        is_done = not is_short(step, counts)
        if is_done and has_timer:
            draft.then(ClearTimer(more_items(step)))
        if _ended(draft, step, counts) or is_done:
            return
        if begun == BEGUN_AT_ONCE_MAX or not _begin_next(
            draft, step, counts, inside, inputs_before
        ):
            break
    if not has_timer:
        draft.then(SetTimer(more_items(step), draft.now))


def is_short(step: PlannedStep, counts: ItemCounts) -> bool:
    """Whether more items of the step may begin."""
    return _room(step, counts) > 0


def _room(step: PlannedStep, counts: ItemCounts, *, ended: int = 0) -> int:
    """How many more items of the step may begin after ``ended`` more have ended."""
    spec = step.spec
    assert isinstance(spec, ForEachSpec | ForEachWorkflowSpec)
    out = counts.unfinished - counts.pending - ended
    return min(counts.pending, spec.at_once - out)


def _begin_next(
    draft: Draft, step: PlannedStep, counts: ItemCounts, inside: Inside, inputs_before: int
) -> bool:
    """Begin the next pending item; ``False`` if it was not read, or is too much for this event."""
    key = ItemKey(step.id, counts.to_run[-counts.pending])
    if not draft.has_item(key) or draft.work_left < _BEGIN_WORK_MIN:
        return False
    is_full = draft.inputs_taken - inputs_before >= BEGUN_AT_ONCE_MAX
    if is_full or draft.input_bytes_left < _BEGIN_BYTES_MIN or not draft.has_room(1):
        return False
    before = draft.item(key)
    after = _begin(draft, step, key.item, before, inside)
    draft.put_item(key, after)
    _count(draft, step, before, after, begun=1)
    return True


_BEGIN_WORK_MIN: Final = limits.EVENT_WORK_MAX // 4
"""With less work left to an event, the next item begins in an event of its own."""
_BEGIN_BYTES_MIN: Final = limits.EVENT_INPUT_BYTES_MAX // 4
"""The same for the inputs of jobs."""


def more_items(step: PlannedStep) -> Timer:
    """The timer for items that may begin and have not been read."""
    return Timer(TimerKind.ITEMS, step.id)


def handle_inside(draft: Draft, step: PlannedStep, event: Event, inside: Inside) -> Ignored | None:
    """Apply an event that names a step of an item."""
    state = draft.step(step.id)
    assert state.items is not None
    index = _index(event)
    if index is None or not 0 <= index < state.items.total:
        return Ignored.NOT_WAITING_FOR_IT
    before = draft.item(ItemKey(step.id, index))
    if not before.status.is_active:
        return Ignored.NOT_WAITING_FOR_IT
    item = draft.of_item(step, index, before)
    ignored = inside(item, event)
    if ignored is None:
        _became(draft, step, index, before, item.changed_item(), inside)
    return ignored


def _handle_timer(draft: Draft, step: PlannedStep, event: Event, inside: Inside) -> Ignored | None:
    """Begin more items, or end one whose time is over."""
    if not isinstance(event, TimerFired):
        return Ignored.NOT_WAITING_FOR_IT
    index = event.timer.item
    counts = draft.step(step.id).items
    assert counts is not None
    if event.timer == more_items(step) and is_short(step, counts):
        _go_on(draft, step, inside)
        return None
    if event.timer.kind is not TimerKind.STEP_TIMEOUT or index is None:
        return Ignored.NOT_WAITING_FOR_IT
    before = draft.item(ItemKey(step.id, index))
    if not before.status.is_active:
        return Ignored.NOT_WAITING_FOR_IT
    item = draft.of_item(step, index, before)
    message = f"not finished within {step.item_timeout_s:g} s"
    item.finish(RunStatus.TIMED_OUT, error=Failure("item_timeout", message, step.id))
    _became(draft, step, index, before, item.changed_item(), inside)
    return None


def _became(
    draft: Draft, step: PlannedStep, index: int, before: Item, after: Item, inside: Inside
) -> None:
    counts = draft.step(step.id).items
    assert counts is not None
    if after.status.is_finished and step.item_timeout_s is not None:
        draft.then(ClearTimer(_timeout_of(step, index)))
    draft.put_item(ItemKey(step.id, index), after)
    _count(draft, step, before, after)
    if after.status.is_finished:
        _go_on(draft, step, inside, has_timer=is_short(step, counts))


def _begin(draft: Draft, step: PlannedStep, index: int, item: Item, inside: Inside) -> Item:
    """Check the input against the schema of the workflow, and start its first steps."""
    fault = _input_fault(draft, step, item.input)
    if fault is not None:
        draft.note("item_failed", step.id, item=index, detail=fault.message)
        return Item(status=StepStatus.FAILED, error=fault)
    inner = draft.of_item(step, index, item)
    inside(inner, None)
    begun = inner.changed_item()
    if not begun.status.is_finished and step.item_timeout_s is not None:
        due = draft.after(step.item_timeout_s)
        draft.then(SetTimer(_timeout_of(step, index), due))
    return begun


def _timeout_of(step: PlannedStep, index: int) -> Timer:
    return Timer(TimerKind.STEP_TIMEOUT, step.id, index)


def _input_fault(draft: Draft, step: PlannedStep, given: object) -> Failure | None:
    assert step.item_plan is not None
    try:
        return input_fault(draft, step.id, step.item_plan.body, given)
    except ExpressionError as error:
        return Failure("expression_error", f"input: {error}", step.id)


# ── The end of the step ──────────────────────────────────────────────────────────────────────────


def _gather(draft: Draft, step: PlannedStep, counts: ItemCounts) -> None:
    """End the step when all its items have ended."""
    spec = step.spec
    assert isinstance(spec, ForEachSpec | ForEachWorkflowSpec)
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
        case TimerFired(timer=timer):
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
        raise _TooManyItems(reason)
    if draft.step(step.id).items is not None:
        return values
    if step.item_plan is not None:
        steps = len(step.item_plan.steps)
        if len(values) * steps > limits.RUN_ITEMS_MAX:
            reason = (
                f"for_each: {len(values)} items with {steps} steps each;"
                f" at most {limits.RUN_ITEMS_MAX} steps of items are allowed"
            )
            raise _TooManyItems(reason)
    before = sum(
        state.items.total * _weight(draft.plan.steps[step_id])
        for step_id, state in draft.steps_so_far()
        if state.items is not None
    )
    if before + len(values) * _weight(step) > limits.RUN_ITEMS_MAX:
        reason = (
            f"for_each: {len(values)} items; with those of the run's other steps, at most"
            f" {limits.RUN_ITEMS_MAX} are allowed"
        )
        raise _TooManyItems(reason)
    return values


class _TooManyItems(ExpressionError):
    """There are more items than allowed, or they have more steps together than are allowed."""


def _weight(step: PlannedStep) -> int:
    return 1 if step.item_plan is None else len(step.item_plan.steps)


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
    values = _values(draft, step)
    return _work(draft, step, values, index, _budget(len(values)))


def _work(
    draft: Draft,
    step: PlannedStep,
    values: list[JsonValue],
    index: int,
    budget: EvaluationBudget,
) -> JsonValue:
    """The input of an item. It may take as much each time, or it could begin and not be retried."""
    assert step.input is not None
    extra: JsonObject = {"item": values[index], "index": index}
    try:
        return draft.evaluate_in(step.parent, step.visible, step.input, extra, budget)
    except ExpressionError as error:
        reason = f"input of item {index}: {error}"
        raise ExpressionError(reason) from error
