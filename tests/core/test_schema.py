"""Input schemas: what they refuse to be, what they say about an input, and that both stay quick."""

from __future__ import annotations

import socket
from typing import Any, cast

import jsonschema_rs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stanchion.core.faults import FAULTS_MAX, Fault, Findings
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.schema import InputSchema, SchemaFaults, compile_schema, judge_schema
from stanchion.core.schema_rules import (
    INPUT_SCHEMA_BYTES_MAX,
    INPUT_SCHEMA_SUBSCHEMAS_MAX,
    judge_rules,
    refuse_remote,
)

RECURSIVE = "leads back to itself; schemas must not be recursive"
NOT_A_TYPE = (
    "must be a type of JSON Schema or a list of them: "
    "array, boolean, integer, null, number, object, string"
)
TOO_MANY = f"more than {INPUT_SCHEMA_SUBSCHEMAS_MAX} subschemas, once every $ref is followed"
TOO_LONG = f"{INPUT_SCHEMA_BYTES_MAX + 18} bytes long; at most {INPUT_SCHEMA_BYTES_MAX} are allowed"
NO_URI = "cannot be used: Invalid URI reference '::': unexpected character at index 0"
NOT_LINEAR = "not a pattern that can be matched in linear time, or too large"


def faults_of(schema: JsonObject) -> list[tuple[str, str]]:
    with pytest.raises(SchemaFaults) as refused:
        compile_schema(schema)
    assert refused.value.faults
    return [(fault.path, fault.message) for fault in refused.value.faults]


def doubling(levels: int) -> JsonObject:
    """A few lines that come to 2^levels subschemas."""
    defs: JsonObject = {f"d{levels}": {}}
    for level in range(levels):
        reference: JsonObject = {"$ref": f"#/$defs/d{level + 1}"}
        defs[f"d{level}"] = {"allOf": [reference, reference]}
    return {"$ref": "#/$defs/d0", "$defs": defs}


# ── Inputs ───────────────────────────────────────────────────────────────────────────────────────

QUESTION = compile_schema(
    {
        "type": "object",
        "properties": {
            "question": {"type": "string", "minLength": 3},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
        },
        "required": ["question"],
        "additionalProperties": False,
    }
)


def test_an_input_that_fits_has_no_faults() -> None:
    assert QUESTION.faults({"question": "why?", "tags": ["a"]}) == ()


@pytest.mark.parametrize(
    ("value", "faults"),
    [
        ([], [("input", 'the value is not of type "object"')]),
        ({}, [("input.question", "missing")]),
        ({"question": "?"}, [("input.question", "the value is shorter than 3 characters")]),
        (
            {"tags": ["a", "c", 5], "tag": 1, "q.": 2},
            [
                ("input.question", "missing"),
                ("input.tags[1]", 'the value is not one of "a" or "b"'),
                ("input.tags[2]", 'the value is not one of "a" or "b"'),
                ("input.tag", "not a member that is expected here"),
                ('input["q."]', "not a member that is expected here"),
            ],
        ),
    ],
)
def test_all_faults_of_an_input_are_listed_with_their_paths(
    value: JsonValue, faults: list[tuple[str, str]]
) -> None:
    found = QUESTION.faults(value)

    assert sorted((fault.path, fault.message) for fault in found) == sorted(faults)


def test_what_is_forbidden_outright_is_said_in_words() -> None:
    schema = compile_schema({"properties": {"old": False}})

    assert schema.faults({"old": 1}) == (Fault("input.old", "nothing is allowed here"),)


def test_the_input_itself_is_not_repeated_in_a_fault() -> None:
    (fault,) = QUESTION.faults({"question": ["a secret"]})

    assert "secret" not in fault.message


def test_a_long_message_is_cut() -> None:
    (fault,) = compile_schema({"const": "x" * 1_000}).faults("y")

    assert len(fault.message) == 300


def test_many_faults_are_counted_instead_of_listed() -> None:
    faults = compile_schema({"items": {"type": "string"}}).faults([1] * (FAULTS_MAX + 5))

    assert len(faults) == FAULTS_MAX + 1
    assert faults[-1] == Fault("", "and 5 more faults")


