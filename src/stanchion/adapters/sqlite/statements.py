"""Statements: SQL in files of its own, each with a name and a sentence.

A file begins with its contract as comments. Then comes one statement after the other:

    -- name: put_tenant
    -- Replaces a tenant's configuration.
    INSERT INTO ...

What lies between two names is one statement; its comments stay in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import Final

__all__ = ["read_statements"]

_NAME: Final = "-- name:"


def read_statements(package: str, *path: str) -> Mapping[str, str]:
    """The statements of a file in a package, or of all files of a folder in it, by name."""
    where = files(package).joinpath(*path)
    statements: dict[str, str] = {}
    for file in sorted(where.iterdir(), key=lambda file: file.name) if where.is_dir() else [where]:
        _, *parts = f"\n{file.read_text('utf-8')}".split(f"\n{_NAME}")
        for part in parts:
            name, _, body = part.partition("\n")
            assert name.strip() not in statements, f"two statements are called {name.strip()}"
            lines = (line for line in body.splitlines() if not line.lstrip().startswith("--"))
            statements[name.strip()] = " ".join(" ".join(lines).split())
    return MappingProxyType(statements)
