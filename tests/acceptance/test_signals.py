"""A10, B7, B9–B11, C10: what is counted, and that it moves when it should."""

from __future__ import annotations

import time
from functools import partial

import pytest

from tests.acceptance.caller import Caller
from tests.acceptance.signals import Signals, read_signals
from tests.acceptance.stack import Kind
from tests.acceptance.waiting import until
from tests.acceptance.worker import Worker, success
from tests.acceptance.workflows import HOLD, one_job

DECISIONS = "stanchion_admission_decisions_total"
RETRIES = "stanchion_lock_busy_retries_total"
WAIT_COUNT = "stanchion_admission_wait_seconds_count"
ON_SQLITE = pytest.mark.parametrize("stack", [Kind.SQLITE], indirect=True, ids=str)
ON_TWO = pytest.mark.parametrize("stack", [Kind.SQLITE, Kind.REPLICAS], indirect=True, ids=str)

PROMISED = (
    "stanchion_admission_decisions_total",
    "stanchion_admission_wait_seconds",
    "stanchion_workflow_lock_fallback_total",
    "stanchion_workflow_run_lock_abandoned_total",
    "stanchion_scheduler_job_lock_abandoned_total",
    "stanchion_run_lock_contended_total",
    "stanchion_run_lock_wait_seconds",
    "stanchion_run_lock_held_seconds",
    "stanchion_lock_busy_retries_total",
    "stanchion_lock_busy_retry_burst",
    "stanchion_lease_renew_errors_total",
    "stanchion_lease_release_errors_total",
    "stanchion_bus_pending_messages",
    "stanchion_duplicate_completions_total",
    "stanchion_duplicate_publishes_total",
    "stanchion_commit_conflicts_total",
    "stanchion_slot_drift_total",
    "stanchion_runs_active",
    "stanchion_escalation_level",
)


async def test_b11_every_promised_metric_is_there(caller: Caller) -> None:
    signals = await read_signals(caller)
    # A counter's family has its name without the suffix.
    assert {name.removesuffix("_total") for name in PROMISED} <= signals.names


async def test_a10_and_b7_decisions_are_counted_by_tenant_workflow_and_outcome(
    caller: Caller,
) -> None:
    await caller.apply("hold", HOLD)
    await caller.configure(max_concurrent_runs=2)
    before = await read_signals(caller)
    first = await caller.start("hold", key="one")
    await caller.start("hold", key="one")
    await caller.start("hold", {"n": 1}, key="one")
    await caller.starts("hold", 9)
    after = await read_signals(caller)
    assert after.labels_of(DECISIONS) == {frozenset({"tenant", "workflow", "outcome"})}
    moved = {
        outcome: after.of_tenant(DECISIONS, caller.tenant, outcome=outcome)
        - before.of_tenant(DECISIONS, caller.tenant, outcome=outcome)
        for outcome in ("admitted", "replayed", "mismatch", "full")
    }
    assert moved == {"admitted": 2, "replayed": 1, "mismatch": 1, "full": 8}
    starts = {"endpoint": "start"}
    waited = [each.of_tenant(WAIT_COUNT, caller.tenant, **starts) for each in (before, after)]
    assert waited[1] - waited[0] == 12

    await caller.cancel(first.run_id)
    await caller.call("POST", f"/v1/runs/{first.run_id}/rerun", {})
    last = await read_signals(caller)
    reruns = {"endpoint": "rerun"}
    waited = [each.of_tenant(WAIT_COUNT, caller.tenant, **reruns) for each in (before, last)]
    assert waited[1] - waited[0] == 1


