"""Dashboards and alert rules ask for what a server has, and every alert is tested both ways."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.generate_dashboards import (
    ADMISSION,
    DASHBOARDS,
    NOT_SHOWN,
    RETRIES,
    Dashboard,
    dashboard_json,
    file_of,
)
from scripts.generate_reference import metric_labels, metric_names
from tests.docs.terminal import ROOT

ALERTS = ROOT / "dashboards" / "alerts.yml"
ALERT_TESTS = ROOT / "dashboards" / "alerts_test.yml"
DRILL_TESTS = ROOT / "dashboards" / "drill_test.yml"
HOW_TO = ROOT / "docs" / "how-to" / "dashboards-and-alerts.md"
NAME = re.compile(r"stanchion_[a-z_]+")
PART = re.compile(r"_(?:bucket|sum|count)$")
PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=Path(sys.executable).parent)


def _rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _alerts() -> list[dict[str, Any]]:
    return [rule for rule in _rules() if "alert" in rule]


def _shown(dashboard: Dashboard) -> list[str]:
    return [query.expr for panel in dashboard.panels for query in panel.queries]


def _expressions() -> list[str]:
    shown = [expr for dashboard in DASHBOARDS for expr in _shown(dashboard)]
    return [rule["expr"] for rule in _rules()] + shown


@pytest.mark.parametrize("page", [ALERTS, ALERT_TESTS], ids=lambda page: page.name)
def test_every_metric_that_is_asked_for_exists(page: Path) -> None:
    known = set(metric_names())
    asked = {PART.sub("", name) for name in NAME.findall(page.read_text(encoding="utf-8"))}
    assert len(asked) >= 5
    assert asked <= known, asked - known


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_the_file_of_a_dashboard_is_up_to_date(dashboard: Dashboard) -> None:
    text = file_of(dashboard).read_text(encoding="utf-8")
    assert text == dashboard_json(dashboard), "run: make generate"


def test_every_metric_is_on_a_dashboard_or_listed_as_not_shown() -> None:
    text = " ".join(expr for dashboard in DASHBOARDS for expr in _shown(dashboard))
    asked = {PART.sub("", name) for name in re.findall(r"(?:stanchion|process)_[a-z_]+", text)}
    assert asked <= metric_names(), asked - metric_names()
    unlisted = metric_names() - asked - set(NOT_SHOWN)
    assert not unlisted, "add a panel, or a reason why not, in scripts/generate_dashboards.py"
    assert not asked & set(NOT_SHOWN)


def test_the_page_says_which_metrics_are_not_shown_and_has_a_picture_of_each_dashboard() -> None:
    page = HOW_TO.read_text(encoding="utf-8")
    assert all(name in page or name.startswith("process_") for name in NOT_SHOWN)
    pictures = re.findall(r"\]\(dashboards/(\w+)\.svg\)", page)
    assert pictures == [file_of(dashboard).stem for dashboard in DASHBOARDS]
    assert all((HOW_TO.parent / "dashboards" / f"{name}.svg").exists() for name in pictures)


def test_cut_locks_fire_the_fallback_page_and_no_other() -> None:
    recorded, *_ = yaml.safe_load(DRILL_TESTS.read_text(encoding="utf-8"))["tests"]
    [asked] = recorded["promql_expr_test"]
    assert 'severity="page"' in asked["expr"]
    assert [each["labels"] for each in asked["exp_samples"]] == [
        '{alertname="StanchionLockFallback"}'
    ]


def test_refusals_are_shown_as_ratios_by_tenant_and_workflow() -> None:
    ratios = [
        expr for expr in _shown(ADMISSION) if "sum by (tenant, workflow)" in expr and " / " in expr
    ]
    assert any("full|queue_full" in expr for expr in ratios)
    assert any("gate_unavailable" in expr for expr in ratios)


def test_every_outcome_of_the_gate_is_shown_as_decided_refused_or_unavailable() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    [row] = re.findall(r"^\| `outcome` \| (.*) \|$", page, re.MULTILINE)
    decided = {"admitted", "queued", "replayed", "mismatch"}
    asked: set[str] = set()
    for panel in RETRIES.panels:
        if panel.title == "Starts refused, by class":
            for query in panel.queries:
                asked |= set(re.findall(r'outcome=~"([^"]+)"', query.expr)[0].split("|"))
    assert decided | asked == set(re.findall(r"`(\w+)`", row))


def test_every_expression_can_be_parsed() -> None:
    parser = pytest.importorskip("promql_parser")  # in the lock, so only a stale .venv lacks it
    assert len(_expressions()) > 20
    for expr in _expressions():
        parser.parse(expr.replace("$__rate_interval", "5m"))


def test_every_recorded_series_that_a_rule_asks_for_is_recorded() -> None:
    recorded = {rule["record"] for rule in _rules() if "record" in rule}
    asked = {name for expr in _expressions() for name in re.findall(r"stanchion:[\w:]+", expr)}
    assert asked == recorded


def test_every_label_that_is_asked_for_exists() -> None:
    parser = pytest.importorskip("promql_parser")
    known = metric_labels()
    for expr in _expressions():
        found: list[Any] = []
        parsed = parser.parse(expr.replace("$__rate_interval", "5m"))
        parser.walk(parsed, lambda node, into=found: into.append(node))
        names = {node.name for node in found if isinstance(node, parser.VectorSelector)}
        matched = {
            matcher.name
            for node in found
            if isinstance(node, parser.VectorSelector)
            for matcher in node.matchers.matchers
        }
        grouped = {
            label
            for node in found
            if isinstance(node, parser.AggregateExpr) and node.modifier
            for label in node.modifier.labels
        }
        has = {"instance", "le"}.union(*(known.get(PART.sub("", name), ()) for name in names))
        assert matched | grouped <= has, expr


@pytest.mark.parametrize("rule", _alerts(), ids=lambda rule: rule["alert"])
def test_every_alert_has_a_severity_a_summary_and_a_runbook(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"page", "ticket"}
    assert rule["annotations"]["summary"].endswith(".")
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert anchor in {heading.lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("rule", _alerts(), ids=lambda rule: rule["alert"])
def test_every_alert_has_a_test_that_fires_it_and_one_that_does_not(rule: dict[str, Any]) -> None:
    tests = yaml.safe_load(ALERT_TESTS.read_text(encoding="utf-8"))["tests"]
    about = [test for test in tests if test["name"].startswith(f"{rule['alert']} ")]
    label = f'alertname="{rule["alert"]}"'
    fires = [label in str(test["promql_expr_test"][0]["exp_samples"]) for test in about]
    assert True in fires
    assert False in fires
    assert fires == [" fires" in test["name"] for test in about]


@pytest.mark.parametrize("tests", [ALERT_TESTS, DRILL_TESTS], ids=lambda tests: tests.name)
@pytest.mark.skipif(PROMTOOL is None, reason="NO promtool: the alert rules are NOT unit tested")
def test_the_unit_tests_of_the_rules_pass(tests: Path) -> None:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, "test", "rules", str(tests)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
