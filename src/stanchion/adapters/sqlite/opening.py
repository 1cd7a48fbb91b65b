"""Opening a file: checks, schema, and translation of errors.

A file holds the program it belongs to (``application_id``) and the version of its schema
(``user_version``); both are checked before anything is written. Migrations are numbered SQL files;
those that are new to a file run in one transaction. There are no downgrades: a file that a newer
Stanchion has migrated is refused.

All errors of SQLite are translated here into those of the ports.
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

from stanchion.core.json_value import DECODE_ERRORS
from stanchion.ports.errors import (
    BackendCorrupt,
    BackendError,
    BackendFull,
    BackendRefused,
    BackendTimeout,
    BackendUnavailable,
)

MEMORY: Final = ":memory:"
"""The path of an in-memory database."""

Sync: TypeAlias = Literal["FULL", "NORMAL"]
"""Whether a commit returns after the sync to disk, or after the write to the operating system."""

_SOUND_SINCE: Final = (3, 51, 3)
"""In older versions a checkpoint of one connection could reset the log under another."""
_HEADER_BYTES: Final = 100
_STATEMENTS_KEPT: Final = 256
"""More than there are statements, so that all stay prepared."""
_PRAGMAS: Final = (
    "PRAGMA cache_size = -32768",
    "PRAGMA temp_store = MEMORY",
    "PRAGMA cell_size_check = ON",
    "PRAGMA trusted_schema = OFF",
)
_LOG_PRAGMAS: Final = (
    # On macOS only this sync reaches the disk.
    "PRAGMA fullfsync = ON",
    # The store's checkpointer copies the log from 4,000 pages (16 MiB) on. Then the writer copies
    # the rest, and SQLite overwrites the log from its start. A higher limit would write fewer pages
    # twice, but the log would be larger.
    "PRAGMA wal_autocheckpoint = 5000",
    "PRAGMA journal_size_limit = 67108864",
)


def resolved(path: str | os.PathLike[str]) -> str:
    """The canonical path of the file. Raises ``BackendRefused``."""
    name = os.fspath(path)
    if name == MEMORY:
        return name
    try:
        return str(Path(name).resolve())
    except (OSError, RuntimeError) as error:
        raise BackendRefused(f"{name}: cannot be found ({error})") from error


def open_for_writing(path: str, schema: Schema, *, sync: Sync, busy_ms: int) -> apsw.Connection:
    """Open or create a file, check it and migrate it.

    Raises ``BackendRefused`` if that is not possible, and then leaves the file unchanged.
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
    """Open a read-only connection to a file that is open for writing."""
    with translated_sqlite_errors(path):
        connection = apsw.Connection(
            path, flags=apsw.SQLITE_OPEN_READONLY, statementcachesize=_STATEMENTS_KEPT
        )
        _configure(connection, busy_ms)
    return connection


def open_for_checkpoints(path: str) -> apsw.Connection:
    """Open a connection that copies the log into a file that is open for writing."""
    connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READWRITE)
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    # Before its first read, a connection does not know that there is a log.
    connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    for pragma in _LOG_PRAGMAS:
        connection.execute(pragma).fetchall()
    return connection


def _check_library() -> None:
    found = apsw.sqlite_lib_version()
    if tuple(map(int, found.split("."))) < _SOUND_SINCE:
        raise BackendRefused(
            f"SQLite {found} can damage a file that two connections have open. Install apsw from"
            " its wheel, which brings a newer one"
        )


def check_place(path: str) -> None:
    """Refuse a path that cannot be a database, before any file is created next to it."""
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
    # SQLite treats a file of a byte or two as empty. Reading the file here is not an option:
    # closing it would drop the locks that this process may have on it.
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
    # Plan each statement once, independent of its parameters. Otherwise SQLite plans many of them
    # again for each set of parameters, which takes ten times as long as running them.
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
    """Sync the directory: a new file is durable only when its name is."""
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
    """The application id of a file, and its migrations in order."""

    application_id: int
    migrations: tuple[str, ...]

    @property
    def version(self) -> int:
        return len(self.migrations)


def read_schema(mark: bytes, package: str, directory: str) -> Schema:
    """The schema with this four-letter application id and the migrations of a directory."""
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
    """Refuse a file of another program or of a newer version. Changes nothing."""
    tables = _number(connection, "SELECT count(*) FROM sqlite_schema")
    owner = _number(connection, "PRAGMA application_id")
    version = _number(connection, "PRAGMA user_version")
    if owner != schema.application_id and (tables or owner):
        raise BackendRefused(
            f"{path}: a SQLite database for another purpose. Give another path: Stanchion does not"
            " add its tables to it"
        )
    if version > schema.version:
        raise BackendRefused(
            f"{path}: written by a newer Stanchion (schema {version}, this one knows"
            f" {schema.version}). Upgrade Stanchion, or restore a backup from before the upgrade"
        )


def bring_up_to_date(connection: apsw.Connection, path: str, schema: Schema) -> None:
    """Run the migrations that are new to this file, in one transaction."""
    # IMMEDIATE: another process may migrate the file at the same time.
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
    """Translate errors of SQLite into ``BackendError``, with the path of the file."""
    try:
        yield
    except (apsw.Error, *DECODE_ERRORS) as error:
        raise translated(error, path) from error


def translated(error: Exception, path: str) -> Exception:
    """The error, translated if it came from SQLite or from decoding stored data."""
    fault: BackendError
    match error:
        case apsw.FullError():
            fault = BackendFull(f"{path}: the disk is full; free some space ({error})")
        case apsw.CorruptError() | apsw.NotADBError() | apsw.FormatError():
            fault = BackendCorrupt(f"{path}: damaged; restore it from a backup ({error})")
        case msgspec.DecodeError() | UnicodeDecodeError():
            fault = BackendCorrupt(f"{path}: a stored value cannot be read ({error})")
        case apsw.BusyError() | apsw.LockedError():
            fault = BackendTimeout(f"{path}: another program keeps the file locked ({error})")
        case apsw.ReadOnlyError() | apsw.CantOpenError() | apsw.PermissionsError():
            fault = BackendUnavailable(f"{path}: cannot be opened for writing ({error})")
        case apsw.IOError() | apsw.NoMemError() | apsw.InterruptError():
            fault = BackendUnavailable(f"{path}: cannot be read or written ({error})")
        case apsw.Error():
            # SQLite refused one of our statements: a bug, not a failure of the disk.
            fault = BackendError(f"{path}: {type(error).__name__}: {error}")
        case _:
            return error
    fault.__cause__ = error
    return fault
