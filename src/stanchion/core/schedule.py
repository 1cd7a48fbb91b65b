"""Schedules: which runs are due, and what becomes of those that cannot start.

A schedule has *ticks*: the instants of a cron expression in a time zone, or of a fixed interval.
``decide_ticks`` decides on those that are due. Each tick ends as one run, or on the list of missed
ticks with a reason. The store raises the ``TickMark`` of a schedule in the step that admits a run,
so that no tick has a second run, however many replicas try.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Final, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
from cronsim import CronSim, CronSimError
from msgspec import Meta

from stanchion.core.faults import Fault
from stanchion.core.json_value import JsonObject
from stanchion.core.model import Instant, RunId, WorkflowId
from stanchion.core.ranges import range_faults

SCHEDULES_MAX: Final = 500
"""Schedules of one tenant. Every replica looks at all of them, twice a second."""
SCHEDULES_BYTES_MAX: Final = 1024 * 1024
"""Of all schedules of one tenant together. Every replica reads them every few seconds."""
CAUGHT_UP_MAX: Final = 1_000
"""Ticks that ``catch_up: all`` makes up for: the newest."""
MISSED_MAX: Final = 100
"""Missed ticks that a schedule lists: the newest."""
RUNS_MAX: Final = 20
"""Runs that a schedule lists: the newest of its ticks, and as many triggered ones."""
LATE_MS_MAX: Final = 60_000
"""Without catching up, a tick is too late after this time, unless it was tried before."""
UNANSWERED: Final = "the gate was unavailable"
"""The refusal of a try without an answer: the tick may have a run."""
_CRON_FIELDS: Final = 5
IntervalS: TypeAlias = Annotated[int, Meta(ge=1, le=366 * 86_400)]
JitterS: TypeAlias = Annotated[int, Meta(ge=0, le=86_400)]


class Overlap(StrEnum):
    """What happens to a tick while the run of an earlier one is unfinished."""

    SKIP = "skip"
    QUEUE = "queue"
    """One tick is held back until that run ends."""
    ALLOW = "allow"


class CatchUp(StrEnum):
    """What happens to ticks that passed while no replica was running."""

    NONE = "none"
    ONE = "one"
    ALL = "all"


class ScheduleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a user configures."""

    workflow_id: WorkflowId
    cron: str | None = None
    every_s: IntervalS | None = None
    timezone: str = "UTC"
    input: JsonObject = {}
    labels: dict[str, str] = {}
    overlap: Overlap = Overlap.SKIP
    catch_up: CatchUp = CatchUp.NONE
    jitter_s: JitterS = 0
    paused: bool = False


def schedule_faults(spec: ScheduleSpec) -> list[Fault]:
    """What is wrong with a schedule; empty if it can be used."""
    faults = []
    if (spec.cron is None) == (spec.every_s is None):
        faults.append(Fault("cron", "give either cron or every_s"))
    zone = _zone(spec.timezone)
    if isinstance(zone, Fault):
        faults.append(zone)
        zone = ZoneInfo("UTC")
    if spec.cron is not None and len(spec.cron.split()) != _CRON_FIELDS:
        faults.append(Fault("cron", "not a cron expression of five fields"))
    elif spec.cron is not None:
        try:
            next(CronSim(spec.cron, datetime(2026, 1, 1, tzinfo=zone)))
        except CronSimError as error:
            faults.append(Fault("cron", f"not a cron expression: {error}"))
        except StopIteration:
            faults.append(Fault("cron", "no day ever fits this expression"))
    return [*faults, *range_faults(spec)]


def _zone(name: str) -> ZoneInfo | Fault:
    first = name.partition("/")[0].lower()  # some file systems ignore case
    if first in _HOST_ZONES:
        message = (
            f"the time zone {name!r} depends on the server's host or counts leap seconds:"
            " give a name such as Europe/Berlin, or UTC"
        )
        return Fault("timezone", message)
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return Fault("timezone", f"there is no time zone {name!r}")


_HOST_ZONES: Final = frozenset({"localtime", "posixrules", "factory", "posix", "right"})
"""Files and folders of a host's time zone database whose content or presence differs by host."""


# ── State ────────────────────────────────────────────────────────────────────────────────────────


class TickRun(msgspec.Struct, frozen=True):
    """The run of a tick."""

    tick: Instant
    run_id: RunId


class TriggeredRun(msgspec.Struct, frozen=True):
    """A run that a caller started beside the ticks."""

    at: Instant
    run_id: RunId


class MissedTick(msgspec.Struct, frozen=True):
    """A tick without a run: it was missed, or it waits."""

    tick: Instant
    reason: str


