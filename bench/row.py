"""Rows: one claim each, with what was measured and what was promised."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

__all__ = ["Row", "best_of", "table"]


class Row(msgspec.Struct, frozen=True):
    """One claim. Ratios are of two measurements in one run: machines differ, ratios less so."""

    name: str
    measured: float
    unit: str
    promise: str
    holds: bool


def best_of(rounds: int, work: Callable[[], object]) -> float:
    """The shortest of several times, in seconds: noise only ever adds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def table(rows: list[Row]) -> str:
    """All rows for a terminal."""
    width = max(len(row.name) for row in rows)
    return "\n".join(
        f"{'ok ' if row.holds else 'NOT'}  {row.name:{width}}  {row.measured:10.2f} {row.unit:10}"
        f"  promised {row.promise}"
        for row in rows
    )
