"""What templates render to, and what they refuse."""

from __future__ import annotations

import contextlib
import json
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stanchion.core.expression import (
    SOURCE_CHARS_MAX,
    BudgetSpent,
    EvaluationBudget,
    ExpressionError,
    TemplateFaults,
    compile_template,
)
from stanchion.core.faults import Path
from stanchion.core.json_value import JsonValue

NAMES: Final = frozenset({"input", "steps", "item", "index"})


def rendered(template: JsonValue, given: JsonValue = None, **scope: JsonValue) -> JsonValue:
    scope = {"input": given, "steps": {}, **scope}
    return compile_template(template, names=NAMES).render(scope)


RENDERED: Final[list[tuple[JsonValue, JsonValue, JsonValue]]] = [
    # No holes.
    (None, None, None),
    (12.5, None, 12.5),
    ("text", None, "text"),
    ("$ { } $x {x} $", None, "$ { } $x {x} $"),
    ({"a": [1, {"b": "c"}]}, None, {"a": [1, {"b": "c"}]}),
    # A string that is one hole keeps the type.
    ("${input}", {"a": [1]}, {"a": [1]}),
    ("${input.n}", {"n": 1.0}, 1.0),
    ("${input.n}", {"n": None}, None),
    ("${ input.n + 1 }", {"n": 1}, 2),
    ("${input.size() > 1}", [1], False),
    # Holes in text: text as it is, everything else as JSON.
    ("a ${input} b", "é\n", "a é\n b"),
    (" ${input}", 1, " 1"),
    ("${input} ", None, "null "),
    ("${input}${input}", True, "truetrue"),
    ("n=${input}", 1.5, "n=1.5"),
    ("l=${input}", [1, "a", None, {"k": "é"}], 'l=[1,"a",null,{"k":"é"}]'),
    ("o=${input}", {"b": 1, "a": {"d": 2, "c": 3}}, 'o={"a":{"c":3,"d":2},"b":1}'),
    ("n=${input}", 2**70, f"n={2**70}"),
    ("${input.a}-${input.b}", {"a": "x", "b": 2}, "x-2"),
    # Escapes.
    ("$${input}", 1, "${input}"),
    ("$$${input}", 1, "$${input}"),
    ("$${a} ${input}", 1, "${a} 1"),
    ("$$ ${input}", 1, "$$ 1"),
    ("a$${", 1, "a${"),
    # Braces and quotes inside a hole.
    ("${{'a': {'b': input}}}", 1, {"a": {"b": 1}}),
    ("${{'}': '}'}['}']}", None, "}"),
    ("<${'}' + \"}\" + '''}'}''' + \"\"\"}\"\"\"}>", None, "<}}}'}}>"),
    (r"<${'\'}' + r'\d}' + R'}'}>", None, r"<'}\d}}>"),
    ("<${input.`a-b`}>", {"a-b": 1}, "<1>"),
    ("<${input // }\n}>", 1, "<1>"),
    ("${[1, 2].map(x, {'v': x})}!", None, '[{"v":1},{"v":2}]!'),
    # Structure.
    ({"q": "${input}", "k": {"deep": ["x", "${input}"]}}, 1, {"q": 1, "k": {"deep": ["x", 1]}}),
    (["${input}", "a", ["${input}"]], 1, [1, "a", [1]]),
    ({"${input}": "${input}"}, 1, {"${input}": 1}),
]


@pytest.mark.parametrize(("template", "given", "expected"), RENDERED)
def test_a_template_renders_to_this(
    template: JsonValue, given: JsonValue, expected: JsonValue
) -> None:
    # As text: to Python, 1 and 1.0 and True are equal.
    assert json.dumps(rendered(template, given)) == json.dumps(expected)


def test_a_hole_may_be_as_long_as_an_expression() -> None:
    longest = "'" + "a" * (SOURCE_CHARS_MAX - 2) + "'"
    assert rendered("${" + longest + "}") == "a" * (SOURCE_CHARS_MAX - 2)


def test_a_template_without_holes_is_not_copied() -> None:
    source: JsonValue = {"a": [1, 2, {"b": "c"}]}
    template = compile_template(source, names=NAMES)
    assert template.render({}) is source
    assert not template.uses
    assert not template.references


