"""Forms from a JSON Schema: which fields there are, and what a posted form says."""

from __future__ import annotations

import html
import re

import pytest

from stanchion.console.schema_form import (
    FIELDS_MAX,
    faults_by_field,
    form_fields,
    form_html,
    parse_form,
    values_of,
)
from stanchion.core.faults import Fault
from stanchion.core.json_value import JsonObject, JsonValue

SCHEMA: JsonObject = {
    "type": "object",
    "required": ["question", "review", "count"],
    "properties": {
        "question": {"type": "string", "minLength": 1, "description": "What to find out"},
        "review": {"type": "boolean"},
        "count": {"type": "integer", "minimum": 1, "maximum": 10, "default": 3},
        "heat": {"type": ["number", "null"], "exclusiveMaximum": 2},
        "mode": {"enum": ["fast", None, 3]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "sizes": {"type": "array", "items": {"type": "integer"}},
        "place": {
            "type": "object",
            "required": ["city"],
            "properties": {
                "city": {"type": "string", "maxLength": 50},
                "map": {"type": "object", "properties": {"x": {"type": "number"}}},
            },
        },
        "more": {"anyOf": [{"type": "string"}, {"type": "array"}]},
        "loud": {"type": "boolean"},
    },
}
FIELDS = form_fields(SCHEMA)


def test_each_kind_of_schema_has_its_field() -> None:
    kinds = {field.path[-1]: field.kind for field in FIELDS}
    assert kinds == {
        "question": "long_text",
        "review": "boolean",
        "count": "integer",
        "heat": "number",
        "mode": "choice",
        "tags": "list",
        "sizes": "list",
        "place": "group",
        "more": "json",
        "loud": "boolean",
    }
    place = FIELDS[7]
    assert [(each.path, each.kind) for each in place.fields] == [
        (("place", "city"), "text"),
        (("place", "map"), "json"),
    ]


@pytest.mark.parametrize(
    "schema",
    [
        None,
        {},
        {"type": "array"},
        {"properties": {}},
        {"oneOf": [], "properties": {"a": {}}},
        {"properties": {f"m{n}": {} for n in range(FIELDS_MAX + 1)}},
    ],
)
def test_a_schema_without_members_is_one_box_for_json(schema: JsonObject | None) -> None:
    (field,) = form_fields(schema)
    assert field.kind == "json"
    assert parse_form((field,), {"value": ['{"a": [1]}']}) == ({"a": [1]}, {})


def test_a_posted_form_is_the_value() -> None:
    posted = {
        "value.question": ["two\r\nlines"],
        "value.review": ["true"],
        "value.count": [" 7 "],
        "value.heat": ["0.5"],
        "value.mode": ["2"],
        "value.tags": ["a b\r\n\r\nc"],
        "value.sizes": ["1\n2"],
        "value.place.city": ["Oslo"],
        "value.place.map": ['{"x": 1}'],
        "value.more": ["[1]"],
        "value.loud": ["false"],
    }
    value: JsonValue = {
        "question": "two\nlines",
        "review": True,
        "count": 7,
        "heat": 0.5,
        "mode": 3,
        "tags": ["a b", "c"],
        "sizes": [1, 2],
        "place": {"city": "Oslo", "map": {"x": 1}},
        "more": [1],
        "loud": False,
    }
    assert parse_form(FIELDS, posted) == (value, {})
    # What the form shows for a value is read back as that value.
    assert parse_form(FIELDS, values_of(FIELDS, value)) == (value, {})


def test_what_is_left_empty_is_left_out_unless_it_is_required() -> None:
    value, faults = parse_form(FIELDS, {"value.count": ["1"], "value.place.city": [" "]})
    assert value == {"question": "", "review": False, "count": 1}
    assert faults == {}
    value, faults = parse_form(FIELDS, {})
    assert faults == {"value.count": "must be filled in"}
    nullable = form_fields({"required": ["a"], "properties": {"a": {"type": ["integer", "null"]}}})
    assert parse_form(nullable, {}) == ({"a": None}, {})


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("value.count", "x", "must be an integer; “x” is not"),
        ("value.count", "9" * 5000, f"must be an integer; “{'9' * 39}…” is not"),
        ("value.heat", "NaN", "must be a number; “NaN” is not"),
        ("value.mode", "9", "must be one of the choices"),
        ("value.sizes", "1\ntwo", "line 2: must be an integer; “two” is not"),
        ("value.more", "{", "is not JSON: expecting property name enclosed in double quotes"),
        ("value.more", "NaN", "is not taken: NaN is not a finite number"),
        ("value.more", "1e999", "is not taken: "),
        ("value.more", "[" * 100_000, "is not taken: more than "),
        ("value.more", "[" * 10_000, "is not taken: nested more than 64 levels deep"),
        ("value.more", "[" * 65 + "]" * 65, "is not taken: nested more than 64 levels deep"),
        ("value.more", "9" * 30, "is not taken: holds an integer beyond 64 bits"),
        ("value.more", '"\\ud800"', "is not JSON: text holds half of a surrogate pair"),
    ],
)
def test_what_cannot_be_read_is_a_fault_of_its_field(name: str, text: str, fault: str) -> None:
    posted = {"value.count": ["1"], name: [text]}
    _, faults = parse_form(FIELDS, posted)
    assert faults.keys() == {name}
    assert faults[name].startswith(fault)


