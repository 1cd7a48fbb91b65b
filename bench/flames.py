"""Draw a flame graph from a profiler's stack samples.

    py-spy record --gil --format raw --duration 20 --pid PID --output stacks.txt
    python -m bench.flames stacks.txt flames.svg "A title"

Each box is a function. Its width is the share of samples that contain it; its callees are above it.
Functions of other packages are grey.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

__all__ = ["Box", "boxes", "drawn"]

WIDTH: Final = 1_200
ROW: Final = 17
TOP: Final = 44
LEAST: Final = 0.004
"""Boxes with a smaller share of the samples are not drawn."""
_WAYS_THERE: Final = (
    "(runpy.py",
    "(click/",
    "(stanchion/cli/",
    "(stanchion/__main__",
    "(threading.py",
    "(<frozen",
)
"""Functions that only lead to the entry point."""
LETTER: Final = 6.1
STYLE: Final = (
    "text{font:11px ui-sans-serif,system-ui,sans-serif;fill:#1c2733}"
    ".title{font-size:15px;font-weight:600}"
    ".ours{fill:#9cc4b2}.others{fill:#d5dbe1}.root{fill:#e9edf0}"
    "rect{stroke:#ffffff;stroke-width:.6}"
)


class Box(NamedTuple):
    """One function, called by the boxes below it."""

    frame: str
    depth: int
    begins: float
    part: float


class _Node:
    __slots__ = ("above", "count")

    def __init__(self) -> None:
        self.count = 0
        self.above: dict[str, _Node] = {}


def boxes(stacks: Iterable[str]) -> list[Box]:
    """The boxes of folded stacks: ``outermost;…;innermost COUNT`` on each line."""
    root = _Node()
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        if not stack:
            continue
        node = root
        node.count += int(count)
        thread, *frames = stack.split(";")
        for name in (_thread(thread), *(_function(frame) for frame in frames)):
            if not any(way in name for way in _WAYS_THERE):
                node = node.above.setdefault(name, _Node())
                node.count += int(count)
    return list(_laid_out(root, 0, 0.0, root.count)) if root.count else []


def _thread(frame: str) -> str:
    """Reduce ``thread (7): /path/to/stanchion.db (writer)`` to what is the same in all runs."""
    return frame.rpartition(": ")[2].rpartition("/")[2]


def _function(frame: str) -> str:
    """Remove the line number of ``f (file.py:7)``."""
    name, colon, _ = frame.rpartition(":")
    return f"{name})" if colon else frame


def _laid_out(node: _Node, depth: int, begins: float, total: int) -> Iterator[Box]:
    for frame in sorted(node.above):
        above = node.above[frame]
        part = above.count / total
        if part >= LEAST:
            yield Box(frame, depth, begins, part)
            yield from _laid_out(above, depth + 1, begins, total)
        begins += part


def drawn(found: list[Box], title: str) -> str:
    """Draw the boxes as SVG; the full name of each is a tooltip."""
    depth = max((box.depth for box in found), default=0) + 1
    height = TOP + ROW * depth + 12
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
            f' width="{WIDTH}" height="{height}" role="img" aria-label="{escape(title)}">'
        ),
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text class="title" x="12" y="26">{escape(title)}</text>',
        *(_box(box, height) for box in found),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _box(box: Box, height: int) -> str:
    x, width = box.begins * WIDTH, box.part * WIDTH
    y = height - 8 - ROW * (box.depth + 1)
    kind = "root" if box.depth == 0 else "ours" if "(stanchion/" in box.frame else "others"
    letters = int((width - 6) / LETTER)
    name = box.frame if box.depth == 0 else box.frame.partition(" (")[0]
    shown = name if len(name) <= letters else name[: letters - 1] + "…" if letters > 3 else ""
    text = f'<text x="{x + 3:.1f}" y="{y + 12}">{escape(shown)}</text>' if shown else ""
    return (
        f'<g><title>{escape(box.frame)}: {box.part:.1%}</title><rect class="{kind}" x="{x:.1f}"'
        f' y="{y}" width="{width:.1f}" height="{ROW - 1}" rx="1.5"/>{text}</g>'
    )


def main(stacks: str, picture: str, title: str) -> None:
    """Read the stacks, write the picture."""
    with Path(stacks).open(encoding="utf-8") as lines:
        Path(picture).write_text(drawn(boxes(lines), title), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
