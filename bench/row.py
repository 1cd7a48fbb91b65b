"""Rows: one claim each, with the measured figure and the promise."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import quantiles

import msgspec

__all__ = [
    "Row",
    "at_least",
    "at_most",
    "below",
    "best_of",
    "recorded",
    "skipped",
    "spread",
    "table",
]


class Row(msgspec.Struct, frozen=True):
    """One claim. Ratios compare two measurements of one run, so they depend less on the machine."""

    name: str
    measured: float
    unit: str
    promise: str
    holds: bool
    note: str = ""
    """What it was measured against, and how far the rounds lay apart."""
    skipped: str = ""
    """Why it was not measured, if it was not."""
    pair: tuple[float, float] | None = None
    """Both sides of a ratio: the measured figure, and its baseline."""

    @property
    def wants_more(self) -> bool:
        """Whether a higher figure is better."""
        return self.promise.startswith(("≥", ">"))


def at_least(
    name: str,
    measured: float,
    unit: str,
    floor: float,
    note: str = "",
    *,
    pair: tuple[float, float] | None = None,
) -> Row:
    """A row whose figure must not be lower."""
    return Row(name, measured, unit, f"≥ {floor:,g}", measured >= floor, note, pair=pair)


def at_most(name: str, measured: float, unit: str, ceiling: float, note: str = "") -> Row:
    """A row whose figure must not be higher."""
    return Row(name, measured, unit, f"≤ {ceiling:,g}", measured <= ceiling, note)


def below(name: str, measured: float, unit: str, ceiling: float, note: str = "") -> Row:
    """A row whose figure must be below the bound."""
    return Row(name, measured, unit, f"< {ceiling:,g}", measured < ceiling, note)


def recorded(name: str, measured: float, unit: str, note: str = "") -> Row:
    """A row without a promise."""
    return Row(name, measured, unit, "", holds=True, note=note)


def skipped(name: str, unit: str, promise: str, why: str) -> Row:
    """A row that was not measured."""
    return Row(name, 0.0, unit, promise, holds=True, skipped=why)


def failed(name: str, error: Exception) -> Row:
    """A row whose measurement failed; it counts as a broken promise."""
    why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return Row(name, 0.0, "", "a figure", holds=False, skipped=why)


def best_of(rounds: int, work: Callable[[], object]) -> float:
    """Return the shortest of several times, in seconds, because noise only adds time."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def spread(values: Sequence[float]) -> str:
    """Return the interquartile range of the rounds."""
    if len(values) < 2:
        return "one round"
    low, _, high = quantiles(values, method="inclusive")
    return f"{_figure(low)} to {_figure(high)}"


def table(rows: Sequence[Row], before: Mapping[str, float] | None = None) -> str:
    """Format all rows for a terminal, with their recorded figures."""
    width = max((len(row.name) for row in rows), default=0)
    return "\n".join(_line(row, width, (before or {}).get(row.name)) for row in rows)


def _line(row: Row, width: int, before: float | None) -> str:
    if row.skipped:
        verdict = "-- " if row.holds else "NOT"
        figure = f"{'not run':>21}"
        return f"{verdict}  {row.name:{width}}  {figure}  promised {row.promise}; {row.skipped}"
    figure = f"{_figure(row.measured):>10} {row.unit:10}"
    verdict = "ok " if row.holds else "NOT"
    promised = f"promised {row.promise}" if row.promise else "for the record"
    parts = [promised, _change(row, before), row.note]
    return f"{verdict}  {row.name:{width}}  {figure}  {'; '.join(part for part in parts if part)}"


def _change(row: Row, before: float | None) -> str:
    if not before:
        return ""
    change = row.measured / before - 1
    return f"was {_figure(before)} ({change:+.0%})"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.2f}"
