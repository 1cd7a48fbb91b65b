"""What a store gives and takes: the records that cross the store port."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Generic, TypeAlias, TypeVar

import msgspec

from stanchion.core.commit import CommitAnswer, CommitConflict, Committed, Gone, StaleFence
from stanchion.core.events import Event
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.model import (
    Failure,
    Instant,
    Job,
    JobId,
    Run,
    RunId,
    RunStatus,
    Stamp,
    StepId,
    TenantId,
    Topic,
    WorkflowId,
)
from stanchion.core.transition import TimelineEntry, Transition
from stanchion.core.workflow import Workflow

__all__ = [
    "CAP_MAX",
    "EVERY_RUN",
    "RATE_MAX",
    "RATE_MIN",
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
    "OutboxRow",
    "Page",
    "PostAnswer",
    "RejectedCode",
    "Renewals",
    "Result",
    "ResultRejected",
    "RunFilter",
    "RunSummary",
    "StaleFence",
    "StoredWorkflow",
    "Tenant",
]

_Each = TypeVar("_Each")


class Page(msgspec.Struct, Generic[_Each], frozen=True):
    """Part of a list, and where the next part begins."""

    items: tuple[_Each, ...]
    cursor: str | None = None
    """Give it back to go on; ``None`` at the end."""


class BadCursor(ValueError):
    """The cursor (or feed position) is not one that this list gave out."""

    def __init__(self, cursor: str) -> None:
        """Remember what was given instead."""
        super().__init__(f"not a cursor of this list: {cursor[:100]!r}")


# ── Admission and runs ───────────────────────────────────────────────────────────────────────────


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """A run that wants to begin, with its first transition already decided.

    ``run`` is the run *after* that transition, its stamp chosen by the writer.
    """

    run: Run
    transition: Transition
    key: str | None = None
    fingerprint: str = ""
    definitions: dict[WorkflowId, int] = {}
    """The newest versions, as far as the caller knew: its own workflow's and those it contains.

    Empty for what is not bound to the newest: a rerun, a single job.
    """
    is_rate_limited: bool = False
    """Counts against the tenant's job rate."""


class InboxEntry(msgspec.Struct, frozen=True):
    """An event that was accepted for a run and has not been applied yet."""

    id: str
    event: Event


class Loaded(msgspec.Struct, frozen=True):
    """A run as it is, without its items, and what lies in its inbox, oldest first."""

    run: Run
    inbox: tuple[InboxEntry, ...] = ()


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A transition that wants to become true."""

    run_id: RunId
    transition: Transition
    read: Stamp
    nonce: str
    """The writer's choice for the new stamp. Found stored, the commit has succeeded before."""
    fence: int | None
    """Of the run lease it was decided under; ``None`` if policy lets it go unleased."""
    applied: tuple[str, ...] = ()
    """Inbox entries that the transition takes care of. They leave with it."""


class PostAnswer(StrEnum):
    """What became of an event put into an inbox."""

    POSTED = "posted"
    REPEATED = "repeated"
    """An entry with this id lies there already."""
    FINISHED = "finished"
    UNKNOWN = "unknown"


class RunFilter(msgspec.Struct, frozen=True):
    """Which runs to list."""

    status: RunStatus | None = None
    workflow_id: WorkflowId | None = None


EVERY_RUN: Final = RunFilter()


class RunSummary(msgspec.Struct, frozen=True):
    """A run in a list."""

    id: RunId
    workflow_id: WorkflowId
    workflow_version: int
    status: RunStatus
    created_at: Instant
    finished_at: Instant | None = None
    error: Failure | None = None


class FeedEntry(msgspec.Struct, frozen=True):
    """One commit's lines of a tenant's history, in the order of commits."""

    position: str
    run_id: RunId
    entries: tuple[TimelineEntry, ...]


# ── Jobs ─────────────────────────────────────────────────────────────────────────────────────────


class JobState(StrEnum):
    """Where a job stands with the store."""

    READY = "ready"
    LEASED = "leased"
    FINISHED = "finished"
    REVOKED = "revoked"
    DEAD = "dead"


