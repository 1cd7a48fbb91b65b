"""The page about metrics is what a server has, and no page names a metric that is not there."""

from __future__ import annotations

import re

from scripts.generate_reference import METRICS_PAGE, metric_names, metrics_text
from tests.docs.terminal import ROOT

MEND = "run: make generate"
PROMISED = """
    admission_decisions_total admission_wait_seconds workflow_lock_fallback_total
    workflow_run_lock_abandoned_total scheduler_job_lock_abandoned_total run_lock_contended_total
    run_lock_wait_seconds run_lock_held_seconds lock_busy_retries_total lock_busy_retry_burst
    lease_renew_errors_total lease_release_errors_total bus_pending_messages
    duplicate_completions_total duplicate_publishes_total commit_conflicts_total slot_drift_total
    runs_active escalation_level
"""
"""People have dashboards and alerts on these: a name may be added, never lost."""


def test_the_page_about_metrics_is_up_to_date() -> None:
    assert METRICS_PAGE.read_text(encoding="utf-8") == metrics_text(), MEND


def test_no_promised_metric_is_lost() -> None:
    assert {f"stanchion_{name}" for name in PROMISED.split()} - metric_names() == set()


def test_every_metric_that_a_page_names_is_there() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    named = {
        name
        for page in pages
        for name in re.findall(r"`(stanchion_[a-z_]+)", page.read_text(encoding="utf-8"))
    }
    assert named
    assert named - metric_names() == set()


def test_every_label_is_explained() -> None:
    page = METRICS_PAGE.read_text(encoding="utf-8")
    opening, _, table = page.partition("<!-- metrics -->")
    explained = {
        label
        for row in re.findall(r"^\| (`[^|]+) \|", opening, re.MULTILINE)
        for label in re.findall(r"`(\w+)`", row)
    }
    used = {
        label
        for row in table.splitlines()
        if row.startswith("| `")
        for label in re.findall(r"`(\w+)`", row.split("|")[3])
    }
    assert explained == used
