"""Values of expressions, and the errors that expressions raise.

A value is JSON or a type: in CEL a type is a value too (``type(input.x) == string``). The result of
an expression must be JSON.

Errors, by who can correct them:

ExpressionFault       the author of the workflow: the text is wrong for any data
ExpressionError       the sender of the data: the expression has no value for it
  BudgetSpent         either: the expression costs too much on this data
"""

from __future__ import annotations

import json
import math
from types import NoneType
from typing import Final, TypeAlias

import msgspec

from stanchion.core.faults import quoted, shown
from stanchion.core.json_value import JsonValue


class ValueKind(msgspec.Struct, frozen=True):
    """A type."""

    name: str


Value: TypeAlias = "JsonValue | ValueKind"

KINDS: Final = {
    name: ValueKind(name)
    for name in ("null_type", "bool", "int", "double", "string", "list", "map", "type")
}
"""The types by their names in CEL."""

_KIND_NAMES: Final[dict[type, str]] = {
    NoneType: "null_type",
    bool: "bool",
    int: "int",
    float: "double",
    str: "string",
    list: "list",
    dict: "map",
    ValueKind: "type",
}


def kind_of(value: Value) -> str:
    """The name of a value's type."""
    exact = _KIND_NAMES.get(type(value))
    if exact is not None:
        return exact
    # Subclasses, such as members of a StrEnum.
    for base, name in _KIND_NAMES.items():
        if isinstance(value, base):
            return name
    raise ExpressionError(f"a {type(value).__name__} is not a JSON value")


def described(value: Value) -> str:
    """The type of a value with its article, for messages: ``a string``, ``an int``, ``null``."""
    kind = kind_of(value)
    if kind == "null_type":
        return "null"
    return f"an {kind}" if kind == "int" else f"a {kind}"


def misfit(function: str, *values: Value) -> ExpressionError:
    """The error for a function that does not take values of these types."""
    return ExpressionError(f"'{function}' does not take ({', '.join(map(kind_of, values))})")


def int64(value: int) -> int:
    """The number, if it fits in 64 bits. Raises ``ExpressionError``."""
    if -(2**63) <= value < 2**63:
        return value
    raise ExpressionError("a whole number does not fit in 64 bits")


def finite(value: float) -> float:
    """The number, if it is finite. Raises ``ExpressionError``."""
    if math.isfinite(value):
        return value
    raise ExpressionError("a number is too large for a double")


def fetch(container: Value, key: Value, path: tuple[str | int, ...] = ()) -> Value:
    """The member of a map or list. Raises ``ExpressionError``, which names ``path``."""
    place = shown(path) if path else "this"
    if isinstance(container, dict):
        if isinstance(key, str) and key in container:
            return container[key]
        raise ExpressionError(f"{place} has no key {_shown_key(key)}")
    if not isinstance(container, list):
        raise ExpressionError(f"{place} is {described(container)} and has no {_shown_key(key)}")
    position = _whole(key)
    if position is None:
        raise ExpressionError(f"{place} is a list and has no {_shown_key(key)}")
    if not 0 <= position < len(container):
        raise ExpressionError(f"{place} has no item {position}: it has {len(container)} items")
    return container[position]


def _whole(key: Value) -> int | None:
    """The position in a list: an integer, or a double without fraction."""
    match key:
        case bool():
            return None
        case int() | float() if abs(key) < 2**63 and key == int(key):
            return int(key)
        case _:
            return None


def _shown_key(key: Value) -> str:
    match key:
        case str():
            return quoted(key)
        case int() if abs(key) >= 2**63:
            return "such large number"  # Python may refuse to convert it to a string
        case None | bool() | int() | float():
            return json.dumps(key)
        case _:
            return described(key)


class ExpressionFault(Exception):
    """An expression that is wrong for any data: raised when it is compiled."""

    def __init__(self, message: str, position: int | None = None) -> None:
        super().__init__(message, position)
        self.message = message
        self.position = position
        """The position of the character in the source, from 1, if known."""

    def __str__(self) -> str:
        return self.message if self.position is None else f"{self.message} (at {self.position})"


class ExpressionError(Exception):
    """An expression that has no value for this data."""


class BudgetSpent(ExpressionError):
    """An evaluation that was stopped because it took too long or its value grew too large."""
