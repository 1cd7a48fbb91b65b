"""Virtual time and simulated processes: an event loop in which waiting takes no real time.

When no callback can run, the clock jumps to the next timer. There is no I/O, so the same program
always has the same history.

All simulated processes share the loop. Every callback and timer carries, in its context, the
process that set it. A paused process runs nothing, not even timers; callbacks that become due
meanwhile run in their order when it resumes. A dead process never runs again: not even its
``finally`` blocks do.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from typing import Any, Final, Protocol, TypeVar, TypeVarTuple, Unpack

from stanchion.core.lease import Moment
from stanchion.core.model import Instant

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")


class DueCallback(Protocol):
    """A callback that is due and waits for its process."""

    def again(self) -> None:
        """Run the callback now."""


class Process:
    """A simulated process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_paused = False
        self.is_dead = False
        self.pauses = 0
        """How often it was paused."""
        self.context = copy_context()
        self.context.run(CURRENT.set, self)
        self._held: deque[DueCallback] = deque()
        self._begun: list[asyncio.Task[Any]] = []
        self._kept: list[asyncio.Task[Any]] = []
        # Registered with the virtual loop, which resumes all processes at the end.
        getattr(asyncio.get_running_loop(), "processes", []).append(self)

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def spawn(
        self, work: Coroutine[Any, Any, _Result], name: str | None = None
    ) -> asyncio.Task[_Result]:
        """Start a task of this process."""
        loop = asyncio.get_running_loop()
        return loop.create_task(work, name=name, context=self.context.copy())

    def begin(self, work: Coroutine[Any, Any, object], name: str | None = None) -> None:
        """Start a task whose result is not used."""
        self._begun.append(self.spawn(work, name))

    def later(
        self,
        seconds: float,
        do: Callable[[Unpack[_Arguments]], object],
        *arguments: *_Arguments,
    ) -> asyncio.TimerHandle:
        """Run a callback in this process after a delay."""
        loop = asyncio.get_running_loop()
        return loop.call_later(seconds, do, *arguments, context=self.context.copy())

    def pause(self) -> None:
        """Run nothing until ``resume``."""
        self.is_paused = True
        self.pauses += 1

    def resume(self) -> list[DueCallback]:
        """Run again. Returns the callbacks that became due meanwhile, for the loop to run."""
        self.is_paused = False
        held, self._held = list(self._held), deque()
        return held

    def kill(self) -> None:
        """End now. Tasks are kept until the world ends: collecting them would run ``finally``."""
        self.is_dead = True
        self._kept = list(asyncio.all_tasks())

    def stops(self, handle: DueCallback) -> bool:
        """Whether a due callback must not run now."""
        if self.is_paused or self.is_dead:
            self._held.append(handle)
            return True
        return False


CURRENT: Final[ContextVar[Process | None]] = ContextVar("process", default=None)
"""The process of the current callback."""


_TURNS_MAX: Final = 100_000
"""Iterations of the loop without passing time."""
_UNWIND_S: Final = 60.0
_START: Final = Instant(1_700_000_000_000)


