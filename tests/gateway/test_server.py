"""The server itself, over real sockets: slow, large, many and broken callers, and the end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from stanchion.gateway import GatewayOptions
from stanchion.gateway.server import serve
from tests.gateway.asgi import opened
from tests.gateway.house import ADMIN, GET, Served, bearer, opened_house, problem, served


async def test_a_good_request_is_answered() -> None:
    async with served() as server:
        close = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        answer = await server.say(close)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"server:" not in answer


async def test_a_request_that_was_answered_is_let_go_without_the_garbage_collector() -> None:
    async with served() as server, server.line() as (reader, writer):
        gc.collect()
        gc.disable()
        try:
            for path in (b"/livez", b"/v1/runs", b"/nowhere") * 20:
                writer.write(GET.replace(b"/livez", path))
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length))
            kept = sum(isinstance(each, RequestResponseCycle) for each in gc.get_objects())
        finally:
            gc.enable()
        # The newest, which the connection still knows.
        assert kept <= 2


NONSENSE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nA: b\r\n c\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n",
    b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"f" * 20
    + b"\r\n",
]


async def test_what_is_no_http_is_400() -> None:
    async with served() as server:
        for each in NONSENSE:
            assert problem(await server.say(each)) == (400, "malformed_request"), each


async def test_requests_that_come_together_are_answered_one_by_one() -> None:
    async with served() as server:
        close = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        answer = await server.say(GET + GET + close)
        assert answer.count(b"HTTP/1.1 200 OK") == 3


async def test_whoever_wants_to_hang_up_afterwards_is_told_that_it_will() -> None:
    async with served() as server:
        close = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        for last in (close, GET.replace(b"HTTP/1.1", b"HTTP/1.0")):
            head, _, body = (await server.say(last)).partition(b"\r\n\r\n")
            assert head.lower().count(b"connection: close") == 1
            assert b"content-length: %d" % len(body) in head


async def test_only_the_head_of_an_answer_is_told_of_what_would_follow() -> None:
    async with served() as server:
        ask = GET.replace(b"GET", b"HEAD", 1).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        head, _, body = (await server.say(ask)).partition(b"\r\n\r\n")
        assert b"content-length: " in head
        assert (b"content-length: 0" in head, body) == (False, b"")


async def test_an_offer_to_speak_another_protocol_is_passed_over() -> None:
    async with served() as server:
        await server.house.start()
        head = b"POST /v1/workflows/one-step/runs HTTP/1.1\r\nHost: localhost\r\nUpgrade: h2c\r\n"
        async with server.line() as (reader, writer):
            writer.write(head + b"Connection: Upgrade\r\nContent-Length: 2\r\n\r\n{}")
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")


async def test_a_head_without_end_is_cut_at_its_size() -> None:
    async with served() as server:
        line = b"X-Large: " + b"y" * 30_000 + b"\r\n"
        answer = await server.say(b"GET /livez HTTP/1.1\r\n", line, line, line)
        assert problem(answer) == (431, "headers_too_large")


async def test_a_url_without_end_is_cut_at_its_size() -> None:
    async with served() as server:
        answer = await server.say(b"GET /" + b"a" * 100_000)
        assert problem(answer) == (431, "headers_too_large")


async def test_slow_heads_slow_first_bytes_and_slow_bodies_are_not_waited_for() -> None:
    options = GatewayOptions(head_timeout_s=0.3, body_timeout_s=0.3)
    async with served(options) as server:
        silent, head, body, chunk = await asyncio.gather(
            server.say(),
            server.say(b"GET /livez HT", b"TP/1.1\r\nHost: loc"),
            server.say(
                b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n",
                b'{"topic"',
            ),
            server.say(
                b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n",
                b'3\r\n{"t\r\n',
            ),
        )
        assert silent == b""
        assert problem(head) == (408, "request_timeout")
        assert problem(body) == (408, "request_timeout")
        assert problem(chunk) == (408, "request_timeout")
        # Those who are quick are served all the while, on a connection that is kept.
        async with server.line() as (reader, writer):
            for _ in range(3):
                writer.write(GET)
                assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 200")
                await asyncio.sleep(0.2)


async def test_a_large_body_is_refused_before_it_comes_and_the_answer_arrives() -> None:
    async with served() as server:
        head = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n\r\n"
        async with server.line() as (reader, writer):
            writer.write(head)
            answer = await reader.readuntil(b"}")
            assert b"413" in answer.split(b"\r\n")[0]
            # A caller who sends first and listens then hears it as well, and may go on.
            writer.write(b"y" * 4_000_000)
            await writer.drain()
            writer.write(GET)
            assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 200")
        # So does one that asks to close: the connection ends after its body, not during it.
        async with server.line() as (reader, writer):
            writer.write(head[:-2] + b"Connection: close\r\n\r\n")
            answer = await reader.readuntil(b"}")
            assert b"413" in answer.split(b"\r\n")[0]
            for _ in range(4):
                assert not reader.at_eof()
                writer.write(b"y" * 1_000_000)
                await writer.drain()
            assert await reader.read() == b""


async def test_a_caller_who_leaves_before_its_turn_makes_no_run() -> None:
    async with served() as server:
        house = server.house
        await house.start()
        patch = {"admission": {"strategy": "lock", "lock_wait_s": 30}}
        await house.ask("PATCH", "/v1/admin/settings", patch)
        await house.ask("POST", "/v1/admin/leases", {"name": "admission/default", "ttl_s": 60})
        head = b"POST /v1/workflows/one-step/runs HTTP/1.1\r\nHost: localhost\r\n"
        async with server.line() as (_, writer):
            writer.write(head + b"Content-Length: 2\r\n\r\n{}")
            await house.has_under_way("requests")
        await house.has_under_way("requests", count=0)
        await house.ask("DELETE", "/v1/admin/leases/admission/default")
        # The next in line gets the lock, and finds nothing made before it.
        assert (await house.ask("POST", "/v1/workflows/one-step/runs", {})).status == 200
        assert len((await house.ask("GET", "/v1/runs")).json["runs"]) == 2


async def test_a_caller_who_leaves_while_it_waits_gives_its_place_back() -> None:
    async with served() as server:
        house = server.house
        run_id = await house.start()
        ask = b"GET /v1/runs/%b?wait=60 HTTP/1.1\r\nHost: localhost\r\n\r\n" % run_id.encode()
        for _ in range(3):
            async with server.line() as (_, writer):
                writer.write(ask)
                await house.has_under_way("waits")
            await house.has_under_way("waits", count=0)


async def test_a_caller_who_leaves_with_another_request_in_line_gives_its_place_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served() as server:
        house = server.house
        run_id = await house.start()
        ask = b"GET /v1/runs/%b?wait=60 HTTP/1.1\r\nHost: localhost\r\n\r\n" % run_id.encode()
        async with server.line() as (_, writer):
            writer.write(ask + ask + GET)
            await house.has_under_way("waits")
        await house.has_under_way("waits", count=0)
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_line_on_which_somebody_waited_serves_the_next_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served() as server:
        run_id = await server.house.start()
        ask = b"GET /v1/runs/%b?wait=0.01 HTTP/1.1\r\nHost: localhost\r\n\r\n" % run_id.encode()
        async with server.line() as (reader, writer):
            for _ in range(3):
                writer.write(ask)
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200")
                length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                assert run_id.encode() in await reader.readexactly(length)
        await server.house.has_under_way("waits", count=0)
    assert not [record for record in caplog.records if record.exc_info]


@asynccontextmanager
async def never_reading(server: Served) -> AsyncIterator[asyncio.StreamWriter]:
    """A connection that asks for more than the line holds, and takes nothing of it."""
    async with server.line() as (_, writer):
        line = writer.transport.get_extra_info("socket")
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport that reads, too
        writer.write(GET.replace(b"/livez", b"/openapi.json") * 200)
        await writer.drain()
        yield writer


async def writing_on(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(GET)
        await writer.drain()
        await asyncio.sleep(0.05)


async def test_large_answers_that_nobody_takes_are_bounded_together() -> None:
    size = 24 * 1024 * 1024  # more than the two ends of a line hold
    async with (
        served(GatewayOptions(answers_bytes_max=size + 1)) as server,
        AsyncExitStack() as lines,
    ):
        readers, statuses = [], []
        for _ in range(3):
            # Another one each time: an answer that several read is held once.
            server.house.app.state.openapi = b"x" * size
            reader, writer = await lines.enter_async_context(server.line())
            writer.write(GET.replace(b"/livez", b"/openapi.json"))
            readers.append(reader)
            statuses.append((await reader.readuntil(b"\r\n"))[9:12])
        assert statuses == [b"200", b"503", b"503"]
        await readers[0].readuntil(b"\r\n\r\n")
        await readers[0].readexactly(size)
        assert (await server.house.ask("GET", "/openapi.json")).status == 200


async def test_a_reader_who_takes_nothing_is_cut_off() -> None:
    options = GatewayOptions(write_timeout_s=0.3)
    async with served(options) as server, never_reading(server) as writer:
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(writing_on(writer), 5)


async def test_a_reader_who_takes_nothing_does_not_hold_up_the_end() -> None:
    async with served(drain_s=30) as server, never_reading(server):
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(4):
            await server.serving


RUNS = GET.replace(b"/livez", b"/v1/runs")
HALF = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"


async def test_a_caller_who_was_told_it_is_too_much_is_not_heard_for_a_moment() -> None:
    async with (
        served(GatewayOptions(requests_at_once_max=1)) as server,
        server.line() as (_, busy),
        server.line() as (deaf_reader, deaf),
        server.line() as (reader, writer),
        asyncio.timeout(8),
    ):
        busy.write(HALF)
        await server.house.has_under_way("requests")
        deaf.write(RUNS)
        assert b" 503 " in await deaf_reader.readuntil(b"\r\n")
        busy.transport.abort()
        await server.house.has_under_way("requests", count=0)
        deaf.write(RUNS)
        again = asyncio.create_task(deaf_reader.readuntil(b"HTTP/1.1 200 OK\r\n"))
        writer.write(RUNS)
        assert b" 200 " in await reader.readuntil(b"\r\n")
        assert not again.done()
        await again


async def test_a_caller_who_hangs_up_while_it_is_not_heard_is_forgotten() -> None:
    async with served(GatewayOptions(requests_at_once_max=1)) as server:
        async with server.line() as (_, busy):
            busy.write(HALF)
            await server.house.has_under_way("requests")
            async with server.line() as (reader, writer):
                writer.write(RUNS)
                assert b" 503 " in await reader.readuntil(b"\r\n")
        close = RUNS.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        assert (await server.say(close)).startswith(b"HTTP/1.1 200")


async def test_a_signal_drains_streams_and_waits_end_and_nothing_under_way_is_lost() -> None:
    async with served(drain_s=4) as server:
        run_id = await server.house.start()
        head = b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n"
        stream = asyncio.create_task(server.say(head % b"/v1/events"))
        wait = asyncio.create_task(server.say(head % f"/v1/runs/{run_id}?wait=60".encode()))
        await server.house.has_under_way("waits")
        await server.house.has_under_way("streams")
        began = asyncio.get_running_loop().time()
        os.kill(os.getpid(), signal.SIGTERM)
        assert b"0\r\n\r\n" in await stream
        assert b'"status":"running"' in await wait
        async with asyncio.timeout(5):
            await server.serving
        assert asyncio.get_running_loop().time() - began < 3
        with pytest.raises(ConnectionRefusedError):
            await server.say(GET)


async def test_while_draining_new_connections_hear_it_before_the_door_closes() -> None:
    async with served(drain_s=4) as server:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        ready = b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert (await server.say(ready)).startswith(b"HTTP/1.1 503")


async def test_an_upload_that_is_incomplete_when_the_server_stops_is_told_so() -> None:
    options = GatewayOptions(body_timeout_s=30)
    async with served(options, drain_s=1) as server, server.line() as (reader, writer):
        head = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\n"
        writer.write(head + b"Content-Length: 50\r\n\r\n{")
        await server.house.has_under_way("requests")
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            answer = await reader.read()
        assert problem(answer) == (503, "draining")
        async with asyncio.timeout(2):
            await server.serving


async def test_a_second_signal_does_not_wait() -> None:
    options = GatewayOptions(body_timeout_s=30)
    async with served(options, drain_s=30) as server, server.line() as (_, writer):
        head = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\n"
        writer.write(head + b"Content-Length: 50\r\n\r\n{")
        await server.house.has_under_way("requests")
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.7)
        assert not server.serving.done()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(2):
            await server.serving


async def test_an_address_that_is_taken_is_an_error_with_its_reason() -> None:
    async with served() as server, opened_house() as other:
        said = rf"127\.0\.0\.1:{server.port}: Address already in use; .* another --port"
        with pytest.raises(OSError, match=said):
            await serve(other.app, host="127.0.0.1", port=server.port)


async def test_a_host_that_is_not_there_is_named() -> None:
    async with opened_house() as house:
        with pytest.raises(OSError, match=r"cannot listen on nowhere\.invalid:8420: .* --host"):
            await serve(house.app, host="nowhere.invalid", port=8420)


async def test_a_slow_readers_stream_ends_when_its_key_is_revoked() -> None:
    options = GatewayOptions(admin_key=ADMIN, write_timeout_s=60)
    async with served(options) as server, asyncio.timeout(20):
        house, key = server.house, await server.house.make_key("runner", "acme")
        async with opened(house.app, "GET", "/v1/events", headers=[bearer(key)]) as feed:
            beginning = (await feed.next()).decode().removeprefix("id: ").strip()
        wide = {"steps": {"all": {"topic": "t", "for_each": "${input.items}"}}}
        await house.ask("PUT", "/v1/workflows/wide", wide, key=key)
        for _ in range(10):
            asked = {"input": {"items": [0] * 1_000}}
            started = await house.ask("POST", "/v1/workflows/wide/runs", asked, key=key)
            assert started.status == 200
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        reader.setblocking(False)
        loop = asyncio.get_running_loop()
        with reader:
            await loop.sock_connect(reader, ("127.0.0.1", server.port))
            head = (
                "GET /v1/events HTTP/1.1\r\nHost: a\r\n"
                f"Authorization: Bearer {key}\r\nLast-Event-ID: {beginning}\r\n\r\n"
            )
            await loop.sock_sendall(reader, head.encode())
            assert (await loop.sock_recv(reader, 4_096)).startswith(b"HTTP/1.1 200 OK")
            await house.ask("DELETE", f"/v1/admin/keys/{key.split('_')[1]}", key=ADMIN)
            began_s, read = loop.time(), 0
            with suppress(ConnectionResetError):
                while part := await loop.sock_recv(reader, 4_096):
                    read += len(part)
                    await asyncio.sleep(0.05)  # as slow as it is meant to be
        assert loop.time() - began_s < 6
        assert read < 500_000
        assert house.metric("stanchion_http_under_way", kind="streams") == 0


async def test_hundreds_of_waits_for_a_large_run_cost_a_read_a_second() -> None:
    async with served() as server, AsyncExitStack() as stack, asyncio.timeout(20):
        house = server.house
        await house.ask("PUT", "/v1/workflows/one", {"steps": {"only": {"topic": "work"}}})
        asked = {"input": {"zeros": [0] * 120_000}}
        started = await house.ask("POST", "/v1/workflows/one/runs", asked)
        run_id = started.json["run_id"]
        lines = [await stack.enter_async_context(server.line()) for _ in range(200)]
        loads, began_s = house.store.calls["load"], time.monotonic()
        for _, writer in lines:
            writer.write(GET.replace(b"/livez", f"/v1/runs/{run_id}?wait=60".encode()))
        await house.has_under_way("waits", count=200)
        await house.ask("POST", f"/v1/runs/{run_id}/cancel")
        for reader, _ in lines:
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            assert b'"status":"cancelled"' in await reader.readexactly(int(length))
        # The first caller's, one a second for all of them, and two of the cancel.
        assert house.store.calls["load"] - loads <= 5 + 2 * (time.monotonic() - began_s)


async def test_one_tenants_streams_leave_places_to_others() -> None:
    async with served() as server, AsyncExitStack() as stack, asyncio.timeout(20):
        answers: list[bytes] = []
        for tenant in [b"loud"] * 60 + [b"quiet"]:
            reader, writer = await stack.enter_async_context(server.line())
            events = GET.replace(b"/livez", b"/v1/events")
            writer.write(
                events.replace(b"\r\n\r\n", b"\r\nX-Stanchion-Tenant: %b\r\n\r\n" % tenant)
            )
            answers.append((await reader.readuntil(b"\r\n")).split()[1])
        assert answers == [b"200"] * 50 + [b"429"] * 10 + [b"200"]
