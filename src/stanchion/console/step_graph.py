"""Step graphs: the steps of a workflow or run as an SVG, drawn on the server.

The layout is layered: a step's column is one more than the last column of the steps it needs. Edges
that cross several columns go through placeholders in between, the order within a column reduces
crossings (barycentres), and steps move towards their neighbours without overlapping. The steps of a
sub-workflow are laid out by themselves and drawn inside the box of their step.

A status is shown by colour, by a sign and by a word; the kind of a step by its shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Literal, TypeAlias

import msgspec
from markupsafe import Markup, escape

from stanchion.console.text import shortened, visible

StepKind: TypeAlias = Literal["job", "for_each", "approval", "delay", "subworkflow"]

STEPS_MAX: Final = 1_000
EDGES_MAX: Final = 400
"""Edges of one graph. If there are more, those that others imply are left out first."""
_CROSSED_MAX: Final = 1_000
"""Columns that all edges of a graph cross by placeholders; further edges go straight."""
_WIDTH, _HEIGHT = 184.0, 54.0
_COLUMN_GAP, _ROW_GAP = 46.0, 16.0
_PADDING, _HEADER = 14.0, 30.0
_MARGIN: Final = 6.0
_SWEEPS: Final = 6
_NAME_CHARS, _NOTE_CHARS = 20, 25
_FITS_WIDTH: Final = 1_800.0
"""A wider graph is shown at its own size at first, and scrolled."""

_SIGNS: Final[Mapping[str, str]] = {
    "pending": "M-4 0h8",
    "running": "M-3 -5l8 5l-8 5z",
    "waiting": "M-4 -5h8l-8 10h8z",
    "succeeded": "M-5 0l4 4l6 -8",
    "failed": "M-4 -4l8 8m0 -8l-8 8",
    "timed_out": "M0 -5a5 5 0 1 0 .1 0M0 -3v3l2 2",
    "cancelled": "M-4 -4h8v8h-8z",
    "skipped": "M-5 -4l4 4l-4 4M0 -4l4 4l-4 4",
}
"""The sign of each status, around its centre."""


class GraphStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step to draw. A step inside a sub-workflow names the step of that as its ``parent``."""

    id: str
    kind: StepKind = "job"
    needs: tuple[str, ...] = ()
    parent: str | None = None
    status: str | None = None
    """``None``: the graph of a workflow, not of a run."""
    note: str = ""
    """A few words below the name: a topic, a duration."""
    items: tuple[int, int, int] | None = None
    """Of a for-each that has begun: how many items there are, have succeeded, have failed."""
    href: str | None = None


def zoomable_graph(steps: Sequence[GraphStep], label: str) -> Markup:
    """The graph in a frame that scrolls, with three sizes to choose from, without a script."""
    width, svg = _graph(steps, label)
    chosen = "fit" if width <= _FITS_WIDTH else "actual"
    sizes = Markup()
    for name, word in (("fit", "fit"), ("actual", "100 %"), ("double", "200 %")):
        sizes += Markup(
            '<input type="radio" class="zoom-{0}" name="graph-zoom" id="graph-{0}"{1}>'
            '<label class="zoom" for="graph-{0}">{2}</label>'
        ).format(name, Markup(" checked") if name == chosen else "", word)
    return Markup(
        '<div class="zoomable">{}<div class="canvas" tabindex="0" role="region" aria-label="{}">'
        "{}</div></div>"
    ).format(sizes, visible(label), svg)


def step_graph(steps: Sequence[GraphStep], label: str) -> Markup:
    """The graph as an SVG element. ``label`` says what it shows, to readers who cannot see it."""
    return _graph(steps, label)[1]


def _graph(steps: Sequence[GraphStep], label: str) -> tuple[float, Markup]:
    known = {step.id: step for step in steps[:STEPS_MAX]}
    children: dict[str | None, list[GraphStep]] = {}
    for step in known.values():
        parent = step.parent if step.parent in known and step.parent != step.id else None
        children.setdefault(parent, []).append(step)
    room = _Room()
    layout = _laid_out(children, None, room)
    width, height = layout.width + 2 * _MARGIN, layout.height + 2 * _MARGIN
    drawn = _drawn(layout, _MARGIN, _MARGIN)
    if room.left_out:
        label = f"{label}; {room.left_out:,} of their dependencies are not drawn"
    svg = Markup(  # noqa: S704 - made of numbers, class names and escaped text
        f'<svg class="step-graph" width="{width:.0f}" height="{height:.0f}"'
        f' viewBox="0 0 {width:.0f} {height:.0f}" role="group"'
        f' aria-label="{escape(visible(label))}">{"".join(drawn)}</svg>'
    )
    return width, svg


