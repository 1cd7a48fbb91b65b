"""The Redis client: what our own pipelining saves of a start's store time, against redis-py.

The same store admits the same runs with the same scripts, once through ``adapters.redis`` and once
through redis-py, in turns on one server. redis-py gets the same help: calls of one turn of the
event loop are gathered into its pipelines, 256 at most, on four connections. What it does not get
is a deadline for every call; its socket time-out covers a whole pipeline. What is compared is the
processor time of this process, most of which a server's event loop would spend: encoding the run
and reading the answer are part of it, and the same for all.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from statistics import median
from typing import Any, cast

import redis.asyncio
import uvloop

from bench.pace import Pace
from bench.row import Row, at_least, recorded
from stanchion.adapters.redis.address import RedisTarget, read_url
from stanchion.adapters.redis.client import RedisClient, RedisRequest
from stanchion.adapters.redis.startup import examine
from stanchion.adapters.store.redis import RedisStore
from stanchion.adapters.store.redis.encode import StoreKeys
from stanchion.adapters.store.redis.shards import Rounds, Shards, script_of
from stanchion.adapters.system import SystemEntropy
from stanchion.core.admission import Admitted
from stanchion.core.model import Instant, TenantId
from stanchion.ports.entropy import Entropy
from stanchion.ports.records import Admission, Tenant
from tests.contract import builders
from tests.servers import running_server

__all__ = ["rows"]

STARTS, STARTS_QUICK = 2_000, 400
ROUNDS, ROUNDS_QUICK = 7, 3
CALLERS = (64, 256)
TENANTS = [TenantId(f"tenant-{number}") for number in range(50)]
QUARTER = 1 / 0.75
BATCH_MAX, CONNECTIONS = 256, 4


def rows(pace: Pace) -> list[Row]:
    """Measure both clients."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_rows(pace))


class _Pipelines(RedisClient):
    """Sends requests through redis-py's pipelines."""

    def __init__(self, target: RedisTarget, *, timeout_s: float, entropy: Entropy) -> None:
        super().__init__(target, timeout_s=timeout_s, entropy=entropy)
        host, port = target.addresses[0]
        self._redis = redis.asyncio.Redis(
            host=host, port=port, socket_timeout=timeout_s, max_connections=max(CALLERS)
        )
        self._queue: deque[tuple[Sequence[Any], asyncio.Future[Any]]] = deque()
        self._busy = 0
        self._running: set[asyncio.Task[None]] = set()

    async def ask(self, request: RedisRequest, *, deadline: float) -> Any:  # noqa: ANN401, ARG002 - as RedisClient
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        if not self._queue:
            loop.call_soon(self._flush)
        self._queue.append((cast("Sequence[Any]", request.packed), answer))
        return await answer

    async def close(self) -> None:
        await self._redis.aclose()
        await super().close()

    def _flush(self) -> None:
        while self._queue and self._busy < CONNECTIONS:
            self._busy += 1
            count = min(BATCH_MAX, len(self._queue))
            batch = [self._queue.popleft() for _ in range(count)]
            task = asyncio.create_task(self._send(batch))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _send(self, batch: list[tuple[Sequence[Any], asyncio.Future[Any]]]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for words, _ in batch:
            pipeline.execute_command(*words)
        replies = await pipeline.execute(raise_on_error=False)
        for (_, answer), reply in zip(batch, replies, strict=True):
            answer.set_result(reply)
        self._busy -= 1
        if self._queue:
            self._flush()


class _OneByOne(_Pipelines):
    """Sends every request by itself, from a pool of connections."""

    async def ask(self, request: RedisRequest, *, deadline: float) -> Any:  # noqa: ANN401, ARG002 - as RedisClient
        words = cast("Sequence[Any]", request.packed)
        return await self._redis.execute_command(*words)  # type: ignore[no-untyped-call]  # no types


class _Words(Shards):
    """Makes requests of words: redis-py encodes them itself."""

    def step(
        self,
        name: str,
        shard: int,
        *arguments: str | bytes | int,
        run_id: str = "",
        tenant: str = "",
        more_keys: Sequence[str] = (),
        is_repeatable: bool = True,
    ) -> RedisRequest:
        script = script_of(name)
        keys = self.keys.all_of(script.key_names, shard, run_id=run_id, tenant=tenant)
        keys += more_keys
        words = ("EVALSHA", script.sha, len(keys), *keys, *arguments)
        return RedisRequest(self.keys.slots[shard], cast("bytes", words), script, is_repeatable)


async def _rows(pace: Pace) -> list[Row]:
    starts = STARTS_QUICK if pace.is_quick else STARTS
    rounds = ROUNDS_QUICK if pace.is_quick else ROUNDS
    with running_server() as server:
        stores = {}
        for name, make in (("ours", RedisClient), ("pipelines", _Pipelines), ("single", _OneByOne)):
            client = make(read_url(server.url), timeout_s=10.0, entropy=SystemEntropy())
            await examine(client)
            keys = StoreKeys(name)
            # Through our own client in any case: these are not measured.
            async with closing_store(server.url, name) as plain:
                for tenant in TENANTS:
                    await plain.put_tenant(tenant, Tenant(max_concurrent_runs=None))
                await builders.start(plain, tenant=TENANTS[0])  # Now the server knows the script.
            make_requests = Shards if name == "ours" else _Words
            requests = make_requests(client, keys, Rounds(0), 1, 1, has_new_formats=True)
            stores[name] = RedisStore(requests, ())
        found = []
        for callers in CALLERS:
            found += await _compared(stores, callers, starts, rounds)
        for store in stores.values():
            await store.close()
    return found


@asynccontextmanager
async def closing_store(url: str, namespace: str) -> AsyncIterator[RedisStore]:
    """A store as a server opens it."""
    store = await RedisStore.open(url, namespace=namespace, timeout_s=10)
    yield store
    await store.close()


async def _compared(
    stores: dict[str, RedisStore], callers: int, starts: int, rounds: int
) -> list[Row]:
    now = await stores["ours"].now()
    times: dict[str, list[float]] = {name: [] for name in stores}
    for _ in range(rounds):
        for name, store in stores.items():
            times[name].append(await _start_all(store, _admissions(now, starts), callers) / starts)
    ours, gathered, single = (1e6 * median(times[name]) for name in stores)
    ratios = [theirs / mine for theirs, mine in zip(times["pipelines"], times["ours"], strict=True)]
    note = f"{gathered:.0f} µs against {ours:.0f} µs, rounds {min(ratios):.2f}–{max(ratios):.2f}"
    return [
        at_least(
            f"redis-py's pipelines against ours: processor time of a start, {callers} callers",
            median(ratios),
            "×",
            round(QUARTER, 2),
            note,
            pair=(gathered, ours),
        ),
        recorded(f"the same, redis-py without pipelines, {callers} callers", single / ours, "×"),
    ]


def _admissions(now: Instant, count: int) -> deque[Admission]:
    return deque(
        builders.admission(now, tenant=TENANTS[number % len(TENANTS)]) for number in range(count)
    )


async def _start_all(store: RedisStore, admissions: deque[Admission], callers: int) -> float:
    """The processor time in which so many callers start all of these, in seconds."""

    async def call() -> None:
        while admissions:
            asked = admissions.popleft()
            assert await store.admit(asked, within_ms=10_000) == Admitted(asked.run.id)

    began = time.process_time()
    await asyncio.gather(*(call() for _ in range(callers)))
    return time.process_time() - began
