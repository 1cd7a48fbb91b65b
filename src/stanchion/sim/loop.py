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
from typing import Any, Final, TypeAlias, TypeVar, TypeVarTuple, Unpack

from stanchion.core.lease import Moment
from stanchion.core.model import Instant

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")


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
        self._held: list[_Due] = []
        self._begun: list[asyncio.Task[Any]] = []
        self._kept: list[asyncio.Task[Any]] = []
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        # The loop resumes all processes at the end.
        loop.processes.append(self)

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

    def errors(self) -> list[BaseException]:
        """What tasks whose result is not used have raised."""
        ended = (task for task in self._begun if task.done() and not task.cancelled())
        return [error for task in ended if (error := task.exception()) is not None]

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

    def resume(self) -> list[_Due]:
        """Run again. Returns the callbacks that became due meanwhile, for the loop to run."""
        self.is_paused = False
        self.is_still = self.is_dead
        held, self._held = self._held, []
        return held

    def kill(self) -> None:
        """End now. Tasks are kept until the world ends: collecting them would run ``finally``."""
        self.is_dead = self.is_still = True
        self._kept = list(asyncio.all_tasks())

    def hold(self, due: _Due) -> None:
        """Keep a due callback until ``resume``."""
        self._held.append(due)


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
        self.now_s = 0.0
        """The time. Clocks read it here: a call of ``time`` costs more than the rest of theirs."""
        self._turns = 0
        self._due: deque[_Due] = deque()
        self._timers: list[tuple[float, int, _Due]] = []
        self._order = 0
        """Timers of the same time run in the order in which they were set."""
        self.is_over = False
        self.processes: list[Process] = []
        super().__init__(_NoSelector())

    def time(self) -> float:
        return self.now_s

    def resume(self, process: Process) -> None:
        """Resume a process, first with the callbacks that became due meanwhile."""
        if not self._closed:  # type: ignore[attr-defined]  # not in the stubs
            self._due.extend(process.resume())

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
        if context is None:
            context = copy_context()
        handle = _Handle((callback, args, context, self.now_s))
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
        if context is None:
            context = copy_context()
        timer = _Handle((callback, args, context, when))
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
        when = self.now_s + delay
        if context is None:
            context = copy_context()
        timer = _Handle((callback, args, context, when))
        self._order = order = self._order + 1
        heappush(self._timers, (when, order, timer))
        return timer  # type: ignore[return-value]  # it has the methods

    def after(
        self,
        delay_s: float,
        process: Process,
        callback: Callable[[Unpack[_Arguments]], object],
        *arguments: *_Arguments,
    ) -> None:
        """Run a callback of a process after a delay.

        Half as expensive as ``call_later``: it cannot be cancelled, and timers and tasks that it
        starts belong to no process unless it names one.
        """
        self._order = order = self._order + 1
        heappush(self._timers, (self.now_s + delay_s, order, (process, callback, arguments)))

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

    def _run_once(self) -> None:  # noqa: C901, PLR0912 - calls of its parts would cost too much
        """Run callbacks until the loop is stopped: a call of this method a turn costs too much."""
        due, timers = self._due, self._timers
        popleft = due.popleft
        while True:
            if due or self._stopping:  # type: ignore[attr-defined]  # not in the stubs
                self._turns += 1
                if self._turns > _TURNS_MAX:
                    self._turns = 0
                    raise NothingLeft("callbacks run without end, and no time passes")
            else:
                while timers and timers[0][2][0] is None:
                    heappop(timers)
                if not timers:
                    raise NothingLeft("every task waits, and no timer is set")
                self._turns = 0
                self.now_s = max(self.now_s, timers[0][0])
            now_s = self.now_s
            while timers and timers[0][0] <= now_s:
                due.append(heappop(timers)[2])
            for _ in range(len(due)):
                item: Any = popleft()
                callback: Any
                try:
                    if item.__class__ is tuple:
                        process, callback, arguments = item
                        if process.is_still and not self.is_over:
                            process.hold(item)
                        else:
                            callback(*arguments)
                        continue
                    callback, arguments, context, _ = item
                    if callback is None:
                        continue
                    process = context.get(CURRENT)
                    if process is not None and process.is_still and not self.is_over:
                        process.hold(item)
                    else:
                        context.run(callback, *arguments)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001 - as the loop that it replaces
                    message = f"Exception in callback {callback}"
                    self.call_exception_handler({"message": message, "exception": error})
            if self._stopping:  # type: ignore[attr-defined]  # likewise
                return

    def _timer_handle_cancelled(self, _handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is dropped when it is due."""


async def _ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    async with asyncio.timeout(_UNWIND_S):
        await asyncio.gather(*tasks, return_exceptions=True)


class _Handle(list[Any]):
    """A callback or timer: callback, arguments, context and time.

    It has the methods of the handles of ``asyncio``, which cost several times as much to make:
    they carry what only a debugger reads. A list is made without a call in Python.
    """

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]  # a list has none

    def when(self) -> float:
        at_s: float = self[3]
        return at_s

    def cancel(self) -> None:
        # It stays in the heap until its time, and must not keep what it refers to.
        self[0] = self[1] = None

    def cancelled(self) -> bool:
        return self[0] is None


_Due: TypeAlias = _Handle | tuple[Process, Callable[..., object], tuple[Any, ...]]
"""What the loop runs: a handle, or a callback of a process that cannot be cancelled."""


class LoopClock:
    """The clock port on the time of the running loop, with drift and steps."""

    def __init__(self, *, drift: float = 0.0, start: Instant = _START) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop = loop
        self._began_s = loop.now_s
        self._rate = 1 + drift
        self._start = start
        self.step_ms = 0
        """How far the wall clock was set forward or back."""
        self.jump_ms = 0
        """Time that passed outside the loop: blocking work, or a suspended machine."""

    def now(self) -> Instant:
        passed_ms = int((self._loop.now_s - self._began_s) * self._rate * 1000)
        return Instant(self._start + passed_ms + self.jump_ms + self.step_ms)

    def moment(self) -> Moment:
        return Moment(int((self._loop.now_s - self._began_s) * self._rate * 1000) + self.jump_ms)

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
