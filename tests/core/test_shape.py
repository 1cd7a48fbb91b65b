"""Shapes: what they read, what they say about the rest, and that their schema says the same."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stanchion.core.faults import Findings
from stanchion.core.json_value import JsonValue
from stanchion.core.workflow_file.record import ByMember, Member, ObjectOr, Record, Tagged
from stanchion.core.workflow_file.shape import (
    UNFIT,
    AnyObject,
    Anything,
    Entries,
    Items,
    Real,
    Shape,
    Text,
    Whole,
    Word,
    fit,
)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Point(msgspec.Struct, frozen=True):
    x: int
    y: int = 0


class Disc(msgspec.Struct, frozen=True):
    radius: float


WORD = Text(4, "[a-z]+", "a small word")
COLOUR = Word({colour.value: colour for colour in Colour})
POINT = Record(
    "a point",
    {
        "x": Member(Whole(0, 9), "Right.", required=True),
        "y": Member(Whole(0, 9), "Up."),
    },
    Point,
    lambda point: [("y", "is above x")] if point.y > point.x else [],
)
DISC: Record[object] = Record(
    "a disc", {"radius": Member(Real(0, 1.5), "Size.", required=True)}, Disc
)
NAMED: Record[object] = Record(
    "a named thing", {"name": Member(WORD, "Name.", required=True)}, dict
)

SHAPES: dict[str, Shape[Any]] = {
    "anything": Anything(),
    "object": AnyObject(),
    "text": Text(3),
    "word": WORD,
    "colour": COLOUR,
    "whole": Whole(-1, 3),
    "real": Real(0, 1.5),
    "items": Items(Whole(0, 9), 2),
    "entries": Entries(WORD, Whole(0, 9), "numbers", 2),
    "record": DISC,
    "tagged": Tagged("kind", {"disc": DISC, "word": NAMED}),
    "by member": ByMember("a thing", {"radius": DISC, "name": NAMED}),
    "object or": ObjectOr(Text(9, r"\$\{.+\}", "an object or one ${…}")),
}

small = st.sampled_from(
    [
        *(None, True, False, 0, 1, 3, 4, -1, -2, 0.0, 1.0, 1.5, 1.6, 2.5, 10, 1e300, 2**63),
        *(
            "",
            "a",
            "abc",
            "abcd",
            "abcde",
            "A",
            "a\n",
            "red",
            "blue",
            "disc",
            "word",
            "${a}",
            "${}",
        ),
    ]
)
names = st.sampled_from(["kind", "radius", "name", "a", "abc", "A", "", "zzzzz"])
candidates = st.recursive(
    small,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


def read(shape: Shape[Any], value: JsonValue) -> tuple[Any, list[tuple[str, str]]]:
    findings = Findings()
    got = fit(shape, value, (), findings)
    return got, [(fault.path, fault.message) for fault in findings.faults()]


@pytest.mark.parametrize("name", SHAPES)
@given(value=candidates)
def test_a_shape_and_its_schema_accept_the_same_values(name: str, value: JsonValue) -> None:
    shape = SHAPES[name]

    got, faults = read(shape, value)

    assert (got is UNFIT) == bool(faults)
    assert jsonschema_rs.Draft202012Validator(shape.schema()).is_valid(value) == (not faults)


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_states_itself_in_valid_json_schema(name: str) -> None:
    jsonschema_rs.meta.validate(SHAPES[name].schema())


@pytest.mark.parametrize(
    ("shape", "value", "read_as"),
    [
        (Anything(), [1, None], [1, None]),
        (AnyObject(), {"a": 1}, {"a": 1}),
        (WORD, "abcd", "abcd"),
        (COLOUR, "red", Colour.RED),
        (Whole(0, 9), 3, 3),
        (Whole(0, 9), 3.0, 3),
        (Real(0, 9), 3, 3.0),
        (Real(0, 9), 0.5, 0.5),
        (Items(COLOUR, 2), ["red", "blue"], (Colour.RED, Colour.BLUE)),
        (Items(COLOUR, 2), [], ()),
        (Entries(WORD, COLOUR, "colours", 2), {"a": "red"}, {"a": Colour.RED}),
        (POINT, {"x": 2}, Point(2)),
        (POINT, {"y": 1, "x": 2}, Point(2, 1)),
        (SHAPES["tagged"], {"kind": "disc", "radius": 1}, Disc(1.0)),
        (SHAPES["by member"], {"name": "a"}, {"name": "a"}),
        (SHAPES["object or"], {"x": 1}, {"x": 1}),
        (SHAPES["object or"], "${a}", "${a}"),
    ],
)
def test_a_value_is_read_into_its_own_type(
    shape: Shape[Any], value: JsonValue, read_as: object
) -> None:
    got, faults = read(shape, value)

    assert faults == []
    assert got == read_as
    assert type(got) is type(read_as)


@pytest.mark.parametrize(
    ("shape", "value", "faults"),
    [
        (AnyObject(), [], [("", "must be an object, not a list")]),
        (WORD, 5, [("", "must be text, not a number")]),
        (WORD, "", [("", "0 characters long; from 1 to 4 are allowed")]),
        (WORD, "abcde", [("", "5 characters long; from 1 to 4 are allowed")]),
        (WORD, "a\n", [("", 'must be a small word; "a\\n" is not')]),
        (COLOUR, "bleu", [("", "must be red or blue; \"bleu\" is not; did you mean 'blue'?")]),
        (COLOUR, None, [("", "must be red or blue, not null")]),
        (Whole(0, 9), True, [("", "must be an integer, not true")]),
        (Whole(0, 9), "3", [("", "must be an integer, not text")]),
        (Whole(0, 9), 2.5, [("", "must be an integer; 2.5 is not")]),
        (Whole(0, 9), math.inf, [("", "must be an integer; inf is not")]),
        (Whole(0, 9), 10**400, [("", f"must be from 0 to 9; {10**400} is not")]),
        (Real(0, 9), False, [("", "must be a number, not false")]),
        (Real(0, 9), math.nan, [("", "must be from 0 to 9; nan is not")]),
        (Real(0, 9), 9.5, [("", "must be from 0 to 9; 9.5 is not")]),
        (Items(WORD, 2), {}, [("", "must be a list, not an object")]),
        (Items(WORD, 2), ["a"] * 3, [("", "3 entries; at most 2 are allowed")]),
        (
            Items(WORD, 3),
            [1, "a", None],
            [("[0]", "must be text, not a number"), ("[2]", "must be text, not null")],
        ),
        (Entries(WORD, WORD, "words", 2), "a", [("", "must be an object, not text")]),
        (Entries(WORD, WORD, "words", 2), {}, [("", "has 0 words; from 1 to 2 are allowed")]),
        (
            Entries(WORD, WORD, "words", 1),
            {"a": 1, "B": "b"},
            [("", "has 2 words; from 1 to 1 are allowed")],
        ),
        (POINT, None, [("", "must be an object, not null")]),
        (POINT, {}, [("x", "missing; a point must have it")]),
        (
            POINT,
            {"xx": 1, "y": 10},
            [
                ("xx", "not a member of a point, which may have x or y"),
                ("y", "must be from 0 to 9; 10 is not"),
                ("x", "missing; a point must have it"),
            ],
        ),
        (POINT, {"x": 1, "y": 2}, [("y", "is above x")]),
        (SHAPES["tagged"], 5, [("", "must be an object, not a number")]),
        (SHAPES["tagged"], {"radius": 1}, [("kind", "missing; it must be disc or word")]),
        (
            SHAPES["tagged"],
            {"kind": "disk"},
            [("kind", "must be disc or word; \"disk\" is not; did you mean 'disc'?")],
        ),
        (
            SHAPES["tagged"],
            {"kind": "word", "name": "a", "radius": 1},
            [("radius", "not a member of a named thing, which may have name")],
        ),
        (SHAPES["by member"], [], [("", "must be an object, not a list")]),
        (
            SHAPES["by member"],
            {"radius": 9, "name": "a", "colour": "red"},
            [
                ("", "must have exactly one of radius or name; it has radius and name"),
                ("radius", "must be from 0 to 1.5; 9 is not"),
                ("colour", "not a member of a thing, which may have radius or name"),
            ],
        ),
        (SHAPES["object or"], 5, [("", "must be an object or one ${…}, not a number")]),
        (SHAPES["object or"], "a", [("", 'must be an object or one ${…}; "a" is not')]),
    ],
)
def test_everything_that_does_not_fit_is_said(
    shape: Shape[Any], value: JsonValue, faults: list[tuple[str, str]]
) -> None:
    assert read(shape, value) == (UNFIT, faults)


def test_a_place_known_to_be_bad_is_not_judged_again() -> None:
    findings = Findings()
    findings.note(("x",), "unreadable")
    findings.note(("z",), "unreadable")

    assert fit(POINT, {"x": "?", "z": 1}, (), findings) is UNFIT
    assert [fault.message for fault in findings.faults()] == ["unreadable", "unreadable"]


def test_the_schema_tells_editors_what_each_member_is_for() -> None:
    assert POINT.schema() == {
        "type": "object",
        "properties": {
            "x": {"description": "Right.", "type": "integer", "minimum": 0, "maximum": 9},
            "y": {"description": "Up.", "type": "integer", "minimum": 0, "maximum": 9},
        },
        "additionalProperties": False,
        "required": ["x"],
    }
