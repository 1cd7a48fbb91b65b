"""Load: counts what is under way, in total and for each tenant, and refuses what is over a limit.

``Load`` counts requests, waits (long polls) and streams separately, because their costs differ.
Over a limit of the whole gateway the answer is 503 ``overloaded``; over the tenant's own limit it
is 429 ``tenant_overloaded``, and other tenants are not affected. ``RequestPlace`` counts one
request from its head to its answer.

``HeavyRequests`` spaces large bodies, ``LargeAnswers`` bounds the memory and the writes of large
answers, and ``RequestSignals`` measures the duration of requests by route and status.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Final, Self, TypeAlias
from weakref import WeakValueDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge

from stanchion.core.model import TenantId
from stanchion.gateway.options import GatewayOptions
from stanchion.gateway.problems import Refusal, RequestRefused, unavailable_after_ms
from stanchion.gateway.route import Route
from stanchion.services.signals import HistogramSeries, LoopHistogram
from stanchion.wire.problems import Code

if TYPE_CHECKING:
    from stanchion.gateway.body import Bodies
    from stanchion.gateway.exchange import Exchange
    from stanchion.gateway.state import GatewayState

WAIT_S_MAX: Final = 0.03
PLACE_WAIT_S_MAX: Final = 0.4
"""Below the half second that a start may take beyond its wait budget."""
PLACE_HELD_S_MAX: Final = 0.1
"""More than a heavy request takes in the store: after it, the request waits for something else."""
_LOOK_EVERY_S: Final = 0.001
_REST_S_MAX: Final = 0.02
"""A piece of work that took longer was interrupted by other processes."""


class LoadKind(StrEnum):
    """The kinds of work that are counted."""

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
    """Counts what is under way, and refuses what is over a limit."""

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
        """Count one more. Raises ``RequestRefused`` (503) over the gateway's limit."""
        count = self._counts[kind]
        if count >= self._limits[kind]:
            self._shed[kind].inc()
            raise self._refused(Code.OVERLOADED, _TOO_MANY[kind])
        self._counts[kind] = count + 1

    def end(self, kind: LoadKind) -> None:
        """Count one less."""
        self._counts[kind] -= 1
        self.ended += 1

    def begin_for(self, kind: LoadKind, tenant: TenantId) -> None:
        """Count one more of the tenant. Raises ``RequestRefused`` (429) over its limit."""
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
        """Count one less of the tenant."""
        counts = self._tenants[kind]
        left = counts[tenant] - 1
        if left:
            counts[tenant] = left
        else:
            del counts[tenant]

    def _refused(
        self, code: Code, detail: str, *, limit: int | None = None, active: int | None = None
    ) -> RequestRefused:
        after_ms = unavailable_after_ms(self._unit())
        return RequestRefused(
            Refusal(code=code, detail=detail, retry_after_ms=after_ms, limit=limit, active=active)
        )


