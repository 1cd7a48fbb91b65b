"""Conversions: ``int``, ``double``, ``string`` and ``bool``, strictly.

Text is a number if all of it is one, in plain digits: no spaces, underscores, ``0x10`` or ``inf``.
What does not fit is an error, never a nearby value.
"""

from __future__ import annotations

import math
import re
from typing import Final

from stanchion.core.cel.budget import EvaluationBudget
from stanchion.core.cel.errors import ExpressionError
from stanchion.core.cel.value import Value, finite, int64, misfit
from stanchion.core.faults import quoted

__all__ = ["to_bool", "to_double", "to_int", "to_string"]

_INT_TEXT = re.compile(r"[+-]?[0-9]{1,19}")
_DOUBLE_TEXT = re.compile(
    r"[+-]?([0-9]{1,400}(\.[0-9]{0,400})?|\.[0-9]{1,400})([eE][+-]?[0-9]{1,4})?"
)
_BOOL_TEXTS: Final = {
    **dict.fromkeys(("true", "True", "TRUE", "t", "1"), True),
    **dict.fromkeys(("false", "False", "FALSE", "f", "0"), False),
}


def to_int(_: EvaluationBudget, value: Value) -> int:
    """A whole number: a double loses its fraction."""
    if isinstance(value, float):
        return int64(math.trunc(finite(value)))
    if isinstance(value, str):
        if _INT_TEXT.fullmatch(value):
            return int64(int(value))
        raise ExpressionError(f"int: {quoted(value)} is not a whole number")
    if type(value) is int:
        return int64(value)
    raise misfit("int", value)


def to_double(_: EvaluationBudget, value: Value) -> float:
    """A double: the nearest one to a whole number."""
    if isinstance(value, float):
        return value
    if isinstance(value, str):
        if _DOUBLE_TEXT.fullmatch(value):
            return finite(float(value))
        raise ExpressionError(f"double: {quoted(value)} is not a number")
    if type(value) is int:
        return float(int64(value))
    raise misfit("double", value)


def to_string(_: EvaluationBudget, value: Value) -> str:
    """The text of a value, as JSON writes it."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int64(value))
    if isinstance(value, float):
        return repr(value)
    raise misfit("string", value)


def to_bool(_: EvaluationBudget, value: Value) -> bool:
    """``true`` and ``false``, and the few other ways CEL lets them be written."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        known = _BOOL_TEXTS.get(value)
        if known is not None:
            return known
        raise ExpressionError(f"bool: {quoted(value)} is neither true nor false")
    raise misfit("bool", value)
