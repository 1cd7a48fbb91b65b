"""What expressions mean, what they refuse, and what they say about it."""

from __future__ import annotations

import contextlib
import gc
import json
import subprocess
import sys
from enum import StrEnum
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stanchion.core.expression import (
    COMPILED_TOKENS_MAX,
    SOURCE_CHARS_MAX,
    Expression,
    ExpressionError,
    ExpressionFault,
    compile_expression,
    tokens_in,
)
from stanchion.core.json_value import JsonValue

NAMES: Final = frozenset({"input", "steps"})
ITEM_NAMES: Final = NAMES | {"item", "index"}


def compiled(source: str, *, want_bool: bool = False) -> Expression:
    return compile_expression(source, names=ITEM_NAMES, want_bool=want_bool)


def value_of(source: str, given: JsonValue = None, **scope: JsonValue) -> JsonValue:
    return compiled(source).evaluate({"input": given, "steps": {}, **scope})


# ── Values ───────────────────────────────────────────────────────────────────────────────────────

VALUES: Final[list[tuple[str, JsonValue, JsonValue]]] = [
    # A way through the data.
    ("input", {"a": 1}, {"a": 1}),
    ("input.question", {"question": "why"}, "why"),
    (" input . a ", {"a": 1}, 1),
    ("input.a.b.c", {"a": {"b": {"c": None}}}, None),
    ('input["a-b"]', {"a-b": 1}, 1),
    ("input.`a-b`", {"a-b": 1}, 1),
    ("input.l[1]", {"l": [1, 2]}, 2),
    ("input[1.0]", [1, 2], 2),
    (r'input["a\u0000b"]', {"a\0b": 1, "a": 2}, 1),
    ("input.map", {"map": 1}, 1),
    # Numbers.
    ("input + 1", 2, 3),
    ("input - 1.5", 2.0, 0.5),
    ("-input * 2", 3, -6),
    ("7 / 2", None, 3),
    ("-7 / 2", None, -3),
    ("7 % -2", None, 1),
    ("-7 % 2", None, -1),
    ("7.0 / 2.0", None, 3.5),
    ("-input", 1.5, -1.5),
    ("0x1f", None, 31),
    ("input - 1", -(2**63) + 1, -(2**63)),
    ("input + 1", 2**63 - 2, 2**63 - 1),
    ("9223372036854775807", None, 2**63 - 1),
    ("-9223372036854775808", None, -(2**63)),
    # Equality is by amount among numbers, and never across kinds.
    ("input == 1", 1.0, True),
    ("input == 1", True, False),
    ("input == [1, true]", [1.0, 1], False),
    ("input != '1'", 1, True),
    ("input == null", None, True),
    ("input == {'a': [1]}", {"a": [1.0]}, True),
    ("input == {'a': [1]}", {"a": [1], "b": 2}, False),
    ("input == {'a': [1]}", {"a": [2]}, False),
    ("input != {'a': [1]}", {"b": [1]}, True),
    ("input == [1, 2]", [1], False),
    ("input == 'a'", "b", False),
    # Order.
    ("input < 1.5", 1, True),
    ("input >= 2", 2.5, True),
    ("'a' < 'b' && 'Z' < 'a'", None, True),
    ("false < true", None, True),
    ("'😀' > 'é'", None, True),
    # Text.
    ("'a' + input", "b", "ab"),
    ("size(input)", "é😀", 2),
    ("input.contains('b') && input.startsWith('a') && input.endsWith('c')", "abc", True),
    (r"input.matches('^[a-z]+@[a-z]+\\.org$')", "me@here.org", True),
    ("input.matches('b')", "abc", True),
    ("r'\\d' + '''it's'''", None, "\\dit's"),
    (r"'a\u0000b'", None, "a\0b"),
    # Lists and maps.
    ("input + [3]", [1, 2], [1, 2, 3]),
    ("input.size() + size({'a': 1})", [1, 2], 3),
    ("2 in input", [1, 2.0], True),
    ("[1] in input", [[1], 2], True),
    ("'a' in input", {"a": None}, True),
    ("1 in input", {"1": None}, False),
    ("[1, [2], {'a': null}]", None, [1, [2], {"a": None}]),
    ("{'a': 1}.a + {'b': 2}['b']", None, 3),
    ("has(input.a)", {"a": None}, True),
    ("has(input.a)", {}, False),
    # Macros.
    ("input.map(x, x * 2)", [1, 2], [2, 4]),
    ("input.map(x, x > 1, x * 2)", [1, 2], [4]),
    ("input.filter(x, x.ok)", [{"ok": True}, {"ok": False}], [{"ok": True}]),
    ("input.all(x, x > 0)", [1, 2], True),
    ("input.exists(x, x > 1)", [1, 2], True),
    ("input.exists_one(x, x > 1)", [1, 2, 3], False),
    ("input.map(x, input.map(y, x * y))", [1, 2], [[1, 2], [2, 4]]),
    ("input.map(x, [x].map(x, x + 1))", [1, 2], [[2], [3]]),
    ("[1].map(int, int + 1)", None, [2]),
    ("input.map(k, k)", {"b": 1, "a": 2}, ["a", "b"]),
    ("input.all(x, false)", [], True),
    # An error on one side does not matter if the other side decides.
    ("input.missing == 1 || true", {}, True),
    ("false && input.missing == 1", {}, False),
    ("input || true", 5, True),
    ("input.all(x, x > 1)", ["a", 0], False),
    ("input.exists(x, x > 1)", ["a", 2], True),
    ("input ? 'yes' : 'no'", True, "yes"),
    # Types and conversions.
    ("type(input) == string", "a", True),
    ("type(input) == null_type && type(type(input)) == type", None, True),
    ("dyn(input) == dyn('1')", 1, False),
    ("int(input) + int('-7') + int(1.9)", 3, -3),
    ("double('1e3') + double(1) + double(0.5)", None, 1001.5),
    ("string(1) + string(true) + string(1.0) + string('a')", None, "1true1.0a"),
    ("bool('true') && !bool('0') && bool(input)", True, True),
]


