"""Servers behind the server that go away for three seconds under load, and come back.

Nothing is lost, nothing becomes a dead letter, and ten seconds after the return all is well.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final

import pytest

from tests.acceptance.caller import Caller, calling
from tests.acceptance.load import Load
from tests.acceptance.stack import Kind, Stack, running_stack
from tests.acceptance.waiting import until
from tests.acceptance.worker import Worker
from tests.servers import NatsServer, Server

AWAY_S = 3.0
AWAY_LONG_S = 30.0
RECOVERED_S = 10.0


@pytest.fixture(scope="module")
def shaken() -> Iterator[Stack]:
    with running_stack(Kind.REPLICAS, has_own_locks=True) as stack:
        yield stack


@pytest.fixture
async def tenant(shaken: Stack) -> AsyncIterator[Caller]:
    async with calling(shaken.urls) as caller:
        yield caller


@contextlib.asynccontextmanager
async def _paused(server: Server | NatsServer) -> AsyncIterator[None]:
    """It takes what is sent and says nothing."""
    server.pause()
    try:
        yield
    finally:
        server.resume()


@contextlib.asynccontextmanager
async def _gone(stack: Stack) -> AsyncIterator[None]:
    """Nobody is there, and what comes back has its data."""
    stack.nats.kill()
    try:
        yield
    finally:
        await asyncio.to_thread(stack.nats.start)


OUTAGES: Final[Mapping[str, Callable[[Stack], AbstractAsyncContextManager[None]]]] = {
    "bus": lambda stack: _paused(stack.nats),
    "bus-gone": _gone,
    "store": lambda stack: _paused(stack.valkey),
    "locks": lambda stack: _paused(stack.locks),
}
EVERY_ONE = pytest.mark.parametrize("outage", list(OUTAGES))


@EVERY_ONE
async def test_an_outage_loses_nothing(shaken: Stack, tenant: Caller, outage: str) -> None:
    await _away(shaken, tenant, outage, AWAY_S)


@pytest.mark.chaos
@EVERY_ONE
async def test_a_long_outage_loses_nothing(shaken: Stack, tenant: Caller, outage: str) -> None:
    await _away(shaken, tenant, outage, AWAY_LONG_S)


async def _away(stack: Stack, caller: Caller, outage: str, away_s: float) -> None:
    load = Load(caller)
    await load.begin()
    try:
        await load.more(20)
        async with OUTAGES[outage](stack):
            began = time.monotonic()
            if outage != "store":
                # Neither the bell nor the locks are needed for runs of standard risk to finish.
                await load.more(20)
                latest = list(load.runs.values())[-1]
                assert (await caller.finished(latest))["status"] == "succeeded"
            await asyncio.sleep(max(0.0, began + away_s - time.monotonic()))
        returned = time.monotonic()
        await load.more(20, within_s=RECOVERED_S)
        await load.end(within_s=RECOVERED_S)
        assert time.monotonic() - returned < RECOVERED_S
    finally:
        await load.stop()
    await load.check()


# ── Why a run does not go on ─────────────────────────────────────────────────────────────────────

RETRY = {"max_attempts": 2, "backoff": {"kind": "fixed", "delay_ms": 60_000}}
EXPLAINED: Final[Mapping[str, Mapping[str, object]]] = {
    "asked": {
        "steps": {
            "review": {"approval": {"message": "Publish?"}},
            "pause": {"delay_s": 3600},
            "work": {"topic": "why.work"},
        }
    },
    "retried": {"steps": {"work": {"topic": "why.work", "retry": RETRY}}},
    "doomed": {"max_deliveries": 1, "steps": {"work": {"topic": "why.work"}}},
    "held": {"steps": {"work": {"topic": "why.work"}}},
    "risky": {"risk": "high", "steps": {"work": {"topic": "why.work"}}},
}


async def _why(caller: Caller, run_id: str) -> list[dict[str, Any]]:
    answer = await caller.call("GET", f"/v1/runs/{run_id}/why")
    assert answer.status == 200, answer.text
    findings: list[dict[str, Any]] = answer.body["findings"]
    assert all(each["detail"] and each["remedy"] for each in findings)
    return findings


async def _named_first(caller: Caller, run_id: str, code: str) -> dict[str, Any]:
    """The finding with this code, which must come first, on every replica and in time."""
    found: dict[str, Any] = {}

    async def is_first(one: Caller) -> bool:
        found.update((await _why(one, run_id))[0])
        return bool(found["code"] == code)

    for replica in range(len(caller.urls)):
        await until(partial(is_first, caller.at(replica)), within_s=RECOVERED_S)
    return found


async def test_the_cause_is_named_also_during_outages(shaken: Stack, tenant: Caller) -> None:
    for name, definition in EXPLAINED.items():
        await tenant.apply(name, definition)
    runs = {name: (await tenant.start(name)).run_id for name in EXPLAINED}
    assert [each["code"] for each in await _why(tenant, runs["asked"])] == [
        "approval_pending",
        "job_ready",
        "delay_pending",
    ]
    worker = Worker(tenant, "why.work")
    jobs = {job["run_id"]: job for job in await worker.lease(max_jobs=10)}
    leased = await _named_first(tenant, runs["risky"], "job_leased")
    assert leased["blocked_by"]["worker_id"] == worker.name
    assert leased["blocked_by"]["fence"] == jobs[runs["risky"]]["fence"]

    await worker.fail(jobs[runs["retried"]])
    retry = await _named_first(tenant, runs["retried"], "retry_pending")
    assert retry["step_id"] == "work"
    await tenant.hold(f"run/{runs['held']}")
    await worker.finish(jobs[runs["held"]])
    held = await _named_first(tenant, runs["held"], "run_locked")
    assert held["blocked_by"]["worker_id"] == "anonymous"
    await tenant.let_go(f"run/{runs['held']}")
    await _named_first(tenant, runs["held"], "finished")
    dead = await _named_first(tenant, runs["doomed"], "dead_letter")
    assert dead["blocked_by"]["id"] in [each["id"] for each in await tenant.dead_letters()]

    again = {job["run_id"]: job for job in await worker.lease(max_jobs=10)}
    async with _paused(shaken.locks):
        await worker.finish(again.get(runs["risky"], jobs[runs["risky"]]))
        closed = await _named_first(tenant, runs["risky"], "class_closed")
        assert "policies.high.on_lock_error" in closed["blocked_by"]["rule"]
        assert closed["since"] is not None
        codes = [each["code"] for each in await _why(tenant, runs["asked"])]
        assert codes[-1] == "backend_unavailable"
    await _named_first(tenant, runs["risky"], "finished")
    async with _paused(shaken.valkey):
        stopped = await _named_first(tenant, runs["asked"], "backend_unavailable")
        assert stopped["blocked_by"]["id"] == "store"
    await _named_first(tenant, runs["asked"], "approval_pending")
    rows = (await tenant.get("/v1/admin/replicas"))["replicas"]
    assert len(rows) == len(shaken.replicas)
    for run_id in runs.values():
        await tenant.cancel(run_id)
