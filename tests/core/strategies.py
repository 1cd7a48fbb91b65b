"""Random workflows that are valid, and worlds in which their jobs end in every way."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
from hypothesis import strategies as st

from stanchion.core.events import Event, Started
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.model import ItemKey, Job, StepId, Topic, WorkflowId
from stanchion.core.retry import Exponential, Fixed, sample_from
from stanchion.core.workflow import (
    ApprovalSpec,
    DelaySpec,
    ForEachSpec,
    ForEachWorkflowSpec,
    JobSpec,
    OnDecisionTimeout,
    OnFailure,
    RetrySpec,
    StepSpec,
    SubworkflowSpec,
    Workflow,
)
from tests.core.world import World, died, failed, succeeded

CHILDREN = (WorkflowId("child"), WorkflowId("grandchild"))
OF_ITEMS = (WorkflowId("item"), WorkflowId("inner"))
"""Workflows that items may have: without approvals and for-each steps."""

RETRIES = st.sampled_from(
    [
        RetrySpec(),
        RetrySpec(max_attempts=2, backoff=Fixed(10)),
        RetrySpec(max_attempts=3, backoff=Exponential(base_ms=100, cap_ms=1_000)),
    ]
)
TIMEOUTS = st.sampled_from([None, None, 5.0])
ON_FAILURE = st.sampled_from([OnFailure.FAIL, OnFailure.FAIL, OnFailure.CONTINUE])


@st.composite
def families(
    draw: st.DrawFn, *, timeouts: bool = True
) -> tuple[Workflow, dict[WorkflowId, Workflow]]:
    """A workflow and those it contains."""
    grandchild = draw(_workflows(CHILDREN[1], (), timeouts=timeouts, steps_max=3))
    child = draw(_workflows(CHILDREN[0], CHILDREN[1:], timeouts=timeouts, steps_max=4))
    parent = draw(_workflows(WorkflowId("parent"), CHILDREN, timeouts=timeouts, steps_max=7))
    inner = draw(_workflows(OF_ITEMS[1], (), timeouts=timeouts, steps_max=2, of_items=True))
    item = draw(
        _workflows(OF_ITEMS[0], OF_ITEMS[1:], timeouts=timeouts, steps_max=3, of_items=True)
    )
    if timeouts and draw(st.booleans()):
        item = msgspec.structs.replace(item, timeout_s=4.0)
    others = (child, grandchild, item, inner)
    return parent, {each.id: each for each in others}


@st.composite
def _workflows(
    draw: st.DrawFn,
    workflow_id: WorkflowId,
    children: tuple[WorkflowId, ...],
    *,
    timeouts: bool,
    steps_max: int,
    of_items: bool = False,
) -> Workflow:
    specs: dict[StepId, StepSpec] = {}
    for number in range(draw(st.integers(1, steps_max))):
        needs = (
            draw(st.lists(st.sampled_from(list(specs)), unique=True, max_size=3)) if specs else []
        )
        specs[StepId(f"s{number}")] = draw(
            _specs(tuple(needs), children, timeouts=timeouts, of_items=of_items)
        )
    output: Any = draw(st.sampled_from([{"all": "${steps.s0.status}"}, "${steps.s0.output}", 7]))
    explicit: dict[str, Any] = {"output": output} if draw(st.booleans()) else {}
    return Workflow(id=workflow_id, steps=specs, **explicit)


@st.composite
def _specs(
    draw: st.DrawFn,
    needs: tuple[StepId, ...],
    children: tuple[WorkflowId, ...],
    *,
    timeouts: bool,
    of_items: bool,
) -> StepSpec:
    conditions = [None, None, None, "true", "input.flag", "size(input.list) > 1"]
    if needs:
        conditions += [
            f"steps.{needs[0]}.status == 'succeeded'",
            f"steps.{needs[0]}.output.n > 0",
            f"steps.{needs[0]}.failures.all(each, each.index >= 0)",
            f"steps.{needs[0]}.error == null || steps.{needs[0]}.error.message != ''",
        ]
    when = draw(st.sampled_from(conditions))
    timeout_s = draw(TIMEOUTS) if timeouts else None
    on_failure = draw(ON_FAILURE)
    kinds = ["job", "job", "delay", *(["sub"] if children else [])]
    if not of_items:
        kinds += ["for_each", "for_each_workflow", "approval"]
    match draw(st.sampled_from(kinds)):
        case "job":
            sources = ["${input.flag}", *(f"${{steps.{need}.output}}" for need in needs[:1])]
            return JobSpec(
                needs=needs,
                when=when,
                on_failure=on_failure,
                topic=Topic("work"),
                input={"value": draw(st.sampled_from(sources))},
                retry=draw(RETRIES),
                timeout_s=timeout_s,
            )
        case "for_each":
            lists = ["${input.list}", *(f"${{steps.{need}.output.list}}" for need in needs[:1])]
            return ForEachSpec(
                needs=needs,
                when=when,
                on_failure=on_failure,
                for_each=draw(st.sampled_from(lists)),
                on_item_failure=draw(ON_FAILURE),
                parallel=draw(st.sampled_from([None, None, 1, 2])),
                topic=Topic("work"),
                input={"value": "${item}", "at": "${index}"},
                retry=draw(RETRIES),
                timeout_s=timeout_s,
            )
        case "for_each_workflow":
            lists = ["${input.list}", *(f"${{steps.{need}.output.list}}" for need in needs[:1])]
            inputs: list[JsonValue] = [{"flag": "${index > 0}", "list": ["${item}"]}, "${input}"]
            return ForEachWorkflowSpec(
                needs=needs,
                when=when,
                on_failure=on_failure,
                for_each=draw(st.sampled_from(lists)),
                on_item_failure=draw(ON_FAILURE),
                parallel=draw(st.sampled_from([None, None, 1, 2])),
                workflow=OF_ITEMS[0],
                input=draw(st.sampled_from(inputs)),
                timeout_s=timeout_s,
            )
        case "approval":
            messages = [
                None,
                "Now?",
                "${input.list}",
                *(f"${{steps.{need}.output.n}}" for need in needs),
            ]
            return ApprovalSpec(
                needs=needs,
                when=when,
                on_failure=on_failure,
                timeout_s=timeout_s,
                message=draw(st.sampled_from(messages)),
                decision_timeout_s=draw(TIMEOUTS) if timeouts else None,
                on_timeout=draw(st.sampled_from([None, *OnDecisionTimeout])),
                not_by_starter=draw(st.booleans()),
            )
        case "delay":
            return DelaySpec(
                needs=needs,
                when=when,
                on_failure=on_failure,
                delay_s=draw(st.sampled_from([0.0, 2.5])),
            )
        case _:
            return SubworkflowSpec(
                needs=needs,
                when=when,
                on_failure=on_failure,
                workflow=draw(st.sampled_from(children)),
                input={"flag": "${input.flag}", "list": "${input.list}"},
                timeout_s=timeout_s,
            )


INPUTS: st.SearchStrategy[JsonObject] = st.fixed_dictionaries(
    {"flag": st.booleans(), "list": st.lists(st.integers(0, 9), max_size=4)}
)


def result_of(job: Job, seed: int) -> Event:
    """How a job ends: fixed by the seed and the job alone, never by when it is asked."""
    chance = sample_from(seed, job.id, job.dispatch)
    if chance < 0.70:
        size = int(chance * 1000) % 3
        output: JsonValue = {"n": size, "list": list(range(size))}
        return succeeded(job, output)
    if chance < 0.90:
        return failed(job, f"attempt {job.attempt}")
    if chance < 0.95:
        return failed(job, "final", final=True)
    return died(job)


def step_forward(world: World, chance: Random, seed: int, *, timeouts: bool) -> bool:
    """Let one thing happen that can happen now; ``False`` if nothing can.

    A timer that guards (a timeout) fires only if asked for, as the run may end well before it.
    """
    guards = {"run_timeout", "step_timeout", "decision"}
    timers = [timer for timer in world.timers if timeouts or timer.kind not in guards]
    moves: list[tuple[str, Any]] = [
        *(("job", job) for job in world.jobs.values()),
        *(
            ("timer", timer)
            for timer in timers
            if timer.kind not in guards or chance.random() < 0.1
        ),
        *(("decide", step_id) for step_id in world.undecided()),
        *(("replay", job) for job in world.dead.values() if _can_replay(world, job)),
    ]
    if not moves:
        return False
    kind, what = chance.choice(moves)
    match kind:
        case "job":
            world.feed(result_of(what, seed))
        case "timer":
            world.fire(what)
        case "replay":
            world.replay(what.step_id, what.item)
        case _:
            if sample_from(seed, what) < 0.8:
                world.approve(what, data={"n": seed})
            else:
                world.reject(what, data=seed)
    return True


def _can_replay(world: World, job: Job) -> bool:
    around = world.plan.item_steps.get(job.step_id)
    if around is None:
        return not world.run.status.is_finished and world.run.step(job.step_id).status.is_active
    assert job.item is not None
    item = world.items[ItemKey(around, job.item)]
    return (
        world.run.step(around).status.is_active
        and item.status.is_active
        and item.steps[job.step_id].status.is_active
    )


def drive(world: World, order: int, seed: int, *, timeouts: bool = False) -> None:
    """Let things happen, in an order of chance's choosing, until nothing more can."""
    chance = Random(order)
    if world.run.status == "pending":
        world.feed(Started())
    for _ in range(2_000):
        if not step_forward(world, chance, seed, timeouts=timeouts):
            return
    message = "the run does not come to rest"
    raise AssertionError(message)
