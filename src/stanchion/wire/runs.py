"""Wire types for workflows, runs and single jobs."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from stanchion.core.bulk import BulkAction, BulkRatePerS, BulkStatus
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.limits import LABELS_MAX
from stanchion.core.model import Failure, ItemFailure, Risk, RunStatus, StepStatus, WorkflowSource
from stanchion.core.queue import FAIRNESS_KEY_CHARS_MAX, PRIORITY_DEFAULT, OnFull, Priority
from stanchion.core.rerun import RerunAction, RerunOnly, RerunVersion
from stanchion.core.why import WhyCode
from stanchion.wire.identifiers import (
    VISIBLE_CHAR,
    Comment,
    LabelName,
    Labels,
    RunName,
    StepName,
    TopicName,
)
from stanchion.wire.problems import Problem


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


FairnessKey: TypeAlias = Annotated[
    str,
    Meta(
        pattern=rf"^(?:{VISIBLE_CHAR}| )*\Z",
        max_length=FAIRNESS_KEY_CHARS_MAX,
        description="Visible characters and spaces.",
        examples=["customer-9"],
    ),
]


class StartRun(_Request, frozen=True, kw_only=True):
    """Start a run."""

    input: JsonObject = {}
    labels: Labels = {}
    """To find the run by; a rerun keeps them."""
    priority: Priority = PRIORITY_DEFAULT
    """Higher ones are served first, while runs wait for a slot."""
    fairness_key: FairnessKey = ""
    """Runs of one priority that wait take turns by this key."""
    on_full: OnFull | None = None
    """``reject``: this start does not wait, also if its tenant queues."""


class BatchRow(StartRun, frozen=True, kw_only=True):
    """One run of a batch."""

    key: (
        Annotated[
            str, Meta(pattern=r"^[!-~]{1,255}\Z", description="1 to 255 visible ASCII characters.")
        ]
        | None
    ) = None
    """The run's idempotency key. Without one it is the request's key, a slash and the index; if the
    request has none either, the row is refused."""


BATCH_SIZE: Final = Meta(min_length=1, max_length=1000)


class StartBatch(_Request, frozen=True, kw_only=True):
    """Start many runs of one workflow."""

    runs: Annotated[tuple[BatchRow, ...], BATCH_SIZE]


class RerunRun(_Request, frozen=True, kw_only=True):
    """Start a new run from a finished one: all of it, or a part."""

    from_step: StepName | None = None
    """Repeat this step and what builds on it. Not with another member than ``dry_run``."""
    version: RerunVersion = RerunVersion.SAME
    """``newest``: of the newest versions, from the beginning."""
    input: JsonObject | None = None
    """Replaces the input of the old run."""
    only: RerunOnly | None = None
    """``failed_items``: other items and steps that succeeded keep their results."""
    dry_run: bool = False
    """Answer what would be reused and what would run again, and change nothing."""


class RerunStepPlan(msgspec.Struct, frozen=True):
    """What a rerun would do with one step, and with the items of a for-each."""

    action: RerunAction
    items_reused: int | None = None
    items_run_again: int | None = None
    """``null`` also for a for-each that runs wholly again: its list is known when it begins."""


class RerunPlan(msgspec.Struct, frozen=True):
    """What a rerun would do: the answer to a dry run."""

    rerun_of: str
    workflow_id: str
    workflow_version: int
    version: RerunVersion
    steps: dict[str, RerunStepPlan]
    workflow_source: WorkflowSource = WorkflowSource.OWN


class CancelRun(_Request, frozen=True, kw_only=True):
    """Cancel a run now."""

    reason: Comment | None = None


class DecideStep(_Request, frozen=True, kw_only=True):
    """Approve or reject a step."""

    comment: Comment | None = None
    data: JsonValue = None
    """For the steps that follow; it must match the approval's ``data_schema``, if it has one."""


class SubmitJob(_Request, frozen=True, kw_only=True):
    """Submit one job without a workflow."""

    topic: TopicName
    input: JsonValue = {}


