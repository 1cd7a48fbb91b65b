"""The rules of a workflow file: references between its parts.

Needs name existing steps, once each, and have no cycles. An expression of a step may read the input
of the run and the steps that it needs, directly or indirectly, but no other step: whether another
step has ended by then would depend on timing. The output may read every step.

The rules are checked on the tree of the file, even if its shape has faults, so that all faults are
reported together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from stanchion.core.expression import (
    ExpressionFault,
    TemplateFaults,
    compile_expression,
    compile_template,
    template_tokens,
    tokens_in,
)
from stanchion.core.faults import Findings, Near, Path, named
from stanchion.core.graph import ancestors, cycle
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.limits import FILE_DATA_SCHEMAS_MAX, FILE_TOKENS_MAX, WORKFLOW_STEPS_MAX
from stanchion.core.schema import judge_schema
from stanchion.core.workflow_file.members import OF_ITEMS

_SCOPE: Final = frozenset({"input", "steps"})
_ITEM_SCOPE: Final = _SCOPE | {"item", "index"}


def judge_workflow(tree: JsonValue, findings: Findings) -> None:
    """Note every violation of a rule in a workflow file."""
    file = _object(tree)
    steps = _object(file.get("steps"))
    if not _judge_size(file, steps, findings):
        return
    sight = _judge_needs(steps, findings)
    for name, step in steps.items():
        _judge_step(name, _object(step), sight, findings)
    _judge_template(None, file, ("output",), _SCOPE, sight, findings)
    schema = file.get("input_schema")
    if isinstance(schema, dict) and findings.clean(("input_schema",)):
        judge_schema(schema, ("input_schema",), findings)
    _judge_data_schemas(steps, findings)


def _judge_data_schemas(steps: JsonObject, findings: Findings) -> None:
    """Judge what approvals demand of the data of their decisions."""
    schemas: dict[Path, JsonObject] = {}
    for name, step in steps.items():
        schema = _object(_object(step).get("approval")).get("data_schema")
        path: Path = ("steps", name, "approval", "data_schema")
        if isinstance(schema, dict) and findings.clean(path):
            schemas[path] = schema
    if len(schemas) > FILE_DATA_SCHEMAS_MAX:
        wrong = f"{len(schemas)} approvals with a data_schema; at most {FILE_DATA_SCHEMAS_MAX} are"
        findings.note(("steps",), f"{wrong} allowed in a file")
        return
    for path, schema in schemas.items():
        judge_schema(schema, path, findings)


def _judge_size(file: JsonObject, steps: JsonObject, findings: Findings) -> bool:
    """Whether the file is small enough to check the rules, whose cost grows with its size."""
    if len(steps) > WORKFLOW_STEPS_MAX:
        return False  # the shape has reported it
    tokens = template_tokens(file.get("output"))
    for step in map(_object, steps.values()):
        when = step.get("when")
        tokens += tokens_in(when) if isinstance(when, str) else 0
        tokens += template_tokens(step.get("input")) + template_tokens(step.get("for_each"))
        tokens += template_tokens(_object(step.get("approval")).get("message"))
    if tokens <= FILE_TOKENS_MAX:
        return True
    wrong = (
        f"the expressions have {tokens} words and signs together; at most {FILE_TOKENS_MAX} are"
        " allowed in a file"
    )
    findings.note(("steps",), wrong)
    return False


def _object(value: JsonValue) -> JsonObject:
    return value if isinstance(value, dict) else {}


# ── Needs ────────────────────────────────────────────────────────────────────────────────────────


class _Readable(NamedTuple):
    """All steps, and the steps that each step may read."""

    steps: JsonObject
    before: Mapping[str, frozenset[str]]
    """Without the steps whose needs are faulty: their references cannot be checked."""


def _judge_needs(steps: JsonObject, findings: Findings) -> _Readable:
    needs: dict[str, list[str]] = {}
    unsure: set[str] = set()
    for name, step in steps.items():
        needs[name] = []
        given = step.get("needs", []) if isinstance(step, dict) else None
        if not isinstance(given, list) or not findings.clean(("steps", name, "needs")):
            unsure.add(name)
            continue
        for position, need in enumerate(given):
            at = ("steps", name, "needs", position)
            if not isinstance(need, str) or not findings.clean(at):
                unsure.add(name)
            elif need == name:
                findings.note(at, "a step cannot need itself")
                unsure.add(name)
            elif need not in steps:
                findings.note(at, f"there is no step {named(need)}", near=Near(need, steps.keys()))
                unsure.add(name)
            elif need in needs[name]:
                findings.note(at, f"repeated: {named(need)} is there already")
            else:
                needs[name].append(need)
    unsure.update(_judge_cycles(steps, needs, findings))
    before = ancestors(needs)
    sure = {name: seen for name, seen in before.items() if unsure.isdisjoint({name, *seen})}
    return _Readable(steps, sure)


def _judge_cycles(steps: JsonObject, needs: dict[str, list[str]], findings: Findings) -> set[str]:
    """Note cycles that share no step, and remove the needs of their steps."""
    places = {name: place for place, name in enumerate(steps)}
    in_cycles: set[str] = set()
    while (found := cycle(needs)) is not None:
        # Begin with the first step in file order, so that a cycle is always reported alike.
        start = found.index(min(found, key=places.__getitem__))
        first, second, *others = (*found[start:], *found[:start])
        given = _object(steps[first])["needs"]
        assert isinstance(given, list)
        position = given.index(second)
        left_out = ["…"] if len(others) > _CYCLE_STEPS_MAX else []
        names = " → ".join((first, second, *others[:_CYCLE_STEPS_MAX], *left_out, first))
        findings.note(("steps", first, "needs", position), f"needs lead in a circle: {names}")
        in_cycles.update(found)
        needs.update({name: [] for name in found})
    return in_cycles


_CYCLE_STEPS_MAX: Final = 8
"""Steps of a cycle that are named, besides the first two."""


# ── Expressions ──────────────────────────────────────────────────────────────────────────────────


def _judge_step(name: str, step: JsonObject, sight: _Readable, findings: Findings) -> None:
    path = ("steps", name)
    when = step.get("when")
    if isinstance(when, str) and findings.clean((*path, "when")):
        _judge_condition(name, when, (*path, "when"), sight, findings)
    _judge_template(name, step, (*path, "for_each"), _SCOPE, sight, findings)
    _judge_single(step.get("for_each"), (*path, "for_each"), findings)
    if ("topic" in step or "workflow" in step) and "for_each" not in step:
        for member in OF_ITEMS:
            if member in step and findings.clean((*path, member)):
                findings.note((*path, member), "only a step with for_each may have it")
    names = _ITEM_SCOPE if "for_each" in step else _SCOPE
    _judge_template(name, step, (*path, "input"), names, sight, findings)
    approval = _object(step.get("approval"))
    _judge_template(name, approval, (*path, "approval", "message"), _SCOPE, sight, findings)
    if "workflow" in step:
        _judge_single(step.get("input"), (*path, "input"), findings, names)


def _judge_condition(name: str, when: str, at: Path, sight: _Readable, findings: Findings) -> None:
    if when.lstrip().startswith("${"):
        findings.note(at, "a condition is written bare, without ${…}")
        return
    try:
        condition = compile_expression(when, names=_SCOPE, want_bool=True)
    except ExpressionFault as fault:
        findings.note(at, str(fault))
    else:
        _judge_references(name, condition.references, at, sight, findings)


def _judge_single(
    value: JsonValue, at: Path, findings: Findings, names: frozenset[str] = _SCOPE
) -> None:
    """Check that the ``${`` and ``}`` around the text, which the shape requires, are one hole."""
    if not isinstance(value, str) or not findings.clean(at):
        return
    try:
        compile_expression(value[2:-1], names=names)
    except ExpressionFault:
        findings.note(at, "must be exactly one expression: ${…}")


def _judge_template(
    name: str | None,
    holder: JsonObject,
    path: Path,
    names: frozenset[str],
    sight: _Readable,
    findings: Findings,
) -> None:
    """Check a member that may hold ``${…}`` in any string. Faults have the path of the string."""
    if path[-1] not in holder or not findings.clean(path):
        return
    for at, text in _texts(holder[str(path[-1])], path):
        try:
            template = compile_template(text, names=names, path=at)
        except TemplateFaults as faults:
            for place, message in faults.faults:
                findings.note(place, message)
        else:
            _judge_references(name, template.references, at, sight, findings)


def _texts(value: JsonValue, path: Path) -> Iterator[tuple[Path, str]]:
    waiting: list[tuple[Path, JsonValue]] = [(path, value)]
    while waiting:
        at, part = waiting.pop()
        if isinstance(part, str):
            yield at, part
        elif isinstance(part, list):
            waiting.extend(((*at, position), item) for position, item in enumerate(part))
        elif isinstance(part, dict):
            waiting.extend(((*at, key), member) for key, member in part.items())


def _judge_references(
    name: str | None, references: frozenset[str], at: Path, sight: _Readable, findings: Findings
) -> None:
    """Check that the steps an expression reads are visible; without a name, all steps are."""
    may_read = None if name is None else sight.before.get(name)
    for reference in sorted(references):
        if reference not in sight.steps:
            wrong = f"there is no step {named(reference)}"
            findings.note(at, wrong, near=Near(reference, sight.steps.keys()))
        elif reference == name:
            findings.note(at, "a step cannot read itself")
        elif may_read is not None and reference not in may_read:
            wrong = f"reads step {named(reference)}, which it does not need"
            findings.note(at, f"{wrong}; add {named(reference)} to its needs")