@pytest.mark.parametrize(("source", "given", "expected"), VALUES)
def test_an_expression_has_this_value(source: str, given: JsonValue, expected: JsonValue) -> None:
    # As text: to Python, 1 and 1.0 and True are equal.
    assert json.dumps(value_of(source, given)) == json.dumps(expected)


def test_all_root_names_can_be_read() -> None:
    source = 'steps.plan.status + steps["a-b"].output.x + item + input.y + string(index)'
    scope: dict[str, JsonValue] = {
        "steps": {
            "plan": {"status": "succeeded", "output": None},
            "a-b": {"status": "succeeded", "output": {"x": "1"}},
        },
        "item": "2",
        "index": 4,
        "input": {"y": "3"},
    }
    assert compiled(source).evaluate(scope) == "succeeded1234"


def test_a_path_hands_out_the_data_itself() -> None:
    queries: JsonValue = [1, 2**70, float("1e300")]
    assert value_of("input.queries", {"queries": queries}) is queries


def test_a_number_beyond_64_bits_is_passed_on_but_not_calculated_with() -> None:
    assert value_of("[input]", 2**70) == [2**70]
    assert value_of("input == input && input > 1", 2**70) is True
    for source in ("input + 1", "-input", "double(input)", "string(input)", "int(input)"):
        with pytest.raises(ExpressionError, match="64 bits"):
            value_of(source, 2**70)
    with pytest.raises(ExpressionError, match="such large number"):
        value_of("[1][input]", 10**5000)
    for key in (2**63, -(2**63)):
        with pytest.raises(ExpressionError, match="such large number"):
            value_of("[1][input]", key)
    with pytest.raises(ExpressionError, match=str(2**63 - 1)):
        value_of("[1][input]", 2**63 - 1)


