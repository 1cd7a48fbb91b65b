"""Workflow files: what a good one becomes, and that everything said about files is the same."""

from __future__ import annotations

import difflib
import itertools
import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
import yaml

from scripts.generate_schema import SCHEMA_FILE, schema_text
from stanchion.core import expression, faults, lease, limits, retry, schema_rules
from stanchion.core.faults import Fault
from stanchion.core.json_value import JsonValue
from stanchion.core.lease import (
    RENEWAL_FAILURES_MAX,
    LeaseOverride,
    OnLockError,
    OnRenewalLost,
)
from stanchion.core.model import Risk, StepId, Topic, WorkflowId
from stanchion.core.plan import Plan, link, subworkflows
from stanchion.core.retry import Backoff, BoundedJitter, Exponential, Fixed
from stanchion.core.workflow import (
    ApprovalSpec,
    DelaySpec,
    ForEachSpec,
    JobSpec,
    OnDecisionTimeout,
    OnFailure,
    RetrySpec,
    SubworkflowSpec,
    Workflow,
)
from stanchion.core.workflow_file import (
    Format,
    WorkflowFaults,
    check_workflows,
    parse_workflow,
    tree,
    workflow_json_schema,
)
from stanchion.core.workflow_file.members import TIMEOUT_S_MIN
from tests.core.good_workflows import EVERY_MEMBER, GOOD, NULL_OUTPUT, RESEARCH, SMALLEST

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "workflow-file.md"
SCHEMA = jsonschema_rs.Draft202012Validator(workflow_json_schema())


def parsed(text: bytes | str, notation: Format = "yaml") -> Workflow:
    workflow = parse_workflow(text, format=notation)
    assert isinstance(workflow, Workflow), workflow
    return workflow


def faults_of(
    text: str, notation: Format = "yaml", workflow_id: str | None = None
) -> tuple[Fault, ...]:
    answer = parse_workflow(text, format=notation, workflow_id=workflow_id)
    assert isinstance(answer, WorkflowFaults)
    return answer.faults


# ── What a good file becomes ─────────────────────────────────────────────────────────────────────


def test_the_example_becomes_what_it_says() -> None:
    assert parsed(RESEARCH) == Workflow(
        id=WorkflowId("research"),
        risk=Risk.HIGH,
        lock_policy=LeaseOverride(on_renewal_lost=OnRenewalLost.FENCE),
        timeout_s=600.0,
        steps={
            StepId("plan"): JobSpec(
                topic=Topic("agent.plan"),
                input={"question": "${input.question}"},
                retry=RetrySpec(max_attempts=3),
            ),
            StepId("search"): ForEachSpec(
                topic=Topic("agent.search"),
                needs=(StepId("plan"),),
                for_each="${steps.plan.output.queries}",
                input={"q": "${item}"},
            ),
            StepId("cool"): DelaySpec(delay_s=5.0, needs=(StepId("search"),)),
            StepId("review"): ApprovalSpec(needs=(StepId("cool"),), when="input.review == true"),
            StepId("publish"): SubworkflowSpec(
                workflow=WorkflowId("publish-report"),
                needs=(StepId("review"),),
                input={"text": "${steps.search.output}"},
            ),
        },
        output="${steps.publish.output}",
    )


def test_on_timeout_makes_the_time_limit_of_the_step_the_decisions() -> None:
    text = "{id: w, steps: {a: {approval: {on_timeout: fail}, timeout_s: 5}}}"
    wanted = ApprovalSpec(decision_timeout_s=5, on_timeout=OnDecisionTimeout.FAIL)
    assert parsed(text).steps[StepId("a")] == wanted


def test_a_file_has_few_data_schemas() -> None:
    steps = ", ".join(f"s{n}: {{approval: {{data_schema: {{}}}}}}" for n in range(21))
    (fault,) = faults_of(f"{{id: w, steps: {{{steps}}}}}")
    assert fault.path == "steps"
    assert "at most 20" in fault.message


