"""Housekeeping: dead letters, the audit of slots, and the removal of old runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from msgspec.structs import replace

from stanchion.adapters.cursor import read_cursor, write_cursor
from stanchion.adapters.outcomes import (
    audit_of_drift,
    discard_entry,
    event_dead_letter,
    replay_entry,
)
from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.store.sqlite.audit import add_audit
from stanchion.adapters.store.sqlite.codec import DEAD_LETTER, EVENT, SQL, encode, encode_text
from stanchion.adapters.store.sqlite.outbox import drop_entry, put_entry
from stanchion.adapters.store.sqlite.queue import promote
from stanchion.core.audit import AuditEntry
from stanchion.core.events import Event
from stanchion.core.model import Instant, RunId, TenantId
from stanchion.ports.records import DeadLetter, Drift, Page, SlotAudit

_LIST: Final = "dead-letters"


def add_letter(db: Database, run: int, letter: DeadLetter) -> int:
    """Store a dead letter; returns its bytes."""
    body = encode(letter)
    db.run(SQL["add_letter"], id=letter.id, tenant=letter.tenant, run=run, body=body)
    return len(body)


def write_dead_letter(
    db: Database, run_id: RunId, entry_id: str, *, cause: str
) -> DeadLetter | None:
    """See ``ports.store.Housekeeping.write_dead_letter``."""
    found = db.first(SQL["find_entry"], run_id=run_id, entry_id=entry_id)
    if found is None:
        return None
    tenant, run, body = found
    letter = event_dead_letter(
        tenant, run_id, entry_id, EVENT.decode(body), cause=cause, at=db.now()
    )
    add_letter(db, run, letter)
    drop_entry(db, run, entry_id)
    return letter


def list_dead_letters(
    db: Database, tenant: TenantId | None, *, cursor: str | None = None, limit: int = 100
) -> Page[DeadLetter]:
    """See ``ports.store.Housekeeping.list_dead_letters``."""
    (after,) = (0,) if cursor is None else read_cursor(_LIST, cursor, tuple[int])
    if tenant is None:
        rows = db.every(SQL["list_letters"], after=after, limit=limit + 1)
    else:
        rows = db.every(SQL["list_letters_of_tenant"], tenant=tenant, after=after, limit=limit + 1)
    letters = tuple(DEAD_LETTER.decode(body) for _, body in rows[:limit])
    return Page(letters, write_cursor(_LIST, rows[limit - 1][0]) if len(rows) > limit else None)


def replay_dead_letter(
    db: Database, letter_id: str, *, actor: str, audit: AuditEntry | None = None
) -> DeadLetter | None:
    """See ``ports.store.Housekeeping.replay_dead_letter``."""
    return _take_letter(db, letter_id, lambda letter: replay_entry(letter, actor), audit)


def discard_dead_letter(
    db: Database, letter_id: str, *, actor: str, audit: AuditEntry | None = None
) -> DeadLetter | None:
    """See ``ports.store.Housekeeping.discard_dead_letter``."""
    return _take_letter(db, letter_id, lambda letter: discard_entry(letter, actor), audit)


def _take_letter(
    db: Database,
    letter_id: str,
    entry_of: Callable[[DeadLetter], tuple[str, Event] | None],
    audit: AuditEntry | None,
) -> DeadLetter | None:
    """Remove a letter and post an event to its run."""
    found = db.first(SQL["take_letter"], id=letter_id)
    if found is None:
        return None
    body, run = found
    letter = DEAD_LETTER.decode(body)
    entry, ended = entry_of(letter), db.first(SQL["is_ended"], run=run)
    # Nothing is posted to a run that has ended; its letter is removed all the same.
    if entry is not None and ended is not None and ended[0] is None:
        put_entry(db, run, *entry, db.now())
    if audit is not None:
        add_audit(db, replace(audit, tenant=letter.tenant))
    return letter


_BELONGINGS: Final = (
    "purge_items",
    "purge_item_blocks",
    "purge_steps",
    "purge_timers",
    "purge_inbox",
    "purge_outbox",
    "purge_letters",
    "purge_origin",
    "purge_labels",
    "purge_marks",
    "purge_run",
)


def audit_slots(
    db: Database,
    *,
    limit: int,
    cursor: str | None = None,
    repair: bool = True,
    audit: AuditEntry | None = None,
) -> SlotAudit:
    """See ``ports.store.Housekeeping.audit_slots``."""
    after = "" if cursor is None else read_cursor("slots", cursor, tuple[str])[0]
    drifts: list[Drift] = []
    checked = 0
    while (tenant := _next_tenant(db, after)) is not None and checked < limit:
        checked += 1
        after = tenant
        drift = _compare(db, tenant)
        if drift is not None:
            drifts.append(drift)
            if repair:
                db.run(SQL["repair_slots"], tenant=tenant, actual=drift.actual)
            if repair and audit is not None:
                add_audit(db, audit_of_drift(audit, drift))
        if repair:
            promote(db, tenant)
    onward = None if tenant is None else write_cursor("slots", after)
    return SlotAudit(checked, tuple(drifts), onward)


def _next_tenant(db: Database, after: str) -> TenantId | None:
    found = db.first(SQL["next_tenant"], after=after)
    return None if found is None else TenantId(found[0])


def _compare(db: Database, tenant: TenantId) -> Drift | None:
    found = db.first(SQL["compare_slots"], tenant=tenant)
    assert found is not None
    counted, actual = found
    if counted == actual:
        return None
    return Drift(tenant, counted, actual)


_PURGED_AT_ONCE: Final = 2_000
"""Jobs and rows of history that one step removes: some 10 ms of work, for which all writes wait. A
run may have a hundred thousand."""


class Purged(NamedTuple):
    """What one step of a purge has done."""

    runs: int
    is_last: bool
    """Whether no other step is needed."""


def purge_some(db: Database, *, finished_before: Instant, limit: int) -> Purged:
    """A step of ``ports.store.Housekeeping.purge``: removes at most ``limit`` runs.

    Of the last run, only a part of the jobs and of the history may be removed: the run is past its
    retention. The next step removes the rest, also if it belongs to a later purge.
    """
    rows = db.every(SQL["old_runs"], before=finished_before, limit=limit)
    left = _PURGED_AT_ONCE
    for count, (run, tenant, key) in enumerate(rows):
        left -= _purge_jobs(db, run, left)
        if left > 0:
            db.run(SQL["keep_feed_end"], tenant=tenant)
            left -= db.changed(SQL["purge_history"], run=run, tenant=tenant, limit=left)
        if left <= 0:
            return Purged(count, is_last=False)
        if key is not None:
            db.run(SQL["purge_key"], tenant=tenant, key=key, run=run)
        for statement in _BELONGINGS:
            db.run(SQL[statement], run=run)
    return Purged(len(rows), is_last=True)


def _purge_jobs(db: Database, run: int, limit: int) -> int:
    """Remove jobs of a run, at most ``limit``; returns how many."""
    jobs = [job for (job,) in db.every(SQL["jobs_to_purge"], run=run, limit=limit)]
    if jobs:
        numbers = encode_text(jobs)
        db.run(SQL["purge_job_inputs"], jobs=numbers)
        db.run(SQL["purge_jobs"], jobs=numbers)
    return len(jobs)
