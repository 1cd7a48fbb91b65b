"""How drills judge: what was seen, and which promises that breaks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from stanchion.drills.admission import (
    FIXED,
    FULL,
    JITTER,
    AdmissionSeen,
    Burst,
    Cell,
    Isolation,
    judge_admission,
    roughness,
)
from stanchion.drills.verdict import Promise


def broken(promises: Sequence[Promise]) -> set[str]:
    return {promise.id for promise in promises if not promise.holds}


# ── Admission ────────────────────────────────────────────────────────────────────────────────────

IN_STEP = tuple(0.05 * wave + 0.0001 * number for wave in range(20) for number in range(50))
SPREAD = tuple(0.001 * number for number in range(1000))
GOOD = Burst(
    stack="SQLite",
    strategy="atomic",
    callers=100,
    answers={"200": 2, FULL: 98},
    waits_s=(0.01,) * 100,
    active=2,
)
FIXED_BURST = replace(GOOD, strategy=FIXED, lock_requests=IN_STEP)
JITTER_BURST = replace(GOOD, strategy=JITTER, lock_requests=SPREAD)
QUIET = Isolation(
    stack="SQLite", beside="bursts", control_s=(0.1,) * 20, beside_s=(0.15,) * 20, refused=0
)
CELL = Cell(
    wait_s=2, retries=25, callers=50, admitted=50, runs=50, requests=60, refused=10, p95_s=1
)
SEEN = AdmissionSeen(
    bursts=(GOOD, FIXED_BURST, JITTER_BURST),
    isolation=(QUIET,),
    cells=(CELL,),
    counted={"SQLite": (6.0, 6.0)},
)


def test_admission_as_promised() -> None:
    promises = judge_admission(SEEN)
    assert broken(promises) == set()
    assert {promise.id for promise in promises} == {
        "cap_exact",
        "refusals",
        "answered_in_time",
        "jitter_flatter",
        "other_tenant",
        "one_run_each",
        "drift",
        "metrics_agree",
    }


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (replace(GOOD, answers={"200": 3, FULL: 97}, active=3), {"cap_exact"}),
        (replace(GOOD, answers={"200": 1, FULL: 99}, active=1), {"cap_exact"}),
        (replace(GOOD, active=3), {"cap_exact"}),
        (replace(GOOD, answers={"200": 2, FULL: 97, "500 internal": 1}), {"refusals"}),
        (replace(GOOD, answers={"200": 2, FULL: 97, "503 gate_busy": 1}), {"refusals"}),
        (replace(GOOD, answers={"200": 2, FULL: 97, "no answer": 1}), {"refusals"}),
        (replace(GOOD, answers={"200": 2, FULL: 97, "503 overloaded": 1}), {"refusals"}),
        (
            replace(GOOD, answers={"200": 2, "503 overloaded": 98}, is_oversized=True),
            set[str](),
        ),
        (replace(FIXED_BURST, answers={"200": 2, "503 gate_busy": 98}), set[str]()),
        (replace(GOOD, waits_s=(4.0,)), {"answered_in_time"}),
        (replace(GOOD, waits_s=(4.0,), is_oversized=True), set[str]()),
    ],
)
def test_a_burst_that_breaks_a_promise(seen: Burst, expected: set[str]) -> None:
    bursts = (seen, FIXED_BURST, JITTER_BURST)
    assert broken(judge_admission(replace(SEEN, bursts=bursts))) == expected


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (replace(SEEN, drift=1.0), {"drift"}),
        (replace(SEEN, counted={"SQLite": (7.0, 6.0)}), {"metrics_agree"}),
        (replace(SEEN, cells=(replace(CELL, runs=51),)), {"one_run_each"}),
        (replace(SEEN, isolation=(replace(QUIET, beside_s=(0.3,) * 20),)), {"other_tenant"}),
        (replace(SEEN, isolation=(replace(QUIET, refused=1),)), {"other_tenant"}),
        (
            replace(SEEN, bursts=(FIXED_BURST, replace(JITTER_BURST, lock_requests=IN_STEP))),
            {"jitter_flatter"},
        ),
    ],
)
def test_an_admission_that_breaks_a_promise(seen: AdmissionSeen, expected: set[str]) -> None:
    assert broken(judge_admission(seen)) == expected


def test_what_was_not_measured_is_not_promised() -> None:
    promises = judge_admission(AdmissionSeen(bursts=(GOOD,)))
    assert {promise.id for promise in promises} == {
        "cap_exact",
        "refusals",
        "answered_in_time",
        "drift",
    }


def test_waves_are_rougher_than_a_steady_stream() -> None:
    assert roughness([100, 0, 100, 0, 100, 0]) > 1.9
    assert roughness([50, 51, 49, 50, 50, 50]) < 0.1
    assert roughness([7]) == roughness([]) == 0.0
