"""Routes for operators that ask what happened: the audit log, and receipts of refusals."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from stanchion.core.audit import AuditEntry, AuditFilter
from stanchion.core.model import Instant, TenantId
from stanchion.core.receipts import Receipt, ReceiptFilter
from stanchion.gateway.route import OPERATORS, RUNNERS, Call, NoBody, Reply, Route, RouteScope
from stanchion.gateway.views import to_instant, when
from stanchion.wire.admin import AuditList, AuditRow, DecisionList, DecisionRow
from stanchion.wire.identifiers import Cursor, Limit, TenantName, Time

__all__ = ["ROUTES"]

_EPOCH: Final = Instant(0)


class ListedAudit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which entries, page by page."""

    cursor: Cursor | None = None
    limit: Limit = 100
    actor: Annotated[str, Meta(pattern=r"^[ -~]{1,128}\Z")] | None = None
    action: Annotated[str, Meta(pattern=r"^[!-~]{1,64}\Z")] | None = None
    tenant: TenantName | None = None
    since: Time | None = None
    until: Time | None = None


async def list_audit(call: Call[NoBody, ListedAudit]) -> Reply:
    """The audit log, newest first: of the key's tenant, or of all."""
    query = call.query
    tenant = None if query.tenant is None else TenantId(query.tenant)
    if call.only is not None and tenant not in {None, call.only}:
        return Reply(AuditList(()))  # another tenant's entries, whether or not it exists
    only = AuditFilter(
        tenant=call.only or tenant,
        actor=query.actor,
        action=query.action,
        since=None if query.since is None else max(_EPOCH, to_instant(query.since)),
        until=None if query.until is None else max(_EPOCH, to_instant(query.until)),
    )
    page = await call.services.store.list_audit(only, cursor=query.cursor, limit=query.limit)
    return Reply(AuditList(tuple(map(_row, page.items)), page.cursor))


def _row(entry: AuditEntry) -> AuditRow:
    return AuditRow(
        at=when(entry.at),
        actor=entry.actor,
        action=entry.action,
        subject=entry.subject,
        tenant=entry.tenant,
        before=entry.before,
        after=entry.after,
        request_id=entry.request_id,
    )


class ListedDecisions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which receipts, page by page."""

    cursor: Cursor | None = None
    limit: Limit = 100
    outcome: Annotated[str, Meta(pattern=r"^[!-~]{1,64}\Z")] | None = None
    key: Annotated[str, Meta(pattern=r"^[!-~]{1,255}\Z")] | None = None
    request_id: Annotated[str, Meta(pattern=r"^[!-~]{1,128}\Z")] | None = None
    since: Time | None = None
    until: Time | None = None


async def list_decisions(call: Call[NoBody, ListedDecisions]) -> Reply:
    """Receipts of refused starts, newest first: of the key's tenant, or of all."""
    query = call.query
    only = ReceiptFilter(
        outcome=query.outcome,
        key=query.key,
        request_id=query.request_id,
        since=None if query.since is None else to_instant(query.since),
        until=None if query.until is None else to_instant(query.until),
    )
    page = await call.services.receipts.list(
        call.only, only, cursor=query.cursor, limit=query.limit
    )
    return Reply(DecisionList(tuple(map(_decision, page.items)), page.cursor))


def _decision(receipt: Receipt) -> DecisionRow:
    return DecisionRow(
        at=when(receipt.at),
        tenant=receipt.tenant,
        workflow_id=receipt.workflow_id,
        outcome=receipt.outcome,
        limit=receipt.limit,
        active=receipt.active,
        retry_after_ms=receipt.retry_after_ms,
        key=receipt.key,
        request_id=receipt.request_id,
        actor=receipt.actor,
        replica=receipt.replica,
        left_out=receipt.left_out,
    )


ROUTES: Final = (
    Route(
        method="GET",
        path="/v1/admin/decisions",
        handler=list_decisions,
        summary="List refused starts, newest first: of the key's tenant, or of all.",
        roles=RUNNERS,
        scope=RouteScope.ONE_OR_ALL,
        query=ListedDecisions,
        answer=DecisionList,
    ),
    Route(
        method="GET",
        path="/v1/admin/audit",
        handler=list_audit,
        summary="List the audit log, newest first: of the key's tenant, or of all.",
        roles=OPERATORS,
        scope=RouteScope.ONE_OR_ALL,
        names_all=False,
        query=ListedAudit,
        answer=AuditList,
    ),
)
