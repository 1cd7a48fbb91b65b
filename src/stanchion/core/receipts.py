"""Receipts: what a refused caller was told, and why.

A replica collects receipts and writes those of a tenant together, once a second: a batch. The store
keeps the newest thousand receipts of a tenant, for a day.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from stanchion.core.model import Instant, TenantId

KEPT_MAX: Final = 1_000
"""Receipts of a tenant that the store keeps, and that a replica collects between two writes."""
DAY_MS: Final = 86_400_000


class Receipt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One refusal."""

    at: Instant
    tenant: TenantId
    workflow_id: str | None
    outcome: str
    """As in the metric: ``full``, ``mismatch``, or the code of the refusal."""
    limit: int | None
    active: int | None
    retry_after_ms: int | None
    key: str | None
    request_id: str
    actor: str
    replica: str
    left_out: int = 0
    """Refusals of this tenant just before it that have no receipt, because there were too many."""
    budget: str | None = None
    """The budget that had too little left; ``limit`` is its limit then, not a cap of runs."""


class ReceiptBatch(msgspec.Struct, frozen=True):
    """Receipts of one tenant that were written together, oldest first."""

    place: str
    """Its place in the list of batches: a cursor."""
    receipts: tuple[Receipt, ...]


class ReceiptFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which receipts to list. All conditions must hold."""

    outcome: str | None = None
    key: str | None = None
    request_id: str | None = None
    since: Instant | None = None
    until: Instant | None = None
    """Refusals before this instant."""

    def fits(self, receipt: Receipt) -> bool:
        """Whether the receipt is to be listed."""
        return (
            self.outcome in {None, receipt.outcome}
            and self.key in {None, receipt.key}
            and self.request_id in {None, receipt.request_id}
            and (self.since is None or receipt.at >= self.since)
            and (self.until is None or receipt.at < self.until)
        )


def newest_kept(counts: Iterable[int]) -> int:
    """How many batches to keep, given the numbers of receipts in them, newest first.

    The newest thousand receipts are kept, so the last batch may be kept for a part of it.
    """
    batches = total = 0
    for count in counts:
        if total >= KEPT_MAX:
            break
        total += count
        batches += 1
    return batches
