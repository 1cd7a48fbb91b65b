"""The admission board: every tenant's slots, what waits, and what was refused."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from markupsafe import Markup

from stanchion.console.api import Api
from stanchion.console.page import DONE, Data, Nav, PageTable, Redirect, View
from stanchion.console.pages.overview import budget_rows
from stanchion.console.pictures import CELLS_MAX, TakenSlot, slot_board
from stanchion.gateway.problems import RequestRefused, invalid_member
from stanchion.ports.errors import BackendError
from stanchion.wire.admin import AdmissionList
from stanchion.wire.runs import RunRow

PAGES: Final = PageTable()

_LIMIT: Final = 25
_TENANTS_MAX: Final = 1_000
_DIGITS_MAX: Final = 9
_RECEIPTS_MAX: Final = 1_000
_ENDED: Final = 50
"""Runs whose length is averaged."""
_ACTIVE: Final = ("pending", "running", "waiting")


@PAGES.page(
    "/admission",
    "Admission",
    "admission.html",
    "GET /v1/admin/admission",
    Nav("Now", "Admission", "a"),
)
async def board(view: View) -> Data:
    """The tenants, those under pressure first; of a chosen one also what other caps would do."""
    api, query = view.api, view.query
    if view.tenant is None:
        cursor, sort = query.get("cursor"), query.get("sort")
        page = await api.get("/v1/admin/admission", limit=_LIMIT, cursor=cursor, sort=sort)
        rows = [_seen(each) for each in page.tenants]
    else:
        page, rows = await _page_of(view)
    boards = await asyncio.gather(*(_board(view, row) for row in rows))
    for row, (_, newest) in zip(rows, boards, strict=True):
        # Every slot has been taken since the newest of its runs took the last one.
        row["full_since"] = newest if row["is_full"] else None
    return {
        "rows": [(row, drawn) for row, (drawn, _) in zip(rows, boards, strict=True)],
        "cursor": page.cursor if view.tenant is None else None,
        "missing": page.replicas_missing,
        **(await _own(view) if rows and view.tenant is not None else _NOT_CHOSEN),
        "may_change": api.allows("PUT /v1/admin/tenants/{tenant}"),
        "has_decisions": api.allows("GET /v1/admin/decisions"),
        "what_if": await _what_if(view, rows[0]) if view.tenant is not None and rows else None,
    }


async def _page_of(view: View) -> tuple[AdmissionList, list[dict[str, Any]]]:
    """The page of the list with the tenant that is looked at, and its row if there is one."""
    cursor: str | None = None
    while True:
        page: AdmissionList = await view.api.get(
            "/v1/admin/admission", limit=_TENANTS_MAX, cursor=cursor, sort="tenant"
        )
        rows = [_seen(each) for each in page.tenants if each.tenant == view.tenant]
        cursor = page.cursor
        if rows or cursor is None:
            return page, rows


def would_admit(refused: Sequence[tuple[int, str | None]], *, extra: int, held_ms: float) -> int:
    """How many refused callers a higher cap would have admitted.

    ``refused`` has the time and the idempotency key of each refusal, oldest first. An admitted run
    holds its slot for ``held_ms``. Refusals of a caller that tries again with its key count once.
    """
    ends: list[float] = []
    admitted: set[str] = set()
    count = 0
    for at_ms, key in refused:
        while ends and ends[0] <= at_ms:
            heapq.heappop(ends)
        if key in admitted or len(ends) >= extra:
            continue
        heapq.heappush(ends, at_ms + held_ms)
        count += 1
        if key is not None:
            admitted.add(key)
    return count


_NOT_CHOSEN: Final[Data] = {"config": None, "budgets": ()}


async def _own(view: View) -> Data:
    """The budgets of the tenant that is looked at, and what a start gets while it is full."""
    own = await view.api.get("/v1/tenant") if view.api.allows("GET /v1/tenant") else None
    return {"config": own, "budgets": budget_rows(own)}


async def _what_if(view: View, row: dict[str, Any]) -> Data | None:
    """What other caps would have admitted of the last hour's refused starts."""
    limit, api = row["limit"], view.api
    if limit is None or not api.allows("GET /v1/admin/decisions"):
        return None
    since = datetime.fromtimestamp(view.now / 1000 - 3_600, UTC)
    listed = await api.get(
        "/v1/admin/decisions",
        limit=_RECEIPTS_MAX,
        outcome="full",
        since=since.isoformat(timespec="seconds"),
    )
    refused = sorted((round(each.at.timestamp() * 1000), each.key) for each in listed.decisions)
    ended = await api.get("/v1/runs", status=["succeeded", "failed"], limit=_ENDED)
    lengths = [
        (run.finished_at - run.created_at).total_seconds() * 1000
        for run in ended.runs
        if run.finished_at is not None
    ]
    # If no run has ended yet, a slot that is taken stays taken.
    held_ms = sum(lengths) / len(lengths) if lengths else math.inf
    callers = {key if key is not None else number for number, (_, key) in enumerate(refused)}
    caps = {limit + 1, limit + 2, limit * 2, limit * 4}
    typed = view.query.get("if_cap").strip()
    if typed.isdecimal() and limit < int(typed[:_DIGITS_MAX]):
        caps.add(int(typed[:_DIGITS_MAX]))
    return {
        "callers": len(callers),
        "caps": [
            (cap, would_admit(refused, extra=cap - limit, held_ms=held_ms))
            for cap in sorted(caps - {limit, 0})
        ],
        "typed": typed,
        "more_than": limit,
        "held_ms": held_ms if lengths else None,
        "left_out": sum(each.left_out for each in listed.decisions),
    }


