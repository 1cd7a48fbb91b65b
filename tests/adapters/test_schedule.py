"""The memory store's schedule, held against the plainest one there is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stanchion.adapters.store.memory.state import DueTimes
from stanchion.core.model import Instant

_THINGS = st.sampled_from("abcdef")
_TIMES = st.integers(0, 4).map(Instant)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), _THINGS, _TIMES),
        st.tuples(st.just("hasten"), _THINGS, _TIMES),
        st.tuples(st.just("remove"), _THINGS, _TIMES),
        st.tuples(st.just("take"), st.integers(0, 4), _TIMES),
    ),
    max_size=60,
)


class _Plain:
    """The same, by looking at everything each time."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, Instant]] = []

    def put(self, thing: str, due: Instant) -> None:
        self.remove(thing)
        self.entries.append((thing, due))

    def hasten(self, thing: str, due: Instant) -> None:
        if due < dict(self.entries).get(thing, Instant(10**9)):
            self.put(thing, due)

    def remove(self, thing: str) -> None:
        self.entries = [entry for entry in self.entries if entry[0] != thing]

    def take(self, now: Instant, limit: int) -> list[str]:
        due = sorted((each for each in self.entries if each[1] <= now), key=lambda each: each[1])
        for thing, _ in due[:limit]:
            self.remove(thing)
        return [thing for thing, _ in due[:limit]]


@given(_STEPS)
def test_a_schedule_does_what_the_plainest_one_does(
    steps: list[tuple[str, str | int, Instant]],
) -> None:
    schedule: DueTimes[str] = DueTimes()
    plain = _Plain()
    for verb, what, when in steps:
        if verb == "take":
            assert schedule.take(when, int(what)) == plain.take(when, int(what))
        elif verb == "remove":
            schedule.remove(str(what))
            plain.remove(str(what))
        else:
            getattr(schedule, verb)(str(what), when)
            getattr(plain, verb)(str(what), when)
        assert {each: schedule.due(each) for each in "abcdef"} == {
            each: dict(plain.entries).get(each) for each in "abcdef"
        }
        assert len(schedule) == len(plain.entries)


def test_a_schedule_does_not_grow_with_what_was_moved_or_removed() -> None:
    schedule: DueTimes[int] = DueTimes()
    for turn in range(10_000):
        schedule.put(turn % 200, Instant(10_000 - turn))
        schedule.put(-1, Instant(turn))
        schedule.remove(-1)
    assert len(schedule) == 200
    assert len(schedule._heap) < 500  # noqa: SLF001 - what it holds on to is not seen outside
    assert schedule.take(Instant(10_000), 1_000) == list(reversed(range(200)))
