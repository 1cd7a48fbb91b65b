"""Start routes: one run, a batch, a rerun."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from types import MappingProxyType
from typing import Annotated, Final, assert_never

import msgspec
from msgspec import to_builtins

from stanchion.core.audit import redacted
from stanchion.core.faults import BATCH_FAULTS_MAX, Fault, WorkflowFaults
from stanchion.core.limits import INPUT_BYTES_MAX
from stanchion.core.model import RunId, StepId, WorkflowId
from stanchion.core.queue import ANY_PLACE, PRIORITY_DEFAULT, QueueRequest
from stanchion.core.rerun import RerunOptions, RerunRefused
from stanchion.gateway.body import are_suspect, check_value, checked_labels, decoded
from stanchion.gateway.endpoint import note_refusal
from stanchion.gateway.problems import (
    Refusal,
    RequestRefused,
    invalid,
    invalid_member,
    not_found,
    problem_of,
)
from stanchion.gateway.route import RUNNERS, Call, NoQuery, Reply, RouteScope, RouteTable, Takes
from stanchion.gateway.views import refusal_of, rerun_plan, started
from stanchion.ports.errors import BackendError
from stanchion.services.batch import StartRow
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
from stanchion.services.plans import UnknownWorkflow
from stanchion.services.reruns import RerunPreview
from stanchion.wire.problems import Code
from stanchion.wire.runs import (
    BATCH_SIZE,
    BatchAnswer,
    BatchResult,
    BatchRow,
    QueuedAnswer,
    QueuedResult,
    RerunPlan,
    RerunRun,
    StartAnswer,
    StartBatch,
    StartRun,
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
        is_short=call.body_bytes <= _SHORT_ROW_BYTES,
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

    runs: Annotated[tuple[msgspec.Raw, ...], BATCH_SIZE]


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
    async with call.services.gate.batches.turns.turn(call.tenant):
        return await _started_batch(call)


async def _started_batch(call: Call[RawBatch, NoQuery]) -> Reply | Refusal:
    refusals: dict[int, Refusal] = {}
    rows: dict[int, StartRow] = {}
    wall_s = call.state.work.stopwatch.wall_s
    begun_s = wall_s()
    texts = [*map(bytes, call.body.runs)]
    at_once = max(1, _ROWS_BYTES // max(map(len, texts), default=1))
    for first in range(0, len(texts), at_once):
        if wall_s() - begun_s > _PIECE_S:
            await asyncio.sleep(0)
            begun_s = wall_s()
        some = texts[first : first + at_once]
        plain = _plain_rows(some) if at_once > 1 else None
        if plain is not None:
            rows |= enumerate(plain, first)
            continue
        for index, text in enumerate(some, first):
            try:
                row = _checked_row(call, text)
            except RequestRefused as refused:
                if refused.refusal.code is Code.MALFORMED_JSON:
                    raise
                refusals[index] = refused.refusal
                continue
            key = _batch_key(call, index, row)
            if key is None:
                refusals[index] = _KEYLESS
            else:
                rows[index] = StartRow(row.input, row.labels, key, _queue_request(row))
    workflow_id = WorkflowId(call.params["workflow_id"])
    answers = await call.services.gate.batches.start_many(
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
    answered = dict(zip(rows, answers, strict=True))
    return Reply(BatchAnswer(await _batch_results(call, rows, answered, refusals)))


async def _batch_results(
    call: Call[RawBatch, NoQuery],
    rows: Mapping[int, StartRow],
    answered: Mapping[int, RunStarted | NotStarted],
    refusals: Mapping[int, Refusal],
) -> tuple[BatchResult, ...]:
    """The results of all rows, in pieces: a thousand problems take 20 ms to render."""
    begun = [each for each in answered.values() if isinstance(each, RunStarted)]
    if len(begun) == len(call.body.runs):
        return tuple(map(_batch_result, begun))
    room = BATCH_FAULTS_MAX

    def result(index: int) -> BatchResult:
        nonlocal room
        answer = answered.get(index)
        if isinstance(answer, RunStarted):
            return _batch_result(answer)
        if answer is None:
            return _batch_problem(call, refusals[index])
        refusal = _not_started(_with_faults(answer, room))
        room -= len(refusal.errors)
        note_refusal(
            call.services,
            refusal,
            tenant=call.tenant,
            workflow_id=call.params["workflow_id"],
            key=rows[index].key,
            request_id=call.request_id,
            actor=call.actor,
        )
        return _batch_problem(call, refusal)

    indexes = range(len(call.body.runs))
    return tuple(await call.state.work.done_each(call.tenant, result, indexes))


def _with_faults(answer: NotStarted, room: int) -> NotStarted:
    """The answer with so many faults at most: each row may have a hundred long ones."""
    if not isinstance(answer, InvalidInput | WorkflowFaults):
        return answer
    left_out = len(answer.faults) - max(1, room)
    if left_out > 0:
        note = Fault("", f"more faults are left out: {left_out}")
    elif room <= 0:
        note = Fault("", "only the first fault is listed: the batch has too many")
    else:
        return answer
    return msgspec.structs.replace(answer, faults=(*answer.faults[: max(1, room)], note))


def _plain_rows(texts: Sequence[bytes]) -> list[StartRow] | None:
    """Rows with an input and a key and nothing else; ``None`` unless all are such rows.

    To decode and check them together takes half the time.
    """
    text = b"[%b]" % b",".join(texts)
    try:
        rows = _BATCH_ROWS.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # decoded one by one, to explain the fault
    # Each has a colon for each of its members, so that the sum shows whether one has more. If not,
    # no member is given twice, and none but these two. See ``_batch_row``.
    if not all(row.input and row.key for row in rows):
        return None
    members = sum(_INPUT_AND_KEY + len(row.input) for row in rows)
    if text.count(b":") != members or are_suspect(texts, text):
        return None
    return [StartRow(row.input, _NO_LABELS, row.key) for row in rows if row.key]


def _checked_row(call: Call[RawBatch, NoQuery], text: bytes) -> BatchRow:
    """A row of a batch, with its input and labels checked. Raises ``RequestRefused``."""
    row = _batch_row(text)
    check_value(call, "input", row.input, bytes_max=INPUT_BYTES_MAX, part=text)
    checked_labels(row.labels)
    return row


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
_INPUT_AND_KEY: Final = 2
_ROWS_BYTES: Final = 4 * 1024
"""Rows are decoded together up to this size: a few milliseconds, whatever they contain."""
_NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})


def _batch_key(call: Call[RawBatch, NoQuery], index: int, row: BatchRow) -> str | None:
    """A row's idempotency key, if it or the request has one.

    Raises ``RequestRefused`` if that of the request is too long: it is not the fault of a row.
    """
    if row.key is not None or call.idempotency_key is None:
        return row.key
    key = f"{call.idempotency_key}/{index}"
    if len(key) > _KEY_CHARS_MAX:
        wrong = f"with the row's index it has {len(key)} characters; at most {_KEY_CHARS_MAX}"
        raise RequestRefused(invalid_member("Idempotency-Key", wrong))
    return key


_KEYLESS: Final = invalid_member(
    "key", "missing; give it, or send an Idempotency-Key for all rows without one"
)
_PIECE_S: Final = 0.001
"""Work on the rows of a batch for this long, then let other requests have the event loop."""
_KEY_CHARS_MAX: Final = 255
_BATCH_ROW: Final = msgspec.json.Decoder(BatchRow)
_BATCH_ROWS: Final = msgspec.json.Decoder(list[BatchRow])


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
    # It reads the results of the old run, of 10,000 items perhaps.
    is_heavy=lambda call: call.body.only is not None or call.body.from_step is not None,
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
    reruns = call.services.gate.reruns
    known: list[WorkflowId] = []
    answer = (
        await reruns.preview_rerun(call.tenant, run_id, options)
        if body.dry_run
        else await reruns.rerun(
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


def _invalid_input(answer: InvalidInput) -> Refusal:
    detail = f"the workflow does not accept this input: {answer.faults[0]}"
    return invalid(answer.faults, detail, code=Code.INVALID_INPUT)


def _invalid_workflow(answer: WorkflowFaults) -> Refusal:
    detail = f"the workflow cannot run as it is: {answer.faults[0]}"
    return invalid(answer.faults, detail, code=Code.INVALID_WORKFLOW)