class LeasedJob(msgspec.Struct, frozen=True):
    """A job handed to a worker."""

    job: Job
    fence: int
    deliveries: int
    expires_at: Instant


class JobLease(msgspec.Struct, frozen=True):
    """What a worker holds."""

    job_id: JobId
    fence: int
    progress: JsonValue = None
    """What the handler has reported since the last renewal; ``None``: nothing new."""


class Renewals(msgspec.Struct, frozen=True):
    """Which leases go on, and which are lost."""

    renewed: tuple[JobId, ...]
    lost: tuple[JobId, ...]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's result for one job: an output, or an error."""

    job_id: JobId
    fence: int
    worker_id: str
    output: JsonValue = None
    error: Failure | None = None
    final: bool = False
    """An error that another attempt would not mend."""


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The result is durable and lies in the run's inbox."""

    job_id: JobId
    run_id: RunId
    repeated: bool = False
    """It was accepted before; this time it had no effect."""


class RejectedCode(StrEnum):
    """Why a result was not taken."""

    STALE_FENCE = "stale_fence"
    UNKNOWN_JOB = "unknown_job"
    ALREADY_FINISHED = "already_finished"


class ResultRejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The result was not taken."""

    job_id: JobId
    code: RejectedCode


Acceptance: TypeAlias = Accepted | ResultRejected


class ExpiredJob(msgspec.Struct, frozen=True):
    """A job whose lease ran out: offered again, or dead if it was offered too often."""

    job_id: JobId
    run_id: RunId
    tenant: TenantId
    topic: Topic
    deliveries: int
    is_dead: bool


class JobView(msgspec.Struct, frozen=True):
    """A job as an operator sees it."""

    job: Job
    state: JobState
    fence: int
    deliveries: int
    worker_id: str | None = None
    """Who has it, or who finished it."""
    expires_at: Instant | None = None
    """While it is leased."""
    progress: JsonValue = None
    """What the handler last reported, while it is leased."""


# ── Outbox, dead letters, definitions, tenants, documents ───────────────────────────────────────


class OutboxRow(msgspec.Struct, frozen=True):
    """The promise that a run with something in its inbox will be advanced. At most one per run."""

    run_id: RunId
    tenant: TenantId
    number: int
    """Rises with everything that is put into the inbox: a row confirmed meanwhile is another row.

    It never falls, also when the row went and came again.
    """


class DeadLetterKind(StrEnum):
    """What could not be delivered."""

    JOB = "job"
    EVENT = "event"


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was tried as often as is allowed."""

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
    """One version of a tenant's workflow."""

    workflow: Workflow
    version: int
    created_at: Instant


CAP_MAX: Final = 2**31 - 1
RATE_MIN: Final = 0.000_001
RATE_MAX: Final = 1_000_000


class Tenant(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a tenant may do. A tenant that nobody configured has these defaults."""

    max_concurrent_runs: int | None = 10
    """``None``: no cap."""
    job_rate_per_s: float | None = None
    """``None``: no limit."""
    admission: JsonObject | None = None

    def __post_init__(self) -> None:
        """Refuse what no store could act on in the same way."""
        if self.max_concurrent_runs is not None and not 0 <= self.max_concurrent_runs <= CAP_MAX:
            raise ValueError(f"max_concurrent_runs must be from 0 to {CAP_MAX}")
        # Written so that NaN, which compares false with everything, is refused as well.
        if self.job_rate_per_s is not None and not RATE_MIN <= self.job_rate_per_s <= RATE_MAX:
            raise ValueError(f"job_rate_per_s must be from {RATE_MIN:f} to {RATE_MAX}")


class Document(msgspec.Struct, frozen=True):
    """A small named value with a revision: settings, keys, latches."""

    value: JsonValue
    revision: int


class Drift(msgspec.Struct, frozen=True):
    """A tenant whose count of slots was not its count of unfinished runs. It is now."""

    tenant: TenantId
    counted: int
    actual: int
