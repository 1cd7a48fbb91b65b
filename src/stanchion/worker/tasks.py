"""Tasks: which function handles which topic, and the threads that run blocking functions.

The thread pool of the standard library waits for its threads when a program ends, so a handler that
hangs would keep the worker from exiting. These threads are daemons.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import re
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, Generic, Literal, ParamSpec, TypeAlias, TypeVar

import msgspec

from stanchion.core.limits import TOPIC_CHARS_MAX
from stanchion.worker.job import Job

Executor: TypeAlias = Literal["thread", "process"]
CHILD_NAME: Final = "stanchion-worker-child"
"""The name of the processes that run handlers."""
_TOPIC: Final = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")


class AsyncTask(msgspec.Struct, frozen=True):
    """Runs on the event loop."""

    handler: Callable[[Job], Awaitable[Any]]


class ThreadTask(msgspec.Struct, frozen=True):
    """Runs in a thread."""

    handler: Callable[[Job], Any]


class ProcessTask(msgspec.Struct, frozen=True):
    """Runs in a process."""

    handler: Callable[[Job], Any]


Task: TypeAlias = AsyncTask | ThreadTask | ProcessTask


def make_task(topic: str, handler: Callable[[Job], Any], executor: Executor | None) -> Task:
    """The task for a handler. Raises ``ValueError`` or ``TypeError`` with what is wrong."""
    if len(topic) > TOPIC_CHARS_MAX or _TOPIC.fullmatch(topic) is None:
        raise ValueError(
            f"{topic!r} is no topic: words of letters, digits, '_' or '-', with dots between them"
        )
    if not callable(handler):
        raise TypeError(f"the handler of {topic!r} cannot be called: put a topic in @app.task(…)")
    if _is_async(handler):
        if executor is not None:
            raise ValueError(f"{topic!r} has an async handler: it runs on the loop, in no executor")
        return AsyncTask(handler)
    match executor:
        case "thread" | None:
            return ThreadTask(handler)
        case "process":
            return ProcessTask(handler)
        case _:
            raise ValueError(f"{executor!r} is no executor; there are 'thread' and 'process'")


def _is_async(handler: Callable[[Job], Any]) -> bool:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if inspect.iscoroutinefunction(handler):
        return True
    # An object with an async __call__.
    return inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004 - looked at, not tested for


_P = ParamSpec("_P")
_T = TypeVar("_T")


class ThreadExecutor:
    """As many threads as there were calls at once, at most ``size``."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._calls: SimpleQueue[_Call[object] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._busy = 0

    def call(
        self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> asyncio.Future[_T]:
        """Call it in a thread. Cancelling the future does not end the call."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        context = contextvars.copy_context()
        call = _Call(lambda: context.run(function, *args, **kwargs), future, loop, self._ended)
        self._busy += 1
        if self._busy > len(self._threads) < self._size:
            name = f"stanchion-worker-{len(self._threads)}"
            thread = threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        self._calls.put(call)  # type: ignore[arg-type]  # the queue never looks into the answer
        return future

    def close(self) -> None:
        """Let idle threads end. Busy ones end after their call."""
        for _ in self._threads:
            self._calls.put(None)

    def _ended(self) -> None:
        self._busy -= 1


class _Call(Generic[_T]):
    """A call on its way through a thread and back to its loop."""

    def __init__(
        self,
        function: Callable[[], _T],
        future: asyncio.Future[_T],
        loop: asyncio.AbstractEventLoop,
        on_end: Callable[[], None],
    ) -> None:
        self._function = function
        self._future = future
        self._loop = loop
        self._on_end = on_end

    def run(self) -> None:
        """In the thread."""
        try:
            value = self._function()
        except BaseException as error:  # noqa: BLE001 - it is raised where the call is awaited
            self._back(self._fail, _awaitable(error))
        else:
            self._back(self._return, value)

    def _back(self, function: Callable[[_Arg], None], argument: _Arg) -> None:
        with suppress(RuntimeError):  # The loop is closed: the result is not awaited.
            self._loop.call_soon_threadsafe(function, argument)

    def _return(self, value: _T) -> None:
        self._on_end()
        if not self._future.done():
            self._future.set_result(value)

    def _fail(self, error: BaseException) -> None:
        self._on_end()
        if not self._future.done():
            self._future.set_exception(error)


_Arg = TypeVar("_Arg")


def _awaitable(error: BaseException) -> BaseException:
    if isinstance(error, StopIteration | KeyboardInterrupt):
        # A future cannot carry the first, since awaiting is built on it. The second would end the
        # event loop; it is no signal, since the interpreter raises those in the main thread only.
        wrapped = RuntimeError(f"the handler raised {type(error).__name__}")
        wrapped.__cause__ = error
        return wrapped
    return error


def _serve(calls: SimpleQueue[_Call[object] | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()
        del call  # Or the thread would keep its last job alive.
