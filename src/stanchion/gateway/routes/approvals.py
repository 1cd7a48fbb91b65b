"""Approval routes: list those that wait, approve, reject."""

from __future__ import annotations

from typing import Final

import msgspec

from stanchion.core.audit import redacted
from stanchion.core.limits import INPUT_BYTES_MAX
from stanchion.core.model import StepId
from stanchion.gateway.body import check_value
from stanchion.gateway.problems import Refusal, invalid
from stanchion.gateway.route import (
    APPROVERS,
    Call,
    NoBody,
    NoQuery,
    Paging,
    Reply,
    RouteScope,
    RouteTable,
    Takes,
)
from stanchion.gateway.routes.runs import change_answer, own_run
from stanchion.gateway.views import approval_row
from stanchion.services.inbox import DecisionForbidden, InvalidData
from stanchion.wire.problems import Code
from stanchion.wire.runs import ApprovalList, ApprovalRow, Change, DecideStep

ROUTES: Final = RouteTable()


@ROUTES.add("GET /v1/approvals", APPROVERS, RouteScope.TENANT_OR_ALL, ApprovalList)
async def list_approvals(call: Call[NoBody, Paging]) -> Reply:
    """List approvals that wait for a decision, oldest first.

    A page of large ones may be short.
    """
    rows: list[ApprovalRow] = []
    cursor, size = call.query.cursor, 0
    while True:
        page = await call.services.store.list_approvals(
            call.only, cursor=cursor, limit=min(_APPROVALS_AT_ONCE, call.query.limit - len(rows))
        )
        found = [approval_row(each) for each in page.items]
        rows, cursor = rows + found, page.cursor
        size += sum(len(msgspec.json.encode(each)) for each in found)
        if cursor is None or len(rows) >= call.query.limit or size >= _APPROVALS_BYTES_MAX:
            return Reply(ApprovalList(tuple(rows), cursor))


_APPROVALS_AT_ONCE: Final = 50
"""Read from the store with one call: each may have a schema of 64 KiB."""
_APPROVALS_BYTES_MAX: Final = 1024 * 1024
"""A page ends with the approvals that reach this size."""


@ROUTES.add(
    "POST /v1/runs/{run_id}/steps/{step_id}/approve",
    APPROVERS,
    RouteScope.TENANT,
    Change,
    takes=Takes.JSON_OR_NOTHING,
    statuses=(200, 202),
    codes=(Code.NOT_FOUND, Code.CONFLICT, Code.INVALID_INPUT),
    audits="step.approve",
)
async def approve_step(call: Call[DecideStep, NoQuery]) -> Reply | Refusal:
    """Approve an approval step."""
    return await _decide(call, approve=True)


@ROUTES.add(
    "POST /v1/runs/{run_id}/steps/{step_id}/reject",
    APPROVERS,
    RouteScope.TENANT,
    Change,
    takes=Takes.JSON_OR_NOTHING,
    statuses=(200, 202),
    codes=(Code.NOT_FOUND, Code.CONFLICT, Code.INVALID_INPUT),
    audits="step.reject",
)
async def reject_step(call: Call[DecideStep, NoQuery]) -> Reply | Refusal:
    """Reject an approval step."""
    return await _decide(call, approve=False)


async def _decide(call: Call[DecideStep, NoQuery], *, approve: bool) -> Reply | Refusal:
    check_value(call, "data", call.body.data, bytes_max=INPUT_BYTES_MAX)
    loaded = await own_run(call)
    changed = await call.services.inbox.decide(
        loaded.run.id,
        StepId(call.params["step_id"]),
        approve=approve,
        comment=call.body.comment,
        data=call.body.data,
        actor=call.actor,
        audit=call.audit(
            f"run/{loaded.run.id}/step/{call.params['step_id']}",
            tenant=call.tenant,
            after=redacted(
                {"approved": approve, "comment": call.body.comment, "data": call.body.data}, "data"
            ),
        ),
    )
    match changed:
        case DecisionForbidden():
            return Refusal(code=Code.FORBIDDEN, detail=changed.rule)
        case InvalidData():
            detail = f"the approval does not accept this data: {changed.faults[0]}"
            return invalid(changed.faults, detail, code=Code.INVALID_INPUT)
        case _:
            return change_answer(changed)
