"""The store port: runs, jobs, workflows, tenants, and the guarantees about them.

Each method is one transaction: it happens entirely, durably and once, or not at all. The contract
suite (``tests/contract``) tests every guarantee with every adapter. In short:

* ``admit`` creates a run only if its tenant has a slot, its key is new and its definition current,
  and then creates slot, run, jobs, timers and timeline together. Repeating it is safe.
* ``admit_many`` is ``admit`` for several runs of one tenant, in one transaction. Each is judged by
  itself, after those before it.
* ``check_starts`` tells for many starts of a tenant what ``admit`` would answer, and changes
  nothing.
* ``accept`` takes a result only from the holder of the current lease of the job. An accepted result
  is durable in the inbox of the run, with an outbox row that stays until the result is applied.
* ``commit`` writes a transition only if the run is unchanged since the writer read it, and the
  writer's fence is not below the highest that has written. Repeating it is safe.
* ``settle`` is ``accept`` and ``commit`` in one: the results of one run and the transition that
  applies them are written together, or nothing is.
* A reservation of a budget is held exactly while its run is unfinished, and what a worker reports
  as used is charged once, in the transaction that takes the report (``core.budget``).
* A slot is held exactly while its run is unfinished and not queued: both change in the same
  transaction.
* Every transaction that frees or adds a slot of a tenant promotes its queued runs, in the order of
  ``core.queue`` and at most ``PROMOTED_AT_ONCE_MAX`` of them: afterwards a run is queued only if no
  slot is free, or a promoted run is not decided on; the commit of that decision promotes the next.
  A promotion changes the stamp of the run and its status to ``pending``, and posts ``Promoted`` to
  its inbox.
* A method with an ``audit`` argument writes that entry to the audit log in the same transaction, if
  and only if it changes something.

Every call returns within the time limit of the adapter or raises a ``BackendError``. All times are
those of the store's clock. What is due at an instant is due from that instant on, and a lease that
expires at an instant is expired at it. A cursor that the list did not issue raises ``BadCursor``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from stanchion.core.admission import Verdict
from stanchion.core.audit import EVERY_ENTRY, AuditEntry, AuditFilter
from stanchion.core.budget import BudgetStanding
from stanchion.core.events import Event
from stanchion.core.json_value import JsonValue
from stanchion.core.model import (
    Instant,
    Item,
    ItemKey,
    JobId,
    PendingApproval,
    RunId,
    Stamp,
    StepId,
    TenantId,
    Topic,
    WorkflowId,
    WorkflowSource,
)
from stanchion.core.queue import QueuePlace
from stanchion.core.receipts import Receipt, ReceiptBatch
from stanchion.core.topic_limits import PoolUse, TokenGrant, TokenPool, TokenRenewal
from stanchion.core.transition import TimelineEntry
from stanchion.core.why import RunFacts
from stanchion.core.workflow import Workflow
from stanchion.ports.records import (
    EVERY_RUN,
    Acceptance,
    Admission,
    Commit,
    CommitAnswer,
    DeadLetter,
    Document,
    ExpiredJob,
    FeedEntry,
    JobLease,
    JobView,
    LeasedJob,
    Loaded,
    LostReason,
    OldestWaits,
    OutboxRow,
    Page,
    PostAnswer,
    Renewals,
    Result,
    RunFilter,
    RunSummary,
    SettleAnswer,
    SlotAudit,
    StartsChecked,
    StartTerms,
    StoredSummaries,
    StoredWorkflow,
    Tenant,
    TenantStanding,
    WorkflowUse,
)


class Runs(Protocol):
    """Runs: admission, commits, inbox, timeline, lists."""

    admissions_max: int
    """Runs that one call of ``admit_many`` may have: the store is busy for some milliseconds."""

    async def admit(self, admission: Admission, *, within_ms: int) -> Verdict:
        """Create a run, or return why not, as ``core.admission.judge`` decides.

        Queued runs for which there is a slot are promoted first. If the verdict is ``Queued``, the
        run of ``core.run.queued_run`` is created, and the verdict has its position.

        The caller waits at most ``within_ms``, and the store changes nothing after that time.
        """

    def prepare_admissions(self, admissions: Sequence[Admission]) -> Sequence[Admission]:
        """The same admissions, of one tenant, encoded as far as that is possible beforehand.

        For ``admit_many``, which takes others as well. The store is not asked.
        """

    async def admit_many(
        self, admissions: Sequence[Admission], *, within_ms: int
    ) -> tuple[Verdict, ...]:
        """Admit runs of one tenant, at most ``admissions_max``, in a few transactions at most.

        The verdicts are those of ``admit`` for one after the other: a run that is refused does not
        affect the others. If the call fails, those that are not refused were created up to one of
        them, perhaps none or all.
        """

    async def check_starts(
        self, tenant: TenantId, terms: Sequence[StartTerms], keys: Collection[str]
    ) -> StartsChecked:
        """What ``admit`` would answer now to starts of a tenant, all at the same moment.

        For each of ``terms`` the refusal of a start with a new key or none, and the runs of those
        ``keys`` that are known. Changes nothing: a start that is not refused must be admitted.
        """

    async def load(self, run_id: RunId) -> Loaded | None:
        """The run with all its steps, without items, and its inbox, oldest entry first."""

    async def run_facts(self, run_id: RunId) -> RunFacts | None:
        """The run, without items, and all that it waits for, in one transaction; for ``why``.

        Open jobs, timers and dead letters are bounded by the constants of ``core.why``.
        """

    async def load_items(
        self, run_id: RunId, wanted: Mapping[StepId, Sequence[int]]
    ) -> dict[ItemKey, Item]:
        """The items among these that exist."""

    async def items_at(
        self, run_id: RunId, stamp: Stamp, wanted: Mapping[StepId, Sequence[int]]
    ) -> dict[ItemKey, Item] | None:
        """The items, read in one transaction with the run; ``None`` if it is not at ``stamp``.

        A decision needs a run and its items from the same state. After a failover the store may
        return to an earlier state of the run, and would accept a commit that was decided on items
        of a lost history.
        """

    async def commit(self, commit: Commit) -> CommitAnswer:
        """Write a transition: steps, items, jobs, timers, timeline, slot, inbox and outbox.

        A run that finishes frees its slot, and the retention of its idempotency key begins; the key
        of a run that waited too long in the queue is removed at once. The answer names the runs
        that were promoted. The
        outbox row of the run is removed when its inbox is empty. Checked in this order: whether
        the run exists, whether the nonce is stored (then the commit has succeeded before), whether
        the fence is stale, whether the stamp matches.
        """

    async def settle(self, results: Sequence[Result], commit: Commit) -> SettleAnswer:
        """Accept results of one run, and write the transition that applies them, in one step.

        The jobs are ended as ``accept`` ends them, without entries in the inbox, and the transition
        is written as by ``commit``. Both happen for all results, or nothing does: if ``commit``
        would not be accepted, if the inbox has an entry that is not in ``commit.applied``, or if a
        result would not be accepted, is for a job of another run, or is for the same job as another
        one. There may be no results: then it is a commit that overtakes no entry. Repeating it is
        safe as long as the run has not changed again; after that the answer is a miss, although the
        results were accepted.
        """

    async def post(
        self, run_id: RunId, event: Event, *, entry_id: str, audit: AuditEntry | None = None
    ) -> PostAnswer:
        """Post an event to the inbox of a run, once per ``entry_id``, and make it due at once."""

    async def timeline(
        self, run_id: RunId, *, cursor: str | None = None, limit: int = 100
    ) -> Page[TimelineEntry]:
        """The timeline of a run, oldest entry first."""

    async def list_runs(
        self,
        tenant: TenantId | None,
        *,
        only: RunFilter = EVERY_RUN,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[RunSummary]:
        """The runs of a tenant, or of all, newest first; of the same instant the highest id first.

        Runs that start between two pages do not change later pages. A page is read from one index
        (``index_for``) and looks at 10 × ``limit`` runs at most: with a filter it may hold fewer
        than ``limit`` and still not be the last.
        """

    async def list_approvals(
        self, tenant: TenantId | None, *, cursor: str | None = None, limit: int = 100
    ) -> Page[PendingApproval]:
        """Approvals that wait for a decision, of one tenant or of all, oldest first.

        An approval is added in the step that makes its step wait, and removed in the step that
        ends the wait.
        """

    async def feed(
        self, tenant: TenantId, *, after: str | None, limit: int = 100
    ) -> tuple[FeedEntry, ...]:
        """The timeline entries of all runs of a tenant after a position, in the order of commits.

        ``None`` begins with the oldest entry; several thousand of the newest are kept. If entries
        after the position are no longer kept, the first one that is has ``is_after_gap``. A commit
        without timeline entries is not in the feed. An invalid position raises ``BadCursor``.
        """

    async def feed_position(self, tenant: TenantId) -> str:
        """The position of the current end of the tenant's feed."""

    async def active_runs(self, tenant: TenantId) -> int:
        """The number of slots that the tenant uses."""

    async def queued_runs(self, tenant: TenantId) -> int:
        """The number of the tenant's runs that wait for a slot."""

    async def queue_place(self, run_id: RunId) -> QueuePlace | None:
        """The place of a run in its tenant's queue; ``None`` outside of it."""

    async def oldest_waits(self, tenant: TenantId | None) -> OldestWaits:
        """What has waited longest for a slot and for a worker, of one tenant or of all.

        Reads the first entries of indexes: of the queued runs, and of the ready jobs of each tenant
        and topic. Does not read runs.
        """


class Jobs(Protocol):
    """Jobs: leases, results, expiry."""

    async def lease_jobs(
        self,
        worker_id: str,
        topics: Collection[Topic],
        *,
        max_jobs: int,
        ttl_ms: int,
        tenant: TenantId | None = None,
        not_after: Instant | None = None,
    ) -> tuple[LeasedJob, ...]:
        """Lease ready jobs, one per tenant in turn; within a tenant and topic the oldest first.

        Each gets a fence above all earlier ones of the job (``core.lease.next_fence``). ``tenant``
        restricts it to one tenant. After ``not_after`` nothing is leased.
        """

    async def ready_tenants(
        self,
        topics: Collection[Topic],
        *,
        limit: int,
        tenant: TenantId | None = None,
        but_not: Collection[TenantId] = (),
    ) -> Mapping[TenantId, int]:
        """At most ``limit`` tenants with ready jobs of these topics, and how many of them.

        ``tenant`` restricts it to one tenant; those in ``but_not`` are left out. If a queue is
        longer than that, the tenants that wait longest for their turn are among them.
        """

    async def renew_jobs(
        self,
        leases: Sequence[JobLease],
        *,
        ttl_ms: int,
        tenant: TenantId | None = None,
        not_after: Instant | None = None,
    ) -> Renewals:
        """Extend the leases that have not expired; results are in the order of the request.

        An expired lease is lost, even if the job has not been leased again. With ``tenant``, jobs
        of other tenants are unknown. A lease with ``progress`` replaces the progress of the job,
        which is kept until the lease ends. What a lease with ``usage`` adds to earlier reports of
        the same job and fence is charged to the run. After ``not_after`` nothing is extended, and
        no lease is in the answer.
        """

    async def lost_leases(
        self, leases: Sequence[JobLease], *, tenant: TenantId | None = None
    ) -> dict[JobId, LostReason]:
        """The leases among these that are lost, with the reasons. Changes nothing.

        A lost lease stays lost: its fence is never issued again. With ``tenant``, jobs of other
        tenants are unknown.
        """

    async def accept(
        self,
        results: Sequence[Result],
        *,
        row_due_in_ms: int = 0,
        tenant: TenantId | None = None,
    ) -> tuple[Acceptance, ...]:
        """Accept results, each independently; returns one answer each, in order.

        With ``tenant``, jobs of other tenants are unknown. A result is accepted only with the
        current fence of the job, until ``expire_jobs`` has ended the lease; its ``usage`` is
        charged as that of a renewal is. The outbox row becomes due after ``row_due_in_ms``: the
        caller can advance the run before other replicas do.
        """

    async def job(self, job_id: JobId) -> JobView | None:
        """One job."""

    async def progress(self, run_id: RunId, jobs: Collection[JobId]) -> dict[JobId, JsonValue]:
        """The progress of those of the jobs that are leased and have reported any."""

    async def expire_jobs(self, *, limit: int, max_deliveries: int) -> tuple[ExpiredJob, ...]:
        """End expired leases, earliest first.

        The job becomes ready again and its old fence stale. After ``max_deliveries`` deliveries, or
        the job's own ``max_deliveries``, it becomes a dead letter, and ``JobDied`` is posted to its
        run with an outbox row due at once.

        A job with ``attempt_timeout_ms`` whose first lease is older than that is revoked instead,
        leased or ready, and ``AttemptFailed`` (code ``attempt_timeout``) is posted in the same way.
        Until then its lease holds and can be renewed.
        """

    async def ready_topics(self) -> Mapping[Topic, int]:
        """The number of ready jobs, by topic."""