def test_members_of_an_enum_of_text_are_text() -> None:
    class Status(StrEnum):
        DONE = "done"

    assert value_of("input == 'done' && size(input) == 4", Status.DONE) is True


# ── Errors ───────────────────────────────────────────────────────────────────────────────────────

ERRORS: Final[list[tuple[str, JsonValue, str]]] = [
    ("input.question", {}, 'input has no key "question"'),
    ("input.a.b", {"a": {}}, 'input.a has no key "b"'),
    ('input["a b"].c', {"a b": []}, 'input["a b"] is a list and has no "c"'),
    ("input.l[2]", {"l": [1]}, "input.l has no item 2: it has 1 items"),
    ("input[-1]", [1], "input has no item -1: it has 1 items"),
    ("input[0.5]", [1], "this is a list and has no 0.5"),
    ("input[true]", [1], "this is a list and has no true"),
    ("input[0]", {"0": 1}, "input has no key 0"),
    ("input.a", "text", 'input is a string and has no "a"'),
    ("input.a", None, 'input is null and has no "a"'),
    ("input.a", 5, 'input is an int and has no "a"'),
    ("input.filter(x, x.y == 1)", [{}], 'x has no key "y"'),
    ("(input + [])[0]", [], "this has no item 0: it has 0 items"),
    ("{'a': 1}[input]", None, "this has no key null"),
    ("[1][input]", [], "this is a list and has no a list"),
    ("(input ? input : input).a", True, 'this is a bool and has no "a"'),
    ("has(input.a)", [], 'has: this is a list and has no "a"'),
    ("input + 1", "a", "'+' does not take (string, int)"),
    ("input + 1", True, "'+' does not take (bool, int)"),
    ("input + 1", 1.0, "'+' does not take (double, int)"),
    ("input % 2", 1.0, "'%' does not take (double, int)"),
    ("input + input", {}, "'+' does not take (map, map)"),
    ("-input", "a", "'-' does not take (string)"),
    ("!input", 1, "'!' does not take (int)"),
    ("input < 1", "a", "'<' does not take (string, int)"),
    ("input <= input", None, "'<=' does not take (null_type, null_type)"),
    ("1 in input", "a", "'in' does not take (int, string)"),
    ("input in {}", [], "'in' does not take (list, map)"),
    ("size(input)", 1, "'size' does not take (int)"),
    ("input.contains('a')", 1, "'contains' does not take (int, string)"),
    ("input + 1", 2**63 - 1, "a whole number does not fit in 64 bits"),
    ("input - 1", -(2**63), "a whole number does not fit in 64 bits"),
    ("input * input", 2**62, "a whole number does not fit in 64 bits"),
    ("-input", -(2**63), "a whole number does not fit in 64 bits"),
    ("input / -1", -(2**63), "a whole number does not fit in 64 bits"),
    ("input % -1", -(2**63), "a whole number does not fit in 64 bits"),
    ("1 / input", 0, "division by zero"),
    ("1 % input", 0, "division by zero"),
    ("1.0 / input", 0.0, "division by zero"),
    ("input * 1e300", 1e300, "a number is too large for a double"),
    ("int(input)", "1_0", 'int: "1_0" is not a whole number'),
    ("int(input)", "٣", 'int: "٣" is not a whole number'),
    ("int(input)", " 5", 'int: " 5" is not a whole number'),
    ("int(input)", "9" * 30, f'int: "{"9" * 30}" is not a whole number'),
    ("int(input)", 1e30, "a whole number does not fit in 64 bits"),
    ("int(input)", True, "'int' does not take (bool)"),
    ("double(input)", "nan", 'double: "nan" is not a number'),
    ("double(input)", "1e999", "a number is too large for a double"),
    ("double(input)", None, "'double' does not take (null_type)"),
    ("string(input)", [], "'string' does not take (list)"),
    ("bool(input)", "yes", 'bool: "yes" is neither true nor false'),
    ("bool(input)", 1, "'bool' does not take (int)"),
    ("input && true", 5, "true or false is needed here, this is an int"),
    ("input.a == 1 || false", {}, 'input has no key "a"'),
    ("input ? 1 : 2", "yes", "true or false is needed here, this is a string"),
    ("input.all(x, x > 1)", ["a", 2], "'>' does not take (string, int)"),
    ("input.exists(x, x > 1)", ["a", 0], "'>' does not take (string, int)"),
    ("input.exists_one(x, x > 1)", ["a", 2], "'>' does not take (string, int)"),
    ("input.filter(x, x)", [1], "true or false is needed here, this is an int"),
    ("input.map(x, x)", "abc", "a list or map is needed to walk over, this is a string"),
    ("{input: 1}", 1, "a map's keys are strings, this is an int"),
    ("{'a': 1, input: 2}", "a", 'a map has the key "a" twice'),
    ("type(input)", 1, "the result is, or holds, a type: int"),
    ("[{'a': type(input)}]", 1, "the result is, or holds, a type: int"),
    ("input.matches(input)", "(", "matches: invalid regular expression: missing ): ("),
    ("input.matches('a')", "a\0b", "matches: the text has a NUL or half a character pair in it"),
    ("'a'.matches(input)", "a\0b", "matches: the pattern has a NUL or half a character pair in it"),
]


