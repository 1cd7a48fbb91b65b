"""Reruns: what is kept, what is done again, what is refused."""

from __future__ import annotations

import pytest

from stanchion.core.events import CancelRequested, Started
from stanchion.core.model import Instant, RunId, RunStatus, StepId, Topic, WorkflowId
from stanchion.core.rerun import RerunRefused, rerun
from stanchion.core.workflow import JobSpec, OnFailure, SubworkflowSpec, Workflow
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
    run = rerun(world.plan, world.run, run_id=RunId("r2"), now=NOW, from_step=step)
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
    refused = rerun(world.plan, world.run, run_id=RunId("r2"), now=NOW, from_step=StepId(from_step))
    assert refused == RerunRefused(code, message)


def test_an_unfinished_run_cannot_be_rerun() -> None:
    world = World.started(planned(Workflow(id=WorkflowId("w"), steps={StepId("a"): job()})))
    refused = rerun(world.plan, world.run, run_id=RunId("r2"), now=NOW)
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
    refused = rerun(world.plan, world.run, run_id=RunId("r2"), now=NOW, from_step=StepId("b.x"))
    assert isinstance(refused, RerunRefused)
    assert refused.message == "'b.x' builds on 'a', which is failed: rerun from there"