def test_of_a_very_large_input_only_the_first_fault_is_told() -> None:
    faults = compile_schema({"items": {"type": "string"}}).faults([1] * 130_000)

    assert faults == (Fault("input[0]", 'the value is not of type "string"'),)


def test_format_is_a_remark_and_not_a_rule() -> None:
    assert compile_schema({"format": "email"}).faults("nobody") == ()


@pytest.mark.parametrize("value", ["\ud800", {"\ud800": 1}])
def test_a_value_that_is_not_json_is_a_fault_and_no_crash(value: JsonValue) -> None:
    (fault,) = compile_schema({}).faults(value)

    assert fault.path == "input"
    assert fault.message.startswith("cannot be checked: ")


@pytest.mark.parametrize("depth", [300, 50_000])
def test_a_value_nested_beyond_reason_is_a_fault_and_no_crash(depth: int) -> None:
    deep: JsonValue = []
    for _ in range(depth):
        deep = [deep]

    faults = QUESTION.faults({"question": 5, "tags": deep})

    assert faults[-1].path == "input"
    assert faults[-1].message.startswith("cannot be checked: ")


# ── Bounded checks ───────────────────────────────────────────────────────────────────────────────

ALTERNATIVES: JsonObject = {"anyOf": [{"const": each + 1} for each in range(488)]}
TINY = 1e-300


def stacked(levels: int) -> JsonObject:
    """Each ``unevaluatedProperties`` evaluates what is below it three times."""
    schema: JsonObject = {"unevaluatedProperties": True}
    for _ in range(levels):
        schema = {"allOf": [schema], "unevaluatedProperties": {"type": "integer"}}
    return schema


COSTLY: dict[str, tuple[JsonObject, JsonValue]] = {
    "alternatives": (
        {"properties": {"x": {"type": "array", "items": ALTERNATIVES}}},
        {"x": [0] * 130_900},
    ),
    "alternatives by reference": (
        {"$defs": {"any": ALTERNATIVES}, "items": {"$ref": "#/$defs/any"}},
        [0] * 130_900,
    ),
    "alternatives, each with a list": (
        {"anyOf": [{"items": {"type": "string"}} for _ in range(200)]},
        [0] * 100_000,
    ),
    "a long enum of unlike things": ({"items": {"enum": [*range(5_000), "x", []]}}, [1] * 50_000),
    "an enum of floats": (
        {"items": {"enum": [each + 0.5 for each in range(1_000)]}},
        [0.5] * 1_000,
    ),
    "an enum of integers, and floats": ({"items": {"enum": [*range(5_000)]}}, [0.5] * 1_000),
    "an enum of objects": (
        {"items": {"enum": [{"a": [0] * 50, "b": each} for each in range(100)]}},
        [{"a": [0] * 50, "b": -1}] * 1_000,
    ),
    "multiples of a fraction": (
        {"items": {"allOf": [{"multipleOf": 0.1} for _ in range(100)]}},
        [TINY] * 1_000,
    ),
    "multiples of a tiny number": ({"items": {"multipleOf": TINY}}, [0.5] * 3_000),
    "multiples, and huge numbers": ({"items": {"multipleOf": 0.1}}, [1e300] * 3_000),
    "bounds with a fraction": ({"items": {"minimum": 0.5}}, [2**62] * 20_000),
    "constants close to zero": ({"items": {"not": {"const": TINY}}}, [1] * 1_000),
    "bounds close to zero": ({"items": {"minimum": TINY}}, [1] * 1_000),
    "bounds and tiny numbers": ({"items": {"minimum": 0.01}}, [TINY] * 20_000),
    "constants and tiny numbers": ({"items": {"not": {"const": 5}}}, [TINY] * 20_000),
    "unique lists": ({"uniqueItems": True}, [[each] for each in range(65_000)]),
    "unevaluated members": (stacked(16), {str(each): 0 for each in range(100)}),
    "a pattern that fits no cache": ({"items": {"pattern": "a[ab]{600}c"}}, ["ab" * 5_000]),
    "names that match many patterns": (
        {"patternProperties": {f"a[ab]{{{each}}}c": {} for each in (20, 21, 22, 23)}},
        {"ab" * 2_000: 0},
    ),
    "names with alternatives": (
        {"propertyNames": {"anyOf": [{"const": str(each)} for each in range(400)]}},
        {str(each): 0 for each in range(20_000)},
    ),
    "many required members": (
        {"items": {"required": [f"k{each}" for each in range(5_000)]}},
        [{}] * 50_000,
    ),
    "deep lists": (
        {"items": {"contains": {"items": {"contains": ALTERNATIVES}}}},
        [[[[0] * 10] * 10] * 10] * 10,
    ),
}


