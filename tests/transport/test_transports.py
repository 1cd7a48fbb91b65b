"""Both transports on real sockets: connections kept, cut, silent and gibberish."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import pytest

from stanchion.gateway.server import KEEP_ALIVE_S
from stanchion.transport.blocking import IDLE_S_MAX, KEPT_MAX, BlockingTransport
from stanchion.transport.event_loop import LoopStream, LoopTransport
from stanchion.transport.messages import HttpReply, NoReply, Request, Silence, parse_address
from tests.transport.tiny_server import (
    HangUp,
    Heard,
    KeepSilent,
    Reaction,
    Say,
    Trickle,
    answer,
    event_stream,
    tiny_server,
)


class _Deaf:
    """A socket that nobody accepts: its time passes at once."""

    def __init__(self, passed: list[float]) -> None:
        self._passed = passed
        self._timeout_s = 0.0

    def settimeout(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def connect(self, _address: object) -> None:
        self._passed[0] += self._timeout_s
        raise TimeoutError

    def close(self) -> None: ...


def test_all_addresses_of_a_host_share_the_time_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed = [0.0]
    found = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 9))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [found] * 4)
    monkeypatch.setattr(socket, "socket", lambda *_: _Deaf(passed))
    monkeypatch.setattr(time, "monotonic", lambda: passed[0])
    request = Request(name="t", method="GET", path="/", timeout_s=8, is_repeatable=True)
    limited = BlockingTransport(parse_address("http://many.test"), connect_s_max=2.0)
    outcomes = [limited.send(request)]
    assert passed[0] <= 2.001
    outcomes.append(BlockingTransport(parse_address("http://many.test")).send(request))
    monkeypatch.undo()
    assert passed[0] <= 10.001
    assert [getattr(each, "silence", None) for each in outcomes] == [Silence.UNREACHED] * 2


class Sends(Protocol):
    def __call__(self, request: Request) -> HttpReply | NoReply: ...


class Line:
    """One of the two transports, as a blocking function."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._runner = asyncio.Runner()
        self._open: dict[str, BlockingTransport | LoopTransport] = {}

    def send(self, url: str, request: Request) -> HttpReply | NoReply | list[bytes | NoReply]:
        """What came of it; of a stream, every piece and how it ended."""
        if self._kind == "sockets":
            blocking = self._open.setdefault(url, BlockingTransport(parse_address(url)))
            assert isinstance(blocking, BlockingTransport)
            outcome = blocking.send(request)
            if isinstance(outcome, HttpReply | NoReply):
                return outcome
            pieces = list[bytes | NoReply]()
            while isinstance(piece := outcome.read(), bytes) and piece:
                pieces.append(piece)
            outcome.close()
            return [*pieces, piece]
        other = self._open.setdefault(url, LoopTransport(parse_address(url)))
        assert isinstance(other, LoopTransport)
        return self._runner.run(self._send(other, request))

    @staticmethod
    async def _send(
        transport: LoopTransport, request: Request
    ) -> HttpReply | NoReply | list[bytes | NoReply]:
        outcome = await transport.send(request)
        if not isinstance(outcome, LoopStream):
            return outcome
        pieces = list[bytes | NoReply]()
        while isinstance(piece := await outcome.read(), bytes) and piece:
            pieces.append(piece)
        outcome.close()
        return [*pieces, piece]

    def settle(self) -> None:
        """Let the event loop take in what has arrived."""
        self._runner.run(asyncio.sleep(0.01))

    def close(self) -> None:
        for each in self._open.values():
            if isinstance(each, BlockingTransport):
                each.close()
            else:
                self._runner.run(each.close())
        self._runner.close()


@pytest.fixture(params=["sockets", "streams"])
def line(request: pytest.FixtureRequest) -> Iterator[Line]:
    opened = Line(request.param)
    yield opened
    opened.close()


def asking(
    *,
    method: str = "GET",
    body: bytes = b"",
    timeout_s: float = 5,
    is_repeatable: bool = True,
    is_stream: bool = False,
    idle_s: float = 5,
) -> Request:
    return Request(
        name="test",
        method=method,
        path="/v1/x",
        body=body,
        timeout_s=timeout_s,
        is_repeatable=is_repeatable,
        is_stream=is_stream,
        idle_s=idle_s,
    )


def always(reaction: Reaction) -> Callable[[Heard], Reaction]:
    return lambda _heard: reaction


