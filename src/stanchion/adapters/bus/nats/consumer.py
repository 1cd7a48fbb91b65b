"""Fetch as many calls as this replica can handle at once, and answer each of them.

The server keeps a request open and sends calls as they arrive, up to the number asked for, with a
heartbeat while there are none. So a call is delivered as soon as it is there, and a replica never
has more calls than it can handle: other replicas take the rest.

Three counts are kept: calls being handled, calls requested and not yet delivered, and free places.
If nothing arrives for a while although calls are requested, the requests are taken for lost and
made again under another inbox; calls that the server still sends to the old one are delivered again
later.

A call belongs to the server until the server has confirmed the answer to it. While a handler works,
heartbeats keep the server from delivering the call to another replica. If this process dies, the
server gets none for ``ack_wait`` and delivers the call to another replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from contextlib import suppress
from typing import Final, assert_never

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from stanchion.adapters.bus.local import handled
from stanchion.adapters.bus.nats.connection import NatsConnection, translated
from stanchion.core.json_value import DECODE_ERRORS
from stanchion.core.retry import Exponential, backoff_ms
from stanchion.ports.bus import Ack, Dead, Disposition, Handler, Retry
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import BackendError, sentence
from stanchion.ports.records import OutboxRow

_log: Final = logging.getLogger("stanchion")

_MS_PER_S: Final = 1_000
_NS_PER_MS: Final = 1_000_000
_NS_PER_S: Final = 1_000_000_000
_REQUEST_S: Final = 10
"""How long a request stays open."""
_HEARTBEAT_S: Final = 1
_SILENCE_S_MAX: Final = 3.0
_PART_S_MAX: Final = 1.0
_SIGNS_PER_WAIT: Final = 3
"""Heartbeats of a working handler within the time that the server waits."""
_RETRY: Final = Exponential(base_ms=100, cap_ms=1_000)

_NOTHING_CAME: Final = frozenset({"404", "408"})
_HEARTBEAT: Final = "100"
_STILL: Final = b"+WPI"
_NOT_ME: Final = b"-NAK"


def answer_to(disposition: Disposition) -> bytes:
    """The disposition in the protocol of the server, with the exact delay."""
    match disposition:
        case Ack():
            return b"+ACK"
        case Retry(delay_ms=0):
            return b"-NAK"
        case Retry(delay_ms=delay_ms):
            return b'-NAK {"delay": %d}' % (delay_ms * _NS_PER_MS)
        case Dead():
            return b"+TERM"
        case _:
            assert_never(disposition)


class PullConsumer:
    """The calls of one consumer in this process."""

    def __init__(
        self,
        connection: NatsConnection,
        subject: str,
        handle: Handler,
        *,
        at_once_max: int,
        ack_wait_s: float,
        clock: Clock,
        entropy: Entropy,
    ) -> None:
        self._connection = connection
        self._subject = subject
        self._handle = handle
        self._at_once_max = at_once_max
        self._ack_wait_s = ack_wait_s
        self._clock = clock
        self._entropy = entropy
        self._in_hand: dict[asyncio.Task[None], None] = {}
        self._asked = 0
        self._inbox = ""
        self._is_leaving = False
        self._stirred = asyncio.Event()

    async def run(self) -> None:
        """Consume until cancelled. Calls that are not finished then go back to the server."""
        unwatch = self._connection.watch(self._stirred.set)
        try:
            while True:
                client = await self._connection.wait()
                try:
                    with translated(self._connection.who):
                        await self._pull(client)
                except BackendError as error:
                    self._connection.cut(client, sentence(error))
        finally:
            unwatch()
            await self._let_go()

    async def _pull(self, client: Client) -> None:
        """Pull calls until the connection breaks or its requests seem to be lost."""
        inbox = self._inbox = client.new_inbox()
        self._asked = 0

        async def arrived(message: Msg) -> None:
            # Only calls have a reply subject; all other messages are the status of a request.
            if message.reply:
                await self._take(message)
            if inbox == self._inbox:
                self._count(message, client)

        subscription = await client.subscribe(inbox, cb=arrived)
        try:
            is_silent = False
            while self._connection.is_with(client) and not (is_silent and self._asked):
                self._stirred.clear()
                await self._ask(client)
                is_silent = not await self._is_stirred()
        except asyncio.CancelledError:
            # Calls that are in transit are received first, within a time limit, and returned.
            self._is_leaving = True
            await _finish(subscription.drain())  # type: ignore[no-untyped-call]  # it has no types here
            raise
        await _finish(subscription.unsubscribe())

    async def _is_stirred(self) -> bool:
        try:
            async with asyncio.timeout(_SILENCE_S_MAX):
                return await self._stirred.wait()
        except TimeoutError:
            return False

    async def _ask(self, client: Client) -> None:
        room = self._at_once_max - len(self._in_hand) - self._asked
        # Ask when half of the places are free, or when no request is open.
        if room <= 0 or (self._asked and 2 * room < self._at_once_max):
            return
        self._asked += room
        wish = {
            "batch": room,
            "expires": _REQUEST_S * _NS_PER_S,
            "idle_heartbeat": _HEARTBEAT_S * _NS_PER_S,
        }
        await client.publish(self._subject, msgspec.json.encode(wish), reply=self._inbox)

    async def _take(self, message: Msg) -> None:
        if self._is_leaving:
            await self._send(message, _NOT_ME)
            return
        hand = asyncio.create_task(self._serve(message), name="bus-hand")
        self._in_hand[hand] = None
        hand.add_done_callback(self._is_free)

    def _count(self, message: Msg, client: Client) -> None:
        headers = message.headers or {}
        status = headers.get("Status")
        if message.reply:
            self._asked = max(0, self._asked - 1)
        elif status in _NOTHING_CAME:
            missing = headers.get("Nats-Pending-Messages", str(self._asked))
            self._asked = max(0, self._asked - int(missing))
        elif status != _HEARTBEAT:
            # The consumer is gone, or its server is no longer the leader.
            said = headers.get("Description", "").partition("\n")[0]
            self._connection.cut(client, f"no calls to be had: {status} {said}".rstrip())
        self._stirred.set()

    def _is_free(self, hand: asyncio.Task[None]) -> None:
        del self._in_hand[hand]
        self._stirred.set()

    async def _serve(self, message: Msg) -> None:
        try:
            call = msgspec.json.decode(message.data, type=OutboxRow)
        except DECODE_ERRORS as error:
            # Not a call of ours: without a final answer it would be delivered for ever.
            fields = {"subject": message.subject, "error": sentence(error)}
            _log.error("bus_call_unreadable", extra={"fields": fields})
            await self._answer(message, Dead("unreadable"))
            return
        try:
            disposition = await handled(
                self._handle,
                call,
                still=lambda: self._send(message, _STILL),
                every_s=self._ack_wait_s / _SIGNS_PER_WAIT,
            )
        except asyncio.CancelledError:
            # This process will not answer: return the call for other replicas.
            await self._send(message, _NOT_ME)
            raise
        await self._answer(message, disposition)

    async def _answer(self, message: Msg, disposition: Disposition) -> None:
        """Send the answer until it is confirmed or the server no longer waits for it."""
        payload = answer_to(disposition)
        until = self._clock.moment() + self._ack_wait_s * _MS_PER_S
        attempt = 0
        while True:
            try:
                await self._connection.request(message.reply, payload)
            except BackendError as error:
                if self._clock.moment() > until:
                    fields = {"subject": message.subject, "error": sentence(error)}
                    _log.warning("bus_answer_lost", extra={"fields": fields})
                    return
            else:
                return
            attempt += 1
            rest_ms = backoff_ms(_RETRY, attempt, self._entropy.unit())
            await self._clock.sleep(rest_ms / _MS_PER_S)

    async def _send(self, message: Msg, payload: bytes) -> None:
        """Send a message that may be lost."""
        with suppress(BackendError), translated(self._connection.who):
            await self._connection.now().publish(message.reply, payload)

    async def _let_go(self) -> None:
        hands = list(self._in_hand)
        for hand in hands:
            hand.cancel()
        if hands:
            await asyncio.wait(hands)


async def _finish(parting: Awaitable[None]) -> None:
    """End a subscription within a time limit; ignores that the connection is gone."""
    with suppress(nats.errors.Error, OSError, TimeoutError):
        async with asyncio.timeout(_PART_S_MAX):
            await parting
