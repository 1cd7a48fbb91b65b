"""A for-each of a thousand items from end to end, embedded: one run, one worker."""

from __future__ import annotations

from statistics import median

import msgspec

from bench.callers import Errand, run_through
from bench.pace import Pace
from bench.row import Row, at_least, spread
from bench.serving import embedded, working
from bench.workflows import FAN

__all__ = ["rows"]

ITEMS = 1_000
WORKERS_HANDS = 200


def rows(pace: Pace) -> list[Row]:
    """Measure one run after the other."""
    body = msgspec.json.encode({"input": {"items": list(range(ITEMS))}}).decode()
    with embedded() as site, working(site.url, WORKERS_HANDS):
        site.prepare({"fan": FAN})
        errand = Errand(urls=site.urls, workflow="fan", body=body, at_once=1, seconds=60)
        run_through(msgspec.structs.replace(errand, runs_max=1))
        ran = run_through(msgspec.structs.replace(errand, runs_max=max(2, pace.rounds)))
    rates = [ITEMS / (took_ms / 1000) for took_ms in ran.latencies_ms]
    label = f"for-each of {ITEMS:,} items, embedded"
    return [at_least(label, median(rates), "items/s", 2_000, spread(rates))]
