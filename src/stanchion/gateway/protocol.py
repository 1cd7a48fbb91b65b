"""The HTTP protocol: uvicorn's, with limits for callers who are slow, large or many.

uvicorn waits for ever for a request that never ends, and keeps whatever headers come. Here a
request's head must be there within ten seconds of its first byte, and all of it within thirty; a
connection that says nothing is closed; heads have a size; connections have a number; and a reader
who lets answers pile up is cut off. Timers are set only when a request arrives in pieces or an
answer is not taken, so that those who do as they should pay nothing.

A caller that was told that there is too much to do is not listened to for a second, the least that
its ``Retry-After`` asks for: thousands that ask again at once would else keep the server busy with
refusing them.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from stanchion.gateway.exchange import ANSWER, GONE, REST, STREAM
from stanchion.gateway.options import GatewayOptions
from stanchion.gateway.problems import Refusal, answer_parts
from stanchion.wire.problems import Code

__all__ = ["HEAD_BYTES_MAX", "GuardedProtocol", "guarded"]

HEAD_BYTES_MAX: Final = 64 * 1024
_CLOSE: Final = (b"connection", b"close")
_STREAM_SEND_BYTES: Final = 64 * 1024
_RESET: Final = struct.pack("ii", 1, 0)
"""A closed socket then drops what was not sent, instead of going on to send it."""
_QUEUED_MAX: Final = 16
"""Requests that may stand in line behind the one being answered, before no more are read."""
_REST_S: Final = 20.0
"""For a body that nobody waits for any more, because it was refused: then the line is cut."""


def guarded(options: GatewayOptions, connections_max: int) -> type[GuardedProtocol]:
    """The protocol for a server with these limits."""

    class Guarded(GuardedProtocol):
        limit = connections_max
        head_s = options.head_timeout_s
        request_s = options.body_timeout_s + _REST_S
        write_s = options.write_timeout_s

    return Guarded


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    limit = 1_000
    head_s = 10.0
    request_s = 30.0
    write_s = 10.0
    deaf_s = 1.0
    _timer: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _deaf: asyncio.TimerHandle | None = None
    _gone: Callable[[], object] = staticmethod(lambda: None)
    """Who wants to know when the caller hangs up: the request under way, if any."""
    _under_way: RequestResponseCycle | None = None
    """Of several requests in a row, the one that is being answered."""
    _head_bytes = 0
    _is_in_head = False
    _is_in_request = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as the class above has it
        super().connection_made(transport)
        if len(self.connections) > self.limit:
            detail = "too many connections"
            self._refuse(Refusal(code=Code.OVERLOADED, detail=detail, retry_after_ms=1_000))
        else:
            self._set_timer(self.head_s, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_timer()
        self._clear_stall()
        if self._deaf is not None:
            self._deaf.cancel()
        super().connection_lost(exc)
        if self._under_way is not None:
            # The one above knows the newest request only, and others may stand before it.
            self._under_way.disconnected = True
            self._under_way.message_event.set()
        self._gone()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        was_in_request = self._is_in_request
        super().data_received(data)
        if not self._is_in_request:
            self._clear_timer()
            return
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                detail = f"the head has more than {HEAD_BYTES_MAX} bytes"
                self._refuse(Refusal(code=Code.HEADERS_TOO_LARGE, detail=detail))
                return
        if not was_in_request or self._timer is None:
            self._set_timer(self.head_s if self._is_in_head else self.request_s, self._too_slow)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = self._is_in_request = True
        self._head_bytes = 0
        self._offers: dict[str, Any] = {
            GONE: self._when_gone,
            REST: self._rest,
            STREAM: self._prepare_stream,
        }
        self.scope["extensions"] = self._offers

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self._timer is not None:
            self._set_timer(self.request_s, self._too_slow)
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= _QUEUED_MAX:
            # Whoever does not read does not learn either that the caller has hung up.
            self.flow.resume_reading()
        # The app begins later. Of several requests in a row each has a cycle of its own.
        self._offers[ANSWER] = partial(self._answer, self.cycle)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:  # noqa: ANN401 - as ASGI has it
        self._under_way = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if self._under_way is not None:
            # It knows the cycle, which knows it: only the garbage collector would ever part them,
            # and a server that leaves it thousands to part stands still meanwhile.
            self._under_way.scope["extensions"].pop(ANSWER, None)
        super().on_response_complete()

    def on_message_complete(self) -> None:
        self._is_in_request = False
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._clear_stall()
        self._stall = self.loop.call_later(self.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._clear_stall()
        super().resume_writing()

    def drop_if_stalled(self) -> None:
        """Hang up on a reader who is behind: the server has no time left to wait."""
        if self._stall is not None:
            self.transport.abort()

    def _prepare_stream(self) -> Callable[[], bool]:
        """Keep what the kernel holds for a reader small; return the function that cuts it off.

        Otherwise a slow reader is megabytes behind, and goes on reading long after its stream has
        ended.
        """
        connected = self.transport.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _STREAM_SEND_BYTES)
        return self._cut

    def _cut(self) -> bool:
        """Drop what a reader who is behind has not taken, and hang up; whether it was behind."""
        if not self.transport.get_write_buffer_size():
            return False
        connected = self.transport.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()
        return True

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refusal(code=Code.MALFORMED_REQUEST, detail=msg))

    def _when_gone(self, then: Callable[[], object]) -> None:
        self._gone = then
        if self.transport.is_closing():
            then()

    def _answer(
        self,
        cycle: RequestResponseCycle,
        status: int,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
    ) -> bool:
        """Write a whole answer, as the cycle's own ``send`` would in two steps; whether it could.

        It could not if the caller is behind with reading: then the one who answers has to wait.
        """
        if cycle.response_started or self.flow.write_paused:
            return False
        if cycle.disconnected:
            return True
        always, given = _lines(tuple(cycle.default_headers)), _text(headers)
        end = b"\r\n"
        if _CLOSE in headers:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            end = b"connection: close\r\n\r\n"
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        self.transport.write(b"".join((STATUS_LINE[status], always, given, end, body)))
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
        return True

    def _rest(self) -> None:
        """Do not listen for a moment, unless there is more to be answered already."""
        if self._deaf is None and not self.pipeline and not self.transport.is_closing():
            self.flow.pause_reading()
            self._deaf = self.loop.call_later(self.deaf_s, self._listen)

    def _listen(self) -> None:
        self._deaf = None
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _too_slow(self) -> None:
        self._timer = None
        detail = "the request did not arrive in time"
        self._refuse(Refusal(code=Code.REQUEST_TIMEOUT, detail=detail))

    def _refuse(self, refusal: Refusal) -> None:
        """Answer instead of the app, which has no whole request to answer, and hang up."""
        self._clear_timer()
        cycle: RequestResponseCycle | None = self.cycle  # none before the first request
        is_under_way = cycle is not None and not cycle.response_complete
        if cycle is None or not is_under_way or not cycle.response_started:
            self._write(refusal)
        if cycle is not None and is_under_way:
            # What the app may still say is for nobody, and must not follow on what was said here.
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    def _write(self, refusal: Refusal) -> None:
        status, body, headers = answer_parts(refusal, "")
        lines = [
            *headers,
            (b"content-length", b"%d" % len(body)),
            _CLOSE,
        ]
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


def _text(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    text = b"".join([b"%b: %b\r\n" % header for header in headers])
    if text.count(b"\n") != len(headers):
        raise ValueError("a header with an end of line in it")
    return text


_lines = lru_cache(maxsize=4)(_text)
"""For what is the same in all answers of a second."""
