"""A worker thread that owns one database, a queue of calls in front of it, and batches of calls.

Files and disks may block, so they get a thread of their own, and coroutines queue for it. The
thread takes all calls that wait, up to a bound, and serves them together: the cost of a transaction
and of a sync to disk is shared by the batch. It is woken once for all calls of an iteration of the
event loop, at its end: woken by the first of them, it would take that one alone, and compete with
the callers behind it for the interpreter.

Every wait is bounded. A caller that has waited long enough gets ``BackendTimeout``. A call whose
caller timed out or was cancelled before its turn is skipped. When the queue is too long, new
callers get ``BackendUnavailable`` at once, since they would time out before their turn.

A batch is one transaction, and callers get their answers after its commit. An operation that fails
is rolled back for its own caller and leaves the others as they are. Few operations fail, so a batch
is first tried without savepoints; if an operation fails, the whole batch is rolled back and done
again with a savepoint for each.

A caller that leaves while its batch is under way has been told that there was no answer in time.
Its operation must not take effect: the batch is rolled back and done again without it. That ends,
since each repetition has fewer callers.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeAlias, TypeVar

import apsw

from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.sqlite.opening import translated
from stanchion.ports.errors import BackendTimeout, BackendUnavailable

_Thing = TypeVar("_Thing")
_Answer = TypeVar("_Answer")

_BATCH_MAX: Final = 512
"""Calls in one batch. More would not be cheaper, and the first one waits for the last."""
_CLOSE_WAIT_S: Final = 30.0


class ThreadCall(Generic[_Thing]):
    """The request of one caller, and its answer once there is one."""

    __slots__ = ("_answer", "_error", "act", "due_s", "future", "is_wanted", "loop", "wait_s")

    def __init__(
        self,
        act: Callable[[_Thing], Any],
        loop: asyncio.AbstractEventLoop,
        wait_s: float = float("inf"),
    ) -> None:
        self.act = act
        self.loop = loop
        self.wait_s = wait_s
        self.due_s = loop.time() + wait_s
        self.future: asyncio.Future[Any] = loop.create_future()
        self.is_wanted = True
        """Whether the caller still waits. Set to false once, on the thread of the caller."""
        self._answer: Any = None
        self._error: Exception | None = None

    def answer(self, answer: object) -> None:
        """Set the answer."""
        self._answer = answer

    def fail(self, error: Exception) -> None:
        """Set an error, which replaces an earlier answer."""
        self._error = error

    def forget(self) -> None:
        """Discard the answer: the operation will be repeated."""
        self._answer = None
        self._error = None

    def settle(self) -> None:
        """Deliver the answer. Called on the thread of the caller."""
        if self.future.done():
            return
        if self._error is None:
            self.future.set_result(self._answer)
        else:
            self.future.set_exception(self._error)

    def time_out(self, thread: str) -> None:
        """End the wait without an answer. Called on the thread of the caller."""
        if not self.future.done():
            self.is_wanted = False
            message = f"{thread}: no answer within {self.wait_s:g} s"
            self.future.set_exception(BackendTimeout(message))


class _Callers:
    """The callers of one event loop: wakes the thread for them, and ends waits that are over.

    One timer for all of them: to set and cancel one for each call takes longer than the rest of
    the hand-over.
    """

    def __init__(
        self, thread: str, wake: Callable[[], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.loop = loop
        self.waiting: dict[ThreadCall[Any], None] = {}
        self._thread = thread
        self._wake_thread = wake
        self._is_waking = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = 0.0

    def watch(self, call: ThreadCall[Any]) -> None:
        """Have a queued call served, and let it time out when it is due.

        Unless it is removed from ``waiting`` before.
        """
        if not self._is_waking:
            self._is_waking = True
            self.loop.call_soon(self._wake)
        self.waiting[call] = None
        # The timer may be that of a call that has ended: it is then set again when it fires.
        if self._timer is None or call.due_s < self._timer_due_s:
            self._set_timer(call.due_s)

    def _wake(self) -> None:
        self._is_waking = False
        self._wake_thread()

    def _set_timer(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_due_s = self.loop.call_at(due_s, self._look), due_s

    def _look(self) -> None:
        self._timer = None
        now_s = self.loop.time()
        for call in [each for each in self.waiting if each.due_s <= now_s]:
            del self.waiting[call]
            call.time_out(self._thread)
        if self.waiting:
            self._set_timer(min(each.due_s for each in self.waiting))


Serve: TypeAlias = Callable[[_Thing, Sequence[ThreadCall[_Thing]]], None]
"""Answers or fails every call of a batch. Runs on the worker thread."""


class WorkerThread(Generic[_Thing]):
    """A thread that owns one resource. Open it with ``WorkerThread.open``."""

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
        self._queue: deque[ThreadCall[_Thing]] = deque()
        self._woken: SimpleQueue[None] = SimpleQueue()
        """Has an entry if the thread is to look at the queue."""
        self._entering = threading.Lock()
        self._is_closing = False
        self._callers: _Callers | None = None
        """The calls of the event loop that called last."""
        self._opened: Future[None] = Future()
        self._ended: Future[None] = Future()
        # Not cancellable: a caller that stops waiting for the end does not prevent it.
        self._opened.set_running_or_notify_cancel()
        self._ended.set_running_or_notify_cancel()
        # A daemon: a program that exits without ``close`` must not hang on the waiting thread.
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
    ) -> WorkerThread[_Thing]:
        """Start the thread and create the resource on it. Raises the error of the creation."""
        thread = cls(name, make, serve, end, queue_max=queue_max)
        thread._thread.start()
        try:
            await asyncio.wrap_future(thread._opened)
        except asyncio.CancelledError:
            thread._stop()
            raise
        return thread

    async def call(self, act: Callable[[_Thing], _Answer], *, wait_s: float) -> _Answer:
        """Run ``act`` on the thread; returns its result. Waits at most ``wait_s``."""
        loop = asyncio.get_running_loop()
        call = ThreadCall(act, loop, wait_s)
        self._enqueue(call)
        callers = self._callers
        if callers is None or callers.loop is not loop:
            callers = self._callers = _Callers(self._name, self._wake, loop)
        callers.watch(call)
        try:
            answer: _Answer = await call.future
        finally:
            callers.waiting.pop(call, None)
            call.is_wanted = False
        return answer

    async def close(self) -> None:
        """Finish all queued calls, then close the resource. Safe to call twice."""
        self._stop()
        try:
            async with asyncio.timeout(_CLOSE_WAIT_S):
                await asyncio.wrap_future(self._ended)
        except TimeoutError:
            raise BackendTimeout(f"{self._name}: not closed within {_CLOSE_WAIT_S:g} s") from None
        self._thread.join()  # ``_ended`` is the last thing it sets, so this returns at once.

    def _enqueue(self, call: ThreadCall[_Thing]) -> None:
        with self._entering:
            if self._is_closing:
                raise BackendUnavailable(f"{self._name}: closed")
            if len(self._queue) >= self._queue_max:
                raise BackendUnavailable(f"{self._name}: {self._queue_max} calls wait already")
            self._queue.append(call)

    def _wake(self) -> None:
        self._woken.put(None)

    def _stop(self) -> None:
        with self._entering:
            if not self._is_closing:
                self._is_closing = True
                self._wake()

    # ── On the worker thread ─────────────────────────────────────────────────────────────────────

    def _live(self) -> None:
        try:
            thing = self._make()
        except Exception as error:  # noqa: BLE001 - raised by ``open``
            self._opened.set_exception(error)
            self._ended.set_result(None)
            return
        self._opened.set_result(None)
        try:
            while batch := self._take():
                self._serve_all(thing, batch)
            self._end(thing)
        except Exception as error:  # noqa: BLE001 - raised by ``close``
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    def _take(self) -> list[ThreadCall[_Thing]]:
        """The next batch of queued calls; empty once the thread is closed and the queue empty."""
        while True:
            # Read first: no call is queued after it is true.
            is_closing = self._is_closing
            size = min(len(self._queue), _BATCH_MAX)
            if size or is_closing:
                return [self._queue.popleft() for _ in range(size)]
            self._woken.get()

    def _serve_all(self, thing: _Thing, batch: list[ThreadCall[_Thing]]) -> None:
        wanted = [call for call in batch if call.is_wanted]
        try:
            if wanted:
                self._serve(thing, wanted)
        except Exception as error:  # noqa: BLE001 - every call must get an answer
            for call in wanted:
                call.fail(error)
        _deliver(wanted)


def _deliver(calls: Iterable[ThreadCall[Any]]) -> None:
    """Wake the callers, with one wake-up per event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[ThreadCall[Any]]] = {}
    for call in calls:
        by_loop.setdefault(call.loop, []).append(call)
    for loop, theirs in by_loop.items():
        # A closed loop has no callers left.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, theirs)


