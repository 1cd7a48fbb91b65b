"""Bounds: what a JSON value from outside may be, beyond being JSON.

Integers have 64 bits and nesting has a limit: what passes here can be kept by every store, read by
every expression, and sent back. Small values cannot break either rule, and are not walked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Never

import msgspec

from stanchion.core.faults import Fault
from stanchion.core.json_value import JsonValue
from stanchion.core.limits import JSON_DEPTH_MAX

__all__ = ["InvalidJson", "Malformed", "decode_json", "fault_in", "is_suspect", "why_not"]

_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**63 - 1
_MANY_DIGITS = re.compile(rb"[0-9]{19}")
_HALF_PAIR = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)
"""The escape of one half of a surrogate pair without the other."""


class Malformed(Exception):
    """Not JSON at all."""


class InvalidJson(Exception):
    """JSON, but not what was asked for. The fault says where and why."""

    def __init__(self, fault: Fault) -> None:
        """Carry the fault."""
        super().__init__(str(fault))
        self.fault = fault


def decode_json(body: bytes, decoder: msgspec.json.Decoder[object]) -> object:
    """The body as the decoder's type. Raises ``Malformed`` or ``InvalidJson`` only."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        return _with_whole_numbers(body, decoder, error)
    except RecursionError:
        raise InvalidJson(Fault("", _TOO_DEEP)) from None
    except msgspec.DecodeError as error:
        _explain(body, str(error))
    except UnicodeDecodeError:
        raise Malformed("the body is not UTF-8") from None


def _with_whole_numbers(
    body: bytes, decoder: msgspec.json.Decoder[object], error: msgspec.ValidationError
) -> object:
    """Read again with ``1.0`` as 1 where an integer is due: to JSON both are the same number."""
    value = None
    for _ in range(_WHOLE_NUMBERS_MAX if len(body) <= _WHOLE_NUMBERS_BYTES_MAX else 0):
        steps = _STEP.findall(str(error).partition(" - at `$")[2])
        if not _FLOAT_FOR_INT.search(str(error)) or not steps:
            break
        value = msgspec.json.decode(body) if value is None else value
        if not _made_whole(value, [int(place) if place else name for name, place in steps]):
            break
        try:
            return msgspec.convert(value, decoder.type)
        except msgspec.ValidationError as next_error:
            error = next_error
    raise InvalidJson(why_not(error)) from None


def _made_whole(value: Any, steps: list[str | int]) -> bool:  # noqa: ANN401 - any JSON
    """Make the number at this place whole, and those at the same place of other list entries.

    One look at the value then serves a whole list: ``leases[0].fence`` and ``leases[1].fence``.
    """
    *inner, last = steps
    holders = [value]
    for step in inner:
        many = isinstance(step, int)
        found = [each if many else [each[step]] for each in holders if many or step in each]
        holders = [each for some in found for each in some if isinstance(each, dict | list)]
    is_changed = False
    for holder in holders:
        places = range(len(holder)) if isinstance(holder, list) else [last]
        for place in places:
            number = holder.get(place) if isinstance(holder, dict) else holder[place]
            if isinstance(number, float) and number.is_integer():
                holder[place] = int(number)
                is_changed = True
    return is_changed


_WHOLE_NUMBERS_MAX: Final = 8
_WHOLE_NUMBERS_BYTES_MAX: Final = 64 * 1024
"""So many places in a request of this size: each costs another look at all of it."""
_FLOAT_FOR_INT = re.compile(r"^Expected `int[^,]*, got `float`")
_STEP = re.compile(r"\.([^.\[\]`]+)|\[(\d+)\]")


def is_suspect(body: bytes) -> bool:
    """Whether a value in this text could break a bound. Cheap, and never wrongly ``False``."""
    return (
        body.count(b"{") + body.count(b"[") > JSON_DEPTH_MAX
        or _MANY_DIGITS.search(body) is not None
    )


def fault_in(value: JsonValue, path: str) -> Fault | None:
    """What is wrong with a free value: nested too deep, or an integer beyond 64 bits."""
    # Level by level and in comprehensions: a value has up to half a million members.
    members: Sequence[JsonValue] = (value,)
    for depth in range(JSON_DEPTH_MAX + 1):
        integers = [each for each in members if type(each) is int]
        if integers and not _INT_MIN <= min(integers) <= max(integers) <= _INT_MAX:
            return Fault(path, "holds an integer beyond 64 bits")
        holders = [each for each in members if type(each) is dict or type(each) is list]
        if not holders:
            return None
        if depth == JSON_DEPTH_MAX:
            break
        members = [
            inner for each in holders for inner in (each.values() if type(each) is dict else each)
        ]
    return Fault(path, _TOO_DEEP)


def why_not(error: msgspec.ValidationError) -> Fault:
    """Place and message, from the decoder's own words."""
    message, _, place = str(error).partition(" - at `")
    path = place.rstrip("`").removeprefix("$").removeprefix(".")
    unknown = _UNKNOWN_MEMBER.fullmatch(message)
    if unknown is not None:
        return Fault(f"{path}.{unknown[1]}" if path else unknown[1], "not a member")
    missing = _MISSING_MEMBER.fullmatch(message)
    if missing is not None:
        return Fault(f"{path}.{missing[1]}" if path else missing[1], "missing")
    return Fault(path, _readable(message))


_UNKNOWN_MEMBER = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING_MEMBER = re.compile(r"Object missing required field `(.*)`")
_TOO_DEEP: Final = f"nested more than {JSON_DEPTH_MAX} levels deep"
_MESSAGE_CHARS_MAX: Final = 300


def _readable(message: str) -> str:
    message = message.replace("`", "").replace(r"\Z'", "$'")
    message = message[:1].lower() + message[1:]
    return message if len(message) <= _MESSAGE_CHARS_MAX else f"{message[:_MESSAGE_CHARS_MAX]}…"


def _explain(body: bytes, message: str) -> Never:
    """Tell ``NaN`` and half characters from other text that is not JSON, without reading it all."""
    try:
        body.decode("utf-8")
    except UnicodeDecodeError:
        raise Malformed("the body is not UTF-8") from None
    place = _PLACE.search(message)
    strange = None if place is None else _NOT_FINITE.match(body, max(0, int(place[1]) - 1))
    if strange is not None:
        raise InvalidJson(Fault("", f"{strange[1].decode()} is not a finite number"))
    if b"\\u" in body and _HALF_PAIR.search(body):  # most bodies have no escapes to look at
        raise Malformed("text holds half of a surrogate pair, which is no character")
    raise Malformed(message)


_PLACE = re.compile(r"\(byte ([0-9]+)\)$")
_NOT_FINITE = re.compile(rb"[^-]?(NaN|-?Infinity)")
"""From the character before the one that the decoder stops at: it may be a minus."""
