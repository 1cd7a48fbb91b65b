"""HTTP/1.1 as bytes: a request written down, an answer read. Sockets are somebody else's.

Only what a client of one JSON API needs: answers with a length, in chunks, or up to the end of the
connection; interim answers are passed over. Whatever comes has a size that bounds it, and whatever
cannot be read for certain is ``Malformed``: a guess about where an answer ends would give one
caller's answer to another.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from typing import Final
from urllib.parse import urlsplit

import msgspec

from stanchion.client.exchange import Request

__all__ = ["BODY_BYTES_MAX", "Address", "Head", "Malformed", "ReplyParser", "address", "written"]

HEAD_BYTES_MAX: Final = 64 * 1024
BODY_BYTES_MAX: Final = 64 * 1024 * 1024
_CHUNK_LINE_BYTES_MAX: Final = 256
_PORTS: Final = {"http": 80, "https": 443}
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: .*)?")
_VISIBLE: Final = re.compile(r"[\x20-\x7e]*")


class Malformed(Exception):
    """What came is not an answer in HTTP/1.1, or larger than any of ours."""


class Address(msgspec.Struct, frozen=True):
    """Where the server is."""

    host: str
    port: int
    is_tls: bool
    prefix: str
    """What every path begins with, for a server behind a proxy."""

    @property
    def named(self) -> str:
        """As in a ``Host`` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def address(url: str) -> Address:
    """Read a server's URL. A ``ValueError`` says what is wrong with it."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ValueError(f"not a server's URL: {url!r}; it looks like http://127.0.0.1:8420")
    if parts.query or parts.fragment or parts.username or parts.password is not None:
        raise ValueError("a server's URL has no user, query or fragment; pass api_key= for a key")
    return Address(
        host=parts.hostname,
        port=parts.port or _PORTS[parts.scheme],
        is_tls=parts.scheme == "https",
        prefix=parts.path.rstrip("/"),
    )


def written(request: Request, to: Address) -> bytes:
    """The request as it is sent."""
    lines = [
        f"{request.method} {to.prefix}{request.path} HTTP/1.1",
        f"Host: {to.named}",
        "User-Agent: stanchion",
        *(f"{name}: {value}" for name, value in request.headers),
    ]
    if request.body or request.method not in {"GET", "DELETE"}:
        lines.append(f"Content-Length: {len(request.body)}")
    for line in lines:
        # A line break in a value would begin a header of the value's own.
        if not _VISIBLE.fullmatch(line):
            raise ValueError(f"{line.partition(':')[0]} has characters that cannot be sent")
    return "\r\n".join([*lines, "", ""]).encode("ascii") + request.body


class Head(msgspec.Struct, frozen=True):
    """The first part of an answer."""

    status: int
    headers: Mapping[str, str]


class ReplyParser:
    """Fed with what the connection gives, says what it means."""

    def __init__(self) -> None:
        self.head: Head | None = None
        self.is_done = False
        self.is_begun = False
        """Something came."""
        self.can_go_on = False
        """The answer is over, and the connection may be used for the next request."""
        self._buffer = bytearray()
        self._is_eof = False
        self._body = bytearray()
        self._steps = self._parse()

    def feed(self, data: bytes) -> bytes:
        """Take what was received, nothing (``b""``) at its end; give the body's bytes in it."""
        self.is_begun = self.is_begun or bool(data)
        self._is_eof = self._is_eof or not data
        self._buffer += data
        # A generator remembers where in the answer it is. It stops where it needs more.
        self.is_done = next(self._steps, True) is True
        if self.is_done and self._buffer:
            # Bytes that nobody asked for: an answer to whom? Never to the next request.
            self.can_go_on = False
        body, self._body = bytes(self._body), bytearray()
        return body

    def _parse(self) -> Generator[None, None, None]:
        while True:
            head, keeps = yield from self._read_head()
            if head.status >= 200:  # noqa: PLR2004 - below are interim answers
                break
        self.head = head
        codings = head.headers.get("transfer-encoding")
        length = head.headers.get("content-length")
        if head.status in {204, 304}:
            pass
        elif codings is not None:
            if codings.lower() != "chunked" or length is not None:
                raise Malformed("a transfer encoding other than chunked, or a length beside it")
            yield from self._read_chunks()
        elif length is not None:
            yield from self._read_exactly(_number(length, 10, "Content-Length"))
        else:
            keeps = False
            yield from self._read_to_the_end()
        self.can_go_on = keeps and not self._is_eof

    def _read_head(self) -> Generator[None, None, tuple[Head, bool]]:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > HEAD_BYTES_MAX:
                raise Malformed("the head of the answer is too large")
            yield from self._more()
        first, *lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + 4]
        status = _STATUS_LINE.fullmatch(first)
        if status is None:
            raise Malformed(f"not an answer in HTTP/1.1: {first[:40]!r}")
        headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.decode("latin-1").partition(":")
            if not colon or not name or name != name.strip():
                raise Malformed(f"not a header: {line[:40]!r}")
            name, value = name.lower(), value.strip()
            if name in headers and name in _ONCE and headers[name] != value:
                raise Malformed(f"two different headers {name}")
            headers[name] = value
        options = {each.strip() for each in headers.get("connection", "").lower().split(",")}
        keeps = "close" not in options and (status[1] == b"1" or "keep-alive" in options)
        return Head(int(status[2]), headers), keeps

    def _read_chunks(self) -> Generator[None, None, None]:
        read = 0
        while True:
            line = yield from self._read_line()
            size = _number(line.partition(b";")[0].decode("latin-1").strip(), 16, "chunk")
            if size == 0:
                break
            read += size
            if read > BODY_BYTES_MAX and not self._is_stream():
                raise Malformed("the answer is too large")
            yield from self._read_exactly(size)
            if (yield from self._read_line()):
                raise Malformed("a chunk that does not end where it says")
        while (yield from self._read_line()):  # Trailers say nothing to us.
            pass

    def _is_stream(self) -> bool:
        kind = "" if self.head is None else self.head.headers.get("content-type", "")
        return kind.startswith("text/event-stream")

    def _read_line(self) -> Generator[None, None, bytes]:
        while (end := self._buffer.find(b"\r\n")) < 0:
            if len(self._buffer) > _CHUNK_LINE_BYTES_MAX:
                raise Malformed("a line of a chunk is too long")
            yield from self._more()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _read_exactly(self, size: int) -> Generator[None, None, None]:
        if size > BODY_BYTES_MAX:
            raise Malformed("the answer is too large")
        while size > 0:
            taken = self._buffer[:size]
            del self._buffer[:size]
            self._body += taken
            size -= len(taken)
            if size > 0:
                yield from self._more()

    def _read_to_the_end(self) -> Generator[None, None, None]:
        read = 0
        while True:
            read += len(self._buffer)
            if read > BODY_BYTES_MAX and not self._is_stream():
                raise Malformed("the answer is too large")
            self._body += self._buffer
            self._buffer.clear()
            if self._is_eof:
                return
            yield

    def _more(self) -> Generator[None, None, None]:
        if self._is_eof:
            raise EOFError("the connection ended before the answer did")
        yield


_ONCE: Final = frozenset({"content-length", "transfer-encoding"})


def _number(text: str, base: int, what: str) -> int:
    digits = "0123456789abcdef"[:base]
    if not 0 < len(text) <= 16 or set(text.lower()) - set(digits):  # noqa: PLR2004 - 64 bits
        raise Malformed(f"{what}: not a number: {text[:40]!r}")
    return int(text, base)
