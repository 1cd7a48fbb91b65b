"""The HTTP protocol: uvicorn's, with limits on slow, large and numerous requests.

uvicorn waits for ever for an incomplete request, and stores any number of headers. Here every
connection has a deadline unless a request on it is being served:

* A request's head must be complete within ``head_s`` of the connection's start or of the first byte
  after the last answer (blank lines count as a first byte), and all of it within ``request_s``.
* After an answer the next request must begin within the keep-alive time.
* The client of a closing connection, or of one with a full send buffer, must read within
  ``write_s``.

Timers are set only when a request arrives in pieces or an answer is not read, so that ordinary
requests need none.

Connections have slots. When all are used, the connection that has been idle for longest is dropped
for a new one; idle means that no request on it waits for its answer. If none is idle, a few more
connections are accepted that may only request ``/livez`` and ``/readyz``: a supervisor must not
restart a server because it is busy. They share the listener with all others because a probe cannot
be recognised before its head is read; a separate listener would need a second port.

A connection's bytes are parsed in slices, and not while more than a few of its requests wait, so
that thousands of pipelined requests do not block other connections. The rest of a body of known
length is one slice.

After an answer ``overloaded`` the connection is not read for a second, the minimum of its
``Retry-After``: otherwise thousands of clients that retry at once would keep the server busy.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar, Final

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from stanchion.gateway.exchange import ANSWER, BODY, GONE, REST, STREAM, Receive, Send
from stanchion.gateway.load import READ_BYTES, ByteTurns
from stanchion.gateway.options import GatewayOptions
from stanchion.gateway.problems import CLOSE, Refusal, answer_parts
from stanchion.gateway.route import PROBES
from stanchion.wire.problems import Code

HEAD_BYTES_MAX: Final = 64 * 1024
PROBE_SLOTS: Final = 32
"""Connections beyond the limit that may only request liveness and readiness."""
_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
_STREAM_SEND_BYTES: Final = 64 * 1024
_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER with zero seconds: closing the socket drops what was not sent."""
_QUEUED_MAX: Final = 16
"""Pipelined requests behind the one being answered; with more, reading pauses."""
_SLICE_BYTES: Final = 8 * 1024
"""Bytes parsed at once: at most some 450 of the smallest requests."""
_LINGER_S: Final = 2.0
"""How long a client with ``Connection: close`` may send the rest of a refused request: if it is
closed on while it sends, it may not read its answer."""
_REST_S: Final = 20.0
"""How long the rest of a refused request's body may take before the connection is closed."""


def _do_nothing() -> None:
    pass


class _Flow(FlowControl):
    """Reads nothing while the connection is full.

    Requests resume reading when they read their body, and the base class when they are answered;
    neither looks at how much is waiting behind them.
    """

    is_full = False

    def resume_reading(self) -> None:
        if self.read_paused and not self.is_full:
            self.read_paused = False
            self._transport.resume_reading()


