"""Whole workflows, from the gate to their end, through a store and the core alone."""

from __future__ import annotations

import asyncio

import msgspec

from stanchion.core import invariants
from stanchion.core.events import Approved, CancelRequested
from stanchion.core.json_value import JsonValue
from stanchion.core.model import (
    Failure,
    JobId,
    RunId,
    RunStatus,
    StepId,
    StepStatus,
    Topic,
    WorkflowId,
)
from stanchion.core.plan import Plan
from stanchion.core.retry import Fixed
from stanchion.core.workflow import (
    ApprovalSpec,
    DelaySpec,
    ForEachSpec,
    ForEachWorkflowSpec,
    JobSpec,
    OnFailure,
    RetrySpec,
    SubworkflowSpec,
    Workflow,
)
from stanchion.ports.records import CommitConflict, Committed, Result, Tenant
from stanchion.ports.store import Store
from tests.contract.builders import (
    ACME,
    FOR_EACH,
    ONE_JOB,
    accept,
    advance,
    lease,
    lease_one,
    loaded,
    planned,
    result_of,
    start,
    workflow,
)
from tests.contract.harness import Harness

_RENDER = workflow("render", draw=JobSpec(topic=Topic("agent.draw"), input="${input.text}"))
_RESEARCH = Workflow(
    id=WorkflowId("research"),
    steps={
        StepId("plan"): JobSpec(topic=Topic("agent.plan"), input={"q": "${input.question}"}),
        StepId("search"): ForEachSpec(
            needs=(StepId("plan"),),
            topic=Topic("agent.search"),
            for_each="${steps.plan.output.queries}",
            input={"q": "${item}"},
        ),
        StepId("cool"): DelaySpec(needs=(StepId("search"),), delay_s=0.05),
        StepId("review"): ApprovalSpec(needs=(StepId("cool"),)),
        StepId("publish"): SubworkflowSpec(
            needs=(StepId("review"),),
            workflow=_RENDER.id,
            input={"text": "${steps.search.output}"},
        ),
    },
    output="${steps.publish.output}",
)


async def test_a_workflow_of_every_kind_of_step_runs_to_its_end(
    store: Store, harness: Harness
) -> None:
    plan = planned(_RESEARCH, {_RENDER.id: _RENDER})
    run_id = await start(store, plan, run_input={"question": "why?"})

    await _do(store, plan, "agent.plan", {"q": "why?"}, {"queries": ["a", "b", "c"]})
    for query in ("a", "b", "c"):
        await _do(store, plan, "agent.search", {"q": query}, f"found {query}")
    assert (await loaded(store, run_id)).run.status is RunStatus.WAITING

    await harness.pass_time(100)
    assert await store.fire_timers(limit=10) == (run_id,)
    await _advance(store, plan, run_id)

    await store.post(
        run_id, Approved(step_id=StepId("review"), actor="reviewer"), entry_id="decision"
    )
    await _advance(store, plan, run_id)

    found: JsonValue = ["found a", "found b", "found c"]
    await _do(store, plan, "agent.draw", found, "a picture")

    run = (await loaded(store, run_id)).run
    assert run.status is RunStatus.SUCCEEDED
    assert run.output == {"draw": "a picture"}
    assert await store.active_runs(ACME) == 0
    assert await store.outbox_size() == 0
    assert await store.ready_topics() == {}
    await harness.pass_time(1)
    assert await store.fire_timers(limit=10) == ()
    assert (await store.audit_slots(limit=1_000)).drifts == ()
    told = [line.what for line in (await store.timeline(run_id)).items]
    assert told[0] == "run_started"
    assert told[-1] == "run_succeeded"


async def test_a_failed_job_is_tried_again_after_its_pause(store: Store, harness: Harness) -> None:
    spec = JobSpec(topic=Topic("work"), retry=RetrySpec(max_attempts=2, backoff=Fixed(40)))
    plan = planned(workflow("flaky", step=spec))
    run_id = await start(store, plan)
    first = await lease_one(store)
    await store.accept(
        [
            Result(
                job_id=first.job.id,
                fence=first.fence,
                worker_id="w",
                error=Failure("boom", "try again"),
            )
        ]
    )
    await _advance(store, plan, run_id)
    assert await lease(store) == ()
    await harness.pass_time(50)
    await store.fire_timers(limit=10)
    await _advance(store, plan, run_id)
    second = await lease_one(store)
    assert second.job.id == JobId(f"{run_id}:step@2")
    await accept(store, second)
    await _advance(store, plan, run_id)
    assert (await loaded(store, run_id)).run.status is RunStatus.SUCCEEDED


