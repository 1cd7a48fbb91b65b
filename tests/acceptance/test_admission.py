"""A1, A2, A5, A8, A9: how many runs of a tenant there are at once, and what a slot is."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.acceptance.caller import Answer, Caller
from tests.acceptance.signals import read_signals
from tests.acceptance.worker import Worker
from tests.acceptance.workflows import AROUND, HOLD, one_job

CAP = 2
FULL = (429, "max_concurrent_runs_reached")
SOON_S = 1.0
"""What is not held up by anybody takes less, also on a machine that is busy."""


def verdicts(answers: list[Answer]) -> Counter[tuple[int, str | None]]:
    return Counter(answer.verdict for answer in answers)


@pytest.mark.parametrize("callers", [10, 50, 100])
async def test_a1_of_any_number_of_starts_that_race_two_are_let_in(
    caller: Caller, callers: int
) -> None:
    await caller.apply("hold", HOLD)
    await caller.configure(max_concurrent_runs=CAP)
    answers = await caller.starts("hold", callers)
    assert verdicts(answers) == {(200, None): CAP, FULL: callers - CAP}
    admitted = {answer.run_id for answer in answers if answer.status == 200}
    assert {run["run_id"] for run in await caller.runs()} == admitted
    assert len(admitted) == CAP
    for answer in answers:
        if answer.status == 429:
            assert (answer.body["limit"], answer.body["active"]) == (CAP, CAP)


@pytest.mark.parametrize("callers", [10, 50])
async def test_a1_two_tenants_at_once_do_not_disturb_each_other(
    caller: Caller, callers: int
) -> None:
    both = [caller, caller.other()]
    for each in both:
        await each.apply("hold", HOLD)
        await each.configure(max_concurrent_runs=CAP)
    answers = await asyncio.gather(*(each.starts("hold", callers) for each in both))
    for each, answered in zip(both, answers, strict=True):
        assert verdicts(answered) == {(200, None): CAP, FULL: callers - CAP}
        assert len(await each.unfinished()) == CAP


async def test_a1_a_tenant_that_nobody_configured_has_ten_slots(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    answers = await caller.starts("hold", 15)
    assert verdicts(answers) == {(200, None): 10, FULL: 5}


async def test_a1_no_cap_is_no_cap_and_a_cap_of_zero_lets_nobody_in(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    await caller.configure(max_concurrent_runs=None)
    assert verdicts(await caller.starts("hold", 30)) == {(200, None): 30}
    second = caller.other()
    await second.apply("hold", HOLD)
    await second.configure(max_concurrent_runs=0)
    assert verdicts(await second.starts("hold", 3)) == {FULL: 3}


async def test_a1_a_cap_is_in_force_when_it_was_answered(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    for cap in (1, 3, 2):
        await caller.configure(max_concurrent_runs=cap)
        count = max(0, cap - len(await caller.unfinished()))
        answers = await caller.starts("hold", 6)
        assert verdicts(answers)[200, None] == count


async def test_a2_a_burst_of_one_tenant_does_not_hold_up_another(caller: Caller) -> None:
    second = caller.other()
    for each in (caller, second):
        await each.apply("hold", HOLD)
    await caller.configure(max_concurrent_runs=CAP, admission={"strategy": "lock"})
    await second.configure(max_concurrent_runs=CAP, admission={"strategy": "lock"})
    await caller.hold(f"admission/{caller.tenant}")
    burst = [asyncio.create_task(caller.start("hold")) for _ in range(50)]
    answers = await second.starts("hold", CAP)
    assert verdicts(answers) == {(200, None): CAP}
    assert max(answer.took_s for answer in answers) < SOON_S
    assert not any(task.done() for task in burst), "the burst was to be still waiting"
    assert verdicts(await asyncio.gather(*burst)) == {(503, "gate_busy"): len(burst)}


async def test_a5_a_held_admission_lock_is_nothing_to_the_atomic_strategy(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    await caller.configure(max_concurrent_runs=CAP)
    await caller.hold(f"admission/{caller.tenant}")
    answers = await caller.starts("hold", 10)
    assert verdicts(answers) == {(200, None): CAP, FULL: 8}
    assert max(answer.took_s for answer in answers) < SOON_S


async def test_a8_a_rerun_passes_the_gate(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    await caller.configure(max_concurrent_runs=1)
    first = (await caller.start("hold")).run_id
    await caller.cancel(first)
    second = (await caller.start("hold")).run_id
    refused = await caller.call("POST", f"/v1/runs/{first}/rerun", {})
    assert refused.verdict == FULL
    assert "Retry-After" in refused.headers
    await caller.cancel(second)
    again = await caller.call("POST", f"/v1/runs/{first}/rerun", {})
    assert again.run_id not in {first, second}
    assert (await caller.run(again.run_id))["rerun_of"] == first
    assert (await caller.start("hold")).verdict == FULL


async def test_a8_a_rerun_with_a_key_is_made_once(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    first = (await caller.start("hold")).run_id
    await caller.cancel(first)
    headers = {"Idempotency-Key": "again"}
    path = f"/v1/runs/{first}/rerun"
    answers = await asyncio.gather(
        *(caller.call("POST", path, {}, headers=headers) for _ in range(10))
    )
    assert len({answer.run_id for answer in answers}) == 1
    assert sum(not answer.is_replayed for answer in answers) == 1


async def test_a8_a_sub_workflow_lives_in_its_parents_slot(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    await caller.apply("around", AROUND)
    await caller.configure(max_concurrent_runs=1)
    run_id = (await caller.start("around")).run_id
    assert (await caller.start("around")).body["active"] == 1
    assert (await caller.approve(run_id, "inside.gate")).status in {200, 202}
    assert (await caller.finished(run_id))["status"] == "succeeded"
    assert (await caller.start("around")).status == 200


async def test_a8_a_single_job_takes_no_slot(caller: Caller) -> None:
    topic = f"{caller.tenant}.alone"
    await caller.apply("hold", HOLD)
    await caller.configure(max_concurrent_runs=1)
    await caller.start("hold")
    answer = await caller.call("POST", "/v1/jobs", {"topic": topic, "input": {"n": 1}})
    assert answer.status == 200, answer.text
    worker = Worker(caller, topic)
    job = await worker.one()
    assert (job["job_id"], job["input"]) == (answer.body["job_id"], {"n": 1})
    await worker.finish(job, {"found": True})
    await caller.finished(answer.run_id)
    view = await caller.get(f"/v1/jobs/{job['job_id']}")
    assert (view["run_status"], view["output"]) == ("succeeded", {"found": True})


@pytest.mark.parametrize("ending", ["success", "failure", "cancel", "timeout", "reject"])
async def test_a9_whatever_ends_a_run_frees_its_slot_in_the_same_step(
    caller: Caller, ending: str
) -> None:
    topic = f"{caller.tenant}.work"
    await caller.apply("work", one_job(topic, timeout_s=0.3 if ending == "timeout" else None))
    await caller.apply("hold", HOLD)
    await caller.configure(max_concurrent_runs=1)
    run_id = (await caller.start("hold" if ending == "reject" else "work")).run_id
    assert (await caller.start("hold")).verdict == FULL
    worker = Worker(caller, topic)
    match ending:
        case "success":
            await worker.finish(await worker.one())
        case "failure":
            await worker.fail(await worker.one())
        case "cancel":
            await caller.cancel(run_id)
        case "reject":
            await caller.reject(run_id, "gate")
        case _:
            # Nobody does the work: its time runs out.
            assert ending == "timeout"
    run = await caller.finished(run_id)
    expected = {"success": "succeeded", "cancel": "cancelled", "timeout": "timed_out"}
    assert run["status"] == expected.get(ending, "failed")
    assert (await caller.start("hold")).status == 200, "a finished run still held its slot"


async def test_a9_the_counters_agree_with_the_truth(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    runs = [(await caller.start("hold")).run_id for _ in range(3)]
    for run_id in runs:
        await caller.cancel(run_id)
    assert await caller.unfinished() == []
    signals = await read_signals(caller)
    assert signals.sum("stanchion_slot_drift_total") == 0
