"""The simulated bus: a queue of calls, and bells, with the faults of a real bus.

A call that is not answered within ``ACK_WAIT_S`` is delivered again, to any replica. Calls may be
delivered twice and out of order. A crash loses calls that were published since the last sync to
disk, and restores calls that were answered since. Bells may be lost. All of this may only cost
time: the outbox rows are in the store.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Final, assert_never

import msgspec

from stanchion.adapters.bus.local import BellListeners, handled
from stanchion.core.model import RunId
from stanchion.ports.bus import Ack, Bell, Dead, Disposition, Handler, Retry
from stanchion.ports.errors import BackendError
from stanchion.ports.records import OutboxRow
from stanchion.sim.loop import Process
from stanchion.sim.network import SimLink

ACK_WAIT_S: Final = 6.0
_SIGN_S: Final = 2.0
BELL_LOST: Final = 0.05
DELIVERED_TWICE: Final = 0.01


class _Message(msgspec.Struct):
    row: OutboxRow
    due_s: float
    is_synced: bool = False
    delivery: int = 0


class BusServer:
    """The queue."""

    def __init__(self, chance: Random, faults: Counter[str]) -> None:
        self.process = Process("bus")
        self.is_down = False
        self.is_kind = False
        """No losses, no duplicates."""
        self._chance = chance
        self._faults = faults
        self._messages: dict[RunId, _Message] = {}
        self._answered: dict[RunId, _Message] = {}
        """Calls published or answered since the last sync."""
        self.ports: list[BusPort] = []

    def crash(self) -> None:
        """Lose calls published since the last sync, and restore those answered since."""
        now_s = asyncio.get_running_loop().time()
        kept = {run_id: each for run_id, each in self._messages.items() if each.is_synced}
        back = {run_id: each for run_id, each in self._answered.items() if run_id not in kept}
        for each in back.values():
            each.due_s = now_s
        self._faults["calls lost by the bus"] += len(self._messages) - len(kept)
        self._faults["calls back from the dead"] += len(back)
        self._messages, self._answered = kept | back, {}
        self.is_down = True

    def restart(self) -> None:
        """Start again with the calls on disk."""
        self.is_down = False
        for run_id in list(self._messages):
            self._due(run_id)

    def sync(self) -> None:
        """Write everything to disk."""
        self._answered = {}
        for each in self._messages.values():
            each.is_synced = True

    # ── Executed for a replica ───────────────────────────────────────────────────────────────────

    def publish(self, rows: Sequence[OutboxRow]) -> int:
        fresh = 0
        for row in rows:
            if row.run_id not in self._messages:
                fresh += 1
                self._put(row, asyncio.get_running_loop().time())
        return fresh

    def answer(self, run_id: RunId, delivery: int, disposition: Disposition) -> None:
        message = self._messages.get(run_id)
        if message is None or message.delivery != delivery:
            return  # The answer to an earlier delivery.
        now_s = asyncio.get_running_loop().time()
        match disposition:
            case Ack() | Dead():
                del self._messages[run_id]
                self._answered[run_id] = message
                if not self.is_kind and self._chance.random() < DELIVERED_TWICE:
                    self._faults["delivered twice"] += 1
                    self._put(message.row, now_s)
            case Retry(delay_ms):
                message.due_s = now_s + delay_ms / 1000
                self.process.later(delay_ms / 1000, self._due, run_id)
            case _:
                assert_never(disposition)

    def still(self, run_id: RunId, delivery: int) -> None:
        message = self._messages.get(run_id)
        if message is not None and message.delivery == delivery:
            message.due_s = asyncio.get_running_loop().time() + ACK_WAIT_S
            self.process.later(ACK_WAIT_S, self._due, run_id)

    def pending(self) -> int:
        return len(self._messages)

    def ring(self, bell: Bell, note: str, ringer: BusPort) -> None:
        """Deliver a bell to all other replicas, unless it is lost."""
        for port in self.ports:
            if port is ringer:
                continue
            if not self.is_kind and self._chance.random() < BELL_LOST:
                self._faults["bell lost"] += 1
            elif not port.link.cut_back:
                port.link.caller.later(port.link.weather.each_way_s, port.hear, bell, note)

    # ── The queue's own doing ────────────────────────────────────────────────────────────────────

    def _put(self, row: OutboxRow, due_s: float) -> None:
        self._messages[row.run_id] = _Message(row, due_s)
        # After a random delay, so that the order varies.
        self.process.later(0.01 * self._chance.random(), self._due, row.run_id)

    def _due(self, run_id: RunId) -> None:
        """Deliver a due call to one of the consumers."""
        now_s = asyncio.get_running_loop().time()
        message = self._messages.get(run_id)
        if message is None or self.is_down or message.due_s > now_s + 1e-6:
            return
        ready = [port for port in self.ports if port.room > 0 and not port.link.caller.is_dead]
        if not ready:
            self.process.later(0.5, self._due, run_id)
            return
        port = self._chance.choice(ready)
        message.delivery += 1
        message.due_s = now_s + ACK_WAIT_S
        self.process.later(ACK_WAIT_S, self._due, run_id)
        if port.link.cut_back:
            self._faults["delivery cut off"] += 1
        else:
            port.link.caller.later(
                port.link.weather.each_way_s, port.deliver, message.row, message.delivery
            )


class BusPort:
    """The bus port of one replica."""

    has_turns = False

    def __init__(self, link: SimLink, server: BusServer) -> None:
        self.link = link
        self._at_once_max = 0
        self.on_answer: Callable[[OutboxRow, Disposition], None] = lambda _row, _said: None
        self.on_bell: Callable[[Bell, str], None] = lambda _bell, _note: None
        self._server = server
        self._listeners = BellListeners()
        self._handle: Handler | None = None
        self._hands: dict[asyncio.Task[None], None] = {}
        server.ports.append(self)

    @property
    def room(self) -> int:
        """The number of further calls it can take."""
        return self._at_once_max - len(self._hands)

    def leave(self) -> None:
        """Remove the connection of a process that has ended."""
        self._at_once_max = 0
        self._server.ports.remove(self)

    async def publish(self, calls: Sequence[OutboxRow]) -> int:
        return await self.link.ask("publish", lambda: self._server.publish(calls))

    async def consume(self, handle: Handler, *, at_once_max: int) -> None:
        self._handle = handle
        self._at_once_max = at_once_max
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._at_once_max = 0
            for hand in self._hands:
                hand.cancel()

    def deliver(self, row: OutboxRow, delivery: int) -> None:
        """Receive a call."""
        if self._handle is not None and self.room > 0:
            hand = asyncio.get_running_loop().create_task(
                self._serve(self._handle, row, delivery), name=f"call {row.run_id}"
            )
            self._hands[hand] = None
            hand.add_done_callback(lambda hand: self._hands.pop(hand, None))

    def ring(self, bell: Bell, note: str = "") -> None:
        self.on_bell(bell, note)
        self._listeners.hear(bell, note)
        if not self.link.cut_there and not self._server.is_down:
            self._server.process.later(
                self.link.weather.each_way_s, self._server.ring, bell, note, self
            )

    def hear(self, bell: Bell, note: str) -> None:
        """Receive a bell of another replica."""
        self.on_bell(bell, note)
        self._listeners.hear(bell, note)

    def listen(self, bell: Bell, hear: Callable[[str], None]) -> Callable[[], None]:
        return self._listeners.listen(bell, hear)

    async def pending(self) -> int:
        return await self.link.ask("pending", self._server.pending)

    async def backlog(self) -> int:
        return await self.pending()

    async def ping(self) -> None:
        await self.link.ask("ping", lambda: None)

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    async def _serve(self, handle: Handler, row: OutboxRow, delivery: int) -> None:
        async def still() -> None:
            await self._say(lambda: self._server.still(row.run_id, delivery))

        disposition = await handled(handle, row, still=still, every_s=_SIGN_S)
        self.on_answer(row, disposition)
        await self._say(lambda: self._server.answer(row.run_id, delivery, disposition))

    async def _say(self, execute: Callable[[], None]) -> None:
        try:
            await self.link.ask("answer", execute)
        except BackendError:
            return  # It will be delivered again.
