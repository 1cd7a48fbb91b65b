"""Trees: plain values built one key or value at a time, in the order of the text.

Both parsers build the same tree, so its rules apply to both: keys are distinct strings, strings
have no lone surrogates, nesting and number of nodes are limited. Nothing here is recursive: depth
is limited by a rule, not by the Python stack.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from stanchion.core.faults import Findings, Path, kind_of
from stanchion.core.json_value import JsonValue
from stanchion.core.limits import JSON_DEPTH_MAX

NODES_MAX: Final = 20_000
"""Keys and values in one file."""


class Unreadable(Exception):
    """The text cannot be parsed further."""

    def __init__(self, reason: str, line: int | None = None, path: Path = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.line = line
        self.path = path


class Scalar(NamedTuple):
    """A value that is neither an object nor a list."""

    value: JsonValue
    word: str
    """Its text."""
    flaw: str = ""
    """Why it cannot be used; empty if it can."""


@dataclass(slots=True)
class _Container:
    holds: dict[str, JsonValue] | list[JsonValue]
    path: Path
    key: str | None = None
    """In an object, the key whose value comes next."""
    repeated: bool = False
    """The key is a duplicate: its value is checked for faults and dropped."""

    @property
    def awaits_key(self) -> bool:
        return self.key is None and isinstance(self.holds, dict)


@dataclass(slots=True)
class Tree:
    """The tree so far. ``lines`` has the path of every node, in the order of the text."""

    findings: Findings
    root: JsonValue = None
    lines: dict[Path, int] = field(default_factory=dict)
    nodes: int = 0
    open: list[_Container] = field(default_factory=list)

    @property
    def in_object(self) -> bool:
        """Whether the innermost open container is an object."""
        return bool(self.open) and isinstance(self.open[-1].holds, dict)

    def begin(
        self, holds: dict[str, JsonValue] | list[JsonValue], line: int, flaw: str = ""
    ) -> None:
        """Open an object or a list. Raises ``Unreadable``."""
        if self.open and self.open[-1].awaits_key:
            wrong = f"a key must be text, not {kind_of(holds)}"
            raise Unreadable(wrong, line, self.open[-1].path)
        path = self._place(holds, line, flaw)
        if len(self.open) == JSON_DEPTH_MAX:
            raise Unreadable(f"nested deeper than {JSON_DEPTH_MAX} levels", line, path)
        self.open.append(_Container(holds, path))

    def end(self) -> None:
        """Close the innermost object or list."""
        self.open.pop()

    def add(self, scalar: Scalar, line: int) -> None:
        """Add a value, or a key where one is expected. Raises ``Unreadable``."""
        flaw = scalar.flaw
        if isinstance(scalar.value, str) and _SURROGATE.search(scalar.value):
            flaw = "contains half of a surrogate pair, which is no character"
        if self.open and self.open[-1].awaits_key:
            self._place_key(self.open[-1], scalar, line, flaw)
        else:
            self._place(scalar.value, line, flaw)

    def _place(self, value: JsonValue, line: int, flaw: str) -> Path:
        self._count(line)
        path: Path = ()
        within = self.open[-1] if self.open else None
        if within is None:
            self.root = value
        elif isinstance(within.holds, list):
            path = (*within.path, len(within.holds))
            within.holds.append(value)
        else:
            key, within.key = str(within.key), None
            path = (*within.path, key)
            if not within.repeated:
                within.holds[key] = value
        self.lines.setdefault(path, line)
        if flaw:
            self.findings.note(path, flaw, line=line)
        return path

    def _place_key(self, within: _Container, scalar: Scalar, line: int, flaw: str) -> None:
        self._count(line)
        key = scalar.value
        if not isinstance(key, str):
            flaw = flaw or f"a key must be text, not {kind_of(key)}; put it in quotes"
            key = scalar.word
        path = (*within.path, key)
        within.key = key
        within.repeated = key in within.holds
        if within.repeated:
            wrong = f"repeated; first given in line {self.lines[path]}"
            self.findings.note(path, wrong, line=line, spoils=False)
        self.lines.setdefault(path, line)
        if flaw:
            self.findings.note(path, flaw, line=line)

    def _count(self, line: int) -> None:
        self.nodes += 1
        if self.nodes > NODES_MAX:
            raise Unreadable(f"more than {NODES_MAX} keys and values", line)


_SURROGATE = re.compile("[\ud800-\udfff]")


def number(word: str) -> Scalar:
    """Parse a decimal number, to an integer if it is written as one."""
    if len(word) > _NUMBER_CHARS_MAX:
        return Scalar(0, word, f"a number of more than {_NUMBER_CHARS_MAX} characters")
    if word.lstrip("+-").isdigit():
        whole = int(word)
        flaw = "" if -(2**63) <= whole < 2**63 else "an integer beyond 64 bits"
        return Scalar(whole, word, flaw)
    real = float(word)
    return Scalar(real, word, "" if math.isfinite(real) else "a number beyond 64 bits")


_NUMBER_CHARS_MAX: Final = 400
