"""For-each steps with a workflow: every item has its steps for itself."""

from __future__ import annotations

from typing import Any

import pytest

from stanchion.core import limits
from stanchion.core.events import (
    AttemptSucceeded,
    CancelRequested,
    JobReturned,
    Started,
    Timer,
    TimerFired,
    TimerKind,
)
from stanchion.core.faults import WorkflowFaults
from stanchion.core.json_value import JsonValue
from stanchion.core.model import ItemKey, RunStatus, StepId, StepStatus, Topic, WorkflowId
from stanchion.core.plan import Plan, link
from stanchion.core.rerun import RerunOnly, RerunOptions, RerunRefused, items_to_keep, rerun
from stanchion.core.retry import Fixed
from stanchion.core.run import decide, items_to_read
from stanchion.core.steps import foreach
from stanchion.core.transition import DispatchJob, Ignored, RevokeJob
from stanchion.core.workflow import (
    ApprovalSpec,
    DelaySpec,
    ForEachSpec,
    ForEachWorkflowSpec,
    JobSpec,
    OnFailure,
    RetrySpec,
    StepSpec,
    SubworkflowSpec,
    Workflow,
)
from tests.core.world import START, World, pending_run, planned, succeeded

EACH = StepId("each")
INNER = WorkflowId("inner")


def job(*needs: str, **members: Any) -> JobSpec:  # noqa: ANN401 - any member of a job
    return JobSpec(topic=Topic("work"), needs=tuple(map(StepId, needs)), **members)


def inner(steps: dict[str, StepSpec] | None = None, **members: Any) -> Workflow:  # noqa: ANN401 - any member
    found = steps or {
        "draft": job(input={"n": "${input.n}"}),
        "check": job("draft", input="${steps.draft.output}"),
    }
    return Workflow(id=INNER, steps={StepId(name): each for name, each in found.items()}, **members)


def plan_of(
    workflow: Workflow,
    other: Workflow | None = None,
    **members: Any,  # noqa: ANN401 - any member
) -> Plan:
    members = {"input": {"n": "${item}", "i": "${index}"}, **members}
    spec = ForEachWorkflowSpec(for_each="${input.list}", workflow=INNER, **members)
    steps: dict[StepId, StepSpec] = {EACH: spec, StepId("end"): job("each")}
    others = {each.id: each for each in (workflow, other) if each is not None}
    return planned(Workflow(id=WorkflowId("w"), steps=steps), others)


def started(
    items: list[JsonValue],
    workflow: Workflow | None = None,
    **members: Any,  # noqa: ANN401 - any member
) -> World:
    return World.started(plan_of(workflow or inner(), **members), {"list": items})


def through(world: World, index: int, output: JsonValue = None) -> None:
    """An item from its first step to its end."""
    world.succeed("each.draft", f"d{index}", item=index)
    world.succeed("each.check", index if output is None else output, item=index)


def out(world: World) -> list[str]:
    return sorted(f"{each.step_id}[{each.item}]" for each in world.jobs.values())


def test_every_item_goes_through_the_workflow_and_outputs_keep_the_order() -> None:
    world = started(["a", "b", "c"])
    assert out(world) == ["each.draft[0]", "each.draft[1]", "each.draft[2]"]
    assert world.job("each.draft", 1).input == {"n": "b"}
    assert world.job("each.draft", 1).id == "r1:each.draft[1]@1"
    for index in (2, 0, 1):
        through(world, index)
    each = world.run.step(EACH)
    assert each.output == [{"check": 0}, {"check": 1}, {"check": 2}]
    assert world.job("each.check" if "each.check" in out(world) else "end").step_id == "end"
    lines = [(line.what, line.step, line.item) for line in world.timeline]
    assert ("step_succeeded", "each.draft", 2) in lines
    assert ("item_succeeded", "each", 2) in lines


def test_inner_state_lives_with_the_item_and_outputs_leave_it_at_its_end() -> None:
    world = started(["a"])
    world.succeed("each.draft", "long", item=0)
    key = ItemKey(EACH, 0)
    assert world.items[key].steps[StepId("each.draft")].output == "long"
    assert set(world.run.steps) == {EACH}
    world.succeed("each.check", "ok", item=0)
    item = world.items[key]
    assert (item.status, item.output) == (StepStatus.SUCCEEDED, {"check": "ok"})
    assert {state.output for state in item.steps.values()} == {None}


