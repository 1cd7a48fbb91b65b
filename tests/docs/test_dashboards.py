"""The dashboard and the alert rules ask for metrics that a server has, with labels they have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from scripts.generate_reference import metric_names
from tests.docs.terminal import ROOT

DASHBOARD = ROOT / "dashboards" / "grafana.json"
ALERTS = ROOT / "dashboards" / "alerts.yml"
NAME = re.compile(r"stanchion_[a-z_]+")
PART = re.compile(r"_(?:bucket|sum|count)$")


@pytest.mark.parametrize("page", [DASHBOARD, ALERTS], ids=lambda page: page.name)
def test_every_metric_that_is_asked_for_exists(page: Path) -> None:
    known = set(metric_names())
    asked = {PART.sub("", name) for name in NAME.findall(page.read_text(encoding="utf-8"))}
    assert len(asked) >= 5
    assert asked <= known, asked - known


def test_refusals_are_shown_as_ratios_by_tenant_and_workflow() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    ratios = [
        target["expr"]
        for panel in panels
        for target in panel["targets"]
        if "sum by (tenant, workflow)" in target["expr"] and " / " in target["expr"]
    ]
    assert any("full" in expr for expr in ratios)
    assert any("gate_unavailable" in expr for expr in ratios)


def test_every_alert_says_what_it_means() -> None:
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    assert all(rule["annotations"]["summary"] and rule["expr"] for rule in group["rules"])
