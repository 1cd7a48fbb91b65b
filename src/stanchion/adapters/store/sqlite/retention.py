"""Retention and audit: old runs go entirely, and slots are counted against the truth."""

from __future__ import annotations

from typing import Final

from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.sqlite.statements import read_statements
from stanchion.core.model import Instant, TenantId
from stanchion.ports.records import Drift

__all__ = ["audit", "purge"]

_SQL = read_statements(__package__, "sql", "retention.sql")
_BELONGINGS: Final = (
    "purge_job_inputs",
    "purge_jobs",
    "purge_items",
    "purge_steps",
    "purge_timers",
    "purge_inbox",
    "purge_outbox",
    "purge_letters",
    "purge_history",
    "purge_origin",
    "purge_run",
)


def audit(db: Database, after: str, limit: int) -> tuple[tuple[Drift, ...], str]:
    """Audit tenants from one on, round and round; what was wrong, and the last one looked at.

    See ``ports.store.Housekeeping.audit_slots``.
    """
    drifts: list[Drift] = []
    seen: set[str] = set()
    while len(seen) < limit:
        tenant = _next_tenant(db, after) or _next_tenant(db, "")
        if tenant is None or tenant in seen:
            break
        seen.add(tenant)
        after = tenant
        drift = _compare(db, tenant)
        if drift is not None:
            drifts.append(drift)
    return tuple(drifts), after


def _next_tenant(db: Database, after: str) -> TenantId | None:
    found = db.first(_SQL["next_tenant"], after=after)
    return None if found is None else TenantId(found[0])


def _compare(db: Database, tenant: TenantId) -> Drift | None:
    found = db.first(_SQL["compare_slots"], tenant=tenant)
    assert found is not None
    counted, actual = found
    if counted == actual:
        return None
    db.run(_SQL["repair_slots"], tenant=tenant, actual=actual)
    return Drift(tenant, counted, actual)


def purge(db: Database, finished_before: Instant, limit: int) -> int:
    """See ``ports.store.Housekeeping.purge``."""
    rows = db.every(_SQL["old_runs"], before=finished_before, limit=limit)
    for tenant in {tenant for _, tenant, _ in rows}:
        db.run(_SQL["keep_feed_end"], tenant=tenant)
    for run, tenant, key in rows:
        if key is not None:
            db.run(_SQL["purge_key"], tenant=tenant, key=key, run=run)
        for statement in _BELONGINGS:
            db.run(_SQL[statement], run=run)
    return len(rows)
