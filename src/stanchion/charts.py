"""Charts: time series, bars and histograms as SVG, for drill reports and the console.

A picture carries its style, so that it works inside a page and as a file; the console, whose policy
forbids style elements, has the same rules in its stylesheet. Colours follow the reader's light or
dark scheme and come from a palette that colour-blind readers can tell apart (Okabe and Ito); every
series also has its own dash pattern and marker, so that a picture printed in grey stays readable.
docs/adr/0013 has the reasons for not using a plotting library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final, TypeAlias, assert_never

import msgspec

WIDTH: Final = 760
_LEFT, _RIGHT, _BOTTOM = 62, 18, 46
_PLOT_HEIGHT: Final = 190
_LEGEND_ROW: Final = 20
_TICKS: Final = 5
_POINTS_MAX: Final = 600
_MARKERS_MAX: Final = 12
"""Markers tell series apart; more of them would hide the line."""
_CHAR_WIDTH: Final = 6.9

_LIGHT: Final = ("#0072b2", "#c55a00", "#00785a", "#a8457f", "#5b5b5b", "#8a6d00")
_DARK: Final = ("#56b4e9", "#ffa94d", "#3ecf9e", "#ee9ccb", "#c9c9c9", "#f0e442")
_DASHES: Final = ("", "7 4", "2 3", "10 3 2 3", "1 5", "14 4")
_MARKERS: Final = ("circle", "square", "triangle", "diamond", "cross", "ring")


class Series(msgspec.Struct, frozen=True):
    """One line."""

    label: str
    points: tuple[tuple[float, float], ...]


class Window(msgspec.Struct, frozen=True):
    """A stretch of time that is shaded: a fault."""

    from_s: float
    until_s: float
    label: str


class Limit(msgspec.Struct, frozen=True):
    """A horizontal line that something must not cross."""

    value: float
    label: str


class LineChart(msgspec.Struct, frozen=True, kw_only=True, tag="lines"):
    """Values over time."""

    title: str
    unit: str
    series: tuple[Series, ...]
    x_unit: str = "seconds"
    windows: tuple[Window, ...] = ()
    limits: tuple[Limit, ...] = ()


class Bars(msgspec.Struct, frozen=True):
    """One value for each group."""

    label: str
    values: tuple[float, ...]


class BarChart(msgspec.Struct, frozen=True, kw_only=True, tag="bars"):
    """Values side by side. A group's label may have two lines: ``first|second``."""

    title: str
    unit: str
    groups: tuple[str, ...]
    series: tuple[Bars, ...]
    limits: tuple[Limit, ...] = ()


class Histogram(msgspec.Struct, frozen=True, kw_only=True, tag="histogram"):
    """Counts in buckets of equal width. The first series is bars, the others are stepped lines."""

    title: str
    unit: str
    bucket_s: float
    series: tuple[Bars, ...]
    x_unit: str = "seconds"
    limits: tuple[Limit, ...] = ()


Chart: TypeAlias = LineChart | BarChart | Histogram


def svg_of(
    chart: Chart,
    *,
    has_style: bool = True,
    width: int = WIDTH,
    y_max_least: float = 0.001,
    ends_now: bool = False,
) -> str:
    """The chart as one SVG element, which is a file of its own as well.

    Without its style, the stylesheet of the page around it must have the rules. Letters have their
    full size if the chart is shown as wide as ``width`` says. The vertical axis goes up to
    ``y_max_least`` at least. With ``ends_now`` the ticks of a ``LineChart`` count back from its
    right edge.
    """
    labels = [series.label for series in chart.series]
    rows = _legend_rows(labels, width)
    top = 34 + _LEGEND_ROW * len(rows) + 16
    height = top + _PLOT_HEIGHT + _BOTTOM
    y_max = max(y_max_least, _y_max(chart))
    frame = _Frame(top=top, right=plot_edges(width)[1], x_max=_x_max(chart), y_max=y_max)
    match chart:
        case LineChart():
            body = _lines(chart, frame, ends_now=ends_now)
        case BarChart():
            body = _bars(chart, frame)
        case Histogram():
            body = _histogram(chart, frame)
        case _:
            assert_never(chart)
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" width="{width}"'
                f' height="{height}" viewBox="0 0 {width} {height}" role="img"'
                f' aria-label="{escape(_summary(chart))}">'
            ),
            *([f"<style>{_STYLE}</style>"] if has_style else []),
            _text(_LEFT, 22, chart.title, "title"),
            *_legend(rows, chart),
            *body,
            "</svg>",
        ]
    )


