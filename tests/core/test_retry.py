"""Backoff keeps its bounds, retries know when to stop, a budget never gives more than it has."""

from __future__ import annotations

import subprocess
import sys
from math import inf, nan

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stanchion.core.faults import Fault
from stanchion.core.limits import ATTEMPTS_MAX, BACKOFF_MS_MAX
from stanchion.core.model import Instant
from stanchion.core.retry import (
    BUDGETS,
    RETRIES,
    Answer,
    Backoff,
    BoundedJitter,
    Budget,
    BudgetState,
    Exponential,
    Fixed,
    GiveUp,
    GiveUpReason,
    RetryClass,
    RetryPolicy,
    Tries,
    Wait,
    backoff_ms,
    faults,
    full_budget,
    honour_retry_after,
    next_try,
    sample_from,
    spend,
    within,
)

ALMOST_ONE = 1 - 2**-53
SAMPLES = st.floats(0, 1, exclude_max=True)
DELAYS_MS = st.integers(0, BACKOFF_MS_MAX)
EPOCH = Instant(1_700_000_000_000)


def later(ms: int) -> Instant:
    return Instant(EPOCH + ms)


# ── How long ─────────────────────────────────────────────────────────────────────────────────────


@given(low=st.integers(-(10**18), 10**18), width=st.integers(0, 10**18), sample=SAMPLES)
def test_a_choice_never_leaves_its_bounds(low: int, width: int, sample: float) -> None:
    assert low <= within(low, low + width, sample) <= low + width


def test_both_ends_of_a_range_are_chosen_and_all_numbers_get_the_same_share() -> None:
    assert [within(3, 6, part / 8) for part in range(8)] == [3, 3, 4, 4, 5, 5, 6, 6]
    assert within(3, 6, ALMOST_ONE) == 6


def test_the_upper_bound_holds_where_floats_are_coarser_than_integers() -> None:
    assert within(0, 2**60, ALMOST_ONE) <= 2**60
    assert within(0, 2**53 + 1, ALMOST_ONE) <= 2**53 + 1