def _settle(calls: Iterable[ThreadCall[Any]]) -> None:
    for call in calls:
        call.settle()


def write_together(database: Database, calls: Sequence[ThreadCall[Database]]) -> None:
    """Serve calls that write, in one transaction."""
    connection = database.connection
    serve = _write
    try:
        while True:
            connection.execute("BEGIN IMMEDIATE")
            try:
                database.upcoming.extend(map(_ACT, calls))
                served = [call for call in calls if serve(database, call)]
                _write_pending(database)
            except _Failed:
                serve = _write_apart
            else:
                if all(map(_IS_WANTED, served)):
                    break
            _end(database, "ROLLBACK")
            for call in calls:
                call.forget()
        database.check_in_place()
        connection.execute("COMMIT")
        database.served(len(calls))
    except Exception as error:  # noqa: BLE001 - it belongs to every caller of the batch
        # The whole batch is rolled back; its answers were not delivered yet.
        _end(database, "ROLLBACK")
        for call in calls:
            call.fail(translated(error, database.path))


_ACT: Final = attrgetter("act")
_IS_WANTED: Final = attrgetter("is_wanted")


class _Failed(Exception):
    """An operation of the batch failed."""


def _write(database: Database, call: ThreadCall[Database]) -> bool:
    """Run the call; ``False`` if its caller no longer waits."""
    database.upcoming.popleft()
    if not call.is_wanted:
        return False
    try:
        call.answer(call.act(database))
    except Exception as error:
        raise _Failed from error
    return True