def test_every_member_arrives() -> None:
    workflow = parsed(EVERY_MEMBER)
    steps = {str(name): step for name, step in workflow.steps.items()}

    assert workflow.lock_policy == LeaseOverride(
        OnLockError.FAIL_CLOSED, OnRenewalLost.CONTINUE, 100
    )
    assert workflow.timeout_s == 2_592_000.0
    assert workflow.max_deliveries == 100
    assert workflow.input_schema is not None
    assert steps["ask"] == ApprovalSpec(
        message="Shall we?\nReally, ${input.question}?",
        timeout_s=0.001,
        decision_timeout_s=2_592_000,
        on_timeout=OnDecisionTimeout.APPROVE,
        not_by_starter=True,
        data_schema={"type": "object", "properties": {"sum": {"type": "integer"}}},
        when="has(input.ask) && input.ask",
    )
    assert steps["fixed"] == JobSpec(
        topic=Topic("agent.work_1"),
        input=None,
        retry=RetrySpec(max_attempts=100, backoff=Fixed(0)),
        timeout_s=60.0,
        attempt_timeout_s=2.5,
        needs=(StepId("ask"),),
        on_failure=OnFailure.CONTINUE,
    )
    growing = steps["growing"]
    assert isinstance(growing, ForEachSpec)
    assert growing.retry == RetrySpec(
        max_attempts=5,
        backoff=Exponential(base_ms=1, cap_ms=86_400_000, factor=1.5, jitter="none"),
    )
    assert type(growing.retry.max_attempts) is int
    assert (growing.on_item_failure, growing.parallel) == (OnFailure.CONTINUE, 1_000)
    assert steps["inner"] == SubworkflowSpec(
        workflow=WorkflowId("other"),
        input="${steps.jittered.output}",
        timeout_s=3.5,
        needs=(StepId("pause"),),
    )


def test_no_output_and_an_output_of_null_are_different() -> None:
    assert parsed(SMALLEST).output is msgspec.UNSET
    assert parsed(NULL_OUTPUT).output is None


def test_steps_keep_the_order_of_the_file() -> None:
    assert [*parsed(RESEARCH).steps] == ["plan", "search", "cool", "review", "publish"]


@pytest.mark.parametrize("name", GOOD)
def test_yaml_and_json_say_the_same(name: str) -> None:
    as_json = json.dumps(yaml.safe_load(GOOD[name]))

    assert parsed(as_json, "json") == parsed(as_json.encode(), "json") == parsed(GOOD[name])


@pytest.mark.parametrize("name", GOOD)
def test_a_workflow_survives_encoding(name: str) -> None:
    workflow = parsed(GOOD[name])

    assert msgspec.json.decode(msgspec.json.encode(workflow), type=Workflow) == workflow
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(workflow), type=Workflow) == workflow


@pytest.mark.parametrize("name", GOOD)
def test_a_parsed_workflow_can_be_linked(name: str) -> None:
    workflow = parsed(GOOD[name])
    others = {
        other: msgspec.structs.replace(parsed(SMALLEST), id=other)
        for other in subworkflows(workflow)
    }

    assert isinstance(link(workflow, others), Plan)


# ── The name of a file ───────────────────────────────────────────────────────────────────────────


def test_a_file_sent_under_a_name_may_leave_its_own_out() -> None:
    named = parse_workflow('{"steps": {"a": {"topic": "a"}}}', format="json", workflow_id="a")

    assert named == parsed(SMALLEST)


def test_a_file_sent_under_its_own_name_is_taken() -> None:
    assert parse_workflow(SMALLEST, format="yaml", workflow_id="a") == parsed(SMALLEST)


