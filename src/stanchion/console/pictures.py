"""Small pictures of the console: a tenant's slots, and the fences of a lock over time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final, Literal

import msgspec
from markupsafe import Markup, escape

from stanchion.charts import WIDTH, Chart, LineChart, Series, svg_of
from stanchion.console.text import duration, visible

CELLS_MAX: Final = 60
"""Cells of one board. A larger cap is drawn as a bar with its share."""


HALF_WIDTH: Final = 420
"""Of a chart that is shown beside another."""


def chart(drawn: Chart, *, width: int = WIDTH) -> Markup:
    """A chart without a style of its own: the console's stylesheet has the rules."""
    svg = svg_of(drawn, has_style=False, width=width)
    return Markup(visible(svg, has_lines=True))  # noqa: S704 - svg_of escapes its labels


def time_chart(title: str, unit: str, series: Sequence[Series], *, length_s: float) -> Markup:
    """A chart of counts over the time until now."""
    is_long = length_s > _LONG_S
    x_unit, size_s = ("minutes ago", 60.0) if is_long else ("seconds ago", 1.0)
    scaled = tuple(
        Series(each.label, tuple((x / size_s, y) for x, y in each.points)) for each in series
    )
    drawn = LineChart(title=title, unit=unit, x_unit=x_unit, series=scaled)
    svg = svg_of(drawn, has_style=False, width=HALF_WIDTH, y_max_least=_COUNT_LEAST, ends_now=True)
    return Markup(svg)  # noqa: S704 - of our own labels, and svg_of escapes them


_LONG_S: Final = 180
"""Times that are longer are shown in minutes."""
_COUNT_LEAST: Final = 4.0
"""The least height of an axis of counts: with less, its ticks would be fractions."""


# ── Slots ────────────────────────────────────────────────────────────────────────────────────────


class TakenSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A run that holds a slot."""

    run_id: str
    status: str
    href: str
    title: str = ""


def slot_board(
    taken: Sequence[TakenSlot], *, active: int, limit: int | None, href: str | None = None
) -> Markup:
    """The slots of a tenant as cells: full ones link to their runs, free ones are outlined.

    ``taken`` may be fewer runs than are active: the other full cells lead to ``href``, the list of
    the tenant's runs.
    """
    label = f"{active:,} of {'unlimited' if limit is None else f'{limit:,}'} slots in use"
    size = max(active, limit or 0)
    if size > CELLS_MAX:
        return share_bar(active, limit, label)
    cells = [_cell(slot) for slot in taken[:active]]
    plain = Markup('<a class="cell" href="{}" aria-label="a run"></a>')
    for _ in range(active - len(cells)):
        inner = Markup('<span class="cell"></span>') if href is None else plain.format(href)
        cells.append(Markup('<li class="slot st-running">{}</li>').format(inner))
    over = limit is not None and active > limit
    free = 0 if limit is None else max(0, limit - active)
    cells += [Markup('<li class="slot free"><span class="cell"></span></li>')] * free
    is_full = limit is not None and active >= limit
    state = " over" if over else " full" if is_full else ""
    return Markup('<ol class="slots{}" aria-label="{}">{}</ol>').format(
        state, label, Markup().join(cells)
    )


def _cell(slot: TakenSlot) -> Markup:
    status = slot.status if slot.status.isidentifier() else "none"
    words = escape(visible(slot.title or f"{slot.run_id}: {slot.status.replace('_', ' ')}"))
    # A page has hundreds of cells, and Markup.format takes five times as long.
    return Markup(  # noqa: S704 - made of a class name and escaped text
        f'<li class="slot st-{escape(status)}"><a class="cell" href="{escape(slot.href)}"'
        f' title="{words}" aria-label="{words}"></a></li>'
    )


def share_bar(active: float, limit: float | None, label: str, *, is_bad: bool = True) -> Markup:
    """A bar that is filled as far as the limit is used."""
    percent = 100.0 if not limit else min(100.0, 100 * active / limit)
    is_reached = limit is not None and active >= limit
    state = "" if not is_reached else " full" if is_bad else " met"
    return Markup(
        '<svg class="share{}" viewBox="0 0 100 10" preserveAspectRatio="none" role="img"'
        ' aria-label="{}"><rect class="track" width="100" height="10"/>'
        '<rect class="part" width="{}" height="10"/></svg>'
    ).format(state, label, f"{percent:.1f}")


# ── Fences ───────────────────────────────────────────────────────────────────────────────────────


class FenceMark(msgspec.Struct, frozen=True, kw_only=True):
    """One moment in the life of a lock."""

    at: datetime
    what: Literal["acquired", "renewed", "released", "forced", "refused"]
    """``refused``: a write with an older fence."""
    fence: int
    holder: str = ""


_STRIP_WIDTH, _STRIP_TOP, _STRIP_HEIGHT = 760, 18, 26
_MARKS_MAX: Final = 200


def fence_strip(marks: Sequence[FenceMark], *, begin: datetime, end: datetime) -> Markup:
    """The holders of one lock over time: a block for each fence, a cross for each refused write.

    Blocks take turns between two shades, so that a change of fence is seen where one holder follows
    the other at once.
    """
    shown = sorted(marks, key=lambda mark: mark.at)[-_MARKS_MAX:]
    length_s = max(0.001, (end - begin).total_seconds())

    def x(time: datetime) -> float:
        return _STRIP_WIDTH * max(0.0, min(1.0, (time - begin).total_seconds() / length_s))

    drawn: list[str] = []
    number = 0
    for place, mark in enumerate(shown):
        if mark.what == "acquired":
            until = _held_until(shown[place + 1 :], end)
            left, right = x(mark.at), x(until)
            words = f"fence {mark.fence}, {visible(mark.holder)}, {_span(mark.at, until)}"
            drawn.append(
                f'<g class="term t{number % 2}"><title>{escape(words)}</title>'
                f'<rect x="{left:.1f}" y="{_STRIP_TOP}" width="{max(2.0, right - left):.1f}"'
                f' height="{_STRIP_HEIGHT}"/></g>'
            )
            if right - left > 60:  # noqa: PLR2004 - a fence's last digits fit in
                drawn.append(
                    f'<text class="in" x="{left + 5:.1f}" y="{_STRIP_TOP + 17}">'
                    f"…{mark.fence % 10**6:06d}</text>"
                )
            number += 1
        elif mark.what in ("forced", "refused"):
            words = (
                f"released by force: fence {mark.fence}"
                if mark.what == "forced"
                else f"refused: a write with the older fence {mark.fence}"
            )
            at = x(mark.at)
            drawn.append(
                f'<g class="{mark.what}"><title>{escape(words)}</title>'
                f'<path d="M{at - 5:.1f} 4l10 10m0 -10l-10 10M{at:.1f} 14V'
                f'{_STRIP_TOP + _STRIP_HEIGHT}"/></g>'
            )
    height = _STRIP_TOP + _STRIP_HEIGHT + 20
    refused = sum(mark.what == "refused" for mark in shown)
    terms = f"{number} {'term' if number == 1 else 'terms'}"
    writes = f"{refused} refused {'write' if refused == 1 else 'writes'}"
    label = f"{terms} in {_span(begin, end)}, {writes}"
    drawn.append(f'<text class="end" x="{_STRIP_WIDTH}" y="{height - 5}">now</text>')
    drawn.append(f'<text x="0" y="{height - 5}">{escape(_span(begin, end))} ago</text>')
    return Markup(  # noqa: S704 - made of numbers, class names and escaped text
        f'<svg class="fences" viewBox="0 0 {_STRIP_WIDTH} {height}" role="img"'
        f' aria-label="{escape(label)}"><rect class="track" y="{_STRIP_TOP}"'
        f' width="{_STRIP_WIDTH}" height="{_STRIP_HEIGHT}"/>{"".join(drawn)}</svg>'
    )


def _held_until(later: Sequence[FenceMark], end: datetime) -> datetime:
    ends = ("acquired", "released", "forced")
    return next((mark.at for mark in later if mark.what in ends), end)


def _span(begin: datetime, end: datetime) -> str:
    return duration((end - begin).total_seconds() * 1_000)
