"""Opening a file: it must be ours and sound before anything is written to it. Schema and errors.

A file says which program it belongs to (``application_id``) and how new its schema is
(``user_version``). Migrations are numbered SQL files; those that a file has not seen run in one
transaction. There is no way back: a file that a newer Stanchion has migrated is refused.

SQLite's errors are translated into those of the ports here, and nowhere else.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Final, Literal, TypeAlias

import apsw
import msgspec

from stanchion.ports.errors import (
    BackendCorrupt,
    BackendError,
    BackendRefused,
    BackendTimeout,
    BackendUnavailable,
)

__all__ = [
    "MEMORY",
    "Schema",
    "Sync",
    "bring_up_to_date",
    "check_ours",
    "check_place",
    "open_for_reading",
    "open_for_writing",
    "read_schema",
    "resolved",
    "translated",
    "translated_sqlite_errors",
]

MEMORY: Final = ":memory:"
"""A path for what nobody keeps."""

Sync: TypeAlias = Literal["FULL", "NORMAL"]
"""When a commit returns, it has reached the disk; or the operating system, which will see to it."""

_SOUND_SINCE: Final = (3, 51, 3)
"""Before it, a checkpoint by one connection could reset the log under another."""
_HEADER_BYTES: Final = 100
_STATEMENTS_KEPT: Final = 256
"""Prepared once, used for ever: more than there are."""
_PRAGMAS: Final = (
    "PRAGMA cache_size = -32768",
    "PRAGMA temp_store = MEMORY",
    "PRAGMA cell_size_check = ON",
    "PRAGMA trusted_schema = OFF",
)
_LOG_PRAGMAS: Final = (
    # What macOS calls a sync that reaches the disk.
    "PRAGMA fullfsync = ON",
    # 16 MiB of log between checkpoints: fewer pauses than by default, and less written twice.
    "PRAGMA wal_autocheckpoint = 4000",
    "PRAGMA journal_size_limit = 67108864",
)


def resolved(path: str | os.PathLike[str]) -> str:
    """The file's one name: under another one it is still the same file."""
    name = os.fspath(path)
    if name == MEMORY:
        return name
    try:
        return str(Path(name).resolve())
    except (OSError, RuntimeError) as error:
        raise BackendRefused(f"{name}: cannot be found ({error})") from error


def open_for_writing(path: str, schema: Schema, *, sync: Sync, busy_ms: int) -> apsw.Connection:
    """A connection to a file that is there, ours and up to date afterwards.

    Raises ``BackendRefused`` if that cannot be, and leaves what is there as it was.
    """
    _check_library()
    check_place(path)
    try:
        with translated_sqlite_errors(path):
            connection = apsw.Connection(path, statementcachesize=_STATEMENTS_KEPT)
    except BackendError as error:
        raise BackendRefused(f"{path}: cannot be opened ({error.__cause__})") from error
    try:
        with translated_sqlite_errors(path):
            _prepare(connection, path, schema, sync, busy_ms)
    except BackendCorrupt as error:
        connection.close()
        raise BackendRefused(f"{path}: damaged, or not a SQLite database ({error})") from error
    except BaseException:
        connection.close()
        raise
    return connection


def open_for_reading(path: str, *, busy_ms: int) -> apsw.Connection:
    """One more connection to a file that is open for writing. It cannot write."""
    with translated_sqlite_errors(path):
        connection = apsw.Connection(
            path, flags=apsw.SQLITE_OPEN_READONLY, statementcachesize=_STATEMENTS_KEPT
        )
        _configure(connection, busy_ms)
    return connection


def _check_library() -> None:
    found = apsw.sqlite_lib_version()
    if tuple(map(int, found.split("."))) < _SOUND_SINCE:
        raise BackendRefused(
            f"SQLite {found} can damage a file that two connections have open. Install apsw from"
            " its wheel, which brings a newer one"
        )


def check_place(path: str) -> None:
    """Refuse what cannot be a file, before anything is made beside it."""
    if path == MEMORY:
        return
    try:
        found = Path(path).stat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise BackendRefused(f"{path}: cannot be opened ({error.strerror})") from error
    if stat.S_ISDIR(found.st_mode):
        raise BackendRefused(f"{path}: a directory. Give the path of a file in it")
    if not stat.S_ISREG(found.st_mode):
        raise BackendRefused(f"{path}: not a regular file. Give another path")
    # SQLite takes a file of a byte or two for an empty one. To read the file instead is no way: to
    # close it would drop the locks that this process may have on it.
    if 0 < found.st_size < _HEADER_BYTES:
        raise BackendRefused(f"{path}: not a SQLite database. Give another path")


def _prepare(
    connection: apsw.Connection, path: str, schema: Schema, sync: Sync, busy_ms: int
) -> None:
    _configure(connection, busy_ms)
    if connection.readonly("main"):
        raise BackendRefused(f"{path}: cannot be written. Change its permissions or its owner")
    check_ours(connection, path, schema)
    connection.execute(f"PRAGMA synchronous = {sync}").fetchall()
    if path != MEMORY:
        _keep_a_log(connection, path)
    bring_up_to_date(connection, path, schema)
    if path != MEMORY:
        _sync_directory(path)


