"""Schedules: things by the instant at which they are due."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from itertools import count
from typing import Generic, TypeVar

from stanchion.core.model import Instant

__all__ = ["Schedule"]

_Thing = TypeVar("_Thing", bound=Hashable)


class Schedule(Generic[_Thing]):
    """Each thing is in it at most once. What is due is taken earliest first, then oldest first."""

    def __init__(self) -> None:
        self._due: dict[_Thing, tuple[Instant, int]] = {}
        # Holds every entry ever made that was not passed yet; those that ``_due`` does not confirm
        # were moved or removed. Cheaper than to search a heap.
        self._heap: list[tuple[Instant, int, _Thing]] = []
        self._order = count()

    def put(self, thing: _Thing, due: Instant) -> None:
        """Add it, or move it."""
        order = next(self._order)
        self._due[thing] = (due, order)
        heapq.heappush(self._heap, (due, order, thing))
        if len(self._heap) > 2 * len(self._due) + 64:
            self._heap = [(due, order, thing) for thing, (due, order) in self._due.items()]
            heapq.heapify(self._heap)

    def hasten(self, thing: _Thing, due: Instant) -> None:
        """Add it, or move it to an earlier time."""
        present = self.due(thing)
        if present is None or due < present:
            self.put(thing, due)

    def remove(self, thing: _Thing) -> None:
        """Forget it, if it is there."""
        self._due.pop(thing, None)

    def due(self, thing: _Thing) -> Instant | None:
        """When it is due; ``None`` if it is not there."""
        entry = self._due.get(thing)
        return None if entry is None else entry[0]

    def take(self, now: Instant, limit: int) -> list[_Thing]:
        """Remove and return what is due, at most ``limit``."""
        taken: list[_Thing] = []
        while len(taken) < limit and self._heap and self._heap[0][0] <= now:
            due, order, thing = heapq.heappop(self._heap)
            if self._due.get(thing) == (due, order):
                del self._due[thing]
                taken.append(thing)
        return taken

    def __len__(self) -> int:
        return len(self._due)
