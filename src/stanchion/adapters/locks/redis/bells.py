"""Bells for waiters of a lock: one Redis subscription for all waiters of this process.

Redis delivers a published message to current subscribers only, so a bell is missed while there is
no connection. Waiters poll the lock as well; a bell only shortens the wait. So nothing here raises:
without a connection no bell rings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final, cast

import hiredis

from stanchion.adapters.redis.client import RedisClient
from stanchion.adapters.redis.node import pack
from stanchion.ports.errors import BackendError

_CONNECT_S_MAX: Final = 2.0
_REST_S: Final = 0.5
"""The pause after a failed attempt to connect."""
_SILENT_S_MAX: Final = 1.0
"""How long a server may take to answer a ping."""
_MORE: Final = object()
_PING: Final = pack("PING")


class LockBells:
    """The bells of all waiters of this process, by token."""

    def __init__(self, client: RedisClient, slot: int, channel: str) -> None:
        self._client = client
        self._slot = slot
        self._channel = channel
        self._bells: dict[str, asyncio.Event] = {}
        self._connecting: asyncio.Task[None] | None = None
        self._subscriber: _Subscriber | None = None
        self._rest_until = 0.0
        self._is_closed = False

    async def expect(self, token: str, *, at_most_s: float) -> None:
        """Register a token, and wait for the subscription for at most ``at_most_s``."""
        self._bells.setdefault(token, asyncio.Event())
        connecting = self._connect()
        if connecting is not None:
            await asyncio.wait({connecting}, timeout=at_most_s)

    async def wait(self, token: str, *, at_most_s: float) -> bool:
        """Wait for the bell of the token; returns whether it rang."""
        bell = self._bells[token]
        try:
            async with asyncio.timeout(at_most_s):
                await bell.wait()
        except TimeoutError:
            if self._subscriber is not None:
                self._subscriber.check()
            return False
        bell.clear()
        return True

    def forget(self, token: str) -> None:
        """Unregister a token."""
        self._bells.pop(token, None)

    async def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            with suppress(asyncio.CancelledError):
                await self._connecting
        if self._subscriber is not None:
            self._subscriber.cut()
            # An aborted transport is closed in the next iteration of the loop.
            await asyncio.sleep(0)

    def _connect(self) -> asyncio.Task[None] | None:
        """The task that connects; ``None`` if there is a connection, or during the pause."""
        if self._subscriber is not None or self._is_closed:
            return None
        if self._connecting is None or self._connecting.done():
            if asyncio.get_running_loop().time() < self._rest_until:
                return None
            self._connecting = asyncio.create_task(self._listen(), name="bells")
        return self._connecting

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        login, tls = self._client.topology.login, self._client.topology.tls
        try:
            address = self._client.topology.node_of(self._slot).address
            async with asyncio.timeout(_CONNECT_S_MAX):
                _, subscriber = await loop.create_connection(
                    lambda: _Subscriber(self._heard, self._lost),
                    address.host,
                    address.port,
                    ssl=tls,
                )
                self._subscriber = subscriber
                subscriber.send(*login.commands(), pack("SUBSCRIBE", self._channel))
                await subscriber.subscribed.wait()
        except (BackendError, OSError, TimeoutError):
            self._rest_until = loop.time() + _REST_S
            if self._subscriber is not None:
                self._subscriber.cut()

    def _heard(self, token: str) -> None:
        bell = self._bells.get(token)
        if bell is not None:
            bell.set()

    def _lost(self, subscriber: _Subscriber) -> None:
        if self._subscriber is subscriber:
            self._subscriber = None
            self._rest_until = asyncio.get_running_loop().time() + _REST_S


class _Subscriber(asyncio.Protocol):
    """A connection with the subscription."""

    def __init__(self, heard: Callable[[str], None], lost: Callable[[_Subscriber], None]) -> None:
        self._heard = heard
        self._lost = lost
        self._reader = hiredis.Reader(notEnoughData=_MORE)
        self._transport: asyncio.Transport | None = None
        self._pinged_at: float | None = None
        self.subscribed = asyncio.Event()
        """Set when it has subscribed or is closed."""

    def send(self, *commands: bytes) -> None:
        assert self._transport is not None
        self._transport.write(b"".join(commands))

    def cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def check(self) -> None:
        """Send a ping; close the connection if the last one was not answered."""
        now = asyncio.get_running_loop().time()
        if self._pinged_at is None:
            self._pinged_at = now
            self.send(_PING)
        elif now > self._pinged_at + _SILENT_S_MAX:
            self.cut()

    # ── What the event loop calls ────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not checked: asyncio.Transport is not a base class of uvloop's transports.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._pinged_at = None
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _MORE:
                self._take(reply)
        except hiredis.ProtocolError:
            self.cut()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - silence is enough
        self._transport = None
        self._lost(self)
        self.subscribed.set()

    def _take(self, reply: object) -> None:
        match reply:
            case [b"message", _, bytes(token)]:
                self._heard(token.decode())
            case [b"subscribe", *_]:
                self.subscribed.set()
            case hiredis.ReplyError():
                # Login or subscription was refused: treated like a lost connection.
                self.cut()
            case _:
                """The reply to a login or a ping."""