async def test_items_go_out_two_at_a_time_and_failed_ones_are_null(store: Store) -> None:
    spec = ForEachSpec(
        topic=Topic("work"),
        for_each="${input.items}",
        input={"n": "${item}"},
        parallel=2,
        on_item_failure=OnFailure.CONTINUE,
    )
    plan = planned(workflow("two", each=spec))
    run_id = await start(store, plan, run_input={"items": [0, 1, 2, 3, 4]})
    seen: list[JsonValue] = []
    while leased := await lease(store, max_jobs=10):
        assert len(leased) <= 2
        for each in leased:
            seen.append(each.job.input)
            odd = each.job.item in {1, 3}
            error = Failure("odd", "is odd") if odd else None
            await store.accept([msgspec.structs.replace(result_of(each, "even"), error=error)])
            await _advance(store, plan, run_id)
    assert seen == [{"n": number} for number in range(5)]
    run = (await loaded(store, run_id)).run
    assert (run.status, run.output) == (
        RunStatus.SUCCEEDED,
        {"each": ["even", None, "even", None, "even"]},
    )
    assert [failed.index for failed in run.step(StepId("each")).failures] == [1, 3]


async def test_items_with_a_workflow_keep_their_steps_in_themselves(store: Store) -> None:
    inner = workflow(
        "inner",
        a=JobSpec(topic=Topic("work"), input="${input.n}", timeout_s=60),
        b=JobSpec(topic=Topic("work"), needs=(StepId("a"),), input="${steps.a.output}"),
    )
    spec = ForEachWorkflowSpec(
        for_each="${input.items}", workflow=inner.id, input={"n": "${item}"}, parallel=2
    )
    plan = planned(workflow("two", each=spec), {inner.id: inner})
    run_id = await start(store, plan, run_input={"items": [0, 1, 2]})
    seen: list[tuple[str, int | None]] = []
    while leased := await lease(store, max_jobs=10):
        assert len(leased) <= 2
        for each in leased:
            seen.append((each.job.step_id, each.job.item))
            assert isinstance(each.job.input, int)
            await store.accept([result_of(each, each.job.input + 10)])
            await _advance(store, plan, run_id)
            items = await store.load_items(run_id, {StepId("each"): range(3)})
            assert len(items) == 3
    assert sorted(seen) == [(f"each.{step}", index) for step in "ab" for index in range(3)]
    run = (await loaded(store, run_id)).run
    assert run.output == {"each": [{"b": 20}, {"b": 21}, {"b": 22}]}
    assert {*run.steps} == {"each"}


async def test_a_cancel_ends_the_run_and_its_jobs_in_one_commit(store: Store) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": list(range(5))})
    leased = await lease(store, max_jobs=2)
    await store.post(run_id, CancelRequested(actor="someone"), entry_id="cancel")
    await _advance(store, FOR_EACH, run_id)
    run = (await loaded(store, run_id)).run
    assert run.status is RunStatus.CANCELLED
    assert run.step(StepId("each")).status is StepStatus.CANCELLED
    assert await store.active_runs(ACME) == 0
    assert await store.ready_topics() == {}
    renewals = await store.renew_jobs([], ttl_ms=1)
    assert renewals.renewed == ()
    answers = await store.accept([result_of(each) for each in leased])
    assert all(type(answer).__name__ == "ResultRefused" for answer in answers)


async def test_a_worker_that_died_costs_a_delivery_and_no_attempt(
    store: Store, harness: Harness
) -> None:
    run_id = await start(store)
    await lease_one(store, ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    await store.expire_jobs(limit=10, max_deliveries=5)
    await accept(store, await lease_one(store))
    await _advance(store, ONE_JOB, run_id)
    run = (await loaded(store, run_id)).run
    assert run.status is RunStatus.SUCCEEDED
    assert run.step(StepId("step")).attempt == 1


async def test_many_replicas_advance_one_run_together(store: Store) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": list(range(40))})

    async def replica(number: int) -> int:
        conflicts = 0
        while leased := await lease(store, max_jobs=2, worker_id=f"worker-{number}"):
            await store.accept([result_of(each, each.job.item) for each in leased])
            while isinstance(await advance(store, FOR_EACH, run_id), CommitConflict):
                conflicts += 1
        return conflicts

    await asyncio.gather(*(replica(number) for number in range(8)))
    run = (await loaded(store, run_id)).run
    assert run.status is RunStatus.SUCCEEDED
    assert run.output == {"each": list(range(40))}
    assert await store.active_runs(ACME) == 0
    assert await store.outbox_size() == 0


async def test_many_runs_of_a_capped_tenant_all_get_their_turn(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=3))
    finished = 0
    for _ in range(4):
        for _ in range(3):
            await start(store)
        for leased in await lease(store, max_jobs=3):
            await accept(store, leased)
            await _advance(store, ONE_JOB, leased.job.run_id)
            finished += 1
    assert finished == 12
    assert await store.active_runs(ACME) == 0


async def _do(store: Store, plan: Plan, topic: str, expected: JsonValue, output: JsonValue) -> None:
    """Be the worker of one job, and the replica that takes its result."""
    leased = await lease_one(store, topic)
    assert leased.job.input == expected
    await accept(store, leased, output)
    await _advance(store, plan, leased.job.run_id)


async def _advance(store: Store, plan: Plan, run_id: RunId) -> None:
    assert isinstance(await advance(store, plan, run_id), Committed)
    assert invariants.of_run(plan, (await loaded(store, run_id)).run) == []
