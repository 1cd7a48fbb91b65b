"""Reruns: what is kept, what is done again, what is refused."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stanchion.core.events import CancelRequested, Started
from stanchion.core.model import (
    Instant,
    ItemKey,
    Run,
    RunId,
    RunStatus,
    StepId,
    StepStatus,
    Topic,
    WorkflowId,
)
from stanchion.core.rerun import (
    RerunAction,
    RerunOnly,
    RerunOptions,
    RerunRefused,
    RerunStep,
    RerunVersion,
    items_to_keep,
    preview,
    rerun,
)
from stanchion.core.workflow import (
    ForEachSpec,
    JobSpec,
    OnFailure,
    StepSpec,
    SubworkflowSpec,
    Workflow,
)
from tests.core.world import World, planned

NOW = Instant(1_800_000_000_000)


def job(*needs: str) -> JobSpec:
    return JobSpec(topic=Topic("work"), needs=tuple(map(StepId, needs)))


def finished() -> World:
    """The end of a → b → c and a lonely d, where c and d have failed."""
    steps = {"a": job(), "b": job("a"), "c": job("b"), "d": job()}
    flow = Workflow(id=WorkflowId("w"), steps={StepId(name): spec for name, spec in steps.items()})
    world = World.started(planned(flow), {"n": 1})
    world.succeed("a", "A")
    world.succeed("b", "B")
    world.fail("c")
    world.fail("d")
    return world


def again(world: World, from_step: str | None = None) -> World:
    step = None if from_step is None else StepId(from_step)
    return begun(world, RerunOptions(from_step=step))


def repeated(world: World, options: RerunOptions) -> Run | RerunRefused:
    """What the gate does: read the items that may be kept, and make the new run."""
    wanted = items_to_keep(world.plan, world.run, options)
    if isinstance(wanted, RerunRefused):
        assert (
            rerun(world.plan, world.run, options, run_id=RunId("r2"), now=NOW, items={}) == wanted
        )
        return wanted
    keys = [ItemKey(step, index) for step, indexes in wanted.items() for index in indexes]
    items = {key: world.items[key] for key in keys}
    return rerun(world.plan, world.run, options, run_id=RunId("r2"), now=NOW, items=items)


def begun(world: World, options: RerunOptions) -> World:
    run = repeated(world, options)
    assert not isinstance(run, RerunRefused)
    assert run.status is RunStatus.PENDING
    second = World(world.plan, run)
    second.feed(Started())
    return second


def test_a_whole_rerun_starts_from_nothing_with_the_same_input_and_versions() -> None:
    old = finished()
    new = again(old)
    assert new.statuses() == {"a": "running", "b": "pending", "c": "pending", "d": "running"}
    assert (new.run.id, new.run.rerun_of, new.run.created_at) == ("r2", "r1", NOW)
    same = ("tenant", "workflow_id", "workflow_version", "uses", "input", "risk", "holds_slot")
    assert [getattr(new.run, name) for name in same] == [getattr(old.run, name) for name in same]


def test_from_a_step_what_it_builds_on_is_kept() -> None:
    new = again(finished(), "b")
    assert new.statuses() == {"a": "succeeded", "b": "running", "c": "pending", "d": "running"}
    assert new.run.step(StepId("a")).output == "A"


def test_a_failure_that_the_workflow_accepts_is_kept() -> None:
    first = JobSpec(topic=Topic("work"), on_failure=OnFailure.CONTINUE)
    flow = Workflow(id=WorkflowId("w"), steps={StepId("a"): first, StepId("b"): job("a")})
    old = World.started(planned(flow))
    old.fail("a")
    old.fail("b")
    assert again(old, "b").statuses() == {"a": "failed", "b": "running"}


def test_what_had_failed_elsewhere_is_done_again_too() -> None:
    assert again(finished(), "c").statuses()["d"] == "running"


def test_the_new_run_can_succeed_where_the_old_one_failed() -> None:
    new = again(finished(), "c")
    new.succeed("c", "C")
    new.succeed("d", "D")
    assert new.run.output == {"c": "C", "d": "D"}


@pytest.mark.parametrize(
    ("from_step", "code", "message"),
    [
        ("x", "unknown_step", "the run has no step 'x'"),
        ("c", "needs_unfinished", "'c' builds on 'b', which is failed: rerun from there"),
    ],
)
def test_a_step_that_cannot_be_begun_with_is_refused(
    from_step: str, code: str, message: str
) -> None:
    steps = {"a": job(), "b": job("a"), "c": job("b")}
    flow = Workflow(id=WorkflowId("w"), steps={StepId(name): spec for name, spec in steps.items()})
    world = World.started(planned(flow))
    world.succeed("a")
    world.fail("b")
    refused = repeated(world, RerunOptions(from_step=StepId(from_step)))
    assert refused == RerunRefused(code, message)


def test_an_unfinished_run_cannot_be_rerun() -> None:
    world = World.started(planned(Workflow(id=WorkflowId("w"), steps={StepId("a"): job()})))
    refused = repeated(world, RerunOptions())
    assert refused == RerunRefused("run_unfinished", "run 'r1' is still running")


def nested() -> World:
    inner = Workflow(
        id=WorkflowId("inner"),
        steps={StepId("x"): job(), StepId("y"): job("x"), StepId("z"): job()},
    )
    flow = Workflow(
        id=WorkflowId("w"),
        steps={
            StepId("a"): job(),
            StepId("b"): SubworkflowSpec(workflow=inner.id, needs=(StepId("a"),)),
            StepId("c"): SubworkflowSpec(workflow=inner.id, needs=(StepId("b"),)),
        },
    )
    world = World.started(planned(flow, {inner.id: inner}))
    for step in ("a", "b.x", "b.y", "b.z", "c.x", "c.z"):
        world.succeed(step, step.upper())
    world.feed(CancelRequested(actor="reviewer"))
    return world


def test_from_a_step_inside_a_sub_workflow_its_other_inner_steps_are_kept() -> None:
    new = again(nested(), "b.y")
    statuses = new.statuses()
    assert (statuses["b.x"], statuses["b.y"], statuses["b.z"]) == (
        "succeeded",
        "running",
        "succeeded",
    )
    assert statuses["b"] == "running"
    # What needs the sub-workflow is done again, with all that is inside.
    assert {statuses[step] for step in ("c", "c.x", "c.y", "c.z")} == {"pending"}
    new.succeed("b.y")
    assert new.statuses()["b"] == "succeeded"
    assert new.statuses()["c.x"] == "running"


def test_from_a_sub_workflow_step_everything_inside_is_done_again() -> None:
    statuses = again(nested(), "b").statuses()
    assert (statuses["b.x"], statuses["b.y"], statuses["b.z"]) == ("running", "pending", "running")


def test_a_cancelled_sub_workflow_goes_on_where_it_was() -> None:
    statuses = again(nested(), "c.y").statuses()
    assert (statuses["c"], statuses["c.x"], statuses["c.y"], statuses["c.z"]) == (
        "running",
        "succeeded",
        "running",
        "succeeded",
    )


def test_what_surrounds_an_inner_step_must_have_been_reached() -> None:
    inner = Workflow(id=WorkflowId("inner"), steps={StepId("x"): job()})
    flow = Workflow(
        id=WorkflowId("w"),
        steps={
            StepId("a"): job(),
            StepId("b"): SubworkflowSpec(workflow=inner.id, needs=(StepId("a"),)),
        },
    )
    world = World.started(planned(flow, {inner.id: inner}))
    world.fail("a")
    refused = repeated(world, RerunOptions(from_step=StepId("b.x")))
    assert isinstance(refused, RerunRefused)
    assert refused.message == "'b.x' builds on 'a', which is failed: rerun from there"


# ── Only failed items ────────────────────────────────────────────────────────────────────────────

FAILED_ITEMS = RerunOptions(only=RerunOnly.FAILED_ITEMS)


def items_of(
    *, parallel: int | None = None, on_item_failure: OnFailure = OnFailure.FAIL
) -> dict[str, StepSpec]:
    return {
        "list": job(),
        "each": ForEachSpec(
            for_each="${steps.list.output}",
            topic=Topic("work"),
            input={"n": "${item}"},
            needs=(StepId("list"),),
            parallel=parallel,
            on_item_failure=on_item_failure,
        ),
        "end": job("each"),
        "beside": job(),
    }


def flow(steps: dict[str, StepSpec]) -> Workflow:
    return Workflow(id=WorkflowId("w"), steps={StepId(name): spec for name, spec in steps.items()})


def with_failed(
    failed: set[int],
    *,
    total: int = 5,
    parallel: int | None = None,
    on_item_failure: OnFailure = OnFailure.FAIL,
) -> World:
    """A finished run of which these items failed, and the others gave their index."""
    steps = items_of(parallel=parallel, on_item_failure=on_item_failure)
    world = World.started(planned(flow(steps)))
    world.succeed("list", list(range(total)))
    world.succeed("beside", "B")
    while not world.run.step(StepId("each")).status.is_finished:
        index = next(iter(world.jobs.values())).item
        assert index is not None
        if index in failed:
            world.fail("each", item=index)
        else:
            world.succeed("each", index, item=index)
    if not world.run.status.is_finished:
        world.succeed("end", "E")
    return world


@pytest.mark.parametrize("parallel", [None, 1, 2])
def test_items_that_succeeded_keep_their_output_and_the_others_run(parallel: int | None) -> None:
    old = with_failed({1, 3}, parallel=parallel)
    new = begun(old, FAILED_ITEMS)
    assert new.statuses() == {
        "list": "succeeded",
        "each": "running",
        "end": "pending",
        "beside": "succeeded",
    }
    for index in (1, 3):
        assert new.jobs[next(iter(new.jobs))].input == {"n": index}
        new.succeed("each", f"again {index}", item=index)
    assert new.run.step(StepId("each")).output == [0, "again 1", 2, "again 3", 4]
    new.succeed("end", "E")
    assert new.run.output == {"end": "E", "beside": "B"}
    details = {line.what: line.detail for line in new.timeline}
    assert details["run_started"] == "rerun of r1: 2 steps reused, 2 to run"
    assert details["step_reused"] == "succeeded in r1"
    assert details["items_started"] == "5 items: 3 reused, 2 to run"


def test_a_reused_item_is_what_it_was_without_a_job() -> None:
    old = with_failed({1})
    new = begun(old, FAILED_ITEMS)
    kept = ItemKey(StepId("each"), 0)
    assert new.items[kept] == msgspec.structs.replace(old.items[kept], dispatch=0)


def test_accepted_failures_of_items_are_repeated_with_what_builds_on_them() -> None:
    old = with_failed({2}, on_item_failure=OnFailure.CONTINUE)
    assert old.run.status is RunStatus.SUCCEEDED
    new = begun(old, FAILED_ITEMS)
    assert new.statuses()["end"] == "pending"
    new.succeed("each", 2, item=2)
    assert new.run.step(StepId("each")).output == [0, 1, 2, 3, 4]


def test_an_accepted_failure_of_a_step_is_not_repeated_with_failed_items() -> None:
    steps = items_of()
    steps["beside"] = JobSpec(topic=Topic("work"), on_failure=OnFailure.CONTINUE)
    world = World.started(planned(flow(steps)))
    world.fail("beside")
    world.succeed("list", [0])
    world.fail("each", item=0)
    run = repeated(world, FAILED_ITEMS)
    assert isinstance(run, Run)
    steps_of_rerun = preview(world.plan, world.run, run)
    assert steps_of_rerun[StepId("beside")] == RerunStep(RerunAction.REUSED)


def test_items_of_a_cancelled_run_that_had_not_ended_run() -> None:
    world = World.started(planned(flow(items_of(parallel=2))))
    world.succeed("list", [0, 1, 2, 3])
    world.succeed("each", 0, item=0)
    world.feed(CancelRequested(actor="reviewer"))
    new = begun(world, FAILED_ITEMS)
    assert sorted(str(each.item) for each in new.jobs.values()) == ["1", "2", "None"]
    for index in (1, 2, 3):
        new.succeed("each", index, item=index)
    assert new.run.step(StepId("each")).output == [0, 1, 2, 3]


def test_a_list_that_is_made_again_is_done_wholly_again() -> None:
    """The second for-each depends on the failed items of the first."""
    steps = items_of(on_item_failure=OnFailure.CONTINUE)
    steps["end"] = ForEachSpec(
        for_each="${steps.each.output}", topic=Topic("work"), needs=(StepId("each"),)
    )
    world = World.started(planned(flow(steps)))
    world.succeed("list", [0, 1])
    world.succeed("beside")
    world.succeed("each", 0, item=0)
    world.fail("each", item=1)
    world.succeed("end", 0, item=0)
    world.fail("end", item=1)
    options = FAILED_ITEMS
    run = repeated(world, options)
    assert isinstance(run, Run)
    assert preview(world.plan, world.run, run) == {
        "list": RerunStep(RerunAction.REUSED),
        "each": RerunStep(RerunAction.RUNS_AGAIN, 1, 1),
        "end": RerunStep(RerunAction.RUNS_AGAIN),
        "beside": RerunStep(RerunAction.REUSED),
    }
    assert {key.step_id for key in run.items} == {"each"}


def test_without_such_items_there_is_nothing_to_repeat() -> None:
    refused = repeated(finished(), FAILED_ITEMS)
    assert isinstance(refused, RerunRefused)
    assert refused.code == "no_failed_items"


def test_from_a_step_reused_for_each_steps_keep_their_items() -> None:
    new = again(with_failed({2}, on_item_failure=OnFailure.CONTINUE), "end")
    assert new.statuses()["each"] == "succeeded"
    assert [new.items[ItemKey(StepId("each"), index)].status for index in (1, 2)] == [
        StepStatus.SUCCEEDED,
        StepStatus.FAILED,
    ]
    assert new.run.step(StepId("each")).failures


@given(
    failed=st.sets(st.integers(0, 11)),
    total=st.integers(1, 12),
    parallel=st.none() | st.integers(1, 4),
    order=st.randoms(use_true_random=False),
)
def test_whatever_failed_the_result_is_that_of_a_run_without_failures(
    failed: set[int], total: int, parallel: int | None, order: random.Random
) -> None:
    """After any failures, a rerun dispatches exactly the failed items, in any order of results."""
    failed = {index for index in failed if index < total}
    old = with_failed(failed, total=total, parallel=parallel)
    if not failed:
        assert isinstance(repeated(old, FAILED_ITEMS), RerunRefused)
        return
    new = begun(old, FAILED_ITEMS)
    dispatched = set()
    while not new.run.step(StepId("each")).status.is_finished:
        out = sorted(each.item for each in new.jobs.values() if each.item is not None)
        assert len(out) <= (parallel or total)
        index = order.choice(out)
        dispatched.add(index)
        new.succeed("each", index, item=index)
    assert dispatched == failed
    assert new.run.step(StepId("each")).output == list(range(total))


@pytest.mark.parametrize(
    ("options", "path"),
    [
        (RerunOptions(only=RerunOnly.FAILED_ITEMS, version=RerunVersion.NEWEST), "version"),
        (RerunOptions(only=RerunOnly.FAILED_ITEMS, input={}), "input"),
        (RerunOptions(only=RerunOnly.FAILED_ITEMS, from_step=StepId("a")), "from_step"),
        (RerunOptions(from_step=StepId("a"), version=RerunVersion.NEWEST), "version"),
        (RerunOptions(from_step=StepId("a"), input={}), "input"),
        (RerunOptions(version=RerunVersion.NEWEST, input={}), None),
        (RerunOptions(), None),
    ],
)
def test_what_keeps_results_excludes_another_version_and_another_input(
    options: RerunOptions, path: str | None
) -> None:
    fault = options.fault()
    assert (None if fault is None else fault.path) == path


def test_a_member_that_is_excluded_is_told_what_to_be_and_why() -> None:
    fault = RerunOptions(only=RerunOnly.FAILED_ITEMS, version=RerunVersion.NEWEST).fault()
    assert fault is not None
    assert fault.message == (
        "must be 'same' with only 'failed_items', which keeps results of that version"
    )


def test_members_at_their_default_are_not_in_the_fingerprint() -> None:
    assert RerunOptions().fingerprinted() == {"from_step": None}
    whole = RerunOptions(version=RerunVersion.NEWEST, input={"n": 1}, only=RerunOnly.FAILED_ITEMS)
    assert whole.fingerprinted() == {
        "from_step": None,
        "version": "newest",
        "input": {"n": 1},
        "only": "failed_items",
    }


def test_a_new_input_replaces_the_old_one_and_keeps_nothing() -> None:
    new = begun(finished(), RerunOptions(input={"n": 2}))
    assert (new.run.input, new.statuses()["a"]) == ({"n": 2}, "running")


def test_a_preview_names_skipped_steps() -> None:
    maybe = JobSpec(topic=Topic("work"), when="input.go == true")
    world = World.started(planned(flow({"a": job(), "maybe": maybe, "b": job("a")})), {"go": False})
    world.succeed("a")
    world.fail("b")
    run = repeated(world, RerunOptions(from_step=StepId("b")))
    assert isinstance(run, Run)
    actions = {name: each.action for name, each in preview(world.plan, world.run, run).items()}
    assert actions == {"a": "reused", "maybe": "skipped", "b": "runs_again"}
