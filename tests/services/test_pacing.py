"""Whoever was refused comes again when it may help, and not together with the others."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from stanchion.adapters.system import ManualClock
from stanchion.core.budget import OverBudget
from stanchion.core.model import Instant, TenantId
from stanchion.services import gate_answers as module
from stanchion.services.gate_answers import Backend, Pacing, full_window_ms, outage_window_ms
from tests.services.seeded import SeededEntropy

ACME = TenantId("acme")
GLOBEX = TenantId("globex")


def made(seed: int = 1) -> tuple[ManualClock, Pacing]:
    clock = ManualClock()
    return clock, Pacing(clock, SeededEntropy(seed))


def after(clock: ManualClock, pacing: Pacing, *gaps_ms: int, tenant: TenantId = ACME) -> None:
    """Runs of the tenant end, so far apart."""
    pacing.finished(tenant, clock.now())
    for gap_ms in gaps_ms:
        clock.advance(gap_ms)
        pacing.finished(tenant, clock.now())


# ── Full tenants ─────────────────────────────────────────────────────────────────────────────────


@given(st.floats(0, 1e9), st.integers(0, 10**12), st.integers(0, 10**9))
def test_a_window_lies_within_the_bounds_and_is_wide(
    gap_ms: float, since_end_ms: int, ahead: int
) -> None:
    low, high = full_window_ms(gap_ms=gap_ms, since_end_ms=since_end_ms, ahead=ahead)
    assert 1_000 <= low <= high - 1_000
    assert high <= 30_000


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(0, 1_000))
def test_rarer_ends_never_mean_an_earlier_return(one: float, other: float, ahead: int) -> None:
    low, high = sorted((one, other))
    soon = full_window_ms(gap_ms=low, since_end_ms=0, ahead=ahead)
    late = full_window_ms(gap_ms=high, since_end_ms=0, ahead=ahead)
    assert soon <= late
    assert soon[1] <= late[1]


def test_a_hundred_who_were_refused_together_do_not_come_back_together() -> None:
    for gaps_ms in ((), (5,), (500, 500), (20_000, 20_000), (10**7,)):
        clock, pacing = made()
        after(clock, pacing, *gaps_ms)
        told = [pacing.full(ACME) for _ in range(100)]
        assert len(set(told)) >= 20
        assert min(told) >= 1_000
        assert max(told) <= 30_000


def test_callers_are_asked_back_at_the_rate_at_which_slots_free() -> None:
    clock, pacing = made()
    after(clock, pacing, 4_000, 4_000, 4_000)
    assert 2_000 <= pacing.full(ACME) <= 4_000
    fast_clock, fast = made()
    after(fast_clock, fast, 100, 100, 100)
    assert 1_000 <= fast.full(ACME) <= 2_000


def test_each_further_caller_since_the_last_end_may_be_asked_to_wait_longer() -> None:
    clock, pacing = made()
    after(clock, pacing, 1_000, 1_000)
    first = [pacing.full(ACME) for _ in range(5)]
    for _ in range(50):
        pacing.full(ACME)
    later = [pacing.full(ACME) for _ in range(30)]
    assert max(first) <= 5_000
    assert max(later) > 15_000
    pacing.finished(ACME, clock.now())
    assert pacing.full(ACME) <= 2_000


def test_one_odd_gap_does_not_turn_the_estimate_over() -> None:
    clock, pacing = made()
    after(clock, pacing, *[1_000] * 10, 11_000)
    # 0.7 · 1 s + 0.3 · 11 s
    assert 2_000 <= pacing.full(ACME) <= 4_000


def test_a_tenant_whose_runs_stopped_ending_is_waited_for_longer() -> None:
    clock, pacing = made()
    after(clock, pacing, 1_000, 1_000)
    clock.advance(20_000)
    assert 10_000 <= pacing.full(ACME) <= 20_000
    clock.advance(3_600_000)
    assert 15_000 <= pacing.full(ACME) <= 30_000


def test_one_tenants_ends_say_nothing_about_anothers() -> None:
    clock, pacing = made()
    after(clock, pacing, 30_000, 30_000)
    pacing.finished(GLOBEX, clock.now())
    assert pacing.full(ACME) >= 15_000
    assert pacing.full(GLOBEX) <= 2_000


def test_a_clock_that_was_set_back_does_no_harm() -> None:
    clock, pacing = made()
    after(clock, pacing, 20_000, 20_000)
    clock.step(-1_000_000_000)
    pacing.finished(ACME, clock.now())
    # A gap of nothing, as far as anybody can tell: 0.7 · 20 s
    assert 7_000 <= pacing.full(ACME) <= 14_000
    clock.step(1_000_000_000)
    assert 15_000 <= pacing.full(ACME) <= 30_000


def test_tenants_nobody_has_heard_of_for_long_are_forgotten() -> None:
    clock, pacing = made()
    after(clock, pacing, 60_000)
    others = [TenantId(f"tenant-{number}") for number in range(module.TENANTS_MAX)]
    for tenant in others[:-1]:
        pacing.full(tenant)
    assert pacing.full(ACME) >= 15_000
    pacing.full(others[-1])  # one too many, but this one was just here
    assert pacing.full(ACME) >= 15_000
    for tenant in others:
        pacing.finished(tenant, clock.now())
    assert pacing.full(ACME) <= 2_000
    assert len(pacing._ends) == module.TENANTS_MAX  # noqa: SLF001 - that it is bounded shows nowhere else


# ── Outages ──────────────────────────────────────────────────────────────────────────────────────


def test_the_wait_grows_while_an_outage_lasts_and_stays_within_its_bounds() -> None:
    windows = [outage_window_ms(lasted_ms=lasted_ms) for lasted_ms in range(0, 60_000, 500)]
    assert windows[0] == (1_000, 2_000)
    assert windows[-1] == (5_000, 10_000)
    assert all(before <= after for before, after in pairwise(windows))
    assert all(1_000 <= low < high <= 10_000 for low, high in windows)


def test_those_who_meet_an_outage_together_do_not_come_back_together() -> None:
    _, pacing = made()
    assert len({pacing.away(Backend.STORE) for _ in range(100)}) >= 20


def test_a_success_ends_an_outage_and_each_backend_has_its_own() -> None:
    clock, pacing = made()
    for backend in Backend:
        pacing.away(backend)
    for _ in range(20):
        clock.advance(1_000)
        for backend in Backend:
            pacing.away(backend)
    pacing.answered(Backend.STORE)
    assert pacing.away(Backend.STORE) <= 2_000
    assert pacing.away(Backend.LOCKS) >= 5_000


def test_a_failure_long_after_the_last_one_is_a_new_outage() -> None:
    clock, pacing = made()
    pacing.away(Backend.STORE)
    clock.advance(31_000)
    assert pacing.away(Backend.STORE) <= 2_000


def test_a_busy_gate_is_asked_again_soon() -> None:
    _, pacing = made()
    told = [pacing.busy() for _ in range(100)]
    assert len(set(told)) >= 20
    assert min(told) >= 1_000
    assert max(told) <= 3_000


def test_a_quiet_night_is_forgotten_after_a_few_ends() -> None:
    clock = ManualClock()
    pacing = Pacing(clock=clock, entropy=SeededEntropy(1))
    tenant = TenantId("acme")
    for pause_ms in (2_000, 2_000, 8 * 3_600_000, *[2_000] * 6):
        clock.advance(pause_ms)
        pacing.finished(tenant, clock.now())
    assert pacing.full(tenant) < 6_000


# ── Budgets ──────────────────────────────────────────────────────────────────────────────────────


def test_a_caller_over_a_budget_comes_back_when_its_window_ends() -> None:
    clock, pacing = made()
    soon = OverBudget("tokens", 100, 90, 0, Instant(clock.now() + 5_000), 20)
    told = [pacing.over_budget(ACME, soon) for _ in range(100)]
    assert all(each.can_wait and 5_000 <= each.retry_after_ms <= 6_000 for each in told)
    assert len({each.retry_after_ms for each in told}) > 50
    clock.advance(10_000)  # this replica's clock is ahead of the store's
    assert pacing.over_budget(ACME, soon).retry_after_ms in range(1_000, 2_001)


def test_a_caller_over_a_budget_does_not_come_back_for_nothing() -> None:
    clock, pacing = made()
    for resets_at, asked in ((None, 20), (Instant(clock.now() + 30_001), 20), (clock.now(), 101)):
        told = pacing.over_budget(ACME, OverBudget("tokens", 100, 90, 0, resets_at, asked))
        assert not told.can_wait
        assert told.retry_after_ms <= 30_000


def test_a_caller_waits_for_runs_that_hold_a_budget_as_for_a_slot() -> None:
    clock, pacing = made()
    after(clock, pacing, *[2_000] * 20)
    told = pacing.over_budget(ACME, OverBudget("tokens", 100, 0, 90, None, 20))
    assert told.can_wait
    assert told.retry_after_ms in range(1_000, 4_001)
