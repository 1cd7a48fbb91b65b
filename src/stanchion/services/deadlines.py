"""Deadlines: nothing lasts for ever, or longer than whoever asked for it.

``asyncio.timeout`` sets and clears a timer for each request, which costs more than routing it. Here
one sweep looks at everything under way a few times a second: a deadline is kept to within a sweep,
and beginning and ending one costs next to nothing.
"""

from __future__ import annotations

import asyncio

__all__ = ["Deadline", "Deadlines"]


class Deadline:
    """Until when one task may go on. When the time is over, the task is cancelled."""

    __slots__ = ("_all", "_cancelling", "_task", "due_s", "is_abandoned", "is_over")

    def __init__(self, everyone: dict[Deadline, None], due_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._all = everyone
        self.due_s = due_s
        self.is_over = False
        self.is_abandoned = False
        everyone[self] = None

    def end(self) -> None:
        """The work is done, in time or not."""
        self._all.pop(self, None)

    def expire(self) -> None:
        """The time is over."""
        if self in self._all:
            self.is_over = True
            self._all.pop(self, None)
            self._task.cancel()

    def abandon(self) -> None:
        """The caller has left: there is nobody to go on for."""
        self.is_abandoned = True
        self.expire()

    def is_why(self) -> bool:
        """Whether the task was cancelled from here, and for nothing else."""
        return self.is_over and self._task.uncancel() <= self._cancelling


class Deadlines:
    """All deadlines of one place, kept to within so many seconds."""

    def __init__(self, *, sweep_s: float) -> None:
        self._sweep_s = sweep_s
        self._all: dict[Deadline, None] = {}
        """In the order of their beginning, so that the same history has the same end."""
        self._sweep: asyncio.TimerHandle | None = None

    def begin(self, within_s: float) -> Deadline:
        """A deadline for the task that asks."""
        loop = asyncio.get_running_loop()
        if self._sweep is None:
            self._sweep = loop.call_later(self._sweep_s, self._look)
        return Deadline(self._all, loop.time() + within_s)

    def extend(self, deadline: Deadline, within_s: float) -> None:
        """So long from now on, instead."""
        deadline.due_s = asyncio.get_running_loop().time() + within_s

    def close(self) -> None:
        """Look no more."""
        if self._sweep is not None:
            self._sweep.cancel()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for deadline in [each for each in self._all if each.due_s <= now_s]:
            deadline.expire()
        self._sweep = loop.call_later(self._sweep_s, self._look) if self._all else None