def test_faults_of_the_server_stand_beside_their_fields() -> None:
    faults = [
        Fault("input.question", "too short"),
        Fault("input.tags[2]", "too long"),
        Fault("input.place.city", "unknown"),
        Fault("input.stranger", "not a member that is expected here"),
    ]
    placed, rest = faults_by_field(FIELDS, faults, "input")
    assert placed == {
        "value.question": "too short",
        "value.tags": "[2]: too long",
        "value.place.city": "unknown",
    }
    assert rest == ["input.stranger: not a member that is expected here"]
    whole = form_fields(None)
    assert faults_by_field(whole, faults[:1], "input") == ({"value": "question: too short"}, [])


def test_a_form_shows_bounds_defaults_what_was_typed_and_what_was_wrong() -> None:
    fresh = form_html(FIELDS)
    assert 'name="value.count" aria-describedby="form-value.count-hint"' in fresh
    assert "at least 1; at most 10" in fresh
    assert 'value="3"' in fresh
    assert re.search(r'<textarea rows="2"[^>]* required>', fresh)
    again = form_html(FIELDS, {"value.count": ["many"]}, {"value.count": "must be an integer"})
    assert 'value="many"' in again
    assert 'aria-invalid="true"' in again
    assert '<p class="fault" id="form-value.count-fault">must be an integer</p>' in again
    assert 'value="3"' not in again


def test_every_input_has_a_label_and_an_id_of_its_own() -> None:
    drawn = form_html(FIELDS, scope="a") + form_html(FIELDS, scope="b")
    ids = re.findall(r"<(?:input|textarea|select)[^>]* id=\"([^\"]+)\"", drawn)
    assert len(ids) == len(set(ids)) == 22
    assert set(re.findall(r'<label for="([^"]+)"', drawn)) == set(ids)


def test_hostile_names_and_values_stay_text() -> None:
    hostile = "\"'><script>alert(1)</script>\u202e"
    schema: JsonObject = {
        "properties": {
            hostile: {"type": "string", "description": hostile, "default": hostile},
            "e": {"enum": [hostile], "title": hostile},
        }
    }
    fields = form_fields(schema)
    drawn = form_html(fields, None, {f"value.{hostile}": hostile})
    assert "<script" not in drawn
    name = re.findall(r'name="([^"]*)"', drawn)[0]
    # The browser posts the name exactly, so that it is found again.
    assert parse_form(fields, {html.unescape(name): ["x"], "value.e": ["0"]}) == (
        {hostile: "x", "e": hostile},
        {},
    )


def test_members_whose_inputs_would_have_one_name_are_typed_as_json() -> None:
    text: JsonObject = {"type": "string"}
    schema: JsonObject = {
        "properties": {"a": {"type": "object", "properties": {"b": text}}, "a.b": text}
    }
    value: JsonObject = {"a": {"b": "inner"}, "a.b": "outer"}
    fields = form_fields(schema)
    assert parse_form(fields, values_of(fields, value)) == (value, {})
