"""Inboxes: what has happened to a run and is not applied yet, and the row that says so."""

from __future__ import annotations

from collections.abc import Iterable

from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.sqlite.statements import read_statements
from stanchion.adapters.store.sqlite.codec import EVENT, encode
from stanchion.core.events import Event
from stanchion.core.model import Instant, RunId
from stanchion.ports.records import InboxEntry, PostAnswer

__all__ = ["count_failure", "drop", "empty", "post", "put", "read"]

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
    ticket = db.ticket()
    is_new = db.changed(
        _SQL["put_entry"], run=run, ticket=ticket, entry_id=entry_id, event=encode(event)
    )
    if is_new:
        db.run(_SQL["hasten_outbox"], run=run, turn=ticket, due=due)
    return bool(is_new)


def read(db: Database, run: int) -> tuple[InboxEntry, ...]:
    """All that lies there, oldest first."""
    found = db.every(_SQL["read_inbox"], run=run)
    return tuple(InboxEntry(entry_id, EVENT.decode(event)) for entry_id, event in found)


def drop(db: Database, run: int, entry_ids: Iterable[str]) -> None:
    """Take entries out. The outbox row goes with the last one."""
    for entry_id in entry_ids:
        db.run(_SQL["remove_entry"], run=run, entry_id=entry_id)
    db.run(_SQL["rest_outbox"], run=run)


def empty(db: Database, run: int) -> None:
    """Take everything out, and the outbox row with it: the run has ended."""
    db.run(_SQL["empty_inbox"], run=run)
    db.run(_SQL["remove_outbox"], run=run)


def count_failure(db: Database, run_id: RunId, entry_id: str) -> int:
    """See ``ports.store.Housekeeping.count_failure``; 0 if there is no such entry."""
    found = db.first(_SQL["count_failure"], run_id=run_id, entry_id=entry_id)
    return 0 if found is None else int(found[0])
