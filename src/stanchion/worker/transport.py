"""The way to the server: one method, and an HTTP/1.1 client that does nothing else.

A worker sends few kinds of requests, all of them POSTs of JSON to one server, thousands a second
under load. A general client spends more time on such a request than the server does.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Final, Protocol, cast
from urllib.parse import urlsplit

from stanchion.worker.http1 import Answer, AnswerReader, BadAnswer

__all__ = ["Answer", "HttpTransport", "Transport", "TransportFailed"]

CONNECT_S_MAX: Final = 5.0
IDLE_MAX: Final = 8
"""Connections kept for the next request: one long poll, and a few results and renewals."""


class TransportFailed(Exception):
    """No answer came. The request may have been executed all the same."""


class Transport(Protocol):
    """What carries a request to the server and its answer back."""

    async def post(self, path: str, body: bytes) -> Answer:
        """Send it and wait for the answer: the caller sets a limit. Raises ``TransportFailed``."""

    async def close(self) -> None: ...


class HttpTransport:
    """HTTP/1.1 over connections that are kept open. For one event loop."""

    def __init__(
        self, url: str, *, api_key: str | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server; expected http://HOST:PORT")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("an address of a server has no user, query or fragment")
        self._host = parts.hostname
        is_secure = parts.scheme == "https"
        self._port = parts.port or (443 if is_secure else 80)
        self._tls = (tls or ssl.create_default_context()) if is_secure else None
        self._prefix = parts.path.rstrip("/")
        self._headers = _headers(parts.netloc, api_key)
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    async def post(self, path: str, body: bytes) -> Answer:
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}{len(body)}\r\n\r\n"
        request = head.encode("ascii") + body
        try:
            return await self._ask(request)
        except (OSError, BadAnswer) as error:
            raise TransportFailed(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        """Hang up, also on requests that are under way."""
        for connection in tuple(self._all):
            connection.abort()
        self._idle.clear()
        # Sockets are closed by the loop, one turn later.
        await asyncio.sleep(0)

    async def _ask(self, request: bytes) -> Answer:
        connection = self._kept()
        if connection is not None:
            try:
                return await self._over(connection, request)
            except _HungUp:
                # It was closed while it lay idle, so the request was most likely never read. And if
                # it was: renewals and results are idempotent, and leases that nobody knows expire.
                pass
        return await self._over(await self._open(), request)

    async def _over(self, connection: _Connection, request: bytes) -> Answer:
        try:
            answer = await connection.ask(request)
        except BaseException:
            connection.abort()
            raise
        if connection.is_open and len(self._idle) < IDLE_MAX:
            self._idle.append(connection)
        else:
            connection.abort()
        return answer

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _open(self) -> _Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S_MAX):
            _, connection = await loop.create_connection(
                lambda: _Connection(self._all), self._host, self._port, ssl=self._tls
            )
        return connection


class _HungUp(ConnectionError):
    """The connection ended before the answer began."""


class _Connection(asyncio.Protocol):
    """One connection, with at most one request under way."""

    def __init__(self, everyone: set[_Connection]) -> None:
        self.is_open = False
        self._everyone = everyone
        self._transport: asyncio.Transport | None = None
        self._reader: AnswerReader | None = None
        self._answer: asyncio.Future[Answer] | None = None

    async def ask(self, request: bytes) -> Answer:
        if self._transport is None or not self.is_open:
            raise _HungUp("the connection was closed")
        self._reader = AnswerReader()
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._answer
        finally:
            self._answer = None

    def abort(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # ── Called by the event loop ─────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True
        self._everyone.add(self)

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._reader is None or self._answer.done():
            # Nobody asked: a time-out notice of a proxy, or worse. It answers nothing of ours.
            self.abort()
            return
        try:
            answer = self._reader.feed(data)
        except BadAnswer as bad:
            self.is_open = False
            self._answer.set_exception(bad)
            return
        if answer is not None:
            self.is_open = self._reader.is_reusable
            self._answer.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._everyone.discard(self)
        if self._answer is None or self._reader is None or self._answer.done():
            return
        answer = self._reader.end() if exc is None else None
        if answer is not None:
            self._answer.set_result(answer)
        elif self._reader.has_begun:
            self._answer.set_exception(ConnectionError("the connection ended within an answer"))
        else:
            self._answer.set_exception(_HungUp("the connection ended before an answer"))


def _headers(host: str, api_key: str | None) -> str:
    lines = [f"host: {host}", "content-type: application/json", "accept: application/json"]
    if api_key is not None:
        if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
            raise ValueError("an API key is one word of printable ASCII characters")
        lines.append(f"authorization: Bearer {api_key}")
    lines.append("content-length: ")
    return "\r\n".join(lines)
