"""How drills judge: what was seen, and which promises that breaks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from stanchion.core.model import Risk
from stanchion.drills.promises.admission import (
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
from stanchion.drills.promises.fallback import EscalationSeen, FallbackSeen, RunSeen, judge_fallback
from stanchion.drills.promises.lock_busy import FIXED as BUSY_FIXED
from stanchion.drills.promises.lock_busy import JITTER as BUSY_JITTER
from stanchion.drills.promises.lock_busy import ArmSeen, LockBusySeen, judge_lock_busy
from stanchion.drills.promises.renewal import (
    LEASES,
    REPLICA,
    HandOver,
    RenewalSeen,
    judge_renewal,
)
from stanchion.drills.promises.retry import (
    BUDGETED,
    SINGLE,
    SPLIT,
    FleetSeen,
    RetrySeen,
    Try,
    judge_retry,
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
    stack="SQLite", beside="bursts", alone_s=(0.1,) * 20, beside_s=(0.15,) * 20, refused=0
)
STARVED = replace(QUIET, alone_s=(0.02,) * 20, beside_s=(0.1,) * 20, starvation=2.1, lag_s=0.01)
IDLE = replace(QUIET, alone_s=(0.003,) * 20, beside_s=(0.009,) * 20)
CELL = Cell(
    wait_s=2,
    retries=25,
    client="jittered",
    callers=50,
    admitted=50,
    runs=50,
    requests=60,
    refused=10,
    p95_s=1,
    spread_s=0.5,
)
SEEN = AdmissionSeen(
    bursts=(GOOD, FIXED_BURST, JITTER_BURST),
    isolation=(QUIET, STARVED, IDLE),
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
            {"refusals"},
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
        (replace(SEEN, cells=(replace(CELL, admitted=0, runs=0),)), {"one_run_each"}),
        (replace(SEEN, isolation=(replace(QUIET, beside_s=(0.3,) * 20),)), {"other_tenant"}),
        (replace(SEEN, isolation=(replace(QUIET, refused=1),)), {"other_tenant"}),
        (replace(SEEN, isolation=(replace(IDLE, beside_s=(0.011,) * 20),)), {"other_tenant"}),
        (
            replace(SEEN, isolation=(replace(IDLE, beside_s=(0.04,) * 20, floor_s=0.05),)),
            set[str](),
        ),
        (replace(SEEN, isolation=(replace(STARVED, starvation=1.0),)), {"other_tenant"}),
        (replace(SEEN, isolation=(replace(STARVED, beside_s=(0.2,) * 20),)), {"other_tenant"}),
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


# ── Retry ────────────────────────────────────────────────────────────────────────────────────────

CUT = (3.0, 13.0)


def refused(key: str, at: float, told_ms: int, *, status: int = 429, code: str = "full") -> Try:
    return Try(key=key, at=at, answered_at=at, status=status, code=code, retry_after_ms=told_ms)


def admitted(key: str, at: float) -> Try:
    return Try(key=key, at=at, answered_at=at, status=200, run_id=f"run-{key}")


def fleet(name: str, *tries: Try, callers: int = 2) -> FleetSeen:
    return FleetSeen(name=name, callers=callers, tries=tries, runs=callers)


A, B = admitted("a", 2.0), admitted("b", 20.0)
SLOW = fleet(
    SINGLE,
    refused("a", 0, 0),
    refused("a", 1, 0),
    A,
    refused("b", 1, 0),
    replace(B, at=30, answered_at=30),
)
SWIFT = fleet(
    SPLIT,
    refused("a", 0, 1_500),
    A,
    refused("b", 5, 9_000, status=503, code="gate_unavailable"),
    B,
)
NEVER = replace(fleet(SINGLE, A, refused("b", 30, 0)), runs=1)
THRIFTY = fleet(BUDGETED, refused("a", 0, 1_000), A, refused("b", 0, 4_000), B)
STORM = RetrySeen(fleets=(SLOW, SWIFT, THRIFTY), cut=CUT)


def with_split(*tries: Try) -> RetrySeen:
    return replace(STORM, fleets=(SLOW, fleet(SPLIT, *tries), THRIFTY))


def test_retries_as_promised() -> None:
    assert broken(judge_retry(STORM)) == set()
    assert "gate_503" not in {each.id for each in judge_retry(replace(STORM, cut=None))}
    # The caller of a third key gave up after a 503; the key has one run.
    untold = replace(SWIFT, runs=3, untold=1)
    assert broken(judge_retry(replace(STORM, fleets=(SLOW, untold, THRIFTY)))) == set()
    assert broken(judge_retry(replace(STORM, active={SPLIT: ((1.0, 10.0),)}, cap=10))) == set()


def test_what_a_busy_machine_answers_late_breaks_no_promise() -> None:
    # Sent before the cut or in it, and answered after it.
    late = replace(refused("c", 12, 9_000, status=503, code="gate_unavailable"), answered_at=19.0)
    early = replace(admitted("d", 2.9), answered_at=8.0)
    tries = (*SWIFT.tries, late, early)
    seen = replace(fleet(SPLIT, *tries, callers=3), runs=3)
    assert broken(judge_retry(replace(STORM, fleets=(SLOW, seen, THRIFTY)))) == set()


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (
            replace(STORM, fleets=(SLOW, replace(SWIFT, runs=3), THRIFTY)),
            {"no_second_run"},
        ),
        (
            replace(STORM, fleets=(SLOW, replace(SWIFT, wrong_replays=1), THRIFTY)),
            {"no_second_run"},
        ),
        (
            with_split(*SWIFT.tries[:3]),
            {"no_second_run", "admitted", "sooner_admitted", "sooner_done"},
        ),
        (with_split(*SWIFT.tries, *(admitted("a", 21 + n) for n in range(9))), {"fewer_requests"}),
        (
            with_split(*SWIFT.tries[:3], admitted("b", 31.0)),
            {"sooner_admitted", "sooner_done"},
        ),
        (
            with_split(admitted("a", 0.1), *SWIFT.tries[2:3], admitted("b", 30.5)),
            {"sooner_done"},
        ),
        (with_split(refused("a", 0, 2_500), *SWIFT.tries[1:]), {"retry_after_honoured"}),
        (
            with_split(*SWIFT.tries, refused("a", 40, 1, status=503, code="gate_unavailable")),
            {"gate_503"},
        ),
        # Nothing met the cut.
        (with_split(A, B), {"gate_503", "never_open"}),
        (with_split(*SWIFT.tries[:3], admitted("b", 12.0)), {"never_open", "retry_after_honoured"}),
        (with_split(refused("a", 0, 2_006), *SWIFT.tries[1:]), {"retry_after_honoured"}),
        # The last caller is never admitted, neither with split policies nor with one.
        (
            replace(STORM, fleets=(NEVER, replace(NEVER, name=SPLIT), THRIFTY)),
            {
                *("admitted", "sooner_admitted", "sooner_done", "fewer_requests"),
                *("gate_503", "never_open"),
            },
        ),
        (replace(STORM, active={SPLIT: ((1.0, 10.0), (2.0, 11.0))}, cap=10), {"cap_held"}),
        (replace(STORM, active={SPLIT: ((1.0, 0.0),)}, cap=10), {"cap_held"}),
        # No server ever said how many runs there are.
        (replace(STORM, active={SPLIT: ()}, cap=10), {"cap_held"}),
    ],
)
def test_retries_that_break_a_promise(seen: RetrySeen, expected: set[str]) -> None:
    found = broken(judge_retry(seen))
    assert expected <= found
    assert found <= expected | {"retry_after_spread", "fewer_requests"}


def test_a_fleet_that_ignores_its_budget_breaks_the_promise() -> None:
    storm = [refused("a", number / 100, 0) for number in range(100)]
    seen = replace(STORM, fleets=(SLOW, SWIFT, fleet(BUDGETED, *storm, A, B)))
    assert "within_budget" in broken(judge_retry(seen))


def test_callers_that_are_all_told_the_same_break_the_promise() -> None:
    told = [refused(str(number), 0, 2_000) for number in range(100)]
    seen = replace(STORM, fleets=(SLOW, SWIFT, fleet(BUDGETED, *told, A, B)))
    assert "retry_after_spread" in broken(judge_retry(seen))


# ── Fallback ─────────────────────────────────────────────────────────────────────────────────────

DARK = (10.0, 20.0)


def runs_of(risk: Risk, *finished_at: float) -> list[RunSeen]:
    return [
        RunSeen(risk=risk, status="succeeded", created_at=at - 1, finished_at=at)
        for at in finished_at
    ]


STEADY = [float(second) for second in range(1, 25)]
AROUND = [at for at in STEADY if not DARK[0] <= at < DARK[1] + 1]
OPEN_RUNS = [*runs_of(Risk.LOW, *STEADY), *runs_of(Risk.STANDARD, *STEADY)]
PUT_OFF = [
    RunSeen(risk=risk, status="succeeded", created_at=12.0, finished_at=21.0)
    for risk in (Risk.HIGH, Risk.CRITICAL)
]
CLOSED_RUNS = [*runs_of(Risk.HIGH, *AROUND), *runs_of(Risk.CRITICAL, *AROUND), *PUT_OFF]
FELL_BACK = {"low": (11.0, 19.0), "standard": (12.0, 20.5), "high": (), "critical": ()}
OUTAGE = FallbackSeen(
    cuts=(DARK,),
    runs=(*OPEN_RUNS, *CLOSED_RUNS),
    fallbacks=FELL_BACK,
    counted={"low": 2, "standard": 2, "high": 0, "critical": 0},
    metric_rises_until=21.0,
)
ESCALATED = EscalationSeen(
    provoked_at=40.0,
    window_s=20.0,
    cut_until=100.0,
    first_duplicate_at=40.5,
    tripped_at=45.0,
    recovered_at=130.0,
    standard_finished_while_escalated=0,
    low_finished_while_escalated=50,
)


def test_a_fallback_as_promised() -> None:
    assert broken(judge_fallback(OUTAGE)) == set()
    assert broken(judge_fallback(replace(OUTAGE, escalation=ESCALATED))) == set()
    unended = replace(ESCALATED, recovered_at=None, sees_recovery=False)
    assert broken(judge_fallback(replace(OUTAGE, escalation=unended))) == set()


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (replace(OUTAGE, fallbacks={}, counted={}), {"fallback_rate"}),
        (
            replace(OUTAGE, fallbacks=FELL_BACK | {"low": (11.0, 25.5)}),
            {"fallback_rate"},
        ),
        (replace(OUTAGE, metric_rises_until=27.0), {"fallback_rate"}),
        (
            replace(OUTAGE, runs=(*runs_of(Risk.LOW, *AROUND), *CLOSED_RUNS)),
            {"open_go_on"},
        ),
        (
            replace(OUTAGE, runs=(*OPEN_RUNS, *runs_of(Risk.HIGH, *STEADY), *PUT_OFF)),
            {"closed_stop"},
        ),
        # No run of one of these classes was started while the lock store was cut.
        (replace(OUTAGE, runs=(*OPEN_RUNS, *CLOSED_RUNS[:-1])), {"closed_stop"}),
        # None finished before the cut, so there is no rate to keep up.
        (
            replace(
                OUTAGE,
                runs=(*(run for run in OPEN_RUNS if (run.finished_at or 0) > 10), *CLOSED_RUNS),
            ),
            {"open_go_on"},
        ),
        (
            replace(OUTAGE, runs=(*OUTAGE.runs, replace(CLOSED_RUNS[0], finished_at=None))),
            {"all_finish"},
        ),
        (
            replace(OUTAGE, runs=(*OUTAGE.runs, replace(CLOSED_RUNS[0], finished_at=40.0))),
            {"all_finish"},
        ),
        (
            replace(
                OUTAGE,
                fallbacks=FELL_BACK | {"high": (12.0,)},
                counted={**OUTAGE.counted, "high": 1},
            ),
            {"fallbacks_counted"},
        ),
        (replace(OUTAGE, counted={**OUTAGE.counted, "low": 3}), {"fallbacks_counted"}),
        (
            replace(OUTAGE, runs=(*OUTAGE.runs, replace(CLOSED_RUNS[0], changed_twice=True))),
            {"changed_once"},
        ),
        (replace(OUTAGE, double_accepts=1), {"changed_once"}),
    ],
)
def test_a_fallback_that_breaks_a_promise(seen: FallbackSeen, expected: set[str]) -> None:
    assert broken(judge_fallback(seen)) == expected


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (
            replace(ESCALATED, tripped_at=None, recovered_at=None),
            {"escalation_trips", "escalation_recovers"},
        ),
        (replace(ESCALATED, tripped_at=30.0), {"escalation_trips"}),
        (replace(ESCALATED, tripped_at=85.0), {"escalation_trips"}),
        (replace(ESCALATED, standard_finished_while_escalated=1), {"escalation_closes"}),
        (replace(ESCALATED, low_finished_while_escalated=0), {"escalation_closes"}),
        (replace(ESCALATED, recovered_at=None), {"escalation_recovers"}),
        (replace(ESCALATED, recovered_at=180.0), {"escalation_recovers"}),
    ],
)
def test_an_escalation_that_breaks_a_promise(seen: EscalationSeen, expected: set[str]) -> None:
    assert broken(judge_fallback(replace(OUTAGE, escalation=seen))) == expected


# ── Renewal ──────────────────────────────────────────────────────────────────────────────────────

FENCED = HandOver(
    kind=LEASES,
    policy="fence",
    ttl_s=3.0,
    fault=(1.0, 5.0),
    trusting_until=2.9,
    acting_until=2.91,
    third_failure_at=2.9,
    expired_at=3.8,
    rival_at=3.85,
)
CONTINUED = replace(FENCED, policy="continue", acting_until=6.0)
OF_REPLICA = replace(FENCED, kind=REPLICA)
RENEWALS = RenewalSeen(
    hand_overs=(
        *(FENCED, CONTINUED, OF_REPLICA, replace(OF_REPLICA, policy="continue")),
        replace(FENCED, kind="job lease", expired_at=None),
    ),
    outage_s=0.4,
    outage_deliveries=(1,),
    stale_verdicts=("stale_fence",),
    stale_counted=1.0,
    paused_runs=80,
)


def with_fenced(seen: HandOver) -> RenewalSeen:
    return replace(RENEWALS, hand_overs=(seen, CONTINUED))


def test_renewals_as_promised() -> None:
    assert broken(judge_renewal(RENEWALS)) == set()


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (with_fenced(replace(FENCED, trusting_until=3.9)), {"no_overlap"}),
        (with_fenced(replace(OF_REPLICA, trusting_until=3.9)), {"no_overlap"}),
        (with_fenced(replace(FENCED, acting_until=4.5)), {"no_overlap"}),
        (with_fenced(replace(FENCED, third_failure_at=3.9)), {"known_before_expiry"}),
        (with_fenced(replace(FENCED, third_failure_at=None)), {"known_before_expiry"}),
        (with_fenced(replace(FENCED, rival_at=None)), {"taken_over"}),
        (with_fenced(replace(FENCED, rival_fence_is_higher=False)), {"taken_over"}),
        (
            replace(RENEWALS, hand_overs=(FENCED, replace(CONTINUED, trusting_until=4.0))),
            {"continue_measured"},
        ),
        (
            replace(RENEWALS, hand_overs=(FENCED, replace(CONTINUED, acting_until=3.0))),
            {"continue_measured"},
        ),
        (replace(RENEWALS, outage_deliveries=(2,)), {"short_outage"}),
        (replace(RENEWALS, stale_verdicts=("accepted",)), {"stale_refused"}),
        (replace(RENEWALS, stale_counted=0.0), {"stale_refused"}),
        (replace(RENEWALS, paused_unfinished=1), {"paused_replica"}),
        (replace(RENEWALS, paused_changed_twice=1), {"paused_replica"}),
        (replace(RENEWALS, paused_runs=0), {"paused_replica"}),
    ],
)
def test_renewals_that_break_a_promise(seen: RenewalSeen, expected: set[str]) -> None:
    assert broken(judge_renewal(seen)) == expected


def test_a_failure_that_was_not_seen_is_named() -> None:
    promises = judge_renewal(with_fenced(replace(FENCED, third_failure_at=None)))
    [known] = [each for each in promises if each.id == "known_before_expiry"]
    assert known.measured.endswith("; not seen in 1 of 1 hand-overs")


# ── Lock busy ────────────────────────────────────────────────────────────────────────────────────

STUCK = ArmSeen(
    name=BUSY_FIXED,
    runs=20,
    waits_s=(8.0,) * 20,
    delays_ms=(500,) * 100,
    attempts_s=tuple(0.5 * wave for wave in range(5) for _ in range(20)),
    retries=100,
    buckets=5,
)
FREE = ArmSeen(
    name=BUSY_JITTER,
    runs=20,
    waits_s=(2.0,) * 20,
    delays_ms=(300, 450, 700),
    attempts_s=tuple(0.1 * number for number in range(20)),
    retries=20,
    buckets=4,
)
CROWD = LockBusySeen(arms=(STUCK, FREE), dead_letters=0)


def with_jitter(arm: ArmSeen) -> LockBusySeen:
    return replace(CROWD, arms=(STUCK, arm))


def test_busy_locks_as_promised() -> None:
    assert broken(judge_lock_busy(CROWD)) == set()


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (with_jitter(replace(FREE, delays_ms=(300, 701))), {"delay_in_window"}),
        (with_jitter(replace(FREE, delays_ms=(299, 700))), {"delay_in_window"}),
        (with_jitter(replace(FREE, delays_ms=(500, 500))), {"delay_spread"}),
        (with_jitter(replace(FREE, delays_ms=())), {"delay_in_window", "delay_spread"}),
        (
            replace(CROWD, arms=(replace(STUCK, delays_ms=(500, 501)), FREE)),
            {"delay_in_window"},
        ),
        (with_jitter(replace(FREE, attempts_s=STUCK.attempts_s)), {"burst_lower"}),
        (with_jitter(replace(FREE, buckets=1)), {"burst_lower"}),
        (with_jitter(replace(FREE, retries=0, buckets=0)), {"burst_lower"}),
        (with_jitter(replace(FREE, waits_s=(9.0,) * 20)), {"wait_lower"}),
        (with_jitter(replace(FREE, unfinished=1)), {"poison_untouched"}),
        (with_jitter(replace(FREE, waits_s=(), unfinished=20)), {"poison_untouched", "wait_lower"}),
        (replace(CROWD, dead_letters=1), {"poison_untouched"}),
        (replace(CROWD, poison_failures=1), {"poison_untouched"}),
    ],
)
def test_busy_locks_that_break_a_promise(seen: LockBusySeen, expected: set[str]) -> None:
    assert broken(judge_lock_busy(seen)) == expected
