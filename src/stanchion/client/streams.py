"""The transport of the event loop: HTTP/1.1 over asyncio's streams, kept and used again.

The same promises as ``sockets``, for coroutines. Connections belong to the loop that opened them;
under another loop they are dropped and opened anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import time
from collections.abc import Iterable
from http import HTTPStatus
from typing import Final, NamedTuple, SupportsIndex

from stanchion.client.exchange import NoReply, Opened, Reply, Request
from stanchion.client.http1 import Address, ReplyParser, written
from stanchion.client.silences import TROUBLES, not_answered, not_connected
from stanchion.client.sockets import IDLE_S_MAX, KEPT_MAX

__all__ = ["LoopStream", "StreamTransport"]

_PIECE_BYTES: Final = 64 * 1024
_CLOSE_S_MAX: Final = 1.0


class _Reader(asyncio.StreamReader):
    """Knows whether something has come that was not read."""

    unread_bytes = 0

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        received = bytes(data)
        self.unread_bytes += len(received)
        super().feed_data(received)

    async def read(self, n: int = -1) -> bytes:
        data = await super().read(n)
        self.unread_bytes -= len(data)
        return data


class _Connection(NamedTuple):
    reader: _Reader
    writer: asyncio.StreamWriter

    @property
    def is_quiet(self) -> bool:
        """Open, and nothing has come that nobody asked for."""
        is_open = not self.reader.at_eof() and not self.writer.is_closing()
        return is_open and self.reader.unread_bytes == 0

    def drop(self) -> None:
        with contextlib.suppress(RuntimeError):  # Its loop may be closed already.
            self.writer.transport.abort()


class StreamTransport:
    """Sends requests to one server, from one event loop at a time."""

    def __init__(self, to: Address) -> None:
        self._to = to
        self._kept: list[tuple[float, _Connection]] = []
        self._owner: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._tls = ssl.create_default_context() if to.is_tls else None

    async def send(self, request: Request) -> Reply | NoReply | LoopStream:
        deadline_s = asyncio.get_running_loop().time() + request.timeout_s
        data = written(request, self._to)
        kept = self._take()
        if kept is not None:
            outcome = await self._exchange(kept, data, request, deadline_s)
            if outcome is not None:
                return outcome
            if not request.is_repeatable:
                return not_answered(EOFError("it was closed while it was idle"), self._to)
        try:
            async with asyncio.timeout_at(deadline_s):
                fresh = await self._connect()
        except OSError as error:
            return not_connected(error, self._to)
        outcome = await self._exchange(fresh, data, request, deadline_s)
        if outcome is None:
            return not_answered(EOFError("it was closed before anything came"), self._to)
        return outcome

    async def close(self) -> None:
        """Hang up. What is under way ends by itself."""
        kept, self._kept = self._kept, []
        for _, connection in kept:
            connection.writer.close()
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_CLOSE_S_MAX):
                for _, connection in kept:
                    await connection.writer.wait_closed()

    async def _exchange(
        self, connection: _Connection, data: bytes, request: Request, deadline_s: float
    ) -> Reply | NoReply | LoopStream | None:
        """What became of it on this connection; ``None`` if it ended before a byte came back."""
        parser, is_kept = ReplyParser(), False
        try:
            async with asyncio.timeout_at(deadline_s):
                connection.writer.write(data)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    # Cut while sending: it may have said why, if the loop still has it.
                    await connection.writer.drain()
                body = bytearray()
                while not parser.is_done:
                    body += parser.feed(await connection.reader.read(_PIECE_BYTES))
                    if request.is_stream and parser.head and parser.head.status == HTTPStatus.OK:
                        is_kept = True
                        return LoopStream(connection, parser, bytes(body), request.idle_s, self._to)
            assert parser.head is not None
            if parser.can_go_on:
                is_kept = self._keep(connection)
            return Reply(parser.head.status, parser.head.headers, bytes(body))
        except (ConnectionResetError, EOFError) as error:
            return not_answered(error, self._to) if parser.is_begun else None
        except TROUBLES as error:
            return not_answered(error, self._to)
        finally:
            if not is_kept:  # Also when the caller was cancelled.
                connection.drop()

    async def _connect(self) -> _Connection:
        # TCP_NODELAY is what asyncio and uvloop set by themselves.
        loop, reader = asyncio.get_running_loop(), _Reader()
        transport, protocol = await loop.create_connection(
            lambda: asyncio.StreamReaderProtocol(reader),
            self._to.host,
            self._to.port,
            ssl=self._tls,
        )
        return _Connection(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    def _take(self) -> _Connection | None:
        owner = (os.getpid(), asyncio.get_running_loop())
        if self._owner != owner:
            # Of another process, or of a loop that no longer turns.
            if self._owner is not None and self._owner[0] == owner[0]:
                for _, connection in self._kept:
                    connection.drop()
            self._kept, self._owner = [], owner
        while self._kept:
            since_s, connection = self._kept.pop()
            if time.monotonic() - since_s < IDLE_S_MAX and connection.is_quiet:
                return connection
            connection.drop()
        return None

    def _keep(self, connection: _Connection) -> bool:
        if len(self._kept) >= KEPT_MAX:
            return False
        self._kept.append((time.monotonic(), connection))
        return True


class LoopStream:
    """An answer that is read piece by piece."""

    def __init__(
        self,
        connection: _Connection,
        parser: ReplyParser,
        first: bytes,
        idle_s: float,
        to: Address,
    ) -> None:
        assert parser.head is not None
        self.opened = Opened(parser.head.headers)
        self._connection = connection
        self._parser = parser
        self._first = first
        self._idle_s = idle_s
        self._to = to

    async def read(self) -> bytes | NoReply:
        piece, self._first = self._first, b""
        try:
            while not piece and not self._parser.is_done:
                async with asyncio.timeout(self._idle_s):
                    piece = self._parser.feed(await self._connection.reader.read(_PIECE_BYTES))
        except TROUBLES as error:
            return not_answered(error, self._to)
        return piece

    def close(self) -> None:
        self._connection.drop()
