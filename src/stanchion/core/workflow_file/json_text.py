"""JSON text: a parser for RFC 8259 that knows the line of every value.

The parser of the standard library silently keeps the last of two equal keys, does not report the
position of a value, and is recursive. This one goes from token to token and keeps one state.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum
from typing import Final

from stanchion.core.faults import quoted
from stanchion.core.json_value import JsonValue
from stanchion.core.workflow_file.tree import Scalar, Tree, Unreadable, number

# Possessive throughout: the pattern never backtracks, so parsing is linear in the text.
_TOKEN = re.compile(
    r"[ \t\n\r]*+"
    r"(?:(?P<sign>[][{},:])"
    r'|(?P<text>"(?:[^"\\\x00-\x1f]++|\\.)*")'
    r"|(?P<number>-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?)"
    r"|(?P<word>true|false|null|NaN|-?Infinity)"
    r"|(?P<end>\Z)"
    r"|(?P<stray>))"
)
_WORDS: Final[Mapping[str, JsonValue]] = {"true": True, "false": False, "null": None}


class _Due(Enum):
    """What is expected next."""

    VALUE = "a value"
    VALUE_OR_END = "a value or ]"
    KEY = "a key in double quotes"
    KEY_OR_END = "a key in double quotes or }"
    COLON = "a colon"
    COMMA_OR_END = "a comma or the closing bracket"
    END = "nothing more"


def read_json(text: str, tree: Tree) -> None:
    """Parse JSON into the tree. Raises ``Unreadable``."""
    due, at, line = _Due.VALUE, 0, 1
    while True:
        token = _TOKEN.match(text, at)
        assert token is not None  # it matches anything, a stray character too
        kind = str(token.lastgroup)
        start = token.start(kind)
        line += text.count("\n", at, start)
        if kind == "end" and due is _Due.END:
            return
        next_due = _take(due, kind, token[kind], tree, line)
        if next_due is None:
            found = quoted(text[start : start + _FOUND_CHARS_MAX].split("\n", maxsplit=1)[0])
            met = "the end of the file" if kind == "end" else found
            column = start - text.rfind("\n", 0, start)
            raise Unreadable(f"not JSON: column {column}: expected {due.value}, found {met}", line)
        due, at = next_due, token.end()


_FOUND_CHARS_MAX: Final = 20


def _take(due: _Due, kind: str, word: str, tree: Tree, line: int) -> _Due | None:
    """Add a token to the tree. Returns what is expected next; ``None`` if it was unexpected."""
    match due, kind, word:
        case ((_Due.KEY | _Due.KEY_OR_END), "text", _):
            tree.add(_scalar(kind, word, line), line)
            return _Due.COLON
        case _Due.COLON, "sign", ":":
            return _Due.VALUE
        case ((_Due.VALUE | _Due.VALUE_OR_END), ("text" | "number" | "word"), _):
            tree.add(_scalar(kind, word, line), line)
            return _after_value(tree)
        case ((_Due.VALUE | _Due.VALUE_OR_END), "sign", "{"):
            tree.begin({}, line)
            return _Due.KEY_OR_END
        case ((_Due.VALUE | _Due.VALUE_OR_END), "sign", "["):
            tree.begin([], line)
            return _Due.VALUE_OR_END
        case _Due.COMMA_OR_END, "sign", ",":
            return _Due.KEY if tree.in_object else _Due.VALUE
        case ((_Due.COMMA_OR_END | _Due.KEY_OR_END), "sign", "}") if tree.in_object:
            tree.end()
            return _after_value(tree)
        case ((_Due.COMMA_OR_END | _Due.VALUE_OR_END), "sign", "]") if not tree.in_object:
            tree.end()
            return _after_value(tree)
        case _:
            return None


def _after_value(tree: Tree) -> _Due:
    return _Due.COMMA_OR_END if tree.open else _Due.END


def _scalar(kind: str, word: str, line: int) -> Scalar:
    if kind == "number":
        return number(word)
    if kind == "word":
        flaw = "" if word in _WORDS else "not a finite number"
        return Scalar(_WORDS.get(word), word, flaw)
    if "\\" not in word:
        return Scalar(word[1:-1], word)
    try:
        return Scalar(json.loads(word), word)
    except json.JSONDecodeError as error:
        raise Unreadable(f"not JSON: {error.msg} in {quoted(word)}", line) from None
