"""Signals of the gateway: how long requests take, by route and by kind of answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from prometheus_client import CollectorRegistry, Histogram

from stanchion.gateway.route import Route

__all__ = ["Observe", "RequestSignals"]

Observe: TypeAlias = Callable[[float, int], None]
"""Told the seconds a request took, and its status."""

_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)
_UNROUTED: Final = "none"


class RequestSignals:
    """One histogram; its children are bound once, a label look-up costs more than a count."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "stanchion_http_request_seconds",
            "Time from a request's head to the end of its answer, waits included.",
            ["method", "route", "status"],
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self.unrouted = self._observer("any", _UNROUTED)

    def observer(self, route: Route) -> Observe:
        """What is to be told of every request to the route."""
        return self._observer(route.method, route.path)

    def _observer(self, method: str, path: str) -> Observe:
        bound: dict[int, Callable[[float], None]] = {}

        def observe(seconds: float, status: int) -> None:
            kind = status // 100
            child = bound.get(kind)
            if child is None:
                labels = self._seconds.labels(method=method, route=path, status=f"{kind}xx")
                child = bound[kind] = labels.observe
            child(seconds)

        return observe
