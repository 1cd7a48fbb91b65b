"""The queue: runs that wait for a slot, in the order of ``core.queue``.

Its rows are never pending: every function writes what is pending first, so that counts and order
are those of the file.
"""

from __future__ import annotations

from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.store.sqlite.codec import SQL, TENANT
from stanchion.adapters.store.sqlite.outbox import put_entry
from stanchion.core.events import Promoted
from stanchion.core.model import RunId, TenantId
from stanchion.core.queue import PROMOTED_AT_ONCE_MAX, PROMOTED_ENTRY, QueuePlace, QueueRequest
from stanchion.ports.records import OldestWaits, Tenant

_DEFAULTS = Tenant()


def enqueue(db: Database, run: int, tenant: TenantId, request: QueueRequest) -> None:
    """Add a run that was just created to the queue of its tenant."""
    place = {
        "tenant": tenant,
        "priority": request.priority,
        "fairness_key": request.fairness_key,
        "ticket": db.ticket(),
    }
    db.run(SQL["enqueue_run"], run=run, **place)
    db.run(SQL["join_ring"], **place)
    db.run(SQL["count_queued"], tenant=tenant, change=1)


def leave_queue(db: Database, run: int, tenant: TenantId) -> None:
    """Remove a run that ends while it waits."""
    found = db.first(SQL["find_waiting"], run=run)
    assert found is not None, "a queued run waits"
    _remove(db, run, tenant, *found)


def promote(db: Database, tenant: TenantId) -> tuple[RunId, ...]:
    """See ``ports.store.Tenants.promote``."""
    found = db.first(SQL["free_slots"], tenant=tenant)
    if found is None:
        return ()
    config, active, queued = found
    limit = (_DEFAULTS if config is None else TENANT.decode(config)).max_concurrent_runs
    free = queued if limit is None else min(queued, limit - active)
    promoted: list[RunId] = []
    while len(promoted) < min(free, PROMOTED_AT_ONCE_MAX):
        row = db.first(SQL["next_waiting"], tenant=tenant)
        assert row is not None, "as many wait as are counted"
        run, run_id, priority, fairness_key = row
        key = {"tenant": tenant, "priority": priority, "fairness_key": fairness_key}
        db.run(SQL["pass_turn"], **key, ticket=db.ticket())
        _remove(db, run, tenant, priority, fairness_key)
        db.run(SQL["promote_run"], run=run)
        db.run(SQL["take_slot"], tenant=tenant)
        put_entry(db, run, PROMOTED_ENTRY, Promoted(), db.now())
        promoted.append(run_id)
    return tuple(promoted)


def queued_runs(db: Database, tenant: TenantId) -> int:
    """See ``ports.store.Runs.queued_runs``."""
    found = db.first(SQL["queued_runs"], tenant=tenant)
    return 0 if found is None else int(found[0])


def queue_place(db: Database, run_id: RunId) -> QueuePlace | None:
    """See ``ports.store.Runs.queue_place``."""
    found = db.first(SQL["queue_place"], run_id=run_id)
    return None if found is None else QueuePlace(*found)


def queue_position(db: Database, run_id: RunId) -> int | None:
    """The position alone: 1 is the next run."""
    place = queue_place(db, run_id)
    return None if place is None else place.position


def oldest_waits(db: Database, tenant: TenantId | None) -> OldestWaits:
    """See ``ports.store.Runs.oldest_waits``."""
    if tenant is None:
        queued = db.first(SQL["oldest_queued_of_all"])
    else:
        queued = db.first(SQL["oldest_queued"], tenant=tenant)
    ready = db.first(SQL["oldest_ready"], tenant=tenant)
    return OldestWaits(
        queued=None if queued is None else queued[0], ready=() if ready is None else (ready[0],)
    )


def _remove(db: Database, run: int, tenant: TenantId, priority: int, fairness_key: str) -> None:
    db.run(SQL["leave_waiting"], run=run)
    db.run(SQL["leave_ring"], tenant=tenant, priority=priority, fairness_key=fairness_key)
    db.run(SQL["count_queued"], tenant=tenant, change=-1)
