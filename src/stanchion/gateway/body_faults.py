"""Body faults: why a body does not fit its type, with the place and in the words of JSON.

The decoder's message names types of Python, patterns, and places such as ``budgets[...].limit``.
Here its text becomes a ``Fault`` whose path names the member and whose message an API's user
understands. A body that fits as it is needs none of this; ``1.0`` is converted for an integer.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal
from itertools import islice
from typing import Any, Final, Never

import msgspec
from msgspec import inspect

from stanchion.core.faults import Fault
from stanchion.core.limits import JSON_DEPTH_MAX

NAMED_CHARS: Final = 100
"""Characters of a name that is too long, in the message about it."""


class MalformedJson(Exception):
    """The body is not JSON."""


class InvalidJson(Exception):
    """The body is JSON, but not of the expected type. The fault has the place and the reason."""

    def __init__(self, fault: Fault) -> None:
        """Carry the fault."""
        super().__init__(str(fault))
        self.fault = fault


def with_whole_numbers(
    body: bytes, decoder: msgspec.json.Decoder[object], error: msgspec.ValidationError
) -> object:
    """Convert again with ``1.0`` as 1 where an integer is expected: in JSON they are equal."""
    value = None
    for _ in range(_WHOLE_NUMBERS_MAX if len(body) <= _WHOLE_NUMBERS_BYTES_MAX else 0):
        steps = _STEP.findall(str(error).partition(" - at `$")[2])
        if not _FLOAT_FOR_INT.search(str(error)) or not steps:
            break
        value = msgspec.json.decode(body) if value is None else value
        if not _made_whole(value, [name or None for name in steps]):
            break
        try:
            return msgspec.convert(value, decoder.type)
        except msgspec.ValidationError as next_error:
            error = next_error
    fault = why_not(error, decoder.type)
    if _ANY_ENTRY in fault.path and len(body) <= _NAMED_BYTES_MAX:
        with suppress(msgspec.MsgspecError):  # a number that is too large for any type
            value = msgspec.json.decode(body) if value is None else value
            fault = _with_entry(fault, value, decoder.type)
    raise InvalidJson(fault) from None


def _with_entry(fault: Fault, value: Any, shape: Any) -> Fault:  # noqa: ANN401 - any JSON, any type
    """The fault with the name of the map's entry: the decoder says ``budgets[...].limit`` only.

    The entry is the first one that is refused for the same reason without the others.
    """
    before, _, after = fault.path.partition(_ANY_ENTRY)
    holder = value
    for name, index in _STEP_OR_INDEX.findall(f".{before}"):
        try:
            holder = holder[name or int(index)]
        except (KeyError, IndexError, TypeError, ValueError):
            return fault
    if not isinstance(holder, dict):
        return fault
    entries = dict(holder)
    for name, entry in islice(entries.items(), _NAMED_ENTRIES_MAX):
        holder.clear()
        holder[name] = entry
        try:
            msgspec.convert(value, shape)
        except msgspec.ValidationError as error:
            if why_not(error, shape) == fault:
                return Fault(f"{before}.{name[:NAMED_CHARS]}{after}", fault.message)
    return fault


_ANY_ENTRY: Final = "[...]"
_STEP_OR_INDEX = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_NAMED_BYTES_MAX: Final = 16 * 1024
_NAMED_ENTRIES_MAX: Final = 100
"""In larger bodies and maps the entry is not looked for: each one is another pass."""


def _made_whole(value: Any, steps: list[str | None]) -> bool:  # noqa: ANN401 - any JSON
    """Make the number at this place whole; ``None`` is every entry of a list or a map.

    One pass then serves a whole list: ``leases[0].fence`` and ``leases[1].fence``.
    """
    *inner, last = steps
    holders = [value]
    for step in inner:
        holders = [each[place] for each in holders for place in _places(each, step)]
    is_changed = False
    for holder in holders:
        for place in _places(holder, last):
            number = holder[place]
            if isinstance(number, float) and number.is_integer():
                holder[place] = int(number)
                is_changed = True
    return is_changed


def _places(holder: Any, step: str | None) -> list[Any]:  # noqa: ANN401 - any JSON
    """The names or indices to which a step leads in this value."""
    if isinstance(holder, dict):
        return list(holder) if step is None else [step] if step in holder else []
    return list(range(len(holder))) if isinstance(holder, list) and step is None else []


_WHOLE_NUMBERS_MAX: Final = 8
_WHOLE_NUMBERS_BYTES_MAX: Final = 64 * 1024
"""Larger bodies are not converted again: each such number costs another pass."""
_FLOAT_FOR_INT = re.compile(r"^Expected `int[^,]*, got `float`")


_KEY_IN: Final = "key` in `"


def why_not(error: msgspec.ValidationError, shape: object) -> Fault:
    """Place and reason, from the decoder's message and the type that it decoded."""
    message, _, place = str(error).partition(" - at `")
    if place.startswith(_KEY_IN):  # the name of an entry: its type is beside that of the values
        place = f"{place.removeprefix(_KEY_IN).rstrip('`')}[...]"
    path = place.rstrip("`").removeprefix("$").removeprefix(".")
    unknown = _UNKNOWN_MEMBER.fullmatch(message)
    if unknown is not None:
        return Fault(f"{path}.{unknown[1]}" if path else unknown[1], "not a member")
    missing = _MISSING_MEMBER.fullmatch(message)
    if missing is not None:
        return Fault(f"{path}.{missing[1]}" if path else missing[1], "missing")
    if message.startswith(_NOT_ALLOWED):
        given = message.removeprefix(_NOT_ALLOWED)[:NAMED_CHARS]
        allowed = _allowed(_types_at(shape, place))
        if allowed:
            return Fault(path, f"{given} is not one of {', '.join(allowed)}")
    if message.startswith(_NO_MATCH):
        described = _described(_types_at(shape, place), message.removeprefix(_NO_MATCH))
        if described is not None:
            return Fault(path, f"expected {described}")
    if message.startswith(_NOT_A_TIME):
        return Fault(path, TIME_WANTED)
    return Fault(path, _readable(message))


