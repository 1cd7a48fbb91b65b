"""Inboxes: what has happened to a run and is not applied yet, and the row that says so."""

from __future__ import annotations

from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.sqlite.statements import read_statements
from stanchion.adapters.store.sqlite.codec import encode
from stanchion.core.events import Event
from stanchion.core.model import Instant, RunId
from stanchion.ports.records import PostAnswer

__all__ = ["count_failure", "drop", "post", "put"]

_SQL = read_statements(__package__, "sql", "inbox.sql")


def post(db: Database, run_id: RunId, event: Event, entry_id: str) -> PostAnswer:
    """See ``ports.store.Runs.post``."""
    found = db.first(_SQL["find_run"], run_id=run_id)
    if found is None:
        return PostAnswer.UNKNOWN
    run, ended_at = found
    if ended_at is not None:
        return PostAnswer.FINISHED
    is_new = put(db, run, entry_id, event, db.now())
    return PostAnswer.POSTED if is_new else PostAnswer.REPEATED


def put(db: Database, run: int, entry_id: str, event: Event, due: Instant) -> bool:
    """Put an event into the inbox of an unfinished run; ``False`` if it lies there already."""
    db.pending.write()  # before counting: what others left for later is not this entry
    before = db.connection.total_changes()
    db.run(
        _SQL["put_entry"],
        run=run,
        ticket=db.ticket(),
        entry_id=entry_id,
        event=encode(event),
        due=due,
    )
    return db.connection.total_changes() > before


def drop(db: Database, run: int, entry_id: str) -> None:
    """Take an entry out. The outbox row goes with the last one."""
    db.run(_SQL["remove_entry"], run=run, entry_id=entry_id)
    db.run(_SQL["rest_outbox"], run=run)


def count_failure(db: Database, run_id: RunId, entry_id: str) -> int:
    """See ``ports.store.Housekeeping.count_failure``; 0 if there is no such entry."""
    found = db.first(_SQL["count_failure"], run_id=run_id, entry_id=entry_id)
    return 0 if found is None else int(found[0])
