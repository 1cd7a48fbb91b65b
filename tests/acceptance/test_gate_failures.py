"""B2 and A3 when the servers behind the gate fail: which code, how fast, and that it heals."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.acceptance.caller import Caller, calling
from tests.acceptance.load import patiently
from tests.acceptance.signals import read_signals
from tests.acceptance.stack import Kind, Stack, running_stack
from tests.acceptance.test_answers import problem
from tests.acceptance.waiting import until
from tests.acceptance.worker import Worker, success
from tests.acceptance.workflows import HOLD, one_job
from tests.servers import Server

WAIT_S = 2.0
LATE_S = 0.5
HEALED_S = 5.0
COUNT = "failed to enforce max concurrent runs"
GATE = "workflow concurrency gate unavailable"


@pytest.fixture(scope="module")
def failing() -> Iterator[Stack]:
    """Locks on a server of their own, so that each can fail alone."""
    with running_stack(Kind.REPLICAS, has_own_locks=True) as stack:
        yield stack


@pytest.fixture
async def tenant(failing: Stack) -> AsyncIterator[Caller]:
    async with calling(failing.urls) as caller:
        await caller.apply("hold", HOLD)
        # Warm on both: what each server knows of the tenant it has read.
        for number in range(len(failing.replicas)):
            run = await caller.at(number).start("hold")
            await caller.cancel(run.run_id)
        yield caller


@contextlib.contextmanager
def paused(server: Server) -> Iterator[None]:
    server.pause()
    try:
        yield
    finally:
        server.resume()


async def _heals(caller: Caller) -> None:
    since = time.monotonic()
    answer = await patiently(
        caller, "POST", "/v1/workflows/hold/runs", {"input": {}}, within_s=HEALED_S
    )
    assert answer.status == 200, answer.text
    assert time.monotonic() - since < HEALED_S


@pytest.mark.parametrize("strategy", ["atomic", "lock"])
async def test_b2_a_silent_store(failing: Stack, tenant: Caller, strategy: str) -> None:
    await tenant.configure(admission={"strategy": strategy})
    await tenant.start("hold")
    with paused(failing.valkey):
        answers = await asyncio.gather(*(tenant.start("hold") for _ in range(10)))
        for answer in answers:
            # With what a server knew from before, one may come as far as the lock and be stuck
            # behind it, and others wait for that one.
            if strategy == "lock" and answer.code == "limit_check_failed":
                problem(answer, 503, "limit_check_failed", COUNT)
            elif strategy == "lock" and answer.code == "gate_busy":
                problem(answer, 503, "gate_busy")
            else:
                problem(answer, 503, "gate_unavailable", GATE)
            assert answer.took_s < WAIT_S + LATE_S
        live = await tenant.call("GET", "/livez")
        assert (live.status, live.took_s < 1.0) == (200, True)
        ready = await tenant.call("GET", "/readyz")
        assert ready.status == 503
        assert ready.body["checks"]["store"] != "ok"
    await _heals(tenant)


async def test_b2_a_store_that_fails_behind_the_held_lock(failing: Stack, tenant: Caller) -> None:
    await tenant.configure(admission={"strategy": "lock"})
    lock = f"admission/{tenant.tenant}"
    await tenant.hold(lock)
    starting = asyncio.create_task(tenant.start("hold"))
    # By now it has read all that it reads before it waits for the lock.
    await asyncio.sleep(0.3)
    with paused(failing.valkey):
        await tenant.let_go(lock)
        answer = await starting
    problem(answer, 503, "limit_check_failed", COUNT)
    assert answer.took_s < WAIT_S + LATE_S
    await _heals(tenant)


async def test_b2_a_silent_lock_server(failing: Stack, tenant: Caller) -> None:
    await tenant.configure(max_concurrent_runs=None, admission={"strategy": "lock"})
    await tenant.start("hold")
    with paused(failing.locks):
        answer = await tenant.start("hold")
        problem(answer, 503, "gate_unavailable", GATE)
        assert answer.took_s < WAIT_S + LATE_S
        await tenant.configure(max_concurrent_runs=None, admission={"strategy": "atomic"})
        atomic = await tenant.start("hold")
        assert (atomic.status, atomic.took_s < 1.0) == (200, True)
        await tenant.configure(max_concurrent_runs=None, admission={"strategy": "lock"})
    await _heals(tenant)


async def test_b2_the_longer_an_outage_the_later_to_come_again(
    failing: Stack, tenant: Caller
) -> None:
    with paused(failing.valkey):
        first = [answer.body["retry_after_ms"] for answer in await tenant.starts("hold", 10)]
        # A replica that knows of the outage refuses at once: time must pass by itself.
        for _ in range(6):
            await asyncio.sleep(0.5)
            await tenant.starts("hold", 1)
        later = [answer.body["retry_after_ms"] for answer in await tenant.starts("hold", 10)]
    assert all(1_000 <= each <= 10_000 for each in first + later)
    assert sum(later) > sum(first)
    assert len(set(first)) > 1, "everybody would come again at the same time"
    await _heals(tenant)


@pytest.mark.parametrize("strategy", ["atomic", "lock"])
async def test_a6_retries_with_one_key_through_an_outage_make_one_run(
    failing: Stack, tenant: Caller, strategy: str
) -> None:
    await tenant.configure(admission={"strategy": strategy})
    before = len(await tenant.runs())
    body = {"input": {"n": 1}}
    retrying = []
    with paused(failing.valkey):
        for _ in range(10):
            call = patiently(tenant, "POST", "/v1/workflows/hold/runs", body, key="order-1")
            retrying.append(asyncio.create_task(call))
        await asyncio.sleep(WAIT_S + 1.0)
        assert not any(task.done() for task in retrying)
    answers = await asyncio.gather(*retrying)
    assert len({answer.run_id for answer in answers}) == 1
    # What timed out is not executed afterwards: only those who asked again were served.
    assert sum(not answer.is_replayed for answer in answers) == 1
    assert len(await tenant.runs()) == before + 1


async def test_c3_without_lock_server_low_risk_goes_on_and_high_risk_waits(
    failing: Stack, tenant: Caller
) -> None:
    topic = f"{tenant.tenant}.work"
    worker = Worker(tenant, topic)
    runs = {}
    for risk in ("low", "high"):
        await tenant.apply(risk, {"risk": risk, **one_job(topic)})
        runs[risk] = (await tenant.start(risk)).run_id
    jobs = {job["run_id"]: job for job in await worker.lease(max_jobs=2, wait_s=5)}
    assert len(jobs) == 2
    before = await read_signals(tenant)
    with paused(failing.locks):
        # Results are accepted while the lock server is away.
        answer = await worker.send(*(success(job, "good") for job in jobs.values()))
        assert len(answer["accepted"]) == 2
        assert (await tenant.finished(runs["low"]))["status"] == "succeeded"
        assert (await tenant.run(runs["high"], wait_s=1.0))["status"] == "running"
    after = await read_signals(tenant)
    name = "stanchion_workflow_lock_fallback_total"
    assert after.sum(name, risk="low") > before.sum(name, risk="low")
    assert after.sum(name, risk="high") == before.sum(name, risk="high")
    assert (await tenant.finished(runs["high"], within_s=10))["status"] == "succeeded"
    assert await tenant.dead_letters() == []


async def test_c9_an_operator_closes_what_would_fail_open(failing: Stack, tenant: Caller) -> None:
    topic = f"{tenant.tenant}.work"
    worker = Worker(tenant, topic)
    await tenant.apply("work", one_job(topic))
    run_id = (await tenant.start("work")).run_id
    job = await worker.one()
    path = "/v1/admin/escalation"
    for number in range(len(failing.replicas)):
        # Said to each: how fast it spreads is another matter.
        answer = await tenant.at(number).call("POST", path, {"order": "force_closed"})
        assert answer.status == 200, answer.text
        assert (answer.body["forced"], "standard" in answer.body["closed_now"]) == (
            "force_closed",
            True,
        )
    try:
        with paused(failing.locks):
            await worker.finish(job)
            assert (await tenant.run(run_id, wait_s=1.0))["status"] == "running"
            for number in range(len(failing.replicas)):
                await tenant.at(number).call("POST", path, {"order": "clear"})
            assert (await tenant.finished(run_id))["status"] == "succeeded"
    finally:
        await tenant.call("POST", path, {"order": "clear"})


async def test_a_silent_store_is_a_503_for_everybody_else(failing: Stack, tenant: Caller) -> None:
    topic = f"{tenant.tenant}.work"
    await tenant.apply("work", one_job(topic))
    run_id = (await tenant.start("work")).run_id
    worker = Worker(tenant, topic)
    job = await worker.one()
    lease = {"job_id": job["job_id"], "fence": job["fence"]}
    requests: list[tuple[str, str, object]] = [
        ("GET", f"/v1/runs/{run_id}", None),
        ("GET", "/v1/runs", None),
        ("POST", f"/v1/runs/{run_id}/cancel", {}),
        ("POST", "/v1/worker/lease", {"worker_id": "w", "topics": [topic]}),
        ("POST", "/v1/worker/renew", {"worker_id": worker.name, "leases": [lease]}),
        ("POST", "/v1/worker/results", {"worker_id": worker.name, "results": [success(job)]}),
        ("PUT", f"/v1/admin/tenants/{tenant.tenant}", {}),
    ]
    with paused(failing.valkey):
        answers = await asyncio.gather(
            *(tenant.call(method, path, body) for method, path, body in requests)
        )
        for request, answer in zip(requests, answers, strict=True):
            assert answer.verdict == (503, "store_unavailable"), request
            problem(answer, 503, "store_unavailable")
        assert (await tenant.call("GET", "/v1/admin/settings")).status == 200, "last values hold"
    for number in range(len(failing.replicas)):
        await until(tenant.at(number).is_ready, within_s=HEALED_S)
