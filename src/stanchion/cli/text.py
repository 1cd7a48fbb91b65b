"""Text: how values look to a person.

Everything that comes from a server may hold what a stranger wrote: it is made printable before it
reaches the terminal.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import click

__all__ = ["cell", "clock", "clock_ms", "lines_of", "pairs", "printable", "table"]

_COLORS: Final[Mapping[str, str]] = {
    "succeeded": "green",
    "running": "cyan",
    "waiting": "yellow",
    "failed": "red",
    "timed_out": "red",
    "cancelled": "magenta",
    "dead": "red",
    "ok": "green",
}


def printable(text: str) -> str:
    """The text, with everything that is no plain character written out."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _written(char) for char in text)


def _written(char: str) -> str:
    return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(char, f"\\u{ord(char):04x}")


def cell(value: object) -> str:
    """One value on one line. Nothing is a dash."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return printable(value)
    return printable(json.dumps(value, ensure_ascii=False))


def clock(value: str | None) -> str:
    """A time to the second, in UTC as the server said it."""
    if value is None:
        return "-"
    return printable(value[:19].replace("T", " ") + "Z")


def clock_ms(value: str) -> str:
    """A time to the millisecond. A whole second comes without its fraction."""
    fraction = value[20:23] if value[19:20] == "." else ""
    return printable(f"{value[:19].replace('T', ' ')}.{fraction:0<3}Z")


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns under their names; states in colour. Cut at the right edge of a terminal."""
    body = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *body, strict=True)]
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    heading = _line(headers, widths, room)
    return [click.style(heading, bold=True), *(_line(row, widths, room, _COLORS) for row in body)]


def _line(
    cells: Sequence[str],
    widths: Sequence[int],
    room: int | None,
    colors: Mapping[str, str] | None = None,
) -> str:
    left = len("  ".join(" " * width for width in widths)) if room is None else room
    shown = []
    for text, width in zip(cells, widths, strict=True):
        cut = text if len(text) <= left else text[: max(left - 1, 0)] + "…" * (left > 0)
        color = (colors or {}).get(text)
        padding = " " * max(min(width, left) - len(cut), 0)
        shown.append((click.style(cut, fg=color) if color else cut) + padding)
        left = max(left - width - 2, 0)
    return "  ".join(shown).rstrip()


def pairs(items: Iterable[tuple[str, str]]) -> list[str]:
    """Names and values, one a line; lines without a value are left out."""
    kept = [(name, value) for name, value in items if value != "-"]
    width = max((len(name) for name, _ in kept), default=0)
    return [
        f"{name:{width}}  {click.style(value, fg=_COLORS[value]) if value in _COLORS else value}"
        for name, value in kept
    ]


def lines_of(document: Any) -> list[str]:  # noqa: ANN401 - any JSON value
    """A JSON value as a person reads it."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    return [printable(line) for line in text.split("\n")]
