"""About whom something is pending: the names under which verbs ask for it and leave it."""

from __future__ import annotations

from typing import Final

from stanchion.adapters.sqlite.database import Database
from stanchion.core.model import JobId, RunId, TenantId

__all__ = ["BEGUN", "job", "key", "run", "slot_freed", "slot_taken", "slots_pending"]

BEGUN: Final = "begun"
"""Any run that begins: the next one's number depends on how many do."""


def run(run_id: RunId) -> tuple[str, str]:
    """A run's own row."""
    return "run", run_id


def job(job_id: JobId) -> tuple[str, str]:
    """A job's row."""
    return "job", job_id


def key(tenant: TenantId, text: str | None) -> tuple[str, str, str | None]:
    """What an idempotency key stands for. Without one, nothing is ever pending."""
    return "key", tenant, text


def slot_taken(tenant: TenantId) -> tuple[str, str]:
    """One slot more in use."""
    return "taken", tenant


def slot_freed(tenant: TenantId) -> tuple[str, str]:
    """One slot fewer."""
    return "freed", tenant


def slots_pending(db: Database, tenant: TenantId) -> int:
    """How many more slots are in use than the tenant's account says."""
    return db.pending.touched(slot_taken(tenant)) - db.pending.touched(slot_freed(tenant))
