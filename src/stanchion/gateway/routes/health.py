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
    RouteScope,
    RouteTable,
)
from stanchion.wire.admin import Health

ROUTES: Final = RouteTable()

_ALIVE: Final = Reply(Health("ok", {}))


@ROUTES.add(f"GET {LIVEZ}", ANYONE, RouteScope.OPEN, Health, is_vital=True)
async def livez(_call: Call[NoBody, NoQuery]) -> Reply:
    """Whether the process answers. Depends on no backend."""
    return _ALIVE


@ROUTES.add("GET /readyz", ANYONE, RouteScope.OPEN, Health, statuses=(200, 503), is_vital=True)
async def readyz(call: Call[NoBody, NoQuery]) -> Reply:
    """Whether store, locks and bus answer; 503 without the store and while draining."""
    health = await call.state.readiness.health(is_draining=call.state.draining.is_set())
    return Reply(health, status=200 if health.status in {"ok", "degraded"} else 503)


@ROUTES.add(f"GET {METRICS}", OPERATORS, RouteScope.DEPLOYMENT, None, is_vital=True)
async def metrics(call: Call[NoBody, NoQuery]) -> Reply:
    """Metrics in the text format of Prometheus. Without a key with `--metrics-open`.

    In that of OpenMetrics, if the request accepts it.
    """
    if b"application/openmetrics-text" in call.headers.get(b"accept", b""):
        text = await call.state.openmetrics.text()
        return Reply(text, content_type=OPENMETRICS.encode())
    text = await call.state.metrics.text()
    return Reply(text, content_type=CONTENT_TYPE_LATEST.encode())


@ROUTES.add("GET /openapi.json", ANYONE, RouteScope.OPEN, dict, is_vital=True)
async def openapi(call: Call[NoBody, NoQuery]) -> Reply:
    """This description of the interface."""
    return Reply(call.state.openapi)
