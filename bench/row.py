"""Rows: one claim each, with what was measured and what was promised."""

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
    """One claim. Ratios are of two measurements in one run: machines differ, ratios less so."""

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
    """Of a ratio, both sides: what is claimed of, and the limit, peer or smaller one beside it."""

    @property
    def wants_more(self) -> bool:
        """Whether a higher figure is the better one."""
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
    """Promise that it is not less."""
    return Row(name, measured, unit, f"≥ {floor:,g}", measured >= floor, note, pair=pair)


def at_most(name: str, measured: float, unit: str, ceiling: float, note: str = "") -> Row:
    """Promise that it is not more."""
    return Row(name, measured, unit, f"≤ {ceiling:,g}", measured <= ceiling, note)


def below(name: str, measured: float, unit: str, ceiling: float, note: str = "") -> Row:
    """Promise that it stays below."""
    return Row(name, measured, unit, f"< {ceiling:,g}", measured < ceiling, note)


def recorded(name: str, measured: float, unit: str, note: str = "") -> Row:
    """Say what it is, and promise nothing."""
    return Row(name, measured, unit, "", holds=True, note=note)


def skipped(name: str, unit: str, promise: str, why: str) -> Row:
    """Say that a promise was not looked at."""
    return Row(name, 0.0, unit, promise, holds=True, skipped=why)


def failed(name: str, error: Exception) -> Row:
    """Say that something could not be measured: a broken promise, whatever was promised."""
    why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return Row(name, 0.0, "", "a figure", holds=False, skipped=why)


def best_of(rounds: int, work: Callable[[], object]) -> float:
    """The shortest of several times, in seconds: noise only ever adds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def spread(values: Sequence[float]) -> str:
    """How far the rounds lay apart: the middle half of them."""
    if len(values) < 2:
        return "one round"
    low, _, high = quantiles(values, method="inclusive")
    return f"{_figure(low)} to {_figure(high)}"


def table(rows: Sequence[Row], before: Mapping[str, float] | None = None) -> str:
    """All rows for a terminal, each beside what was recorded before."""
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
