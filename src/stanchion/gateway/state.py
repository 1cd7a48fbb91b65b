"""Gateway state: what all handlers of one gateway share.

``GatewayState`` holds the keys, limits, deadlines, cursors and counters. ``Readiness`` checks the
backends for ``/readyz``, at most twice a second. ``MetricsPage`` renders ``/metrics`` in a thread,
at most once a second.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, Metric, ProcessCollector, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from stanchion.core import __version__
from stanchion.core.lease import Moment
from stanchion.gateway.auth import Auth
from stanchion.gateway.body import Bodies
from stanchion.gateway.cursors import Cursors
from stanchion.gateway.load import HeavyRequests, LargeAnswers, Load
from stanchion.gateway.options import GatewayOptions
from stanchion.gateway.problems import Refusal, RequestRefused, unavailable_after_ms
from stanchion.ports.clock import Clock
from stanchion.services.engine import Services
from stanchion.services.keys import Keys
from stanchion.services.replicas import Ping, check_backends
from stanchion.services.work import Deadlines
from stanchion.wire.admin import Health
from stanchion.wire.problems import Code

_SWEEP_S: Final = 0.5
"""How often request deadlines are checked: a request may overrun by this much."""


class GatewayState:
    """Keys, readiness, load and limits of one gateway."""

    def __init__(self, services: Services, options: GatewayOptions) -> None:
        self.options = options
        self.keys = Keys(
            documents=services.store,
            clock=services.clock,
            entropy=services.entropy,
            admin_key=options.admin_key,
        )
        self.auth = Auth(self.keys)
        self.cursors = Cursors(services.store, services.entropy, services.clock)
        self.bodies = Bodies(options)
        self.answers = LargeAnswers(options.answers_bytes_max)
        self.load = Load(options, services.registry, services.entropy.unit)
        self.heavy = HeavyRequests(self.load, self.bodies)
        self.replays = asyncio.Lock()
        """Held while a stream encodes a part of old events."""
        self.deadlines = Deadlines(sweep_s=_SWEEP_S)
        self.readiness = Readiness(services)
        _describe_process(services.registry, services.clock)
        self.metrics = MetricsPage(services.registry, services.clock)
        self.openmetrics = MetricsPage(
            services.registry, services.clock, render=generate_openmetrics
        )
        """The same with exemplars, for scrapers that accept the format."""
        self.work = services.work
        self.draining = asyncio.Event()
        self.openapi = b""
        """The encoded OpenAPI document. Set by the app, which knows all routes."""
        self._entropy = services.entropy

    def overloaded(self, detail: str) -> Refusal:
        """A refusal with 503 ``overloaded`` and a jittered time to retry."""
        after_ms = unavailable_after_ms(self._entropy.unit())
        return Refusal(code=Code.OVERLOADED, detail=detail, retry_after_ms=after_ms)

    def unavailable(
        self, code: Code, detail: str, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> Refusal:
        """A refusal with 503 and a jittered time to retry: a backend does not answer."""
        after_ms = unavailable_after_ms(self._entropy.unit())
        return Refusal(code=code, detail=detail, retry_after_ms=after_ms, headers=headers)

    def close(self) -> None:
        """Stop the metrics thread and the deadline timer."""
        self.deadlines.close()
        self.metrics.close()
        self.openmetrics.close()


KEPT_MS: Final = 500
_VITAL: Final = "store"
"""Without the store nothing works. Without locks or bus much does, and all replicas lose those at
the same time: if that made them unready, no replica would be ready."""


class Readiness:
    """Pings store, locks and bus, and caches the result for half a second."""

    def __init__(self, services: Services) -> None:
        self._clock = services.clock
        self._pings: Mapping[str, Ping] = {
            "store": services.store.ping,
            # Without a lock backend there is only the local mutex, which cannot fail.
            "locks": _nothing if services.locks is None else services.locks.ping,
            "bus": services.bus.ping,
        }
        self._kept: dict[str, str] = {}
        self._kept_at = Moment(-KEPT_MS)
        self._asking: asyncio.Task[dict[str, str]] | None = None

    async def health(self, *, is_draining: bool) -> Health:
        """The status, and the result of each check by name."""
        if self._clock.moment() - self._kept_at >= KEPT_MS:
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask())
            await asyncio.shield(self._asking)
        if is_draining:
            return Health("draining", self._kept)
        if self._kept[_VITAL] != "ok":
            return Health("unavailable", self._kept)
        is_ok = all(word == "ok" for word in self._kept.values())
        return Health("ok" if is_ok else "degraded", self._kept)

    async def _ask(self) -> dict[str, str]:
        try:
            self._kept = await check_backends(self._pings)
            self._kept_at = self._clock.moment()
            return self._kept
        finally:
            self._asking = None


async def _nothing() -> None:
    pass


CACHED_MS: Final = 1_000
ANSWERS_MAX: Final = 20
"""Scrapes that are answered with one rendering."""
WAITING_MAX: Final = 100
"""Scrapes that wait for a rendering."""
_PAUSE_S: Final = 0.001
"""The pause of the thread between metric families, so that it does not hold the GIL."""
_PAUSE_SAMPLES: Final = 100
"""It pauses after this many samples. Most families have only a few."""


class MetricsPage:
    """Renders the metrics in a thread, and shares a rendering between scrapes."""

    def __init__(
        self,
        registry: CollectorRegistry,
        clock: Clock,
        *,
        render: Callable[[Collector], bytes] = generate_latest,
    ) -> None:
        self._render = partial(render, _PausingCollector(registry))
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="metrics")
        self._rendering: asyncio.Future[bytes] | None = None
        self._text: bytes | None = None
        self._rendered_at = Moment(0)
        self._answers_left = 0
        self._waiting = 0
        self._is_closed = False

    async def text(self) -> bytes:
        """The metrics, at most a second old, or rendered since this call.

        Raises ``RequestRefused`` if too many scrapes wait.
        """
        if self._waiting >= WAITING_MAX:
            detail = "too many scrapes are waiting for the metrics"
            raise RequestRefused(
                Refusal(code=Code.OVERLOADED, detail=detail, retry_after_ms=CACHED_MS)
            )
        if self._is_closed:
            raise RequestRefused(
                Refusal(
                    code=Code.DRAINING,
                    detail="the server is shutting down",
                    retry_after_ms=CACHED_MS,
                )
            )
        self._waiting += 1
        came_at = self._clock.moment()
        try:
            while True:
                age_ms = self._clock.moment() - self._rendered_at
                # One that was made for this scrape is an answer, however long it took.
                is_new = age_ms < CACHED_MS or self._rendered_at >= came_at
                if self._text is not None and is_new and self._answers_left:
                    self._answers_left -= 1
                    return self._text
                if self._text is None or age_ms >= CACHED_MS:
                    await asyncio.shield(self._begin())
                else:
                    await self._clock.sleep((CACHED_MS - age_ms) / 1000)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Shut the thread down; later scrapes are refused."""
        self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> asyncio.Future[bytes]:
        """The rendering under way, or a new one."""
        if self._rendering is None:
            loop = asyncio.get_running_loop()
            now = self._clock.moment()
            self._rendering = loop.run_in_executor(self._thread, self._render)
            self._rendering.add_done_callback(partial(self._end, now))
        return self._rendering

    def _end(self, began_at: Moment, rendering: asyncio.Future[bytes]) -> None:
        self._rendering = None
        if not rendering.cancelled() and rendering.exception() is None:
            self._text, self._rendered_at = rendering.result(), began_at
            self._answers_left = ANSWERS_MAX


def _describe_process(registry: CollectorRegistry, clock: Clock) -> None:
    """Add the metrics of the process: its version, memory, processor time and open files."""
    ProcessCollector(registry=registry)
    build = Gauge(
        "stanchion_build_info",
        "Always 1; the labels say what runs.",
        ["version", "python"],
        registry=registry,
    )
    build.labels(version=__version__, python=platform.python_version()).set(1)
    Gauge(
        "stanchion_metrics_rendered_timestamp_seconds",
        "When this page was rendered, as Unix time. A rendering is served for a second.",
        registry=registry,
    ).set_function(lambda: clock.now() / 1000)


class _PausingCollector(Collector):
    """Yields the registry's metric families, with pauses between them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        samples = 0
        for family in self._registry.collect():
            yield family
            samples += len(family.samples)
            if samples >= _PAUSE_SAMPLES:
                samples = 0
                time.sleep(_PAUSE_S)
