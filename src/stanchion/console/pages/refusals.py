"""Refusals: receipts of refused starts, and the rhythm in which callers retry."""

from __future__ import annotations

from datetime import timedelta
from statistics import median
from typing import Any, Final

from markupsafe import Markup

from stanchion.charts import Bars, Histogram
from stanchion.console.page import Data, Nav, PageTable, View
from stanchion.console.pictures import HALF_WIDTH, chart
from stanchion.console.rhythm import (
    MODEL_BUCKET_MS,
    buckets,
    coarser,
    expected_retries,
    expected_returns,
    fixed_beside,
    policy_synchrony,
    simulated,
    synchrony,
)
from stanchion.core.retry import BoundedJitter, Fixed
from stanchion.core.settings import Rhythm
from stanchion.gateway.views import to_instant, when
from stanchion.wire.admin import DecisionList

PAGES: Final = PageTable()

_LIMIT: Final = 100
_FILTERS: Final = ("outcome", "key", "request_id", "since", "until")
_DECISIONS: Final = "GET /v1/admin/decisions"


@PAGES.page("/decisions", "Decisions", "decisions.html", _DECISIONS, Nav("Now", "Decisions", "d"))
async def show_decisions(view: View) -> Data:
    """Receipts of refused starts, newest first."""
    query = view.query
    page = await view.filtered(
        "/v1/admin/decisions",
        DecisionList(()),
        outcome=query.get("outcome").strip(),
        key=query.get("key").strip(),
        request_id=query.get("request_id").strip(),
        since=query.get("since").strip(),
        until=query.get("until").strip(),
        cursor=query.get("cursor"),
        limit=_LIMIT,
    )
    return {
        "decisions": page.decisions,
        "cursor": page.cursor,
        "is_filtered": any(query.get(name) for name in _FILTERS),
    }


# ── Rhythm ───────────────────────────────────────────────────────────────────────────────────────

_BUCKET_MS: Final = 500
_SPAN_MS: Final = 60_000
_RECEIPTS_MAX: Final = 1_000


@PAGES.page(
    "/retries",
    "Retry rhythm",
    "retries.html",
    "GET /v1/admin/lock-history",
    Nav("Locks", "Retries", "t"),
)
async def show_retries(view: View) -> Data:
    """Lock-busy retries and refused callers of the last minute, against what the policy gives."""
    settings = await view.api.get("/v1/admin/settings")
    history = await view.api.get("/v1/admin/lock-history")
    rhythm = _rhythm(settings["lock_busy"])
    busy = list(history.busy)
    fixed, jitter = fixed_beside(rhythm)
    return {
        "replica": history.replica,
        "rhythm": rhythm,
        "is_fixed": isinstance(rhythm, Fixed),
        "busy_total": sum(busy),
        "busy_score": synchrony(busy, bucket_ms=history.bucket_ms, period_ms=rhythm.delay_ms),
        "policy_score": policy_synchrony(rhythm),
        "busy_chart": _histogram(
            "Runs found locked by another",
            coarser(busy, _BUCKET_MS // history.bucket_ms),
            buckets(
                expected_retries(busy, bucket_ms=history.bucket_ms, rhythm=rhythm),
                until_ms=_SPAN_MS,
                bucket_ms=_BUCKET_MS,
                count=_SPAN_MS // _BUCKET_MS,
            ),
            "tried again by the policy",
        ),
        "models": [_model(fixed), _model(jitter)],
        **await _refused(view),
    }


def _rhythm(settings: dict[str, Any]) -> Rhythm:
    if settings["kind"] == "fixed":
        return Fixed(settings["delay_ms"], settings["jitter_ms"])
    return BoundedJitter(settings["delay_ms"], settings["jitter_ms"])


async def _refused(view: View) -> Data:
    """Callers that were answered 429 or 503, and when they are expected back."""
    if not view.api.allows(_DECISIONS):
        return {"refused_chart": None}
    since = when(view.now) - timedelta(milliseconds=2 * _SPAN_MS)
    page = await view.api.get("/v1/admin/decisions", since=since.isoformat(), limit=_RECEIPTS_MAX)
    waits = [
        (float(to_instant(row.at)), row.retry_after_ms)
        for row in page.decisions
        if row.retry_after_ms is not None
    ]
    seen = _last_minute([at for at, _ in waits], view.now, 50)
    expected = _last_minute(expected_returns(waits), view.now, _BUCKET_MS)
    period_ms = median([after for _, after in waits]) if waits else 0
    coarse = coarser(seen, _BUCKET_MS // 50)
    return {
        "refused_total": sum(seen),
        "left_out": sum(row.left_out for row in page.decisions),
        "refused_score": synchrony(seen, bucket_ms=50, period_ms=period_ms),
        "refused_chart": _histogram("Callers answered 429 or 503", coarse, expected),
    }


def _last_minute(times_ms: list[float], now: float, bucket_ms: int) -> list[int]:
    return buckets(times_ms, until_ms=now, bucket_ms=bucket_ms, count=_SPAN_MS // bucket_ms)


def _histogram(
    title: str, counts: list[int], expected: list[int], label: str = "expected back by Retry-After"
) -> Markup:
    return chart(
        Histogram(
            title=title,
            unit="per 500 ms",
            bucket_s=_BUCKET_MS / 1_000,
            series=(
                Bars("seen", tuple(map(float, counts))),
                Bars(label, tuple(map(float, expected))),
            ),
            x_unit="seconds, now at the right",
        ),
        width=HALF_WIDTH,
    )


def _model(rhythm: Rhythm) -> Data:
    name = (
        f"fixed {rhythm.delay_ms} ms"
        if isinstance(rhythm, Fixed)
        else f"{rhythm.delay_ms} ms ± {rhythm.jitter_ms} ms"
    )
    counts = tuple(map(float, simulated(rhythm)))
    return {
        "score": policy_synchrony(rhythm),
        "chart": chart(
            Histogram(
                title=f"40 callers that met once: {name}",
                unit="per 50 ms",
                bucket_s=MODEL_BUCKET_MS / 1_000,
                series=(Bars("retries", counts),),
            ),
            width=HALF_WIDTH,
        ),
    }
