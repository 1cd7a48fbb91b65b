"""Processes: programs of the simulated world, which can stand still or end without a word.

All of them share one event loop. What belongs to whom is known by context: every callback and timer
of the loop carries the process in whose name it was set. A process that stands still runs nothing,
also no timers; what is due meanwhile waits in the order in which it became due. A process that is
dead never runs anything again: no ``finally`` of its own says a last word.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import ContextVar, copy_context
from typing import Any, Final, Protocol, TypeVar, TypeVarTuple, Unpack

__all__ = ["CURRENT", "Process"]

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")


class Held(Protocol):
    """A callback that is due and waits for its process."""

    def again(self) -> None:
        """Run now."""


class Process:
    """One program."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_paused = False
        self.is_dead = False
        self.pauses = 0
        """How often it stood still."""
        self.context = copy_context()
        self.context.run(CURRENT.set, self)
        self._held: deque[Held] = deque()
        self._begun: list[asyncio.Task[Any]] = []
        self._kept: list[asyncio.Task[Any]] = []
        # A virtual loop knows whom it has to wake at the end.
        getattr(asyncio.get_running_loop(), "processes", []).append(self)

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def spawn(
        self, work: Coroutine[Any, Any, _Result], name: str | None = None
    ) -> asyncio.Task[_Result]:
        """Begin a task of this process."""
        loop = asyncio.get_running_loop()
        return loop.create_task(work, name=name, context=self.context.copy())

    def begin(self, work: Coroutine[Any, Any, object], name: str | None = None) -> None:
        """Begin a task that nobody waits for."""
        self._begun.append(self.spawn(work, name))

    def later(
        self,
        seconds: float,
        do: Callable[[Unpack[_Arguments]], object],
        *arguments: *_Arguments,
    ) -> asyncio.TimerHandle:
        """Have something done by this process, later."""
        loop = asyncio.get_running_loop()
        return loop.call_later(seconds, do, *arguments, context=self.context.copy())

    def pause(self) -> None:
        """Stand still."""
        self.is_paused = True
        self.pauses += 1

    def resume(self) -> list[Held]:
        """Go on. What became due meanwhile is handed back, for the loop to run now."""
        self.is_paused = False
        held, self._held = list(self._held), deque()
        return held

    def kill(self) -> None:
        """End now. Tasks are kept until the world ends: to collect them would run their ends."""
        self.is_dead = True
        self._kept = list(asyncio.all_tasks())

    def stops(self, handle: Held) -> bool:
        """Whether a callback that is due does not run now."""
        if self.is_paused or self.is_dead:
            self._held.append(handle)
            return True
        return False


CURRENT: Final[ContextVar[Process | None]] = ContextVar("process", default=None)
"""In whose name the present callback runs."""
