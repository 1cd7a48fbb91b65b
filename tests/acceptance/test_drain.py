"""SIGTERM under load, with everything open that can be open: nothing accepted is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import httpx2
import pytest

from tests.acceptance.caller import Answer, Caller, calling
from tests.acceptance.load import Load
from tests.acceptance.stack import Kind, Stack, running_stack
from tests.acceptance.workflows import HOLD

EXIT_S = 10.0


@pytest.fixture(scope="module", params=[Kind.SQLITE, Kind.REDIS], ids=str)
def drained(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with running_stack(request.param) as stack:
        yield stack


@pytest.fixture
async def tenant(drained: Stack) -> AsyncIterator[Caller]:
    async with calling(drained.urls) as caller:
        yield caller


async def test_sigterm_under_load_loses_nothing_and_ends_in_time(
    drained: Stack, tenant: Caller
) -> None:
    await tenant.apply("hold", HOLD)
    holding = (await tenant.start("hold")).run_id
    load = Load(tenant)
    replica = drained.replicas[0]
    listening = asyncio.create_task(_listen(tenant))
    waiting = asyncio.create_task(
        tenant.call("GET", f"/v1/runs/{holding}?wait=30", timeout_s=EXIT_S)
    )
    body = {"worker_id": "w", "topics": [f"{tenant.tenant}.none"], "wait_s": 30}
    polling = asyncio.create_task(tenant.call("POST", "/v1/worker/lease", body, timeout_s=EXIT_S))
    await load.begin()
    try:
        await load.more(30)
        replica.terminate()
        since = time.monotonic()
        # Whoever waited for something is answered, not cut off.
        waited, polled = await asyncio.gather(waiting, polling)
        assert waited.status in {200, 503}
        assert polled.status in {200, 503}
        async with asyncio.timeout(EXIT_S):
            assert await listening > 0, "the stream had something to tell"
        code = await asyncio.to_thread(replica.process.wait, EXIT_S)
        assert time.monotonic() - since < EXIT_S
        assert code == 0, drained.last_words()
        await asyncio.to_thread(replica.start)
        await tenant.cancel(holding)
        await load.more(10)
        await load.end()
    finally:
        await load.stop()
    runs = {run["run_id"] for run in await tenant.runs()}
    assert set(load.runs.values()) | {holding} == runs


async def test_a_draining_server_says_so(drained: Stack, tenant: Caller) -> None:
    await tenant.apply("hold", HOLD)
    replica = drained.replicas[0]
    limits = httpx2.Limits(max_keepalive_connections=1)
    async with httpx2.AsyncClient(limits=limits, trust_env=False) as client:
        # A connection from before: nothing new is let in, but whoever is in may ask.
        assert (await client.get(f"{replica.url}/readyz")).status_code == 200
        replica.terminate()
        answers: list[Answer | None] = []
        async with asyncio.timeout(EXIT_S):
            while replica.process.poll() is None:
                try:
                    answers.append(await tenant.start("hold"))
                except httpx2.TransportError:
                    answers.append(None)
                await asyncio.sleep(0.02)
    assert replica.process.returncode == 0
    refused = [answer for answer in answers if answer is not None and answer.status != 200]
    assert {answer.verdict for answer in refused} <= {(503, "draining")}
    assert all(1 <= int(answer.headers["retry-after"]) <= 10 for answer in refused)
    await asyncio.to_thread(replica.start)
    started = {answer.run_id for answer in answers if answer is not None and answer.status == 200}
    assert started <= {run["run_id"] for run in await tenant.runs()}


async def _listen(caller: Caller) -> int:
    """How many lines of events came, until the server ended the stream."""
    count = 0
    url = f"{caller.urls[0]}/v1/events"
    timeout = httpx2.Timeout(30.0)
    async with caller.client.stream(
        "GET", url, headers=caller.headers, timeout=timeout
    ) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            count += line.startswith("data:")
    return count
