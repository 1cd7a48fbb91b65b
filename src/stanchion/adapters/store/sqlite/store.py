"""The store in one SQLite file, for one process.

    callers ──▶ queue ──▶ writer thread ── one transaction, one sync ──▶ file
            ──▶ queue ──▶ reader thread ◀── a snapshot ────────────────── file

Acknowledged writes are on disk. A read starts its snapshot after the call, so it sees all of them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from pathlib import Path
from shutil import disk_usage
from typing import Any, Concatenate, Final, ParamSpec, TypeAlias, TypeVar

from stanchion.adapters.outcomes import SummaryBoard
from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.sqlite.opening import MEMORY, resolved, translated_sqlite_errors
from stanchion.adapters.sqlite.thread import WorkerThread, read_together, write_together
from stanchion.adapters.store.sqlite import admission as gate
from stanchion.adapters.store.sqlite import audit as log
from stanchion.adapters.store.sqlite import (
    definitions,
    housekeeping,
    jobs,
    limits,
    outbox,
    queue,
    runs,
)
from stanchion.adapters.store.sqlite.batches import prepare_admissions
from stanchion.adapters.store.sqlite.codec import SQL
from stanchion.adapters.store.sqlite.file import open_reader, open_writer, shut
from stanchion.core.admission import Verdict
from stanchion.core.audit import EVERY_ENTRY, AuditEntry, AuditFilter
from stanchion.core.commit import SettleAnswer
from stanchion.core.json_value import LARGE_BYTES, JsonValue
from stanchion.core.model import Instant, TenantId, Topic
from stanchion.core.upgrade import LEVEL
from stanchion.ports.clock import Clock
from stanchion.ports.errors import BackendError, BackendFull, BackendUnavailable
from stanchion.ports.records import (
    Admission,
    Commit,
    ExpiredJob,
    LeasedJob,
    Page,
    Result,
    StartsChecked,
    StartTerms,
    StoredSummaries,
)

_MS_PER_S: Final = 1_000
_DAY_MS: Final = 86_400_000
_AUDIT_TTL_MS: Final = 90 * _DAY_MS
_TIMEOUT_S: Final = 2.0
_QUEUE_MAX: Final = 10_000
ROOM_MIN: Final = 4 * 1024 * 1024
"""The free bytes on the disk below which the store does not call itself ready."""


_Args = ParamSpec("_Args")
_Answer = TypeVar("_Answer")
_Verb: TypeAlias = Callable[Concatenate[Database, _Args], _Answer]
_Method: TypeAlias = Callable[Concatenate["SqliteStore", _Args], Coroutine[Any, Any, _Answer]]


def _reads(verb: _Verb[_Args, _Answer]) -> _Method[_Args, _Answer]:
    """A method that runs a reading function on the reader thread."""

    def method(
        self: SqliteStore, /, *args: _Args.args, **kwargs: _Args.kwargs
    ) -> Coroutine[Any, Any, _Answer]:
        return self.reader.call(lambda db: verb(db, *args, **kwargs), wait_s=self.timeout_s)

    return method


def _writes(verb: _Verb[_Args, _Answer]) -> _Method[_Args, _Answer]:
    """A method that runs a writing function on the writer thread."""

    def method(
        self: SqliteStore, /, *args: _Args.args, **kwargs: _Args.kwargs
    ) -> Coroutine[Any, Any, _Answer]:
        return self.writer.call(lambda db: verb(db, *args, **kwargs), wait_s=self.timeout_s)

    return method


class SqliteStore:
    """See ``ports.store.Store``. Made by ``open``."""

    def __init__(
        self,
        *,
        path: str,
        writer: WorkerThread[Database],
        reader: WorkerThread[Database],
        clock: Clock,
        key_ttl_ms: int,
        audit_ttl_ms: int,
        timeout_s: float,
    ) -> None:
        self.path = path
        self.writer = writer
        self.reader = reader
        self.timeout_s = timeout_s
        self._clock = clock
        self._key_ttl_ms = key_ttl_ms
        self._summaries = SummaryBoard()  # not in the file: one process serves it
        self._audit_ttl_ms = audit_ttl_ms

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        *,
        clock: Clock,
        key_ttl_ms: int = _DAY_MS,
        audit_ttl_ms: int = _AUDIT_TTL_MS,
        timeout_s: float = _TIMEOUT_S,
        queue_max: int = _QUEUE_MAX,
    ) -> SqliteStore:
        """Open the file, or create it. Raises ``BackendRefused`` if that is not safe.

        ``key_ttl_ms``: how long an idempotency key is kept after its run ended. ``audit_ttl_ms``:
        how long an audit entry is kept. ``timeout_s``: how long a caller waits. ``queue_max``: how
        many callers may wait.
        """
        where = resolved(path)
        writer = await WorkerThread.open(
            f"{where} (writer)",
            lambda: open_writer(where, clock),
            write_together,
            shut,
            queue_max=queue_max,
        )
        try:
            reader = writer
            if where != MEMORY:
                reader = await WorkerThread.open(
                    f"{where} (reader)",
                    lambda: open_reader(where, clock),
                    read_together,
                    lambda db: db.connection.close(),
                    queue_max=queue_max,
                )
        except BaseException:
            await writer.close()
            raise
        return cls(
            path=where,
            writer=writer,
            reader=reader,
            clock=clock,
            key_ttl_ms=key_ttl_ms,
            audit_ttl_ms=audit_ttl_ms,
            timeout_s=timeout_s,
        )

    # ── Verbs: what they promise is in ``ports.store`` ───────────────────────────────────────────

    admissions_max = 400
    """A commit, with its sync to disk, costs as much as writing a hundred runs."""

    def admit(self, admission: Admission, *, within_ms: int) -> Coroutine[Any, Any, Verdict]:
        not_after = Instant(self._clock.now() + within_ms)
        return self.writer.call(
            lambda db: gate.admit(db, admission, not_after, self._key_ttl_ms),
            wait_s=within_ms / _MS_PER_S,
        )

    def prepare_admissions(self, admissions: Sequence[Admission]) -> Sequence[Admission]:
        return prepare_admissions(admissions)

    async def admit_many(
        self, admissions: Sequence[Admission], *, within_ms: int
    ) -> tuple[Verdict, ...]:
        not_after = Instant(self._clock.now() + within_ms)
        prepared = prepare_admissions(admissions)
        return await self.writer.call(
            lambda db: gate.admit_many(db, prepared, not_after, self._key_ttl_ms),
            wait_s=within_ms / _MS_PER_S,
        )

    async def check_starts(
        self, tenant: TenantId, terms: Sequence[StartTerms], keys: Collection[str]
    ) -> StartsChecked:
        return await self.reader.call(
            lambda db: gate.check_starts(db, tenant, terms, keys, self._key_ttl_ms),
            wait_s=self.timeout_s,
        )

    load = _reads(runs.load)
    run_facts = _reads(runs.run_facts)
    load_items = _reads(runs.load_items)
    items_at = _reads(runs.items_at)
    commit = _writes(runs.commit)

    def settle(
        self, results: Sequence[Result], commit: Commit
    ) -> Coroutine[Any, Any, SettleAnswer]:
        """See ``ports.store.Runs.settle``."""
        return self.writer.call(runs.Settling(results, commit), wait_s=self.timeout_s)

    timeline = _reads(runs.timeline)
    list_runs = _reads(runs.list_runs)
    list_approvals = _reads(runs.list_approvals)
    feed = _reads(runs.feed)
    feed_position = _reads(runs.feed_position)
    active_runs = _reads(runs.active_runs)
    queued_runs = _reads(queue.queued_runs)
    queue_place = _reads(queue.queue_place)
    oldest_waits = _reads(queue.oldest_waits)

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
        """See ``ports.store.Jobs.lease_jobs``."""
        lease = partial(
            jobs.lease_jobs,
            worker_id=worker_id,
            topics=topics,
            max_jobs=max_jobs,
            ttl_ms=ttl_ms,
            tenant=tenant,
            not_after=not_after,
        )
        leased = await self.writer.call(lease, wait_s=self.timeout_s)
        with translated_sqlite_errors(self.path):
            if jobs.input_bytes(leased) < LARGE_BYTES:
                return jobs.read_inputs(leased)
            return await asyncio.to_thread(jobs.read_inputs, leased)

    renew_jobs = _writes(jobs.renew_jobs)
    lost_leases = _reads(jobs.lost_leases)
    accept = _writes(jobs.accept)
    job = _reads(jobs.job)
    progress = _reads(jobs.progress)
    ready_tenants = _reads(jobs.ready_tenants)
    take_tokens = _writes(limits.take_tokens)
    renew_tokens = _writes(limits.renew_tokens)
    release_tokens = _writes(limits.release_tokens)
    pool_uses = _reads(limits.pool_uses)

    async def expire_jobs(self, *, limit: int, max_deliveries: int) -> tuple[ExpiredJob, ...]:
        """See ``ports.store.Jobs.expire_jobs``. In steps, between which others get their turn."""
        expired: list[ExpiredJob] = []
        is_last = False
        while not is_last and len(expired) < limit:
            step = partial(
                jobs.expire_some, limit=limit - len(expired), max_deliveries=max_deliveries
            )
            try:
                some, is_last = await self.writer.call(step, wait_s=self.timeout_s)
            except BackendError:
                if not expired:
                    raise
                break
            expired += some
        return tuple(expired)

    ready_topics = _reads(jobs.ready_topics)

    post = _writes(outbox.post)
    count_failure = _writes(outbox.count_failure)
    fire_timers = _writes(outbox.fire_timers)
    take_outbox = _writes(outbox.take_outbox)
    confirm_outbox = _writes(outbox.confirm_outbox)
    defer_outbox = _writes(outbox.defer_outbox)
    outbox_size = _reads(outbox.outbox_size)

    put_workflow = _writes(definitions.put_workflow)
    put_shared_workflow = _writes(definitions.put_shared_workflow)
    workflow = _reads(definitions.workflow_of)
    shared_workflow = _reads(definitions.shared_workflow)
    list_workflows = _reads(definitions.list_workflows)
    list_shared_workflows = _reads(definitions.list_shared_workflows)
    list_workflow_uses = _reads(definitions.list_workflow_uses)
    put_tenant = _writes(definitions.put_tenant)
    promote = _writes(queue.promote)
    delete_tenant = _writes(definitions.delete_tenant)
    tenant = _reads(definitions.tenant_of)
    budgets = _reads(definitions.budgets_of)
    list_tenants = _reads(definitions.list_tenants)
    list_standings = _reads(definitions.list_standings)
    standings = _reads(definitions.standings)
    document = _reads(definitions.document)
    put_document = _writes(definitions.put_document)
    list_documents = _reads(definitions.list_documents)
    delete_document = _writes(definitions.delete_document)

    write_dead_letter = _writes(housekeeping.write_dead_letter)
    list_dead_letters = _reads(housekeeping.list_dead_letters)
    replay_dead_letter = _writes(housekeeping.replay_dead_letter)
    audit_slots = _writes(housekeeping.audit_slots)
    discard_dead_letter = _writes(housekeeping.discard_dead_letter)
    add_audit = _writes(log.add_audit)
    put_receipts = _writes(log.put_receipts)
    receipt_batches = _reads(log.receipt_batches)

    async def report_replica(self, replica: str, summary: JsonValue, *, keep_ms: int) -> Instant:
        now = self._clock.now()
        return self._summaries.report(replica, summary, keep_ms=keep_ms, now=now)

    async def replica_summaries(self) -> StoredSummaries:
        return self._summaries.read(self._clock.now())

    async def remove_replica(self, replica: str) -> bool:
        return self._summaries.remove(replica)

    async def level(self) -> int:
        return LEVEL  # the file was migrated when this process opened it, and no other has it open

    async def raise_level(self, level: int, *, audit: AuditEntry | None = None) -> int:
        assert level <= LEVEL, (level, audit)
        return LEVEL

    async def list_audit(
        self, only: AuditFilter = EVERY_ENTRY, *, cursor: str | None = None, limit: int = 100
    ) -> Page[AuditEntry]:
        read = partial(
            log.list_audit, only=only, ttl_ms=self._audit_ttl_ms, cursor=cursor, limit=limit
        )
        return await self.reader.call(read, wait_s=self.timeout_s)

    async def purge(self, *, finished_before: Instant, limit: int) -> int:
        """See ``ports.store.Housekeeping.purge``. In steps, between which others get their turn."""
        removed, is_last = 0, False

        def remove(db: Database) -> housekeeping.Purged:
            log.forget_audit(db, ttl_ms=self._audit_ttl_ms, limit=limit)
            return housekeeping.purge_some(
                db, finished_before=finished_before, limit=limit - removed
            )

        while not is_last and removed < limit:
            runs, is_last = await self.writer.call(remove, wait_s=self.timeout_s)
            removed += runs
        return removed

    async def now(self) -> Instant:
        return self._clock.now()

    async def ping(self) -> None:
        """Check that the file can be read and written, and grow. Raises ``BackendError``."""
        await self.reader.call(self._look, wait_s=self.timeout_s)
        await self.writer.call(lambda db: db.run(SQL["leave_a_mark"]), wait_s=self.timeout_s)

    def _look(self, database: Database) -> None:
        database.first(SQL["look"])
        if self.path != MEMORY:
            # On a full disk the mark below still finds room in the log, and starts do not.
            try:
                free = disk_usage(Path(self.path).parent).free
            except OSError as error:
                raise BackendUnavailable(f"{self.path}: {error.strerror}") from error
            if free < ROOM_MIN:
                raise BackendFull(
                    f"{self.path}: the disk is full; free some space ({free:,} bytes are left)"
                )

    async def close(self) -> None:
        try:
            await self.reader.close()
        finally:
            await self.writer.close()
