"""Evaluation: compiles a syntax tree to functions, and limits what a call of them may use.

``build`` turns each node into a function of a frame. A frame is a list: the budget, then a slot for
each root name and each loop variable. Slots are assigned when the functions are built, so a name
lookup is a list index.

In CEL an error does not always propagate: ``a || b`` is true if either side is true, even if the
other raises. ``BudgetSpent`` always propagates.

``EvaluationBudget`` limits time and size. Time is counted, not measured, so that the same
expression on the same data always has the same outcome. A unit of work takes 0.1 to 0.2 µs: one
syntax node in one iteration of a loop, or half a comparison of two list elements. Bulk operations
cost less: one unit covers 16 characters of a concatenation, or 4 values of a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, assert_never, cast

import msgspec

from stanchion.core.cel.operations import FUNCTIONS, elements, has
from stanchion.core.cel.pattern import check_pattern
from stanchion.core.cel.syntax import (
    CallNode,
    Constant,
    Has,
    ListOf,
    Loop,
    Macro,
    MapOf,
    Name,
    Node,
    Select,
    children,
)
from stanchion.core.cel.value import (
    KINDS,
    BudgetSpent,
    ExpressionError,
    ExpressionFault,
    Value,
    ValueKind,
    described,
    fetch,
)
from stanchion.core.faults import Path, quoted
from stanchion.core.json_value import JsonValue
from stanchion.core.limits import JSON_DEPTH_MAX

_Frame: TypeAlias = list[Any]
# Any, not Value: an intermediate list may hold types, which a result must not.
_Step: TypeAlias = Callable[[_Frame], Any]
_Slots: TypeAlias = Mapping[str, int]


class Program(msgspec.Struct, frozen=True):
    """A compiled expression."""

    step: _Step
    names: tuple[str, ...]
    """The root names it uses, in the order of their slots."""
    loops: int
    """Slots for loop variables."""
    weight: int
    """The work that every run takes."""

    def run(self, scope: Mapping[str, JsonValue], budget: EvaluationBudget) -> Value:
        """Evaluate. Every name in ``names`` must be in the scope."""
        budget.work(self.weight)
        value: Value = self.step(
            [budget, *map(scope.__getitem__, self.names), *[None] * self.loops]
        )
        return value


def build(root: Node, names: tuple[str, ...]) -> Program:
    """Build the program for an expression that uses these root names, or raise ExpressionFault."""
    slots = {name: slot for slot, name in enumerate(names, start=1)}
    return Program(_step(root, slots), names, _loops(root), _weight(root))


def path_of(node: Node) -> Path | None:
    """The path, if the expression only selects a part of the data."""
    match node:
        case Name(name=name):
            return (name,)
        case Select(operand=operand, field=key):
            rest = path_of(operand)
        case CallNode(
            function="_[_]", arguments=(operand, Constant(value=str() | int() as key))
        ) if not isinstance(key, bool):
            rest = path_of(operand)
        case _:
            return None
    return None if rest is None else (*rest, key)


def follow(value: Value, path: Path) -> Value:
    """The part of the value at the path. Raises ``ExpressionError`` if there is none."""
    for place in range(1, len(path)):
        key = path[place]
        if isinstance(value, dict) and key in value:
            value = value[key]
        else:
            value = fetch(value, key, path[:place])
    return value


def _weight(node: Node) -> int:
    return 1 + sum(map(_weight, children(node)))


def _loops(node: Node) -> int:
    """The nesting depth of loops."""
    return isinstance(node, Loop) + max(map(_loops, children(node)), default=0)


# ── One function per node ────────────────────────────────────────────────────────────────────────


def _step(node: Node, slots: _Slots) -> _Step:
    path = path_of(node)
    if path is not None and path[0] in slots:
        return _path_step(path, slots[str(path[0])])
    match node:
        case Constant(value=value):
            return lambda _: value
        case Name(name=name):
            return _type_step(node, name)
        case Select(operand=operand, field=field):
            inner = _step(operand, slots)
            return lambda frame: fetch(inner(frame), field)
        case Has(operand=operand, field=field):
            inner = _step(operand, slots)
            return lambda frame: has(inner(frame), field)
        case CallNode():
            return _call_step(node, slots)
        case ListOf(items=items):
            steps = tuple(_step(item, slots) for item in items)
            return lambda frame: [step(frame) for step in steps]
        case MapOf():
            return _map_step(node, slots)
        case Loop():
            return _loop_step(node, slots)
        case _:
            assert_never(node)


def _path_step(path: Path, slot: int) -> _Step:
    if len(path) == 1:
        return lambda frame: frame[slot]
    return lambda frame: follow(frame[slot], path)


def _type_step(node: Name, name: str) -> _Step:
    kind = KINDS.get(name)
    if kind is None:
        raise ExpressionFault(f"the type {name} is not available", node.position)
    return lambda _: kind


def _call_step(node: CallNode, slots: _Slots) -> _Step:
    steps = [_step(argument, slots) for argument in node.arguments]
    match node.function, steps:
        case "_&&_", [left, right]:
            return _logic_step(left, right, stops=False)
        case "_||_", [left, right]:
            return _logic_step(left, right, stops=True)
        case "_?_:_", [condition, yes, no]:
            return lambda frame: (yes if _truth(condition(frame)) else no)(frame)
        case name, [one] if name in FUNCTIONS:
            function = FUNCTIONS[name]
            return lambda frame: function(frame[0], one(frame))
        case name, [one, other] if name in FUNCTIONS:
            _check_literal_pattern(node)
            function = FUNCTIONS[name]
            return lambda frame: function(frame[0], one(frame), other(frame))
        case name, _:
            raise ExpressionFault(f"the function {name} is not available", node.position)


def _check_literal_pattern(node: CallNode) -> None:
    match node.function, node.arguments[1]:
        case "matches", Constant(position=at, value=str() as pattern):
            check_pattern(pattern, at)
        case _:
            pass


_ERROR_WORK: Final = 60
"""Raising and catching an error takes longer than finding a value."""


def _truth(value: Value) -> bool:
    if isinstance(value, bool):
        return value
    raise ExpressionError(f"true or false is needed here, this is {described(value)}")


def _logic_step(left: _Step, right: _Step, *, stops: bool) -> _Step:
    def decide(frame: _Frame) -> bool:
        budget: EvaluationBudget = frame[0]
        error: ExpressionError | None = None
        for side in (left, right):
            try:
                if _truth(side(frame)) is stops:
                    return stops
            except BudgetSpent:
                raise
            except ExpressionError as caught:
                error = error or caught
                budget.work(_ERROR_WORK)
        if error is not None:
            raise error
        return not stops

    return decide


def _map_step(node: MapOf, slots: _Slots) -> _Step:
    entries = [(_step(key, slots), _step(value, slots)) for key, value in node.entries]

    def make(frame: _Frame) -> Value:
        made: dict[str, Any] = {}
        for key_step, value_step in entries:
            key = key_step(frame)
            if not isinstance(key, str):
                raise ExpressionError(f"a map's keys are strings, this is {described(key)}")
            if key in made:
                raise ExpressionError(f"a map has the key {quoted(key)} twice")
            made[key] = value_step(frame)
        return made

    return make


# ── Loops ────────────────────────────────────────────────────────────────────────────────────────


def _loop_step(node: Loop, slots: _Slots) -> _Step:
    slot = max(slots.values(), default=0) + 1
    inner = {**slots, node.variable: slot}
    over = _step(node.over, slots)
    condition = None if node.condition is None else _step(node.condition, inner)
    value = None if node.value is None else _step(node.value, inner)
    cost = _weight(node) - _weight(node.over)
    match node.macro:
        case Macro.ALL | Macro.EXISTS:
            assert condition is not None
            return _quantifier_step(over, slot, condition, cost, stops=node.macro is Macro.EXISTS)
        case Macro.EXISTS_ONE:
            assert condition is not None
            return _exists_one_step(over, slot, condition, cost)
        case Macro.COLLECT:
            assert value is not None
            return _collect_step(over, slot, condition, value, cost)
        case _:
            assert_never(node.macro)


def _quantifier_step(over: _Step, slot: int, condition: _Step, cost: int, *, stops: bool) -> _Step:
    def decide(frame: _Frame) -> bool:
        budget: EvaluationBudget = frame[0]
        error: ExpressionError | None = None
        for element in elements(budget, over(frame)):
            budget.work(cost)
            frame[slot] = element
            try:
                if _truth(condition(frame)) is stops:
                    return stops
            except BudgetSpent:
                raise
            except ExpressionError as caught:
                error = error or caught
                budget.work(_ERROR_WORK)
        if error is not None:
            raise error
        return not stops

    return decide


def _exists_one_step(over: _Step, slot: int, condition: _Step, cost: int) -> _Step:
    def count(frame: _Frame) -> bool:
        budget: EvaluationBudget = frame[0]
        found = 0
        for element in elements(budget, over(frame)):
            budget.work(cost)
            frame[slot] = element
            found += _truth(condition(frame))
        return found == 1

    return count


def _collect_step(
    over: _Step, slot: int, condition: _Step | None, value: _Step, cost: int
) -> _Step:
    def collect(frame: _Frame) -> Value:
        budget: EvaluationBudget = frame[0]
        made: list[Any] = []
        for element in elements(budget, over(frame)):
            budget.work(cost)
            frame[slot] = element
            if condition is None or _truth(condition(frame)):
                made.append(value(frame))
        return made

    return collect


# ── The budget ────────────────────────────────────────────────────────────────────────────────────

WORK_MAX: Final = 250_000
"""Units of work in one evaluation, or in all holes of one template."""
SIZE_MAX: Final = 4 * 1024 * 1024
"""The size of the results of one evaluation, or of all holes of one template: one for each value,
and one for each character of strings and keys. Never more than the bytes of the value as JSON."""
_SCALARS: Final = frozenset({type(None), bool, int, float})


class EvaluationBudget:
    """The work and size that are left. Evaluations that share a budget are limited together."""

    __slots__ = ("size_left", "work_left")

    def __init__(self, *, work: int = WORK_MAX, size: int = SIZE_MAX) -> None:
        self.work_left = work
        self.size_left = size

    def work(self, units: int) -> None:
        """Charge this much work. Raises ``BudgetSpent``."""
        self.work_left -= units
        if self.work_left < 0:
            raise BudgetSpent("too much work: it repeats too often or looks at too much data")

    def size(self, units: int) -> None:
        """Charge this much size. Raises ``BudgetSpent``."""
        self.size_left -= units
        if self.size_left < 0:
            raise BudgetSpent("the result is too large")

    def keep(self, value: Value) -> JsonValue:
        """Charge the size of a result and check that it is JSON.

        Raises ``BudgetSpent`` if it is too large, ``ExpressionError`` if it holds a type.
        """
        self.size(1)
        if type(value) in _SCALARS:
            return cast("JsonValue", value)
        # Level by level, and each value is charged before it is visited: a value may contain the
        # same list a million times without using memory, so the budget must stop the walk.
        level = [value]
        for _ in range(JSON_DEPTH_MAX + 1):
            below: list[Value] = []
            for part in level:
                if isinstance(part, str):
                    self.size(len(part))
                elif isinstance(part, list):
                    self.size(len(part))
                    self.work(1 + len(part) // 4)
                    below += part
                elif isinstance(part, dict):
                    self.size(len(part) + sum(map(len, part)))
                    self.work(3 + len(part) // 4)
                    below += part.values()
                elif isinstance(part, ValueKind):
                    raise ExpressionError(f"the result is, or holds, a type: {part.name}")
            if not below:
                return cast("JsonValue", value)
            level = below
        raise BudgetSpent(f"the result is nested more than {JSON_DEPTH_MAX} levels deep")
