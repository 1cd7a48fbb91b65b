"""The gate: the order of its questions, and what makes two requests the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stanchion.core.admission import (
    Admitted,
    Facts,
    Full,
    KeyRecord,
    Mismatch,
    Rate,
    RateExceeded,
    Replayed,
    StaleDefinition,
    TickTaken,
    TooLate,
    Verdict,
    fingerprint,
    judge,
)
from stanchion.core.json_value import JsonValue
from stanchion.core.model import Instant, RunId, WorkflowId
from stanchion.core.rerun import RerunOptions
from stanchion.core.retry import WorkAllowance

NOW = Instant(1_000_000)
SAME = KeyRecord("print", RunId("old"))
OTHER = KeyRecord("another", RunId("old"))
BUSY = Rate(per_s=1, used_until_ms=NOW + 1)


def verdict(**facts: object) -> Verdict:
    known: dict[str, Any] = {
        "run_id": RunId("new"),
        "now": NOW,
        "not_after": NOW,
        "fingerprint": "print",
    }
    return judge(Facts(**(known | facts)))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, Admitted(RunId("new"))),
        ({"tick_taken": (3, 7), "definition_is_current": False}, TickTaken(3, 7)),
        ({"tick_taken": (3, 7), "key": SAME}, Replayed(RunId("old"))),
        ({"limit": 2, "active": 1}, Admitted(RunId("new"))),
        ({"limit": 2, "active": 2}, Full(2, 2)),
        ({"limit": 2, "active": 3}, Full(2, 3)),
        ({"limit": 0, "active": 0}, Full(0, 0)),
        ({"limit": None, "active": 10**6}, Admitted(RunId("new"))),
        ({"limit": 0, "takes_slot": False}, Admitted(RunId("new"))),
        ({"key": SAME}, Replayed(RunId("old"))),
        ({"key": OTHER}, Mismatch()),
        ({"definition_is_current": False}, StaleDefinition()),
        ({"not_after": NOW - 1}, TooLate()),
        ({"exists": True}, Admitted(RunId("new"))),
        ({"rate": Rate(per_s=1)}, Admitted(RunId("new"))),
        ({"rate": BUSY}, RateExceeded()),
    ],
)
def test_each_question_has_its_answer(facts: dict[str, Any], expected: Verdict) -> None:
    assert verdict(**facts) == expected


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ({"exists": True}, Admitted(RunId("new"))),
        ({"not_after": NOW - 1}, TooLate()),
        ({"key": OTHER}, Mismatch()),
        ({"key": SAME}, Replayed(RunId("old"))),
        ({"definition_is_current": False}, StaleDefinition()),
        ({"limit": 2, "active": 2}, Full(2, 2)),
        ({"rate": BUSY}, RateExceeded()),
    ],
)
def test_the_questions_come_in_this_order(first: dict[str, Any], expected: Verdict) -> None:
    order: list[dict[str, Any]] = [
        {"exists": True},
        {"not_after": NOW - 1},
        {"key": OTHER},
        {"key": SAME},
        {"definition_is_current": False},
        {"limit": 2, "active": 2},
        {"rate": BUSY},
    ]
    # Everything that comes later is wrong as well, and does not matter.
    facts: dict[str, Any] = {}
    for later in reversed(order[order.index(first) :]):
        facts |= later
    assert verdict(**facts) == expected


def test_a_rate_admits_its_burst_and_then_one_by_one() -> None:
    rate, now, admitted = Rate(per_s=2), NOW, []
    for step in range(8):
        now = Instant(NOW + 250 * step)
        if rate.spent_until(now) <= now:
            rate = Rate(rate.per_s, rate.after_one(now))
            admitted.append(250 * step)
    assert admitted == [0, 250, 500, 1000, 1500]


@pytest.mark.parametrize(("per_s", "burst"), [(0.5, 1), (1, 1), (2.5, 2), (10, 10), (1_000, 1_000)])
def test_the_burst_is_a_second_of_the_rate_and_at_least_one(per_s: float, burst: int) -> None:
    rate, admitted = Rate(per_s), 0
    while rate.spent_until(NOW) <= NOW:
        rate = Rate(per_s, rate.after_one(NOW))
        admitted += 1
    assert admitted == burst


def test_a_clock_that_was_set_back_does_not_shut_a_tenant_out() -> None:
    rate = Rate(per_s=2, used_until_ms=NOW + 3_600_000)
    assert rate.spent_until(NOW) <= NOW
    assert rate.after_one(NOW) == NOW + 500


def test_a_burst_that_is_used_up_is_not_taken_for_a_clock_that_was_set_back() -> None:
    # The burst is a second long; a millisecond more is a matter of rounding.
    for used_until_ms in (NOW + 1_000, NOW + 1_001):
        rate = Rate(per_s=2, used_until_ms=used_until_ms)
        assert rate.spent_until(NOW) > NOW
        assert rate.after_one(NOW) == used_until_ms + 500
    assert Rate(per_s=2, used_until_ms=NOW + 1_002).after_one(NOW) == NOW + 500


@given(st.floats(0.1, 500), st.lists(st.integers(0, 2_000), min_size=1, max_size=200))
def test_no_window_sees_more_than_rate_and_burst(per_s: float, gaps: list[int]) -> None:
    rate, now, admitted = Rate(per_s), int(NOW), []
    for gap in gaps:
        now += gap
        if rate.spent_until(Instant(now)) <= now:
            rate = Rate(per_s, rate.after_one(Instant(now)))
            admitted.append(now)
    for first in range(len(admitted)):
        for last in range(first, len(admitted)):
            seconds = (admitted[last] - admitted[first]) / 1000
            assert last - first + 1 <= per_s * seconds + max(1.0, per_s) + 1e-6


W = WorkflowId("w")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_the_order_of_members_does_not_matter(body: dict[str, Any]) -> None:
    assert fingerprint(W, body) == fingerprint(W, dict(reversed(body.items())))


@given(JSON, JSON)
def test_equal_values_have_equal_prints_and_unequal_ones_do_not(
    one: JsonValue, other: JsonValue
) -> None:
    assert (fingerprint(W, one) == fingerprint(W, other)) == _same(one, other)


def _same(one: JsonValue, other: JsonValue) -> bool:
    """Equal as JSON: unlike in Python, true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return bool(one == other)


