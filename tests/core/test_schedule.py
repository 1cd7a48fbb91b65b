"""Schedules: which ticks there are, and what becomes of each."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stanchion.core.model import Instant, RunId, WorkflowId
from stanchion.core.schedule import (
    CAUGHT_UP_MAX,
    RUNS_MAX,
    UNANSWERED,
    CatchUp,
    DueTicks,
    MissedTick,
    Overlap,
    Schedule,
    ScheduleSpec,
    TickMark,
    TickOutcome,
    TickPlan,
    TickRun,
    after_taken,
    decide_ticks,
    due_ticks,
    next_ticks,
    outcome_of,
    schedule_faults,
    waiting_tick,
    with_held,
    with_missed,
    with_run,
    with_spec,
    with_trial,
    with_triggered,
)

MINUTE = 60_000
BUSY = RunId("r1")
CHANGED = "the schedule was changed before it could start"


def spec(**members: Any) -> ScheduleSpec:  # noqa: ANN401 - of any member
    return ScheduleSpec(workflow_id=WorkflowId("w"), **({"every_s": 60} | members))


def schedule(at: int = 0, **members: Any) -> Schedule:  # noqa: ANN401 - of any member
    begin = Instant(at)
    return Schedule(spec=spec(**members), generation=1, since=begin, handled=begin)


def instant(text: str, zone: str = "UTC") -> Instant:
    when = datetime.fromisoformat(text)
    when = when if when.tzinfo else when.replace(tzinfo=ZoneInfo(zone))
    return Instant(round(when.timestamp() * 1000))


def plan(which: Schedule, minutes: float, busy: RunId | None = None) -> TickPlan:
    return decide_ticks(which, Instant(round(minutes * MINUTE)), 0.0, busy)


def after(which: Schedule, decided: TickPlan) -> Schedule:
    """The schedule after what was decided has been done."""
    which = with_missed(which, decided.missed)
    if decided.start is not None:
        return with_run(which, decided.start, RunId(f"r{decided.start}"))
    return which if decided.hold is None else with_held(which, decided.hold)


def reasons(which: Schedule) -> list[tuple[float, str]]:
    return [(each.tick / MINUTE, each.reason) for each in reversed(which.missed)]


AWKWARD = [
    ("a skipped half hour runs once the clock has jumped", "30 2 * * *", "Europe/Berlin",
     "2026-03-28T12:00", ["2026-03-29T03:00+02:00", "2026-03-30T02:30+02:00"]),
    ("an hour that comes twice has one daily run", "30 2 * * *", "Europe/Berlin",
     "2026-10-24T12:00", ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]),
    ("what runs every half hour runs in both of them", "*/30 * * * *", "Europe/Berlin",
     "2026-10-25T01:45", ["2026-10-25T02:00+02:00", "2026-10-25T02:30+02:00",
                          "2026-10-25T02:00+01:00", "2026-10-25T02:30+01:00"]),
    ("a shift by half an hour", "15 2 * * *", "Australia/Lord_Howe",
     "2026-10-03T12:00", ["2026-10-04T02:30+11:00", "2026-10-05T02:15+11:00"]),
    ("a zone without daylight saving", "0 9 * * MON", "Asia/Kolkata",
     "2026-11-16T09:00", ["2026-11-23T09:00+05:30"]),
    ("the leap day", "0 0 29 2 *", "UTC", "2026-11-16T00:00", ["2028-02-29T00:00+00:00"]),
    ("the last day of a month", "0 12 L * *", "America/New_York",
     "2026-01-30T13:00", ["2026-01-31T12:00-05:00", "2026-02-28T12:00-05:00"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("cron", "zone", "begin", "expected"), [row[1:] for row in AWKWARD], ids=[r[0] for r in AWKWARD]
)
def test_the_awkward_hours(cron: str, zone: str, begin: str, expected: list[str]) -> None:
    which = schedule(instant(begin, zone), every_s=None, cron=cron, timezone=zone)
    found = next_ticks(which, which.since, len(expected))
    assert found == [instant(each) for each in expected]


@pytest.mark.parametrize(
    ("members", "path"),
    [
        ({"cron": "* * * * *"}, "cron"),
        ({"every_s": None}, "cron"),
        ({"every_s": None, "cron": "61 * * * *"}, "cron"),
        ({"every_s": None, "cron": "* * * *"}, "cron"),
        ({"every_s": None, "cron": "* * * * * *"}, "cron"),
        ({"every_s": None, "cron": "0 0 31 2 *"}, "cron"),
        ({"every_s": 0}, "every_s"),
        ({"timezone": "Mars/Olympus"}, "timezone"),
        ({"timezone": "../../etc/passwd"}, "timezone"),
        ({"timezone": ""}, "timezone"),
        ({"every_s": 366 * 86_400 + 1}, "every_s"),
        ({"jitter_s": -1}, "jitter_s"),
    ],
)
def test_what_cannot_be_used_is_named(members: dict[str, object], path: str) -> None:
    assert [each.path for each in schedule_faults(spec(**members))] == [path]


@pytest.mark.parametrize(
    "zone",
    ["localtime", "LOCALTIME", "posixrules", "Factory", "right/UTC", "posix/Europe/Berlin"],
)
def test_a_time_zone_that_differs_by_host_is_refused(zone: str) -> None:
    (fault,) = schedule_faults(spec(every_s=None, cron="0 9 * * *", timezone=zone))
    assert fault.path == "timezone"
    assert fault.message == (
        f"the time zone {zone!r} depends on the server's host or counts leap seconds:"
        " give a name such as Europe/Berlin, or UTC"
    )


@pytest.mark.parametrize("zone", ["UTC", "Etc/GMT-1", "GB", "America/Argentina/Buenos_Aires"])
def test_a_time_zone_that_is_the_same_on_every_host_is_accepted(zone: str) -> None:
    assert schedule_faults(spec(every_s=None, cron="0 9 * * *", timezone=zone)) == []


def test_a_good_schedule_has_no_faults() -> None:
    good = spec(every_s=None, cron="0 9 * * MON-FRI", timezone="Europe/Berlin", jitter_s=30)
    assert schedule_faults(good) == []


def test_nothing_is_due_before_the_first_tick_and_a_pause_has_none() -> None:
    assert plan(schedule(), 0.5) == TickPlan(wake_at=Instant(MINUTE))
    assert plan(schedule(paused=True), 10) == TickPlan()


def test_jitter_moves_every_tick_by_the_same_time() -> None:
    which = schedule(jitter_s=40)
    assert decide_ticks(which, Instant(MINUTE), 0.5, None).wake_at == MINUTE + 20_000
    assert decide_ticks(which, Instant(MINUTE + 20_000), 0.5, None).start == MINUTE


def test_a_refused_tick_is_tried_until_the_next_is_due() -> None:
    which = msgspec.structs.replace(schedule(), tried=Instant(MINUTE), refusal="full")
    assert plan(which, 1.9).start == MINUTE
    late = plan(which, 2)
    assert late.start == 2 * MINUTE
    assert reasons(after(which, late)) == [(1, "full")]
    kept = schedule(catch_up=CatchUp.ALL)
    kept = msgspec.structs.replace(kept, tried=Instant(MINUTE), refusal="full")
    assert plan(kept, 2) == TickPlan(start=Instant(MINUTE))


def test_what_passed_while_nothing_ran_is_missed_or_caught_up() -> None:
    none = plan(schedule(every_s=3600), 200)
    assert none.start is None
    assert [each.tick // MINUTE for each in none.missed] == [60, 120, 180]
    one = plan(schedule(every_s=3600, catch_up=CatchUp.ONE), 200)
    assert (one.start, len(one.missed)) == (180 * MINUTE, 2)
    every = schedule(every_s=3600, catch_up=CatchUp.ALL)
    started = []
    while (now := plan(every, 200)).start is not None:
        started.append(now.start // MINUTE)
        every = after(every, now)
    assert started == [60, 120, 180]


def test_catching_up_is_bounded_and_the_rest_is_listed() -> None:
    which = schedule(every_s=1, catch_up=CatchUp.ALL)
    decided = plan(which, 60)
    assert decided.start == 3_600_000 - (CAUGHT_UP_MAX - 1) * 1000
    assert [each.tick for each in decided.missed] == [*range(1_000, decided.start, 1_000)]
    assert {each.reason for each in decided.missed} == {"more than 1,000 ticks were due"}


@pytest.mark.parametrize("catch_up", list(CatchUp))
def test_a_very_long_outage_has_one_decision_on_its_newest_ticks(catch_up: CatchUp) -> None:
    which, minutes = schedule(every_s=1, catch_up=catch_up), 24 * 60 * 5
    started: list[int] = []
    for _ in range(4):
        decided = plan(which, minutes)
        started += [] if decided.start is None else [decided.start]
        which = after(which, decided)
    last = minutes * MINUTE
    expected = {CatchUp.NONE: [last], CatchUp.ONE: [last]}
    begun = [last - (CAUGHT_UP_MAX - each) * 1_000 for each in range(1, 3)]
    assert started == expected.get(catch_up, begun)
    assert which.missed_total == which.handled // 1_000 - len(started)


def test_a_tick_that_is_not_caught_up_may_be_a_minute_late() -> None:
    which = schedule(every_s=3600, catch_up=CatchUp.NONE)
    assert plan(which, 61).start == 60 * MINUTE
    late = decide_ticks(which, Instant(61 * MINUTE + 1), 0.0, None)
    assert (late.start, [each.tick for each in late.missed]) == (None, [60 * MINUTE])


def test_a_change_lists_the_ticks_that_were_due() -> None:
    which, changed = schedule(catch_up=CatchUp.ALL), spec(every_s=30)
    refused = msgspec.structs.replace(which, tried=Instant(MINUTE), refusal="full")
    now = Instant(round(2.5 * MINUTE))
    after_change = with_spec(refused, changed, "kim", now)
    assert reasons(after_change) == [(1, "full"), (2, CHANGED)]
    assert (after_change.since, after_change.handled, after_change.tried) == (now, now, None)
    assert after_change.generation > which.generation
    held = with_held(which, Instant(MINUTE))
    assert reasons(with_spec(held, changed, "kim", Instant(MINUTE + 1))) == [(1, CHANGED)]
    # A tick without an answer may have a run already, or get one later.
    tried, at = with_trial(which, Instant(MINUTE)), Instant(MINUTE)
    begun = with_spec(tried, changed, "kim", at, tried_run=BUSY)
    assert (begun.runs, begun.missed, begun.tried) == ((TickRun(at, BUSY),), (), None)
    unknown = with_spec(tried, changed, "kim", at)
    assert reasons(unknown) == [(1, CHANGED)]
    assert with_run(unknown, at, BUSY).missed == ()
    kept = with_spec(held, changed, "kim", Instant(MINUTE + 1), tried_run=BUSY)
    assert (kept.runs, kept.missed) == ((TickRun(at, BUSY),), ())
    # A paused schedule has no ticks.
    assert with_spec(schedule(paused=True), changed, "kim", now).missed == ()


def test_overlap() -> None:
    skipped = plan(schedule(), 1, BUSY)
    assert (skipped.start, skipped.missed[0].tick) == (None, MINUTE)
    assert BUSY in skipped.missed[0].reason
    assert plan(schedule(overlap=Overlap.ALLOW), 1, BUSY).start == MINUTE


@pytest.mark.parametrize("catch_up", list(CatchUp))
def test_one_tick_is_held_back_and_later_ones_are_missed(catch_up: CatchUp) -> None:
    which = schedule(overlap=Overlap.QUEUE, catch_up=catch_up)
    for minute in (1, 1.5, 2, 3, 3.2):
        decided = plan(which, minute, BUSY)
        assert decided.hold == MINUTE
        assert decided.start is None
        which = after(which, decided)
    assert [tick for tick, _ in reasons(which)] == [2, 3]
    free = plan(which, 3.5)
    assert free.start == MINUTE
    assert plan(after(which, free), 4).start == 4 * MINUTE


@pytest.mark.parametrize(("catch_up", "left_minutes"), [("none", 2), ("one", 2), ("all", 1_001)])
def test_a_tick_that_was_held_back_and_is_refused_is_missed_when_the_next_is_due(
    catch_up: str, left_minutes: int
) -> None:
    held = with_held(schedule(overlap=Overlap.QUEUE, catch_up=CatchUp(catch_up)), Instant(MINUTE))
    assert plan(held, left_minutes).start == MINUTE, "it was not tried"
    refused = msgspec.structs.replace(held, refusal="the tenant was full")
    told = waiting_tick(refused)
    assert told is not None
    assert (told.tick, told.reason) == (MINUTE, "the tenant was full")
    assert plan(refused, left_minutes - 0.5).start == MINUTE
    given_up = plan(refused, left_minutes)
    assert given_up == TickPlan(missed=(MissedTick(Instant(MINUTE), "the tenant was full"),))
    assert plan(after(refused, given_up), left_minutes).start == 2 * MINUTE
    unanswered = msgspec.structs.replace(held, refusal=UNANSWERED)
    assert plan(unanswered, left_minutes).start == MINUTE, "it may have a run"
    assert plan(refused, left_minutes, BUSY).hold == MINUTE


@given(
    st.sampled_from(list(Overlap)),
    st.sampled_from(list(CatchUp)),
    st.lists(st.tuples(st.integers(0, 400), st.booleans(), st.booleans()), max_size=40),
)
def test_every_tick_has_one_run_or_one_reason(
    overlap: Overlap, catch_up: CatchUp, looks: list[tuple[int, bool, bool]]
) -> None:
    which, now = schedule(overlap=overlap, catch_up=catch_up), 0.0
    runs: list[int] = []
    missed: list[int] = []
    for seconds, is_busy, is_refused in looks:
        now += seconds / 60
        decided = plan(which, now, BUSY if is_busy and runs else None)
        missed += [each.tick for each in decided.missed]
        if decided.start is not None and is_refused:
            which = with_missed(which, decided.missed)
            which = msgspec.structs.replace(which, tried=decided.start, refusal="full")
            if decided.start <= which.handled:
                continue  # held back: still to come
        else:
            runs += [] if decided.start is None else [decided.start]
            which = after(which, decided)
    ended = sorted([*runs, *missed])
    assert len(ended) == len(set(ended))
    held = {which.tried} if which.tried is not None else set()
    passed = {each * MINUTE for each in range(1, which.handled // MINUTE + 1)}
    assert set(ended) | held >= passed
    assert set(ended) <= passed


def test_triggered_runs_are_listed_once_the_newest_ones_and_beside_the_ticks() -> None:
    which = schedule()
    for number in range(RUNS_MAX + 1):
        which = with_triggered(which, Instant(number), RunId(f"t{number}"))
    assert [each.run_id for each in which.triggered] == [f"t{n}" for n in range(RUNS_MAX, 0, -1)]
    assert with_triggered(which, Instant(99), RunId("t1")) is which
    assert (which.runs, which.handled) == (schedule().runs, schedule().handled)


def test_a_tick_that_waits_is_told_with_its_reason() -> None:
    held = with_held(schedule(overlap=Overlap.QUEUE), Instant(MINUTE))
    told = waiting_tick(held)
    assert told is not None
    assert (told.tick, told.reason) == (MINUTE, "the run of an earlier tick is unfinished")
    tried = msgspec.structs.replace(schedule(), tried=Instant(MINUTE))
    told = waiting_tick(tried)
    assert told is not None
    assert (told.tick, told.reason) == (MINUTE, "its start is under way")
    refused = msgspec.structs.replace(tried, refusal="the tenant was full: 1 run")
    told = waiting_tick(refused)
    assert told is not None
    assert (told.tick, told.reason) == (MINUTE, "the tenant was full: 1 run")
    assert waiting_tick(schedule()) is None


@pytest.mark.parametrize(
    ("mark", "generation", "missed"),
    [
        (None, 5, [2]),  # its key is of another run
        ((5, 2 * MINUTE), 5, [2]),  # a run that was forgotten
        ((5, 9 * MINUTE), 5, [2]),
        ((7, 1 * MINUTE), 8, []),  # of a schedule that was removed: the tick is tried above it
        ((7, 2 * MINUTE), 8, [2]),  # or of changes that were lost: they may have had this tick
        ((7, 3 * MINUTE), 8, [2]),
        ((7, 9 * MINUTE), 8, []),  # by a clock that was set back since
    ],
)
def test_a_tick_that_the_store_has_passed_is_tried_above_its_mark_or_missed(
    mark: tuple[int, int] | None, generation: int, missed: list[float]
) -> None:
    tick, now = Instant(2 * MINUTE), Instant(3 * MINUTE)
    tried = with_trial(msgspec.structs.replace(schedule(), generation=5), tick)
    changed = after_taken(tried, tick, mark, now)
    assert changed.generation == generation
    assert [at for at, _ in reasons(changed)] == missed
    assert changed.tried is None
    assert changed.handled == (tick if missed else 0)


def test_a_mark_takes_the_ticks_up_to_it() -> None:
    mark = TickMark("s", 5, Instant(7))
    for newest in ((5, 7), (5, 8), (6, 1)):
        assert mark.taken_by(newest) == newest
    for earlier in (None, (5, 6), (4, 9)):
        assert mark.taken_by(earlier) is None


def test_a_tick_that_was_held_back_stays_so_if_it_is_tried_above_a_mark() -> None:
    held = with_held(schedule(overlap=Overlap.QUEUE), Instant(2 * MINUTE))
    changed = after_taken(held, Instant(2 * MINUTE), (7, MINUTE), Instant(3 * MINUTE))
    assert (changed.generation, changed.tried) == (8, 2 * MINUTE)
    assert plan(changed, 3).start == 2 * MINUTE


def test_the_reason_of_a_missed_tick_has_a_class() -> None:
    def classes(missed: tuple[MissedTick, ...]) -> list[TickOutcome]:
        return [outcome_of(each) for each in missed]

    assert classes(plan(schedule(), 1, BUSY).missed) == [TickOutcome.SKIPPED]
    assert classes(plan(schedule(), 2.5).missed) == [TickOutcome.LATE]
    assert classes(plan(schedule(every_s=3_600), 62).missed) == [TickOutcome.LATE]
    once = plan(schedule(catch_up=CatchUp.ONE), 2.5)
    assert classes(once.missed) == [TickOutcome.CAUGHT_UP]
    many = plan(schedule(catch_up=CatchUp.ALL), CAUGHT_UP_MAX + 1)
    assert classes(many.missed) == [TickOutcome.CAUGHT_UP]
    held = with_held(schedule(overlap=Overlap.QUEUE), Instant(MINUTE))
    assert classes(plan(held, 2, BUSY).missed) == [TickOutcome.SKIPPED]
    changed = with_spec(held, held.spec, "a", Instant(MINUTE))
    assert classes(changed.missed) == [TickOutcome.CHANGED]
    told = [MissedTick(Instant(0), each) for each in (UNANSWERED, "the tenant was full: 2 runs")]
    assert classes(tuple(told)) == [TickOutcome.UNAVAILABLE, TickOutcome.REFUSED]


def test_what_is_due_is_counted_with_the_oldest() -> None:
    def due(which: Schedule, minutes: float, jitter: float = 0.0) -> DueTicks | None:
        return due_ticks(which, Instant(round(minutes * MINUTE)), jitter)

    every = schedule(catch_up=CatchUp.ALL)
    assert due(every, 0.9) is None
    assert due(every, 5.5) == DueTicks(5, Instant(MINUTE))
    assert due(after(every, plan(every, 5.5)), 5.5) == DueTicks(4, Instant(2 * MINUTE))
    assert due(schedule(jitter_s=30), 1.2, 1.0) is None
    assert due(schedule(jitter_s=30), 1.5, 1.0) == DueTicks(1, Instant(MINUTE))
    assert due(schedule(paused=True), 5.5) is None
    assert due(every, 10 * CAUGHT_UP_MAX) == DueTicks(CAUGHT_UP_MAX, Instant(MINUTE))
    held = with_held(schedule(overlap=Overlap.QUEUE), Instant(2 * MINUTE))
    assert due(held, 2.5) == DueTicks(1, Instant(2 * MINUTE))
    assert due(held, 3.5) == DueTicks(2, Instant(2 * MINUTE))


def test_a_held_tick_waits_for_what_its_last_try_was_refused_for() -> None:
    held = with_held(schedule(overlap=Overlap.QUEUE), Instant(MINUTE))
    refused = msgspec.structs.replace(held, refusal="the tenant was full: 1 run")
    assert waiting_tick(refused) == MissedTick(Instant(MINUTE), "the tenant was full: 1 run")
