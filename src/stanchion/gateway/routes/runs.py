"""Run routes: start, get, wait, list, cancel, rerun, approve and reject."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Final, assert_never

import msgspec
from msgspec import to_builtins

from stanchion.core.audit import redacted
from stanchion.core.faults import WorkflowFaults
from stanchion.core.limits import INPUT_BYTES_MAX
from stanchion.core.model import ItemKey, Run, RunId, RunStatus, StepId, StepStatus, WorkflowId
from stanchion.core.plan import Plan
from stanchion.core.queue import ANY_PLACE, PRIORITY_DEFAULT, QueueRequest
from stanchion.core.rerun import RerunOptions, RerunRefused
from stanchion.gateway.body import check_value, checked_labels, decoded
from stanchion.gateway.endpoint import note_refusal
from stanchion.gateway.problems import (
    Refusal,
    RequestRefused,
    invalid,
    invalid_member,
    not_found,
    problem_of,
)
from stanchion.gateway.route import (
    APPROVERS,
    RUNNERS,
    Call,
    NoBody,
    NoQuery,
    Paging,
    Reply,
    RouteScope,
    RouteTable,
    Takes,
)
from stanchion.gateway.views import (
    approval_row,
    encoded_run,
    filter_of,
    has_small_outputs,
    item_row,
    jobs_out,
    refusal_of,
    rerun_plan,
    run_row,
    run_view,
    started,
    timeline_line,
    wait_row,
    when,
    why_answer,
)
from stanchion.ports.errors import BackendError
from stanchion.ports.records import BadCursor, Loaded
from stanchion.services.gate import RerunPreview, StartRow
from stanchion.services.gate_answers import (
    GateFailed,
    GateFull,
    GateOverBudget,
    InvalidInput,
    JobThrottled,
    KeyMismatch,
    NotStarted,
    QueueOff,
    RunStarted,
    UnknownRun,
)
from stanchion.services.inbox import (
    Conflicting,
    DecisionForbidden,
    InvalidData,
    RunChange,
    UnknownTarget,
)
from stanchion.services.plans import DefinitionMissing, UnknownWorkflow
from stanchion.wire.identifiers import Cursor, Limit, WaitS
from stanchion.wire.problems import Code
from stanchion.wire.runs import (
    ApprovalList,
    ApprovalRow,
    BatchAnswer,
    BatchResult,
    BatchRow,
    CancelRun,
    Change,
    DecideStep,
    ItemList,
    ItemRow,
    QueuedAnswer,
    QueuedResult,
    RerunPlan,
    RerunRun,
    RunList,
    RunSelection,
    RunView,
    StartAnswer,
    StartBatch,
    StartRun,
    TimelineAnswer,
    WaitsAnswer,
    WhyAnswer,
)

ROUTES: Final = RouteTable()

START_CODES: Final = (
    Code.NOT_FOUND,
    Code.INVALID_INPUT,
    Code.INVALID_WORKFLOW,
    Code.IDEMPOTENCY_MISMATCH,
    Code.MAX_CONCURRENT_RUNS_REACHED,
    Code.BUDGET_EXHAUSTED,
    Code.QUEUE_FULL,
    Code.GATE_UNAVAILABLE,
    Code.GATE_BUSY,
    Code.LIMIT_CHECK_FAILED,
    Code.DRAINING,
)


class Waiting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long to wait for the end of the run."""

    wait: WaitS = 0


class Listed(RunSelection, frozen=True, forbid_unknown_fields=True):
    """Which runs, page by page."""

    cursor: Cursor | None = None
    limit: Limit = 100


class ListedItems(Paging, frozen=True, forbid_unknown_fields=True):
    """Which items, page by page."""

    status: StepStatus | None = None


