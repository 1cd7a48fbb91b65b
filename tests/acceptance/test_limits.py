"""Topic limits: never more at once, never faster, and a killed worker gives its place back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.acceptance.caller import Caller, fresh_name
from tests.acceptance.stack import JOB_TTL_S, Kind, Stack
from tests.acceptance.worker import Worker
from tests.integration.program import running_program

ON_TWO = pytest.mark.parametrize("stack", [Kind.SQLITE, Kind.REPLICAS], indirect=True, ids=str)
PLACE_BACK_S = JOB_TTL_S * 1.02 + 2


@asynccontextmanager
async def limited(caller: Caller, topics: str, **members: object) -> AsyncIterator[str]:
    """A limit for the length of a test: tests share their stack."""
    path = f"/v1/admin/limits/{fresh_name('limit')}"
    answer = await caller.call("PUT", path, {"topics": [topics], **members})
    assert answer.status == 200, answer.text
    try:
        yield path
    finally:
        assert (await caller.call("DELETE", path)).status == 200


async def fan(caller: Caller, topic: str, items: int) -> str:
    each = {"topic": topic, "for_each": "${input.items}", "input": "${item}"}
    await caller.apply("fan", {"steps": {"each": each}})
    return (await caller.start("fan", {"items": list(range(items))})).run_id


@ON_TWO
async def test_twenty_workers_have_three_jobs_at_once(caller: Caller) -> None:
    topic = f"{caller.tenant}.llm.chat"
    running, highest, done = 0, 0, 0

    async def work() -> None:
        nonlocal running, highest, done
        worker = Worker(caller, topic)
        while done < 40:
            for job in await worker.lease(wait_s=0.5):
                running += 1
                highest = max(highest, running)
                await asyncio.sleep(0.02)
                running -= 1
                done += 1
                await worker.finish(job)

    async with limited(caller, f"{caller.tenant}.*", max_running=3) as path:
        run_id = await fan(caller, topic, 40)
        await asyncio.gather(*(work() for _ in range(20)))
        assert (highest, done) == (3, 40)
        assert (await caller.get(path))["running"] == 0
    assert (await caller.get(f"/v1/runs/{run_id}?wait=5"))["status"] == "succeeded"


@ON_TWO
async def test_jobs_begin_at_their_rate_and_others_at_once(caller: Caller) -> None:
    topic, other = f"{caller.tenant}.llm", f"{caller.tenant}.mail"
    async with limited(caller, topic, rate_per_s=20.0):
        await fan(caller, topic, 40)
        worker, began = Worker(caller, topic, other), time.monotonic()
        jobs = await worker.lease(max_jobs=40)
        took_s = time.monotonic() - began
        assert 20 <= len(jobs) <= 20 + 20 * took_s + 1
        # What is behind the limit does not hold up another topic of the same worker.
        await caller.apply("mail", {"steps": {"one": {"topic": other}}})
        await caller.start("mail")
        assert other in {job["topic"] for job in await worker.lease(max_jobs=40, wait_s=1)}
        async with asyncio.timeout(20):
            while len(jobs) < 39:
                jobs += await worker.lease(max_jobs=40, wait_s=2)
        assert time.monotonic() - began >= (39 - 1 - 20) / 20 - 0.05


@pytest.mark.parametrize("stack", [Kind.REPLICAS], indirect=True, ids=str)
async def test_a_killed_worker_gives_its_place_back(caller: Caller, stack: Stack) -> None:
    topic = f"{caller.tenant}.llm"
    async with (
        limited(caller, topic, per="tenant", max_running=1) as path,
        running_program("tests.acceptance.agent", stack.urls[0], topic) as agent,
    ):
        run_id = await fan(caller, topic, 2)
        await agent.line()
        worker = Worker(caller.at(1), topic)
        assert await worker.lease() == []
        answer = await caller.get(f"/v1/runs/{run_id}/why")
        found = {each["code"]: each for each in answer["findings"]}
        assert {*found} == {"topic_limited", "job_leased"}
        assert "1 of max_running 1 jobs" in found["topic_limited"]["detail"]
        assert found["topic_limited"]["blocked_by"]["id"] == path.rpartition("/")[2]
        await agent.kill()
        began = time.monotonic()
        await worker.one(within_s=10)
        # A poll a second finds what expired, if nothing else happens.
        assert time.monotonic() - began < PLACE_BACK_S + 2
