"""Escalation closes when failing open does harm, opens only when that is over, and remembers."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stanchion.core.escalation import (
    ANNOUNCEMENT_LAPSES_MS,
    PEERS_MAX,
    Announcement,
    Escalation,
    EscalationState,
    Level,
    Observation,
    Order,
    Slice,
    announcement,
    begin,
    counts_of,
    faults,
    hear,
    level_at,
    obey,
    observe,
)
from stanchion.core.faults import Fault
from stanchion.core.model import Instant, Risk

RULES = Escalation()  # slices of a minute; more than 6 fallbacks in each of five trip
MINUTE = 60_000
START = Instant(28_000_000 * MINUTE)
NORMAL, ESCALATED, LATCHED = Level


def later(ms: int) -> Instant:
    return Instant(START + ms)


class Story:
    """A replica's life, told minute by minute. Each minute is observed at its start."""

    def __init__(self, rules: Escalation = RULES, *, latched: bool = False) -> None:
        self.rules = rules
        self.now = START
        self.state = begin("a", START, latched=latched)

    def minutes(
        self, count: int, fallbacks: int = 0, duplicates: int = 0, ok: int = 0, failed: int = 0
    ) -> Story:
        for _ in range(count):
            self.see(Observation(fallbacks, duplicates, ok, failed))
            self.now = Instant(self.now + MINUTE)
        return self

    def see(self, seen: Observation) -> Story:
        self.state = observe(self.rules, self.state, seen, self.now)
        return self

    def obey(self, order: Order) -> Story:
        self.state = obey(self.state, order, self.now)
        return self

    @property
    def level(self) -> Level:
        """The replica's own view, once it has looked at what is complete by now."""
        return observe(self.rules, self.state, Observation(), self.now).level


def tripped() -> Story:
    story = Story().minutes(5, fallbacks=7, duplicates=1).see(Observation())
    assert story.state.level is ESCALATED
    return story


# ── Tripping ─────────────────────────────────────────────────────────────────────────────────────


def test_sustained_fallbacks_with_rising_duplicates_escalate() -> None:
    story = Story().minutes(4, fallbacks=7)
    assert story.minutes(1, fallbacks=7, duplicates=1).level is ESCALATED


@pytest.mark.parametrize("fallbacks", [0, 5, 6, 7])
@pytest.mark.parametrize("duplicates", [0, 1])
def test_the_counts_shown_are_those_that_trip(fallbacks: int, duplicates: int) -> None:
    story = Story().minutes(5, fallbacks, duplicates)
    seen = counts_of(RULES, story.state, Observation(2, 1), story.now)
    assert (seen.fallbacks_running, seen.duplicates_running) == (2, 1)
    assert seen.fallbacks_per_s == pytest.approx(fallbacks / 60)
    is_over = (
        seen.fallbacks_per_s > RULES.fallbacks_per_s
        and seen.slices_at_threshold == 5
        and seen.duplicates > seen.duplicates_before
    )
    story.minutes(1)
    assert is_over == (story.state.level is ESCALATED)


def test_a_rate_exactly_at_the_threshold_does_not_escalate() -> None:
    assert Story().minutes(20, fallbacks=6, duplicates=1).level is NORMAL


@pytest.mark.parametrize("per_s", [0.57, 0.07, 0.29])
def test_a_threshold_that_floats_cannot_hold_is_compared_exactly(per_s: float) -> None:
    # A slice of 100 s; 0.57 × 100 is 56.99… in floats, and 57 is not above it.
    rules = Escalation(fallbacks_per_s=per_s, window_s=500)
    at_threshold, above = Story(rules), Story(rules)
    for _ in range(6):
        at_threshold.see(Observation(round(per_s * 100), 1))
        above.see(Observation(round(per_s * 100) + 1, 1))
        at_threshold.now = above.now = Instant(above.now + 100_000)
    assert at_threshold.level is NORMAL
    assert above.level is ESCALATED