@given(delay_ms=DELAYS_MS, attempt=st.integers(1, 10**6), sample=SAMPLES)
def test_a_fixed_backoff_is_always_its_delay(delay_ms: int, attempt: int, sample: float) -> None:
    assert backoff_ms(Fixed(delay_ms, jitter_ms=delay_ms // 2), attempt, sample) == delay_ms


@given(data=st.data(), attempt=st.integers(1, 10**6), sample=SAMPLES)
def test_bounded_jitter_stays_within_its_bounds(
    data: st.DataObject, attempt: int, sample: float
) -> None:
    delay_ms = data.draw(DELAYS_MS)
    jitter_ms = data.draw(st.integers(0, delay_ms))
    wait_ms = backoff_ms(BoundedJitter(delay_ms, jitter_ms), attempt, sample)
    assert delay_ms - jitter_ms <= wait_ms <= delay_ms + jitter_ms
    assert wait_ms >= 0


def test_a_busy_lock_is_tried_again_after_300_to_700_ms() -> None:
    busy = BoundedJitter(delay_ms=500, jitter_ms=200)
    assert backoff_ms(busy, 1, 0.0) == 300
    assert backoff_ms(busy, 1, 0.5) == 500
    assert backoff_ms(busy, 1, ALMOST_ONE) == 700


def test_an_exponential_ceiling_starts_at_its_base_and_ends_at_its_cap() -> None:
    policy = Exponential(base_ms=100, cap_ms=1_000, factor=2, jitter="none")
    waits = [backoff_ms(policy, attempt, 0.0) for attempt in range(1, 7)]
    assert waits == [100, 200, 400, 800, 1_000, 1_000]


def test_a_fractional_factor_is_cut_to_whole_milliseconds() -> None:
    policy = Exponential(base_ms=101, cap_ms=1_000, factor=1.5, jitter="none")
    assert [backoff_ms(policy, attempt, 0.0) for attempt in (1, 2, 3)] == [101, 151, 227]


def test_full_jitter_reaches_from_nothing_to_the_ceiling() -> None:
    policy = Exponential(base_ms=100, cap_ms=1_000)
    assert backoff_ms(policy, 3, 0.0) == 0
    assert backoff_ms(policy, 3, 0.5) == 200
    assert backoff_ms(policy, 3, ALMOST_ONE) == 400


@pytest.mark.parametrize("factor", [1.0, 1.000_001, 2, 2.0, 10.0])
@pytest.mark.parametrize("attempt", [1, 1_000, 10**6])
def test_no_attempt_is_too_late_to_have_a_backoff(factor: float, attempt: int) -> None:
    policy = Exponential(base_ms=200, cap_ms=BACKOFF_MS_MAX, factor=factor)
    assert 0 <= backoff_ms(policy, attempt, ALMOST_ONE) <= BACKOFF_MS_MAX


def test_the_millionth_attempt_waits_for_the_cap() -> None:
    policy = Exponential(base_ms=200, cap_ms=30_000, jitter="none")
    assert backoff_ms(policy, 10**6, 0.0) == 30_000


@given(
    base_ms=st.integers(1, 10_000),
    cap_ms=st.integers(10_000, BACKOFF_MS_MAX),
    factor=st.floats(1, 10),
    attempt=st.integers(1, 10**6),
    sample=SAMPLES,
)
def test_a_later_attempt_never_has_a_lower_ceiling(
    base_ms: int, cap_ms: int, factor: float, attempt: int, sample: float
) -> None:
    policy = Exponential(base_ms=base_ms, cap_ms=cap_ms, factor=factor, jitter="none")
    ceiling_ms = backoff_ms(policy, attempt, sample)
    assert base_ms <= ceiling_ms <= backoff_ms(policy, attempt + 1, sample) <= cap_ms
    jittered = msgspec.structs.replace(policy, jitter="full")
    assert 0 <= backoff_ms(jittered, attempt, sample) <= ceiling_ms


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ('{"kind":"fixed","delay_ms":500}', Fixed(500)),
        ('{"kind":"fixed","delay_ms":500,"jitter_ms":200}', Fixed(500, jitter_ms=200)),
        ('{"kind":"jitter","delay_ms":10,"jitter_ms":5}', BoundedJitter(10, 5)),
        (
            '{"kind":"exponential","base_ms":1,"cap_ms":9,"factor":3.0,"jitter":"none"}',
            Exponential(base_ms=1, cap_ms=9, factor=3.0, jitter="none"),
        ),
        ('{"kind":"exponential","base_ms":1,"cap_ms":9}', Exponential(base_ms=1, cap_ms=9)),
    ],
)
def test_a_policy_is_a_setting_that_survives_json(text: str, policy: Backoff) -> None:
    assert msgspec.json.decode(text, type=Backoff) == policy
    assert msgspec.json.encode(policy).decode() == text


def test_one_word_switches_a_setting_to_fixed_and_back() -> None:
    setting = {"kind": "jitter", "delay_ms": 500, "jitter_ms": 200}
    assert msgspec.convert(setting | {"kind": "fixed"}, Backoff) == Fixed(500, jitter_ms=200)
    assert msgspec.convert(setting | {"kind": "jitter"}, Backoff) == BoundedJitter(500, 200)


def test_a_setting_with_an_unknown_member_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"kind": "fixed", "delay_ms": 1, "delay": 1}, Backoff)


# ── Samples ──────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.integers() | st.text(max_size=9), max_size=9))
def test_a_sample_from_any_parts_is_in_the_unit_interval(parts: list[int | str]) -> None:
    assert 0 <= sample_from(*parts) < 1


def test_samples_never_change_between_versions() -> None:
    # Stored runs were scheduled with these: a change would move their retries.
    assert sample_from("run-1", "plan", 1) == 0.13440050891131783
    assert sample_from("run-1", "plan", 2) == 0.018756025635695894


def test_samples_do_not_depend_on_the_process() -> None:
    program = "from stanchion.core.retry import sample_from; print(sample_from('run', 'step', 7))"
    command = [sys.executable, "-c", program]
    outputs = {
        subprocess.check_output(command, env={"PYTHONHASHSEED": seed}, text=True)
        for seed in ("1", "2")
    }
    assert outputs == {f"{sample_from('run', 'step', 7)}\n"}


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (("ab", "c"), ("a", "bc")),
        (("1",), (1,)),
        ((1, 12), (11, 2)),
        (("a", ""), ("a",)),
        (("s1:a",), ("a", "a")),
        ((-1,), (1,)),
    ],
)
def test_different_parts_give_different_samples(
    left: tuple[str | int, ...], right: tuple[str | int, ...]
) -> None:
    assert sample_from(*left) != sample_from(*right)


