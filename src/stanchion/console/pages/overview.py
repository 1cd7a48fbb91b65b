"""The overview, what an operator must know first; and the search."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final
from urllib.parse import urlencode

import msgspec
from markupsafe import Markup

from stanchion.charts import Series, plot_edges
from stanchion.console.live import AdmissionSample
from stanchion.console.page import Data, Elsewhere, Nav, PageTable, View
from stanchion.console.pages.fleet import ABSENT_AFTER, served_topics
from stanchion.console.pictures import HALF_WIDTH, share_bar, time_chart
from stanchion.console.text import duration
from stanchion.gateway.problems import RequestRefused
from stanchion.gateway.views import when
from stanchion.wire.admin import ReplicaRow, TenantView
from stanchion.wire.runs import WaitRow

PAGES: Final = PageTable()

_FAILED: Final = 6
_UNKNOWN: Final = "unknown"
"""The state of a replica's store if it has not reported for 15 s."""
_COUNTED_MAX: Final = 100
"""Lists are counted up to here: there may be more."""
_TENANTS_MAX: Final = 1_000
_MOMENT: Final = timedelta(seconds=2)
"""Runs that have waited for less are not shown."""


@PAGES.page("", "Overview", "overview.html", nav=Nav("Now", "Overview", "o"))
async def overview(view: View) -> Data:
    """The state of the deployment, or of the tenant that is looked at."""
    found = await asyncio.gather(
        _tenants(view),
        _listed(view, "/v1/runs", limit=_FAILED, status="failed"),
        _listed(view, "/v1/runs", limit=_FAILED),
        _listed(view, "/v1/approvals", limit=_COUNTED_MAX),
        _listed(view, "/v1/admin/dead-letters", limit=_COUNTED_MAX),
        _listed(view, "/v1/admin/replicas", limit=_COUNTED_MAX),
        _unserved(view),
        _own(view),
        _listed(view, "/v1/waits"),
    )
    tenants, failed, newest, approvals, letters, replicas, unserved, own, waits = found
    data: Data = {
        "tenants": tenants,
        "failed": () if failed is None else failed.runs,
        "newest": () if newest is None else newest.runs,
        "approvals": None if approvals is None else approvals.approvals,
        "more_approvals": approvals is not None and approvals.cursor is not None,
        "letters": None if letters is None else letters.dead_letters,
        "more_letters": letters is not None and letters.cursor is not None,
        "replicas": None if replicas is None else replicas.replicas,
        "reporting": "" if replicas is None else reporting(replicas.replicas),
        "unserved": unserved,
        "own": own,
        **_waits(view, () if waits is None else waits.waits),
        "budgets": budget_rows(own),
        "sees_admission": view.api.allows("GET /v1/admin/tenants") and view.tenant is None,
    }
    hidden = frozenset(view.query.all("hide")) & {name for name, _ in _STARTS}
    charts = None
    if tenants is not None and len(view.samples) > 1:
        charts = _charts(view.samples, hidden)
    sentence, toggles = _sentence(view, data), _toggles(view, hidden)
    return {**data, "sentence": sentence, "charts": charts, "toggles": toggles}


@dataclass(frozen=True, slots=True)
class _Plot:
    """A chart, with what the script needs to read values from it."""

    id: str
    drawn: Markup
    names: tuple[str, ...]
    picked: tuple[int, ...]
    """The columns of its series."""
    latest: str
    """The newest values in words."""


_STARTS: Final = (("admitted", 2), ("refused", 3), ("gate unavailable", 4))
"""Series of the chart of starts, with their columns."""


def _toggles(view: View, hidden: frozenset[str]) -> list[tuple[str, str]]:
    """Links that hide a series of the chart of starts, or show it again: words and address."""
    found = []
    for name, _ in _STARTS:
        others = hidden ^ {name}
        if len(others) < len(_STARTS):
            here = view.url(view.path)
            query = urlencode([("hide", each) for each in sorted(others)])
            sign = "&" if "?" in here else "?"
            words = f"{'show' if name in hidden else 'hide'} {name}"
            found.append((words, f"{here}{sign}{query}" if query else here))
    return found


