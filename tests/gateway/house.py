"""A house: one gateway over a whole engine, in memory, on lines that can go bad."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import NamedTuple

import msgspec

from stanchion.adapters.bus.local import LocalBus
from stanchion.adapters.store.memory import MemoryStore
from stanchion.adapters.system import SystemClock, SystemEntropy
from stanchion.gateway import Gateway, GatewayOptions, make_app
from stanchion.gateway.server import serve
from stanchion.ports.errors import BackendUnavailable
from stanchion.ports.locks import LockView
from stanchion.services.context import Backends
from stanchion.services.engine import Engine, Terms
from tests.gateway.asgi import Answer, Stuck, ask
from tests.services.faulty_locks import Fault, FaultyLocks
from tests.services.faulty_store import FaultyStore

__all__ = ["ADMIN", "GET", "House", "Served", "bearer", "opened_house", "problem", "served"]

ADMIN = "the-admin-key"
ONE_STEP = {"steps": {"only": {"topic": "work"}}}


def bearer(key: str) -> tuple[str, str]:
    """The header that shows a key."""
    return "Authorization", f"Bearer {key}"


class HouseLocks(FaultyLocks):
    """Also what only an operator asks for can go wrong."""

    async def list(self, prefix: str = "", *, limit: int = 1000) -> Sequence[LockView]:
        if self._always.get("list") is Fault.ERROR:
            raise BackendUnavailable("connection refused")
        return await super().list(prefix, limit=limit)

    async def inspect(self, name: str) -> LockView | None:
        if self._always.get("inspect") is Fault.ERROR:
            raise BackendUnavailable("connection refused")
        return await super().inspect(name)


class House:
    """A gateway, what stands behind it, and how to ask it."""

    def __init__(
        self, engine: Engine, app: Gateway, store: FaultyStore, locks: FaultyLocks
    ) -> None:
        self.engine = engine
        self.services = engine.services
        self.app = app
        self.store = store
        self.locks = locks

    async def ask(
        self,
        method: str,
        target: str,
        body: object = b"",
        *,
        key: str | None = None,
        tenant: str | None = None,
        headers: Iterable[tuple[str, str | bytes]] = (),
        parts: Sequence[bytes | type[Stuck]] | None = None,
    ) -> Answer:
        """Send one request."""
        given = [*headers]
        if key is not None:
            given.append(bearer(key))
        if tenant is not None:
            given.append(("X-Stanchion-Tenant", tenant))
        async with asyncio.timeout(10):
            return await ask(self.app, method, target, body, given, parts=parts)

    async def make_key(self, role: str, tenant: str) -> str:
        """A key of this role for this tenant."""
        asked = {"role": role, "tenant": tenant}
        answer = await self.ask("POST", "/v1/admin/keys", asked, key=ADMIN)
        assert answer.status == 200, answer.body
        return str(answer.json["key"])

    async def start(self, *, key: str | None = None, tenant: str | None = None) -> str:
        """A run of the one-step workflow, which is put first."""
        path = "/v1/workflows/one-step"
        put = await self.ask("PUT", path, ONE_STEP, key=key, tenant=tenant)
        assert put.status == 200, put.body
        started = await self.ask("POST", f"{path}/runs", {}, key=key, tenant=tenant)
        assert started.status == 200, started.body
        return str(started.json["run_id"])

    async def lease(self, *, key: str | None = None, topic: str = "work") -> dict[str, object]:
        """One job of this topic."""
        asked = {"worker_id": "worker-1", "topics": [topic], "wait_s": 1}
        answer = await self.ask("POST", "/v1/worker/lease", asked, key=key)
        assert answer.status == 200, answer.body
        (job,) = answer.json["jobs"]
        return dict(job)

    async def has_under_way(self, kind: str, *, count: int = 1) -> None:
        """Wait until so many requests, waits or streams are under way."""
        async with asyncio.timeout(5):
            while self.metric("stanchion_http_under_way", kind=kind) != count:  # noqa: ASYNC110 - it is counted, nobody is told
                await asyncio.sleep(0.002)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.services.registry.get_sample_value(name, labels)


def older_store(house: House) -> None:
    """Have the store be one that an older version made."""
    memory = house.store.real
    assert isinstance(memory, MemoryStore)
    memory._state.level = 1  # noqa: SLF001 - as only an older version can make it


@asynccontextmanager
async def opened_house(
    options: GatewayOptions | None = None,
    *,
    is_watched: bool = True,
    job_lease_ttl_ms: int = 30_000,
) -> AsyncIterator[House]:
    """A gateway that is running, its loop watched for stalls unless a server does that."""
    clock = SystemClock()
    memory = MemoryStore(clock)
    store, locks = FaultyStore(memory), HouseLocks(clock)
    store.each_way_s = 0
    wires = Backends(
        store=store.port,
        locks=locks,
        bus=LocalBus(memory, clock),
        clock=clock,
        entropy=SystemEntropy(),
    )
    engine = Engine("house", wires, terms=Terms(job_lease_ttl_ms=job_lease_ttl_ms))
    app = make_app(engine.services, options)
    loops = asyncio.create_task(engine.run())
    try:
        with app.watchdog.watching() if is_watched else nullcontext():
            yield House(engine, app, store, locks)
    finally:
        app.drain()
        loops.cancel()
        with suppress(asyncio.CancelledError):
            await loops
        store.back()
        await engine.close()
        await wires.bus.close()
        app.close()


GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Served(NamedTuple):
    """A house with a door."""

    house: House
    port: int
    serving: asyncio.Task[None]

    async def say(self, *parts: bytes) -> bytes:
        """Send these bytes, and read until the server hangs up."""
        async with asyncio.timeout(8), self.line() as (reader, writer):
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await reader.read()

    @asynccontextmanager
    async def line(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection, hung up at the end whatever became of it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()


@asynccontextmanager
async def served(
    options: GatewayOptions | None = None, drain_s: float = 0.4
) -> AsyncIterator[Served]:
    async with opened_house(options, is_watched=False) as house:
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            serve(house.app, host="127.0.0.1", port=0, drain_s=drain_s, on_ready=ready.set_result)
        )
        url = await ready
        try:
            yield Served(house, int(url.rpartition(":")[2]), serving)
        finally:
            if not serving.done():
                os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(10):
                await serving


def problem(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/problem+json" in head, answer
    assert b"connection: close" in head
    said = msgspec.json.decode(body)
    assert int(head.split()[1]) == said["status"]
    return said["status"], said["code"]