# ── Layout ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Node:
    """A step, or a placeholder where an edge crosses a column."""

    step: GraphStep | None
    column: int
    width: float
    height: float
    inner: _Layout | None = None
    y: float = 0.0
    before: list[_Node] = field(default_factory=list)
    after: list[_Node] = field(default_factory=list)

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


@dataclass(slots=True)
class _Layout:
    """The steps of one workflow, placed."""

    columns: list[list[_Node]]
    lefts: list[float]
    width: float
    height: float


@dataclass(slots=True)
class _Room:
    """How much more of a graph may be drawn: a workflow may have ten thousand dependencies."""

    edges: int = EDGES_MAX
    crossed: int = _CROSSED_MAX
    left_out: int = 0


def _laid_out(
    children: Mapping[str | None, Sequence[GraphStep]], parent: str | None, room: _Room
) -> _Layout:
    steps = children.get(parent, ())
    nodes: dict[str, _Node] = {}
    for step, column in _columns(steps):
        inner = _laid_out(children, step.id, room) if step.id in children else None
        width = _WIDTH if inner is None else max(_WIDTH, inner.width + 2 * _PADDING)
        height = _HEIGHT if inner is None else inner.height + _HEADER + _PADDING
        nodes[step.id] = _Node(step, column, width, height, inner)
    columns: list[list[_Node]] = [
        [] for _ in range(max((node.column for node in nodes.values()), default=-1) + 1)
    ]
    for node in nodes.values():
        columns[node.column].append(node)
    edges = _edges(nodes)
    if len(edges) > room.edges:
        edges = _not_implied(edges)
    room.left_out += max(0, len(edges) - room.edges)
    for begin, end in edges[: room.edges]:
        _connect(begin, end, columns, room)
    room.edges -= min(room.edges, len(edges))
    _reduce_crossings(columns)
    _place(columns)
    lefts, x = [], 0.0
    for nodes_of_column in columns:
        lefts.append(x)
        x += max(node.width for node in nodes_of_column) + _COLUMN_GAP
    bottom = max((node.y + node.height for column in columns for node in column), default=_HEIGHT)
    return _Layout(columns, lefts, max(_WIDTH, x - _COLUMN_GAP), bottom)


def _columns(steps: Sequence[GraphStep]) -> list[tuple[GraphStep, int]]:
    """Each step with its column. Not recursive; a cycle, which a workflow cannot have, is cut."""
    known = {step.id: step for step in steps}
    found: dict[str, int] = {}
    for root in known:
        stack, open_ids = [root], {root}
        while stack:
            step = known[stack[-1]]
            missing = [
                each
                for each in step.needs
                if each in known and each not in found and each not in open_ids
            ]
            if missing:
                stack.append(missing[0])
                open_ids.add(missing[0])
                continue
            if step.id not in found:
                found[step.id] = 1 + max((found.get(each, -1) for each in step.needs), default=-1)
            open_ids.discard(stack.pop())
    return [(step, found[step.id]) for step in steps]


def _edges(nodes: Mapping[str, _Node]) -> list[tuple[_Node, _Node]]:
    """All edges, in the order of the steps that they lead to."""
    return [
        (nodes[needed], node)
        for node in nodes.values()
        for needed in dict.fromkeys(() if node.step is None else node.step.needs)
        if needed in nodes and nodes[needed].column < node.column
    ]


def _not_implied(edges: Sequence[tuple[_Node, _Node]]) -> list[tuple[_Node, _Node]]:
    """The edges without those that follow from others: from a to c, if a leads to b and b to c."""
    bits: dict[int, int] = {}
    """A number with a bit for each step that leads to this one; the highest is the step's own."""
    kept = []
    for end, begins in sorted(_by_end(edges), key=lambda each: each[0].column):
        above = 0
        for begin in sorted(begins, key=lambda each: -each.column):
            own = bits.setdefault(id(begin), 1 << len(bits))
            if not above >> (own.bit_length() - 1) & 1:
                kept.append((begin, end))
                above |= own
        bits[id(end)] = (1 << len(bits)) | above
    return kept


def _by_end(edges: Sequence[tuple[_Node, _Node]]) -> Iterable[tuple[_Node, list[_Node]]]:
    found: dict[int, tuple[_Node, list[_Node]]] = {}
    for begin, end in edges:
        found.setdefault(id(end), (end, []))[1].append(begin)
    return found.values()


