"""The blocking transport: a pool of sockets, for any number of threads."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from stanchion.transport.failover import CONNECT_S_MAX, ServerOrder, attempts
from stanchion.transport.messages import (
    CONNECTION_ERRORS,
    Address,
    HttpReply,
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

KEPT_MAX: Final = 16
"""Idle connections that are kept."""
IDLE_S_MAX: Final = 70.0
"""Kept no longer than this: the server closes idle connections after 75 s."""
_PIECE_BYTES: Final = 64 * 1024
_TIMEOUT_S_MIN: Final = 0.001
"""A time-out of 0 would mean a socket that does not block."""
_OK: Final = 200


class BlockingTransport:
    """Sends requests to one server. Used by many threads at once."""

    def __init__(
        self,
        to: Address,
        *,
        connect_s_max: float | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._to = to
        self._connect_s_max = connect_s_max
        self._now_s = now_s
        self._kept: list[tuple[float, socket.socket]] = []
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._tls: ssl.SSLContext | None = None

    def send(self, request: Request) -> HttpReply | NoReply | BlockingStream:
        deadline_s = time.monotonic() + request.timeout_s
        data = encode_request(request, self._to)
        kept = self._take()
        if kept is not None:
            outcome = self._exchange(kept, data, request, deadline_s)
            if outcome is not None:
                return outcome
            if not request.is_repeatable:
                return receive_failed(EOFError("it was closed while it was idle"), self._to)
        try:
            fresh = self._connect(deadline_s)
        except OSError as error:
            return connect_failed(error, self._to)
        outcome = self._exchange(fresh, data, request, deadline_s)
        if outcome is None:
            return receive_failed(EOFError("it was closed before anything came"), self._to)
        return outcome

    def close(self) -> None:
        """Close idle connections. Requests that are under way end by themselves."""
        with self._lock:
            kept, self._kept = self._kept, []
        for _, connection in kept:
            connection.close()

    def __del__(self) -> None:
        # Most clients live as long as their process and are never closed explicitly.
        for _, connection in self._kept:
            connection.close()

    def _exchange(
        self, connection: socket.socket, data: bytes, request: Request, deadline_s: float
    ) -> HttpReply | NoReply | BlockingStream | None:
        """The outcome on this connection; ``None`` if it ended before a byte came back."""
        parser, is_kept = ResponseParser(), False
        try:
            connection.settimeout(_left_s(deadline_s))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                # Closed while sending: the server may have refused the request before reading it.
                connection.sendall(data)
            while not parser.is_done:
                connection.settimeout(_left_s(deadline_s))
                parser.feed(connection.recv(_PIECE_BYTES))
                if request.is_stream and parser.status == _OK:
                    is_kept = True
                    return BlockingStream(connection, parser, request.idle_s, self._to)
            if parser.can_reuse:
                is_kept = self._keep(connection)
            return HttpReply(parser.status, parser.headers, parser.take_body())
        except (ConnectionError, EOFError) as error:
            return receive_failed(error, self._to) if parser.is_begun else None
        except CONNECTION_ERRORS as error:
            return receive_failed(error, self._to)
        finally:
            if not is_kept:
                connection.close()

    def _connect(self, deadline_s: float) -> socket.socket:
        timeout_s = _left_s(deadline_s)
        if self._connect_s_max is not None:
            timeout_s = min(timeout_s, self._connect_s_max)
        connection = _connected(self._to, time.monotonic() + timeout_s)
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
        with self._lock:
            if self._process != os.getpid():
                # After a fork both processes would read each other's responses.
                self._kept, self._process = [], os.getpid()
            while self._kept:
                since_s, connection = self._kept.pop()
                if self._now_s() - since_s < IDLE_S_MAX and not _is_readable(connection):
                    return connection
                connection.close()
        return None

    def _keep(self, connection: socket.socket) -> bool:
        with self._lock:
            if len(self._kept) >= KEPT_MAX or self._process != os.getpid():
                return False
            self._kept.append((self._now_s(), connection))
        return True


class BlockingFailover:
    """Sends requests to one of several servers, by the rules of ``failover``. Thread-safe."""

    def __init__(self, servers: Sequence[BlockingTransport]) -> None:
        self._servers = tuple(servers)
        self._order = ServerOrder(len(self._servers))

    def send(self, request: Request) -> HttpReply | NoReply | BlockingStream:
        tries = attempts(self._order, request, time.monotonic)
        index, sent = next(tries)
        while True:
            outcome = self._servers[index].send(sent)
            if isinstance(outcome, BlockingStream):
                return outcome
            try:
                index, sent = tries.send(outcome)
            except StopIteration as done:
                answer: HttpReply | NoReply = done.value
                return answer

    def close(self) -> None:
        for server in self._servers:
            server.close()


def blocking_transport(servers: Sequence[Address]) -> BlockingTransport | BlockingFailover:
    """A transport to one server, or to several with failover."""
    if len(servers) == 1:
        return BlockingTransport(servers[0])
    return BlockingFailover(
        [BlockingTransport(each, connect_s_max=CONNECT_S_MAX) for each in servers]
    )


class BlockingStream:
    """A response that is read piece by piece."""

    def __init__(
        self, connection: socket.socket, parser: ResponseParser, idle_s: float, to: Address
    ) -> None:
        self.opened = Opened(parser.headers)
        self._connection = connection
        self._connection.settimeout(idle_s)
        self._parser = parser
        self._to = to

    def read(self) -> bytes | NoReply:
        try:
            while not (piece := self._parser.take_body()) and not self._parser.is_done:
                self._parser.feed(self._connection.recv(_PIECE_BYTES))
        except CONNECTION_ERRORS as error:
            return receive_failed(error, self._to)
        return piece

    def close(self) -> None:
        self._connection.close()


def _connected(to: Address, deadline_s: float) -> socket.socket:
    """A connection to the first of the host's addresses that accepts one.

    Addresses share the time: with ``socket.create_connection`` each of them would have all of it.
    """
    found = socket.getaddrinfo(to.host, to.port, type=socket.SOCK_STREAM)
    error = OSError("the host has no address")
    for left, (family, kind, protocol, _, address) in zip(
        range(len(found), 0, -1), found, strict=True
    ):
        try:
            connection = socket.socket(family, kind, protocol)
        except OSError as unsupported:
            error = unsupported
            continue
        try:
            connection.settimeout(max(_TIMEOUT_S_MIN, _left_s(deadline_s) / left))
            connection.connect(address)
        except OSError as failed:
            error = failed
            connection.close()
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise error


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return max(_TIMEOUT_S_MIN, left_s)


def _is_readable(connection: socket.socket) -> bool:
    """Whether an idle connection was closed, or received bytes without a request."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))