@pytest.mark.parametrize(("source", "given", "message"), ERRORS)
def test_an_expression_without_a_value_says_why(
    source: str, given: JsonValue, message: str
) -> None:
    with pytest.raises(ExpressionError) as caught:
        value_of(source, given)
    assert str(caught.value) == message


def test_what_is_not_json_is_an_error() -> None:
    with pytest.raises(ExpressionError, match="a tuple is not a JSON value"):
        value_of("input.a", ())  # type: ignore[arg-type]  # this is the point


def test_a_name_that_the_scope_lacks_is_an_error() -> None:
    with pytest.raises(ExpressionError, match=r"^input has no value here$"):
        compiled("steps.a.output == item && input.x").evaluate({"item": 1})


def test_a_condition_is_true_or_false_and_nothing_else() -> None:
    condition = compiled("input.review", want_bool=True)
    assert condition.evaluate({"input": {"review": False}}) is False
    others: list[JsonValue] = [0, 1, "", "true", None, [], {}]
    for other in others:
        with pytest.raises(ExpressionError, match="true or false is needed, this is"):
            condition.evaluate({"input": {"review": other}})


# ── Faults ───────────────────────────────────────────────────────────────────────────────────────

UNKNOWN: Final = "unknown name or function '{}'; names here: index, input, item, steps"
TOO_LARGE: Final = "matches: the pattern is too long, or becomes so when repetitions are expanded"
FAULTS: Final[list[tuple[str, str, int | None]]] = [
    ("", "an expression is needed, this is empty", None),
    (" \n", "an expression is needed, this is empty", None),
    ("input.", "syntax error: no viable alternative at input '.'", 7),
    ("1 +", "the expression ends too early", 4),
    ("input[0", "the expression ends too early", 8),
    ("'abc", "syntax error: token recognition error at: ''abc'", 1),
    ("inptu.a", "unknown name or function 'inptu'; did you mean 'input'?", 1),
    (
        "steps.web-search.output",
        """unknown name or function 'search'; an id with a dash is written steps["web-search"]""",
        11,
    ),
    (
        "input.a = 3",
        "syntax error: token recognition error at: '= '; use == to compare",
        9,
    ),
    (
        "input.a and input.b",
        "syntax error: mismatched input 'and'; and, or, not are &&, ||, !",
        9,
    ),
    ("input.a and 'x = y'", "syntax error: mismatched input 'and'; and, or, not are &&, ||, !", 9),
    ("input.a +\n  nme", UNKNOWN.format("nme"), 13),
    ("'😀' + x", UNKNOWN.format("x"), 7),
    ("now()", UNKNOWN.format("now"), 1),
    ("input.f()", UNKNOWN.format("f"), 7),
    ("1 == 'a'", "'==' does not take (int, string)", 3),
    ("index + 'a'", "'+' does not take (int, string)", 7),
    ("true ? 1 : 'a'", "'?:' does not take (bool, int, string)", 6),
    ("1 in 'a'", "'in' does not take (int, string)", 3),
    ("has(input)", "has() argument must be a field selection", 5),
    ("9223372036854775808", "invalid int literal", 1),
    ("1e999", "this number is too large", 1),
    ("input == 1u", "unsigned numbers and bytes are not available", 10),
    ("b'abc'", "unsigned numbers and bytes are not available", 1),
    ("timestamp(input)", "the function timestamp is not available", 10),
    ("duration('1s') == duration('1s')", "the function duration is not available", 9),
    ("type(input) == bytes", "the type bytes is not available", 16),
    ("google.protobuf.Value{}", "messages (google.protobuf.Value) are not available", 1),
    ("input.matches('(')", "matches: invalid regular expression: missing ): (", 15),
    ("input.matches('(.{900}){900}')", TOO_LARGE, 15),
    (r"input.matches('\\Qa')", TOO_LARGE, 15),
    ("input.a\0.b", "a control character or half a character pair", 8),
    ("'\ud800'", "a control character or half a character pair", 2),
    ("(" * 40 + "1" + ")" * 40, "nested too deeply: 32 levels are allowed", None),
    ("1" + " + 1" * 40, "nested too deeply: 32 levels are allowed", None),
    (
        "1" * (SOURCE_CHARS_MAX + 1),
        "2001 characters; at most 2000 are allowed in an expression",
        None,
    ),
    ("steps", 'name the step: steps.plan or steps["my-step"], not all steps', 1),
    ("size(steps) > 1", 'name the step: steps.plan or steps["my-step"], not all steps', 6),
    ("steps[input.x].output", 'name the step: steps.plan or steps["my-step"], not all steps', 1),
    ("steps.plan.outptu", 'a step has output, status, error and failures, not "outptu"', 11),
    (
        'has(steps.plan["errors"].x)',
        'a step has output, status, error and failures, not "errors"',
        15,
    ),
    ("[1].map(input, input)", "'input' is taken: choose another name", 8),
]