def test_a_steady_rate_barely_above_the_threshold_escalates() -> None:
    story = Story()  # 31 in five minutes is more than 0.1/s, and four minutes are just at it
    for fallbacks in (6, 6, 7, 6, 6):
        story.minutes(1, fallbacks=fallbacks, duplicates=1)
    assert story.level is ESCALATED


@pytest.mark.parametrize("calm", range(5))
def test_one_calm_slice_in_the_window_is_enough_not_to_escalate(calm: int) -> None:
    story = Story()
    for minute in range(5):
        story.minutes(1, fallbacks=5 if minute == calm else 100, duplicates=1)
    assert story.level is NORMAL


def test_a_burst_does_not_escalate_however_large() -> None:
    assert Story().minutes(5).minutes(1, fallbacks=10**6, duplicates=10**6).level is NORMAL


def test_four_slices_are_not_a_window() -> None:
    assert Story().minutes(4, fallbacks=100, duplicates=100).level is NORMAL


def test_the_running_slice_is_no_evidence_yet() -> None:
    story = Story().minutes(4, fallbacks=7, duplicates=1)
    story.see(Observation(7, 1))
    assert story.state.level is NORMAL
    story.now = Instant(story.now + MINUTE - 1)
    assert story.see(Observation()).state.level is NORMAL
    story.now = Instant(story.now + 1)
    assert story.see(Observation()).state.level is ESCALATED


def test_fallbacks_without_duplicates_are_what_failing_open_is_for() -> None:
    assert Story().minutes(60, fallbacks=1_000).level is NORMAL


def test_duplicates_without_fallbacks_do_not_escalate() -> None:
    story = Story()
    for minute in range(30):
        story.minutes(1, duplicates=minute)
    assert story.level is NORMAL


@pytest.mark.parametrize(("before", "during", "level"), [(2, 2, NORMAL), (2, 3, ESCALATED)])
def test_duplicates_must_be_more_than_in_the_window_before(
    before: int, during: int, level: Level
) -> None:
    story = Story().minutes(5, duplicates=before)
    assert story.minutes(5, fallbacks=7, duplicates=during).level is level


def test_the_window_before_is_no_longer_than_the_window() -> None:
    story = Story().minutes(5, duplicates=1_000).minutes(5, duplicates=0)
    assert story.minutes(5, fallbacks=7, duplicates=1).level is ESCALATED


