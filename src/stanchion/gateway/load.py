"""Load: how much goes on at once, and what is turned away so that the rest gets through.

Three kinds are counted apart, because they cost differently: requests (work), waits (a caller
parked until something happens) and streams. Of the requests no tenant may have more than its share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

from stanchion.core.model import TenantId
from stanchion.gateway.options import GatewayOptions
from stanchion.gateway.problems import Refusal, Refused, unavailable_after_ms
from stanchion.wire.problems import Code

__all__ = ["Load"]

_REQUESTS: Final = "requests"
_WAITS: Final = "waits"
_STREAMS: Final = "streams"
_TENANT: Final = "tenant"


class Load:
    """Counts what is under way, and refuses what is too much."""

    def __init__(
        self, options: GatewayOptions, registry: CollectorRegistry, unit: Callable[[], float]
    ) -> None:
        self._options = options
        self._unit = unit
        self.requests = 0
        self.waits = 0
        self.streams = 0
        self._tenants: dict[TenantId, int] = {}
        shed = Counter(
            "stanchion_http_shed",
            "Requests refused because too much was under way.",
            ["reason"],
            registry=registry,
        )
        self._shed = {
            reason: shed.labels(reason=reason) for reason in (_REQUESTS, _WAITS, _STREAMS, _TENANT)
        }
        under_way = Gauge(
            "stanchion_http_under_way",
            "Requests, waits and streams under way.",
            ["kind"],
            registry=registry,
        )
        under_way.labels(kind=_REQUESTS).set_function(lambda: self.requests)
        under_way.labels(kind=_WAITS).set_function(lambda: self.waits)
        under_way.labels(kind=_STREAMS).set_function(lambda: self.streams)

    def begin_request(self) -> None:
        """Count a request in, or refuse it."""
        if self.requests >= self._options.requests_at_once_max:
            raise self._too_much(_REQUESTS, "too many requests at once")
        self.requests += 1

    def end_request(self) -> None:
        """Count it out."""
        self.requests -= 1

    def begin_wait(self) -> None:
        """Count a wait in, or refuse it."""
        if self.waits >= self._options.waits_max:
            raise self._too_much(_WAITS, "too many callers are waiting")
        self.waits += 1

    def end_wait(self) -> None:
        """Count it out."""
        self.waits -= 1

    def begin_stream(self) -> None:
        """Count a stream in, or refuse it."""
        if self.streams >= self._options.streams_max:
            raise self._too_much(_STREAMS, "too many event streams are open")
        self.streams += 1

    def end_stream(self) -> None:
        """Count it out."""
        self.streams -= 1

    def begin_for(self, tenant: TenantId) -> None:
        """Count a request in for its tenant, or refuse it."""
        under_way = self._tenants.get(tenant, 0)
        if under_way >= self._options.requests_at_once_per_tenant_max:
            raise self._too_much(_TENANT, "too many requests of this tenant at once")
        self._tenants[tenant] = under_way + 1

    def end_for(self, tenant: TenantId) -> None:
        """Count it out."""
        left = self._tenants[tenant] - 1
        if left:
            self._tenants[tenant] = left
        else:
            del self._tenants[tenant]

    def _too_much(self, reason: str, detail: str) -> Refused:
        self._shed[reason].inc()
        after_ms = unavailable_after_ms(self._unit())
        return Refused(Refusal(code=Code.OVERLOADED, detail=detail, retry_after_ms=after_ms))
