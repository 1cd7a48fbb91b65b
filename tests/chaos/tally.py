"""The tally: how often each statement was checked, and where it did not hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from tests.chaos.fault import Seen

__all__ = ["Losses", "Tally"]

_BEFORE_S: Final = 1.0
_AFTER_S: Final = 0.5


class Tally:
    """Statements, in the order in which they were first checked."""

    def __init__(self) -> None:
        self.checked: Counter[str] = Counter()
        self.broken: dict[str, list[str]] = {}

    def look(self, statement: str, *wrong: Iterable[str]) -> None:
        """One check of a statement. Each sentence says what is wrong; none is good."""
        self.checked[statement] += 1
        found = [sentence for sentences in wrong for sentence in sentences]
        if found:
            self.broken.setdefault(statement, []).extend(found)

    def sentences(self) -> Iterator[str]:
        """Everything that is wrong."""
        for statement, found in self.broken.items():
            for sentence in found:
                yield f"{statement}: {sentence}"


class Losses:
    """What a failover may lose: that which a primary acknowledged just before it was taken away.

    Replication is asynchronous. What callers and workers were told from a second before that moment
    until half a second after it (an answer may have been on its way) may be gone, and nothing else.
    Each use of this is counted, and shown in the verdict.
    """

    def __init__(self, seen: Iterable[Seen]) -> None:
        self._moments = [moment for each in seen for moment in each.losing_at]
        self.used: Counter[str] = Counter()

    def excuse(self, what: str, acknowledged_at: float) -> bool:
        """Whether this may have been lost."""
        is_excused = any(
            moment - _BEFORE_S <= acknowledged_at <= moment + _AFTER_S for moment in self._moments
        )
        self.used[what] += is_excused
        return is_excused