@ROUTES.add(
    "POST /v1/workflows/{workflow_id}/runs",
    RUNNERS,
    RouteScope.TENANT,
    StartAnswer,
    takes=Takes.JSON_OR_NOTHING,
    queued_answer=QueuedAnswer,
    codes=START_CODES,
    takes_key=True,
    admits=True,
)
async def start_run(call: Call[StartRun, NoQuery]) -> Reply | Refusal:
    """Start a run."""
    check_value(call, "input", call.body.input, bytes_max=INPUT_BYTES_MAX)
    answer = await call.services.gate.start(
        call.tenant,
        WorkflowId(call.params["workflow_id"]),
        call.body.input,
        labels=checked_labels(call.body.labels),
        key=call.idempotency_key,
        actor=call.actor,
        traceparent=call.traceparent,
        queue=_queue_request(call.body),
    )
    return start_answer(answer)


def _queue_request(body: StartRun | BatchRow) -> QueueRequest:
    """The run's place in the queue, if it must wait."""
    if body.on_full is None and not body.fairness_key and body.priority == PRIORITY_DEFAULT:
        return ANY_PLACE
    return QueueRequest(body.priority, body.fairness_key, body.on_full)


def _start_body(answer: RunStarted) -> StartAnswer | QueuedAnswer:
    if answer.position is None:
        return StartAnswer(answer.run_id, answer.status)
    return QueuedAnswer(
        run_id=answer.run_id,
        status=answer.status,
        position=answer.position,
        estimate_s=answer.estimate_s,
    )


def start_answer(answer: RunStarted | NotStarted) -> Reply | Refusal:
    """The response to a start."""
    if isinstance(answer, RunStarted):
        return started(answer, _start_body(answer))
    return _not_started(answer)


def _not_started(answer: NotStarted) -> Refusal:
    match answer:
        case UnknownWorkflow():
            return not_found("workflow")
        case InvalidInput():
            return _invalid_input(answer)
        case WorkflowFaults():
            return _invalid_workflow(answer)
        case (
            GateFull()
            | QueueOff()
            | GateOverBudget()
            | KeyMismatch()
            | JobThrottled()
            | GateFailed()
        ):
            return refusal_of(answer)
        case _:
            assert_never(answer)


class RawBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A batch whose rows are not decoded: a faulty row is refused alone."""

    runs: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(min_length=1, max_length=1000)]


@ROUTES.add(
    "POST /v1/workflows/{workflow_id}/runs/batch",
    RUNNERS,
    RouteScope.TENANT,
    BatchAnswer,
    body=StartBatch,
    codes=(Code.NOT_FOUND, Code.GATE_UNAVAILABLE, Code.DRAINING),
    takes_key=True,
    admits=True,
)
async def start_batch(call: Call[RawBatch, NoQuery]) -> Reply | Refusal:
    """Start up to 1,000 runs, each judged by itself, in their order."""
    # One at a time of each tenant: several take as long, and leave less time to others.
    async with call.services.gate.batches.turn(call.tenant):
        return await _started_batch(call)


async def _started_batch(call: Call[RawBatch, NoQuery]) -> Reply | Refusal:
    refusals: dict[int, Refusal] = {}
    rows: dict[int, StartRow] = {}
    wall_s = call.state.work.stopwatch.wall_s
    begun_s = wall_s()
    for index, raw in enumerate(call.body.runs):
        if wall_s() - begun_s > _PIECE_S:
            await asyncio.sleep(0)
            begun_s = wall_s()
        try:
            text = bytes(raw)
            row = _batch_row(text)
            check_value(call, "input", row.input, bytes_max=INPUT_BYTES_MAX, part=text)
            labels = checked_labels(row.labels) if row.labels else row.labels
        except RequestRefused as refused:
            if refused.refusal.code is Code.MALFORMED_JSON:
                raise
            refusals[index] = refused.refusal
        else:
            key = _batch_key(call, index, row)
            rows[index] = StartRow(row.input, labels, key, _queue_request(row))
    workflow_id = WorkflowId(call.params["workflow_id"])
    answers = await call.services.gate.start_many(
        call.tenant,
        workflow_id,
        tuple(rows.values()),
        actor=call.actor,
        traceparent=call.traceparent,
    )
    is_unknown = any(isinstance(each, UnknownWorkflow) for each in answers)
    if not rows:  # the gate was not asked for the workflow
        with suppress(BackendError):
            is_unknown = await call.services.store.workflow(call.tenant, workflow_id) is None
    if is_unknown:
        return not_found("workflow")
    begun: dict[int, RunStarted] = {}
    for index, answer in zip(rows, answers, strict=True):
        if isinstance(answer, RunStarted):
            begun[index] = answer
        else:
            refusals[index] = _not_started(answer)
            note_refusal(
                call.services,
                refusals[index],
                tenant=call.tenant,
                workflow_id=workflow_id,
                key=rows[index].key,
                request_id=call.request_id,
                actor=call.actor,
            )
    return Reply(
        BatchAnswer(
            tuple(
                _batch_result(begun[index])
                if index in begun
                else _batch_problem(call, refusals[index])
                for index in range(len(call.body.runs))
            )
        )
    )


def _batch_row(text: bytes) -> BatchRow:
    """A row of a batch. Raises ``RequestRefused``."""
    if len(text) <= _SHORT_ROW_BYTES:
        # A faulty one is decoded again, to explain the fault.
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            row = _BATCH_ROW.decode(text)
            # Every member has a colon. So none is given twice if there are no more colons than
            # members, which is found in a tenth of the time of a look at their names.
            members = 1 + (row.key is not None) + len(row.input)
            if text.count(b":") == members and text.count(b"{") == _ROW_AND_INPUT:
                return row
    slowly: BatchRow = decoded(text, _BATCH_ROW)
    return slowly


_SHORT_ROW_BYTES: Final = 2 * 1024
"""A longer one may be costly to decode, see ``gateway.body``."""
_ROW_AND_INPUT: Final = 2


def _batch_key(call: Call[RawBatch, NoQuery], index: int, row: BatchRow) -> str:
    """A row's idempotency key. Raises ``RequestRefused`` if it has none."""
    if row.key is not None:
        return row.key
    if call.idempotency_key is None:
        wrong = "missing; give it, or send an Idempotency-Key for all rows without one"
        raise RequestRefused(invalid_member(f"runs[{index}].key", wrong))
    key = f"{call.idempotency_key}/{index}"
    if len(key) > _KEY_CHARS_MAX:
        wrong = f"with the row's index it has {len(key)} characters; at most {_KEY_CHARS_MAX}"
        raise RequestRefused(invalid_member("Idempotency-Key", wrong))
    return key


