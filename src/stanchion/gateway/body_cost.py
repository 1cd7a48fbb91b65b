"""Costly bodies: texts that the decoder would work on for too long, found by counting.

Decoding runs on the event loop. A number with a large exponent or many digits takes the decoder up
to a thousand times as long as a short one, and every object and list takes memory.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from itertools import islice
from typing import Final

AS_ZEROS: Final = bytes.maketrans(b"123456789E", b"000000000e")
"""Makes all digits zeros, so that long numbers are found by a search for one text."""
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


def why_costly(body: bytes) -> Generator[None, None, str | None]:
    """Why decoding this text could hold the event loop for more than 20 ms; ``None`` if not.

    Cheap counts come first. They also find digits in text, such as hash values; only if there are
    many are the exponents of numbers counted, by what follows them, each kind in a piece of work.
    """
    if body.count(b"[") + body.count(b"{") > CONTAINERS_MAX:
        return f"more than {CONTAINERS_MAX:,} objects and lists in one body"
    plain = body.translate(AS_ZEROS, b"+-")
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
"""Searching this much text for long numbers takes 5 ms."""


def _has_more(pattern: re.Pattern[bytes], text: bytes, count: int) -> bool:
    """Whether the pattern is found more often than this. Stops there."""
    return next(islice(pattern.finditer(text), count, None), None) is not None
