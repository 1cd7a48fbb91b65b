"""A call: one verb with its arguments, ready to be sent to either side."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Any, Final, TypeAlias

from tests.model.side import Side

__all__ = ["LONG_MS", "SHORT_MS", "Ask", "Call", "Domain", "Read", "batches"]

LONG_MS: Final = 3_600_000
"""A term that does not end while an example lasts."""
SHORT_MS: Final = 1
"""A term that has ended when the next batch begins."""

Ask: TypeAlias = Callable[[Side], Awaitable[Any]]
Read: TypeAlias = Callable[[Side, Any], object]


class Domain(StrEnum):
    """What can be short: the terms of leases, of outbox rows, of keys."""

    LEASES = auto()
    OUTBOX = auto()
    KEYS = auto()


def _as_it_is(side: Side, answer: object) -> object:  # noqa: ARG001 - the shape of ``Read``
    return answer


@dataclass(frozen=True)
class Call:
    """``ask`` gets a side's own answer, ``read`` puts it into common words."""

    text: str
    ask: Ask
    read: Read = _as_it_is
    parts: Sequence[Call] = ()
    """Steps between which others may come. Their answers, put together, are the whole answer."""
    part: Call | None = None
    """The same for a sweep, which takes as many such steps as its answer is long."""
    sets: Domain | None = None
    """It begins short terms: whether they have ended is uncertain until time has passed."""
    sees: Domain | None = None
    """It depends on whether terms have ended."""
    is_alone: bool = False
    """It looks at several things that change one by one."""
    teaches: bool = False
    """Its answer has to be read before others, since it brings new words."""

    def __str__(self) -> str:
        return self.text

    def steps(self, answer: object) -> Sequence[Call]:
        """What the model does for it when others come between, in order."""
        if self.part is not None and isinstance(answer, tuple):
            return (self.part,) * len(answer) or (self,)
        return self.parts or (self,)

    def disturbs(self, other: Call) -> bool:
        """Whether the answers to both at once depend on how fast time passes."""
        domain = self.sets
        if domain is None:
            return False
        # Jobs whose terms end at the same instant may become ready in any order.
        return other.sees is domain or (other.sets is domain is Domain.LEASES)


def batches(calls: Sequence[Call]) -> list[list[Call]]:
    """The calls in order, those together that may be sent at once."""
    made: list[list[Call]] = []
    for call in calls:
        last = made[-1] if made else []
        fits = not any(
            other.is_alone or call.is_alone or call.disturbs(other) or other.disturbs(call)
            for other in last
        )
        if last and fits:
            last.append(call)
        else:
            made.append([call])
    return made
