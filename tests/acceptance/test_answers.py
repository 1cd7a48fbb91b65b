"""B1–B4: what a caller who is refused is told, and when to come again."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from tests.acceptance.caller import Answer, Caller
from tests.acceptance.stack import Kind
from tests.acceptance.worker import Worker
from tests.acceptance.workflows import HOLD, one_job

ON_SQLITE = pytest.mark.parametrize("stack", [Kind.SQLITE], indirect=True, ids=str)
ON_TWO = pytest.mark.parametrize("stack", [Kind.SQLITE, Kind.REPLICAS], indirect=True, ids=str)

_BUDGET_S, _LATE_S = 2.0, 0.2
"""How long a start waits for the tenant's lock, and how much longer it may take on a good day."""


def problem(answer: Answer, status: int, code: str, detail: str | None = None) -> dict[str, Any]:
    """The problem that the answer must be, as RFC 9457 and DESIGN §5 want it."""
    assert answer.status == status, answer.text
    assert answer.headers["content-type"].split(";")[0] == "application/problem+json"
    body = answer.body
    assert (body["status"], body["code"]) == (status, code)
    assert body["request_id"]
    assert body["detail"]
    assert detail is None or body["detail"] == detail
    expected = {429: "quota", 503: "unavailable"}.get(status)
    assert body["retry_class"] == expected
    if expected is None:
        assert body["retry_after_ms"] is None
        assert "retry-after" not in answer.headers
    else:
        seconds = int(answer.headers["retry-after"])
        assert seconds == math.ceil(body["retry_after_ms"] / 1000)
        assert 1 <= seconds <= (30 if status == 429 else 10)
    return body


async def test_b1_a_full_tenant(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    await caller.configure(max_concurrent_runs=1)
    await caller.start("hold")
    answer = await caller.start("hold")
    body = problem(answer, 429, "max_concurrent_runs_reached", "max concurrent runs reached")
    assert (body["limit"], body["active"]) == (1, 1)


@ON_TWO
async def test_b2_a_busy_gate(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    await caller.configure(admission={"strategy": "lock"})
    await caller.hold(f"admission/{caller.tenant}")
    answer = await caller.start("hold")
    if answer.took_s > _BUDGET_S + _LATE_S:
        # A machine that stood still at the end of the wait has cut off the last question, and
        # nobody can say any more what came of it. It does not do so twice.
        answer = await caller.start("hold")
    problem(answer, 503, "gate_busy", "workflow concurrency gate unavailable")


async def test_b3_jobs_over_the_rate(caller: Caller) -> None:
    topic = f"{caller.tenant}.alone"
    await caller.configure(job_rate_per_s=0.1)
    body = {"topic": topic, "input": {"n": 1}}
    headers = {"Idempotency-Key": "one"}
    first = await caller.call("POST", "/v1/jobs", body, headers=headers)
    assert first.status == 200, first.text
    second = await caller.call("POST", "/v1/jobs", body)
    told = problem(second, 429, "job_throttled")
    assert told["retry_after_ms"] == 30_000
    assert second.headers["retry-after"] == "30"
    again = await caller.call("POST", "/v1/jobs", body, headers=headers)
    assert again.is_replayed
    assert again.body["job_id"] == first.body["job_id"]


async def test_b3_a_rate_is_also_the_burst(caller: Caller) -> None:
    topic = f"{caller.tenant}.alone"
    await caller.configure(job_rate_per_s=5)
    answers = [await caller.call("POST", "/v1/jobs", {"topic": topic}) for _ in range(10)]
    taken = sum(answer.status == 200 for answer in answers)
    # Ten requests may take a while, in which some of the rate comes back.
    took_s = sum(answer.took_s for answer in answers)
    assert 5 <= taken <= min(10, 6 + 5 * took_s)
    assert {answer.status for answer in answers} <= {200, 429}


async def test_b4_a_hundred_refused_callers_do_not_come_back_together(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    await caller.configure(max_concurrent_runs=0)
    answers = await caller.starts("hold", 100)
    waits_ms = []
    for answer in answers:
        body = problem(answer, 429, "max_concurrent_runs_reached")
        waits_ms.append(body["retry_after_ms"])
    assert all(isinstance(each, int) for each in waits_ms)
    assert min(waits_ms) >= 1_000
    assert max(waits_ms) <= 30_000
    assert len(set(waits_ms)) >= 20


@ON_SQLITE
async def test_b4_a_tenant_whose_slots_free_fast_is_told_to_come_sooner(caller: Caller) -> None:
    topic = f"{caller.tenant}.work"
    await caller.apply("work", one_job(topic))
    await caller.configure(max_concurrent_runs=5)
    worker = Worker(caller, topic)
    for _ in range(10):
        assert {answer.status for answer in await caller.starts("work", 5)} == {200}
        jobs = await worker.do_all(5)
        for job in jobs:
            await caller.finished(job["run_id"])
    await caller.starts("work", 5)
    refused = await caller.starts("work", 50)
    fast = sorted(answer.body["retry_after_ms"] for answer in refused)
    # Fifty runs ended within seconds: nobody has to wait for half a minute.
    assert fast[len(fast) // 2] < 10_000


@ON_SQLITE
@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("GET", "/v1/runs/nothing", None, (404, "not_found")),
        ("GET", "/v1/nothing", None, (404, "not_found")),
        ("GET", "/nothing", None, (404, "not_found")),
        ("DELETE", "/v1/runs", None, (405, "method_not_allowed")),
        ("POST", "/v1/workflows/absent/runs", b"{}", (404, "not_found")),
        ("POST", "/v1/workflows/hold/runs", b"{", (400, "malformed_json")),
        ("POST", "/v1/workflows/hold/runs", b'{"input": {}, "x": 1}', (422, "invalid_request")),
        ("POST", "/v1/workflows/hold/runs", b'{"input": 7}', (422, "invalid_request")),
        ("POST", "/v1/jobs", b'{"topic": "a\\u0000b"}', (422, "invalid_request")),
        ("GET", "/v1/runs?limit=0", None, (422, "invalid_request")),
        ("GET", "/v1/runs?limit=1001", None, (422, "invalid_request")),
        ("GET", "/v1/runs/nothing?wait=61", None, (422, "invalid_request")),
        (
            "POST",
            "/v1/worker/lease",
            b'{"worker_id": "w", "topics": ["t"], "max_jobs": 0}',
            (422, "invalid_request"),
        ),
        (
            "POST",
            "/v1/worker/lease",
            b'{"worker_id": "w", "topics": ["t"], "wait_s": 60.5}',
            (422, "invalid_request"),
        ),
        ("PUT", "/v1/workflows/bad", b'{"steps": {}}', (422, "invalid_workflow")),
        ("PUT", "/v1/workflows/hold", b" " * (1024 * 1024 + 1), (413, "body_too_large")),
    ],
)
async def test_everything_else_that_is_refused_is_a_problem_document(
    caller: Caller, method: str, path: str, body: bytes | None, expected: tuple[int, str]
) -> None:
    await caller.apply("hold", HOLD)
    raw = None if body is None else msgspec.Raw(body)
    problem(await caller.call(method, path, raw), *expected)
