"""The proxy itself: it passes everything on, until it is told otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from stanchion.drills.proxy import Flow, Loss, Proxy, proxied

SOON_S = 5.0
NEVER_S = 0.1
"""So long nothing may come."""


class Echo:
    """A server that says what it hears, and remembers it."""

    def __init__(self) -> None:
        self.heard = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(1_000):
            self.heard += chunk
            writer.write(chunk)
        writer.close()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def hears(self, size: int, within_s: float = SOON_S) -> bytes:
        async with asyncio.timeout(within_s):
            return await self._reader.readexactly(size)

    async def hears_nothing(self) -> bool:
        try:
            await self.hears(1, NEVER_S)
        except TimeoutError:
            return True
        return False


@pytest.fixture
async def echo() -> AsyncIterator[tuple[Echo, Proxy]]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    async with proxied(server.sockets[0].getsockname()[1]) as proxy:
        yield echo, proxy
    server.close()


@asynccontextmanager
async def client_of(proxy: Proxy) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)


async def test_everything_passes(echo: tuple[Echo, Proxy]) -> None:
    async with client_of(echo[1]) as client:
        large = bytes(range(256)) * 4_000
        client.writer.write(large)
        assert await client.hears(len(large)) == large


async def test_answers_that_are_lost_were_asked_for(echo: tuple[Echo, Proxy]) -> None:
    server, proxy = echo
    async with client_of(proxy) as client:
        proxy.set_flow(replies=Flow.IS_LOST)
        client.writer.write(b"lost")
        assert await client.hears_nothing()
        assert server.heard == b"lost"
        proxy.mend()
        client.writer.write(b"found")
        assert await client.hears(5) == b"found"


async def test_connections_that_lost_something_can_be_broken_and_others_stay(
    echo: tuple[Echo, Proxy],
) -> None:
    proxy = echo[1]
    async with client_of(proxy) as lossy, client_of(proxy) as whole:
        proxy.set_flow(replies=Flow.IS_LOST)
        lossy.writer.write(b"lost")
        assert await lossy.hears_nothing()
        proxy.hang_up_gaps()
        proxy.mend()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await lossy.hears(1)
        whole.writer.write(b"whole")
        assert await whole.hears(5) == b"whole"


async def test_questions_that_are_lost_never_arrive(echo: tuple[Echo, Proxy]) -> None:
    server, proxy = echo
    async with client_of(proxy) as client:
        proxy.set_flow(requests=Flow.IS_LOST)
        client.writer.write(b"lost")
        assert await client.hears_nothing()
        assert server.heard == b""


@pytest.mark.parametrize("direction", ["requests", "replies"])
async def test_what_is_held_arrives_late(echo: tuple[Echo, Proxy], direction: str) -> None:
    proxy = echo[1]
    async with client_of(proxy) as client:
        proxy.set_flow(**{direction: Flow.IS_HELD})
        client.writer.write(b"late")
        assert await client.hears_nothing()
        proxy.set_flow()
        assert await client.hears(4) == b"late"


async def test_a_cut_breaks_what_is_open_and_lets_nothing_in(echo: tuple[Echo, Proxy]) -> None:
    proxy = echo[1]
    async with client_of(proxy) as client:
        client.writer.write(b"x")
        await client.hears(1)
        proxy.cut()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await client.hears(1)
    async with client_of(proxy) as late:
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await late.hears(1)
    proxy.mend()
    async with client_of(proxy) as again:
        again.writer.write(b"y")
        assert await again.hears(1) == b"y"


async def test_a_trap_catches_one_request_and_its_answer(echo: tuple[Echo, Proxy]) -> None:
    server, proxy = echo
    trap = proxy.trap(b"needle", Loss.CUT)
    async with client_of(proxy) as client:
        client.writer.write(b"hay")
        assert await client.hears(3) == b"hay"
        assert not trap.sprung.is_set()
        client.writer.write(b"nee")
        assert await client.hears(3) == b"nee"
        client.writer.write(b"dle")  # The needle may come in two pieces.
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await client.hears(1)
        assert trap.sprung.is_set()
        assert server.heard == b"hayneedle"
    async with client_of(proxy) as again:
        again.writer.write(b"needle")
        assert await again.hears(6) == b"needle"


async def test_a_silent_trap_leaves_the_connection_open(echo: tuple[Echo, Proxy]) -> None:
    server, proxy = echo
    trap = proxy.trap(b"needle", Loss.SILENCE)
    async with client_of(proxy) as client:
        client.writer.write(b"needle")
        async with asyncio.timeout(SOON_S):
            await trap.sprung.wait()
        assert await client.hears_nothing()
        assert server.heard == b"needle"


async def test_a_slow_direction_delays(echo: tuple[Echo, Proxy]) -> None:
    proxy = echo[1]
    proxy.replies_delay_s = 2 * NEVER_S
    async with client_of(proxy) as client:
        client.writer.write(b"slow")
        assert await client.hears_nothing()
        assert await client.hears(4) == b"slow"


async def test_a_tap_is_shown_what_clients_send_and_nothing_else(
    echo: tuple[Echo, Proxy],
) -> None:
    server, proxy = echo
    tapped: list[bytes] = []
    async with client_of(proxy) as client:
        proxy.tap = tapped.append
        client.writer.write(b"first")
        assert await client.hears(5) == b"first"
        proxy.tap = None
        client.writer.write(b"second")
        assert await client.hears(6) == b"second"
    assert b"".join(tapped) == b"first"
    assert server.heard == b"firstsecond"
