"""The outbox: who must be advanced, and when to ask again."""

from __future__ import annotations

from collections.abc import Sequence

from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.sqlite.statements import read_statements
from stanchion.adapters.store.sqlite import inbox
from stanchion.adapters.store.sqlite.codec import TIMER
from stanchion.core.events import TimerFired
from stanchion.core.model import RunId
from stanchion.ports.records import OutboxRow

__all__ = ["confirm", "defer", "fire_timers", "size", "take"]

_SQL = read_statements(__package__, "sql", "outbox.sql")


def fire_timers(db: Database, limit: int) -> tuple[RunId, ...]:
    """See ``ports.store.Outbox.fire_timers``."""
    now = db.now()
    fired: list[RunId] = []
    for run, run_id, ended_at, step_id, key, due, body in db.every(
        _SQL["due_timers"], now=now, limit=limit
    ):
        db.run(_SQL["remove_timer"], run=run, step_id=step_id, key=key)
        if ended_at is None:
            event = TimerFired(timer=TIMER.decode(body))
            inbox.put(db, run, f"timer:{key}#{due}", event, now)
            fired.append(run_id)
    return tuple(fired)


def take(db: Database, limit: int, hold_ms: int) -> tuple[OutboxRow, ...]:
    """See ``ports.store.Outbox.take_outbox``."""
    now = db.now()
    rows = db.every(_SQL["due_rows"], now=now, limit=limit)
    for run, *_ in rows:
        db.run(_SQL["hold_row"], run=run, turn=db.ticket(), due=now + hold_ms)
    return tuple(OutboxRow(run_id, tenant, number) for _, run_id, tenant, number in rows)


def confirm(db: Database, rows: Sequence[OutboxRow]) -> None:
    """See ``ports.store.Outbox.confirm_outbox``."""
    for row in rows:
        db.run(_SQL["confirm_row"], run_id=row.run_id, number=row.number)


def defer(db: Database, row: OutboxRow, delay_ms: int) -> None:
    """See ``ports.store.Outbox.defer_outbox``."""
    db.run(
        _SQL["defer_row"],
        run_id=row.run_id,
        number=row.number,
        turn=db.ticket(),
        due=db.now() + delay_ms,
    )


def size(db: Database) -> int:
    """See ``ports.store.Outbox.outbox_size``."""
    found = db.first(_SQL["count_rows"])
    assert found is not None
    return int(found[0])
