"""Connections over real sockets: deadlines, slots, turns, and where a request begins and ends."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import resource
import socket
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from weakref import ref

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from stanchion.gateway import GatewayOptions
from stanchion.gateway.exchange import CancelScope, Exchange
from stanchion.gateway.load import READ_BYTES, TURN_BYTES
from stanchion.gateway.protocol import GuardedProtocol, guarded
from stanchion.sim.loop import run
from tests.gateway.house import ADMIN, GET, ONE_STEP, Served, problem, served

CLOSE = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
RUNS = CLOSE.replace(b"/livez", b"/v1/runs")
START = b"POST /v1/workflows/one-step/runs HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"


def connections() -> list[GuardedProtocol]:
    """The server's side of every connection that is open."""
    found = [each for each in gc.get_objects() if isinstance(each, GuardedProtocol)]
    return [each for each in found if each in each.connections]


async def turn(server: Served) -> None:
    """Come back when the server has handled what was sent before."""
    assert (await server.say(CLOSE)).startswith(b"HTTP/1.1 200")


LARGE = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000000\r\n\r\n"
IDLE = {
    "nothing was sent": (b"", b""),
    "a blank line": (b"\r\n", b""),
    "blank lines": (b"\r\n" * 50, b""),
    "part of a request line": (b"GET /liv", b""),
    "part of a head": (b"GET /livez HTTP/1.1\r\nHost: loc", b""),
    "a request was answered": (GET, b"}}"),
    "a request was answered, then a blank line": (GET + b"\r\n", b"}}"),
    "a request was answered, the next has begun": (GET + b"GET /", b"}}"),
    "a request was refused": (GET.replace(b"livez", b"nowhere"), b"}"),
    "a body was refused and does not come": (LARGE, b"}"),
    "a body was refused and came": (LARGE + b"y" * 2_000_000, b"}"),
    "an answer without a body": (GET.replace(b"GET", b"HEAD"), b"\r\n\r\n"),
    "an upgrade was offered": (GET.replace(b"\r\n\r\n", b"\r\nUpgrade: h2c\r\n\r\n"), b"}}"),
    "a hundred requests were answered": (GET * 100, b"}}"),
}


async def test_every_connection_without_a_request_to_serve_has_a_deadline() -> None:
    async with served() as server:
        for state, (sent, answered) in IDLE.items():
            async with server.line() as (reader, writer):
                writer.write(sent)
                await writer.drain()
                for _ in range(max(1, sent.count(b"GET /livez")) if answered else 0):
                    await reader.readuntil(answered)
                await turn(server)
                open_now = [each for each in connections() if each in each.idle]
                assert open_now, state
                assert all(each.has_deadline for each in open_now), state


async def test_the_kernel_does_not_keep_more_and_more_for_a_connection() -> None:
    body = b'{"input": ' + b" " * 900_000 + b"{}}"
    request = START + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with served() as server, server.line() as (reader, writer):
        for _ in range(8):
            writer.write(request + body)
            await reader.readuntil(b"\r\n\r\n")
        (mine,) = connections()
        theirs = mine.transport.get_extra_info("socket")
        # Linux counts twice: as much again for its own use.
        assert theirs.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) <= 2 * 64 * 1024


