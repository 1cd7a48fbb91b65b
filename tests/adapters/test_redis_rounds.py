"""Rounds: whoever has one job waits for one job of each other tenant, in whichever shard."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from stanchion.adapters.store.redis.shards import ReadyCount, Rounds
from stanchion.core.model import Topic

_A, _B = Topic("a"), Topic("b")
_SHARDS = st.dictionaries(
    st.integers(0, 63),
    st.tuples(st.integers(1, 5), st.integers(0, 20)).map(
        lambda each: ReadyCount(each[0], each[0] + each[1])
    ),
    min_size=1,
    max_size=12,
)


def _taken(rounds: Rounds, wanted: int, *topics: Topic) -> Counter[int]:
    shares = rounds.take(topics, wanted)
    return Counter({shard: sum(share.values()) for shard, share in shares.items()})


@given(_SHARDS, st.integers(0, 63))
def test_a_round_takes_one_job_of_every_tenant(waiting: dict[int, ReadyCount], first: int) -> None:
    rounds = Rounds(first)
    rounds.learn(_A, waiting, at=0.0)
    tenants = sum(each.tenants for each in waiting.values())
    assert rounds.knows([_A], tenants, at=100.0)
    assert not rounds.knows([_A], tenants + 1, at=100.0)
    assert _taken(rounds, tenants, _A) == {shard: each.tenants for shard, each in waiting.items()}


@given(_SHARDS, st.integers(0, 63), st.lists(st.integers(1, 7), min_size=1, max_size=40))
def test_no_shard_is_a_whole_round_behind_however_few_are_asked_for(
    waiting: dict[int, ReadyCount], first: int, wants: list[int]
) -> None:
    rounds = Rounds(first)
    plenty = {shard: ReadyCount(each.tenants, 1_000) for shard, each in waiting.items()}
    taken: Counter[int] = Counter()
    for wanted in wants:
        if not rounds.knows([_A], wanted, at=100.0):
            rounds.learn(_A, plenty, at=0.0)
        taken += _taken(rounds, wanted, _A)
    turns = [taken[shard] / each.tenants for shard, each in plenty.items()]
    assert max(turns) - min(turns) <= 1


@given(_SHARDS, st.integers(0, 63), st.integers(0, 200))
def test_no_more_is_taken_than_waits(
    waiting: dict[int, ReadyCount], first: int, wanted: int
) -> None:
    rounds = Rounds(first)
    rounds.learn(_A, waiting, at=0.0)
    taken = _taken(rounds, wanted, _A)
    assert taken.total() == min(wanted, sum(each.jobs for each in waiting.values()))
    assert all(taken[shard] <= waiting[shard].jobs for shard in taken)


def test_two_topics_take_turns_job_by_job() -> None:
    rounds = Rounds(0)
    rounds.learn(_A, {1: ReadyCount(1, 100)}, at=0.0)
    rounds.learn(_B, {2: ReadyCount(1, 1)}, at=0.0)
    assert rounds.take([_A, _B], 3) == {1: {_A: 2}, 2: {_B: 1}}


def test_with_one_job_a_call_topics_take_turns_all_the_same() -> None:
    rounds = Rounds(0)
    rounds.learn(_A, {1: ReadyCount(1, 100)}, at=0.0)
    rounds.learn(_B, {2: ReadyCount(1, 100)}, at=0.0)
    served = [next(iter(next(iter(rounds.take([_A, _B], 1).values())))) for _ in range(6)]
    assert served == [_A, _B, _A, _B, _A, _B]


def test_a_look_is_good_for_the_next_rounds_while_it_is_fresh() -> None:
    rounds = Rounds(0)
    rounds.learn(_A, {1: ReadyCount(1, 3)}, at=10.0)
    assert rounds.knows([_A], 3, at=10.001)
    assert not rounds.knows([_A], 3, at=10.1)
    assert not rounds.knows([_A], 4, at=10.001)
    assert not rounds.knows([_A, _B], 3, at=10.001)


def test_finding_nothing_is_never_good_for_later() -> None:
    rounds = Rounds(0)
    rounds.learn(_A, {}, at=10.0)
    assert not rounds.knows([_A], 1, at=10.0)
    assert rounds.take([_A], 1) == {}


def test_what_was_put_in_here_comes_in_the_same_round() -> None:
    rounds = Rounds(0)
    rounds.learn(_A, {5: ReadyCount(1, 10_000), 7: ReadyCount(1, 10_000)}, at=10.0)
    rounds.hint(6, _A)
    assert rounds.take([_A], 3) == {5: {_A: 1}, 7: {_A: 1}, 6: {_A: 1}}


def test_what_nobody_here_asked_for_is_not_remembered() -> None:
    rounds = Rounds(0)
    rounds.hint(3, _B)
    assert rounds.take([_B], 1) == {}


def test_after_a_look_that_found_nothing_a_hint_is_enough_however_old_the_look() -> None:
    rounds = Rounds(first_shard=0)
    rounds.learn(_A, {3: ReadyCount(1, 1)}, at=0.0)
    assert rounds.take([_A], 1) == {3: {_A: 1}}
    rounds.learn(_A, {}, at=0.0)
    rounds.hint(3, _A)
    assert rounds.knows([_A], 1, at=3_600.0)
    assert rounds.take([_A], 1) == {3: {_A: 1}}
