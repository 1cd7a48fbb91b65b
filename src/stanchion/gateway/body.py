"""Bodies and queries: read within bounds of size and memory, decoded, and checked.

``Bodies`` reads a body and refuses one that is too large: by its declared length before a byte is
read, otherwise as soon as it exceeds the limit. (The endpoint limits how long it may take.)
``decoded`` returns a body as the route's type, ``read_query`` a query string; both raise
``RequestRefused`` with the place of the fault. ``check_value`` bounds the size, depth and integers
of values that have no schema.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Generator, Hashable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain, islice
from typing import Any, Final, Never, TypeVar, cast
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import inspect

from stanchion.core.faults import Fault
from stanchion.core.json_value import JsonValue
from stanchion.core.limits import JSON_DEPTH_MAX, LABEL_CHARS_MAX, LABELS_MAX
from stanchion.gateway.exchange import ClientGone, Message, Receive
from stanchion.gateway.options import GatewayOptions
from stanchion.gateway.problems import Refusal, RequestRefused, invalid, invalid_member
from stanchion.gateway.route import Call
from stanchion.wire.identifiers import LABEL_NAME_PATTERN, LABEL_PATTERN
from stanchion.wire.problems import Code

_Result = TypeVar("_Result")


class Bodies:
    """Reads bodies, and bounds the memory of all of them together."""

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self._held_bytes = 0

    async def read(self, receive: Receive, declared: bytes | None) -> bytes:
        """The whole body. The caller must report its end with ``done``.

        Raises ``RequestRefused``, and ``ClientGone`` if the client disconnects.
        """
        if declared is not None:
            self._refuse_declared(declared)
        message = await _part(receive)
        first: bytes = message.get("body", b"")
        if message.get("more_body", False):
            return await self._rest(receive, first)
        self._refuse_large(len(first))
        self._hold(len(first))
        return first

    def done(self, body: bytes) -> None:
        """A body is no longer in use."""
        self._held_bytes -= len(body)

    async def _rest(self, receive: Receive, first: bytes) -> bytes:
        body = bytearray(first)
        held = 0
        is_whole = False
        try:
            while True:
                self._refuse_large(len(body))
                self._hold(len(body) - held)
                held = len(body)
                if is_whole:
                    held = 0  # from here on the caller reports it with done
                    return bytes(body)
                message = await _part(receive)
                body += message.get("body", b"")
                is_whole = not message.get("more_body", False)
        finally:
            self._held_bytes -= held

    def _refuse_declared(self, declared: bytes) -> None:
        if not declared.isdigit():
            detail = "Content-Length is not a number"
            raise RequestRefused(Refusal(code=Code.MALFORMED_REQUEST, detail=detail))
        self._refuse_large(int(declared[:_LENGTH_DIGITS_MAX]))

    def _refuse_large(self, size: int) -> None:
        if size > self._options.body_bytes_max:
            detail = f"the body has more than {self._options.body_bytes_max} bytes"
            raise RequestRefused(Refusal(code=Code.BODY_TOO_LARGE, detail=detail))

    def _hold(self, more_bytes: int) -> None:
        if self._held_bytes + more_bytes > self._options.bodies_bytes_max:
            detail = "too many large bodies at once"
            raise RequestRefused(Refusal(code=Code.OVERLOADED, detail=detail, retry_after_ms=1_000))
        self._held_bytes += more_bytes


_LENGTH_DIGITS_MAX: Final = 18


async def _part(receive: Receive) -> Message:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message


def decoded(
    body: bytes,
    decoder: msgspec.json.Decoder[Any],
    *,
    is_checked: bool = False,
) -> Any:  # noqa: ANN401 - the route's own type
    """The body as the route's type. Raises ``RequestRefused`` with the place of the fault.

    ``is_checked``: ``refuse_costly`` has accepted it.
    """
    try:
        return decode_json(body, decoder, is_checked=is_checked)
    except MalformedJson as error:
        detail = f"the body is not JSON: {error}"
        raise RequestRefused(Refusal(code=Code.MALFORMED_JSON, detail=detail)) from None
    except InvalidJson as error:
        raise RequestRefused(invalid((error.fault,), str(error.fault))) from None


def refuse_costly(body: bytes) -> Iterator[None]:
    """Raise ``RequestRefused`` if decoding the body could block the event loop for over 20 ms.

    In pieces of 15 ms at most, and apart from ``decoded``: others are to be served in between.
    """
    if len(body) > _SMALL_BYTES:
        costly = yield from _costly(body)
        if costly is not None:
            fault = Fault("", costly)
            raise RequestRefused(invalid((fault,), str(fault)))


_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**63 - 1
_AS_ZEROS: Final = bytes.maketrans(b"123456789E", b"000000000e")
_MANY_DIGITS: Final = b"0" * 19

_SMALL_BYTES: Final = 2 * 1024
"""A body up to this size is decoded in a few milliseconds, whatever it contains."""
CONTAINERS_MAX: Final = 50_000
"""Objects and lists in one body. Each takes 0.1 µs to make, and up to twice that with what the
garbage collector and new memory take."""
EXTREME_NUMBERS_MAX: Final = 500
"""Numbers of one body that take the decoder up to 17 µs each: ``1e300``, and very long ones."""
LARGE_NUMBERS_MAX: Final = 10_000
"""Numbers of one body that take the decoder up to 0.8 µs each.

