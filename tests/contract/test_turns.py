"""Turns: a name that many want goes from hand to hand, in the order in which they came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stanchion.ports.errors import BackendTimeout
from stanchion.ports.locks import (
    AcquireAnswer,
    AcquireTooLate,
    Granted,
    Held,
    LockReleased,
    NotOwned,
)
from stanchion.ports.turns import Place, Turns
from tests.contract.harness import LONG_MS
from tests.leases.stages import FileStage, MemoryStage, ServerStage, Stage
from tests.servers import Cluster, Server

# Everything that is promised of locks is promised of these too: the same cases, once more.
from tests.contract.test_locks import *  # noqa: F403 - the cases themselves  # isort: skip

_WITHIN_MS = 30_000
_RING_MS = 5_000
"""A bell that rings does so long before."""
_SILENCE_MS = 100
NAME = "invoice/1"


@pytest.fixture
async def harness(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stage]:
    stage = _stage(request, tmp_path)
    yield stage
    await stage.close()


@pytest.fixture
async def turns(harness: Stage) -> Turns:
    return await harness.open()


@pytest.fixture
async def locks(harness: Stage) -> Turns:
    return await harness.open()


@pytest.fixture
async def durable_locks(harness: Stage) -> Turns:
    return await harness.open()


def _stage(request: pytest.FixtureRequest, directory: Path) -> Stage:
    match request.param:
        case "memory":
            return MemoryStage()
        case "sqlite":
            return FileStage(directory)
        case "cluster":
            cluster: Cluster = request.getfixturevalue("valkey_cluster")
            return ServerStage(cluster.url, cluster.servers[0].url)
        case name:
            server: Server = request.getfixturevalue(f"{name}_server")
            return ServerStage(server.url, server.url)


# ── Whose turn it is ─────────────────────────────────────────────────────────────────────────────


async def test_a_name_that_nobody_waits_for_needs_no_ticket(turns: Turns) -> None:
    assert isinstance(await _acquire(turns, "me"), Granted)


async def test_whoever_waits_goes_before_whoever_comes(turns: Turns) -> None:
    await _acquire(turns, "holder")
    await _join(turns, "first")
    await _release(turns, "holder")
    assert isinstance(await _acquire(turns, "newcomer"), Held)
    assert isinstance(await _acquire(turns, "first"), Granted)


async def test_those_who_wait_go_in_the_order_in_which_they_came(turns: Turns) -> None:
    waiting = [f"waiter-{number}" for number in range(5)]
    await _acquire(turns, "holder")
    for token in waiting:
        await _join(turns, token)
    holder = "holder"
    for token in waiting:
        await _release(turns, holder)
        others = [each for each in waiting if each != token]
        answers = [await _acquire(turns, each) for each in reversed(others)]
        assert all(isinstance(answer, Held) for answer in answers)
        assert isinstance(await _acquire(turns, token), Granted)
        holder = token


async def test_of_many_who_join_at_once_everyone_has_a_place_of_their_own(turns: Turns) -> None:
    await _acquire(turns, "holder")
    places = await asyncio.gather(*(_join(turns, f"t{number}") for number in range(30)))
    assert sorted(place.ahead for place in places) == list(range(30))


async def test_to_try_is_not_to_wait(turns: Turns) -> None:
    await _acquire(turns, "holder")
    assert isinstance(await _acquire(turns, "passer-by"), Held)
    assert (await _join(turns, "first")).ahead == 0


async def test_the_holder_who_asks_again_is_answered_though_others_wait(turns: Turns) -> None:
    granted = await _acquire(turns, "holder")
    await _join(turns, "first")
    assert await _acquire(turns, "holder") == granted


async def test_whoever_is_granted_the_name_has_left_the_line(turns: Turns) -> None:
    await _join(turns, "first")
    assert isinstance(await _acquire(turns, "first"), Granted)
    assert (await _join(turns, "second")).ahead == 0
    await turns.leave(NAME, "second", within_ms=_WITHIN_MS)
    await _release(turns, "first")
    assert isinstance(await _acquire(turns, "newcomer"), Granted)


async def test_names_have_lines_of_their_own(turns: Turns) -> None:
    await _join(turns, "me", name="a")
    assert isinstance(await _acquire(turns, "you", name="b"), Granted)
    assert (await _join(turns, "you", name="b")).ahead == 0


@pytest.mark.parametrize("name", ["a{b}c", "ü/€", "with space", "line\nbreak", "x" * 300, "{}"])
async def test_a_name_with_odd_characters_has_a_line_like_any_other(
    turns: Turns, name: str
) -> None:
    await _acquire(turns, "holder", name=name)
    await _join(turns, "first", name=name)
    assert await turns.release(name, "holder", within_ms=_WITHIN_MS) == LockReleased()
    assert await turns.bell(name, "first", at_most_ms=_RING_MS)
    assert isinstance(await _acquire(turns, "newcomer", name=name), Held)
    assert isinstance(await _acquire(turns, "first", name=name), Granted)


async def test_a_request_executed_after_its_time_keeps_its_ticket(turns: Turns) -> None:
    await _join(turns, "first")
    try:
        answer = await turns.acquire(NAME, "first", ttl_ms=LONG_MS, within_ms=-1_000)
        assert answer == AcquireTooLate()
    except BackendTimeout:
        pass  # an adapter may say at once that there is no time left
    assert (await _join(turns, "second")).ahead == 1


async def test_whoever_is_not_the_holder_lets_nobody_in(turns: Turns) -> None:
    await _acquire(turns, "holder")
    await _join(turns, "first")
    assert await turns.release(NAME, "first", within_ms=_WITHIN_MS) == NotOwned()
    assert not await turns.bell(NAME, "first", at_most_ms=_SILENCE_MS)
    assert isinstance(await _acquire(turns, "first"), Held)


# ── Tickets ──────────────────────────────────────────────────────────────────────────────────────


async def test_joining_again_keeps_the_place(turns: Turns) -> None:
    await _acquire(turns, "holder")
    await _join(turns, "first")
    assert (await _join(turns, "second")).ahead == 1
    assert (await _join(turns, "first")).ahead == 0


async def test_joining_again_keeps_the_place_for_longer(turns: Turns, harness: Stage) -> None:
    await _join(turns, "first", ticket_ms=harness.short_ms)
    await _join(turns, "first", ticket_ms=LONG_MS)
    await harness.pass_time(harness.short_ms)
    assert (await _join(turns, "second")).ahead == 1


async def test_whoever_crashed_while_waiting_is_passed_over_when_the_ticket_ends(
    turns: Turns, harness: Stage
) -> None:
    await _acquire(turns, "holder")
    await _join(turns, "crashed", ticket_ms=harness.short_ms)
    await _join(turns, "second")
    await harness.pass_time(harness.short_ms)
    await _release(turns, "holder")
    assert await turns.bell(NAME, "second", at_most_ms=_RING_MS)
    assert isinstance(await _acquire(turns, "second"), Granted)


async def test_whoever_comes_too_late_joins_at_the_end(turns: Turns, harness: Stage) -> None:
    await _acquire(turns, "holder")
    await _join(turns, "late", ticket_ms=harness.short_ms)
    await _join(turns, "second")
    await harness.pass_time(harness.short_ms)
    assert (await _join(turns, "late")).ahead == 1
    assert (await _join(turns, "second")).ahead == 0


async def test_a_line_that_everybody_has_deserted_holds_nobody_up(
    turns: Turns, harness: Stage
) -> None:
    for number in range(3):
        await _join(turns, f"gone-{number}", ticket_ms=harness.short_ms)
    assert isinstance(await _acquire(turns, "newcomer"), Held)
    await harness.pass_time(harness.short_ms)
    assert isinstance(await _acquire(turns, "newcomer"), Granted)


async def test_whoever_leaves_lets_the_next_one_up(turns: Turns) -> None:
    await _acquire(turns, "holder")
    await _join(turns, "first")
    await _join(turns, "second")
    await turns.leave(NAME, "first", within_ms=_WITHIN_MS)
    assert (await _join(turns, "second")).ahead == 0
    await _release(turns, "holder")
    assert isinstance(await _acquire(turns, "second"), Granted)


async def test_one_may_leave_without_having_come(turns: Turns) -> None:
    await turns.leave(NAME, "nobody", within_ms=_WITHIN_MS)
    await _join(turns, "first")
    await turns.leave(NAME, "first", within_ms=_WITHIN_MS)
    await turns.leave(NAME, "first", within_ms=_WITHIN_MS)
    assert isinstance(await _acquire(turns, "newcomer"), Granted)


# ── When to look again ───────────────────────────────────────────────────────────────────────────


async def test_the_first_in_line_for_a_free_name_need_not_wait(turns: Turns) -> None:
    assert await _join(turns, "first") == Place(ahead=0, look_again_in_ms=0)


async def test_while_the_name_is_held_it_is_worth_looking_when_its_term_ends(turns: Turns) -> None:
    await _acquire(turns, "holder", ttl_ms=LONG_MS)
    for ahead, token in enumerate(("first", "second")):
        place = await _join(turns, token, ticket_ms=1_000)
        assert place.ahead == ahead
        assert 1_000 < place.look_again_in_ms <= LONG_MS


async def test_behind_somebody_silent_it_is_worth_looking_when_the_ticket_ends(
    turns: Turns,
) -> None:
    await _join(turns, "silent", ticket_ms=5_000)
    place = await _join(turns, "second", ticket_ms=LONG_MS)
    assert place.ahead == 1
    assert 0 < place.look_again_in_ms <= 5_000
    refused = await _acquire(turns, "newcomer")
    assert isinstance(refused, Held)
    assert 0 < refused.expires_in_ms <= 5_000


# ── Bells ────────────────────────────────────────────────────────────────────────────────────────


async def test_a_release_rings_for_the_first_in_line_and_for_nobody_else(turns: Turns) -> None:
    await _acquire(turns, "holder")
    await _join(turns, "first")
    await _join(turns, "second")
    first = asyncio.create_task(turns.bell(NAME, "first", at_most_ms=_RING_MS))
    second = asyncio.create_task(turns.bell(NAME, "second", at_most_ms=_SILENCE_MS))
    await _release(turns, "holder")
    assert await first
    assert not await second


async def test_a_bell_that_rang_before_anybody_listened_is_not_missed(turns: Turns) -> None:
    await _acquire(turns, "holder")
    await _join(turns, "first")
    await _release(turns, "holder")
    assert await turns.bell(NAME, "first", at_most_ms=_RING_MS)


async def test_without_a_release_the_bell_is_silent_and_the_wait_is_over_in_time(
    turns: Turns,
) -> None:
    await _acquire(turns, "holder")
    await _join(turns, "first")
    began = time.monotonic()
    assert not await turns.bell(NAME, "first", at_most_ms=_SILENCE_MS)
    assert _SILENCE_MS / 1000 <= time.monotonic() - began + 0.01 < 5


async def test_whoever_leaves_when_the_name_is_free_passes_the_bell_on(turns: Turns) -> None:
    await _acquire(turns, "holder")
    await _join(turns, "first")
    await _join(turns, "second")
    await _release(turns, "holder")
    await turns.leave(NAME, "first", within_ms=_WITHIN_MS)
    assert await turns.bell(NAME, "second", at_most_ms=_RING_MS)


async def test_an_operator_who_takes_the_name_away_rings_too(turns: Turns) -> None:
    await _acquire(turns, "holder")
    await _join(turns, "first")
    assert await turns.force_release(NAME)
    assert await turns.bell(NAME, "first", at_most_ms=_RING_MS)


async def test_listening_can_be_cancelled(turns: Turns) -> None:
    await _acquire(turns, "holder")
    await _join(turns, "first")
    listening = asyncio.create_task(turns.bell(NAME, "first", at_most_ms=LONG_MS))
    await asyncio.sleep(0)
    listening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listening
    await _release(turns, "holder")
    assert await turns.bell(NAME, "first", at_most_ms=_RING_MS)


# ── Several openers ──────────────────────────────────────────────────────────────────────────────


async def test_a_line_is_shared_by_all_who_have_the_store_open(
    durable_locks: Turns, harness: Stage
) -> None:
    here, there = durable_locks, await harness.open()
    await _acquire(here, "holder")
    assert (await _join(there, "first")).ahead == 0
    assert (await _join(here, "second")).ahead == 1
    listening = asyncio.create_task(there.bell(NAME, "first", at_most_ms=_RING_MS))
    await _release(here, "holder")
    assert await listening
    assert isinstance(await _acquire(here, "second"), Held)
    assert isinstance(await _acquire(there, "first"), Granted)
    await _release(there, "first")
    assert await here.bell(NAME, "second", at_most_ms=_RING_MS)
    assert isinstance(await _acquire(here, "second"), Granted)


async def _acquire(
    turns: Turns, token: str, *, name: str = NAME, ttl_ms: int = LONG_MS
) -> AcquireAnswer:
    return await turns.acquire(name, token, ttl_ms=ttl_ms, within_ms=_WITHIN_MS)


async def _join(turns: Turns, token: str, *, name: str = NAME, ticket_ms: int = LONG_MS) -> Place:
    return await turns.join(name, token, ticket_ms=ticket_ms, within_ms=_WITHIN_MS)


async def _release(turns: Turns, token: str) -> None:
    assert await turns.release(NAME, token, within_ms=_WITHIN_MS) == LockReleased()