@lru_cache(maxsize=16)
def _charts(samples: tuple[AdmissionSample, ...], hidden: frozenset[str]) -> Data:
    """The charts of the last half hour. Samples are taken every few seconds, for all viewers."""
    columns = list(zip(*map(msgspec.structs.astuple, samples), strict=True))
    return {
        "series": msgspec.json.encode(columns).decode(),
        "edges": " ".join(map(str, plot_edges(HALF_WIDTH))),
        "plots": (
            _plot("plot-active", "Active runs", "runs", [("active", 1)], columns, hidden),
            _plot("plot-starts", "Starts in a minute", "starts", _STARTS, columns, hidden),
        ),
    }


def _plot(
    id_: str,
    title: str,
    unit: str,
    named: Sequence[tuple[str, int]],
    columns: Sequence[Sequence[int]],
    hidden: Container[str],
) -> _Plot:
    times = columns[0]
    ages = [at - times[0] for at in times]
    # One that is hidden keeps its place, so that the others keep their colours.
    series = [
        Series(f"{name} (hidden)", ())
        if name in hidden
        else Series(name, tuple(zip(ages, columns[column], strict=True)))
        for name, column in named
    ]
    picked = [each for each in named if each[0] not in hidden]
    return _Plot(
        id=id_,
        drawn=time_chart(title, unit, series, length_s=times[-1] - times[0]),
        names=tuple(name for name, _ in picked),
        picked=tuple(column for _, column in picked),
        latest="now: " + ", ".join(f"{name} {columns[column][-1]:,}" for name, column in picked),
    )


async def _listed(view: View, path: str, **query: object) -> Any:  # noqa: ANN401 - a wire type
    """A list; ``None`` if the viewer may not see it."""
    if not view.api.allows(f"GET {path}"):
        return None
    try:
        return await view.api.get(path, None, **query)
    except RequestRefused:
        return None


async def _tenants(view: View) -> Data | None:
    """Figures of all tenants together."""
    if view.tenant is not None or not view.api.allows("GET /v1/admin/admission"):
        return None
    page = await view.api.get("/v1/admin/admission", limit=_TENANTS_MAX)
    rows = page.tenants
    full = [row for row in rows if row.limit is not None and row.active >= row.limit]
    return {
        "active": sum(row.active for row in rows),
        "queued": sum(row.queued or 0 for row in rows),
        "admitted": sum(row.admitted_1m for row in rows),
        "refused": sum(row.full_1m for row in rows),
        "unavailable": sum(row.unavailable_1m for row in rows),
        "full": full,
        "pressed": rows[:8],
        "count": len(rows),
        "is_more": page.cursor is not None,
        "missing": tuple(getattr(page, "replicas_missing", ())),
    }


def _waits(view: View, waits: Sequence[WaitRow]) -> Data:
    """The runs that have waited longest. On a busy server some job always waits a moment."""
    now = datetime.fromtimestamp(view.now / 1000, UTC)
    long = [each for each in waits if now - each.since >= _MOMENT]
    waited_ms = (now - long[0].since).total_seconds() * 1000 if long else 0
    return {"waits": long, "waited": duration(waited_ms)}


async def _own(view: View) -> TenantView | None:
    """What a viewer may know of the tenant that it looks at."""
    path = "/v1/tenant"
    if view.tenant is None or not view.api.allows(f"GET {path}"):
        return None
    found: TenantView = await view.api.get(path)
    return found


def budget_rows(own: TenantView | None) -> list[Data]:
    """The budgets of a tenant, each with a bar of what is used and reserved of it."""
    rows = []
    for name, budget in sorted(() if own is None else own.budgets.items()):
        taken = budget.used + budget.reserved
        words = f"{taken:,} of {budget.limit:,}"
        rows.append(
            {
                "name": name,
                "budget": budget,
                "left": max(0, budget.limit - taken),
                "bar": share_bar(taken, budget.limit, f"{name}: {words}"),
            }
        )
    return rows