def test_a_lone_surrogate_has_a_sample_too() -> None:
    assert sample_from("\ud800") != sample_from("\udfff")


def test_samples_of_neighbouring_attempts_are_spread_evenly() -> None:
    tenths = [int(sample_from("run", "step", attempt) * 10) for attempt in range(2_000)]
    counts = [tenths.count(tenth) for tenth in range(10)]
    assert min(counts) > 150
    assert max(counts) < 250


# ── The server's word ────────────────────────────────────────────────────────────────────────────


@given(retry_after_ms=DELAYS_MS, own_ms=DELAYS_MS, sample=SAMPLES, spread=st.floats(0, 1))
def test_nobody_comes_back_before_the_servers_word(
    retry_after_ms: int, own_ms: int, sample: float, spread: float
) -> None:
    delay_ms = honour_retry_after(retry_after_ms, own_ms, sample, spread)
    assert delay_ms >= max(retry_after_ms, own_ms)
    assert delay_ms <= max(own_ms, retry_after_ms * (1 + spread))


def test_callers_told_the_same_time_come_back_at_different_times() -> None:
    delays = [honour_retry_after(30_000, 200, sample, 0.25) for sample in (0.0, 0.5, ALMOST_ONE)]
    assert delays == [30_000, 33_750, 37_500]


def test_a_backoff_longer_than_the_servers_word_stands() -> None:
    assert honour_retry_after(1_000, 5_000, 0.5, 0.25) == 5_000
    assert honour_retry_after(0, 5_000, ALMOST_ONE, 1.0) == 5_000


# ── Whether to try again ─────────────────────────────────────────────────────────────────────────

QUOTA, UNAVAILABLE = RetryClass.QUOTA, RetryClass.UNAVAILABLE
STEADY = {
    QUOTA: RetryPolicy(
        attempts_max=2, total_ms_max=1_000, retry_after_ms_max=800, backoff=Fixed(300), spread=0.5
    ),
    UNAVAILABLE: RetryPolicy(
        attempts_max=3, total_ms_max=2_000, retry_after_ms_max=900, backoff=Fixed(100), spread=0.5
    ),
}


def test_an_answer_without_a_class_is_not_tried_again() -> None:
    assert next_try(STEADY, Tries(EPOCH), Answer(None), EPOCH, 0.5) == GiveUp(
        GiveUpReason.NOT_RETRYABLE
    )


def test_each_class_waits_by_its_own_backoff() -> None:
    first = Tries(EPOCH)
    assert next_try(STEADY, first, Answer(QUOTA), EPOCH, 0.0) == Wait(300, Tries(EPOCH, (QUOTA,)))
    assert next_try(STEADY, first, Answer(UNAVAILABLE), EPOCH, 0.0) == Wait(
        100, Tries(EPOCH, (UNAVAILABLE,))
    )


def test_the_backoff_grows_with_the_tries_of_its_class_only() -> None:
    growing = {
        RetryClass.UNAVAILABLE: RetryPolicy(
            attempts_max=9,
            total_ms_max=9_999,
            retry_after_ms_max=0,
            backoff=Exponential(base_ms=10, cap_ms=999, jitter="none"),
        )
    }
    tries = Tries(EPOCH, (UNAVAILABLE, QUOTA, UNAVAILABLE))
    decision = next_try(growing, tries, Answer(UNAVAILABLE), EPOCH, 0.0)
    assert decision == Wait(40, Tries(EPOCH, (UNAVAILABLE, QUOTA, UNAVAILABLE, UNAVAILABLE)))


def test_the_last_attempt_of_a_class_is_the_last() -> None:
    one = Tries(EPOCH, (UNAVAILABLE,))
    two = Tries(EPOCH, (UNAVAILABLE, UNAVAILABLE))
    assert isinstance(next_try(STEADY, one, Answer(UNAVAILABLE), EPOCH, 0.0), Wait)
    assert next_try(STEADY, two, Answer(UNAVAILABLE), EPOCH, 0.0) == GiveUp(
        GiveUpReason.ATTEMPTS_SPENT
    )


