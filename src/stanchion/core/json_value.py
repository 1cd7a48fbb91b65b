"""The types of JSON values: all data of workflows is JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

__all__ = ["LARGE_BYTES", "JsonObject", "JsonValue", "decode_value"]

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

LARGE_BYTES: Final = 256 * 1024
"""A longer text is decoded in pieces."""
# ``float`` reads ``1e300`` in 0.3 µs, the decoder itself in 15: a value may hold 40,000 of them.
_VALUE: Final[msgspec.json.Decoder[JsonValue]] = msgspec.json.Decoder(float_hook=float)
_RAW_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_RAW_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode_value(text: bytes) -> JsonValue:
    """Decode a JSON value; the members of a large one, one by one.

    A decoder holds the GIL, for tens of milliseconds per many megabytes: in a thread, between two
    members, the event loop can run.
    """
    if len(text) < LARGE_BYTES:
        return _VALUE.decode(text)
    if text.startswith(b"{"):
        return {name: decode_value(bytes(raw)) for name, raw in _RAW_OBJECT.decode(text).items()}
    if text.startswith(b"["):
        return [decode_value(bytes(raw)) for raw in _RAW_LIST.decode(text)]
    return _VALUE.decode(text)
