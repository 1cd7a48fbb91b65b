"""What telemetry costs: traces that are off, one run in a hundred traced, and a scrape.

Off, a start executes a few comparisons and one assignment to a context variable. They are timed by
themselves, as a part of the processor time of a start. On, two servers on SQLite run alternately,
and their processor time for a start is compared; the exporter's endpoint refuses connections. While
the metrics are scraped, another connection's requests show whether the event loop is blocked.
"""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from statistics import median
from timeit import timeit
from typing import NamedTuple

from bench.http import BODY, PATH
from bench.pace import Pace
from bench.row import Row, at_most, below, spread
from bench.serving import Site, embedded
from bench.workflows import ONE_JOB
from stanchion import telemetry

__all__ = ["rows"]

STARTS, STARTS_QUICK = 300, 100
"""In one round. Short rounds, so that a change of the machine's speed meets both servers alike."""
ROUNDS, ROUNDS_QUICK = 80, 4
WARM_UP = 2_000
TENANTS, TENANTS_QUICK = 1_000, 50
SCRAPES = 11
BESIDE = 10
COMPARISONS = 8
"""How often a start compares ``telemetry.tracing`` with ``None``, generously counted."""
TIMED = 100_000
ON = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
    "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
    "OTEL_TRACES_SAMPLER_ARG": "0.01",
}


def rows(pace: Pace) -> list[Row]:
    """Measure all four."""
    starts = STARTS_QUICK if pace.is_quick else STARTS
    rounds = ROUNDS_QUICK if pace.is_quick else ROUNDS
    with embedded() as off, _variables(ON), embedded() as on:
        off.prepare({"one-job": ONE_JOB})
        on.prepare({"one-job": ONE_JOB})
        _start(off, WARM_UP)
        _start(on, WARM_UP)
        pairs = [_pair(off, on, starts, number) for number in range(rounds)]
        scrape = _scraped(off, TENANTS_QUICK if pace.is_quick else TENANTS)
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
        below(
            "processor time of a start, 1 in 100 traced, against off",
            median(ratios),
            "×",
            1.05,
            f"{rounds} rounds, {spread(ratios)}",
        ),
        below("scrape with 1,000 tenants", scrape.took_ms, "ms", 50),
        at_most(
            "another request during a scrape with 1,000 tenants",
            scrape.beside_ms,
            "ms",
            20,
            f"the slowest of each scrape; {scrape.alone_ms:.2f} ms without a scrape",
        ),
    ]


def _pair(off: Site, on: Site, starts: int, number: int) -> tuple[float, float]:
    """What a start costs without and with traces. Each of them comes first in every other pair."""
    if number % 2:
        with_us = _start(on, starts)
        return _start(off, starts), with_us
    return _start(off, starts), _start(on, starts)


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


class _Scrape(NamedTuple):
    """Medians, in milliseconds."""

    took_ms: float
    beside_ms: float
    """The slowest of the requests that another connection sent during the scrape."""
    alone_ms: float
    """The slowest of as many without a scrape."""


def _scraped(site: Site, tenants: int) -> _Scrape:
    for number in range(tenants):
        name = f"tenant-{number}"
        site.call("PUT", "/v1/workflows/one-job", ONE_JOB, name)
        site.call("POST", PATH, {"input": {}}, name)
    scraper, other = (
        http.client.HTTPConnection("127.0.0.1", site.replicas[0].port, timeout=30.0)
        for _ in range(2)
    )
    taken, beside, alone = [], [], []
    for _ in range(SCRAPES):
        time.sleep(1.0)  # a rendering is served for a second
        alone.append(max(_get_ms(other, "/livez") for _ in range(BESIDE)))
        with ThreadPoolExecutor(1) as thread:
            scraping = thread.submit(_get_ms, scraper, "/metrics")
            seen = [_get_ms(other, "/livez")]
            while not scraping.done():
                seen.append(_get_ms(other, "/livez"))
            taken.append(scraping.result())
            beside.append(max(seen))
    scraper.close()
    other.close()
    return _Scrape(median(taken), median(beside), median(alone))


def _get_ms(connection: http.client.HTTPConnection, path: str) -> float:
    began = time.perf_counter()
    connection.request("GET", path)
    connection.getresponse().read()
    return (time.perf_counter() - began) * 1_000


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
