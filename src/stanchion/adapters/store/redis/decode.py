"""Decode the data in Redis: runs, jobs, events, dead letters and definitions.

Data that the scripts compare is flat: fields of hashes, and MessagePack lists of numbers and
strings. Everything else is JSON, which the scripts pass on as text and never parse. ``encode`` and
the scripts write it. Data that cannot be decoded raises ``BackendCorrupt``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

import msgspec
from msgspec.structs import asdict, replace

from stanchion.adapters.outcomes import (
    audit_of_config,
    audit_of_drift,
    audit_of_version,
    by_place,
    dead_work,
    why_lost,
)
from stanchion.core.audit import AuditEntry
from stanchion.core.budget import BudgetStanding, BudgetTally, standing_of
from stanchion.core.events import AttemptFailed, AttemptSucceeded, Event, TimerFired
from stanchion.core.json_value import JsonValue, decode_value
from stanchion.core.model import (
    Failure,
    Instant,
    Item,
    Job,
    JobId,
    JobTrace,
    PendingApproval,
    Risk,
    Run,
    RunId,
    RunStatus,
    Stamp,
    Step,
    StepId,
    TenantId,
    Topic,
    WorkflowId,
    WorkflowSource,
)
from stanchion.core.queue import PRIORITY_MAX, QueuePlace
from stanchion.core.receipts import Receipt
from stanchion.core.transition import TimelineEntry
from stanchion.core.why import OpenJob, OpenJobState, PendingTimer, RunFacts, decided_steps
from stanchion.core.workflow import Workflow
from stanchion.ports.errors import BackendCorrupt
from stanchion.ports.records import (
    DeadLetter,
    Document,
    Drift,
    InboxEntry,
    JobState,
    JobView,
    Loaded,
    LostReason,
    RunSummary,
    StoredWorkflow,
    Tenant,
)

_P = ParamSpec("_P")
_T = TypeVar("_T")


def checked(read: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make a decoder raise ``BackendCorrupt`` for every error of decoding."""

    @wraps(read)
    def reading(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return read(*args, **kwargs)
        except (msgspec.MsgspecError, ValueError, KeyError, IndexError, TypeError) as error:
            raise BackendCorrupt(f"stored data cannot be decoded: {error}") from error

    return reading


# ── Runs ─────────────────────────────────────────────────────────────────────────────────────────

_TIME_CHARS: Final = 16
"""The time of creation, with which the position of a run begins."""
SUMMARY_FIELDS: Final = ("about", "status", "end", "whose")
"""The fields of a run's hash that lists need."""


class RunHeader(msgspec.Struct, frozen=True, array_like=True):
    """The constant fields of a run in a list."""

    workflow_id: WorkflowId
    workflow_version: int
    created_at: Instant
    risk: Risk = Risk.STANDARD
    labels: dict[str, str] = {}
    rerun_of: RunId | None = None


class RunEnd(msgspec.Struct, frozen=True, array_like=True):
    """The end of a run."""

    finished_at: Instant | None = None
    error: Failure | None = None


# ``float`` reads ``1e300`` in 0.3 µs, the decoder itself in 15: a value may hold 40,000 of them.
_run_decoder = msgspec.json.Decoder(Run, float_hook=float)
_step_decoder = msgspec.json.Decoder(Step, float_hook=float)
_item_decoder = msgspec.json.Decoder(Item, float_hook=float)
_json_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(float_hook=float)
_end_decoder = msgspec.json.Decoder(RunEnd)
_about_decoder = msgspec.json.Decoder(RunHeader)


@checked
def read_loaded(fields: Sequence[bytes], entries: Sequence[bytes]) -> Loaded | None:
    """Decode the reply of ``load.lua``."""
    if not fields:
        return None
    found = dict(zip(fields[::2], fields[1::2], strict=True))
    version, fence, nonce = found[b"stamp"].decode().split(" ", 2)
    end = _read_end(found.get(b"end"))
    run = replace(
        _run_decoder.decode(found[b"base"]),
        status=RunStatus(found[b"status"].decode()),
        output=decode_value(found[b"output"]) if b"output" in found else None,
        error=end.error,
        finished_at=end.finished_at,
        steps={
            StepId(name[2:].decode()): _step_decoder.decode(value)
            for name, value in found.items()
            if name.startswith(b"s:")
        },
        stamp=Stamp(int(version), nonce),
        fence=int(fence),
    )
    inbox = sorted(
        (*read_number_and_event(packed), entry_id.decode())
        for entry_id, packed in zip(entries[::2], entries[1::2], strict=True)
    )
    return Loaded(run, tuple(InboxEntry(entry_id, event) for _, event, entry_id in inbox))


@checked
def read_stamp(text: bytes) -> Stamp:
    """Decode the ``stamp`` field of a run, without the fence."""
    version, _, nonce = text.decode().split(" ", 2)
    return Stamp(int(version), nonce)


@checked
def read_summary(run_id: RunId, values: Sequence[bytes | None]) -> RunSummary | None:
    """Decode a run in a list, from ``SUMMARY_FIELDS``; ``None`` if it is gone."""
    packed_about, status, packed_end, whose = values
    if packed_about is None or status is None or whose is None:
        return None
    about, end = _about_decoder.decode(packed_about), _read_end(packed_end)
    return RunSummary(
        id=run_id,
        tenant=TenantId(whose.decode()[_TIME_CHARS + len(run_id) :]),
        workflow_id=about.workflow_id,
        workflow_version=about.workflow_version,
        status=RunStatus(status.decode()),
        created_at=about.created_at,
        finished_at=end.finished_at,
        error=end.error,
        risk=about.risk,
        labels=about.labels,
        rerun_of=about.rerun_of,
    )


read_base = checked(_run_decoder.decode)
"""Decode the constant part of a run."""


def _read_end(packed: bytes | None) -> RunEnd:
    return RunEnd() if packed is None else _end_decoder.decode(packed)


read_item = checked(_item_decoder.decode)
"""Decode an item of a for-each step."""


# ── Events ───────────────────────────────────────────────────────────────────────────────────────


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """An inbox entry, in the form that the scripts write."""

    number: int
    failures: int
    step: StepId | bool
    item: int | bool
    event: str


_entry_decoder = msgspec.msgpack.Decoder(_Entry)
_event_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event, float_hook=float)
_line_decoder = msgspec.json.Decoder(TimelineEntry)
_lines_decoder = msgspec.json.Decoder(tuple[TimelineEntry, ...])


