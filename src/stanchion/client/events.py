"""Events: a stream of a tenant's history, without gaps when the connection breaks.

The lines of one commit arrive together, and the last of them has the id to resume after. So lines
are emitted when their id is known: a client that reconnects sends the last id, and receives every
later line once.

A stream that ends is opened again: after an orderly end with a random delay, after failures with
the engine's retries, whose count starts over after a stream that delivered something.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlencode

import msgspec

from stanchion.client.engine import CallEngine, Emit, Feed, Read, Sleep
from stanchion.client.errors import CallFacts, UnexpectedAnswer
from stanchion.core.retry import RetryClass, Tries, backoff_ms
from stanchion.transport.messages import NoReply, Request, Silence
from stanchion.wire.runs import GAP, RUN_ENDS, FeedLine

HELD_BYTES_MAX: Final = 64 * 1024 * 1024
"""Buffered lines whose id has not arrived yet."""


class Event(msgspec.Struct, frozen=True):
    """A line of a run's history."""

    id: str
    """Its position in the tenant's history: ``events(after=…)`` resumes after it."""
    line: FeedLine


def events(
    engine: CallEngine, run_id: str | None = None, *, after: str | None = None
) -> Feed[Event]:
    """Events of the tenant's runs from now on, or after an event that was seen before.

    For one run: its events from its beginning to its end. Where the server no longer keeps events
    there is one whose ``line.what`` is ``gap``. Otherwise it continues until the iterator
    is closed, or the server is unavailable for longer than the retry policy allows: then the error
    is raised, and ``after=`` the last event's id resumes.
    """
    tries = Tries(engine.pace.now())
    while True:
        request = _request(engine, run_id, after)
        yield from engine.open(request)
        parser, heard = EventParser(), False
        while isinstance(piece := (yield Read()), bytes) and piece:
            heard = True
            for event in _parsed(parser, piece):
                yield Emit(event)
                if run_id is not None and _is_last(event.line, run_id):
                    return
            after = parser.last_id or after
        if heard:
            # The server shuts down, or a proxy closes old connections. All streams end together,
            # so reconnects are jittered; but nothing failed, so it takes no retry token.
            tries = Tries(engine.pace.now())
            policy = engine.pace.policies[RetryClass.UNAVAILABLE]
            yield Sleep(backoff_ms(policy.backoff, _REOPEN_ATTEMPT, engine.pace.sample()))
        else:
            broken = NoReply(Silence.BROKEN, "the stream ended before anything came")
            wait = engine.again(request, broken, tries)
            tries = wait.tries
            yield Sleep(wait.delay_ms)


def _is_last(line: FeedLine, run_id: str) -> bool:
    """Whether no further line of the run follows: it has ended, or its end is no longer kept."""
    return line.what in RUN_ENDS or (line.what == GAP and line.run_id == run_id)


_REOPEN_ATTEMPT: Final = 4
"""The backoff of this many failures: full jitter up to 1.6 s by the default policy."""


class EventParser:
    """Parses a stream of server-sent events by the HTML standard."""

    def __init__(self, held_bytes_max: int = HELD_BYTES_MAX) -> None:
        self._held_bytes_max = held_bytes_max
        self.last_id = ""
        """The id of the last event that was returned."""
        self._id: str | None = None
        self._data: list[bytes] = []
        self._held: list[FeedLine] = []
        self._rest = b""
        self._size = 0

    def feed(self, piece: bytes) -> list[Event]:
        """Parse a piece; return the events whose id is known now."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        found: list[Event] = []
        for line in lines:
            found += self._line(line.removesuffix(b"\r"))
        if self._size + len(self._rest) > self._held_bytes_max:
            raise ValueError(f"more than {self._held_bytes_max} bytes without an id")
        return found

    def _line(self, line: bytes) -> list[Event]:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._size += len(value)
        elif name == b"id":
            self._id = value.decode("ascii")
        # Else a comment (a heartbeat), or the event's kind, which its data has too.
        return []

    def _dispatch(self) -> list[Event]:
        if self._data:
            self._held.append(_LINE.decode(b"\n".join(self._data)))
            self._data = []
        if self._id is None:
            return []
        self.last_id, self._id = self._id, None
        held, self._held, self._size = self._held, [], 0
        return [Event(self.last_id, each) for each in held]


_LINE: Final = msgspec.json.Decoder(FeedLine)


def _parsed(parser: EventParser, piece: bytes) -> list[Event]:
    try:
        return parser.feed(piece)
    except ValueError as error:  # msgspec's errors are among them.
        raise UnexpectedAnswer(f"events: {error}", CallFacts(call="events", status=200)) from error


def _request(engine: CallEngine, run_id: str | None, after: str | None) -> Request:
    headers = [*engine.headers, ("Accept", "text/event-stream")]
    if after is not None:
        headers.append(("Last-Event-ID", after))
    query = "" if run_id is None else f"?{urlencode({'run_id': run_id})}"
    return Request(
        name="events",
        method="GET",
        path=f"/v1/events{query}",
        headers=tuple(headers),
        timeout_s=engine.timeout_s,
        is_repeatable=True,
        is_stream=True,
    )
