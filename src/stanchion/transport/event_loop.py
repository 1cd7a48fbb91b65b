"""The transport for coroutines: a pool of asyncio connections.

Connections belong to the event loop that opened them. On another loop, or after a fork, they are
dropped and new ones are opened.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, cast

from stanchion.transport.blocking import IDLE_S_MAX, KEPT_MAX
from stanchion.transport.failover import CONNECT_S_MAX, ServerOrder, attempts
from stanchion.transport.messages import (
    CONNECTION_ERRORS,
    Address,
    HttpReply,
    MalformedResponse,
    NoReply,
    Opened,
    Request,
    connect_failed,
    encode_request,
    receive_failed,
)
from stanchion.transport.parser import ResponseParser

if TYPE_CHECKING:
    import ssl

_CLOSE_S_MAX: Final = 1.0
_UNREAD_BYTES_MAX: Final = 1024 * 1024
"""Bytes buffered for a slow reader of a stream; with more, receiving pauses."""
_OK: Final = 200


class LoopTransport:
    """Sends requests to one server, from one event loop at a time."""

    def __init__(
        self,
        to: Address,
        *,
        tls: ssl.SSLContext | None = None,
        connect_s_max: float | None = None,
        kept_max: int = KEPT_MAX,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._to = to
        self._tls = (tls or _default_tls()) if to.is_tls else None
        self._connect_s_max = connect_s_max
        self._kept_max = kept_max
        self._now_s = now_s
        self._kept: list[tuple[float, _Connection]] = []
        self._open: set[_Connection] = set()
        self._owner: tuple[int, asyncio.AbstractEventLoop] | None = None

    async def send(self, request: Request) -> HttpReply | NoReply | LoopStream:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + request.timeout_s
        data = encode_request(request, self._to)
        kept = self._take(loop)
        if kept is not None:
            outcome = await self._exchange(kept, data, request, deadline_s)
            if outcome is not None:
                return outcome
            if not request.is_repeatable:
                return receive_failed(EOFError("it was closed while it was idle"), self._to)
        connect_by_s = deadline_s
        if self._connect_s_max is not None:
            connect_by_s = min(deadline_s, loop.time() + self._connect_s_max)
        try:
            async with asyncio.timeout_at(connect_by_s):
                _, fresh = await loop.create_connection(
                    lambda: _Connection(self._open), self._to.host, self._to.port, ssl=self._tls
                )
        except OSError as error:
            return connect_failed(error, self._to)
        outcome = await self._exchange(fresh, data, request, deadline_s)
        if outcome is None:
            return receive_failed(EOFError("it was closed before anything came"), self._to)
        return outcome

    async def close(self) -> None:
        """Close idle connections. Requests that are under way end by themselves."""
        kept, self._kept = [connection for _, connection in self._kept], []
        for connection in kept:
            connection.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S_MAX):
                for connection in kept:
                    await connection.wait_closed()

    async def abort(self) -> None:
        """Drop every connection, also those with a request under way."""
        self._kept.clear()
        for connection in tuple(self._open):
            connection.drop()
        await asyncio.sleep(0)  # The loop closes their sockets in its next iteration.

    async def _exchange(
        self, connection: _Connection, data: bytes, request: Request, deadline_s: float
    ) -> HttpReply | NoReply | LoopStream | None:
        """The outcome on this connection; ``None`` if it ended before a byte came back."""
        parser, is_kept = ResponseParser(), False
        timer = asyncio.get_running_loop().call_at(deadline_s, connection.expire)
        try:
            connection.request(data, parser, is_stream=request.is_stream)
            while not parser.is_done:
                await connection.received()
                if request.is_stream and parser.status == _OK:
                    is_kept = True
                    return LoopStream(connection, parser, request.idle_s, self._to)
            if parser.can_reuse:
                is_kept = self._keep(connection)
            return HttpReply(parser.status, parser.headers, parser.take_body())
        except (ConnectionError, EOFError) as error:
            return receive_failed(error, self._to) if parser.is_begun else None
        except CONNECTION_ERRORS as error:
            return receive_failed(error, self._to)
        finally:
            timer.cancel()
            if not is_kept:  # Also when the caller was cancelled.
                connection.drop()

    def _take(self, loop: asyncio.AbstractEventLoop) -> _Connection | None:
        owner = (os.getpid(), loop)
        if self._owner != owner:
            if self._owner is not None and self._owner[0] == owner[0]:
                for _, connection in self._kept:
                    connection.drop()
            self._kept, self._open, self._owner = [], set(), owner
        while self._kept:
            since_s, connection = self._kept.pop()
            if self._now_s() - since_s < IDLE_S_MAX and connection.is_idle:
                return connection
            connection.drop()
        return None

    def _keep(self, connection: _Connection) -> bool:
        if len(self._kept) >= self._kept_max or not connection.is_idle:
            return False
        self._kept.append((self._now_s(), connection))
        return True


class LoopFailover:
    """Sends requests to one of several servers, by the rules of ``failover``."""

    def __init__(self, servers: Sequence[LoopTransport]) -> None:
        self._servers = tuple(servers)
        self._order = ServerOrder(len(self._servers))
        self._answers = [0] * len(self._servers)
        """How many requests each server has answered."""

    async def send(self, request: Request) -> HttpReply | NoReply | LoopStream:
        tries = attempts(self._order, request, asyncio.get_running_loop().time)
        index, sent = next(tries)
        while True:
            answers = self._answers[index]
            try:
                outcome = await self._servers[index].send(sent)
            except asyncio.CancelledError:
                # The caller's own time-out ends a request this way. But a caller also gives up
                # requests that wait at the server, such as long polls, while it answers others.
                if self._answers[index] == answers:
                    self._order.move_on(index)
                raise
            if not isinstance(outcome, NoReply):
                self._answers[index] += 1
            if isinstance(outcome, LoopStream):
                return outcome
            try:
                index, sent = tries.send(outcome)
            except StopIteration as done:
                answer: HttpReply | NoReply = done.value
                return answer

    async def close(self) -> None:
        """Close idle connections. Requests that are under way end by themselves."""
        for server in self._servers:
            await server.close()

    async def abort(self) -> None:
        """Drop every connection, also those with a request under way."""
        for server in self._servers:
            await server.abort()


def loop_transport(
    servers: Sequence[Address],
    *,
    connect_s_max: float | None = None,
    kept_max: int = KEPT_MAX,
) -> LoopTransport | LoopFailover:
    """A transport to one server, or to several with failover."""
    if len(servers) > 1:
        connect_s_max = CONNECT_S_MAX
    transports = [
        LoopTransport(each, connect_s_max=connect_s_max, kept_max=kept_max) for each in servers
    ]
    return transports[0] if len(transports) == 1 else LoopFailover(transports)


class LoopStream:
    """A response that is read piece by piece."""

    def __init__(
        self, connection: _Connection, parser: ResponseParser, idle_s: float, to: Address
    ) -> None:
        self.opened = Opened(parser.headers)
        self._connection = connection
        self._parser = parser
        self._idle_s = idle_s
        self._to = to

    async def read(self) -> bytes | NoReply:
        timer = asyncio.get_running_loop().call_later(self._idle_s, self._connection.expire)
        try:
            while not (piece := self._connection.take_body()) and not self._parser.is_done:
                await self._connection.received()
        except CONNECTION_ERRORS as error:
            return receive_failed(error, self._to)
        finally:
            timer.cancel()
        return piece

    def close(self) -> None:
        self._connection.drop()


class _Connection(asyncio.Protocol):
    """One connection, with at most one request under way."""

    def __init__(self, everyone: set[_Connection]) -> None:
        self._everyone = everyone
        self._transport: asyncio.Transport | None = None
        self._parser: ResponseParser | None = None
        self._is_stream = False
        self._unread_bytes = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_idle(self) -> bool:
        """Whether it is open and nothing has arrived since the last response."""
        return self._error is None and self._transport is not None

    def request(self, data: bytes, parser: ResponseParser, *, is_stream: bool) -> None:
        """Send a request and set the parser of its response."""
        if self._transport is None or self._error is not None:
            raise EOFError("the connection was closed")
        self._parser, self._is_stream = parser, is_stream
        self._transport.write(data)

    async def received(self) -> None:
        """Wait until the response is complete or has failed; for a stream, for its next bytes."""
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take_body(self) -> bytes:
        assert self._parser is not None
        if self._unread_bytes > _UNREAD_BYTES_MAX and self._transport is not None:
            self._transport.resume_reading()
        self._unread_bytes = 0
        return self._parser.take_body()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def drop(self) -> None:
        if self._error is None:
            self._error = EOFError("the connection was closed")
        if self._transport is not None:
            with suppress(RuntimeError):  # Its loop may be closed already.
                self._transport.abort()

    def expire(self) -> None:
        """Fail what is awaited: its time is over."""
        self._fail(TimeoutError())

    async def wait_closed(self) -> None:
        await self._closed

    # ── Called by the event loop ─────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._everyone.add(self)

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        if parser is None or parser.is_done:
            # No request is under way, so these bytes are not a response of ours.
            self.drop()
            return
        try:
            parser.feed(data)
        except MalformedResponse as error:
            self._fail(error)
            return
        if self._is_stream:
            self._unread_bytes += len(data)
            if self._unread_bytes > _UNREAD_BYTES_MAX and self._transport is not None:
                self._transport.pause_reading()
        if self._is_stream or parser.is_done:
            self._wake()

    def eof_received(self) -> None:
        self._end(EOFError("the connection ended before the answer did"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._everyone.discard(self)
        if not self._closed.done():
            self._closed.set_result(None)
        ended = EOFError("the connection ended before the answer did")
        self._end(ended if exc is None else exc)

    def _end(self, error: Exception) -> None:
        """Handle the end of the connection, which may also end the response."""
        parser = self._parser
        if isinstance(error, EOFError) and parser is not None and not parser.is_done:
            with suppress(EOFError):
                parser.feed(b"")
                self._wake()
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(self._error)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _default_tls() -> ssl.SSLContext:
    import ssl  # noqa: PLC0415 - for https only

    return ssl.create_default_context()
