"""Bodies: read from the connection within bounds of size and memory, then decoded.

A body that is too large is refused when that is known: by its declared length before a byte is
read, else as soon as it has become too long. How long it may take to arrive is the endpoint's rule.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from stanchion.gateway import bounds
from stanchion.gateway.exchange import ClientGone, Message, Receive
from stanchion.gateway.options import GatewayOptions
from stanchion.gateway.problems import Refusal, Refused, invalid
from stanchion.wire.problems import Code

__all__ = ["Bodies", "decoded"]


class Bodies:
    """Reads bodies, and counts what all of them hold together."""

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self._held_bytes = 0

    async def read(self, receive: Receive, declared: bytes | None) -> bytes:
        """The whole body. Whoever gets one gives it back with ``done``."""
        if declared is not None:
            self._refuse_declared(declared)
        message = await _part(receive)
        first: bytes = message.get("body", b"")
        if message.get("more_body", False):
            return await self._rest(receive, first)
        self._refuse_large(len(first))
        self._hold(len(first))
        return first

    def done(self, body: bytes) -> None:
        """A body is no longer in use."""
        self._held_bytes -= len(body)

    async def _rest(self, receive: Receive, first: bytes) -> bytes:
        body = bytearray(first)
        held = 0
        is_whole = False
        try:
            while True:
                self._refuse_large(len(body))
                self._hold(len(body) - held)
                held = len(body)
                if is_whole:
                    held = 0  # from here on the caller's to give back
                    return bytes(body)
                message = await _part(receive)
                body += message.get("body", b"")
                is_whole = not message.get("more_body", False)
        finally:
            self._held_bytes -= held

    def _refuse_declared(self, declared: bytes) -> None:
        if not declared.isdigit():
            detail = "Content-Length is not a number"
            raise Refused(Refusal(code=Code.MALFORMED_REQUEST, detail=detail))
        self._refuse_large(int(declared[:_LENGTH_DIGITS_MAX]))

    def _refuse_large(self, size: int) -> None:
        if size > self._options.body_bytes_max:
            detail = f"the body has more than {self._options.body_bytes_max} bytes"
            raise Refused(Refusal(code=Code.BODY_TOO_LARGE, detail=detail))

    def _hold(self, more_bytes: int) -> None:
        if self._held_bytes + more_bytes > self._options.bodies_bytes_max:
            detail = "too many large bodies at once"
            raise Refused(Refusal(code=Code.OVERLOADED, detail=detail, retry_after_ms=1_000))
        self._held_bytes += more_bytes


_LENGTH_DIGITS_MAX: Final = 18


async def _part(receive: Receive) -> Message:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message


def decoded(body: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:  # noqa: ANN401 - the route's own type
    """The body as the route's type, or a refusal that names the place."""
    try:
        return bounds.decode_json(body, decoder)
    except bounds.Malformed as error:
        detail = f"the body is not JSON: {error}"
        raise Refused(Refusal(code=Code.MALFORMED_JSON, detail=detail)) from None
    except bounds.InvalidJson as error:
        raise Refused(invalid((error.fault,), str(error.fault))) from None