@checked
def read_number_and_event(packed: bytes) -> tuple[int, Event]:
    """Decode an inbox entry: its position in the order of arrival, and its event."""
    entry = _entry_decoder.decode(packed)
    event = _event_decoder.decode(entry.event)
    if isinstance(event, AttemptSucceeded | AttemptFailed) and isinstance(entry.step, str):
        item = None if isinstance(entry.item, bool) else entry.item
        event = replace(event, step_id=entry.step, item=item)
    return entry.number, event


read_timeline_entry = checked(_line_decoder.decode)
"""Decode one entry of a timeline."""


read_lines = checked(_lines_decoder.decode)
"""Decode the timeline entries of one feed entry."""


@checked
def read_opening(text: bytes) -> tuple[TimelineEntry, ...]:
    """Decode the timeline entries in the hash of a run. Their number comes first."""
    return _lines_decoder.decode(text.partition(b" ")[2])


# ── Jobs and dead letters ────────────────────────────────────────────────────────────────────────


class _Open(msgspec.Struct, frozen=True, array_like=True):
    """The state of an open job, in the form that ``part_jobs.lua`` writes."""

    state: JobState
    deliveries: int
    fence: int
    number: int
    expires: int
    worker: str
    topic: str = ""
    step: str = ""
    item: int | bool = False
    progress: str = ""
    """JSON; empty if there is none."""


class _Retired(msgspec.Struct, frozen=True, array_like=True):
    """A job that is no longer open, in the form that ``part_retired.lua`` writes."""

    state: JobState
    deliveries: int
    fence: int
    worker: str
    work: str


class _Letter(msgspec.Struct, frozen=True, array_like=True):
    """A dead letter, in the form that ``part_letters.lua`` writes."""

    place: str
    at: Instant
    letter: str


_open_decoder = msgspec.msgpack.Decoder(_Open)
_retired_decoder = msgspec.msgpack.Decoder(_Retired)
_letter_frame_decoder = msgspec.msgpack.Decoder(_Letter)
_job_decoder = msgspec.json.Decoder(Job, float_hook=float)
_letter_decoder = msgspec.json.Decoder(DeadLetter, float_hook=float)


read_job = checked(_job_decoder.decode)
"""Decode a job as it is sent to a worker."""


@checked
def read_progress(said: bytes | str) -> JsonValue:
    """Decode the progress that a handler reported."""
    value: JsonValue = _json_decoder.decode(said)
    return value


