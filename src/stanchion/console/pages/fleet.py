"""The fleet: workers and topics, replicas, drills, and the audit log."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Final

import msgspec
from markupsafe import Markup

from stanchion.charts import Chart
from stanchion.console.page import Data, Nav, PageTable, View
from stanchion.console.pictures import chart
from stanchion.core.json_value import JsonObject
from stanchion.core.why import NO_WORKER_MS
from stanchion.gateway.views import when
from stanchion.wire.admin import AuditList, ReplicaRow, WorkerRow

PAGES: Final = PageTable()

_LIMIT: Final = 100
_MISSING_S: Final = 15
_CLOCK_MS: Final = 1_000
"""A clock that differs more than this is worth a look: leases allow for two seconds."""


# ── Workers and topics ───────────────────────────────────────────────────────────────────────────

_TOPICS: Final = "GET /v1/worker/topics"


@PAGES.page(
    "/workers",
    "Workers and topics",
    "workers.html",
    "GET /v1/admin/workers",
    Nav("System", "Workers", "h"),
)
async def show_workers(view: View) -> Data:
    """Workers, and the topics with jobs that wait."""
    page = await view.api.get("/v1/admin/workers", cursor=view.query.get("cursor"), limit=_LIMIT)
    # Jobs are counted over all tenants: beside the workers of one they would mean nothing.
    is_counted = view.tenant is None and view.api.allows(_TOPICS)
    ready = (await view.api.get("/v1/worker/topics")).ready if is_counted else {}
    is_whole = page.cursor is None and "cursor" not in view.query
    recent = when(view.now) - ABSENT_AFTER
    return {
        "workers": page.workers,
        "cursor": page.cursor,
        "topics": served_topics(page.workers, ready, recent),
        "is_whole": is_whole,
        "is_counted": is_counted,
        "recent": recent,
    }


ABSENT_AFTER: Final = timedelta(milliseconds=NO_WORKER_MS)
"""A worker that has not called for so long serves no topic, as in ``GET /v1/runs/{id}/why``."""


class ServedTopic(msgspec.Struct, frozen=True):
    """A topic with its ready jobs, and how many workers serve it."""

    topic: str
    ready: int
    workers: int
    last_seen_at: datetime | None
    """When any worker of it called last."""


def served_topics(
    workers: Iterable[WorkerRow], ready: dict[str, int], recent: datetime
) -> list[ServedTopic]:
    """Each topic of a worker or with ready jobs; those that no worker has served since first."""
    seen: dict[str, list[datetime]] = {topic: [] for topic in ready}
    for worker in workers:
        for topic in worker.topics:
            seen.setdefault(topic, []).append(worker.last_seen_at)
    found = [
        ServedTopic(
            topic,
            ready.get(topic, 0),
            sum(time >= recent for time in times),
            max(times, default=None),
        )
        for topic, times in seen.items()
    ]
    return sorted(found, key=lambda each: (bool(each.workers), each.topic))


# ── Replicas ─────────────────────────────────────────────────────────────────────────────────────


@PAGES.page(
    "/replicas",
    "Replicas",
    "replicas.html",
    "GET /v1/admin/replicas",
    Nav("System", "Replicas", "n"),
)
async def show_replicas(view: View) -> Data:
    """Every server process, as it last reported itself."""
    page = await view.api.get("/v1/admin/replicas", cursor=view.query.get("cursor"), limit=_LIMIT)
    rows: tuple[ReplicaRow, ...] = page.replicas
    missing = when(view.now) - timedelta(seconds=_MISSING_S)
    newest = max((row.settings_revision for row in rows), default=0)
    return {
        "replicas": [
            {
                "row": row,
                "is_missing": row.seen_at < missing,
                "is_behind": row.settings_revision != newest,
                "is_off": abs(row.clock_offset_ms) > _CLOCK_MS,
            }
            for row in rows
        ],
        "versions": sorted({row.version for row in rows}),
        "cursor": page.cursor,
    }


# ── Drills ───────────────────────────────────────────────────────────────────────────────────────

_OLD: Final = timedelta(days=30)
DRILLS: Final = ("admission", "retry", "fallback", "renewal", "lock-busy")


@PAGES.page(
    "/drills", "Drills", "drills.html", "GET /v1/admin/drills", Nav("System", "Drills", "i")
)
async def show_drills(view: View) -> Data:
    """The reports of drills, and those that there is none of; or one with its charts."""
    only = view.query.get("drill") or None
    found = await view.api.get("/v1/admin/drills", drill=only)
    done = {row.drill for row in found.drills}
    return {
        "drills": found.drills,
        "directory": found.directory,
        "only": only,
        "charts": [drawn for row in found.drills for drawn in _drawn(row.charts)],
        "missing": [name for name in DRILLS if name not in done],
        "old": when(view.now) - _OLD,
    }


def _drawn(charts: tuple[JsonObject, ...]) -> list[Markup]:
    """The charts that this version can draw."""
    drawn = []
    for each in charts:
        with suppress(msgspec.ValidationError, ValueError, ArithmeticError):
            drawn.append(chart(msgspec.convert(each, Chart)))
    return drawn


# ── Audit ────────────────────────────────────────────────────────────────────────────────────────


@PAGES.page("/audit", "Audit", "audit.html", "GET /v1/admin/audit", Nav("System", "Audit", "u"))
async def show_audit(view: View) -> Data:
    """Who changed what, newest first."""
    query = view.query
    page = await view.filtered(
        "/v1/admin/audit",
        AuditList(()),
        actor=query.get("actor"),
        action=query.get("action"),
        tenant=query.get("of") or view.tenant,
        since=query.get("since"),
        until=query.get("until"),
        cursor=query.get("cursor"),
        limit=_LIMIT,
    )
    return {"entries": page.entries, "cursor": page.cursor, "is_filtered": _is_filtered(view)}


def _is_filtered(view: View) -> bool:
    return any(view.query.get(name) for name in ("actor", "action", "of", "since", "until"))
