"""Input schemas: which inputs a workflow accepts, in JSON Schema 2020-12.

A schema comes from a tenant and is applied to every input, so it must not fetch anything and must
not take long to check. ``schema_rules`` enforces both before a schema is compiled; this module
compiles schemas and checks inputs.
"""

from __future__ import annotations

from typing import Final

import jsonschema_rs
import msgspec

from stanchion.core.faults import Fault, Findings, Path
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.schema_cost import CHECK_NS_MAX, ERRORS_NS_MAX, CheckCost, InputShape
from stanchion.core.schema_rules import PATTERN_OPTIONS, judge_rules, refuse_remote

_INPUT: Final[Path] = ("input",)


def compile_schema(schema: JsonObject) -> InputSchema:
    """Compile a schema. Raises ``SchemaFaults`` with all faults."""
    findings = Findings()
    compiled = judge_schema(schema, (), findings)
    if compiled is None:
        raise SchemaFaults(findings.faults())
    return compiled


def judge_schema(schema: JsonObject, path: Path, findings: Findings) -> InputSchema | None:
    """Compile the schema at ``path`` of a document, or note its faults and return ``None``."""
    cost = judge_rules(schema, path, findings)
    if cost is None:
        return None
    try:
        return InputSchema(_validator(schema), cost)
    except ValueError as error:
        # Some faults are found only by the validator itself.
        findings.note(path, f"cannot be used: {str(error).splitlines()[0]}")
        return None


class SchemaFaults(Exception):
    """The faults of a schema that cannot be used."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        super().__init__("; ".join(f"{fault.path}: {fault.message}" for fault in faults))
        self.faults = faults


class InputSchema:
    """A compiled schema."""

    __slots__ = ("_cost", "_small_bytes", "_validator")

    def __init__(self, validator: jsonschema_rs.Validator, cost: CheckCost) -> None:
        self._validator = validator
        self._cost = cost
        self._small_bytes = cost.small_bytes()

    def faults(
        self, value: JsonValue, root: Path = _INPUT, *, first_only: bool = False
    ) -> tuple[Fault, ...]:
        """All faults of an input, or the first; empty if it is valid.

        An input whose check could take too long is refused without a check. If listing all faults
        could take too long, only the first is reported, or only that there is one.
        """
        findings = Findings()
        try:
            self._check(value, root, findings, first_only=first_only)
        except (ValueError, RecursionError) as error:
            findings.note(root, f"cannot be checked: {str(error).splitlines()[0]}")
        return findings.faults()

    def work(self, value: JsonValue) -> int:
        """The work of checking this input, in the units of ``EvaluationBudget``."""
        size = len(msgspec.json.encode(value))
        if size <= self._small_bytes:
            return size // 8
        return int(min(CHECK_NS_MAX, self._cost.check_ns(InputShape(value))) / _WORK_UNIT_NS)

    def _check(self, value: JsonValue, root: Path, findings: Findings, *, first_only: bool) -> None:
        size = len(msgspec.json.encode(value))
        if size > self._small_bytes:
            shape = InputShape(value)
            check_ns = self._cost.check_ns(shape)
            if check_ns > CHECK_NS_MAX:
                times = check_ns / CHECK_NS_MAX
                findings.note(
                    root,
                    "too large for the workflow's schema: checking it could take"
                    f" {times:,.1f} times as long as the {CHECK_NS_MAX / 1e6:g} ms that are"
                    " allowed (rules that apply to each value × values). Send less, or"
                    " simplify the schema",
                )
                return
            if self._cost.first_error_ns(shape) > ERRORS_NS_MAX:
                if not self._validator.is_valid(value):
                    wrong = "does not match the workflow's schema; it is too large to say where"
                    findings.note(root, wrong)
                return
            first_only = first_only or self._cost.all_errors_ns(shape) > ERRORS_NS_MAX
        if first_only:
            try:
                self._validator.validate(value)
            except jsonschema_rs.ValidationError as first:
                _note(first, root, findings)
            return
        for error in self._validator.iter_errors(value):
            _note(error, root, findings)


_WORK_UNIT_NS: Final = 150
_MESSAGE_CHARS_MAX: Final = 300


def _validator(schema: JsonObject) -> jsonschema_rs.Validator:
    return jsonschema_rs.Draft202012Validator(
        schema,
        retriever=refuse_remote,
        validate_formats=False,  # 2020-12: `format` is an annotation, not an assertion
        pattern_options=PATTERN_OPTIONS,
        mask="the value",  # inputs may be secret, and large
    )


def _note(error: jsonschema_rs.ValidationError, root: Path, findings: Findings) -> None:
    at: Path = (*root, *error.instance_path)
    kinds = jsonschema_rs.ValidationErrorKind
    match error.kind:
        case kinds.Required(property=name):
            findings.note((*at, name), "missing")
        case kinds.AdditionalProperties(unexpected=names):
            for name in names:
                findings.note((*at, name), "not a member that is expected here")
        case kinds.FalseSchema():
            findings.note(at, "nothing is allowed here")
        case _:
            findings.note(at, error.message[:_MESSAGE_CHARS_MAX])
