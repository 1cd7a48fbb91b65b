"""Views: core values and gate answers as wire types and refusals.

``run_view``, ``job_answer`` and what ``wire_view`` makes convert what the store returns;
``encoded_run`` encodes a large run in slices, so that the event loop is not blocked;
``refusal_of`` turns a gate answer into the refusal that is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from itertools import islice
from types import MappingProxyType, NoneType
from typing import Final, TypeVar, assert_never, cast, get_args

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from stanchion import telemetry
from stanchion.core.draft import status_inside
from stanchion.core.json_value import JsonObject, JsonValue, decoding
from stanchion.core.model import (
    Instant,
    Item,
    ItemKey,
    JobId,
    JobTrace,
    OnChildren,
    OnDecision,
    OnDelay,
    OnItems,
    OnJob,
    OnReplay,
    OnRetry,
    PendingApproval,
    Run,
    RunId,
    RunStatus,
    Step,
    StepId,
    StepStatus,
    Wait,
    WorkflowId,
    job_id,
    split_name,
)
from stanchion.core.plan import Plan
from stanchion.core.queue import QueuePlace
from stanchion.core.rerun import RerunVersion
from stanchion.core.transition import TimelineEntry
from stanchion.core.why import Blocker, Finding
from stanchion.core.workflow import ApprovalSpec, StepSpec, Workflow
from stanchion.gateway.problems import (
    GATE_UNAVAILABLE,
    LIMIT_CHECK_FAILED,
    TENANT_FULL,
    BudgetFacts,
    Headers,
    Refusal,
    invalid_member,
)
from stanchion.gateway.route import Reply
from stanchion.ports.records import DeadLetter, JobState, JobView, LeasedJob, RunFilter, RunSummary
from stanchion.services.gate_answers import (
    GateCode,
    GateFailed,
    GateFull,
    GateOverBudget,
    JobThrottled,
    KeyMismatch,
    QueueOff,
    RunStarted,
)
from stanchion.services.keys import ApiKeyRecord
from stanchion.services.reruns import RerunPreview
from stanchion.services.why import Explanation, LongestWait
from stanchion.wire.admin import DeadLetterRow, KeyRow
from stanchion.wire.problems import Code
from stanchion.wire.runs import (
    ApprovalRow,
    FeedLine,
    ItemRow,
    JobAnswer,
    RerunPlan,
    RerunStepPlan,
    RunRow,
    RunSelection,
    RunView,
    StepView,
    TimelineLine,
    UsedWorkflow,
    WaitingFor,
    WaitRow,
    WhyAnswer,
    WhyBlocker,
    WhyFinding,
)
from stanchion.wire.worker import LeasedJob as LeasedJobView

_Value = TypeVar("_Value")
_Wire = TypeVar("_Wire")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def when(instant: Instant) -> datetime:
    """The instant as a UTC time, exact to the millisecond."""
    # In whole seconds and microseconds: from milliseconds it takes nearly twice as long.
    return _EPOCH + timedelta(0, instant // 1_000, instant % 1_000 * 1_000)


def to_instant(time: datetime) -> Instant:
    """The instant of a time with a time zone, rounded down to the millisecond."""
    return Instant((time - _EPOCH) // timedelta(milliseconds=1))


LAST_INSTANT: Final = to_instant(datetime.max.replace(tzinfo=UTC))
"""The last time that an answer can show: with an offset, a time of the year 9999 may be later."""


def when_if(instant: Instant | None) -> datetime | None:
    """The instant as a UTC time, if there is one."""
    return None if instant is None else when(instant)


def wire_view(
    source: type[_Value],
    target: Callable[..., _Wire],
    *given: str,
    **made: str | Callable[[_Value], object],
) -> Callable[..., _Wire]:
    """A function that converts a value to a wire type.

    Members of the same name are copied, and instants become times. ``made`` says what another
    member is: the path of an attribute, or a function of the value. Those that are ``given`` are
    arguments of the conversion. A member that comes from nowhere is an error here, when the module
    is imported.
    """
    arguments = []
    for field in msgspec.structs.fields(cast("type[msgspec.Struct]", target)):
        make = made.get(field.name, field.name)
        if field.name in given:
            arguments.append(f"{field.name}={field.name}")
        elif isinstance(make, str):
            getattr(source, make.partition(".")[0])
            kinds = {field.type, *get_args(field.type)}
            convert = "" if datetime not in kinds else "when_if" if NoneType in kinds else "when"
            arguments.append(f"{field.name}={convert}(value.{make})")
        else:
            arguments.append(f"{field.name}=made[{field.name!r}](value)")
    # Compiled, as dataclasses are: a loop over the members takes three times as long.
    text = f"lambda {', '.join(('value', *given))}: target({', '.join(arguments)})"
    names = {"target": target, "made": made, "when": when, "when_if": when_if}
    return cast("Callable[..., _Wire]", eval(text, names))  # noqa: S307 - the text is our own


approval_row = wire_view(PendingApproval, ApprovalRow, labels=lambda asked: asked.labels or {})
dead_letter_row = wire_view(
    DeadLetter,
    DeadLetterRow,
    job_id=lambda letter: None if letter.job is None else letter.job.id,
    topic=lambda letter: None if letter.job is None else letter.job.topic,
    event=lambda letter: None if letter.event is None else msgspec.to_builtins(letter.event),
)
feed_line = wire_view(TimelineEntry, FeedLine, "run_id")
key_row = wire_view(ApiKeyRecord, KeyRow, "id")
run_row = wire_view(RunSummary, RunRow, run_id="id")
timeline_line = wire_view(TimelineEntry, TimelineLine)
_blocker = wire_view(Blocker, WhyBlocker)
_finding = wire_view(
    Finding,
    WhyFinding,
    blocked_by=lambda found: None if found.blocked_by is None else _blocker(found.blocked_by),
)
why_answer = wire_view(
    Explanation, WhyAnswer, findings=lambda found: tuple(map(_finding, found.findings))
)
wait_row = wire_view(
    LongestWait,
    WaitRow,
    step_id="finding.step_id",
    until="finding.until",
    code="finding.code",
    detail="finding.detail",
    remedy="finding.remedy",
)


def jobs_out(run: Run) -> tuple[JobId, ...]:
    """The jobs that the run's steps wait for, except those of for-each items."""
    return tuple(step.wait.job_id for step in run.steps.values() if isinstance(step.wait, OnJob))


