"""C4, C5 and the worker protocol: who may finish a job, and what becomes of one nobody finishes."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import quote

import pytest

from tests.acceptance.caller import Caller
from tests.acceptance.signals import read_signals
from tests.acceptance.stack import JOB_TTL_S, Kind
from tests.acceptance.worker import Job, Worker, failure, success
from tests.acceptance.workflows import one_job
from tests.integration.program import running_program

AGAIN_S = JOB_TTL_S + 5.0
"""An expired lease is offered again within this."""
DELIVERIES_MAX = 5
ON_SQLITE = pytest.mark.parametrize("stack", [Kind.SQLITE], indirect=True, ids=str)
ON_TWO = pytest.mark.parametrize("stack", [Kind.SQLITE, Kind.REPLICAS], indirect=True, ids=str)


@pytest.fixture
def topic(caller: Caller) -> str:
    return f"{caller.tenant}.work"


async def begun(caller: Caller, topic: str, **members: Any) -> str:  # noqa: ANN401 - of a step
    """A run whose one job waits for a worker."""
    await caller.apply("work", one_job(topic, **members))
    return (await caller.start("work", {"n": 7})).run_id


def completions(lines: list[dict[str, Any]]) -> list[str]:
    """The ends of steps, as the history tells them."""
    return [line["what"] for line in lines if line["what"].startswith("step_")]


async def test_a_leased_job_says_all_that_a_worker_needs(caller: Caller, topic: str) -> None:
    run_id = await begun(caller, topic)
    job = await Worker(caller, topic).one()
    assert job["fence"] > 0
    expected = {
        "job_id": f"{run_id}:work@1",
        "tenant": caller.tenant,
        "run_id": run_id,
        "step_id": "work",
        "topic": topic,
        "attempt": 1,
        "input": {"n": 7},
        "lease_ttl_ms": round(JOB_TTL_S * 1000),
    }
    assert {name: job[name] for name in expected} == expected


async def test_a_long_poll_is_answered_when_a_job_comes(caller: Caller, topic: str) -> None:
    await caller.apply("work", one_job(topic))
    worker = Worker(caller, topic)
    since = time.monotonic()
    assert await worker.lease(wait_s=0.3) == []
    assert time.monotonic() - since >= 0.25
    polls = [asyncio.create_task(Worker(caller, topic).lease(wait_s=10.0)) for _ in range(4)]
    await asyncio.sleep(0.2)
    since = time.monotonic()
    await asyncio.gather(*(caller.start("work") for _ in range(4)))
    found = [job for jobs in await asyncio.gather(*polls) for job in jobs]
    assert time.monotonic() - since < 2.0
    assert len({job["job_id"] for job in found}) == 4


async def test_c4_a_stale_fence_cannot_finish_a_job(caller: Caller, topic: str) -> None:
    run_id = await begun(caller, topic)
    before = await read_signals(caller)
    slow, quick = Worker(caller, topic), Worker(caller, topic)
    first = await slow.one()
    since = time.monotonic()
    second = await quick.one(within_s=AGAIN_S)
    assert JOB_TTL_S * 0.9 < time.monotonic() - since < AGAIN_S
    assert second["job_id"] == first["job_id"]
    assert second["attempt"] == first["attempt"] == 1, "a death is not an attempt"
    assert second["fence"] > first["fence"]
    stale = [{"job_id": first["job_id"], "code": "stale_fence"}]
    assert await slow.send(success(first, "old")) == {"accepted": [], "rejected": stale}
    assert await slow.renew(first) == {
        "renewed": [],
        "lost": [first["job_id"]],
        "reasons": {first["job_id"]: "stale_fence"},
    }
    assert await quick.renew(second) == {"renewed": [second["job_id"]], "lost": [], "reasons": {}}
    await quick.finish(second, "new")
    run = await caller.finished(run_id)
    assert run["output"] == {"work": "new"}
    late = await slow.send(success(first, "old"))
    assert late["accepted"] == []
    assert late["rejected"][0]["code"] in {"already_finished", "stale_fence"}
    assert (await caller.run(run_id))["output"] == {"work": "new"}
    after = await read_signals(caller)
    name = "stanchion_scheduler_job_lock_abandoned_total"
    assert after.sum(name) - before.sum(name) >= 1
    name = "stanchion_duplicate_completions_total"
    assert after.sum(name) - before.sum(name) >= 1


async def test_c4_an_accepted_result_sent_again_has_no_effect(caller: Caller, topic: str) -> None:
    run_id = await begun(caller, topic)
    worker = Worker(caller, topic)
    job = await worker.one()
    answers = await asyncio.gather(*(worker.send(success(job, "good")) for _ in range(10)))
    assert all(answer == {"accepted": [job["job_id"]], "rejected": []} for answer in answers)
    await caller.finished(run_id)
    lines = await caller.timeline(run_id)
    assert completions(lines) == ["step_succeeded"]
    assert await worker.send(success(job, "other")) == answers[0]
    assert (await caller.run(run_id))["output"] == {"work": "good"}
    assert await caller.timeline(run_id) == lines


async def test_c5_a_renewed_lease_outlives_its_term(caller: Caller, topic: str) -> None:
    run_id = await begun(caller, topic)
    worker, rival = Worker(caller, topic), Worker(caller, topic)
    job = await worker.one()
    polling = asyncio.create_task(rival.lease(wait_s=2 * JOB_TTL_S))
    while not polling.done():
        assert (await worker.renew(job))["renewed"] == [job["job_id"]]
        await asyncio.wait([polling], timeout=JOB_TTL_S / 3)
    assert polling.result() == []
    await worker.finish(job)
    await caller.finished(run_id)


async def test_results_of_jobs_that_are_not_there(caller: Caller, topic: str) -> None:
    run_id = await begun(caller, topic)
    worker = Worker(caller, topic)
    job = await worker.one()
    await caller.cancel(run_id)
    gone = {**job, "job_id": f"{run_id}:nothing@1"}
    nonsense = {**job, "job_id": "nonsense"}
    answer = await worker.send(success(job), success(gone), success(nonsense))
    assert answer["accepted"] == []
    codes = {each["job_id"]: each["code"] for each in answer["rejected"]}
    assert codes[gone["job_id"]] == codes["nonsense"] == "unknown_job"
    assert codes[job["job_id"]] == "stale_fence", "a cancel revokes what is out"
    renewed = await worker.renew(job)
    assert renewed["lost"] == [job["job_id"]]
    assert renewed["reasons"] == {job["job_id"]: "cancelled"}


async def test_a_job_of_an_item_is_shown_by_its_id(caller: Caller, topic: str) -> None:
    each = {"topic": topic, "for_each": "${input.items}", "input": "${item}"}
    await caller.apply("work", {"steps": {"each": each}})
    run_id = (await caller.start("work", {"items": ["a", "b"]})).run_id
    worker = Worker(caller, topic)
    job = await worker.one()
    assert (job["job_id"], job["item"]) == (f"{run_id}:each[0]@1", 0)
    path = f"/v1/jobs/{quote(job['job_id'], safe='')}"
    shown = await caller.get(path)
    assert (shown["status"], shown["deliveries"], shown["attempt"]) == ("leased", 1, 1)
    await worker.finish(job, "good")
    assert (await caller.get(path))["status"] == "finished"


async def test_a_run_whose_worker_died_ends_in_its_time(caller: Caller, topic: str) -> None:
    await caller.apply("work", one_job(topic, timeout_s=2 * JOB_TTL_S))
    await caller.configure(max_concurrent_runs=1)
    run_id = (await caller.start("work")).run_id
    dead = await Worker(caller, topic).one()
    run = await caller.finished(run_id, within_s=2 * JOB_TTL_S + 5)
    assert run["status"] == "timed_out"
    assert (await caller.start("work")).status == 200
    late = await Worker(caller, topic).send(success(dead))
    assert late["rejected"] == [{"job_id": dead["job_id"], "code": "stale_fence"}]


async def test_another_tenants_job_is_unknown(caller: Caller, topic: str) -> None:
    run_id = await begun(caller, topic)
    job = await Worker(caller, topic).one()
    second = caller.other()
    for path in (f"/v1/jobs/{job['job_id']}", f"/v1/runs/{run_id}"):
        assert (await second.call("GET", path)).status == 404
    assert (await second.cancel(run_id)).status == 404


async def test_a_failed_attempt_is_tried_again_as_the_file_says(caller: Caller, topic: str) -> None:
    retry = {"max_attempts": 3, "backoff": {"kind": "fixed", "delay_ms": 50}}
    run_id = await begun(caller, topic, retry=retry)
    worker = Worker(caller, topic)
    for attempt in (1, 2):
        job = await worker.one()
        assert (job["attempt"], job["job_id"]) == (attempt, f"{run_id}:work@{attempt}")
        await worker.fail(job, f"no {attempt}")
    await worker.finish(await worker.one(), "third")
    run = await caller.finished(run_id)
    assert (run["status"], run["steps"]["work"]["attempt"]) == ("succeeded", 3)


async def test_an_error_that_is_final_is_not_tried_again(caller: Caller, topic: str) -> None:
    run_id = await begun(caller, topic, retry={"max_attempts": 3})
    worker = Worker(caller, topic)
    job = await worker.one()
    error = {"message": "never", "code": "hopeless", "retryable": False}
    await worker.send({**failure(job), "error": error})
    run = await caller.finished(run_id)
    assert run["status"] == "failed"
    assert (run["error"]["code"], run["error"]["message"]) == ("hopeless", "never")


@ON_TWO
async def test_a_worker_process_that_was_killed_is_replaced(caller: Caller, topic: str) -> None:
    run_id = await begun(caller, topic)
    url = caller.urls[0]
    async with running_program("tests.acceptance.agent", url, topic) as agent:
        first: Job = await agent.line()
        assert first["job_id"] == f"{run_id}:work@1"
        # It is alive and renews: nobody else gets the job.
        assert await Worker(caller, topic).lease(wait_s=JOB_TTL_S * 1.5) == []
        await agent.kill()
    worker = Worker(caller, topic)
    second = await worker.one(within_s=AGAIN_S)
    assert (second["job_id"], second["attempt"]) == (first["job_id"], 1)
    assert second["fence"] > first["fence"]
    await worker.finish(second)
    assert (await caller.finished(run_id))["status"] == "succeeded"


@ON_TWO
async def test_a_job_that_kills_five_workers_is_a_dead_letter_until_it_is_replayed(
    caller: Caller, topic: str
) -> None:
    run_id = await begun(caller, topic)
    fences = []
    for delivery in range(1, DELIVERIES_MAX + 1):
        job = await Worker(caller, topic).one(within_s=AGAIN_S)
        assert (job["job_id"], job["attempt"]) == (f"{run_id}:work@1", 1)
        assert job["delivery"] == delivery
        fences.append(job["fence"])
    assert fences == sorted(set(fences))
    letter = await _only_letter(caller)
    assert (letter["kind"], letter["run_id"]) == ("job", run_id)
    assert (letter["step_id"], letter["job_id"]) == ("work", f"{run_id}:work@1")
    assert letter["cause"]
    run = await caller.run(run_id)
    assert (run["status"], run["finished_at"]) == ("waiting", None)
    assert await Worker(caller, topic).lease(wait_s=0.5) == []
    answer = await caller.replay(letter["id"])
    assert answer.status == 200, answer.text
    worker = Worker(caller, topic)
    job = await worker.one()
    assert job["fence"] > fences[-1]
    await worker.finish(job, "at last")
    run = await caller.finished(run_id)
    assert (run["status"], run["output"]) == ("succeeded", {"work": "at last"})
    assert run["steps"]["work"]["attempt"] == 1
    assert await caller.dead_letters() == []
    again = await caller.replay(letter["id"])
    assert again.status in {404, 409}, "it is replayed once"


@ON_SQLITE
async def test_a_dead_letters_run_can_be_cancelled_instead(caller: Caller, topic: str) -> None:
    run_id = await begun(caller, topic)
    await caller.configure(max_concurrent_runs=1)
    for _ in range(DELIVERIES_MAX):
        await Worker(caller, topic).one(within_s=AGAIN_S)
    await _only_letter(caller)
    assert (await caller.start("work")).status == 429
    assert (await caller.cancel(run_id)).status == 200
    assert (await caller.run(run_id))["status"] == "cancelled"
    assert (await caller.start("work")).status == 200


async def _only_letter(caller: Caller) -> dict[str, Any]:
    async with asyncio.timeout(AGAIN_S):
        while True:
            letters = await caller.dead_letters()
            if letters:
                # The run learns of it a moment later.
                run = await caller.run(letters[0]["run_id"])
                if run["status"] == "waiting":
                    assert len(letters) == 1
                    return letters[0]
            await asyncio.sleep(0.05)
