"""More than the server can give: it stays well, and says no to what it cannot do."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from stanchion.drills.processes import ServerProcess
from tests.acceptance.caller import Caller, calling
from tests.acceptance.flood import Said
from tests.acceptance.stack import Kind, Stack, running_stack
from tests.acceptance.worker import Worker, success
from tests.acceptance.workflows import one_job
from tests.integration.program import running_program

FLOOD_S = 4.0
FLOOD_LONG_S = 30.0
CONNECTIONS = 300
"""Of each of two processes: many times as much as is answered at once."""
HEALTH_S_MAX = 1.0
GROWTH_BYTES_MAX = 300 * 1024 * 1024
CAP = 50


@pytest.fixture(scope="module", params=[Kind.SQLITE], ids=str)
def flooded(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with running_stack(request.param) as stack:
        yield stack


@pytest.fixture
async def tenant(flooded: Stack) -> AsyncIterator[Caller]:
    async with calling(flooded.urls) as caller:
        yield caller


async def test_an_overloaded_server_stays_well(flooded: Stack, tenant: Caller) -> None:
    await _flood(flooded, tenant, FLOOD_S)


@pytest.mark.chaos
async def test_a_server_that_is_overloaded_for_long_stays_well(
    flooded: Stack, tenant: Caller
) -> None:
    await _flood(flooded, tenant, FLOOD_LONG_S)


async def _flood(stack: Stack, caller: Caller, seconds: float) -> None:
    topic = f"{caller.tenant}.work"
    await caller.configure(max_concurrent_runs=CAP)
    await caller.apply("work", one_job(topic))
    replica = stack.replicas[0]
    before = replica.resident_bytes()
    words = (caller.tenant, "work", str(CONNECTIONS), str(seconds))
    stop = asyncio.Event()
    working = asyncio.create_task(_work(Worker(caller, topic), stop))
    watching = asyncio.create_task(_watch(replica, caller, stop))
    async with (
        running_program("tests.acceptance.flood", str(replica.port), *words) as one,
        running_program("tests.acceptance.flood", str(replica.port), *words) as two,
    ):
        said = [
            msgspec.convert(await each.line(seconds + 30), Said, strict=False)
            for each in (one, two)
        ]
    await _all_finish(caller)
    stop.set()
    slowest_s, highest = await watching
    await working

    statuses: Counter[int] = Counter()
    for each in said:
        statuses.update(each.statuses)
    print(statuses, slowest_s, highest - before)  # noqa: T201 - shown when it fails
    assert set(statuses) <= {200, 429, 503}
    assert statuses[429] + statuses[503] > statuses[200] > 0, "that was no overload"
    assert sum(each.without_retry_after for each in said) == 0
    assert sum(each.silences for each in said) == 0
    assert slowest_s < HEALTH_S_MAX
    assert highest - before < GROWTH_BYTES_MAX
    admitted = {run_id for each in said for run_id in each.runs}
    assert admitted <= {run["run_id"] for run in await caller.runs("succeeded")}


async def _watch(replica: ServerProcess, caller: Caller, stop: asyncio.Event) -> tuple[float, int]:
    """How long health took at the worst, and how much memory there was at the most."""
    slowest_s, highest = 0.0, 0
    while not stop.is_set():
        answer = await caller.call("GET", "/livez")
        assert answer.status == 200
        slowest_s = max(slowest_s, answer.took_s)
        highest = max(highest, replica.resident_bytes())
        await asyncio.sleep(0.1)
    return slowest_s, highest


async def _work(worker: Worker, stop: asyncio.Event) -> None:
    """Do what comes, as a worker that is told to wait and waits."""
    path = "/v1/worker"
    lease = {"worker_id": worker.name, "topics": list(worker.topics), "max_jobs": 100}
    while not stop.is_set():
        answer = await worker.caller.call("POST", f"{path}/lease", {**lease, "wait_s": 0.2})
        jobs = answer.body["jobs"] if answer.status == 200 else []
        results = [success(job) for job in jobs]
        body = {"worker_id": worker.name, "results": results}
        while results:
            answer = await worker.caller.call("POST", f"{path}/results", body)
            if answer.status == 200:
                break
            await asyncio.sleep(0.05)
        if not jobs:
            await asyncio.sleep(0.05)


async def _all_finish(caller: Caller) -> None:
    until = time.monotonic() + 30.0
    while await caller.unfinished():
        assert time.monotonic() < until, "accepted work does not finish"
        await asyncio.sleep(0.1)
