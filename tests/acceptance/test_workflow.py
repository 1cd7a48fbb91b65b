"""E: a workflow with every kind of step, and the same history of it on every stack."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import msgspec
import pytest

from tests.acceptance.caller import Caller
from tests.acceptance.stack import Kind
from tests.acceptance.worker import Job, Worker
from tests.acceptance.workflows import HOLD, every_kind, inner, one_job

ON_SQLITE = pytest.mark.parametrize("stack", [Kind.SQLITE], indirect=True, ids=str)

# What happened, to which step, to which item, and who caused it. "caller" is whoever started the
# run and decided: a name of the server's, the same each time.
WORKER = "worker-one"
HISTORY = [
    ("run_started", None, None, "caller"),
    ("job_dispatched", "plan", None, "caller"),
    ("job_failed", "plan", None, WORKER),
    ("job_dispatched", "plan", None, "system"),
    ("step_succeeded", "plan", None, WORKER),
    ("items_started", "search", None, WORKER),
    ("job_dispatched", "search", 0, WORKER),
    ("job_dispatched", "search", 1, WORKER),
    ("job_dispatched", "search", 2, WORKER),
    ("item_succeeded", "search", 0, WORKER),
    ("item_succeeded", "search", 1, WORKER),
    ("item_succeeded", "search", 2, WORKER),
    ("step_succeeded", "search", None, WORKER),
    ("delay_started", "cool", None, WORKER),
    ("step_succeeded", "cool", None, "system"),
    ("approval_requested", "review", None, "system"),
    ("step_succeeded", "review", None, "caller"),
    ("step_skipped", "extra", None, "caller"),
    ("subworkflow_started", "publish", None, "caller"),
    ("job_dispatched", "publish.draw", None, "caller"),
    ("step_succeeded", "publish.draw", None, WORKER),
    ("step_succeeded", "publish", None, WORKER),
    ("run_succeeded", None, None, WORKER),
]


async def test_e_every_kind_of_step_and_its_history(caller: Caller) -> None:
    topic = f"{caller.tenant}.agent"
    await caller.apply("inner", inner(topic))
    await caller.apply("every-kind", every_kind(topic))
    run_id = (await caller.start("every-kind", {"question": "why?"})).run_id
    worker = Worker(caller, topic, name=WORKER)

    job = await worker.one()
    assert (job["step_id"], job["input"]) == ("plan", {"q": "why?"})
    await worker.fail(job)
    job = await worker.one()
    assert (job["step_id"], job["attempt"]) == ("plan", 2)
    await worker.finish(job, {"queries": ["a", "b", "c"]})
    for index, query in enumerate("abc"):
        job = await worker.one()
        assert (job["item"], job["input"]) == (index, {"q": query})
        await worker.finish(job, f"found {query}")
    await _until_asked(caller, run_id, "review")
    approved = await caller.approve(run_id, "review")
    assert approved.status in {200, 202}, approved.text
    job = await worker.one()
    found = ["found a", "found b", "found c"]
    assert (job["step_id"], job["input"]) == ("publish.draw", found)
    await worker.finish(job, "a picture")

    run = await caller.finished(run_id)
    assert (run["status"], run["output"]) == ("succeeded", "a picture")
    statuses = {step_id: step["status"] for step_id, step in run["steps"].items()}
    assert statuses.pop("extra") == "skipped"
    assert set(statuses.values()) == {"succeeded"}
    assert run["steps"]["search"]["output"] == found
    lines = await caller.timeline(run_id)
    starter = lines[0]["actor"]
    assert starter not in {WORKER, ""}
    told = [
        (line["what"], line["step"], line["item"], _renamed(line["actor"], starter))
        for line in lines
    ]
    assert told == HISTORY
    # A whole second has no fraction, so the texts do not sort.
    times = [datetime.fromisoformat(line["at"]) for line in lines]
    assert times == sorted(times)
    assert await caller.unfinished() == []
    assert await worker.lease() == []


def _renamed(actor: str, starter: str) -> str:
    return "caller" if actor == starter else actor


async def _until_asked(caller: Caller, run_id: str, step: str) -> dict[str, Any]:
    async with asyncio.timeout(10):
        while True:
            run = await caller.run(run_id)
            if run["steps"].get(step, {}).get("waiting_for") == "decision":
                return run
            await asyncio.sleep(0.02)


async def test_e_the_same_workflow_in_yaml(caller: Caller) -> None:
    text = b"""
    steps:
      work: {topic: TOPIC, input: "${input}"}
    output: {answer: "${steps.work.output}"}
    """
    topic = f"{caller.tenant}.work"
    answer = await caller.client.put(
        f"{caller.urls[0]}/v1/workflows/written",
        content=text.replace(b"TOPIC", topic.encode()),
        headers={**caller.headers, "Content-Type": "application/yaml"},
    )
    assert msgspec.json.decode(answer.content) == {"id": "written", "version": 1}
    run_id = (await caller.start("written", {"n": 1})).run_id
    worker = Worker(caller, topic)
    await worker.finish(await worker.one(), 42)
    assert (await caller.finished(run_id))["output"] == {"answer": 42}


async def test_e_a_new_version_is_for_new_runs(caller: Caller) -> None:
    old, new = f"{caller.tenant}.old", f"{caller.tenant}.new"
    jobs: list[Job] = []
    for version, topic in ((1, old), (1, old), (2, new)):
        answer = await caller.call("PUT", "/v1/workflows/work", one_job(topic))
        assert answer.body == {"id": "work", "version": version}
    assert (await caller.start("work")).status == 200
    jobs += await Worker(caller, old, new).lease(wait_s=5)
    assert [job["topic"] for job in jobs] == [new]


async def test_e_a_rerun_from_a_step_keeps_what_came_before(caller: Caller) -> None:
    topic = f"{caller.tenant}.work"
    steps = {
        "first": {"topic": topic, "input": "first"},
        "second": {"topic": topic, "needs": ["first"], "input": "${steps.first.output}"},
    }
    await caller.apply("two", {"steps": steps})
    run_id = (await caller.start("two")).run_id
    worker = Worker(caller, topic)
    await worker.finish(await worker.one(), "kept")
    await worker.fail(await worker.one())
    assert (await caller.finished(run_id))["status"] == "failed"
    path = f"/v1/runs/{run_id}/rerun"
    again = await caller.call("POST", path, {"from_step": "second"})
    job = await worker.one()
    assert (job["run_id"], job["step_id"], job["input"]) == (again.run_id, "second", "kept")
    assert (await caller.call("POST", f"/v1/runs/{again.run_id}/rerun")).status == 409, "unfinished"
    await worker.finish(job, "done")
    run = await caller.finished(again.run_id)
    assert (run["status"], run["output"], run["rerun_of"]) == (
        *("succeeded", {"second": "done"}),
        run_id,
    )
    assert (await caller.call("POST", path, {"from_step": "absent"})).status == 422


async def test_e_a_decision_is_taken_once(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    run_id = (await caller.start("hold")).run_id
    answers = await asyncio.gather(
        *(caller.approve(run_id, "gate") for _ in range(5)),
        *(caller.reject(run_id, "gate") for _ in range(5)),
    )
    run = await caller.finished(run_id)
    kept, lost = answers[:5], answers[5:]
    if run["status"] == "failed":
        kept, lost = lost, kept
    assert any(answer.status in {200, 202} for answer in kept)
    ends = [line["what"] for line in await caller.timeline(run_id) if line["step"] == "gate"]
    assert len([what for what in ends if what.startswith("step_")]) == 1
    # Who came while it was undecided may have been recorded; whoever comes now is told.
    assert {answer.status for answer in lost} <= {202, 409}
    other = caller.reject if run["status"] == "succeeded" else caller.approve
    assert (await other(run_id, "gate")).verdict == (409, "conflict")


async def test_e_decisions_on_what_is_not_there(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    run_id = (await caller.start("hold")).run_id
    assert (await caller.approve(run_id, "absent")).status == 404
    assert (await caller.approve("absent", "gate")).status == 404
    assert (await caller.cancel("absent")).status == 404


@ON_SQLITE
async def test_e_waiting_for_a_run_is_answered_when_it_ends(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    run_id = (await caller.start("hold")).run_id
    assert (await caller.run(run_id, wait_s=0.1))["status"] == "waiting"
    waiting = asyncio.create_task(caller.run(run_id, wait_s=20))
    await asyncio.sleep(0.1)
    await caller.cancel(run_id)
    async with asyncio.timeout(2):
        assert (await waiting)["status"] == "cancelled"