Large ones, such as ``1e23``, and those that may lie halfway between two values of a float:
they have more than 19 digits, or are like ``672422035976010.9375``.
"""
_LONG_DIGITS: Final = b"0" * 100
_AS_ONES: Final = bytes.maketrans(b"123456789E", b"111111111e")
_HALFWAY_DIGITS: Final = 20
_HALFWAY_ZEROS: Final = b"0" * _HALFWAY_DIGITS
_LARGE_WHOLE_PART: Final = b"0" * 15 + b"."
# Patterns begin with a literal, because such a search is five times faster.
_EXTREME_EXPONENT = re.compile(rb"e000+(?=[\s,\]}])")
_LARGE_EXPONENT = re.compile(rb"e(?:\+?[2-9]|(?<=[0-9.]{15}e)\+?1?)[0-9](?=[\s,\]}])")
# From 2 to the 49th on: the larger the number, the fewer digits does its fraction need.
_HALFWAY_FRACTION = re.compile(
    rb"\.(?:(?<=[0-9]{17}\.)0+|(?<=9[0-9]{15}\.)0+|(?<=[4-9][0-9]{15}\.)50*|(?<=[0-9]{16}\.)[27]50*"
    rb"|(?<=[0-9]{15}\.)[0-9]?[0-9][27]50*)(?=[\s,\]}])"
)
_DIGITS = re.compile(rb"(1[01]*+)[\s,\]}e]|1[01]*+")
"""The digits of a number from the first that is not zero on; those in a text are not captured."""


class MalformedJson(Exception):
    """The body is not JSON."""


class InvalidJson(Exception):
    """The body is JSON, but not of the expected type. The fault has the place and the reason."""

    def __init__(self, fault: Fault) -> None:
        """Carry the fault."""
        super().__init__(str(fault))
        self.fault = fault


def decode_json(
    body: bytes, decoder: msgspec.json.Decoder[object], *, is_checked: bool = False
) -> object:
    """The body as the decoder's type. Raises ``MalformedJson`` or ``InvalidJson`` only."""
    if len(body) > _SMALL_BYTES and not is_checked:
        costly = _at_once(_costly(body))
        if costly is not None:
            raise InvalidJson(Fault("", costly))
    try:
        value = decoder.decode(body)
    except msgspec.ValidationError as error:
        value = _with_whole_numbers(body, decoder, error)
    except RecursionError:
        raise InvalidJson(Fault("", _TOO_DEEP)) from None
    except msgspec.DecodeError as error:
        _explain(body, str(error))
    except UnicodeDecodeError:
        raise MalformedJson("the body is not UTF-8") from None
    if len(body) <= _REPEATS_BYTES_MAX:
        _refuse_repeated(body)
    return value


_REPEATS_BYTES_MAX: Final = 16 * 1024
"""In larger bodies the last of several members with one name counts: to find them takes long."""
_FEW_NAMES_BYTES: Final = 256
_MEMBER = re.compile(rb'"([^"]*)":')
_SPACED = re.compile(rb'"[ \t\r\n]+:')