@pytest.mark.parametrize(
    ("source", "message", "position"), FAULTS, ids=[source[:30] for source, _, _ in FAULTS]
)
def test_a_faulty_expression_is_refused_with_its_reason(
    source: str, message: str, position: int | None
) -> None:
    with pytest.raises(ExpressionFault) as caught:
        compiled(source)
    assert caught.value.message == message
    assert caught.value.position == position
    assert str(caught.value) == (message if position is None else f"{message} (at {position})")


@pytest.mark.parametrize(
    ("source", "kind"),
    [("1", "int"), ("'a' + 'b'", "string"), ("null", "null"), ("input.map(x, x)", "list<dyn>")],
)
def test_a_condition_that_can_never_be_true_or_false_is_refused(source: str, kind: str) -> None:
    with pytest.raises(ExpressionFault, match=f"^true or false is needed, this is always {kind}$"):
        compiled(source, want_bool=True)


def test_names_that_are_not_offered_are_unknown() -> None:
    with pytest.raises(
        ExpressionFault, match="'item'; it is known only in the input of a for-each"
    ):
        compile_expression("item", names=NAMES)


# ── What is read ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("source", "uses", "references"),
    [
        ("1 == 1", set(), set()),
        ("input.a", {"input"}, set()),
        ("item + index > 1", {"item", "index"}, set()),
        ("steps.plan.output", {"steps"}, {"plan"}),
        ('steps["my-step"].output[0].a', {"steps"}, {"my-step"}),
        ("steps.`my-step`.output", {"steps"}, {"my-step"}),
        ("has(steps.a.output) && has(steps.b)", {"steps"}, {"a", "b"}),
        ("input.map(x, x + steps.a.output)", {"input", "steps"}, {"a"}),
        ("{'k': steps.a.status}", {"steps"}, {"a"}),
        ("[1].map(a, [a].map(b, steps.c.output + steps.d.output))", {"steps"}, {"c", "d"}),
        ("input.steps.plan + 'steps.x'", {"input"}, set()),
        (".steps.plan.output", {"steps"}, {"plan"}),
        ("true || steps.a.status == 'x'", {"steps"}, {"a"}),
    ],
)
def test_an_expression_knows_what_it_reads(
    source: str, uses: set[str], references: set[str]
) -> None:
    expression = compiled(source)
    assert expression.uses == uses
    assert expression.references == references


