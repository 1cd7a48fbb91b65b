"""Stages for the buses: a bus to open, and a handler that tells the case what reaches it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Final

import nats
from nats.aio.client import Client

from stanchion.adapters.bus.local import LocalBus
from stanchion.adapters.bus.nats import NatsBus
from stanchion.adapters.store.memory import MemoryStore
from stanchion.adapters.system import SystemClock, SystemEntropy
from stanchion.core.model import Instant, TenantId, make_run_id
from stanchion.ports.bus import Ack, Bus, Disposition, Handler
from stanchion.ports.records import OutboxRow

__all__ = [
    "LONG_S",
    "BusStage",
    "Desk",
    "LocalStage",
    "NatsStage",
    "consuming",
    "plain_client",
    "row",
    "rows",
    "staged",
    "until_pending",
]

LONG_S: Final = 15.0
"""Longer than anything takes that is going to happen at all, also on a busy machine."""
_ACME: Final = TenantId("acme")
_NUMBERS: Final = itertools.count()


def row() -> OutboxRow:
    """A call for a run of its own."""
    run_id = make_run_id(_ACME, Instant(1_700_000_000_000), next(_NUMBERS))
    return OutboxRow(run_id, _ACME, 1)


def rows(count: int) -> list[OutboxRow]:
    return [row() for _ in range(count)]


async def until_pending(bus: Bus, count: int) -> None:
    """Come back when the bus has so many."""
    async with asyncio.timeout(LONG_S):
        while await bus.pending() != count:  # noqa: ASYNC110 - a server gives no sign of it
            await asyncio.sleep(0.01)


class Desk:
    """A handler. What comes in is written down with its time; the case decides what is answered."""

    def __init__(self, decide: Callable[[OutboxRow, int], Disposition] | None = None) -> None:
        self._decide = decide or (lambda _call, _time: Ack())
        self._came: asyncio.Queue[OutboxRow] = asyncio.Queue()
        self.calls: list[OutboxRow] = []
        self.at_s: list[float] = []
        self.busy = 0
        self.busy_max = 0
        self._changed = asyncio.Event()
        self.open = asyncio.Event()
        """While it is not set, nobody gets an answer."""
        self.open.set()

    async def handle(self, call: OutboxRow) -> Disposition:
        self.calls.append(call)
        self.at_s.append(asyncio.get_running_loop().time())
        self.busy += 1
        self.busy_max = max(self.busy, self.busy_max)
        self._came.put_nowait(call)
        self._changed.set()
        try:
            await self.open.wait()
            return self._decide(call, self.calls.count(call))
        finally:
            self.busy -= 1
            self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Come back when something at this desk is so."""
        async with asyncio.timeout(LONG_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    async def next(self) -> OutboxRow:
        async with asyncio.timeout(LONG_S):
            return await self._came.get()

    async def next_few(self, count: int) -> list[OutboxRow]:
        return [await self.next() for _ in range(count)]


@contextlib.asynccontextmanager
async def consuming(bus: Bus, handle: Handler, *, at_once_max: int = 10) -> AsyncIterator[None]:
    """Consume for as long as the block lasts."""
    task = asyncio.create_task(bus.consume(handle, at_once_max=at_once_max))
    try:
        yield
    finally:
        is_over = task.done()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert not is_over, "consuming ended by itself"


class BusStage(ABC):
    """One bus, fresh for one case."""

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.entropy = SystemEntropy()
        self._buses: list[Bus] = []

    async def open(self) -> Bus:
        self._buses.append(await self._open())
        return self._buses[-1]

    async def close(self) -> None:
        for bus in self._buses:
            await bus.close()

    @abstractmethod
    async def _open(self) -> Bus: ...


class LocalStage(BusStage):
    async def _open(self) -> Bus:
        return LocalBus(MemoryStore(self.clock), self.clock)


class NatsStage(BusStage):
    """Every ``open`` is another replica."""

    def __init__(self, url: str, *, ack_wait_s: float = 30.0, timeout_s: float = 5.0) -> None:
        super().__init__()
        self.url = url
        self.namespace = f"case-{secrets.token_hex(6)}"
        self.ack_wait_s = ack_wait_s
        self.timeout_s = timeout_s

    async def open_at(self, url: str) -> Bus:
        """A replica that goes another way to the same server."""
        bus = await self._open(url)
        self._buses.append(bus)
        return bus

    async def _open(self, url: str | None = None) -> Bus:
        return await NatsBus.open(
            url or self.url,
            namespace=self.namespace,
            clock=self.clock,
            entropy=self.entropy,
            timeout_s=self.timeout_s,
            ack_wait_s=self.ack_wait_s,
        )


@contextlib.asynccontextmanager
async def staged(stage: NatsStage) -> AsyncIterator[NatsStage]:
    """Close what was opened when the block ends."""
    try:
        yield stage
    finally:
        await stage.close()


@contextlib.asynccontextmanager
async def plain_client(url: str) -> AsyncIterator[Client]:
    """A plain connection, for what is not the business of the adapter."""
    client = await nats.connect(url)
    try:
        yield client
    finally:
        await client.close()
