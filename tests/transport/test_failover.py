"""Several servers: a request moves on when one does not answer, and stays where one does."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from msgspec.structs import replace

import stanchion
from stanchion.transport.blocking import BlockingStream, blocking_transport
from stanchion.transport.event_loop import LoopStream, loop_transport
from stanchion.transport.failover import ServerOrder, attempts, parse_addresses
from stanchion.transport.messages import HttpReply, NoReply, Request, Silence
from stanchion.worker.server import HttpTransport, ServerAnswered, ServerUnreachable, WorkerApi
from tests.transport.tiny_server import (
    HangUp,
    KeepSilent,
    Reaction,
    TinyServer,
    answer,
    event_stream,
    tiny_server,
)

OK = answer(b"{}")
DRAINING = answer(b'{"status": 503, "code": "draining"}', 503)
STORE_DOWN = answer(b'{"status": 503, "code": "store_unavailable"}', 503)
Sends = Callable[[Request], object]
Opens = Callable[..., Sends]
Serves = Callable[[Reaction], TinyServer]


@pytest.fixture
def serving() -> Iterator[Serves]:
    with ExitStack() as stack:
        yield lambda reaction: stack.enter_context(tiny_server(lambda _heard: reaction))


@pytest.fixture
def dead() -> Iterator[str]:
    """The URL of a port at which nothing listens, and which no other process gets."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(params=["blocking", "loop"])
def opening(request: pytest.FixtureRequest) -> Iterator[Opens]:
    """Both transports to several servers, each as a blocking function."""
    runner, ending = asyncio.Runner(), ExitStack()

    def blocking(*urls: str) -> Sends:
        transport = blocking_transport(parse_addresses(urls))
        ending.callback(transport.close)
        return transport.send

    def loop(*urls: str) -> Sends:
        transport = loop_transport(parse_addresses(urls))
        ending.callback(lambda: runner.run(transport.close()))
        return lambda sent: runner.run(transport.send(sent))

    yield blocking if request.param == "blocking" else loop
    ending.close()
    runner.close()


def asking(*, is_repeatable: bool = True, timeout_s: float = 5, is_stream: bool = False) -> Request:
    return Request(
        name="test",
        method="POST",
        path="/v1/x",
        timeout_s=timeout_s,
        is_repeatable=is_repeatable,
        is_stream=is_stream,
    )


def test_a_refused_connection_moves_on_and_the_next_server_keeps_the_requests(
    opening: Opens, serving: Serves, dead: str
) -> None:
    other = serving(answer(b"ok"))
    send = opening(dead, other.url)
    for _ in range(3):
        outcome = send(asking(is_repeatable=False))
        assert isinstance(outcome, HttpReply)
        assert outcome.body == b"ok"
    assert len(other.heard) == 3


def test_requests_stay_with_the_server_that_answered(opening: Opens, serving: Serves) -> None:
    first, second = serving(DRAINING), serving(answer(b"ok"))
    send = opening(first.url, second.url)
    for _ in range(3):
        assert isinstance(send(asking(is_repeatable=False)), HttpReply)
    assert (len(first.heard), len(second.heard)) == (1, 3)


@pytest.mark.parametrize("is_repeatable", [True, False])
def test_only_repeatable_requests_move_on_from_a_broken_connection(
    opening: Opens, serving: Serves, *, is_repeatable: bool
) -> None:
    first, second = serving(HangUp()), serving(answer(b"ok"))
    send = opening(first.url, second.url)
    outcome = send(asking(is_repeatable=is_repeatable))
    if is_repeatable:
        assert isinstance(outcome, HttpReply)
    else:
        assert isinstance(outcome, NoReply)
        assert outcome.silence is Silence.BROKEN
        assert second.heard == []
        assert isinstance(send(asking(is_repeatable=False)), HttpReply)  # The next goes elsewhere.


@pytest.mark.parametrize("reaction", [KeepSilent(), STORE_DOWN], ids=["silent", "store_down"])
def test_a_time_out_or_another_503_is_returned_and_the_retry_goes_to_the_next(
    opening: Opens, serving: Serves, reaction: Reaction
) -> None:
    first, second = serving(reaction), serving(answer(b"ok"))
    send = opening(first.url, second.url)
    outcome = send(asking(timeout_s=0.2))
    assert isinstance(outcome, NoReply) or (
        isinstance(outcome, HttpReply) and outcome.status == 503
    )
    retried = send(asking())
    assert isinstance(retried, HttpReply)
    assert (retried.body, len(first.heard), len(second.heard)) == (b"ok", 1, 1)


def test_what_no_server_answers_names_all_of_them(opening: Opens, dead: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        outcome = opening(dead, f"http://127.0.0.1:{port}")(asking())
    assert isinstance(outcome, NoReply)
    assert outcome.silence is Silence.UNREACHED
    assert dead.removeprefix("http://") in outcome.message
    assert f"127.0.0.1:{port}" in outcome.message


def test_a_stream_is_opened_at_the_server_that_answers(
    opening: Opens, serving: Serves, dead: str
) -> None:
    other = serving(event_stream(b"data: 1\n\n"))
    outcome = opening(dead, other.url)(asking(is_stream=True))
    assert isinstance(outcome, BlockingStream | LoopStream)
    outcome.close()


def test_what_may_have_run_is_said_before_what_was_refused() -> None:
    tries = attempts(ServerOrder(3), asking(), lambda: 0.0)
    next(tries)
    tries.send(NoReply(Silence.BROKEN, "a broke"))
    tries.send(HttpReply(503, {}, b'{"code": "draining"}'))
    with pytest.raises(StopIteration) as done:
        tries.send(NoReply(Silence.UNREACHED, "c refused"))
    assert done.value.value == NoReply(Silence.BROKEN, "a broke; c refused")


def test_all_servers_share_the_deadline_of_the_request() -> None:
    clock = iter([0.0, 0.0, 4.0, 6.0])
    tries = attempts(ServerOrder(3), asking(), lambda: next(clock))
    assert next(tries)[1].timeout_s == 5
    index, sent = tries.send(NoReply(Silence.UNREACHED, "a refused"))
    assert (index, sent.timeout_s) == (1, 1.0)
    with pytest.raises(StopIteration):
        tries.send(NoReply(Silence.UNREACHED, "b timed out"))


def test_urls_come_as_a_list_or_with_commas() -> None:
    one, two = "http://a:1", "https://b/x"
    assert parse_addresses(f"{one}, {two}") == parse_addresses([one, two])
    assert len(parse_addresses([one, one])) == 1
    wrongs: list[str | list[str]] = ["", [], f"{one},", "a,b"]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="URL"):
            stanchion.Client(wrong)


async def test_a_cancelled_request_leaves_no_server_that_answers_others(serving: Serves) -> None:
    with tiny_server(lambda heard: KeepSilent() if "held" in heard.path else OK) as first:
        second = serving(OK)
        transport = loop_transport(parse_addresses([first.url, second.url]))
        held = asyncio.create_task(transport.send(replace(asking(), path="/held")))
        await transport.send(asking())
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        await transport.send(asking())
        assert second.heard == []
        await transport.close()


async def test_a_worker_whose_server_is_silent_asks_the_next(serving: Serves) -> None:
    silent, second = serving(KeepSilent()), serving(answer(b'{"renewed": [], "lost": []}'))
    transport = HttpTransport([silent.url, second.url])
    api = WorkerApi(transport, "w")
    assert isinstance(await api.renew((), timeout_s=0.2), ServerUnreachable)
    assert isinstance(await api.renew((), timeout_s=5), ServerAnswered)
    await transport.close()
