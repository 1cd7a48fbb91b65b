"""Every cell of the policy matrix moves its metric and writes its line, and no other does."""

from __future__ import annotations

import itertools
import logging
from typing import TypedDict

import pytest
from prometheus_client import CollectorRegistry

from stanchion.core.lease import FenceCause
from stanchion.core.model import Instant, Risk
from stanchion.services import lease_events as told
from stanchion.services.lease_events import LeaseEvent
from stanchion.services.lease_signals import UNLOCKED_MAX, RunLeaseSignals, Unlocked


class About(TypedDict):
    name: str
    risk: Risk


NOW = Instant(1_000)
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
            told.StaleWrite(**H, fence=1, highest=2),
            "stanchion_run_stale_writes_total",
            {},
            None,
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
    signals = RunLeaseSignals(registry, now=lambda: NOW)
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
    signals = RunLeaseSignals(registry, now=lambda: NOW)
    signals(told.Acquired(**H, fence=1, waited_ms=1_500))
    signals(told.Released(**H, held_ms=250))
    assert registry.get_sample_value("stanchion_run_lock_wait_seconds_sum") == 1.5
    assert registry.get_sample_value("stanchion_run_lock_held_seconds_sum") == 0.25


def test_every_class_is_there_from_the_start() -> None:
    registry = CollectorRegistry()
    RunLeaseSignals(registry, now=lambda: NOW)
    for risk in Risk:
        assert (
            registry.get_sample_value("stanchion_workflow_lock_fallback_total", {"risk": risk}) == 0
        )


def test_the_history_keeps_what_people_ask_for_and_forgets_the_rest() -> None:
    times = itertools.count(1_000)
    signals = RunLeaseSignals(CollectorRegistry(), now=lambda: Instant(next(times)))
    history = signals.history
    signals(told.Acquired(**H, fence=7, waited_ms=0))
    signals(told.StaleWrite(**H, fence=6, highest=7))
    signals(told.Abandoned(**H, cause=FenceCause.DEADLINE))
    signals(told.Released(**H, held_ms=1))
    assert [(mark.what, mark.fence) for mark in history.of_lock("run/1")] == [
        ("acquired", 7),
        ("stale_write", 6),
        ("abandoned", None),
        ("released", None),
    ]
    signals(told.Contended(**H, expires_in_ms=None))
    assert list(history.busy) == [1_005]
    for _ in range(UNLOCKED_MAX + 1):
        signals(told.Fallback(**H, error="cut"))
    assert (len(history.unlocked), history.unlocked_count) == (UNLOCKED_MAX, UNLOCKED_MAX + 1)
    assert history.unlocked[-1] == Unlocked(
        Instant(1_005 + UNLOCKED_MAX + 1), "run/1", Risk.HIGH, "cut"
    )
    for number in range(60):
        signals(told.Acquired(**H, fence=number, waited_ms=0))
    assert [mark.fence for mark in history.of_lock("run/1")] == list(range(10, 60))
    for number in range(1_000):
        signals(told.Acquired(name=f"run/{number + 2}", risk=Risk.LOW, fence=1, waited_ms=0))
    assert history.of_lock("run/1") == ()
    assert len(history.of_lock("run/1001")) == 1
