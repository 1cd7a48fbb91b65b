"""The admission board: every tenant's slots, what waits, and what was refused."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from markupsafe import Markup

from stanchion.console.api import Api
from stanchion.console.page import DONE, Action, Data, Nav, Page, Redirect, View
from stanchion.console.pictures import CELLS_MAX, TakenSlot, slot_board
from stanchion.gateway.problems import RequestRefused, invalid_member
from stanchion.ports.errors import BackendError

__all__ = ["ACTIONS", "PAGES"]

_LIMIT: Final = 25
_ACTIVE: Final = ("pending", "running", "waiting")


async def board(view: View) -> Data:
    """The tenants, those under pressure first."""
    api = view.api
    if not api.allows("GET /v1/admin/admission"):
        page = await api.get("/v1/admin/tenants", limit=_LIMIT, cursor=view.query.get("cursor"))
        rows = [_configured(each) for each in page.tenants]
        missing: tuple[str, ...] = ()
    else:
        page = await api.get(
            "/v1/admin/admission",
            limit=_LIMIT,
            cursor=view.query.get("cursor"),
            sort=view.query.get("sort"),
        )
        rows = [_seen(each) for each in page.tenants]
        missing = tuple(getattr(page, "replicas_missing", ()))
    boards = await asyncio.gather(*(_board(view, row) for row in rows))
    return {
        "rows": list(zip(rows, boards, strict=True)),
        "cursor": page.cursor,
        "missing": missing,
        "has_figures": api.allows("GET /v1/admin/admission"),
        "may_change": api.allows("PUT /v1/admin/tenants/{tenant}"),
        "has_decisions": api.allows("GET /v1/admin/decisions"),
        "full": sum(1 for row in rows if row["is_full"]),
    }


def _configured(row: Any) -> dict[str, Any]:  # noqa: ANN401 - a wire type
    limit, active = row.max_concurrent_runs, getattr(row, "active", None)
    is_full = active is not None and limit is not None and active >= limit
    return {"tenant": row.tenant, "limit": limit, "active": active, "is_full": is_full}


def _seen(row: Any) -> dict[str, Any]:  # noqa: ANN401 - a wire type
    figures = {name: getattr(row, name) for name in row.__struct_fields__}
    is_full = row.limit is not None and row.active >= row.limit
    return {**figures, "is_full": is_full}


async def _board(view: View, row: dict[str, Any]) -> Markup | None:
    """The slots of a tenant as cells that lead to their runs."""
    active, limit = row["active"], row["limit"]
    if active is None:
        return None
    tenant = row["tenant"]
    taken: list[TakenSlot] = []
    if active > 0 and max(active, limit or 0) <= CELLS_MAX:
        taken = await _taken(view, view.api.of(tenant), tenant, active)
    return slot_board(taken, active=active, limit=limit, href=view.at("runs", tenant=tenant))


async def _taken(view: View, api: Api, tenant: str, active: int) -> list[TakenSlot]:
    try:
        page = await api.get("/v1/runs", limit=active, status=list(_ACTIVE))
    except (RequestRefused, BackendError):
        return []
    return [
        TakenSlot(
            run_id=run.run_id,
            status=run.status,
            href=view.at("runs", run.run_id, tenant=tenant),
            title=f"{run.workflow_id} {run.run_id}",
        )
        for run in page.runs
    ]


async def change_cap(view: View) -> Redirect:
    """Change a tenant's cap and leave the rest of its configuration as it is."""
    params = {"tenant": view.form.get("of")}
    typed = view.form.get("limit").strip()
    if typed and not typed.isdecimal():
        raise RequestRefused(
            invalid_member("limit", "must be a whole number, or empty for no limit")
        )
    config = await view.api.get("/v1/admin/tenants/{tenant}", params)
    body = {name: getattr(config, name) for name in config.__struct_fields__}
    body["max_concurrent_runs"] = int(typed) if typed else None
    await view.api.send("PUT /v1/admin/tenants/{tenant}", params, body)
    return Redirect(f"{view.at('admission')}{view.query.with_(did=None)}", "cap_changed")


BOARD: Final = Page(
    path="/console/admission",
    title="Admission",
    template="admission.html",
    load=board,
    needs="GET /v1/admin/tenants",
    nav=Nav(group="Now", label="Admission", letter="a"),
)
PAGES: Final = (BOARD,)
ACTIONS: Final = (
    Action(
        path="/console/admission/cap",
        act=change_cap,
        needs="PUT /v1/admin/tenants/{tenant}",
        page=BOARD,
    ),
)
DONE["cap_changed"] = "The cap was changed. It is in force."
