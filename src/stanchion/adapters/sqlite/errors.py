"""SQLite's errors, in our words. Translated here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import apsw
import msgspec

from stanchion.ports.errors import (
    BackendCorrupt,
    BackendError,
    BackendTimeout,
    BackendUnavailable,
)

__all__ = ["translated", "translated_sqlite_errors"]


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
