"""Subscribers: clients that follow a tenant's events, over streams that break.

Each follows all events of its tenant with the SDK and resumes where it was. At the end it must have
seen every line of the feed once and in order, whatever happened to replicas and connections.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Final

from stanchion.client.async_client import AsyncClient
from stanchion.client.engine import Pace, RetryBudgets
from stanchion.client.errors import CallFailed
from stanchion.core.model import Instant, TenantId
from stanchion.sim import invariants as must
from stanchion.sim.loop import LoopClock, Process
from stanchion.sim.network import CallerTransport, HttpServer, Network, _Exchange
from stanchion.sim.workload import BUDGETS, CALL_TIMEOUT_S
from stanchion.transport.messages import (
    HttpReply,
    NoReply,
    Opened,
    Request,
    Silence,
)

if TYPE_CHECKING:
    from stanchion.gateway.exchange import Message
    from stanchion.sim.world import World

TENANTS: Final = ("acme", "globex")
_WAY_S: Final = 0.002
_BREAKS: Final = 0.03
"""The share of pieces at which the connection breaks."""
_CATCH_UP_S: Final = 12.0
_BROKEN: Final = NoReply(Silence.BROKEN, "the connection broke")
_UNREACHED: Final = NoReply(Silence.UNREACHED, "connection refused")

Line = tuple[str, str, str | None, int | None, int | None]
"""Run, what, step, item, attempt."""


class _StreamExchange(_Exchange):
    """A request whose answer is read piece by piece, as long as the connection holds."""

    def __init__(self, request: Request, request_id: str, stream: EventStream) -> None:
        headers = dict(request.headers)
        super().__init__(request_id, request.method, request.path, headers, request.body)
        self._stream = stream

    async def _send(self, message: Message) -> None:
        await super()._send(message)
        if message["type"] == "http.response.start":
            self._stream.head(self._status, self._headers)
        else:
            self._answer = b""
            self._stream.piece(message["body"])


class EventStream:
    """One connection: what has arrived, and whether it holds."""

    def __init__(self, caller: Process, chance: Random, idle_s: float) -> None:
        self._idle_s = idle_s
        self.opened = Opened({})
        self.began: asyncio.Future[HttpReply | NoReply | None] = (
            asyncio.get_running_loop().create_future()
        )
        """``None`` once a stream has begun."""
        self.exchange: _StreamExchange | None = None
        self.is_cut = False
        self._caller = caller
        self._chance = chance
        self._pieces: deque[bytes | NoReply] = deque()
        self._arrived = asyncio.Event()
        self._reply: tuple[int, dict[str, str], bytes] | None = None

    def head(self, status: int, headers: dict[str, str]) -> None:
        """The head of the answer was sent."""
        if status != 200:  # noqa: PLR2004 - OK
            self._reply = (status, headers, b"")
            return
        self._caller.later(_WAY_S, self._begin, None)

    def piece(self, piece: bytes) -> None:
        """A piece of the body was sent."""
        if self._reply is not None:
            status, headers, body = self._reply
            self._reply = (status, headers, body + piece)
            return
        if self.is_cut or self._chance.random() < _BREAKS:
            self.break_off()
        elif piece:
            self._caller.later(_WAY_S, self._arrive, piece)

    def ended(self) -> None:
        """The server has sent all of its answer."""
        if self._reply is not None:
            self._caller.later(_WAY_S, self._begin, HttpReply(*self._reply))
        else:
            self._caller.later(_WAY_S, self._arrive, b"")

    def break_off(self) -> None:
        """Lose the connection: nothing more arrives, and both sides notice."""
        if not self.is_cut or self.exchange is not None:
            self.is_cut = True
            exchange, self.exchange = self.exchange, None
            if exchange is not None:
                exchange.hang_up()
            self._begin(_BROKEN)
            self._arrive(_BROKEN, is_forced=True)

    async def read(self) -> bytes | NoReply:
        while not self._pieces:
            self._arrived.clear()
            try:
                async with asyncio.timeout(self._idle_s):
                    await self._arrived.wait()
            except TimeoutError:
                self.break_off()
        return self._pieces.popleft()

    def close(self) -> None:
        self.break_off()

    def _begin(self, outcome: HttpReply | NoReply | None) -> None:
        if not self.began.done():
            self.began.set_result(outcome)

    def _arrive(self, piece: bytes | NoReply, *, is_forced: bool = False) -> None:
        if not self.is_cut or is_forced:
            self._pieces.append(piece)
            self._arrived.set()


class StreamTransport:
    """The SDK's transport, with streams."""

    def __init__(
        self, network: Network, world: World, chance: Random, on_open: Callable[[], None]
    ) -> None:
        self._network = network
        self._on_open = on_open
        self._whole = CallerTransport(network)
        self._world = world
        self._chance = chance
        self._count = 0

    async def send(self, request: Request) -> HttpReply | NoReply | EventStream:
        if not request.is_stream:
            return await self._whole.send(request)
        replicas = self._world.up()
        if not replicas or self._network.is_cut:
            await asyncio.sleep(_WAY_S)
            return _UNREACHED
        self._count += 1
        caller = self._network.caller
        stream = EventStream(caller, self._chance, request.idle_s)
        exchange = _StreamExchange(request, f"{caller.name}-stream-{self._count}", stream)
        stream.exchange = exchange
        replica = self._chance.choice(replicas)
        replica.process.later(_WAY_S, self._arrive, replica, exchange, stream)
        try:
            async with asyncio.timeout(request.timeout_s):
                outcome = await stream.began
        except TimeoutError:
            stream.break_off()
            return NoReply(Silence.TIMED_OUT, "no answer in time")
        except asyncio.CancelledError:
            stream.break_off()  # the day is over; so is the connection
            raise
        if outcome is not None:
            return outcome
        self._on_open()
        return stream

    def _arrive(self, replica: HttpServer, exchange: _StreamExchange, stream: EventStream) -> None:
        connection: asyncio.Future[HttpReply | NoReply] = asyncio.get_running_loop().create_future()
        # When the replica dies, its open requests are settled: the connection is broken then.
        connection.add_done_callback(
            lambda _: stream.break_off(), context=self._network.caller.context.copy()
        )
        replica.inflight[connection] = None
        task = replica.process.spawn(exchange.run(replica.app), name="stream")

        def done(task: asyncio.Task[HttpReply | None]) -> None:
            replica.inflight.pop(connection, None)
            if not task.cancelled() and task.exception() is None:
                stream.ended()

        task.add_done_callback(done)