def silence(outcome: object) -> Silence:
    assert isinstance(outcome, NoReply), outcome
    return outcome.silence


def test_one_connection_serves_many_requests(line: Line) -> None:
    with tiny_server(lambda heard: answer(heard.body)) as server:
        for number in range(10):
            body = b"%d" % number
            outcome = line.send(server.url, asking(method="POST", body=body))
            assert isinstance(outcome, HttpReply)
            assert outcome.body == body
    assert server.connections == 1


def test_answers_in_chunks_and_pieces_are_put_together(line: Line) -> None:
    pieces = (b"HTTP/1.1 200 OK\r\ntransfer", b"-encoding: chunked\r\n\r\n3\r\nabc\r", b"\n")
    with tiny_server(always(Say((*pieces, b"2;x=y\r\nde\r\n0\r\n", b"\r\n")))) as server:
        for _ in range(2):
            outcome = line.send(server.url, asking())
            assert isinstance(outcome, HttpReply)
            assert outcome.body == b"abcde"
    assert server.connections == 1


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n",
    ],
    ids=["close", "of an older version", "with more than was asked for"],
)
def test_a_connection_that_is_not_sure_to_be_clean_is_not_used_again(
    line: Line, said: bytes
) -> None:
    with tiny_server(always(Say((said,)))) as server:
        for _ in range(2):
            outcome = line.send(server.url, asking())
            assert isinstance(outcome, HttpReply)
            assert outcome.body == b"ok"
    assert server.connections == 2


def test_an_answer_without_a_length_goes_to_the_end_of_the_connection(line: Line) -> None:
    said = Say((b"HTTP/1.1 200 OK\r\n\r\n", b"all of", b" it"), then_hang_up=True)
    with tiny_server(always(said)) as server:
        outcome = line.send(server.url, asking())
    assert isinstance(outcome, HttpReply)
    assert outcome.body == b"all of it"


def test_a_kept_connection_that_was_closed_meanwhile_costs_nobody_a_failure(line: Line) -> None:
    with tiny_server(always(answer(b"ok"))) as server:
        for _ in range(3):
            # Not even what may be sent only once: nothing goes out on a connection that is over.
            request = asking(method="POST", is_repeatable=False)
            assert isinstance(line.send(server.url, request), HttpReply)
            server.hang_up_on_all()
            line.settle()
    assert (server.connections, len(server.heard)) == (3, 3)


def test_what_comes_on_an_idle_connection_is_nobodys_answer(line: Line) -> None:
    # As proxies do before they close: 408, to a request that was never made.
    with tiny_server(always(answer(b"ok"))) as server:
        assert isinstance(line.send(server.url, asking()), HttpReply)
        server.say_to_all(b"HTTP/1.1 408 X\r\ncontent-length: 2\r\n\r\nno")
        line.settle()
        outcome = line.send(server.url, asking())
    assert isinstance(outcome, HttpReply)
    assert (outcome.status, outcome.body) == (200, b"ok")
    assert server.connections == 2


def test_a_server_that_hangs_up_on_kept_connections_gets_repeatable_requests_once_more(
    line: Line,
) -> None:
    def script(heard: Heard) -> Reaction:
        return HangUp() if heard.number == 2 else answer(b"ok")

    with tiny_server(script) as server:
        assert isinstance(line.send(server.url, asking()), HttpReply)
        assert isinstance(line.send(server.url, asking()), HttpReply)
    assert [heard.connection for heard in server.heard] == [1, 1, 2]


def test_and_others_not_because_they_may_have_been_carried_out(line: Line) -> None:
    def script(heard: Heard) -> Reaction:
        return HangUp() if heard.number == 2 else answer(b"ok")

    with tiny_server(script) as server:
        assert isinstance(line.send(server.url, asking()), HttpReply)
        outcome = line.send(server.url, asking(method="POST", is_repeatable=False))
    assert silence(outcome) is Silence.BROKEN
    assert len(server.heard) == 2


def test_a_new_connection_that_is_cut_is_broken_and_not_tried_again_here(line: Line) -> None:
    with tiny_server(always(HangUp())) as server:
        outcome = line.send(server.url, asking())
    assert silence(outcome) is Silence.BROKEN
    assert isinstance(outcome, NoReply)
    assert outcome.may_have_run
    assert len(server.heard) == 1


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 2",
    ],
)
def test_half_an_answer_is_none(line: Line, said: bytes) -> None:
    with tiny_server(always(Say((said,), then_hang_up=True))) as server:
        assert silence(line.send(server.url, asking())) is Silence.BROKEN


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1" * 300,
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
    ],
    ids=range(13),
)
def test_gibberish_is_said_to_be_that(line: Line, said: bytes) -> None:
    with tiny_server(always(KeepSilent(after=said))) as server:
        assert silence(line.send(server.url, asking())) is Silence.MALFORMED


