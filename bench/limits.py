"""A topic limit that holds back 10,000 jobs: how it affects leases of another topic.

Two servers alternate, lease by lease. One has only the other topic's jobs. The other one also has
the jobs behind the limit, as many leases as the limit allows, and workers that wait for room. On
both, one worker leases jobs of the other topic, one at a time; on the second server it also asks
for the limited topic in every other round.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from statistics import median
from typing import Final

from bench.pace import Pace
from bench.row import Row, at_most
from bench.serving import Site, distributed, embedded
from tests.acceptance.caller import Caller, calling
from tests.acceptance.worker import Worker

__all__ = ["rows"]

BEHIND: Final = 10_000
WAITING: Final = 20
LEASES: Final = 100
"""In one round."""
LIMITED, OTHER = "llm.chat", "mail"
_SITES: Final[dict[str, Callable[[], AbstractContextManager[Site]]]] = {
    "SQLite": embedded,
    "Valkey": distributed,
}


def rows(pace: Pace) -> list[Row]:
    """Measure both durable stores."""
    return [row for name in _SITES for row in _on(name, pace)]


def _on(name: str, pace: Pace) -> list[Row]:
    with _SITES[name]() as alone, _SITES[name]() as beside:
        for site in (alone, beside):
            flows = {topic.partition(".")[0]: _fan(topic) for topic in (LIMITED, OTHER)}
            site.prepare(flows)
        path = "/v1/admin/limits/llm"
        beside.call("PUT", path, {"topics": ["llm.*"], "max_running": 3})
        _start(beside, "llm", BEHIND)
        measured = asyncio.run(_measure(alone, beside, max(3, pace.rounds)))
        assert beside.call("GET", path)["running"] == 3
    rows = []
    for asks, (beside_ms, alone_ms) in measured.items():
        label = f"lease of another topic beside {BEHIND:,} limited jobs, {name}{asks}"
        note = f"{beside_ms:.2f} ms against {alone_ms:.2f} ms, medians"
        rows.append(at_most(label, beside_ms / alone_ms, "×", 1.2, note))
    return rows


def _fan(topic: str) -> dict[str, object]:
    each = {"topic": topic, "for_each": "${input.items}", "input": "${item}"}
    return {"steps": {"each": each}}


def _start(site: Site, workflow: str, items: int) -> None:
    site.call("POST", f"/v1/workflows/{workflow}/runs", {"input": {"items": [*range(items)]}})


async def _measure(alone: Site, beside: Site, rounds: int) -> dict[str, tuple[float, float]]:
    """The medians of both servers, for a worker of the other topic alone and of both topics."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    async with calling(alone.urls, "default") as one, calling(beside.urls, "default") as two:
        assert len(await Worker(two, LIMITED).lease(max_jobs=5)) == 3
        async with _waiting(two):
            for _ in range(rounds):
                for asks, topics in {"": (OTHER,), ", asking for both": (OTHER, LIMITED)}.items():
                    workers = (Worker(two, *topics), Worker(one, OTHER))
                    both = await _leases_ms((beside, alone), workers)
                    for times_ms, more in zip(found.setdefault(asks, ([], [])), both, strict=True):
                        times_ms.extend(more)
    return {asks: (median(slow), median(fast)) for asks, (slow, fast) in found.items()}


async def _leases_ms(
    sites: tuple[Site, Site], workers: tuple[Worker, Worker]
) -> tuple[list[float], list[float]]:
    """How long each lease of a ready job takes: one on each server in turn."""
    times_ms: tuple[list[float], list[float]] = ([], [])
    for site in sites:
        _start(site, OTHER, LEASES)
    for _ in range(LEASES):
        for worker, times in zip(workers, times_ms, strict=True):
            began = time.perf_counter()
            (job,) = await worker.lease()
            times.append((time.perf_counter() - began) * 1000)
            assert job["topic"] == OTHER
            await worker.finish(job)
    return times_ms


@asynccontextmanager
async def _waiting(caller: Caller) -> AsyncIterator[None]:
    """Workers that wait for room, and the renewals of those that have it."""

    async def wait() -> None:
        while True:
            assert await Worker(caller, LIMITED).lease(wait_s=30.0) == []

    polls = [asyncio.create_task(wait()) for _ in range(WAITING)]
    try:
        await asyncio.sleep(0.5)  # By then all of them wait.
        yield
    finally:
        for poll in polls:
            poll.cancel()