def test_no_more_items_than_parallel_are_out() -> None:
    world = started([0, 1, 2, 3], parallel=2)
    assert out(world) == ["each.draft[0]", "each.draft[1]"]
    world.succeed("each.draft", item=1)
    assert out(world) == ["each.check[1]", "each.draft[0]"]
    world.succeed("each.check", item=1)
    assert out(world) == ["each.draft[0]", "each.draft[2]"]
    for index in (0, 2, 3):
        through(world, index)
    assert world.run.step(EACH).status is StepStatus.SUCCEEDED


@pytest.mark.parametrize("policy", OnFailure)
def test_a_failed_item_fails_the_step_or_leaves_null(policy: OnFailure) -> None:
    world = started([0, 1], on_item_failure=policy)
    world.fail("each.draft", "no", item=0)
    through(world, 1)
    each = world.run.step(EACH)
    [failure] = each.failures
    assert (failure.index, failure.error.message, failure.error.step) == (0, "no", "each.draft")
    assert world.items[ItemKey(EACH, 0)].steps[StepId("each.check")].status == "cancelled"
    if policy is OnFailure.CONTINUE:
        assert each.output == [None, {"check": 1}]
    else:
        assert (each.status, each.error and each.error.code) == ("failed", "items_failed")


def test_retries_count_per_item() -> None:
    retry = RetrySpec(max_attempts=2, backoff=Fixed(delay_ms=10))
    world = started([0, 1], inner({"draft": job(retry=retry)}))
    world.fail("each.draft", item=0)
    assert world.items[ItemKey(EACH, 0)].status is StepStatus.WAITING
    timer = Timer(TimerKind.RETRY, StepId("each.draft"), 0, 1)
    world.fire(timer)
    assert world.job("each.draft", 0).id == "r1:each.draft[0]@2"
    world.fail("each.draft", item=0)
    assert world.items[ItemKey(EACH, 0)].status is StepStatus.FAILED
    assert world.job("each.draft", 1).attempt == 1


def test_a_time_limit_of_an_inner_step_ends_it_in_its_item_alone() -> None:
    world = started([0, 1], inner({"draft": job(timeout_s=5)}))
    change = world.fire(Timer(TimerKind.STEP_TIMEOUT, StepId("each.draft"), 0))
    assert [each.job_id for each in change.effects if isinstance(each, RevokeJob)] == [
        "r1:each.draft[0]@1"
    ]
    assert out(world) == ["each.draft[1]"]
    assert world.items[ItemKey(EACH, 0)].error is not None


@pytest.mark.parametrize("wait", ["job", "retry", "delay", "inside"])
def test_the_workflows_time_limit_is_that_of_each_item(wait: str) -> None:
    retry = RetrySpec(max_attempts=2, backoff=Fixed(delay_ms=10_000))
    steps: dict[str, dict[str, StepSpec]] = {
        "job": {"draft": job()},
        "retry": {"draft": job(retry=retry)},
        "delay": {"draft": DelaySpec(delay_s=9)},
        "inside": {"draft": SubworkflowSpec(workflow=WorkflowId("deep"), timeout_s=8)},
    }
    deep = Workflow(id=WorkflowId("deep"), steps={StepId("x"): job(timeout_s=7)})
    plan = plan_of(inner(steps[wait], timeout_s=3), deep)
    world = World.started(plan, {"list": [0, 1]})
    if wait == "retry":
        world.fail("each.draft", item=0)
    world.fire(Timer(TimerKind.STEP_TIMEOUT, EACH, 0))
    item = world.items[ItemKey(EACH, 0)]
    assert (item.status, item.error and item.error.code) == ("timed_out", "item_timeout")
    assert world.run.step(EACH).status.is_active
    world.feed(CancelRequested())
    assert (world.jobs, world.timers) == ({}, {})


def test_a_cancel_and_the_steps_own_time_limit_stop_every_item() -> None:
    world = started([0, 1, 2], timeout_s=60, parallel=2)
    world.succeed("each.draft", item=1)
    world.fire(Timer(TimerKind.STEP_TIMEOUT, EACH))
    assert (out(world), world.run.status) == ([], RunStatus.FAILED)
    world = started([0, 1, 2])
    world.feed(CancelRequested())
    assert (out(world), world.run.status) == ([], RunStatus.CANCELLED)


