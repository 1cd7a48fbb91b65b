"""Escalation: closes risk classes that fail open, once failing open causes duplicate writes.

Failing open assumes that two replicas seldom work on the same run while the lock store is down.
This state machine detects when that no longer holds. Its input are two counters of the replica:
how often it proceeded without a lock (fallbacks), and how often two writers collided (duplicates).

    NORMAL ──trip──▶ ESCALATED ──quiet for the dwell time, and probes succeed──▶ NORMAL
                         └─────one trip too many in a day──▶ LATCHED ──operator──▶ NORMAL

* A trip needs both: a fallback rate above the threshold over the window and below it in no slice,
  *and* more duplicates than in the window before. An outage without collisions does not trip.
* While escalated, the classes in ``closes`` fail closed. That stops the counters that had risen, so
  low counts alone do not end it: the lock store must answer probes as well.
* Replicas announce their level to each other. The strictest one applies, and expires when its
  sender stops announcing. A replica announces only its own level: if it repeated what it heard, the
  replicas would keep each other escalated for ever.

Time is divided into slices, a fifth of the window each. Only complete slices count, so the state
has a fixed size and the same history always gives the same result. Counts are added to the slice in
which they are reported, so report fallbacks and duplicates as they happen: a slice may last 0.2 s.
In between call ``observe`` every few seconds. It evaluates every slice that ended since the last
call, so how often it is called does not change the verdict.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Annotated, Final, assert_never

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from stanchion.core.faults import Faults, fault_unless
from stanchion.core.model import Instant, Risk
from stanchion.core.ranges import range_faults

ANNOUNCEMENT_LAPSES_MS: Final = 30_000
PEERS_MAX: Final = 256
"""Announcements that are kept, one per replica: the strictest first, then the newest."""

_WINDOW_SLICES: Final = 5
_SLICES_KEPT: Final = 2 * _WINDOW_SLICES + 1  # this window, the one before, and the running slice
_UNSEEN_MS_MAX: Final = 15_000
"""The longest time between two observations; a slice, if that is longer.

Above two seconds and the time-outs of the calls that a replica makes between two of them. In a
longer gap the process may have been suspended, and its counts say nothing.
"""
_DAY_MS: Final = 24 * 60 * 60 * 1_000
_DAY_S: Final = 24 * 60 * 60


def observe(
    settings: Escalation, state: EscalationState, seen: Observation, now: Instant
) -> EscalationState:
    """The state after adding ``seen``, the counts since the last observation."""
    state, is_bet_lost = _sliced(settings, _clocked(state, now))
    state = _counted(settings, state, seen)
    match state.level:
        case Level.NORMAL:
            return _tripped(settings, state) if is_bet_lost else state
        case Level.ESCALATED:
            return _recovered(state) if _is_well_again(settings, state) else state
        case Level.LATCHED:
            return state
        case _:
            assert_never(state.level)


def level_at(state: EscalationState, now: Instant) -> Level:
    """The level in force: the operator's order, else the strictest of all replicas' levels."""
    if state.forced is Order.FORCE_OPEN:
        return Level.NORMAL
    return max((_own_view(state), *(peer.said.level for peer in _live(_clocked(state, now)))))


def obey(state: EscalationState, order: Order, now: Instant) -> EscalationState:
    """The state after an order: an operator's, or the latch that the store keeps."""
    match order:
        case Order.FORCE_OPEN | Order.FORCE_CLOSED:
            return replace(state, forced=order)
        case Order.LATCH:
            return replace(state, level=Level.LATCHED)
        case Order.CLEAR:
            # Discard the counts: another trip takes a complete new window.
            fresh = _clocked(state, now)
            return EscalationState(state.replica, fresh.clock, fresh.skew_ms)
        case _:
            assert_never(order)


def end_order(state: EscalationState) -> EscalationState:
    """The state when the time of a forced level is over: the level follows the counts again."""
    return replace(state, forced=None)


