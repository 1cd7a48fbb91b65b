"""Schedules: what starts by the clock, when it starts next, and what was missed."""

from __future__ import annotations

import secrets
from typing import Any, Final

import msgspec

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
        "key": secrets.token_hex(16),
    }


@PAGES.page(
    "/schedules/{schedule_id}", "Schedule", "schedule.html", f"GET {_PATH}", is_of_tenant=True
)
async def show_schedule(view: View) -> Data:
    """One schedule: what it starts, its next ticks, its last runs and its missed ticks."""
    schedule: ScheduleView = await view.api.get(_PATH, view.params)
    return {
        "title": f"Schedule {schedule.id}",
        "schedule": schedule,
        "typed": {
            "input": msgspec.json.encode(schedule.input).decode(),
            "labels": " ".join(f"{name}:{value}" for name, value in schedule.labels.items()),
        },
        "may_change": view.api.allows(f"PUT {_PATH}"),
        "key": secrets.token_hex(16),
    }


@PAGES.action("/schedules", f"PUT {_PATH}", list_schedules)
async def make(view: View) -> Redirect:
    """Store the schedule that is in the form, under the name that is there."""
    return await _put(view, view.form.get("schedule_id").strip())


@PAGES.action("/schedules/{schedule_id}", f"PUT {_PATH}", show_schedule)
async def change(view: View) -> Redirect:
    """Store another definition of the schedule."""
    return await _put(view, view.params["schedule_id"])


async def _put(view: View, schedule_id: str) -> Redirect:
    form = view.form
    body: dict[str, Any] = {
        "workflow_id": form.get("workflow_id").strip(),
        "cron": form.get("cron").strip() or None,
        "every_s": form.integer("every_s"),
        "timezone": form.get("timezone").strip() or "UTC",
        "input": form.json("input") if form.get("input").strip() else {},
        "labels": form.labels("labels"),
        "overlap": form.get("overlap") or "skip",
        "catch_up": form.get("catch_up") or "none",
        "jitter_s": form.integer("jitter_s") or 0,
        "paused": form.get("paused") == "yes",
    }
    await view.api.send(f"PUT {_PATH}", {"schedule_id": schedule_id}, body)
    return Redirect(view.at("schedules", schedule_id), "schedule_stored")


@PAGES.action("/schedules/{schedule_id}/pause", f"PUT {_PATH}", show_schedule)
async def pause(view: View) -> Redirect:
    """Pause a schedule, or resume it. Sending the form again changes nothing."""
    stored: ScheduleView = await view.api.get(_PATH, view.params)
    wanted = view.form.get("wanted")
    is_paused = wanted == "paused" if wanted else not stored.paused
    if is_paused != stored.paused:
        body = {name: getattr(stored, name) for name in _KEPT}
        await view.api.send(f"PUT {_PATH}", view.params, {**body, "paused": is_paused})
    return Redirect(
        view.at("schedules") if view.form.get("back") else view.at("schedules", stored.id),
        "schedule_paused" if is_paused else "schedule_resumed",
    )


@PAGES.action("/schedules/{schedule_id}/trigger", f"POST {_PATH}/trigger", show_schedule)
async def trigger(view: View) -> Redirect:
    """Start a run now. Sending the form again starts no second one."""
    key = view.form.get("key") or None
    answer = await view.api.send(f"POST {_PATH}/trigger", view.params, key=key)
    return Redirect(view.at("runs", answer.run_id), started(answer))


@PAGES.action("/schedules/{schedule_id}/delete", f"DELETE {_PATH}", show_schedule)
async def delete(view: View) -> Redirect:
    """Delete a schedule."""
    await view.api.send(f"DELETE {_PATH}", view.params)
    return Redirect(view.at("schedules"), "schedule_deleted")


DONE["schedule_stored"] = "The schedule was stored: its next tick comes after now."
DONE["schedule_paused"] = "The schedule is paused: it starts no runs."
DONE["schedule_resumed"] = "The schedule goes on with its next tick."
DONE["schedule_deleted"] = "The schedule was deleted. Its runs go on."
