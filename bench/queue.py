"""The admission queue: how soon after a slot is freed the next waiting run is at work.

One slot, runs of one step that wait for it, and a worker that waits for a job. Over HTTP, the time
is that from sending a run's result to the answer of the waiting lease: two requests, the commit of
the result, which promotes the next run, and that run's first decision. Inside a server on SQLite,
it is that from the return of the commit to the return of the lease.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from bench.pace import Pace
from bench.row import Row, below, recorded
from bench.serving import Site, distributed, embedded
from stanchion.adapters.bus.local import LocalBus
from stanchion.adapters.store.sqlite.store import SqliteStore
from stanchion.adapters.system import SystemClock, SystemEntropy
from stanchion.core.model import StepId, TenantId, Topic, WorkflowId
from stanchion.core.queue import OnFull
from stanchion.core.workflow import JobSpec, Workflow
from stanchion.ports.records import Committed, LeasedJob, Result, Tenant
from stanchion.services.context import Backends
from stanchion.services.engine import Engine
from tests.acceptance.caller import Caller, calling
from tests.acceptance.worker import Worker

__all__ = ["rows"]

WAITING: Final = 100
TOPIC: Final = Topic("queued")
TENANT: Final = TenantId("default")
P99_MS_MAX: Final = 10.0
_SITES: Final[dict[str, Callable[[], AbstractContextManager[Site]]]] = {
    "SQLite": embedded,
    "Valkey": distributed,
}


def rows(pace: Pace) -> list[Row]:
    """Measure inside a server, and over HTTP on both durable stores."""
    rounds = max(3, pace.rounds)
    took_ms = asyncio.run(_inside(rounds))
    label = "queue, freed slot to the next run's first job leased, p99, SQLite"
    inside = below(label, quantiles(took_ms, n=100)[-1], "ms", P99_MS_MAX, _note(took_ms))
    return [inside, *(_over_http(name, rounds) for name in _SITES)]


def _note(took_ms: list[float]) -> str:
    return f"median {median(took_ms):.1f} ms, {len(took_ms)} hand-overs"


# ── Inside a server ──────────────────────────────────────────────────────────────────────────────


async def _inside(rounds: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        clock = SystemClock()
        store = await SqliteStore.open(Path(folder) / "queue.db", clock=clock)
        freed = _Freed(store)
        bus = LocalBus(store, clock)
        backends = Backends(store=store, locks=None, bus=bus, clock=clock, entropy=SystemEntropy())
        engine = Engine("bench", backends)
        loops = asyncio.create_task(engine.run())
        try:
            spec = JobSpec(topic=TOPIC)
            await store.put_workflow(
                TENANT, Workflow(id=WorkflowId("one"), steps={StepId("only"): spec})
            )
            config = Tenant(max_concurrent_runs=1, on_full=OnFull.QUEUE, queue_max=WAITING)
            await store.put_tenant(TENANT, config)
            found = [await _round(engine, freed) for _ in range(rounds + 1)]
        finally:
            loops.cancel()
            with suppress(asyncio.CancelledError):
                await loops
            await engine.close()
            await bus.close()
            await store.close()
    return [each for some in found[1:] for each in some]  # The first round warms up.


class _Freed:
    """Notes when a commit that promoted a run returned."""

    def __init__(self, store: SqliteStore) -> None:
        self.at_s = 0.0
        for verb in ("commit", "settle"):
            vars(store)[verb] = self._noting(getattr(store, verb))

    def _noting(self, verb: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*arguments: object) -> object:
            answer = await verb(*arguments)
            if isinstance(answer, Committed) and answer.promoted:
                self.at_s = time.perf_counter()
            return answer

        return call


async def _round(engine: Engine, freed: _Freed) -> list[float]:
    services, took_ms = engine.services, list[float]()
    for number in range(1 + WAITING):
        await services.gate.start(TENANT, WorkflowId("one"), {"n": number}, key=None, actor="bench")
    job = await _lease(engine)
    for _ in range(WAITING):
        following = asyncio.create_task(_lease(engine))
        await asyncio.sleep(0.001)  # By then it waits.
        result = Result(job_id=job.job.id, fence=job.fence, worker_id="bench")
        await services.inbox.results([result])
        job = await following
        took_ms.append((time.perf_counter() - freed.at_s) * 1000)
    last = Result(job_id=job.job.id, fence=job.fence, worker_id="bench")
    await services.inbox.results([last])
    return took_ms


async def _lease(engine: Engine) -> LeasedJob:
    scheduler = engine.services.scheduler
    (job,) = (await scheduler.lease("bench", [TOPIC], max_jobs=1, wait_s=10.0)).jobs
    return job


# ── Over HTTP ────────────────────────────────────────────────────────────────────────────────────


def _over_http(name: str, rounds: int) -> Row:
    with _SITES[name]() as site:
        site.prepare({"one": {"steps": {"only": {"topic": TOPIC}}}})
        config = {"max_concurrent_runs": 1, "on_full": "queue", "queue_max": WAITING}
        site.call("PUT", f"/v1/admin/tenants/{TENANT}", config)
        took_ms = asyncio.run(_measure(site, rounds))
    label = f"queue, result sent to the next run's first job leased over HTTP, p99, {name}"
    return recorded(label, quantiles(took_ms, n=100)[-1], "ms", _note(took_ms))


async def _measure(site: Site, rounds: int) -> list[float]:
    took_ms: list[float] = []
    async with calling(site.urls, TENANT) as caller:
        worker = Worker(caller, TOPIC)
        for number in range(rounds + 1):
            some = await _handed_over(caller, worker)
            took_ms += some if number else []  # The first round warms up.
    return took_ms


async def _handed_over(caller: Caller, worker: Worker) -> list[float]:
    """How long each of the waiting runs takes to follow the one before it."""
    for answer in await caller.starts("one", 1 + WAITING):
        assert answer.status in {200, 202}, answer.text
    job = await worker.one()
    took_ms: list[float] = []
    for _ in range(WAITING):
        following = asyncio.create_task(worker.one())
        await asyncio.sleep(0.002)  # By then the lease waits at the server.
        began = time.perf_counter()
        await worker.finish(job)
        job = await following
        took_ms.append((time.perf_counter() - began) * 1000)
    await worker.finish(job)
    return took_ms
