"""A for-each from end to end, one run at a time with one worker: a thousand items, ten thousand.

What ``parallel: 50`` costs is compared with a worker that takes 50 jobs at a time: both have as
many jobs out, so that requests carry as many.
"""

from __future__ import annotations

from statistics import median

import msgspec

from bench.callers import Errand, run_through
from bench.pace import Pace
from bench.row import Row, at_least, at_most, recorded, spread
from bench.serving import Site, distributed, embedded, working
from bench.workflows import FAN, FAN_PARALLEL, PARALLEL

__all__ = ["rows"]

ITEMS = 1_000
MANY = 10_000
WORKERS_HANDS = 200


def rows(pace: Pace) -> list[Row]:
    """Measure one run after the other."""
    with embedded() as site:
        measured = [_throughput(site, pace), *_costs(site, pace, "embedded")]
    with distributed() as site:
        return [*measured, *_costs(site, pace, "on Valkey")]


def _throughput(site: Site, pace: Pace) -> Row:
    site.prepare({"fan": FAN})
    errand = _errand(site, "fan", ITEMS)
    with working(site.url, WORKERS_HANDS):
        run_through(msgspec.structs.replace(errand, runs_max=1))
        ran = run_through(msgspec.structs.replace(errand, runs_max=max(2, pace.rounds)))
    rates = [ITEMS / (took_ms / 1000) for took_ms in ran.latencies_ms]
    label = f"for-each of {ITEMS:,} items, embedded"
    return at_least(label, median(rates), "items/s", 2_000, spread(rates))


def _costs(site: Site, pace: Pace, where: str) -> list[Row]:
    """The servers' processor time for an item of ten thousand."""
    site.prepare({"fan": FAN, "parallel": FAN_PARALLEL})
    with working(site.url, WORKERS_HANDS):
        at_once = _item_us(site, "fan", pace)
        parallel = _item_us(site, "parallel", pace)
    with working(site.url, PARALLEL):
        as_many = _item_us(site, "fan", pace)
    label = f"for-each of {MANY:,} items {where}"
    ratio = median(parallel) / median(as_many)
    pair = f"{median(parallel):.0f} against {median(as_many):.0f} µs"
    return [
        recorded(f"{label}: an item", median(at_once), "µs", spread(at_once)),
        at_most(f"{label}: parallel: {PARALLEL}, against {PARALLEL} out", ratio, "×", 1.1, pair),
    ]


def _item_us(site: Site, workflow: str, pace: Pace) -> list[float]:
    errand = msgspec.structs.replace(_errand(site, workflow, MANY), runs_max=1)
    run_through(msgspec.structs.replace(_errand(site, workflow, ITEMS), runs_max=1))
    times = []
    for _ in range(pace.rounds):
        before_s = site.cpu_s
        run_through(errand)
        times.append((site.cpu_s - before_s) / MANY * 1e6)
    return times


def _errand(site: Site, workflow: str, items: int) -> Errand:
    body = msgspec.json.encode({"input": {"items": list(range(items))}}).decode()
    return Errand(urls=site.urls, workflow=workflow, body=body, at_once=1, seconds=60)