class CountingValidator:
    """Counts how often an input is checked."""

    def __init__(self, validator: Any) -> None:  # noqa: ANN401 - three methods of theirs
        self._validator = validator
        self.checks: list[str] = []

    def is_valid(self, value: JsonValue) -> bool:
        self.checks.append("is_valid")
        return bool(self._validator.is_valid(value))

    def validate(self, value: JsonValue) -> None:
        self.checks.append("validate")
        self._validator.validate(value)

    def iter_errors(self, value: JsonValue) -> Any:  # noqa: ANN401 - theirs
        self.checks.append("iter_errors")
        return self._validator.iter_errors(value)


def counted(schema: JsonObject) -> tuple[InputSchema, CountingValidator]:
    cost = judge_rules(schema, (), Findings())
    assert cost is not None
    counting = CountingValidator(jsonschema_rs.Draft202012Validator(schema))
    return InputSchema(cast("jsonschema_rs.Validator", counting), cost), counting


@pytest.mark.parametrize(("schema", "value"), COSTLY.values(), ids=COSTLY)
def test_a_check_that_could_take_long_is_refused_before_it_begins(
    schema: JsonObject, value: JsonValue
) -> None:
    checker, counting = counted(schema)

    (fault,) = checker.faults(value)

    assert fault.path == "input"
    assert fault.message.startswith("too large for the workflow's schema: checking it could take")
    assert "times as long as the 10 ms that are allowed" in fault.message
    assert counting.checks == []


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"items": {"type": "integer", "minimum": 0}}, [1] * 130_000),
        (
            {"items": {"properties": {f"k{each}": {"type": "integer"} for each in range(100)}}},
            [{f"k{each}": each for each in range(100)}] * 250,
        ),
        ({"items": {"enum": [f"country-{each}" for each in range(300)]}}, ["country-7"] * 15_000),
        ({"items": {"pattern": "^[0-9a-f]{8}-[0-9a-f]{4}$"}}, ["0123abcd-ef01"] * 15_000),
        ({"items": {"type": "number", "minimum": -1, "maximum": 1}}, [0.123456] * 25_000),
        ({"uniqueItems": True}, [f"item-{each}" for each in range(15_000)]),
        ({"type": "object", "properties": {"text": {"type": "string"}}}, {"text": "x" * 250_000}),
        (ALTERNATIVES, 488),
    ],
)
def test_large_inputs_of_plain_schemas_are_checked_as_ever(
    schema: JsonObject, value: JsonValue
) -> None:
    checker, counting = counted(schema)
    assert checker.faults(value) == ()
    assert len(counting.checks) == 1


@pytest.mark.parametrize(
    ("schema", "value", "check", "message"),
    [
        ({"items": {"type": "string"}}, [1] * 5, "iter_errors", "not of type"),
        ({"items": {"type": "string"}}, [1] * 100_000, "validate", "not of type"),
        ({"required": ["y"]}, {"x": [1] * 100_000}, "validate", "missing"),
        (
            {"anyOf": [{"required": [f"y{each}"]} for each in range(50)]},
            {"x": [1] * 60_000},
            "is_valid",
            "does not match the workflow's schema; it is too large to say where",
        ),
        (
            {"propertyNames": {"pattern": "^(x|y|z)*a[0-9]+$"}},
            {f"b{each}": 0 for each in range(5_000)},
            "validate",
            "does not match",
        ),
    ],
)
def test_an_invalid_input_is_checked_once(
    schema: JsonObject, value: JsonValue, check: str, message: str
) -> None:
    checker, counting = counted(schema)
    faults = checker.faults(value)
    assert message in faults[0].message
    assert counting.checks == [check]


