"""Messages: a request and its possible outcomes. No sockets here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Final, Protocol, TypeAlias
from urllib.parse import urlsplit

import msgspec

from stanchion.core import __version__
from stanchion.core.url import shown_url

_PORTS: Final = {"http": 80, "https": 443}
_HOST: Final = re.compile(r"[!-\-/-~]{1,63}(?:\.[!-\-/-~]{1,63})*\.?")
"""Labels of visible ASCII characters; a name in another script is written as ``xn--…``."""
_NOT_VISIBLE: Final = re.compile(r"[^\x20-\x7e]")
_WITHOUT_BODY: Final = frozenset({"GET", "DELETE"})


# ── Requests ─────────────────────────────────────────────────────────────────────────────────────


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request, complete except for the server's address."""

    name: str
    """The name of its call, for messages and metrics: ``start``, ``get``…"""
    method: str
    path: str
    """The path with its query, quoted."""
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    timeout_s: float
    """From connecting to the last byte of the response; of a stream, to the end of its head."""
    is_repeatable: bool
    """Whether sending it twice has the effect of once: it reads, replaces, or carries a key."""
    is_stream: bool = False
    """Whether a response of 200 is read piece by piece."""
    idle_s: float = 45.0
    """How long a stream may be silent."""

    def __repr__(self) -> str:
        # Without the headers: they contain the caller's key, and reprs are logged.
        return f"<{self.name}: {self.method} {self.path}, {len(self.body)} bytes>"


class Address(msgspec.Struct, frozen=True):
    """A server's address."""

    host: str
    port: int
    is_tls: bool
    prefix: str
    """The prefix of every path, for a server behind a proxy."""

    @property
    def named(self) -> str:
        """As in a ``Host`` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(url: str) -> Address:
    """Parse a server's URL. Raises ``ValueError``, whose message repeats no secrets."""
    wrong = ValueError(
        f"not a server's URL: {shown_url(url)}; one looks like http://127.0.0.1:8420"
    )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise wrong from None  # the cause's message quotes a part of the URL
    # An '@' in the path: a '/' in front of it was part of a password.
    if parts.username is not None or "@" in parts.path or parts.query or parts.fragment:
        raise ValueError("a server's URL has no user, query or fragment; pass api_key= for a key")
    if parts.scheme not in _PORTS or not parts.hostname or port == 0:
        raise wrong
    if ":" not in parts.hostname and not _HOST.fullmatch(parts.hostname):
        raise wrong  # or looking it up would raise an error of a codec
    return Address(
        host=parts.hostname,
        port=port or _PORTS[parts.scheme],
        is_tls=parts.scheme == "https",
        prefix=parts.path.rstrip("/"),
    )


def encode_request(request: Request, to: Address) -> bytes:
    """The request as it is sent. Raises ``ValueError`` if a value would break the head."""
    lines = [
        f"{request.method} {to.prefix}{request.path} HTTP/1.1",
        f"Host: {to.named}",
        f"User-Agent: stanchion/{__version__}",
        *(f"{name}: {value}" for name, value in request.headers),
    ]
    if request.body or request.method not in _WITHOUT_BODY:
        lines.append(f"Content-Length: {len(request.body)}")
    text = "".join(lines)
    # A line break in a value would begin another header.
    if not (text.isascii() and text.isprintable()):
        wrong = next(line for line in lines if _NOT_VISIBLE.search(line))
        raise ValueError(f"{wrong.partition(':')[0]} has characters that cannot be sent")
    return "\r\n".join([*lines, "", ""]).encode("ascii") + request.body


# ── Outcomes ─────────────────────────────────────────────────────────────────────────────────────


class HttpReply(msgspec.Struct, frozen=True):
    """The whole response."""

    status: int
    headers: Mapping[str, str]
    """Headers by their names in lower case."""
    body: bytes = b""


class Silence(StrEnum):
    """Why there was no response."""

    UNREACHED = "unreached"
    """No connection: refused, no route, no such name, or not in time."""
    UNTRUSTED = "untrusted"
    """The server's certificate was not accepted. A retry cannot help."""
    TIMED_OUT = "timed_out"
    """The request was sent, and no response came in time."""
    BROKEN = "broken"
    """The connection ended before the response did."""
    MALFORMED = "malformed"
    """The response is not HTTP."""


_NEVER_SENT: Final = frozenset({Silence.UNREACHED, Silence.UNTRUSTED})


class NoReply(msgspec.Struct, frozen=True):
    """There was no complete response."""

    silence: Silence
    message: str

    @property
    def may_have_run(self) -> bool:
        """Whether the server may have executed the request."""
        return self.silence not in _NEVER_SENT


class Opened(msgspec.Struct, frozen=True):
    """A stream was opened; its pieces can be read."""

    headers: Mapping[str, str]


Outcome: TypeAlias = HttpReply | NoReply | Opened


class MalformedResponse(Exception):
    """What was received is not an HTTP/1.1 response, or exceeds a limit."""


CONNECTION_ERRORS: Final = (OSError, EOFError, MalformedResponse)
"""Exceptions of a connection. ``TimeoutError`` and the errors of TLS are an ``OSError``."""


def connect_failed(error: Exception, to: Address) -> NoReply:
    """The outcome of a failed connection attempt: nothing was sent."""
    if hasattr(error, "verify_code"):  # Of ssl, which is imported for https only.
        return NoReply(Silence.UNTRUSTED, f"the certificate of {to.named} is not valid: {error}")
    match error:
        case TimeoutError():
            why = "timed out"
        case ConnectionRefusedError():
            why = "refused; is the server running?"
        case OSError() if type(error).__name__ == "gaierror":
            why = "there is no such host"
        case _:
            why = str(error) or type(error).__name__
    return NoReply(Silence.UNREACHED, f"no connection to {to.named}: {why}")


def receive_failed(error: Exception, to: Address) -> NoReply:
    """The outcome of a request that was sent, or partly sent, and may have been executed."""
    match error:
        case TimeoutError():
            return NoReply(Silence.TIMED_OUT, f"no answer from {to.named} within the time")
        case MalformedResponse():
            return NoReply(Silence.MALFORMED, f"{to.named}: {error}")
        case _:
            return NoReply(Silence.BROKEN, f"the connection to {to.named} broke: {error}")


# ── Transports ───────────────────────────────────────────────────────────────────────────────────


class ByteStream(Protocol):
    """The body of a response that does not end by itself."""

    opened: Opened

    def read(self) -> bytes | NoReply:
        """The next piece; ``b""`` at the end."""

    def close(self) -> None: ...


class SyncTransport(Protocol):
    """Sends requests and blocks until their outcome. Thread-safe."""

    def send(self, request: Request) -> HttpReply | NoReply | ByteStream:
        """Send it once. The outcome is a stream only if the request asks for one."""


class AsyncByteStream(Protocol):
    """The body of a response that does not end by itself."""

    opened: Opened

    async def read(self) -> bytes | NoReply:
        """The next piece; ``b""`` at the end."""

    def close(self) -> None: ...


class AsyncTransport(Protocol):
    """Sends requests without blocking the event loop."""

    async def send(self, request: Request) -> HttpReply | NoReply | AsyncByteStream:
        """Send it once. The outcome is a stream only if the request asks for one."""