class RunSelection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which runs: those that fit all of it. A member is absent, never null."""

    status: Annotated[tuple[RunStatus, ...], Meta(max_length=len(RunStatus))] = ()
    """One of these."""
    workflow_id: (
        Annotated[
            str, Meta(pattern=r"^[!-~]{1,200}\Z", description="1 to 200 visible ASCII characters.")
        ]
        | UnsetType
    ) = UNSET
    label: Annotated[tuple[LabelName, ...], Meta(max_length=LABELS_MAX)] = ()
    """Every one of these, each `name:value`."""
    since: Annotated[datetime, Meta(tz=True)] | UnsetType = UNSET
    """Created then or later."""
    until: Annotated[datetime, Meta(tz=True)] | UnsetType = UNSET
    """Created before."""
    rerun_of: RunName | UnsetType = UNSET


class StartAnswer(msgspec.Struct, frozen=True):
    """The run that was started, or that the same key started before."""

    run_id: str
    status: RunStatus


class QueuedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The run that waits for a slot of its tenant."""

    run_id: str
    status: RunStatus
    position: int
    """Its place in the queue; 1 is the next one."""
    estimate_s: float | None
    """How long it will probably wait; `null` until two runs of the tenant have ended."""


class BatchResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to one run of a batch: its id, or why it was not started."""

    status: int
    """The HTTP status that a start of this run alone would have."""
    run_id: str | None = None
    problem: Problem | None = None
    position: int | None = None
    """With 202: its place in the queue."""
    estimate_s: float | None = None
    """With 202: how long it will probably wait; `null` until two runs of the tenant have ended."""


class QueuedResult(BatchResult, frozen=True, kw_only=True):
    """The answer to a run of a batch that waits: its estimate is sent also while it is `null`."""

    position: int
    estimate_s: float | None


class BatchAnswer(msgspec.Struct, frozen=True):
    """One result for each run of the batch, in the same order."""

    results: tuple[BatchResult, ...]


class SubmitAnswer(msgspec.Struct, frozen=True):
    """The job that was submitted, or that the same key submitted before."""

    job_id: str
    run_id: str
    status: RunStatus


class Change(msgspec.Struct, frozen=True):
    """A cancel, approval or rejection: applied, or recorded because the run was busy."""

    run_id: str
    status: RunStatus
    applied: bool


WaitingFor: TypeAlias = Literal["job", "retry", "replay", "decision", "delay", "items", "children"]


class StepView(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a run."""

    status: StepStatus
    attempt: int
    output: JsonValue
    error: Failure | None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    items_total: int | None = None
    items_succeeded: int | None = None
    items_failed: int | None = None
    failures: tuple[ItemFailure, ...] | None = None
    """The failed items of a for-each that has ended: the first hundred."""
    waiting_for: WaitingFor | None = None
    question: str | None = None
    """The message of an approval as rendered; before that ``null`` if it has expressions."""
    decide_by: datetime | None = None
    """When the time for a decision ends."""
    progress: JsonValue = None
    """The last progress report of the step's worker, while its job is leased."""


class UsedWorkflow(msgspec.Struct, frozen=True, kw_only=True):
    """A workflow that a run contains, in the version that it began with."""

    id: str
    version: int
    source: WorkflowSource


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    run_id: str
    workflow_id: str
    workflow_version: int
    workflow_source: WorkflowSource = WorkflowSource.OWN
    """Whether the version is one of the tenant's own workflow or of a shared one."""
    uses: tuple[UsedWorkflow, ...] = ()
    """Its sub-workflows, by id."""
    tenant: str
    status: RunStatus
    risk: Risk
    input: JsonObject
    output: JsonValue
    error: Failure | None
    steps: dict[str, StepView]
    created_at: datetime
    finished_at: datetime | None
    rerun_of: str | None = None
    starter: str | None = None
    """The actor that started the run."""
    labels: dict[str, str] = {}
    position: int | None = None
    """Its place in the queue while it waits for a slot; 1 is the next one."""
    priority: int | None = None
    """Its priority while it waits for a slot: runs of a higher one go first."""
    fairness_key: str | None = None
    """While it waits for a slot: runs of one priority take turns by this key; the oldest of a key
    goes first."""


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run in a list."""

    run_id: str
    workflow_id: str
    workflow_version: int
    status: RunStatus
    created_at: datetime
    finished_at: datetime | None
    error: Failure | None
    tenant: str = ""
    risk: Risk = Risk.STANDARD
    labels: dict[str, str] = {}


class RunList(msgspec.Struct, frozen=True):
    """A page of runs, newest first."""

    runs: tuple[RunRow, ...]
    cursor: str | None = None


class ApprovalRow(msgspec.Struct, frozen=True, kw_only=True):
    """One approval that waits for a decision."""

    run_id: str
    step_id: str
    item: int | None
    ask: str | None
    """The key of a job's own question; ``null`` for an approval step."""
    tenant: str
    workflow_id: str
    message: str | None
    data: JsonValue
    data_schema: JsonObject | None
    """The JSON Schema of the decision's data."""
    since: datetime
    expires_at: datetime | None
    starter: str | None
    labels: dict[str, str]
    not_by_starter: bool = False
    """Whether another person than ``starter`` must decide."""


