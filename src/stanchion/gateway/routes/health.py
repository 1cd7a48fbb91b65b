"""Health routes: liveness, readiness, metrics and the OpenAPI document."""

from __future__ import annotations

from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS

from stanchion.gateway.route import (
    ANYONE,
    LIVEZ,
    METRICS,
    OPERATORS,
    Call,
    NoBody,
    NoQuery,
    Reply,
    Route,
    RouteScope,
)
from stanchion.wire.admin import Health

__all__ = ["ROUTES"]

_ALIVE: Final = Reply(Health("ok", {}))


async def livez(_call: Call[NoBody, NoQuery]) -> Reply:
    """Answer 200. Depends on no backend."""
    return _ALIVE


async def readyz(call: Call[NoBody, NoQuery]) -> Reply:
    """Whether the store answers and the server is not draining; also the state of locks and bus."""
    health = await call.state.readiness.health(is_draining=call.state.draining.is_set())
    return Reply(health, status=200 if health.status in {"ok", "degraded"} else 503)


async def metrics(call: Call[NoBody, NoQuery]) -> Reply:
    """All metrics, in the text format of Prometheus, or of OpenMetrics if that is accepted."""
    if b"application/openmetrics-text" in call.headers.get(b"accept", b""):
        text = await call.state.openmetrics.text()
        return Reply(text, content_type=OPENMETRICS.encode())
    text = await call.state.metrics.text()
    return Reply(text, content_type=CONTENT_TYPE_LATEST.encode())


async def openapi(call: Call[NoBody, NoQuery]) -> Reply:
    """The OpenAPI document."""
    return Reply(call.state.openapi)


ROUTES: Final = (
    Route(
        method="GET",
        path=LIVEZ,
        handler=livez,
        summary="Whether the process answers. Depends on no backend.",
        roles=ANYONE,
        scope=RouteScope.OPEN,
        answer=Health,
        is_vital=True,
    ),
    Route(
        method="GET",
        path="/readyz",
        handler=readyz,
        summary="Whether store, locks and bus answer; 503 without the store and while draining.",
        roles=ANYONE,
        scope=RouteScope.OPEN,
        answer=Health,
        statuses=(200, 503),
        is_vital=True,
    ),
    Route(
        method="GET",
        path=METRICS,
        handler=metrics,
        summary="Metrics in the text format of Prometheus. Without a key with `--metrics-open`.",
        roles=OPERATORS,
        scope=RouteScope.DEPLOYMENT,
        answer=None,
        is_vital=True,
    ),
    Route(
        method="GET",
        path="/openapi.json",
        handler=openapi,
        summary="This description of the interface.",
        roles=ANYONE,
        scope=RouteScope.OPEN,
        answer=dict,
        is_vital=True,
    ),
)
