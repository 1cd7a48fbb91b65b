"""Routes of topic limits: how many jobs of some topics may be leased at once, and per second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from stanchion.core.topic_limits import LIMITS_MAX, LimitScope, TopicLimit
from stanchion.core.upgrade import TOPIC_LIMITS
from stanchion.gateway.problems import Refusal, invalid_member, not_found, upgrade_unfinished
from stanchion.gateway.route import (
    ADMINS,
    OPERATORS,
    Call,
    NoBody,
    NoQuery,
    Paging,
    Reply,
    RouteScope,
    RouteTable,
)
from stanchion.services.topic_limits import TooManyLimits
from stanchion.wire.admin import LimitList, LimitView, PutLimit
from stanchion.wire.problems import Code

ROUTES: Final = RouteTable()


@ROUTES.add(
    "PUT /v1/admin/limits/{limit_id}",
    ADMINS,
    RouteScope.DEPLOYMENT,
    LimitView,
    audits="limit.put",
    codes=(Code.CONFLICT, Code.UPGRADE_UNFINISHED),
)
async def put_limit(call: Call[PutLimit, NoQuery]) -> Reply | Refusal:
    """Store a topic limit. In force everywhere within a second."""
    body = call.body
    if body.max_running is None and body.rate_per_s is None:
        return invalid_member("max_running", "give max_running, rate_per_s, or both")
    unfinished = await call.services.upgrades.require(TOPIC_LIMITS)
    if unfinished is not None:
        return upgrade_unfinished("a topic limit", unfinished)
    limit = TopicLimit(
        id=call.params["limit_id"],
        topics=tuple(dict.fromkeys(body.topics)),
        per=LimitScope(body.per),
        max_running=body.max_running,
        rate_per_s=body.rate_per_s,
    )
    try:
        await call.services.limits.put(limit, call.audit(f"limit/{limit.id}", tenant=None))
    except TooManyLimits:
        detail = f"there are {LIMITS_MAX} limits already: delete one, or give one more topics"
        return Refusal(code=Code.CONFLICT, detail=detail)
    return Reply((await _views(call, [limit]))[0])


@ROUTES.add(
    "GET /v1/admin/limits/{limit_id}",
    OPERATORS,
    RouteScope.DEPLOYMENT,
    LimitView,
    codes=(Code.NOT_FOUND,),
)
async def get_limit(call: Call[NoBody, NoQuery]) -> Reply | Refusal:
    """One topic limit, and how much of it is in use.

    Of a limit of each tenant, by the tenant that `X-Stanchion-Tenant` names.
    """
    limit = await call.services.limits.get(call.params["limit_id"])
    return not_found("limit") if limit is None else Reply((await _views(call, [limit]))[0])


@ROUTES.add(
    "DELETE /v1/admin/limits/{limit_id}",
    ADMINS,
    RouteScope.DEPLOYMENT,
    LimitView,
    audits="limit.delete",
    codes=(Code.NOT_FOUND,),
)
async def delete_limit(call: Call[NoBody, NoQuery]) -> Reply | Refusal:
    """Delete a topic limit. Jobs that it held back can be leased at once."""
    limit_id = call.params["limit_id"]
    entry = call.audit(f"limit/{limit_id}", tenant=None)
    limit = await call.services.limits.delete(limit_id, entry)
    return not_found("limit") if limit is None else Reply((await _views(call, [limit]))[0])


@ROUTES.add("GET /v1/admin/limits", OPERATORS, RouteScope.DEPLOYMENT, LimitList)
async def list_limits(call: Call[NoBody, Paging]) -> Reply:
    """List topic limits, by id."""
    page = await call.services.limits.page(cursor=call.query.cursor, limit=call.query.limit)
    return Reply(LimitList(tuple(await _views(call, page.items)), page.cursor))


async def _views(call: Call[Any, Any], limits: Sequence[TopicLimit]) -> list[LimitView]:
    uses = await call.services.limits.uses(limits, call.only)
    return [
        LimitView(
            id=limit.id,
            topics=limit.topics,
            per="tenant" if limit.per is LimitScope.TENANT else "deployment",
            max_running=limit.max_running,
            rate_per_s=limit.rate_per_s,
            tenant=call.only if limit.per is LimitScope.TENANT else None,
            running=None if use is None else use.running,
            retry_after_ms=None if use is None or limit.rate_per_s is None else use.retry_after_ms,
        )
        for limit, use in zip(limits, uses, strict=True)
    ]
