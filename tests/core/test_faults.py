"""Faults: their order, their number, and words that are safe to print."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stanchion.core.faults import (
    FAULTS_MAX,
    Fault,
    Findings,
    Near,
    Path,
    kind_of,
    listed,
    named,
    quoted,
    shown,
)
from stanchion.core.json_value import JsonValue


def test_faults_come_in_the_order_of_the_document() -> None:
    lines: dict[Path, int] = {(): 1, ("b",): 2, ("b", "x"): 2, ("a",): 3}
    findings = Findings()
    for path in [("a",), ("b", "x"), ("b",), ()]:
        findings.note(path, "bad")

    assert findings.faults(lines) == (
        Fault("", "bad", 1),
        Fault("b", "bad", 2),
        Fault("b.x", "bad", 2),
        Fault("a", "bad", 3),
    )


def test_a_missing_member_stands_where_it_should_have_been() -> None:
    findings = Findings()
    findings.note(("b",), "bad")
    findings.note(("a", "gone", "deeper"), "missing")

    faults = findings.faults({(): 1, ("a",): 2, ("a", "x"): 2, ("b",): 3})

    assert faults == (Fault("a.gone.deeper", "missing", 2), Fault("b", "bad", 3))


def test_a_line_of_its_own_goes_before_the_line_of_the_place() -> None:
    findings = Findings()
    findings.note(("a",), "repeated", line=9)
    findings.note(("b",), "bad")

    assert findings.faults({(): 1, ("a",): 1, ("b",): 2}) == (
        Fault("b", "bad", 2),
        Fault("a", "repeated", 9),
    )


def test_without_a_document_faults_keep_their_order_and_have_no_line() -> None:
    findings = Findings()
    findings.note(("z",), "first")
    findings.note(("a",), "second")

    assert findings.faults() == (Fault("z", "first"), Fault("a", "second"))


def test_too_many_faults_are_counted_instead_of_listed() -> None:
    findings = Findings()
    for number in range(FAULTS_MAX + 7):
        findings.note((number,), "bad")

    faults = findings.faults()

    assert len(faults) == FAULTS_MAX + 1
    assert faults[-2:] == (Fault(f"[{FAULTS_MAX - 1}]", "bad"), Fault("", "and 7 more faults"))


def test_exactly_as_many_faults_as_allowed_are_all_listed() -> None:
    findings = Findings()
    for number in range(FAULTS_MAX):
        findings.note((number,), "bad")

    assert len(findings.faults()) == FAULTS_MAX


def test_a_place_with_a_fault_is_not_clean_but_those_around_it_are() -> None:
    findings = Findings()
    findings.note(("a", 1), "bad")
    findings.note(("b",), "repeated", spoils=False)

    assert not findings.clean(("a", 1))
    assert findings.clean(("a",))
    assert findings.clean(("a", 1, "x"))
    assert findings.clean(("b",))


@pytest.mark.parametrize(
    ("word", "words", "hint"),
    [
        ("topci", ["topic", "retry"], "; did you mean 'topic'?"),
        ("zebra", ["topic", "retry"], ""),
        ("topic", [], ""),
        ("ab", {"aB", "Ab"}, ""),
        ("plan1", {"plan3", "plan2"}, "; did you mean 'plan3'?"),
        ("a.b.cd", ["a.b.c"], '; did you mean "a.b.c"?'),
        ("x" * 65, ["x" * 64], ""),
        ("x" * 64, ["x" * 63], f"; did you mean '{'x' * 63}'?"),
    ],
)
def test_a_near_name_is_suggested(word: str, words: list[str], hint: str) -> None:
    findings = Findings()
    findings.note((), "unknown", near=Near(word, words))

    assert findings.faults() == (Fault("", f"unknown{hint}"),)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ((), ""),
        (("steps", "plan", "needs", 1), "steps.plan.needs[1]"),
        ((0, "a"), "[0].a"),
        (("steps", "a.b", "topic"), 'steps["a.b"].topic'),
        (("my-step", "$ref"), "my-step.$ref"),
        (("1st",), '["1st"]'),
        (("",), '[""]'),
        (("a\nb",), '["a\\nb"]'),
        (("x" * 80,), "x" * 80),
        (("x" * 81,), f'["{"x" * 79}…"]'),
    ],
)
def test_a_path_is_shown_as_people_write_it(path: Path, text: str) -> None:
    assert shown(path) == text


@given(st.text(st.characters(exclude_categories=())))
def test_quoted_text_is_one_short_line_of_what_can_be_seen(text: str) -> None:
    safe = quoted(text)

    assert safe.isprintable()
    assert len(safe) <= 10 * 80 + 2


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plan", '"plan"'),
        ('say "hi"', '"say \\"hi\\""'),
        ("\x1b[31m", '"\\u001b[31m"'),
        ("\x7f\u202e\ufeff\ud800", '"\\u007f\\u202e\\ufeff\\ud800"'),
        ("x" * 80, f'"{"x" * 80}"'),
        ("x" * 81, f'"{"x" * 79}…"'),
        ("Grüße 😀", '"Grüße 😀"'),
        ("\U000e0001", '"\\U000e0001"'),
    ],
)
def test_quoted_text_hides_nothing(text: str, safe: str) -> None:
    assert quoted(text) == safe


def test_names_have_single_quotes_unless_they_are_strange() -> None:
    assert named("plan") == "'plan'"
    assert named("no\nsuch") == '"no\\nsuch"'


@pytest.mark.parametrize(
    ("words", "text"),
    [([], ""), (["a"], "a"), (["a", "b"], "a or b"), (["a", "b", "c"], "a, b or c")],
)
def test_words_are_listed(words: list[str], text: str) -> None:
    assert listed(words) == text
    assert listed(words, "and") == text.replace(" or ", " and ")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (0, "a number"),
        (0.5, "a number"),
        ("", "text"),
        ([], "a list"),
        ({}, "an object"),
    ],
)
def test_every_value_has_a_word_for_its_kind(value: JsonValue, kind: str) -> None:
    assert kind_of(value) == kind


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault("steps.a", "bad", 4), "line 4: steps.a: bad"),
        (Fault("steps.a", "bad"), "steps.a: bad"),
        (Fault("", "bad", 4), "line 4: bad"),
        (Fault("", "bad"), "bad"),
    ],
)
def test_a_fault_reads_as_a_line(fault: Fault, text: str) -> None:
    assert str(fault) == text
