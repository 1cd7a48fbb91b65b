"""The library: parses and checks expressions with the reference implementation of CEL.

This is the only module that imports the library. It uses its parser, its type checker, and its
linear-time regular expressions (RE2). It does not use its evaluator, which does not limit memory:
``docs/adr/0004-expressions.md`` has the figures.

The library returns a checked expression as a protobuf message, ``cel.expr.CheckedExpr``. Its field
numbers are a public standard, so a decoder of forty lines is enough.
"""

from __future__ import annotations

import difflib
import math
import re
import struct
from functools import lru_cache
from typing import Final

import msgspec
from cel_expr_python import cel

from stanchion.core.cel.syntax import (
    CallNode,
    Constant,
    Has,
    ListOf,
    Loop,
    Macro,
    MapOf,
    Name,
    Node,
    Select,
)
from stanchion.core.cel.value import ExpressionFault

NESTING_MAX: Final = 32
"""Levels of brackets, calls and operators in one expression. The library's own limit."""


class Checked(msgspec.Struct, frozen=True):
    """An expression whose names exist and whose static types agree."""

    root: Node
    type: str
    """The static type of its value, such as ``BOOL``; ``DYN`` if it depends on the data."""


def parse(source: str, names: frozenset[str]) -> Checked:
    """Parse and check an expression that may use these root names, or raise ExpressionFault."""
    # The library reads only up to the first NUL, and cannot encode a lone surrogate.
    unfit = _UNFIT.search(source)
    if unfit:
        raise ExpressionFault("a control character or half a character pair", unfit.start() + 1)
    try:
        program = _environment(names).compile(source)
    except RuntimeError as error:
        raise _fault(str(error), source, names) from error
    checked = _Message(_Message(program.serialize()).chunk(2))
    return Checked(
        root=_Reader(_Message(checked.chunk(5))).node(checked.chunk(4)),
        type=program.return_type().name(),
    )


_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


@lru_cache(maxsize=16)
def _environment(names: frozenset[str]) -> cel.Env:
    # All other names have values of any type.
    known = {"steps": cel.Type.Map(cel.Type.STRING, cel.Type.DYN), "index": cel.Type.INT}
    return cel.NewEnv(variables={name: known.get(name, cel.Type.DYN) for name in sorted(names)})


# ── Regular expressions ──────────────────────────────────────────────────────────────────────────


def search(text: str, pattern: str) -> bool:
    """Whether the pattern (RE2) is found anywhere in the text, or raise ValueError.

    The time is linear in the length of the text times the size of the pattern: the caller limits
    both.
    """
    # The library would search only up to the first NUL.
    for given, what in ((text, "the text"), (pattern, "the pattern")):
        unfit = _UNSEARCHABLE.search(given)
        if unfit:
            raise ValueError(f"{what} has a NUL or half a character pair in it")
    found = _search_program().eval(data={"text": text, "pattern": pattern})
    # The library returns an error as a value, which is truthy.
    if found.type() != cel.Type.BOOL:
        reason = str(found.value()).removeprefix("INVALID_ARGUMENT: ")
        raise ValueError(reason[:_MESSAGE_CHARS_MAX])
    return found.value() is True


_UNSEARCHABLE = re.compile("[\x00\ud800-\udfff]")


@lru_cache(maxsize=1)
def _search_program() -> cel.Expression:
    variables = {"text": cel.Type.STRING, "pattern": cel.Type.STRING}
    return cel.NewEnv(variables=variables).compile("text.matches(pattern)")


# ── Error messages of the library, rewritten for the author of a workflow ────────────────────────


def _fault(error: str, source: str, names: frozenset[str]) -> ExpressionFault:
    if "recursion" in error:
        return ExpressionFault(f"nested too deeply: {NESTING_MAX} levels are allowed")
    # Only the first error: the later ones mostly follow from it.
    found = _COMPLAINT.search(error)
    if found is None:
        return ExpressionFault(error)
    line, column, message = int(found[1]), int(found[2]), found[3]
    before = source.split("\n")[: line - 1]
    position = sum(len(part) + 1 for part in before) + column
    if unknown := _UNKNOWN.match(message):
        # In ``nme.field`` the unknown part is ``nme``.
        name = unknown[1].lstrip(".").split(".")[0]
        message = f"unknown name or function '{name}'; {_hint(name, source, names)}"
        # The position from the library is that of the dot or bracket after the name.
        begin = source.rfind(name, 0, position - 1 + len(name))
        position = position if begin < 0 else begin + 1
    elif misfit := _MISFIT.match(message):
        message = f"'{re.sub('[_@]', '', misfit[1])}' does not take {misfit[2]}"
    else:
        message = _syntax(message.split(" expecting ")[0], source)
    return ExpressionFault(message[:_MESSAGE_CHARS_MAX], position)


def _hint(name: str, source: str, names: frozenset[str]) -> str:
    dashed = next((id_ for id_ in _DASHED.findall(source) if name in id_.split("-")), None)
    if dashed is not None:
        return f'an id with a dash is written steps["{dashed}"]'
    if name in {"item", "index"}:
        return "it is known only in the input of a for-each"
    near = difflib.get_close_matches(name, sorted(names), n=1)
    return f"did you mean '{near[0]}'?" if near else f"names here: {', '.join(sorted(names))}"