def guarded(options: GatewayOptions, connections_max: int) -> type[GuardedProtocol]:
    """The protocol for a server with these limits."""

    class Guarded(GuardedProtocol):
        limit = connections_max
        head_s = options.head_timeout_s
        request_s = options.body_timeout_s + _REST_S
        write_s = options.write_timeout_s
        headers_max = options.headers_max
        idle: ClassVar[dict[GuardedProtocol, None]] = {}
        refused = ByteTurns()

    return Guarded


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    limit = 1_000
    head_s = 10.0
    request_s = 30.0
    write_s = 10.0
    pause_s = 1.0
    headers_max = 100
    idle: ClassVar[dict[GuardedProtocol, None]] = {}
    """The server's connections without an unanswered request, the longest idle one first."""
    refused = ByteTurns()
    """For the rests of bodies that are not wanted any more."""
    flow: _Flow  # type: ignore[mutable-override] # set when the connection is made
    _timer: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _pause: asyncio.TimerHandle | None = None
    _next_timer: asyncio.TimerHandle | None = None
    """Ends the keep-alive time. It stays while a request is under way: to set and cancel one for
    each request takes longer than to look at the clock."""
    _next_by_s: float | None = None
    """When the next request must begin; ``None`` while one is under way or arriving."""
    _gone: Callable[[], object] = staticmethod(_do_nothing)
    """Called when the client disconnects; set by the request under way."""
    _under_way: RequestResponseCycle | None = None
    """Of several pipelined requests, the one that is being answered."""
    _held = b""
    """Bytes that were read but not parsed, because too many requests are queued before them."""
    _silent_bytes = 0
    """Bytes of a head, or bytes since the last piece of body."""
    _body_bytes = 0
    """Bytes of the present request's body that have arrived."""
    _offers: dict[str, Any]
    """What the present request may ask of its connection."""
    _is_for_probes = False
    _is_replaying = False
    """Whether the parser is fed a head that was handled before."""
    _is_in_head = False
    _is_in_request = False
    _is_lost = False
    _refused: Refusal | None = None
    """The answer to a broken request, sent after the answers to the requests before it."""

    @property
    def has_deadline(self) -> bool:
        """Whether a timer bounds the connection's present state."""
        next_timer = None if self._next_by_s is None else self._next_timer
        return any(each is not None for each in (self._timer, self._stall, next_timer))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as the class above has it
        super().connection_made(transport)
        self.flow = _Flow(transport)
        excess = len(self.connections) - self.limit
        if excess > 0 and not self._drop_longest_idle():
            if excess > PROBE_SLOTS:
                self._refuse(_no_slot())
                return
            self._is_for_probes = True
        self.idle[self] = None
        self._set_timer(self.head_s, self._close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_timer()
        self._clear_stall()
        self._is_lost = True
        self.idle.pop(self, None)
        self._held = b""
        for timer in (self._pause, self._next_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._next_by_s = self._next_timer = None
        if self._under_way is not None:
            # The base class disconnects only the newest request; an older one may be under way.
            self._under_way.disconnected = True
            self._under_way.message_event.set()
        self._gone()
        self._forget_requests()

    def _forget_requests(self) -> None:
        """Break the reference cycles between a lost connection and its requests.

        They hold bodies and other values of the request, and the garbage collector runs
        rarely: what a thousand connections leave would stay in memory, between what is in use.
        """
        self._gone = _do_nothing
        for cycle in (self._under_way, self.cycle, *(queued for queued, _ in self.pipeline)):
            if cycle is not None:
                _unbind(cycle)
        self._under_way = self.scope = self.headers = self.cycle = None  # type: ignore[assignment] # as the base class has them before the first request
        self._offers = {}
        self.pipeline.clear()

    def eof_received(self) -> None:
        # The transport closes itself now, and would wait for ever for a client that does not read.
        self._close()

    def data_received(self, data: bytes) -> None:
        if self._refused is not None:
            return  # what follows a broken request has no meaning
        if self._held or len(self.pipeline) > _QUEUED_MAX:
            self._held += data
            self._pace()
        elif len(data) <= _SLICE_BYTES:
            self._parse(data)
        else:
            self._parse_slices(data)

    def _parse_slices(self, data: bytes) -> None:
        begin = 0
        while begin < len(data) and self._refused is None:
            if len(self.pipeline) > _QUEUED_MAX:
                self._held = data[begin:]
                self._pace()
                return
            end = begin + max(_SLICE_BYTES, self._body_bytes_due())
            self._parse(data[begin:end])
            begin = end

    def _pace(self) -> None:
        """Pause reading while too much waits for the request that is being answered."""
        self.flow.is_full = (
            self._held != b""
            or len(self.pipeline) > _QUEUED_MAX
            or (len(self.pipeline) > 0 and len(self.cycle.body) > HIGH_WATER_LIMIT)
        )
        if self.flow.is_full:
            self.flow.pause_reading()
        else:
            self.flow.resume_reading()

    def _body_bytes_due(self) -> int:
        """How many of the next bytes are certainly body, and contain no other request."""
        if not self._is_in_request or self._is_in_head:
            return 0
        declared = next((value for name, value in self.headers if name == b"content-length"), b"0")
        return int(declared) - self._body_bytes

    def _parse(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        was_in_request = self._is_in_request
        self._next_by_s = None
        self._feed(data)
        if self.transport.is_closing() or self._refused is not None:
            return
        if not self._is_in_request:
            if self._timer is None and self in self.idle:
                # Only blank lines: they are no request, and must not clear the deadline.
                self._set_timer(self.head_s, self._close)
            return
        self._silent_bytes += min(len(data), _SLICE_BYTES)  # a longer slice is all body
        if self._silent_bytes > HEAD_BYTES_MAX:
            part = "head has" if self._is_in_head else "trailers or chunk extensions have"
            detail = f"the {part} more than {HEAD_BYTES_MAX} bytes"
            self._refuse(Refusal(code=Code.HEADERS_TOO_LARGE, detail=detail))
            return
        if not was_in_request or self._timer is None:
            self._set_timer(self.head_s if self._is_in_head else self.request_s, self._too_slow)

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                # No upgrade is supported: the rest is this request's body, if it has one, and the
                # next request.
                data = data[offer.args[0] :]
                self._read_body_after_upgrade()
                continue
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
            return

    def _read_body_after_upgrade(self) -> None:
        """Continue with a new parser that has read the same framing, without the upgrade header.

        The parser ends a request with an upgrade header after its head, and would parse its body
        as the next request.
        """
        framing = self._framing()
        if not framing:
            return
        self.parser = httptools.HttpRequestParser(self)
        self._is_replaying = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + _text(framing) + b"\r\n")
        self._is_replaying = False

    def _framing(self) -> list[tuple[bytes, bytes]]:
        return [each for each in self.headers if each[0] in _FRAMING]

    def on_message_begin(self) -> None:
        if self._is_replaying:
            return
        super().on_message_begin()
        self._is_in_head = self._is_in_request = True
        self._silent_bytes = self._body_bytes = 0
        self._offers = {
            GONE: self._when_gone,
            REST: self._pause_reading,
            STREAM: self._prepare_stream,
        }
        self.scope["extensions"] = self._offers

    def on_header(self, name: bytes, value: bytes) -> None:
        # The parser reports trailers here as well. They are ignored: a key, tenant or length must
        # not come after a body. One header over the limit is kept, so that the request is refused,
        # and those that say where it ends.
        if self._is_in_head and (len(self.headers) <= self.headers_max or name.lower() in _FRAMING):
            # The same as in the base class, without its second call for each header. White space
            # around a value is not part of it, and the parser keeps what comes after it.
            name, value = name.lower(), value.rstrip(b" \t")
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._is_replaying:
            return
        self._is_in_head = False
        self._silent_bytes = 0
        if self._timer is not None:
            self._set_timer(self.request_s, self._too_slow)
        if self.expect_100_continue and self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # such a client takes the answer 100 for the last one
        super().on_headers_complete()
        if self.pipeline:
            # Keep reading if possible, or a disconnect goes unnoticed.
            self._pace()
        # Bound to this cycle: each of several pipelined requests has a cycle of its own.
        cycle = self.cycle
        self._offers[ANSWER] = partial(self._answer, cycle)
        self._offers[BODY] = partial(_whole_body, cycle)

    def on_body(self, body: bytes) -> None:
        self._silent_bytes = 0
        self._body_bytes += len(body)
        if len(body) > _SLICE_BYTES and self.cycle.response_complete:
            self.flow.pause_reading()
            self.refused.call(READ_BYTES, None, self._read_on)
        super().on_body(body)
        if self.pipeline and self.flow.read_paused:
            self._pace()

    def _read_on(self) -> None:
        if self._pause is None and not self.transport.is_closing():
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:  # noqa: ANN401 - as ASGI has it
        self._under_way = cycle
        self.idle.pop(self, None)
        if self._is_for_probes:
            cycle.keep_alive = False
            if cycle.scope["path"] not in PROBES:
                app = _refuse_for_lack_of_slots
        self.tasks.add(self.loop.create_task(self._run(cycle, app)))

    async def _run(self, cycle: RequestResponseCycle, app: Any) -> None:  # noqa: ANN401 - as ASGI has it
        try:
            await cycle.run_asgi(app)
        finally:
            # Not in a callback of the task, which would be one more of the event loop's.
            task = asyncio.current_task(self.loop)
            assert task is not None
            self.tasks.discard(task)
            if self.transport.is_closing() and not self._is_lost:
                self._close()

    def on_response_complete(self) -> None:
        if self._under_way is not None:
            # Break the reference cycle: the garbage collector would pause the server to collect
            # thousands of them.
            _unbind(self._under_way)
        is_last = not self.pipeline
        if is_last and not self.transport.is_closing():
            self._expect_next()
        else:
            super().on_response_complete()
        if is_last:
            self.idle[self] = None
        if self.transport.is_closing():
            self._close()
        elif self._refused is not None:
            if is_last:
                self._refuse(self._refused)
        elif self._held and len(self.pipeline) <= _QUEUED_MAX // 2:
            held, self._held = self._held, b""
            self._parse_slices(held)
            self._pace()
        elif self.flow.is_full:
            self._pace()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._framing():
            return  # the new parser reads its body
        self._is_in_request = False
        if self._timer is not None:
            self._clear_timer()
        if self.cycle.response_complete:
            # This was the rest of a request that was refused before it was complete.
            if self.cycle.keep_alive:
                self._set_timer(self.timeout_keep_alive, self._close)
            else:
                self._close()
        else:
            self.cycle.more_body = False
            self.cycle.message_event.set()

    def _expect_next(self) -> None:
        """What the base class does when no request is queued, with a timer that stays."""
        self.server_state.total_requests += 1
        self.flow.resume_reading()
        self._next_by_s = self.loop.time() + self.timeout_keep_alive
        if self._next_timer is None:
            self._next_timer = self.loop.call_later(self.timeout_keep_alive, self._look_for_next)

    def _look_for_next(self) -> None:
        self._next_timer = None
        if self._next_by_s is None:
            return  # set again after the request under way
        left_s = self._next_by_s - self.loop.time()
        if left_s > 0:
            self._next_timer = self.loop.call_later(left_s, self._look_for_next)
        else:
            self._close()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._clear_stall()
        self._stall = self.loop.call_later(self.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._clear_stall()
        super().resume_writing()

    def drop_if_stalled(self) -> None:
        """Disconnect if the client does not read: the server is shutting down."""
        if self._stall is not None:
            self.transport.abort()

    def _prepare_stream(self) -> Callable[[], bool]:
        """Shrink the socket's send buffer; return the function that aborts the stream.

        With a large buffer a slow client would be megabytes behind, and would read events long
        after its stream has ended.
        """
        connected = self.transport.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _STREAM_SEND_BYTES)
        return self._cut

    def _cut(self) -> bool:
        """If the client is behind, drop what it has not read and disconnect; whether it was."""
        if not self.transport.get_write_buffer_size():
            return False
        connected = self.transport.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()
        return True

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refusal(code=Code.MALFORMED_REQUEST, detail=msg))

    def _when_gone(self, then: Callable[[], object]) -> None:
        if not self._is_lost:
            self._gone = then
        if self.transport.is_closing():
            then()

    def _answer(
        self,
        cycle: RequestResponseCycle,
        status: int,
        headers: Sequence[tuple[bytes, bytes]] | bytes,
        body: bytes,
    ) -> bool:
        """Write a whole answer at once, which the cycle's ``send`` would do in two steps.

        Headers may be given as text; then they do not close the connection.
        ``False`` if the client is behind with reading: then the caller must use ``send``, and wait.
        """
        if cycle.response_started or self.flow.write_paused:
            return False
        if cycle.disconnected:
            return True
        always, end = _lines(tuple(cycle.default_headers)), b"\r\n"
        given = headers if isinstance(headers, bytes) else _text(headers)
        if not isinstance(headers, bytes) and CLOSE in headers:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            end = b"connection: close\r\n\r\n"
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        self.transport.write(b"".join((STATUS_LINE[status], always, given, end, body)))
        cycle.message_event.set()
        is_sending = cycle is self.cycle and self._is_in_request
        if not cycle.keep_alive and not is_sending:
            self.transport.close()  # on_response sets a deadline for it
        cycle.on_response()
        if not cycle.keep_alive and is_sending:
            self._set_timer(_LINGER_S, self._close)
        return True

    def _pause_reading(self) -> None:
        """Stop reading for ``pause_s``, unless more requests are waiting already."""
        if self._pause is None and not self.pipeline and not self.transport.is_closing():
            self.flow.pause_reading()
            self._pause = self.loop.call_later(self.pause_s, self._resume)

    def _resume(self) -> None:
        self._pause = None
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _too_slow(self) -> None:
        self._timer = None
        if self.flow.is_full:  # it was not read, because another one is being answered
            self._set_timer(self.request_s, self._too_slow)
            return
        detail = "the request did not arrive in time"
        self._refuse(Refusal(code=Code.REQUEST_TIMEOUT, detail=detail))

    def _refuse(self, refusal: Refusal) -> None:
        """Answer instead of the app, because the request is incomplete, and disconnect.

        Requests before it on the same connection are answered first.
        """
        self._clear_timer()
        cycle: RequestResponseCycle | None = self.cycle  # none before the first request
        own = cycle if self._is_in_request and not self._is_in_head else None
        before = self._under_way
        if before is not None and before is not own and not before.response_complete:
            self._refused, self._held = refusal, b""
            self.pipeline = deque(each for each in self.pipeline if each[0] is not own)
            self.flow.is_full = False
            self.flow.resume_reading()  # what comes is dropped
            return
        is_under_way = cycle is not None and not cycle.response_complete
        # It has its answer if only the rest of its body is faulty or late.
        is_answered = own is not None and own.response_complete
        if not is_answered and (cycle is None or not is_under_way or not cycle.response_started):
            self._write(refusal)
        if cycle is not None and is_under_way:
            # The app's own answer must not be sent after this one.
            cycle.disconnected = True
            cycle.message_event.set()
        self._held = b""
        self.idle[self] = None
        self._close()

    def _close(self) -> None:
        """Close when all that was written is sent, and after ``write_s`` in any case."""
        self._clear_timer()
        self.transport.close()
        self._timer = self.loop.call_later(self.write_s, self.transport.abort)

    def _drop_longest_idle(self) -> bool:
        """Drop the connection that has been idle for longest; whether there was an idle one.

        What its client has not read yet is lost.
        """
        for longest in self.idle:
            del self.idle[longest]
            # Uncounted here, because the transport reports the loss of a connection later.
            self.connections.discard(longest)
            longest.transport.abort()
            return True
        return False

    def _write(self, refusal: Refusal) -> None:
        status, body, headers = answer_parts(refusal, "")
        lines = [*headers, (b"content-length", b"%d" % len(body)), CLOSE]
        self.transport.write(STATUS_LINE[status] + _text(lines) + b"\r\n" + body)

    def _set_timer(self, seconds: float, then: Callable[[], None]) -> None:
        self._clear_timer()
        self._timer = self.loop.call_later(seconds, then)

    def _clear_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _clear_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _no_slot() -> Refusal:
    detail = "too many connections"
    return Refusal(code=Code.OVERLOADED, detail=detail, retry_after_ms=1_000)


async def _refuse_for_lack_of_slots(_scope: object, _receive: Receive, send: Send) -> None:
    """The app for other requests on connections that are reserved for probes."""
    status, body, headers = answer_parts(_no_slot(), "")
    headers = [*headers, (b"content-length", b"%d" % len(body)), CLOSE]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _unbind(cycle: RequestResponseCycle) -> None:
    offers = cycle.scope["extensions"]
    offers.pop(ANSWER, None)
    offers.pop(BODY, None)


def _whole_body(cycle: RequestResponseCycle) -> bytes | None:
    """What ``receive`` would return of a body that has arrived, without a coroutine."""
    if cycle.more_body or cycle.disconnected or cycle.response_complete:
        return None
    body, cycle.body = bytes(cycle.body), bytearray()
    cycle.waiting_for_100_continue = False
    cycle.flow.resume_reading()
    cycle.message_event.clear()
    return body


def _text(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    text = b"".join([b"%b: %b\r\n" % header for header in headers])
    if text.count(b"\n") != len(headers):
        raise ValueError("a header contains a line break")
    return text


_lines = lru_cache(maxsize=4)(_text)
"""For the headers that all answers of one second share."""
