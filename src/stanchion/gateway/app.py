"""The app: routes every request to its endpoint, and drains the gateway.

``make_app`` builds the ASGI app of the whole interface, ``Gateway.scraping`` one for a listener
that serves only metrics and liveness. ``Paths`` finds the endpoint of a path by its segments;
Starlette's router is left with the few templates whose parameters may contain a slash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any, Final, Generic, TypeVar

import msgspec
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.routing import BaseRoute, Router
from starlette.routing import Route as PathRoute
from starlette.types import ASGIApp

from stanchion.gateway.endpoint import Endpoint
from stanchion.gateway.exchange import Exchange
from stanchion.gateway.load import Observe, RequestSignals
from stanchion.gateway.openapi import document
from stanchion.gateway.options import GatewayOptions
from stanchion.gateway.problems import Refusal
from stanchion.gateway.route import ANYONE, LIVEZ, METRICS, PATHS, Route, RouteScope
from stanchion.gateway.routes import ROUTES
from stanchion.gateway.state import GatewayState
from stanchion.ports.errors import BackendError
from stanchion.services.engine import Services
from stanchion.services.watchdog import LoopWatchdog
from stanchion.wire.problems import Code

_PREPARE_S: Final = 2.0
_CACHED_MAX: Final = 512
"""Paths whose endpoint is remembered."""
_CACHED_CHARS_MAX: Final = 100


def make_app(services: Services, options: GatewayOptions | None = None) -> Gateway:
    """The whole HTTP interface, as an ASGI app."""
    return Gateway(services, options or GatewayOptions())


class Gateway:
    """The ASGI app of the whole interface."""

    def __init__(self, services: Services, options: GatewayOptions) -> None:
        self.services = services
        self.options = options
        self.state = GatewayState(services, options)
        self.state.openapi = _openapi()
        self.watchdog = LoopWatchdog(services.registry)
        self._signals = signals = RequestSignals(services.registry)
        self._unrouted = signals.unrouted
        endpoints = _endpoints(services, self.state, signals, ROUTES, options)
        self._paths = Paths(endpoints)
        # Starlette's router tries one pattern after the other, which is slow: it gets only the
        # templates that need a pattern.
        matched: list[BaseRoute] = [
            PathRoute(_template(path), endpoints[path]) for path in self._paths.left_out
        ]
        self._router = Router(matched, redirect_slashes=False, default=self.nowhere)
        self._mounted: dict[str, ASGIApp] = {}
        self._closes: list[Callable[[], None]] = [self.state.close]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - as ASGI has it
        """Answer one request."""
        if scope["type"] == "http":
            found = self._paths.find(scope["path"])
            if found is None:
                mounted = self._mounted.get(scope["path"][1:].partition("/")[0])
                await (mounted or self._router)(scope, receive, send)
            else:
                endpoint, scope["path_params"] = found
                await endpoint(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})
        else:
            await _lifespan(receive, send)

    def mount(self, segment: str, app: ASGIApp, *, close: Callable[[], None]) -> None:
        """Let another app answer all paths that begin with this segment.

        ``close`` is called when the gateway is closed.
        """
        self._mounted[segment] = app
        self._closes.append(close)

    def observer(self, method: str, path: str) -> Observe:
        """Measures requests to a path that is not in the table of routes."""
        return self._signals.path_observer(method, path)

    async def prepare(self) -> None:
        """Check whether there are keys before the first request.

        If the store fails or is slow, the server starts anyway, as if there were no keys.
        """
        with suppress(BackendError, TimeoutError):
            async with asyncio.timeout(_PREPARE_S):
                await self.state.keys.configured()

    def scraping(self, *, is_private: bool) -> MetricsApp:
        """The app of a listener that serves only metrics and liveness.

        A private listener, which only this machine can reach, requires no key.
        """
        table = [each for each in ROUTES if each.path in {METRICS, LIVEZ}]
        open_too = msgspec.structs.replace(self.options, metrics_open=True)
        options = open_too if is_private else self.options
        endpoints = _endpoints(self.services, self.state, self._signals, table, options)
        return MetricsApp(Paths(endpoints), self.nowhere, self.state, is_private=is_private)

    @property
    def is_draining(self) -> bool:
        """Whether ``drain`` was called."""
        return self.state.draining.is_set()

    def drain(self) -> None:
        """Refuse new work and end all waits and streams. Requests under way are finished."""
        self.state.draining.set()
        self.services.scheduler.drain()
        self.services.waiters.drain()

    def close(self) -> None:
        """Stop the app's thread and timer, and what is mounted."""
        for close in self._closes:
            close()

    async def nowhere(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - as ASGI has it
        """Answer a request for a path that does not exist."""
        exchange = Exchange(self.options, scope, receive, send, self._unrouted)
        nothing = Refusal(code=Code.NOT_FOUND, detail="there is nothing at this path")
        foreign = self.state.auth.foreign(exchange.headers)
        await exchange.refuse(exchange.flaw() or foreign or nothing)


class MetricsApp:
    """The ASGI app of a listener that serves only metrics and liveness.

    A private one checks the origin of each request even if there are keys: pages in a browser on
    this machine can reach it, and must not read the metrics, which need no key there.
    """

    def __init__(
        self, paths: Paths[Endpoint], nowhere: ASGIApp, state: GatewayState, *, is_private: bool
    ) -> None:
        self.options = state.options
        self._paths = paths
        self._nowhere = nowhere
        self._auth = state.auth
        self._is_private = is_private

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - as ASGI has it
        """Answer one request."""
        if scope["type"] != "http":
            return
        if self._is_private and (foreign := self._auth.from_elsewhere(dict(scope["headers"]))):
            exchange = Exchange(self.options, scope, receive, send, lambda _s, _status: None)
            await exchange.refuse(foreign)
            return
        found = self._paths.find(scope["path"])
        if found is None:
            await self._nowhere(scope, receive, send)
        else:
            endpoint, scope["path_params"] = found
            await endpoint(scope, receive, send)


@cache
def _openapi() -> bytes:
    return msgspec.json.encode(document(ROUTES))


def _endpoints(
    services: Services,
    state: GatewayState,
    signals: RequestSignals,
    routes: Iterable[Route],
    options: GatewayOptions,
) -> dict[str, Endpoint]:
    by_path: dict[str, list[tuple[Route, Observe]]] = {}
    for route in map(partial(_as_configured, options), routes):
        by_path.setdefault(route.path, []).append((route, signals.observer(route)))
    return {
        path: Endpoint(services, state, routes, signals.unrouted)
        for path, routes in by_path.items()
    }


def _as_configured(options: GatewayOptions, route: Route) -> Route:
    if route.path == METRICS and options.metrics_open:
        return replace(route, roles=ANYONE, scope=RouteScope.OPEN)
    return route


def _template(path: str) -> str:
    for name in PATHS:
        path = path.replace(f"{{{name}}}", f"{{{name}:{_ANY_PATH}}}")
    return path


class _AnyPathConvertor(PathConvertor):
    """Matches a line break too: it is refused as one of an identifier, like other controls."""

    regex = "(?s:.*)"


_ANY_PATH: Final = "any_path"
register_url_convertor(_ANY_PATH, _AnyPathConvertor())


async def _lifespan(receive: Any, send: Any) -> None:  # noqa: ANN401 - as ASGI has it
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


_Endpoint = TypeVar("_Endpoint")


class Paths(Generic[_Endpoint]):
    """Finds endpoints by the segments of a path."""

    def __init__(self, endpoints: Mapping[str, _Endpoint]) -> None:
        self.left_out = [path for path in endpoints if any(f"{{{name}}}" in path for name in PATHS)]
        """Templates with a parameter that may contain a slash."""
        self._cached = lru_cache(maxsize=_CACHED_MAX)(self._look_up)
        self._root: _Node[_Endpoint] = _Node()
        for template, endpoint in endpoints.items():
            if template not in self.left_out:
                self._put(template.split("/"), endpoint)

    def find(self, path: str) -> tuple[_Endpoint, Mapping[str, str]] | None:
        """The endpoint and the values of its path parameters; ``None`` if no template matches."""
        # Most requests are for a few paths: those of starts, leases and results.
        return self._cached(path) if len(path) <= _CACHED_CHARS_MAX else self._look_up(path)

    def _look_up(self, path: str) -> tuple[_Endpoint, Mapping[str, str]] | None:
        node, segments = self._root, path.split("/")
        for segment in segments:
            below = node.words.get(segment) or (node.anything if segment else None)
            if below is None:
                return None
            node = below
        if node.endpoint is None:
            return None
        return node.endpoint, {name: segments[place] for name, place in node.parameters}

    def _put(self, segments: list[str], endpoint: _Endpoint) -> None:
        node, parameters = self._root, []
        for place, segment in enumerate(segments):
            if segment.startswith("{"):
                parameters.append((segment[1:-1], place))
                node.anything = node.anything or _Node()
                below = node.anything
            else:
                below = node.words.setdefault(segment, _Node())
            assert node.anything is None or not node.words, f"{segments}: {segment} is ambiguous"
            node = below
        node.endpoint, node.parameters = endpoint, tuple(parameters)


class _Node(Generic[_Endpoint]):
    __slots__ = ("anything", "endpoint", "parameters", "words")

    def __init__(self) -> None:
        self.words: dict[str, _Node[_Endpoint]] = {}
        self.anything: _Node[_Endpoint] | None = None
        self.endpoint: _Endpoint | None = None
        self.parameters: tuple[tuple[str, int], ...] = ()
        """The endpoint's parameters, each with its place in the path."""
