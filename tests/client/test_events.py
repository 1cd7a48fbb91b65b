"""Following events: nothing is missed and nothing comes twice, however often the line breaks."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stanchion.client.client import Client
from stanchion.client.engine import Pace
from stanchion.client.errors import InvalidRequest, ServerUnavailable, UnexpectedAnswer
from stanchion.client.events import Event, EventParser
from stanchion.sim.loop import run
from stanchion.transport.messages import HttpReply, NoReply, Opened, Request, Silence
from tests.client.scripted import DEAD, away, client, now, problem
from tests.transport.tiny_server import Heard, Reaction, answer, event_stream, tiny_server


def line(what: str, run_id: str = "r1") -> bytes:
    at = "2026-01-01T00:00:00Z"
    data = {"run_id": run_id, "at": at, "what": what, "actor": "engine"}
    return b"event: %b\ndata: %b\n" % (what.encode(), msgspec.json.encode(data))


def commit(position: int, *whats: str) -> bytes:
    """Lines that come together. The last one has the id."""
    *lines, last = (line(what) for what in whats)
    return b"".join(each + b"\n" for each in lines) + b"id: %d\n" % position + last + b"\n"


def seen(events: list[Event]) -> list[tuple[str, str]]:
    return [(each.id, each.line.what) for each in events]


WHOLE = b": hi\n\nid: 0\n\n" + commit(1, "a", "b") + b": heartbeat\r\n\r\n" + commit(2, "c")


@given(st.integers(1, 30))
def test_events_read_the_same_however_they_are_cut(cut: int) -> None:
    parser, found = EventParser(), list[Event]()
    for at in range(0, len(WHOLE), cut):
        found += parser.feed(WHOLE[at : at + cut])
    assert seen(found) == [("1", "a"), ("1", "b"), ("2", "c")]
    assert parser.last_id == "2"


def test_a_commit_that_came_half_is_not_handed_out() -> None:
    parser = EventParser()
    half = commit(1, "a", "b").partition(b"id: ")[0]
    assert parser.feed(b"id: 0\n\n" + half) == []
    assert parser.last_id == "0"


def test_what_is_held_without_an_id_is_bounded() -> None:
    size = len(line("a"))
    parser = EventParser(held_bytes_max=3 * size)
    for number in range(100):
        parser.feed(commit(number, "a", "a"))
    parser.feed((line("a") + b"\n") * 3)
    with pytest.raises(ValueError, match="without an id"):
        parser.feed((line("a") + b"\n") * 3)
    with pytest.raises(ValueError, match="without an id"):
        EventParser(held_bytes_max=size).feed(b"x" * (size + 1))


@pytest.mark.parametrize(("about", "is_last"), [("r1", True), ("", False)])
def test_events_of_a_run_end_where_its_end_is_no_longer_kept(about: str, *, is_last: bool) -> None:
    told = b"id: 1\n" + line("gap", about) + b"\n" + commit(2, "run_succeeded")

    class Told:
        async def send(self, _: Request) -> Broken:
            return Broken(told, whole=True)

    async def main() -> list[Event]:
        return [event async for event in client(Told()).events("r1")]

    expected = [("1", "gap")] if is_last else [("1", "gap"), ("2", "run_succeeded")]
    assert seen(run(main())) == expected


class History:
    """A tenant's history, told in streams that break wherever chance has it."""

    def __init__(self, commits: int, seed: int, failures: list[HttpReply | NoReply]) -> None:
        self.resumed: list[str | None] = []
        self.opened_at_ms: list[int] = []
        self._chance = random.Random(seed)
        self._failures = failures
        self._commits = [commit(n, f"a{n}", f"b{n}") for n in range(1, commits + 1)]

    async def send(self, request: Request) -> HttpReply | NoReply | Broken:
        self.opened_at_ms.append(now())
        if self._failures and self._chance.random() < 0.3:
            return self._chance.choice(self._failures)
        after = dict(request.headers).get("Last-Event-ID")
        self.resumed.append(after)
        rest = b"id: %d\n\n" % int(after or 0) + b"".join(self._commits[int(after or 0) :])
        if int(after or 0) == len(self._commits):
            return Broken(b": nothing more\n\n", whole=True)
        return Broken(rest[: self._chance.randrange(1, 500)], whole=False)