def run_view(
    run: Run,
    plan: Plan | None,
    progress: Mapping[JobId, JsonValue] = MappingProxyType({}),
    *,
    place: QueuePlace | None = None,
) -> RunView:
    """A whole run. With its plan, steps that have not begun are shown too.

    ``progress``: what workers have reported for the jobs of ``jobs_out``. ``place``: in the
    queue, while it waits for a slot.
    """
    steps = dict(run.steps) if plan is None else {each: run.step(each) for each in plan.steps}
    return RunView(
        run_id=run.id,
        workflow_id=run.workflow_id,
        workflow_version=run.workflow_version,
        workflow_source=run.workflow_source,
        uses=tuple(_used(name, run.uses[name]) for name in run.uses),
        tenant=run.tenant,
        status=run.status,
        risk=run.risk,
        input=run.input,
        output=run.output,
        error=run.error,
        steps={
            step_id: _step_view(step, _question(plan, step_id, step), progress)
            for step_id, step in steps.items()
        },
        created_at=when(run.created_at),
        finished_at=when_if(run.finished_at),
        rerun_of=run.rerun_of,
        starter=run.starter,
        labels=run.labels,
        position=None if place is None else place.position,
        priority=None if place is None else place.priority,
        fairness_key=None if place is None else place.fairness_key,
    )


def has_small_outputs(run: Run, plan: Plan | None) -> bool:
    """Whether the outputs of a run are surely small, so that it can be encoded in one go.

    Without an output template the run's output consists of outputs of its steps.
    """
    outputs_bytes = 0
    for step in run.steps.values():
        if step.output is not None and not step.output_bytes:
            return False  # of an older version, which did not record the size
        outputs_bytes += step.output_bytes
    has_template = plan is None or plan.body.output is not None
    return outputs_bytes <= _SMALL_BYTES and (run.output is None or not has_template)