def _types_at(shape: object, place: str) -> list[inspect.Type]:
    """The types that are possible at a place of the decoder's message: ``$.runs[0].key``."""
    found = [_type_info(shape)]
    for name in _STEP.findall(place):
        found = [inner for each in _plain(found) for inner in _inside(each, name)]
    return found


@functools.cache
def _type_info(shape: Hashable) -> inspect.Type:
    return inspect.type_info(shape)


def _inside(kind: inspect.Type, name: str) -> list[inspect.Type]:
    """The type of a member; without a name, of the entries of a list or of an object."""
    match kind:
        case inspect.StructType():
            return [field.type for field in kind.fields if field.encode_name == name]
        case inspect.CollectionType() if not name:
            return [kind.item_type]
        case inspect.DictType() if not name:
            return [kind.key_type, kind.value_type]
        case _:
            return []


def _plain(kinds: Sequence[inspect.Type]) -> Iterator[inspect.Type]:
    """The types without their descriptions, and those of unions one by one."""
    for kind in kinds:
        if isinstance(kind, inspect.Metadata):
            yield from _plain([kind.type])
        elif isinstance(kind, inspect.UnionType):
            yield from _plain(kind.types)
        else:
            yield kind


def _allowed(kinds: Sequence[inspect.Type]) -> list[str]:
    """The values of enumerations."""
    allowed: list[str] = []
    for kind in _plain(kinds):
        if isinstance(kind, inspect.EnumType):
            allowed += [str(each.value) for each in kind.cls]
        elif isinstance(kind, inspect.LiteralType):
            allowed += map(str, kind.values)
    return allowed


def _described(kinds: Sequence[inspect.Type], pattern: str) -> str | None:
    """The description of the type with this pattern, as the end of a sentence."""
    for kind in kinds:
        if isinstance(kind, inspect.UnionType):
            found = _described(kind.types, pattern)
            if found is not None:
                return found
        if not isinstance(kind, inspect.Metadata) or not isinstance(kind.type, inspect.StrType):
            continue
        text = (kind.extra_json_schema or {}).get("description")
        if text is not None and repr(kind.type.pattern) == pattern:
            return as_ending(text)
    return None


def as_ending(description: str) -> str:
    """The description of a type, as the end of a sentence."""
    text = description.replace("`", "").removesuffix(".")
    return f"{text[:1].lower()}{text[1:]}"


_NOT_ALLOWED: Final = "Invalid enum value "
_NOT_A_TIME: Final = "Invalid RFC3339"
TIME_WANTED: Final = "not a time like 2026-11-30T12:00:00Z"
_NO_MATCH: Final = "Expected `str` matching regex "
_STEP = re.compile(r"\.([^.\[\]`]+)|\[(?:\d+|\.\.\.)\]")
_UNKNOWN_MEMBER = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING_MEMBER = re.compile(r"Object missing required field `(.*)`")
TOO_DEEP: Final = f"nested more than {JSON_DEPTH_MAX} levels deep"
_MESSAGE_CHARS_MAX: Final = 300


_BOUND = re.compile(r"Expected `(int|float)` ([<>]=) (-?[0-9][0-9.e+-]*)")
_BOUND_WORDS: Final = {"int": "an integer", "float": "a number"}
_QUOTED = re.compile(r"`([^`]*)`")
_JSON_WORDS: Final = {
    "int": "integer",
    "float": "number",
    "str": "string",
    "bool": "boolean",
    "array": "list",
}
"""The decoder names the types of Python."""


def _readable(message: str) -> str:
    """The decoder's message, with the words of JSON: ``expected integer or null, got string``.

    A bound is in words, without an exponent: ``expected a number of at least 0.000001``.
    """
    message = _BOUND.sub(
        lambda found: (
            f"Expected {_BOUND_WORDS[found[1]]} of at"
            f" {'least' if found[2] == '>=' else 'most'} {Decimal(found[3]):f}"
        ),
        message,
    )
    message = _QUOTED.sub(
        lambda found: " or ".join(_JSON_WORDS.get(each, each) for each in found[1].split(" | ")),
        message,
    ).replace(r"\\Z'", "$'")
    message = message[:1].lower() + message[1:]
    return message if len(message) <= _MESSAGE_CHARS_MAX else f"{message[:_MESSAGE_CHARS_MAX]}…"


def explain_text(body: bytes, message: str) -> Never:
    """Raise the fitting error for ``NaN``, lone surrogates and other text that is not JSON."""
    try:
        body.decode("utf-8")
    except UnicodeDecodeError:
        raise MalformedJson("the body is not UTF-8") from None
    place = _PLACE.search(message)
    strange = None if place is None else _NOT_FINITE.match(body, max(0, int(place[1]) - 1))
    if strange is not None:
        raise InvalidJson(Fault("", f"{strange[1].decode()} is not a finite number"))
    if "surrogate" in message or (place is None and _HALF_PAIR.search(body[-_PAIR_BYTES:])):
        raise MalformedJson("text holds half of a surrogate pair, which is no character")
    raise MalformedJson(message)


_PAIR_BYTES: Final = 16
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
"""The escape of half a surrogate pair: near its end, the text seems to be truncated."""
_PLACE = re.compile(r"\(byte ([0-9]+)\)$")
_NOT_FINITE = re.compile(rb"[^-]?(NaN|-?Infinity)")
"""Searched from one character before the decoder's position: it may be a minus."""
