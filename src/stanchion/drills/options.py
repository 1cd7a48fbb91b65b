"""The options of a drill, and how it reports its progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Final, TextIO

import msgspec

_COLUMNS_MAX: Final = 78


class DrillOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to run a drill."""

    quick: bool = False
    seed: int = 1
    out: Path = Path("drill-reports")
    against: str | None = None
    api_key: str | None = None

    def chance(self, purpose: str) -> Random:
        """Chance that depends on the seed and the purpose alone."""
        return Random(f"{self.seed}/{purpose}")  # noqa: S311 - repeatable on purpose

    def __repr__(self) -> str:
        return f"DrillOptions(quick={self.quick}, seed={self.seed}, against={self.against!r})"


class Progress:
    """Says what happens now, what comes next and how long it takes.

    On a terminal one line is redrawn; elsewhere each phase is a line.
    """

    def __init__(
        self,
        drill: str,
        *,
        stream: TextIO = sys.stderr,
        is_live: bool | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drill = drill
        self._stream = stream
        self._is_live = stream.isatty() if is_live is None else is_live
        self._now = now
        self._began = now()
        self._plan: list[tuple[str, float]] = []
        self._done = 0

    def plan(self, phases: Sequence[tuple[str, float]]) -> None:
        """What will happen: each phase with about how many seconds it takes."""
        self._plan = list(phases)
        total_s = sum(time_s for _, time_s in phases)
        count = "1 phase" if len(phases) == 1 else f"{len(phases)} phases"
        self._say(f"{self._drill}: {count}, about {total_s:.0f} s")

    def next(self) -> None:
        """The next phase of the plan begins."""
        name, about_s = self._plan[min(self._done, len(self._plan) - 1)]
        self._done = min(self._done + 1, len(self._plan))
        left_s = sum(time_s for _, time_s in self._plan[self._done - 1 :])
        text = f"{self._drill} {self._done}/{len(self._plan)}: {name}, about {about_s:.0f} s"
        if self._is_live:
            text += f" of {left_s:.0f} s"
        if self._done < len(self._plan):
            text += f"; then {self._plan[self._done][0]}"
        if not self._is_live:
            self._say(f"[{self._now() - self._began:5.1f} s] {text}")
            return
        self._stream.write("\r\x1b[K" + _cut(text))
        self._stream.flush()

    def end(self) -> None:
        """Leave the line to whatever is printed next."""
        if self._is_live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _say(self, text: str) -> None:
        self._stream.write(_cut(text) + "\n" if self._is_live else text + "\n")
        self._stream.flush()


def _cut(text: str) -> str:
    return text if len(text) <= _COLUMNS_MAX else text[: _COLUMNS_MAX - 1] + "…"