async def encoded_run(view: RunView, *, is_small: bool = False) -> bytes:
    """The view as JSON. A large one is encoded in slices, with a pause for the event loop between.

    Encoding millions of small values in one go would block the loop for tens of milliseconds.
    """
    if is_small:
        return _encode(view)
    slices = _Slices()
    steps: dict[str, msgspec.Raw] = {}
    for step_id, step in view.steps.items():
        await slices.pause()
        if step.items_total is None:
            steps[step_id] = msgspec.Raw(slices.counted(_encode(step)))
        else:
            output = msgspec.Raw(await slices.encoded(step.output))
            steps[step_id] = msgspec.Raw(_encode(replace(step, output=output)))
    output = msgspec.Raw(await slices.encoded(view.output))
    return _encode(replace(view, steps=steps, output=output))


async def decoded_run(text: bytes) -> RunView:
    """The view that was encoded, with the same pauses: the console shows a run of 8 MB too."""
    if len(text) <= _SLICE_BYTES:
        return _RUN.decode(text)
    parts, slices = _RAW_MEMBERS.decode(text), _Slices()
    steps: dict[str, StepView] = {}
    for step_id, step in _RAW_MEMBERS.decode(parts["steps"]).items():
        await slices.pause()
        if len(bytes(step)) <= _SLICE_BYTES:
            steps[step_id] = _STEP.decode(slices.counted(bytes(step)))
        else:
            members = _RAW_MEMBERS.decode(step)
            output = await slices.decoded(bytes(members["output"]))
            rest = _encode(members | {"output": _NULL})
            steps[step_id] = replace(_STEP.decode(rest), output=output)
    output = await slices.decoded(bytes(parts["output"]))
    rest = _encode(parts | {"steps": msgspec.Raw(b"{}"), "output": _NULL})
    return replace(_RUN.decode(rest), steps=steps, output=output)


_RUN: Final = msgspec.json.Decoder(RunView)
_STEP: Final = msgspec.json.Decoder(StepView)
_NULL: Final = msgspec.Raw(b"null")
_RAW_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SLICES: Final = 64
"""The number of pieces in which a list or an object is encoded; smaller ones member by member."""
_DEPTH: Final = 3
"""How deep members are encoded one by one: in a run's output a step, its items, their members."""


class _Slices:
    """Encodes values member by member, and yields to the event loop after every 256 KiB."""

    def __init__(self) -> None:
        self._bytes = 0

    async def pause(self) -> None:
        """Yield to the event loop, if enough was encoded since the last time."""
        if self._bytes >= _SLICE_BYTES:
            self._bytes = 0
            await asyncio.sleep(0)

    def counted(self, encoded: bytes) -> bytes:
        self._bytes += len(encoded)
        return encoded

    async def decoded(self, text: bytes) -> JsonValue:
        """Decode a value, a large one in pieces."""
        pieces = decoding(text)
        while True:
            await self.pause()
            try:
                self._bytes += next(pieces)
            except StopIteration as end:
                value: JsonValue = end.value
                return value

    async def encoded(self, value: JsonValue, depth: int = _DEPTH) -> bytes:
        """Encode a value that may have many or large members, at this depth or in one of them."""
        await self.pause()
        pieces: list[bytes] = []
        if not isinstance(value, list | dict) or depth == 0:
            return self.counted(_encode(value))
        if len(value) > _SLICES:
            for some in _parts(value):
                await self.pause()
                pieces.append(self.counted(_encode(some))[1:-1])
        elif isinstance(value, list):
            pieces = [await self.encoded(each, depth - 1) for each in value]
        else:
            for name, each in value.items():
                pieces.append(_encode(name) + b":" + await self.encoded(each, depth - 1))
        begin_with, end_with = (b"[", b"]") if isinstance(value, list) else (b"{", b"}")
        return b"".join((begin_with, b",".join(pieces), end_with))