def announcement(state: EscalationState, now: Instant) -> Announcement:
    """The announcement for the other replicas: this replica's own level, not what it heard."""
    return Announcement(state.replica, _own_view(state), now)


def hear(state: EscalationState, said: Announcement, now: Instant) -> EscalationState:
    """Record the level of another replica, with the local time of receipt: clocks differ."""
    state = _clocked(state, now)
    peers = _live(state)
    # The same level from an earlier time was not overtaken: the replica's clock stepped back.
    overtaken = any(
        p.said.replica == said.replica and p.said.at > said.at and p.said.level is not said.level
        for p in peers
    )
    if said.replica == state.replica or overtaken:
        return state
    others = (peer for peer in peers if peer.said.replica != said.replica)
    strictest = sorted((*others, Heard(said, state.clock)), key=_strictness, reverse=True)
    return replace(state, peers=tuple(strictest[:PEERS_MAX]))


# ── Values ───────────────────────────────────────────────────────────────────────────────────────


class Level(IntEnum):
    """How strict a replica is. The numbers are those of the metric."""

    NORMAL = 0
    ESCALATED = 1
    LATCHED = 2
    """As strict as ``ESCALATED``; only an operator can end it."""


class Order(StrEnum):
    """Orders that override the state machine."""

    FORCE_OPEN = "force_open"
    FORCE_CLOSED = "force_closed"
    LATCH = "latch"
    CLEAR = "clear"
    """Ends a forced level and a latch, and discards the counts and trips."""


class Escalation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Thresholds: when to escalate, which classes to close, when to recover."""

    fallbacks_per_s: Annotated[float, Meta(ge=0.001, le=1_000_000)] = 0.1
    window_s: Annotated[float, Meta(ge=1, le=_DAY_S)] = 300
    closes: tuple[Risk, ...] = (Risk.HIGH, Risk.STANDARD)
    dwell_s: Annotated[float, Meta(ge=0, le=_DAY_S)] = 600
    quiet_divisor: Annotated[int, Meta(ge=1, le=1_000)] = 5
    """Recovery needs a rate below the threshold divided by this (hysteresis)."""
    probes_min: Annotated[int, Meta(ge=0, le=1_000)] = 3
    trips_per_day_max: Annotated[int, Meta(ge=0, le=1_000)] = 2

    @property
    def slice_ms(self) -> int:
        return round(self.window_s * 1_000) // _WINDOW_SLICES


class Observation(msgspec.Struct, frozen=True):
    """Counts since the last observation."""

    fallbacks: int = 0
    duplicates: int = 0
    """Commit conflicts, repeated completions and repeated publishes."""
    probes_ok: int = 0
    """Successful answers of the lock store, to probes or to lock requests."""
    probes_failed: int = 0


class Announcement(msgspec.Struct, frozen=True):
    """The level of one replica, with the time on its clock."""

    replica: str
    level: Level
    at: Instant

    @property
    def latched(self) -> bool:
        return self.level is Level.LATCHED


class Heard(msgspec.Struct, frozen=True):
    """An announcement and the local time of its receipt."""

    said: Announcement
    heard_at: Instant


class Slice(msgspec.Struct, frozen=True):
    """The counts of one slice of time."""

    fallbacks: int = 0
    duplicates: int = 0


class EscalationState(msgspec.Struct, frozen=True):
    """The state of a replica: two windows of slices, the trips of a day, its peers' levels."""

    replica: str
    clock: Instant
    """The latest time, on a timeline that never steps back."""
    skew_ms: int = 0
    """How far that timeline is ahead of the wall clock."""
    level: Level = Level.NORMAL
    """The level that this replica's own counts led to."""
    forced: Order | None = None
    slice_ms: int = 0
    slice_no: int = 0
    slices: tuple[Slice, ...] = (Slice(),)
    """Oldest first; the last one is not complete."""
    observed_at: Instant = Instant(0)
    quiet_since: Instant = Instant(0)
    probes_ok: int = 0
    """Successful probes since then."""
    trips: tuple[Instant, ...] = ()
    peers: tuple[Heard, ...] = ()


