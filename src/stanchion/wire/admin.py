"""Wire types for operators and administrators: tenants, keys, locks, dead letters, health."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from stanchion.core.admission import ConcurrencyLimit, RatePerS
from stanchion.core.budget import BUDGETS_MAX, BudgetMax
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.lease import TermS
from stanchion.core.model import Risk
from stanchion.core.queue import OnFull, QueueMax, QueueWaitS
from stanchion.wire.identifiers import (
    BudgetName,
    Comment,
    KeyLabel,
    LimitedTopic,
    LockName,
    TenantOrAll,
    Time,
    WorkflowVersion,
)


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Role(StrEnum):
    """What a key may do."""

    APPROVER = "approver"
    """Read runs of its tenant and decide approvals, nothing else."""
    RUNNER = "runner"
    """Workflows, runs, jobs and events of its tenant."""
    WORKER = "worker"
    """Lease, renew, results; of its tenant, or of all."""
    OPERATOR = "operator"
    """All of a runner, plus leases, dead letters, escalation, and reading settings."""
    ADMIN = "admin"
    """Everything, including keys, tenants and settings."""


class TenantConfig(_Request, frozen=True, kw_only=True):
    """A tenant's limits."""

    max_concurrent_runs: ConcurrencyLimit | None = 10
    job_rate_per_s: RatePerS | None = None
    admission: JsonObject | None = None
    """``strategy`` and ``lock_retry``, in place of those of the settings."""
    workflows: Annotated[dict[str, WorkflowVersion], Meta(max_length=200)] = {}
    """Versions of shared workflows that the tenant runs in place of the newest."""
    budgets: Annotated[dict[BudgetName, BudgetConfig], Meta(max_length=BUDGETS_MAX)] = {}
    """What its runs may use in a window of time, by name."""
    on_full: OnFull = OnFull.REJECT
    """What a start gets while no slot is free: 429, or a place in the queue."""
    queue_max: QueueMax = 100
    """How many runs may wait; further starts get 429 ``queue_full``."""
    queue_wait_s: QueueWaitS = 300.0
    """How long a run may wait; then it ends as ``timed_out`` with the code ``queue_timeout``."""


class BudgetConfig(_Request, frozen=True, kw_only=True):
    """A budget of a tenant."""

    limit: BudgetMax
    window: Literal["hour", "day", "month", "total"]
    """Hours, days and months begin in UTC; ``total`` never ends."""