def _connect(begin: _Node, end: _Node, columns: list[list[_Node]], room: _Room) -> None:
    """An edge, with a placeholder in each column that it crosses while there is room for them."""
    last, crossed = begin, end.column - begin.column - 1
    is_straight = crossed > room.crossed
    room.crossed -= 0 if is_straight else crossed
    for column in () if is_straight else range(begin.column + 1, end.column):
        between = _Node(None, column, 0.0, 4.0)
        columns[column].append(between)
        last.after.append(between)
        between.before.append(last)
        last = between
    last.after.append(end)
    end.before.append(last)


def _reduce_crossings(columns: list[list[_Node]]) -> None:
    """Sort each column by the mean position of the neighbours, from left and right in turn."""
    for sweep in range(_SWEEPS):
        is_forward = sweep % 2 == 0
        for column in columns if is_forward else reversed(columns):
            _sort(column, columns, is_forward=is_forward)


def _sort(column: list[_Node], columns: list[list[_Node]], *, is_forward: bool) -> None:
    number = column[0].column + (-1 if is_forward else 1)
    if not 0 <= number < len(columns):
        return
    place = {id(node): place for place, node in enumerate(columns[number])}
    keys: dict[int, float] = {}
    for own, node in enumerate(column):
        # A straight edge comes from a column further away.
        neighbours = node.before if is_forward else node.after
        near = [each for each in neighbours if id(each) in place]
        keys[id(node)] = sum(place[id(each)] for each in near) / len(near) if near else float(own)
    column.sort(key=lambda node: keys[id(node)])


def _place(columns: list[list[_Node]]) -> None:
    """Give every node its height on the paper: near its neighbours, below the one above it."""
    for column in columns:
        y = 0.0
        for node in column:
            node.y, y = y, y + node.height + _ROW_GAP
    for sweep in range(_SWEEPS):
        is_forward = sweep % 2 == 0
        for column in columns if is_forward else reversed(columns):
            wanted = [_wanted(node, is_forward=is_forward) for node in column]
            _spread(column, wanted)
    top = min((node.y for column in columns for node in column), default=0.0)
    for column in columns:
        for node in column:
            node.y -= top


def _wanted(node: _Node, *, is_forward: bool) -> float:
    near = (node.before if is_forward else node.after) or node.before or node.after
    if not near:
        return node.y
    return sum(each.middle for each in near) / len(near) - node.height / 2


def _spread(column: Sequence[_Node], wanted: Sequence[float]) -> None:
    """Place the nodes where they want to be; blocks that would overlap share the difference."""
    blocks: list[tuple[int, float, float]] = []
    """Of each block the number of its nodes, its height with the gap below it, and its top."""
    for node, y in zip(column, wanted, strict=True):
        count, size, top = 1, node.height + _ROW_GAP, y
        while blocks and blocks[-1][2] + blocks[-1][1] > top:
            above, above_size, above_top = blocks.pop()
            # The mean of what the members of both blocks want, weighted by their number.
            top = (above_top * above + (top - above_size) * count) / (above + count)
            count, size = above + count, above_size + size
        blocks.append((count, size, top))
    nodes = iter(column)
    for count, _, top in blocks:
        y = top
        for node in islice(nodes, count):
            node.y, y = y, y + node.height + _ROW_GAP


# ── Drawing ──────────────────────────────────────────────────────────────────────────────────────


def _drawn(layout: _Layout, x: float, y: float) -> list[str]:
    edges: list[str] = []
    boxes: list[str] = []
    for column, left in zip(layout.columns, layout.lefts, strict=True):
        for node in column:
            if node.step is not None:
                boxes += _box(node, node.step, x + left, y + node.y)
                edges += [_edge(layout, node, following, x, y) for following in node.after]
    return [f'<g class="edges" aria-hidden="true">{"".join(edges)}</g>', *boxes]


