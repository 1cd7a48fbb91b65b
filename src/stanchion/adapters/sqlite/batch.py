"""Batches: many callers, one transaction.

A commit waits for the disk, and the disk takes as long for one operation as for a hundred. So the
writer takes all operations that wait and commits them together; then, and only then, their callers
get their answers. An operation that fails takes back what it did, fails for its own caller, and
leaves the others as they are. Hardly any does, so a batch is first tried without savepoints; if one
of its operations fails, all of it is taken back and done again with a savepoint for each.

A caller that left while the batch was being worked on has been told that there was no answer in
time. What it asked for must then not become true: the batch is taken back and done again without
it. That ends, since everybody who waits leaves sooner or later.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import apsw

from stanchion.adapters.lane import Call
from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.sqlite.errors import translated

__all__ = ["read_together", "write_together"]


def write_together(database: Database, calls: Sequence[Call[Database]]) -> None:
    """Serve calls that change something, in one durable step."""
    connection = database.connection
    serve = _write
    try:
        while True:
            connection.execute("BEGIN IMMEDIATE")
            try:
                served = [call for call in calls if serve(database, call)]
                _write_pending(database)
            except _Failed:
                serve = _write_apart
            else:
                if all(call.is_wanted for call in served):
                    break
            _end(database, "ROLLBACK")
            for call in calls:
                call.forget()
        database.check_in_place()
        connection.execute("COMMIT")
    except Exception as error:  # noqa: BLE001 - it belongs to every caller of the batch
        # Nothing of the batch is true, also what went well: its answers were not given yet.
        _end(database, "ROLLBACK")
        for call in calls:
            call.fail(translated(error, database.path))


class _Failed(Exception):
    """An operation of the batch failed."""


def _write(database: Database, call: Call[Database]) -> bool:
    """Do what the call asks for; ``False`` if nobody waits for it any more."""
    if not call.is_wanted:
        return False
    try:
        call.answer(call.act(database))
    except Exception as error:
        raise _Failed from error
    return True


def _write_pending(database: Database) -> None:
    """Write what the calls left for later. Whose fault it is if that fails, nobody knows."""
    try:
        database.pending.write()
    except Exception as error:
        raise _Failed from error


def _write_apart(database: Database, call: Call[Database]) -> bool:
    """Do the same so that it can be taken back alone."""
    connection = database.connection
    # The transaction may have had to wait for another process's, and the caller not so long.
    if not call.is_wanted:
        return False
    connection.execute("SAVEPOINT call")
    try:
        call.answer(call.act(database))
        database.pending.write()
    except Exception as error:
        database.pending.forget()
        # A full disk or a failing one makes SQLite take back the whole transaction.
        if not connection.in_transaction:
            raise
        connection.execute("ROLLBACK TO call")
        call.fail(translated(error, database.path))
    connection.execute("RELEASE call")
    return True


def read_together(database: Database, calls: Sequence[Call[Database]]) -> None:
    """Serve calls that only look. All see the same state, with all that was acknowledged before."""
    try:
        database.connection.execute("BEGIN")
        for call in calls:
            try:
                call.answer(call.act(database))
            except Exception as error:  # noqa: BLE001 - it belongs to the one who asked
                call.fail(translated(error, database.path))
    except apsw.Error as error:
        for call in calls:
            call.fail(translated(error, database.path))
    finally:
        _end(database, "COMMIT")


def _end(database: Database, statement: str) -> None:
    """End the transaction, if there still is one. Nothing depends on how that goes."""
    database.pending.forget()
    with suppress(apsw.Error):
        if database.connection.in_transaction:
            database.connection.execute(statement)