def test_attempts_are_counted_by_class() -> None:
    tries = Tries(EPOCH, (UNAVAILABLE, UNAVAILABLE))
    assert isinstance(next_try(STEADY, tries, Answer(QUOTA), EPOCH, 0.0), Wait)


def test_asked_to_wait_too_long_a_caller_gives_up_rather_than_come_early() -> None:
    at_cap, above = Answer(QUOTA, 800), Answer(QUOTA, 801)
    assert next_try(STEADY, Tries(EPOCH), at_cap, EPOCH, 0.0) == Wait(800, Tries(EPOCH, (QUOTA,)))
    assert next_try(STEADY, Tries(EPOCH), above, EPOCH, 0.0) == GiveUp(
        GiveUpReason.RETRY_AFTER_TOO_LONG
    )


def test_the_servers_word_is_spread_by_the_policys_share() -> None:
    decision = next_try(STEADY, Tries(EPOCH), Answer(UNAVAILABLE, 800), EPOCH, ALMOST_ONE)
    assert decision == Wait(1_200, Tries(EPOCH, (UNAVAILABLE,)))


def test_a_wait_that_would_end_too_late_is_not_begun() -> None:
    tries = Tries(EPOCH)
    assert isinstance(next_try(STEADY, tries, Answer(QUOTA), later(700), 0.0), Wait)
    assert next_try(STEADY, tries, Answer(QUOTA), later(701), 0.0) == GiveUp(
        GiveUpReason.TIME_SPENT
    )


def test_a_clock_that_stepped_back_gives_a_call_no_extra_time() -> None:
    just, slow = (
        {QUOTA: msgspec.structs.replace(STEADY[QUOTA], backoff=Fixed(delay_ms))}
        for delay_ms in (1_000, 1_001)
    )
    for now in (EPOCH, later(-5_000)):
        assert isinstance(next_try(just, Tries(EPOCH), Answer(QUOTA), now, 0.0), Wait)
        assert next_try(slow, Tries(EPOCH), Answer(QUOTA), now, 0.0) == GiveUp(
            GiveUpReason.TIME_SPENT
        )


@given(
    answers=st.lists(st.sampled_from(RetryClass), min_size=20, max_size=20),
    retry_after_ms=st.integers(0, 40_000),
    sample=SAMPLES,
)
def test_every_call_ends_within_its_attempts_and_its_time(
    answers: list[RetryClass], retry_after_ms: int, sample: float
) -> None:
    tries, now = Tries(EPOCH), EPOCH
    for retry_class in answers:
        decision = next_try(RETRIES, tries, Answer(retry_class, retry_after_ms), now, sample)
        if isinstance(decision, GiveUp):
            break
        now, tries = Instant(now + decision.delay_ms), decision.tries
        assert decision.delay_ms >= retry_after_ms
    else:
        pytest.fail("a call was never given up")
    assert now - EPOCH <= RETRIES[UNAVAILABLE].total_ms_max
    assert all(tries.ended.count(kind) < RETRIES[kind].attempts_max for kind in RetryClass)


def test_the_words_that_leave_the_process_are_fixed() -> None:
    assert [kind.value for kind in RetryClass] == ["quota", "unavailable"]
    assert [reason.value for reason in GiveUpReason] == [
        "not_retryable",
        "attempts_spent",
        "retry_after_too_long",
        "time_spent",
    ]


def test_the_quota_has_the_stricter_caps() -> None:
    quota, unavailable = RETRIES[QUOTA], RETRIES[UNAVAILABLE]
    assert quota.attempts_max < unavailable.attempts_max
    assert quota.total_ms_max < unavailable.total_ms_max
    assert BUDGETS[QUOTA].tokens_max < BUDGETS[UNAVAILABLE].tokens_max
    assert BUDGETS[QUOTA].refill_per_s < BUDGETS[UNAVAILABLE].refill_per_s


def test_the_throttled_jobs_thirty_seconds_are_within_every_callers_patience() -> None:
    for retry_class, policy in RETRIES.items():
        answer = Answer(retry_class, 30_000)
        assert isinstance(next_try(RETRIES, Tries(EPOCH), answer, EPOCH, ALMOST_ONE), Wait)
        assert isinstance(policy.backoff, Exponential)
        assert policy.backoff.jitter == "full"


