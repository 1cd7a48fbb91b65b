"""The store port: where runs are, and the promises about them.

Each verb is one indivisible step: it happens entirely, durably and once, or not at all. The
contract suite (``tests/contract``) states every promise as a case and runs over every adapter. In
short:

* ``admit`` makes a run only if its tenant has a slot, its key is fresh and its definition current,
  and makes all of it: slot, run, jobs, timers, timeline. It is safe to send twice.
* ``accept`` takes a result only from the holder of the job's present lease. Accepted means durable,
  in the run's inbox, with an outbox row that keeps somebody coming back until it is applied.
* ``commit`` takes a transition only if the run is still what the writer read and the writer's fence
  is not below the highest that has written. It is safe to send twice.
* A slot is held exactly while its run is unfinished, because both change in the same step.

Every call ends within the adapter's bound or raises a ``BackendError``. Time is the store's own.
What is due at an instant is due from that instant on, and a lease that runs out at an instant does
not stand at it any more. A cursor that a list did not give out raises ``BadCursor``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from stanchion.core.admission import Verdict
from stanchion.core.events import Event
from stanchion.core.json_value import JsonValue
from stanchion.core.model import (
    Instant,
    Item,
    ItemKey,
    JobId,
    RunId,
    Stamp,
    StepId,
    TenantId,
    Topic,
    WorkflowId,
)
from stanchion.core.transition import TimelineEntry
from stanchion.core.workflow import Workflow
from stanchion.ports.records import (
    EVERY_RUN,
    Acceptance,
    Admission,
    Commit,
    CommitAnswer,
    DeadLetter,
    Document,
    Drift,
    ExpiredJob,
    FeedEntry,
    JobLease,
    JobView,
    LeasedJob,
    Loaded,
    OutboxRow,
    Page,
    PostAnswer,
    Renewals,
    Result,
    RunFilter,
    RunSummary,
    StoredWorkflow,
    Tenant,
)

__all__ = [
    "Definitions",
    "Documents",
    "Housekeeping",
    "Jobs",
    "Outbox",
    "Runs",
    "Store",
    "Tenants",
]


class Runs(Protocol):
    """Runs, from the gate to the last line of their timeline."""

    async def admit(self, admission: Admission, *, within_ms: int) -> Verdict:
        """Let a run begin, or say why not (``core.admission.judge`` has the order of questions).

        The caller waits at most ``within_ms``, and the store changes nothing after that time.
        """

    async def load(self, run_id: RunId) -> Loaded | None:
        """The run with all its steps, without items; its inbox, oldest first."""

    async def load_items(
        self, run_id: RunId, wanted: Mapping[StepId, Sequence[int]]
    ) -> dict[ItemKey, Item]:
        """These items, as far as they exist."""

    async def items_at(
        self, run_id: RunId, stamp: Stamp, wanted: Mapping[StepId, Sequence[int]]
    ) -> dict[ItemKey, Item] | None:
        """The same, in one step with a look at the run; ``None`` if it is not at ``stamp``.

        Whoever decides needs a run and its items from the same moment. A store that fails over may
        go back to what the run was, and would take a commit decided on items of a lost history.
        """

    async def commit(self, commit: Commit) -> CommitAnswer:
        """Make a transition true: steps, items, jobs, timers, timeline, slot, inbox and outbox.

        A run that finishes frees its slot, and its idempotency key begins to age. The run's outbox
        row goes when its inbox is empty. Asked in this order: is there such a run; is the nonce
        stored already (then it has succeeded before); is the fence stale; does the stamp match.
        """

    async def post(self, run_id: RunId, event: Event, *, entry_id: str) -> PostAnswer:
        """Put an event into a run's inbox, once an ``entry_id``, with an outbox row due at once."""

    async def timeline(
        self, run_id: RunId, *, cursor: str | None = None, limit: int = 100
    ) -> Page[TimelineEntry]:
        """A run's history, oldest first."""

    async def list_runs(
        self,
        tenant: TenantId,
        *,
        only: RunFilter = EVERY_RUN,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[RunSummary]:
        """A tenant's runs, newest first, of the same instant the highest id first.

        A run that begins meanwhile does not disturb the pages.

        With a filter, a page may hold fewer than ``limit`` runs and still not be the last.
        """

    async def feed(
        self, tenant: TenantId, *, after: str | None, limit: int = 100
    ) -> tuple[FeedEntry, ...]:
        """What happened to all of a tenant's runs, in the order of commits, after a position.

        ``None`` begins with the oldest that is kept. The newest thousands are kept. A commit
        without lines for the timeline is not in it. A position is read like a cursor.
        """

    async def feed_position(self, tenant: TenantId) -> str:
        """The present end of the tenant's feed: what comes after it is new."""

    async def active_runs(self, tenant: TenantId) -> int:
        """How many slots the tenant uses now."""


class Jobs(Protocol):
    """Jobs, from the ready index to an accepted result."""

    async def lease_jobs(
        self,
        worker_id: str,
        topics: Collection[Topic],
        *,
        max_jobs: int,
        ttl_ms: int,
        tenant: TenantId | None = None,
    ) -> tuple[LeasedJob, ...]:
        """Hand out ready jobs, one per tenant in turn; within a tenant and topic the oldest first.

        Each gets a fence above every one the job has had (``core.lease.next_fence``). ``tenant``
        restricts it to one.
        """

    async def renew_jobs(
        self, leases: Sequence[JobLease], *, ttl_ms: int, tenant: TenantId | None = None
    ) -> Renewals:
        """Extend the leases that have not expired; answered in the order of the request.

        A lease that ran out is lost, even if nobody else has the job yet. With ``tenant``, another
        tenant's job is an unknown job. A lease with ``progress`` replaces the job's progress, which
        is kept until the lease ends.
        """

    async def accept(
        self,
        results: Sequence[Result],
        *,
        row_due_in_ms: int = 0,
        tenant: TenantId | None = None,
    ) -> tuple[Acceptance, ...]:
        """Take results, each on its own: one answer each, in order.

        With ``tenant``, another tenant's job is an unknown job.

        Taken only under the job's present fence, up to the moment in which its expiry is noticed.
        The outbox row becomes due after ``row_due_in_ms``: time for whoever accepted to advance the
        run at once, before others are asked to.
        """

    async def job(self, job_id: JobId) -> JobView | None:
        """One job."""

    async def progress(self, run_id: RunId, jobs: Collection[JobId]) -> dict[JobId, JsonValue]:
        """The progress of these jobs of one run: of those that are leased and have reported any."""

    async def expire_jobs(self, *, limit: int, max_deliveries: int) -> tuple[ExpiredJob, ...]:
        """End leases that have run out, earliest first.

        The job is ready again and its old fence stale; or, delivered ``max_deliveries`` times, it
        is a dead letter and ``JobDied`` lies in its run's inbox, with an outbox row due at once.
        """

    async def ready_topics(self) -> Mapping[Topic, int]:
        """How many jobs are ready, by topic."""


class Outbox(Protocol):
    """Who must be advanced, and when to ask again."""

    async def fire_timers(self, *, limit: int) -> tuple[RunId, ...]:
        """Turn due timers, earliest first, into inbox entries with outbox rows due at once.

        One run id for each timer: a run with two of them is named twice.
        """

    async def take_outbox(self, *, limit: int, hold_ms: int) -> tuple[OutboxRow, ...]:
        """Rows that are due, earliest first. Each is due again in ``hold_ms``, unless confirmed."""

    async def confirm_outbox(self, rows: Sequence[OutboxRow]) -> None:
        """Remove rows whose run has nothing in its inbox and whose number has not risen since."""

    async def defer_outbox(self, row: OutboxRow, *, delay_ms: int) -> None:
        """Make a row due later: the run was busy, or its lock could not be had.

        A row whose number has risen since stays as it is: what came in meanwhile is due on its own.
        """

    async def outbox_size(self) -> int:
        """How many rows there are."""


class Definitions(Protocol):
    """Workflows, by version."""

    async def put_workflow(self, tenant: TenantId, workflow: Workflow) -> int:
        """Store a workflow; its version. The same workflow as the newest one keeps its version.

        The order of its steps is part of it: it decides which failure becomes a run's error.
        """

    async def workflow(
        self, tenant: TenantId, workflow_id: WorkflowId, *, version: int | None = None
    ) -> StoredWorkflow | None:
        """One version, the newest unless asked for otherwise."""

    async def list_workflows(
        self, tenant: TenantId, *, cursor: str | None = None, limit: int = 100
    ) -> Page[StoredWorkflow]:
        """The newest version of each, by id."""


class Tenants(Protocol):
    """What each tenant may do."""

    async def put_tenant(self, tenant: TenantId, config: Tenant) -> None:
        """Replace a tenant's configuration. In force for every admission after the answer."""

    async def delete_tenant(self, tenant: TenantId) -> bool:
        """Forget a tenant's configuration: the defaults hold again. Whether there was one."""

    async def tenant(self, tenant: TenantId) -> Tenant:
        """A tenant's configuration; the defaults for one nobody configured."""

    async def list_tenants(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> Page[tuple[TenantId, Tenant]]:
        """Those that were configured, by name."""


class Documents(Protocol):
    """Small named values with a revision: settings, keys, latches."""

    async def document(self, kind: str, name: str) -> Document | None:
        """One document."""

    async def put_document(
        self, kind: str, name: str, value: JsonValue, *, read: int | None
    ) -> Document | None:
        """Write a document if its revision is still ``read`` (0: not there; ``None``: whatever).

        The new one, with its revision raised (the first is 1); ``None`` if somebody else was first.
        """

    async def list_documents(
        self, kind: str, *, cursor: str | None = None, limit: int = 100
    ) -> Page[tuple[str, Document]]:
        """All of a kind, by name."""

    async def delete_document(self, kind: str, name: str) -> bool:
        """Remove a document; ``False`` if there was none."""


class Housekeeping(Protocol):
    """Dead letters, audit, retention, health."""

    async def write_dead_letter(
        self, run_id: RunId, entry_id: str, *, cause: str
    ) -> DeadLetter | None:
        """Move an inbox entry that cannot be applied to the dead letters; ``None`` if it is gone.

        The letter's id is ``event:<run id>:<entry id>``. The outbox row goes with the last entry.
        """

    async def count_failure(self, run_id: RunId, entry_id: str) -> int:
        """Raise and read how often applying an inbox entry failed through a fault of our own.

        0 for an entry that is not there (any more).
        """

    async def list_dead_letters(
        self, tenant: TenantId | None, *, cursor: str | None = None, limit: int = 100
    ) -> Page[DeadLetter]:
        """Dead letters, oldest first."""

    async def replay_dead_letter(self, letter_id: str, *, actor: str) -> DeadLetter | None:
        """Take a dead letter out and put it back to work through the inbox, once.

        A job's letter posts ``JobReplayed`` as entry ``replayed:<job id>#<dispatch>``; an event's
        letter posts the event again, as the entry it was. The letter of a finished run is only
        taken out. ``None`` if there is no such letter (any more).
        """

    async def audit_slots(self, *, limit: int) -> tuple[Drift, ...]:
        """Compare the next ``limit`` tenants' slots with their unfinished runs, and repair.

        Called again and again, it goes round all tenants.
        """

    async def purge(self, *, finished_before: Instant, limit: int) -> int:
        """Remove runs that finished earlier, oldest first, with all that is theirs; how many."""

    async def now(self) -> Instant:
        """The store's clock."""

    async def ping(self) -> None:
        """Answer, or raise."""

    async def close(self) -> None:
        """Let go of connections and files; what was acknowledged is kept. Safe to call twice."""


class Store(Runs, Jobs, Outbox, Definitions, Tenants, Documents, Housekeeping, Protocol):
    """All of it. Services ask for the smallest part they need."""
