"""Schedules on whole servers: one run a tick, however many replicas there are and get killed."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.acceptance.caller import Caller, calling
from tests.acceptance.stack import Kind, Stack, running_stack
from tests.acceptance.waiting import until
from tests.acceptance.worker import Worker
from tests.acceptance.workflows import one_job

KINDS = [Kind.SQLITE, Kind.REPLICAS]
ON_TWO = pytest.mark.parametrize("stack", KINDS, indirect=True, ids=str)
PATH = "/v1/schedules/s"
SECOND = timedelta(seconds=1)
LISTED_MAX = 20
"""A schedule lists so many runs: on a slow machine there may be more."""


async def _put(caller: Caller, **members: object) -> dict[str, Any]:
    body = {"workflow_id": "work", "every_s": 1, "labels": {"of": "s"}, **members}
    answer = await caller.call("PUT", PATH, body)
    assert answer.status == 200, answer.text
    return answer.body


async def _reaches(caller: Caller, runs: int = 0, missed: int = 0) -> dict[str, Any]:
    """The schedule, as soon as it has so many runs and missed ticks."""

    async def has_come() -> bool:
        seen = await caller.get(PATH)
        return len(seen["runs"]) >= runs and len(seen["missed"]) >= missed

    await until(has_come, within_s=20)
    return await caller.get(PATH)


def _ticks(rows: list[dict[str, Any]]) -> list[datetime]:
    return [datetime.fromisoformat(row["tick"]) for row in rows]


async def _check_one_run_or_reason(caller: Caller) -> dict[str, Any]:
    """Each tick of a paused schedule, from the first to the last, has one run or one reason."""

    async def are_runs_listed() -> bool:
        # A start that was under way when the schedule was paused is listed when it is done.
        found = await caller.get("/v1/runs?limit=1000&label=of:s")
        newest = {row["run_id"] for row in found["runs"][:LISTED_MAX]}
        return {row["run_id"] for row in (await caller.get(PATH))["runs"]} == newest

    await until(are_runs_listed)
    schedule = await caller.get(PATH)
    runs, missed = _ticks(schedule["runs"]), _ticks(schedule["missed"])
    if len(runs) == LISTED_MAX:
        missed = [tick for tick in missed if tick > runs[-1]]
    ended = sorted([*runs, *missed])
    assert ended == [ended[0] + count * SECOND for count in range(len(ended))]
    return schedule


@ON_TWO
async def test_every_tick_has_one_run(caller: Caller) -> None:
    await caller.configure(max_concurrent_runs=None)
    await caller.apply("work", one_job("work"))
    made = await _put(caller, overlap="allow", input={"n": 1})
    assert len(made["next"]) == 5
    await _reaches(caller, runs=4)
    await _put(caller, overlap="allow", input={"n": 1}, paused=True)
    schedule = await _check_one_run_or_reason(caller)
    assert schedule["next"] == []
    run = await caller.run(schedule["runs"][0]["run_id"])
    assert (run["input"], run["labels"]) == ({"n": 1}, {"of": "s"})


@ON_TWO
async def test_a_tick_is_missed_while_the_last_run_is_unfinished(caller: Caller) -> None:
    await caller.apply("work", one_job("work"))
    await _put(caller)
    await _reaches(caller, runs=1, missed=2)
    await _put(caller, paused=True)
    schedule = await _check_one_run_or_reason(caller)
    (run,) = schedule["runs"]
    assert run["status"] == "running"
    assert f"unfinished: {run['run_id']}" in schedule["missed"][-1]["reason"]


@ON_TWO
async def test_one_tick_is_held_back_until_the_last_run_ends(caller: Caller) -> None:
    await caller.apply("work", one_job("work"))
    await _put(caller, overlap="queue")
    schedule = await _reaches(caller, runs=1, missed=1)
    first = _ticks(schedule["runs"])[0]
    assert _ticks(schedule["missed"])[-1] == first + 2 * SECOND
    assert "held back" in schedule["missed"][-1]["reason"]
    worker = Worker(caller, "work")
    await worker.finish(await worker.one())
    schedule = await _reaches(caller, runs=2)
    assert _ticks(schedule["runs"]) == [first + SECOND, first]
    await _put(caller, overlap="queue", paused=True)
    await _check_one_run_or_reason(caller)


@pytest.mark.parametrize(
    ("kind", "catch_up"),
    [(Kind.SQLITE, "none"), (Kind.SQLITE, "one"), (Kind.SQLITE, "all"), (Kind.REPLICAS, "all")],
    ids=str,
)
async def test_kills_neither_double_nor_hide_a_tick(kind: Kind, catch_up: str) -> None:
    with running_stack(kind) as stack:
        async with calling(stack.urls) as caller:
            await caller.configure(max_concurrent_runs=None)
            await caller.apply("work", one_job("work"))
            members = {"overlap": "allow", "catch_up": catch_up}
            await _put(caller, **members)
            await _reaches(caller, runs=1)
            await _kill_all(stack)
            await _reaches(caller, runs=3)
            await _kill_all(stack)
            # A change while a tick may be under trial by a process that is gone.
            await _put(caller, **members, paused=True)
            await _check_one_run_or_reason(caller)


async def _kill_all(stack: Stack) -> None:
    for replica in stack.replicas:
        replica.kill()
    for replica in stack.replicas:
        await asyncio.to_thread(replica.start)