_PIECE_S: Final = 0.001
"""Work on the rows of a batch for this long, then let other requests have the event loop."""
_KEY_CHARS_MAX: Final = 255
_BATCH_ROW: Final = msgspec.json.Decoder(BatchRow)


def _batch_result(answer: RunStarted) -> BatchResult:
    if answer.position is None:
        return BatchResult(status=HTTPStatus.OK, run_id=answer.run_id)
    return QueuedResult(
        status=HTTPStatus.ACCEPTED,
        run_id=answer.run_id,
        position=answer.position,
        estimate_s=answer.estimate_s,
    )


def _batch_problem(call: Call[RawBatch, NoQuery], refusal: Refusal) -> BatchResult:
    return BatchResult(status=refusal.status, problem=problem_of(refusal, call.request_id))


@ROUTES.add(
    "POST /v1/runs/{run_id}/rerun",
    RUNNERS,
    RouteScope.TENANT,
    StartAnswer,
    takes=Takes.JSON_OR_NOTHING,
    audits="run.rerun",
    queued_answer=QueuedAnswer,
    dry_answer=RerunPlan,
    codes=(*START_CODES, Code.CONFLICT, Code.JOB_THROTTLED),
    takes_key=True,
    admits=True,
)
async def rerun_run(call: Call[RerunRun, NoQuery]) -> Reply | Refusal:
    """Start a new run from a finished one, or with `dry_run` say what it would repeat."""
    body, run_id = call.body, RunId(call.params["run_id"])
    check_value(call, "input", body.input, bytes_max=INPUT_BYTES_MAX)
    options = RerunOptions(
        from_step=None if body.from_step is None else StepId(body.from_step),
        version=body.version,
        input=body.input,
        only=body.only,
    )
    fault = options.fault()
    if fault is not None:
        return invalid_member(fault.path, fault.message)
    gate = call.services.gate
    known: list[WorkflowId] = []
    answer = (
        await gate.preview_rerun(call.tenant, run_id, options)
        if body.dry_run
        else await gate.rerun(
            call.tenant,
            run_id,
            options,
            key=call.idempotency_key,
            actor=call.actor,
            traceparent=call.traceparent,
            learn=known.append,
            audit=call.audit(
                f"run/{run_id}", tenant=call.tenant, after=redacted(to_builtins(options), "input")
            ),
        )
    )
    match answer:
        case RunStarted():
            return started(answer, _start_body(answer))
        case RerunPreview():
            return Reply(rerun_plan(answer, options.version))
        case UnknownRun():
            return not_found("run")
        case UnknownWorkflow():
            return not_found("workflow")
        case InvalidInput():
            return _invalid_input(answer)
        case WorkflowFaults():
            return _invalid_workflow(answer)
        case RerunRefused(code="unknown_step"):
            return invalid_member("from_step", answer.message)
        case RerunRefused():
            return Refusal(code=Code.CONFLICT, detail=answer.message)
        case (
            GateFull()
            | QueueOff()
            | GateOverBudget()
            | KeyMismatch()
            | JobThrottled()
            | GateFailed()
        ):
            workflow_id = known[0] if known else None
            return msgspec.structs.replace(refusal_of(answer), workflow_id=workflow_id)
        case _:
            assert_never(answer)