class EscalationCounts(msgspec.Struct, frozen=True):
    """What a replica has counted, in the terms of the rules for a trip and for its end."""

    fallbacks_per_s: float
    """Over the complete slices of the window."""
    slices_at_threshold: int
    """Complete slices of the window whose own rate is not below the threshold."""
    duplicates: int
    duplicates_before: int
    """In the window before. A trip needs more than these."""
    fallbacks_running: int
    """In the slice that is not complete, which does not count yet."""
    duplicates_running: int
    quiet_ms: int
    """Since when the rate has been low, without duplicates and failed probes."""
    probes_ok: int
    """Successful answers of the lock store since then."""


def begin(replica: str, now: Instant, *, latched: bool = False) -> EscalationState:
    """The initial state. ``latched``: whether the store holds a latch from before the start."""
    level = Level.LATCHED if latched else Level.NORMAL
    return EscalationState(replica, now, level=level)


def faults(settings: Escalation) -> Faults:
    """All faults of the settings; empty if they are valid."""
    return (
        *range_faults(settings),
        *fault_unless(
            len(set(settings.closes)) == len(settings.closes), "closes", "names a class twice"
        ),
    )


def counts_of(
    settings: Escalation, state: EscalationState, unseen: Observation, now: Instant
) -> EscalationCounts:
    """The counts that decide on a trip. ``unseen`` was counted since the last observation."""
    state, _ = _sliced(settings, _clocked(state, now))
    window, before = _windows(state.slices[:-1])
    counted = sum(part.fallbacks for part in window)
    return EscalationCounts(
        fallbacks_per_s=_per_s(settings, counted, slices=_WINDOW_SLICES),
        slices_at_threshold=sum(_is_at_threshold(settings, part) for part in window),
        duplicates=sum(part.duplicates for part in window),
        duplicates_before=sum(part.duplicates for part in before),
        fallbacks_running=state.slices[-1].fallbacks + unseen.fallbacks,
        duplicates_running=state.slices[-1].duplicates + unseen.duplicates,
        quiet_ms=max(0, state.clock - state.quiet_since) if state.quiet_since else 0,
        probes_ok=state.probes_ok + unseen.probes_ok,
    )


def trips_of_day(state: EscalationState) -> tuple[Instant, ...]:
    """The trips of the last day, as of the last observation."""
    return tuple(trip for trip in state.trips if state.clock - trip < _DAY_MS)


# ── Time ─────────────────────────────────────────────────────────────────────────────────────────


def _clocked(state: EscalationState, now: Instant) -> EscalationState:
    # A wall clock may step back by an hour. The timeline continues from its last value: waiting for
    # the clock to catch up would disable detection for that hour.
    behind_ms = max(0, state.clock - (now + state.skew_ms))
    skew_ms = state.skew_ms + behind_ms
    return replace(state, clock=Instant(now + skew_ms), skew_ms=skew_ms)


def _sliced(settings: Escalation, state: EscalationState) -> tuple[EscalationState, bool]:
    """The state with the slices up to now, and whether any window that ended on the way trips."""
    slice_no = state.clock // settings.slice_ms
    if state.slice_ms != settings.slice_ms:
        # The slice length changed: counts per old slice and per new slice are not comparable.
        fresh = replace(state, slice_ms=settings.slice_ms, slice_no=slice_no, slices=(Slice(),))
        return fresh, False
    # After a gap only the slices that are kept are created, so a long gap costs no extra time.
    passed = min(slice_no - state.slice_no, _SLICES_KEPT)
    slices, has_tripped, was_seen = state.slices, False, _is_seen(settings, state)
    for left in reversed(range(passed)):
        slices = (*slices, Slice())[-_SLICES_KEPT:]
        # A gap without observations is no evidence: only the window before now counts.
        if was_seen or left == 0:
            has_tripped = has_tripped or _trips(settings, slices[:-1])
    return replace(state, slice_no=slice_no, slices=slices), has_tripped