@checked
def read_open_job(packed: bytes, work: bytes) -> JobView:
    """Decode a job that is ready or leased, from its state and its content."""
    job = _open_decoder.decode(packed)
    return JobView(
        job=_job_decoder.decode(work),
        state=job.state,
        fence=job.fence,
        deliveries=job.deliveries,
        worker_id=job.worker or None,
        expires_at=Instant(job.expires) if job.expires else None,
        progress=read_progress(job.progress) if job.progress else None,
    )


class _Unread(msgspec.Struct, frozen=True):
    """A job, with its input as JSON."""

    id: JobId
    run_id: RunId
    tenant: TenantId
    step_id: StepId
    topic: Topic
    attempt: int
    input: msgspec.Raw
    item: int | None = None
    dispatch: int = 1
    max_deliveries: int | None = None
    attempt_timeout_ms: int | None = None
    trace: JobTrace | None = None


_unread_decoder = msgspec.json.Decoder(_Unread)


@checked
def read_unread_job(packed: bytes, work: bytes) -> JobView:
    """Like ``read_open_job``, with the input of the job as JSON, and without its progress.

    To decode an input may take 20 ms; to encode it again as it was takes none.
    """
    job = _open_decoder.decode(packed)
    return JobView(
        job=Job(**asdict(_unread_decoder.decode(work))),
        state=job.state,
        fence=job.fence,
        deliveries=job.deliveries,
        worker_id=job.worker or None,
        expires_at=Instant(job.expires) if job.expires else None,
    )


@checked
def read_retired_job(packed: bytes) -> JobView:
    """Decode a job that is no longer open."""
    job = _retired_decoder.decode(packed)
    return JobView(
        job=_job_decoder.decode(job.work),
        state=job.state,
        fence=job.fence,
        deliveries=job.deliveries,
        worker_id=job.worker or None,
    )


@checked
def read_lost_reason(reply: Sequence[bytes | int]) -> LostReason:
    """Why the lease of a job is lost that is not open any more: an answer of ``retired.lua``."""
    match reply:
        case [bytes(state), bytes(status), has_fence]:
            return why_lost(
                JobState(state.decode()), RunStatus(status.decode()), has_fence=bool(has_fence)
            )
        case _:
            return LostReason.UNKNOWN_JOB


_approval_decoder: Final = msgspec.json.Decoder(PendingApproval, float_hook=float)


read_approval = checked(_approval_decoder.decode)
"""Decode an approval that waits for a decision."""


@checked
def read_letter(packed: bytes) -> DeadLetter:
    """Decode a dead letter, with its time."""
    frame = _letter_frame_decoder.decode(packed)
    return replace(_letter_decoder.decode(frame.letter), at=frame.at)


class _Timer(msgspec.Struct, frozen=True, array_like=True):
    """A timer, in the form that ``part_effects.lua`` writes."""

    step: str
    event: str


_timer_decoder = msgspec.msgpack.Decoder(_Timer)


@checked
def read_run_facts(reply: Sequence[Any]) -> RunFacts | None:
    """Decode the reply of ``run_facts.lua``."""
    if not reply:
        return None
    now, fields, entries, next_try, jobs, timers, letters, place = reply
    loaded = read_loaded(fields, entries)
    assert loaded is not None
    return RunFacts(
        at=Instant(now),
        run=loaded.run,
        inbox=len(loaded.inbox),
        decided=decided_steps(each.event for each in loaded.inbox),
        failures=max((_entry_decoder.decode(each).failures for each in entries[1::2]), default=0),
        next_try_at=Instant(int(float(next_try))) if next_try else None,
        jobs=by_place(
            _open_job(job_id, packed, ahead)
            for job_id, packed, ahead in zip(jobs[::3], jobs[1::3], jobs[2::3], strict=True)
        ),
        timers=tuple(
            sorted(
                (
                    _pending_timer(packed, due)
                    for due, packed in zip(timers[::2], timers[1::2], strict=True)
                ),
                key=lambda each: (each.due, each.timer.key),
            )
        ),
        letters=tuple(
            sorted(
                (dead_work(read_letter(each)) for each in letters),
                key=lambda each: (each.at, each.id),
            )
        ),
        place=read_place(place),
    )


def read_place(reply: Sequence[Any]) -> QueuePlace | None:
    """Decode what ``queue_place`` of ``part_place.lua`` answers."""
    if not reply:
        return None
    position, rank, fairness_key = reply
    return QueuePlace(int(position), PRIORITY_MAX - int(rank), fairness_key.decode())


