"""The pure core: the cost of a decision does not depend on the size of the run."""

from __future__ import annotations

import msgspec

from bench.row import Row, below, best_of
from stanchion.core.events import AttemptSucceeded, Started
from stanchion.core.expression import compile_expression
from stanchion.core.json_value import JsonValue
from stanchion.core.model import (
    Instant,
    Item,
    ItemKey,
    Run,
    RunId,
    StepId,
    TenantId,
    Topic,
    WorkflowId,
    job_id,
)
from stanchion.core.plan import Plan, link
from stanchion.core.run import decide, evolve, items_to_read
from stanchion.core.workflow import ForEachSpec, JobSpec, Workflow

__all__ = ["rows"]

NOW = Instant(1_800_000_000_000)
STEP = StepId("fan")
EVALUATIONS = 1_000
CONDITION = "input.review == true && size(steps.plan.output.queries) > 2 && input.tries < 5"
PATH = "steps.plan.output.queries"
SCOPE: dict[str, JsonValue] = {
    "input": {"review": True, "tries": 3},
    "steps": {"plan": {"status": "succeeded", "output": {"queries": ["a", "b", "c"]}}},
}


def rows() -> list[Row]:
    """Measure."""
    small = best_of(5, lambda: _handle_all(1_000))
    large = best_of(5, lambda: _handle_all(2_000))
    ratio = large / small
    per_item_us = small / 1_000 * 1e6
    decide_us = best_of(5, _three_steps) / 300 * 1e6
    condition_us = best_of(5, lambda: _evaluate(CONDITION)) / EVALUATIONS * 1e6
    path_us = best_of(5, lambda: _evaluate(PATH)) / EVALUATIONS * 1e6
    return [
        Row("for-each: 2,000 items against 1,000", ratio, "×", "≤ 2.5", ratio <= 2.5),
        Row("for-each: one item's result", per_item_us, "µs", "< 500", per_item_us < 500),
        Row("decide: one result of a three-step run", decide_us, "µs", "< 500", decide_us < 500),
        below("expression: a condition of three terms", condition_us, "µs", 50),
        below("expression: a path", path_us, "µs", 10),
    ]


def _evaluate(source: str) -> None:
    expression = compile_expression(source, names=frozenset({"input", "steps"}))
    for _ in range(EVALUATIONS):
        expression.evaluate(SCOPE)


def _handle_all(count: int) -> None:
    """Start a for-each and apply all of its results, one transition each, as a store would."""
    plan = _plan(
        Workflow(
            id=WorkflowId("w"),
            steps={STEP: ForEachSpec(for_each="${input.list}", topic=Topic("t"), input="${item}")},
        )
    )
    run = _run(plan, list(range(count)))
    first = decide(plan, run, Started(), NOW)
    items: dict[ItemKey, Item] = dict(first.items)
    run = evolve(run, first)
    for index in range(count):
        event = AttemptSucceeded(
            job_id=job_id(run.id, STEP, index, 1), step_id=STEP, item=index, output=index
        )
        wanted = items_to_read(plan, run, [event])
        view = {ItemKey(STEP, each): items[ItemKey(STEP, each)] for each in wanted[STEP]}
        run = msgspec.structs.replace(run, items=view)
        transition = decide(plan, run, event, NOW)
        items.update(transition.items)
        run = msgspec.structs.replace(evolve(run, transition), items={})
    assert run.status == "succeeded"


def _three_steps() -> None:
    a, b, c = StepId("a"), StepId("b"), StepId("c")
    plan = _plan(
        Workflow(
            id=WorkflowId("w"),
            steps={
                a: JobSpec(topic=Topic("t"), input={"q": "${input.list}"}),
                b: JobSpec(topic=Topic("t"), needs=(a,), input="${steps.a.output}"),
                c: JobSpec(topic=Topic("t"), needs=(b,), input="${steps.b.output}"),
            },
        )
    )
    for _ in range(100):
        run = _run(plan, [1])
        run = evolve(run, decide(plan, run, Started(), NOW))
        for step in (a, b, c):
            event = AttemptSucceeded(job_id=job_id(run.id, step, None, 1), step_id=step, output=1)
            run = evolve(run, decide(plan, run, event, NOW))
        assert run.status == "succeeded"


def _plan(workflow: Workflow) -> Plan:
    plan = link(workflow, {})
    assert isinstance(plan, Plan)
    return plan


def _run(plan: Plan, values: list[int]) -> Run:
    return Run(
        id=RunId("r"),
        tenant=TenantId("t"),
        workflow_id=plan.workflow_id,
        workflow_version=1,
        input={"list": list(values)},
        created_at=NOW,
    )
