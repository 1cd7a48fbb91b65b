"""One connection to the store's file, and what every operation on it needs."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping
from itertools import count
from typing import Any, TypeAlias

import apsw

from stanchion.adapters.sqlite.pending import Pending
from stanchion.core.model import Instant
from stanchion.ports.clock import Clock
from stanchion.ports.errors import BackendCorrupt

__all__ = ["Database", "Row"]

Row: TypeAlias = tuple[Any, ...]


def _file_at(path: str) -> tuple[int, int] | None:
    """Which file that is, whatever its name; ``None`` if there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - at every commit; a Path would cost as much again
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Database:
    """Runs statements. Parameters are given by name, as the statement has them.

    It belongs to one thread at a time, and knows nothing of transactions: those are the writer's.
    What was asked for ``later`` is written before any other statement but ``peek``.
    """

    def __init__(self, connection: apsw.Connection, path: str, clock: Clock) -> None:
        self.connection = connection
        self.path = path
        self.pending = Pending(connection.execute)
        self._execute = connection.execute
        self._clock = clock
        self._file = _file_at(path)
        self._tickets = count(1)

    def check_in_place(self) -> None:
        """Raise ``BackendCorrupt`` if the file's name does not lead to the file any more.

        Somebody removed or replaced it. What is written then reaches a file without a name, and is
        gone with this process: nothing of it may be acknowledged.
        """
        if _file_at(self.path) != self._file:
            raise BackendCorrupt(
                f"{self.path}: removed or replaced while in use. Stop this process, put the file"
                " back, and start again"
            )

    def now(self) -> Instant:
        """The store's time."""
        return self._clock.now()

    def ticket(self) -> int:
        """A number above all that were drawn before and are still in the file."""
        return next(self._tickets)

    def draw_tickets_above(self, highest: int) -> None:
        """Begin above what a former process has drawn."""
        self._tickets = count(highest + 1)

    def first(self, statement: str, **values: object) -> Row | None:
        """The first row, if there is one."""
        self.pending.write()
        return self.peek(statement, **values)

    def peek(self, statement: str, **values: object) -> Row | None:
        """As ``first``, for what nothing that is pending bears on."""
        row: Row | None = None
        # To the end, also when one row was expected: a statement left half-way stays open.
        for found in self._execute(statement, values):
            row = found if row is None else row
        return row

    def every(self, statement: str, **values: object) -> list[Row]:
        """All rows."""
        self.pending.write()
        return self.peek_every(statement, **values)

    def peek_every(self, statement: str, **values: object) -> list[Row]:
        """As ``every``, for what nothing that is pending bears on."""
        return self._execute(statement, values).fetchall()

    def run(self, statement: str, **values: object) -> None:
        """Change something."""
        self.pending.write()
        self._execute(statement, values)

    def later(self, statement: str, **values: object) -> None:
        """Insert a row, at the latest at the end of the batch."""
        self.pending.add(statement, values)

    def settle(self, *whom: Hashable) -> None:
        """Have everything written that bears on them, before they are looked at."""
        if any(map(self.pending.touched, whom)):
            self.pending.write()

    def changed(self, statement: str, **values: object) -> int:
        """Change something; how many rows."""
        self.pending.write()
        self._execute(statement, values)
        return self.connection.changes()

    def run_each(self, statement: str, rows: Iterable[Mapping[str, object]]) -> None:
        """Change something once for each row of values."""
        self.pending.write()
        self.connection.executemany(statement, rows)
