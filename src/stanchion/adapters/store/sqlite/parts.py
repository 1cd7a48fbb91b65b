"""The store's verbs, each handed to the thread that carries it out.

What changes something goes to the writer, what only looks to the reader. What the verbs do is in
the modules beside this one, as functions of a database; what they promise is in ``ports.store``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, TypeVar

from stanchion.adapters.lane import Lane
from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.store.sqlite import (
    admission as gate,
)
from stanchion.adapters.store.sqlite import (
    definitions,
    history,
    inbox,
    jobs,
    listing,
    outbox,
    ready,
    runs,
    state,
)
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
from stanchion.ports.clock import Clock
from stanchion.ports.records import (
    EVERY_RUN,
    Acceptance,
    Admission,
    Commit,
    CommitAnswer,
    Document,
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

__all__ = ["Part", "SqliteDefinitions", "SqliteJobs", "SqliteOutbox", "SqliteRuns"]

_Answer = TypeVar("_Answer")
_MS_PER_S: Final = 1_000


class Part:
    """What every part of the store has: a thread that writes, and one that reads."""

    def __init__(
        self,
        *,
        path: str,
        writer: Lane[Database],
        reader: Lane[Database],
        clock: Clock,
        key_ttl_ms: int,
        timeout_s: float,
    ) -> None:
        self.path = path
        self._writer = writer
        self._reader = reader
        self._clock = clock
        self._key_ttl_ms = key_ttl_ms
        self._timeout_s = timeout_s

    async def _write(self, act: Callable[[Database], _Answer]) -> _Answer:
        return await self._writer.call(act, wait_s=self._timeout_s)

    async def _read(self, act: Callable[[Database], _Answer]) -> _Answer:
        return await self._reader.call(act, wait_s=self._timeout_s)


class SqliteRuns(Part):
    """See ``ports.store.Runs``."""

    async def admit(self, admission: Admission, *, within_ms: int) -> Verdict:
        not_after = Instant(self._clock.now() + within_ms)
        return await self._writer.call(
            lambda db: gate.admit(db, admission, not_after, self._key_ttl_ms),
            wait_s=within_ms / _MS_PER_S,
        )

    async def load(self, run_id: RunId) -> Loaded | None:
        return await self._read(lambda db: runs.load(db, run_id))

    async def load_items(
        self, run_id: RunId, wanted: Mapping[StepId, Sequence[int]]
    ) -> dict[ItemKey, Item]:
        if not wanted:
            return {}
        return await self._read(lambda db: state.read_items(db, run_id, wanted))

    async def items_at(
        self, run_id: RunId, stamp: Stamp, wanted: Mapping[StepId, Sequence[int]]
    ) -> dict[ItemKey, Item] | None:
        return await self._read(lambda db: runs.items_at(db, run_id, stamp, wanted))

    async def commit(self, commit: Commit) -> CommitAnswer:
        return await self._write(lambda db: runs.commit(db, commit))

    async def post(self, run_id: RunId, event: Event, *, entry_id: str) -> PostAnswer:
        return await self._write(lambda db: inbox.post(db, run_id, event, entry_id))

    async def timeline(
        self, run_id: RunId, *, cursor: str | None = None, limit: int = 100
    ) -> Page[TimelineEntry]:
        return await self._read(lambda db: history.timeline(db, run_id, cursor, limit))

    async def list_runs(
        self,
        tenant: TenantId,
        *,
        only: RunFilter = EVERY_RUN,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[RunSummary]:
        return await self._read(lambda db: listing.list_runs(db, tenant, only, cursor, limit))

    async def feed(
        self, tenant: TenantId, *, after: str | None, limit: int = 100
    ) -> tuple[FeedEntry, ...]:
        return await self._read(lambda db: history.feed(db, tenant, after, limit))

    async def feed_position(self, tenant: TenantId) -> str:
        return await self._read(lambda db: history.feed_position(db, tenant))

    async def active_runs(self, tenant: TenantId) -> int:
        return await self._read(lambda db: runs.active_runs(db, tenant))


class SqliteJobs(Part):
    """See ``ports.store.Jobs``."""

    async def lease_jobs(
        self,
        worker_id: str,
        topics: Collection[Topic],
        *,
        max_jobs: int,
        ttl_ms: int,
        tenant: TenantId | None = None,
    ) -> tuple[LeasedJob, ...]:
        return await self._write(
            lambda db: ready.lease(
                db, worker_id, topics, max_jobs=max_jobs, ttl_ms=ttl_ms, tenant=tenant
            )
        )

    async def renew_jobs(
        self, leases: Sequence[JobLease], *, ttl_ms: int, tenant: TenantId | None = None
    ) -> Renewals:
        return await self._write(lambda db: jobs.renew(db, leases, ttl_ms, tenant))

    async def accept(
        self,
        results: Sequence[Result],
        *,
        row_due_in_ms: int = 0,
        tenant: TenantId | None = None,
    ) -> tuple[Acceptance, ...]:
        return await self._write(lambda db: jobs.accept(db, results, row_due_in_ms, tenant))

    async def job(self, job_id: JobId) -> JobView | None:
        return await self._read(lambda db: jobs.show(db, job_id))

    async def progress(self, run_id: RunId, wanted: Collection[JobId]) -> dict[JobId, JsonValue]:
        return await self._read(lambda db: jobs.progress(db, run_id, wanted))

    async def expire_jobs(self, *, limit: int, max_deliveries: int) -> tuple[ExpiredJob, ...]:
        return await self._write(lambda db: jobs.expire(db, limit, max_deliveries))

    async def ready_topics(self) -> Mapping[Topic, int]:
        return await self._read(ready.count_by_topic)


class SqliteOutbox(Part):
    """See ``ports.store.Outbox``."""

    async def fire_timers(self, *, limit: int) -> tuple[RunId, ...]:
        return await self._write(lambda db: outbox.fire_timers(db, limit))

    async def take_outbox(self, *, limit: int, hold_ms: int) -> tuple[OutboxRow, ...]:
        return await self._write(lambda db: outbox.take(db, limit, hold_ms))

    async def confirm_outbox(self, rows: Sequence[OutboxRow]) -> None:
        await self._write(lambda db: outbox.confirm(db, rows))

    async def defer_outbox(self, row: OutboxRow, *, delay_ms: int) -> None:
        await self._write(lambda db: outbox.defer(db, row, delay_ms))

    async def outbox_size(self) -> int:
        return await self._read(outbox.size)


class SqliteDefinitions(Part):
    """See ``ports.store.Definitions``, ``Tenants`` and ``Documents``."""

    async def put_workflow(self, tenant: TenantId, workflow: Workflow) -> int:
        return await self._write(lambda db: definitions.put_workflow(db, tenant, workflow))

    async def workflow(
        self, tenant: TenantId, workflow_id: WorkflowId, *, version: int | None = None
    ) -> StoredWorkflow | None:
        return await self._read(
            lambda db: definitions.read_workflow(db, tenant, workflow_id, version)
        )

    async def list_workflows(
        self, tenant: TenantId, *, cursor: str | None = None, limit: int = 100
    ) -> Page[StoredWorkflow]:
        return await self._read(lambda db: definitions.list_workflows(db, tenant, cursor, limit))

    async def put_tenant(self, tenant: TenantId, config: Tenant) -> None:
        await self._write(lambda db: definitions.put_tenant(db, tenant, config))

    async def tenant(self, tenant: TenantId) -> Tenant:
        return await self._read(lambda db: definitions.read_tenant(db, tenant))

    async def list_tenants(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> Page[tuple[TenantId, Tenant]]:
        return await self._read(lambda db: definitions.list_tenants(db, cursor, limit))

    async def document(self, kind: str, name: str) -> Document | None:
        return await self._read(lambda db: definitions.read_document(db, kind, name))

    async def put_document(
        self, kind: str, name: str, value: JsonValue, *, read: int | None
    ) -> Document | None:
        return await self._write(lambda db: definitions.put_document(db, kind, name, value, read))

    async def list_documents(
        self, kind: str, *, cursor: str | None = None, limit: int = 100
    ) -> Page[tuple[str, Document]]:
        return await self._read(lambda db: definitions.list_documents(db, kind, cursor, limit))

    async def delete_document(self, kind: str, name: str) -> bool:
        return await self._write(lambda db: definitions.delete_document(db, kind, name))
