"""Admission figures: the rolling minute, sums over replicas, percentiles, and who is worst."""

from __future__ import annotations

import pytest

from stanchion.core.model import Instant, TenantId
from stanchion.core.pressure import (
    MINUTE_WINDOWS,
    WAIT_BOUNDS_MS,
    GateFigures,
    GateWindow,
    TenantPressure,
    added,
    last_minute,
    percentile_ms,
    pressure_order,
    together,
)

NOTHING = (0,) * len(WAIT_BOUNDS_MS)


def waits(**counts: int) -> tuple[int, ...]:
    found = [0] * len(WAIT_BOUNDS_MS)
    for name, count in counts.items():
        found[WAIT_BOUNDS_MS.index(int(name.removeprefix("ms")))] = count
    return tuple(found)


def test_the_minute_is_the_last_twelve_windows() -> None:
    windows = [GateWindow(number, admitted=1, full=2, unavailable=3) for number in range(20)]
    figures = last_minute(windows, 15)
    count = MINUTE_WINDOWS
    assert (figures.admitted, figures.full, figures.unavailable) == (count, 2 * count, 3 * count)
    assert last_minute(windows, 40) == GateFigures()
    assert last_minute([], 0) == last_minute([GateWindow(1)], 1) == GateFigures()


def test_windows_of_a_clock_that_was_set_back_do_not_count() -> None:
    assert last_minute([GateWindow(99, admitted=5)], 15).admitted == 0


def test_what_the_last_refused_caller_was_told_is_forgotten_with_the_refusals() -> None:
    told = (1_500, Instant(7))
    refused = last_minute([GateWindow(1, full=1)], 2, told=told)
    assert (refused.retry_after_ms, refused.refused_at) == told
    assert last_minute([GateWindow(1, unavailable=1)], 2, told=told).retry_after_ms == 1_500
    assert last_minute([GateWindow(1, admitted=1)], 2, told=told).retry_after_ms is None
    assert last_minute([GateWindow(1, full=1)], 30, told=told).retry_after_ms is None


def test_figures_of_replicas_are_added_and_the_latest_delay_counts() -> None:
    one = GateFigures(1, 2, 3, 1_000, Instant(10), waits(ms1=1, ms5=2))
    two = GateFigures(10, 20, 30, 2_000, Instant(20), waits(ms5=3))
    assert added([one, two]) == GateFigures(11, 22, 33, 2_000, Instant(20), waits(ms1=1, ms5=5))
    assert added([]) == GateFigures()
    # A replica of another version may count in fewer buckets.
    assert added([GateFigures(waits=(1,)), one]).waits == waits(ms1=2, ms5=2)
    a, b = TenantId("a"), TenantId("b")
    assert together([{a: one}, {a: two, b: one}]) == {a: added([one, two]), b: one}


@pytest.mark.parametrize(
    ("counts", "p95"),
    [
        (NOTHING, None),
        (waits(ms1=1), 1),
        (waits(ms1=95, ms200=5), 1),
        (waits(ms1=94, ms200=6), 200),
        (waits(ms5000=1), 5_000),
    ],
)
def test_a_percentile_is_the_bound_of_its_bucket(counts: tuple[int, ...], p95: int | None) -> None:
    assert percentile_ms(counts, 0.95) == p95


def test_waits_are_told_by_these_bounds() -> None:
    bounds = (1, 2, 3, 5, 8, 12, 20, 35, 60, 100, 200, 400, 800, 1_500, 2_500, 5_000)
    for place, bound in enumerate(bounds):
        assert percentile_ms([0] * place + [1], 0.95) == bound


def test_tenants_are_ordered_by_refusals_then_by_slots_in_use() -> None:
    def tenant(
        name: str, limit: int | None, active: int, full: int = 0, unavailable: int = 0
    ) -> TenantPressure:
        figures = GateFigures(full=full, unavailable=unavailable)
        return TenantPressure(tenant=TenantId(name), limit=limit, active=active, figures=figures)

    expected = [
        tenant("stormy", 10, 1, full=5, unavailable=2),
        tenant("refused", None, 0, full=6),
        tenant("closed", 0, 1),
        tenant("full", 2, 2),
        tenant("half", 10, 5),
        tenant("big", None, 100),
        tenant("small", None, 1),
        tenant("idle-a", 10, 0),
        tenant("idle-b", 0, 0),
    ]
    expected.reverse()
    found = [each.tenant for each in sorted(expected, key=pressure_order)]
    # Two with all slots in use: the one with more of them first.
    assert found == [
        *("stormy", "refused", "full", "closed", "half"),
        *("big", "small", "idle-a", "idle-b"),
    ]
