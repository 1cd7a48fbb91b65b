"""Load: how much is under way, in total and for each tenant, and what is refused above that.

Requests, waits (a caller parked until something happens) and streams are counted apart, because
they cost differently. Above a limit of the whole gateway the answer is 503 ``overloaded``; above
the tenant's own limit it is 429 ``tenant_overloaded``, and other tenants are not affected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import StrEnum
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge

from stanchion.core.model import TenantId
from stanchion.gateway.options import GatewayOptions
from stanchion.gateway.problems import Refusal, Refused, unavailable_after_ms
from stanchion.wire.problems import Code

__all__ = ["HeavyRequests", "Load", "LoadKind"]

WAIT_S_MAX: Final = 0.05
_LOOK_EVERY_S: Final = 0.001


class LoadKind(StrEnum):
    """What is counted."""

    REQUESTS = "requests"
    WAITS = "waits"
    STREAMS = "streams"


_TOO_MANY: Final = {
    LoadKind.REQUESTS: "too many requests at once",
    LoadKind.WAITS: "too many callers are waiting",
    LoadKind.STREAMS: "too many event streams are open",
}
_TOO_MANY_OF_TENANT: Final = {
    LoadKind.REQUESTS: "the tenant has too many requests under way",
    LoadKind.WAITS: "the tenant has too many callers waiting",
    LoadKind.STREAMS: "the tenant has too many event streams open",
}


class Load:
    """Counts what is under way, and refuses what is above a limit."""

    def __init__(
        self, options: GatewayOptions, registry: CollectorRegistry, unit: Callable[[], float]
    ) -> None:
        self._unit = unit
        self._limits = {
            LoadKind.REQUESTS: options.requests_at_once_max,
            LoadKind.WAITS: options.waits_max,
            LoadKind.STREAMS: options.streams_max,
        }
        self._tenant_limits = {
            LoadKind.REQUESTS: options.requests_at_once_per_tenant_max,
            LoadKind.WAITS: options.waits_per_tenant_max,
            LoadKind.STREAMS: options.streams_per_tenant_max,
        }
        self._counts = dict.fromkeys(LoadKind, 0)
        self.ended = 0
        """How many requests, waits and streams have ended so far."""
        self._tenants: dict[LoadKind, dict[TenantId, int]] = {kind: {} for kind in LoadKind}
        shed = Counter(
            "stanchion_http_shed",
            "Requests refused because too much was under way, in total or of their tenant.",
            ["reason"],
            registry=registry,
        )
        self._shed = {kind: shed.labels(reason=kind.value) for kind in LoadKind}
        self._tenant_shed = {kind: shed.labels(reason=f"tenant_{kind}") for kind in LoadKind}
        under_way = Gauge(
            "stanchion_http_under_way",
            "Requests, waits and streams under way.",
            ["kind"],
            registry=registry,
        )
        for kind in LoadKind:
            under_way.labels(kind=kind.value).set_function(partial(self._counts.__getitem__, kind))

    @property
    def requests(self) -> int:
        """How many requests are under way."""
        return self._counts[LoadKind.REQUESTS]

    def begin(self, kind: LoadKind) -> None:
        """Count one in, or refuse it with 503."""
        count = self._counts[kind]
        if count >= self._limits[kind]:
            self._shed[kind].inc()
            raise self._refused(Code.OVERLOADED, _TOO_MANY[kind])
        self._counts[kind] = count + 1

    def end(self, kind: LoadKind) -> None:
        """Count it out."""
        self._counts[kind] -= 1
        self.ended += 1

    def begin_for(self, kind: LoadKind, tenant: TenantId) -> None:
        """Count one in for its tenant, or refuse it with 429."""
        counts = self._tenants[kind]
        count = counts.get(tenant, 0)
        limit = self._tenant_limits[kind]
        if count >= limit:
            self._tenant_shed[kind].inc()
            raise self._refused(
                Code.TENANT_OVERLOADED, _TOO_MANY_OF_TENANT[kind], limit=limit, active=count
            )
        counts[tenant] = count + 1

    def end_for(self, kind: LoadKind, tenant: TenantId) -> None:
        """Count it out."""
        counts = self._tenants[kind]
        left = counts[tenant] - 1
        if left:
            counts[tenant] = left
        else:
            del counts[tenant]

    def _refused(
        self, code: Code, detail: str, *, limit: int | None = None, active: int | None = None
    ) -> Refused:
        after_ms = unavailable_after_ms(self._unit())
        return Refused(
            Refusal(code=code, detail=detail, retry_after_ms=after_ms, limit=limit, active=active)
        )


class HeavyRequests:
    """Large bodies are decoded one at a time, and each tenant's heavy requests are handled so.

    Decoding and checking a large body holds the event loop for milliseconds. Several in a row would
    add up for every request behind them, so each waits until the requests that came before it are
    answered, for ``WAIT_S_MAX`` at most: a server that is always busy gets to them as well.

    What a heavy request has the store do takes milliseconds too. A tenant that sends many at once
    has one of them under way, so that other tenants' calls wait behind one and not behind all.
    """

    def __init__(self, load: Load) -> None:
        self._load = load
        self._turn = asyncio.Lock()
        self._rest_until_s = 0.0
        self._waiting = 0
        self._tenants: WeakValueDictionary[TenantId, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def alone(self, tenant: TenantId) -> AsyncIterator[None]:
        """Inside, no other heavy request of the tenant is handled."""
        lock = self._tenants.get(tenant)
        if lock is None:
            lock = self._tenants[tenant] = asyncio.Lock()
        async with lock:
            yield

    async def take(self) -> None:
        """Wait for a turn. It ends by itself when its holder next waits for something."""
        loop = asyncio.get_running_loop()
        self._waiting += 1
        try:
            await self._turn.acquire()
            try:
                await self._quiet(loop.time() + WAIT_S_MAX)
            finally:
                # The loop comes to it after the holder has worked and waits again.
                loop.call_soon(self._end_turn, loop.time())
        finally:
            self._waiting -= 1

    def _end_turn(self, began_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        self._rest_until_s = now_s + (now_s - began_s)
        self._turn.release()

    async def _quiet(self, until_s: float) -> None:
        """Wait until as many requests have ended as were under way when the turn came.

        While there are others, large bodies also leave them as much time as the last one took.
        """
        loop, load = asyncio.get_running_loop(), self._load
        ended = load.ended + load.requests - self._waiting
        while loop.time() < until_s and (  # noqa: ASYNC110 - small requests must not pay for an event
            load.ended < ended
            or (load.requests > self._waiting and loop.time() < self._rest_until_s)
        ):
            await asyncio.sleep(_LOOK_EVERY_S)
