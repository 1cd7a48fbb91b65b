"""Linking: how workflows fit together, and everything that can be wrong about it."""

from __future__ import annotations

import pytest

from stanchion.core.expression import Template, compile_template, template_tokens
from stanchion.core.faults import Fault, WorkflowFaults
from stanchion.core.json_value import JsonValue
from stanchion.core.lease import LeaseOverride, OnRenewalLost
from stanchion.core.model import Risk, StepId, Topic, WorkflowId, WorkflowSource, shared_name
from stanchion.core.plan import Plan, link, subworkflows
from stanchion.core.workflow import DelaySpec, JobSpec, StepSpec, SubworkflowSpec, Workflow
from tests.core.world import planned


def flow(name: str, risk: Risk = Risk.STANDARD, /, **steps: StepSpec) -> Workflow:
    return Workflow(
        id=WorkflowId(name), risk=risk, steps={StepId(step): spec for step, spec in steps.items()}
    )


def sub(name: str, *needs: str, timeout_s: float | None = None) -> SubworkflowSpec:
    return SubworkflowSpec(
        workflow=WorkflowId(name), needs=tuple(map(StepId, needs)), timeout_s=timeout_s
    )


def job(*needs: str) -> JobSpec:
    return JobSpec(topic=Topic("work"), needs=tuple(map(StepId, needs)))


def linked(*flows: Workflow) -> Plan | tuple[Fault, ...]:
    answer = link(flows[0], {each.id: each for each in flows[1:]})
    return answer.faults if isinstance(answer, WorkflowFaults) else answer


def test_inner_steps_are_namespaced_and_stand_behind_the_step_that_holds_them() -> None:
    inner = flow("inner", x=job(), y=job("x"))
    plan = planned(flow("outer", a=sub("inner"), b=sub("inner", "a"), c=job()), {inner.id: inner})
    assert list(plan.steps) == ["a", "a.x", "a.y", "b", "b.x", "b.y", "c"]
    assert plan.steps[StepId("b.y")].needs == ("b.x",)
    assert plan.steps[StepId("b.y")].parent == "b"
    assert plan.steps[StepId("a")].dependants == ("b",)
    assert plan.body.steps == ("a", "b", "c")
    assert plan.body.leaves == {"b": "b", "c": "c"}
    assert plan.steps[StepId("a")].body is not None
    assert plan.steps[StepId("a")].body.leaves == {"y": "a.y"}  # type: ignore[union-attr]  # above


def test_a_step_sees_what_it_builds_on_by_its_name_in_the_file() -> None:
    inner = flow("inner", x=job(), y=job("x"), z=job("y"), other=job())
    plan = planned(flow("outer", a=sub("inner")), {inner.id: inner})
    assert plan.steps[StepId("a.z")].visible == {"x": "a.x", "y": "a.y"}
    assert plan.steps[StepId("a")].visible == {}


def test_the_strictest_class_of_all_the_parts_rules() -> None:
    inner = flow("inner", Risk.CRITICAL, x=job())
    plan = planned(flow("outer", Risk.LOW, a=sub("inner"), b=job()), {inner.id: inner})
    assert plan.risk is Risk.CRITICAL


def test_the_outer_lock_policy_and_time_limit_are_the_plans() -> None:
    override = LeaseOverride(on_renewal_lost=OnRenewalLost.FENCE)
    plan = planned(
        Workflow(
            id=WorkflowId("w"),
            steps={StepId("a"): job()},
            timeout_s=60,
            lock_policy=override,
        )
    )
    assert (plan.timeout_s, plan.lock_policy) == (60, override)
    assert planned(flow("w", a=job())).timeout_s == 24 * 60 * 60


@pytest.mark.parametrize(
    ("of_step", "of_child", "expected"), [(5, 9, 5), (None, 9, 9), (5, None, 5), (None, None, None)]
)
def test_a_sub_workflow_is_bounded_by_its_step_or_else_by_its_own_file(
    of_step: float | None, of_child: float | None, expected: float | None
) -> None:
    inner = Workflow(id=WorkflowId("inner"), timeout_s=of_child, steps={StepId("x"): job()})
    plan = planned(flow("outer", a=sub("inner", timeout_s=of_step)), {inner.id: inner})
    assert plan.steps[StepId("a")].timeout_s == expected


@pytest.mark.parametrize(("outer", "inner", "expected"), [(3, None, 3), (3, 7, 7), (None, 7, 7)])
def test_a_sub_workflows_limit_of_deliveries_is_its_own_or_else_the_outer_ones(
    outer: int | None, inner: int | None, expected: int
) -> None:
    child = Workflow(
        id=WorkflowId("child"), steps={StepId("b"): JobSpec(topic=Topic("t"))}, max_deliveries=inner
    )
    steps: dict[StepId, StepSpec] = {
        StepId("a"): JobSpec(topic=Topic("t")),
        StepId("in"): SubworkflowSpec(workflow=child.id),
    }
    parent = Workflow(id=WorkflowId("parent"), steps=steps, max_deliveries=outer)
    plan = planned(parent, {child.id: child})
    assert plan.steps[StepId("a")].max_deliveries == outer
    assert plan.steps[StepId("in.b")].max_deliveries == expected