def _configure(connection: apsw.Connection, busy_ms: int) -> None:
    connection.set_busy_timeout(busy_ms)
    # One plan for a statement, whatever its parameters. Otherwise SQLite plans many of them anew
    # with each set of parameters, which takes ten times as long as to run them.
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    for pragma in _PRAGMAS:
        connection.execute(pragma).fetchall()


def _keep_a_log(connection: apsw.Connection, path: str) -> None:
    if connection.execute("PRAGMA journal_mode = WAL").get != "wal":
        raise BackendRefused(
            f"{path}: on a file system that cannot share memory, which the write-ahead log needs."
            " Use a local disk"
        )
    for pragma in _LOG_PRAGMAS:
        connection.execute(pragma).fetchall()


def _sync_directory(path: str) -> None:
    """A new file is durable once its name is."""
    parent = Path(path).parent
    try:
        directory = os.open(parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise BackendRefused(
            f"{parent}: cannot be synced ({error.strerror}). Give a path in a directory that this"
            " process may read and write"
        ) from error


class Schema(msgspec.Struct, frozen=True):
    """What a file is for, and the scripts that lead to its tables, the first one first."""

    application_id: int
    migrations: tuple[str, ...]

    @property
    def version(self) -> int:
        return len(self.migrations)


def read_schema(mark: bytes, package: str, directory: str) -> Schema:
    """The schema with this mark of four letters, and the scripts of a directory in a package."""
    scripts = sorted(
        (each for each in files(package).joinpath(directory).iterdir() if each.is_file()),
        key=lambda script: script.name,
    )
    numbers = [int(script.name.partition("_")[0]) for script in scripts]
    assert numbers == list(range(1, len(scripts) + 1)), "migrations are numbered from one"
    return Schema(
        int.from_bytes(mark, "big"), tuple(script.read_text("utf-8") for script in scripts)
    )


def check_ours(connection: apsw.Connection, path: str, schema: Schema) -> None:
    """Refuse a file that is another's, or too new. Changes nothing."""
    tables = _number(connection, "SELECT count(*) FROM sqlite_schema")
    owner = _number(connection, "PRAGMA application_id")
    version = _number(connection, "PRAGMA user_version")
    if owner != schema.application_id and (tables or owner):
        raise BackendRefused(
            f"{path}: a SQLite database that is not for this. Give another path: Stanchion does not"
            " add its tables to it"
        )
    if version > schema.version:
        raise BackendRefused(
            f"{path}: written by a newer Stanchion (schema {version}, this one knows"
            f" {schema.version}). Upgrade Stanchion, or restore a backup from before the upgrade"
        )


def bring_up_to_date(connection: apsw.Connection, path: str, schema: Schema) -> None:
    """Run the migrations that this file has not seen: all of them, or none."""
    # At once as a writer: another process may be about to do the same.
    connection.execute("BEGIN IMMEDIATE")
    try:
        check_ours(connection, path, schema)
        seen = _number(connection, "PRAGMA user_version")
        for script in schema.migrations[seen:]:
            connection.execute(script).fetchall()
        connection.execute(f"PRAGMA user_version = {schema.version}").fetchall()
        connection.execute(f"PRAGMA application_id = {schema.application_id}").fetchall()
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _number(connection: apsw.Connection, statement: str) -> int:
    found = connection.execute(statement).get
    assert isinstance(found, int)
    return found


@contextmanager
def translated_sqlite_errors(path: str) -> Iterator[None]:
    """Whatever SQLite raises inside comes out as a ``BackendError`` that names the file."""
    try:
        yield
    except (apsw.Error, msgspec.DecodeError) as error:
        raise translated(error, path) from error


def translated(error: Exception, path: str) -> Exception:
    """The error as ours if it was SQLite's, or came from reading what is stored; else itself."""
    fault: BackendError
    match error:
        case apsw.FullError():
            fault = BackendUnavailable(f"{path}: the disk is full; free some space ({error})")
        case apsw.CorruptError() | apsw.NotADBError() | apsw.FormatError():
            fault = BackendCorrupt(f"{path}: damaged; restore it from a backup ({error})")
        case msgspec.DecodeError():
            fault = BackendCorrupt(f"{path}: a stored value cannot be read ({error})")
        case apsw.BusyError() | apsw.LockedError():
            fault = BackendTimeout(f"{path}: another program keeps the file locked ({error})")
        case apsw.ReadOnlyError() | apsw.CantOpenError() | apsw.PermissionsError():
            fault = BackendUnavailable(f"{path}: cannot be opened for writing ({error})")
        case apsw.IOError() | apsw.NoMemError() | apsw.InterruptError():
            fault = BackendUnavailable(f"{path}: cannot be read or written ({error})")
        case apsw.Error():
            # A statement of ours that SQLite would not run: nobody's disk is at fault.
            fault = BackendError(f"{path}: {type(error).__name__}: {error}")
        case _:
            return error
    fault.__cause__ = error
    return fault