def test_a_check_counts_as_work_in_proportion_to_its_cost() -> None:
    checker = compile_schema({"items": ALTERNATIVES})
    assert checker.work([]) == 0
    assert 50_000 < checker.work([488] * 90) <= 10_000_000 / 150
    assert checker.work([488] * 90) > 8 * checker.work([488] * 10)


# ── Schemas ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.org/s"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}, "unused": True}},
        {"$ref": "#/definitions/a", "definitions": {"a": {"type": "string"}}},
        {"$ref": "#/$defs/a~1b~0c", "$defs": {"a/b~c": {}}},
        {"prefixItems": [{"type": "string"}], "items": {"$ref": "#/prefixItems/0"}},
        {"properties": {"$ref": {"type": "string"}, "$id": {}, "pattern": {}}},
        {"const": {"$ref": "https://example.org"}, "enum": [{"$ref": 5}]},
        {"pattern": r"^[\w.-]{1,64}@\d+$", "patternProperties": {"^x-": {}}},
        {"dependencies": {"a": ["b"]}, "dependentSchemas": {"a": {"required": ["b"]}}},
        {"if": {}, "then": True, "else": False, "not": False},
        {"$anchor": "here"},
        {"propertys": "an unknown word is a remark"},
    ],
)
def test_schemas_within_the_rules_are_accepted(schema: JsonObject) -> None:
    assert isinstance(compile_schema(schema), InputSchema)


@pytest.mark.parametrize(
    ("schema", "faults"),
    [
        (
            {"type": 5, "properties": {"a": 3, "b": {"minimum": "x", "required": "y"}}},
            [
                ("properties.a", '3 is not of types "boolean", "object"'),
                ("properties.b.minimum", '"x" is not of type "number"'),
                ("properties.b.required", '"y" is not of type "array"'),
                ("type", NOT_A_TYPE),
            ],
        ),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#"},
            [("$schema", 'must be "https://json-schema.org/draft/2020-12/schema" or absent')],
        ),
        (
            {"properties": {"a": {"$ref": "other.json"}, "b": {"$ref": "http://127.0.0.1:9/x"}}},
            [
                (
                    "properties.a.$ref",
                    '"other.json" is outside the schema; refer to #/$defs/… within it',
                ),
                (
                    "properties.b.$ref",
                    '"http://127.0.0.1:9/x" is outside the schema; refer to #/$defs/… within it',
                ),
            ],
        ),
        (
            {"$defs": {"unused": {"items": {"$ref": "file:///etc/passwd"}}}},
            [
                (
                    "$defs.unused.items.$ref",
                    '"file:///etc/passwd" is outside the schema; refer to #/$defs/… within it',
                )
            ],
        ),
        (
            {"$ref": "#/$defs/a", "$defs": {"b": {}}},
            [("$ref", '"#/$defs/a" is no place in the schema')],
        ),
        ({"$ref": "#a", "$anchor": "a"}, [("$ref", '"#a" is no place in the schema')]),
        (
            {"$ref": "#/$defs/%61", "$defs": {"a": {}, "%61": {}}},
            [("$ref", '"#/$defs/%61" is no place in the schema')],
        ),
        (
            {"allOf": [{"$ref": "#/required/0"}, {"$ref": "#/allOf/9"}], "required": ["a"]},
            [
                ("allOf[0].$ref", '"#/required/0" is no place in the schema'),
                ("allOf[1].$ref", '"#/allOf/9" is no place in the schema'),
            ],
        ),
        ({"$ref": "#"}, [("$ref", RECURSIVE)]),
        ({"properties": {"a": {"$ref": "#"}}}, [("properties.a.$ref", RECURSIVE)]),
        (
            {"$defs": {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {"not": {"$ref": "#/$defs/a"}}}},
            [("$defs.a.items.$ref", RECURSIVE)],
        ),
        (
            {"properties": {"a": {"$id": "a", "$schema": "b", "$dynamicRef": "#c"}}},
            [
                ("properties.a.$dynamicRef", "not allowed; use $ref"),
                ("properties.a.$id", "allowed at the top of the schema only"),
                ("properties.a.$schema", "allowed at the top of the schema only"),
            ],
        ),
        (
            {"pattern": "(", "patternProperties": {r"(a)\1": {}, "(?=a)": {}, "ok": {}}},
            [
                (r'patternProperties["(a)\\1"]', NOT_LINEAR),
                ('patternProperties["(?=a)"]', NOT_LINEAR),
                ("pattern", NOT_LINEAR),
            ],
        ),
        ({"pattern": "((a{1,100}){1,100}){1,100}"}, [("pattern", NOT_LINEAR)]),
        (
            {"allOf": [{"pattern": "^[a-z]{1,300}$"}] * 2},
            [("", "the patterns are too large together; shorten their repetitions")],
        ),
        (doubling(9), [("", TOO_MANY)]),
        ({"description": "x" * INPUT_SCHEMA_BYTES_MAX}, [("", TOO_LONG)]),
        ({"$id": "::"}, [("", NO_URI)]),
        (
            # What a reference leads to was never meant to be a schema.
            {"properties": {"allOf": {}, "pattern": {}}, "not": {"$ref": "#/properties"}},
            [("", 'cannot be used: the value is not of type "array"')],
        ),
    ],
)
def test_everything_that_is_wrong_with_a_schema_is_said(
    schema: JsonObject, faults: list[tuple[str, str]]
) -> None:
    assert faults_of(schema) == faults


