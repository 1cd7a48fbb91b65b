"""However many tenants and workflows there are, the metrics stay small, and count them all."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from stanchion.adapters.system import ManualClock
from stanchion.core.budget import BudgetStanding, BudgetWindow
from stanchion.core.model import TenantId
from stanchion.services.signals import OTHER, UNNAMED_MAX, EngineSignals, TenantLabels


def test_the_first_tenants_have_labels_of_their_own_and_keep_them() -> None:
    labels = TenantLabels(2)
    assert [labels.tenant(name) for name in ("first", "second", "third", "first", "fourth")] == [
        "first",
        "second",
        OTHER,
        "first",
        OTHER,
    ]


def test_workflows_are_capped_for_each_tenant() -> None:
    labels = TenantLabels(2, workflows_max=1)
    assert labels.workflow("first", "one") == "one"
    assert labels.workflow("first", "two") == OTHER
    assert labels.workflow("second", "two") == "two"
    assert labels.workflow("first", "one") == "one"


def test_workflows_of_a_tenant_without_a_label_have_none_either() -> None:
    labels = TenantLabels(1)
    labels.tenant("first")
    assert labels.workflow("second", "one") == OTHER


def test_a_name_that_was_made_up_gets_no_label_and_takes_no_place() -> None:
    labels = TenantLabels(1, workflows_max=1)
    assert labels.workflow("first", "made-up", exists=False) == OTHER
    assert labels.workflow("first", "one") == "one"
    assert labels.workflow("first", "one", exists=False) == "one"


def test_whoever_is_called_like_the_others_is_one_of_them() -> None:
    labels = TenantLabels(2, workflows_max=2)
    assert labels.tenant(OTHER) == OTHER
    assert labels.workflow("first", OTHER) == OTHER
    assert [labels.tenant(name) for name in ("first", "second")] == ["first", "second"]
    assert [labels.workflow("first", name) for name in ("one", "two")] == ["one", "two"]


def test_the_others_are_remembered_so_that_they_can_be_counted_together() -> None:
    labels = TenantLabels(1)
    for tenant in ("acme", "globex", *(f"t{number}" for number in range(UNNAMED_MAX))):
        labels.tenant(tenant)
    assert labels.seen[:2] == ("acme", "t0")
    assert len(labels.seen) == 1 + UNNAMED_MAX


def test_active_runs_of_tenants_without_a_label_are_shown_together() -> None:
    registry = CollectorRegistry()
    signals = EngineSignals(registry, ManualClock(), labels=TenantLabels(1))
    signals.active({TenantId("acme"): 3, TenantId("globex"): 2, TenantId("initech"): 5})
    shown = {
        tenant: registry.get_sample_value("stanchion_runs_active", {"tenant": tenant})
        for tenant in ("acme", "other", "globex")
    }
    assert shown == {"acme": 3, "other": 7, "globex": None}


def test_budgets_are_shown_as_long_as_they_are_configured() -> None:
    registry = CollectorRegistry()
    signals = EngineSignals(registry, ManualClock(), labels=TenantLabels(1))
    day = BudgetStanding(9, BudgetWindow.DAY, 4, 3, None)

    def shown(tenant: str, name: str) -> list[float | None]:
        labels = {"tenant": tenant, "budget": name}
        return [
            registry.get_sample_value(f"stanchion_budget_{each}", labels)
            for each in ("used", "reserved", "limit")
        ]

    signals.budgets({TenantId("acme"): {"tokens": day, "calls": day}, TenantId("b"): {"x": day}})
    assert shown("acme", "tokens") == shown("acme", "calls") == [4, 3, 9]
    assert shown("b", "x") == shown("other", "x") == [None] * 3
    signals.budgets({TenantId("acme"): {"calls": day}})
    assert shown("acme", "tokens") == [None] * 3