def test_counts_of_one_slice_add_up_over_its_observations() -> None:
    story = Story()
    for _ in range(5):
        for part in range(4):
            story.see(Observation(fallbacks=2 if part else 1, duplicates=part % 2))
            story.now = Instant(story.now + MINUTE // 4)
    assert story.state.slices[-1] == Slice(fallbacks=7, duplicates=2)
    assert story.level is ESCALATED


def test_a_gap_in_the_observations_breaks_the_window() -> None:
    story = Story().minutes(4, fallbacks=7, duplicates=1)
    story.now = Instant(story.now + MINUTE)
    assert story.minutes(4, fallbacks=7, duplicates=1).level is NORMAL
    assert story.minutes(1, fallbacks=7, duplicates=1).level is ESCALATED


def test_an_hour_without_observations_leaves_no_old_evidence() -> None:
    story = Story().minutes(5, fallbacks=7, duplicates=1)
    story.now = Instant(story.now + 60 * MINUTE)
    story.see(Observation())
    assert story.state.level is NORMAL
    assert story.state.slices == (Slice(),) * 11


# ── Recovering ───────────────────────────────────────────────────────────────────────────────────


def test_a_quiet_dwell_time_with_successful_probes_recovers() -> None:
    story = tripped().minutes(9, ok=1).see(Observation())
    assert story.state.level is ESCALATED
    story.now = Instant(story.now + MINUTE - 1)
    assert story.see(Observation(probes_ok=1)).state.level is ESCALATED
    story.now = Instant(story.now + 1)
    assert story.see(Observation()).state.level is NORMAL


@pytest.mark.parametrize(("probes", "level"), [(2, ESCALATED), (3, NORMAL)])
def test_quiet_alone_proves_nothing(probes: int, level: Level) -> None:
    story = tripped().minutes(probes, ok=1).minutes(30)
    assert story.level is level


def test_probes_from_before_the_trip_do_not_count() -> None:
    story = Story().minutes(5, fallbacks=7, duplicates=1, ok=100)
    story.see(Observation(probes_ok=100))  # the observation that trips
    assert story.state.level is ESCALATED
    assert story.minutes(30).level is ESCALATED


@pytest.mark.parametrize(
    ("noise", "level"),
    [
        (Observation(fallbacks=1, probes_ok=3), NORMAL),  # 1 a minute is below a fifth of 6
        (Observation(fallbacks=2, probes_ok=3), ESCALATED),
        (Observation(duplicates=1, probes_ok=3), ESCALATED),
        (Observation(probes_failed=1, probes_ok=3), ESCALATED),
    ],
)
def test_noise_in_the_dwell_time_starts_it_again(noise: Observation, level: Level) -> None:
    story = tripped().minutes(5, ok=1).see(noise)
    story.now = Instant(story.now + MINUTE)
    story.minutes(4)
    assert story.level is level
    assert story.minutes(6, ok=1).level is NORMAL


def test_a_rate_of_exactly_a_fifth_is_not_quiet() -> None:
    rules = Escalation(fallbacks_per_s=0.1, window_s=500, dwell_s=1_000)
    for fallbacks, level in ((2, ESCALATED), (1, NORMAL)):  # 2 in 100 s is a fifth of 0.1/s
        story = Story(rules)
        for seen in [Observation(11, 1)] * 5 + [Observation(fallbacks, probes_ok=1)] * 30:
            story.see(seen)
            story.now = Instant(story.now + 100_000)
        assert story.state.level is level


def test_noise_forgets_the_probes_before_it() -> None:
    story = tripped().minutes(3, ok=5).minutes(1, duplicates=1, ok=5).minutes(15)
    assert story.minutes(2, ok=1).level is ESCALATED
    assert story.minutes(1, ok=1).level is NORMAL


def test_time_that_nobody_observed_is_not_quiet() -> None:
    story = tripped().minutes(3, ok=1)
    story.now = Instant(story.now + 60 * MINUTE)
    story.see(Observation(probes_ok=3))
    assert story.state.level is ESCALATED
    assert story.minutes(9, ok=1).state.level is ESCALATED
    assert story.minutes(2, ok=1).state.level is NORMAL


@pytest.mark.parametrize(("gap_ms", "level"), [(MINUTE, NORMAL), (MINUTE + 1, ESCALATED)])
def test_up_to_a_slice_may_pass_between_two_looks(gap_ms: int, level: Level) -> None:
    story = tripped().minutes(8, ok=1)
    story.see(Observation())
    story.now = Instant(story.now + gap_ms)
    story.see(Observation())
    assert story.minutes(2).state.level is level


def test_recovery_takes_less_noise_than_tripping_did() -> None:
    # Between a fifth of the threshold and the threshold the level stays what it was.
    assert Story().minutes(60, fallbacks=4, duplicates=0, ok=1).level is NORMAL
    assert tripped().minutes(60, fallbacks=4, duplicates=0, ok=1).level is ESCALATED


def test_the_same_evidence_never_trips_twice() -> None:
    story = Story(Escalation(dwell_s=1, probes_min=1)).minutes(5, fallbacks=7, duplicates=1)
    story.see(Observation())
    assert story.state.level is ESCALATED
    story.now = Instant(story.now + 1_000)
    assert story.see(Observation(probes_ok=1)).state.level is NORMAL
    story.now = Instant(story.now + 1_000)
    assert story.see(Observation()).state.level is NORMAL


# ── Latching ─────────────────────────────────────────────────────────────────────────────────────


def trip_and_recover(story: Story) -> Story:
    return story.minutes(5, fallbacks=7, duplicates=1).minutes(12, ok=1)


def test_the_third_trip_of_a_day_latches() -> None:
    story = Story()
    for _ in range(2):
        assert trip_and_recover(story).state.level is NORMAL
    assert story.minutes(5, fallbacks=7, duplicates=1).level is LATCHED
    assert story.minutes(60, ok=1).level is LATCHED


@pytest.mark.parametrize(("early_ms", "level"), [(1, LATCHED), (0, ESCALATED)])
def test_a_trip_counts_for_24_hours(early_ms: int, level: Level) -> None:
    story = trip_and_recover(trip_and_recover(Story()))
    (first, _) = story.state.trips
    # Five noisy minutes that are complete exactly a day after the first trip, or just before it.
    story.now = Instant(first + 24 * 60 * MINUTE - 5 * MINUTE)
    story.minutes(5, fallbacks=7, duplicates=1)
    state = msgspec.structs.replace(
        story.state, trips=(Instant(first + early_ms), story.state.trips[1])
    )
    assert observe(RULES, state, Observation(), story.now).level is level


def test_two_trips_a_day_never_latch() -> None:
    story = Story()
    for _ in range(6):
        trip_and_recover(story)
        story.now = Instant(story.now + 12 * 60 * MINUTE)
    assert story.level is NORMAL
    assert len(story.state.trips) == 2


def test_a_latch_outlives_the_process() -> None:
    assert Story(latched=True).minutes(60, ok=10).level is LATCHED


# ── Orders ───────────────────────────────────────────────────────────────────────────────────────


def test_an_operator_clears_a_latch_for_a_fresh_start() -> None:
    story = Story()
    for _ in range(3):
        trip_and_recover(story)
    assert story.state.level is LATCHED
    story.minutes(5, fallbacks=7, duplicates=1).obey(Order.CLEAR)
    assert story.level is NORMAL
    assert story.minutes(5, fallbacks=7, duplicates=1).level is ESCALATED


def test_what_is_cleared_is_forgotten_but_for_the_clock() -> None:
    story = tripped().obey(Order.FORCE_CLOSED)
    story.state = hear(story.state, Announcement("b", LATCHED, START), story.now)
    story.now = Instant(story.now - 1_000)
    story.obey(Order.CLEAR)
    assert story.state == EscalationState("a", Instant(story.now + 1_000), skew_ms=1_000)


def test_the_stores_latch_is_adopted() -> None:
    story = Story().obey(Order.LATCH)
    assert level_at(story.state, START) is LATCHED
    assert story.minutes(60, ok=10).level is LATCHED


@pytest.mark.parametrize("story", [Story(), tripped(), Story(latched=True)])
def test_an_operator_who_forces_open_outvotes_everyone(story: Story) -> None:
    state = hear(story.state, Announcement("b", LATCHED, START), story.now)
    state = obey(state, Order.FORCE_OPEN, story.now)
    assert level_at(state, story.now) is NORMAL
    assert announcement(state, story.now).level is NORMAL
    assert state.level is story.state.level


@pytest.mark.parametrize(
    ("story", "level"),
    [(Story(), ESCALATED), (tripped(), ESCALATED), (Story(latched=True), LATCHED)],
)
def test_an_operator_who_forces_closed_closes(story: Story, level: Level) -> None:
    state = obey(story.state, Order.FORCE_CLOSED, story.now)
    assert level_at(state, story.now) is level
    assert announcement(state, story.now).level is level


def test_a_force_ends_with_a_clear_and_the_machine_went_on_below_it() -> None:
    forced = tripped().obey(Order.FORCE_OPEN).minutes(11, ok=1)
    assert forced.state.level is NORMAL
    assert forced.state.forced is Order.FORCE_OPEN
    assert forced.obey(Order.CLEAR).state.forced is None


# ── Other replicas ───────────────────────────────────────────────────────────────────────────────


def said(replica: str, level: Level, at_ms: int = 0) -> Announcement:
    return Announcement(replica, level, later(at_ms))


@pytest.mark.parametrize("level", Level)
def test_the_stricter_view_wins(level: Level) -> None:
    state = hear(begin("a", START), said("b", level), START)
    state = hear(state, said("c", NORMAL), START)
    assert level_at(state, START) is level
    assert level_at(obey(state, Order.LATCH, START), START) is LATCHED


def test_a_view_lapses_30_seconds_after_its_authors_last_word() -> None:
    state = hear(begin("a", START), said("b", ESCALATED), later(5_000))
    assert ANNOUNCEMENT_LAPSES_MS == 30_000
    assert level_at(state, later(34_999)) is ESCALATED
    assert level_at(state, later(35_000)) is NORMAL
    state = hear(state, said("b", ESCALATED, 20_000), later(20_000))
    assert level_at(state, later(49_999)) is ESCALATED
    assert level_at(state, later(50_000)) is NORMAL


def test_an_authors_newer_view_replaces_its_older_one() -> None:
    state = hear(begin("a", START), said("b", ESCALATED, 1), START)
    assert level_at(hear(state, said("b", NORMAL, 2), START), START) is NORMAL


def test_a_view_that_was_overtaken_on_the_way_is_ignored() -> None:
    state = hear(begin("a", START), said("b", NORMAL, 2), START)
    assert level_at(hear(state, said("b", ESCALATED, 1), START), START) is NORMAL
    assert level_at(hear(state, said("b", ESCALATED, 2), START), START) is ESCALATED
    assert level_at(hear(state, said("c", ESCALATED, 1), START), START) is ESCALATED


def test_an_author_whose_clock_stepped_back_is_heard_again_once_its_old_word_lapsed() -> None:
    state = hear(begin("a", START), said("b", NORMAL, 3_600_000), START)
    state = hear(state, said("b", ESCALATED), later(30_000))
    assert level_at(state, later(30_000)) is ESCALATED


def test_an_author_that_stays_escalated_is_not_forgotten_when_its_clock_steps_back() -> None:
    state = hear(begin("a", START), said("b", ESCALATED, 3_600_000), START)
    for ms in range(1_000, 60_000, 2_000):
        state = hear(state, said("b", ESCALATED, ms), later(ms))
        assert level_at(state, later(ms + 1_999)) is ESCALATED


def test_a_replica_does_not_listen_to_itself() -> None:
    state = hear(begin("a", START), said("a", LATCHED), START)
    assert level_at(state, START) is NORMAL
    assert state.peers == ()


def test_two_replicas_do_not_keep_each_other_closed() -> None:
    left, right = begin("a", START), begin("b", START)
    left = hear(left, said("c", ESCALATED), START)
    assert announcement(left, START) == Announcement("a", NORMAL, START)
    right = hear(right, announcement(left, START), START)
    assert level_at(right, START) is NORMAL


def test_an_announcement_says_what_the_replica_itself_has_found() -> None:
    story = tripped()
    assert announcement(story.state, story.now) == Announcement("a", ESCALATED, story.now)
    assert not announcement(story.state, story.now).latched
    latched = announcement(begin("a", START, latched=True), START)
    assert latched == Announcement("a", LATCHED, START)
    assert latched.latched


def test_of_too_many_peers_the_strictest_and_then_the_newest_are_kept() -> None:
    state = hear(begin("a", START), said("strict", LATCHED), START)
    for number in range(PEERS_MAX + 50):
        state = hear(state, said(f"n{number}", NORMAL), later(number))
    assert len(state.peers) == PEERS_MAX
    kept = [peer.said.replica for peer in state.peers]
    assert kept[:2] == ["strict", f"n{PEERS_MAX + 49}"]
    assert "n50" not in kept
    assert "n51" in kept


def test_lapsed_views_are_forgotten() -> None:
    state = hear(begin("a", START), said("b", ESCALATED), START)
    state = hear(state, said("c", NORMAL), later(30_000))
    assert [peer.said.replica for peer in state.peers] == ["c"]


# ── Time ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_clock_that_steps_back_does_not_blind_the_machine() -> None:
    story = Story().minutes(3, fallbacks=7, duplicates=1)
    story.now = Instant(story.now - 61 * MINUTE)  # an hour back; the story goes on
    assert story.minutes(3, fallbacks=7, duplicates=1).level is ESCALATED


def test_a_clock_that_steps_back_shortens_no_dwell_time() -> None:
    story = tripped().minutes(5, ok=1)
    story.now = Instant(story.now - 60 * MINUTE)
    assert story.minutes(4, ok=1).state.level is ESCALATED
    assert story.minutes(8, ok=1).state.level is NORMAL


def test_a_step_back_does_not_make_a_lapsed_view_live_again() -> None:
    state = hear(begin("a", START), said("b", ESCALATED), START)
    state = observe(RULES, state, Observation(), later(30_000))
    assert level_at(state, START) is NORMAL


def test_new_settings_start_a_new_window_and_keep_the_level() -> None:
    story = Story().minutes(4, fallbacks=7, duplicates=1)
    story.rules = Escalation(window_s=150)
    story.minutes(1, fallbacks=7, duplicates=1)
    assert story.state.slices[-1] == Slice(7, 1)
    assert len(story.state.slices) == 1
    escalated = tripped()
    escalated.rules = Escalation(window_s=150)
    assert escalated.see(Observation()).state.level is ESCALATED


def test_a_shorter_window_has_shorter_slices() -> None:
    assert RULES.slice_ms == 60_000
    assert Escalation(window_s=1).slice_ms == 200
    assert Escalation(window_s=2.5).slice_ms == 500


OBSERVATIONS = st.builds(
    Observation, st.integers(0, 20), st.integers(0, 2), st.integers(0, 2), st.integers(0, 1)
)
STEPS = st.lists(
    st.tuples(OBSERVATIONS, st.sampled_from([-3_600_000, -1, 0, 1_000, 60_000, 86_400_000])),
    max_size=60,
)


def replay(steps: list[tuple[Observation, int]]) -> list[EscalationState]:
    now, state, states = START, begin("a", START), []
    for seen, step_ms in steps:
        now = Instant(now + step_ms)
        state = hear(state, Announcement(f"r{step_ms}", ESCALATED, now), now)
        state = observe(RULES, state, seen, now)
        states.append(state)
    return states


@settings(deadline=None)
@given(STEPS)
def test_any_history_keeps_the_state_small_and_its_time_going_forward(
    steps: list[tuple[Observation, int]],
) -> None:
    states = replay(steps)
    assert replay(steps) == states
    for before, after in pairwise(states):
        assert after.clock >= before.clock
        assert after.quiet_since <= after.clock == after.observed_at
        if before.level is LATCHED:
            assert after.level is LATCHED
    for state in states:
        assert len(state.slices) <= 11
        assert len(state.trips) <= RULES.trips_per_day_max + 1
        assert msgspec.json.decode(msgspec.json.encode(state), type=EscalationState) == state


WINDOWS_S = st.one_of(
    st.floats(1, 20, allow_nan=False),
    st.floats(20, 86_400, allow_nan=False),
    st.sampled_from([1, 8, 8.001, 10, 10.001, 300, 86_400]),
)
"""The documented range. Short windows are more likely: their slices are shorter than the looks."""


@settings(max_examples=60, deadline=None)
@given(WINDOWS_S, st.floats(0.001, 50), st.integers(1, 4_000), st.integers(0, 10_000))
def test_every_documented_window_trips_and_recovers(
    window_s: float, per_s: float, look_ms: int, begins_ms: int
) -> None:
    rules = Escalation(fallbacks_per_s=per_s, window_s=window_s, dwell_s=5)
    # A replica looks every two seconds, later if its calls take longer. A long window is looked at
    # less often here, to bound the number of looks.
    look_ms = max(look_ms + 2_000, rules.slice_ms // 7)
    story, event_ms = Story(rules), max(1, rules.slice_ms // 3)
    story.now = later(begins_ms)
    noise = Observation(fallbacks=int(2 * per_s * event_ms / 1_000) + 2, duplicates=1)
    looks_at = story.now
    while story.now < later(begins_ms) + 8 * rules.slice_ms + look_ms:
        story.see(noise)
        story.now = Instant(story.now + event_ms)
        if story.now >= looks_at + look_ms:
            looks_at = story.now
            story.see(Observation())
    assert story.state.level is ESCALATED
    for _ in range(2 + (rules.slice_ms + 5_000) // look_ms):
        story.see(Observation(probes_ok=3))
        story.now = Instant(story.now + look_ms)
    assert story.see(Observation()).state.level is NORMAL


@settings(max_examples=60, deadline=None)
@given(
    st.floats(1, 20, allow_nan=False),
    st.lists(
        st.tuples(st.integers(100, 900), st.integers(1, 3), st.integers(0, 1)),
        min_size=6,
        max_size=30,
    ),
    st.integers(1_001, 15_000),
)
def test_how_often_it_looks_does_not_change_the_verdict(
    window_s: float, events: list[tuple[int, int, int]], look_ms: int
) -> None:
    rules = Escalation(fallbacks_per_s=5 / window_s, window_s=window_s, dwell_s=86_400)
    levels = []
    for every_ms in (look_ms, 1_000):
        story, looks_at = Story(rules), START
        for after_ms, fallbacks, duplicates in (*events, (5_000, 0, 0)):
            happens_at = Instant(story.now + after_ms * rules.slice_ms // 1_000)
            while looks_at + every_ms < happens_at:
                looks_at = story.now = Instant(looks_at + every_ms)
                story.see(Observation())
            story.now = happens_at
            story.see(Observation(fallbacks, duplicates))
        levels.append(story.state.level)
    assert levels[0] is levels[1]


def test_a_million_quiet_hours_cost_no_more_than_one() -> None:
    far = later(10**6 * 60 * MINUTE)
    state = observe(RULES, begin("a", START), Observation(), START)
    state = observe(RULES, state, Observation(), far)
    assert len(state.slices) == 11


# ── Settings ─────────────────────────────────────────────────────────────────────────────────────


def test_the_defaults_are_the_documented_ones() -> None:
    assert msgspec.to_builtins(RULES) == {
        "fallbacks_per_s": 0.1,
        "window_s": 300,
        "closes": ("high", "standard"),
        "dwell_s": 600,
        "quiet_divisor": 5,
        "probes_min": 3,
        "trips_per_day_max": 2,
    }
    assert msgspec.convert({}, Escalation) == RULES
    assert faults(RULES) == ()


def test_a_setting_with_an_unknown_member_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"window": 300}, Escalation)


def test_the_words_and_numbers_that_leave_the_process_are_fixed() -> None:
    assert [level.value for level in Level] == [0, 1, 2]
    assert [order.value for order in Order] == ["force_open", "force_closed", "latch", "clear"]


def test_every_fault_of_the_settings_is_reported() -> None:
    bad = Escalation(
        fallbacks_per_s=0,
        window_s=0.9,
        closes=(Risk.HIGH, Risk.HIGH),
        dwell_s=float("nan"),
        quiet_divisor=0,
        probes_min=-1,
        trips_per_day_max=-1,
    )
    assert faults(bad) == (
        Fault("fallbacks_per_s", "must be from 0.001 to 1000000"),
        Fault("window_s", "must be from 1 to 86400"),
        Fault("dwell_s", "must be from 0 to 86400"),
        Fault("quiet_divisor", "must be from 1 to 1000"),
        Fault("probes_min", "must be from 0 to 1000"),
        Fault("trips_per_day_max", "must be from 0 to 1000"),
        Fault("closes", "names a class twice"),
    )
