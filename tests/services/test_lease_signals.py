"""Every cell of the policy matrix moves its metric and writes its line, and no other does."""

from __future__ import annotations

import logging
from typing import TypedDict

import pytest
from prometheus_client import CollectorRegistry

from stanchion.core.lease import FenceCause
from stanchion.core.model import Risk
from stanchion.services import lease_events as told
from stanchion.services.lease_events import LeaseEvent
from stanchion.services.lease_signals import RunLeaseSignals


class About(TypedDict):
    name: str
    risk: Risk


H: About = {"name": "run/1", "risk": Risk.HIGH}


@pytest.mark.parametrize(
    ("event", "metric", "labels", "line"),
    [
        (
            told.Fallback(**H, error="cut"),
            "stanchion_workflow_lock_fallback_total",
            {"risk": "high"},
            ("ERROR", "run_lock_fallback", {"error": "cut", "race": "possible"}),
        ),
        (
            told.Refused(**H, error="cut", escalated=True),
            "stanchion_run_lock_refused_total",
            {"risk": "high"},
            ("ERROR", "run_lock_refused", {"error": "cut", "escalated": "yes"}),
        ),
        (
            told.Refused(**H, error="cut", escalated=False),
            "stanchion_run_lock_refused_total",
            {"risk": "high"},
            ("ERROR", "run_lock_refused", {"error": "cut", "escalated": "no"}),
        ),
        (
            told.Abandoned(**H, cause=FenceCause.DEADLINE),
            "stanchion_workflow_run_lock_abandoned_total",
            {"risk": "high"},
            ("ERROR", "run_lock_abandoned", {"cause": "deadline"}),
        ),
        (
            told.TrustLost(**H, cause=FenceCause.RENEWAL_FAILURES),
            "stanchion_run_lock_untrusted_total",
            {"risk": "high"},
            ("WARNING", "run_lock_untrusted", {"cause": "renewal_failures"}),
        ),
        (
            told.RenewFailed(**H, failures=2, error="cut"),
            "stanchion_lease_renew_errors_total",
            {"risk": "high", "kind": "run"},
            ("WARNING", "run_lock_renew_failed", {"error": "cut", "failures": "2"}),
        ),
        (
            told.RenewFailed(**H, failures=None, error="cut"),
            "stanchion_lease_renew_errors_total",
            {"risk": "high", "kind": "run"},
            ("WARNING", "run_lock_renew_failed", {"error": "cut", "failures": "untrusted"}),
        ),
        (
            told.ReleaseFailed(**H, error="cut"),
            "stanchion_lease_release_errors_total",
            {"risk": "high", "kind": "run"},
            ("WARNING", "lock_release_failed", {"error": "cut"}),
        ),
        (
            told.Contended(**H, expires_in_ms=5),
            "stanchion_run_lock_contended_total",
            {},
            None,
        ),
        (
            told.Acquired(**H, fence=1, waited_ms=20),
            "stanchion_run_lock_wait_seconds_count",
            {},
            None,
        ),
        (
            told.Released(**H, held_ms=20),
            "stanchion_run_lock_held_seconds_count",
            {},
            None,
        ),
    ],
)
def test_an_event_moves_its_metric_and_writes_its_line(
    event: LeaseEvent,
    metric: str,
    labels: dict[str, str],
    line: tuple[str, str, dict[str, str]] | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = CollectorRegistry()
    signals = RunLeaseSignals(registry)
    before = _values(registry)
    with caplog.at_level(logging.DEBUG, logger="stanchion"):
        signals(event)
    assert registry.get_sample_value(metric, labels) == 1
    moved = {name for name, value in _values(registry).items() if value != before[name]}
    assert {name for name, _ in moved} == {metric.removesuffix("_count").removesuffix("_total")}
    lines = [(each.levelname, each.getMessage(), vars(each)["fields"]) for each in caplog.records]
    expected = [] if line is None else [(*line[:2], {"lease": "run/1", "risk": "high"} | line[2])]
    assert lines == expected


def _values(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    return {
        (family.name, f"{sample.name}{sorted(sample.labels.items())}"): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_times_are_in_seconds() -> None:
    registry = CollectorRegistry()
    signals = RunLeaseSignals(registry)
    signals(told.Acquired(**H, fence=1, waited_ms=1_500))
    signals(told.Released(**H, held_ms=250))
    assert registry.get_sample_value("stanchion_run_lock_wait_seconds_sum") == 1.5
    assert registry.get_sample_value("stanchion_run_lock_held_seconds_sum") == 0.25


def test_every_class_is_there_from_the_start() -> None:
    registry = CollectorRegistry()
    RunLeaseSignals(registry)
    for risk in Risk:
        assert (
            registry.get_sample_value("stanchion_workflow_lock_fallback_total", {"risk": risk}) == 0
        )
