"""The bus port on NATS."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from nats.aio.client import Client

from stanchion.adapters.bus.ears import Ears
from stanchion.adapters.bus.nats.bells import Bells
from stanchion.adapters.bus.nats.link import Link
from stanchion.adapters.bus.nats.pulling import Pulling
from stanchion.adapters.bus.nats.stream import (
    Names,
    StreamState,
    count_messages,
    names_in,
    set_up,
)
from stanchion.ports.bus import Bell, Handler
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import BackendError, BackendUnavailable
from stanchion.ports.records import OutboxRow

__all__ = ["NatsBus"]

_log: Final = logging.getLogger("stanchion")

_AT_ONCE_MAX: Final = 1_000
"""How many publishes wait for their confirmations together."""
_PENDING_ALREADY: Final = "maximum messages per subject exceeded"
"""How the server says it. Its error number is that of every failure to store."""


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
        self._names = names
        self._clock = clock
        self._entropy = entropy
        self._timeout_s = timeout_s
        self._stream = StreamState(ack_wait_s)
        self._ears = Ears()
        self._link = Link(url, self._greet, clock=clock, entropy=entropy, timeout_s=timeout_s)
        self._bells = Bells(self._link, names.bells, self._ears, clock)

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
        """Connect, and have the stream there.

        ``url`` may be several addresses with commas between them. ``ack_wait_s`` is how long the
        server waits for a sign of life before it gives a call to another replica; it takes effect
        when the consumer is made. Raises ``BackendError`` within ``timeout_s``.
        """
        bus = cls(
            url,
            names_in(namespace),
            clock=clock,
            entropy=entropy,
            timeout_s=timeout_s,
            ack_wait_s=ack_wait_s,
        )
        await bus._link.open()
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
        await Pulling(
            self._link,
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
        return self._ears.listen(bell, hear)

    async def pending(self) -> int:
        return await self._link.manage(lambda manager: count_messages(manager, self._names))

    async def ping(self) -> None:
        await self.pending()

    async def close(self) -> None:
        await self._bells.close()
        await self._link.close()

    async def _greet(self, client: Client) -> None:
        # First of all: what is answered on this connection afterwards tells that the server knows
        # of the ear, so nothing that is rung once the bus is open goes unheard.
        await self._bells.subscribe(client)
        manager = client.jsm(timeout=self._timeout_s)
        self._stream = await set_up(manager, self._names, ack_wait_s=self._stream.ack_wait_s)
        if self._stream.has_one_replica:
            fields = {"server": self._link.who, "stream": self._names.stream}
            _log.warning("bus_fragile", extra={"fields": fields})

    async def _put(self, call: OutboxRow) -> bool:
        """Whether it was new."""
        payload = msgspec.json.encode(call)
        answer = await self._link.request(self._names.call(call.run_id), payload)
        try:
            problem = msgspec.json.decode(answer.data, type=_Confirmation).error
        except msgspec.DecodeError as error:
            raise BackendError(f"{self._link.who} confirmed a call unreadably") from error
        if problem is not None and problem.description != _PENDING_ALREADY:
            raise BackendUnavailable(f"{self._link.who} did not take a call: {problem.description}")
        return problem is None