class Tokens(Protocol):
    """Tokens of topic limits, in pools (``core.topic_limits``). Expired tokens do not count.

    The numbers of a limit come with each call; the store has only its tokens, and the time up to
    which its rate is used.
    """

    async def take_tokens(
        self, pool: TokenPool, tokens: Sequence[str], *, ttl_ms: int
    ) -> TokenGrant:
        """Take tokens with these names, as many as there are (``core.topic_limits.grant_tokens``).

        Tokens that are there already are granted and extended, and use no rate: repeating the call
        is safe.
        """

    async def renew_tokens(
        self, pool: TokenPool, tokens: Mapping[str, str], *, ttl_ms: int
    ) -> TokenRenewal:
        """Extend tokens, each under the name to which ``tokens`` maps its present one.

        Returns the new names. A token that keeps its name is extended only if fewer than
        ``max_running`` of the unexpired ones were taken before it. One that is not there under
        either name is taken if there are fewer than ``max_running``, and uses no rate.
        """

    async def release_tokens(
        self, pool: TokenPool, tokens: Collection[str], *, is_unused: bool = False
    ) -> int:
        """Remove tokens; returns how many were there. Unused ones are given back to the rate."""

    async def pool_uses(self, pools: Sequence[TokenPool]) -> tuple[PoolUse, ...]:
        """How much of each pool is in use, in the order of the pools."""