def test_what_has_no_hole_is_not_copied_and_the_template_is_not_changed() -> None:
    constant: JsonValue = ["large"]
    source: JsonValue = {"a": "${input}", "b": constant, "c": ["${input}", constant]}
    before = json.dumps(source)
    first, second = rendered(source, 1), rendered(source, 2)
    assert isinstance(first, dict)
    assert first["b"] is constant
    assert first == {"a": 1, "b": ["large"], "c": [1, ["large"]]}
    assert second == {"a": 2, "b": ["large"], "c": [2, ["large"]]}
    assert json.dumps(source) == before


def test_a_template_and_an_expression_are_worked_out_alike() -> None:
    template = compile_template({"a": "${input}"}, names=NAMES)
    assert template.evaluate({"input": 1}) == template.render({"input": 1}) == {"a": 1}


def test_a_template_knows_what_it_reads() -> None:
    template = compile_template(
        {
            "a": "${steps.plan.output} and ${input.x}",
            "b": ['${steps["my-step"].status}', "${item}"],
        },
        names=NAMES,
    )
    assert template.references == {"plan", "my-step"}
    assert template.uses == {"steps", "input", "item"}


def test_equal_templates_are_equal_values() -> None:
    assert compile_template({"a": "${input}"}, names=NAMES) == compile_template(
        {"a": "${input}"}, names=NAMES
    )
    assert compile_template("${input}", names=NAMES) != compile_template("${item}", names=NAMES)


def test_an_error_in_a_hole_is_an_error_of_the_template() -> None:
    sources: list[JsonValue] = ["${input.a}", "x ${input.a}", {"k": ["${input.a}"]}]
    for source in sources:
        with pytest.raises(ExpressionError, match=r'^input has no key "a"$'):
            rendered(source, {})


def test_what_json_cannot_write_is_an_error() -> None:
    for number in (float("nan"), 10**5000):
        with pytest.raises(ExpressionError, match="this cannot be written as JSON: "):
            rendered("x ${input}", number)


# ── Faults ───────────────────────────────────────────────────────────────────────────────────────

FAULTS: Final[list[tuple[JsonValue, list[tuple[Path, str]]]]] = [
    ("${}", [((), 'in "${}": an expression is needed, this is empty')]),
    ("a ${input", [((), 'in "${input": the closing } is missing')]),
    ("${'}", [((), "in \"${'}\": syntax error: token recognition error at: ''' (at 1)")]),
    ("${{'a': 1}", [((), "in \"${{'a': 1}\": the closing } is missing")]),
    (
        "${x} and ${1 + 'a'}",
        [
            ((), "in \"${x}\": unknown name or function 'x'; names here: input (at 1)"),
            ((), "in \"${1 + 'a'}\": '+' does not take (int, string) (at 3)"),
        ],
    ),
    (
        {"a": ["ok", "${", {"b": "${1 +}"}], "c": "${input}"},
        [
            (("a", 1), 'in "${": the closing } is missing'),
            (("a", 2, "b"), 'in "${1 +}": the expression ends too early (at 4)'),
        ],
    ),
    (
        "${" + "1" * 2_001 + "}",
        [((), 'in "${' + "1" * 77 + '…": no closing brace within 2000 characters')],
    ),
]


@pytest.mark.parametrize(("template", "faults"), FAULTS, ids=range(len(FAULTS)))
def test_a_faulty_template_is_refused_with_every_reason(
    template: JsonValue, faults: list[tuple[Path, str]]
) -> None:
    with pytest.raises(TemplateFaults) as caught:
        compile_template(template, names=frozenset({"input"}))
    assert list(caught.value.faults) == faults
    assert str(caught.value) == "; ".join(message for _, message in faults)


def test_faults_are_told_from_where_the_template_stands() -> None:
    with pytest.raises(TemplateFaults) as caught:
        compile_template({"a": "${"}, names=NAMES, path=("steps", "plan", "input"))
    ((path, _),) = caught.value.faults
    assert path == ("steps", "plan", "input", "a")


