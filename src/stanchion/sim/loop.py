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
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Executor
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
        self.is_still = False
        """Whether it is paused or dead."""
        self.pauses = 0
        """How often it was paused."""
        self.context = copy_context()
        self.context.run(CURRENT.set, self)
        self._held: deque[DueCallback] = deque()
        self._begun: list[asyncio.Task[Any]] = []
        self._kept: list[asyncio.Task[Any]] = []
        self.loop = asyncio.get_running_loop()
        # Registered with the virtual loop, which resumes all processes at the end.
        getattr(self.loop, "processes", []).append(self)

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def spawn(
        self, work: Coroutine[Any, Any, _Result], name: str | None = None
    ) -> asyncio.Task[_Result]:
        """Start a task of this process."""
        return self.loop.create_task(work, name=name, context=self.context.copy())

    def begin(self, work: Coroutine[Any, Any, object], name: str | None = None) -> None:
        """Start a task whose result is not used."""
        self._begun.append(self.spawn(work, name))

    def later(
        self,
        seconds: float,
        do: Callable[[Unpack[_Arguments]], object],
        *arguments: *_Arguments,
    ) -> asyncio.TimerHandle:
        """Run a callback in this process after a delay. It must not set context variables."""
        return self.loop.call_later(seconds, do, *arguments, context=self.context)

    def pause(self) -> None:
        """Run nothing until ``resume``."""
        self.is_paused = self.is_still = True
        self.pauses += 1

    def resume(self) -> list[DueCallback]:
        """Run again. Returns the callbacks that became due meanwhile, for the loop to run."""
        self.is_paused = False
        self.is_still = self.is_dead
        held, self._held = list(self._held), deque()
        return held

    def kill(self) -> None:
        """End now. Tasks are kept until the world ends: collecting them would run ``finally``."""
        self.is_dead = self.is_still = True
        self._kept = list(asyncio.all_tasks())

    def hold(self, handle: DueCallback) -> None:
        """Keep a due callback until ``resume``."""
        self._held.append(handle)


CURRENT: Final[ContextVar[Process | None]] = ContextVar("process", default=None)
"""The process of the current callback."""


_TURNS_MAX: Final = 100_000
"""Iterations of the loop without passing time."""
_UNWIND_S: Final = 60.0
_THREAD_S: Final = 0.002
"""How long the work of a thread takes."""
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
        self._due: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        self._order = 0
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

    # The loop is asked at the creation of every future and task. ``bool()`` is ``False``, without a
    # frame in Python.
    get_debug = bool

    # All callbacks of the loop are created here. They check their process before they run.

    def call_soon(
        self,
        callback: Callable[[Unpack[_Arguments]], object],
        *args: *_Arguments,
        context: Context | None = None,
    ) -> asyncio.Handle:
        handle = _Handle(self._now_s, callback, args, self, context)
        # A task that did not unwind in time is collected after the loop is closed, and may still
        # schedule a callback, which is dropped.
        if not self._closed:  # type: ignore[attr-defined]  # not in the stubs
            self._due.append(handle)
        return handle  # type: ignore[return-value]  # it has the methods

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
        timer = _Handle(when, callback, args, self, context)
        self._order = order = self._order + 1
        heappush(self._timers, (when, order, timer))
        return timer  # type: ignore[return-value]  # it has the methods

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[_Arguments]], object],
        *args: *_Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        when = self._now_s + delay
        timer = _Handle(when, callback, args, self, context)
        self._order = order = self._order + 1
        heappush(self._timers, (when, order, timer))
        return timer  # type: ignore[return-value]  # it has the methods

    def run_in_executor(
        self,
        _executor: Executor | None,
        func: Callable[[Unpack[_Arguments]], _Result],
        *args: *_Arguments,
    ) -> asyncio.Future[_Result]:
        """Run a function of a worker thread here: a thread ends at a time that no seed decides."""
        done: asyncio.Future[_Result] = self.create_future()

        def work() -> None:
            if done.done():
                return  # Its caller was cancelled.
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - raised for the caller
                done.set_exception(error)
            else:
                done.set_result(result)

        self.call_later(_THREAD_S, work)
        return done

    def _run_once(self) -> None:
        """Run callbacks until the loop is stopped: a call of this method a turn costs too much."""
        due, timers = self._due, self._timers
        while True:
            if due or self._stopping:  # type: ignore[attr-defined]  # not in the stubs
                self._turns += 1
                if self._turns > _TURNS_MAX:
                    self._turns = 0
                    raise NothingLeft("callbacks run without end, and no time passes")
            else:
                while timers and timers[0][2].is_cancelled:
                    heappop(timers)
                if not timers:
                    raise NothingLeft("every task waits, and no timer is set")
                self._turns = 0
                self._now_s = max(self._now_s, timers[0][0])
            while timers and timers[0][0] <= self._now_s:
                due.append(heappop(timers)[2])
            for _ in range(len(due)):
                due.popleft().again()
            if self._stopping:  # type: ignore[attr-defined]  # likewise
                return

    def _timer_handle_cancelled(self, _handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is dropped when it is due."""


async def _ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    async with asyncio.timeout(_UNWIND_S):
        await asyncio.gather(*tasks, return_exceptions=True)


def _nothing() -> None:
    """The callback of a cancelled timer."""


class _Handle:
    """A callback or timer that runs only while its process runs.

    It has the methods of the handles of ``asyncio``, which cost several times as much to make:
    they carry what only a debugger reads.
    """

    __slots__ = ("_arguments", "_at_s", "_callback", "_context", "_loop", "is_cancelled")

    def __init__(
        self,
        at_s: float,
        callback: Callable[..., object],
        arguments: tuple[object, ...],
        loop: VirtualLoop,
        context: Context | None,
    ) -> None:
        self._at_s = at_s
        self._callback = callback
        self._arguments = arguments
        self._loop = loop
        self._context = copy_context() if context is None else context
        self.is_cancelled = False

    def __repr__(self) -> str:
        return f"<{self._callback} at {self._at_s} s>"

    def when(self) -> float:
        return self._at_s

    def cancel(self) -> None:
        self.is_cancelled = True
        # It stays in the heap until its time, and must not keep what it refers to.
        self._callback, self._arguments = _nothing, ()

    def cancelled(self) -> bool:
        return self.is_cancelled

    def again(self) -> None:
        """Run now, unless it was cancelled; if its process does not run, let it wait."""
        if self.is_cancelled:
            return
        context, loop = self._context, self._loop
        process = context.get(CURRENT)
        if process is not None and process.is_still and not loop.is_over:
            process.hold(self)
            return
        try:
            context.run(self._callback, *self._arguments)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - as the handles that it replaces
            message = f"Exception in callback {self._callback}"
            loop.call_exception_handler({"message": message, "exception": error})


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

    def for_servers_ms(self, span_ms: float) -> float:
        """A span of this clock in the time of servers, which do not drift."""
        return span_ms / self._rate


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
