"""Requests go over connections that are kept; one that was closed meanwhile costs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from stanchion.transport.messages import HttpReply
from stanchion.worker.server import (
    HttpTransport,
    ServerAnswered,
    ServerRefused,
    ServerUnreachable,
    TransportFailed,
    WorkerApi,
)

_OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Listener:
    """A server that does with each connection what a test says."""

    def __init__(self, make: Callable[[Listener], Talk]) -> None:
        self._talk = make(self)
        self.connections = 0
        self.heads: list[str] = []
        self.bodies: list[bytes] = []

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await self._talk(reader, writer)
        writer.close()

    async def request(self, reader: asyncio.StreamReader) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        self.heads.append(head)
        self.bodies.append(await reader.readexactly(length))


@asynccontextmanager
async def _listening(make: Callable[[Listener], Talk]) -> AsyncIterator[tuple[Listener, str]]:
    listener = Listener(make)
    server = await asyncio.start_server(listener.accept, "127.0.0.1", 0)
    try:
        yield listener, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def _always(answer: bytes) -> Callable[[Listener], Talk]:
    def make(listener: Listener) -> Talk:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                await listener.request(reader)
                writer.write(answer)
                await writer.drain()

        return talk

    return make


def _once(answer: bytes) -> Callable[[Listener], Talk]:
    """Answers one request a connection, and hangs up."""

    def make(listener: Listener) -> Talk:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await listener.request(reader)
            writer.write(answer)
            await writer.drain()

        return talk

    return make


async def test_a_hundred_requests_one_after_the_other_use_one_connection() -> None:
    async with _listening(_always(_OK)) as (listener, url):
        transport = HttpTransport(f"{url}/below/", api_key="sk-1")
        for number in range(100):
            reply = await transport.post("/v1/x", b"%d" % number)
            assert (reply.status, reply.body) == (200, b"ok")
        await transport.close()
    assert listener.connections == 1
    assert listener.bodies == [b"%d" % number for number in range(100)]
    assert listener.heads[0].startswith("POST /below/v1/x HTTP/1.1\r\nHost: 127.0.0.1:")
    assert "\r\nAuthorization: Bearer sk-1\r\n" in listener.heads[0]


async def test_requests_at_once_use_a_connection_each_and_a_few_are_kept() -> None:
    async with _listening(_always(_OK)) as (listener, url):
        transport = HttpTransport(url)
        for _ in range(2):
            await asyncio.gather(*(transport.post("/", b"") for _ in range(20)))
        await transport.close()
    assert listener.connections in range(20, 33)


async def test_a_connection_closed_while_idle_is_replaced_without_an_error() -> None:
    async with _listening(_once(_OK)) as (listener, url):
        transport = HttpTransport(url)
        for _ in range(5):
            assert (await transport.post("/", b"x")).status == 200
        await transport.close()
    assert listener.connections == 5


async def test_a_server_that_hangs_up_on_a_fresh_connection_is_an_error() -> None:
    async with _listening(_once(b"")) as (listener, url):
        transport = HttpTransport(url)
        with pytest.raises(TransportFailed, match="before anything came"):
            await transport.post("/", b"x")
        await transport.close()
    assert listener.connections == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", "before the answer did"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not an HTTP/1.1 response"),
    ],
)
async def test_half_an_answer_and_no_answer_are_errors(answer: bytes, message: str) -> None:
    async with _listening(_once(answer)) as (_, url):
        transport = HttpTransport(url)
        with pytest.raises(TransportFailed, match=message):
            await transport.post("/", b"x")
        await transport.close()


async def test_an_answer_up_to_the_end_of_the_connection_is_read() -> None:
    async with _listening(_once(b"HTTP/1.1 502 Bad\r\n\r\noops")) as (_, url):
        transport = HttpTransport(url)
        assert await transport.post("/", b"x") == HttpReply(502, {}, b"oops")
        await transport.close()


async def test_a_port_where_nobody_listens_is_an_error() -> None:
    async with _listening(_always(_OK)) as (_, url):
        pass
    transport = HttpTransport(url)
    with pytest.raises(TransportFailed):
        await transport.post("/", b"x")


async def test_a_cancelled_request_closes_its_connection() -> None:
    hung_up = asyncio.Event()
    asked = asyncio.Event()

    def make(listener: Listener) -> Talk:
        async def talk(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
            await listener.request(reader)
            asked.set()
            with suppress(ConnectionError):
                await reader.read()
            hung_up.set()

        return talk

    async with _listening(make) as (_, url):
        transport = HttpTransport(url)
        post = asyncio.create_task(transport.post("/", b"x"))
        await asked.wait()
        post.cancel()
        async with asyncio.timeout(5):
            await hung_up.wait()
        await transport.close()


@pytest.mark.parametrize(
    "url", ["ftp://x", "127.0.0.1:8420", "http://", "http://me@x", "http://x?a=b", "http://x#a"]
)
def test_what_is_no_address_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="server's URL"):
        HttpTransport(url)


@pytest.mark.parametrize("key", ["a\r\nx: y", "é", "a b"])
def test_a_key_that_would_break_the_head_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="API key"):
        HttpTransport("http://x", api_key=key)


# ── What answers mean ────────────────────────────────────────────────────────────────────────────


NOT_UTF8 = b'{"code": "caf\xe9", "status": 502, "title": "t", "detail": "d"}'


class Fixed:
    def __init__(self, answer: HttpReply | None) -> None:
        self._answer = answer

    async def post(self, _path: str, _body: bytes) -> HttpReply:
        if self._answer is None:
            await asyncio.Event().wait()
        assert self._answer is not None
        return self._answer

    async def close(self) -> None: ...


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
async def test_what_may_pass_by_itself_is_away(status: int) -> None:
    server = WorkerApi(Fixed(HttpReply(status, {}, b"<html>")), "w")
    outcome = await server.lease(("t",), max_jobs=1, wait_s=0)
    assert outcome == ServerUnreachable(f"{status} unknown: HTTP status {status}", 0)


async def test_a_refusal_that_is_not_utf8_is_that_of_a_proxy() -> None:
    outcome = await WorkerApi(Fixed(HttpReply(502, {}, NOT_UTF8)), "w").renew((), timeout_s=1)
    assert outcome == ServerUnreachable("502 unknown: HTTP status 502", 0)


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 405, 413, 422])
async def test_what_will_not_pass_is_refused(status: int) -> None:
    body = b'{"status":4,"code":"c","title":"t","detail":"d"}'
    server = WorkerApi(Fixed(HttpReply(status, {}, body)), "w")
    assert await server.lease(("t",), max_jobs=1, wait_s=0) == ServerRefused(status, "c", "d")


async def test_the_servers_word_on_when_to_come_back_is_passed_on() -> None:
    body = b'{"status":503,"code":"c","title":"t","detail":"d","retry_after_ms":1500}'
    outcome = await WorkerApi(Fixed(HttpReply(503, {}, body)), "w").renew((), timeout_s=1)
    assert outcome == ServerUnreachable("503 c: d", 1500)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"jobs": [{}]}', b'{"jobs": 1}'])
async def test_an_answer_in_the_servers_name_that_is_not_its_own_is_away(body: bytes) -> None:
    outcome = await WorkerApi(Fixed(HttpReply(200, {}, body)), "w").lease(
        ("t",), max_jobs=1, wait_s=0
    )
    assert isinstance(outcome, ServerUnreachable)


async def test_members_that_a_newer_server_adds_are_passed_over() -> None:
    body = b'{"jobs": [], "waited_ms": 5, "weather": "fine"}'
    outcome = await WorkerApi(Fixed(HttpReply(200, {}, body)), "w").lease(
        ("t",), max_jobs=1, wait_s=0
    )
    assert isinstance(outcome, ServerAnswered)


async def test_no_answer_in_time_is_away() -> None:
    outcome = await WorkerApi(Fixed(None), "w").renew((), timeout_s=0.01)
    assert outcome == ServerUnreachable("no answer within 0.01 s")
