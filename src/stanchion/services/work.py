"""Work: processor time is charged to the tenant that causes it, and bounded for each tenant.

Whatever a tenant can make the server compute (check an input, evaluate expressions, parse a file,
render a page) is measured and charged to the tenant's ``WorkAllowance``. A tenant that is over its
allowance is refused with ``TenantOverloaded`` until it has recovered; other tenants do not notice.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from stanchion.core.admission import WorkAllowance
from stanchion.core.model import TenantId
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.services.labels import TenantLabels

__all__ = ["DEFAULT_ALLOWANCE", "TENANTS_MAX", "TenantOverloaded", "TenantWorkBudget"]

DEFAULT_ALLOWANCE: Final = WorkAllowance(share=0.25, burst_s=2.0)
"""A quarter of one core for each tenant, and two seconds ahead of that."""
TENANTS_MAX: Final = 10_000
"""Tenants whose use is remembered: those charged last."""
_OVER: Final = "the tenant uses more processor time than its share"
_SPREAD: Final = 0.25
"""Refused callers are told to wait up to this much longer, so that they do not return together."""
_RETRY_AFTER_MS_MAX: Final = 30_000
_RETRY_AFTER_MS_MIN: Final = 50


class TenantOverloaded(Exception):
    """The tenant has used more processor time than its share: 429, and when to ask again."""

    def __init__(self, detail: str, retry_after_ms: int) -> None:
        super().__init__(detail)
        self.detail = detail
        self.retry_after_ms = retry_after_ms


class TenantWorkBudget:
    """Counts each tenant's processor time on this replica, and refuses a tenant over its share."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        clock: Clock,
        entropy: Entropy,
        labels: TenantLabels,
        allowance: WorkAllowance = DEFAULT_ALLOWANCE,
        processor_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """``processor_s`` reads the processor time of the calling thread, in seconds."""
        self.allowance = allowance
        self.processor_s = processor_s
        self._clock = clock
        self._entropy = entropy
        self._labels = labels
        self._accounts: OrderedDict[TenantId, _Account] = OrderedDict()
        self._seconds = Counter(
            "stanchion_tenant_work_seconds",
            "Processor time spent on checks, expressions, files and pages of a tenant.",
            ["tenant"],
            registry=registry,
        )
        self._refusals = Counter(
            "stanchion_tenant_work_refusals",
            "Requests refused because their tenant had used more processor time than its share.",
            ["tenant"],
            registry=registry,
        )

    def check(self, tenant: TenantId) -> None:
        """Raise ``TenantOverloaded`` if the tenant is over its share. To be called before work."""
        wait_ms = self.wait_ms(tenant)
        if wait_ms > 0:
            raise self.refusal(
                tenant, "the tenant uses more processor time than its share", wait_ms
            )

    def wait_ms(self, tenant: TenantId) -> float:
        """How long the tenant is over its share; zero if its work may begin now."""
        account = self._accounts.get(tenant)
        if account is None:
            return 0.0
        return self.allowance.wait_ms(account.full_at_ms, now_ms=self._clock.moment())

    def charge(self, tenant: TenantId, seconds: float) -> None:
        """Charge processor time, measured or estimated, to a tenant."""
        account = self._accounts.get(tenant)
        if account is None:
            label = self._labels.tenant(tenant)
            account = _Account(self._seconds.labels(tenant=label).inc)
            self._accounts[tenant] = account
            if len(self._accounts) > TENANTS_MAX:
                self._accounts.popitem(last=False)
        else:
            self._accounts.move_to_end(tenant)
        now_ms = self._clock.moment()
        account.full_at_ms = self.allowance.after(account.full_at_ms, seconds, now_ms=now_ms)
        account.count(seconds)

    @contextmanager
    def measured(self, tenant: TenantId) -> Iterator[None]:
        """Charge what this thread works inside. Nothing may be awaited there."""
        before_s = self.processor_s()
        try:
            yield
        finally:
            self.charge(tenant, max(0.0, self.processor_s() - before_s))

    def refusal(self, tenant: TenantId, detail: str, wait_ms: float) -> TenantOverloaded:
        """The refusal of a request of this tenant, counted, with a spread time to ask again."""
        self._refusals.labels(tenant=self._labels.tenant(tenant)).inc()
        spread_ms = max(wait_ms, _RETRY_AFTER_MS_MIN) * (1 + _SPREAD * self._entropy.unit())
        return TenantOverloaded(detail, min(_RETRY_AFTER_MS_MAX, round(spread_ms)))


class _Account:
    __slots__ = ("count", "full_at_ms")

    def __init__(self, count: Callable[[float], None]) -> None:
        self.count = count
        self.full_at_ms = 0.0