class Outbox(Protocol):
    """The runs that must be advanced, and timers."""

    async def fire_timers(self, *, limit: int) -> tuple[RunId, ...]:
        """Turn due timers into inbox entries with outbox rows due at once.

        Those of a tenant fire earliest first. If more than ``limit`` are due, tenants take turns:
        no tenant with a due timer waits while others get two, except those of many tenants.

        Returns one run id for each timer: a run with two due timers appears twice.
        """

    async def take_outbox(self, *, limit: int, hold_ms: int) -> tuple[OutboxRow, ...]:
        """Due rows, earliest first. Each is due again after ``hold_ms`` unless confirmed.

        If there are more than ``limit``, tenants may take turns: see ``ports.bus.Bus.has_turns``.
        """

    async def confirm_outbox(self, rows: Sequence[OutboxRow]) -> None:
        """Remove those of the rows whose number has not risen and whose run's inbox is empty."""

    async def defer_outbox(self, row: OutboxRow, *, delay_ms: int) -> None:
        """Make a row due later: the lock of the run was contended or unavailable.

        A row whose number has risen since is not changed: the new entry is due by itself.
        """

    async def outbox_size(self) -> int:
        """The number of rows."""


class Definitions(Protocol):
    """Workflows, by version: those of each tenant, and shared ones.

    A shared workflow is in force for every tenant without an own workflow of its id, in the version
    that the tenant's configuration pins, or else in the newest.
    """

    async def put_workflow(
        self, tenant: TenantId, workflow: Workflow, *, audit: AuditEntry | None = None
    ) -> int:
        """Store a workflow; returns its version. An unchanged workflow keeps its version.

        The order of its steps counts: it decides which failure becomes the error of a run. The
        store sets ``before`` and ``after`` of the entry: ``{"version": n}``.
        """

    async def put_shared_workflow(
        self, workflow: Workflow, *, audit: AuditEntry | None = None
    ) -> int:
        """Store a shared workflow; returns its version. An unchanged workflow keeps its version.

        Every admission after the return compares with this version or a later one. If the call
        fails, some tenants may have the version and some not, until it is repeated.
        """

    async def workflow(
        self,
        tenant: TenantId,
        workflow_id: WorkflowId,
        *,
        version: int | None = None,
        source: WorkflowSource | None = None,
    ) -> StoredWorkflow | None:
        """A workflow as the tenant runs it; ``None`` if there is none.

        The tenant's own one, or else the shared one; ``source`` restricts it to one of them. The
        version in force, or the given one.
        """

    async def shared_workflow(
        self, workflow_id: WorkflowId, *, version: int | None = None
    ) -> StoredWorkflow | None:
        """One version of a shared workflow, by default the newest; ``None`` if there is none."""

    async def list_workflows(
        self, tenant: TenantId, *, cursor: str | None = None, limit: int = 100
    ) -> Page[StoredWorkflow]:
        """The workflows of a tenant, own and shared, in the versions in force, sorted by id."""

    async def list_shared_workflows(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> Page[StoredWorkflow]:
        """The newest version of each shared workflow, sorted by id."""

    async def list_workflow_uses(
        self, workflow_id: WorkflowId, *, cursor: str | None = None, limit: int = 100
    ) -> Page[WorkflowUse]:
        """What each tenant runs under the id of a shared workflow, sorted by tenant.

        Listed are tenants with a configuration, a workflow, or a run, now or earlier.
        """


class Tenants(Protocol):
    """The configuration of tenants."""

    async def put_tenant(
        self, tenant: TenantId, config: Tenant, *, audit: AuditEntry | None = None
    ) -> None:
        """Replace the configuration of a tenant. Applies to every admission after the return.

        The store sets ``before`` and ``after`` of the entry to the configurations.
        """

    async def promote(self, tenant: TenantId) -> tuple[RunId, ...]:
        """Promote the next queued runs, at most ``PROMOTED_AT_ONCE_MAX``; returns these runs.

        None if none is queued or no slot is free. To be called until then after a change of the
        configuration, which promotes no more than that either.
        """

    async def delete_tenant(self, tenant: TenantId, *, audit: AuditEntry | None = None) -> bool:
        """Remove the configuration of a tenant: the defaults apply. Returns if there was one.

        The store sets ``before`` of the entry to the configuration.
        """

    async def tenant(self, tenant: TenantId) -> Tenant:
        """The configuration of a tenant; the defaults if none is stored."""

    async def budgets(self, tenant: TenantId) -> dict[str, BudgetStanding]:
        """The budgets of a tenant, by name, as of now."""

    async def list_tenants(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> Page[tuple[TenantId, Tenant]]:
        """The tenants with a stored configuration, sorted by name."""

    async def list_standings(
        self, *, seen_since: Instant, cursor: str | None = None, limit: int = 100
    ) -> Page[TenantStanding]:
        """Tenants that are configured, use a slot or started a run since then, sorted by name."""

    async def standings(self, tenants: Sequence[TenantId]) -> tuple[TenantStanding, ...]:
        """The standings of these tenants, in this order, also of those that were never seen."""


class Documents(Protocol):
    """Small named values with a revision: settings, keys, latches."""

    async def document(self, kind: str, name: str) -> Document | None:
        """One document."""

    async def put_document(
        self,
        kind: str,
        name: str,
        value: JsonValue,
        *,
        read: int | None,
        audit: AuditEntry | None = None,
    ) -> Document | None:
        """Write a document if its revision is still ``read`` (0: none; ``None``: any).

        Returns the document with its new revision (the first is 1); ``None`` if the revision has
        changed.
        """

    async def list_documents(
        self, kind: str, *, cursor: str | None = None, limit: int = 100
    ) -> Page[tuple[str, Document]]:
        """All documents of a kind, sorted by name."""

    async def delete_document(
        self, kind: str, name: str, *, audit: AuditEntry | None = None
    ) -> bool:
        """Remove a document; ``False`` if there was none."""


class Replicas(Protocol):
    """The summaries that replicas report, each under its own name, and the level of the store.

    A summary need not outlive the server of a store that one process serves. Such a store always
    has the level of that process.
    """

    async def level(self) -> int:
        """The level of the store (``core.upgrade``): processes below it cannot open it."""

    async def raise_level(self, level: int, *, audit: AuditEntry | None = None) -> int:
        """Raise the level of the store; returns the level, which never falls.

        The audit entry is written if the level has changed.
        """

    async def report_replica(self, replica: str, summary: JsonValue, *, keep_ms: int) -> Instant:
        """Replace the summary of a replica, and remove those not replaced for ``keep_ms``.

        Returns the time of the store, which is the new ``seen_at``.
        """

    async def replica_summaries(self) -> StoredSummaries:
        """All summaries, sorted by replica, and the time of the store, in one read."""

    async def remove_replica(self, replica: str) -> bool:
        """Remove the summary of a replica that stops; ``False`` if there was none."""


class Housekeeping(Protocol):
    """Dead letters, audit, retention, health."""

    async def write_dead_letter(
        self, run_id: RunId, entry_id: str, *, cause: str
    ) -> DeadLetter | None:
        """Move an inbox entry that cannot be applied to the dead letters; ``None`` if it is gone.

        The id of the letter is ``event:<run id>:<entry id>``. The outbox row is removed with the
        last entry.
        """

    async def count_failure(self, run_id: RunId, entry_id: str) -> int:
        """Count an internal error while applying an inbox entry; returns the new count.

        Returns 0 if the entry does not exist.
        """

    async def list_dead_letters(
        self, tenant: TenantId | None, *, cursor: str | None = None, limit: int = 100
    ) -> Page[DeadLetter]:
        """Dead letters, oldest first."""

    async def replay_dead_letter(
        self, letter_id: str, *, actor: str, audit: AuditEntry | None = None
    ) -> DeadLetter | None:
        """Remove a dead letter and post it to the inbox of its run, once.

        The letter of a job posts ``JobReplayed`` as entry ``replayed:<job id>#<dispatch>``; the
        letter of an event posts the event again, under its former entry id. The letter of a
        finished run is only removed. Returns the letter; ``None`` if there is none.
        """

    async def discard_dead_letter(
        self, letter_id: str, *, actor: str, audit: AuditEntry | None = None
    ) -> DeadLetter | None:
        """Discard a dead letter, once.

        The letter of a job posts ``JobDiscarded`` as entry ``discarded:<job id>#<dispatch>``,
        unless its run has finished; the event of an event's letter is dropped. Returns the letter;
        ``None`` if there is none.
        """

    async def audit_slots(
        self,
        *,
        limit: int,
        cursor: str | None = None,
        repair: bool = True,
        audit: AuditEntry | None = None,
    ) -> SlotAudit:
        """Compare the slots of tenants with their unfinished runs, and with ``repair`` correct.

        An entry is written for each correction: the store sets its subject, tenant, ``before`` and
        ``after``.
        """

    async def purge(self, *, finished_before: Instant, limit: int) -> int:
        """Remove runs that finished earlier with all their data, oldest first; returns how many.

        Not in one step: after an interruption the next run may lack its jobs and a part of its
        timeline, until it is removed as well.
        """

    async def now(self) -> Instant:
        """The time of the store."""

    async def ping(self) -> None:
        """Return if the store answers. Raises ``BackendError``."""

    async def close(self) -> None:
        """Close all connections and files. Acknowledged data is kept. Safe to call twice."""


class AuditLog(Protocol):
    """The entries that other methods wrote with their changes. They are kept for a limited time."""

    async def add_audit(self, entry: AuditEntry, *, once: str | None = None) -> bool:
        """Write an entry whose change is not in this store, such as that of a lock.

        Of several with the same ``once`` the first is written; returns whether this one was.
        """

    async def list_audit(
        self, only: AuditFilter = EVERY_ENTRY, *, cursor: str | None = None, limit: int = 100
    ) -> Page[AuditEntry]:
        """The entries that fit, newest first.

        A page looks at ten times ``limit`` entries at most, so it may be short and not be the last.
        Entries that are written between two pages do not change later pages.
        """


class Receipts(Protocol):
    """Receipts of refusals: the newest thousand of each tenant, for a day."""

    async def put_receipts(
        self, tenant: TenantId, receipts: Sequence[Receipt], *, batch_id: str
    ) -> None:
        """Write receipts of a tenant, oldest first, once per ``batch_id``; remove old ones."""

    async def receipt_batches(
        self, tenant: TenantId | None, *, at_most: str | None = None, limit: int = 20
    ) -> tuple[ReceiptBatch, ...]:
        """Batches of one tenant or of all, newest first; from the place ``at_most`` on, with it.

        Also contains batches with receipts beyond the newest thousand, and older ones than a day.
        """


class Store(
    Runs,
    Jobs,
    Tokens,
    Outbox,
    Definitions,
    Tenants,
    Documents,
    Replicas,
    Housekeeping,
    AuditLog,
    Receipts,
    Protocol,
):
    """The whole port. Services declare the smallest part that they need."""
