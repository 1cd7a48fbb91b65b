"""Lines in Redis: bells that are not heard, and what is left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from stanchion.adapters.locks.redis.locks import RedisTurns
from stanchion.ports.locks import Granted, LockReleased
from stanchion.ports.turns import Place
from tests.servers import Server, running_server

NAME = "invoice:42"
_MS = 30_000
_SOON_S = 10.0


@pytest.fixture
async def turns(server: Server, namespace: str) -> AsyncIterator[RedisTurns]:
    turns = await RedisTurns.open(server.url, namespace=namespace, timeout_s=5.0)
    yield turns
    await turns.close()


async def _acquire(turns: RedisTurns, token: str) -> None:
    answer = await turns.acquire(NAME, token, ttl_ms=_MS, within_ms=_MS)
    assert isinstance(answer, Granted)


async def _join(turns: RedisTurns, token: str, ticket_ms: int = _MS) -> Place:
    return await turns.join(NAME, token, ticket_ms=ticket_ms, within_ms=_MS)


async def _release(turns: RedisTurns, token: str) -> None:
    assert await turns.release(NAME, token, within_ms=_MS) == LockReleased()


def _listeners(server: Server) -> set[str]:
    with server.client() as client:
        return {each["id"] for each in client.client_list(_type="pubsub")}


async def _until_heard(turns: RedisTurns, server: Server, token: str) -> set[str]:
    """Join until there is a connection on which the bell is heard; it takes a moment of rest."""
    async with asyncio.timeout(_SOON_S):
        while True:
            await _join(turns, token)
            if listeners := _listeners(server):
                return listeners
            await asyncio.sleep(0.02)


def _keys(server: Server, namespace: str) -> set[str]:
    with server.client() as client:
        return {key.rpartition("}:")[2] for key in client.keys(f"{namespace}:*")}


async def test_nobody_listens_before_somebody_waits(turns: RedisTurns, server: Server) -> None:
    before = _listeners(server)
    await _acquire(turns, "holder")
    assert _listeners(server) == before
    for number in range(10):
        await _join(turns, f"waiter-{number}")
    assert len(_listeners(server) - before) == 1


async def test_a_connection_that_was_lost_is_made_again(turns: RedisTurns, server: Server) -> None:
    await _acquire(turns, "holder")
    await _join(turns, "first")
    with server.client() as client:
        client.client_kill_filter(_type="pubsub")
    await _release(turns, "holder")
    # Nobody heard it, and that is all: whoever looks sees.
    assert not await turns.bell(NAME, "first", at_most_ms=50)
    assert await _join(turns, "first") == Place(0, 0)
    await _acquire(turns, "first")
    await _until_heard(turns, server, "second")
    await _release(turns, "first")
    assert await turns.bell(NAME, "second", at_most_ms=5_000)


async def test_a_connection_that_has_gone_silent_is_given_up(namespace: str) -> None:
    with running_server() as server:
        turns = await RedisTurns.open(server.url, namespace=namespace, timeout_s=5.0)
        await _acquire(turns, "holder")
        await _join(turns, "first")
        [before] = _listeners(server)
        server.pause()
        until = time.monotonic() + 1.3
        while time.monotonic() < until:
            assert not await turns.bell(NAME, "first", at_most_ms=100)
        server.resume()
        assert before not in await _until_heard(turns, server, "first")
        await _release(turns, "holder")
        assert await turns.bell(NAME, "first", at_most_ms=5_000)
        await turns.close()


async def test_a_bell_can_wait_while_the_server_is_gone(namespace: str) -> None:
    with running_server() as server:
        turns = await RedisTurns.open(server.url, namespace=namespace, timeout_s=5.0)
        await _acquire(turns, "holder")
        await _join(turns, "first")
        server.kill()
        assert not await turns.bell(NAME, "first", at_most_ms=100)
        await turns.close()


async def test_a_user_who_may_not_publish_still_gets_the_turns_right(
    server: Server, namespace: str
) -> None:
    with server.client() as client:
        client.execute_command(
            "ACL", "SETUSER", "quiet", "on", ">secret", "allkeys", "resetchannels", "+@all"
        )
    turns = await RedisTurns.open(
        f"redis://quiet:secret@{server.address}", namespace=namespace, timeout_s=5.0
    )
    await _acquire(turns, "holder")
    await _join(turns, "first")
    await _join(turns, "second")
    await _release(turns, "holder")
    assert not await turns.bell(NAME, "first", at_most_ms=50)
    assert (await _join(turns, "second")).ahead == 1
    assert await _join(turns, "first") == Place(0, 0)
    await _acquire(turns, "first")
    await turns.close()


async def test_those_who_left_leave_nothing_behind(
    turns: RedisTurns, server: Server, namespace: str
) -> None:
    await _acquire(turns, "holder")
    before = _keys(server, namespace)
    for token in ("first", "second"):
        await _join(turns, token)
    assert _keys(server, namespace) - before == {f"queue:{NAME}", f"tickets:{NAME}"}
    await _release(turns, "holder")
    await _acquire(turns, "first")
    await turns.leave(NAME, "second", within_ms=_MS)
    assert _keys(server, namespace) == before


async def test_a_line_goes_with_its_last_ticket(
    turns: RedisTurns, server: Server, namespace: str
) -> None:
    await _acquire(turns, "holder")
    before = _keys(server, namespace)
    await _join(turns, "first", ticket_ms=300)
    await _join(turns, "second", ticket_ms=100)
    until = time.monotonic() + _SOON_S
    while _keys(server, namespace) != before:
        assert time.monotonic() < until
        await asyncio.sleep(0.05)


async def test_many_who_wait_share_one_connection_and_each_hears_their_own_bell(
    turns: RedisTurns, server: Server
) -> None:
    before = _listeners(server)
    names = [f"invoice:{number}" for number in range(20)]
    for name in names:
        await turns.acquire(name, "holder", ttl_ms=_MS, within_ms=_MS)
        await turns.join(name, f"waits for {name}", ticket_ms=_MS, within_ms=_MS)
    assert len(_listeners(server) - before) == 1
    for name in names:
        others = [
            asyncio.create_task(turns.bell(other, f"waits for {other}", at_most_ms=_MS))
            for other in names
            if other > name
        ]
        await turns.release(name, "holder", within_ms=_MS)
        assert await turns.bell(name, f"waits for {name}", at_most_ms=5_000)
        assert not any(other.done() for other in others)
        for other in others:
            other.cancel()
