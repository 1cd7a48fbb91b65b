"""The records of the store port."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar, overload

import msgspec
from msgspec.structs import replace

from stanchion.core.admission import ConcurrencyLimit, KeyRecord, RatePerS, Refused
from stanchion.core.audit import AuditEntry
from stanchion.core.budget import BudgetLimit
from stanchion.core.commit import (
    CommitAnswer,
    CommitConflict,
    Committed,
    Gone,
    SettleAnswer,
    SettleMiss,
    SettleMissed,
    StaleFence,
)
from stanchion.core.events import AttemptFailed, AttemptSucceeded, Event
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.model import (
    Failure,
    Instant,
    Job,
    JobId,
    Risk,
    Run,
    RunId,
    RunStatus,
    Stamp,
    StepId,
    TenantId,
    Topic,
    WorkflowId,
    WorkflowSource,
)
from stanchion.core.queue import (
    OnFull,
    QueueMax,
    QueueRequest,
    QueueWaitS,
)
from stanchion.core.ranges import check_ranges
from stanchion.core.run import evolve, start_with
from stanchion.core.schedule import TickMark
from stanchion.core.transition import DispatchJob, TimelineEntry, Transition
from stanchion.core.workflow import Workflow

__all__ = [
    "EVERY_RUN",
    "Acceptance",
    "Accepted",
    "Admission",
    "BadCursor",
    "Commit",
    "CommitAnswer",
    "CommitConflict",
    "Committed",
    "DeadLetter",
    "DeadLetterKind",
    "Document",
    "Drift",
    "ExpiredJob",
    "FeedEntry",
    "Gone",
    "InboxEntry",
    "JobLease",
    "JobState",
    "JobView",
    "LeasedJob",
    "Loaded",
    "LostReason",
    "OldestWaits",
    "OutboxRow",
    "Page",
    "PostAnswer",
    "RejectedCode",
    "Renewals",
    "Result",
    "ResultRefused",
    "RunFilter",
    "RunIndex",
    "RunSummary",
    "SettleAnswer",
    "SettleMiss",
    "SettleMissed",
    "SlotAudit",
    "StaleFence",
    "StartTerms",
    "StartsChecked",
    "StoredSummaries",
    "StoredSummary",
    "StoredWorkflow",
    "Tenant",
    "TenantStanding",
    "WorkflowUse",
    "index_for",
    "label_texts",
    "result_event",
]

_Each = TypeVar("_Each")


class Page(msgspec.Struct, Generic[_Each], frozen=True):
    """One page of a list, and the cursor of the next."""

    items: tuple[_Each, ...]
    cursor: str | None = None
    """The cursor of the next page; ``None`` at the end."""


class BadCursor(ValueError):
    """The cursor (or feed position) was not issued by this list."""

    def __init__(self, cursor: str) -> None:
        """Keep the invalid cursor for the message."""
        super().__init__(f"not a cursor of this list: {cursor[:100]!r}")


# ── Admission and runs ───────────────────────────────────────────────────────────────────────────


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """A request to create a run, with its first transition already decided.

    ``run`` is the run *after* that transition, with a stamp chosen by the writer.
    """

    run: Run
    transition: Transition
    key: str | None = None
    fingerprint: str = ""
    definitions: dict[WorkflowId, int] = {}
    """The workflow and its sub-workflows with the versions in force, as the caller read them.

    An id stands for the tenant's own workflow, with version 0 if the tenant must have none; a
    ``shared_name`` stands for the shared one, pinned or newest. Empty for a rerun or a single job,
    which need not use the newest versions.
    """
    is_rate_limited: bool = False
    """Whether it counts against the job rate of the tenant."""
    audit: AuditEntry | None = None
    """Written with the run. Starts have none, reruns do."""
    budget: dict[str, int] = {}
    """What the run reserves of the tenant's budgets. It is charged to the others as well."""
    tick: TickMark | None = None
    """For a scheduled run: it needs a higher mark than the last run of its schedule."""
    before: Run | None = None
    """The run before its first transition, as it would wait in the queue; ``None``: it never does.

    Its stamp is that of ``run``.
    """
    queue: QueueRequest = QueueRequest()