def test_late_and_repeated_events_of_items_change_nothing() -> None:
    world = started([0, 1])
    first = succeeded(world.job("each.draft", 0), "d")
    world.feed(first)
    assert world.feed(first).ignored == (Ignored.NOT_WAITING_FOR_IT,)
    through_check = succeeded(world.job("each.check", 0), "c")
    world.feed(through_check)
    for event in (
        first,
        through_check,
        AttemptSucceeded(job_id=first.job_id, step_id=StepId("each.draft"), item=9),
        AttemptSucceeded(job_id=first.job_id, step_id=EACH, item=0),
        TimerFired(timer=Timer(TimerKind.STEP_TIMEOUT, EACH, 0)),
        TimerFired(timer=Timer(TimerKind.ITEMS, EACH)),
        TimerFired(timer=Timer(TimerKind.DELAY, EACH, 0)),
    ):
        assert world.feed(event).ignored == (Ignored.NOT_WAITING_FOR_IT,), event
    unknown = AttemptSucceeded(job_id=first.job_id, step_id=StepId("each.none"), item=0)
    assert world.feed(unknown).ignored == (Ignored.UNKNOWN_STEP,)
    back = JobReturned(job_id=first.job_id, step_id=StepId("each.draft"), deliveries=1, item=1)
    assert world.feed(back).ignored == (None,)


def test_dead_letters_of_items_are_replayed_and_discarded() -> None:
    world = started([0, 1], inner({"draft": job()}))
    world.die("each.draft", item=0)
    world.die("each.draft", item=1)
    world.replay("each.draft", item=0)
    world.succeed("each.draft", "late", item=0)
    world.discard("each.draft", item=1)
    each = world.run.step(EACH)
    assert (each.status, [failure.index for failure in each.failures]) == ("failed", [1])


def test_an_input_that_the_workflow_does_not_accept_fails_its_item() -> None:
    schema: dict[str, JsonValue] = {"properties": {"n": {"type": "integer"}}}
    world = started([0, "no"], inner(input_schema=schema), on_item_failure=OnFailure.CONTINUE)
    through(world, 0)
    [failure] = world.run.step(EACH).failures
    assert (failure.index, failure.error.code) == (1, "invalid_input")
    world = started([0], inner(), input="${item}")
    assert world.items[ItemKey(EACH, 0)].error is not None


@pytest.mark.parametrize("parallel", [None, 1, 3])
def test_items_that_end_at_once_make_room_for_the_next_however_many(parallel: int | None) -> None:
    steps: dict[str, StepSpec] = {
        "draft": job(when="input.n % 500 == 0", input={"n": "${input.n}"})
    }
    world = started(list(range(2_500)), inner(steps), parallel=parallel)
    seen: set[int] = set()
    for _ in range(100):
        timer = foreach.more_items(world.plan.steps[EACH])
        if timer in world.timers:
            world.fire(timer)
        elif out(world) == ["end[None]"]:
            break
        else:
            done = next(iter(world.jobs.values()))
            seen.add(done.item or 0)
            world.feed(succeeded(done, "ok"))
    assert seen == {0, 500, 1000, 1500, 2000}
    output = world.run.step(EACH).output
    assert isinstance(output, list)
    assert [n for n, each in enumerate(output) if each == {"draft": "ok"}] == sorted(seen)


def test_a_result_reads_and_writes_one_item_and_the_next() -> None:
    world = started(list(range(100)), parallel=5)
    event = succeeded(world.job("each.draft", 3), "x")
    assert items_to_read(world.plan, world.run, [event]) == {EACH: [3, 5]}
    change = world.feed(event)
    assert [*change.items] == [ItemKey(EACH, 3)]
    assert [*world.succeed("each.check", 1, item=3).items] == [ItemKey(EACH, 3), ItemKey(EACH, 5)]


def test_more_steps_of_items_than_allowed_fail_the_step_clearly() -> None:
    many = {f"s{n}": DelaySpec(delay_s=1) for n in range(5)}
    world = started([None] * 4_001, inner({**many}), input={})
    error = world.run.step(EACH).error
    assert error is not None
    assert (error.code, error.message) == (
        "too_many_items",
        "for_each: 4001 items with 5 steps each; at most 20000 steps of items are allowed",
    )
    assert limits.RUN_ITEMS_MAX == 20_000


