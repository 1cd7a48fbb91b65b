"""Inbox and outbox: events that wait to be applied to a run, timers, and the runs to advance."""

from __future__ import annotations

from collections.abc import Sequence

from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.store.sqlite.audit import add_audit
from stanchion.adapters.store.sqlite.codec import SQL, TIMER, encode
from stanchion.core.audit import AuditEntry
from stanchion.core.events import Event, TimerFired
from stanchion.core.model import Instant, RunId, TenantId
from stanchion.ports.records import OutboxRow, PostAnswer


def fire_timers(db: Database, *, limit: int) -> tuple[RunId, ...]:
    """See ``ports.store.Outbox.fire_timers``."""
    now = db.now()
    fired: list[RunId] = []
    served: list[TenantId] = []
    has_more: list[TenantId] = []
    # The timers of some tenants may have been cleared: then others are looked at.
    while waiting := _next_in_turn(db, now, limit - len(fired), len(served)):
        served += waiting
        has_more += _fire_some(db, waiting, now, limit, fired)
    while len(fired) < limit and has_more:
        has_more = _fire_some(db, has_more, now, limit, fired)
    for tenant in served:
        db.run(SQL["pass_timer_turn"], tenant=tenant, now=now)
    return tuple(fired)


def _next_in_turn(db: Database, now: Instant, limit: int, skip: int) -> list[TenantId]:
    rows = db.every(SQL["timer_turns"], now=now, limit=limit, skip=skip)
    return [tenant for (tenant,) in rows]


def _fire_some(
    db: Database, tenants: Sequence[TenantId], now: Instant, limit: int, fired: list[RunId]
) -> list[TenantId]:
    """Fire as many timers of each tenant, and note their runs; returns those with more."""
    share = max(1, (limit - len(fired)) // len(tenants))
    has_more = []
    for tenant in tenants:
        count = min(share, limit - len(fired))
        rows = db.every(SQL["due_timers"], tenant=tenant, now=now, limit=count)
        for run, run_id, ended_at, step_id, key, due, body in rows:
            db.run(SQL["remove_timer"], run=run, step_id=step_id, key=key)
            if ended_at is None:
                event = TimerFired(timer=TIMER.decode(body), due=due)
                put_entry(db, run, f"timer:{key}#{due}", event, now)
                fired.append(run_id)
        has_more += [tenant] if len(rows) == share else []
    return has_more


def take_outbox(db: Database, *, limit: int, hold_ms: int) -> tuple[OutboxRow, ...]:
    """See ``ports.store.Outbox.take_outbox``."""
    now = db.now()
    rows = db.every(SQL["due_rows"], now=now, limit=limit)
    for run, *_ in rows:
        db.run(SQL["hold_row"], run=run, turn=db.ticket(), due=now + hold_ms)
    return tuple(OutboxRow(run_id, tenant, number) for _, run_id, tenant, number in rows)


def confirm_outbox(db: Database, rows: Sequence[OutboxRow]) -> None:
    """See ``ports.store.Outbox.confirm_outbox``."""
    for row in rows:
        db.run(SQL["confirm_row"], run_id=row.run_id, number=row.number)


def defer_outbox(db: Database, row: OutboxRow, *, delay_ms: int) -> None:
    """See ``ports.store.Outbox.defer_outbox``."""
    db.run(
        SQL["defer_row"],
        run_id=row.run_id,
        number=row.number,
        turn=db.ticket(),
        due=db.now() + delay_ms,
    )


def outbox_size(db: Database) -> int:
    """See ``ports.store.Outbox.outbox_size``."""
    found = db.first(SQL["count_rows"])
    assert found is not None
    return int(found[0])


def post(
    db: Database, run_id: RunId, event: Event, *, entry_id: str, audit: AuditEntry | None = None
) -> PostAnswer:
    """See ``ports.store.Runs.post``."""
    found = db.first(SQL["find_run"], run_id=run_id)
    if found is None:
        return PostAnswer.UNKNOWN
    run, ended_at = found
    if ended_at is not None:
        return PostAnswer.FINISHED
    if not put_entry(db, run, entry_id, event, db.now()):
        return PostAnswer.REPEATED
    if audit is not None:
        add_audit(db, audit)
    return PostAnswer.POSTED


def put_entry(db: Database, run: int, entry_id: str, event: Event, due: Instant) -> bool:
    """Post an event to the inbox of an unfinished run; ``False`` if it is there already."""
    db.pending.write()  # first, so that the count of changed rows is that of this entry
    before = db.connection.total_changes()
    db.run(
        SQL["put_entry"],
        run=run,
        ticket=db.ticket(),
        entry_id=entry_id,
        event=encode(event),
        due=due,
    )
    return db.connection.total_changes() > before


def drop_entry(db: Database, run: int, entry_id: str) -> None:
    """Remove an entry. The outbox row is removed with the last one."""
    db.run(SQL["remove_entry"], run=run, entry_id=entry_id)
    db.run(SQL["rest_outbox"], run=run)


def count_failure(db: Database, run_id: RunId, entry_id: str) -> int:
    """See ``ports.store.Housekeeping.count_failure``; 0 if there is no such entry."""
    found = db.first(SQL["count_failure"], run_id=run_id, entry_id=entry_id)
    return 0 if found is None else int(found[0])