def _parts(value: list[JsonValue] | dict[str, JsonValue]) -> Iterator[JsonValue]:
    """A list or an object in parts of the same kind."""
    at_once = -(-len(value) // _SLICES)
    if isinstance(value, list):
        for begin in range(0, len(value), at_once):
            yield value[begin : begin + at_once]
    else:
        members = iter(value.items())
        while some := dict(islice(members, at_once)):
            yield some


_SMALL_BYTES: Final = 64 * 1024
_SLICE_BYTES: Final = 256 * 1024
_encode: Final = msgspec.json.Encoder().encode


def _question(plan: Plan | None, step_id: StepId, step: Step) -> str | None:
    """The message of an approval: as rendered, or from the workflow if it has no expression."""
    if isinstance(step.wait, OnDecision):
        return step.wait.message
    planned = None if plan is None else plan.steps.get(step_id)
    if step.question or planned is None or not isinstance(planned.spec, ApprovalSpec):
        return step.question
    message = planned.spec.message
    return None if message is None or "${" in message else message


def _step_view(step: Step, question: str | None, progress: Mapping[JobId, JsonValue]) -> StepView:
    items = step.items
    return StepView(
        status=step.status,
        attempt=step.attempt,
        output=step.output,
        error=step.error,
        started_at=when_if(step.started_at),
        finished_at=when_if(step.finished_at),
        items_total=None if items is None else items.total,
        items_succeeded=None if items is None else items.succeeded,
        items_failed=None if items is None else items.failed,
        failures=None if items is None or not step.status.is_finished else step.failures,
        waiting_for=None if step.wait is None else _waiting_for(step.wait),
        question=question,
        decide_by=when_if(step.wait.due) if isinstance(step.wait, OnDecision) else None,
        progress=progress.get(step.wait.job_id) if isinstance(step.wait, OnJob) else None,
    )


def _waiting_for(wait: Wait) -> WaitingFor:
    match wait:
        case OnJob():
            return "job"
        case OnRetry():
            return "retry"
        case OnReplay():
            return "replay"
        case OnDecision():
            return "decision"
        case OnDelay():
            return "delay"
        case OnItems():
            return "items"
        case OnChildren():
            return "children"
        case _:
            assert_never(wait)


def rerun_plan(answer: RerunPreview, version: RerunVersion) -> RerunPlan:
    """What a rerun would do."""
    return RerunPlan(
        rerun_of=answer.old.id,
        workflow_id=answer.old.workflow_id,
        workflow_version=answer.new.workflow_version,
        workflow_source=answer.new.workflow_source,
        version=version,
        steps={
            step_id: RerunStepPlan(each.action, each.items_reused, each.items_run_again)
            for step_id, each in answer.steps.items()
        },
    )


def filter_of(wanted: RunSelection) -> RunFilter:
    """The filter that a request names."""
    return RunFilter(
        statuses=wanted.status,
        workflow_id=None if wanted.workflow_id is UNSET else WorkflowId(wanted.workflow_id),
        labels=wanted.label,
        since=None if wanted.since is UNSET else to_instant(wanted.since),
        until=None if wanted.until is UNSET else to_instant(wanted.until),
        rerun_of=None if wanted.rerun_of is UNSET else RunId(wanted.rerun_of),
    )


def _used(name: WorkflowId, version: int) -> UsedWorkflow:
    source, workflow_id = split_name(name)
    return UsedWorkflow(id=workflow_id, version=version, source=source)


def item_row(run: Run, key: ItemKey, item: Item) -> ItemRow:
    """One item of a for-each step. Items of a step that ended early are shown as ended with it."""
    around = run.step(key.step_id).status
    status = item.status
    if around.is_finished and not status.is_finished:
        status = status_inside(around, status)
    # An item that a rerun keeps has no job in this run.
    job = _inner_job(run, key.item, item)
    if item.dispatch:
        job = job_id(run.id, key.step_id, key.item, item.attempt)
    return ItemRow(
        index=key.item,
        status=status,
        attempt=item.attempt,
        output=item.output,
        error=item.error,
        job_id=job,
    )


def _inner_job(run: Run, index: int, item: Item) -> JobId | None:
    """Of an item with a workflow: the job that it waits for, or else the one that ended last.

    Of several that ended in the same millisecond, the last in the order of the workflow.
    """
    jobs = [(step_id, step) for step_id, step in item.steps.items() if step.dispatch]
    if not jobs:
        return None
    step_id, step = max(
        reversed(jobs), key=lambda each: (isinstance(each[1].wait, OnJob), each[1].finished_at or 0)
    )
    return job_id(run.id, step_id, index, step.attempt)


def job_answer(view: JobView, run: Run, place: Step | Item, *, now: Instant) -> JobAnswer:
    """A job with its result, if the run has applied it. ``now`` is the store's time."""
    job, ends_at = view.job, view.expires_at
    is_done = view.state is JobState.FINISHED and place.attempt == job.attempt
    return JobAnswer(
        job_id=job.id,
        run_id=job.run_id,
        step_id=job.step_id,
        topic=job.topic,
        status=view.state.value,
        run_status=run.status,
        attempt=job.attempt,
        deliveries=view.deliveries,
        output=place.output if is_done and place.status is StepStatus.SUCCEEDED else None,
        error=place.error if is_done else None,
        worker_id=view.worker_id,
        lease_ends_in_ms=None if ends_at is None else max(0, ends_at - now),
        progress=view.progress,
    )


def leased_job(leased: LeasedJob, ttl_ms: int) -> LeasedJobView:
    """A leased job as a worker gets it."""
    job = leased.job
    return LeasedJobView(
        job_id=job.id,
        tenant=job.tenant,
        run_id=job.run_id,
        step_id=job.step_id,
        topic=job.topic,
        attempt=job.attempt,
        input=job.input,
        fence=leased.fence,
        lease_ttl_ms=ttl_ms,
        item=job.item,
        delivery=leased.deliveries,
        traceparent=UNSET if job.trace is None else _traced(leased, job.trace),
    )


def _traced(leased: LeasedJob, trace: JobTrace) -> str:
    """Make the spans of a delivery, if traces are on; return the context for the handler."""
    job = leased.job
    if telemetry.tracing is None or not telemetry.is_sampled(trace.parent):
        return telemetry.context_of_run(job.run_id, trace.parent)
    attributes: dict[str, str | int | None] = {
        telemetry.TENANT: job.tenant,
        telemetry.RUN: job.run_id,
        telemetry.STEP: job.step_id,
        telemetry.ITEM: job.item,
        telemetry.JOB: job.id,
        telemetry.TOPIC: job.topic,
        telemetry.ATTEMPT: job.attempt,
        telemetry.DELIVERY: leased.deliveries,
        telemetry.FENCE: leased.fence,
    }
    return telemetry.tracing.delivered(
        job.run_id,
        trace.parent,
        attributes,
        dispatch=job.dispatch,
        dispatched_ms=trace.dispatched_at,
    )


def definition(workflow: Workflow) -> JsonObject:
    """A workflow in the form of its file: the result can be stored again."""
    shown = _with_whole_seconds(msgspec.to_builtins(workflow))
    shown["steps"] = {step_id: _step_of_file(spec) for step_id, spec in workflow.steps.items()}
    return _ordered(shown, _WORKFLOW_ORDER)


_WORKFLOW_ORDER: Final = (
    *("id", "risk", "lock_policy", "timeout_s", "max_deliveries", "budget", "input_schema"),
    *("steps", "output"),
)
_STEP_ORDER: Final = (
    *("topic", "workflow", "approval", "delay_s", "needs", "when", "for_each", "input"),
    *("parallel", "on_item_failure", "retry", "timeout_s", "attempt_timeout_s", "on_failure"),
)
"""Members as the reference writes them: people read a file from its head and a step's kind."""


def _ordered(document: JsonObject, names: Sequence[str]) -> JsonObject:
    return {name: document[name] for name in names if name in document} | document


_APPROVAL_MEMBERS: Final = {
    "message": "message",
    "timeout_s": "decision_timeout_s",
    "on_timeout": "on_timeout",
    "not_by_starter": "not_by_starter",
    "data_schema": "data_schema",
}
"""Members of an approval in a file, and where the spec has them."""


def _step_of_file(spec: StepSpec) -> JsonObject:
    shown = _with_whole_seconds(msgspec.to_builtins(spec))
    del shown["kind"]
    if isinstance(spec, ApprovalSpec):
        members = {file: spec for file, spec in _APPROVAL_MEMBERS.items() if spec in shown}
        shown["approval"] = {file: shown.pop(spec) for file, spec in members.items()}
    return _ordered(shown, _STEP_ORDER)


def _with_whole_seconds(document: JsonObject) -> JsonObject:
    """With ``5`` where a file says ``5``: times are floats once they are read.

    An input or output stays as it was sent: ``1e22`` has no integer of 64 bits.
    """
    return {
        name: int(value)
        if name.endswith("_s") and isinstance(value, float) and value.is_integer()
        else value
        for name, value in document.items()
    }


REPLAYED: Final[Headers] = ((b"idempotency-replayed", b"true"),)

_FAILED: Final[Mapping[GateCode, tuple[Code, str]]] = {
    GateCode.GATE_UNAVAILABLE: (Code.GATE_UNAVAILABLE, GATE_UNAVAILABLE),
    GateCode.GATE_BUSY: (Code.GATE_BUSY, GATE_UNAVAILABLE),
    GateCode.LIMIT_CHECK_FAILED: (Code.LIMIT_CHECK_FAILED, LIMIT_CHECK_FAILED),
}


def started(answer: RunStarted, value: object) -> Reply:
    """The answer to a start; a header says whether it is a replay."""
    status = HTTPStatus.ACCEPTED if answer.status is RunStatus.QUEUED else HTTPStatus.OK
    return Reply(value, status=status, headers=REPLAYED if answer.replayed else ())


def refusal_of(
    answer: GateFull | QueueOff | GateOverBudget | KeyMismatch | JobThrottled | GateFailed,
) -> Refusal:
    """The refusal for an answer of the gate that is not a run."""
    match answer:
        case GateFull(queue_max=int(queue_max)):
            return Refusal(
                code=Code.QUEUE_FULL,
                detail="max concurrent runs reached, and "
                + ("1 run waits already" if queue_max == 1 else f"{queue_max} runs wait already"),
                retry_after_ms=answer.retry_after_ms,
                limit=answer.limit,
                active=answer.active,
            )
        case QueueOff():
            wrong = "'queue' needs a tenant whose configuration says so; this one rejects"
            return invalid_member("on_full", wrong)
        case GateFull():
            return Refusal(
                code=Code.MAX_CONCURRENT_RUNS_REACHED,
                detail=TENANT_FULL,
                retry_after_ms=answer.retry_after_ms,
                limit=answer.limit,
                active=answer.active,
            )
        case GateOverBudget(over=over):
            left = over.limit - over.used - over.reserved
            return Refusal(
                code=Code.BUDGET_EXHAUSTED,
                detail=f"the run would reserve {over.asked} of the budget '{over.budget}', and"
                f" {max(0, left)} of {over.limit} are left",
                retry_after_ms=answer.retry_after_ms,
                is_final=not answer.can_wait,
                limit=over.limit,
                budget=BudgetFacts(over.budget, over.used, over.reserved, when_if(over.resets_at)),
            )
        case KeyMismatch():
            return Refusal(
                code=Code.IDEMPOTENCY_MISMATCH,
                detail="this Idempotency-Key was used for another request",
            )
        case JobThrottled():
            return Refusal(
                code=Code.JOB_THROTTLED,
                detail="job rate limit reached",
                retry_after_ms=answer.retry_after_ms,
            )
        case GateFailed():
            code, detail = _FAILED[answer.code]
            return Refusal(code=code, detail=detail, retry_after_ms=answer.retry_after_ms)
        case _:
            assert_never(answer)
