"""Faults: everything that is wrong with a file or an input, in one answer.

A reader of foreign text does not stop at the first mistake. It notes each one in ``Findings`` with
the path to its place, and goes on with what can still be judged. At the end the findings become
faults: in the order of the document, not too many, each with a near name if there is one.
"""

from __future__ import annotations

import difflib
import heapq
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from stanchion.core.json_value import JsonValue

__all__ = [
    "FAULTS_MAX",
    "Fault",
    "Findings",
    "Near",
    "Path",
    "WorkflowFaults",
    "kind_of",
    "listed",
    "named",
    "quoted",
    "shown",
]

FAULTS_MAX: Final = 100
"""Faults in one answer. A last line says how many more there are."""

Path: TypeAlias = tuple[str | int, ...]
"""From the root of a document to a place in it: names of members and positions in lists."""


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that is wrong, where it is, and what would be right."""

    path: str
    """Such as ``steps.plan.needs[1]``; empty for the document as a whole."""
    message: str
    line: int | None = None
    """In the text the document was read from, the first being 1."""

    def __str__(self) -> str:
        place = ": ".join(
            part for part in (f"line {self.line}" if self.line else "", self.path) if part
        )
        return f"{place}: {self.message}" if place else self.message


class WorkflowFaults(msgspec.Struct, frozen=True):
    """Why something is not a workflow, or not one that can run. There is at least one reason."""

    faults: tuple[Fault, ...]


class Near(msgspec.Struct, frozen=True):
    """A word nobody knows, and the words it may have been meant for."""

    word: str
    words: Iterable[str]

    def hint(self) -> str:
        """``; did you mean 'topic'?``, or nothing when no word is close."""
        if len(self.word) > _NEAR_CHARS_MAX:
            return ""
        # To compare two long words takes a quarter of a millisecond, so only the likeliest are.
        words = [word for word in self.words if len(word) <= _NEAR_CHARS_MAX]
        if len(words) > _COMPARED_MAX:
            words = heapq.nlargest(_COMPARED_MAX, words[:_NEAR_WORDS_MAX], key=self._shared)
        close = difflib.get_close_matches(self.word, words, n=1, cutoff=0.7)
        return f"; did you mean {named(close[0])}?" if close else ""

    def _shared(self, word: str) -> int:
        """How much of the word's beginning and end is the same."""
        return _common(self.word, word) + _common(self.word[::-1], word[::-1])


_NEAR_CHARS_MAX: Final = 64
_NEAR_WORDS_MAX: Final = 500
"""Words that are looked at, and how many of these are compared in full."""
_COMPARED_MAX: Final = 10
_HINTS_MAX: Final = 20
"""Faults of one answer for which a near word is looked for."""


def _common(one: str, other: str) -> int:
    shared = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        shared += 1
    return shared


class _Finding(msgspec.Struct, frozen=True):
    path: Path
    message: str
    line: int | None
    near: Near | None


@dataclass(slots=True)
class Findings:
    """What has been noted so far, and which places are known to be bad."""

    noted: list[_Finding] = field(default_factory=list)
    spoilt: set[Path] = field(default_factory=set)

    def note(
        self,
        path: Path,
        message: str,
        *,
        line: int | None = None,
        near: Near | None = None,
        spoils: bool = True,
    ) -> None:
        """Note a fault. Unless told otherwise, the place is then not judged a second time."""
        self.noted.append(_Finding(path, message, line, near))
        if spoils:
            self.spoilt.add(path)

    def clean(self, path: Path) -> bool:
        """Whether nothing wrong is known of this place. Places inside it are not looked at."""
        return path not in self.spoilt

    def faults(self, lines: Mapping[Path, int] | None = None) -> tuple[Fault, ...]:
        """Everything noted, in document order: ``lines`` has every place in that order."""
        lines = lines or {}
        places = {path: place for place, path in enumerate(lines)}

        def rank(finding: _Finding) -> tuple[int, int]:
            return _line(finding, lines) or 0, places.get(_nearest(finding.path, places), 0)

        ordered = sorted(self.noted, key=rank)
        faults = []
        hints = 0
        for finding in ordered[:FAULTS_MAX]:
            # Only now, for those that are reported: looking for near names is slow.
            is_hinted = finding.near is not None and hints < _HINTS_MAX
            hints += is_hinted
            hint = finding.near.hint() if finding.near is not None and is_hinted else ""
            line = _line(finding, lines)
            faults.append(Fault(shown(finding.path), finding.message + hint, line))
        if len(ordered) > FAULTS_MAX:
            faults.append(Fault("", f"and {len(ordered) - FAULTS_MAX} more faults"))
        return tuple(faults)


def _line(finding: _Finding, lines: Mapping[Path, int]) -> int | None:
    if finding.line is not None:
        return finding.line
    return lines.get(_nearest(finding.path, lines))


def _nearest(path: Path, known: Mapping[Path, int]) -> Path:
    """The place itself, or, if it is missing from the document, what should contain it."""
    while path and path not in known:
        path = path[:-1]
    return path


# ── Words for messages ───────────────────────────────────────────────────────────────────────────

_PLAIN = re.compile(r"[A-Za-z_$][A-Za-z0-9_$-]*")
_SHOWN_CHARS_MAX: Final = 80


def shown(path: Path) -> str:
    """The path as people write it: ``steps.plan.needs[1]``, ``steps["a.b"].topic``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _plain(part):
            text += f".{part}" if text else part
        else:
            text += f"[{quoted(part)}]"
    return text


def quoted(text: str) -> str:
    """The text in double quotes, cut if it is long. Everything in it can be seen."""
    if len(text) > _SHOWN_CHARS_MAX:
        text = text[: _SHOWN_CHARS_MAX - 1] + "…"
    escaped = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else _escape(char) for char in escaped)


def _escape(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) <= _BMP_MAX else f"\\U{ord(char):08x}"


_BMP_MAX: Final = 0xFFFF


def named(word: str) -> str:
    """A name in single quotes; if it is no plain word, like any other text."""
    return f"'{word}'" if _plain(word) else quoted(word)


def _plain(word: str) -> bool:
    return len(word) <= _SHOWN_CHARS_MAX and _PLAIN.fullmatch(word) is not None


def listed(words: Sequence[str], last: str = "or") -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def kind_of(value: JsonValue) -> str:
    """What a value is, for a sentence that says what it should have been."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list():
            return "a list"
        case _:
            return "an object"
