"""A tenant's processor time is charged to it, and a tenant over its share is refused."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from stanchion.adapters.system import ManualClock
from stanchion.core.model import TenantId
from stanchion.services import work as module
from stanchion.services.labels import TenantLabels
from stanchion.services.work import TenantOverloaded, TenantWorkBudget
from tests.services.seeded import SeededEntropy

ACME = TenantId("acme")
GLOBEX = TenantId("globex")


class Bench:
    """A budget whose time and processor are set by hand."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.registry = CollectorRegistry()
        self.processor_s = 0.0
        self.budget = TenantWorkBudget(
            self.registry,
            clock=self.clock,
            entropy=SeededEntropy(1),
            labels=TenantLabels(limit=1),
            processor_s=lambda: self.processor_s,
        )

    def metric(self, name: str, tenant: str) -> float | None:
        return self.registry.get_sample_value(
            f"stanchion_tenant_work_{name}_total", {"tenant": tenant}
        )


def test_a_tenant_over_its_share_is_refused_until_it_has_recovered() -> None:
    bench = Bench()
    bench.budget.check(ACME)
    bench.budget.charge(ACME, 2.0)
    bench.budget.check(ACME)
    bench.budget.charge(ACME, 0.5)
    with pytest.raises(TenantOverloaded) as refused:
        bench.budget.check(ACME)
    assert 2_000 <= refused.value.retry_after_ms <= 2_500
    bench.budget.check(GLOBEX)
    bench.clock.advance(refused.value.retry_after_ms)
    bench.budget.check(ACME)


def test_work_is_measured_and_charged_also_when_it_fails() -> None:
    bench = Bench()

    def work() -> None:
        with bench.budget.measured(ACME):
            bench.processor_s += 3
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert bench.metric("seconds", "acme") == 3
    with pytest.raises(TenantOverloaded):
        bench.budget.check(ACME)
    assert bench.metric("refusals", "acme") == 1


def test_nobody_is_told_to_wait_longer_than_half_a_minute() -> None:
    bench = Bench()
    bench.budget.charge(ACME, 1e9)
    with pytest.raises(TenantOverloaded) as refused:
        bench.budget.check(ACME)
    assert refused.value.retry_after_ms == 30_000
    bench.clock.advance(30_001)
    bench.budget.check(ACME)


def test_only_so_many_tenants_are_remembered_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TENANTS_MAX", 2)
    bench = Bench()
    for name in ("one", "two", "one", "three"):
        bench.budget.charge(TenantId(name), 10)
    bench.budget.check(TenantId("two"))  # the one that was charged longest ago
    for name in ("one", "three"):
        with pytest.raises(TenantOverloaded):
            bench.budget.check(TenantId(name))
    assert bench.metric("seconds", "one") == 20
    assert bench.metric("seconds", "other") == 20
