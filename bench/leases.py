"""Leases: cost without contention against redis-py's own lock, and hand-over time with waiters.

The two locks are timed alternately in batches, so that disturbances affect both. The hand-over is
measured between processes: from the end of a holder's body to the beginning of the next holder's,
including the release.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from statistics import median

import redis
import redis.asyncio

import stanchion
from bench.row import Row
from tests.leases.lines import until_waiting
from tests.servers import running_server

__all__ = ["rows"]

NAME = "invoice:42"
TTL_S = 30
BATCH, ROUNDS, SESSIONS = 20, 30, 5
PROCESSES, WAITERS_EACH, VISITS = 5, 10, 3
VISIT_S = 0.002


def rows() -> list[Row]:
    """Measure on a Redis and on a SQLite file."""
    logging.disable()  # The server warns that it has no persistence, which is intended here.
    try:
        return _rows()
    finally:
        logging.disable(logging.NOTSET)


def _rows() -> list[Row]:
    with running_server() as server:
        # Several sessions, because the assignment of connections to cores differs in each.
        coroutines = _ratio(
            [pair for _ in range(SESSIONS) for pair in asyncio.run(_coroutines(server.url))]
        )
        threads = _ratio([pair for _ in range(SESSIONS) for pair in _threads(server.url)])
        on_redis = asyncio.run(_hand_over_ms(server.url, PROCESSES, WAITERS_EACH))
    with tempfile.TemporaryDirectory(prefix="stanchion-bench-") as directory:
        on_sqlite = asyncio.run(_hand_over_ms(f"sqlite:{directory}/leases.db", PROCESSES, 2))
    many, few = PROCESSES * WAITERS_EACH, PROCESSES * 2
    return [
        Row("lease against redis-py's asyncio Lock", coroutines, "×", "≤ 1.2", coroutines <= 1.2),
        Row("lease against redis-py's Lock, threads", threads, "×", "≤ 5", threads <= 5),
        Row(f"hand-over on Redis, {many} waiting", on_redis, "ms", "< 5", on_redis < 5),
        Row(f"hand-over on SQLite, {few} waiting", on_sqlite, "ms", "< 25", on_sqlite < 25),
    ]


# ── No waiters ─────────────────────────────────────────────────────────────────────────────────


async def _coroutines(url: str) -> list[tuple[float, float]]:
    """Return pairs of times, ours and redis-py's."""
    client = redis.asyncio.Redis.from_url(url)
    async with stanchion.Leases(url, ttl_s=TTL_S) as leases:

        async def ours() -> None:
            async with leases.hold(NAME):
                """Nothing to do."""

        async def theirs() -> None:
            async with client.lock(NAME, timeout=TTL_S):
                """Nothing to do."""

        await _batch(ours), await _batch(theirs)
        times = [(await _batch(ours), await _batch(theirs)) for _ in range(ROUNDS)]
    await client.aclose()
    return times


async def _batch(once: Callable[[], Awaitable[None]]) -> float:
    began = time.perf_counter()
    for _ in range(BATCH):
        await once()
    return time.perf_counter() - began


def _threads(url: str) -> list[tuple[float, float]]:
    with stanchion.SyncLeases(url, ttl_s=TTL_S) as leases, redis.Redis.from_url(url) as client:

        def ours() -> float:
            began = time.perf_counter()
            for _ in range(BATCH):
                with leases.hold(NAME):
                    """Nothing to do."""
            return time.perf_counter() - began

        def theirs() -> float:
            began = time.perf_counter()
            for _ in range(BATCH):
                with client.lock(NAME, timeout=TTL_S):
                    """Nothing to do."""
            return time.perf_counter() - began

        ours(), theirs()
        return [(ours(), theirs()) for _ in range(ROUNDS)]


def _ratio(times: Sequence[tuple[float, float]]) -> float:
    """The median ratio of adjacent times, so that a short disturbance affects few pairs."""
    return median(ours / theirs for ours, theirs in times)


# ── Many wait ────────────────────────────────────────────────────────────────────────────────────


async def _hand_over_ms(url: str, processes: int, waiters_each: int) -> float:
    namespace = "hand-over"
    command = [sys.executable, "-m", "bench.leases", url, namespace, str(waiters_each)]
    async with stanchion.Leases(url, ttl_s=TTL_S, namespace=namespace) as leases:
        async with leases.hold(NAME):
            waiting = [
                subprocess.Popen(  # noqa: ASYNC220, S603 - once, and it is this very file
                    command, stdout=subprocess.PIPE, text=True
                )
                for _ in range(processes)
            ]
            await until_waiting(url, namespace, NAME, processes * waiters_each)
        said = [process.communicate(timeout=60)[0] for process in waiting]
    visits = sorted(_visit(line) for output in said for line in output.splitlines())
    assert len(visits) == processes * waiters_each * VISITS
    return median(
        (began_ns - ended_ns) / 1e6 for (_, _, ended_ns), (_, began_ns, _) in pairwise(visits)
    )


def _visit(line: str) -> tuple[int, int, int]:
    fence, began_ns, ended_ns = map(int, line.split())
    return fence, began_ns, ended_ns


async def _wait_in_line(url: str, namespace: str, count: int) -> None:
    """Run several waiters with separate connections, and print every hold."""

    async def waiter() -> None:
        async with stanchion.Leases(url, ttl_s=TTL_S, namespace=namespace) as leases:
            for _ in range(VISITS):
                async with leases.hold(NAME, wait_s=60) as lease:
                    began_ns = time.monotonic_ns()
                    await asyncio.sleep(VISIT_S)
                    ended_ns = time.monotonic_ns()
                visits.append(f"{lease.fence} {began_ns} {ended_ns}")

    visits: list[str] = []
    await asyncio.gather(*(waiter() for _ in range(count)))
    print("\n".join(visits))


if __name__ == "__main__":
    logging.disable()
    asyncio.run(_wait_in_line(sys.argv[1], sys.argv[2], int(sys.argv[3])))