async def _unserved(view: View) -> list[tuple[str, int]] | None:
    """Topics with ready jobs that no worker has asked for lately; ``None`` if it is not known."""
    if view.tenant is not None:
        return None  # jobs are counted over all tenants, and workers of others may serve them
    topics = await _listed(view, "/v1/worker/topics")
    workers = await _listed(view, "/v1/admin/workers", limit=_TENANTS_MAX)
    if topics is None or workers is None or workers.cursor is not None:
        return None
    known = served_topics(workers.workers, topics.ready, when(view.now) - ABSENT_AFTER)
    found = [(each.topic, each.ready) for each in known if each.ready and not each.workers]
    return sorted(found, key=lambda each: -each[1])


def reporting(replicas: Sequence[ReplicaRow]) -> str:
    """How many replicas report themselves, and of how many if one is missing."""
    found = sum(each.store != _UNKNOWN for each in replicas)
    return str(found) if found == len(replicas) else f"{found} of {len(replicas)}"


def _sentence(view: View, data: Data) -> str:
    """A sentence with everything that is wrong or waits for an operator."""
    now = datetime.fromtimestamp(view.now / 1000, UTC)
    parts = [
        f"{each.brief} (for {duration(view.now - each.since)})"
        for each in view.alarms
        if each.since is not None
    ]
    tenants = data["tenants"]
    if tenants:
        if tenants["full"]:
            parts.append(f"{_many(len(tenants['full']), 'tenant')} at the cap")
        if tenants["queued"]:
            verb = "waits" if tenants["queued"] == 1 else "wait"
            parts.append(f"{_many(tenants['queued'], 'run')} {verb} for a slot")
        if tenants["refused"]:
            parts.append(f"{_many(tenants['refused'], 'start')} refused in the last minute")
        if tenants["unavailable"]:
            parts.append(f"{_many(tenants['unavailable'], 'start')} met an unavailable gate")
    if data["waits"]:
        awaited = data["waits"][0].waits_for
        awaited = "topic limit" if awaited == "limit" else awaited
        parts.append(f"a run has waited {data['waited']} for a {awaited}")
    if data["approvals"]:
        oldest_ms = (now - data["approvals"][0].since).total_seconds() * 1000
        waits = _many(len(data["approvals"]), "approval", is_more=data["more_approvals"])
        verb = "waits" if len(data["approvals"]) == 1 else "wait"
        parts.append(f"{waits} {verb}, the oldest for {duration(oldest_ms)}")
    if data["letters"]:
        parts.append(_many(len(data["letters"]), "dead letter", is_more=data["more_letters"]))
    if data["unserved"]:
        jobs = sum(count for _, count in data["unserved"])
        parts.append(f"{_many(jobs, 'job')} on topics that no worker serves")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else "Nothing waits for you."


def _many(count: int, noun: str, *, is_more: bool = False) -> str:
    return f"{count:,}{' or more' if is_more else ''} {noun}{'' if count == 1 else 's'}"


_RUN_ID: Final = re.compile(r"[0-9a-z]{8,64}")


@PAGES.page("/search", "Search", "search.html", is_of_tenant=True, is_live=False)
async def search(view: View) -> Data:
    """What the words may mean: a run, a workflow, a tenant, a label, a request."""
    text = view.query.get("q").strip()
    found: Data = {"q": text, "workflow": None, "runs": ()}
    if not text:
        return found
    api = view.api
    if api.allows("GET /v1/runs/{run_id}") and _RUN_ID.fullmatch(text):
        with suppress(RequestRefused):
            run = await api.get("/v1/runs/{run_id}", {"run_id": text})
            raise Elsewhere(view.at("runs", run.run_id))
        tenant = None if view.query.get("tenant") else await api.tenant_of_run(text)
        if tenant is not None:
            raise Elsewhere(view.at("runs", text, tenant=tenant))
    if api.allows("GET /v1/workflows/{workflow_id}"):
        with suppress(RequestRefused):
            params = {"workflow_id": text}
            found["workflow"] = await api.get("/v1/workflows/{workflow_id}", params)
    if ":" in text:
        listed = await _listed(view, "/v1/runs", label=[text], limit=20)
        found["runs"] = () if listed is None else listed.runs
    found["is_tenant"] = view.visitor.sees_all and bool(
        re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", text)
    )
    found["has_decisions"] = api.allows("GET /v1/admin/decisions")
    return found
