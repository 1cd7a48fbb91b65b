"""HTTP/1.1 answers, read from pieces of bytes. No socket here: what comes in is fed, byte for byte.

It reads what a server may send to a POST: interim answers, a body with a length, in chunks, or up
to the end of the connection. Whatever it does not understand is ``BadAnswer``: a connection that
said something odd is not used again.
"""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["ANSWER_BYTES_MAX", "Answer", "AnswerReader", "BadAnswer"]

HEAD_BYTES_MAX: Final = 64 * 1024
ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
"""A hundred jobs with the largest inputs are 25 MiB."""
_LINE_BYTES_MAX: Final = 1024
_INTERIM_BELOW: Final = 200
_DIGITS_MAX: Final = 12
_HEX: Final = b"0123456789abcdefABCDEF"
_NO_BODY: Final = frozenset({204, 304})


class BadAnswer(Exception):
    """What came in is no HTTP answer that a worker can read."""


class Answer(msgspec.Struct, frozen=True):
    """What a server answered."""

    status: int
    body: bytes


class AnswerReader:
    """Reads one answer."""

    def __init__(self) -> None:
        self.is_reusable = True
        """Whether the connection may carry another request after this answer."""
        self.has_begun = False
        self._buffer = bytearray()
        self._status = 0
        self._left: int | None = None
        """Bytes of the body that are still to come; ``None``: up to the end of the connection."""
        self._is_chunked = False
        self._is_in_trailer = False
        self._body = bytearray()

    def feed(self, data: bytes) -> Answer | None:
        """Take what came in; the answer, once it is whole."""
        self.has_begun = True
        self._buffer += data
        if self._status == 0 and not self._read_head():
            return None
        if self._is_chunked:
            return self._read_chunks()
        if self._left is None:
            self._take(len(self._buffer))
            return None
        if len(self._buffer) < self._left:
            return None
        return self._done(bytes(self._buffer[: self._left]), rest=len(self._buffer) - self._left)

    def end(self) -> Answer | None:
        """The connection ended; the answer, if that was its end."""
        if self._status == 0 or self._is_chunked or self._left is not None:
            return None
        return Answer(self._status, bytes(self._body))

    def _done(self, body: bytes, rest: int) -> Answer:
        # Nobody asked for more: whatever it is, it must not become the next answer.
        self.is_reusable = self.is_reusable and rest == 0
        return Answer(self._status, body)

    def _read_head(self) -> bool:
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > HEAD_BYTES_MAX:
                    raise BadAnswer("the head of the answer is too long")
                return False
            head = bytes(self._buffer[:end])
            del self._buffer[: end + 4]
            status = self._read_status(head)
            if status >= _INTERIM_BELOW:
                break
        self._status = status
        self._read_headers(head)
        return True

    def _read_status(self, head: bytes) -> int:
        version, *rest = head.split(b"\r\n", 1)[0].split(b" ", 2)
        if version not in {b"HTTP/1.1", b"HTTP/1.0"} or not rest or not _is_number(rest[0]):
            raise BadAnswer("it does not begin like an HTTP answer")
        if version == b"HTTP/1.0":
            self.is_reusable = False
        return int(rest[0])

    def _read_headers(self, head: bytes) -> None:
        lengths: set[bytes] = set()
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            match name.lower():
                case b"content-length":
                    lengths.add(value.strip())
                case b"transfer-encoding":
                    if value.strip().lower() != b"chunked":
                        raise BadAnswer("the answer is encoded in a way that was not asked for")
                    self._is_chunked = True
                case b"connection":
                    self.is_reusable = self.is_reusable and value.strip().lower() != b"close"
                case _:
                    pass
        if self._status in _NO_BODY:
            self._left, self._is_chunked = 0, False
        elif lengths and not self._is_chunked:
            length, *others = lengths
            if others or not _is_number(length) or int(length) > ANSWER_BYTES_MAX:
                raise BadAnswer("the answer's length makes no sense")
            self._left = int(length)
        elif not self._is_chunked:
            self.is_reusable = False

    def _read_chunks(self) -> Answer | None:
        while True:
            if self._left is None:
                line = self._line()
                if line is None:
                    return None
                if self._is_in_trailer:
                    if not line:
                        return self._done(bytes(self._body), rest=len(self._buffer))
                    continue
                size = line.split(b";", 1)[0].strip()
                if not size or len(size) > _DIGITS_MAX or size.strip(_HEX):
                    raise BadAnswer("a chunk's length makes no sense")
                if int(size, 16) == 0:
                    self._is_in_trailer = True
                    continue
                self._left = int(size, 16) + 2
                if len(self._body) + self._left > ANSWER_BYTES_MAX:
                    raise BadAnswer("the answer is too long")
            if len(self._buffer) < self._left:
                return None
            if self._buffer[self._left - 2 : self._left] != b"\r\n":
                raise BadAnswer("a chunk does not end where it should")
            self._body += self._buffer[: self._left - 2]
            del self._buffer[: self._left]
            self._left = None

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > _LINE_BYTES_MAX:
                raise BadAnswer("a line of the answer is too long")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _take(self, count: int) -> None:
        self._body += self._buffer[:count]
        del self._buffer[:count]
        if len(self._body) > ANSWER_BYTES_MAX:
            raise BadAnswer("the answer is too long")


def _is_number(text: bytes) -> bool:
    return text.isdigit() and len(text) <= _DIGITS_MAX
