"""Lanes: a thread that owns one thing, and a queue in front of it.

Some things may block: a file, a disk. They get a thread of their own, and coroutines queue for it.
The thread sleeps until somebody asks, then takes everybody who waits, up to a bound, and serves
them together: what is costly once (a transaction, a sync to disk) is paid once for all of them.

Every wait has an end. A caller who has waited long enough gets ``BackendTimeout``; one that leaves,
by that or by cancellation, before its turn has come is passed over. A queue that is too long turns
new callers away with ``BackendUnavailable``, since by the time of their turn they would have left.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeAlias, TypeVar

from stanchion.ports.errors import BackendTimeout, BackendUnavailable

__all__ = ["Call", "Lane", "Serve"]

_Thing = TypeVar("_Thing")
_Answer = TypeVar("_Answer")

_BATCH_MAX: Final = 512
"""Callers served together. More would not be cheaper, and the first one waits for the last."""
_CLOSE_WAIT_S: Final = 30.0


class Call(Generic[_Thing]):
    """One caller's request, and its answer once there is one."""

    __slots__ = ("_answer", "_error", "act", "future", "is_wanted", "loop")

    def __init__(self, act: Callable[[_Thing], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.act = act
        self.loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()
        self.is_wanted = True
        """Whether the caller still waits. Turns false once, on the caller's thread."""
        self._answer: Any = None
        self._error: Exception | None = None

    def answer(self, answer: object) -> None:
        """Say what came of it."""
        self._answer = answer

    def fail(self, error: Exception) -> None:
        """Say that nothing came of it. What was said before no longer counts."""
        self._error = error

    def forget(self) -> None:
        """What was said no longer counts: it will be done again."""
        self._answer = None
        self._error = None

    def settle(self) -> None:
        """Hand the answer over. On the caller's thread."""
        if self.future.done():
            return
        if self._error is None:
            self.future.set_result(self._answer)
        else:
            self.future.set_exception(self._error)

    def time_out(self, lane: str, wait_s: float) -> None:
        """End the wait without an answer. On the caller's thread."""
        if not self.future.done():
            self.is_wanted = False
            message = f"{lane}: no answer within {wait_s:g} s"
            self.future.set_exception(BackendTimeout(message))


Serve: TypeAlias = Callable[[_Thing, Sequence[Call[_Thing]]], None]
"""Answers or fails every call of a batch. Runs on the lane's thread."""


class Lane(Generic[_Thing]):
    """A thread that owns one thing. Open it with ``Lane.open``."""

    def __init__(
        self,
        name: str,
        make: Callable[[], _Thing],
        serve: Serve[_Thing],
        end: Callable[[_Thing], None],
        *,
        queue_max: int,
    ) -> None:
        self._name = name
        self._make = make
        self._serve = serve
        self._end = end
        self._queue_max = queue_max
        self._queue: SimpleQueue[Call[_Thing] | None] = SimpleQueue()
        """``None`` is the last there will be."""
        self._entering = threading.Lock()
        self._is_closing = False
        self._opened: Future[None] = Future()
        self._ended: Future[None] = Future()
        # Not cancellable: whoever stops waiting for the end does not undo it.
        self._opened.set_running_or_notify_cancel()
        self._ended.set_running_or_notify_cancel()
        # A daemon: a program that ends without closing must not hang on a thread that waits for it.
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)

    @classmethod
    async def open(
        cls,
        name: str,
        make: Callable[[], _Thing],
        serve: Serve[_Thing],
        end: Callable[[_Thing], None],
        *,
        queue_max: int,
    ) -> Lane[_Thing]:
        """Start the thread and make its thing there; raises what making it raised."""
        lane = cls(name, make, serve, end, queue_max=queue_max)
        lane._thread.start()
        try:
            await asyncio.wrap_future(lane._opened)
        except asyncio.CancelledError:
            lane._stop()
            raise
        return lane

    async def call(self, act: Callable[[_Thing], _Answer], *, wait_s: float) -> _Answer:
        """Do something with the thing, in turn; its answer. Waits at most ``wait_s``."""
        loop = asyncio.get_running_loop()
        call = Call(act, loop)
        self._enqueue(call)
        timer = loop.call_later(wait_s, call.time_out, self._name, wait_s)
        try:
            answer: _Answer = await call.future
        finally:
            timer.cancel()
            call.is_wanted = False
        return answer

    async def close(self) -> None:
        """Serve all who wait, then let go of the thing. Safe to call twice."""
        self._stop()
        try:
            async with asyncio.timeout(_CLOSE_WAIT_S):
                await asyncio.wrap_future(self._ended)
        except TimeoutError:
            raise BackendTimeout(f"{self._name}: not closed within {_CLOSE_WAIT_S:g} s") from None
        self._thread.join()  # It has said its last word: nothing is left of it but to be gone.

    def _enqueue(self, call: Call[_Thing]) -> None:
        with self._entering:
            if self._is_closing:
                raise BackendUnavailable(f"{self._name}: closed")
            if self._queue.qsize() >= self._queue_max:
                raise BackendUnavailable(f"{self._name}: {self._queue_max} calls wait already")
            self._queue.put(call)

    def _stop(self) -> None:
        with self._entering:
            if not self._is_closing:
                self._is_closing = True
                self._queue.put(None)

    # ── On the lane's thread ─────────────────────────────────────────────────────────────────────

    def _live(self) -> None:
        try:
            thing = self._make()
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the one who opens
            self._opened.set_exception(error)
            self._ended.set_result(None)
            return
        self._opened.set_result(None)
        try:
            while batch := self._take():
                self._serve_all(thing, batch)
            self._end(thing)
        except Exception as error:  # noqa: BLE001 - and this to the one who closes
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    def _take(self) -> list[Call[_Thing]]:
        """Everybody who waits, at most a batch; nobody, once the lane is closed and empty."""
        batch: list[Call[_Thing]] = []
        while not batch or (self._queue.qsize() and len(batch) < _BATCH_MAX):
            call = self._queue.get()
            if call is None:
                self._queue.put(None)  # for the next time, when there is nobody before it
                break
            batch.append(call)
        return batch

    def _serve_all(self, thing: _Thing, batch: list[Call[_Thing]]) -> None:
        wanted = [call for call in batch if call.is_wanted]
        try:
            if wanted:
                self._serve(thing, wanted)
        except Exception as error:  # noqa: BLE001 - nobody may be left without an answer
            for call in wanted:
                call.fail(error)
        _deliver(wanted)


def _deliver(calls: Iterable[Call[Any]]) -> None:
    """Wake the callers: each loop once, however many of its callers were served."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Call[Any]]] = {}
    for call in calls:
        by_loop.setdefault(call.loop, []).append(call)
    for loop, theirs in by_loop.items():
        # A closed loop has no callers any more.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, theirs)


def _settle(calls: Iterable[Call[Any]]) -> None:
    for call in calls:
        call.settle()
