"""Routes for operators that ask what happened: the audit log, refusals, and admission."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from stanchion.core.audit import AuditEntry, AuditFilter
from stanchion.core.model import Instant, TenantId
from stanchion.core.pressure import TenantPressure, percentile_ms, pressure_order
from stanchion.core.receipts import Receipt, ReceiptFilter
from stanchion.gateway.endpoint import RECEIPTED
from stanchion.gateway.route import (
    OPERATORS,
    RUNNERS,
    Call,
    NoBody,
    Paging,
    Reply,
    RouteScope,
    RouteTable,
)
from stanchion.gateway.views import to_instant, wire_view
from stanchion.ports.records import BadCursor
from stanchion.wire.admin import (
    AdmissionList,
    AdmissionRow,
    AuditList,
    AuditRow,
    DecisionList,
    DecisionRow,
)
from stanchion.wire.identifiers import TenantName, Time

ROUTES: Final = RouteTable()

_EPOCH: Final = Instant(0)


class ListedAudit(Paging, frozen=True, forbid_unknown_fields=True):
    """Which entries, page by page."""

    actor: Annotated[str, Meta(pattern=r"^[ -~]{1,128}\Z")] | None = None
    action: Annotated[str, Meta(pattern=r"^[!-~]{1,64}\Z")] | None = None
    tenant: TenantName | None = None
    since: Time | None = None
    until: Time | None = None


@ROUTES.add("GET /v1/admin/audit", OPERATORS, RouteScope.ONE_OR_ALL, AuditList, names_all=False)
async def list_audit(call: Call[NoBody, ListedAudit]) -> Reply:
    """List the audit log, newest first: of the key's tenant, or of all."""
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


_row = wire_view(AuditEntry, AuditRow)
_decision = wire_view(Receipt, DecisionRow)
_admission = wire_view(
    TenantPressure,
    AdmissionRow,
    admitted_1m="figures.admitted",
    full_1m="figures.full",
    unavailable_1m="figures.unavailable",
    wait_p95_ms=lambda tenant: percentile_ms(tenant.figures.waits, _P95),
    retry_after_ms="figures.retry_after_ms",
)
_P95: Final = 0.95
_OUTCOMES: Final = sorted({*RECEIPTED.values()})
_Outcome: TypeAlias = Annotated[
    str,
    Meta(
        pattern=rf"^({'|'.join(_OUTCOMES)})\Z",
        extra_json_schema={"description": f"One of {', '.join(_OUTCOMES)}."},
    ),
]


class ListedDecisions(Paging, frozen=True, forbid_unknown_fields=True):
    """Which receipts, page by page."""

    outcome: _Outcome | None = None
    key: Annotated[str, Meta(pattern=r"^[!-~]{1,255}\Z")] | None = None
    request_id: Annotated[str, Meta(pattern=r"^[!-~]{1,128}\Z")] | None = None
    since: Time | None = None
    until: Time | None = None


@ROUTES.add("GET /v1/admin/decisions", RUNNERS, RouteScope.ONE_OR_ALL, DecisionList)
async def list_decisions(call: Call[NoBody, ListedDecisions]) -> Reply:
    """List refused starts, newest first: of the key's tenant, or of all."""
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


class ListedAdmission(Paging, frozen=True, forbid_unknown_fields=True):
    """Which tenants first, page by page."""

    sort: Literal["pressure", "tenant"] = "pressure"


@ROUTES.add("GET /v1/admin/admission", OPERATORS, RouteScope.DEPLOYMENT, AdmissionList)
async def show_admission(call: Call[NoBody, ListedAdmission]) -> Reply:
    """Every tenant's slots and the gate's answers of the last minute, worst first."""
    overview, query = await call.services.overview.read(), call.query
    by_name = query.sort == "tenant"
    order: Callable[[TenantPressure], tuple[Any, ...]] = _by_name if by_name else pressure_order
    tenants: Sequence[TenantPressure] = overview.tenants  # in the order of their pressure
    if by_name:
        tenants = sorted(tenants, key=order)
    if query.cursor is not None:
        # The key of the last row. A tenant whose pressure changes meanwhile may move over it.
        last = _key_in(query.cursor, tuple[str] if by_name else tuple[float, float, int, str])
        tenants = [each for each in tenants if order(each) > last]
    page = tenants[: query.limit]
    cursor = None
    if len(tenants) > query.limit:
        cursor = msgspec.json.encode(order(page[-1])).decode()
    rows = tuple(map(_admission, page))
    return Reply(AdmissionList(rows, overview.replicas_missing, cursor))


def _by_name(tenant: TenantPressure) -> tuple[str]:
    return (tenant.tenant,)


def _key_in(cursor: str, shape: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a tuple's type
    try:
        key: tuple[Any, ...] = msgspec.json.decode(cursor, type=shape)
    except msgspec.MsgspecError:
        raise BadCursor(cursor) from None
    return key