class FairLock:
    """A lock whose waiting callers get it tenant by tenant."""

    def __init__(self) -> None:
        self._is_taken = False
        self._queues: OrderedDict[TenantId, deque[asyncio.Future[None]]] = OrderedDict()

    async def acquire(self, tenant: TenantId) -> None:
        """Wait for the lock."""
        if not self._is_taken:
            self._is_taken = True
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(tenant, deque()).append(waiting)
        try:
            await waiting
        except asyncio.CancelledError:
            if not waiting.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Pass the lock to the first caller of the next tenant."""
        while self._queues:
            tenant, queue = self._queues.popitem(last=False)
            waiting = queue.popleft()
            if queue:
                self._queues[tenant] = queue
            if not waiting.done():
                waiting.set_result(None)
                return
        self._is_taken = False


class HeavyRequests:
    """Decodes large bodies one at a time, and handles one heavy request of each tenant at a time.

    Decoding and checking a large body blocks the event loop for milliseconds, and several in a row
    would delay every request behind them. So each waits until the requests before it are answered,
    for at most ``WAIT_S_MAX`` in all: on a busy server it is decoded after that time. And while
    others are under way, the event loop is theirs for as long as each turn took. Tenants take
    turns.

    The store call of a heavy request takes milliseconds too. With one per tenant at a time, other
    tenants' calls wait for one of them and not for all. A request that itself waits, for a lock or
    for a store that does not answer, must not hold up those behind it: results and renewals would
    be late, and leases lost. So a place is given back after ``PLACE_HELD_S_MAX``, no request waits
    for one longer than ``PLACE_WAIT_S_MAX``, and workers' requests have a place of their own.
    """

    def __init__(self, load: Load, bodies: Bodies) -> None:
        self._load = load
        self._bodies = bodies
        self._turns = FairLock()
        self._rest_until_s = 0.0
        self._waiting = 0
        self._places: WeakValueDictionary[tuple[TenantId, bool], asyncio.Lock] = (
            WeakValueDictionary()
        )

    @asynccontextmanager
    async def alone(self, tenant: TenantId, *, is_worker: bool) -> AsyncIterator[None]:
        """Handle one heavy request of the tenant at a time, as long as none of them waits."""
        place = self._places.get((tenant, is_worker))
        if place is None:
            place = self._places[tenant, is_worker] = asyncio.Lock()
        try:
            async with asyncio.timeout(PLACE_WAIT_S_MAX):
                await place.acquire()
        except TimeoutError:
            yield
            return
        held = [place]

        def give_back() -> None:
            if held:
                held.pop().release()

        timer = asyncio.get_running_loop().call_later(PLACE_HELD_S_MAX, give_back)
        try:
            yield
        finally:
            timer.cancel()
            give_back()

    @staticmethod
    def patience_ends_s() -> float:
        """Until when a request that asks now gives way to others, in all its turns together."""
        return asyncio.get_running_loop().time() + WAIT_S_MAX

    async def take(self, tenant: TenantId, until_s: float) -> None:
        """Wait for a turn. It ends by itself at the caller's next await that blocks."""
        loop = asyncio.get_running_loop()
        self._waiting += 1
        try:
            await self._turns.acquire(tenant)
            try:
                await self._quiet(until_s)
            finally:
                # The loop runs this callback after the caller has decoded its body and awaits.
                loop.call_soon(self._end_turn, loop.time())
        finally:
            self._waiting -= 1

    def _end_turn(self, began_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        self._rest_until_s = now_s + min(_REST_S_MAX, now_s - began_s)
        self._turns.release()

    async def _quiet(self, until_s: float) -> None:
        """Wait until as many requests have ended as were under way when the turn began.

        If there are other requests, also pause for as long as the last turn took. Those whose body
        has not come yet do not count: a client that does not send it would delay all large bodies.
        """
        loop, load = asyncio.get_running_loop(), self._load
        ended = load.ended + self._others()
        while (  # noqa: ASYNC110 - an event would cost small requests time
            loop.time() < self._rest_until_s and self._others() > 0
        ) or (loop.time() < until_s and load.ended < ended):
            await asyncio.sleep(_LOOK_EVERY_S)

    def _others(self) -> int:
        """How many requests are being handled now."""
        return self._load.requests - self._waiting - self._bodies.reading


class RequestPlace:
    """One request in the counters: as a request, later perhaps as a wait, with its body."""

    __slots__ = ("_bodies", "_body_bytes", "_kind", "_load", "_tenant")

    def __init__(self, state: GatewayState) -> None:
        self._load = state.load
        self._bodies = state.bodies
        self._tenant: TenantId | None = None
        self._body_bytes = 0
        self._kind = LoadKind.REQUESTS

    def __enter__(self) -> Self:
        self._load.begin(self._kind)
        return self

    def take_for(self, tenant: TenantId) -> None:
        """Count the request for its tenant as well. Raises ``RequestRefused``."""
        self._load.begin_for(self._kind, tenant)
        self._tenant = tenant

    async def read_body(self, exchange: Exchange, *, bytes_max: int | None = None) -> bytes:
        """The request's body. Its memory is counted until the end. Raises ``RequestRefused``."""
        bodies, tenant, whole = self._bodies, self._tenant, exchange.whole_body()
        if whole is not None:
            body = bodies.take(whole, tenant, bytes_max=bytes_max)
        else:
            declared = exchange.headers.get(b"content-length")
            body = await bodies.read(exchange.receive, declared, tenant, bytes_max=bytes_max)
        self._body_bytes = len(body)
        return body

    @property
    def has_body(self) -> bool:
        """Whether the request's body has arrived."""
        return self._body_bytes > 0

    def only_wait(self) -> None:
        """Count it as a wait from now on, and no longer as a request. Raises ``RequestRefused``."""
        _begin(self._load, LoadKind.WAITS, self._tenant)
        _end(self._load, self._kind, self._tenant)
        self._kind = LoadKind.WAITS

    def __exit__(self, *_error: object) -> None:
        if self._body_bytes:
            self._bodies.done(self._body_bytes, self._tenant)
        self._load.end(self._kind)
        if self._tenant is not None:
            self._load.end_for(self._kind, self._tenant)


@contextmanager
def stream_counted(load: Load, tenant: TenantId) -> Iterator[None]:
    """Count a stream during the body. Raises ``RequestRefused``."""
    _begin(load, LoadKind.STREAMS, tenant)
    try:
        yield
    finally:
        _end(load, LoadKind.STREAMS, tenant)


def _begin(load: Load, kind: LoadKind, tenant: TenantId | None) -> None:
    if tenant is not None:
        load.begin_for(kind, tenant)
    try:
        load.begin(kind)
    except BaseException:
        if tenant is not None:
            load.end_for(kind, tenant)
        raise


def _end(load: Load, kind: LoadKind, tenant: TenantId | None) -> None:
    load.end(kind)
    if tenant is not None:
        load.end_for(kind, tenant)


TENANT_SHARE: Final = 4
"""One tenant may use one part in this many of the memory for bodies, or for large answers."""
TURN_BYTES: Final = 512 * 1024
"""Bytes of large answers written in one iteration of the event loop, and of large bodies read; one
answer always fits."""
READ_BYTES: Final = 256 * 1024
"""What one connection is read at once."""
_PAUSE: Final = 3.0
"""Pause after each such iteration, as a multiple of the time that it took; others have the loop."""
_PAUSE_S_MAX: Final = 0.05


class ByteTurns:
    """Divides the transfer of many bytes by the iterations of the event loop, tenants in turn."""

    def __init__(self) -> None:
        self._turn_bytes = 0
        """Bytes granted since the last pause; zero if none were."""
        self._granted_s = 0.0
        self._queues: OrderedDict[TenantId | None, deque[tuple[Callable[[], object], int]]] = (
            OrderedDict()
        )

    async def turn(self, size: int, tenant: TenantId | None) -> None:
        """Wait until ``size`` bytes may be read or written in this iteration of the event loop."""
        if not self._may_begin(size):
            granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.call(size, tenant, partial(_grant, granted))
            await granted

    def call(self, size: int, tenant: TenantId | None, then: Callable[[], object]) -> None:
        """Call ``then`` when it is so, now at the earliest."""
        if self._may_begin(size):
            then()
        else:
            self._queues.setdefault(tenant, deque()).append((then, size))

    def _may_begin(self, size: int) -> bool:
        if self._queues or not self._has_room(size):
            return False
        if not self._turn_bytes:
            self._granted_s = time.perf_counter()
            asyncio.get_running_loop().call_soon(self._pause)
        self._turn_bytes += size
        return True

    def _has_room(self, size: int) -> bool:
        return not self._turn_bytes or self._turn_bytes + size <= TURN_BYTES

    def _pause(self) -> None:
        """Serve others, so that many transfers in a row do not occupy the event loop."""
        took_s = time.perf_counter() - self._granted_s
        if self._queues:
            pause_s = min(_PAUSE_S_MAX, _PAUSE * took_s)
            asyncio.get_running_loop().call_later(pause_s, self._next_turn)
        else:
            self._turn_bytes = 0

    def _next_turn(self) -> None:
        self._turn_bytes = 0
        self._granted_s = time.perf_counter()
        while self._queues:
            tenant, queue = next(iter(self._queues.items()))
            then, size = queue[0]
            if not self._has_room(size):
                break
            queue.popleft()
            if queue:
                self._queues.move_to_end(tenant)
            else:
                del self._queues[tenant]
            self._turn_bytes += size
            then()
        asyncio.get_running_loop().call_soon(self._pause)


def _grant(granted: asyncio.Future[None]) -> None:
    if not granted.done():
        granted.set_result(None)


class LargeAnswers(ByteTurns):
    """Bounds the memory of large answers that are being sent, in total and for each tenant."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__()
        self._bytes_max = bytes_max
        self._held_bytes = 0
        self._by_tenant: dict[TenantId | None, int] = {}
        self._holders: dict[int, int] = {}
        """How many clients are being sent the same body, by its identity."""

    def is_tenant_full(self, body: bytes, tenant: TenantId | None) -> bool:
        """Whether the answer would exceed the tenant's share. A single answer never does."""
        held_bytes = self._by_tenant.get(tenant, 0)
        is_new = id(body) not in self._holders
        return (
            is_new and held_bytes > 0 and held_bytes + len(body) > self._bytes_max // TENANT_SHARE
        )

    def take(self, body: bytes, tenant: TenantId | None) -> bool:
        """Count an answer; ``False`` if it would exceed the limit. A single answer never does."""
        holders = self._holders.get(id(body), 0)
        if holders == 0:
            size = len(body)
            if self._held_bytes and self._held_bytes + size > self._bytes_max:
                return False
            self._held_bytes += size
            self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + size
        self._holders[id(body)] = holders + 1
        return True

    def give(self, body: bytes, tenant: TenantId | None) -> None:
        """Count an answer out: it was sent, or its client has disconnected."""
        holders = self._holders.pop(id(body)) - 1
        if holders:
            self._holders[id(body)] = holders
            return
        self._held_bytes -= len(body)
        left = self._by_tenant[tenant] - len(body)
        if left:
            self._by_tenant[tenant] = left
        else:
            del self._by_tenant[tenant]


Observe: TypeAlias = Callable[[float, int], None]
"""Called with the duration of a request in seconds, and its status."""

_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)
_UNROUTED: Final = "none"


class RequestSignals:
    """The histogram of requests. Series are bound once: a look-up costs more."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = LoopHistogram(
            "stanchion_http_request_seconds",
            "Time from a request's head to the end of its answer, waits included.",
            ["method", "route", "status"],
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self.unrouted = self.path_observer("any", _UNROUTED)

    def observer(self, route: Route) -> Observe:
        """The function to call after every request to the route."""
        return self.path_observer(route.method, route.path)

    def path_observer(self, method: str, path: str) -> Observe:
        """The function to call after every request with this method to this path."""
        bound: dict[int, HistogramSeries] = {}

        def observe(seconds: float, status: int) -> None:
            kind = status // 100
            series = bound.get(kind)
            if series is None:
                series = bound[kind] = self._seconds.series(method, path, f"{kind}xx")
            # As its ``observe``, without a call: every request comes through here.
            series.counts[bisect_left(_BUCKETS_S, seconds)] += 1
            series.sum += seconds

        return observe
