"""Limits: how many jobs of some topics may run at once or begin per second, and what they hold."""

from __future__ import annotations

from typing import Any, Final

from stanchion.console.page import DONE, Data, Nav, PageTable, Redirect, View
from stanchion.console.pictures import share_bar
from stanchion.core.model import Topic
from stanchion.core.topic_limits import LimitScope, TopicLimit
from stanchion.wire.admin import LimitView

PAGES: Final = PageTable()

_LIMIT: Final = 100
_PATH: Final = "/v1/admin/limits/{limit_id}"
_TOPICS: Final = "GET /v1/worker/topics"


@PAGES.page(
    "/limits", "Topic limits", "limits.html", "GET /v1/admin/limits", Nav("Work", "Limits", "m")
)
async def show_limits(view: View) -> Data:
    """The limits with what they use, and one of them in the form."""
    page = await view.api.get("/v1/admin/limits", limit=_LIMIT, cursor=view.query.get("cursor"))
    ready: dict[Topic, int] = {}
    if view.api.allows(_TOPICS):
        ready = (await view.api.get("/v1/worker/topics")).ready
    wanted = view.query.get("limit")
    return {
        "limits": [_seen(each, ready) for each in page.limits],
        "cursor": page.cursor,
        "edited": next((each for each in page.limits if each.id == wanted), None),
        "may_change": view.api.allows(f"PUT {_PATH}"),
    }


def _seen(row: LimitView, ready: dict[Topic, int]) -> Data:
    """A limit with a bar of its use, and the ready jobs of its topics."""
    covered = TopicLimit(
        id=row.id,
        topics=row.topics,
        per=LimitScope(row.per),
        max_running=row.max_running,
        rate_per_s=row.rate_per_s,
    )
    bar = None
    if row.max_running is not None and row.running is not None:
        words = f"{row.running:,} of {row.max_running:,} running"
        bar = share_bar(row.running, row.max_running, words)
    waiting = sum(count for topic, count in ready.items() if covered.covers(topic))
    is_full = row.max_running is not None and (row.running or 0) >= row.max_running
    return {"row": row, "bar": bar, "waiting": waiting, "is_full": is_full}


@PAGES.action("/limits/put", f"PUT {_PATH}", show_limits)
async def put(view: View) -> Redirect:
    """Store the limit that is in the form. Raises ``RequestRefused``."""
    form = view.form
    topics = form.get("topics").replace(",", " ").split()
    body: dict[str, Any] = {"topics": topics, "per": form.get("per") or "deployment"}
    for name in ("max_running", "rate_per_s"):
        body[name] = form.number(name)
    await view.api.send(f"PUT {_PATH}", {"limit_id": form.get("limit_id").strip()}, body)
    return Redirect(view.at("limits"), "limit_stored")


@PAGES.action("/limits/delete", f"DELETE {_PATH}", show_limits)
async def delete(view: View) -> Redirect:
    """Delete a limit."""
    await view.api.send(f"DELETE {_PATH}", {"limit_id": view.form.get("limit_id")})
    return Redirect(view.at("limits"), "limit_deleted")


DONE["limit_stored"] = "The limit was stored: in force everywhere within a second."
DONE["limit_deleted"] = "The limit was deleted: jobs that it held back can be leased."