class TickOutcome(StrEnum):
    """What became of a tick, for counting."""

    STARTED = "started"
    SKIPPED = "skipped"
    """The run of an earlier tick was unfinished."""
    CAUGHT_UP = "caught_up"
    """``catch_up`` left it to a newer one."""
    CHANGED = "changed"
    """The schedule was changed before it could start."""
    LATE = "late"
    """No replica tried it in time."""
    REFUSED = "refused"
    """Until the next one was due: the tenant was full or over its budget, or the input wrong."""
    UNAVAILABLE = "unavailable"
    """Until the next one was due, the gate gave no answer."""


def outcome_of(missed: MissedTick) -> TickOutcome:
    """The class of the reason of a missed tick."""
    if missed.reason.startswith(_UNFINISHED):
        return TickOutcome.SKIPPED
    return _OUTCOMES.get(missed.reason, TickOutcome.REFUSED)


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as it is stored."""

    spec: ScheduleSpec
    generation: int
    """Raised by every change of the specification."""
    author: str | None = None
    """Who stored it: the starter of its runs, who may not approve what they ask for."""
    since: Instant
    """Ticks after this instant are due: when the specification was stored, or resumed."""
    handled: Instant
    """The newest tick that has a run or was missed."""
    tried: Instant | None = None
    """The tick that is being tried; or, if it is handled, the one held back.

    Written before its run is asked for, so that every replica knows that it may have one.
    """
    refusal: str = ""
    """Why the last try was refused; empty or ``UNANSWERED`` if it may have a run."""
    runs: tuple[TickRun, ...] = ()
    """Newest first."""
    triggered: tuple[TriggeredRun, ...] = ()
    """Newest first. Apart from ``runs``: they do not hold ticks back."""
    missed: tuple[MissedTick, ...] = ()
    """Newest first."""
    missed_total: int = 0


class TickMark(msgspec.Struct, frozen=True):
    """The place of a tick: an admission needs a higher one than the last of its schedule."""

    schedule_id: str
    generation: int
    tick: Instant

    def taken_by(self, newest: tuple[int, int] | None) -> tuple[int, int] | None:
        """The newest mark of the schedule, if it is at or beyond this one."""
        is_taken = newest is not None and newest >= (self.generation, self.tick)
        return newest if is_taken else None


def with_spec(
    schedule: Schedule,
    spec: ScheduleSpec,
    author: str,
    now: Instant,
    *,
    tried_run: RunId | None = None,
) -> Schedule:
    """The schedule after a change. Ticks that were due and have no run are missed.

    ``tried_run`` is the run of the tick that is being tried, if it has one already. If it gets one
    later, ``with_run`` takes it off the list of missed ticks.
    """
    if tried_run is not None and schedule.tried is not None:
        schedule = with_run(schedule, schedule.tried, tried_run)
    due, _ = ((), None) if schedule.spec.paused else _due(schedule, now)
    refusal = schedule.refusal or _CHANGED
    ended = with_missed(
        schedule,
        tuple(MissedTick(each, refusal if each == schedule.tried else _CHANGED) for each in due),
    )
    if schedule.tried is not None and schedule.tried <= schedule.handled:
        ended = with_missed(ended, (MissedTick(schedule.tried, _CHANGED),))  # it was held back
    return msgspec.structs.replace(
        ended,
        spec=spec,
        generation=max(now, schedule.generation + 1),
        author=author,
        since=now,
        handled=now,
        tried=None,
        refusal="",
    )


def with_trial(schedule: Schedule, tick: Instant) -> Schedule:
    """The schedule before a run is asked for a tick."""
    return msgspec.structs.replace(schedule, tried=tick, refusal="")


def with_run(schedule: Schedule, tick: Instant, run_id: RunId) -> Schedule:
    """The schedule after a tick was given a run, also if it was thought to be missed."""
    runs = (TickRun(tick, run_id), *schedule.runs)[:RUNS_MAX]
    missed = tuple(each for each in schedule.missed if each.tick != tick)
    is_done = schedule.tried is None or schedule.tried <= tick
    return msgspec.structs.replace(
        schedule,
        runs=runs,
        handled=max(schedule.handled, tick),
        tried=None if is_done else schedule.tried,
        missed=missed,
        missed_total=schedule.missed_total - (len(schedule.missed) - len(missed)),
    )


def after_taken(
    schedule: Schedule, tick: Instant, mark: tuple[int, int] | None, now: Instant
) -> Schedule:
    """The schedule after the store refused a tick, because it has a run at ``mark``.

    If that run is of a later generation, the schedule was removed and made again, or read after a
    failover that lost its last changes. A clock may have been set back meanwhile: the tick is tried
    again, above the mark, unless the mark is at a time between the tick and now.
    """
    generation, newest = (schedule.generation, tick) if mark is None else mark
    is_ahead = generation > schedule.generation
    if is_ahead:
        held = schedule.tried if tick <= schedule.handled else None
        schedule = msgspec.structs.replace(schedule, generation=generation + 1, tried=held)
    if is_ahead and not tick <= newest <= now:
        return schedule
    return with_missed(schedule, (MissedTick(tick, _TAKEN),))


def waiting_tick(schedule: Schedule) -> MissedTick | None:
    """The tick that is due and has no run yet, with the reason."""
    tick = schedule.tried
    if tick is None or schedule.spec.paused:
        return None
    if tick <= schedule.handled:
        return MissedTick(tick, schedule.refusal or _UNFINISHED)
    return MissedTick(tick, schedule.refusal or "its start is under way")


class DueTicks(msgspec.Struct, frozen=True):
    """Ticks that are due and have no run yet."""

    count: int
    """At most ``CAUGHT_UP_MAX`` of them are counted."""
    oldest: Instant


def due_ticks(schedule: Schedule, now: Instant, jitter: float) -> DueTicks | None:
    """The ticks that are due and have no run yet, the waiting one among them; ``None`` of none.

    ``jitter`` is the same as in ``decide_ticks``.
    """
    if schedule.spec.paused:
        return None
    last = now - _delay_ms(schedule, jitter)
    ticks = itertools.islice(_ticks(schedule, schedule.handled), CAUGHT_UP_MAX)
    due = list(itertools.takewhile(lambda tick: tick <= last, ticks))
    if schedule.tried is not None and schedule.tried <= schedule.handled:
        due.insert(0, schedule.tried)  # it is held back
    return DueTicks(len(due), due[0]) if due else None


def with_triggered(schedule: Schedule, at: Instant, run_id: RunId) -> Schedule:
    """The schedule after a run was started beside its ticks; the same one if it is listed."""
    if any(each.run_id == run_id for each in schedule.triggered):
        return schedule
    triggered = (TriggeredRun(at, run_id), *schedule.triggered)[:RUNS_MAX]
    return msgspec.structs.replace(schedule, triggered=triggered)


def with_held(schedule: Schedule, tick: Instant) -> Schedule:
    """The schedule with a tick held back. Later ones are missed meanwhile."""
    handled = max(schedule.handled, tick)
    return msgspec.structs.replace(schedule, tried=tick, handled=handled, refusal="")


def with_missed(schedule: Schedule, missed: tuple[MissedTick, ...]) -> Schedule:
    """The schedule after ticks were missed, the oldest first."""
    if not missed:
        return schedule
    ticks = [each.tick for each in missed]
    return msgspec.structs.replace(
        schedule,
        missed=(*reversed(missed), *schedule.missed)[:MISSED_MAX],
        missed_total=schedule.missed_total + len(missed),
        handled=max(schedule.handled, *ticks),
        tried=None if schedule.tried in ticks else schedule.tried,
    )


# ── Ticks ────────────────────────────────────────────────────────────────────────────────────────


def next_ticks(schedule: Schedule, after: Instant, count: int) -> list[Instant]:
    """The next ticks after an instant."""
    return list(itertools.islice(_ticks(schedule, after), count))


def _ticks(schedule: Schedule, after: Instant) -> Iterator[Instant]:
    spec = schedule.spec
    after = max(after, schedule.since)
    if spec.every_s is not None:
        every_ms = spec.every_s * 1000
        first = (after - schedule.since) // every_ms + 1
        return (Instant(schedule.since + each * every_ms) for each in itertools.count(first))
    assert spec.cron is not None
    begin = _EPOCH + timedelta(milliseconds=after)
    fits = CronSim(spec.cron, begin.astimezone(ZoneInfo(spec.timezone)))
    # An instant within a second: cron counts whole minutes, so none is skipped.
    instants = (Instant(round((each - _EPOCH).total_seconds() * 1000)) for each in fits)
    return (each for each in instants if each > after)


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class TickPlan(msgspec.Struct, frozen=True):
    """What to do now."""

    start: Instant | None = None
    """Start the run of this tick."""
    hold: Instant | None = None
    """Hold this tick back: the run of an earlier one is unfinished."""
    missed: tuple[MissedTick, ...] = ()
    """List these, the oldest first."""
    wake_at: Instant | None = None
    """Nothing is to be done before this instant, unless the schedule changes."""


_Busy: TypeAlias = RunId | None


def decide_ticks(schedule: Schedule, now: Instant, jitter: float, busy: _Busy) -> TickPlan:
    """Decide on the ticks that are due.

    ``jitter`` is a fraction, the same each time for one schedule and tick. ``busy`` is the
    unfinished run of an earlier tick.
    """
    spec = schedule.spec
    if spec.paused:
        return TickPlan()
    delay_ms = _delay_ms(schedule, jitter)
    due, following = _due(schedule, Instant(now - delay_ms))
    held = schedule.tried
    if spec.overlap is Overlap.QUEUE and held is not None and held <= schedule.handled:
        if busy is None and (len(due) < _kept(spec) or schedule.refusal in _MAY_HAVE_RUN):
            return TickPlan(start=held)
        if busy is None:
            return TickPlan(missed=(MissedTick(held, schedule.refusal),))
        missed = tuple(MissedTick(each, _HELD) for each in due)
        return TickPlan(hold=held, missed=missed, wake_at=Instant(now + _HOLD_MS))
    if not due:
        return TickPlan(wake_at=None if following is None else Instant(following + delay_ms))
    if held in due and schedule.refusal in _MAY_HAVE_RUN:
        # It may have a run: only the store can tell, and the tick is not missed before.
        return TickPlan(start=held)
    if following is None:
        # Even more are due: the newest of all are decided on next time.
        return TickPlan(missed=_left_out(schedule, due[:-CAUGHT_UP_MAX]))
    first, missed = _choose(schedule, due, Instant(now - delay_ms))
    if first is None or busy is None or spec.overlap is Overlap.ALLOW:
        return TickPlan(start=first, missed=missed)
    if spec.overlap is Overlap.SKIP:
        reason = f"{_UNFINISHED}: {busy}"
        return TickPlan(missed=(*missed, MissedTick(first, reason)))
    return TickPlan(hold=first, missed=missed, wake_at=Instant(now + _HOLD_MS))


def _delay_ms(schedule: Schedule, jitter: float) -> int:
    return round(schedule.spec.jitter_s * 1000 * jitter)


def _choose(
    schedule: Schedule, due: list[Instant], now: Instant
) -> tuple[Instant | None, tuple[MissedTick, ...]]:
    """The tick of those due that is to have a run now, and those that will have none."""
    spec = schedule.spec
    kept = _kept(spec)
    missed, (first, *_) = _left_out(schedule, due[:-kept]), due[-kept:]
    if spec.catch_up is CatchUp.NONE and schedule.tried != first and now - first > LATE_MS_MAX:
        return None, (*missed, MissedTick(first, _LATE))
    return first, missed


def _kept(spec: ScheduleSpec) -> int:
    """How many of the ticks that are due are to have runs."""
    return CAUGHT_UP_MAX if spec.catch_up is CatchUp.ALL else 1


def _left_out(schedule: Schedule, ticks: list[Instant]) -> tuple[MissedTick, ...]:
    """Ticks that have no run because later ones are due, each with its reason."""
    reason, tried = _REASONS[schedule.spec.catch_up], schedule.tried
    return tuple(MissedTick(each, schedule.refusal if each == tried else reason) for each in ticks)


def _due(schedule: Schedule, now: Instant) -> tuple[list[Instant], Instant | None]:
    """The ticks that are due, oldest first, and the next one; ``None`` if even more are due."""
    due: list[Instant] = []
    for tick in itertools.islice(_ticks(schedule, schedule.handled), _LOOKED_AT_MAX):
        if tick > now:
            return due, tick
        due.append(tick)
    return due, None


_MAY_HAVE_RUN: Final = frozenset({"", UNANSWERED})
"""Refusals of a tick that may have a run nevertheless."""
_LOOKED_AT_MAX: Final = 200_000
_HOLD_MS: Final = 1_000
_REASONS: Final = {
    CatchUp.NONE: "passed before it could be tried",
    CatchUp.ONE: "caught up by the newest tick",
    CatchUp.ALL: f"more than {CAUGHT_UP_MAX:,} ticks were due",
}
_UNFINISHED: Final = "the run of an earlier tick is unfinished"
_CHANGED: Final = "the schedule was changed before it could start"
_HELD: Final = "an earlier tick is held back already"
_TAKEN: Final = "it, or a later tick, had a run that is not known here"
_LATE: Final = "late by more than a minute"
_OUTCOMES: Final = {
    _HELD: TickOutcome.SKIPPED,
    _CHANGED: TickOutcome.CHANGED,
    _LATE: TickOutcome.LATE,
    _REASONS[CatchUp.NONE]: TickOutcome.LATE,
    _REASONS[CatchUp.ONE]: TickOutcome.CAUGHT_UP,
    _REASONS[CatchUp.ALL]: TickOutcome.CAUGHT_UP,
    UNANSWERED: TickOutcome.UNAVAILABLE,
}