def _seen(row: Any) -> dict[str, Any]:  # noqa: ANN401 - a wire type
    figures = {name: getattr(row, name) for name in row.__struct_fields__}
    is_full = row.limit is not None and row.active >= row.limit
    return {**figures, "is_full": is_full}


async def _board(view: View, row: dict[str, Any]) -> tuple[Markup, datetime | None]:
    """The slots of a tenant as cells that lead to their runs, and when the last one was taken."""
    active, limit = row["active"], row["limit"]
    tenant = row["tenant"]
    runs: tuple[RunRow, ...] = ()
    is_drawn = max(active, limit or 0) <= CELLS_MAX
    if active > 0 and (is_drawn or row["is_full"]):
        runs = await _active(view.api.of(tenant), active if is_drawn else 1)
    board = slot_board(
        _slots(view, tenant, runs) if is_drawn else (),
        active=active,
        limit=limit,
        href=view.at("runs", tenant=tenant),
    )
    return board, max((run.created_at for run in runs), default=None)


async def _active(api: Api, limit: int) -> tuple[RunRow, ...]:
    """The newest runs that hold a slot."""
    try:
        page = await api.get("/v1/runs", limit=limit, status=list(_ACTIVE))
    except (RequestRefused, BackendError):
        return ()
    found: tuple[RunRow, ...] = page.runs
    return found


def _slots(view: View, tenant: str, runs: Sequence[RunRow]) -> list[TakenSlot]:
    of_tenant = view.url("", tenant=tenant)
    return [
        TakenSlot(
            run_id=run.run_id,
            status=run.status,
            href=f"/console/runs/{run.run_id}{of_tenant}",
            title=f"{run.workflow_id} {run.run_id}",
        )
        for run in runs
    ]


@PAGES.action("/admission/cap", "PUT /v1/admin/tenants/{tenant}", board)
async def change_cap(view: View) -> Redirect:
    """Change a tenant's cap."""
    await _change(view, max_concurrent_runs=view.form.integer("limit"))
    return Redirect(_here(view), "cap_changed")


@PAGES.action("/admission/queue", "PUT /v1/admin/tenants/{tenant}", board)
async def change_queue(view: View) -> Redirect:
    """Change what a start of the tenant gets while no slot is free."""
    numbers = {name: view.form.number(name) for name in ("queue_max", "queue_wait_s")}
    for name, number in numbers.items():
        if number is None:
            raise RequestRefused(invalid_member(name, "must be a number"))
    await _change(
        view,
        on_full=view.form.get("on_full"),
        **numbers,
    )
    return Redirect(_here(view), "queue_changed")


def _here(view: View) -> str:
    """The board as it was looked at."""
    return f"/console/admission{view.query.with_(did=None, tenant=view.tenant)}"


async def _change(view: View, **changed: object) -> None:
    """Change members of a tenant's configuration and leave the rest as it is."""
    params = {"tenant": view.form.get("of")}
    config = await view.api.get("/v1/admin/tenants/{tenant}", params)
    body = {name: getattr(config, name) for name in config.__struct_fields__}
    await view.api.send("PUT /v1/admin/tenants/{tenant}", params, body | changed)


DONE["queue_changed"] = "The queue was changed. It is in force."
DONE["cap_changed"] = "The cap was changed. It is in force."
