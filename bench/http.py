"""Starts over HTTP against an endpoint that only decodes the body and sends it back; and batches.

One hot tenant without a cap, 64 callers, one connection each. The server and the bare endpoint are
loaded alternately, and adjacent rounds are compared, so that a short disturbance affects one pair.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Final

import msgspec

from bench.loadgen import Load, send
from bench.pace import Pace
from bench.row import Row, at_least, spread
from bench.serving import Site, distributed, echoing, embedded
from bench.workflows import ONE_JOB

__all__ = ["PATH", "rows", "start_load"]

PATH = "/v1/workflows/one-job/runs"
BODY = '{"input":{"n":7,"question":"how do bridges fail?","tags":["steel","wind"]}}'
LIMIT_PART = 0.4
BATCH: Final = 1_000
"""Runs that one request starts."""
BATCH_GAIN: Final = 5.0


def rows(pace: Pace) -> list[Row]:
    """Measure both durable stores."""
    with echoing() as echo:
        with embedded() as site:
            on_sqlite = _against_echo("SQLite", site, echo, pace)
            batches = _batches("SQLite", site, pace)
        with distributed() as site:
            on_redis = _against_echo("Valkey and NATS", site, echo, pace)
            more = _batches("Valkey and NATS", site, pace)
    return [on_sqlite, on_redis, batches, more]


def start_load(url: str, seconds: float, requests_max: int = 10_000_000) -> Load:
    """Starts at the maximum rate."""
    return Load(url=url + PATH, body=BODY, seconds=seconds, requests_max=requests_max)


def _against_echo(name: str, site: Site, echo: str, pace: Pace) -> Row:
    site.prepare({"one-job": ONE_JOB})
    for url in (site.url, echo):
        send(start_load(url, pace.seconds / 3)).only("200")  # warm up
    pairs = []
    for _ in range(pace.rounds):
        ours = send(start_load(site.url, pace.seconds)).only("200").per_s
        limit = send(start_load(echo, pace.seconds)).only("200").per_s
        pairs.append((ours, limit))
    ratios = [ours / limit for ours, limit in pairs]
    ours, limit = (median(side) for side in zip(*pairs, strict=True))
    label = f"start a run on {name}, against a bare echo"
    note = f"{ours:,.0f}/s against {limit:,.0f}/s; {spread(ratios)}"
    return at_least(label, median(ratios), "×", LIMIT_PART, note, pair=(ours, limit))


def _batches(name: str, site: Site, pace: Pace) -> Row:
    """One caller with batches against 64 callers with single starts, alternately."""
    keys = iter(range(10_000_000))
    given = msgspec.json.decode(BODY)["input"]

    def started_per_s() -> float:
        started, spent_s = 0, 0.0
        while spent_s < pace.seconds:
            numbers = [next(keys) for _ in range(BATCH)]
            # Each run has an input of its own, which its first step reads.
            body = {"runs": [{"input": given | {"n": n}, "key": f"batch-{n}"} for n in numbers]}
            begun_s = time.perf_counter()
            results = site.call("POST", f"{PATH}/batch", body)["results"]
            spent_s += time.perf_counter() - begun_s
            started += sum(result["status"] == 200 for result in results)
        return started / spent_s

    started_per_s()  # warm up
    pairs = [
        (started_per_s(), send(start_load(site.url, pace.seconds)).only("200").per_s)
        for _ in range(pace.rounds)
    ]
    ratios = [batched / single for batched, single in pairs]
    batched, single = (median(side) for side in zip(*pairs, strict=True))
    label = f"start {BATCH:,} runs with one request on {name}, against single starts"
    note = f"{batched:,.0f}/s against {single:,.0f}/s; {spread(ratios)}"
    return at_least(label, median(ratios), "×", BATCH_GAIN, note, pair=(batched, single))
