"""The audit log: entries, written in the transaction of their change; and receipts of refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from stanchion.adapters.cursor import read_cursor, write_cursor
from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.store.sqlite.codec import SQL, encode
from stanchion.core.audit import EVERY_ENTRY, LOOKED_AT_FACTOR, AuditEntry, AuditFilter
from stanchion.core.model import Instant, TenantId
from stanchion.core.receipts import DAY_MS, Receipt, ReceiptBatch, newest_kept
from stanchion.ports.records import Page

_LIST: Final = "audit"
_RECEIPTS: Final = "receipts"
_FORGOTTEN_MAX: Final = 20
"""Batches of receipts that one write removes because of their age."""
_ENTRY: Final = msgspec.json.Decoder(AuditEntry)
_BATCH: Final = msgspec.json.Decoder(tuple[Receipt, ...])
_END: Final = 2**62
"""After every time and every entry."""


def add_audit(db: Database, entry: AuditEntry, *, once: str | None = None) -> bool:
    """See ``ports.store.AuditLog.add_audit``."""
    return bool(
        db.changed(
            SQL["add_audit"],
            now=db.now(),
            tenant=entry.tenant,
            actor=entry.actor,
            action=entry.action,
            once=once,
            body=encode(entry),
        )
    )


def list_audit(
    db: Database,
    only: AuditFilter = EVERY_ENTRY,
    *,
    ttl_ms: int,
    cursor: str | None = None,
    limit: int = 100,
) -> Page[AuditEntry]:
    """See ``ports.store.AuditLog.list_audit``.

    One index selects the entries; the other conditions are checked for each of them.
    """
    at, entry = (_END, _END) if cursor is None else read_cursor(_LIST, cursor, tuple[int, int])
    if only.until is not None:
        at, entry = min((at, entry), (only.until, 0))
    since = max(only.since or 0, db.now() - ttl_ms)
    statement, name = _index(only)
    looked_at = limit * LOOKED_AT_FACTOR
    rows = db.every(SQL[statement], name=name, since=since, at=at, entry=entry, limit=looked_at + 1)
    found: list[AuditEntry] = []
    for place, (number, written_at, body) in enumerate(rows[:looked_at]):
        each = replace(_ENTRY.decode(body), at=Instant(written_at))
        if only.fits(each):
            found.append(each)
        is_last = place + 1 == min(len(rows), looked_at)
        if len(found) == limit or is_last:
            more = place + 1 < len(rows)
            return Page(tuple(found), write_cursor(_LIST, written_at, number) if more else None)
    return Page(())


def forget_audit(db: Database, *, ttl_ms: int, limit: int) -> None:
    """Remove entries that are older than ``ttl_ms``."""
    db.run(SQL["forget_audit"], before=db.now() - ttl_ms, limit=limit)


def _index(only: AuditFilter) -> tuple[str, str]:
    """The statement for the index that selects best, and the value to look for in it."""
    if only.tenant is not None:
        return "list_audit_of_tenant", only.tenant
    if only.actor is not None:
        return "list_audit_of_actor", only.actor
    if only.action is not None:
        return "list_audit_of_action", only.action
    return "list_audit", ""


def put_receipts(
    db: Database, tenant: TenantId, receipts: Sequence[Receipt], *, batch_id: str
) -> None:
    """See ``ports.store.Receipts.put_receipts``."""
    now = db.now()
    db.run(
        SQL["put_receipts"],
        id=batch_id,
        tenant=tenant,
        at=now,
        count=len(receipts),
        body=encode(receipts),
    )
    batches = db.every(SQL["receipt_counts"], tenant=tenant)
    gone = batches[newest_kept(count for _, count in batches) :]
    if gone:
        db.run(SQL["drop_receipts"], tenant=tenant, batch=gone[0][0])
    db.run(SQL["forget_receipts"], before=now - DAY_MS, limit=_FORGOTTEN_MAX)


def receipt_batches(
    db: Database, tenant: TenantId | None, *, at_most: str | None = None, limit: int = 20
) -> tuple[ReceiptBatch, ...]:
    """See ``ports.store.Receipts.receipt_batches``."""
    last = _END if at_most is None else read_cursor(_RECEIPTS, at_most, tuple[int])[0]
    if tenant is None:
        rows = db.every(SQL["receipt_batches"], last=last, limit=limit)
    else:
        statement = SQL["receipt_batches_of_tenant"]
        rows = db.every(statement, tenant=tenant, last=last, limit=limit)
    return tuple(
        ReceiptBatch(write_cursor(_RECEIPTS, batch), _BATCH.decode(body)) for batch, body in rows
    )
