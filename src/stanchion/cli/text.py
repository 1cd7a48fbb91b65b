"""Text: values as lines and tables for people, or as YAML.

Text from a server is untrusted: control characters are escaped before they reach the terminal.
"""

from __future__ import annotations

import json
import re
import shutil
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Self, TypeAlias

import click

IDENT_CHARS: Final = 8
"""Characters of an id that are shown on a narrow terminal."""
_LAST_CHARS: Final = 20
"""Characters that the last column gets before others are cut."""
_LAST_CHARS_RARE: Final = 10
"""The same if most rows have nothing there."""
_COLUMN_CHARS_MIN: Final = 9
_SHORTENED: Final = "(shortened to fit; a wider terminal or -o json shows all)"

COLORS: Final[Mapping[str, str]] = {
    "succeeded": "green",
    "running": "cyan",
    "waiting": "yellow",
    "queued": "yellow",
    "failed": "red",
    "timed_out": "red",
    "cancelled": "magenta",
    "dead": "red",
    "ok": "green",
}


def printable(text: str) -> str:
    """The text with characters that cannot be printed escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _written(char) for char in text)


def _written(char: str) -> str:
    return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(char, f"\\u{ord(char):04x}")


def cell(value: object) -> str:
    """One value on one line; ``None`` is a dash."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return printable(value)
    return printable(json.dumps(value, ensure_ascii=False))


def excerpt(value: str | None) -> str:
    """A text that may be long: as much of it as fits into a line, also into a pipe."""
    width = shutil.get_terminal_size().columns
    whole = cell(value)
    return whole if cells_of(whole) <= width else cut(whole, width)


_COMMAND: Final = r"stanchion(?: [^\s;,()]+)+"
_JOINT: Final = "\0"
"""Marks a space at which a line must not end."""


