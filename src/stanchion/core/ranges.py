"""Ranges: the least and the highest value of a setting, stated once, at the member that holds it.

``msgspec.Meta`` on a member of a value states its range. What parses documents, checks values that
were made in Python, or offers options on the command line takes the range from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec
from msgspec import inspect

from stanchion.core.faults import Fault, Faults


class Range(NamedTuple):
    """The least and the highest value, both allowed."""

    low: float
    high: float
    is_integer: bool

    def __str__(self) -> str:
        return f"from {_plain(self.low)} to {_plain(self.high)}"


@cache
def ranges_of(struct: type[msgspec.Struct]) -> Mapping[str, Range]:
    """The ranges of all members of a value that have one, in the order of the members."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    found = ((field.encode_name, _range_in(field.type)) for field in info.fields)
    return MappingProxyType({name: range_ for name, range_ in found if range_ is not None})


@cache
def range_of(number: object) -> Range:
    """The range of one annotated type, such as ``Annotated[int, Meta(ge=0, le=9)]``."""
    found = _range_in(inspect.type_info(number))
    assert found is not None, number
    return found


def range_faults(value: msgspec.Struct) -> Faults:
    """A fault for every member that is out of its range. ``None`` is in every range."""
    found: Faults = ()
    for name, allowed in ranges_of(type(value)).items():
        number = getattr(value, name)
        # Written so that NaN, for which every comparison is false, is out of range.
        if number is not None and not allowed[0] <= number <= allowed[1]:
            found = (*found, Fault(name, f"must be {allowed}"))
    return found


def check_ranges(value: msgspec.Struct) -> None:
    """Raise ``ValueError`` if a member is out of its range."""
    for fault in range_faults(value):
        raise ValueError(f"{fault.path} {fault.message}")


def _range_in(kind: inspect.Type) -> Range | None:
    match kind:
        case inspect.IntType(ge=low, le=high) | inspect.FloatType(ge=low, le=high):
            is_integer = isinstance(kind, inspect.IntType)
            return None if low is None or high is None else Range(low, high, is_integer)
        case inspect.Metadata():
            return _range_in(kind.type)
        case inspect.UnionType():
            return next(filter(None, map(_range_in, kind.types)), None)
        case _:
            return None


_TINY: Final = 0.001


def _plain(number: float) -> str:
    """The number, without an exponent if it is a small one."""
    return f"{number:f}" if 0 < number < _TINY else str(number)