def test_equal_expressions_are_equal_values() -> None:
    assert compiled("input.a == 1") == compiled("input.a == 1")
    assert compiled("input.a == 1") != compiled("input.a == 2")
    assert compiled("input.a") != compiled("input.a", want_bool=True)


# ── The same everywhere ──────────────────────────────────────────────────────────────────────────

SHUFFLED: Final = """
import json, sys
from stanchion.core.expression import *
names = frozenset({"input", "steps", "item", "index"})
scope = {"input": {key: {"n": len(key)} for key in sys.argv[1].split()}, "steps": {}, "item": 1}
for source in ("input.map(k, k)", "input.map(k, {k: input[k].n})", "input.filter(k, k > 'k2')",
               "input == {'a': {'n': 1}}", "input.exists_one(k, k)", "input.all(k, input[k].x)",
               "item + index", "steps.a.b", "unknown", "steps.a.output + input.a + item + index"):
    budget = EvaluationBudget()
    try:
        found = compile_expression(source, names=names).evaluate(scope, budget)
    except (ExpressionError, ExpressionFault) as error:
        found = repr(error)
    print(json.dumps(found, sort_keys=True), budget.work_left, budget.size_left)
"""


def test_results_do_not_depend_on_the_process_or_the_order_of_keys() -> None:
    keys = [f"k{n}" * (1 + n % 2) for n in range(30)]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SHUFFLED, " ".join(order)],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed, order in (("0", keys), ("1", keys[::-1]), ("2", keys[7:] + keys[:7]))
    }
    assert len(outputs) == 1
    assert outputs.pop().count("\n") == 10


@given(st.text(alphabet="inputsea.[]0'\"+!?:(){}&|<>= \\\n,x", max_size=40))
def test_any_text_is_an_expression_or_a_fault(source: str) -> None:
    try:
        expression = compile_expression(source, names=NAMES)
    except ExpressionFault:
        return
    with contextlib.suppress(ExpressionError):
        json.dumps(expression.evaluate({"input": {"a": 1}, "steps": {}}))


def test_a_number_of_tokens_bounds_what_is_kept_of_compiled_expressions() -> None:
    marker = "input.kept_of_compiled"
    per_expression = tokens_in(f"{marker} == 0" + f" || {marker} == 0" * 50)
    for number in range(3 * COMPILED_TOKENS_MAX // per_expression):
        compiled(" || ".join([f"{marker} == {number}"] * 51))
    gc.collect()
    kept = [
        each
        for each in gc.get_objects()
        if isinstance(each, Expression) and each.source.startswith(marker)
    ]
    assert 0 < sum(tokens_in(each.source) for each in kept) <= COMPILED_TOKENS_MAX


def test_what_was_compiled_or_asked_for_last_is_not_compiled_again() -> None:
    first = compiled("input.asked_for")
    for number in range(COMPILED_TOKENS_MAX // 6):
        compiled(f"input.other == {number}")
        assert compiled("input.asked_for") is first