def _open_job(job_id: bytes, packed: bytes, ahead: int | bytes) -> OpenJob:
    job = _open_decoder.decode(packed)
    return OpenJob(
        id=JobId(job_id.decode()),
        step_id=StepId(job.step),
        item=None if isinstance(job.item, bool) else job.item,
        topic=Topic(job.topic),
        state=OpenJobState(job.state),
        deliveries=job.deliveries,
        fence=job.fence,
        worker_id=job.worker or None,
        expires_at=Instant(job.expires) if job.expires else None,
        ahead=ahead if isinstance(ahead, int) else None,
    )


def _pending_timer(packed: bytes, due: bytes) -> PendingTimer:
    event = _event_decoder.decode(_timer_decoder.decode(packed).event)
    assert isinstance(event, TimerFired)
    return PendingTimer(event.timer, Instant(int(float(due))))


class _Version(msgspec.Struct, frozen=True, array_like=True):
    created_at: Instant
    workflow: str


class StoredTenant(msgspec.Struct, frozen=True, array_like=True):
    """The configuration of a tenant, with the members that scripts read apart from it."""

    limit: int | bool
    rate: float | bool
    tenant: str
    pins: dict[WorkflowId, int] = {}
    budgets: list[str | int] = []
    """Name, limit and window of each, sorted by name."""
    queues: bool = False
    queue_max: int = 0
    queue_wait_ms: int = 0


class _Tally(BudgetTally, frozen=True, array_like=True):
    """A tally as ``part_budgets.lua`` writes it."""


_tally_decoder = msgspec.msgpack.Decoder(_Tally)
_version_decoder = msgspec.msgpack.Decoder(_Version)
_config_decoder = msgspec.msgpack.Decoder(StoredTenant)
_workflow_decoder = msgspec.json.Decoder(Workflow)
_audit_decoder = msgspec.json.Decoder(AuditEntry)
_batch_decoder = msgspec.msgpack.Decoder(tuple[str, str, int, str])
_receipts_decoder = msgspec.json.Decoder(tuple[Receipt, ...])
_tenant_decoder = msgspec.json.Decoder(Tenant)


@checked
def read_workflow(
    packed: bytes, version: int, source: WorkflowSource, *, is_pinned: bool = False
) -> StoredWorkflow:
    """Decode one version of a workflow."""
    frame = _version_decoder.decode(packed)
    workflow = _workflow_decoder.decode(frame.workflow)
    return StoredWorkflow(workflow, version, frame.created_at, source, is_pinned)


class _Document(msgspec.Struct, frozen=True, array_like=True):
    revision: int
    value: str


_document_decoder = msgspec.msgpack.Decoder(_Document)


@checked
def read_document(packed: bytes) -> Document:
    """Decode a document with its revision."""
    frame = _document_decoder.decode(packed)
    return Document(_json_decoder.decode(frame.value), frame.revision)


@checked
def read_audit(written_at: int, fields: Sequence[bytes]) -> AuditEntry:
    """Decode an audit entry, with what a script added to it."""
    entry = replace(_audit_decoder.decode(fields[1]), at=Instant(written_at))
    if len(fields) == 2:  # noqa: PLR2004 - a name and the entry
        return entry
    name, value = fields[2:]
    match name:
        case b"version":
            return audit_of_version(entry, int(value))
        case b"slots":
            assert entry.tenant is not None
            return audit_of_drift(entry, Drift(entry.tenant, *map(int, value.split())))
        case _:
            before = audit_of_config(entry, read_tenant(value) if value else None, None).before
            return replace(entry, before=before)


@checked
def read_receipts(packed: bytes) -> tuple[Receipt, ...]:
    """Decode a batch of receipts."""
    return _receipts_decoder.decode(_batch_decoder.decode(packed)[3])


@checked
def read_tenant(packed: bytes) -> Tenant:
    """Decode the configuration of a tenant."""
    return _tenant_decoder.decode(_config_decoder.decode(packed).tenant)


@checked
def read_budgets(
    now: int, config: bytes | None, *tallies: bytes | None
) -> dict[str, BudgetStanding]:
    """Decode the reply of ``budgets.lua``."""
    if config is None:
        return {}
    limits = read_tenant(config).budgets
    stored = {
        name.decode(): None if packed is None else _tally_decoder.decode(packed)
        for name, packed in zip(tallies[::2], tallies[1::2], strict=True)
        if name is not None
    }
    return {name: standing_of(limits[name], stored.get(name), Instant(now)) for name in limits}


@checked
def read_level(text: bytes | None) -> int:
    """The level in the format of the data; the lowest if a server without a disk has lost it."""
    return 1 if text is None else int(text.partition(b" ")[0])
