"""Budgets: what a tenant's runs may use is reserved at the start and charged as it is reported."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.acceptance.caller import Caller
from tests.acceptance.stack import Kind
from tests.acceptance.worker import Job, Worker, failure, success
from tests.acceptance.workflows import one_job

pytestmark = pytest.mark.parametrize("stack", [Kind.SQLITE, Kind.REPLICAS], indirect=True, ids=str)
EXHAUSTED = (429, "budget_exhausted")


async def _tokens(caller: Caller) -> tuple[int, int]:
    """What is used and what is reserved."""
    budget = (await caller.get("/v1/tenant"))["budgets"]["tokens"]
    return budget["used"], budget["reserved"]


async def _renew(worker: Worker, job: Job, **usage: int) -> dict[str, Any]:
    lease = {"job_id": job["job_id"], "fence": job["fence"], "usage": usage}
    body = {"worker_id": worker.name, "leases": [lease]}
    answer = await worker.caller.call("POST", "/v1/worker/renew", body)
    assert answer.status == 200, answer.text
    return answer.body


async def test_of_a_hundred_starts_that_race_three_have_room(caller: Caller) -> None:
    await caller.apply("spend", {**one_job("work"), "budget": {"tokens": 30}})
    budgets = {"tokens": {"limit": 100, "window": "month"}}
    await caller.configure(max_concurrent_runs=None, budgets=budgets)
    answers = await caller.starts("spend", 100)
    assert Counter(answer.verdict for answer in answers) == {(200, None): 3, EXHAUSTED: 97}
    now = datetime.now(UTC)
    refused = [answer for answer in answers if answer.status == 429]
    (ends,) = {answer.body["resets_at"] for answer in refused}
    for answer in refused:
        told = answer.body
        assert (told["budget"], told["limit"], told["used"]) == ("tokens", 100, 0)
        assert told["reserved"] == 90
        assert told["retry_class"] == "quota"  # the others may end
        assert 1 <= int(answer.headers["retry-after"]) <= 30
    resets_at = datetime.fromisoformat(ends)
    assert (resets_at.day, resets_at.hour, resets_at.minute) == (1, 0, 0)
    assert 0 < (resets_at - now).days + 1 <= 31
    assert (await caller.get("/v1/tenant"))["budgets"] == {
        "tokens": {
            "limit": 100,
            "window": "month",
            "used": 0,
            "reserved": 90,
            "resets_at": ends,
        }
    }


async def test_what_every_delivery_and_attempt_used_is_charged_once(caller: Caller) -> None:
    await caller.apply(
        "spend", {**one_job("work", retry={"max_attempts": 2}), "budget": {"tokens": 50}}
    )
    await caller.configure(budgets={"tokens": {"limit": 100, "window": "total"}})
    started = await caller.start("spend", key="k")
    assert (await caller.start("spend", key="k")).is_replayed
    assert await _tokens(caller) == (0, 50)
    worker = Worker(caller, "work")
    dead = await worker.one()
    await _renew(worker, dead, tokens=10, others=7)
    await _renew(worker, dead, tokens=8)  # an older report that came late
    assert await _tokens(caller) == (10, 40)
    # Its worker dies: the lease expires, and the job is delivered again.
    again = await worker.one()
    assert again["fence"] > dead["fence"]
    assert (await _renew(worker, dead, tokens=99))["lost"] == [dead["job_id"]]
    assert (await worker.send({**success(dead), "usage": {"tokens": 99}}))["rejected"]
    for _ in range(2):
        await worker.send({**failure(again), "usage": {"tokens": 5}})
    last = await worker.one()
    assert last["attempt"] == 2
    await worker.send({**success(last), "usage": {"tokens": 60}})
    await caller.finished(started.run_id)
    assert await _tokens(caller) == (75, 0)
    refused = await caller.start("spend")
    assert refused.verdict == EXHAUSTED
    assert (refused.body["used"], refused.body["reserved"]) == (75, 0)
    assert (refused.body["resets_at"], refused.body["retry_class"]) == (None, None)
    rerun = await caller.call("POST", f"/v1/runs/{started.run_id}/rerun", {})
    assert rerun.verdict == EXHAUSTED
    await caller.configure(budgets={"tokens": {"limit": 125, "window": "total"}})
    rerun = await caller.call("POST", f"/v1/runs/{started.run_id}/rerun", {})
    assert await _tokens(caller) == (75, 50)
    job = await worker.one()
    await _renew(worker, job, tokens=20)
    await caller.cancel(rerun.run_id)
    await caller.finished(rerun.run_id)
    assert await _tokens(caller) == (95, 0)
