"""A worker's way to its server: a port of one method, and its HTTP transport."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from stanchion.transport.event_loop import LoopTransport
from stanchion.transport.messages import NoReply, Reply, Request, parse_address

if TYPE_CHECKING:
    import ssl

__all__ = ["HttpTransport", "Transport", "TransportFailed"]

CONNECT_S_MAX: Final = 5.0
KEPT_MAX: Final = 8
"""Connections kept for the next request: one long poll, and a few results and renewals."""
_REQUEST_S_MAX: Final = 120.0
"""The caller sets the time-out. This bounds a request whose caller sets none."""


class TransportFailed(Exception):
    """No answer came. The request may have been executed all the same."""


class Transport(Protocol):
    """What carries a request to the server and its answer back."""

    async def post(self, path: str, body: bytes) -> Reply:
        """Send it and wait for the answer: the caller sets a limit. Raises ``TransportFailed``."""

    async def close(self) -> None: ...


class HttpTransport:
    """HTTP/1.1 over connections that are kept open. For one event loop."""

    def __init__(
        self, url: str, *, api_key: str | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        headers = [("Content-Type", "application/json"), ("Accept", "application/json")]
        if api_key is not None:
            if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
                raise ValueError("an API key is one word of printable ASCII characters")
            headers.append(("Authorization", f"Bearer {api_key}"))
        self._headers = tuple(headers)
        self._http = LoopTransport(
            parse_address(url), tls=tls, connect_s_max=CONNECT_S_MAX, kept_max=KEPT_MAX
        )

    async def post(self, path: str, body: bytes) -> Reply:
        outcome = await self._http.send(
            Request(
                name="worker",
                method="POST",
                path=path,
                headers=self._headers,
                body=body,
                timeout_s=_REQUEST_S_MAX,
                # Renewals and results are idempotent, and a lease that nobody received expires.
                is_repeatable=True,
            )
        )
        if isinstance(outcome, Reply):
            return outcome
        assert isinstance(outcome, NoReply)  # Streams are not asked for.
        raise TransportFailed(outcome.message)

    async def close(self) -> None:
        """Drop every connection, also those with a request under way."""
        await self._http.abort()
