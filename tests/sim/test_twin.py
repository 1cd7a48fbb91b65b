"""Days on the SQLite and the Redis store, whose answers the memory store must give as well."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from stanchion.adapters.store.redis import RedisStore
from stanchion.adapters.store.sqlite import SqliteStore
from stanchion.sim.replica import Mutant
from stanchion.sim.scenario import draw
from stanchion.sim.world import Verdict, play
from tests.sim.valkey import playing_on_valkey

SAME = "both stores answer the same"


@cache
def _day(seed: int) -> Verdict:
    return play(draw(seed, "sqlite"))


@pytest.mark.parametrize("seed", [1, 16, 34])
def test_a_day_on_sqlite_has_the_answers_of_a_day_in_memory(seed: int) -> None:
    # 1 has queues; on 16, batches are refused in one step, and metrics count their rows; on 34, one
    # step ends two attempts of a run.
    verdict = _day(seed)
    assert verdict.broken == ()
    assert verdict.checks[SAME] > 1_000


def test_a_day_on_sqlite_is_the_same_every_time() -> None:
    assert play(draw(1, "sqlite")).digest == _day(1).digest


@pytest.mark.parametrize(("verb", "answer"), [("lease_jobs", ()), ("outbox_size", 77)])
def test_an_answer_that_only_sqlite_gives_is_found(
    verb: str, answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wrong(*_arguments: object, **_named: object) -> object:
        return answer

    monkeypatch.setattr(SqliteStore, verb, wrong)
    verdict = play(draw(0, "sqlite"))
    assert any(said.startswith(f"{SAME}: {verb}") for said in verdict.broken), verdict.broken


@pytest.fixture(scope="module")
def on_valkey() -> Iterator[Mutant]:
    with playing_on_valkey() as world:
        yield world


@pytest.mark.parametrize(("seed", "profile"), [(4, "replicas"), (1, "operators"), (7, "queue")])
def test_a_day_on_valkey_has_the_answers_of_a_day_in_memory(
    seed: int, profile: str, on_valkey: Mutant
) -> None:
    # On operators 1 a tenant whose jobs were revoked hid another one from a lease; on queue 7 a
    # promoted run became due again when it was read.
    verdict = play(draw(seed, profile), on_valkey)
    assert verdict.broken == ()
    assert verdict.checks[SAME] > 1_000


def test_a_day_on_valkey_is_the_same_every_time(on_valkey: Mutant) -> None:
    digests = {play(draw(5, "embedded"), on_valkey).digest for _ in range(2)}
    assert len(digests) == 1


def test_an_answer_that_only_valkey_gives_is_found(
    on_valkey: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wrong(*_arguments: object, **_named: object) -> object:
        return 77

    monkeypatch.setattr(RedisStore, "outbox_size", wrong)
    verdict = play(draw(4, "replicas"), on_valkey)
    assert any(said.startswith(f"{SAME}: outbox_size") for said in verdict.broken), verdict.broken