def sentence(text: str, indent: str = "") -> str:
    """Text in lines that fit the terminal; all but the first begin with ``indent``.

    A command that it contains stays on one line, so that it can be copied.
    """
    room = shutil.get_terminal_size(fallback=(0, 0)).columns
    if not 0 < room < cells_of(text):
        return text
    joined = re.sub(_COMMAND, lambda command: command[0].replace(" ", _JOINT), text)
    lines = wrapped(
        joined, room, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace(_JOINT, " ")


# ── Widths: a Chinese character takes two cells of a terminal, a combining accent none ───────────


def cells_of(text: str) -> int:
    """How many cells of a terminal the text takes."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(char: str) -> int:
    if unicodedata.east_asian_width(char) in "WF":
        return 2
    return 0 if unicodedata.category(char) in {"Mn", "Me"} else 1


def cut(text: str, cells: int) -> str:
    """The beginning of a text that is too long, with an ellipsis, in so many cells."""
    if text.isascii():
        return text[: cells - 1] + "…"
    taken = 0
    for place, char in enumerate(text):
        taken += _cells(char)
        if taken > cells - 1:
            return text[:place] + "…"
    return text + "…"


_SECOND: Final = "\x01"
"""Stands for the second cell of a wide character while lines are broken. Texts have been made
printable before, so they do not have it."""


def wrapped(text: str, cells: int, **options: Any) -> list[str]:  # noqa: ANN401 - those of textwrap
    """The text in lines of at most so many cells; ``options`` are those of ``textwrap.wrap``."""
    if text.isascii():
        return textwrap.wrap(text, cells, **options)
    doubled = "".join(char + _SECOND if _cells(char) > 1 else char for char in text)
    if doubled == text:
        return textwrap.wrap(text, cells, **options)
    # One cell less, because a line may end between the halves of a character.
    lines = textwrap.wrap(doubled, max(2, cells - 1), **options)
    return [line.replace(_SECOND, "") for line in lines]


class FlexibleCell(str):
    """A cell with a shorter form, for terminals that are too narrow for the whole one."""

    __slots__ = ("short",)
    short: str

    def __new__(cls, whole: str, short: str) -> Self:
        made = super().__new__(cls, whole)
        made.short = short
        return made


class WholeCell(str):
    """A cell that is shown whole on every terminal."""

    __slots__ = ()


class VersionedCell(str):
    """A name and its version, ``name@3``: if it is cut, the version is kept."""

    __slots__ = ()

    def cut(self, width: int) -> str:
        """As much of the name as fits, and the version."""
        name, _, version = self.rpartition("@")
        return f"{cut(name, max(2, width - len(version) - 1))}@{version}"


class SpareHeading(str):
    """The heading of a column that a narrow terminal leaves out, the highest rank first."""

    __slots__ = ("rank",)
    rank: int

    def __new__(cls, name: str, rank: int = 1) -> Self:
        made = super().__new__(cls, name)
        made.rank = rank
        return made


class _IdentCell(FlexibleCell):
    """An id: shortened after times, and if leaving spare columns out is not enough."""

    __slots__ = ()


def ident(value: str | None) -> str:
    """An id. A narrow terminal shows its end, because ids differ there."""
    whole = cell(value)
    is_long = len(whole) > IDENT_CHARS + 1
    return _IdentCell(whole, f"…{whole[-IDENT_CHARS:]}") if is_long else whole


def whole_ident(value: str | None) -> str:
    """An id that other commands take: every terminal shows it whole, so that it can be copied."""
    return WholeCell(cell(value))


def clock(value: str | None) -> str:
    """A time in UTC, to the second. A narrow terminal shows the year only of another year."""
    if value is None:
        return "-"
    first = 5 if value[:4] == this_year() else 0
    return FlexibleCell(
        printable(value[:19].replace("T", " ") + "Z"), printable(value[first:16].replace("T", " "))
    )


def whole_clock(value: str | None) -> str:
    """A time that every terminal shows to the second: the rows may differ by it alone."""
    return WholeCell(clock(value))


def this_year() -> str:
    """The year now, in UTC."""
    return str(datetime.now(UTC).year)


def clock_ms(value: str) -> str:
    """A time to the millisecond. The server omits the fraction of a whole second."""
    fraction = value[20:23] if value[19:20] == "." else ""
    time = printable(f"{value[11:19]}.{fraction:0<3}")
    return FlexibleCell(f"{printable(value[:10])} {time}Z", time)


def table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, wraps: bool = False
) -> list[str]:
    """Columns with headers; states in colour.

    If they are wider than the terminal, or than ``COLUMNS`` says, times are shortened, then spare
    columns left out, then ids shortened, then the widest columns cut, until the last one (an error,
    a detail) is readable. With ``wraps`` the last column is not cut but goes on in the next line;
    words of at most 20 characters are not broken.
    A remark says if something was cut or left out; short times are no loss.
    """
    body = [list(row) for row in rows]
    room = shutil.get_terminal_size(fallback=(0, 0)).columns
    widths = _widths(headers, body)
    is_cut = False
    if 0 < room < _total(widths):
        heads, body, is_cut = _narrowed(headers, body, room, wraps=wraps)
        before = _widths(heads, body)
        widths = _fitted(before, body, room, wraps=wraps)
        headers = heads
        is_cut |= widths[:-1] != before[:-1] or (widths != before and not wraps)
    lines = [
        click.style(_line(headers, widths), bold=True),
        *(line for row in body for line in _lines(row, widths, wraps=wraps)),
    ]
    if is_cut:
        lines.append(click.style(_SHORTENED, dim=True))
    return lines


Column: TypeAlias = str | tuple[str, Callable[[Any], str]] | Callable[[Any], str]
"""What a column shows: a member of the row, a member in a form of its own, or text of the row."""


def rows_of(
    rows: Iterable[Mapping[str, Any]], columns: Mapping[str, Column], *, wraps: bool = False
) -> list[str]:
    """A table of documents, its columns by heading; nothing without rows."""
    shown = [[_shown(row, column) for column in columns.values()] for row in rows]
    return table(tuple(columns), shown, wraps=wraps) if shown else []


def _shown(row: Mapping[str, Any], column: Column) -> str:
    match column:
        case str():
            return cell(row[column])
        case (member, form):
            return form(row[member])
        case _:
            return column(row)


def _narrowed(
    headers: Sequence[str], body: list[list[str]], room: int, *, wraps: bool
) -> tuple[list[str], list[list[str]], bool]:
    """With short times, then without spare columns, then with short ids, until it fits.

    With short ids, only the spare columns for which there is still no room are left out. Returns
    headers and rows, and whether something is missing: ids are short or columns left out.
    """
    rows = [_shortened(row) for row in (headers, *body)]
    with_ids = _without_spare(rows, room, wraps=wraps)
    if _has_room(with_ids, room, wraps=wraps) or not any(
        isinstance(each, _IdentCell) for row in rows for each in row
    ):
        return with_ids[0], with_ids[1:], len(with_ids[0]) < len(headers)
    short = _without_spare([_shortened(row, ids=True) for row in rows], room, wraps=wraps)
    return short[0], short[1:], True


def _without_spare(rows: list[list[str]], room: int, *, wraps: bool) -> list[list[str]]:
    """The rows, the first of which has the headings, without as many spare columns as needed."""
    while not _has_room(rows, room, wraps=wraps):
        spare = [each for each in rows[0] if isinstance(each, SpareHeading)]
        if not spare:
            break
        at = rows[0].index(max(spare, key=lambda each: each.rank))
        rows = [[*row[:at], *row[at + 1 :]] for row in rows]
    return rows


def _has_room(rows: Sequence[Sequence[str]], room: int, *, wraps: bool) -> bool:
    """Whether the last column is readable if no other is cut."""
    *first, last = _widths(rows[0], rows[1:])
    return _total([*first, _enough(last, rows[1:], wraps=wraps)]) <= room


def _enough(last: int, body: Sequence[Sequence[str]], *, wraps: bool) -> int:
    """The width with which the last column is readable."""
    cells = [row[-1] for row in body]
    if any(isinstance(each, WholeCell | _IdentCell) for each in cells):
        return last
    is_rare = 2 * sum(each not in {"-", ""} for each in cells) < len(cells)
    if is_rare and wraps:
        longest = max((cells_of(word) for each in cells for word in each.split()), default=0)
        return min(last, _LAST_CHARS, max(_LAST_CHARS_RARE, longest))
    return min(last, _LAST_CHARS_RARE if is_rare else _LAST_CHARS)


def _shortened(cells: Sequence[str], *, ids: bool = False) -> list[str]:
    """Short forms of times and, with ``ids``, of ids; they are not cut further."""
    return [
        WholeCell(each.short)
        if isinstance(each, FlexibleCell) and (ids or not isinstance(each, _IdentCell))
        else each
        for each in cells
    ]


def _whole(body: Sequence[Sequence[str]]) -> list[bool]:
    """Which columns must not be cut."""
    columns = zip(*body, strict=True)
    return [any(isinstance(each, WholeCell) for each in column) for column in columns]


def _widths(headers: Sequence[str], body: Iterable[Sequence[str]]) -> list[int]:
    return [max(map(cells_of, column)) for column in zip(headers, *body, strict=True)]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _fitted(
    widths: list[int], body: Sequence[Sequence[str]], room: int, *, wraps: bool
) -> list[int]:
    """Narrow the widest columns that may be cut until the last one has enough, then the last."""
    *first, last = widths
    enough, is_whole = _enough(last, body, wraps=wraps), _whole(body)
    while _total([*first, enough]) > room:
        long = [
            at for at, width in enumerate(first) if width > _COLUMN_CHARS_MIN and not is_whole[at]
        ]
        if not long:
            break
        first[max(long, key=first.__getitem__)] -= 1
    least = last if is_whole and is_whole[-1] else 1
    return [*first, max(least, min(last, room - _total([*first, 0])))]


def _lines(cells: Sequence[str], widths: Sequence[int], *, wraps: bool) -> Iterator[str]:
    """A row; with ``wraps``, on as many lines as its last cell needs."""
    *first, last = cells
    parts = wrapped(last, max(_LAST_CHARS // 2, widths[-1])) if wraps else [last]
    yield _line([*first, parts[0] if parts else ""], widths, COLORS)
    for part in parts[1:]:
        yield " " * (_total(widths) - widths[-1]) + part


def _line(
    cells: Sequence[str], widths: Sequence[int], colors: Mapping[str, str] | None = None
) -> str:
    shown = []
    for text, width in zip(cells, widths, strict=True):
        fits = text if cells_of(text) <= width else _cut(text, width)
        color = (colors or {}).get(text)
        padding = " " * (width - cells_of(fits))
        shown.append((click.style(fits, fg=color) if color else fits) + padding)
    return "  ".join(shown).rstrip()


def _cut(text: str, width: int) -> str:
    return text.cut(width) if isinstance(text, VersionedCell) else cut(text, width)


def pairs(items: Iterable[tuple[str, str]]) -> list[str]:
    """Names and values, one pair per line; pairs without a value are left out."""
    kept = [(name, value) for name, value in items if value != "-"]
    width = max((len(name) for name, _ in kept), default=0)
    return [f"{name:{width}}  {_paired(value, width + 2)}" for name, value in kept]


def _paired(value: str, indent: int) -> str:
    """A value beside its name: a state in colour, a sentence in lines below each other."""
    if value in COLORS:
        return click.style(value, fg=COLORS[value])
    room = shutil.get_terminal_size(fallback=(0, 0)).columns - indent
    longest = max((len(word) for word in value.split() if word.isascii()), default=0)
    if cells_of(value) <= room or longest > room:
        return value  # It fits, or it has a word like a key, which the terminal must wrap.
    return "\n".join(
        (" " * indent if number else "") + line
        for number, line in enumerate(wrapped(value, room, break_on_hyphens=False))
    )


def lines_of(document: Any) -> list[str]:  # noqa: ANN401 - any JSON value
    """A JSON value, indented."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    return [printable(line) for line in text.split("\n")]


# ── YAML ─────────────────────────────────────────────────────────────────────────────────────────

_PLAIN: Final = r"[A-Za-z_][A-Za-z0-9_./-]*(?: [A-Za-z0-9_./-]+)*"
_RESERVED: Final = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
"""Words that some YAML parsers do not read as text."""
_KEY_CHARS_MAX: Final = 1000
"""YAML allows 1,024 characters for a key that is followed by a colon on its line."""


def yaml_lines(document: Any) -> Iterator[str]:  # noqa: ANN401 - any JSON value
    """A JSON value as YAML that every parser reads as the same value.

    Written without a YAML package, which the command line does not depend on. Text that another
    type could be read from is in double quotes, with unprintable characters escaped.
    """
    match document:
        case dict() if document:
            for name, value in document.items():
                yield from _yaml_member(_yaml_scalar(name), value)
        case list() if not _is_flow(document):
            for value in document:
                first, *rest = yaml_lines(value)
                yield f"- {first}"
                yield from (f"  {line}" for line in rest)
        case _:
            yield _yaml_flow(document)


def _yaml_member(name: str, value: object) -> Iterator[str]:
    if len(name) > _KEY_CHARS_MAX:
        yield f"? {name}"
        name = ""
    if _is_flow(value):
        yield f"{name}: {_yaml_flow(value)}"
    else:
        yield f"{name}:"
        yield from (f"  {line}" for line in yaml_lines(value))


def _is_flow(value: object) -> bool:
    """Whether the value is written on one line: not an object, nor a list with one inside."""
    if isinstance(value, list):
        return not any(isinstance(each, dict | list) for each in value)
    return not (isinstance(value, dict) and value)


def _yaml_flow(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml_scalar, value))}]"
    return _yaml_scalar(value)


def _yaml_scalar(value: object) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    if re.fullmatch(_PLAIN, value) and value.lower() not in _RESERVED:
        return value
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() else _yaml_escape(char) for char in quoted)


def _yaml_escape(char: str) -> str:
    code = ord(char)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"  # noqa: PLR2004 - as YAML does
