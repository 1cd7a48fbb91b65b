"""The app: every path of the table under Starlette's router, and the way to shut it all down."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final, Generic, TypeVar

import msgspec
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

__all__ = ["Gateway", "MetricsApp", "Paths", "make_app"]

_PREPARE_S: Final = 2.0


def make_app(services: Services, options: GatewayOptions | None = None) -> Gateway:
    """The whole HTTP interface, as an ASGI app."""
    return Gateway(services, options or GatewayOptions())


class Gateway:
    """An ASGI app that can be told to drain."""

    def __init__(self, services: Services, options: GatewayOptions) -> None:
        self._services = services
        self.options = options
        self._state = GatewayState(services, options)
        self._state.openapi = _openapi()
        self.watchdog = LoopWatchdog(services.registry)
        self._signals = signals = RequestSignals(services.registry)
        self._unrouted = signals.unrouted
        endpoints = _endpoints(services, self._state, signals, ROUTES, options)
        self._paths = Paths(endpoints)
        # Starlette's router tries one pattern after the other, which costs as much as all the rest
        # of the routing: it is left with what only a pattern can tell.
        matched: list[BaseRoute] = [
            PathRoute(_template(path), endpoints[path]) for path in self._paths.left_out
        ]
        self._router = Router(matched, redirect_slashes=False, default=self._nowhere)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - as ASGI has it
        """Answer one request."""
        if scope["type"] == "http":
            found = self._paths.find(scope["path"])
            if found is None:
                await self._router(scope, receive, send)
            else:
                endpoint, scope["path_params"] = found
                await endpoint(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})
        else:
            await _lifespan(receive, send)

    async def prepare(self) -> None:
        """Read whether there are keys, so that the first request is judged by it.

        A store that fails or is slow does not stop the server: it then acts as if there were none.
        """
        with suppress(BackendError, TimeoutError):
            async with asyncio.timeout(_PREPARE_S):
                await self._state.keys.configured()

    def scraping(self, *, is_private: bool) -> MetricsApp:
        """The app of a listener that serves only metrics and liveness.

        On a private one, which only this machine reaches, no key is asked for.
        """
        table = [each for each in ROUTES if each.path in {METRICS, LIVEZ}]
        open_too = msgspec.structs.replace(self.options, metrics_open=True)
        options = open_too if is_private else self.options
        endpoints = _endpoints(self._services, self._state, self._signals, table, options)
        return MetricsApp(Paths(endpoints), self._nowhere, self._state, is_private=is_private)

    @property
    def is_draining(self) -> bool:
        """Whether it was told to."""
        return self._state.draining.is_set()

    def drain(self) -> None:
        """Begin nothing new, and end whatever only waits. What is under way is finished."""
        self._state.draining.set()
        self._services.scheduler.drain()
        self._services.waiters.drain()

    def close(self) -> None:
        """Let go of what the app itself holds."""
        self._state.close()

    async def _nowhere(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - as ASGI has it
        exchange = Exchange(self.options, scope, receive, send, self._unrouted)
        nothing = Refusal(code=Code.NOT_FOUND, detail="there is nothing at this path")
        foreign = self._state.auth.foreign(exchange.headers)
        await exchange.refuse(exchange.flaw() or foreign or nothing)


class MetricsApp:
    """An ASGI app for a listener of its own: metrics and liveness, and nothing else.

    Also with keys, a private one checks where a request comes from: pages in a browser on this
    machine can reach it, and must not read what it answers without a key.
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
        path = path.replace(f"{{{name}}}", f"{{{name}:path}}")
    return path


async def _lifespan(receive: Any, send: Any) -> None:  # noqa: ANN401 - as ASGI has it
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


_Endpoint = TypeVar("_Endpoint")


class Paths(Generic[_Endpoint]):
    """A table of templates."""

    def __init__(self, endpoints: Mapping[str, _Endpoint]) -> None:
        self.left_out = [path for path in endpoints if any(f"{{{name}}}" in path for name in PATHS)]
        """Those with a parameter that has no bounds."""
        self._root: _Node[_Endpoint] = _Node()
        for template, endpoint in endpoints.items():
            if template not in self.left_out:
                self._put(template.split("/"), endpoint)

    def find(self, path: str) -> tuple[_Endpoint, dict[str, str]] | None:
        """The endpoint, and what stands where its template has parameters."""
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
            assert node.anything is None or not node.words, f"{segments}: {segment} has rivals"
            node = below
        node.endpoint, node.parameters = endpoint, tuple(parameters)


class _Node(Generic[_Endpoint]):
    __slots__ = ("anything", "endpoint", "parameters", "words")

    def __init__(self) -> None:
        self.words: dict[str, _Node[_Endpoint]] = {}
        self.anything: _Node[_Endpoint] | None = None
        self.endpoint: _Endpoint | None = None
        self.parameters: tuple[tuple[str, int], ...] = ()
        """Of the endpoint, each with its place in the path."""
