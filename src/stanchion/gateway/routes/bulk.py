"""Bulk actions: one action on every run that a filter matches."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from stanchion.core.bulk import BULK_RUNS_MAX, Bulk, BulkAction, BulkFailed
from stanchion.core.json_value import JsonObject
from stanchion.gateway.problems import Refusal, RequestRefused, invalid_member, not_found
from stanchion.gateway.route import (
    OPERATORS,
    RUNNERS,
    Call,
    NoBody,
    NoQuery,
    Paging,
    Reply,
    RouteScope,
    RouteTable,
)
from stanchion.gateway.views import REPLAYED, filter_of, refusal_of, wire_view
from stanchion.services.bulk import NewBulk, TooManyRuns
from stanchion.services.gate_answers import KeyMismatch
from stanchion.wire.identifiers import ALL_TENANTS
from stanchion.wire.problems import Code
from stanchion.wire.runs import BulkError, BulkList, BulkPreview, BulkView, StartBulk

ROUTES: Final = RouteTable()

_OPERATORS_ONLY: Final = frozenset({BulkAction.REPLAY, BulkAction.DISCARD})


@ROUTES.add(
    "POST /v1/bulk",
    RUNNERS,
    RouteScope.TENANT_OR_ALL,
    BulkView,
    dry_answer=BulkPreview,
    admits=True,
    audits="bulk.start",
    codes=(Code.DRAINING, Code.IDEMPOTENCY_MISMATCH),
    takes_key=True,
)
async def start_bulk(call: Call[StartBulk, NoQuery]) -> Reply | Refusal:
    """Cancel, rerun, replay, discard, approve or reject all runs that match a filter."""
    body = call.body
    if body.action in _OPERATORS_ONLY and call.role not in OPERATORS:
        needed = f"{body.action} needs the role operator or admin"
        return Refusal(code=Code.FORBIDDEN, detail=f"{needed}; this key has the role {call.role}")
    wanted = NewBulk(
        action=body.action,
        tenant=call.only,
        only=filter_of(body.filter),
        filter=msgspec.to_builtins(body.filter),
        rate_per_s=body.rate_per_s,
        actor=call.actor,
        request_id=call.request_id,
        key_id=call.key_id,
        idempotency_key=call.idempotency_key,
    )
    try:
        if body.dry_run:
            counted = await call.services.bulk.count(wanted)
            by_tenant = {str(tenant): count for tenant, count in sorted(counted.items())}
            return Reply(BulkPreview(matched=counted.total(), by_tenant=by_tenant))
        asked: JsonObject = {
            "action": body.action,
            "filter": wanted.filter,
            "rate_per_s": body.rate_per_s,
        }
        begun = await call.services.bulk.create(
            wanted, lambda bulk_id: call.audit(f"bulk/{bulk_id}", tenant=call.only, after=asked)
        )
    except TooManyRuns:
        wrong = f"more than {BULK_RUNS_MAX} runs match: narrow it, for example with since and until"
        return invalid_member("filter", wrong)
    if isinstance(begun, KeyMismatch):
        return refusal_of(begun)
    return Reply(_view(begun.bulk), headers=REPLAYED if begun.replayed else ())


@ROUTES.add("GET /v1/bulk", RUNNERS, RouteScope.TENANT_OR_ALL, BulkList)
async def list_bulks(call: Call[NoBody, Paging]) -> Reply:
    """List bulk actions, newest first."""
    page = await call.services.bulk.page(
        call.only, cursor=call.query.cursor, limit=call.query.limit
    )
    return Reply(BulkList(tuple(map(_view, page.items)), page.cursor))


@ROUTES.add(
    "GET /v1/bulk/{bulk_id}", RUNNERS, RouteScope.ONE_OR_ALL, BulkView, codes=(Code.NOT_FOUND,)
)
async def get_bulk(call: Call[NoBody, NoQuery]) -> Reply:
    """One bulk action and its progress."""
    return Reply(_view(await _own(call)))


@ROUTES.add(
    "DELETE /v1/bulk/{bulk_id}",
    RUNNERS,
    RouteScope.ONE_OR_ALL,
    BulkView,
    codes=(Code.NOT_FOUND,),
    audits="bulk.stop",
)
async def stop_bulk(call: Call[NoBody, NoQuery]) -> Reply | Refusal:
    """Stop a bulk action: no further run is acted on."""
    bulk = await _own(call)
    entry = call.audit(
        f"bulk/{bulk.id}",
        tenant=bulk.tenant,
        before={"status": bulk.status},
        after={"status": "stopped"},
    )
    stopped = await call.services.bulk.stop(bulk.id, entry)
    return not_found("bulk action") if stopped is None else Reply(_view(stopped))


async def _own(call: Call[Any, Any]) -> Bulk:
    """The bulk action that the path names. Raises ``RequestRefused`` if it is another tenant's."""
    bulk = await call.services.bulk.get(call.params["bulk_id"])
    if bulk is None or call.only not in {None, bulk.tenant}:
        raise RequestRefused(not_found("bulk action"))
    return bulk


_error = wire_view(BulkFailed, BulkError)
_view = wire_view(
    Bulk,
    BulkView,
    bulk_id="id",
    tenant=lambda bulk: bulk.tenant or ALL_TENANTS,
    errors=lambda bulk: tuple(map(_error, bulk.errors)),
)
