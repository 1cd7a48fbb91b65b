"""The ready index: jobs that wait for a worker, and whose turn it is.

Each topic has a ring of the tenants with ready jobs. Whoever is at the head gives its oldest job
and goes to the tail, in the rings of all topics that were asked for: so a tenant with one job waits
for one job of each other tenant, however many those have and however many topics they use. Of one
tenant's topics, the one that was served longest ago comes first.

The rings are in the file, shared by all callers, and go on where they were after a restart.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from stanchion.adapters.sqlite.database import Database, Row
from stanchion.adapters.sqlite.statements import read_statements
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
    asked = frozenset(topics)
    expires_at = Instant(db.now() + ttl_ms)
    heads: dict[Topic, Row] = {}
    _look(db, heads, asked, tenant)
    leased: list[LeasedJob] = []
    while heads and len(leased) < max_jobs:
        _, _, topic, whose = min(heads.values())
        turn = db.ticket()
        job = _take(db, topic, whose, turn, worker_id, expires_at)
        if job is not None:
            leased.append(job)
        if len(asked) > 1:
            db.run(_SQL["move_queues"], topics=encode_text(asked), tenant=whose, turn=turn)
        # The rings with another tenant at their head have it there still.
        _look(db, heads, [each for each, head in heads.items() if head[3] == whose], tenant)
    return tuple(leased)


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


def _look(
    db: Database, heads: dict[Topic, Row], topics: Collection[Topic], tenant: TenantId | None
) -> None:
    """Find out whose turn it is in these topics' rings."""
    for topic in topics:
        if tenant is None:
            head = db.first(_SQL["head_of_ring"], topic=topic)
        else:
            head = db.first(_SQL["queue_of_tenant"], topic=topic, tenant=tenant)
        if head is None:
            heads.pop(topic, None)
        else:
            heads[topic] = head


def _take(
    db: Database,
    topic: Topic,
    tenant: TenantId,
    turn: int,
    worker_id: str,
    expires_at: Instant,
) -> LeasedJob | None:
    """Lease the oldest job of a queue, and send the queue to the tail of its ring."""
    found = db.first(_SQL["oldest_ready_job"], topic=topic, tenant=tenant)
    if found is None:
        # Not so long as queues and jobs agree. A count that is too high must not stop the ring.
        leave(db, topic, tenant, 1)
        return None
    row, job_id, run_id, step_id, item, attempt, dispatch, fence, deliveries, value = found
    fence = next_fence(fence, 0, db.now() * _US_PER_MS)
    db.run(
        _SQL["lease_job"],
        job=row,
        fence=fence,
        deliveries=deliveries + 1,
        worker_id=worker_id,
        expires_at=expires_at,
        topic=topic,
        tenant=tenant,
        turn=turn,
    )
    job = Job(
        id=job_id,
        run_id=run_id,
        tenant=tenant,
        step_id=step_id,
        topic=topic,
        attempt=attempt,
        input=VALUE.decode(value),
        item=item,
        dispatch=dispatch,
    )
    return LeasedJob(job, fence, deliveries + 1, expires_at)
