"""One connection to a file, rows that are pending to be written, and statements from files.

**Pending rows.** Each statement releases the GIL, and the thread waits to get it back. So the
writer collects the rows of all callers of a batch and writes those of one kind with one statement.
Pending rows are written before any read, so that it sees them; a read that concerns a known run,
job or key (``peek``) only checks that nothing is pending for it.

**Statements** are in SQL files. A file begins with its contract as comments; then each statement
has a name and a sentence:

    -- name: put_tenant
    -- Replaces a tenant's configuration.
    INSERT INTO ...

The text between two names is one statement.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import chain, count
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import apsw

from stanchion.core.lease import Moment
from stanchion.core.model import Instant
from stanchion.ports.clock import Clock
from stanchion.ports.errors import BackendCorrupt

Row: TypeAlias = tuple[Any, ...]


def file_at(path: str) -> tuple[int, int] | None:
    """The device and inode of the file; ``None`` if there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - at every commit; a Path would cost as much again
    except OSError:
        return None
    return found.st_dev, found.st_ino


_PERIOD_MS: Final = 5_000
_QUIET_CALLS: Final = 1_000
"""In a period. The loops of an idle replica alone make about 200 calls."""
_QUIET_CACHE_BYTES: Final = 4 * 1024 * 1024
CHECKPOINT_PAGES: Final = 4_000
"""Pages of the log, 16 MiB, that are not in the file yet, after which they are copied into it."""
_LOOK_PAGES: Final = 250
"""Pages written between two looks at the log."""


class Database:
    """Runs statements. Parameters are given by name.

    Used by one thread at a time. The writer handles transactions. Rows added with ``later`` are
    written before any other statement except ``peek``.
    """

    def __init__(self, connection: apsw.Connection, path: str, clock: Clock) -> None:
        self.connection = connection
        self.path = path
        self.pending = Pending(connection.execute)
        self.later = self.pending.add
        """Insert a row, at the end of the batch at the latest."""
        self._execute = connection.execute
        self._clock = clock
        self.now: Callable[[], Instant] = clock.now
        """The time of the store."""
        self._file = file_at(path)
        self.upcoming: deque[Callable[[Database], Any]] = deque()
        """The operations of the batch after the present one: it may read for them as well."""
        self._tickets = count(1)
        self._period_ends = Moment(clock.moment() + _PERIOD_MS)
        self._calls = 0
        """How many calls were served in the present period."""
        self.checkpoint: Callable[[], None] | None = None
        """Begins to copy the log into the file, on another thread, and does not wait for it."""
        self._log_pages = 0
        """How many pages were written since the last look at the log."""

    def served(self, calls: int) -> None:
        """Note a batch of calls: begin a checkpoint if the log has grown.

        After a quiet period, return the page cache to the system.

        A burst of load fills the cache. A server that has become quiet again does not need it, and
        should not keep its memory; what it reads next comes from the operating system's cache.
        """
        self._calls += calls
        if self.checkpoint is not None:
            written, _ = self.connection.status(apsw.SQLITE_DBSTATUS_CACHE_WRITE, reset=True)
            self._log_pages += written
            if self._log_pages >= _LOOK_PAGES:
                self._log_pages = 0
                in_log, copied = self.connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
                if in_log - copied >= CHECKPOINT_PAGES:
                    self.checkpoint()
        now = self._clock.moment()
        if now < self._period_ends:
            return
        if self._calls <= _QUIET_CALLS:
            used, _ = self.connection.status(apsw.SQLITE_DBSTATUS_CACHE_USED)
            if used > _QUIET_CACHE_BYTES:
                self.connection.release_memory()
        self._calls = 0
        self._period_ends = Moment(now + _PERIOD_MS)

    def check_in_place(self) -> None:
        """Raise ``BackendCorrupt`` if the path no longer refers to the open file.

        The file was removed or replaced. Further writes go to a file without a name, and are lost
        with this process: they must not be acknowledged.
        """
        if file_at(self.path) != self._file:
            raise BackendCorrupt(
                f"{self.path}: removed or replaced while in use. Stop this process, put the file"
                " back, and start again"
            )

    def ticket(self) -> int:
        """A number above all earlier ones that are in the file."""
        return next(self._tickets)

    def tickets(self, number: int) -> int:
        """The first of so many consecutive tickets."""
        first = next(self._tickets)
        self._tickets = count(first + number)
        return first

    def draw_tickets_above(self, highest: int) -> None:
        """Continue above the tickets of earlier processes."""
        self._tickets = count(highest + 1)

    def first(self, statement: str, **values: object) -> Row | None:
        """The first row, if there is one."""
        self.pending.write()
        return self.peek(statement, **values)

    def peek(self, statement: str, **values: object) -> Row | None:
        """Like ``first``, without writing pending rows: they must not affect the result."""
        row: Row | None = None
        # Read to the end even for one row: else the statement stays open.
        for found in self._execute(statement, values):
            row = found if row is None else row
        return row

    def every(self, statement: str, **values: object) -> list[Row]:
        """All rows."""
        self.pending.write()
        return self.peek_every(statement, **values)

    def peek_every(self, statement: str, **values: object) -> list[Row]:
        """Like ``every``, without writing pending rows: they must not affect the result."""
        return self._execute(statement, values).fetchall()

    def run(self, statement: str, **values: object) -> None:
        """Run a statement that writes."""
        self.pending.write()
        self._execute(statement, values)

    def settle(self, *whom: Hashable) -> None:
        """Write the pending rows if one of them concerns any of ``whom``."""
        if self.pending.touches(whom):
            self.pending.write()

    def changed(self, statement: str, **values: object) -> int:
        """Run a statement that writes; returns the number of rows."""
        self.pending.write()
        self._execute(statement, values)
        return self.connection.changes()

    def insert(self, statement: str, rows: Sequence[Row]) -> None:
        """Insert rows at once. Each has the values of the statement in its order."""
        self.pending.write()
        _insert_rows(self._execute, statement, rows, at_once=_STAGED_AT_ONCE)

    def run_each(self, statement: str, rows: Iterable[Mapping[str, object]]) -> None:
        """Run a statement that writes once for each row of values."""
        self.pending.write()
        self.connection.executemany(statement, rows)


