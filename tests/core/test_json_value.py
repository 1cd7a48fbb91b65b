"""Decoding of JSON values: in pieces, so that the event loop can run between two of them."""

from __future__ import annotations

import msgspec
import pytest

from stanchion.core.json_value import LARGE_BYTES, JsonValue, decode_value, decoding

ROWS: JsonValue = [{"a": number, "b": "text"} for number in range(9_000)]
VALUES: dict[str, tuple[JsonValue, int]] = {
    "a number": (7, 1),
    "nothing": ({}, 1),
    "a short list": ([1, None, "a"], 1),
    "large members": ([ROWS] * 9, 18),
    "large members in others": ({"a": {"b": [ROWS, ROWS]}, "c": ROWS, "d": 1}, 20),
    "a text": ("y" * 300_000, 1),
    "many numbers": ([1, -2.5e3, None, True] * 100_000, 20),
    "many texts": (["a,b"] * 200_000, 40),
    "many members": ({f"k{number}": number for number in range(90_000)}, 20),
    "many empty lists": ([[]] * 200_000, 40),
    "small ones beside a large one": ([1] * 200_000 + [ROWS, *([1] * 9), "y" * 300_000, {}], 60),
    "one member": ([[[1] * 200_000]], 10),
}


@pytest.mark.parametrize(("value", "pieces_max"), VALUES.values(), ids=VALUES)
def test_a_value_is_decoded_in_a_few_pieces(value: JsonValue, pieces_max: int) -> None:
    # A decoder holds the GIL: 7 MB of small objects stopped the event loop for 95 ms. One by one,
    # a megabyte of numbers stopped it for 270 ms.
    text = msgspec.json.encode(value)
    assert decode_value(text) == value
    pieces = [*decoding(text)]
    assert len(pieces) <= pieces_max
    assert all(each < LARGE_BYTES or each == 300_002 for each in pieces)  # but for a text
