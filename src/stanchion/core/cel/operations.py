"""Operations: what the operators and functions of an expression do.

Values are JSON and stay JSON: 64-bit integers, finite doubles, strings, booleans, null, lists, and
maps with string keys. A result outside these types raises ``ExpressionError``, and so does an
operand of the wrong type: nothing is converted implicitly, and ``true`` is not ``1``.

Conversions are strict. ``int`` and ``double`` accept a string only if all of it is a number in
plain digits: no spaces, underscores, ``0x10`` or ``inf``. A value that does not fit raises
``ExpressionError``; it is never rounded to a value that does.

An operation that takes more than constant time (concatenation, comparison, search) charges the
budget before it runs.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from stanchion.core.cel import pattern
from stanchion.core.cel.value import (
    KINDS,
    ExpressionError,
    Value,
    described,
    fetch,
    finite,
    int64,
    kind_of,
    misfit,
)
from stanchion.core.faults import quoted

if TYPE_CHECKING:
    from stanchion.core.cel.evaluation import EvaluationBudget

Function: TypeAlias = Callable[..., Value]
"""Takes the budget, then the arguments."""


def elements(budget: EvaluationBudget, value: Value) -> Sequence[Value]:
    """The elements that a macro iterates: the items of a list, or the keys of a map.

    CEL does not define the order of keys. They are sorted, so that equal maps give equal results.
    """
    if isinstance(value, list):
        return value
    if isinstance(value, dict):
        budget.work(len(value))
        return sorted(value)
    raise ExpressionError(f"a list or map is needed to walk over, this is {described(value)}")


def has(value: Value, field: str) -> bool:
    """Whether a map has a key."""
    if isinstance(value, dict):
        return field in value
    raise ExpressionError(f"has: this is {described(value)} and has no {quoted(field)}")


# ── Numbers ──────────────────────────────────────────────────────────────────────────────────────


_NUMBERS: Final = frozenset({int, float})


def _arithmetic(
    sign: str, whole: Callable[[int, int], int], real: Callable[[float, float], float] | None
) -> Function:
    def calculate(_: EvaluationBudget, left: Value, right: Value) -> Value:
        # Exact types: in Python a bool is an int, in CEL it is not.
        if type(left) is int and type(right) is int:
            return int64(whole(int64(left), int64(right)))
        if real is not None and type(left) is float and type(right) is float:
            return finite(real(left, right))
        raise misfit(sign, left, right)

    return calculate


def _quotient(left: int, right: int) -> int:
    """Integer division that truncates towards zero; that of Python rounds down."""
    if right == 0:
        raise ExpressionError("division by zero")
    quotient = abs(left) // abs(right)
    return int64(quotient if (left < 0) == (right < 0) else -quotient)


def _remainder(left: int, right: int) -> int:
    return left - right * _quotient(left, right)


def _ratio(left: float, right: float) -> float:
    if right == 0:
        raise ExpressionError("division by zero")
    return left / right


_add_numbers = _arithmetic("+", operator.add, operator.add)


def _add(budget: EvaluationBudget, left: Value, right: Value) -> Value:
    if isinstance(left, str) and isinstance(right, str):
        budget.work((len(left) + len(right)) // 16)
        return left + right
    if isinstance(left, list) and isinstance(right, list):
        budget.work((len(left) + len(right)) // 4)
        return left + right
    return _add_numbers(budget, left, right)


def _negate(_: EvaluationBudget, value: Value) -> Value:
    if isinstance(value, float):
        return -value
    if type(value) is int:
        return int64(-int64(value))
    raise misfit("-", value)


# ── Comparing ────────────────────────────────────────────────────────────────────────────────────


def _equal(budget: EvaluationBudget, left: Value, right: Value) -> bool:
    """Numbers compare by value, lists and maps by content; different types are not equal."""
    if type(left) in _NUMBERS and type(right) in _NUMBERS:
        return left == right
    pairs = [(left, right)]
    while pairs:
        one, other = pairs.pop()
        kind = kind_of(one)
        if kind != kind_of(other):
            if not (type(one) in _NUMBERS and type(other) in _NUMBERS and one == other):
                return False
        elif isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other):
                return False
            budget.work(2 * len(one))
            pairs.extend(zip(one, other, strict=True))
        elif isinstance(one, dict) and isinstance(other, dict):
            budget.work(2 * len(one))
            if one.keys() != other.keys():
                return False
            pairs.extend((value, other[key]) for key, value in one.items())
        elif isinstance(one, str) and isinstance(other, str):
            budget.work(min(len(one), len(other)) // 16)
            if one != other:
                return False
        elif one != other:
            return False
    return True


def _unequal(budget: EvaluationBudget, left: Value, right: Value) -> bool:
    return not _equal(budget, left, right)


def _ordering(sign: str, compare: Callable[[Any, Any], bool]) -> Function:
    def ordered(budget: EvaluationBudget, left: Value, right: Value) -> bool:
        if type(left) in _NUMBERS and type(right) in _NUMBERS:
            return compare(left, right)
        if isinstance(left, str) and isinstance(right, str):
            budget.work(min(len(left), len(right)) // 16)
            return compare(left, right)
        if isinstance(left, bool) and isinstance(right, bool):
            return compare(left, right)
        raise misfit(sign, left, right)

    return ordered


def _in(budget: EvaluationBudget, needle: Value, container: Value) -> bool:
    if isinstance(container, list):
        budget.work(2 * len(container))
        return any(_equal(budget, needle, item) for item in container)
    if isinstance(container, dict):
        if isinstance(needle, str):
            return needle in container
        if isinstance(needle, bool | int | float):
            return False
    raise misfit("in", needle, container)


# ── Looking in ───────────────────────────────────────────────────────────────────────────────────


def _index(_: EvaluationBudget, container: Value, key: Value) -> Value:
    return fetch(container, key)


def _size(_: EvaluationBudget, value: Value) -> int:
    if isinstance(value, str | list | dict):
        return len(value)
    raise misfit("size", value)


def _type(_: EvaluationBudget, value: Value) -> Value:
    return KINDS[kind_of(value)]


def _dyn(_: EvaluationBudget, value: Value) -> Value:
    return value


def _not(_: EvaluationBudget, value: Value) -> bool:
    if isinstance(value, bool):
        return not value
    raise misfit("!", value)


def _on_text(name: str, decide: Callable[[EvaluationBudget, str, str], bool]) -> Function:
    def decided(budget: EvaluationBudget, text: Value, part: Value) -> bool:
        if isinstance(text, str) and isinstance(part, str):
            return decide(budget, text, part)
        raise misfit(name, text, part)

    return decided


def _contains(budget: EvaluationBudget, text: str, part: str) -> bool:
    # For a short needle the search may compare each of its characters at each position.
    budget.work(len(text) // 16 * (1 + min(len(part), 100) // 32))
    return part in text


def _starts_with(budget: EvaluationBudget, text: str, part: str) -> bool:
    budget.work(len(part) // 16)
    return text.startswith(part)


def _ends_with(budget: EvaluationBudget, text: str, part: str) -> bool:
    budget.work(len(part) // 16)
    return text.endswith(part)


# ── Conversions ───────────────────────────────────────────────────────────────────────────────────

_INT_TEXT = re.compile(r"[+-]?[0-9]{1,19}")
_DOUBLE_TEXT = re.compile(
    r"[+-]?([0-9]{1,400}(\.[0-9]{0,400})?|\.[0-9]{1,400})([eE][+-]?[0-9]{1,4})?"
)
_BOOL_TEXTS: Final = {
    **dict.fromkeys(("true", "True", "TRUE", "t", "1"), True),
    **dict.fromkeys(("false", "False", "FALSE", "f", "0"), False),
}


def _to_int(_: EvaluationBudget, value: Value) -> int:
    """Convert to an integer. A double is truncated."""
    if isinstance(value, float):
        return int64(math.trunc(finite(value)))
    if isinstance(value, str):
        if _INT_TEXT.fullmatch(value):
            return int64(int(value))
        raise ExpressionError(f"int: {quoted(value)} is not a whole number")
    if type(value) is int:
        return int64(value)
    raise misfit("int", value)


def _to_double(_: EvaluationBudget, value: Value) -> float:
    """Convert to a double. An integer becomes the nearest one."""
    if isinstance(value, float):
        return value
    if isinstance(value, str):
        if _DOUBLE_TEXT.fullmatch(value):
            return finite(float(value))
        raise ExpressionError(f"double: {quoted(value)} is not a number")
    if type(value) is int:
        return float(int64(value))
    raise misfit("double", value)


def _to_string(_: EvaluationBudget, value: Value) -> str:
    """Convert to a string, as in JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int64(value))
    if isinstance(value, float):
        return repr(value)
    raise misfit("string", value)


