"""What was typed into a form, as JSON or as a number, within the limits of the HTTP API.

Every page reads its fields with these: a text that the API would refuse in a body is refused here,
with a message for the person who typed it.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final

import msgspec

from stanchion.console.text import shortened, visible
from stanchion.core.json_value import JsonValue
from stanchion.gateway.body import decode_json, fault_in
from stanchion.gateway.body_faults import InvalidJson, MalformedJson


class WronglyTyped(Exception):
    """What was typed is not a value of the field's kind. The message says why."""


def typed_json(text: str) -> JsonValue:
    """The value of a JSON text. Raises ``WronglyTyped``."""
    try:
        found: Any = decode_json(text.encode("utf-8", "surrogatepass"), _ANY)
    except InvalidJson as error:
        raise WronglyTyped(f"is not taken: {error.fault}") from None
    except MalformedJson as error:
        raise WronglyTyped(f"is not JSON: {_why(text) or error}") from None
    fault = fault_in(found, "")
    if fault is not None:
        raise WronglyTyped(f"is not taken: {fault.message}")
    value: JsonValue = found
    return value


def _why(text: str) -> str | None:
    """Why a text is not JSON, with line and column; ``None`` if they are not known."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return f"{error.msg.lower()} at line {error.lineno}, column {error.colno}"
    except (ValueError, RecursionError):
        return None
    return None


def typed_integer(text: str) -> int:
    """A whole number of at most 64 bits. Raises ``WronglyTyped``."""
    found = _integer(text.strip())
    if found is None:
        raise WronglyTyped(f"must be an integer; {_quoted(text)} is not")
    return found


def typed_number(text: str) -> int | float:
    """A finite number. Raises ``WronglyTyped``."""
    text = text.strip()
    whole = _integer(text)
    if whole is not None:
        return whole
    found = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(found):
        raise WronglyTyped(f"must be a number; {_quoted(text)} is not")
    is_short = found.is_integer() and "." not in text and abs(found) < _EXACT
    return int(found) if is_short else found


def _integer(text: str) -> int | None:
    if _INTEGER.fullmatch(text) is None:
        return None
    found = int(text)
    return found if -(2**63) <= found < 2**63 else None


def _quoted(text: str) -> str:
    return f"“{visible(shortened(text, 40))}”"


_ANY: Final = msgspec.json.Decoder(object)
_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_EXACT: Final = 2**53
"""Below it, every whole number is a float of the same value."""