def test_a_template_may_be_64_levels_deep() -> None:
    source: JsonValue = "${input}"
    for _ in range(64):
        source = [source]
    compile_template(source, names=NAMES, path=("input",))
    with pytest.raises(TemplateFaults, match="nested more than 64 levels deep"):
        compile_template([source], names=NAMES, path=("input",))
    for _ in range(100_000):
        source = [source]
    with pytest.raises(TemplateFaults, match="nested more than 64 levels deep"):
        compile_template({"a": source}, names=NAMES)


# ── Bounds ───────────────────────────────────────────────────────────────────────────────────────


def test_all_holes_together_are_bounded_in_size() -> None:
    large = "x" * 1_000_000
    assert rendered(["${input}"] * 4, large) == [large] * 4
    too_many: list[JsonValue] = [["${input}"] * 5, "${input}" * 5, ["a ${[input]}"] * 3]
    for many in too_many:
        with pytest.raises(BudgetSpent, match="too large"):
            rendered(many, large)


def test_all_holes_together_are_bounded_in_work() -> None:
    loop = "${input.map(x, input.map(y, x + y)).size()}"
    thirty: JsonValue = list(range(30))
    assert rendered([loop] * 10, thirty) == [30] * 10
    with pytest.raises(BudgetSpent, match="too much work"):
        rendered([loop] * 100, thirty)


def test_templates_that_share_a_budget_are_bounded_together() -> None:
    template = compile_template({"q": "${item}"}, names=NAMES)

    def render_often(budget: EvaluationBudget) -> None:
        for _ in range(100):
            template.render({"item": "x" * 20}, budget)

    with pytest.raises(BudgetSpent, match="too large"):
        render_often(EvaluationBudget(size=2_099))
    render_often(EvaluationBudget(size=2_100))


def test_a_template_that_only_passes_data_on_may_pass_any_amount() -> None:
    large: JsonValue = ["x" * 1_000_000] * 10
    assert rendered("${input.a}", {"a": large}) is large


@pytest.mark.parametrize(
    "source",
    [
        "${" * 100_000,
        "${'" * 50_000,
        "${'''\\" * 30_000,
        "${" + "{" * 200_000,
        "${" + "'\"" * 100_000 + "}",
    ],
    ids=["openings", "quotes", "triple quotes", "braces", "mixed quotes"],
)
def test_many_braces_and_quotes_are_read_in_one_pass(source: str) -> None:
    with pytest.raises(TemplateFaults) as caught:
        compile_template(source, names=NAMES)
    assert len(str(caught.value)) < 1_000


def test_a_long_row_of_signs_is_read_in_one_pass() -> None:
    assert rendered("$" * 200_000 + "{") == "$" * 199_999 + "{"


# ── Properties ───────────────────────────────────────────────────────────────────────────────────

VALUES: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def escaped(value: JsonValue) -> JsonValue:
    match value:
        case str():
            return value.replace("${", "$${")
        case list():
            return [escaped(item) for item in value]
        case dict():
            return {key: escaped(item) for key, item in value.items()}
        case _:
            return value


@given(VALUES)
def test_an_escaped_value_renders_to_itself(value: JsonValue) -> None:
    assert rendered(escaped(value)) == value


@given(VALUES)
def test_a_hole_in_a_structure_is_filled_with_the_very_value(value: JsonValue) -> None:
    assert rendered({"a": ["${input}"]}, value) == {"a": [value]}


@given(st.lists(st.sampled_from(["${", "$${", "$", "}", "{", "'", '"', "\\", "input", "//", "\n"])))
def test_any_text_is_a_template_or_has_faults(parts: list[str]) -> None:
    try:
        template = compile_template("".join(parts), names=NAMES)
    except TemplateFaults:
        return
    with contextlib.suppress(ExpressionError):
        template.render({"input": 1})


@given(value=VALUES, before=st.text(), after=st.text())
def test_text_around_a_hole_stays_as_it_is(value: JsonValue, before: str, after: str) -> None:
    source = f"{escaped(before)}|${{input}}|{escaped(after)}"
    text = (
        value
        if isinstance(value, str)
        else json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    )
    assert rendered(source, value) == f"{before}|{text}|{after}"
