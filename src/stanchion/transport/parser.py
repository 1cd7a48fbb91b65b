"""Parsing one HTTP/1.1 response, with llhttp (``httptools``). No sockets here.

The grammar is llhttp's. What is added: limits, interim responses are skipped, trailers are never
headers, and a body without a length ends with the connection.
"""

from __future__ import annotations

from typing import Final

import httptools

from stanchion.transport.messages import MalformedResponse

HEAD_BYTES_MAX: Final = 64 * 1024
"""The limit of the head, and of bytes between two parts of a body: chunk sizes and trailers."""
BODY_BYTES_MAX: Final = 64 * 1024 * 1024
"""A hundred jobs with the largest inputs are 25 MiB. Event streams have no limit."""
_FINAL: Final = 200
_STATUS_MAX: Final = 599
_VERSIONS: Final = frozenset({"1.0", "1.1"})


class ResponseParser:
    """Feed it what a connection receives, until ``is_done``."""

    def __init__(self) -> None:
        self.status = 0
        """0 until the head is complete."""
        self.headers: dict[str, str] = {}
        self.is_begun = False
        """Whether at least one byte was received."""
        self.is_done = False
        self.can_reuse = False
        """Whether the response is complete and the connection may carry another request."""
        self._body = bytearray()
        self._body_bytes = 0
        self._overhead_bytes = 0
        self._fault: str | None = None
        self._keeps_alive = False
        self._is_until_eof = False
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Parse received bytes; ``b""`` at the end of the connection.

        Raises ``MalformedResponse``, and ``EOFError`` if the connection ended before the response.
        """
        if not data:
            self._end()
            return
        self.is_begun = True
        self._overhead_bytes += len(data)
        parser = self._parser
        if parser is None:  # bytes after the end of the response: do not use it again
            self.can_reuse = False
            return
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fault = "an upgrade that was not asked for"
        except httptools.HttpParserError as error:
            if self.is_done:
                self.can_reuse = False  # the error is in what follows the response
            else:
                self._fault = self._fault or f"not an HTTP/1.1 response: {error}"
        if self.is_done:
            self._parser = None  # breaks a reference cycle
        elif self._overhead_bytes > HEAD_BYTES_MAX:
            self._fault = self._fault or "the head of the response is too large"
        if self._fault is not None:
            self._parser, self.is_done = None, False
            raise MalformedResponse(self._fault)

    def take_body(self) -> bytes:
        """The bytes of the body that were received since the last call."""
        body, self._body = bytes(self._body), bytearray()
        return body

    def _end(self) -> None:
        self.can_reuse = False
        if self.is_done:
            return
        if not (self.status and self._is_until_eof):
            raise EOFError("the connection ended before the answer did")
        self.is_done, self._parser = True, None

    # ── Called by llhttp ─────────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        if self.is_done:
            self.can_reuse = False
        else:
            self.headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        parser = self._parser
        if parser is None or self.is_done:
            return
        status = parser.get_status_code()
        if status < _FINAL:
            return
        self.status = status
        self._keeps_alive = parser.should_keep_alive()
        coding, length = self.headers.get("transfer-encoding"), self.headers.get("content-length")
        self._is_until_eof = coding is None and length is None
        if status > _STATUS_MAX or parser.get_http_version() not in _VERSIONS:
            self._fault = "not an HTTP/1.1 response: unknown version or status"
        elif coding is not None and coding.lower() != "chunked":
            self._fault = "a transfer encoding other than chunked"
        elif length is not None and int(length) > BODY_BYTES_MAX:
            self._fault = "the answer is too large"

    def on_body(self, data: bytes) -> None:
        if self.is_done or self._fault is not None:
            return
        self._body += data
        self._body_bytes += len(data)
        self._overhead_bytes = 0
        if self._body_bytes > BODY_BYTES_MAX and not self._is_event_stream():
            self._fault = "the answer is too large"

    def on_message_complete(self) -> None:
        if self.status and not self.is_done and self._fault is None:
            self.is_done = True
            self.can_reuse = self._keeps_alive

    def _is_event_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")