def test_a_silent_server_costs_no_more_than_the_time_out(line: Line) -> None:
    with tiny_server(always(KeepSilent())) as server:
        began_s = time.monotonic()
        assert silence(line.send(server.url, asking(timeout_s=0.15))) is Silence.TIMED_OUT
        assert 0.1 < time.monotonic() - began_s < 3


def test_an_answer_that_trickles_is_held_to_the_same_time(line: Line) -> None:
    # A time-out for each read would never come: there is always a little more.
    with tiny_server(always(Trickle(b"HTTP/1.1 200 OK\r\n", b"x: y\r\n"))) as server:
        assert silence(line.send(server.url, asking(timeout_s=0.15))) is Silence.TIMED_OUT


def test_nobody_there_is_told_apart_from_an_answer_that_was_lost(line: Line) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        outcome = line.send(f"http://127.0.0.1:{port}", asking())
    assert silence(outcome) is Silence.UNREACHED
    assert isinstance(outcome, NoReply)
    assert not outcome.may_have_run
    assert "is the server running?" in outcome.message


def test_a_refusal_that_comes_while_the_body_is_still_going_out_is_read(line: Line) -> None:
    # As a server does with a body above its limit: it answers, and reads no further.
    refusal = b"HTTP/1.1 413 X\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def refuse() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(refusal)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 20):  # Drained, so that it is not reset.
                    pass

        refusing = threading.Thread(target=refuse)
        refusing.start()
        outcome = line.send(
            f"http://127.0.0.1:{port}", asking(method="POST", body=b"x" * 4_000_000)
        )
        refusing.join(5)
    assert isinstance(outcome, HttpReply)
    assert outcome.status == 413


def test_a_refusal_before_a_reset_is_read_by_a_blocking_caller() -> None:
    # It answers and closes with the body unread, so the rest of the sending fails. An event loop
    # drops what came before a reset: there, this is a connection that broke.
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def refuse() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"HTTP/1.1 413 X\r\ncontent-length: 2\r\n\r\nno")

        refusing = threading.Thread(target=refuse)
        refusing.start()
        transport = BlockingTransport(parse_address(f"http://127.0.0.1:{port}"))
        outcome = transport.send(asking(method="POST", body=b"x" * 8_000_000))
        refusing.join(5)
    assert isinstance(outcome, HttpReply)
    assert outcome.status == 413


def test_interim_answers_are_passed_over(line: Line) -> None:
    said = b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\nHTTP/1.1 204 No\r\n\r\n"
    with tiny_server(always(Say((said,)))) as server:
        for _ in range(2):
            outcome = line.send(server.url, asking())
            assert isinstance(outcome, HttpReply)
            assert (outcome.status, outcome.body) == (204, b"")
    assert server.connections == 1


def test_a_stream_gives_its_pieces_and_how_it_ended(line: Line) -> None:
    with tiny_server(always(event_stream(b": hi\n\n", b"data: 1\n\n"))) as server:
        outcome = line.send(server.url, asking(is_stream=True))
    assert isinstance(outcome, list)
    *pieces, end = outcome
    assert b"".join(each for each in pieces if isinstance(each, bytes)) == b": hi\n\ndata: 1\n\n"
    assert silence(end) is Silence.BROKEN


def test_a_stream_that_falls_silent_is_given_up(line: Line) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n: hi\n\n"
    with tiny_server(always(KeepSilent(after=head))) as server:
        outcome = line.send(server.url, asking(is_stream=True, idle_s=0.1))
    assert isinstance(outcome, list)
    assert silence(outcome[-1]) is Silence.TIMED_OUT


def test_a_stream_that_is_refused_is_an_answer_like_others(line: Line) -> None:
    with tiny_server(always(answer(b"{}", 503))) as server:
        outcome = line.send(server.url, asking(is_stream=True))
    assert isinstance(outcome, HttpReply)
    assert outcome.status == 503


