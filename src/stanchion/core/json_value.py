"""The types of JSON values: all data of workflows is JSON."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

__all__ = ["DECODE_ERRORS", "LARGE_BYTES", "JsonObject", "JsonValue", "decode_value", "decoding"]

if TYPE_CHECKING:
    JsonValue: TypeAlias = (
        "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
    )
    JsonObject: TypeAlias = dict[str, JsonValue]
else:
    # msgspec reads annotations at run time and has no recursive types. Whatever it decodes from
    # JSON is a JSON value.
    JsonValue = Any
    JsonObject = dict[str, Any]

DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError)
"""What ``msgspec.json.decode`` raises for foreign bytes; the second is not one of the first."""
LARGE_BYTES: Final = 256 * 1024
"""A longer text is decoded in pieces."""
# ``float`` reads ``1e300`` in 0.3 µs, the decoder itself in 15: a value may hold 40,000 of them.
_VALUE: Final[msgspec.json.Decoder[JsonValue]] = msgspec.json.Decoder(float_hook=float)
_VALUES: Final[msgspec.json.Decoder[list[JsonValue]]] = msgspec.json.Decoder(
    list[Any], float_hook=float
)
_RAW_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_RAW_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode_value(text: bytes) -> JsonValue:
    """Decode a JSON value, a large one in pieces.

    A decoder holds the GIL, for tens of milliseconds per many megabytes: in a thread, between two
    pieces, the event loop can run.
    """
    if len(text) < LARGE_BYTES:
        return _VALUE.decode(text)
    pieces = decoding(text)
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            value: JsonValue = end.value
            return value


def decoding(text: bytes) -> Generator[int, None, JsonValue]:
    """Decode a JSON value; yields the length of each piece when it has been decoded.

    The pieces of a large list or object are its members, small ones together: to decode a hundred
    thousand of them one by one takes fifty times as long.
    """
    if len(text) >= LARGE_BYTES and text.startswith(b"["):
        if b'"' not in text and b"{" not in text and text.find(b"[", 1) < 0:
            return (yield from _decoding_plain(text))
        return (yield from _decoding_all(_RAW_LIST.decode(text)))
    if len(text) >= LARGE_BYTES and text.startswith(b"{"):
        members = _RAW_OBJECT.decode(text)
        values = yield from _decoding_all([*members.values()])
        return dict(zip(members, values, strict=True))
    value: JsonValue = _VALUE.decode(text)
    yield len(text)
    return value


def _decoding_plain(text: bytes) -> Generator[int, None, list[JsonValue]]:
    """A list of numbers and words: each comma is between two of them."""
    values: list[JsonValue] = []
    begin, last = 1, len(text) - 1
    while begin <= last:
        end = text.find(b",", begin + LARGE_BYTES // 2, last)
        end = last if end < 0 else end
        values += _VALUES.decode(b"[%b]" % text[begin:end])
        yield end - begin
        begin = end + 1
    return values


def _decoding_all(raws: Sequence[msgspec.Raw]) -> Generator[int, None, list[JsonValue]]:
    """The values of all members."""
    values: list[JsonValue] = []
    for begin in range(0, len(raws), _TOGETHER_MAX):
        values += yield from _decoding_some(raws[begin : begin + _TOGETHER_MAX])
    return values


def _decoding_some(raws: Sequence[msgspec.Raw]) -> Generator[int, None, list[JsonValue]]:
    joined = b",".join(raws)
    if len(raws) == 1:
        return [(yield from decoding(joined))]
    if len(joined) >= LARGE_BYTES:
        half = len(raws) // 2
        values = yield from _decoding_some(raws[:half])
        return values + (yield from _decoding_some(raws[half:]))
    some: list[JsonValue] = _VALUES.decode(b"[%b]" % joined)
    yield len(joined)
    return some


_TOGETHER_MAX: Final = 10_000
"""Members that are decoded together: small numbers, a millisecond."""
