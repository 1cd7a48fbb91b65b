"""Schema costs: an upper bound for the time of checking an input, computed before the check.

The validator holds the GIL for the whole check, so a check can neither be interrupted nor be moved
off the event loop: it must be short, or not start. ``CheckCost`` is computed once for a schema: for
each level below the root, the worst-case nanoseconds of all rules that can apply to one node of
that level. ``InputShape`` is computed for an input: the number of nodes, numbers, characters and
names on each level. Their product is an upper bound of the time.

The figures were measured with jsonschema-rs 0.60: a rule takes 5 to 20 ns, but a comparison of two
numbers 0.2 to 40 µs, because it uses fractions of arbitrary precision; a pattern takes up to 3.5 µs
per character if its automaton exceeds the cache; an error copies the value it concerns, once for
each failed alternative of an ``anyOf``; ``unevaluated…`` evaluates its siblings again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Final, NamedTuple, TypeAlias

from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.limits import INPUT_BYTES_MAX, JSON_DEPTH_MAX

CHECK_NS_MAX: Final = 10_000_000
"""The estimated time that one check may take at most."""
ERRORS_NS_MAX: Final = 10_000_000
"""The estimated time that building the errors of a check may take at most."""


class LevelCost(NamedTuple):
    """The worst-case time of the rules for the nodes of one level, in nanoseconds."""

    node: float = 0
    """For each node."""
    container: float = 0
    """Extra for each list or object: it may be compared with one in the schema."""
    integer: float = 0
    """Extra for each integer; likewise for floats, and for very small and very large floats."""
    float_: float = 0
    tiny: float = 0
    char: float = 0
    """For each character of a string."""
    name: float = 0
    """For each name of a member whose value is on this level, and for each character of it."""
    name_char: float = 0
    rules: float = 0
    """Not a time: the number of errors that each node and each name can cause."""
    name_rules: float = 0


Levels: TypeAlias = tuple[LevelCost, ...]
"""One entry per level, from the node to which the schema applies downwards."""

_NONE: Final = LevelCost()
_RULE_NS: Final = 15
_NAME_NS: Final = 20
_PATTERN_NS: Final = 35
_UNIQUE_NS: Final = 200
_UNIQUE_TINY_NS: Final = 1_500
_HASHED_NS: Final = 25
_ERROR_NS: Final = 7_000
_COPY_NS: Final = 75
"""For each node that an error copies."""
_COPY_NAME_NS: Final = 300
_UNEVALUATED: Final = 3
"""How often the siblings of ``unevaluatedItems`` or ``unevaluatedProperties`` are evaluated."""
_TINY: Final = 1e-30
_HUGE: Final = 1e30
_INT_MAX: Final = 2**63


def _compared(number: float) -> LevelCost:
    """The cost of comparing a node with this number for equality."""
    if _is_extreme(number):
        return LevelCost(integer=20_000, float_=25_000, tiny=40_000, container=10)
    plain = 180 if isinstance(number, int) else 1_500
    return LevelCost(integer=plain, float_=3_000, tiny=25_000, container=10)


def _bounded(number: float) -> LevelCost:
    """The cost of comparing a node with this limit."""
    if _is_extreme(number):
        return LevelCost(integer=20_000, float_=25_000, tiny=40_000)
    if isinstance(number, int):
        return LevelCost(integer=20, float_=50, tiny=1_000)
    return LevelCost(integer=1_000, float_=900, tiny=25_000)


def _multiple(divisor: float) -> LevelCost:
    """The cost of dividing a node by this number."""
    if _is_extreme(divisor) or abs(divisor) < _SMALL_DIVISOR:
        return LevelCost(integer=20_000, float_=20_000, tiny=42_000)
    integer = 500 if isinstance(divisor, int) else 1_000
    return LevelCost(integer=integer, float_=2_800, tiny=42_000)


_SMALL_DIVISOR: Final = 1e-12


def _is_extreme(number: float) -> bool:
    return abs(number) > _INT_MAX or 0 < abs(number) < _TINY


# ── What a schema costs ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class CheckCost:
    """The worst-case cost of checking one input against a schema."""

    levels: Levels
    unique: int
    """How many ``uniqueItems`` rules may visit each node of the input, on any level."""
    has_branches: bool
    """Whether an error may contain the errors of several alternatives (``anyOf``, ``oneOf``)."""

    def small_bytes(self) -> int:
        """Inputs up to this size are within the limit and need no ``InputShape``."""
        # A node has at least two bytes. A name has three more: its quotes and its colon.
        check_ns = self.unique * (_UNIQUE_NS + _UNIQUE_TINY_NS) / 2 + max(
            (level.node + 150 * level.container + max(level.integer, level.float_, level.tiny)) / 2
            + level.char
            + level.name / 3
            + level.name_char
            for level in self.levels
        )
        copy_ns = _COPY_NS / 2 + _COPY_NAME_NS / 5 + 1
        errors_ns = max(level.rules for level in self.levels) * _ERROR_NS / 2
        errors_ns += sum(level.rules for level in self.levels) * copy_ns
        names = sum(level.name_rules for level in self.levels)
        size = INPUT_BYTES_MAX
        while size and (
            size * check_ns > CHECK_NS_MAX
            or size * (errors_ns + names / 5 * (_ERROR_NS + size * copy_ns)) > ERRORS_NS_MAX
        ):
            size //= 2
        return size

    def check_ns(self, shape: InputShape) -> float:
        """The upper bound of the time of the check."""
        total = float(self.unique * (_UNIQUE_NS * shape.nodes + _UNIQUE_TINY_NS * shape.tinies))
        # Comparing an object with one in the schema compares the numbers in it.
        worst = max(
            (place for place, found in enumerate((True, shape.floats, shape.tinies)) if found)
        )
        for cost, level in zip(self.levels, shape.levels, strict=False):
            units = (cost.container, cost.container * 15, cost.container * 150)
            total += (
                cost.node * level.nodes
                + units[worst] * level.containers
                + cost.integer * level.integers
                + cost.float_ * level.floats
                + cost.tiny * level.tinies
                + cost.char * level.chars
                + cost.name * level.names
                + cost.name_char * level.name_chars
            )
        return total

    def first_error_ns(self, shape: InputShape) -> float:
        """The upper bound of the time to build one error, with those of each alternative."""
        if self.has_branches:
            return self.all_errors_ns(shape)
        return _ERROR_NS + shape.copy_ns

    def all_errors_ns(self, shape: InputShape) -> float:
        """The upper bound of the time to build every error."""
        total = 0.0
        above = below = shape.copy_ns
        for cost, level in zip(self.levels, shape.levels, strict=False):
            # Each rule may copy every node of this level with all nodes below it.
            total += cost.rules * (_ERROR_NS * level.nodes + below)
            total += cost.name_rules * level.names * (_ERROR_NS + above)
            above, below = below, below - level.copy_ns
        return total


def cost_of_rules(node: JsonObject, char_ns: Callable[[str], float]) -> Levels:
    """The cost of the rules of one schema, without its subschemas.

    ``char_ns`` returns the cost of a pattern per character.
    """
    own = LevelCost(node=_RULE_NS * (1 + len(node)), rules=len(node))
    child = _NONE
    for word, value in node.items():
        match word, value:
            case "const", _:
                own = _add(own, _constant(value))
            case "enum", list():
                own = _add(own, _enumeration(value))
            case (
                ("minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum"),
                int() | float(),
            ):
                own = _add(own, _bounded(value))
            case "multipleOf", int() | float():
                own = _add(own, _multiple(value))
            case "pattern", str():
                own = _add(own, LevelCost(char=char_ns(value)))
            case (("required" | "dependentRequired" | "dependentSchemas"), list() | dict()):
                own = _add(own, LevelCost(node=_NAME_NS * len(value), rules=len(value)))
            case "patternProperties", dict():
                per_char = sum(map(char_ns, value))
                child = _add(child, LevelCost(name=_PATTERN_NS * len(value), name_char=per_char))
            case "additionalProperties" | "unevaluatedProperties", False:
                child = _add(child, LevelCost(name=_NAME_NS))
            case _:
                pass
    return own, child


def joined(own: Levels, inner: Iterable[tuple[str, Levels]], *, repeats: bool) -> Levels:
    """The cost of a schema with its subschemas, each given with its keyword."""
    here: list[Levels] = [own]
    instead: list[Levels] = []
    for word, levels in inner:
        if word in _OF_ONE_CHILD:
            # A child has one name or position, so only one of these applies to it.
            instead.append((_NONE, *levels))
        elif word in _OF_ALL_CHILDREN:
            here.append((_NONE, *levels))
        elif word == "propertyNames":
            named = levels[0]
            cost = LevelCost(name=named.node, name_char=named.char, name_rules=named.rules)
            here.append((_NONE, cost))
        else:
            here.append(levels)
    total = _merged([*here, _merged(instead, max)], sum)
    if repeats:
        total = tuple(LevelCost(*(_UNEVALUATED * each for each in level)) for level in total)
    return total


_OF_ONE_CHILD: Final = frozenset({"additionalProperties", "items", "prefixItems", "properties"})
_OF_ALL_CHILDREN: Final = frozenset(
    {"contains", "patternProperties", "unevaluatedItems", "unevaluatedProperties"}
)


def _constant(value: JsonValue) -> LevelCost:
    match value:
        case bool() | None:
            return LevelCost(node=10)
        case int() | float():
            return _compared(value)
        case str():
            return LevelCost(node=10, char=0.1)
        case list():
            inside = map(_constant, value)
        case _:
            inside = map(_constant, value.values())
    # Applies to lists and objects only: each of their nodes may be compared with each node here.
    parts = _merged([(each,) for each in inside], sum)
    whole = parts[0].node + parts[0].container + parts[0].integer if parts else 0
    return LevelCost(node=10, container=20 + whole)


def _enumeration(values: list[JsonValue]) -> LevelCost:
    kinds = set(map(type, values))
    each = _merged([(_constant(value),) for value in values], sum)[0] if values else _NONE
    if kinds <= {str, bool, type(None)}:
        return LevelCost(node=_HASHED_NS, char=1)
    if kinds == {int}:
        # Integers are looked up in a set. A float is compared with each value in turn.
        return LevelCost(node=_HASHED_NS, float_=each.float_, tiny=each.tiny)
    return each


def _add(one: LevelCost, other: LevelCost) -> LevelCost:
    return LevelCost(*(left + right for left, right in zip(one, other, strict=True)))


def _merged(many: list[Levels], how: Callable[[Iterable[float]], float]) -> Levels:
    if len(many) == 1:
        return many[0]
    # No input is nested deeper.
    rows = islice(zip_longest(*many, fillvalue=_NONE), JSON_DEPTH_MAX + 1)
    return tuple(LevelCost(*map(how, zip(*row, strict=True))) for row in rows)


# ── What a pattern costs ─────────────────────────────────────────────────────────────────────────


_CHAR_NS: Final[Mapping[int, float]] = {1_024: 5, 4_096: 1_000, 16_384: 1_500, 65_536: 3_500}
_FIXED = re.compile(
    r"\^(?:[^\\|*+?{}()\[\].^$]|\\[dDwWsS.\-]|\[\^?(?:[^\\\]\[]|\\.)+\]|\{\d+\})*\$?"
)


def pattern_char_ns(pattern: str, size: int) -> float:
    """The cost of a match per character, by the compiled size (rounded up) of the pattern."""
    # A pattern without alternatives or repetition is in one state at a time.
    return _CHAR_NS[1_024] if _FIXED.fullmatch(pattern) else _CHAR_NS[size]


# ── What is in an input ──────────────────────────────────────────────────────────────────────────


class _Level(NamedTuple):
    nodes: int
    containers: int
    integers: int
    floats: int
    tinies: int
    chars: int
    names: int
    name_chars: int

    @property
    def copy_ns(self) -> float:
        """How long copying the level takes."""
        return _COPY_NS * self.nodes + _COPY_NAME_NS * self.names + self.chars + self.name_chars


class InputShape:
    """The number of nodes, characters and names on each level of an input."""

    __slots__ = ("copy_ns", "floats", "levels", "nodes", "tinies")

    def __init__(self, value: JsonValue) -> None:
        """Count the nodes. Takes about 60 ns per node."""
        self.levels: list[_Level] = []
        level: list[JsonValue] = [value]
        names: list[str] = []
        while level:
            kinds = Counter(map(type, level))
            lists = [each for each in level if type(each) is list] if kinds[list] else []
            objects = [each for each in level if type(each) is dict] if kinds[dict] else []
            floats = [each for each in level if type(each) is float] if kinds[float] else []
            tinies = sum(not _TINY <= abs(each) <= _HUGE and each != 0 for each in floats)
            chars = sum(len(each) for each in level if type(each) is str) if kinds[str] else 0
            self.levels.append(
                _Level(
                    nodes=len(level),
                    containers=len(lists) + len(objects),
                    integers=kinds[int],
                    floats=len(floats) - tinies,
                    tinies=tinies,
                    chars=chars,
                    names=len(names),
                    name_chars=sum(map(len, names)),
                )
            )
            names = list(chain.from_iterable(objects))
            level = [*chain.from_iterable(lists), *chain.from_iterable(map(_values, objects))]
        self.nodes = sum(each.nodes for each in self.levels)
        self.copy_ns = sum(each.copy_ns for each in self.levels)
        self.floats = sum(each.floats for each in self.levels)
        self.tinies = sum(each.tinies for each in self.levels)


def _values(members: dict[str, JsonValue]) -> Iterable[JsonValue]:
    return members.values()
