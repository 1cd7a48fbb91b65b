"""Budgets: windows by the clock, and tallies that always equal the sum over the runs."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stanchion.core.admission import Facts, Full, judge
from stanchion.core.budget import (
    BudgetLimit,
    BudgetTally,
    BudgetWindow,
    OverBudget,
    Reservation,
    charge,
    merge_usage,
    new_usage,
    over_budget,
    reserve,
    rolled,
    settle,
    standing_of,
    window_end,
    window_start,
)
from stanchion.core.model import Instant, RunId, StepId, WorkflowId
from stanchion.core.plan import Plan, link
from stanchion.core.workflow import DelaySpec, StepSpec, SubworkflowSpec, Workflow


def _at(text: str) -> Instant:
    return Instant(int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000))


@pytest.mark.parametrize(
    ("window", "now", "start", "end"),
    [
        ("hour", "2026-11-16T10:59:59.999", "2026-11-16T10:00", "2026-11-16T11:00"),
        ("hour", "2026-11-16T11:00:00", "2026-11-16T11:00", "2026-11-16T12:00"),
        ("day", "2026-10-25T00:00:00", "2026-10-25T00:00", "2026-10-26T00:00"),
        ("day", "2026-12-31T23:59:59", "2026-12-31T00:00", "2027-01-01T00:00"),
        ("month", "2024-02-29T12:00:00", "2024-02-01T00:00", "2024-03-01T00:00"),
        ("month", "2100-02-28T23:59:59", "2100-02-01T00:00", "2100-03-01T00:00"),
        ("month", "2026-12-01T00:00:00", "2026-12-01T00:00", "2027-01-01T00:00"),
    ],
)
def test_windows_begin_and_end_in_utc(window: str, now: str, start: str, end: str) -> None:
    kind = BudgetWindow(window)
    assert window_start(kind, _at(now)) == _at(start)
    assert window_end(kind, _at(start)) == _at(end)
    # The end belongs to the next window.
    assert window_start(kind, _at(end)) == _at(end)


def test_a_total_never_ends() -> None:
    tally = rolled(None, BudgetWindow.TOTAL, Instant(5))
    assert tally == BudgetTally(BudgetWindow.TOTAL, Instant(0), 1)
    assert rolled(tally, BudgetWindow.TOTAL, Instant(10**14)) is tally
    assert window_end(BudgetWindow.TOTAL, tally.start) is None


def test_a_window_rolls_once_and_not_back() -> None:
    hour = BudgetWindow.HOUR
    first = BudgetTally(hour, _at("2026-11-16T10:00"), 3, used=5, held=7)
    assert rolled(first, hour, _at("2026-11-16T10:59:59.999")) is first
    second = rolled(first, hour, _at("2026-11-16T11:00"))
    assert second == BudgetTally(hour, _at("2026-11-16T11:00"), 4)
    # A clock that is set back a little stays in the window; one that was far ahead is corrected.
    assert rolled(second, hour, _at("2026-11-16T10:30")) is second
    assert rolled(second, hour, _at("2026-11-16T09:30")).start == _at("2026-11-16T09:00")
    assert rolled(second, hour, _at("2026-11-16T09:30")).generation == 5
    assert rolled(second, BudgetWindow.DAY, _at("2026-11-16T11:00")) == BudgetTally(
        BudgetWindow.DAY, _at("2026-11-16T00:00"), 5
    )


def test_a_budget_is_judged_before_the_cap() -> None:
    over = OverBudget("tokens", 10, 5, 5, None, 1)
    facts = Facts(
        run_id=RunId("r"),
        now=Instant(0),
        not_after=Instant(0),
        over_budget=over,
        limit=0,
    )
    assert judge(facts) == over
    assert isinstance(
        judge(Facts(run_id=RunId("r"), now=Instant(0), not_after=Instant(0), limit=0)), Full
    )


@pytest.mark.parametrize(
    ("used", "reserved", "asked", "resets_in_ms", "can_wait"),
    [
        (50, 50, 50, None, True),  # others may end and return what they hold
        (51, 49, 50, None, False),  # it is used up for ever
        (51, 49, 50, 30_000, True),  # the window ends
        (51, 49, 50, 30_001, False),
        (0, 0, 101, 1, False),  # it never fits
    ],
)
def test_a_caller_waits_only_if_that_can_help(
    *, used: int, reserved: int, asked: int, resets_in_ms: int | None, can_wait: bool
) -> None:
    now = Instant(1_000_000)
    resets_at = None if resets_in_ms is None else Instant(now + resets_in_ms)
    over = OverBudget("tokens", 100, used, reserved, resets_at, asked)
    assert over.can_end_within(30_000, now) is can_wait


_amounts = st.integers(0, 40)
_steps = st.lists(
    st.tuples(
        st.sampled_from(["start", "report", "lease", "end", "roll"]), st.integers(0, 5), _amounts
    ),
    max_size=60,
)


@given(_steps)
def test_a_tally_is_the_sum_over_the_runs_of_its_window(
    steps: list[tuple[str, int, int]],
) -> None:
    limit, now = BudgetLimit(100, BudgetWindow.HOUR), Instant(0)
    tally = rolled(None, limit.window, now)
    runs: list[Reservation] = []
    ended: list[bool] = []
    told: list[dict[str, int]] = []
    for what, which, amount in steps:
        tally = rolled(tally, limit.window, now)
        at = which % len(runs) if runs else 0
        if what == "start":
            over = over_budget({"tokens": limit}, {"tokens": tally}, {"tokens": amount})
            if over is None:
                tally, reservation = reserve(tally, amount)
                runs.append(reservation)
                ended.append(False)
                told.append({})
                assert _committed(tally, runs, ended) <= limit.limit
            else:
                assert _committed(tally, runs, ended) + amount > limit.limit
        elif what == "roll":
            now = Instant(now + 3_600_000)
            continue
        elif not runs or ended[at]:
            continue
        elif what == "report":
            more = new_usage(told[at], {"tokens": amount})
            told[at] = merge_usage(told[at], {"tokens": amount})
            charged, runs[at] = charge(tally, runs[at], more.get("tokens", 0))
            assert charged is not None
            tally = charged
        elif what == "lease":
            told[at] = {}
        else:
            settled = settle(tally, runs[at])
            assert settled is not None
            tally, ended[at] = settled, True
        assert tally.used + tally.held == _committed(tally, runs, ended)
        assert tally.used == sum(run.used for run in runs if run.generation == tally.generation)


def _committed(tally: BudgetTally, runs: list[Reservation], ended: list[bool]) -> int:
    return sum(
        run.used if over else max(run.reserved, run.used)
        for run, over in zip(runs, ended, strict=True)
        if run.generation == tally.generation
    )


def test_what_a_budget_shows() -> None:
    tally = BudgetTally(BudgetWindow.HOUR, Instant(0), 1, used=3, held=4)
    limit = BudgetLimit(9, BudgetWindow.HOUR)
    shown = standing_of(limit, tally, Instant(3_599_999))
    assert (shown.used, shown.reserved, shown.resets_at) == (3, 4, 3_600_000)
    later = standing_of(limit, tally, Instant(3_600_000))
    assert (later.used, later.reserved, later.resets_at) == (0, 0, 7_200_000)


@pytest.mark.parametrize("limit", [-1, 10**15 + 1])
def test_a_limit_is_in_range(limit: int) -> None:
    with pytest.raises(ValueError, match="limit must be from 0"):
        BudgetLimit(limit, BudgetWindow.DAY)


def test_a_run_reserves_what_its_own_file_says_and_not_its_sub_workflows() -> None:
    inner = Workflow(
        id=WorkflowId("inner"), steps={StepId("a"): DelaySpec(delay_s=1)}, budget={"tokens": 5}
    )
    steps: dict[StepId, StepSpec] = {StepId("sub"): SubworkflowSpec(workflow=WorkflowId("inner"))}
    for budget in ({}, {"calls": 3}):
        plan = link(Workflow(id=WorkflowId("outer"), steps=steps, budget=budget), {inner.id: inner})
        assert isinstance(plan, Plan)
        assert plan.budget == budget
