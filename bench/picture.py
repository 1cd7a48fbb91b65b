"""A chart of growth: the throughput of each large store relative to the small one."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from bench.row import Row

__all__ = ["picture"]

WIDTH, LABEL, FIGURE = 960, 400, 230
BAR_HEIGHT, ROW_HEIGHT, TOP = 16, 28, 64
SCALE_MAX = 1.25
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1c2733}"
    ".title{font-size:16px;font-weight:600}"
    ".quiet{fill:#66727f}"
    ".ok{fill:#2f7d6b}"
    ".not{fill:#c0492f}"
    ".floor{stroke:#1c2733;stroke-dasharray:3 3}"
    ".even{stroke:#b8c0c8}"
)


def picture(rows: Sequence[Row], *, title: str, floor: float) -> str:
    """Draw one bar per row, as SVG; the dashed line is the promise."""
    height = TOP + ROW_HEIGHT * len(rows) + 24
    bottom = TOP + ROW_HEIGHT * len(rows)
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
            f' width="{WIDTH}" height="{height}" role="img" aria-label="{escape(title)}">'
        ),
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(16, 28, title, "title"),
        _text(16, 48, "throughput with a large store relative to a small one", "quiet"),
        _line(1.0, bottom, "even"),
        *(line for number, row in enumerate(rows) for line in _bar(row, number)),
        _line(floor, bottom, "floor"),
        _text(_x(floor) - 14, bottom + 16, f"{floor:g}×", "quiet"),
        _text(_x(1.0) + 2, bottom + 16, "1×", "quiet"),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _bar(row: Row, number: int) -> list[str]:
    y = TOP + ROW_HEIGHT * number
    width = _x(min(row.measured, SCALE_MAX)) - LABEL
    verdict = "ok" if row.holds else "not"
    figure = f"{row.measured:.2f}×"
    if row.pair is not None:
        figure += f": {row.pair[0]:,.0f}/s of {row.pair[1]:,.0f}/s"
    return [
        _text(16, y + BAR_HEIGHT - 3, row.name, ""),
        (
            f'<rect class="{verdict}" x="{LABEL}" y="{y}" width="{max(width, 0):.1f}"'
            f' height="{BAR_HEIGHT}" rx="2"/>'
        ),
        _text(WIDTH - FIGURE + 16, y + BAR_HEIGHT - 3, figure, "" if row.holds else "not"),
    ]


def _x(ratio: float) -> float:
    return LABEL + (WIDTH - FIGURE - LABEL) * ratio / SCALE_MAX


def _line(ratio: float, bottom: float, name: str) -> str:
    x = _x(ratio)
    return f'<line class="{name}" x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom}"/>'


def _text(x: float, y: float, words: str, name: str) -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'
