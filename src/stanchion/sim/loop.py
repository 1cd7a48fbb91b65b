"""Virtual time and simulated processes: an event loop in which waiting costs nothing.

Whenever nothing can run, the clock jumps to the next timer: an hour of sleeping takes as long as
the code that runs in it. There is no input or output, so the same program has the same history
every time.

All simulated processes share the loop. Every callback and timer carries, in its context, the
process that set it. A paused process runs nothing, not even timers; callbacks that become due
meanwhile run in their order when it resumes. A dead process never runs again: not even its
``finally`` blocks do.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, Protocol, TypeVar, TypeVarTuple, Unpack

from stanchion.core.lease import Moment
from stanchion.core.model import Instant

__all__ = ["CURRENT", "LoopClock", "NothingLeft", "Process", "VirtualLoop", "run"]

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")


class DueCallback(Protocol):
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
        self._held: deque[DueCallback] = deque()
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

    def resume(self) -> list[DueCallback]:
        """Go on. What became due meanwhile is handed back, for the loop to run now."""
        self.is_paused = False
        held, self._held = list(self._held), deque()
        return held

    def kill(self) -> None:
        """End now. Tasks are kept until the world ends: to collect them would run their ends."""
        self.is_dead = True
        self._kept = list(asyncio.all_tasks())

    def stops(self, handle: DueCallback) -> bool:
        """Whether a callback that is due does not run now."""
        if self.is_paused or self.is_dead:
            self._held.append(handle)
            return True
        return False


CURRENT: Final[ContextVar[Process | None]] = ContextVar("process", default=None)
"""In whose name the present callback runs."""


_TURNS_MAX: Final = 100_000
"""Turns of the loop in which no time passes."""
_UNWIND_S: Final = 60.0
_START: Final = Instant(1_700_000_000_000)


def run(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine to its end, in virtual time. Tasks that are left over are cancelled."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class NothingLeft(Exception):
    """Every task waits, and nothing will ever wake one of them."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when nothing else can happen."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        self.is_over = False
        self.processes: list[Process] = []
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def resume(self, process: Process) -> None:
        """Let a process that stood still go on: first with what became due meanwhile."""
        for held in process.resume():
            super().call_soon(held.again, context=Context())

    def dissolve(self) -> None:
        """End whatever is left, quickly and without a word, and close.

        The world is over: nobody stands still any more, and the dead may unwind.
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

    # Every callback of the loop is made in one of these two. Ours ask their process first.

    def call_soon(
        self,
        callback: Callable[[Unpack[_Arguments]], object],
        *args: *_Arguments,
        context: Context | None = None,
    ) -> asyncio.Handle:
        if self.is_closed():
            # Whoever could not unwind in time is thrown away after the end, and may still want to
            # wake somebody on its way out: there is nobody any more.
            return asyncio.Handle(callback, args, self, context)
        handle = super().call_soon(callback, *args, context=context)
        handle.__class__ = _Handle
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[_Arguments]], object],
        *args: *_Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = super().call_at(when, callback, *args, context=context)
        timer.__class__ = _Timer
        return timer


async def _ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    async with asyncio.timeout(_UNWIND_S):
        await asyncio.gather(*tasks, return_exceptions=True)


class _Handle(asyncio.Handle):
    """A callback that runs only while its process does."""

    __slots__ = ()

    def again(self) -> None:
        """Run after all, unless it was cancelled meanwhile."""
        if not self.cancelled():
            self._run()

    def _run(self) -> None:
        process = self._context.get(CURRENT)  # type: ignore[attr-defined]  # not in the stubs
        if process is None or self._loop.is_over or not process.stops(self):  # type: ignore[attr-defined]  # likewise
            super()._run()


class _Timer(asyncio.TimerHandle):
    """Likewise, at a time."""

    __slots__ = ()
    again = _Handle.again

    def _run(self) -> None:
        process = self._context.get(CURRENT)  # type: ignore[attr-defined]  # not in the stubs
        if process is None or self._loop.is_over or not process.stops(self):  # type: ignore[attr-defined]  # likewise
            super()._run()


class LoopClock:
    """The clock port, on the running loop's time. Drift and steps make it a bad clock."""

    def __init__(self, *, drift: float = 0.0, start: Instant = _START) -> None:
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._rate = 1 + drift
        self._start = start
        self.step_ms = 0
        """How far the time of day was set forward, or back."""
        self.jump_ms = 0
        """Time that passed without the loop: work that never awaits, a machine that was asleep."""

    def now(self) -> Instant:
        return Instant(self._start + self.moment() + self.step_ms)

    def moment(self) -> Moment:
        passed_ms = (self._loop.time() - self._began_s) * self._rate * 1000
        return Moment(int(passed_ms) + self.jump_ms)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._rate)


class _Jumping(selectors.BaseSelector):
    """Stands where a loop waits for sockets. There are none: it moves the time instead."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._turns = 0
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

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeft("every task waits, and no timer is set")
        self._turns = 0 if timeout > 0 else self._turns + 1
        if self._turns > _TURNS_MAX:
            self._turns = 0
            raise NothingLeft("something goes on and on, and no time passes")
        self.now_s += max(0.0, timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys
