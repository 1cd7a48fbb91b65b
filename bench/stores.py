"""The stores: each operation costs the same with 1,000 and with 200,000 stored runs.

A small and a large store of the same kind are open at the same time. The operations are timed
alternately in batches, so that disturbances affect both. A batch waits for the disk, which is
sometimes slow: the faster quarter of many batches is compared, because noise only adds time. Each
run is complete: admitted, leased, finished and committed.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from statistics import quantiles

from bench.row import Row
from stanchion.adapters.store.redis import RedisStore
from stanchion.adapters.store.sqlite import SqliteStore
from stanchion.adapters.system import SystemClock
from stanchion.core.model import TenantId
from stanchion.ports.records import LeasedJob, Tenant
from stanchion.ports.store import Store
from tests.contract import builders
from tests.servers import running_server

__all__ = ["rows"]

SMALL, LARGE = 1_000, 200_000
BATCH, ROUNDS = 100, 40
TENANTS = [TenantId(f"tenant-{number}") for number in range(50)]
PROMISE = 1.3


def rows() -> list[Row]:
    """Measure both durable stores."""
    return asyncio.run(_rows())


async def _rows() -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="stanchion-bench-") as directory:
        sqlite = await _growth("SQLite", _sqlite_pair(Path(directory)))
    redis = await _growth("Redis", _redis_pair())
    return [*sqlite, *redis]


@asynccontextmanager
async def _sqlite_pair(directory: Path) -> AsyncIterator[tuple[Store, Store]]:
    pair = [
        await SqliteStore.open(directory / f"{name}.db", clock=SystemClock())
        for name in ("small", "large")
    ]
    try:
        yield pair[0], pair[1]
    finally:
        for store in pair:
            await store.close()


@asynccontextmanager
async def _redis_pair() -> AsyncIterator[tuple[Store, Store]]:
    # One server for both, so that both namespaces see the same noise.
    with running_server() as server:
        pair = [
            await RedisStore.open(server.url, namespace=name, timeout_s=10)
            for name in ("small", "large")
        ]
        try:
            yield pair[0], pair[1]
        finally:
            for store in pair:
                await store.close()


async def _growth(name: str, opened: AbstractAsyncContextManager[tuple[Store, Store]]) -> list[Row]:
    async with opened as pair:
        for store, runs in zip(pair, (SMALL, LARGE), strict=True):
            await _fill(store, runs)
        times: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        for _ in range(ROUNDS):
            for which, store in enumerate(pair):
                for verb, seconds in (await _time_verbs(store)).items():
                    times[verb][which].append(seconds)
    rows = []
    for verb, (small, large) in times.items():
        ratio = quantiles(large)[0] / quantiles(small)[0]
        label = f"{name}: {verb} with {LARGE:,} runs against {SMALL:,}"
        rows.append(Row(label, ratio, "×", f"≤ {PROMISE}", ratio <= PROMISE))
    return rows


async def _fill(store: Store, runs: int) -> None:
    """Store whole runs of fifty tenants, many at a time."""
    for tenant in TENANTS:
        await store.put_tenant(tenant, Tenant(max_concurrent_runs=None))
    left = runs
    while left:
        count = min(left, 500)
        await _start_many(store, count)
        jobs = await _lease_many(store, count)
        await store.accept([builders.result_of(job) for job in jobs])
        left -= count
        await _advance_taken(store, count)


async def _start_many(store: Store, count: int) -> None:
    await asyncio.gather(
        *(
            builders.start(store, tenant=TENANTS[number % len(TENANTS)], key=builders.nonce())
            for number in range(count)
        )
    )


async def _lease_many(store: Store, count: int) -> list[LeasedJob]:
    leased: list[LeasedJob] = []
    while len(leased) < count:
        leased += await builders.lease(store, max_jobs=100)
    return leased


async def _advance_taken(store: Store, count: int) -> None:
    rows = await store.take_outbox(limit=count, hold_ms=60_000)
    await asyncio.gather(*(builders.advance(store, builders.ONE_JOB, row.run_id) for row in rows))
    assert len(rows) == count


async def _time_verbs(store: Store) -> dict[str, float]:
    times = {}
    began = time.perf_counter()

    def lap(verb: str) -> None:
        nonlocal began
        times[verb] = time.perf_counter() - began
        began = time.perf_counter()

    await _start_many(store, BATCH)
    lap("start")
    leased = await _lease_many(store, BATCH)
    lap("lease")
    await asyncio.gather(*(store.accept([builders.result_of(job)]) for job in leased))
    lap("accept")
    await _advance_taken(store, BATCH)
    lap("commit")
    await asyncio.gather(*(store.list_runs(tenant, limit=20) for tenant in TENANTS))
    lap("list")
    return times
