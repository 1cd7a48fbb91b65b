r"""Patterns: the cost of regular expressions.

RE2 has no exponential cases such as ``(a+)+$``. Its time is bounded by the length of the text times
the size of the compiled pattern: ``(.{900}x){900}`` is short, but its program is not. So the size
of a pattern is estimated before it is used, and the work is charged to the budget.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from stanchion.core.cel import library
from stanchion.core.cel.value import ExpressionError, ExpressionFault

if TYPE_CHECKING:
    from stanchion.core.cel.evaluation import EvaluationBudget

CHARS_MAX: Final = 1_000
"""The length of a pattern."""
WEIGHT_MAX: Final = 10_000
"""The weight of a pattern: about the number of instructions of its program."""


def matches(budget: EvaluationBudget, text: str, pattern: str) -> bool:
    """Whether the pattern is found anywhere in the text. Raises ``ExpressionError``."""
    weight = weigh(pattern)
    if weight > WEIGHT_MAX:
        raise ExpressionError(_TOO_LARGE)
    # RE2 works on UTF-8: up to four bytes a character.
    length = len(text) * (1 if text.isascii() else 4)
    budget.work(_CALL_WORK + _COMPILE_WORK * weight + length * weight // _STEPS_A_UNIT)
    try:
        return library.search(text, pattern)
    except ValueError as error:
        raise ExpressionError(f"matches: {error}") from error


def check_pattern(pattern: str, position: int | None) -> None:
    """Check a pattern that is a literal in the expression. Raises ``ExpressionFault``."""
    if weigh(pattern) > WEIGHT_MAX:
        raise ExpressionFault(_TOO_LARGE, position)
    try:
        library.search("", pattern)
    except ValueError as error:
        raise ExpressionFault(f"matches: {error}", position) from error


_TOO_LARGE: Final = "matches: the pattern is too long, or becomes so when repetitions are expanded"

# Measured: 15 µs per call, 1 µs to compile an instruction, at most 7 ns per byte of text.
_CALL_WORK: Final = 100
_COMPILE_WORK: Final = 8
_STEPS_A_UNIT: Final = 16


def weigh(pattern: str) -> int:
    """An upper bound of the size of the compiled pattern."""
    # \Q quotes what follows, which the tokens below do not handle: refused.
    if len(pattern) > CHARS_MAX or r"\Q" in pattern:
        return WEIGHT_MAX + 1
    groups = [0]  # the weight of each open group so far
    last = 0  # the weight of what a repetition would repeat
    for token in _TOKEN.finditer(pattern):
        match token.lastgroup:
            case "open":
                groups.append(0)
            case "close" if len(groups) > 1:
                last = groups.pop() + 1
                groups[-1] += last
            case "times":
                copies = max(int(token["least"]), int(token["most"] or 0)) + 1
                groups[-1] += last * (copies - 1)
                last *= copies
            case "sign":
                groups[-1] += 1
            case _:
                last = _weigh_one(token[0])
                groups[-1] += last
    return (sum(groups) + 1) * (3 if _FOLDS.search(pattern) else 1)


def _weigh_one(token: str) -> int:
    """The weight of a token that matches one character: itself, any, or one of a class."""
    unicode_classes = len(_UNICODE_CLASS.findall(token))
    wide = not token.isascii() or _WIDE.search(token)
    return 2 + len(token) // 2 + unicode_classes * 1_000 + (16 if wide else 0)


_TOKEN = re.compile(
    r"""
      (?P<open> \( )
    | (?P<close> \) )
    | (?P<times> \{ (?P<least>\d+) (?: ,(?P<most>\d*) )? \} )
    | (?P<sign> [*+?|^$] )
    | \[ \^? \]? (?: \[:\^?\w+:\] | \\. | [^\]\\] )* \]
    | \\? .
    """,
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_UNICODE_CLASS = re.compile(r"\\[pP]")  # hundreds of ranges
_WIDE = re.compile(r"^\.|^\[\^|\\[DSWCx]|\[:\^")  # characters of every length in UTF-8
_FOLDS = re.compile(r"\(\?[a-zA-Z]*i")  # a letter has up to three forms
