"""Input schemas: what a workflow accepts, in JSON Schema 2020-12.

A schema comes from a tenant and is held against every input, so it may neither reach outside nor
make the server work for long. ``schema_rules`` sees to that before anything is compiled; here it is
compiled, and inputs are checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import jsonschema_rs
import msgspec

from stanchion.core.faults import Fault, Findings, Path
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.schema_rules import PATTERN_OPTIONS, judge_rules, refuse_remote

__all__ = ["InputSchema", "SchemaFaults", "compile_schema", "judge_schema"]


def compile_schema(schema: JsonObject) -> InputSchema:
    """Make a schema ready for use. Raises ``SchemaFaults`` with everything that is wrong."""
    findings = Findings()
    compiled = judge_schema(schema, (), findings)
    if compiled is None:
        raise SchemaFaults(findings.faults())
    return compiled


def judge_schema(schema: JsonObject, path: Path, findings: Findings) -> InputSchema | None:
    """Compile a schema that stands at ``path`` in a document, or note what is wrong with it."""
    weight = judge_rules(schema, path, findings)
    if weight is None:
        return None
    try:
        return InputSchema(_validator(schema), weight)
    except ValueError as error:
        # What the rules do not know of, they leave to the one who has to work with it.
        findings.note(path, f"cannot be used: {str(error).splitlines()[0]}")
        return None


class SchemaFaults(Exception):
    """A schema that cannot be used, and why."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        super().__init__("; ".join(f"{fault.path}: {fault.message}" for fault in faults))
        self.faults = faults


class InputSchema:
    """A compiled schema."""

    __slots__ = ("_validator", "_weight")

    def __init__(self, validator: jsonschema_rs.Validator, weight: int) -> None:
        self._validator = validator
        self._weight = weight

    def faults(self, value: JsonValue) -> tuple[Fault, ...]:
        """Everything that is wrong with an input; nothing, if it may be used.

        Of an input so large that listing its faults could take long, only the first is told.
        """
        findings = Findings()
        try:
            for error in self._errors(value):
                _note(error, findings)
        except (ValueError, RecursionError) as error:
            findings.note(_INPUT, f"cannot be checked: {str(error).splitlines()[0]}")
        return findings.faults()

    def _errors(self, value: JsonValue) -> Iterable[jsonschema_rs.ValidationError]:
        size = self._weight * len(msgspec.json.encode(value))
        try:
            self._validator.validate(value)
        except jsonschema_rs.ValidationError as first:
            return [first] if size > _LISTING_MAX else self._validator.iter_errors(value)
        return ()


_INPUT: Final[Path] = ("input",)
_LISTING_MAX: Final = 500_000
"""Subschemas times bytes. Each fault costs microseconds, and there may be that many."""
_MESSAGE_CHARS_MAX: Final = 300


def _validator(schema: JsonObject) -> jsonschema_rs.Validator:
    return jsonschema_rs.Draft202012Validator(
        schema,
        retriever=refuse_remote,
        validate_formats=False,  # 2020-12: `format` is a remark, not a rule
        pattern_options=PATTERN_OPTIONS,
        mask="the value",  # inputs may be secret, and large
    )


def _note(error: jsonschema_rs.ValidationError, findings: Findings) -> None:
    at: Path = (*_INPUT, *error.instance_path)
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