def test_the_defaults_have_no_faults() -> None:
    assert [faults(policy) for policy in RETRIES.values()] == [(), ()]
    assert [faults(budget) for budget in BUDGETS.values()] == [(), ()]


# ── Budgets ──────────────────────────────────────────────────────────────────────────────────────

SLOW = Budget(tokens_max=2, refill_per_s=0.1)


def drain(budget: Budget, state: BudgetState, now: Instant) -> tuple[BudgetState, int]:
    """Spend until refused."""
    count = 0
    while True:
        state, granted = spend(budget, state, now)
        if not granted:
            return state, count
        count += 1


def test_a_full_budget_gives_its_tokens_and_then_none() -> None:
    _, count = drain(SLOW, full_budget(SLOW, EPOCH), EPOCH)
    assert count == 2


def test_a_token_comes_back_exactly_when_its_time_has_passed() -> None:
    empty, _ = drain(SLOW, full_budget(SLOW, EPOCH), EPOCH)
    assert spend(SLOW, empty, later(9_999))[1] is False
    assert spend(SLOW, empty, later(10_000)) == (BudgetState(0, later(10_000)), True)


def test_asking_often_does_not_round_the_refill_away() -> None:
    state, _ = drain(SLOW, full_budget(SLOW, EPOCH), EPOCH)
    for ms in range(1, 10_000):
        state, granted = spend(SLOW, state, later(ms))
        assert not granted
    assert spend(SLOW, state, later(10_000))[1] is True


def test_a_budget_never_holds_more_than_its_maximum() -> None:
    _, count = drain(SLOW, full_budget(SLOW, EPOCH), later(10**9))
    assert count == 2


def test_a_budget_that_was_made_smaller_gives_no_more_than_the_new_maximum() -> None:
    state = full_budget(Budget(tokens_max=50, refill_per_s=0.1), EPOCH)
    _, count = drain(SLOW, state, EPOCH)
    assert count == 2


def test_a_clock_that_steps_back_costs_no_token_and_gives_none() -> None:
    one = BudgetState(1_000_000, EPOCH)
    empty, granted = spend(SLOW, one, later(-3_600_000))
    assert granted
    assert spend(SLOW, empty, later(-3_600_000)) == (empty, False)


def test_after_a_step_back_the_budget_refills_from_the_new_reading() -> None:
    empty = BudgetState(0, EPOCH)
    state, granted = spend(SLOW, empty, later(-3_600_000))
    assert not granted
    assert spend(SLOW, state, later(-3_600_000 + 9_999))[1] is False
    assert spend(SLOW, state, later(-3_600_000 + 10_000))[1] is True


@given(
    steps_ms=st.lists(st.integers(-10_000, 10_000), max_size=60),
    refill_per_s=st.sampled_from([0.0, 0.1, 1.0, 3.3]),
)
def test_what_is_spent_never_exceeds_the_maximum_and_the_refill_of_the_time_that_passed(
    steps_ms: list[int], refill_per_s: float
) -> None:
    budget = Budget(tokens_max=3, refill_per_s=refill_per_s)
    state, now, spent, passed_ms = full_budget(budget, EPOCH), EPOCH, 0, 0
    for step_ms in steps_ms:
        now, passed_ms = Instant(now + step_ms), passed_ms + max(0, step_ms)
        state, granted = spend(budget, state, now)
        spent += granted
    assert spent <= 3 + passed_ms * refill_per_s / 1_000 + 1e-4


@given(tokens=st.integers(0, 3_000_000), early_ms=st.integers(0, 99_999), more_ms=st.integers(0, 9))
def test_waiting_longer_never_turns_a_yes_into_a_no(
    tokens: int, early_ms: int, more_ms: int
) -> None:
    state = BudgetState(tokens, EPOCH)
    _, early = spend(SLOW, state, later(early_ms))
    _, late = spend(SLOW, state, later(early_ms + more_ms))
    assert late or not early


# ── Faults ───────────────────────────────────────────────────────────────────────────────────────

DAY = "must be from 0 to 86400000"
DAY_FROM_1 = "must be from 1 to 86400000"


