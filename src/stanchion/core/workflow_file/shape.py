"""Shapes: one definition of a value for the parser and for the JSON Schema.

A shape converts a plain value to a typed one and notes every fault with its path; and it returns
its JSON Schema, for editors. So the published schema cannot contradict the parser. (It may allow
more: rules between parts of a document are not part of a shape.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, Protocol, TypeVar

from msgspec import Struct

from stanchion.core.faults import Findings, Near, Path, kind_of, listed, quoted
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.ranges import Range, ranges_of


class Unfit(Enum):
    """The result for a value that does not fit; the findings hold the reasons."""

    UNFIT = "unfit"


UNFIT: Final = Unfit.UNFIT

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class Shape(Protocol[_T_co]):
    """The definition of a value."""

    def read(self, value: JsonValue, path: Path, findings: Findings) -> _T_co | Unfit:
        """Convert the value, or note the reasons and return ``UNFIT``."""

    def schema(self) -> JsonObject:
        """The JSON Schema (2020-12) of the shape."""


def fit(shape: Shape[_T], value: JsonValue, path: Path, findings: Findings) -> _T | Unfit:
    """Read a value, unless a fault is already noted for its place."""
    return shape.read(value, path, findings) if findings.clean(path) else UNFIT


def unfit(expected: str, value: JsonValue, path: Path, findings: Findings) -> Unfit:
    """Note that a value does not have the expected type."""
    findings.note(path, f"must be {expected}, not {kind_of(value)}")
    return UNFIT


# ── Single values ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Anything:
    """Any value."""

    def read(self, value: JsonValue, path: Path, findings: Findings) -> JsonValue | Unfit:
        del path, findings
        return value

    def schema(self) -> JsonObject:
        return {}


@dataclass(frozen=True, slots=True)
class AnyObject:
    """An object with any members."""

    def read(self, value: JsonValue, path: Path, findings: Findings) -> JsonObject | Unfit:
        return value if isinstance(value, dict) else unfit("an object", value, path, findings)

    def schema(self) -> JsonObject:
        return {"type": "object"}


@dataclass(frozen=True, slots=True)
class Boolean:
    """True or false."""

    def read(self, value: JsonValue, path: Path, findings: Findings) -> bool | Unfit:
        return value if isinstance(value, bool) else unfit("true or false", value, path, findings)

    def schema(self) -> JsonObject:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Text:
    """A string of limited length, with an optional pattern."""

    chars_max: int
    pattern: str = ""
    rule: str = ""
    """The pattern in words, after "must be"."""

    def read(self, value: JsonValue, path: Path, findings: Findings) -> str | Unfit:
        if not isinstance(value, str):
            return unfit("text", value, path, findings)
        if not 1 <= len(value) <= self.chars_max:
            wrong = f"{len(value)} characters long; from 1 to {self.chars_max} are allowed"
            findings.note(path, wrong)
            return UNFIT
        if self.pattern and not re.fullmatch(self.pattern, value):
            findings.note(path, f"must be {self.rule}; {quoted(value)} is not")
            return UNFIT
        return value

    def schema(self) -> JsonObject:
        said: JsonObject = {"type": "string", "minLength": 1, "maxLength": self.chars_max}
        return {**said, "pattern": f"^(?:{self.pattern})$"} if self.pattern else said


@dataclass(frozen=True, slots=True)
class Word(Generic[_T]):
    """One word of a fixed list, converted to its value."""

    words: Mapping[str, _T]

    def read(self, value: JsonValue, path: Path, findings: Findings) -> _T | Unfit:
        allowed = listed([*self.words])
        if not isinstance(value, str):
            return unfit(allowed, value, path, findings)
        if value not in self.words:
            near = Near(value, self.words.keys())
            findings.note(path, f"must be {allowed}; {quoted(value)} is not", near=near)
            return UNFIT
        return self.words[value]

    def schema(self) -> JsonObject:
        return {"enum": [*self.words]}


@dataclass(frozen=True, slots=True)
class Whole:
    """An integer in a range. ``3.0`` is one, as in JSON Schema; ``true`` is not."""

    low: int
    high: int

    def read(self, value: JsonValue, path: Path, findings: Findings) -> int | Unfit:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return unfit("an integer", value, path, findings)
        if isinstance(value, float) and not value.is_integer():
            findings.note(path, f"must be an integer; {value} is not")
            return UNFIT
        return int(value) if _ranged(value, self.low, self.high, path, findings) else UNFIT

    def schema(self) -> JsonObject:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Real:
    """A number in a range."""

    low: float
    high: float

    def read(self, value: JsonValue, path: Path, findings: Findings) -> float | Unfit:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return unfit("a number", value, path, findings)
        return float(value) if _ranged(value, self.low, self.high, path, findings) else UNFIT

    def schema(self) -> JsonObject:
        return {"type": "number", "minimum": self.low, "maximum": self.high}


def number_of(struct: type[Struct], member: str) -> Whole | Real:
    """The shape of a number whose range is stated at the member of ``struct`` that holds it."""
    return number_in(ranges_of(struct)[member])


def number_in(allowed: Range) -> Whole | Real:
    """The shape of a number in a range."""
    low, high, is_integer = allowed
    return Whole(int(low), int(high)) if is_integer else Real(low, high)


def _ranged(number: float, low: float, high: float, path: Path, findings: Findings) -> bool:
    # Written so that NaN, for which every comparison is false, is out of range.
    if low <= number <= high:
        return True
    findings.note(path, f"must be from {low} to {high}; {number} is not")
    return False


# ── Many of one kind ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Items(Generic[_T]):
    """A list of values of one shape."""

    item: Shape[_T]
    items_max: int

    def read(self, value: JsonValue, path: Path, findings: Findings) -> tuple[_T, ...] | Unfit:
        if not isinstance(value, list):
            return unfit("a list", value, path, findings)
        if len(value) > self.items_max:
            findings.note(path, f"{len(value)} entries; at most {self.items_max} are allowed")
            return UNFIT
        read = [fit(self.item, item, (*path, n), findings) for n, item in enumerate(value)]
        good = tuple(item for item in read if not isinstance(item, Unfit))
        return good if len(good) == len(read) else UNFIT

    def schema(self) -> JsonObject:
        return {"type": "array", "items": self.item.schema(), "maxItems": self.items_max}


@dataclass(frozen=True, slots=True)
class Entries(Generic[_T]):
    """An object whose keys are names and whose values have one shape."""

    key: Text
    value: Shape[_T]
    noun: str
    entries_max: int
    entries_min: int = 1

    def read(self, value: JsonValue, path: Path, findings: Findings) -> dict[str, _T] | Unfit:
        if not isinstance(value, dict):
            return unfit("an object", value, path, findings)
        if not self.entries_min <= len(value) <= self.entries_max:
            allowed = f"from {self.entries_min} to {self.entries_max} are allowed"
            findings.note(path, f"has {len(value)} {self.noun}; {allowed}")
            return UNFIT
        good: dict[str, _T] = {}
        for name, entry in value.items():
            read = fit(self.value, entry, (*path, name), findings)
            named = fit(self.key, name, (*path, name), findings)
            if not isinstance(read, Unfit) and not isinstance(named, Unfit):
                good[name] = read
        return good if len(good) == len(value) else UNFIT

    def schema(self) -> JsonObject:
        return {
            "type": "object",
            "propertyNames": self.key.schema(),
            "additionalProperties": self.value.schema(),
            "minProperties": self.entries_min,
            "maxProperties": self.entries_max,
        }
