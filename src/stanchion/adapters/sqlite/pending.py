"""Pending rows: what is to be written and is not yet, so that many are written by one statement.

With every statement that takes a while, its thread loses its turn of the interpreter and has to
wait for the next. So the writer collects rows, of all callers of a batch, and writes those of a
kind together. Whoever reads sees what was collected before, because it is written first. The
exception says so: a reader that knows whom it reads about asks whether anything is pending for
them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

__all__ = ["Pending"]

_AT_ONCE_MAX: Final = 64
"""Rows of one statement. There is one for each power of two, so that all stay prepared."""
_INSERT = re.compile(r"(INSERT INTO .+? VALUES )\(([:\w, ]+)\)(.*)")

_Row = tuple[object, ...]


class Pending:
    """Rows by the statement that writes them, and whom they are about."""

    def __init__(self, execute: Callable[[str, _Row], object]) -> None:
        self._execute = execute
        self._rows: dict[str, list[_Row]] = {}
        self._touched: Counter[Hashable] = Counter()
        self.known: dict[Hashable, Any] = {}
        """What was read and holds, with what is pending, until that is written."""

    def add(self, statement: str, values: Mapping[str, object]) -> None:
        """Write a row before anything is read. Rows of one statement stay in their order."""
        self._rows.setdefault(statement, []).append(_insert(statement).row(values))

    def touch(self, whom: Hashable) -> None:
        """What was added is about them."""
        self._touched[whom] += 1

    def touched(self, whom: Hashable) -> int:
        """How often something was added about them that is not written yet."""
        return self._touched[whom]

    def write(self) -> None:
        """Write all of it."""
        self.known.clear()
        if not self._rows:
            return
        rows, self._rows = self._rows, {}
        self._touched.clear()
        for statement, theirs in rows.items():
            insert, done = _insert(statement), 0
            while done < len(theirs):
                count = min(_AT_ONCE_MAX, 1 << (len(theirs) - done).bit_length() - 1)
                some = theirs[done : done + count]
                self._execute(insert.of(count), tuple(value for row in some for value in row))
                done += count

    def forget(self) -> None:
        """Write none of it."""
        self.known.clear()
        self._rows.clear()
        self._touched.clear()


class _Insert(NamedTuple):
    """A statement for one row with names in it, taken apart."""

    head: str
    places: str
    tail: str
    row: Callable[[Mapping[str, object]], _Row]
    """A row's values in their order."""

    @cache  # noqa: B019 - a few statements, there as long as the program
    def of(self, count: int) -> str:
        """The same for so many rows, with places in it."""
        return self.head + ", ".join([self.places] * count) + self.tail


@cache
def _insert(statement: str) -> _Insert:
    found = _INSERT.fullmatch(statement)
    assert found is not None, f"not an INSERT of one row: {statement}"
    names = [name.strip().removeprefix(":") for name in found[2].split(",")]
    places = f"({', '.join('?' * len(names))})"
    return _Insert(found[1], places, found[3], lambda values: tuple(values[name] for name in names))
