"""Schedules: what starts by the clock, when it starts next, and what was missed."""

from __future__ import annotations

from typing import Any, Final

from stanchion.console.page import DONE, Data, Nav, PageTable, Redirect, View
from stanchion.console.pages.runs import started
from stanchion.wire.schedules import ScheduleView

PAGES: Final = PageTable()

_LIMIT: Final = 100
_PATH: Final = "/v1/schedules/{schedule_id}"
_KEPT: Final = (
    *("workflow_id", "cron", "every_s", "timezone", "input", "labels", "overlap"),
    *("catch_up", "jitter_s"),
)
"""What a change of ``paused`` keeps."""


@PAGES.page(
    "/schedules", "Schedules", "schedules.html", "GET /v1/schedules", Nav("Work", "Schedules", "c")
)
async def list_schedules(view: View) -> Data:
    """The schedules, by tenant and id."""
    page = await view.api.get("/v1/schedules", limit=_LIMIT, cursor=view.query.get("cursor"))
    return {
        "schedules": page.schedules,
        "cursor": page.cursor,
        "may_change": view.api.allows(f"PUT {_PATH}"),
    }


@PAGES.action("/schedules/put", f"PUT {_PATH}", list_schedules)
async def put(view: View) -> Redirect:
    """Store the schedule that is in the form."""
    form = view.form
    given = form.json("input") if form.get("input").strip() else {}
    body: dict[str, Any] = {
        "workflow_id": form.get("workflow_id").strip(),
        "cron": form.get("cron").strip() or None,
        "every_s": form.integer("every_s"),
        "timezone": form.get("timezone").strip() or "UTC",
        "input": given,
        "overlap": form.get("overlap") or "skip",
        "catch_up": form.get("catch_up") or "none",
    }
    params = {"schedule_id": form.get("schedule_id").strip()}
    await view.api.send(f"PUT {_PATH}", params, body)
    return Redirect(view.at("schedules"), "schedule_stored")


@PAGES.action("/schedules/pause", f"PUT {_PATH}", list_schedules)
async def pause(view: View) -> Redirect:
    """Pause a schedule, or resume it."""
    params = {"schedule_id": view.form.get("schedule_id")}
    stored: ScheduleView = await view.api.get(_PATH, params)
    body = {name: getattr(stored, name) for name in _KEPT}
    await view.api.send(f"PUT {_PATH}", params, {**body, "paused": not stored.paused})
    return Redirect(
        view.at("schedules"), "schedule_resumed" if stored.paused else "schedule_paused"
    )


@PAGES.action("/schedules/trigger", f"POST {_PATH}/trigger", list_schedules)
async def trigger(view: View) -> Redirect:
    """Start a run now."""
    params = {"schedule_id": view.form.get("schedule_id")}
    answer = await view.api.send(f"POST {_PATH}/trigger", params)
    return Redirect(view.at("runs", answer.run_id), started(answer))


@PAGES.action("/schedules/delete", f"DELETE {_PATH}", list_schedules)
async def delete(view: View) -> Redirect:
    """Delete a schedule."""
    await view.api.send(f"DELETE {_PATH}", {"schedule_id": view.form.get("schedule_id")})
    return Redirect(view.at("schedules"), "schedule_deleted")


DONE["schedule_stored"] = "The schedule was stored: its next tick comes after now."
DONE["schedule_paused"] = "The schedule is paused: it starts no runs."
DONE["schedule_resumed"] = "The schedule goes on with its next tick."
DONE["schedule_deleted"] = "The schedule was deleted. Its runs go on."
