"""The blocking transport: HTTP/1.1 over sockets that are kept and used again.

Every request has a deadline over all it does. A connection is used again only if its last answer
was read to the end and nothing has come since. A kept connection that turns out to be closed is not
a failure of the server: the request goes out once more on a new one, if it may be sent twice.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from stanchion.client.exchange import NoReply, Opened, Reply, Request
from stanchion.client.http1 import Address, ReplyParser, written
from stanchion.client.silences import TROUBLES, not_answered, not_connected

if TYPE_CHECKING:
    import ssl

__all__ = ["IDLE_S_MAX", "KEPT_MAX", "SocketStream", "SocketTransport"]

KEPT_MAX: Final = 16
"""Idle connections that are kept."""
IDLE_S_MAX: Final = 4.0
"""Kept no longer than this: the server closes after 5 s, and a request must not meet that."""
_PIECE_BYTES: Final = 64 * 1024
_LEAST_S: Final = 0.001
"""A time-out of 0 would mean: do not wait at all."""


class SocketTransport:
    """Sends requests to one server. Used by many threads at once."""

    def __init__(self, to: Address) -> None:
        self._to = to
        self._kept: list[tuple[float, socket.socket]] = []
        self._turn = threading.Lock()
        self._process = os.getpid()
        self._tls: ssl.SSLContext | None = None

    def send(self, request: Request) -> Reply | NoReply | SocketStream:
        deadline_s = time.monotonic() + request.timeout_s
        data = written(request, self._to)
        kept = self._take()
        if kept is not None:
            outcome = self._exchange(kept, data, request, deadline_s)
            if outcome is not None:
                return outcome
            if not request.is_repeatable:
                return not_answered(EOFError("it was closed while it was idle"), self._to)
        try:
            fresh = self._connect(deadline_s)
        except OSError as error:
            return not_connected(error, self._to)
        outcome = self._exchange(fresh, data, request, deadline_s)
        if outcome is None:
            return not_answered(EOFError("it was closed before anything came"), self._to)
        return outcome

    def close(self) -> None:
        """Hang up. What is under way ends by itself."""
        with self._turn:
            kept, self._kept = self._kept, []
        for _, connection in kept:
            connection.close()

    def __del__(self) -> None:
        # Most clients live as long as their process. Nobody has to close one to be quiet.
        for _, connection in self._kept:
            connection.close()

    def _exchange(
        self, connection: socket.socket, data: bytes, request: Request, deadline_s: float
    ) -> Reply | NoReply | SocketStream | None:
        """What became of it on this connection; ``None`` if it ended before a byte came back."""
        parser, is_kept = ReplyParser(), False
        try:
            connection.settimeout(_left_s(deadline_s))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                # Cut while sending: it may have refused the request unread, and said why.
                connection.sendall(data)
            body = bytearray()
            while not parser.is_done:
                connection.settimeout(_left_s(deadline_s))
                body += parser.feed(connection.recv(_PIECE_BYTES))
                if request.is_stream and parser.head and parser.head.status == HTTPStatus.OK:
                    is_kept = True
                    return SocketStream(connection, parser, bytes(body), request.idle_s, self._to)
            assert parser.head is not None
            if parser.can_go_on:
                is_kept = self._keep(connection)
            return Reply(parser.head.status, parser.head.headers, bytes(body))
        except (ConnectionResetError, EOFError) as error:
            return not_answered(error, self._to) if parser.is_begun else None
        except TROUBLES as error:
            return not_answered(error, self._to)
        finally:
            if not is_kept:
                connection.close()

    def _connect(self, deadline_s: float) -> socket.socket:
        connection = socket.create_connection(
            (self._to.host, self._to.port), timeout=_left_s(deadline_s)
        )
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self._to.is_tls:
            return connection
        import ssl  # noqa: PLC0415 - 25 ms that only https needs

        if self._tls is None:
            self._tls = ssl.create_default_context()
        connection.settimeout(_left_s(deadline_s))
        try:
            return self._tls.wrap_socket(connection, server_hostname=self._to.host)
        except BaseException:
            connection.close()
            raise

    def _take(self) -> socket.socket | None:
        with self._turn:
            if self._process != os.getpid():
                # A fork has the parent's sockets: two would read each other's answers.
                self._kept, self._process = [], os.getpid()
            while self._kept:
                since_s, connection = self._kept.pop()
                if time.monotonic() - since_s < IDLE_S_MAX and not _is_readable(connection):
                    return connection
                connection.close()
        return None

    def _keep(self, connection: socket.socket) -> bool:
        with self._turn:
            if len(self._kept) >= KEPT_MAX or self._process != os.getpid():
                return False
            self._kept.append((time.monotonic(), connection))
        return True


class SocketStream:
    """An answer that is read piece by piece."""

    def __init__(
        self,
        connection: socket.socket,
        parser: ReplyParser,
        first: bytes,
        idle_s: float,
        to: Address,
    ) -> None:
        assert parser.head is not None
        self.opened = Opened(parser.head.headers)
        self._connection = connection
        self._connection.settimeout(idle_s)
        self._parser = parser
        self._first = first
        self._to = to

    def read(self) -> bytes | NoReply:
        piece, self._first = self._first, b""
        try:
            while not piece and not self._parser.is_done:
                piece = self._parser.feed(self._connection.recv(_PIECE_BYTES))
        except TROUBLES as error:
            return not_answered(error, self._to)
        return piece

    def close(self) -> None:
        self._connection.close()


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return max(_LEAST_S, left_s)


def _is_readable(connection: socket.socket) -> bool:
    """Whether something came on an idle connection: its end, or what nobody asked for."""
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    return bool(waiting.poll(0))