def _to_bool(_: EvaluationBudget, value: Value) -> bool:
    """Convert to a boolean, from the strings that CEL allows."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        known = _BOOL_TEXTS.get(value)
        if known is not None:
            return known
        raise ExpressionError(f"bool: {quoted(value)} is neither true nor false")
    raise misfit("bool", value)


FUNCTIONS: Final[dict[str, Function]] = {
    "_+_": _add,
    "_-_": _arithmetic("-", operator.sub, operator.sub),
    "_*_": _arithmetic("*", operator.mul, operator.mul),
    "_/_": _arithmetic("/", _quotient, _ratio),
    "_%_": _arithmetic("%", _remainder, None),
    "-_": _negate,
    "!_": _not,
    "_==_": _equal,
    "_!=_": _unequal,
    "_<_": _ordering("<", operator.lt),
    "_<=_": _ordering("<=", operator.le),
    "_>_": _ordering(">", operator.gt),
    "_>=_": _ordering(">=", operator.ge),
    "@in": _in,
    "_[_]": _index,
    "size": _size,
    "contains": _on_text("contains", _contains),
    "startsWith": _on_text("startsWith", _starts_with),
    "endsWith": _on_text("endsWith", _ends_with),
    "matches": _on_text("matches", pattern.matches),
    "int": _to_int,
    "double": _to_double,
    "string": _to_string,
    "bool": _to_bool,
    "type": _type,
    "dyn": _dyn,
}
"""By their names in CEL. ``&&``, ``||`` and ``?:`` are in ``evaluation``, because they do not
evaluate all their arguments."""