@ROUTES.add(
    "GET /v1/runs/{run_id}",
    APPROVERS,
    RouteScope.TENANT,
    RunView,
    codes=(Code.NOT_FOUND,),
    waits=lambda call: call.query.wait,
)
async def get_run(call: Call[NoBody, Waiting]) -> Reply:
    """One run; with `wait`, once it has ended or the seconds have passed."""
    body = await call.services.waiters.rendered(
        RunId(call.params["run_id"]),
        partial(_rendered, call),
        of=call.tenant,
        within_s=call.query.wait,
    )
    if body is None:
        raise RequestRefused(not_found("run"))
    return Reply(body)


async def _rendered(call: Call[NoBody, Waiting], loaded: Loaded) -> bytes:
    """The encoded answer for all callers that get this reading of the run."""
    run, out = loaded.run, jobs_out(loaded.run)
    progress = await call.services.store.progress(run.id, out) if out else {}
    plan, position = await _plan(call, run), None
    if run.status is RunStatus.QUEUED:
        position = await call.services.store.queue_position(run.id)
    view = run_view(run, plan, progress, position=position)
    return await encoded_run(view, is_small=has_small_outputs(run, plan))


async def _plan(call: Call[Any, Any], run: Run) -> Plan | None:
    try:
        return await call.services.plans.of_run(run)
    except DefinitionMissing:
        return None  # the run is shown without the steps that have not begun


@ROUTES.add("GET /v1/runs", APPROVERS, RouteScope.TENANT_OR_ALL, RunList)
async def list_runs(call: Call[NoBody, Listed]) -> Reply:
    """List runs, newest first, by status, workflow, labels and time."""
    query = call.query
    page = await call.services.store.list_runs(
        call.only, only=filter_of(query), cursor=query.cursor, limit=query.limit
    )
    return Reply(RunList(tuple(map(run_row, page.items)), page.cursor))


@ROUTES.add(
    "GET /v1/runs/{run_id}/timeline",
    APPROVERS,
    RouteScope.TENANT,
    TimelineAnswer,
    codes=(Code.NOT_FOUND,),
)
async def get_timeline(call: Call[NoBody, Paging]) -> Reply:
    """A run's history, oldest first."""
    loaded = await own_run(call)
    page = await call.services.store.timeline(
        loaded.run.id, cursor=call.query.cursor, limit=call.query.limit
    )
    entries = tuple(map(timeline_line, page.items))
    return Reply(TimelineAnswer(loaded.run.id, entries, page.cursor))


