"""Our evaluator against the reference implementation of CEL, on expressions nobody would write.

Both get the same text and the same data, grown from a seed. They must find the same value, or both
find none. What is never grown is where we differ on purpose: doubles that are not finite, text of
doubles, keys that are not text, and walks over a map whose order shows (theirs is another one in
every process).
"""

from __future__ import annotations

import ctypes
import json
import re
from collections import Counter
from random import Random
from typing import Final, cast

from cel_expr_python import cel

from stanchion.core.expression import ExpressionError, ExpressionFault, compile_expression
from stanchion.core.json_value import JsonValue
from tests.conftest import SOAK

SEEDS: Final = range(50_000 if SOAK else 1_500)
NAMES: Final = frozenset({"input", "item"})
NO_VALUE: Final = "no value"
FAULT: Final = "fault"

_environment = cel.NewEnv(variables={"input": cel.Type.DYN, "item": cel.Type.DYN})


def reference(source: str, scope: dict[str, JsonValue]) -> str:
    try:
        program = _environment.compile(source)
    except RuntimeError:
        return FAULT
    try:
        found = program.eval(data=scope)
    except RuntimeError:
        return NO_VALUE
    if found.type() == cel.Type.ERROR:
        return NO_VALUE
    value = cast("JsonValue", found.plain_value())
    for _ in range(_count_nulls(value)):
        # The library hands out None without counting it. Before Python 3.12 that ends the process
        # after a few thousand nulls. Our own code never asks it for a value other than a bool.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(None))
    return json.dumps(value, sort_keys=True)


def _count_nulls(value: JsonValue) -> int:
    match value:
        case None:
            return 1
        case list():
            return sum(map(_count_nulls, value))
        case dict():
            return sum(map(_count_nulls, value.values()))
        case _:
            return 0


def ours(source: str, scope: dict[str, JsonValue]) -> str:
    try:
        return json.dumps(compile_expression(source, names=NAMES).evaluate(scope), sort_keys=True)
    except ExpressionError:
        return NO_VALUE
    except ExpressionFault:
        return FAULT


# ── What grows from a seed ───────────────────────────────────────────────────────────────────────

SCALARS: Final[tuple[JsonValue, ...]] = (
    *(None, True, False, 0, 1, 2, -1, 2**63 - 1, -(2**63), 0.0, 0.5, 1.0, -1.5),
    *("", "a", "ab", "ba", "é😀", "1", "-7", "true", "x" * 40),
)


def grow_value(random: Random, depth: int = 3) -> JsonValue:
    match random.randrange(6) if depth else 0:
        case 4:
            return [grow_value(random, depth - 1) for _ in range(random.randrange(4))]
        case 5:
            # One key at most: this may be walked over, and then the order would show.
            keys = random.sample("abkl", random.randrange(2))
            return {key: grow_value(random, depth - 1) for key in keys}
        case _:
            return random.choice(SCALARS)


def grow_scope(random: Random) -> dict[str, JsonValue]:
    return {
        "input": {
            "a": grow_value(random),
            "l": [grow_value(random) for _ in range(random.randrange(4))],
            "m": {key: grow_value(random) for key in random.sample("abkl", random.randrange(4))},
            "n": random.randrange(-3, 4),
            "s": random.choice(["", "a", "ab", "ba"]),
            "t": random.random() < 0.5,
        },
        "item": grow_value(random),
    }