def _syntax(message: str, source: str) -> str:
    if "<EOF>" in message:
        return "the expression ends too early"
    bare = _STRING.sub("''", source)
    message = message[:1].lower() + message[1:]
    if _ASSIGNMENT.search(bare):
        return f"{message.strip()}; use == to compare"
    if _WORDS.search(bare):
        return f"{message.strip()}; and, or, not are &&, ||, !"
    return message


_DASHED = re.compile(r"\bsteps\.([A-Za-z]\w*(?:-\w+)+)")
_STRING = re.compile(r"""'[^']*'|"[^"]*\"""")
_ASSIGNMENT = re.compile(r"(?<![=!<>])=(?!=)")
_WORDS = re.compile(r"\b(?:and|or|not)\b")
_MESSAGE_CHARS_MAX: Final = 300
_COMPLAINT = re.compile(r"ERROR: <input>:(\d+):(\d+): (.*)")
_UNKNOWN = re.compile(r"undeclared reference to '(.*?)'")
_MISFIT = re.compile(r"found no matching overload for '(.*?)' applied to '(.*)'")


# ── Reading cel.expr.CheckedExpr ─────────────────────────────────────────────────────────────────


class _Message:
    """A protobuf message: its numbers and its chunks (strings, bytes, messages) by field."""

    def __init__(self, data: bytes) -> None:
        self.numbers: dict[int, int] = {}
        self.chunks: dict[int, list[bytes]] = {}
        at = 0
        while at < len(data):
            tag, at = _varint(data, at)
            field, wire = tag >> 3, tag & 7
            if wire == _VARINT:
                self.numbers[field], at = _varint(data, at)
                continue
            size, at = (_FIXED_SIZES[wire], at) if wire in _FIXED_SIZES else _varint(data, at)
            self.chunks.setdefault(field, []).append(data[at : at + size])
            at += size

    def chunk(self, field: int) -> bytes:
        return self.chunks.get(field, [b""])[-1]

    def text(self, field: int) -> str:
        return self.chunk(field).decode()


_VARINT: Final = 0
_FIXED_SIZES: Final = {1: 8, 5: 4}


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at


class _Reader:
    """Nodes from ``cel.expr.Expr``. The numbers are those of its definition."""

    def __init__(self, source_info: _Message) -> None:
        entries = (_Message(entry).numbers for entry in source_info.chunks.get(4, []))
        # A protobuf map omits zeros, and the first character has position 0.
        self._positions = {entry[1]: entry.get(2, 0) + 1 for entry in entries}

    def node(self, data: bytes) -> Node:
        message = _Message(data)
        at = self._positions.get(message.numbers.get(2, 0))
        (field,) = message.chunks
        content = _Message(message.chunk(field))
        match field:
            case 3:
                return self._constant(at, content)
            case 4:
                return Name(at, content.text(1))
            case 5:
                kind = Has if content.numbers.get(3) else Select
                return kind(at, self.node(content.chunk(1)), content.text(2))
            case 6:
                arguments = [*content.chunks.get(1, []), *content.chunks.get(3, [])]
                return CallNode(at, content.text(2), tuple(map(self.node, arguments)))
            case 7:
                return ListOf(at, tuple(map(self.node, content.chunks.get(1, []))))
            case 8:
                return self._map(at, content)
            case 9:
                return self._loop(at, content)
            case _:
                raise ExpressionFault("this kind of expression is not available", at)

    def _constant(self, at: int | None, content: _Message) -> Constant:
        (field,) = (*content.numbers, *content.chunks)
        match field:
            case 1:
                return Constant(at, None)
            case 2:
                return Constant(at, content.numbers[2] == 1)
            case 3:
                (whole,) = struct.unpack("<q", content.numbers[3].to_bytes(8, "little"))
                return Constant(at, whole)
            case 5:
                (double,) = struct.unpack("<d", content.chunk(5))
                if not math.isfinite(double):
                    raise ExpressionFault("this number is too large", at)
                return Constant(at, double)
            case 6:
                return Constant(at, content.text(6))
            case _:
                raise ExpressionFault("unsigned numbers and bytes are not available", at)

    def _map(self, at: int | None, content: _Message) -> MapOf:
        if content.chunk(1):
            raise ExpressionFault(f"messages ({content.text(1)}) are not available", at)
        entries = map(_Message, content.chunks.get(2, []))
        return MapOf(
            at, tuple((self.node(entry.chunk(3)), self.node(entry.chunk(4))) for entry in entries)
        )

    def _loop(self, at: int | None, content: _Message) -> Loop:
        """A macro, recognised by the loop step of its expansion."""
        variable, over = content.text(1), self.node(content.chunk(2))
        match self.node(content.chunk(6)):
            case CallNode(_, "_&&_", (Name(), condition)):
                return Loop(at, Macro.ALL, variable, over, condition, None)
            case CallNode(_, "_||_", (Name(), condition)):
                return Loop(at, Macro.EXISTS, variable, over, condition, None)
            case CallNode(
                _, "_?_:_", (condition, CallNode(_, "_+_", (Name(), Constant())), Name())
            ):
                return Loop(at, Macro.EXISTS_ONE, variable, over, condition, None)
            case CallNode(
                _, "_?_:_", (condition, CallNode(_, "_+_", (Name(), ListOf(_, (value,)))), _)
            ):
                return Loop(at, Macro.COLLECT, variable, over, condition, value)
            case CallNode(_, "_+_", (Name(), ListOf(_, (value,)))):
                return Loop(at, Macro.COLLECT, variable, over, None, value)
            case _:
                raise ExpressionFault("this macro is not available", at)
