"""Escalation: when failing open has stopped being harmless.

Failing open is a bet that two replicas seldom meet on the same run while the lock store is away.
This is the machine that notices when the bet is being lost. Its evidence is what the replica counts
anyway: how often it went on without a lock (fallbacks), and how often two writers met (duplicates).

    NORMAL ──trip──▶ ESCALATED ──quiet for the dwell time, and probes succeed──▶ NORMAL
                         └─────one trip too many in a day──▶ LATCHED ──operator──▶ NORMAL

* A trip takes both: fallbacks above the threshold in the window, in no part of it below, *and*
  more duplicates than in the window before. An outage without collisions is what failing open is
  for.
* While escalated, the classes in ``closes`` fail closed. That silences the very counters that rose,
  so quiet alone proves nothing: the lock store has to be seen working as well.
* Replicas tell each other what they see. The stricter view wins, and lapses when its author falls
  silent. A replica announces its own view only: an echo would keep everyone closed for ever.

Time is cut into slices, a fifth of the window each. Only complete slices count as evidence, so the
state has a fixed size and the same history always gives the same verdict. Counts belong to the
slice they are reported in: observe a few times a slice.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Final, assert_never

import msgspec
from msgspec.structs import replace

from stanchion.core.lease import LeasePolicy, OnLockError
from stanchion.core.model import Instant, Risk
from stanchion.core.retry import Faults, fault_unless, out_of_range

__all__ = [
    "ANNOUNCEMENT_LAPSES_MS",
    "PEERS_MAX",
    "Announcement",
    "Escalation",
    "EscalationState",
    "Heard",
    "Level",
    "Observation",
    "Order",
    "Slice",
    "announcement",
    "begin",
    "effective_policy",
    "faults",
    "hear",
    "level_at",
    "obey",
    "observe",
]

ANNOUNCEMENT_LAPSES_MS: Final = 30_000
PEERS_MAX: Final = 256
"""Views of so many replicas are kept, the strictest and then the newest first."""

_WINDOW_SLICES: Final = 5
_SLICES_KEPT: Final = 2 * _WINDOW_SLICES + 1  # this window, the one before, and the running slice
_DAY_MS: Final = 24 * 60 * 60 * 1_000
_DAY_S: Final = 24 * 60 * 60


def observe(
    settings: Escalation, state: EscalationState, seen: Observation, now: Instant
) -> EscalationState:
    """What the replica knows after counting ``seen`` since it last observed."""
    state = _sliced(settings, _clocked(state, now))
    state = _counted(settings, state, seen)
    match state.level:
        case Level.NORMAL:
            return _tripped(settings, state) if _is_bet_lost(settings, state) else state
        case Level.ESCALATED:
            return _recovered(state) if _is_well_again(settings, state) else state
        case Level.LATCHED:
            return state
        case _:
            assert_never(state.level)


def level_at(state: EscalationState, now: Instant) -> Level:
    """The level in force: the operator's word, else the strictest of our view and the others'."""
    if state.forced is Order.FORCE_OPEN:
        return Level.NORMAL
    return max((_own_view(state), *(peer.said.level for peer in _live(_clocked(state, now)))))


def effective_policy(
    settings: Escalation, level: Level, risk: Risk, policy: LeasePolicy
) -> LeasePolicy:
    """The policy as it stands at this level: closed classes fail closed, the rest is untouched."""
    if level is Level.NORMAL or risk not in settings.closes:
        return policy
    return replace(policy, on_lock_error=OnLockError.FAIL_CLOSED)


def obey(state: EscalationState, order: Order, now: Instant) -> EscalationState:
    """Carry out an order: an operator's, or the latch that the store keeps for all replicas."""
    match order:
        case Order.FORCE_OPEN | Order.FORCE_CLOSED:
            return replace(state, forced=order)
        case Order.LATCH:
            return replace(state, level=Level.LATCHED)
        case Order.CLEAR:
            # A fresh start: it takes a whole new window of evidence to trip again.
            fresh = _clocked(state, now)
            return EscalationState(state.replica, fresh.clock, fresh.skew_ms)
        case _:
            assert_never(order)