def _edge(layout: _Layout, begin: _Node, following: _Node, x: float, y: float) -> str:
    """A smooth line from a step to the next one, through the placeholders between."""
    at_x, at_y = x + layout.lefts[begin.column] + begin.width, y + begin.middle
    path = f"M{at_x:.1f} {at_y:.1f}"
    widest = max(node.width for node in layout.columns[begin.column])
    path += f"H{x + layout.lefts[begin.column] + widest:.1f}" if widest > begin.width else ""
    at_x = x + layout.lefts[begin.column] + widest
    node = following
    while True:
        to_x, to_y = x + layout.lefts[node.column], y + node.middle
        bend = (to_x - at_x) / 2
        path += f"C{at_x + bend:.1f} {at_y:.1f} {to_x - bend:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"
        if node.step is not None:
            break
        at_x, at_y = to_x + max(each.width for each in layout.columns[node.column]), to_y
        path += f"H{at_x:.1f}"
        node = node.after[0]
    return f'<path class="edge" d="{path}"/><path class="tip" d="M{to_x:.1f} {to_y:.1f}l-7 -4v8z"/>'


def _box(node: _Node, step: GraphStep, x: float, y: float) -> list[str]:
    name, status = visible(step.id.rpartition(".")[2] or step.id), step.status
    words = [step.id, step.kind.replace("_", "-"), (status or "").replace("_", " ")]
    if step.items is not None:
        words.append("{1} of {0} items succeeded, {2} failed".format(*step.items))
    if step.note:
        words.append(step.note)
    title = escape(visible(", ".join(word for word in words if word)))
    state = f"st-{status}" if status in _SIGNS else "st-none"
    drawn = [f'<g class="node k-{step.kind} {state}"><title>{title}</title>']
    drawn.append(_outline(node, step, x, y))
    text_x = x + 12
    if status is not None and status in _SIGNS:
        place = f"translate({x + 17:.1f} {y + 19:.1f})"
        drawn.append(f'<path class="sign" transform="{place}" d="{_SIGNS[status]}"/>')
        text_x = x + 32
    drawn.append(
        f'<text class="name" x="{text_x:.1f}" y="{y + 23:.1f}">'
        f"{escape(shortened(name, _NAME_CHARS))}</text>"
    )
    if node.inner is None:
        note = _note(step)
        drawn.append(
            f'<text class="note" x="{text_x:.1f}" y="{y + 41:.1f}">'
            f"{escape(shortened(note, _NOTE_CHARS))}</text>"
        )
        drawn += _progress(step, x, y)
    drawn.append("</g>")
    linked = drawn
    if step.href is not None:
        linked = [f'<a href="{escape(step.href)}" aria-label="{title}">', *drawn, "</a>"]
    if node.inner is None:
        return linked
    return [*linked, *_drawn(node.inner, x + _PADDING, y + _HEADER)]


def _note(step: GraphStep) -> str:
    words = []
    if step.status is not None:
        words.append(step.status.replace("_", " "))
    if step.items is not None:
        total, succeeded, failed = step.items
        words.append(f"{succeeded}/{total}" + (f", {failed} failed" if failed else ""))
    elif step.note:
        words.append(step.note)
    return visible(" · ".join(words)) or step.kind.replace("_", "-")


def _outline(node: _Node, step: GraphStep, x: float, y: float) -> str:
    width, height = node.width, node.height
    match step.kind:
        case "approval":
            path = (
                f"M{x + 12:.1f} {y:.1f}h{width - 24:.1f}l12 {height / 2:.1f}"
                f"l-12 {height / 2:.1f}h{24 - width:.1f}l-12 {-height / 2:.1f}z"
            )
            return f'<path class="box" d="{path}"/>'
        case "delay":
            return _rect("box", x, y, width, height, height / 2)
        case "for_each":
            behind = _rect("behind", x + 5, y - 4, width - 6, height, 7)
            return behind + _rect("box", x, y, width, height, 7)
        case "subworkflow":
            return _rect("box frame", x, y, width, height, 9)
        case _:
            return _rect("box", x, y, width, height, 7)


def _rect(name: str, x: float, y: float, width: float, height: float, radius: float) -> str:
    return (
        f'<rect class="{name}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}"'
        f' height="{height:.1f}" rx="{radius:.1f}"/>'
    )


def _progress(step: GraphStep, x: float, y: float) -> list[str]:
    """A bar at the foot of a for-each: its succeeded and failed items."""
    if step.items is None or step.items[0] <= 0:
        return []
    total, succeeded, failed = step.items
    width, foot = _WIDTH - 24, y + _HEIGHT - 7
    good, bad = width * min(1.0, succeeded / total), width * min(1.0, failed / total)
    return [
        _rect("track", x + 12, foot, width, 3, 1.5),
        _rect("good", x + 12, foot, good, 3, 1.5),
        _rect("bad", x + 12 + good, foot, bad, 3, 1.5),
    ]
