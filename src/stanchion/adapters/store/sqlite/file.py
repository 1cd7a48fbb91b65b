"""The file of the store, used by one process at a time.

The claim is a lock on a second file, ``<path>.lock``, which exists while the store is open. The
operating system releases the lock when the process ends for any reason. Only the lock counts: a
lock file that a killed process left behind is not a claim.
"""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import closing, suppress
from importlib.resources import files
from pathlib import Path
from typing import Final

import apsw

from stanchion.adapters.sqlite.database import Database, file_at
from stanchion.adapters.sqlite.opening import (
    MEMORY,
    check_place,
    open_for_checkpoints,
    open_for_reading,
    open_for_writing,
    read_schema,
    translated_sqlite_errors,
)
from stanchion.adapters.store.sqlite.codec import SQL
from stanchion.ports.clock import Clock
from stanchion.ports.errors import BackendRefused

_SCHEMA: Final = read_schema(b"STCN", __package__, "migrations")
_TOGETHER: Final = files(__package__).joinpath("sql", "together.sql").read_text("utf-8")
_BUSY_MS: Final = 2_000
"""No other process writes, but a backup may lock the file for a moment."""


class Claim:
    """The exclusive right of this process to use a file."""

    def __init__(self, path: str) -> None:
        """Take the claim. Raises ``BackendRefused`` with the id of the process that has it."""
        self._path = f"{path}.lock"
        try:
            self._lock = self._take()
        except BlockingIOError as error:
            raise BackendRefused(
                f"{path}: in use by process {self._holder()}. One process serves a file: stop that"
                " one, or give another path"
            ) from error
        except OSError as error:
            raise BackendRefused(
                f"{self._path}: cannot be written ({error.strerror}). Give a path in a directory"
                " that is there and that this process may write to"
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def let_go(self) -> None:
        Path(self._path).unlink(missing_ok=True)
        os.close(self._lock)

    def _take(self) -> int:
        while True:
            lock = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_there(lock):
                    return lock
            except BaseException:
                os.close(lock)
                raise
            # The last holder removed the file meanwhile: this lock is on a file without a name.
            os.close(lock)

    def _is_there(self, lock: int) -> bool:
        try:
            return os.path.samestat(os.fstat(lock), os.stat(self._path))  # noqa: PTH116 - a pair
        except FileNotFoundError:
            return False

    def _holder(self) -> str:
        try:
            return Path(self._path).read_text("ascii").strip() or "unknown"
        except (OSError, ValueError):
            return "unknown"


class Checkpointer:
    """Copies the log of a file into the file, in a thread, while the writer goes on.

    On the writer's thread, a checkpoint of 16 MiB delays every write by 20 to 50 ms. The writer
    copies only what was written meanwhile (``wal_autocheckpoint``). A failure is not reported: the
    writer will meet it as well.
    """

    def __init__(self, path: str) -> None:
        """The file must be open."""
        self._path = path
        self._file = file_at(path)
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Have the log copied, unless that is under way, and do not wait for it."""
        if self._thread is None or not self._thread.is_alive():
            name = f"{self._path} (checkpoint)"
            self._thread = threading.Thread(target=self._copy, name=name, daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait for the checkpoint that is under way."""
        if self._thread is not None:
            self._thread.join()

    def _copy(self) -> None:
        with suppress(apsw.Error):
            # Of a file that was replaced, the log beside it is not its own.
            if file_at(self._path) != self._file:
                return
            with closing(open_for_checkpoints(self._path)) as connection:
                if file_at(self._path) == self._file:
                    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)


class WriterDatabase(Database):
    """The database of the writer, with its claim."""

    claim: Claim | None = None
    checkpointer: Checkpointer | None = None
    own_lock: int | None = None
    """A lock on the database file itself, in case the lock file is removed."""


def open_writer(path: str, clock: Clock) -> Database:
    """Claim the file, and open it for writing. See ``opening.open_for_writing``."""
    check_place(path)
    claim = None if path == MEMORY else Claim(path)
    try:
        connection = open_for_writing(path, _SCHEMA, sync="FULL", busy_ms=_BUSY_MS)
    except BaseException:
        if claim is not None:
            claim.let_go()
        raise
    db = WriterDatabase(connection, path, clock)
    db.claim = claim
    try:
        db.own_lock = None if path == MEMORY else _lock_itself(path)
        with translated_sqlite_errors(path):
            connection.execute(_TOGETHER).fetchall()
            found = db.first(SQL["highest_ticket"])
    except BaseException:
        shut(db)
        raise
    assert found is not None
    db.draw_tickets_above(found[0])
    if path != MEMORY:
        db.checkpointer = Checkpointer(path)
        db.checkpoint = db.checkpointer.begin
    return db


def open_reader(path: str, clock: Clock) -> Database:
    """Open the file for reading. A read sees all writes that were acknowledged before it."""
    return Database(open_for_reading(path, busy_ms=_BUSY_MS), path, clock)


def shut(db: Database) -> None:
    """Checkpoint the log into the file, close it, and release the claim."""
    if isinstance(db, WriterDatabase) and db.checkpointer is not None:
        db.checkpointer.join()
    try:
        # Blocked by a backup, for example. Nothing is lost: the next open reads the log.
        with suppress(apsw.Error):
            db.connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        with translated_sqlite_errors(db.path):
            db.connection.close()
    finally:
        if isinstance(db, WriterDatabase):
            # Not earlier: closing the file drops every lock that SQLite has on it.
            if db.own_lock is not None:
                os.close(db.own_lock)
            if db.claim is not None:
                db.claim.let_go()


def _lock_itself(path: str) -> int:
    """Lock the file with ``flock``, which does not interfere with the locks of SQLite."""
    lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise BackendRefused(
            f"{path}: in use by another process, under this name or another one. One process"
            " serves a file: stop that one, or give another path"
        ) from error
    return lock