@pytest.mark.parametrize(
    "policy",
    [
        Fixed(0),
        Fixed(BACKOFF_MS_MAX),
        BoundedJitter(0, 0),
        BoundedJitter(10, 10),
        Exponential(base_ms=1, cap_ms=1, factor=1),
        Exponential(base_ms=1, cap_ms=BACKOFF_MS_MAX, factor=10),
        RetryPolicy(
            attempts_max=1, total_ms_max=0, retry_after_ms_max=0, backoff=Fixed(0), spread=0
        ),
        RetryPolicy(
            attempts_max=ATTEMPTS_MAX,
            total_ms_max=BACKOFF_MS_MAX,
            retry_after_ms_max=BACKOFF_MS_MAX,
            backoff=Fixed(0),
            spread=1,
        ),
        Budget(1, 0),
        Budget(1_000_000, 1_000_000),
    ],
)
def test_policies_at_the_edge_of_their_ranges_are_good(
    policy: Backoff | RetryPolicy | Budget,
) -> None:
    assert faults(policy) == ()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Fixed(-1), [("delay_ms", DAY), ("jitter_ms", "exceeds delay_ms")]),
        (Fixed(BACKOFF_MS_MAX + 1), [("delay_ms", DAY)]),
        (Fixed(10, jitter_ms=11), [("jitter_ms", "exceeds delay_ms")]),
        (BoundedJitter(10, 11), [("jitter_ms", "exceeds delay_ms")]),
        (BoundedJitter(10, -1), [("jitter_ms", DAY)]),
        (
            BoundedJitter(BACKOFF_MS_MAX + 1, BACKOFF_MS_MAX + 2),
            [("delay_ms", DAY), ("jitter_ms", DAY), ("jitter_ms", "exceeds delay_ms")],
        ),
        (
            Exponential(base_ms=0, cap_ms=0, factor=0.9),
            [
                ("base_ms", DAY_FROM_1),
                ("cap_ms", DAY_FROM_1),
                ("factor", "must be from 1 to 10"),
            ],
        ),
        (Exponential(base_ms=2, cap_ms=1), [("cap_ms", "is below base_ms")]),
        (Exponential(base_ms=1, cap_ms=2, factor=nan), [("factor", "must be from 1 to 10")]),
        (Exponential(base_ms=1, cap_ms=2, factor=inf), [("factor", "must be from 1 to 10")]),
        (Exponential(base_ms=1, cap_ms=2, factor=10.1), [("factor", "must be from 1 to 10")]),
        (
            Exponential(base_ms=BACKOFF_MS_MAX + 1, cap_ms=BACKOFF_MS_MAX + 1),
            [("base_ms", DAY_FROM_1), ("cap_ms", DAY_FROM_1)],
        ),
        (
            RetryPolicy(
                attempts_max=0,
                total_ms_max=-1,
                retry_after_ms_max=-1,
                backoff=BoundedJitter(1, 2),
                spread=nan,
            ),
            [
                ("attempts_max", "must be from 1 to 100"),
                ("total_ms_max", DAY),
                ("retry_after_ms_max", DAY),
                ("spread", "must be from 0 to 1"),
                ("backoff.jitter_ms", "exceeds delay_ms"),
            ],
        ),
        (
            Budget(0, -1),
            [
                ("tokens_max", "must be from 1 to 1000000"),
                ("refill_per_s", "must be from 0 to 1000000"),
            ],
        ),
        (Budget(1, inf), [("refill_per_s", "must be from 0 to 1000000")]),
    ],
)
def test_every_fault_of_a_policy_is_reported(
    policy: Backoff | RetryPolicy | Budget, expected: list[tuple[str, str]]
) -> None:
    assert faults(policy) == tuple(Fault(path, message) for path, message in expected)


@pytest.mark.parametrize("policy", [Fixed(99, jitter_ms=30), BoundedJitter(99, 30)])
def test_jitter_stays_below_the_term_of_the_lock_it_waits_for(policy: Backoff) -> None:
    assert faults(policy, lock_ttl_ms=31) == ()
    assert faults(policy, lock_ttl_ms=30) == (
        Fault("jitter_ms", "must be below the lock's term of 30 ms"),
    )
