"""The server's clock, as far as it can be known: a deadline made from it is never late."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from stanchion.adapters.redis.node import ServerClock

_DELAYS_S = st.floats(0, 3)


class _Look(NamedTuple):
    before_s: float
    """Time since the look before."""
    there_s: float
    back_s: float


_LOOKS = st.lists(st.builds(_Look, st.floats(0, 60), _DELAYS_S, _DELAYS_S), min_size=1, max_size=8)


def _looked(looks: list[_Look], offset_s: float, drift: float) -> tuple[ServerClock, float]:
    """A clock after some looks at a server, and the local time after the last one."""
    clock, local = ServerClock(), 1_000.0
    for look in looks:
        sent = local + look.before_s
        read_at = sent + look.there_s
        local = read_at + look.back_s
        clock.observe(round(_server_s(read_at, offset_s, drift) * 1e6), sent, local)
    return clock, local


def _server_s(local: float, offset_s: float, drift: float) -> float:
    return local * (1 + drift) + offset_s


@given(_LOOKS, st.floats(0, 2e9), st.floats(-0.0002, 0.0002), st.floats(0, 600))
def test_the_estimate_is_never_ahead_of_the_server(
    looks: list[_Look], offset_s: float, drift: float, later_s: float
) -> None:
    clock, local = _looked(looks, offset_s, drift)
    at = local + later_s
    assert clock.instant(at) <= _server_s(at, offset_s, drift) * 1000 + 0.01


@given(_LOOKS, st.floats(0, 2e9))
def test_the_estimate_is_behind_by_no_more_than_the_quickest_answer_took(
    looks: list[_Look], offset_s: float
) -> None:
    clock, local = _looked(looks, offset_s, 0.0)
    quickest_s = min(look.there_s + look.back_s for look in looks)
    since_s = sum(look.before_s + look.there_s + look.back_s for look in looks)
    behind_ms = _server_s(local, offset_s, 0.0) * 1000 - clock.instant(local)
    # A millisecond for cutting, and what clocks may have drifted apart since the quickest answer.
    assert behind_ms <= quickest_s * 1000 + since_s * 2 * 0.5 + 1.1


@given(st.floats(0, 2e9), st.floats(1, 1e6), st.booleans())
def test_a_clock_that_was_set_is_believed_at_once(
    offset_s: float, step_s: float, forward: bool
) -> None:
    clock, local = _looked([_Look(0, 0.001, 0.001)], offset_s, 0.0)
    moved_s = offset_s + (step_s if forward else -step_s)
    clock.observe(round((local + moved_s) * 1e6), local - 0.001, local)
    assert -0.01 <= (local + moved_s) * 1000 - clock.instant(local) <= 2.2


def test_nothing_is_known_before_the_first_look() -> None:
    clock = ServerClock()
    known = [clock.is_known]
    clock.observe(5_000_000, 1.0, 1.25)
    known.append(clock.is_known)
    assert known == [False, True]
    assert clock.age_s(2.5) == 1.25