class ApprovalList(msgspec.Struct, frozen=True):
    """A page of approvals that wait for a decision, oldest first."""

    approvals: tuple[ApprovalRow, ...]
    cursor: str | None = None


class WaitRow(msgspec.Struct, frozen=True, kw_only=True):
    """The run that has waited longest for a slot, a lock, a worker or a topic limit."""

    waits_for: Literal["slot", "lock", "worker", "limit"]
    run_id: str
    tenant: str
    workflow_id: str
    step_id: str | None
    since: datetime
    until: datetime | None
    """When that changes by itself."""
    code: WhyCode
    detail: str
    remedy: str


class WaitsAnswer(msgspec.Struct, frozen=True):
    """At most one run for each kind of wait, the longest wait first."""

    as_of: datetime
    waits: tuple[WaitRow, ...]


class TimelineLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a run's history."""

    at: datetime
    what: str
    actor: str
    step: str | None = None
    item: int | None = None
    attempt: int | None = None
    detail: str | None = None


class TimelineAnswer(msgspec.Struct, frozen=True):
    """A page of a run's history, oldest first."""

    run_id: str
    entries: tuple[TimelineLine, ...]
    cursor: str | None = None


class ItemRow(msgspec.Struct, frozen=True, kw_only=True):
    """One item of a for-each step."""

    index: int
    status: StepStatus
    attempt: int
    output: JsonValue
    error: Failure | None
    job_id: str | None
    """The job of its last attempt; null before the first."""


class ItemList(msgspec.Struct, frozen=True):
    """A page of a for-each step's items, in the order of the list."""

    items: tuple[ItemRow, ...]
    cursor: str | None = None


GAP: Final = "gap"
"""``what`` of an event: others are missing before it, because the store no longer keeps them."""
RUN_ENDS: Final = frozenset(f"run_{status}" for status in RunStatus if status.is_finished)
"""``what`` of the last line of a run."""


class FeedLine(TimelineLine, frozen=True, kw_only=True):
    """The data of one server-sent event: a line of a run's history, or a gap."""

    run_id: str
    """Empty for a gap; that of a run whose end is missing has the run."""


class JobAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One job, of a workflow's step or submitted without a workflow."""

    job_id: str
    run_id: str
    step_id: str
    topic: str
    status: Literal["ready", "leased", "finished", "revoked", "dead"]
    run_status: RunStatus
    attempt: int
    deliveries: int
    output: JsonValue
    error: Failure | None
    worker_id: str | None = None
    """The worker that holds the job's lease, or that finished the job."""
    lease_ends_in_ms: int | None = None
    """Set while the job is leased."""
    progress: JsonValue = None
    """The worker's last progress report, while the job is leased."""


class JobList(msgspec.Struct, frozen=True):
    """How many jobs are ready, by topic."""

    ready: dict[str, int]


class ApplyAnswer(msgspec.Struct, frozen=True):
    """The workflow's present version."""

    id: str
    version: int


