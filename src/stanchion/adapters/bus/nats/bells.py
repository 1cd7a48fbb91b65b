"""Bells over core NATS: told to whoever listens now, and then forgotten.

A busy replica rings hundreds of times in a moment, often the same bell with the same note. So bells
are collected for two milliseconds, each kept once, and sent as one message. Whoever listens in this
process hears them at once, and not a second time when the message comes round: it does not. Without
a connection bells are dropped: behind each of them is a poll.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from stanchion.adapters.bus.ears import Ears
from stanchion.adapters.bus.nats.errors import translated
from stanchion.adapters.bus.nats.link import Link
from stanchion.ports.bus import Bell
from stanchion.ports.clock import Clock
from stanchion.ports.errors import BackendError, sentence

__all__ = ["Bells"]

_log: Final = logging.getLogger("stanchion")

_COLLECT_S: Final = 0.002
_COLLECTED_MAX: Final = 10_000
_MESSAGE_BYTES_MAX: Final = 256 * 1024
"""A quarter of what a server takes by default."""
_KNOWN: Final = frozenset(Bell)


class Bells:
    """What was rung here and is not sent yet."""

    def __init__(self, link: Link, subject: str, ears: Ears, clock: Clock) -> None:
        self._link = link
        self._subject = subject
        self._ears = ears
        self._clock = clock
        self._rung: dict[tuple[Bell, str], None] = {}
        self._sending: asyncio.Task[None] | None = None

    def ring(self, bell: Bell, note: str) -> None:
        """Here at once, elsewhere soon."""
        self._ears.hear(bell, note)
        if not self._link.is_up or len(self._rung) >= _COLLECTED_MAX:
            return
        self._rung[bell, note] = None
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_soon(), name="nats-bells")

    async def subscribe(self, client: Client) -> None:
        """Hear what other replicas ring, on this connection."""
        await client.subscribe(self._subject, cb=self._heard)

    async def close(self) -> None:
        """Ring no more. Safe to call twice."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait({self._sending})

    async def _send_soon(self) -> None:
        try:
            while self._rung:
                await self._clock.sleep(_COLLECT_S)
                rung, self._rung = self._rung, {}
                await self._send(rung)
        finally:
            self._sending = None

    async def _send(self, rung: Iterable[tuple[Bell, str]]) -> None:
        try:
            client = self._link.now()
            with translated(self._link.who):
                for message in _messages(rung):
                    await client.publish(self._subject, message)
        except BackendError as error:
            _log.debug("bells_dropped", extra={"fields": {"error": sentence(error)}})

    async def _heard(self, message: Msg) -> None:
        try:
            rung = msgspec.json.decode(message.data, type=list[tuple[str, str]])
        except msgspec.DecodeError as error:
            _log.debug("bells_unreadable", extra={"fields": {"error": sentence(error)}})
            return
        for bell, note in rung:
            # A newer replica may ring what this one has never heard of.
            if bell in _KNOWN:
                self._ears.hear(Bell(bell), note)


def _messages(rung: Iterable[tuple[Bell, str]]) -> Iterator[bytes]:
    """As few messages as will do."""
    part: list[bytes] = []
    size = 0
    for each in rung:
        encoded = msgspec.json.encode(each)
        if part and size + len(encoded) > _MESSAGE_BYTES_MAX:
            yield b"[" + b",".join(part) + b"]"
            part, size = [], 0
        part.append(encoded)
        size += len(encoded) + 1
    if part:
        yield b"[" + b",".join(part) + b"]"
