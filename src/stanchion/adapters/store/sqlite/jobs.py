"""Jobs: the ready index and its leases, renewals, results, and leases that expired.

Each topic has a ring of the tenants with ready jobs. The oldest job of the tenant at the head is
taken, and the tenant moves to the tail in the rings of all requested topics: a tenant with one job
waits for one job of each other tenant, independent of their numbers of jobs and topics. Of one
tenant's topics, the one that was served longest ago comes first. The rings are rows of the file:
all callers share them, and they survive a restart.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple, cast

import msgspec
from msgspec.structs import replace

from stanchion.adapters.outcomes import (
    is_last_delivery,
    job_dead_letter,
    job_died_entry,
    timed_out_entry,
    why_lost,
)
from stanchion.adapters.sqlite.database import Database, Row
from stanchion.adapters.store.sqlite.budgets import charge_usage
from stanchion.adapters.store.sqlite.codec import (
    JOB_TRACE,
    SQL,
    VALUE,
    encode,
    encode_text,
    pending_inbox,
    pending_job,
    pending_run,
)
from stanchion.adapters.store.sqlite.housekeeping import add_letter
from stanchion.adapters.store.sqlite.outbox import put_entry
from stanchion.core.json_value import JsonValue
from stanchion.core.lease import next_fence
from stanchion.core.model import Instant, Job, JobId, RunId, RunStatus, TenantId, Topic
from stanchion.ports.records import (
    Acceptance,
    Accepted,
    ExpiredJob,
    JobLease,
    JobState,
    JobView,
    LeasedJob,
    LostReason,
    RejectedCode,
    Renewals,
    Result,
    ResultRefused,
    result_event,
)

__all__ = [
    "accept",
    "end_job",
    "enter_ready",
    "expire_some",
    "find_jobs",
    "held_jobs",
    "input_bytes",
    "job",
    "lease_jobs",
    "leave_ready",
    "lost_leases",
    "progress",
    "read_inputs",
    "ready_tenants",
    "ready_topics",
    "renew_jobs",
]


def renew_jobs(
    db: Database,
    leases: Sequence[JobLease],
    *,
    ttl_ms: int,
    tenant: TenantId | None = None,
    not_after: Instant | None = None,
) -> Renewals:
    """See ``ports.store.Jobs.renew_jobs``."""
    now = db.now()
    if not_after is not None and now > not_after:
        return Renewals((), ())
    renewed: list[JobId] = []
    lost: list[JobId] = []
    for lease in leases:
        extended = db.changed(
            SQL["renew_job"],
            job_id=lease.job_id,
            fence=lease.fence,
            now=now,
            expires_at=now + ttl_ms,
            tenant=tenant,
            progress=None if lease.progress is None else encode(lease.progress),
        )
        if extended and lease.usage:
            charge_usage(db, lease.job_id, lease.usage)
        (renewed if extended else lost).append(lease.job_id)
    return Renewals(tuple(renewed), tuple(lost))


def lost_leases(
    db: Database, leases: Sequence[JobLease], *, tenant: TenantId | None = None
) -> dict[JobId, LostReason]:
    """See ``ports.store.Jobs.lost_leases``."""
    now = db.now()
    lost: dict[JobId, LostReason] = {}
    for lease in leases:
        found = db.first(SQL["show_lease"], job_id=lease.job_id, tenant=tenant)
        if found is None:
            lost[lease.job_id] = LostReason.UNKNOWN_JOB
            continue
        state, status, fence, expires_at = found
        has_fence = fence == lease.fence
        if not (state == JobState.LEASED and has_fence and now < expires_at):
            lost[lease.job_id] = why_lost(JobState(state), RunStatus(status), has_fence=has_fence)
    return lost


def progress(db: Database, run_id: RunId, jobs: Collection[JobId]) -> dict[JobId, JsonValue]:
    """See ``ports.store.Jobs.progress``."""
    rows = (db.first(SQL["show_progress"], job_id=each, run_id=run_id) for each in jobs)
    return {row[0]: VALUE.decode(row[1]) for row in rows if row is not None}


def accept(
    db: Database,
    results: Sequence[Result],
    *,
    row_due_in_ms: int = 0,
    tenant: TenantId | None = None,
) -> tuple[Acceptance, ...]:
    """See ``ports.store.Jobs.accept``."""
    due = Instant(db.now() + row_due_in_ms)
    return tuple(_accept(db, result, due, tenant) for result in results)


def _accept(db: Database, result: Result, due: Instant, tenant: TenantId | None) -> Acceptance:
    db.settle(pending_job(result.job_id), pending_run(_run_of(result.job_id)))
    found = db.peek(SQL["find_job"], job_id=result.job_id, tenant=tenant)
    if found is None:
        return ResultRefused(result.job_id, RejectedCode.UNKNOWN_JOB)
    job, run, run_id, ended_at, step_id, item, state, fence = found
    if state == JobState.FINISHED:
        if fence == result.fence:
            return Accepted(result.job_id, run_id, repeated=True)
        return ResultRefused(result.job_id, RejectedCode.ALREADY_FINISHED)
    # A result of an expired lease is accepted until the expiry is processed: no other worker has
    # the job yet, and finished work should not be repeated.
    if state != JobState.LEASED or fence != result.fence or ended_at is not None:
        return ResultRefused(result.job_id, RejectedCode.STALE_FENCE)
    event = encode(result_event(result, step_id, item))
    end_job(db, result, job, run, entry_id=f"result:{result.job_id}#{fence}", event=event, due=due)
    db.pending.touch(pending_inbox(run_id))
    return Accepted(result.job_id, run_id)


def find_jobs(db: Database, job_ids: Sequence[JobId]) -> dict[JobId, Row]:
    """The number, run, state and fence of each of these jobs that exists."""
    ids = encode_text(job_ids)
    return {row[0]: row[1:] for row in db.peek_every(SQL["find_jobs"], job_ids=ids)}


def held_jobs(
    found: Mapping[JobId, Row], results: Collection[Result], run: int
) -> dict[JobId, int]:
    """The numbers of the jobs of this run whose results are from their holders, by id."""
    held: dict[JobId, int] = {}
    for result in results:
        job, its_run, state, fence = found.get(result.job_id, _NO_JOB)
        if state == JobState.LEASED and fence == result.fence and its_run == run:
            held[result.job_id] = job
    return held


_NO_JOB: Final = (0, 0, "", 0)


def end_job(
    db: Database,
    result: Result,
    job: int,
    run: int,
    *,
    entry_id: str | None = None,
    event: bytes | None = None,
    due: Instant | None = None,
) -> None:
    """End a job by the result of its holder, and post the entry to its run, if there is one."""
    if result.usage:
        charge_usage(db, result.job_id, result.usage)
    db.later(
        SQL["accept_result"],
        job=job,
        worker_id=result.worker_id,
        run=run,
        ticket=db.ticket(),
        entry_id=entry_id,
        event=event,
        due=due,
    )
    db.pending.touch(pending_job(result.job_id))


def _run_of(job_id: JobId) -> RunId:
    """The run of a job id. A malformed id gives an id for which nothing is pending."""
    return RunId(job_id.partition(":")[0])


def job(db: Database, job_id: JobId) -> JobView | None:
    """See ``ports.store.Jobs.job``."""
    found = db.first(SQL["show_job"], job_id=job_id)
    return None if found is None else _view(found, VALUE.decode(found[_INPUT]))


_INPUT: Final = 8
"""The place of the input in a row of ``show_job``."""


def _unread(db: Database, job_id: JobId) -> JobView:
    """A job with its input as JSON: to decode that of one job may take 20 ms."""
    found = db.first(SQL["show_job"], job_id=job_id)
    assert found is not None
    return _view(found, cast("JsonValue", msgspec.Raw(found[_INPUT])))


def _view(found: Row, value: JsonValue) -> JobView:
    """A row of ``show_job``, with this input."""
    id_, run_id, tenant, step_id, topic, attempt, item, dispatch, _, state, *rest = found
    fence, deliveries, worker_id, expires_at, max_deliveries, timeout_ms, trace, said = rest
    job = Job(
        id=id_,
        run_id=run_id,
        tenant=tenant,
        step_id=step_id,
        topic=topic,
        attempt=attempt,
        input=value,
        item=item,
        dispatch=dispatch,
        max_deliveries=max_deliveries,
        attempt_timeout_ms=timeout_ms,
        trace=None if trace is None else JOB_TRACE.decode(trace),
    )
    return JobView(
        job=job,
        state=JobState(state),
        fence=fence,
        deliveries=deliveries,
        worker_id=worker_id,
        expires_at=expires_at,
        progress=None if said is None else VALUE.decode(said),
    )


class Expired(NamedTuple):
    """What one step of ``expire_jobs`` has done."""

    jobs: tuple[ExpiredJob, ...]
    is_last: bool
    """Whether no other step is needed."""


def expire_some(db: Database, *, limit: int, max_deliveries: int) -> Expired:
    """A step of ``ports.store.Jobs.expire_jobs``."""
    expired: list[ExpiredJob] = []
    now = db.now()
    found = db.every(SQL["overdue_jobs"], now=now, limit=limit)
    found += db.every(SQL["expired_jobs"], now=now, limit=limit)
    # By time, then by the number of the job, which is unique. A job may be found by both of its
    # times: then the earlier one counts, which comes last here.
    latest_first = sorted(found, key=lambda row: row[:2], reverse=True)
    by_job = {row[1]: row for row in latest_first}
    left = _LETTER_BYTES
    for row in sorted(by_job.values(), key=lambda row: row[:2])[:limit]:
        _, job, job_id, run, run_id, tenant, topic, deliveries, own, state, is_over = row
        is_dead = is_last_delivery(deliveries, own, max_deliveries) and not is_over
        if is_over:
            _revoke_attempt(db, job, run, job_id)
            leave_ready(db, topic, tenant, int(state == JobState.READY))
        elif is_dead:
            left -= _write_job_letter(db, job, run, job_id)
        else:
            db.run(SQL["offer_again"], job=job, ticket=db.ticket())
            enter_ready(db, topic, tenant)
        expired.append(
            ExpiredJob(job_id, run_id, tenant, topic, deliveries, is_dead, bool(is_over))
        )
        if left <= 0:
            return Expired(tuple(expired), is_last=False)
    return Expired(tuple(expired), is_last=True)


_LETTER_BYTES: Final = 4 * 1024 * 1024
"""Dead letters that one step writes, roughly: all other writes wait for it."""


def _revoke_attempt(db: Database, row: int, run: int, job_id: JobId) -> None:
    """Revoke a job whose attempt has taken too long, and tell its run."""
    view = _unread(db, job_id)
    db.run(SQL["revoke_job"], job=row)
    put_entry(db, run, *timed_out_entry(view.job), db.now())


def _write_job_letter(db: Database, row: int, run: int, job_id: JobId) -> int:
    """Write the dead letter of a job, and post the event to its run; returns its bytes."""
    view = _unread(db, job_id)
    dead, now = view.job, db.now()
    db.run(SQL["mark_dead"], job=row)
    size = add_letter(db, run, job_dead_letter(dead, view.deliveries, now))
    put_entry(db, run, *job_died_entry(dead, view.deliveries), now)
    return size


_US_PER_MS: Final = 1_000


def lease_jobs(
    db: Database,
    worker_id: str,
    topics: Collection[Topic],
    *,
    max_jobs: int,
    ttl_ms: int,
    tenant: TenantId | None = None,
    not_after: Instant | None = None,
) -> tuple[LeasedJob, ...]:
    """See ``ports.store.Jobs.lease_jobs``. The inputs are JSON: see ``read_inputs``."""
    if not_after is not None and db.now() > not_after:
        return ()
    taking = _Taking(db, worker_id, Instant(db.now() + ttl_ms))
    ring = _Ring(db, frozenset(topics), tenant, max_jobs)
    while len(taking.leased) < max_jobs:
        queue = ring.next_queue()
        if queue is None:
            break
        share = -(-(max_jobs - len(taking.leased)) // len(ring))
        row = queue.next_job(db, share)
        if row is None:
            ring.leave(queue)
            continue
        turn = db.ticket()
        taking.take(queue, row, turn)
        ring.send_to_tail(queue, turn)
    ring.write(db)
    return tuple(taking.leased)


def read_inputs(leased: Sequence[LeasedJob]) -> tuple[LeasedJob, ...]:
    """The leased jobs with their inputs decoded.

    Not in the transaction that leases them: for one input it may take 20 ms, and the transactions
    of all callers wait for it.
    """
    return tuple(
        replace(each, job=replace(each.job, input=VALUE.decode(_raw_input(each.job))))
        for each in leased
    )


def input_bytes(leased: Sequence[LeasedJob]) -> int:
    """How long the inputs are that are not decoded yet."""
    return sum(len(memoryview(_raw_input(each.job))) for each in leased)


def _raw_input(job: Job) -> msgspec.Raw:
    raw: object = job.input
    assert isinstance(raw, msgspec.Raw)
    return raw


def enter_ready(db: Database, topic: Topic, tenant: TenantId) -> None:
    """Count one more ready job of the tenant."""
    db.run(SQL["enter_queue"], topic=topic, tenant=tenant, turn=db.ticket())


def leave_ready(db: Database, topic: Topic, tenant: TenantId, count: int) -> None:
    """Count ``count`` ready jobs less, which were not leased."""
    if count:
        left = db.first(SQL["leave_queue"], topic=topic, tenant=tenant, count=count)
        if left is not None and left[0] <= 0:
            db.run(SQL["remove_queue"], topic=topic, tenant=tenant)


def ready_tenants(
    db: Database,
    topics: Collection[Topic],
    *,
    limit: int,
    tenant: TenantId | None = None,
    but_not: Collection[TenantId] = (),
) -> dict[TenantId, int]:
    """See ``ports.store.Jobs.ready_tenants``."""
    found: dict[TenantId, int] = {}
    for topic in _with_jobs(db, list(dict.fromkeys(topics))):
        if tenant is None:
            rows = db.every(SQL["ready_in_ring"], topic=topic, limit=limit + len(but_not))
        else:
            rows = db.every(SQL["ready_of_tenant"], topic=topic, tenant=tenant)
        for whose, ready in rows:
            if ready > 0 and whose not in but_not:
                found[whose] = found.get(whose, 0) + ready
    return dict(islice(found.items(), limit))


def ready_topics(db: Database) -> dict[Topic, int]:
    """The number of ready jobs, by topic."""
    return dict(db.every(SQL["count_ready"]))


class _Queue:
    """The ready jobs of one tenant for one topic, as far as they were read."""

    def __init__(self, turn: int, served: int, topic: Topic, tenant: TenantId) -> None:
        self.topic = topic
        self.tenant = tenant
        self.place = (turn, served, topic, tenant)
        """The smallest goes first."""
        self.is_gone = False
        self._rows: deque[Row] = deque()
        self._read_to = -1
        self._is_read = False

    def next_job(self, db: Database, share: int) -> Row | None:
        """The oldest job that is not taken yet. Reads up to ``share`` rows if none is left."""
        if not self._rows and not self._is_read:
            self._rows.extend(
                db.peek_every(
                    SQL["oldest_ready_jobs"],
                    topic=self.topic,
                    tenant=self.tenant,
                    after=self._read_to,
                    limit=share,
                )
            )
            self._is_read = len(self._rows) < share
        if not self._rows:
            return None
        row = self._rows.popleft()
        self._read_to = row[0]
        return row


def _queues(
    db: Database, topics: Collection[Topic], tenant: TenantId | None, limit: int
) -> Iterator[Row]:
    """The queues of a tenant, or the next ``limit`` queues of each topic."""
    if tenant is not None:
        yield from db.every(SQL["queues_of_tenant"], topics=encode_text(topics), tenant=tenant)
        return
    for topic in _with_jobs(db, topics):
        yield from db.every(SQL["head_of_ring"], topic=topic, limit=limit)


def _with_jobs(db: Database, topics: Collection[Topic]) -> Collection[Topic]:
    """The topics among these that have a ready job, found by one statement.

    A worker may ask for a hundred topics, and most of them have none.
    """
    if len(topics) <= 1:
        return topics
    found = db.every(SQL["topics_with_queues"], topics=encode_text(topics))
    return [topic for (topic,) in found]


class _Ring:
    """The order of the queues, in the rings of all requested topics.

    It reads at most ``max_jobs`` queues of each topic: no more are needed for so many jobs, since a
    queue moves behind all others after each job.
    """

    def __init__(
        self, db: Database, topics: Collection[Topic], tenant: TenantId | None, max_jobs: int
    ) -> None:
        self._topics = topics
        self._queues: dict[TenantId, list[_Queue]] = {}
        self._heap: list[tuple[tuple[int, int, Topic, TenantId], _Queue]] = []
        self._moved: dict[TenantId, int] = {}
        self._empty: list[_Queue] = []
        self._count = 0
        for row in _queues(db, topics, tenant, max_jobs):
            queue = _Queue(*row)
            self._queues.setdefault(queue.tenant, []).append(queue)
            self._heap.append((queue.place, queue))
            self._count += 1
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        """The number of queues."""
        return self._count

    def next_queue(self) -> _Queue | None:
        """The next queue; ``None`` if none is left."""
        while self._heap:
            place, queue = self._heap[0]
            if not queue.is_gone and place == queue.place:
                return queue
            heapq.heappop(self._heap)  # it has moved since
        return None

    def send_to_tail(self, served: _Queue, turn: int) -> None:
        """Move a queue and the other queues of its tenant to the tail, after a job of it."""
        self._moved[served.tenant] = turn
        for queue in self._queues[served.tenant]:
            last = turn if queue is served else queue.place[1]
            queue.place = (turn, last, queue.topic, queue.tenant)
            if not queue.is_gone:
                heapq.heappush(self._heap, (queue.place, queue))

    def leave(self, queue: _Queue) -> None:
        """Remove an empty queue."""
        queue.is_gone = True
        self._count -= 1
        self._empty.append(queue)

    def write(self, db: Database) -> None:
        """Write the changes of the rings that leasing does not write itself."""
        if len(self._topics) > 1:
            topics = encode_text(self._topics)
            for tenant, turn in self._moved.items():
                db.run(SQL["move_queues"], topics=topics, tenant=tenant, turn=turn)
        for queue in self._empty:
            # Normally removed with its last job; still there only if its count was too high.
            db.run(SQL["remove_queue"], topic=queue.topic, tenant=queue.tenant)


class _Taking:
    """A worker, and the jobs leased to it so far."""

    def __init__(self, db: Database, worker_id: str, expires_at: Instant) -> None:
        self.leased: list[LeasedJob] = []
        self._db = db
        self._worker_id = worker_id
        self._expires_at = expires_at

    def take(self, queue: _Queue, row: Row, turn: int) -> None:
        """Lease a job, and move its queue to the tail of its ring."""
        _, number, job_id, run_id, step_id, item, attempt, dispatch, own, *rest = row
        timeout_ms, ends_at, trace, fence, deliveries, value = rest
        fence = next_fence(fence, 0, self._db.now() * _US_PER_MS)
        if timeout_ms is not None and ends_at is None:
            ends_at = self._db.now() + timeout_ms
        self._db.later(
            SQL["lease_job"],
            job=number,
            fence=fence,
            deliveries=deliveries + 1,
            worker_id=self._worker_id,
            expires_at=self._expires_at,
            attempt_ends_at=ends_at,
            topic=queue.topic,
            tenant=queue.tenant,
            turn=turn,
        )
        self._db.pending.touch(pending_job(job_id))
        job = Job(
            id=job_id,
            run_id=run_id,
            tenant=queue.tenant,
            step_id=step_id,
            topic=queue.topic,
            attempt=attempt,
            input=cast("JsonValue", msgspec.Raw(value)),
            item=item,
            dispatch=dispatch,
            max_deliveries=own,
            attempt_timeout_ms=timeout_ms,
            trace=None if trace is None else JOB_TRACE.decode(trace),
        )
        self.leased.append(LeasedJob(job, fence, deliveries + 1, self._expires_at))