def test_one_and_one_point_zero_are_the_same_number() -> None:
    assert fingerprint(W, {"n": 1}) == fingerprint(W, {"n": 1.0})
    assert fingerprint(W, {"n": [-0.0]}) == fingerprint(W, {"n": [0]})


def test_huge_numbers_have_prints_too() -> None:
    assert fingerprint(W, 1e300) != fingerprint(W, 1e301)
    assert fingerprint(W, 2.0**53) == fingerprint(W, 2**53)
    assert fingerprint(W, -(2.0**53)) == fingerprint(W, -(2**53))
    assert fingerprint(W, 2.0**60) == fingerprint(W, 2.0**60)


def test_the_workflow_is_part_of_the_print() -> None:
    assert fingerprint(W, {}) != fingerprint(WorkflowId("v"), {})


def test_a_print_stays_what_it_is() -> None:
    # Prints are stored for a day and longer: another release must find the same ones.
    assert (
        fingerprint(W, {"input": {"a": [1, 2.5, None, True, "é"]}})
        == "1c17102be3f29aab41c4fb898c91912c12e6391bd2759cf69dfc3fa32031741b"
    )


# ── Processor time ───────────────────────────────────────────────────────────────────────────────

QUARTER = WorkAllowance(share=0.25, burst_s=2.0)


def test_a_bucket_is_overdrawn_only_after_its_burst() -> None:
    full_at_ms = QUARTER.after(0.0, 2.0, now_ms=1_000)
    assert full_at_ms == 1_000 + 8_000
    assert QUARTER.wait_ms(full_at_ms, now_ms=1_000) == 0
    full_at_ms = QUARTER.after(full_at_ms, 0.1, now_ms=1_000)
    assert QUARTER.wait_ms(full_at_ms, now_ms=1_000) == 400
    assert QUARTER.wait_ms(full_at_ms, now_ms=1_400) == 0


def test_no_debt_means_a_longer_wait_than_is_allowed() -> None:
    full_at_ms = QUARTER.after(0.0, 10_000, now_ms=50)
    assert QUARTER.wait_ms(full_at_ms, now_ms=50) == 30_000


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 5_000)), max_size=50))
def test_over_any_time_a_tenant_gets_its_share_and_its_burst(
    asked: list[tuple[float, float]],
) -> None:
    full_at_ms = now_ms = spent_s = 0.0
    for seconds, pause_ms in asked:
        now_ms += pause_ms
        if not QUARTER.wait_ms(full_at_ms, now_ms=now_ms):
            full_at_ms = QUARTER.after(full_at_ms, seconds, now_ms=now_ms)
            spent_s += seconds
    # What was allowed to begin is finished: one piece of work may be over.
    assert spent_s <= 2.0 + now_ms / 1000 * 0.25 + 1.0 + 1e-6


def test_a_request_without_new_members_has_the_fingerprint_that_older_versions_gave_it() -> None:
    # A retry that crosses an upgrade must find its key. These are the values of version 0.1.
    start = fingerprint(W, {"input": {"n": 1}})
    assert W == "w"
    assert start == "b560db72dcb6c1e0472584d17d82395f338acfc21de87e1a683c0c7c08e5af77"
    again = fingerprint(WorkflowId("rerun/r"), RerunOptions().fingerprinted())
    assert again == "bd67bab423c66ecad70ba80a9c78216d888b295f15170d8662ca7e3a3ab01b52"