@ROUTES.add(
    "GET /v1/runs/{run_id}/why", APPROVERS, RouteScope.TENANT, WhyAnswer, codes=(Code.NOT_FOUND,)
)
async def explain_run(call: Call[NoBody, NoQuery]) -> Reply | Refusal:
    """Why a run does not go on, and what to do, the most important cause first.

    Answered also while the store or the lock store is down.
    """
    found = await call.services.explainer.explain(RunId(call.params["run_id"]), call.tenant)
    return not_found("run") if found is None else Reply(why_answer(found))


@ROUTES.add(
    "GET /v1/runs/{run_id}/steps/{step_id}/items",
    APPROVERS,
    RouteScope.TENANT,
    ItemList,
    codes=(Code.NOT_FOUND,),
)
async def list_items(call: Call[NoBody, ListedItems]) -> Reply:
    """The items of a for-each step, in the order of the list.

    A page with a filter may be short.
    """
    run, step_id = (await own_run(call)).run, StepId(call.params["step_id"])
    plan = await _plan(call, run)
    if step_id not in run.steps and (plan is None or step_id not in plan.steps):
        raise RequestRefused(not_found("step"))
    counts, query = run.step(step_id).items, call.query
    total = 0 if counts is None else counts.total
    first = _index(query.cursor)
    looked_at_max = query.limit if query.status is None else max(query.limit, _ITEMS_LOOKED_AT_MAX)
    indexes = range(first, min(total, first + looked_at_max))
    # The store is asked for a few hundred at a time, so that a large page does not hold it up.
    rows: list[ItemRow] = []
    following = first
    while following < indexes.stop and len(rows) < query.limit:
        some = range(following, min(indexes.stop, following + _ITEMS_AT_ONCE))
        found = await call.services.store.load_items(run.id, {step_id: some})
        for following in some:
            key = ItemKey(step_id, following)
            row = item_row(run, key, found[key]) if key in found else None
            if row is not None and query.status in {None, row.status}:
                rows.append(row)
                if len(rows) == query.limit:
                    break
        following += 1
    return Reply(ItemList(tuple(rows), str(following) if following < total else None))