def test_a_file_sent_under_another_name_is_refused() -> None:
    assert faults_of("risk: low\n" + "id: a\nsteps: {a: {topic: a}}\n", workflow_id="b") == (
        Fault("id", 'is "a", but the file was sent as "b"', 2),
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("steps: {a: {topic: a}}", 'must be an id: a letter, then letters, digits, "_" or "-"'),
        ("{id: 5, steps: {a: {topic: a}}}", "must be text, not a number"),
        ("{id: !x a, steps: {a: {topic: a}}}", "YAML tags are not allowed"),
    ],
)
def test_a_bad_name_is_one_fault(text: str, fault: str) -> None:
    (only,) = faults_of(text, workflow_id="a b")

    assert only.path == "id"
    assert only.message.startswith(fault)


def test_a_file_that_is_no_object_has_no_name_to_compare() -> None:
    assert faults_of("[]", "json", workflow_id="a") == (
        Fault("", "must be an object, not a list", 1),
    )


# ── Rules that a table of bad files shows badly ──────────────────────────────────────────────────


def test_a_step_whose_needs_are_in_doubt_is_not_told_to_add_more() -> None:
    text = """
        id: a
        steps:
          plan: {topic: x}
          wrong: {topic: x, needs: [plna], input: "${steps.plan.output}"}
          after: {topic: x, needs: [wrong], input: "${steps.plan.output}"}
          alias: &a {topic: x}
          other: *a
          later: {topic: x, needs: [other], input: "${steps.plan.output}"}
          circle: {topic: x, needs: [back], when: "steps.plan.output"}
          back: {topic: x, needs: [circle]}
    """

    assert [fault.path for fault in faults_of(text)] == [
        "steps.wrong.needs[0]",
        "steps.alias",
        "steps.other",
        "steps.circle.needs[0]",
    ]


def test_a_step_with_other_faults_is_still_told_what_it_lacks() -> None:
    text = """
        id: a
        steps:
          plan: {topic: x}
          bad: {topic: "?", retry: 5, delay_s: 1, input: "${steps.plan.output}"}
    """

    assert [fault.path for fault in faults_of(text)] == [
        "steps.bad",
        "steps.bad.topic",
        "steps.bad.retry",
        "steps.bad.input",
    ]


def test_what_cannot_be_read_is_not_judged_again() -> None:
    text = """
        id: &a a
        risk: !x y
        input_schema: !x {type: 5}
        steps:
          a: {topic: !x "?", when: !x "${", for_each: !x y, needs: !x [nobody], input: !x "${"}
          b: {topic: x, needs: [!x nobody, *a]}
        output: !x "${"
    """

    assert [fault.path for fault in faults_of(text)] == [
        "id",
        "risk",
        "input_schema",
        "steps.a.topic",
        "steps.a.when",
        "steps.a.for_each",
        "steps.a.needs",
        "steps.a.input",
        "steps.b.needs[0]",
        "steps.b.needs[1]",
        "output",
    ]


def test_one_list_expression_may_contain_braces_and_quotes() -> None:
    text = """{id: a, steps: {a: {topic: a, for_each: '${ {"}": ["${"]}["}"] }'}}}"""

    assert isinstance(parsed(text).steps[StepId("a")], ForEachSpec)


def test_the_largest_file_of_the_worst_order_is_parsed_soon() -> None:
    steps = {
        f"s{n}": {"topic": "a", "needs": [f"s{m}" for m in range(n)][-100:]} for n in range(200)
    }
    text = json.dumps({"id": "a", "steps": dict(reversed(steps.items()))})

    assert parsed(text, "json").id == "a"


# ── One truth ────────────────────────────────────────────────────────────────────────────────────

BACKOFFS = [
    *(Fixed(ms) for ms in (-1, 0, 86_400_000, 86_400_001)),
    *(BoundedJitter(a, b) for a, b in itertools.product((0, 5, 86_400_000), (-1, 0, 5, 6))),
    *(
        Exponential(base_ms=base, cap_ms=cap, factor=factor)
        for base, cap in itertools.product((0, 1, 5, 86_400_001), (0, 1, 5, 86_400_000, 86_400_001))
        for factor in (0.5, 1, 2.5, 10, 10.5)
    ),
]


@pytest.mark.parametrize("policy", BACKOFFS, ids=repr)
def test_a_file_accepts_exactly_the_backoffs_that_retries_accept(policy: Backoff) -> None:
    backoff = msgspec.to_builtins(policy)
    text = json.dumps({"id": "a", "steps": {"a": {"topic": "a", "retry": {"backoff": backoff}}}})

    answer = parse_workflow(text, format="json")

    assert isinstance(answer, Workflow) == (not retry.faults(policy))
    if isinstance(answer, Workflow):
        step = answer.steps[StepId("a")]
        assert isinstance(step, JobSpec)
        assert step.retry.backoff == policy


@pytest.mark.parametrize("failures", [0, 1, RENEWAL_FAILURES_MAX, RENEWAL_FAILURES_MAX + 1])
def test_a_file_accepts_exactly_the_lock_policies_that_leases_accept(failures: int) -> None:
    override = LeaseOverride(renewal_failures_max=failures)
    policy = f"{{renewal_failures_max: {failures}}}"

    answer = parse_workflow(
        f"{{id: a, lock_policy: {policy}, steps: {{a: {{topic: a}}}}}}", format="yaml"
    )

    assert isinstance(answer, Workflow) == (not lease.policy_faults(override))


@pytest.mark.parametrize("name", GOOD)
def test_the_published_schema_accepts_every_good_file(name: str) -> None:
    assert SCHEMA.is_valid(yaml.safe_load(GOOD[name]))


def test_the_published_schema_is_the_one_the_parser_states() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text()


def test_the_published_schema_is_a_schema() -> None:
    jsonschema_rs.meta.validate(workflow_json_schema())


# ── The reference ────────────────────────────────────────────────────────────────────────────────


def blocks(language: str) -> list[str]:
    text = REFERENCE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_every_example_of_the_reference_is_a_good_file(text: str) -> None:
    parsed(text)


def test_the_examples_of_items_with_a_workflow_fit_together() -> None:
    texts = [text for text in blocks("yaml") if "id: review-" in text]
    checked = check_workflows({text: (text.encode(), "yaml") for text in texts})
    assert [(each.faults, each.unknown) for each in checked.values()] == [((), frozenset())] * 2
    inner, outer = texts
    asking = inner.replace("judge:", "ask: {approval: {}}\n  judge:")
    found = check_workflows({"inner": (asking.encode(), "yaml"), "outer": (outer.encode(), "yaml")})
    [fault] = found["outer"].faults
    assert str(fault) == (
        "line 4: steps.pages.workflow: workflow 'review-page' has an approval step, 'ask':"
        " there can be none inside a for_each"
    )


@pytest.mark.parametrize("text", blocks("json"))
def test_every_json_example_of_the_reference_is_a_good_file(text: str) -> None:
    parsed(text, "json")


def members(schema: JsonValue) -> set[str]:
    match schema:
        case dict():
            named = schema.get("properties")
            own = set(named) if isinstance(named, dict) else set()
            return own.union(*map(members, schema.values()))
        case list():
            return set().union(*map(members, schema))
        case _:
            return set()


def test_the_reference_names_every_member() -> None:
    text = REFERENCE.read_text(encoding="utf-8")
    known = members(workflow_json_schema())

    assert {"id", "steps", "topic", "jitter_ms", "renewal_failures_max", "message"} <= known
    assert {member for member in known if f"`{member}`" not in text} == set()