class TenantRow(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant in a list."""

    tenant: str
    max_concurrent_runs: int | None
    job_rate_per_s: float | None
    admission: JsonObject | None
    workflows: dict[str, int] = {}
    budgets: dict[str, BudgetConfig] = {}
    on_full: OnFull = OnFull.REJECT
    queue_max: int = 100
    queue_wait_s: float = 300.0
    active: int = 0
    """Runs that use a slot now."""
    queued: int = 0
    """Runs that wait for a slot."""
    is_configured: bool = True
    """Whether it has a configuration; otherwise it has the defaults."""
    seen_at: datetime | None = None
    """When it last started a run."""


class TenantView(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of the caller's own tenant, and how much of them is used."""

    tenant: str
    max_concurrent_runs: int | None
    active: int
    queued: int
    job_rate_per_s: float | None
    budgets: dict[str, TenantBudget]
    on_full: OnFull = OnFull.REJECT
    queue_max: int = 100
    queue_wait_s: float = 300.0


class TenantBudget(msgspec.Struct, frozen=True, kw_only=True):
    """A budget, and how much of it is used in its present window."""

    limit: int
    window: Literal["hour", "day", "month", "total"]
    used: int
    reserved: int
    resets_at: datetime | None


class TenantList(msgspec.Struct, frozen=True):
    """A page of tenants, by name."""

    tenants: tuple[TenantRow, ...]
    cursor: str | None = None


class PutLimit(_Request, frozen=True, kw_only=True):
    """A topic limit: how many jobs of some topics may be leased at once, and per second.

    At least one of ``max_running`` and ``rate_per_s`` is given.
    """

    topics: Annotated[tuple[LimitedTopic, ...], Meta(min_length=1, max_length=100)]
    per: Literal["deployment", "tenant"] = "deployment"
    """Whether all tenants share the limit, or each tenant has it for itself."""
    max_running: ConcurrencyLimit | None = None
    """Jobs that are leased at the same time; 0 stops the topics."""
    rate_per_s: RatePerS | None = None
    """New leases per second, with a burst of that number, at least 1."""


class LimitView(msgspec.Struct, frozen=True, kw_only=True):
    """A topic limit, and how much of it is in use."""

    id: str
    topics: tuple[str, ...]
    per: Literal["deployment", "tenant"]
    max_running: int | None
    rate_per_s: float | None
    tenant: str | None = None
    """Of a limit of each tenant: the one whose use is shown, if the request names a tenant."""
    running: int | None
    """Leased jobs that count against it; ``null`` for a limit of each tenant if none is named."""
    retry_after_ms: int | None
    """When the rate allows the next lease; ``null`` without a rate, or like ``running``."""


class LimitList(msgspec.Struct, frozen=True):
    """A page of topic limits, by id."""

    limits: tuple[LimitView, ...]
    cursor: str | None = None


class HoldLease(_Request, frozen=True, kw_only=True):
    """Hold a lock as an operator, for a limited time."""

    name: LockName
    ttl_s: TermS


class LeaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """One lock that is held."""

    name: str
    fence: int
    expires_in_ms: int
    holder: str | None
    """The replica, or the actor who holds it by hand; ``null`` for other programs."""
    acquired_at: datetime | None
    """``null`` if a replica of an older version acquired it."""
    renewals: int


class LeaseList(msgspec.Struct, frozen=True):
    """A page of locks that are held, by name."""

    leases: tuple[LeaseRow, ...]
    cursor: str | None = None


class UnlockedRow(msgspec.Struct, frozen=True, kw_only=True):
    """Work that was done without a lock, because the lock store failed."""

    at: datetime
    name: str
    risk: Risk
    error: str


class LeaseMarkRow(msgspec.Struct, frozen=True, kw_only=True):
    """A moment in the life of a lock, as one replica has seen it."""

    at: datetime
    what: Literal["acquired", "released", "abandoned", "stale_write"]
    """``stale_write``: the store refused a write with an older fence."""
    fence: int | None


class LockWaitRow(msgspec.Struct, frozen=True, kw_only=True):
    """Work of the replica that answers, which found a lock busy and tries again."""

    name: str
    since: datetime
    tried_at: datetime
    tries: int


class LockHistory(msgspec.Struct, frozen=True, kw_only=True):
    """What the replica that answers has lately done with run leases. It is kept in memory."""

    replica: str
    since: datetime
    """When this memory begins: the start of the process."""
    unlocked_count: int
    """How often work was done without a lock since then."""
    unlocked: tuple[UnlockedRow, ...]
    """The newest thousand, newest first."""
    unlocked_elsewhere: dict[str, int] = {}
    """How often other replicas worked without a lock since their start, by replica."""
    until: datetime
    bucket_ms: int
    busy: tuple[int, ...]
    """How often a run's lock was busy, in each bucket of the last minute before ``until``."""
    waits: tuple[LockWaitRow, ...]
    """Locks that this replica waits for: tried in the last 15 s and not acquired since."""
    marks: tuple[LeaseMarkRow, ...]
    """The last moments of the lock that was asked for, oldest first."""


class DeadLetterRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job or event that was tried as often as is allowed."""

    id: str
    kind: Literal["job", "event"]
    tenant: str
    run_id: str
    step_id: str | None
    cause: str
    at: datetime
    job_id: str | None = None
    topic: str | None = None
    event: JsonValue = None


class DeadLetterList(msgspec.Struct, frozen=True):
    """A page of dead letters, oldest first."""

    dead_letters: tuple[DeadLetterRow, ...]
    cursor: str | None = None


class ReplayAnswer(msgspec.Struct, frozen=True):
    """The letter that was replayed."""

    id: str
    run_id: str
    replayed: bool


class DiscardAnswer(msgspec.Struct, frozen=True):
    """The letter that was discarded."""

    id: str
    run_id: str
    discarded: bool


class DiscardLetter(_Request, frozen=True, kw_only=True):
    """Discard a dead letter. The body has no members."""


class ReplayLetter(_Request, frozen=True, kw_only=True):
    """Replay a dead letter. The body has no members."""


class CreateKey(_Request, frozen=True, kw_only=True):
    """Create an API key. The tenant ``*`` means all tenants."""

    role: Role
    tenant: TenantOrAll
    name: KeyLabel | None = None
    """Shown as the actor of the key's requests; without a name, the key's id is shown."""
    note: Comment | None = None
    expires_at: Annotated[datetime, Meta(tz=True)] | None = None
    """The key stops working at this time."""


class KeyCreated(msgspec.Struct, frozen=True, kw_only=True):
    """A new key. Its secret is shown only in this answer."""

    id: str
    key: str
    role: Role
    tenant: str
    name: str | None
    note: str | None
    created_at: datetime
    expires_at: datetime | None


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A key, without its secret."""

    id: str
    role: Role
    tenant: str
    name: str | None
    note: str | None
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None
    """Exact to a minute: it is written at most once a minute."""
    revoked_at: datetime | None


class KeyList(msgspec.Struct, frozen=True):
    """A page of keys."""

    keys: tuple[KeyRow, ...]
    cursor: str | None = None


class AuditRow(msgspec.Struct, frozen=True, kw_only=True):
    """A change: who made it, and what was before and after it."""

    at: datetime
    actor: str
    action: str
    """What was done, as `noun.verb`: `run.cancel`."""
    subject: str
    """What was changed, as `noun/name`: `run/<run_id>`."""
    tenant: str | None
    """`null`: the change concerns the whole deployment."""
    before: JsonValue
    after: JsonValue
    """Members that may be secret are left out; `redacted` names them."""
    request_id: str | None


class AuditList(msgspec.Struct, frozen=True):
    """A page of the audit log. A filtered page may be short and not be the last."""

    entries: tuple[AuditRow, ...]
    cursor: str | None = None


class DecisionRow(msgspec.Struct, frozen=True, kw_only=True):
    """The receipt of a refused start."""

    at: datetime
    tenant: str
    workflow_id: str | None
    """`null` for a rerun or a single job."""
    outcome: str
    """`full`, `mismatch`, `throttled`, or the code of the refusal."""
    limit: int | None
    active: int | None
    retry_after_ms: int | None
    """What the caller was told."""
    key: str | None
    """The idempotency key."""
    request_id: str
    actor: str
    replica: str
    left_out: int = 0
    """Refusals of the tenant just before this one that have no receipt: there were too many."""
    budget: str | None = None
    """The budget that had too little left; `limit` is its limit then, and no number of runs."""


class DecisionList(msgspec.Struct, frozen=True):
    """A page of receipts. A filtered page may be short and not be the last."""

    decisions: tuple[DecisionRow, ...]
    cursor: str | None = None


class AdmissionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's slots, and what all replicas answered its callers in the last minute."""

    tenant: str
    limit: int | None
    active: int
    queued: int
    admitted_1m: int
    """With the queued runs that got their slots."""
    full_1m: int
    unavailable_1m: int
    wait_p95_ms: int | None
    """95 of 100 callers were answered within this time; `null` if there was no call."""
    retry_after_ms: int | None
    """What the last refused caller was told; `null` if none was refused."""


class AdmissionList(msgspec.Struct, frozen=True):
    """A page of tenants. Figures of the replicas in `replicas_missing` are not in it."""

    tenants: tuple[AdmissionRow, ...]
    replicas_missing: tuple[str, ...]
    """Replicas that have not reported for 15 s."""
    cursor: str | None = None


class SetEscalation(_Request, frozen=True, kw_only=True):
    """An operator's order: force open or closed, or clear the latch and every order."""

    order: Literal["force_open", "force_closed", "clear"]
    reason: Comment | None = None
    expires_at: Time | None = None
    """When a forced level ends by itself. Without it, when it is cleared."""


class EscalationCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What the replica that answers has counted, beside the thresholds of the settings."""

    replica: str
    window_s: float
    fallbacks_per_s: float
    """Runs that went on without a lock, over the complete fifths of the window."""
    fallbacks_per_s_max: float
    """A trip needs more, and more duplicates than before."""
    fifths_at_threshold: int
    """Fifths of the window with at least that rate. A trip needs all five."""
    duplicates: int
    """Runs that two replicas wrote at once, in the window."""
    duplicates_before: int
    """In the window before."""
    fallbacks_running: int
    """In the fifth that is not complete; it counts when it is."""
    duplicates_running: int
    quiet_s: float
    """Since when the rate has been low enough, without duplicates and failed probes."""
    dwell_s: float
    """How long it must be quiet before an escalation ends."""
    probes_ok: int
    """Answers of the lock store in that time."""
    probes_min: int
    trips_per_day_max: int
    """More trips latch it."""


class EscalationView(msgspec.Struct, frozen=True, kw_only=True):
    """The escalation level: whether failing open is allowed now."""

    level: Literal["normal", "escalated", "latched"]
    forced: Literal["force_open", "force_closed"] | None
    forced_by: str | None = None
    forced_at: datetime | None = None
    reason: str | None = None
    expires_at: datetime | None = None
    closes: tuple[Risk, ...]
    closed_now: tuple[Risk, ...]
    trips_today: int
    counters: EscalationCounters


class AuditSlots(_Request, frozen=True, kw_only=True):
    """Audit the slots of all tenants now. The body has no members."""


class DriftRow(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant whose count of slots differed from its unfinished runs."""

    tenant: str
    counted: int
    """What the count said."""
    true: int
    """How many unfinished runs hold a slot."""


class DriftAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An audit of slots."""

    at: datetime | None
    """When it was made; ``null`` before the first audit after a start."""
    checked: int
    """Tenants that were audited."""
    drifted: int
    """Tenants whose count was wrong."""
    repaired: tuple[DriftRow, ...]
    """What was repaired; of a dry run, what would be."""


class ReplicaRow(msgspec.Struct, frozen=True, kw_only=True):
    """One server process, as it last reported itself."""

    replica: str
    version: str
    started_at: datetime
    seen_at: datetime
    """When it last reported, by the store's clock. Replicas report every three seconds."""
    clock_offset_ms: int
    """How far its clock is ahead of the store's."""
    settings_revision: int
    """The settings in force there; the same on all replicas within two seconds of a change."""
    store: str
    """``ok``, or the error. ``unknown`` if it has not reported for 15 s."""
    locks: str
    bus: str
    runs_held: int
    """Runs that it is advancing now."""


class ReplicaList(msgspec.Struct, frozen=True):
    """A page of replicas, by name."""

    replicas: tuple[ReplicaRow, ...]
    cursor: str | None = None


class PromiseRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a drill has checked."""

    id: str
    says: str
    measured: str
    holds: bool


class DrillRow(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one drill, as its directory has it."""

    drill: str
    verdict: Literal["pass", "fail"]
    seed: int
    started_at: Annotated[datetime, Meta(tz=True)]
    duration_s: float
    promises: tuple[PromiseRow, ...]
    charts: tuple[JsonObject, ...] = ()
    """What was measured over time, of the drill that was asked for."""


class DrillList(msgspec.Struct, frozen=True):
    """The newest reports of drills that this server can read, newest first."""

    drills: tuple[DrillRow, ...]
    directory: str


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One worker that called a server in the last ten minutes."""

    worker_id: str
    tenant: str
    """The tenant whose jobs it takes; ``*`` for all."""
    topics: tuple[str, ...]
    """What it asks for; at most 20 topics for each replica that it called."""
    jobs: int
    """The leases that it holds, as far as the replica knows that it called last."""
    last_seen_at: datetime
    version: str | None
    """The version of its SDK, if it sends one."""


class WorkerList(msgspec.Struct, frozen=True):
    """A page of workers, by tenant and name."""

    workers: tuple[WorkerRow, ...]
    cursor: str | None = None


class Health(msgspec.Struct, frozen=True):
    """Whether the server is ready, check by check."""

    status: Literal["ok", "degraded", "unavailable", "draining"]
    """``degraded``: locks or bus fail, and runs go on by policy. Only the store is required."""
    checks: dict[str, str]
    """``ok``, or the error, for ``store``, ``locks`` and ``bus``."""


class OlderReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica of an older version."""

    replica: str
    version: str
    seen_at: datetime


class UpgradeView(msgspec.Struct, frozen=True, kw_only=True):
    """Whether every process of the deployment has the version of this one."""

    finished: bool
    level: int
    """The level of the store: processes below it cannot open it."""
    newest_level: int
    """The level of this replica's version."""
    older: tuple[OlderReplica, ...]
    """The replicas of an older version that still report, or did in the last ten minutes."""
    remedy: str | None
    """What an operator does to finish it."""


class FinishUpgrade(_Request, frozen=True, kw_only=True):
    """Declare that no older process is left. The body has no members."""