class Sent(asyncio.Transport):
    """A connection without a socket, whose client reads all that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        """What is sent is sent by the test."""

    def resume_reading(self) -> None:
        """As above."""

    def close(self) -> None:
        self.is_closed = True

    abort = close


def test_a_connection_is_closed_when_its_next_request_does_not_begin_in_time() -> None:
    async def answer(_scope: Scope, _receive: Receive, send: Send) -> None:
        await asyncio.sleep(20)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def connected() -> None:
        config = uvicorn.Config(
            answer, http=guarded(GatewayOptions(), 10), timeout_keep_alive=75, log_config=None
        )
        config.load()
        loop, sent = asyncio.get_running_loop(), Sent()
        server = ServerState()
        protocol = GuardedProtocol(config=config, server_state=server, app_state={}, _loop=loop)
        protocol.connection_made(sent)
        for number, idle_s in enumerate((50, 74, 74), 1):
            protocol.data_received(GET)
            before = protocol.has_deadline
            await asyncio.sleep(20.5)
            assert sent.written.count(b"200 OK") == number
            assert (before, protocol.has_deadline) == (False, True)
            await asyncio.sleep(idle_s)
            assert not sent.is_closing()
        await asyncio.sleep(1.1)
        assert sent.is_closing()
        protocol.connection_lost(None)
        protocol = GuardedProtocol(config=config, server_state=server, app_state={}, _loop=loop)
        protocol.connection_made(Sent())
        protocol.data_received(GET)
        await asyncio.sleep(20.5)
        lost = ref(protocol)
        protocol.connection_lost(None)
        del protocol
        assert lost() is None, "no timer keeps a lost connection"

    run(connected())


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (b"Content-Length: 9\r\n\r\ny", b""),
        (b"Transfer-Encoding: chunked\r\n\r\n", b"no number\r\n"),
        (b"Transfer-Encoding: chunked\r\n\r\n", b"0\r\nX: " + b"y" * 100_000),
    ],
    ids=["late", "broken", "with large trailers"],
)
def test_a_refused_request_has_one_answer_whatever_the_rest_is(first: bytes, last: bytes) -> None:
    async def refuse(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    async def connected() -> None:
        config = uvicorn.Config(
            refuse, http=guarded(GatewayOptions(), 10), timeout_keep_alive=75, log_config=None
        )
        config.load()
        loop, sent = asyncio.get_running_loop(), Sent()
        protocol = GuardedProtocol(
            config=config, server_state=ServerState(), app_state={}, _loop=loop
        )
        protocol.connection_made(sent)
        protocol.data_received(START + first)
        for _ in range(5):
            await asyncio.sleep(5)
            assert not sent.is_closing()
            protocol.data_received(b"y" if b"Content" in first else b"1\r\ny\r\n")
        protocol.data_received(last)
        await asyncio.sleep(6)
        assert sent.is_closing()
        assert sent.written.count(b"HTTP/1.1 ") == 1
        protocol.connection_lost(None)

    run(connected())


def test_a_request_is_not_too_late_while_the_one_before_it_keeps_it_from_being_read() -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "GET":
            await asyncio.sleep(50)
        else:
            while (await receive())["more_body"]:
                pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def connected() -> None:
        config = uvicorn.Config(answer, http=guarded(GatewayOptions(), 10), log_config=None)
        config.load()
        loop, sent = asyncio.get_running_loop(), Sent()
        protocol = GuardedProtocol(
            config=config, server_state=ServerState(), app_state={}, _loop=loop
        )
        protocol.connection_made(sent)
        protocol.data_received(GET + START + b"Content-Length: 99999\r\n\r\n" + b"y" * 70_000)
        await asyncio.sleep(51)
        assert sent.written.count(b"HTTP/1.1 200") == sent.written.count(b"HTTP/1.1 ") == 1
        protocol.data_received(b"y" * 29_999)
        await asyncio.sleep(1)
        assert sent.written.count(b"HTTP/1.1 200") == 2
        protocol.data_received(START + b"Content-Length: 9\r\n\r\n")
        await asyncio.sleep(31)
        assert b"HTTP/1.1 408" in sent.written
        protocol.connection_lost(None)

    run(connected())


async def test_blank_lines_do_not_stop_the_clock() -> None:
    async with served(GatewayOptions(head_timeout_s=0.3)) as server:
        assert await server.say(b"\r\n", b"\r\n\r\n") == b""
        async with server.line() as (reader, writer), asyncio.timeout(5):
            for _ in range(2):
                writer.write(GET)
                await reader.readuntil(b"}}")
            writer.write(b"\r\n")
            assert await reader.read() == b""


async def test_a_head_of_one_byte_at_a_time_is_cut_off_at_its_time() -> None:
    async with served(GatewayOptions(head_timeout_s=0.4)) as server, server.line() as (reader, w):
        answer = asyncio.create_task(reader.read())
        for byte in GET * 10:
            if answer.done():
                break
            w.write(bytes([byte]))
            await asyncio.sleep(0.05)
        assert problem(await answer) == (408, "request_timeout")


async def test_a_closing_connection_is_not_kept_for_a_reader_who_takes_nothing() -> None:
    async with served(GatewayOptions(write_timeout_s=0.3)) as server:
        server.house.app.state.openapi = b"x" * (24 * 1024 * 1024)
        async with server.line() as (_, writer):
            await turn(server)
            writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport that reads, too
            (mine,) = connections()
            # As if it were less than the transport reports: it then never pauses the writer.
            mine.transport.set_write_buffer_limits(high=1 << 30)
            writer.write(CLOSE.replace(b"/livez", b"/openapi.json"))
            async with asyncio.timeout(5):
                while connections():  # noqa: ASYNC110 - nobody is told
                    await asyncio.sleep(0.02)


@asynccontextmanager
async def full(options: GatewayOptions | None = None) -> AsyncIterator[Served]:
    """A server with 16 slots, each with a request that waits."""
    options = options or GatewayOptions(connections_max=16)
    async with served(options) as server, AsyncExitStack() as busy:
        run_id = await server.house.start()
        wait = b"GET /v1/runs/%b?wait=60 HTTP/1.1\r\nHost: localhost\r\n\r\n" % run_id.encode()
        for _ in range(16):
            _, writer = await busy.enter_async_context(server.line())
            writer.write(wait)
        await server.house.has_under_way("waits", count=16)
        yield server
        assert server.house.metric("stanchion_http_under_way", kind="waits") == 16


async def test_the_longest_idle_connection_makes_place_for_a_new_one() -> None:
    async with served(GatewayOptions(connections_max=16)) as server, AsyncExitStack() as many:
        lines = [await many.enter_async_context(server.line()) for _ in range(16)]
        for reader, writer in (lines[0], *lines[2:]):  # the second one has been idle for longest
            writer.write(GET)
            await reader.readuntil(b"}}")
        assert (await server.say(RUNS)).startswith(b"HTTP/1.1 200")
        async with asyncio.timeout(2):
            assert await lines[1][0].read() == b""
        for reader, writer in (lines[0], *lines[2:]):
            writer.write(GET)
            assert b" 200 " in await reader.readuntil(b"}}")


async def test_probes_are_answered_when_every_slot_is_busy_and_nothing_else_is() -> None:
    async with full() as server:
        for path in (b"/livez", b"/readyz"):
            answer = await server.say(GET.replace(b"/livez", path))
            assert answer.startswith(b"HTTP/1.1 200"), answer
        assert problem(await server.say(GET.replace(b"/livez", b"/v1/runs"))) == (503, "overloaded")


async def test_connections_that_say_nothing_do_not_keep_probes_out() -> None:
    async with full() as server, AsyncExitStack() as many:
        for _ in range(100):
            _, writer = await many.enter_async_context(server.line())
            writer.write(b"\r\n")
        assert (await server.say(CLOSE)).startswith(b"HTTP/1.1 200")
        assert len(connections()) <= 16 + 33


async def test_slow_heads_do_not_keep_others_out() -> None:
    async with served(GatewayOptions(connections_max=16)) as server, AsyncExitStack() as many:
        for _ in range(64):
            _, writer = await many.enter_async_context(server.line())
            writer.write(b"GET /livez HT")
        assert (await server.say(RUNS)).startswith(b"HTTP/1.1 200")


async def test_connections_that_reset_at_once_leave_nothing_behind() -> None:
    async with served(GatewayOptions(connections_max=16)) as server:
        for _ in range(300):
            with socket.create_connection(("127.0.0.1", server.port)) as line:
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                line.sendall(GET)
            await asyncio.sleep(0)
        await turn(server)
        async with asyncio.timeout(5):
            while connections():  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0.02)


LEFT = {
    "a request was answered": (GET, b"}}"),
    "a blank line": (b"\r\n", b""),
    "a request was refused": (GET.replace(b"livez", b"nowhere"), b"}"),
    "a request waits": (GET.replace(b"/livez", b"/v1/runs/{run_id}?wait=60"), b""),
    "requests are queued": (GET.replace(b"/livez", b"/v1/runs/{run_id}?wait=60") + GET * 5, b""),
    "a body has not come": (START + b"Content-Length: 2\r\n\r\n{", b""),
    "a stream of events is open": (GET.replace(b"/livez", b"/v1/events"), b"\r\n\r\n"),
    "an upgrade was offered": (GET.replace(b"\r\n\r\n", b"\r\nUpgrade: h2c\r\n\r\n"), b"}}"),
}


@pytest.mark.parametrize("state", LEFT)
async def test_a_lost_connection_needs_no_garbage_collector(state: str) -> None:
    sent, answered = LEFT[state]
    async with served() as server:
        run_id = await server.house.start()
        gc.collect()
        gc.disable()
        try:
            async with server.line() as (reader, writer):
                writer.write(sent.replace(b"{run_id}", run_id.encode()))
                if answered:
                    await reader.readuntil(answered)
                await turn(server)
                assert connections()
                writer.transport.abort()
            async with asyncio.timeout(5):
                while _of_requests():  # noqa: ASYNC110 - there is no event for it
                    await asyncio.sleep(0.02)
        finally:
            gc.enable()


def _of_requests() -> list[object]:
    """What is left of connections and their requests, in use or not."""
    kinds = (GuardedProtocol, RequestResponseCycle, Exchange, CancelScope)
    return [each for each in gc.get_objects() if isinstance(each, kinds)]


async def test_pipelined_requests_are_parsed_a_few_at_a_time_and_all_answered() -> None:
    at_most = 17 + 8 * 1024 // len(GET)
    async with served() as server, server.line() as (reader, writer):
        for rounds, at_once in ((20, 100), (1, 3_000)):  # in reads below and above a slice
            for _ in range(rounds):
                writer.write(GET * at_once)
                assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 200")
                (mine,) = connections()
                assert len(mine.pipeline) <= at_most
            for _ in range(rounds * (at_once - 1)):
                assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 200")


WAIT = b'{"worker_id":"w","topics":["work"],"wait_s":60}'
WAIT = b"POST /v1/worker/lease HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (
    len(WAIT),
    WAIT,
)


async def test_no_more_is_read_while_many_requests_wait_for_a_slow_one() -> None:
    padded = GET.replace(b"\r\n\r\n", b"\r\nX: %b\r\n\r\n" % (b"y" * 8_000))
    async with served() as server, server.line() as (reader, writer):
        writer.write(WAIT + GET * 30 + padded * 800)
        await server.house.has_under_way("waits")
        for _ in range(50):
            await turn(server)
        (mine,) = [each for each in connections() if each not in each.idle]
        assert len(mine._held) <= READ_BYTES, "it has a length of 6 MB"  # noqa: SLF001 - what it keeps
        await server.house.start()
        answers = b""
        async with asyncio.timeout(8):
            while answers.count(b"HTTP/1.1 200") < 831:
                answers += await reader.read(1 << 16)


async def test_little_is_read_of_a_body_that_waits_for_requests_before_it() -> None:
    body = b"{}".ljust(1_000_000)
    last = START + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    async with served() as server, server.line() as (reader, writer):
        writer.write(GET * 15 + WAIT + last)  # each answer lets the connection read again
        await server.house.has_under_way("waits")
        for _ in range(50):
            await turn(server)
        (mine,) = [each for each in connections() if each not in each.idle]
        assert 0 < len(mine.cycle.body) <= READ_BYTES
        await server.house.start()
        answers = await reader.read()
        assert answers.count(b"HTTP/1.1 200") == 17


async def test_a_large_body_behind_pipelined_requests_arrives_whole() -> None:
    async with served() as server, server.line() as (reader, writer):
        await server.house.start()
        body = b'{"input": {"x": "%b"}}' % (b"y" * 200_000)
        writer.write(GET * 600 + START + b"Content-Length: %d\r\n\r\n" % len(body) + body + GET)
        for _ in range(600):
            await reader.readuntil(b"}}")
        assert b" 200 " in await reader.readuntil(b"}")
        assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 200")


_BROKEN = {
    "no request at all": (b"BAD\0 REQUEST\r\n\r\n", (400, "malformed_request")),
    "two lengths": (START + b"Content-Length: 2\r\nContent-Length: 3\r\n", None),
    "a chunk without a size": (START + CHUNKED.replace(b"2\r\n{}", b"x"), None),
    "a head without end": (b"GET /livez HTTP/1.1\r\nX: ", (408, "request_timeout")),
    "a body without end": (START + b"Content-Length: 9\r\n\r\n", (408, "request_timeout")),
}


@pytest.mark.parametrize("broken", _BROKEN.values(), ids=_BROKEN)
async def test_a_broken_request_does_not_take_the_answers_of_those_before_it(
    broken: tuple[bytes, tuple[int, str] | None],
) -> None:
    sent, expected = broken
    options = GatewayOptions(head_timeout_s=0.2, body_timeout_s=0.2)
    async with served(options) as server, server.line() as (reader, writer):
        await server.house.start()
        asked = b'{"worker_id": "w", "topics": ["none"], "wait_s": 0.6}'
        wait = b"POST /v1/worker/lease HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
        writer.write(wait % (len(asked), asked) + GET * 2 + sent)
        assert b'"jobs":[]' in await reader.readuntil(b"}")
        for _ in range(2):
            assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 200")
        async with asyncio.timeout(5):
            assert problem(await reader.read()) == (expected or (400, "malformed_request"))


async def test_a_transfer_coding_other_than_chunked_is_refused() -> None:
    async with served() as server:
        await server.house.start()
        for coding in (b"gzip, chunked", b"gzip,chunked", b"identity, chunked"):
            head = START + CHUNKED.replace(b"chunked", coding) + b"\r\n"
            answer = await server.say(head + CLOSE)
            assert answer.startswith(b"HTTP/1.1 501 ")
            assert b'"code":"not_implemented"' in answer
            assert answer.count(b"HTTP/1.1 200") == 1, "the next request begins where it should"


async def test_a_refused_body_is_dropped_in_large_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    on_body = GuardedProtocol.on_body

    def counted(connection: GuardedProtocol, body: bytes) -> None:
        sizes.append(len(body))
        on_body(connection, body)

    monkeypatch.setattr(GuardedProtocol, "on_body", counted)
    async with served() as server, server.line() as (reader, writer):
        writer.write(LARGE + b"y" * 2_000_000 + GET * 600)
        assert b" 413 " in await reader.readuntil(b"}")
        for _ in range(600):
            assert b" 200 " in await reader.readuntil(b"}}")
    assert sum(sizes) == 2_000_000
    assert len(sizes) < 120  # 245 in slices of 8 KB


@pytest.mark.parametrize("size", [1_000_000, 2_000_000], ids=["accepted", "refused"])
async def test_large_bodies_that_come_at_once_are_read_in_turns(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 140 blank bodies of a megabyte made every other request wait for 180 ms.
    pieces: defaultdict[GuardedProtocol, list[tuple[int, int]]] = defaultdict(list)
    on_body = GuardedProtocol.on_body
    loop, iteration = asyncio.get_running_loop(), 0

    def counted(connection: GuardedProtocol, body: bytes) -> None:
        pieces[connection].append((iteration, len(body)))
        on_body(connection, body)

    def count() -> None:
        nonlocal iteration
        iteration += 1
        counting.append(loop.call_soon(count))
        del counting[:-1]

    monkeypatch.setattr(GuardedProtocol, "on_body", counted)
    counting: list[asyncio.Handle] = []
    body = b" " * (size - 2) + b"{}"
    request = START + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % size + body
    async with served() as server:
        count()
        answers = await asyncio.gather(*(server.say(request) for _ in range(20)))
        counting[-1].cancel()
    assert all(b" 413 " in each or b" 404 " in each for each in answers), answers[0]
    assert sum(length for some in pieces.values() for _, length in some) == 20 * size
    at_once: Counter[int] = Counter()
    for some in pieces.values():
        _, known, *_ = sorted({number for number, _ in some})
        for number, length in some:
            if number > known:  # of the first piece only the head is known
                at_once[number] += length
    assert max(at_once.values()) <= 2 * TURN_BYTES


async def test_a_key_in_a_trailer_is_no_key() -> None:
    async with served(GatewayOptions(admin_key=ADMIN)) as server:
        await server.house.start(key=ADMIN)
        trailer = b"Authorization: Bearer %b\r\n\r\n" % ADMIN.encode()
        sent = START + b"Connection: close\r\n" + CHUNKED + trailer
        for parts in ((sent,), (sent[:-30], sent[-30:])):
            assert (await server.say(*parts)).startswith(b"HTTP/1.1 401")


async def test_a_tenant_and_an_idempotency_key_in_trailers_are_passed_over() -> None:
    async with served() as server:
        await server.house.start()
        trailers = b"X-Stanchion-Tenant: other\r\nIdempotency-Key: same\r\nHost: evil.example\r\n"
        sent = START + b"Connection: close\r\n" + CHUNKED + trailers + b"\r\n"
        ids = {(await server.say(sent)).partition(b'"run_id":"')[2][:26] for _ in range(2)}
        assert len(ids) == 2
        assert len((await server.house.ask("GET", "/v1/runs")).json["runs"]) == 3


@pytest.mark.parametrize("rest", [b"0\r\nX: ", b"1;"])
async def test_trailers_and_chunk_extensions_without_end_are_cut_off(rest: bytes) -> None:
    async with served() as server:
        sent = START + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n" + rest
        assert problem(await server.say(sent, *[b"y" * 30_000] * 3)) == (431, "headers_too_large")


async def test_the_body_of_a_request_that_offers_an_upgrade_is_its_body() -> None:
    """And never the next request, also if it comes later than its head."""
    async with served() as server:
        put = b"PUT /v1/workflows/one-step HTTP/1.1\r\nHost: localhost\r\n"
        offer = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
        file = str(ONE_STEP).replace("'", '"').encode()
        for framing, body in (
            (b"Content-Length: %d\r\n\r\n" % len(file), file),
            (b"Transfer-Encoding: chunked\r\n\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(file), file)),
            (b"Content-Length: %d\r\n\r\n" % len(GET), GET),
        ):
            for parts in ((put + offer + framing + body,), (put + offer + framing, body)):
                answer = await server.say(*parts, CLOSE)
                answers = answer.count(b"HTTP/1.1 ")
                first = answer.startswith(b"HTTP/1.1 200") == (body is not GET)
                assert (answers, first) == (2, True), (parts, answer)
            # Its length counts also if it comes after more headers than are kept.
            answer = await server.say(put + offer + b"a: b\r\n" * 150 + framing + body, CLOSE)
            assert (answer.count(b"HTTP/1.1 "), answer[9:12]) == (2, b"431"), (framing, answer)


async def test_many_headers_in_one_go_are_refused_cheaply() -> None:
    async with served() as server:
        many = GET.replace(b"\r\n\r\n", b"\r\n" + b"a:b\r\n" * 9_000 + b"\r\n")
        answer = await server.say(many.replace(b"Host", b"Connection: close\r\nHost"))
        assert answer.startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize(
    "lines", [b"X-%b: 1\r\n" % (b"a" * 40_000), (b"X-Same: %b\r\n" % (b"a" * 1_000)) * 40]
)
async def test_names_and_repeated_headers_count_against_the_limit(lines: bytes) -> None:
    async with served() as server:
        answer = await server.say(CLOSE.replace(b"Host", lines + b"Host"))
        assert problem(answer) == (431, "headers_too_large")


async def test_white_space_around_a_header_value_is_not_part_of_it() -> None:
    lines = (
        b"POST /v1/jobs HTTP/1.1",
        b"Host: localhost",
        b"Connection: close",
        b"Content-Type: application/json",
        b"Content-Length: 13",
        b"Idempotency-Key:%babc%b",
        b"X-Stanchion-Tenant:%bdefault%b",
    )
    head = b"\r\n".join(lines) + b"\r\n\r\n"
    async with served() as server:
        for space in (b" \t ", b""):
            answer = await server.say(head % ((space,) * 4) + b'{"topic":"t"}')
            assert answer.startswith(b"HTTP/1.1 200"), answer
            assert (b"idempotency-replayed: true" in answer) == (not space)


@asynccontextmanager
async def process_with_files(
    soft: int, hard: int, directory: Path
) -> AsyncIterator[tuple[int, int]]:
    """A server in a process that may have so many files; its process id and its port."""
    limits = f"ulimit -Sn {soft} && ulimit -Hn {hard} && exec"
    server = f"{sys.executable} -m stanchion serve --port 0 --data-dir {directory}"
    clean = {name: value for name, value in os.environ.items() if "STANCHION" not in name}
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", f"{limits} {server}"), stderr=asyncio.subprocess.PIPE, env=clean
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(30):
            said = await process.stderr.readuntil(b"server_ready")
            said += await process.stderr.readline()
        port = re.search(rb"127\.0\.0\.1:(\d+)", said)
        assert port is not None, said
        yield process.pid, int(port[1])
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait_for(process.communicate(), 15)


async def test_a_server_with_few_files_is_not_used_up_by_connections_that_say_nothing(
    tmp_path: Path,
) -> None:
    async with process_with_files(64, 400, tmp_path) as (pid, port), AsyncExitStack() as many:
        assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (400, 400)
        for _ in range(300):
            line = many.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            with suppress(ConnectionError):
                line.sendall(b"\r\n")
        for ask in (CLOSE, RUNS):
            async with asyncio.timeout(5):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(ask)
                answer = await reader.read()
                writer.close()
            assert answer.startswith(b"HTTP/1.1 200"), answer


async def test_a_body_that_was_asked_for_and_does_not_come_is_not_waited_for() -> None:
    head = START + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    async with served(GatewayOptions(body_timeout_s=0.3)) as server:
        interim, _, answer = (await server.say(head)).partition(b"\r\n\r\n")
        assert interim == b"HTTP/1.1 100 Continue"
        assert problem(answer) == (408, "request_timeout")
    async with served(GatewayOptions(admin_key=ADMIN)) as server, server.line() as (reader, writer):
        writer.write(head)  # a body that is of no use is not asked for
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 401")


async def test_an_older_callers_connection_is_not_kept() -> None:
    async with served() as server:
        await server.house.start()
        start = START.replace(b"/1.1", b"/1.0") + b"Expect: 100-continue\r\nContent-Length: 2\r\n"
        assert (await server.say(start + b"\r\n{}")).startswith(b"HTTP/1.1 200")
        old = GET.replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\nConnection: keep-alive\r\n")
        assert (await server.say(old + old)).count(b"HTTP/1.1 200") == 1


# ── Bodies that arrive with their heads ──────────────────────────────────────────────────────────


def _start(body: bytes) -> bytes:
    return START + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body


async def test_a_body_that_arrived_with_its_head_is_refused_if_it_is_too_large() -> None:
    async with served(GatewayOptions(body_bytes_max=100)) as server:
        allowed = _start(b"{}".ljust(100))
        assert problem(await server.say(allowed)) == (404, "not_found")
        assert problem(await server.say(_start(b"{}".ljust(101)))) == (413, "body_too_large")


async def test_the_memory_of_bodies_that_arrived_with_their_heads_is_bounded() -> None:
    async with served(GatewayOptions(bodies_bytes_max=150)) as server:
        for _ in range(3):  # one after the other: each gives back what it took
            assert problem(await server.say(_start(b"{}".ljust(100)))) == (404, "not_found")
        assert problem(await server.say(_start(b"{}".ljust(200)))) == (503, "overloaded")