def run(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine to its end in virtual time. Remaining tasks are cancelled."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class NothingLeft(Exception):
    """Every task waits, and no timer will wake one."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when no callback can run.

    It keeps its timers in a heap of tuples and runs callbacks itself: the loop of the standard
    library compares timers in Python and polls a selector, a third of the time of a day.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._turns = 0
        self._due: deque[_Handle | _Timer] = deque()
        self._timers: list[tuple[float, int, _Timer]] = []
        self._order = itertools.count()
        """Timers of the same time run in the order in which they were set."""
        self.is_over = False
        self.processes: list[Process] = []
        super().__init__(_NoSelector())

    def time(self) -> float:
        return self._now_s

    def resume(self, process: Process) -> None:
        """Resume a process, first with the callbacks that became due meanwhile."""
        for held in process.resume():
            self.call_soon(held.again, context=Context())

    def dissolve(self) -> None:
        """Cancel all remaining tasks without logging, and close.

        Paused and dead processes run again, so that their tasks can unwind.
        """
        self.is_over = True
        for process in self.processes:
            self.resume(process)
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        with suppress(NothingLeft, TimeoutError):
            self.run_until_complete(_ended(tasks))
        self.close()

    # All callbacks of the loop are created here. They check their process before they run.

    def call_soon(
        self,
        callback: Callable[[Unpack[_Arguments]], object],
        *args: *_Arguments,
        context: Context | None = None,
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        # A task that did not unwind in time is collected after the loop is closed, and may still
        # schedule a callback, which is dropped.
        if not self.is_closed():
            self._due.append(handle)
        return handle

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[_Arguments]], object],
        *args: *_Arguments,
        context: Context | None = None,
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[_Arguments]], object],
        *args: *_Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        heappush(self._timers, (when, next(self._order), timer))
        return timer

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[_Arguments]], object],
        *args: *_Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def _run_once(self) -> None:
        """Run what is due; if nothing is, let time pass until the next timer."""
        due, timers = self._due, self._timers
        if due or self._stopping:  # type: ignore[attr-defined]  # not in the stubs
            self._turns += 1
            if self._turns > _TURNS_MAX:
                self._turns = 0
                raise NothingLeft("callbacks run without end, and no time passes")
        else:
            while timers and timers[0][2].cancelled():
                heappop(timers)
            if not timers:
                raise NothingLeft("every task waits, and no timer is set")
            self._turns = 0
            self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            due.append(heappop(timers)[2])
        for _ in range(len(due)):
            handle = due.popleft()
            if not handle.cancelled():
                handle._run()  # noqa: SLF001 - as the loop that it replaces

    def _timer_handle_cancelled(self, _handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is dropped when it is due."""


async def _ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    async with asyncio.timeout(_UNWIND_S):
        await asyncio.gather(*tasks, return_exceptions=True)


class _Handle(asyncio.Handle):
    """A callback that runs only while its process runs."""

    __slots__ = ()

    def again(self) -> None:
        """Run now, unless it was cancelled."""
        if not self.cancelled():
            self._run()

    def _run(self) -> None:
        process = self._context.get(CURRENT)  # type: ignore[attr-defined]  # not in the stubs
        if process is None or self._loop.is_over or not process.stops(self):  # type: ignore[attr-defined]  # likewise
            super()._run()


class _Timer(asyncio.TimerHandle):
    """A timer that runs only while its process runs."""

    __slots__ = ()
    again = _Handle.again

    def _run(self) -> None:
        process = self._context.get(CURRENT)  # type: ignore[attr-defined]  # not in the stubs
        if process is None or self._loop.is_over or not process.stops(self):  # type: ignore[attr-defined]  # likewise
            super()._run()


class LoopClock:
    """The clock port on the time of the running loop, with drift and steps."""

    def __init__(self, *, drift: float = 0.0, start: Instant = _START) -> None:
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._rate = 1 + drift
        self._start = start
        self.step_ms = 0
        """How far the wall clock was set forward or back."""
        self.jump_ms = 0
        """Time that passed outside the loop: blocking work, or a suspended machine."""

    def now(self) -> Instant:
        return Instant(self._start + self.moment() + self.step_ms)

    def moment(self) -> Moment:
        passed_ms = (self._loop.time() - self._began_s) * self._rate * 1000
        return Moment(int(passed_ms) + self.jump_ms)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._rate)


class _NoSelector(selectors.BaseSelector):
    """The selector of the loop: there are no sockets."""

    def __init__(self) -> None:
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(
        self,
        fileobj: Any,  # noqa: ANN401 - as in the class it replaces
        events: int,
        data: Any = None,  # noqa: ANN401 - likewise
    ) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, -1, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(
        self,
        fileobj: Any,  # noqa: ANN401 - as in the class it replaces
    ) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, _timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys
