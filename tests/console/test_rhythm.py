"""The rhythm of retries: what is in step scores high, what is spread scores low."""

from __future__ import annotations

import random

import pytest

from stanchion.console.rhythm import (
    MODEL_BUCKET_MS,
    MODEL_CALLERS,
    buckets,
    coarser,
    expected_retries,
    expected_returns,
    fixed_beside,
    policy_synchrony,
    simulated,
    synchrony,
)
from stanchion.core.retry import BoundedJitter, Fixed
from stanchion.core.settings import Rhythm

FIXED, JITTER = Fixed(500), BoundedJitter(500, 200)


def test_what_was_found_busy_is_tried_again_after_the_policys_delay() -> None:
    assert expected_retries([2, 0, 1], bucket_ms=50, rhythm=FIXED) == [525, 525, 625]
    spread = expected_retries([40], bucket_ms=50, rhythm=JITTER)
    assert len(set(spread)) > 30
    assert all(325 <= time <= 725 for time in spread)


def test_times_are_counted_in_the_last_buckets_only() -> None:
    times = [0.0, 499.0, 500.0, 999.9, 1000.0, -1.0, 1000.1]
    assert buckets(times, until_ms=1000, bucket_ms=500, count=2) == [2, 2]
    assert coarser([1, 2, 3, 4, 5], 2) == [3, 7, 5]


def test_callers_in_step_score_one_and_spread_ones_near_zero() -> None:
    in_step = [float(500 * number) for number in range(100) for _ in range(5)]
    chance = random.Random(1)
    spread = [chance.uniform(0, 50_000) for _ in range(500)]
    for times, low, high in ((in_step, 0.95, 1.0), (spread, 0.0, 0.15)):
        counts = buckets(times, until_ms=60_000, bucket_ms=50, count=1_200)
        score = synchrony(counts, bucket_ms=50, period_ms=500)
        assert score is not None
        assert low <= score <= high + 1e-9


@pytest.mark.parametrize(("counts", "period_ms"), [([0] * 9, 500), ([1] * 7, 500), ([9] * 9, 60)])
def test_too_few_retries_have_no_score(counts: list[int], period_ms: float) -> None:
    assert synchrony(counts, bucket_ms=50, period_ms=period_ms) is None


def test_the_model_shows_what_the_policy_gives() -> None:
    fixed, jitter = simulated(FIXED), simulated(JITTER)
    assert max(fixed) == MODEL_CALLERS, "all at once, again and again"
    assert sum(bool(count) for count in fixed) == 11
    # The first retries still show the jitter's width; later ones are everywhere.
    assert max(jitter[40:]) < MODEL_CALLERS / 3
    assert sum(fixed) == pytest.approx(sum(jitter), rel=0.1)
    assert policy_synchrony(FIXED) == policy_synchrony(BoundedJitter(500, 0)) == 1.0
    assert policy_synchrony(JITTER) == pytest.approx(0.234, abs=0.001)
    score = synchrony(jitter, bucket_ms=MODEL_BUCKET_MS, period_ms=500)
    assert score is not None
    assert score < 0.3


def test_each_policy_is_shown_without_and_with_jitter() -> None:
    both: tuple[Rhythm, Rhythm] = (Fixed(500), BoundedJitter(500, 200))
    assert fixed_beside(Fixed(500)) == fixed_beside(BoundedJitter(500, 200)) == both


def test_refused_callers_come_back_after_their_time_and_spread() -> None:
    back = expected_returns([(0.0, 1_000)] * 100)
    assert min(back) >= 1_000
    assert max(back) <= 1_250
    assert len(set(back)) > 50
