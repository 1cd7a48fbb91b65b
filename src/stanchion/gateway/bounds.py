"""Bounds: what a JSON value from outside may be, beyond being JSON.

Integers have 64 bits and nesting has a limit: what passes here can be kept by every store, read by
every expression, and sent back. Small values cannot break either rule, and are not walked.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, Never

import msgspec

from stanchion.core.faults import Fault
from stanchion.core.json_value import JsonValue
from stanchion.core.limits import JSON_DEPTH_MAX

__all__ = ["Malformed", "Unfit", "decode_json", "fault_in", "is_suspect", "why_not"]

_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**63 - 1
_MANY_DIGITS = re.compile(rb"[0-9]{19}")
_SURROGATE = re.compile("[\ud800-\udfff]")


class Malformed(Exception):
    """Not JSON at all."""


class Unfit(Exception):
    """JSON, but not what was asked for. The fault says where and why."""

    def __init__(self, fault: Fault) -> None:
        """Carry the fault."""
        super().__init__(str(fault))
        self.fault = fault


def decode_json(body: bytes, decoder: msgspec.json.Decoder[object]) -> object:
    """The body as the decoder's type. Raises ``Malformed`` or ``Unfit``, never anything else."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        return _with_whole_numbers(body, decoder, error)
    except RecursionError:
        raise Unfit(Fault("", _TOO_DEEP)) from None
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
    raise Unfit(why_not(error)) from None


def _made_whole(value: Any, steps: list[str | int]) -> bool:  # noqa: ANN401 - any JSON
    *inner, last = steps
    for step in inner:
        value = value[step]
    number = value[last]
    if not isinstance(number, float) or not number.is_integer():
        return False
    value[last] = int(number)
    return True


_WHOLE_NUMBERS_MAX: Final = 50
_WHOLE_NUMBERS_BYTES_MAX: Final = 64 * 1024
"""So many in a request of this size: each costs another look at all of it."""
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
    level: list[JsonValue] = [value]
    for depth in range(JSON_DEPTH_MAX + 1):
        inner: list[JsonValue] = []
        for each in level:
            if isinstance(each, dict | list):
                if depth == JSON_DEPTH_MAX:
                    return Fault(path, _TOO_DEEP)
                inner.extend(each.values() if isinstance(each, dict) else each)
            elif type(each) is int and not _INT_MIN <= each <= _INT_MAX:
                return Fault(path, "holds an integer beyond 64 bits")
        level = inner
    return None


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
    """Tell ``NaN`` in otherwise good JSON from text that is no JSON. Errors may be slow."""
    strange: list[str] = []
    try:
        text = body.decode("utf-8")
        json.loads(text, parse_constant=strange.append)
    except UnicodeDecodeError:
        raise Malformed("the body is not UTF-8") from None
    except RecursionError:
        raise Unfit(Fault("", _TOO_DEEP)) from None
    except ValueError:
        raise Malformed(message) from None
    if strange:
        raise Unfit(Fault("", f"{strange[0]} is not a finite number"))
    if _SURROGATE.search(text) or "\\u" in text:
        raise Malformed("text holds half of a surrogate pair, which is no character")
    raise Malformed(message)