def test_the_reference_lists_every_limit_with_its_value() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| ([\d.,]+) ", REFERENCE.read_text(encoding="utf-8"), re.MULTILINE
    )
    stated = {name: float(value.replace(",", "")) for name, value in rows}
    actual = {name: getattr(limits, name) for name in limits.__all__} | {
        "EXPRESSION_CHARS_MAX": expression.SOURCE_CHARS_MAX,
        "EXPRESSION_NESTING_MAX": expression.NESTING_MAX,
        "EXPRESSION_WORK_MAX": expression.WORK_MAX,
        "EXPRESSION_SIZE_MAX": expression.SIZE_MAX,
        "BACKOFF_FACTOR_MAX": retry.FACTOR_MAX,
        "FAULTS_MAX": faults.FAULTS_MAX,
        "INPUT_SCHEMA_BYTES_MAX": schema_rules.INPUT_SCHEMA_BYTES_MAX,
        "INPUT_SCHEMA_PATTERN_BYTES_MAX": schema_rules.INPUT_SCHEMA_PATTERN_BYTES_MAX,
        "INPUT_SCHEMA_SUBSCHEMAS_MAX": schema_rules.INPUT_SCHEMA_SUBSCHEMAS_MAX,
        "NODES_MAX": tree.NODES_MAX,
        "RENEWAL_FAILURES_MAX": RENEWAL_FAILURES_MAX,
        "TIMEOUT_S_MIN": TIMEOUT_S_MIN,
    }

    assert stated == actual


# ── What a file may cost ─────────────────────────────────────────────────────────────────────────


class Comparisons:
    """Counts how many words are compared in full to find a near one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.words = 0
        self.calls = 0
        compare = difflib.get_close_matches

        def counting(word: str, words: list[str], n: int, cutoff: float) -> list[str]:
            self.calls += 1
            self.words += len(words)
            return compare(word, words, n, cutoff)

        monkeypatch.setattr("stanchion.core.faults.difflib.get_close_matches", counting)


def similar(count: int) -> dict[str, Any]:
    """Steps with long names that differ in their last letters, and a hundred unknown needs."""
    steps: dict[str, Any] = {f"{'a' * 40}{each:05}": {"topic": "t"} for each in range(count)}
    steps[next(iter(steps))]["needs"] = [f"{'a' * 42}{each:03}" for each in range(100)]
    return {"id": "w", "steps": steps}


def test_a_file_with_too_many_steps_is_told_so_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comparisons = Comparisons(monkeypatch)
    (fault,) = faults_of(json.dumps(similar(3_206)), "json")
    assert fault.message == "has 3206 steps; from 1 to 200 are allowed"
    assert comparisons.words == 0


def test_near_names_are_looked_for_among_a_few_and_for_a_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comparisons = Comparisons(monkeypatch)
    faults = faults_of(json.dumps(similar(200)), "json")
    assert len(faults) == 100
    assert comparisons.calls == 20
    assert comparisons.words <= 200
    assert "did you mean" in faults[0].message


def test_a_near_name_is_found_among_many() -> None:
    steps = {f"step-{each}": {"topic": "t"} for each in range(150)}
    steps["summarise"] = {"topic": "t"}
    steps["last"] = {"topic": "t", "needs": ["sumarise"]}  # type: ignore[dict-item]
    (fault,) = faults_of(json.dumps({"id": "w", "steps": steps}), "json")
    assert fault.message == "there is no step 'sumarise'; did you mean 'summarise'?"


def heavy(expressions: int) -> dict[str, Any]:
    """Expressions that are all different, of five words and signs each, which count as seven."""
    holes = [f"${{input.a{each}.b}}" for each in range(expressions)]
    return {"id": "w", "steps": {"s": {"topic": "t", "input": holes}}}


def test_the_expressions_of_a_file_are_counted_before_they_are_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed(json.dumps(heavy(limits.FILE_TOKENS_MAX // 7)), "json")
    compiled: list[str] = []
    monkeypatch.setattr(
        "stanchion.core.workflow_file.rules.compile_template",
        lambda value, **_: compiled.append(value),
    )
    (fault,) = faults_of(json.dumps(heavy(3_000)), "json")
    assert fault.path == "steps"
    assert fault.message == (
        "the expressions have 21000 words and signs together; at most 6000 are allowed in a file"
    )
    assert compiled == []


def test_long_texts_around_expressions_are_not_counted() -> None:
    text = "Please answer the question. " * 1_000 + "${input.question}"
    parsed(json.dumps({"id": "w", "steps": {"s": {"topic": "t", "input": text}}}), "json")
