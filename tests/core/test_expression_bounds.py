"""No expression runs long, fills the memory or brings the process down, whatever the data.

Work is counted, so what is asserted is how an evaluation ended and what it had left, not how long
it took. All cases run once more in a process of their own with little memory, where a crash, a hang
or a gigabyte would show.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Final

import pytest

from stanchion.core.cel import pattern
from stanchion.core.expression import (
    SIZE_MAX,
    SOURCE_CHARS_MAX,
    WORK_MAX,
    BudgetSpent,
    EvaluationBudget,
    ExpressionError,
    ExpressionFault,
    compile_expression,
)
from stanchion.core.json_value import JsonValue

NAMES: Final = frozenset({"input", "steps", "item", "index"})
THOUSAND: Final[JsonValue] = list(range(1_000))

MEMORY_BYTES_MAX: Final = 512 * 1024 * 1024
CASE_S_MAX: Final = 5


def nested(levels: int) -> JsonValue:
    value: JsonValue = []
    for _ in range(levels):
        value = [value]
    return value


def spread(width: int, levels: int) -> JsonValue:
    """As large as ``width ** levels``, at the cost of ``levels`` lists."""
    value: JsonValue = 1
    for _ in range(levels):
        value = [value] * width
    return value


def spread_keys(levels: int) -> JsonValue:
    """As large as ``2 ** levels``, at the cost of ``levels`` objects."""
    value: JsonValue = 1
    for _ in range(levels):
        value = {"a": value, "b": value}
    return value


Case = tuple[str, Callable[[], JsonValue], type[Exception] | None]

FAULT: Final = ExpressionFault
SPENT: Final = BudgetSpent
ERROR: Final = ExpressionError
FINE: Final = None


def given(value: JsonValue) -> Callable[[], JsonValue]:
    return lambda: value


HOSTILE: Final[dict[str, Case]] = {
    # Loops.
    "three loops": (
        "input.all(a, input.all(b, input.all(c, a + b + c >= 0)))",
        given(THOUSAND),
        SPENT,
    ),
    "three maps": ("input.map(a, input.map(b, input.map(c, a)))", given(THOUSAND), SPENT),
    "twenty loops": ("input.exists_one(x, " * 20 + "true" + ")" * 20, given([1] * 1000), SPENT),
    "an error in every round": (
        "input.all(a, input.all(b, input.all(c, a.x)))",
        given(THOUSAND),
        SPENT,
    ),
    "a loop behind an or": (
        "input.all(a, input.all(b, input.all(c, true))) || true",
        given(THOUSAND),
        SPENT,
    ),
    "a loop behind an and": (
        "input.all(a, input.all(b, input.all(c, true))) && false",
        given(THOUSAND),
        SPENT,
    ),
    "a loop in a loop over keys": (
        "input.map(a, input.map(b, a))",
        lambda: {str(n): n for n in range(1_000)},
        SPENT,
    ),
    "a heavy body": ("input.map(a, [" + ",".join(["a"] * 900) + "])", given(THOUSAND), SPENT),
    # Growth.
    "text doubled by maps": (
        "[input]" + ".map(x, x + x)" * 27 + "[0].size()",
        given("x" * 10),
        SPENT,
    ),
    "text doubled by sums": (
        "[input].map(a, a+a+a+a+a+a+a+a).map(a, a+a+a+a+a+a+a+a)",
        given("x" * 1_000_000),
        SPENT,
    ),
    "text in every round": (
        "input.l.map(x, input.s + 'a')",
        lambda: {"l": THOUSAND, "s": "x" * 100_000},
        SPENT,
    ),
    "lists doubled by maps": ("[input]" + ".map(x, x + x)" * 27 + "[0].size()", given([1]), SPENT),
    "a result of shared lists": ("[1]" + ".map(x, [x, x])" * 27, given(None), SPENT),
    "a result of shared maps": ("[1]" + ".map(x, {'a': x, 'b': x})" * 27, given(None), SPENT),
    "a result of shared text": ("[" + ",".join(["input"] * 250) + "]", given("x" * 100_000), SPENT),
    "a result of long keys": (
        "[" + ",".join(["{input: 1}"] * 150) + "]",
        given("x" * 100_000),
        SPENT,
    ),
    "a result of shared data": (
        "[" + ",".join(["input"] * 250) + "]",
        lambda: spread(100, 8),
        SPENT,
    ),
    "a result nested too deeply": ("[input]", lambda: nested(100_000), SPENT),
    # Comparing and searching.
    "equality of wide values": (
        "input.a == input.b",
        lambda: {"a": spread(100, 8), "b": spread(100, 8)},
        SPENT,
    ),
    "equality of wide maps": (
        "input.a == input.b",
        lambda: {"a": spread_keys(30), "b": spread_keys(30)},
        SPENT,
    ),
    "equality of deep values": (
        "input.a == input.b",
        lambda: {"a": nested(100_000), "b": nested(100_000)},
        FINE,
    ),
    "equality in a loop": ("input.all(x, input == input)", lambda: spread(100, 2), SPENT),
    "equality of long text": (
        "input.l.all(x, input.a != input.b)",
        lambda: {"l": THOUSAND, "a": "x" * 10**6 + "y", "b": "x" * 10**6 + "z"},
        SPENT,
    ),
    "order of long text": (
        "input.l.all(x, input.a <= input.b)",
        lambda: {"l": THOUSAND, "a": "x" * 10**6, "b": "x" * 10**6 + "y"},
        SPENT,
    ),
    "membership in a loop": ("input.all(x, !(1001 in input))", given(THOUSAND), SPENT),
    "keys sorted in a loop": (
        "input.l.all(x, input.m.exists(k, true))",
        lambda: {"l": THOUSAND, "m": {str(n): 1 for n in range(1_000)}},
        SPENT,
    ),
    "search in a loop": (
        "input.l.all(x, !input.s.contains('aab'))",
        lambda: {"l": THOUSAND, "s": "a" * 100_000},
        SPENT,
    ),
    "search for much": (
        "input.s.contains(input.p)",
        lambda: {"s": "a" * 3_000_000, "p": "a" * 90 + "b"},
        SPENT,
    ),
    "start in a loop": (
        "input.l.all(x, input.s.startsWith(input.s))",
        lambda: {"l": THOUSAND, "s": "a" * 100_000},
        SPENT,
    ),
    "end in a loop": (
        "input.l.all(x, input.s.endsWith(input.s))",
        lambda: {"l": THOUSAND, "s": "a" * 100_000},
        SPENT,
    ),
    # Patterns.
    "a pattern that backtracks": ("input.matches('^(a+)+$')", given("a" * 10_000 + "b"), FINE),
    "a pattern that is not a DFA": (
        "input.matches('[ab]*a[ab]{200}c')",
        given("ab" * 5_000),
        SPENT,
    ),
    "a pattern that grows": ("input.matches('((a{1,100}){1,100}){1,100}')", given("a"), FAULT),
    "a pattern of all letters": (r"input.matches('\\pL{900}')", given("a"), FAULT),
    "a pattern over much text": ("input.matches('a.*b.*c')", given("abab" * 300_000), SPENT),
    "a pattern in a loop": ("input.all(x, !'abc'.matches('^x.{50}y'))", given(THOUSAND), SPENT),
    "a long pattern from data": ("'a'.matches(input)", given("a" * 100_000), ERROR),
    "brackets from data": ("'a'.matches(input)", given("[" * 999), ERROR),
    "groups from data": ("'a'.matches(input)", given("(" * 999), ERROR),
    "repeats from data": ("'a'.matches(input)", given("(" * 100 + "a" + "{999})" * 100), ERROR),
    # Source.
    "open brackets": ("(" * 10_000, given(None), FAULT),
    "brackets": ("(" * 999 + "1" + ")" * 999, given(None), FAULT),
    "list brackets": ("[" * 999 + "]" * 999, given(None), FAULT),
    "map brackets": ("{'a':" * 333 + "1" + "}" * 333, given(None), FAULT),
    "index brackets": ("input" + "[0" * 600 + "]" * 600, given(None), FAULT),
    "nots": ("!" * (SOURCE_CHARS_MAX - 5) + "true", given(None), FINE),
    "minuses": ("-" * (SOURCE_CHARS_MAX - 2) + "1", given(None), FINE),
    "nots in brackets": ("!(" * 600 + "true" + ")" * 600, given(None), FAULT),
    "ternaries": ("true ? 1 : " * 150 + "1", given(None), FAULT),
    "sums": ("1" + "+1" * 990, given(None), FAULT),
    "selects": ("input" + ".a" * 990, given({}), FAULT),
    "selects that fit": ("input" + ".a" * 25, given({}), ERROR),
    "macros": ("[1].map(x," * 150 + "1" + ")" * 150, given(None), FAULT),
    "macros that fit": ("[1].map(x," * 25 + "1" + ")" * 25, given(None), FINE),
    "a long list": ("[" + ",".join(["1"] * 999) + "]", given(None), FINE),
    "a list too long": ("[" + ",".join(["1"] * 500_000) + "]", given(None), FAULT),
    "a long or": ("||".join(["input.a"] * 220), given({}), ERROR),
    "a long map": ("{" + ",".join(f"'{n}':{n}" for n in range(180)) + "}", given(None), FINE),
    "a long name": ("input." + "a" * 1_990, given({}), ERROR),
    "one long text": ("'" + "a" * 1_998 + "'", given(None), FINE),
    "quotes": ("'" * SOURCE_CHARS_MAX, given(None), FAULT),
    "backslashes": ("'" + "\\" * 1_990, given(None), FAULT),
    # Data.
    "a very long number": ("input + 1", lambda: 10**100_000, ERROR),
    "a product of long numbers": ("input * input", lambda: 10**100_000, ERROR),
    "a position that is a very long number": ("[1][input]", lambda: 10**100_000, ERROR),
    "a double out of a very long text": ("double(input)", given("1" * 10**6), ERROR),
    "an int out of a very long text": ("int(input)", given("1" * 10**6), ERROR),
    "a missing key that is long": ("{}[input]", given("k" * 10**6), ERROR),
    "data nested deeply": ("input[0][0][0] == [] || input == 1", lambda: nested(100_000), FINE),
}


def run(case: Case) -> tuple[type[Exception] | None, str, EvaluationBudget]:
    source, data, _ = case
    budget = EvaluationBudget()
    try:
        compile_expression(source, names=NAMES).evaluate({"input": data()}, budget)
    except (ExpressionFault, ExpressionError) as error:
        return type(error), str(error), budget
    return None, "", budget


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_expression_ends_as_it_should(name: str) -> None:
    ended, message, budget = run(HOSTILE[name])
    assert ended is HOSTILE[name][2]
    assert len(message) < 500
    # However it ended, it did no more than it had paid for, and what it could not pay for it did
    # not begin.
    if ended is not BudgetSpent:
        assert budget.work_left >= 0
        assert budget.size_left >= 0


def test_hostile_expressions_need_little_memory_and_do_not_crash() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from tests.core.test_expression_bounds import main; main()"],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        check=False,
        text=True,
        timeout=CASE_S_MAX * len(HOSTILE),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == list(HOSTILE)


def main() -> None:
    """Run every case under a limit on memory, and name each that ended as it should."""
    import resource  # noqa: PLC0415 - only the process that limits itself needs it
    import signal  # noqa: PLC0415

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    for name, case in HOSTILE.items():
        # The default action ends the process, also from inside the library.
        signal.setitimer(signal.ITIMER_PROF, CASE_S_MAX)
        ended, _, _ = run(case)
        assert ended is case[2], (name, ended)
        print(name, flush=True)  # noqa: T201 - the parent reads it


# ── Budgets ──────────────────────────────────────────────────────────────────────────────────────


def test_what_a_workflow_really_does_fits_many_times_over() -> None:
    found: JsonValue = [
        {"url": f"https://example.org/{n}", "score": n / 1000, "tags": ["a", "b"], "ok": n % 2 == 0}
        for n in range(1_000)
    ]
    budget = EvaluationBudget()
    source = (
        "input.filter(f, f.ok && f.score > 0.5 && 'b' in f.tags)"
        ".map(f, {'url': f.url, 'label': f.url + ' (' + string(f.score) + ')'})"
    )
    result = compile_expression(source, names=NAMES).evaluate({"input": found}, budget)
    assert isinstance(result, list)
    assert len(result) == 249
    assert budget.work_left > WORK_MAX * 0.8


def test_evaluations_that_share_a_budget_are_bounded_together() -> None:
    expression = compile_expression("input.map(x, x + 1)", names=NAMES)

    def evaluate_often(budget: EvaluationBudget) -> None:
        for _ in range(1_000):
            expression.evaluate({"input": [1, 2, 3]}, budget)

    with pytest.raises(BudgetSpent, match="too much work"):
        evaluate_often(EvaluationBudget(work=10_000))
    with pytest.raises(BudgetSpent, match="too large"):
        evaluate_often(EvaluationBudget(size=1_000))
    evaluate_often(EvaluationBudget(work=1_000_000, size=10_000))


def test_a_spent_budget_stays_spent() -> None:
    expression = compile_expression("input == 1", names=NAMES)
    budget = EvaluationBudget(work=2)
    for _ in range(2):
        with pytest.raises(BudgetSpent):
            expression.evaluate({"input": 1}, budget)


def test_a_loop_ends_in_the_round_that_it_cannot_pay() -> None:
    # 3 for the whole (the loop, its list, its value), and 2 for each round.
    expression = compile_expression("input.map(x, x)", names=NAMES)
    scope: dict[str, JsonValue] = {"input": [1, 2, 3, 4]}
    enough = 3 + 4 * 2 + 2
    assert expression.evaluate(scope, EvaluationBudget(work=enough)) == [1, 2, 3, 4]
    with pytest.raises(BudgetSpent):
        expression.evaluate(scope, EvaluationBudget(work=enough - 1))


@pytest.mark.parametrize("source", ["input.all(x, x.y)", "input.map(x, x.y || true).size() == 100"])
def test_an_error_that_does_not_matter_costs_more_than_a_value(source: str) -> None:
    expression = compile_expression(source, names=NAMES)
    good: dict[str, JsonValue] = {"input": [{"y": True}] * 100}
    bad: dict[str, JsonValue] = {"input": [{}] * 99 + [{"y": False}]}
    assert expression.evaluate(good, EvaluationBudget(work=1_000)) is True
    with pytest.raises(BudgetSpent):
        expression.evaluate(bad, EvaluationBudget(work=1_000))


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (None, 1),
        (2**70, 1),
        ("abc", 4),
        ([], 1),
        ([1, "ab"], 5),
        ({"key": [True, "x"], "k": {}}, 1 + 2 + 4 + 2 + 1),
    ],
)
def test_size_counts_values_and_characters(value: JsonValue, size: int) -> None:
    budget = EvaluationBudget()
    assert budget.keep(value) == value
    assert SIZE_MAX - budget.size_left == size
    assert EvaluationBudget(size=size).keep(value) == value
    with pytest.raises(BudgetSpent, match="too large"):
        EvaluationBudget(size=size - 1).keep(value)


def test_looking_at_a_result_is_work_too() -> None:
    for shared in (spread(2, 12), spread_keys(12)):
        with pytest.raises(BudgetSpent, match="too much work"):
            EvaluationBudget(work=1_000).keep(shared)


def test_a_result_may_be_64_levels_deep() -> None:
    assert EvaluationBudget().keep(nested(63)) == nested(63)
    assert EvaluationBudget().keep(nested(64)) == nested(64)
    with pytest.raises(BudgetSpent, match="nested more than 64 levels deep"):
        EvaluationBudget().keep(nested(65))


# ── Patterns ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "usual",
    [
        r"^[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,}$",
        r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
        r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{1,9})?Z$",
        r"(?i)\b(error|warning|fatal)\b.*$",
        r"^\p{Lu}\p{L}+$",
        r"^https?://[^\s/]+(/[^\s]*)?$",
    ],
)
def test_usual_patterns_are_light_enough_for_a_page_of_text(usual: str) -> None:
    pattern.check_pattern(usual, None)
    budget = EvaluationBudget()
    pattern.matches(budget, "lorem ipsum " * 80, usual)
    assert budget.work_left > 0


@pytest.mark.parametrize(
    ("shorter", "longer"),
    [
        ("a{9}", "a{90}"),
        ("a{9}", "a{9,90}"),
        ("(ab){9}", "((ab){9}){9}"),
        ("(a{9})", "(a{9})(b{9})"),
        ("[^a]{9}", "[^a]{90}"),
        ("x", "(?i)x"),
        ("[a-z]", r"[\pL]"),
        ("a", "é"),
        ("[]a]{9}", "[]a]{90}"),
        (r"[\]a{9}]", r"[\]a]{9}"),
        ("[[:alpha:]]{9}", "[[:^alpha:]]{9}"),
        ("a|b", "a|b|c"),
        (r"\(a{9}", r"(a{9}){9}"),
    ],
)
def test_what_repeats_more_weighs_more(shorter: str, longer: str) -> None:
    assert pattern.weigh(shorter) < pattern.weigh(longer)


def test_a_group_weighs_more_than_what_is_in_it() -> None:
    assert pattern.weigh("(a)") == pattern.weigh("a") + 1
    assert pattern.weigh("((a))") == pattern.weigh("a") + 2


def test_a_repetition_of_nothing_weighs_nothing() -> None:
    assert pattern.weigh("^{900}") == pattern.weigh("^")


def test_groups_side_by_side_add_up() -> None:
    assert pattern.weigh("(a{900})") < pattern.WEIGHT_MAX < pattern.weigh("(a{900})" * 20)


def test_a_class_hides_no_repetition() -> None:
    # If a bracket were read as part of a class that is closed already, the rest would weigh little.
    for opening in ("[a]", "[]]", "[^]]", r"[\]]", "[[:alpha:]]", r"\[", "[[]", "[a[:]"):
        assert pattern.weigh(opening + "(b{900}){900}[c]") > pattern.WEIGHT_MAX