@ON_TWO
async def test_a10_a_refusal_by_the_gate_is_counted_by_its_code(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    await caller.configure(admission={"strategy": "lock"})
    await caller.hold(f"admission/{caller.tenant}")
    before = await read_signals(caller)
    assert (await caller.start("hold")).status == 503
    after = await read_signals(caller)
    busy = [
        each.of_tenant(DECISIONS, caller.tenant, outcome="gate_busy") for each in (before, after)
    ]
    assert busy[1] - busy[0] == 1


@ON_TWO
async def test_active_runs_are_shown_by_tenant(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    run_id = (await caller.start("hold")).run_id
    await until(partial(_shows, caller, 1))
    await caller.cancel(run_id)
    await until(partial(_shows, caller, 0))


async def _shows(caller: Caller, count: int) -> bool:
    """A gauge may be a look behind. A tenant that came late is among the others."""
    signals = await read_signals(caller)
    shown = signals.sum("stanchion_runs_active", tenant=caller.tenant)
    others = signals.sum("stanchion_runs_active", tenant="other")
    # Every replica shows what the store has.
    return (shown >= count or others >= count) if count else shown == 0


async def _moved(caller: Caller, before: Signals, name: str, count: int) -> bool:
    return (await read_signals(caller)).sum(name) - before.sum(name) >= count


async def test_b9_b10_a_busy_run_is_tried_again_and_nothing_is_lost(caller: Caller) -> None:
    topic = f"{caller.tenant}.work"
    await caller.apply("work", one_job(topic))
    before = await read_signals(caller)
    run_id = (await caller.start("work")).run_id
    worker = Worker(caller, topic)
    job = await worker.one()
    lock = f"run/{run_id}"
    await caller.hold(lock)
    # Accepted means durable, whoever holds the run.
    await worker.finish(job, "good")
    await until(partial(_moved, caller, before, RETRIES, 3))
    assert (await caller.run(run_id))["status"] == "running"
    after = await read_signals(caller)
    contended = "stanchion_run_lock_contended_total"
    assert after.sum(contended) - before.sum(contended) >= 3
    await caller.let_go(lock)
    since = time.monotonic()
    run = await caller.finished(run_id)
    assert time.monotonic() - since < 0.5 + 0.2 + 1.0
    assert (run["status"], run["output"]) == ("succeeded", {"work": "good"})
    assert await caller.dead_letters() == []


async def test_b9_a_decision_on_a_busy_run_is_recorded_and_carried_out(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    run_id = (await caller.start("hold")).run_id
    await caller.hold(f"run/{run_id}")
    recorded = await caller.approve(run_id, "gate")
    assert recorded.status == 202, recorded.text
    assert recorded.body["applied"] is False
    await caller.let_go(f"run/{run_id}")
    assert (await caller.finished(run_id))["status"] == "succeeded"
    conflicting = await caller.reject(run_id, "gate")
    assert conflicting.verdict == (409, "conflict")


@ON_SQLITE
async def test_b9_the_rhythm_of_busy_retries_can_be_fixed(
    caller: Caller, settings_kept: None
) -> None:
    del settings_kept
    answer = await caller.patch_settings({"lock_busy": {"kind": "fixed", "delay_ms": 50}})
    assert answer.status == 422, "the jitter that is still there does not fit"
    patch = {"lock_busy": {"kind": "fixed", "delay_ms": 50, "jitter_ms": 0}}
    answer = await caller.patch_settings(patch)
    assert answer.status == 200, answer.text
    await caller.apply("hold", HOLD)
    run_id = (await caller.start("hold")).run_id
    await caller.hold(f"run/{run_id}")
    before = await read_signals(caller)
    since = time.monotonic()
    assert (await caller.approve(run_id, "gate")).status == 202
    await until(partial(_moved, caller, before, RETRIES, 10))
    # Ten tries at the default delay would take three seconds and more.
    assert 10 * 0.05 * 0.8 < time.monotonic() - since < 2.5
    await caller.let_go(f"run/{run_id}")
    await caller.finished(run_id)


async def test_c10_a_repeated_completion_is_counted(caller: Caller) -> None:
    topic = f"{caller.tenant}.work"
    await caller.apply("work", one_job(topic))
    await caller.start("work")
    worker = Worker(caller, topic)
    job = await worker.one()
    before = await read_signals(caller)
    await worker.finish(job)
    await worker.finish(job)
    after = await read_signals(caller)
    name = "stanchion_duplicate_completions_total"
    assert after.sum(name) - before.sum(name) >= 1
    assert (await worker.send(success(job)))["accepted"] == [job["job_id"]]