class AlikeStart(NamedTuple):
    """What differs between runs that begin alike."""

    run_id: RunId
    key: str | None
    fingerprint: str
    input: JsonObject
    works: tuple[JsonValue, ...]
    """The inputs of its jobs, in the order in which they are dispatched."""

    @classmethod
    def of(cls, admission: Admission) -> AlikeStart:
        """The differing part of this admission."""
        run, effects = admission.run, admission.transition.effects
        works = tuple(each.job.input for each in effects if isinstance(each, DispatchJob))
        return cls(run.id, admission.key, admission.fingerprint, run.input, works)

    def like(self, first: Admission) -> Admission:
        """The admission of this run, from that of another one of them."""
        assert first.before is not None, "it may have to wait"
        before = replace(first.before, id=self.run_id, input=self.input, stamp=first.run.stamp)
        transition = start_with(first.transition, before, self.works)
        return replace(
            first,
            run=evolve(before, transition),
            before=before,
            transition=transition,
            key=self.key,
            fingerprint=self.fingerprint,
        )


class AlikeStarts(Sequence[Admission]):
    """Admissions that ``start_like`` makes from the first one. Each is made when it is read.

    They differ in ids, keys, inputs and the inputs of jobs only: also the nonce, which tells the
    histories of one run apart, is the same. A store that writes them together
    needs no objects for each.
    """

    def __init__(self, first: Admission, rows: Sequence[AlikeStart]) -> None:
        self.first = first
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> Admission: ...
    @overload
    def __getitem__(self, place: slice) -> AlikeStarts: ...
    def __getitem__(self, place: int | slice) -> Admission | AlikeStarts:
        if isinstance(place, slice):
            return AlikeStarts(self.first, self.rows[place])
        return self.rows[place].like(self.first)


class StartTerms(msgspec.Struct, frozen=True):
    """What decides on a start with a new key, apart from its tenant's slots."""

    definitions: dict[WorkflowId, int] = {}
    """As in ``Admission``."""
    budget: dict[str, int] = {}
    on_full: OnFull | None = None
    """The policy that the start itself requests, if any."""


class StartsChecked(msgspec.Struct, frozen=True):
    """What ``admit`` would have answered to starts of one tenant at one moment."""

    refused: tuple[Refused | None, ...]
    """For starts with new keys, by their terms; ``None``: admitted, or queued."""
    known: dict[str, KeyRecord] = {}
    """The keys that are bound to a run."""


class InboxEntry(msgspec.Struct, frozen=True):
    """An event that was accepted for a run and has not been applied yet."""

    id: str
    event: Event


class Loaded(msgspec.Struct, frozen=True):
    """A run without its items, and its inbox, oldest entry first."""

    run: Run
    inbox: tuple[InboxEntry, ...] = ()


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A request to write a transition."""

    run_id: RunId
    transition: Transition
    read: Stamp
    nonce: str
    """The nonce of the new stamp. If it is already stored, the commit has succeeded before."""
    fence: int | None
    """The fence of the run lease; ``None`` if policy allows a commit without a lease."""
    applied: tuple[str, ...] = ()
    """Inbox entries that the transition handles. They are removed with the commit."""


class PostAnswer(StrEnum):
    """The result of posting an event to an inbox."""

    POSTED = "posted"
    REPEATED = "repeated"
    """The inbox already has an entry with this id."""
    FINISHED = "finished"
    UNKNOWN = "unknown"


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in a list."""

    id: RunId
    tenant: TenantId
    workflow_id: WorkflowId
    workflow_version: int
    status: RunStatus
    created_at: Instant
    finished_at: Instant | None = None
    error: Failure | None = None
    risk: Risk = Risk.STANDARD
    labels: dict[str, str] = {}
    rerun_of: RunId | None = None


