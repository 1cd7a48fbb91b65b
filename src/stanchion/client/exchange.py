"""Exchanges: one request, and what can come of it.

A transport is a port of one method: it sends a ``Request`` and says what became of it. It raises
nothing: that there was no answer is an outcome like others, and the engine decides what follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, Protocol, TypeAlias

import msgspec

__all__ = [
    "AsyncByteStream",
    "AsyncTransport",
    "ByteStream",
    "NoReply",
    "Opened",
    "Outcome",
    "Reply",
    "Request",
    "Silence",
    "Transport",
]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request, complete but for the server's address."""

    name: str
    """The call it belongs to, for people and metrics: ``start``, ``get``…"""
    method: str
    path: str
    """With its query, quoted."""
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    timeout_s: float
    """From connecting to the last byte of the answer; of a stream, to the end of its head."""
    is_repeatable: bool
    """Sent twice, it does what it does once: it reads, or replaces, or carries a key."""
    is_stream: bool = False
    """An answer of 200 is to be read piece by piece."""
    idle_s: float = 45.0
    """How long a stream may be silent."""

    def __repr__(self) -> str:
        # The headers hold the caller's key, and a repr is what ends up in logs.
        return f"<{self.name}: {self.method} {self.path}, {len(self.body)} bytes>"


class Reply(msgspec.Struct, frozen=True):
    """The whole answer."""

    status: int
    headers: Mapping[str, str]
    """By their names in lower case."""
    body: bytes = b""


class Silence(StrEnum):
    """Why there was no answer."""

    UNREACHED = "unreached"
    """No connection: refused, no route, no such name, or not within the time."""
    UNTRUSTED = "untrusted"
    """The server's certificate was not accepted. Asking again does not mend that."""
    TIMED_OUT = "timed_out"
    """Sent, and not answered within the time."""
    BROKEN = "broken"
    """The connection ended before the answer did."""
    MALFORMED = "malformed"
    """What came back is not HTTP."""


_NEVER_SENT: Final = frozenset({Silence.UNREACHED, Silence.UNTRUSTED})


class NoReply(msgspec.Struct, frozen=True):
    """There was no answer, or not a whole one."""

    silence: Silence
    message: str

    @property
    def may_have_run(self) -> bool:
        """Whether the server may have done what it was asked."""
        return self.silence not in _NEVER_SENT


class Opened(msgspec.Struct, frozen=True):
    """A stream was opened: its pieces can be read."""

    headers: Mapping[str, str]


Outcome: TypeAlias = Reply | NoReply | Opened


class ByteStream(Protocol):
    """The body of an answer that does not end by itself."""

    opened: Opened

    def read(self) -> bytes | NoReply:
        """The next piece; nothing (``b""``) at the end."""

    def close(self) -> None:
        """Hang up."""


class Transport(Protocol):
    """Sends requests, and blocks meanwhile. Used by many threads at once."""

    def send(self, request: Request) -> Reply | NoReply | ByteStream:
        """Send it once and say what became of it. A stream only if one was asked for."""


class AsyncByteStream(Protocol):
    """The body of an answer that does not end by itself."""

    opened: Opened

    async def read(self) -> bytes | NoReply:
        """The next piece; nothing (``b""``) at the end."""

    def close(self) -> None:
        """Hang up."""


class AsyncTransport(Protocol):
    """Sends requests, and lets others run meanwhile."""

    async def send(self, request: Request) -> Reply | NoReply | AsyncByteStream:
        """Send it once and say what became of it. A stream only if one was asked for."""
