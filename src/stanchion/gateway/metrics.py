"""Metrics: the text that Prometheus scrapes, rendered in a thread and shared by all who ask.

Rendering a thousand series takes tens of milliseconds of processor time. It is done at most once a
second, in a thread of its own that gives way to the event loop, and every scrape within that second
is answered with the same text. Only so many scrapes are answered with one text; further ones wait
for the next, and above a number of waiting scrapes the answer is 503. So clients that scrape as
fast as they can cost no more than a few scrapes a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, Metric, generate_latest
from prometheus_client.registry import Collector

from stanchion.core.lease import Moment
from stanchion.gateway.problems import Refusal, Refused
from stanchion.ports.clock import Clock
from stanchion.wire.problems import Code

__all__ = ["ANSWERS_MAX", "CACHED_MS", "WAITING_MAX", "MetricsPage"]

CACHED_MS: Final = 1_000
ANSWERS_MAX: Final = 20
"""Scrapes that are answered with one text."""
WAITING_MAX: Final = 100
"""Scrapes that wait for a text."""
_PAUSE_S: Final = 0.001
"""After each family of series the thread lets go of the interpreter for so long."""


class MetricsPage:
    """The newest text, and the scrapes that wait for the next."""

    def __init__(self, registry: CollectorRegistry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="metrics")
        self._rendering: asyncio.Future[bytes] | None = None
        self._text: bytes | None = None
        self._rendered_at = Moment(0)
        self._answers_left = 0
        self._waiting = 0
        self._is_closed = False
        self._rendered = Gauge(
            "stanchion_metrics_rendered_timestamp_seconds",
            "When this text was rendered, as Unix time. A text is answered for a second.",
            registry=registry,
        )

    async def text(self) -> bytes:
        """A text that is at most a second old. Raises ``Refused`` if too many wait for one."""
        if self._waiting >= WAITING_MAX:
            detail = "too many scrapes are waiting for the metrics"
            raise Refused(Refusal(code=Code.OVERLOADED, detail=detail, retry_after_ms=CACHED_MS))
        if self._is_closed:
            raise Refused(
                Refusal(
                    code=Code.DRAINING,
                    detail="the server is shutting down",
                    retry_after_ms=CACHED_MS,
                )
            )
        self._waiting += 1
        try:
            while True:
                age_ms = self._clock.moment() - self._rendered_at
                if self._text is None or age_ms >= CACHED_MS:
                    await asyncio.shield(self._begin())
                elif self._answers_left:
                    self._answers_left -= 1
                    return self._text
                else:
                    await self._clock.sleep((CACHED_MS - age_ms) / 1000)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Let the thread go."""
        self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> asyncio.Future[bytes]:
        """The rendering under way, or a new one."""
        if self._rendering is None:
            loop = asyncio.get_running_loop()
            now = self._clock.moment()
            self._rendered.set(self._clock.now() / 1000)
            self._rendering = loop.run_in_executor(self._thread, _rendered, self._registry)
            self._rendering.add_done_callback(partial(self._end, now))
        return self._rendering

    def _end(self, began_at: Moment, rendering: asyncio.Future[bytes]) -> None:
        self._rendering = None
        if not rendering.cancelled() and rendering.exception() is None:
            self._text, self._rendered_at = rendering.result(), began_at
            self._answers_left = ANSWERS_MAX


def _rendered(registry: CollectorRegistry) -> bytes:
    return generate_latest(_Unhurried(registry))


class _Unhurried(Collector):
    """The registry's families one by one, with a pause after each."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            yield family
            time.sleep(_PAUSE_S)
