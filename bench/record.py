"""The record: the figures of the last recorded run."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from bench.row import Row

__all__ = ["RECORD", "Record", "read", "worse", "write"]

RECORD: Final = Path(__file__).with_name("results.json")
NOISE: Final = 0.2
"""Less than that is no news."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Figures by row name, and where they were measured."""

    recorded_on: str
    python: str
    cores: int
    rows: dict[str, float]


def read(path: Path = RECORD) -> Record | None:
    """Return the last record, if there is one."""
    if not path.exists():
        return None
    return msgspec.json.decode(path.read_bytes(), type=Record)


def write(rows: Sequence[Row], path: Path = RECORD) -> None:
    """Record these rows. Rows that were not measured keep their old figures."""
    before = read(path)
    known = {} if before is None else dict(before.rows)
    known |= {row.name: round(row.measured, 4) for row in rows if not row.skipped}
    record = Record(
        recorded_on=datetime.now(UTC).date().isoformat(),
        python=platform.python_version(),
        cores=os.cpu_count() or 1,
        rows=dict(sorted(known.items())),
    )
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")


def worse(rows: Sequence[Row], before: Record | None) -> list[str]:
    """Return the names of rows that are worse than their record by more than noise."""
    return [row.name for row in rows if not row.skipped and _fell(row, before)]


def _fell(row: Row, before: Record | None) -> bool:
    was = 0.0 if before is None else before.rows.get(row.name, 0.0)
    if was <= 0:
        return False
    if row.wants_more:
        return row.measured < was * (1 - NOISE)
    return row.measured > was * (1 + NOISE)