def test_all_faults_are_reported_with_their_places() -> None:
    inner = flow("inner", x=sub("nowhere"), y=sub("outer"))
    assert linked(flow("outer", a=sub("inner"), b=sub("gone")), inner) == (
        Fault("steps.a.x.workflow", "there is no workflow 'nowhere'"),
        Fault(
            "steps.a.y.workflow", "workflows contain each other in a circle: outer → inner → outer"
        ),
        Fault("steps.b.workflow", "there is no workflow 'gone'"),
    )


def test_a_workflow_cannot_contain_itself() -> None:
    assert linked(flow("w", a=sub("w"))) == (
        Fault("steps.a.workflow", "workflows contain each other in a circle: w → w"),
    )


def test_five_levels_of_sub_workflows_are_allowed_and_six_are_not() -> None:
    def chain(levels: int) -> list[Workflow]:
        names = [f"w{level}" for level in range(levels + 1)]
        inner = [flow(names[level], a=sub(names[level + 1])) for level in range(levels)]
        return [*inner, flow(names[levels], a=job())]

    assert isinstance(linked(*chain(5)), Plan)
    assert linked(*chain(6)) == (
        Fault("steps.a.a.a.a.a.a.workflow", "sub-workflows are nested deeper than 5 levels"),
    )


def test_too_many_steps_are_counted_without_unfolding_for_ever() -> None:
    wide = [
        Workflow(
            id=WorkflowId(f"w{level}"),
            steps={StepId(f"s{n}"): sub(f"w{level + 1}") for n in range(200)},
        )
        for level in range(5)
    ]
    bottom = flow("w5", a=DelaySpec(delay_s=1))
    faults = linked(*wide, bottom)
    assert isinstance(faults, tuple)
    assert [fault.path for fault in faults] == ["steps"]
    assert "at most 500 are allowed" in faults[0].message


def test_exactly_five_hundred_steps_are_allowed() -> None:
    inner = Workflow(id=WorkflowId("inner"), steps={StepId(f"s{n}"): job() for n in range(200)})
    rest: dict[StepId, StepSpec] = {StepId(f"r{n}"): job() for n in range(98)}
    outer = Workflow(
        id=WorkflowId("outer"),
        steps={StepId("a"): sub("inner"), StepId("b"): sub("inner"), **rest},
    )
    plan = linked(outer, inner)
    assert isinstance(plan, Plan)
    assert len(plan.steps) == 500
    more = Workflow(id=outer.id, steps=outer.steps | {StepId("c"): job()})
    assert isinstance(linked(more, inner), tuple)


def test_the_workflows_that_one_names_are_known_without_linking() -> None:
    assert subworkflows(flow("w", a=sub("x"), b=sub("y"), c=sub("x"), d=job())) == {"x", "y"}


def test_the_expressions_of_all_sub_workflows_together_are_counted_before_they_are_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = JobSpec(topic=Topic("work"), input=["${input.a}"] * 1_000)  # 5 for each
    inner = flow("inner", x=large)
    few = {f"s{each}": sub("inner") for each in range(4)}
    many = {f"s{each}": sub("inner") for each in range(100)}
    assert isinstance(linked(flow("outer", **few), inner), Plan)
    compiled = 0

    def counting(value: JsonValue, **_: object) -> Template:
        nonlocal compiled
        compiled += template_tokens(value)
        return compile_template(value, names=frozenset({"input", "steps"}))

    monkeypatch.setattr("stanchion.core.plan.compile_template", counting)
    wrong = "the expressions of all sub-workflows have more than 20000 words and signs together"
    assert linked(flow("outer", **many), inner) == (Fault("steps", wrong),)
    assert compiled <= 20_000


def test_a_shared_workflow_contains_shared_ones_and_an_own_one_its_own_first() -> None:
    shared_x, own_x = flow("x", shared=job()), flow("x", own=job())
    others = {
        shared_name(WorkflowId("s")): flow("s", in_s=sub("x")),
        shared_name(own_x.id): shared_x,
    }
    root = flow("root", a=sub("x"), b=sub("s"))

    def steps(others: dict[WorkflowId, Workflow]) -> list[str]:
        plan = link(root, others)
        assert isinstance(plan, Plan), plan
        return [
            step for step in plan.steps if not isinstance(plan.steps[step].spec, SubworkflowSpec)
        ]

    assert steps({**others, own_x.id: own_x}) == ["a.own", "b.in_s.shared"]
    assert steps(others) == ["a.shared", "b.in_s.shared"]


def test_a_shared_workflow_does_not_see_the_own_workflows_of_a_tenant() -> None:
    inner = flow("inner", x=job())
    found = link(flow("outer", a=sub("inner")), {inner.id: inner}, source=WorkflowSource.SHARED)
    assert isinstance(found, WorkflowFaults)
    assert found.faults == (Fault("steps.a.workflow", "there is no shared workflow 'inner'"),)


def test_an_own_workflow_may_contain_the_shared_one_of_an_other_but_not_of_its_own_id() -> None:
    shared_w = {shared_name(WorkflowId("w")): flow("w", x=job())}
    found = link(flow("w", a=sub("w")), shared_w)
    assert isinstance(found, WorkflowFaults)
    assert found.faults[0].message == "workflows contain each other in a circle: w → w"
    # Not a circle: the shared workflow contains the shared one of that id.
    through = {**shared_w, shared_name(WorkflowId("s")): flow("s", y=sub("w"))}
    plan = link(flow("w", a=sub("s")), through)
    assert isinstance(plan, Plan)
    assert list(plan.steps) == ["a", "a.y", "a.y.x"]