def test_outputs_inside_an_item_are_bounded() -> None:
    large = "x" * (limits.ITEM_OUTPUT_BYTES_MAX // 4)
    steps: dict[str, StepSpec] = {f"s{n}": job() for n in range(4)}
    world = started([0], inner(steps))
    for n in range(4):
        world.succeed(f"each.s{n}", large, item=0)
    error = world.items[ItemKey(EACH, 0)].error
    assert error is not None
    assert (error.code, error.step) == ("output_too_large", "each.s3")


@pytest.mark.parametrize(
    ("spec", "noun"),
    [
        (ApprovalSpec(), "an approval step"),
        (ForEachSpec(for_each="${[1]}", topic=Topic("t")), "a for_each step"),
        (ForEachWorkflowSpec(for_each="${[1]}", workflow=INNER), "a for_each step"),
    ],
)
@pytest.mark.parametrize("is_deep", [False, True])
def test_no_approval_and_no_for_each_inside(spec: StepSpec, noun: str, *, is_deep: bool) -> None:
    bad = Workflow(id=WorkflowId("bad"), steps={StepId("ask"): spec})
    via = inner({"sub": SubworkflowSpec(workflow=bad.id)}) if is_deep else bad
    outer = ForEachWorkflowSpec(for_each="${[1]}", workflow=via.id)
    flow = Workflow(id=WorkflowId("w"), steps={EACH: outer})
    found = link(flow, {bad.id: bad, via.id: via})
    assert isinstance(found, WorkflowFaults)
    assert found.faults[0].path == "steps.each.workflow"
    assert f"'bad' has {noun}, 'ask'" in found.faults[0].message


def test_circles_unknown_names_and_too_many_steps_are_found_through_items() -> None:
    def faults(**others: Workflow) -> str:
        spec = ForEachWorkflowSpec(for_each="${[1]}", workflow=INNER)
        flow = Workflow(id=WorkflowId("w"), steps={EACH: spec})
        found = link(flow, {each.id: each for each in others.values()})
        return str(found.faults[0]) if isinstance(found, WorkflowFaults) else ""

    assert "there is no workflow 'inner'" in faults()
    circle = inner({"x": SubworkflowSpec(workflow=WorkflowId("w"))})
    assert "circle" in faults(a=circle)
    deep = inner({f"s{n}": SubworkflowSpec(workflow=WorkflowId("wide")) for n in range(4)})
    wide = Workflow(
        id=WorkflowId("wide"), steps={StepId(f"x{n}"): DelaySpec(delay_s=0) for n in range(150)}
    )
    assert "605 steps with all sub-workflows unfolded" in faults(a=deep, b=wide)


def test_a_rerun_of_failed_items_begins_their_workflow_anew() -> None:
    world = started([0, 1, 2], parallel=1)
    through(world, 0)
    world.succeed("each.draft", item=1)
    world.fail("each.check", item=1)
    through(world, 2)
    options = RerunOptions(only=RerunOnly.FAILED_ITEMS)
    wanted = items_to_keep(world.plan, world.run, options)
    assert not isinstance(wanted, RerunRefused)
    items = {ItemKey(EACH, index): world.items[ItemKey(EACH, index)] for index in wanted[EACH]}
    run = rerun(world.plan, world.run, options, run_id=world.run.id, now=START, items=items)
    assert not isinstance(run, RerunRefused)
    new = World(world.plan, run)
    new.feed(Started())
    assert out(new) == ["each.draft[1]"]
    through(new, 1, "again")
    assert new.run.step(EACH).output == [{"check": 0}, {"check": "again"}, {"check": 2}]


def test_an_inner_job_has_the_workflows_own_members() -> None:
    """Deliveries and attempt time-outs come from the inner workflow, as in a sub-workflow."""
    plan = plan_of(inner({"draft": job(attempt_timeout_s=2)}, max_deliveries=3))
    change = decide(plan, pending_run(plan, {"list": [1]}), Started(), START)
    [sent] = [each.job for each in change.effects if isinstance(each, DispatchJob)]
    assert (sent.max_deliveries, sent.attempt_timeout_ms, sent.item) == (3, 2_000, 0)