def _write_pending(database: Database) -> None:
    """Write the pending rows of all calls. A failure cannot be attributed to one of them."""
    try:
        database.pending.write()
    except Exception as error:
        raise _Failed from error


def _write_apart(database: Database, call: ThreadCall[Database]) -> bool:
    """Run the call in a savepoint, so that it can be rolled back alone."""
    connection = database.connection
    database.upcoming.popleft()
    # The caller may have timed out while the transaction waited for another process.
    if not call.is_wanted:
        return False
    connection.execute("SAVEPOINT call")
    try:
        call.answer(call.act(database))
        database.pending.write()
    except Exception as error:
        database.pending.forget()
        # On a full or failing disk SQLite rolls back the whole transaction.
        if not connection.in_transaction:
            raise
        connection.execute("ROLLBACK TO call")
        call.fail(translated(error, database.path))
    connection.execute("RELEASE call")
    return True


def read_together(database: Database, calls: Sequence[ThreadCall[Database]]) -> None:
    """Serve calls that read. All see the same state, which includes all acknowledged writes."""
    try:
        database.connection.execute("BEGIN")
        for call in calls:
            try:
                call.answer(call.act(database))
            except Exception as error:  # noqa: BLE001 - it belongs to the one who asked
                call.fail(translated(error, database.path))
    except apsw.Error as error:
        for call in calls:
            call.fail(translated(error, database.path))
    finally:
        _end(database, "COMMIT")
    database.served(len(calls))


def _end(database: Database, statement: str) -> None:
    """End the transaction if there is one, and ignore errors."""
    database.pending.forget()
    database.upcoming.clear()
    with suppress(apsw.Error):
        if database.connection.in_transaction:
            database.connection.execute(statement)
