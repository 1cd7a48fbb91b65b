"""A holder stops believing before the store can have let go, whatever the network does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stanchion.core.faults import Fault
from stanchion.core.lease import (
    DEFAULT_POLICIES,
    FAILURES_KNOWN_IN_TIME,
    JOB_POLICY,
    JOB_TERMS,
    RUN_TERMS,
    Continuing,
    FenceCause,
    Fenced,
    Holding,
    LeaseLost,
    LeasePolicy,
    LeaseTerms,
    Moment,
    OnLockError,
    OnRenewalLost,
    RetrySchedule,
    Trust,
    faults,
    granted,
    job_terms_for,
    may_renew_early,
    next_fence,
    not_owned,
    renewal_failed,
    renewed,
    terms_for,
    tick,
)

OPEN, CLOSED = OnLockError.FAIL_OPEN, OnLockError.FAIL_CLOSED
FENCE, CONTINUE = OnRenewalLost.FENCE, OnRenewalLost.CONTINUE
FENCING = LeasePolicy(CLOSED, FENCE, 3)
CONTINUING = LeasePolicy(OPEN, CONTINUE, 3)
BOTH = pytest.mark.parametrize("policy", [FENCING, CONTINUING])

TERMS = LeaseTerms(ttl_ms=24_000, margin_ms=760)  # trusted for 23,000 ms
START = Moment(1_000_000)
TRUST_ENDS = Moment(START + 23_000)
ALMOST_ONE = 1 - 2**-53
SAMPLES = st.floats(0, 1, exclude_max=True)
TTLS_MS = st.integers(100, 3_600_000)


def after(ms: int) -> Moment:
    return Moment(START + ms)


def held(policy: LeasePolicy = FENCING, *, failures: int = 0) -> Holding:
    return Holding(TERMS, policy, START, after(8_000), failures)


def continuing(cause: FenceCause = FenceCause.DEADLINE) -> Continuing:
    return Continuing(TERMS, CONTINUING, START, after(9_000), cause)


# ── Terms ────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_lease_has_the_documented_times() -> None:
    assert LeaseTerms(ttl_ms=30_000, margin_ms=500) == RUN_TERMS
    assert RUN_TERMS.trusted_ms == 29_200
    assert RUN_TERMS.renew_every_ms == 10_000
    assert RUN_TERMS.renew_timeout_ms == 2_000
    assert RUN_TERMS.retry_window_ms == (1_250, 2_500)
    assert [RUN_TERMS.known_after_ms(n) for n in (1, 2, 3)] == [12_000, 16_500, 21_000]


def test_a_job_lease_has_the_documented_times() -> None:
    assert LeaseTerms(60_000, 500, RetrySchedule.SPREAD) == JOB_TERMS
    assert JOB_TERMS.trusted_ms == 58_900
    assert JOB_TERMS.renew_every_ms == 20_000
    assert JOB_TERMS.renew_timeout_ms == 2_000
    assert JOB_TERMS.last_attempt_window_ms == (54_900, 55_900)
    assert [JOB_TERMS.known_after_ms(n) for n in (1, 2, 3)] == [22_000, 40_950, 57_900]
    assert JOB_TERMS.outage_survived_ms == 34_900


def test_a_lease_of_a_tenth_of_a_second_has_sane_times() -> None:
    terms = terms_for(100)
    assert terms == LeaseTerms(ttl_ms=100, margin_ms=5)
    assert terms.trusted_ms == 94
    assert terms.renew_every_ms == 33
    assert terms.renew_timeout_ms == 8
    assert terms.retry_window_ms == (4, 8)
    assert terms.known_after_ms(3) == 73


def test_the_margin_is_a_twentieth_of_the_term_and_half_a_second_at_most() -> None:
    assert [terms_for(ttl_ms).margin_ms for ttl_ms in (9_979, 9_999, 10_000, 3_600_000)] == [
        498,
        499,
        500,
        500,
    ]


def test_a_renewal_may_take_a_twelfth_of_the_term_and_two_seconds_at_most() -> None:
    ttls_ms = (1_200, 23_988, 24_000, 24_012)
    assert [terms_for(ttl_ms).renew_timeout_ms for ttl_ms in ttls_ms] == [100, 1_999, 2_000, 2_000]


@given(ttl_ms=TTLS_MS)
def test_the_usual_terms_are_good_from_a_tenth_of_a_second_to_an_hour(ttl_ms: int) -> None:
    terms = terms_for(ttl_ms)
    assert faults(terms) == ()
    shortest_ms, longest_ms = terms.retry_window_ms
    assert 0 < shortest_ms < longest_ms
    assert 0 < terms.renew_timeout_ms <= longest_ms
    assert terms.known_after_ms(FAILURES_KNOWN_IN_TIME) < terms.trusted_ms < ttl_ms


@given(ttl_ms=TTLS_MS)
def test_a_holder_whose_clock_is_one_per_cent_slow_stops_before_the_store_lets_go(
    ttl_ms: int,
) -> None:
    # While this holder counts 99 ms, the store counts 100.
    assert terms_for(ttl_ms).trusted_ms * 100 < ttl_ms * 99


def test_every_fault_of_the_terms_is_reported() -> None:
    ttl = Fault("ttl_ms", "must be from 100 to 3600000")
    assert faults(LeaseTerms(100, 1)) == ()
    assert faults(LeaseTerms(3_600_000, 1)) == ()
    assert faults(LeaseTerms(99, 1)) == (ttl,)
    assert faults(LeaseTerms(3_600_001, 1)) == (ttl,)
    assert faults(LeaseTerms(50, 0)) == (ttl, Fault("margin_ms", "must be from 1 to 50"))
    assert faults(LeaseTerms(1_000, 0)) == (Fault("margin_ms", "must be from 1 to 1000"),)
    assert faults(LeaseTerms(1_000, 1_001)) == (Fault("margin_ms", "must be from 1 to 1000"),)


def test_a_margin_must_leave_time_to_learn_of_three_failures() -> None:
    # 12,000 ms: renew at 4,000, three calls of 1,000, two pauses of 1,000: all known at 9,000.
    assert LeaseTerms(12_000, 1).known_after_ms(3) == 9_000
    assert faults(LeaseTerms(12_000, 2_879)) == ()
    assert faults(LeaseTerms(12_000, 2_880)) == (
        Fault("margin_ms", "leaves no time for 3 failed renewals before trust ends"),
    )


# ── A holder ─────────────────────────────────────────────────────────────────────────────────────


@BOTH
def test_a_grant_is_trusted_from_when_it_was_asked_for(policy: LeasePolicy) -> None:
    trust = granted(TERMS, policy, sent_at=START, at=after(1_500))
    assert trust == Holding(TERMS, policy, START, next_renewal_at=after(8_000), failures=0)
    assert trust.trusted_until == TRUST_ENDS
    assert trust.may_release


def test_a_grant_whose_answer_took_too_long_is_never_held() -> None:
    last_good = granted(TERMS, FENCING, sent_at=START, at=Moment(TRUST_ENDS - 1))
    assert isinstance(last_good, Holding)
    assert granted(TERMS, FENCING, sent_at=START, at=TRUST_ENDS) == Fenced(FenceCause.DEADLINE)


def test_an_answer_from_before_its_question_gains_no_time() -> None:
    early = granted(TERMS, FENCING, sent_at=after(10), at=START)
    assert early == granted(TERMS, FENCING, sent_at=START, at=START)
    assert renewed(held(), sent_at=after(99_000), at=after(8_000)) == renewed(
        held(), sent_at=after(8_000), at=after(8_000)
    )


def test_trust_ends_exactly_at_the_deadline() -> None:
    trust = held()
    assert tick(trust, Moment(TRUST_ENDS - 1)) is trust
    assert tick(trust, TRUST_ENDS) == Fenced(FenceCause.DEADLINE)
    assert tick(trust, Moment(TRUST_ENDS + 1)) == Fenced(FenceCause.DEADLINE)


def test_a_success_counts_from_its_question_and_forgets_the_failures() -> None:
    trust = renewed(held(failures=2), sent_at=after(8_000), at=after(9_900))
    assert trust == Holding(TERMS, FENCING, after(8_000), after(16_000), failures=0)
    assert trust.trusted_until == after(31_000)


@pytest.mark.parametrize("sent_ms", [-5_000, 0])
def test_an_answer_to_an_older_question_tells_nothing_new(sent_ms: int) -> None:
    trust = held(failures=2)
    assert renewed(trust, sent_at=after(sent_ms), at=after(100)) is trust


def test_an_answer_to_a_question_one_millisecond_younger_does() -> None:
    assert renewed(held(failures=2), sent_at=after(1), at=after(100)) == Holding(
        TERMS, FENCING, after(1), after(8_001)
    )


def test_a_success_that_arrives_after_the_deadline_does_not_revive_a_fenced_holder() -> None:
    trust = held()
    assert isinstance(renewed(trust, after(22_000), Moment(TRUST_ENDS - 1)), Holding)
    assert renewed(trust, after(22_000), TRUST_ENDS) == Fenced(FenceCause.DEADLINE)


def test_after_a_failure_the_next_attempt_comes_sooner() -> None:
    first = renewal_failed(held(), at=after(10_000), sample=0.0)
    assert first == Holding(TERMS, FENCING, START, after(11_000), failures=1)
    latest = renewal_failed(held(), at=after(10_000), sample=ALMOST_ONE)
    assert latest == Holding(TERMS, FENCING, START, after(12_000), failures=1)


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_exactly_so_many_consecutive_failures_fence(limit: int) -> None:
    trust: Trust = held(LeasePolicy(CLOSED, FENCE, limit))
    for _ in range(limit - 1):
        trust = renewal_failed(trust, after(9_000), 0.5)
        assert isinstance(trust, Holding)
    assert renewal_failed(trust, after(9_000), 0.5) == Fenced(FenceCause.RENEWAL_FAILURES)


def test_a_success_in_between_resets_the_count() -> None:
    trust: Trust = held()
    for round_ms in (8_000, 16_000, 24_000):
        trust = renewal_failed(trust, after(round_ms), 0.5)
        trust = renewal_failed(trust, after(round_ms + 1), 0.5)
        trust = renewed(trust, after(round_ms + 2), after(round_ms + 3))
    assert trust == Holding(TERMS, FENCING, after(24_002), after(32_002), failures=0)


def test_a_failure_that_is_learned_of_too_late_is_the_deadlines_case() -> None:
    assert renewal_failed(held(failures=2), Moment(TRUST_ENDS - 1), 0.5) == Fenced(
        FenceCause.RENEWAL_FAILURES
    )
    assert renewal_failed(held(failures=2), TRUST_ENDS, 0.5) == Fenced(FenceCause.DEADLINE)
    assert renewal_failed(held(), TRUST_ENDS, 0.5) == Fenced(FenceCause.DEADLINE)


@pytest.mark.parametrize("trust", [held(FENCING), held(CONTINUING), continuing()])
def test_not_owned_fences_at_once_under_every_policy(trust: Trust) -> None:
    assert not_owned(trust) == Fenced(FenceCause.TAKEN)


@given(
    cause=st.sampled_from(FenceCause),
    steps=st.lists(st.tuples(st.sampled_from("rfnt"), st.integers(0, 10**9), SAMPLES)),
)
def test_nothing_leads_out_of_a_fence(
    cause: FenceCause, steps: list[tuple[str, int, float]]
) -> None:
    fenced = Fenced(cause)
    for kind, at, sample in steps:
        assert play(fenced, kind, Moment(at), Moment(at), sample) is fenced
    assert not fenced.may_release


def play(trust: Trust, kind: str, sent_at: Moment, at: Moment, sample: float) -> Trust:
    """What happens to a holder, by its first letter."""
    match kind:
        case "r":
            return renewed(trust, sent_at, at)
        case "f":
            return renewal_failed(trust, at, sample)
        case "n":
            return not_owned(trust)
        case _:
            return tick(trust, at)


# ── Going on without a trusted lease ─────────────────────────────────────────────────────────────


def test_at_the_deadline_a_continuing_policy_goes_on_untrusted() -> None:
    trust = held(CONTINUING)
    assert tick(trust, Moment(TRUST_ENDS - 1)) is trust
    assert tick(trust, TRUST_ENDS) == Continuing(
        TERMS, CONTINUING, START, after(8_000), FenceCause.DEADLINE
    )


def test_after_the_last_failure_a_continuing_policy_goes_on_untrusted_and_keeps_asking() -> None:
    assert renewal_failed(held(CONTINUING, failures=2), after(10_000), 0.0) == Continuing(
        TERMS, CONTINUING, START, after(11_000), FenceCause.RENEWAL_FAILURES
    )


def test_further_failures_only_move_the_next_attempt() -> None:
    trust = continuing(FenceCause.RENEWAL_FAILURES)
    assert renewal_failed(trust, after(50_000), ALMOST_ONE) == Continuing(
        TERMS, CONTINUING, START, after(52_000), FenceCause.RENEWAL_FAILURES
    )
    assert tick(trust, after(10**9)) is trust


def test_work_that_goes_on_untrusted_never_releases() -> None:
    assert continuing().may_release is False


def test_trust_returns_when_the_store_proves_that_it_never_let_go() -> None:
    trust = renewed(continuing(), sent_at=after(40_000), at=after(41_000))
    assert trust == Holding(TERMS, CONTINUING, after(40_000), after(48_000), failures=0)


def test_an_answer_too_slow_to_be_trusted_leaves_things_as_they_are() -> None:
    trust = continuing(FenceCause.RENEWAL_FAILURES)
    assert isinstance(renewed(trust, after(40_000), after(62_999)), Holding)
    assert renewed(trust, after(40_000), after(63_000)) is trust


def test_an_old_answer_does_not_bring_trust_back() -> None:
    trust = continuing(FenceCause.RENEWAL_FAILURES)
    assert renewed(trust, START, after(100)) is trust


# ── The promise, searched for a counterexample ───────────────────────────────────────────────────


@given(
    ttl_ms=TTLS_MS,
    policy=st.sampled_from([FENCING, CONTINUING, *DEFAULT_POLICIES.values()]),
    events=st.lists(
        st.tuples(st.sampled_from("rrfft"), st.integers(0, 400), st.integers(0, 400), SAMPLES),
        max_size=40,
    ),
)
def test_nobody_holds_once_the_last_success_is_too_old(
    ttl_ms: int, policy: LeasePolicy, events: list[tuple[str, int, int, float]]
) -> None:
    terms = terms_for(ttl_ms)
    successes = [START]
    trust = granted(terms, policy, START, START)
    at = START
    for kind, pause, flight, sample in events:
        # In thousandths of the term, so that every term sees calls both good and hopeless.
        sent_at = Moment(at + pause * ttl_ms // 1_000)
        at = Moment(sent_at + flight * ttl_ms // 1_000)
        if kind == "r":
            successes.append(sent_at)
        before, trust = trust, play(trust, kind, sent_at, at, sample)
        trust_ends = max(successes) + ttl_ms * 99 // 100 - terms.margin_ms
        if isinstance(trust, Holding):
            assert at < trust_ends == trust.trusted_until
        assert isinstance(trust, Fenced) or not isinstance(before, Fenced)
        assert trust.may_release == isinstance(trust, Holding)


@given(
    ttl_ms=TTLS_MS,
    delays=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    samples=st.lists(SAMPLES, min_size=3, max_size=3),
)
def test_three_failures_are_known_before_the_lease_can_have_expired(
    ttl_ms: int, delays: list[float], samples: list[float]
) -> None:
    terms = terms_for(ttl_ms)
    trust = granted(terms, JOB_POLICY, START, START)
    known_at = START
    for share, sample in zip(delays, samples, strict=True):
        assert isinstance(trust, Holding)
        known_at = Moment(trust.next_renewal_at + round(share * terms.renew_timeout_ms))
        trust = renewal_failed(trust, known_at, sample)
    assert trust == Fenced(FenceCause.RENEWAL_FAILURES)
    assert known_at <= START + terms.known_after_ms(3) < START + terms.trusted_ms
    assert known_at < START + ttl_ms


def test_the_worst_case_of_three_failures_is_three_quarters_of_the_term() -> None:
    trust = granted(TERMS, FENCING, START, START)
    known = [failed_at for failed_at, _ in failing(trust, sample=ALMOST_ONE)]
    assert known == [after(10_000), after(14_000), after(18_000)]


def test_a_third_of_the_term_between_attempts_would_have_been_too_slow() -> None:
    # Why retries come sooner: at ttl/3 apart the third failure is known after the lease expired.
    assert 3 * TERMS.renew_every_ms + TERMS.renew_timeout_ms > TERMS.ttl_ms


def failing(trust: Trust, sample: float) -> Iterator[tuple[Moment, Trust]]:
    """Renew when told to, each call timing out, until told to stop."""
    while isinstance(trust, Holding):
        failed_at = Moment(trust.next_renewal_at + trust.terms.renew_timeout_ms)
        trust = renewal_failed(trust, failed_at, sample)
        yield failed_at, trust


@given(
    ttl_ms=TTLS_MS,
    delays=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    samples=st.lists(SAMPLES, min_size=3, max_size=3),
)
def test_a_job_lease_makes_exactly_three_attempts_all_known_before_trust_ends(
    ttl_ms: int, delays: list[float], samples: list[float]
) -> None:
    terms = job_terms_for(ttl_ms)
    assert faults(terms) == ()
    trust = granted(terms, JOB_POLICY, START, START)
    sent: list[int] = []
    known_at = START
    for share, sample in zip(delays, samples, strict=True):
        assert isinstance(trust, Holding)
        assert trust.next_renewal_at >= known_at
        sent.append(trust.next_renewal_at - START)
        known_at = Moment(trust.next_renewal_at + round(share * terms.renew_timeout_ms))
        trust = renewal_failed(trust, known_at, sample)
        assert known_at - START <= terms.known_after_ms(len(sent)) < terms.trusted_ms
    assert trust == Fenced(FenceCause.RENEWAL_FAILURES)
    first, second, third = sent
    earliest, latest = terms.last_attempt_window_ms
    assert first == terms.renew_every_ms
    assert earliest <= third <= latest
    # Midway, but for the time of a call and the choice of the third attempt.
    unequal_ms = abs((third - second) - (second - first))
    assert unequal_ms <= terms.renew_timeout_ms + latest - earliest + 2


@pytest.mark.parametrize(
    ("call_ms", "sample", "sent_ms"),
    [
        (0, 0.0, [20_000, 37_450, 54_900]),
        (0, ALMOST_ONE, [20_000, 37_950, 55_900]),
        (2_000, 0.0, [20_000, 38_450, 54_900]),
        (2_000, ALMOST_ONE, [20_000, 38_950, 55_900]),
    ],
)
def test_the_attempts_of_a_job_lease_of_a_minute(
    call_ms: int, sample: float, sent_ms: list[int]
) -> None:
    trust = granted(JOB_TERMS, JOB_POLICY, START, START)
    sent: list[int] = []
    while isinstance(trust, Holding):
        sent.append(trust.next_renewal_at - START)
        trust = renewal_failed(trust, Moment(trust.next_renewal_at + call_ms), sample)
    assert sent == sent_ms


@pytest.mark.parametrize(
    ("ttl_ms", "sent_ms"),
    [(1_000, [333, 611, 807]), (3_000, [1_000, 1_835, 2_420]), (6_000, [2_000, 3_670, 4_840])],
)
def test_short_job_leases_spread_their_attempts_too(ttl_ms: int, sent_ms: list[int]) -> None:
    trust = granted(job_terms_for(ttl_ms), JOB_POLICY, START, START)
    sent: list[int] = []
    while isinstance(trust, Holding):
        sent.append(trust.next_renewal_at - START)
        call_ms = trust.terms.renew_timeout_ms
        trust = renewal_failed(trust, Moment(trust.next_renewal_at + call_ms), ALMOST_ONE)
    assert sent == sent_ms


@given(
    ttl_ms=st.integers(60_000, 3_600_000),
    begins=st.floats(0, 1),
    lasts_ms=st.integers(0, 30_000),
    hang_ms=st.integers(0, 2_000),
    samples=st.lists(SAMPLES, min_size=12, max_size=12),
)
def test_an_outage_of_half_a_minute_costs_no_job_whenever_it_begins(
    ttl_ms: int, begins: float, lasts_ms: int, hang_ms: int, samples: list[float]
) -> None:
    terms = job_terms_for(ttl_ms)
    assert terms.outage_survived_ms > 30_000
    outage = range(round(begins * 2 * ttl_ms), round(begins * 2 * ttl_ms) + lasts_ms + 1)
    trust = granted(terms, JOB_POLICY, START, START)
    for sample in samples:
        assert isinstance(trust, Holding)
        sent_at = trust.next_renewal_at
        if sent_at - START in outage:
            trust = renewal_failed(trust, Moment(sent_at + hang_ms), sample)
        else:
            # The store renews what has not expired.
            assert sent_at < trust.sent_at + ttl_ms
            trust = renewed(trust, sent_at, Moment(sent_at + 5))
    assert isinstance(trust, Holding)


@pytest.mark.parametrize(
    ("failures", "next_ms", "may_from_ms"),
    [(0, 20_000, 17_500), (1, 38_000, 37_500), (2, 55_700, 55_200), (2, 55_000, 54_900)],
)
def test_a_renewal_may_share_the_call_of_another_a_little_before_it_is_due(
    failures: int, next_ms: int, may_from_ms: int
) -> None:
    holding = Holding(JOB_TERMS, JOB_POLICY, START, after(next_ms), failures)
    assert not may_renew_early(holding, after(may_from_ms - 1))
    assert may_renew_early(holding, after(may_from_ms))


def test_a_failed_renewal_of_a_run_lease_keeps_its_pause() -> None:
    holding = Holding(RUN_TERMS, FENCING, START, after(12_000), 1)
    assert not may_renew_early(holding, after(11_999))


def test_the_schedule_of_run_leases_would_lose_a_job_in_that_outage() -> None:
    attempts = list(failing(granted(terms_for(60_000), JOB_POLICY, START, START), ALMOST_ONE))
    assert attempts[-1] == (after(36_000), Fenced(FenceCause.RENEWAL_FAILURES))
    assert terms_for(60_000).outage_survived_ms == 5_000


def test_a_job_lease_whose_first_attempt_came_late_still_makes_three() -> None:
    trust = granted(JOB_TERMS, JOB_POLICY, START, START)
    late = renewal_failed(trust, after(50_000), 0.0)
    assert isinstance(late, Holding)
    assert late.next_renewal_at == after(52_450)
    last = renewal_failed(late, after(57_000), 0.0)
    assert isinstance(last, Holding)
    assert last.next_renewal_at == after(57_000)


@given(sample=SAMPLES, ttl_ms=TTLS_MS)
def test_a_count_the_deadline_leaves_no_room_for_ends_at_the_deadline(
    sample: float, ttl_ms: int
) -> None:
    policy = LeasePolicy(CLOSED, FENCE, 100)
    *_, (_, trust) = failing(granted(terms_for(ttl_ms), policy, START, START), sample)
    assert trust == Fenced(FenceCause.DEADLINE)


# ── Fences ───────────────────────────────────────────────────────────────────────────────────────


def test_a_fence_is_the_servers_time_unless_that_is_behind() -> None:
    assert next_fence(previous=10, floor=20, server_time_us=1_000) == 1_000
    assert next_fence(previous=1_000, floor=0, server_time_us=1_000) == 1_001
    assert next_fence(previous=0, floor=1_000, server_time_us=1_000) == 1_001
    assert next_fence(previous=0, floor=0, server_time_us=0) == 1


@given(previous=st.integers(0, 2**62), floor=st.integers(0, 2**62), server_time_us=st.integers(0))
def test_a_fence_is_above_every_fence_before_it(
    previous: int, floor: int, server_time_us: int
) -> None:
    fence = next_fence(previous, floor, server_time_us)
    assert fence > previous
    assert fence > floor
    assert fence >= server_time_us


def test_the_causes_of_a_fence_have_fixed_names() -> None:
    assert [cause.value for cause in FenceCause] == [
        *("renewal_failures", "deadline", "taken", "cancelled", "timed_out")
    ]


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (FenceCause.RENEWAL_FAILURES, "too many renewals failed in a row"),
        (FenceCause.DEADLINE, "it could not be renewed in time"),
        (FenceCause.CANCELLED, "its run was cancelled"),
        (FenceCause.TIMED_OUT, "its run or step took too long"),
        (FenceCause.TAKEN, "according to the lock store, another holder has it or it has expired"),
    ],
)
def test_a_lost_lease_says_which_and_why(cause: FenceCause, reason: str) -> None:
    lost = LeaseLost("run/1", cause)
    assert str(lost) == f"the lease on 'run/1' was lost: {reason}"
    assert (lost.name, lost.cause) == ("run/1", cause)