def _refuse_repeated(body: bytes) -> None:
    """Raise ``InvalidJson`` if an object has two members with one name.

    First the cheap reasons why there are none: no name occurs twice anywhere, or the value has as
    many members as the text.
    """
    if b"\\" not in body and _SPACED.search(body) is None:
        at_most = body.count(b'":')  # as many members, and texts that begin with a colon
        names = _MEMBER.findall(body) if len(body) <= _FEW_NAMES_BYTES else ()
        if len(set(names)) == at_most or _members(msgspec.json.decode(body)) == at_most:
            return
    json.loads(body, object_pairs_hook=_once)


def _members(value: JsonValue) -> int:
    """How many members all objects in this value have."""
    count, level = 0, [value]
    while level:
        objects = [each for each in level if type(each) is dict]
        lists = [each for each in level if type(each) is list]
        count += sum(map(len, objects))
        inside = chain.from_iterable(map(dict.values, objects))
        level = [*chain.from_iterable(lists), *inside]
    return count


def _once(members: list[tuple[str, object]]) -> None:
    names = [name for name, _ in members]
    if len(set(names)) < len(names):
        name = next(each for each in names if names.count(each) > 1)
        raise InvalidJson(Fault(name[:_NAMED_CHARS], "given more than once"))


def _at_once(pieces: Generator[None, None, _Result]) -> _Result:
    """The result of work that is divided into pieces, without a pause."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: _Result = end.value
            return result


def _costly(body: bytes) -> Generator[None, None, str | None]:
    """Why decoding this text could hold the event loop for more than 20 ms; ``None`` if not.

    Cheap counts come first. They also find digits in text, such as hash values; only if there are
    many are the exponents of numbers counted, by what follows them, each kind in a piece of work.
    """
    if body.count(b"[") + body.count(b"{") > CONTAINERS_MAX:
        return f"more than {CONTAINERS_MAX:,} objects and lists in one body"
    plain = body.translate(_AS_ZEROS, b"+-")
    long = plain.count(_LONG_DIGITS)
    exponents = plain.count(b"0e0")
    has_extreme = long > EXTREME_NUMBERS_MAX
    if long + exponents > EXTREME_NUMBERS_MAX and not has_extreme:
        yield
        has_extreme = _has_more(_EXTREME_EXPONENT, plain, EXTREME_NUMBERS_MAX - long)
    if has_extreme:
        return (
            f"more than {EXTREME_NUMBERS_MAX} numbers with an exponent of three digits, or with"
            " more than 100 digits, in one body"
        )
    if (yield from _has_large(body, plain, exponents)):
        return (
            f"more than {LARGE_NUMBERS_MAX:,} numbers over 1e20, with more than 19 digits, or over"
            " 1e14 with more than 15 digits, in one body"
        )
    return None


def _has_large(body: bytes, plain: bytes, exponents: int) -> Generator[None, None, bool]:
    """Whether there are too many numbers that the decoder is slow at."""
    most = LARGE_NUMBERS_MAX
    if exponents > most:
        yield
        if _has_more(_LARGE_EXPONENT, body.replace(b"E", b"e"), most):
            return True
    if plain.count(_LARGE_WHOLE_PART) > most:
        yield
        if _has_more(_HALFWAY_FRACTION, body, most):
            return True
    if plain.replace(b".", b"").count(_HALFWAY_ZEROS) <= most:
        return False
    ones = body.translate(_AS_ONES, b"+-.")
    begin, count = 0, 0
    while begin < len(ones) and count <= most:
        yield
        # A number ends before a comma.
        end = ones.find(b",", begin + _PIECE_BYTES) + 1 or len(ones)
        found = _DIGITS.findall(ones, begin, end)
        count += sum(map(_HALFWAY_DIGITS.__le__, map(len, found)))
        begin = end
    return count > most


_PIECE_BYTES: Final = 256 * 1024
"""So much text takes 5 ms to look for long numbers."""


def _has_more(pattern: re.Pattern[bytes], text: bytes, count: int) -> bool:
    """Whether the pattern is found more often than this. Stops there."""
    return next(islice(pattern.finditer(text), count, None), None) is not None


def _with_whole_numbers(
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
                return Fault(f"{before}.{name[:_NAMED_CHARS]}{after}", fault.message)
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


def is_suspect(body: bytes) -> bool:
    """Whether a value in this text could be too deep or too large. Never wrongly ``False``."""
    return body.count(b"{") + body.count(b"[") > JSON_DEPTH_MAX or _MANY_DIGITS in body.translate(
        _AS_ZEROS
    )


def fault_in(value: JsonValue, path: str) -> Fault | None:
    """The fault of a value without a schema: nested too deep, or an integer beyond 64 bits."""
    return fault_among((value,), path)


def fault_among(members: Sequence[JsonValue], path: str) -> Fault | None:
    """The fault of the first such value that has one."""
    # Level by level and without a loop over single values, for speed: there may be 100,000.
    for depth in range(JSON_DEPTH_MAX + 1):
        kinds = set(map(type, members))
        if int in kinds:
            integers = _of_type(int, members, kinds)
            if not _INT_MIN <= min(integers) <= max(integers) <= _INT_MAX:
                return Fault(path, "holds an integer beyond 64 bits")
        if dict not in kinds and list not in kinds:
            return None
        if depth == JSON_DEPTH_MAX:
            break
        lists = _of_type(list, members, kinds)
        objects = [each.values() for each in _of_type(dict, members, kinds)]
        members = [*chain.from_iterable(lists), *chain.from_iterable(objects)]
    return Fault(path, _TOO_DEEP)


def _of_type(
    kind: type[_Result], members: Sequence[Any], kinds: set[type[Any]]
) -> Sequence[_Result]:
    """The members of this type; ``kinds`` are the types of all. Often all have the same."""
    if kind not in kinds:
        return ()
    return members if len(kinds) == 1 else [each for each in members if type(each) is kind]


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
        given = message.removeprefix(_NOT_ALLOWED)[:_NAMED_CHARS]
        allowed = _allowed(_types_at(shape, place))
        if allowed:
            return Fault(path, f"{given} is not one of {', '.join(allowed)}")
    if message.startswith(_NO_MATCH):
        described = _described(_types_at(shape, place), message.removeprefix(_NO_MATCH))
        if described is not None:
            return Fault(path, f"expected {described}")
    if message.startswith(_NOT_A_TIME):
        return Fault(path, _TIME_WANTED)
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
            text = text.replace("`", "").removesuffix(".")
            return f"{text[:1].lower()}{text[1:]}"
    return None


_NOT_ALLOWED: Final = "Invalid enum value "
_NOT_A_TIME: Final = "Invalid RFC3339"
_TIME_WANTED: Final = "not a time like 2026-11-30T12:00:00Z"
_NO_MATCH: Final = "Expected `str` matching regex "
_STEP = re.compile(r"\.([^.\[\]`]+)|\[(?:\d+|\.\.\.)\]")
_UNKNOWN_MEMBER = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING_MEMBER = re.compile(r"Object missing required field `(.*)`")
_TOO_DEEP: Final = f"nested more than {JSON_DEPTH_MAX} levels deep"
_MESSAGE_CHARS_MAX: Final = 300


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
    """The decoder's message, with the words of JSON: ``expected integer or null, got string``."""
    message = _QUOTED.sub(
        lambda found: " or ".join(_JSON_WORDS.get(each, each) for each in found[1].split(" | ")),
        message,
    ).replace(r"\\Z'", "$'")
    message = message[:1].lower() + message[1:]
    return message if len(message) <= _MESSAGE_CHARS_MAX else f"{message[:_MESSAGE_CHARS_MAX]}…"