def announcement(state: EscalationState, now: Instant) -> Announcement:
    """What to tell the other replicas: our own view, and nothing we only heard."""
    return Announcement(state.replica, _own_view(state), now)


def hear(state: EscalationState, said: Announcement, now: Instant) -> EscalationState:
    """Take note of another replica's view. It counts from when it was heard: clocks differ."""
    state = _clocked(state, now)
    peers = _live(state)
    overtaken = any(p.said.replica == said.replica and p.said.at > said.at for p in peers)
    if said.replica == state.replica or overtaken:
        return state
    others = (peer for peer in peers if peer.said.replica != said.replica)
    strictest = sorted((*others, Heard(said, state.clock)), key=_strictness, reverse=True)
    return replace(state, peers=tuple(strictest[:PEERS_MAX]))


# ── Values ───────────────────────────────────────────────────────────────────────────────────────


class Level(IntEnum):
    """How strict a replica is. The numbers are the metric's."""

    NORMAL = 0
    ESCALATED = 1
    LATCHED = 2
    """As strict as escalated, and only an operator leads out of it."""


class Order(StrEnum):
    """What may be decided over the machine's head."""

    FORCE_OPEN = "force_open"
    FORCE_CLOSED = "force_closed"
    LATCH = "latch"
    CLEAR = "clear"
    """Ends a force and a latch, and forgets what led there."""


class Escalation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When to close, what to close, and when to open again."""

    fallbacks_per_s: float = 0.1
    window_s: float = 300
    closes: tuple[Risk, ...] = (Risk.HIGH, Risk.STANDARD)
    dwell_s: float = 600
    quiet_divisor: int = 5
    """Quiet is a rate below the threshold divided by this: to open takes more than not to close."""
    probes_min: int = 3
    trips_per_day_max: int = 2

    @property
    def slice_ms(self) -> int:
        return round(self.window_s * 1_000) // _WINDOW_SLICES


class Observation(msgspec.Struct, frozen=True):
    """What was counted since the last observation."""

    fallbacks: int = 0
    duplicates: int = 0
    """Commit conflicts, repeated completions and repeated publishes."""
    probes_ok: int = 0
    """Answers of the lock store, to a probe or to real work."""
    probes_failed: int = 0


class Announcement(msgspec.Struct, frozen=True):
    """One replica's own view, at a time on its own clock."""

    replica: str
    level: Level
    at: Instant

    @property
    def latched(self) -> bool:
        return self.level is Level.LATCHED


class Heard(msgspec.Struct, frozen=True):
    """An announcement, and when it came in."""

    said: Announcement
    heard_at: Instant


class Slice(msgspec.Struct, frozen=True):
    """The counts of one slice of time."""

    fallbacks: int = 0
    duplicates: int = 0


class EscalationState(msgspec.Struct, frozen=True):
    """All that a replica remembers: two windows of slices, a day of trips, and its peers' views."""

    replica: str
    clock: Instant
    """The latest reading, on a time line of our own that never goes back."""
    skew_ms: int = 0
    """How far that line is ahead of the wall clock."""
    level: Level = Level.NORMAL
    """Our own view."""
    forced: Order | None = None
    slice_ms: int = 0
    slice_no: int = 0
    slices: tuple[Slice, ...] = (Slice(),)
    """Oldest first; the last one is still running."""
    observed_at: Instant = Instant(0)
    quiet_since: Instant = Instant(0)
    probes_ok: int = 0
    """Successful probes since then."""
    trips: tuple[Instant, ...] = ()
    peers: tuple[Heard, ...] = ()


def begin(replica: str, now: Instant, *, latched: bool = False) -> EscalationState:
    """A replica that has seen nothing yet. The latch outlives it, in the store."""
    level = Level.LATCHED if latched else Level.NORMAL
    return EscalationState(replica, now, level=level)


