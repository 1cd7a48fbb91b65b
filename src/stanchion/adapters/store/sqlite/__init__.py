"""The store in a SQLite file: the embedded default, one process per file."""

from __future__ import annotations

from stanchion.adapters.store.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