class Broken:
    """A stream that gives some bytes, and breaks."""

    def __init__(self, data: bytes, *, whole: bool) -> None:
        self.opened = Opened({})
        self._pieces: list[bytes | NoReply] = [data[at : at + 37] for at in range(0, len(data), 37)]
        self._pieces.append(b"" if whole else NoReply(Silence.BROKEN, "cut"))

    async def read(self) -> bytes | NoReply:
        await asyncio.sleep(0.001)
        return self._pieces.pop(0)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("seed", range(10))
def test_a_line_that_keeps_breaking_loses_nothing_and_repeats_nothing(seed: int) -> None:
    history = History(40, seed, [DEAD, away(100)])

    async def main() -> list[Event]:
        following = client(history, seed=seed).events()
        found = [await anext(following) for _ in range(80)]
        await following.aclose()
        return found

    expected = [(f"{n}", f"{letter}{n}") for n in range(1, 41) for letter in "ab"]
    assert seen(run(main())) == expected
    assert len(history.resumed) > 5


def test_the_events_of_one_run_end_with_it() -> None:
    stream = event_stream(commit(1, "run_started"), commit(2, "run_succeeded"))
    with tiny_server(lambda _heard: stream) as server, Client(server.url) as caller:
        assert seen(list(caller.events("r1"))) == [("1", "run_started"), ("2", "run_succeeded")]
    assert [heard.path for heard in server.heard] == ["/v1/events?run_id=r1"]


def test_a_blocking_client_resumes_after_the_last_event_it_saw() -> None:
    def script(heard: Heard) -> Reaction:
        match heard.number:
            case 1:
                return event_stream(b"id: 0\n\n", commit(1, "a"), line("half"))
            case 2:
                return answer(b"{}", 503, "retry-after: 0")
            case _:
                return event_stream(commit(2, "half", "run_failed"))

    at_once = Pace(sample=lambda: 0.0)
    with tiny_server(script) as server, Client(server.url, pace=at_once) as caller:
        found = list(caller.events("r1", after="0"))
    assert seen(found) == [("1", "a"), ("2", "half"), ("2", "run_failed")]
    assert [heard.headers.get("last-event-id") for heard in server.heard] == ["0", "1", "1"]


def test_whoever_stops_listening_hangs_up() -> None:
    def script(_heard: Heard) -> Reaction:
        return event_stream(commit(1, "a"), then_hang_up=False)

    with tiny_server(script) as server, Client(server.url) as caller:
        following = caller.events()
        assert next(following).id == "1"
        following.close()
        server.wait_until_quiet()


def test_streams_that_end_before_anything_came_are_failures_like_others() -> None:
    class Empty:
        def __init__(self) -> None:
            self.opened_at_ms = list[int]()

        async def send(self, _request: Request) -> Broken:
            self.opened_at_ms.append(now())
            return Broken(b"", whole=True)

    server = Empty()

    async def main() -> None:
        with pytest.raises(ServerUnavailable):
            async for _ in client(server, sample=0.999).events():
                pass

    run(main())
    assert len(server.opened_at_ms) == 8


def test_streams_that_end_in_order_are_opened_again_at_leisure_without_cost() -> None:
    history = History(0, 0, [])

    async def main() -> None:
        async with asyncio.timeout(60):
            async for _ in client(history, seed=1).events():
                pass

    with pytest.raises(TimeoutError):
        run(main())
    assert 40 < len(history.opened_at_ms) < 150


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (problem(422, "invalid_request"), InvalidRequest),
        (HttpReply(200, {}, b"{}"), UnexpectedAnswer),
    ],
)
def test_what_is_no_stream_is_an_error(outcome: HttpReply, kind: type[Exception]) -> None:
    class Answering:
        async def send(self, _request: Request) -> HttpReply:
            return outcome

    async def main() -> None:
        with pytest.raises(kind):
            async for _ in client(Answering()).events():
                pass

    run(main())


@pytest.mark.parametrize("piece", [b"data: {]\n\n", b"id: \xff\n\n", b'data: {"what": 1}\n\n'])
def test_lines_that_are_no_history_are_told(piece: bytes) -> None:
    class Odd:
        async def send(self, _request: Request) -> Broken:
            return Broken(piece, whole=True)

    async def main() -> None:
        with pytest.raises(UnexpectedAnswer):
            async for _ in client(Odd()).events():
                pass

    run(main())