_AT_ONCE_MAX: Final = 100
"""Rows of one statement. Lower counts are powers of two, so that all statements stay prepared."""
_STAGED_AT_ONCE: Final = (400, 200, _AT_ONCE_MAX)
"""The same for ``insert``: each statement makes the thread wait for the interpreter again. The text
of the longest must stay below 16 KiB, or it is compiled each time."""
_INSERT = re.compile(r"(INSERT INTO .+? VALUES )\(([:\w, ]+)\)(.*)")

_Row = tuple[object, ...]


class Pending:
    """Rows by the statement that writes them, and what they concern."""

    def __init__(self, execute: Callable[[str, _Row], object]) -> None:
        self._execute = execute
        self._rows: dict[str, list[_Row]] = {}
        self._touched: dict[Hashable, int] = {}  # not a Counter: it takes longer to say 0
        self.known: dict[Hashable, Any] = {}
        """Values read from the file, valid until the pending rows are written."""

    def add(self, statement: str, **values: object) -> None:
        """Add a row. Rows of one statement keep their order; those of another may come first."""
        self._rows.setdefault(statement, []).append(_insert(statement).row(values))

    def touch(self, whom: Hashable) -> None:
        """Record that a pending row concerns ``whom``."""
        self._touched[whom] = self._touched.get(whom, 0) + 1

    def touched(self, whom: Hashable) -> int:
        """The number of pending rows that concern ``whom``."""
        return self._touched.get(whom, 0)

    def touches(self, whom: Iterable[Hashable]) -> bool:
        """Whether a pending row concerns any of them."""
        return not self._touched.keys().isdisjoint(whom)

    def write(self) -> None:
        """Write all pending rows."""
        self.known.clear()
        if not self._rows:
            return
        rows, self._rows = self._rows, {}
        self._touched.clear()
        for statement, theirs in rows.items():
            _insert_rows(self._execute, statement, theirs)

    def forget(self) -> None:
        """Drop all pending rows."""
        self.known.clear()
        self._rows.clear()
        self._touched.clear()


def _insert_rows(
    execute: Callable[[str, _Row], object],
    statement: str,
    rows: Sequence[_Row],
    at_once: Sequence[int] = (_AT_ONCE_MAX,),
) -> None:
    insert, done = _insert(statement), 0
    while done < len(rows):
        left = len(rows) - done
        count = next((most for most in at_once if left >= most), 1 << left.bit_length() - 1)
        execute(insert.of(count), tuple(chain.from_iterable(rows[done : done + count])))
        done += count


class _Insert(NamedTuple):
    """A statement that inserts one row, split into its parts."""

    head: str
    places: str
    tail: str
    row: Callable[[Mapping[str, object]], _Row]
    """The values of a row in the order of the statement."""

    @cache  # noqa: B019 - a few statements, there as long as the program
    def of(self, count: int) -> str:
        """The statement for ``count`` rows, with positional parameters."""
        return self.head + ",".join([self.places] * count) + self.tail


@cache
def _insert(statement: str) -> _Insert:
    found = _INSERT.fullmatch(statement)
    assert found is not None, f"not an INSERT of one row: {statement}"
    names = [name.strip().removeprefix(":") for name in found[2].split(",")]
    places = f"({','.join('?' * len(names))})"
    # Of a single name ``itemgetter`` gives no tuple.
    row = itemgetter(*names) if len(names) > 1 else lambda values: (values[names[0]],)
    return _Insert(found[1], places, found[3], row)


_PART: Final = re.compile(r"<(part \w+)>")
_NAME: Final = "-- name:"


def read_statements(package: str, *path: str) -> Mapping[str, str]:
    """The statements of a file, or of all files of a folder, in a package, by name.

    ``<part NAME>`` in a statement stands for the text that is called ``part NAME``.
    """
    where = files(package).joinpath(*path)
    statements: dict[str, str] = {}
    for file in sorted(where.iterdir(), key=lambda file: file.name) if where.is_dir() else [where]:
        _, *parts = f"\n{file.read_text('utf-8')}".split(f"\n{_NAME}")
        for part in parts:
            name, _, body = part.partition("\n")
            assert name.strip() not in statements, f"two statements are called {name.strip()}"
            lines = (line for line in body.splitlines() if not line.lstrip().startswith("--"))
            statements[name.strip()] = " ".join(" ".join(lines).split())
    shared = {name: text for name, text in statements.items() if name.startswith("part ")}
    return MappingProxyType(
        {
            name: _PART.sub(lambda found: shared[found[1]], text)
            for name, text in statements.items()
            if name not in shared
        }
    )