def test_the_error_reads_as_one_line() -> None:
    with pytest.raises(SchemaFaults, match=r"^\$ref: leads back to itself; .*recursive$"):
        compile_schema({"$ref": "#"})


def test_subschemas_are_counted_as_often_as_references_lead_to_them() -> None:
    compile_schema({"allOf": [{}] * (INPUT_SCHEMA_SUBSCHEMAS_MAX - 1)})
    faults_of({"allOf": [{}] * INPUT_SCHEMA_SUBSCHEMAS_MAX})
    compile_schema(doubling(6))


def test_a_schema_that_would_take_for_ever_is_refused_at_once() -> None:
    assert len(faults_of(doubling(200))) == 1


def test_a_chain_of_references_is_no_deeper_than_a_short_one() -> None:
    length = 1_500
    defs: JsonObject = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(length)}

    assert len(faults_of({"$ref": "#/$defs/a0", "$defs": {**defs, f"a{length}": {}}})) == 1


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "URL"},
        {"$ref": "URL#/a"},
        {"definitions": {"a": {"$ref": "URL"}}},
        {"properties": {"a": {"$id": "URL", "$ref": "b.json"}}},
        {"$id": "URL", "$ref": "b.json"},
        {"$schema": "URL"},
        {"$dynamicRef": "URL"},
        {"unknown": {"$ref": "URL"}, "$ref": "#/unknown"},
    ],
)
def test_nothing_is_ever_fetched(schema: JsonObject) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
        aimed = msgspec.json.decode(msgspec.json.encode(schema).replace(b"URL", url.encode()))

        assert faults_of(aimed)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_what_the_rules_may_have_missed_is_not_fetched_either() -> None:
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:9/ is outside the schema"):
        jsonschema_rs.Draft202012Validator({"$ref": "http://127.0.0.1:9/"}, retriever=refuse_remote)


words = st.sampled_from(
    [
        *("$ref", "$defs", "$id", "$schema", "$dynamicRef", "type", "properties", "items"),
        *("allOf", "anyOf", "not", "pattern", "patternProperties", "required", "enum"),
        *("additionalProperties", "prefixItems", "dependencies", "minimum", "a"),
    ]
)
texts = st.sampled_from(["#", "#/$defs/a", "#/properties/a", "a", "string", "(", "http://x", "#a"])
schemas = st.dictionaries(
    words,
    st.recursive(
        st.none() | st.booleans() | st.integers(-5, 5) | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
        max_leaves=15,
    ),
    max_size=5,
)


@given(
    schemas, st.recursive(st.integers() | texts, lambda x: st.lists(x) | st.dictionaries(words, x))
)
def test_any_schema_is_compiled_or_refused(schema: JsonObject, value: JsonValue) -> None:
    findings = Findings()

    compiled = judge_schema(schema, (), findings)

    assert (compiled is None) == bool(findings.faults())
    if compiled is not None:
        compiled.faults(value)