_INVALID: Final = frozenset({400, 404, 409, 422})


class Subscribers:
    """One subscriber a tenant."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.seen: dict[str, list[Line]] = {tenant: [] for tenant in TENANTS}
        self.missable: dict[str, int] = {}
        """By tenant: the lines that its feed had when the stream was open that it resumes from."""
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Subscribe, before the first run."""
        for tenant in TENANTS:
            process = Process(f"subscriber-{tenant}")
            self._tasks.append(process.spawn(self._follow(process, tenant), name="subscriber"))

    async def check_end(self) -> None:
        """Wait until all is read, and compare it with the feeds; end the subscribers."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _CATCH_UP_S
        while loop.time() < until_s and not self._is_all_read():
            await self._world.history.go_on(0.5)
        self._is_over = True
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        for tenant in TENANTS:
            stored, seen = self._stored(tenant), self.seen[tenant]
            # What came before that stream was open is not missed: nothing says where it began.
            due = len(stored) - self.missable.get(tenant, len(stored))
            stored = stored[len(stored) - max(due, len(seen)) :]
            self._world.history.check(
                "subscribers miss nothing, and see nothing twice",
                must.all_seen_once(tenant, stored=stored, seen=seen),
            )

    def _is_all_read(self) -> bool:
        return all(self.seen[tenant][-1:] == self._stored(tenant)[-1:] for tenant in TENANTS)

    def _stored(self, tenant: str) -> list[Line]:
        feed = self._world.store.real.state.peek(TenantId(tenant)).feed
        return [
            (entry.run_id, line.what, line.step, line.item, line.attempt)
            for entry in feed
            for line in entry.entries
        ]

    def _opened(self, tenant: str) -> None:
        self.missable.setdefault(tenant, len(self._stored(tenant)))

    async def _follow(self, process: Process, tenant: str) -> None:
        world = self._world
        chance = Random(f"{world.scenario.seed}/{process.name}")  # noqa: S311 - to be foreseen
        clock = LoopClock(drift=chance.uniform(-0.01, 0.01))
        client = AsyncClient(
            "http://127.0.0.1:1",
            tenant=tenant,
            timeout_s=CALL_TIMEOUT_S,
            pace=Pace(
                budgets=RetryBudgets(BUDGETS),
                now=lambda: Instant(clock.moment()),
                wall=clock.now,
                sample=chance.random,
            ),
            transport=StreamTransport(
                world.network_of(process), world, chance, lambda: self._opened(tenant)
            ),
        )
        after: str | None = None
        while not self._is_over:
            try:
                async for event in client.events(after=after):
                    after = event.id
                    line = event.line
                    self.seen[tenant].append(
                        (line.run_id, line.what, line.step, line.item, line.attempt)
                    )
            except CallFailed as error:
                world.history.tell(f"{process.name}: {error}")
                is_refused = error.facts.status in _INVALID
                world.history.check(
                    "no valid request is called invalid", [str(error)] if is_refused else []
                )
                if after is None:
                    # No event has told it where to resume: it starts from the beginning.
                    self.missable.pop(tenant, None)
            await asyncio.sleep(1 + chance.random())
