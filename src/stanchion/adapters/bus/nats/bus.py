"""The bus port on NATS.

Bells go over core NATS: delivered to current subscribers and then forgotten. A busy replica rings
hundreds of times in a moment, often the same bell with the same note. So bells are collected for
two milliseconds, each kept once, and sent as one message. Listeners in this process hear a bell at
once, and not a second time from the server. Without a connection bells are dropped; a poll backs
each of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from stanchion.adapters.bus.local import BellListeners
from stanchion.adapters.bus.nats.connection import NatsConnection
from stanchion.adapters.bus.nats.consumer import PullConsumer
from stanchion.adapters.bus.nats.stream import Names, StreamState, count_messages, names_in, set_up
from stanchion.core.json_value import DECODE_ERRORS
from stanchion.ports.bus import Bell, Handler
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import BackendError, BackendUnavailable, sentence
from stanchion.ports.records import OutboxRow

_log: Final = logging.getLogger("stanchion")

_AT_ONCE_MAX: Final = 1_000
"""Publishes that wait for their confirmation at the same time."""
_PENDING_ALREADY: Final = "maximum messages per subject exceeded"
"""The server's message. Its error code is not specific: all failures to store share it."""


class _Problem(msgspec.Struct):
    description: str = ""


class _Confirmation(msgspec.Struct):
    error: _Problem | None = None


class NatsBus:
    """Calls and bells between all replicas of a namespace. Made by ``open``."""

    def __init__(
        self,
        url: str,
        names: Names,
        *,
        clock: Clock,
        entropy: Entropy,
        timeout_s: float,
        ack_wait_s: float,
    ) -> None:
        self.has_turns = False  # the stream delivers calls in the order in which it got them
        self._names = names
        self._clock = clock
        self._entropy = entropy
        self._timeout_s = timeout_s
        self._stream = StreamState(ack_wait_s)
        self._listeners = BellListeners()
        self._connection = NatsConnection(
            url, self._greet, clock=clock, entropy=entropy, timeout_s=timeout_s
        )
        self._bells = BusBells(self._connection, names.bells, self._listeners, clock)

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        clock: Clock,
        entropy: Entropy,
        namespace: str = "stanchion",
        timeout_s: float = 2.0,
        ack_wait_s: float = 5.0,
    ) -> NatsBus:
        """Connect, and create or check the stream.

        ``url`` may be several addresses, separated by commas. ``ack_wait_s`` is how long the server
        waits for a heartbeat before it delivers a call to another replica; it takes effect when the
        consumer is created. Raises ``BackendError`` within ``timeout_s``.
        """
        bus = cls(
            url,
            names_in(namespace),
            clock=clock,
            entropy=entropy,
            timeout_s=timeout_s,
            ack_wait_s=ack_wait_s,
        )
        await bus._connection.open()
        return bus

    async def publish(self, calls: Sequence[OutboxRow]) -> int:
        fresh = 0
        for first in range(0, len(calls), _AT_ONCE_MAX):
            some = calls[first : first + _AT_ONCE_MAX]
            answers = await asyncio.gather(*map(self._put, some), return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
                fresh += answer
        return fresh

    async def consume(self, handle: Handler, *, at_once_max: int) -> None:
        await PullConsumer(
            self._connection,
            self._names.next_call,
            handle,
            at_once_max=at_once_max,
            ack_wait_s=self._stream.ack_wait_s,
            clock=self._clock,
            entropy=self._entropy,
        ).run()

    def ring(self, bell: Bell, note: str = "") -> None:
        self._bells.ring(bell, note)

    def listen(self, bell: Bell, hear: Callable[[str], None]) -> Callable[[], None]:
        return self._listeners.listen(bell, hear)

    async def pending(self) -> int:
        return await self._connection.manage(lambda manager: count_messages(manager, self._names))

    async def backlog(self) -> int:
        return await self.pending()

    async def ping(self) -> None:
        await self.pending()

    async def close(self) -> None:
        await self._bells.close()
        await self._connection.close()

    async def _greet(self, client: Client) -> None:
        # Before anything else: an answer to a later request proves that the server has processed
        # the subscription, so no bell is missed once the bus is open.
        await self._bells.subscribe(client)
        manager = client.jsm(timeout=self._timeout_s)
        self._stream = await set_up(manager, self._names, ack_wait_s=self._stream.ack_wait_s)
        if self._stream.has_one_replica:
            fields = {"server": self._connection.who, "stream": self._names.stream}
            _log.warning("bus_fragile", extra={"fields": fields})

    async def _put(self, call: OutboxRow) -> bool:
        """Publish one call; returns whether it was new."""
        payload = msgspec.json.encode(call)
        answer = await self._connection.request(self._names.call(call.run_id), payload)
        try:
            problem = msgspec.json.decode(answer.data, type=_Confirmation).error
        except DECODE_ERRORS as error:
            raise BackendError(f"{self._connection.who} confirmed a call unreadably") from error
        if problem is not None and problem.description != _PENDING_ALREADY:
            raise BackendUnavailable(
                f"{self._connection.who} did not take a call: {problem.description}"
            )
        return problem is None


_COLLECT_S: Final = 0.002
_COLLECTED_MAX: Final = 10_000
_MESSAGE_BYTES_MAX: Final = 256 * 1024
"""A quarter of the default limit of a server."""
_KNOWN: Final = frozenset(Bell)


class BusBells:
    """Bells of this process that are not sent yet."""

    def __init__(
        self, connection: NatsConnection, subject: str, listeners: BellListeners, clock: Clock
    ) -> None:
        self._connection = connection
        self._subject = subject
        self._listeners = listeners
        self._clock = clock
        self._rung: dict[tuple[Bell, str], None] = {}
        self._sending: asyncio.Task[None] | None = None

    def ring(self, bell: Bell, note: str) -> None:
        """Notify listeners of this process at once, and other replicas with the next message."""
        self._listeners.hear(bell, note)
        client = self._connection.client
        is_up = client is not None and client.is_connected
        if not is_up or len(self._rung) >= _COLLECTED_MAX:
            return
        self._rung[bell, note] = None
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_soon(), name="nats-bells")

    async def subscribe(self, client: Client) -> None:
        """Subscribe to the bells of other replicas on this connection."""
        await client.subscribe(self._subject, cb=self._heard)

    async def close(self) -> None:
        """Stop sending. Safe to call twice."""
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
        client = self._connection.client
        if client is None:
            return
        try:
            for message in _messages(rung):
                await client.publish(self._subject, message)
        except Exception as error:  # noqa: BLE001 - a poll backs each bell, whatever was wrong
            _log.debug("bells_dropped", extra={"fields": {"error": sentence(error)}})

    async def _heard(self, message: Msg) -> None:
        try:
            rung = msgspec.json.decode(message.data, type=list[tuple[str, str]])
        except DECODE_ERRORS as error:
            _log.debug("bells_unreadable", extra={"fields": {"error": sentence(error)}})
            return
        for bell, note in rung:
            # A newer replica may send bells that this version does not know.
            if bell in _KNOWN:
                self._listeners.hear(Bell(bell), note)


def _messages(rung: Iterable[tuple[Bell, str]]) -> Iterator[bytes]:
    """The bells in as few messages as possible."""
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