def _explain(body: bytes, message: str) -> Never:
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


_GROWTH_MAX: Final = 5
"""How many times longer a number may become when it is encoded again: ``1e15``."""


def check_value(
    call: Call[Any, Any],
    path: str,
    value: JsonValue,
    *,
    bytes_max: int,
    part: bytes | None = None,
    is_walked: bool = False,
) -> None:
    """Raise ``RequestRefused`` for a value too large, too deep, or with an integer over 64 bits.

    ``part`` is the part of the body that has the value, if it is a small one. ``is_walked``: it is
    known not to be too deep and to have no such integer.
    """
    body_bytes, suspect = call.body_bytes, call.is_suspect and not is_walked
    if part is not None:
        body_bytes, suspect = len(part), suspect and is_suspect(part)
    # The size first: a value within it is walked in a few milliseconds.
    if body_bytes * _GROWTH_MAX > bytes_max:
        size = len(msgspec.json.encode(value))
        if size > bytes_max:
            wrong = f"{size} bytes long; at most {bytes_max} are allowed"
            raise RequestRefused(invalid_member(path, wrong))
    if suspect:
        fault = fault_in(value, path)
        if fault is not None:
            raise RequestRefused(invalid((fault,), str(fault)))


def checked_labels(labels: dict[str, Any]) -> dict[str, str]:
    """The labels of a request. Raises ``RequestRefused`` that names the faulty one."""
    if len(labels) > LABELS_MAX:
        wrong = f"{len(labels)} labels; at most {LABELS_MAX} are allowed"
        raise RequestRefused(invalid_member("labels", wrong))
    for name, value in labels.items():
        if _LABEL_NAME.match(name) is None:
            raise RequestRefused(invalid_member(f"labels.{name[:_NAMED_CHARS]}", _NOT_A_NAME))
        if not isinstance(value, str) or _LABEL.match(value) is None:
            raise RequestRefused(invalid_member(f"labels.{name}", _NOT_A_VALUE))
    return labels


