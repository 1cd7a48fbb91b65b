"""What telemetry costs: traces that are off, one run in a hundred traced, and a scrape.

Off, a start executes a few comparisons and one assignment to a context variable. They are timed by
themselves, as a part of the processor time of a start. On, two servers on SQLite run alternately,
and their processor time for a start is compared; the exporter's endpoint refuses connections.
"""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from statistics import median
from timeit import timeit

from bench.http import BODY, PATH
from bench.pace import Pace
from bench.row import Row, at_most, below, spread
from bench.serving import Site, embedded
from bench.workflows import ONE_JOB
from stanchion import telemetry

__all__ = ["rows"]

STARTS, STARTS_QUICK = 2_000, 200
ROUNDS, ROUNDS_QUICK = 10, 2
TENANTS, TENANTS_QUICK = 1_000, 50
SCRAPES = 11
COMPARISONS = 8
"""How often a start compares ``telemetry.tracing`` with ``None``, generously counted."""
TIMED = 100_000
ON = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
    "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
    "OTEL_TRACES_SAMPLER_ARG": "0.01",
}


def rows(pace: Pace) -> list[Row]:
    """Measure all three."""
    starts = STARTS_QUICK if pace.is_quick else STARTS
    rounds = ROUNDS_QUICK if pace.is_quick else ROUNDS
    with embedded() as off, _variables(ON), embedded() as on:
        off.prepare({"one-job": ONE_JOB})
        on.prepare({"one-job": ONE_JOB})
        _start(off, starts)
        _start(on, starts)
        pairs = [(_start(off, starts), _start(on, starts)) for _ in range(rounds)]
        scrape_ms = _scrape_ms(off, TENANTS_QUICK if pace.is_quick else TENANTS)
    start_us = median(each[0] for each in pairs)
    off_us = _off_us()
    ratios = [with_us / without_us for without_us, with_us in pairs]
    return [
        below(
            "traces off: part of a start's processor time",
            100 * off_us / start_us,
            "%",
            2,
            f"{off_us:.2f} µs of {start_us:.0f} µs",
        ),
        at_most(
            "processor time of a start, 1 in 100 traced, against off",
            median(ratios),
            "×",
            1.05,
            spread(ratios),
        ),
        below("scrape with 1,000 tenants", scrape_ms, "ms", 50),
    ]


def _start(site: Site, times: int) -> float:
    """Start runs one after the other; return the processor time of each, in µs."""
    connection = http.client.HTTPConnection("127.0.0.1", site.replicas[0].port, timeout=30.0)
    headers = {"Content-Type": "application/json"}
    before_s = site.cpu_s
    for _ in range(times):
        connection.request("POST", PATH, BODY, headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == http.HTTPStatus.OK, answer.status
    connection.close()
    return (site.cpu_s - before_s) / times * 1_000_000


def _off_us() -> float:
    """What the code for traces costs a start while they are off, in µs."""
    assert telemetry.tracing is None

    def compare() -> None:
        if telemetry.tracing is not None:
            raise AssertionError

    def note() -> None:
        telemetry.LOG_IDS.set(telemetry.LogIds("request", "tenant"))
        with telemetry.UNTRACED:
            pass

    def timed() -> float:
        return COMPARISONS * timeit(compare, number=TIMED) + timeit(note, number=TIMED)

    return copy_context().run(timed) / TIMED * 1_000_000


def _scrape_ms(site: Site, tenants: int) -> float:
    for number in range(tenants):
        name = f"tenant-{number}"
        site.call("PUT", "/v1/workflows/one-job", ONE_JOB, name)
        site.call("POST", PATH, {"input": {}}, name)
    connection = http.client.HTTPConnection("127.0.0.1", site.replicas[0].port, timeout=30.0)
    taken_ms = []
    for _ in range(SCRAPES):
        time.sleep(1.0)  # a rendering is served for a second
        began = time.perf_counter()
        connection.request("GET", "/metrics")
        connection.getresponse().read()
        taken_ms.append((time.perf_counter() - began) * 1000)
    connection.close()
    return median(taken_ms)


@contextmanager
def _variables(given: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