def _is_seen(settings: Escalation, state: EscalationState) -> bool:
    """Whether the time since the last observation was short enough to know what happened in it."""
    return state.clock - state.observed_at <= max(settings.slice_ms, _UNSEEN_MS_MAX)


def _counted(settings: Escalation, state: EscalationState, seen: Observation) -> EscalationState:
    running = Slice(
        state.slices[-1].fallbacks + seen.fallbacks, state.slices[-1].duplicates + seen.duplicates
    )
    quiet = (
        seen.duplicates == 0
        and seen.probes_failed == 0
        and _per_s(settings, running.fallbacks * settings.quiet_divisor) < settings.fallbacks_per_s
        and _is_seen(settings, state)
    )
    return replace(
        state,
        slices=(*state.slices[:-1], running),
        observed_at=state.clock,
        quiet_since=state.quiet_since if quiet else state.clock,
        probes_ok=state.probes_ok + seen.probes_ok if quiet else 0,
    )


def _per_s(settings: Escalation, count: int, *, slices: int = 1) -> float:
    # A single division, so that a count exactly at the threshold compares equal to it.
    return count * 1_000 / (settings.slice_ms * slices)


# ── Verdicts ─────────────────────────────────────────────────────────────────────────────────────


def _trips(settings: Escalation, complete: tuple[Slice, ...]) -> bool:
    """Whether the complete slices, oldest first, trip."""
    window, before = _windows(complete)
    # The window is above the threshold and no slice is below it. Requiring every slice to be above
    # would miss a steady rate that exceeds the threshold by less than one fallback per slice.
    sustained = (
        len(window) == _WINDOW_SLICES
        and all(_is_at_threshold(settings, part) for part in window)
        and _per_s(settings, sum(part.fallbacks for part in window), slices=_WINDOW_SLICES)
        > settings.fallbacks_per_s
    )
    rising = sum(part.duplicates for part in window) > sum(part.duplicates for part in before)
    return sustained and rising


def _windows(complete: tuple[Slice, ...]) -> tuple[tuple[Slice, ...], tuple[Slice, ...]]:
    """Of the complete slices those of the window, and those of the window before."""
    return complete[-_WINDOW_SLICES:], complete[:-_WINDOW_SLICES]


def _is_at_threshold(settings: Escalation, part: Slice) -> bool:
    return _per_s(settings, part.fallbacks) >= settings.fallbacks_per_s


def _tripped(settings: Escalation, state: EscalationState) -> EscalationState:
    today = (*trips_of_day(state), state.clock)
    latches = len(today) > settings.trips_per_day_max
    return replace(
        state,
        level=Level.LATCHED if latches else Level.ESCALATED,
        trips=today,
        quiet_since=state.clock,
        probes_ok=0,
    )


def _is_well_again(settings: Escalation, state: EscalationState) -> bool:
    dwelt_ms = state.clock - state.quiet_since
    return dwelt_ms >= settings.dwell_s * 1_000 and state.probes_ok >= settings.probes_min


def _recovered(state: EscalationState) -> EscalationState:
    # Discard the counts: with a dwell time shorter than the window they would trip a second time.
    return replace(state, level=Level.NORMAL, slices=(Slice(),))


def _own_view(state: EscalationState) -> Level:
    match state.forced:
        case Order.FORCE_OPEN:
            return Level.NORMAL
        case Order.FORCE_CLOSED:
            return max(state.level, Level.ESCALATED)
        case _:
            return state.level


def _live(state: EscalationState) -> tuple[Heard, ...]:
    return tuple(p for p in state.peers if state.clock - p.heard_at < ANNOUNCEMENT_LAPSES_MS)


def _strictness(heard: Heard) -> tuple[Level, Instant, str]:
    return heard.said.level, heard.heard_at, heard.said.replica