def _index(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not cursor.isdecimal():
        raise BadCursor(cursor)
    return int(cursor)


_ITEMS_AT_ONCE: Final = 200
"""Items that are read from the store with one call."""
_ITEMS_LOOKED_AT_MAX: Final = 1_000
"""Items that one page with a filter looks at."""


@ROUTES.add("GET /v1/approvals", APPROVERS, RouteScope.TENANT_OR_ALL, ApprovalList)
async def list_approvals(call: Call[NoBody, Paging]) -> Reply:
    """List approvals that wait for a decision, oldest first.

    A page of large ones may be short.
    """
    rows: list[ApprovalRow] = []
    cursor, size = call.query.cursor, 0
    while True:
        page = await call.services.store.list_approvals(
            call.only, cursor=cursor, limit=min(_APPROVALS_AT_ONCE, call.query.limit - len(rows))
        )
        found = [approval_row(each) for each in page.items]
        rows, cursor = rows + found, page.cursor
        size += sum(len(msgspec.json.encode(each)) for each in found)
        if cursor is None or len(rows) >= call.query.limit or size >= _APPROVALS_BYTES_MAX:
            return Reply(ApprovalList(tuple(rows), cursor))


_APPROVALS_AT_ONCE: Final = 50
"""Read from the store with one call: each may have a schema of 64 KiB."""
_APPROVALS_BYTES_MAX: Final = 1024 * 1024
"""A page ends with the approvals that reach this size."""


@ROUTES.add("GET /v1/waits", APPROVERS, RouteScope.TENANT_OR_ALL, WaitsAnswer)
async def list_waits(call: Call[NoBody, NoQuery]) -> Reply:
    """The runs that have waited longest: for a slot, a lock, a worker."""
    now = call.services.clock.now()
    waits = await call.services.explainer.longest_waits(call.only)
    return Reply(WaitsAnswer(when(now), tuple(map(wait_row, waits))))


@ROUTES.add(
    "POST /v1/runs/{run_id}/cancel",
    RUNNERS,
    RouteScope.TENANT,
    Change,
    takes=Takes.JSON_OR_NOTHING,
    statuses=(200, 202),
    codes=(Code.NOT_FOUND, Code.CONFLICT),
    audits="run.cancel",
)
async def cancel_run(call: Call[CancelRun, NoQuery]) -> Reply | Refusal:
    """Cancel a run now."""
    run = call.services.inbox.remembered(RunId(call.params["run_id"]))
    if run is None or run.tenant != call.tenant:
        run = (await own_run(call)).run
    changed = await call.services.inbox.cancel(
        run.id,
        reason=call.body.reason,
        actor=call.actor,
        audit=call.audit(
            f"run/{run.id}",
            tenant=call.tenant,
            before={"status": run.status},
            after={"status": RunStatus.CANCELLED, "reason": call.body.reason},
        ),
    )
    return _change(changed)


@ROUTES.add(
    "POST /v1/runs/{run_id}/steps/{step_id}/approve",
    APPROVERS,
    RouteScope.TENANT,
    Change,
    takes=Takes.JSON_OR_NOTHING,
    statuses=(200, 202),
    codes=(Code.NOT_FOUND, Code.CONFLICT, Code.INVALID_INPUT),
    audits="step.approve",
)
async def approve_step(call: Call[DecideStep, NoQuery]) -> Reply | Refusal:
    """Approve an approval step."""
    return await _decide(call, approve=True)


@ROUTES.add(
    "POST /v1/runs/{run_id}/steps/{step_id}/reject",
    APPROVERS,
    RouteScope.TENANT,
    Change,
    takes=Takes.JSON_OR_NOTHING,
    statuses=(200, 202),
    codes=(Code.NOT_FOUND, Code.CONFLICT, Code.INVALID_INPUT),
    audits="step.reject",
)
async def reject_step(call: Call[DecideStep, NoQuery]) -> Reply | Refusal:
    """Reject an approval step."""
    return await _decide(call, approve=False)


async def _decide(call: Call[DecideStep, NoQuery], *, approve: bool) -> Reply | Refusal:
    check_value(call, "data", call.body.data, bytes_max=INPUT_BYTES_MAX)
    loaded = await own_run(call)
    changed = await call.services.inbox.decide(
        loaded.run.id,
        StepId(call.params["step_id"]),
        approve=approve,
        comment=call.body.comment,
        data=call.body.data,
        actor=call.actor,
        audit=call.audit(
            f"run/{loaded.run.id}/step/{call.params['step_id']}",
            tenant=call.tenant,
            after=redacted(
                {"approved": approve, "comment": call.body.comment, "data": call.body.data}, "data"
            ),
        ),
    )
    match changed:
        case DecisionForbidden():
            return Refusal(code=Code.FORBIDDEN, detail=changed.rule)
        case InvalidData():
            detail = f"the approval does not accept this data: {changed.faults[0]}"
            return invalid(changed.faults, detail, code=Code.INVALID_INPUT)
        case _:
            return _change(changed)


def _change(changed: RunChange | UnknownTarget | Conflicting) -> Reply | Refusal:
    match changed:
        case RunChange():
            value = Change(changed.run_id, changed.status, changed.applied)
            return Reply(value, status=200 if changed.applied else 202)
        case UnknownTarget():
            return Refusal(code=Code.NOT_FOUND, detail=f"there is no {changed.what}")
        case Conflicting():
            return Refusal(code=Code.CONFLICT, detail=changed.message)
        case _:
            assert_never(changed)


async def own_run(call: Call[Any, Any]) -> Loaded:
    """The run that the path names. Raises ``RequestRefused`` if the tenant has no such run."""
    loaded = await call.services.store.load(RunId(call.params["run_id"]))
    if loaded is None or loaded.run.tenant != call.tenant:
        raise RequestRefused(not_found("run"))
    return loaded


def _invalid_input(answer: InvalidInput) -> Refusal:
    detail = f"the workflow does not accept this input: {answer.faults[0]}"
    return invalid(answer.faults, detail, code=Code.INVALID_INPUT)


def _invalid_workflow(answer: WorkflowFaults) -> Refusal:
    detail = f"the workflow cannot run as it is: {answer.faults[0]}"
    return invalid(answer.faults, detail, code=Code.INVALID_WORKFLOW)
