"""Whole workflows through whole engines, on one replica and on two, with the same history."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from stanchion.core.json_value import JsonValue
from stanchion.core.model import (
    Failure,
    RunStatus,
    StepId,
    StepStatus,
    Topic,
    WorkflowId,
    WorkflowSource,
    shared_name,
)
from stanchion.core.rerun import RerunOptions
from stanchion.core.retry import Fixed
from stanchion.core.workflow import (
    ApprovalSpec,
    DelaySpec,
    ForEachSpec,
    JobSpec,
    RetrySpec,
    SubworkflowSpec,
    Workflow,
)
from stanchion.ports.records import LeasedJob, Loaded
from stanchion.services.gate_answers import RunStarted
from stanchion.services.inbox import RunChange
from tests.services.stage import ACME, World, job, under_lease, virtual, workflow

RENDER = workflow("render", draw=JobSpec(topic=Topic("draw"), input="${input.text}"))
RESEARCH = Workflow(
    id=WorkflowId("research"),
    steps={
        StepId("plan"): JobSpec(
            topic=Topic("plan"),
            input={"q": "${input.question}"},
            retry=RetrySpec(max_attempts=2, backoff=Fixed(2_000)),
        ),
        StepId("search"): ForEachSpec(
            needs=(StepId("plan"),),
            topic=Topic("search"),
            for_each="${steps.plan.output.queries}",
            input={"q": "${item}"},
        ),
        StepId("cool"): DelaySpec(needs=(StepId("search"),), delay_s=5),
        StepId("doubt"): JobSpec(
            topic=Topic("doubt"), needs=(StepId("cool"),), when="input.doubt == true"
        ),
        StepId("review"): ApprovalSpec(needs=(StepId("cool"), StepId("doubt"))),
        StepId("publish"): SubworkflowSpec(
            needs=(StepId("review"),),
            workflow=RENDER.id,
            input={"text": "${steps.search.output}"},
        ),
    },
    output="${steps.publish.output}",
)

HISTORY = [
    "run_started - caller",
    "job_dispatched plan caller",
    "job_failed plan plan-worker",
    "job_dispatched plan system",
    "step_succeeded plan plan-worker",
    "items_started search plan-worker",
    "job_dispatched search[0] plan-worker",
    "job_dispatched search[1] plan-worker",
    "job_dispatched search[2] plan-worker",
    "item_succeeded search[0] search-worker",
    "item_succeeded search[1] search-worker",
    "item_succeeded search[2] search-worker",
    "step_succeeded search search-worker",
    "delay_started cool search-worker",
    "step_succeeded cool system",
    "step_skipped doubt system",
    "approval_requested review system",
    "step_succeeded review reviewer",
    "subworkflow_started publish reviewer",
    "job_dispatched publish.draw reviewer",
    "step_succeeded publish.draw draw-worker",
    "step_succeeded publish draw-worker",
    "run_succeeded - draw-worker",
]


def plan(leased: LeasedJob) -> JsonValue | Failure:
    if leased.job.attempt == 1:
        return Failure("boom", "try again")
    return {"queries": ["a", "b", "c"]}


@pytest.mark.parametrize("replicas", [1, 2])
@virtual
async def test_a_workflow_of_every_kind_of_step_has_the_same_history_on_any_replicas(
    world: World, replicas: int
) -> None:
    engines = [world.add() for _ in range(replicas)]
    one, other = engines[0], engines[-1]
    await world.define(RENDER, RESEARCH)
    world.work(one, "plan", plan)
    world.work(other, "search", lambda leased: f"found {leased.job.input}")
    world.work(one, "draw", lambda leased: leased.job.input)

    run_id = await world.start(one, "research", {"question": "why?", "doubt": False})
    await asyncio.sleep(10)
    waiting = await world.run(run_id)
    assert waiting.status is RunStatus.WAITING
    assert waiting.step(StepId("review")).status is StepStatus.WAITING
    assert await world.store.load(run_id) == Loaded(waiting, inbox=())
    assert await world.store.outbox_size() == 0
    decided = await other.inbox.decide(
        run_id, StepId("review"), approve=True, comment=None, actor="reviewer"
    )
    assert decided == RunChange(run_id, RunStatus.RUNNING, applied=True)

    assert await world.ended(run_id) == "succeeded"
    found = [f"found {{'q': '{query}'}}" for query in "abc"]
    assert (await world.run(run_id)).output == {"draw": found}
    assert await world.told(run_id) == HISTORY
    await world.assert_nothing_left()
    finished = [each.metric("runs_finished_total", status="succeeded") for each in engines]
    assert sum(finished) == 1


@virtual
async def test_a_failed_attempt_waits_for_its_pause_and_no_longer(world: World) -> None:
    one = world.add()
    await world.define(RENDER, RESEARCH)
    await world.start(one, "research", {"question": "why?", "doubt": False})
    first, *_ = await world.lease(one, "plan")
    await world.report(one, first, output=Failure("boom", "try again"))
    failed_at = world.clock.now()
    second, *_ = await world.lease(one, "plan")
    assert second.job.attempt == 2
    # The pause of two seconds, and one look of whoever fires timers.
    assert 2_000 <= world.clock.now() - failed_at <= 2_300


@virtual
async def test_a_step_that_is_out_of_time_ends_its_run_and_its_worker_comes_too_late(
    world: World,
) -> None:
    one = world.add()
    spec = JobSpec(topic=Topic("slow"), timeout_s=3)
    await world.define(workflow("slow", step=spec))
    run_id = await world.start(one, "slow")
    leased = await world.lease(one, "slow")
    assert await world.ended(run_id, within_s=4) == "failed"
    error = (await world.run(run_id)).error
    assert error is not None
    assert error.code == "step_timeout"
    await world.report(one, *leased)
    assert one.metric("results_rejected_total", code="stale_fence") == 1
    await world.assert_nothing_left()


@virtual
async def test_a_run_keeps_the_versions_that_it_began_with(world: World) -> None:
    one, two = world.add(), world.add()
    inner = workflow("inner", draw=job("old"))
    outer = Workflow(
        id=WorkflowId("outer"),
        steps={
            StepId("first"): job("work"),
            StepId("inner"): SubworkflowSpec(needs=(StepId("first"),), workflow=inner.id),
        },
    )
    await world.define(inner, outer)
    old = await world.start(one, "outer")
    leased = await world.lease(one, "work")
    await world.define(
        workflow("inner", draw=job("new")), workflow("outer", first=job("work"), last=job("new"))
    )
    # The second replica has never seen the first versions.
    await world.report(two, *leased)
    assert [each.job.step_id for each in await world.lease(two, "old")] == ["inner.draw"]
    new = await world.start(one, "outer")
    run = await world.run(new)
    assert (run.workflow_version, (await world.run(old)).workflow_version) == (2, 1)
    assert [each.job.run_id for each in await world.lease(two, "new")] == [new]


@virtual
async def test_a_single_job_is_a_run_of_one_step_without_a_slot(world: World) -> None:
    one, two = world.add(), world.add()
    answer = await one.services.gate.submit(ACME, Topic("work"), {"q": 1}, key=None, actor="caller")
    assert isinstance(answer, RunStarted)
    assert await world.store.active_runs(ACME) == 0
    world.work(two, "work", lambda leased: [leased.job.input])
    assert await world.ended(answer.run_id) == "succeeded"
    assert (await world.run(answer.run_id)).output == {"job": [{"q": 1}]}
    await world.assert_nothing_left()


# ── Several events of one run ────────────────────────────────────────────────────────────────────

FAN = workflow(
    "fan", each=ForEachSpec(for_each="${input.items}", topic=Topic("work"), input="${item}")
)


@virtual
async def test_results_that_arrive_together_are_applied_in_one_hold(world: World) -> None:
    one = world.add()
    await world.define(under_lease(FAN))
    run_id = await world.start(one, "fan", {"items": list(range(20))})
    jobs = await world.lease(one, "work", max_jobs=20)
    answers = await world.report(one, *jobs)
    assert await world.ended(run_id) == "succeeded"
    assert one.locks.calls["acquire"] == 1
    assert one.store.calls["commit"] == 1
    assert len({answer.job_id for answer in answers}) == 20
    await world.assert_nothing_left()


@virtual
async def test_results_that_arrive_during_a_hold_join_it(world: World) -> None:
    one = world.add()
    await world.define(FAN)
    run_id = await world.start(one, "fan", {"items": list(range(20))})
    jobs = await world.lease(one, "work", max_jobs=20)
    # Each comes by itself, a little after the other, while the first is being applied.
    one.store.each_way_s = 0.005
    reports = []
    for leased in jobs:
        reports.append(asyncio.create_task(world.report(one, leased)))
        await asyncio.sleep(0.001)
    await asyncio.gather(*reports)
    # Not when the outbox row is due: at once.
    assert await world.ended(run_id, within_s=0.1) == "succeeded"
    assert one.locks.calls["acquire"] <= 2
    assert one.store.calls["commit"] < 20
    told = Counter(await world.told(run_id))
    assert [told[f"item_succeeded each[{item}] work-worker"] for item in range(20)] == [1] * 20
    assert (await world.run(run_id)).output == {"each": ["done"] * 20}
    await world.assert_nothing_left()


@virtual
async def test_a_result_that_is_sent_again_counts_as_a_duplicate_and_changes_nothing(
    world: World,
) -> None:
    one = world.add()
    await world.define(workflow("two", first=job("work"), second=job("work", "first")))
    run_id = await world.start(one, "two")
    leased = await world.lease(one, "work")
    (first,) = await world.report(one, *leased)
    await asyncio.sleep(1)
    (again,) = await world.report(one, *leased)
    assert (first.job_id, again.job_id) == (leased[0].job.id,) * 2
    assert one.metric("duplicate_completions_total") == 1
    assert len(world.completions) == 1
    world.work(one, "work")
    assert await world.ended(run_id) == "succeeded"
    assert len(world.completions) == 2


@virtual
async def test_two_replicas_with_results_of_one_run_apply_each_of_them_once(world: World) -> None:
    one, two = world.add(), world.add()
    await world.define(FAN)
    run_id = await world.start(one, "fan", {"items": list(range(40))})
    for replica in (one, two, one, two):
        world.work(replica, "work", max_jobs=3)
    assert await world.ended(run_id, within_s=20) == "succeeded"
    told = Counter(await world.told(run_id))
    assert [told[f"item_succeeded each[{item}] work-worker"] for item in range(40)] == [1] * 40
    await asyncio.sleep(0.1)  # the last answers reach their workers
    assert len(world.completions) == len({each.job_id for each in world.completions}) == 40
    await world.assert_nothing_left(ACME)


@virtual
async def test_a_run_keeps_its_shared_version_whatever_is_applied_later(world: World) -> None:
    one, other = world.add(), world.add()

    async def share(suffix: str) -> None:
        inner = workflow("inner", draw=job(f"draw{suffix}"))
        sub = SubworkflowSpec(workflow=inner.id, needs=(StepId("plan"),))
        await world.store.put_shared_workflow(inner)
        await world.store.put_shared_workflow(workflow("outer", plan=job(f"plan{suffix}"), sub=sub))

    await share("")
    run_id = await world.start(one, "outer", {})
    await world.define(workflow("inner", own=job("own")))
    await share("-newer")
    # Its cached plan is older than the store's, which notices that.
    second = await world.run(await world.start(one, "outer", {}))
    assert (second.workflow_source, second.workflow_version) == (WorkflowSource.SHARED, 2)
    assert second.uses == {shared_name(WorkflowId("inner")): 2}
    await world.define(workflow("outer", own=job("own")))
    one.kill()
    for topic in ("plan", "draw"):
        world.work(other, topic, lambda leased: leased.job.topic)
    assert await world.ended(run_id) == "succeeded"
    assert (await world.run(run_id)).output == {"sub": {"draw": "draw"}}
    again = await other.services.gate.reruns.rerun(
        ACME, run_id, RerunOptions(), key=None, actor="me"
    )
    assert isinstance(again, RunStarted)
    assert await world.ended(again.run_id) == "succeeded"
    # The next start takes what is in force now: on both replicas the tenant's own workflow.
    newest = await world.run(await world.start(other, "outer", {}))
    assert (newest.workflow_source, newest.workflow_version) == (WorkflowSource.OWN, 1)
