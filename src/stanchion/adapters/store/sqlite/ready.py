"""The ready index: jobs that wait for a worker, and whose turn it is.

Each topic has a ring of the tenants with ready jobs. Whoever is at the head gives its oldest job
and goes to the tail, in the rings of all topics that were asked for: so a tenant with one job waits
for one job of each other tenant, however many those have and however many topics they use. Of one
tenant's topics, the one that was served longest ago comes first.

The rings are in the file, shared by all callers, and go on where they were after a restart.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection
from typing import Final

from stanchion.adapters.sqlite.database import Database, Row
from stanchion.adapters.sqlite.statements import read_statements
from stanchion.adapters.store.sqlite import about
from stanchion.adapters.store.sqlite.codec import VALUE, encode_text
from stanchion.core.lease import next_fence
from stanchion.core.model import Instant, Job, TenantId, Topic
from stanchion.ports.records import LeasedJob

__all__ = ["count_by_topic", "enter", "lease", "leave"]

_SQL = read_statements(__package__, "sql", "ready.sql")
_US_PER_MS: Final = 1_000


def lease(
    db: Database,
    worker_id: str,
    topics: Collection[Topic],
    *,
    max_jobs: int,
    ttl_ms: int,
    tenant: TenantId | None,
) -> tuple[LeasedJob, ...]:
    """See ``ports.store.Jobs.lease_jobs``."""
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


def enter(db: Database, topic: Topic, tenant: TenantId) -> None:
    """One more of the tenant's jobs is ready."""
    db.run(_SQL["enter_queue"], topic=topic, tenant=tenant, turn=db.ticket())


def leave(db: Database, topic: Topic, tenant: TenantId, count: int) -> None:
    """So many of the tenant's jobs are no longer ready, without having been leased."""
    if count:
        left = db.first(_SQL["leave_queue"], topic=topic, tenant=tenant, count=count)
        if left is not None and left[0] <= 0:
            db.run(_SQL["remove_queue"], topic=topic, tenant=tenant)


def count_by_topic(db: Database) -> dict[Topic, int]:
    """How many jobs are ready."""
    return dict(db.every(_SQL["count_ready"]))


class _Queue:
    """One tenant's ready jobs for one topic, as far as they were read."""

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
        """Its oldest job that was not taken yet; if more have to be read, so many of them."""
        if not self._rows and not self._is_read:
            self._rows.extend(
                db.peek_every(
                    _SQL["oldest_ready_jobs"],
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


class _Ring:
    """Whose turn it is, in the rings of all topics that were asked for.

    So many jobs come from the first so many queues of each topic at most: whoever is sent to the
    tail is behind all the others, read or not.
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
        for topic in topics:
            if tenant is None:
                rows = db.every(_SQL["head_of_ring"], topic=topic, limit=max_jobs)
            else:
                rows = db.every(_SQL["queue_of_tenant"], topic=topic, tenant=tenant)
            for row in rows:
                queue = _Queue(*row)
                self._queues.setdefault(queue.tenant, []).append(queue)
                self._heap.append((queue.place, queue))
                self._count += 1
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        """How many queues there are."""
        return self._count

    def next_queue(self) -> _Queue | None:
        """Whose turn it is; ``None`` if nobody is left."""
        while self._heap:
            place, queue = self._heap[0]
            if not queue.is_gone and place == queue.place:
                return queue
            heapq.heappop(self._heap)  # it has moved since
        return None

    def send_to_tail(self, served: _Queue, turn: int) -> None:
        """It has given a job. Its tenant's other queues go with it."""
        self._moved[served.tenant] = turn
        for queue in self._queues[served.tenant]:
            last = turn if queue is served else queue.place[1]
            queue.place = (turn, last, queue.topic, queue.tenant)
            if not queue.is_gone:
                heapq.heappush(self._heap, (queue.place, queue))

    def leave(self, queue: _Queue) -> None:
        """It has no jobs any more."""
        queue.is_gone = True
        self._count -= 1
        self._empty.append(queue)

    def write(self, db: Database) -> None:
        """What leasing does not write by itself."""
        if len(self._topics) > 1:
            topics = encode_text(self._topics)
            for tenant, turn in self._moved.items():
                db.run(_SQL["move_queues"], topics=topics, tenant=tenant, turn=turn)
        for queue in self._empty:
            # It went with its last job, unless its count was too high, which must not be.
            db.run(_SQL["remove_queue"], topic=queue.topic, tenant=queue.tenant)


class _Taking:
    """A worker, and the jobs it has got so far."""

    def __init__(self, db: Database, worker_id: str, expires_at: Instant) -> None:
        self.leased: list[LeasedJob] = []
        self._db = db
        self._worker_id = worker_id
        self._expires_at = expires_at

    def take(self, queue: _Queue, row: Row, turn: int) -> None:
        """Lease a job, and send its queue to the tail of its ring."""
        _, number, job_id, run_id, step_id, item, attempt, dispatch, fence, deliveries, value = row
        fence = next_fence(fence, 0, self._db.now() * _US_PER_MS)
        self._db.later(
            _SQL["lease_job"],
            job=number,
            fence=fence,
            deliveries=deliveries + 1,
            worker_id=self._worker_id,
            expires_at=self._expires_at,
            topic=queue.topic,
            tenant=queue.tenant,
            turn=turn,
        )
        self._db.pending.touch(about.job(job_id))
        job = Job(
            id=job_id,
            run_id=run_id,
            tenant=queue.tenant,
            step_id=step_id,
            topic=queue.topic,
            attempt=attempt,
            input=VALUE.decode(value),
            item=item,
            dispatch=dispatch,
        )
        self.leased.append(LeasedJob(job, fence, deliveries + 1, self._expires_at))