_LABEL = re.compile(LABEL_PATTERN)
_LABEL_NAME = re.compile(LABEL_NAME_PATTERN)
_NAMED_CHARS: Final = 100
"""Characters of a name that is too long, in the message about it."""
_NOT_A_NAME: Final = (
    f"the name of a label has 1 to {LABEL_CHARS_MAX} visible characters, and no colon"
)
_NOT_A_VALUE: Final = f"the value must be text of 1 to {LABEL_CHARS_MAX} visible characters"
_PARAMETERS_MAX: Final = 50


def read_query(text: bytes, shape: type[Any]) -> Any:  # noqa: ANN401 - the route's own type
    """The parameters as the route's type. Raises ``RequestRefused`` with the parameter's name."""
    given: dict[str, Any] = {}
    repeatable = _repeatable(cast("Hashable", shape))
    parts = text.split(b"&")
    if len(parts) > _PARAMETERS_MAX:
        raise RequestRefused(invalid_member("", f"more than {_PARAMETERS_MAX} query parameters"))
    for part in filter(None, parts):
        name, _, value = part.partition(b"=")
        key = _text(name, "a query parameter's name")
        if key in repeatable:
            given.setdefault(key, []).append(_text(value, key))
        elif key in given:
            raise RequestRefused(invalid_member(key, "given more than once"))
        else:
            given[key] = _text(value, key)
    try:
        query = msgspec.convert(given, shape, strict=False)
    except msgspec.ValidationError as error:
        fault = _as_parameter(why_not(error, shape))
        raise RequestRefused(invalid((fault,), f"query: {fault}")) from None
    for key, typed in given.items():
        value = getattr(query, key)
        # The decoder reads the text ``null`` as None; a parameter that is given must have a value.
        if value is None:
            raise RequestRefused(invalid_member(key, "must not be null"))
        # It reads 1e2 and 1.0 as whole numbers.
        if type(value) is int and _WHOLE_NUMBER.fullmatch(typed) is None:
            raise RequestRefused(invalid_member(key, "must be a whole number, in digits"))
        # It reads numbers as times.
        if isinstance(value, datetime) and "-" not in typed[1:]:
            raise RequestRefused(invalid_member(key, _TIME_WANTED))
    return query


_WHOLE_NUMBER = re.compile("-?[0-9]+")


@functools.cache
def _repeatable(shape: Hashable) -> frozenset[str]:
    """The parameters that may be given several times: those with a list of values."""
    return frozenset(
        field.encode_name
        for field in msgspec.structs.fields(shape)  # type: ignore[arg-type]  # a struct
        if isinstance(field.default, tuple)
    )


def _text(encoded: bytes, path: str) -> str:
    try:
        return unquote_to_bytes(encoded.replace(b"+", b" ")).decode("utf-8")
    except UnicodeDecodeError:
        raise RequestRefused(invalid_member(path, "not UTF-8")) from None


def _as_parameter(fault: Fault) -> Fault:
    known = "not a member", "not a query parameter"
    return Fault(fault.path, fault.message.replace(*known))