def plot_edges(width: int) -> tuple[float, float]:
    """Where the lines of a chart of this width begin and end, from its left."""
    return _LEFT, width - _RIGHT


class _Frame(msgspec.Struct, frozen=True):
    """Where values are on the paper."""

    top: float
    right: float
    x_max: float
    y_max: float

    @property
    def bottom(self) -> float:
        return self.top + _PLOT_HEIGHT

    def x(self, value: float) -> float:
        return _LEFT + (self.right - _LEFT) * max(0.0, min(1.0, value / self.x_max))

    def y(self, value: float) -> float:
        return self.bottom - _PLOT_HEIGHT * max(0.0, min(1.0, value / self.y_max))


def _lines(chart: LineChart, frame: _Frame, *, ends_now: bool) -> list[str]:
    drawn = [_window(window, frame) for window in chart.windows]
    drawn += _grid(chart.unit, frame)
    drawn += _time_axis(chart.x_unit, frame, ends_now=ends_now)
    drawn += [_limit(limit, frame) for limit in chart.limits]
    for number, series in enumerate(chart.series):
        drawn += _line(_thinned(series.points), number, frame)
    return drawn


def _line(points: Sequence[tuple[float, float]], number: int, frame: _Frame) -> list[str]:
    if not points:
        return []
    placed = [(frame.x(x), frame.y(y)) for x, y in points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
    style = number % len(_LIGHT)
    every = max(1, len(placed) // _MARKERS_MAX)
    # Each series begins elsewhere, so that markers of equal lines do not cover each other.
    marked = placed[number * every // 4 :: every]
    return [
        f'<path class="line s{style}" stroke-dasharray="{_DASHES[style]}" d="{path}"/>',
        *(_marker(x, y, style) for x, y in marked),
    ]


def _bars(chart: BarChart, frame: _Frame) -> list[str]:
    drawn = _grid(chart.unit, frame)
    room = (frame.right - _LEFT) / max(1, len(chart.groups))
    width = min(46.0, room * 0.8 / max(1, len(chart.series)))
    for place, group in enumerate(chart.groups):
        middle = _LEFT + room * (place + 0.5)
        for row, words in enumerate(group.split("|")):
            drawn.append(_text(middle, frame.bottom + 18 + 14 * row, words, "tick mid"))
        begin = middle - width * len(chart.series) / 2
        for number, bars in enumerate(chart.series):
            value = bars.values[place]
            x, y = begin + number * width, frame.y(value)
            drawn.append(
                f'<rect class="bar f{number % len(_LIGHT)}" x="{x + 1:.1f}" y="{y:.1f}"'
                f' width="{width - 2:.1f}" height="{frame.bottom - y:.1f}"/>'
            )
            drawn.append(_text(x + width / 2, y - 4, _number(value), "tick mid"))
    drawn += [_limit(limit, frame) for limit in chart.limits]
    return drawn


def _histogram(chart: Histogram, frame: _Frame) -> list[str]:
    drawn = _grid(chart.unit, frame)
    drawn += _time_axis(chart.x_unit, frame)
    width = frame.x(chart.bucket_s) - frame.x(0)
    gap = min(1.0, width / 4)
    for number, bars in enumerate(chart.series):
        style = number % len(_LIGHT)
        tops = [frame.y(value) for value in bars.values]
        if number == 0:
            drawn += [
                f'<rect class="bar f{style}" x="{frame.x(place * chart.bucket_s) + gap / 2:.1f}"'
                f' y="{y:.1f}" width="{width - gap:.1f}" height="{frame.bottom - y:.1f}"/>'
                for place, y in enumerate(tops)
                if y < frame.bottom
            ]
        elif tops:
            path = "".join(f"V{y:.1f}h{width:.1f}" for y in tops)
            drawn.append(
                f'<path class="line s{style}" stroke-dasharray="{_DASHES[style]}"'
                f' d="M{frame.x(0):.1f} {frame.bottom:.1f}{path}"/>'
            )
    drawn += [_limit(limit, frame) for limit in chart.limits]
    return drawn


# ── Parts ────────────────────────────────────────────────────────────────────────────────────────


def _grid(unit: str, frame: _Frame) -> list[str]:
    drawn = []
    for value in _ticks(frame.y_max):
        y = frame.y(value)
        drawn.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{frame.right}"/>')
        drawn.append(_text(_LEFT - 8, y + 4, _number(value), "tick end"))
    drawn.append(f'<path class="axis" d="M{_LEFT} {frame.bottom:.1f}H{frame.right}"/>')
    drawn.append(_text(6, frame.top - 8, unit, "tick"))
    return drawn


def _time_axis(unit: str, frame: _Frame, *, ends_now: bool = False) -> list[str]:
    drawn = []
    for value in _ticks(frame.x_max):
        x = frame.x(frame.x_max - value if ends_now else value)
        drawn.append(f'<path class="axis" d="M{x:.1f} {frame.bottom:.1f}v5"/>')
        drawn.append(_text(x, frame.bottom + 18, _number(value), "tick mid"))
    drawn.append(_text(frame.right, frame.bottom + 36, unit, "tick end"))
    return drawn


def _window(window: Window, frame: _Frame) -> str:
    x, end = frame.x(window.from_s), frame.x(window.until_s)
    return (
        f'<rect class="fault" x="{x:.1f}" y="{frame.top:.1f}" width="{max(1.0, end - x):.1f}"'
        f' height="{_PLOT_HEIGHT}"/>' + _text(x + 5, frame.top + 13, window.label, "tick")
    )


def _limit(limit: Limit, frame: _Frame) -> str:
    y = frame.y(limit.value)
    line = f'<path class="limit" d="M{_LEFT} {y:.1f}H{frame.right}"/>'
    return line + _text(frame.right - 4, y - 5, limit.label, "tick end over")


def _legend_rows(labels: Sequence[str], paper_width: float) -> list[list[tuple[int, str, float]]]:
    """Numbers, labels and places of a legend, in as many rows as it takes."""
    rows: list[list[tuple[int, str, float]]] = [[]]
    x = float(_LEFT)
    for number, label in enumerate(labels):
        width = 42 + len(label) * _CHAR_WIDTH
        if x + width > paper_width and rows[-1]:
            rows.append([])
            x = float(_LEFT)
        rows[-1].append((number, label, x))
        x += width
    return rows


def _legend(rows: Sequence[Sequence[tuple[int, str, float]]], chart: Chart) -> list[str]:
    drawn = []
    for number, row in enumerate(rows):
        y = 42 + _LEGEND_ROW * number
        for place, label, x in row:
            style = place % len(_LIGHT)
            if isinstance(chart, Histogram) and place > 0:
                dash = _DASHES[style]
                drawn.append(
                    f'<path class="line s{style}" stroke-dasharray="{dash}"'
                    f' d="M{x:.1f} {y - 4}h26"/>'
                )
            elif isinstance(chart, LineChart):
                dash = _DASHES[style]
                drawn.append(
                    f'<path class="line s{style}" stroke-dasharray="{dash}"'
                    f' d="M{x:.1f} {y - 4}h26"/>' + _marker(x + 13, y - 4, style)
                )
            else:
                drawn.append(
                    f'<rect class="bar f{style}" x="{x:.1f}" y="{y - 10}" width="18" height="11"/>'
                )
            drawn.append(_text(x + 32, y, label, ""))
    return drawn


def _marker(x: float, y: float, style: int) -> str:
    match _MARKERS[style]:
        case "circle":
            return f'<circle class="f{style}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
        case "square":
            return f'<rect class="f{style}" x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6"/>'
        case "triangle":
            return f'<path class="f{style}" d="M{x:.1f} {y - 4:.1f}l4 7h-8z"/>'
        case "diamond":
            return f'<path class="f{style}" d="M{x:.1f} {y - 4:.1f}l4 4l-4 4l-4 -4z"/>'
        case "cross":
            return f'<path class="line s{style}" d="M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6"/>'
        case _:
            return f'<circle class="line s{style}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'


def _text(x: float, y: float, words: str, name: str) -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


# ── Numbers ──────────────────────────────────────────────────────────────────────────────────────


def _ticks(highest: float) -> list[float]:
    """Round numbers from 0 up, about as many as there is room for."""
    rough = highest / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 2.5, 5, 10) if power * each >= rough * 0.999)
    return [step * number for number in range(int(highest / step + 1e-6) + 1)]


def _x_max(chart: Chart) -> float:
    if isinstance(chart, BarChart):
        return 1.0
    if isinstance(chart, Histogram):
        return max(0.001, chart.bucket_s * max(len(bars.values) for bars in chart.series))
    ends = [x for series in chart.series for x, _ in series.points]
    return max([*ends, *(window.until_s for window in chart.windows), 0.001])


def _y_max(chart: Chart) -> float:
    limits = [limit.value for limit in chart.limits]
    if not isinstance(chart, LineChart):
        found = [value for bars in chart.series for value in bars.values]
    else:
        found = [y for series in chart.series for _, y in series.points]
    lowest = 1.0 if isinstance(chart, Histogram) else 0.001
    return max([*found, *limits, lowest]) * 1.12


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most this many points; of each stretch the highest, so that no peak is lost."""
    if len(points) <= _POINTS_MAX:
        return points
    size = math.ceil(len(points) / _POINTS_MAX)
    parts = [points[begin : begin + size] for begin in range(0, len(points), size)]
    return [max(part, key=lambda point: point[1]) for part in parts]


def _number(value: float) -> str:
    if value >= 1000:  # noqa: PLR2004 - where a separator begins to help
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _summary(chart: Chart) -> str:
    """A description of the chart in words, for readers who cannot see it."""
    tops = []
    for series in chart.series:
        values = series.values if isinstance(series, Bars) else [y for _, y in series.points]
        tops.append(f"{series.label} up to {_number(max(values, default=0.0))}")
    return f"{chart.title}, in {chart.unit}: {'; '.join(tops)}"


def _palette(colours: Sequence[str]) -> str:
    return "".join(
        f".s{number}{{stroke:{colour}}}.f{number}{{fill:{colour}}}"
        for number, colour in enumerate(colours)
    )


_STYLE: Final = (
    ".chart text{font:12px system-ui,sans-serif;fill:#1c2733}"
    ".chart .title{font-size:14px;font-weight:600}"
    ".chart .tick{fill:#55606c}.chart .mid{text-anchor:middle}.chart .end{text-anchor:end}"
    ".chart .line{fill:none;stroke-width:1.8;stroke-linejoin:round}"
    ".chart .grid{stroke:#dde2e7}.chart .axis{stroke:#7a8591;fill:none}"
    ".chart .limit{stroke:#1c2733;stroke-dasharray:4 4;fill:none}"
    ".chart .over{paint-order:stroke;stroke:#fff;stroke-width:3px}"
    ".chart .fault{fill:#d9480f;opacity:.13}" + _palette(_LIGHT) + "@media screen and "
    "(prefers-color-scheme:dark){.chart text{fill:#e8ecf0}.chart .tick{fill:#a9b4bf}"
    ".chart .grid{stroke:#2c353e}.chart .axis{stroke:#77828d}.chart .limit{stroke:#e8ecf0}"
    ".chart .over{stroke:#14191e}"
    ".chart .fault{fill:#ff8a5b;opacity:.2}" + _palette(_DARK) + "}"
)