class RunFilter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which runs to list: those that fit all of it."""

    statuses: tuple[RunStatus, ...] = ()
    """One of these; of any status if there are none."""
    workflow_id: WorkflowId | None = None
    labels: tuple[str, ...] = ()
    """Each ``name:value``: the run has all of them."""
    since: Instant | None = None
    """Created then or later."""
    until: Instant | None = None
    """Created before."""
    rerun_of: RunId | None = None

    def fits(self, run: RunSummary) -> bool:
        """Whether the run is one of them."""
        return (
            (not self.statuses or run.status in self.statuses)
            and self.workflow_id in {None, run.workflow_id}
            and self.rerun_of in {None, run.rerun_of}
            and (self.since is None or run.created_at >= self.since)
            and (self.until is None or run.created_at < self.until)
            and (not self.labels or {*self.labels} <= {*label_texts(run.labels)})
        )


def label_texts(labels: Mapping[str, str]) -> list[str]:
    """Each label as one text, the way filters name it."""
    # Once each: the names and values "a", "b:c" and "a:b", "c" give the same text.
    return list(dict.fromkeys(f"{name}:{value}" for name, value in labels.items()))


EVERY_RUN: Final = RunFilter()


class RunIndex(StrEnum):
    """What the list of runs is read by."""

    AGE = "age"
    STATUS = "status"
    WORKFLOW = "workflow"
    LABEL = "label"
    RERUN = "rerun"


def index_for(only: RunFilter, tenant: TenantId | None) -> RunIndex:
    """The index that leaves out the most runs that do not fit.

    Most runs have succeeded, so a workflow is read by its status only if that is another one. There
    is no index of a workflow over all tenants.
    """
    if only.rerun_of is not None:
        return RunIndex.RERUN
    if only.labels:
        return RunIndex.LABEL
    is_rare = bool(only.statuses) and RunStatus.SUCCEEDED not in only.statuses
    if only.workflow_id is not None and tenant is not None and not is_rare:
        return RunIndex.WORKFLOW
    return RunIndex.STATUS if only.statuses else RunIndex.AGE


class OldestWaits(msgspec.Struct, frozen=True):
    """What has waited longest for a slot and for a worker."""

    queued: RunId | None = None
    """The queued run that was created first."""
    ready: tuple[JobId, ...] = ()
    """The job that became ready first; with several shards, the first one of each of them."""


class FeedEntry(msgspec.Struct, frozen=True):
    """The timeline entries of one commit in the feed of a tenant."""

    position: str
    run_id: RunId
    entries: tuple[TimelineEntry, ...]
    is_after_gap: bool = False
    """Entries between the position before and this one are no longer kept."""


# ── Jobs ─────────────────────────────────────────────────────────────────────────────────────────


class JobState(StrEnum):
    """The state of a job in the store."""

    READY = "ready"
    LEASED = "leased"
    FINISHED = "finished"
    REVOKED = "revoked"
    DEAD = "dead"


class LeasedJob(msgspec.Struct, frozen=True):
    """A job leased to a worker."""

    job: Job
    fence: int
    deliveries: int
    expires_at: Instant


class JobLease(msgspec.Struct, frozen=True):
    """The lease of a worker on a job."""

    job_id: JobId
    fence: int
    progress: JsonValue = None
    """The progress reported since the last renewal; ``None`` if there is none."""
    usage: dict[str, int] = {}
    """What the job has used of budgets under this fence, in all."""


class Renewals(msgspec.Struct, frozen=True):
    """The leases that were extended, and those that are lost."""

    renewed: tuple[JobId, ...]
    lost: tuple[JobId, ...]


class LostReason(StrEnum):
    """Why a lease does not hold any more."""

    CANCELLED = "cancelled"
    """The job was revoked, because its run was cancelled."""
    TIMED_OUT = "timed_out"
    """The job was revoked, because its run, step or attempt took too long."""
    STALE_FENCE = "stale_fence"
    """The job was leased again since."""
    EXPIRED = "expired"
    """The lease was not renewed in time."""
    FINISHED = "finished"
    """The result was accepted under this very lease."""
    UNKNOWN_JOB = "unknown_job"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's result for one job: an output, or an error."""

    job_id: JobId
    fence: int
    worker_id: str
    output: JsonValue = None
    error: Failure | None = None
    final: bool = False
    """Whether the error is permanent: the attempt is not retried."""
    usage: dict[str, int] = {}
    """What the job has used of budgets under this fence, in all."""