def test_threads_that_share_a_transport_never_get_each_others_answers() -> None:
    with tiny_server(lambda heard: answer(heard.body)) as server:
        transport = BlockingTransport(parse_address(server.url))

        def talk(name: int) -> list[bool]:
            bodies = [b"%d-%d" % (name, number) for number in range(30)]
            outcomes = [transport.send(asking(method="POST", body=body)) for body in bodies]
            return [
                isinstance(outcome, HttpReply) and outcome.body == body
                for outcome, body in zip(outcomes, bodies, strict=True)
            ]

        with ThreadPoolExecutor(8) as pool:
            assert all(itertools.chain.from_iterable(pool.map(talk, range(8))))
        transport.close()
    assert server.connections <= 8


def test_no_more_connections_are_kept_than_is_said() -> None:
    together = KEPT_MAX + 5

    async def main(url: str) -> None:
        transport = LoopTransport(parse_address(url))
        for _ in range(2):
            await asyncio.gather(*(transport.send(asking()) for _ in range(together)))
        await transport.close()

    with tiny_server(always(answer(b"ok"))) as server:
        asyncio.run(main(server.url))
    # All of them at first; the second time, those that were not kept.
    assert server.connections == together + 5


@pytest.mark.parametrize("kind", ["blocking", "event loop"])
def test_a_connection_is_kept_for_almost_as_long_as_the_server_keeps_it(kind: str) -> None:
    moments = [0.0]

    async def main(url: str) -> None:
        to, now_s = parse_address(url), lambda: moments[0]
        loop, sockets = LoopTransport(to, now_s=now_s), BlockingTransport(to, now_s=now_s)
        for moments[0] in (0.0, 60.0, 129.0, 200.0):
            if kind == "blocking":
                assert isinstance(await asyncio.to_thread(sockets.send, asking()), HttpReply)
            else:
                assert isinstance(await loop.send(asking()), HttpReply)
        await loop.close()
        sockets.close()

    with tiny_server(always(answer(b"ok"))) as server:
        asyncio.run(main(server.url))
    assert [heard.connection for heard in server.heard] == [1, 1, 1, 2]
    assert 60 <= IDLE_S_MAX < KEEP_ALIVE_S


def test_a_stream_that_is_larger_than_what_is_held_is_read_to_its_end(line: Line) -> None:
    pieces = [b"x" * 300_000] * 20
    with tiny_server(always(event_stream(*pieces))) as server:
        outcome = line.send(server.url, asking(is_stream=True))
    assert isinstance(outcome, list)
    assert sum(len(each) for each in outcome if isinstance(each, bytes)) == 6_000_000


def test_a_client_outlives_the_loop_that_it_was_used_in() -> None:
    with tiny_server(always(answer(b"ok"))) as server:
        transport = LoopTransport(parse_address(server.url))

        async def main() -> None:
            assert isinstance(await transport.send(asking()), HttpReply)

        async def last() -> None:
            await main()
            await transport.close()

        with asyncio.Runner() as first:
            first.run(main())
            with asyncio.Runner() as second:
                second.run(last())
            first.run(asyncio.sleep(0))
    assert server.connections == 2


def test_a_cancelled_call_leaves_no_connection_that_somebody_else_would_read_from() -> None:
    def script(heard: Heard) -> Reaction:
        return KeepSilent() if heard.number == 1 else answer(b"mine")

    async def main(url: str) -> None:
        transport = LoopTransport(parse_address(url))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await transport.send(asking())
        outcome = await transport.send(asking())
        assert isinstance(outcome, HttpReply)
        assert outcome.body == b"mine"
        await transport.close()

    with tiny_server(script) as server:
        asyncio.run(main(server.url))
    assert server.connections == 2


FORKING = """
import os, sys
from stanchion.transport.messages import HttpReply, Request
from stanchion.transport.messages import parse_address
from stanchion.transport.blocking import KEPT_MAX, BlockingTransport

transport = BlockingTransport(parse_address(sys.argv[1]))

def echo(body):
    request = Request(name="t", method="POST", path="/", body=body, timeout_s=5, is_repeatable=True)
    outcome = transport.send(request)
    assert isinstance(outcome, HttpReply) and outcome.body == body, outcome

echo(b"before")
child = os.fork()
for number in range(50):
    echo(b"%d %d" % (child, number))
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_fork_does_not_talk_over_its_parents_connection() -> None:
    with tiny_server(lambda heard: answer(heard.body)) as server:
        ran = subprocess.run(
            [sys.executable, "-c", FORKING, server.url],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert server.connections == 2