# A sort of expression is written <b>: of type bool, int, string, list, map, or of any.
GRAMMAR: Final = {
    "path": [
        *("input", "item", "input.a", "input.l", "input.m", "input.s", " input . m "),
        *("<path>.a", "<path>.k", "<path>.l", "<path>.m", "<path>.`a`", '<path>["a"]'),
        *('<path>["no-such"]', "<path>[0]", "<path>[1]", "<path>[-1]", "<path>[99]"),
        *("<path>[0.0]", "<path>[1.0]", "<path>[0.5]", "<path>[true]", "<path>[null]"),
    ],
    "any": ["<path>", "<b>", "<i>", "<s>", "<l>", "<m>", "x", "dyn(<any>)", "<m>.a", "<l>[<i>]"],
    "b": [
        *("true", "false", "input.t", "input.a", "item", "x"),
        *("<b> && <b>", "<b> || <b>", "!<b>", "(<b> ? <b> : <b>)"),
        *("(<any> == <any>)", "(<any> != <any>)", "(<any> < <any>)", "(<any> <= <any>)"),
        *("(<any> > <any>)", "(<any> >= <any>)", "(<any> in <l>)", "(<any> in <m>)"),
        *("<s>.contains(<s>)", "<s>.startsWith(<s>)", "<s>.endsWith(<s>)", "bool(<s>)"),
        *("<s>.matches('^a|b$')", "matches(<s>, 'a+$')", "<s>.matches(<s>)"),
        *("<l>.all(x, <b>)", "<l>.exists(x, <b>)", "<l>.exists_one(x, <b>)"),
        *("<l>.all(x, x == <any>)", "<l>.exists(x, x == <any> || <b>)"),
        *("<l>.exists(x, <l>.all(y, x == y))", "<l>.exists_one(x, x == <any>)"),
        *("<m>.all(x, <m>[x] == <any>)", "<m>.exists(x, x == <s>)", "<any>.all(x, <b>)"),
        *("has(input.a)", "has(item.a)", "has(<path>.k)", "has(<m>.a)"),
        *("type(<any>) == <t>", "type(<any>) == type(<any>)", "type(<t>) == type"),
    ],
    "t": ["int", "double", "string", "bool", "list", "map", "null_type"],
    "i": [
        *("0", "1", "-1", "7", "9223372036854775807", "input.n", "input.a", "item", "x"),
        *("(<i> + <i>)", "(<i> - <i>)", "(<i> * <i>)", "(<i> % <i>)", "-<i>"),
        *("(<i> / 0)", "(<i> / 2)", "(<i> / -1)", "(<i> / -3)"),
        *("size(<s>)", "<l>.size()", "size(<m>)", "size(<any>)", "int(<num>)"),
    ],
    "num": ["'12'", "'-7'", "'x'", "''", "1.9", "-1.9", "1e30", "input.n"],
    "s": [
        *("''", "'a'", '"b"', r"'\u00e9'", "r'\\d'", "input.s", "input.a", "item", "x"),
        *(
            "(<s> + <s>)",
            "string(input.n)",
            "string(input.t)",
            "string(size(<l>))",
            "string(input.s)",
        ),
    ],
    "l": [
        *("[]", "input.l", "input.a", "item", "[<any>]", "[<any>, <any>]", "(<l> + <l>)"),
        *("<l>.map(x, <any>)", "<l>.map(x, [x, <any>])", "<l>.map(x, <b>, x)"),
        *("<l>.filter(x, <b>)", "<l>.filter(x, x == <any>)", "<l>.map(x, <l>.map(x, [x]))"),
    ],
    "m": ["{}", "input.m", "input.a", "item", "{'k': <any>}", "{'a': <any>, 'b' + input.s: <any>}"],
}
_SORT = re.compile(r"<(\w+)>")


def grow_source(random: Random, sort: str, depth: int = 4) -> str:
    choices = GRAMMAR[sort]
    if depth == 0:
        choices = [choice for choice in choices if not _SORT.search(choice)] or ["item"]
    return _SORT.sub(lambda found: grow_source(random, found[1], depth - 1), random.choice(choices))


def disagreements(sort: str) -> tuple[list[str], Counter[str]]:
    found, kinds = [], Counter[str]()
    for seed in SEEDS:
        random = Random(f"{sort} {seed}")
        source, scope = grow_source(random, sort), grow_scope(random)
        expected = reference(source, scope)
        kinds[expected if expected in {FAULT, NO_VALUE} else "value"] += 1
        if ours(source, scope) != expected:
            found.append(f"seed {seed}: {source} over {scope}")
    return found, kinds


def test_a_path_leads_where_the_reference_goes() -> None:
    found, kinds = disagreements("path")
    assert not found
    assert min(kinds["value"], kinds[NO_VALUE]) > len(SEEDS) // 10


def test_an_expression_has_the_value_the_reference_finds() -> None:
    found, kinds = disagreements("any")
    assert not found
    assert min(kinds["value"], kinds[NO_VALUE]) > len(SEEDS) // 10


def test_a_condition_has_the_value_the_reference_finds() -> None:
    found, kinds = disagreements("b")
    assert not found
    assert min(kinds["value"], kinds[NO_VALUE]) > len(SEEDS) // 10
