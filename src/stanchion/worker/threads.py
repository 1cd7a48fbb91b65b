"""Threads for blocking handlers.

The standard library's pool waits for its threads when a program ends. A handler that hangs would
keep the worker from ever exiting, so these threads are daemons: a worker that was told to go, goes.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Generic, ParamSpec, TypeVar

__all__ = ["Threads"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Threads:
    """As many threads as there was work at once, at most ``size``."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._calls: SimpleQueue[_Call[object] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._busy = 0

    def call(
        self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> asyncio.Future[_T]:
        """Call it in a thread. To cancel the future forgets the call, and does not end it."""
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
        with suppress(RuntimeError):  # The loop is closed: nobody waits any more.
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
    if isinstance(error, StopIteration):
        # A future cannot carry it, since awaiting is built on it.
        wrapped = RuntimeError("the handler raised StopIteration")
        wrapped.__cause__ = error
        return wrapped
    return error


def _serve(calls: SimpleQueue[_Call[object] | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()
        del call  # Or the thread would keep its last job alive.
