"""Faults: the errors of a file or an input, reported together.

A parser does not stop at the first error. It notes each one in ``Findings`` with its path and goes
on. ``Findings.faults`` returns them in document order, limited in number, each with a similar name
if there is one.
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

BATCH_FAULTS_MAX: Final = 1_000
"""Faults of all rows of a batch that are collected; of each row after them only the first."""
FAULTS_MAX: Final = 100
"""Faults in one report. A last entry says how many more there are."""

Path: TypeAlias = tuple[str | int, ...]
"""A place in a document, from its root: names of members and positions in lists."""


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """One error, its place, and what is expected there."""

    path: str
    """Such as ``steps.plan.needs[1]``; empty for the document as a whole."""
    message: str
    line: int | None = None
    """The line in the text of the document, from 1."""

    def __str__(self) -> str:
        place = ": ".join(
            part for part in (f"line {self.line}" if self.line else "", self.path) if part
        )
        return f"{place}: {self.message}" if place else self.message


Faults: TypeAlias = tuple[Fault, ...]


def fault_unless(good: bool, path: str, message: str) -> Faults:  # noqa: FBT001 - a condition, not a switch
    """A fault if the condition does not hold."""
    return () if good else (Fault(path, message),)


class WorkflowFaults(msgspec.Struct, frozen=True):
    """The faults of a workflow that cannot be used: at least one."""

    faults: tuple[Fault, ...]


class Near(msgspec.Struct, frozen=True):
    """An unknown word and the known words, for a "did you mean" hint."""

    word: str
    words: Iterable[str]

    def hint(self) -> str:
        """``; did you mean 'topic'?``, or an empty string if no word is similar."""
        if len(self.word) > _NEAR_CHARS_MAX:
            return ""
        # Comparing two long words takes 0.25 ms, so only the likeliest are compared.
        words = [word for word in self.words if len(word) <= _NEAR_CHARS_MAX]
        if len(words) > _COMPARED_MAX:
            words = heapq.nlargest(_COMPARED_MAX, words[:_NEAR_WORDS_MAX], key=self._shared)
        close = difflib.get_close_matches(self.word, words, n=1, cutoff=0.7)
        return f"; did you mean {named(close[0])}?" if close else ""

    def _shared(self, word: str) -> int:
        """The number of leading and trailing characters that both words share."""
        return _common(self.word, word) + _common(self.word[::-1], word[::-1])


_NEAR_CHARS_MAX: Final = 64
_NEAR_WORDS_MAX: Final = 500
"""Words that are considered, and how many of these are compared in full."""
_COMPARED_MAX: Final = 10
_HINTS_MAX: Final = 20
"""Faults of one report for which a similar word is searched."""


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
    """The faults noted so far, and the places that they concern."""

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
        """Note a fault. With ``spoils``, ``clean`` is false for the place from now on."""
        self.noted.append(_Finding(path, message, line, near))
        if spoils:
            self.spoilt.add(path)

    def clean(self, path: Path) -> bool:
        """Whether no fault is noted for this place itself. Places inside it do not count."""
        return path not in self.spoilt

    def faults(self, lines: Mapping[Path, int] | None = None) -> tuple[Fault, ...]:
        """All noted faults in document order. ``lines`` holds every place in that order."""
        lines = lines or {}
        places = {path: place for place, path in enumerate(lines)}

        def rank(finding: _Finding) -> tuple[int, int]:
            return _line(finding, lines) or 0, places.get(_nearest(finding.path, places), 0)

        ordered = sorted(self.noted, key=rank)
        faults = []
        hints = 0
        for finding in ordered[:FAULTS_MAX]:
            # Only for the faults that are reported: searching similar names is slow.
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
    """The place itself or, if the document does not have it, the nearest place around it."""
    while path and path not in known:
        path = path[:-1]
    return path


# ── Words for messages ───────────────────────────────────────────────────────────────────────────

_PLAIN = re.compile(r"[A-Za-z_$][A-Za-z0-9_$-]*")
_SHOWN_CHARS_MAX: Final = 80


def shown(path: Path) -> str:
    """The path as text: ``steps.plan.needs[1]``, ``steps["a.b"].topic``."""
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
    """The text in double quotes, cut if it is long, with invisible characters escaped."""
    if len(text) > _SHOWN_CHARS_MAX:
        text = text[: _SHOWN_CHARS_MAX - 1] + "…"
    escaped = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else _escape(char) for char in escaped)


def _escape(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) <= _BMP_MAX else f"\\U{ord(char):08x}"


_BMP_MAX: Final = 0xFFFF


def named(word: str) -> str:
    """A name in single quotes; a name with other characters as ``quoted`` writes it."""
    return f"'{word}'" if _plain(word) else quoted(word)


def _plain(word: str) -> bool:
    return len(word) <= _SHOWN_CHARS_MAX and _PLAIN.fullmatch(word) is not None


def listed(words: Sequence[str], last: str = "or") -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def kind_of(value: JsonValue) -> str:
    """The type of a value for an error message, such as ``a list``."""
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