def result_event(
    result: Result, step_id: StepId, item: int | None = None
) -> AttemptSucceeded | AttemptFailed:
    """The event for the run from the result of a worker."""
    if result.error is None:
        return AttemptSucceeded(
            job_id=result.job_id,
            step_id=step_id,
            item=item,
            output=result.output,
            actor=result.worker_id,
        )
    return AttemptFailed(
        job_id=result.job_id,
        step_id=step_id,
        item=item,
        error=result.error,
        final=result.final,
        actor=result.worker_id,
    )


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The result is durable in the inbox of the run."""

    job_id: JobId
    run_id: RunId
    repeated: bool = False
    """It was accepted before; the repeat had no effect."""


class RejectedCode(StrEnum):
    """Why a result was rejected."""

    STALE_FENCE = "stale_fence"
    UNKNOWN_JOB = "unknown_job"
    ALREADY_FINISHED = "already_finished"


class ResultRefused(msgspec.Struct, frozen=True, tag="rejected"):
    """The result was rejected."""

    job_id: JobId
    code: RejectedCode


Acceptance: TypeAlias = Accepted | ResultRefused


class ExpiredJob(msgspec.Struct, frozen=True):
    """A job whose lease expired: ready again, or a dead letter after too many deliveries."""

    job_id: JobId
    run_id: RunId
    tenant: TenantId
    topic: Topic
    deliveries: int
    is_dead: bool
    is_timed_out: bool = False
    """The time of the attempt is over: the job is revoked, and the attempt has failed."""


class JobView(msgspec.Struct, frozen=True):
    """A job as shown to an operator."""

    job: Job
    state: JobState
    fence: int
    deliveries: int
    worker_id: str | None = None
    """The worker that has leased or finished it."""
    expires_at: Instant | None = None
    """While it is leased."""
    progress: JsonValue = None
    """The progress last reported, while the job is leased."""


# ── Outbox, dead letters, definitions, tenants, documents ───────────────────────────────────────


class OutboxRow(msgspec.Struct, frozen=True):
    """Marks a run with a non-empty inbox, so that it will be advanced. At most one per run."""

    run_id: RunId
    tenant: TenantId
    number: int
    """Rises with every entry posted to the inbox, so that an older read cannot confirm the row.

    It never falls, not even when the row is removed and created again.
    """


class DeadLetterKind(StrEnum):
    """What the dead letter holds: a job or an event."""

    JOB = "job"
    EVENT = "event"


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A job or event that failed as often as is allowed."""

    id: str
    kind: DeadLetterKind
    tenant: TenantId
    run_id: RunId
    step_id: StepId | None
    cause: str
    at: Instant
    job: Job | None = None
    event: Event | None = None


class StoredWorkflow(msgspec.Struct, frozen=True):
    """One version of a workflow."""

    workflow: Workflow
    version: int
    created_at: Instant
    source: WorkflowSource = WorkflowSource.OWN
    is_pinned: bool = False
    """Whether the tenant's configuration pins this shared workflow."""


class WorkflowUse(msgspec.Struct, frozen=True):
    """What a tenant runs under the id of a shared workflow."""

    tenant: TenantId
    source: WorkflowSource
    version: int
    """The version in force."""
    pin: int | None
    active: int
    """The unfinished runs of the shared workflow, in any version."""


class Tenant(msgspec.Struct, frozen=True, omit_defaults=True):
    """The configuration of a tenant. One without a stored configuration has these defaults."""

    max_concurrent_runs: ConcurrencyLimit | None = 10
    """``None``: no cap."""
    job_rate_per_s: RatePerS | None = None
    """``None``: no limit."""
    admission: JsonObject | None = None
    workflows: dict[WorkflowId, int] = {}
    """Versions of shared workflows that the tenant runs in place of the newest."""
    budgets: dict[str, BudgetLimit] = {}
    """By name, what its runs may use in a window of time."""
    on_full: OnFull = OnFull.REJECT
    """What a start gets while no slot is free."""
    queue_max: QueueMax = 100
    """How many runs may wait."""
    queue_wait_s: QueueWaitS = 300.0
    """How long a run may wait, from its creation on."""

    @property
    def queue_wait_ms(self) -> int:
        """How long a run may wait, in milliseconds."""
        return round(self.queue_wait_s * 1000)

    def __post_init__(self) -> None:
        """Check the ranges that every store supports. Raises ``ValueError``."""
        check_ranges(self)


class TenantStanding(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant in the list of those that matter now."""

    tenant: TenantId
    config: Tenant | None
    """``None``: it has the defaults."""
    active: int
    """The slots that it uses."""
    queued: int = 0
    """The runs that wait for a slot."""
    seen_at: Instant
    """When it last started a run; 0 if never."""

    def is_listed(self, seen_since: Instant) -> bool:
        """Whether the tenant is on a list of those seen since then."""
        return self.config is not None or self.active > 0 or self.seen_at >= seen_since


class Document(msgspec.Struct, frozen=True):
    """A small named value with a revision: settings, keys, latches."""

    value: JsonValue
    revision: int


class StoredSummary(msgspec.Struct, frozen=True):
    """The last summary that a replica reported."""

    replica: str
    seen_at: Instant
    """When it was reported, by the clock of the store."""
    summary: JsonValue


class StoredSummaries(msgspec.Struct, frozen=True):
    """The summaries of all replicas, as of one instant."""

    at: Instant
    summaries: tuple[StoredSummary, ...]


class Drift(msgspec.Struct, frozen=True):
    """A tenant whose count of slots differs from its unfinished runs."""

    tenant: TenantId
    counted: int
    actual: int


class SlotAudit(msgspec.Struct, frozen=True):
    """A comparison of slots with unfinished runs, for some tenants."""

    checked: int
    drifts: tuple[Drift, ...]
    cursor: str | None = None
    """Where the next comparison continues; ``None`` after the last tenant."""