class WorkflowRow(msgspec.Struct, frozen=True, kw_only=True):
    """One workflow in a list."""

    id: str
    version: int
    source: WorkflowSource = WorkflowSource.OWN
    """Whether it is the tenant's own workflow or a shared one."""
    pinned: bool = False
    """Whether the tenant's configuration pins the version of this shared workflow."""
    risk: Risk
    created_at: datetime


class WorkflowList(msgspec.Struct, frozen=True):
    """A page of workflows, by id."""

    workflows: tuple[WorkflowRow, ...]
    cursor: str | None = None


class WorkflowView(WorkflowRow, frozen=True, kw_only=True):
    """One version of a workflow."""

    definition: JsonObject


class WorkflowUseRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant runs under the id of a shared workflow."""

    tenant: str
    source: WorkflowSource
    """`own`: a workflow of the tenant's own has this id, and the shared one is not in force."""
    version: int
    """The version in force."""
    pin: int | None
    """The version of the shared workflow that the tenant's configuration pins."""
    active: int
    """Unfinished runs of the shared workflow, in any version."""


class WorkflowUseList(msgspec.Struct, frozen=True):
    """A page of tenants, by name."""

    tenants: tuple[WorkflowUseRow, ...]
    cursor: str | None = None


class WhyBlocker(msgspec.Struct, frozen=True, kw_only=True):
    """What a run waits for, as data."""

    kind: str
    """``job``, ``timer``, ``approval``, ``dead_letter``, ``lock``, ``inbox``, ``rule``, …"""
    id: str | None
    item: int | None
    """The item of a for-each step; of several, the first."""
    topic: str | None
    worker_id: str | None
    """The worker that has the job; for a lock, its holder."""
    fence: int | None
    ahead: int | None
    """Ready jobs of the same tenant and topic before this one."""
    rule: str | None
    seen_at: datetime | None
    """When it was seen, for what is not stored with the run: locks, workers, bus."""


class WhyFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that must change before the run can end."""

    code: WhyCode
    detail: str
    step_id: str | None
    since: datetime | None
    until: datetime | None
    blocked_by: WhyBlocker | None
    remedy: str
    """A command, or what to do."""


class WhyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run does not go on, what needs a person first."""

    run_id: str
    status: RunStatus | None
    """``null`` while the store does not answer."""
    as_of: datetime
    findings: tuple[WhyFinding, ...]


class BulkFilter(RunSelection, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which runs: those that fit all of it. Lists are not empty, as that would mean all runs."""

    status: Annotated[tuple[RunStatus, ...], Meta(min_length=1, max_length=len(RunStatus))] = ()
    """One of these."""
    label: Annotated[tuple[LabelName, ...], Meta(min_length=1, max_length=LABELS_MAX)] = ()
    """Every one of these, each `name:value`."""


class StartBulk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Act on all runs that match and were created before."""

    action: BulkAction
    filter: BulkFilter
    """The members of the query of `GET /v1/runs`; lists where that repeats one."""
    dry_run: bool = False
    """Only say how many runs match, by tenant."""
    rate_per_s: BulkRatePerS = 50.0
    """Runs that are acted on each second."""


class BulkPreview(msgspec.Struct, frozen=True, kw_only=True):
    """How many runs match now."""

    matched: int
    by_tenant: dict[str, int]


class BulkError(msgspec.Struct, frozen=True):
    """A run on which the action was refused."""

    run_id: str
    code: str
    detail: str


class BulkView(msgspec.Struct, frozen=True, kw_only=True):
    """A bulk action and its progress."""

    bulk_id: str
    action: BulkAction
    matched: int
    done: int
    failed: int
    skipped: int = 0
    """Of `done`: runs that were to be cancelled and had ended already."""
    status: BulkStatus
    errors: tuple[BulkError, ...]
    """The first hundred."""
    tenant: str
    """`*` for all tenants."""
    filter: JsonObject
    rate_per_s: float
    actor: str
    created_at: datetime
    finished_at: datetime | None


class BulkList(msgspec.Struct, frozen=True):
    """A page of bulk actions, newest first."""

    bulks: tuple[BulkView, ...]
    cursor: str | None = None
