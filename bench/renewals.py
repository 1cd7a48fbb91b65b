"""Lease throughput: acquired and released one by one, and renewed while ten thousand are held.

Run leases are acquired concurrently through the lock port, as a replica does. Job leases are
renewed through the store port, in lists of the length that a worker sends.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import stanchion
from bench.filling import PATIENCE_S, Stock, fill
from bench.pace import Pace
from bench.row import Row, at_least
from bench.serving import backends
from stanchion.adapters.locks.redis import RedisLocks
from stanchion.adapters.store.redis import RedisStore
from stanchion.adapters.store.sqlite import SqliteStore
from stanchion.adapters.system import SystemClock, SystemEntropy
from stanchion.ports.locks import Granted, Renewed
from stanchion.ports.records import JobLease
from stanchion.ports.store import Store
from tests.contract import builders

__all__ = ["rows"]

HELD, HELD_QUICK = 10_000, 500
PAIRS, PAIRS_QUICK = 2_000, 100
AT_ONCE: Final = 500
LIST: Final = 250
"""What a worker sends in one call."""
TTL_MS, WITHIN_MS = 600_000, 60_000


def rows(pace: Pace) -> list[Row]:
    """Measure on Valkey and on a file."""
    return asyncio.run(_rows(pace))


async def _rows(pace: Pace) -> list[Row]:
    held = HELD_QUICK if pace.is_quick else HELD
    pairs = PAIRS_QUICK if pace.is_quick else PAIRS
    with (
        backends() as behind,
        tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as directory,
    ):
        on_redis = await _pairs_per_s(behind.store, pairs)
        on_sqlite = await _pairs_per_s(f"sqlite:{directory}/leases.db", pairs)
        run_leases = await _run_leases_per_s(behind.store, held, pace.rounds)
        redis = await RedisStore.open(behind.store, namespace="jobs", timeout_s=PATIENCE_S)
        in_redis = await _job_leases_per_s(redis, held, pace.rounds)
        path = Path(directory) / "jobs.db"
        sqlite = await SqliteStore.open(path, clock=SystemClock(), timeout_s=PATIENCE_S)
        in_sqlite = await _job_leases_per_s(sqlite, held, pace.rounds)
    return [
        at_least("lease acquired and released on Valkey, one by one", on_redis, "/s", 500),
        at_least("lease acquired and released on SQLite, one by one", on_sqlite, "/s", 200),
        at_least(f"run leases renewed on Valkey, {held:,} held", run_leases, "/s", 5_000),
        at_least(f"job leases renewed on Valkey, {held:,} held", in_redis, "/s", 10_000),
        at_least(f"job leases renewed on SQLite, {held:,} held", in_sqlite, "/s", 10_000),
    ]


async def _pairs_per_s(url: str, pairs: int) -> float:
    async with stanchion.Leases(url, ttl_s=30) as leases:

        async def all_of_them() -> None:
            for _ in range(pairs):
                async with leases.hold("invoice:42"):
                    """Nothing to do."""

        return await _best_per_s(pairs, 3, all_of_them)


async def _run_leases_per_s(url: str, held: int, rounds: int) -> float:
    locks = await RedisLocks.open(url, namespace="locks", entropy=SystemEntropy())
    names = [f"run/{number}" for number in range(held)]

    async def take(name: str) -> None:
        answer = await locks.acquire(name, "holder", ttl_ms=TTL_MS, within_ms=WITHIN_MS)
        assert isinstance(answer, Granted)

    async def renew(name: str) -> None:
        answer = await locks.renew(name, "holder", ttl_ms=TTL_MS, within_ms=WITHIN_MS)
        assert isinstance(answer, Renewed)

    async def each(do: Callable[[str], Awaitable[None]]) -> None:
        for first in range(0, held, AT_ONCE):
            await asyncio.gather(*(do(name) for name in names[first : first + AT_ONCE]))

    try:
        await each(take)
        return await _best_per_s(held, rounds, lambda: each(renew))
    finally:
        await locks.close()


async def _job_leases_per_s(store: Store, held: int, rounds: int) -> float:
    leases: list[JobLease] = []

    async def renew() -> None:
        for first in range(0, held, LIST):
            some = leases[first : first + LIST]
            answer = await store.renew_jobs(some, ttl_ms=TTL_MS)
            assert len(answer.renewed) == len(some)

    try:
        await fill(store, Stock(finished=0, tenants=10, active=held))
        while len(leases) < held:
            leased = await builders.lease(store, max_jobs=100, ttl_ms=TTL_MS)
            leases += [builders.held(job) for job in leased]
        return await _best_per_s(held, rounds, renew)
    finally:
        await store.close()


async def _best_per_s(count: int, rounds: int, work: Callable[[], Awaitable[None]]) -> float:
    """Return the best of several rates, because noise only lowers them."""
    rates = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        await work()
        rates.append(count / (time.perf_counter() - began_s))
    return max(rates)
