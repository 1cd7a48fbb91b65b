"""Cheap HTTP connections: requests are bytes, and responses are parsed only as far as needed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Final, cast
from urllib.parse import urlsplit

import msgspec

__all__ = ["Answer", "Connection", "as_bytes", "connect", "tenants_in_turn"]


class Answer(msgspec.Struct, frozen=True):
    """The response to one request."""

    status: str
    body: bytes = b""


LOST: Final = Answer("lost")


async def connect(url: str) -> Connection:
    """Connect to this address. Raises ``OSError``."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    loop = asyncio.get_running_loop()
    return (await loop.create_connection(Connection, parts.hostname, parts.port))[1]


def tenants_in_turn(count: int) -> list[dict[str, str]]:
    """Headers of ``tenant-0`` and so on, beginning at a random tenant."""
    first = random.randrange(count)
    return [{"x-stanchion-tenant": f"tenant-{(first + each) % count}"} for each in range(count)]


def as_bytes(
    method: str, url: str, body: str = "", headers: Mapping[str, str] | None = None
) -> bytes:
    """Encode a request."""
    parts = urlsplit(url)
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    content = body.encode()
    lines = [
        f"{method} {path} HTTP/1.1",
        f"host: {parts.netloc}",
        "content-type: application/json",
        f"content-length: {len(content)}",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content


class Connection(asyncio.Protocol):
    """One connection with one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._answer: asyncio.Future[Answer] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0 or self._answer is None:
            return
        head = self._buffer[:head_end].lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        end = head_end + 4 + length
        if len(self._buffer) >= end:
            found = Answer(self._buffer[9:12].decode(), self._buffer[head_end + 4 : end])
            self._buffer = self._buffer[end:]
            answer, self._answer = self._answer, None
            if not answer.done():
                answer.set_result(found)

    def connection_lost(self, _exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(LOST)

    async def ask(self, request: bytes) -> Answer:
        """Send a request and return its response; the status is ``lost`` if there is none."""
        assert self._transport is not None
        if self._transport.is_closing():
            return LOST
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    @property
    def is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
