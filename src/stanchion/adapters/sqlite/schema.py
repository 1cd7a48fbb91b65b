"""Schemas: which tables a file has, and how an older file comes to have them.

A file says whose it is (``application_id``) and how new it is (``user_version``). Migrations are
numbered SQL files; those that a file has not seen run in one transaction. Nothing is ever migrated
back: a file that a newer Stanchion has touched is refused.
"""

from __future__ import annotations

from importlib.resources import files

import apsw
import msgspec

from stanchion.ports.errors import BackendRefused

__all__ = ["Schema", "bring_up_to_date", "check_ours", "read_schema"]


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
