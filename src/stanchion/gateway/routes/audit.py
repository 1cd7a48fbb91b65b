"""Routes for operators that ask what happened: the audit log, refusals, and admission."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from stanchion.core.audit import AuditEntry, AuditFilter
from stanchion.core.model import Instant, TenantId
from stanchion.core.pressure import TenantPressure, percentile_ms, pressure_order
from stanchion.core.receipts import Receipt, ReceiptFilter
from stanchion.gateway.endpoint import RECEIPTED
from stanchion.gateway.route import OPERATORS, RUNNERS, Call, NoBody, Reply, Route, RouteScope
from stanchion.gateway.views import to_instant, when
from stanchion.ports.records import BadCursor
from stanchion.wire.admin import (
    AdmissionList,
    AdmissionRow,
    AuditList,
    AuditRow,
    DecisionList,
    DecisionRow,
)
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


_OUTCOMES: Final = sorted({*RECEIPTED.values()})
_Outcome: TypeAlias = Annotated[
    str,
    Meta(
        pattern=rf"^({'|'.join(_OUTCOMES)})\Z",
        extra_json_schema={"description": f"One of {', '.join(_OUTCOMES)}."},
    ),
]


class ListedDecisions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which receipts, page by page."""

    cursor: Cursor | None = None
    limit: Limit = 100
    outcome: _Outcome | None = None
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


class ListedAdmission(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tenants first, page by page."""

    cursor: Cursor | None = None
    limit: Limit = 100
    sort: Literal["pressure", "tenant"] = "pressure"


async def show_admission(call: Call[NoBody, ListedAdmission]) -> Reply:
    """Every tenant's slots and what its callers were answered, the worst tenant first."""
    overview, query = await call.services.overview.read(), call.query
    by_name = query.sort == "tenant"
    keyed = [
        ((each.tenant,) if by_name else pressure_order(each), each) for each in overview.tenants
    ]
    if by_name:
        keyed.sort(key=lambda pair: pair[0])
    if query.cursor is not None:
        # The key of the last row. A tenant whose pressure changes meanwhile may move over it.
        last = _key_in(query.cursor, tuple[str] if by_name else tuple[float, float, int, str])
        keyed = [pair for pair in keyed if pair[0] > last]
    page = keyed[: query.limit]
    cursor = None
    if len(keyed) > query.limit:
        cursor = msgspec.json.encode(page[-1][0]).decode()
    rows = tuple(_admission(each) for _, each in page)
    return Reply(AdmissionList(rows, overview.replicas_missing, cursor))


def _key_in(cursor: str, shape: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a tuple's type
    try:
        key: tuple[Any, ...] = msgspec.json.decode(cursor, type=shape)
    except msgspec.MsgspecError:
        raise BadCursor(cursor) from None
    return key


def _admission(tenant: TenantPressure) -> AdmissionRow:
    figures = tenant.figures
    return AdmissionRow(
        tenant=tenant.tenant,
        limit=tenant.limit,
        active=tenant.active,
        queued=tenant.queued,
        admitted_1m=figures.admitted,
        full_1m=figures.full,
        unavailable_1m=figures.unavailable,
        wait_p95_ms=percentile_ms(figures.waits, _P95),
        retry_after_ms=figures.retry_after_ms,
    )


_P95: Final = 0.95

ROUTES: Final = (
    Route(
        method="GET",
        path="/v1/admin/admission",
        handler=show_admission,
        summary="Every tenant's slots and the gate's answers of the last minute, worst first.",
        roles=OPERATORS,
        scope=RouteScope.DEPLOYMENT,
        query=ListedAdmission,
        answer=AdmissionList,
    ),
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