def faults(settings: Escalation) -> Faults:
    """Everything that is wrong with the settings; nothing, if they may be used."""
    return (
        *out_of_range("fallbacks_per_s", settings.fallbacks_per_s, 0.001, 1_000_000),
        *out_of_range("window_s", settings.window_s, 1, _DAY_S),
        *out_of_range("dwell_s", settings.dwell_s, 0, _DAY_S),
        *out_of_range("quiet_divisor", settings.quiet_divisor, 1, 1_000),
        *out_of_range("probes_min", settings.probes_min, 0, 1_000),
        *out_of_range("trips_per_day_max", settings.trips_per_day_max, 0, 1_000),
        *fault_unless(
            len(set(settings.closes)) == len(settings.closes), "closes", "names a class twice"
        ),
    )


# ── Time ─────────────────────────────────────────────────────────────────────────────────────────


def _clocked(state: EscalationState, now: Instant) -> EscalationState:
    # A wall clock may step back by an hour. To wait until it has caught up would blind the machine
    # for that hour; instead our own line goes on from where it was.
    behind_ms = max(0, state.clock - (now + state.skew_ms))
    skew_ms = state.skew_ms + behind_ms
    return replace(state, clock=Instant(now + skew_ms), skew_ms=skew_ms)


def _sliced(settings: Escalation, state: EscalationState) -> EscalationState:
    slice_no = state.clock // settings.slice_ms
    if state.slice_ms != settings.slice_ms:
        # New settings: counts per old slice cannot be compared with counts per new slice.
        return replace(state, slice_ms=settings.slice_ms, slice_no=slice_no, slices=(Slice(),))
    # After a long gap only the last few slices matter, so an hour costs no more than a minute.
    passed = min(slice_no - state.slice_no, _SLICES_KEPT)
    slices = (*state.slices, *(Slice() for _ in range(passed)))[-_SLICES_KEPT:]
    return replace(state, slice_no=slice_no, slices=slices)


def _counted(settings: Escalation, state: EscalationState, seen: Observation) -> EscalationState:
    running = Slice(
        state.slices[-1].fallbacks + seen.fallbacks, state.slices[-1].duplicates + seen.duplicates
    )
    quiet = (
        seen.duplicates == 0
        and seen.probes_failed == 0
        and _per_s(settings, running.fallbacks * settings.quiet_divisor) < settings.fallbacks_per_s
        # Nobody looked for a whole slice: that is not quiet, that is unknown.
        and state.clock - state.observed_at <= settings.slice_ms
    )
    return replace(
        state,
        slices=(*state.slices[:-1], running),
        observed_at=state.clock,
        quiet_since=state.quiet_since if quiet else state.clock,
        probes_ok=state.probes_ok + seen.probes_ok if quiet else 0,
    )


def _per_s(settings: Escalation, count: int, *, slices: int = 1) -> float:
    # One division, so that a count exactly at the threshold is found equal to it.
    return count * 1_000 / (settings.slice_ms * slices)


# ── Verdicts ─────────────────────────────────────────────────────────────────────────────────────


def _is_bet_lost(settings: Escalation, state: EscalationState) -> bool:
    complete = state.slices[:-1]
    window, before = complete[-_WINDOW_SLICES:], complete[:-_WINDOW_SLICES]
    # The window as a whole is above the threshold, and no part of it below. To ask that every part
    # is above would let a steady rate pass that is above by less than one fallback a slice.
    sustained = (
        len(window) == _WINDOW_SLICES
        and all(_per_s(settings, part.fallbacks) >= settings.fallbacks_per_s for part in window)
        and _per_s(settings, sum(part.fallbacks for part in window), slices=_WINDOW_SLICES)
        > settings.fallbacks_per_s
    )
    rising = sum(part.duplicates for part in window) > sum(part.duplicates for part in before)
    return sustained and rising


def _tripped(settings: Escalation, state: EscalationState) -> EscalationState:
    today = (*(trip for trip in state.trips if state.clock - trip < _DAY_MS), state.clock)
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
    # Evidence is used once: a dwell time shorter than the window must not trip on the same slices.
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
