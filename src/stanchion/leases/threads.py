"""Leases for threads: ``Leases`` without ``async``.

    leases = SyncLeases("sqlite:leases.db")
    with leases.hold("invoice:42", wait_s=10) as lease:
        ...
        lease.check()       # raises LeaseLost; a thread cannot be cancelled, so it must check

One event loop in a thread of its own serves all holds, so leases are renewed while the body
computes or blocks. A thread cannot be stopped from outside: a body that does not call ``check``
gets ``LeaseLost`` at its end, or a refused write where the fence is compared. ``on_lost`` is called
as soon as the lease is lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, TypedDict, Unpack

from stanchion.core.lease import LeaseLost, LeasePolicy
from stanchion.core.model import Risk
from stanchion.core.retry import Backoff
from stanchion.leases.leases import Leases, RiskName
from stanchion.leases.waiting import Order
from stanchion.services.lease_events import LeaseHook
from stanchion.services.renewal import Lease

OnLost: TypeAlias = Callable[[LeaseLost], None]
_CLOSE_S_MAX: Final = 10.0
_END_S_MAX: Final = 10.0
"""Far longer than a release may take: only a dead event loop takes longer."""
_SIGNAL_S_MAX: Final = 0.5
"""The interpreter may notice a signal that comes just before a thread blocks only when the thread
wakes up: without this, an interrupt from the keyboard could be lost for as long as the wait."""
_log = logging.getLogger("stanchion")


class LeasesOptions(TypedDict, total=False):
    """See ``Leases``."""

    ttl_s: float
    namespace: str
    retry: Backoff
    on_event: LeaseHook | None


class HoldOptions(TypedDict, total=False):
    """See ``Leases.hold``."""

    risk: Risk | RiskName
    policy: LeasePolicy | None
    wait_s: float
    order: Order
    floor: int


class SyncLeases:
    """Leases in one store, for any number of threads. ``on_event`` is called in another thread."""

    def __init__(self, url: str, **options: Unpack[LeasesOptions]) -> None:
        self._make: Callable[[], Leases] = lambda: Leases(url, **options)
        self._make()  # raises for wrong options here, not at the first hold
        self._starting = threading.Lock()
        self._engine: _Engine | None = None
        self._is_closed = False

    def hold(
        self, name: str, *, on_lost: OnLost | None = None, **options: Unpack[HoldOptions]
    ) -> AbstractContextManager[Lease]:
        """Hold ``name`` for the body; see ``Leases.hold``.

        ``on_lost`` is called in another thread, as soon as the lease is not trusted any more and
        policy says to stop.
        """
        return _Hold(self._running(), name, options, on_lost)

    def close(self) -> None:
        """Stop the thread and close the store. Holds must have ended before. Safe to call twice."""
        self._is_closed = True
        if self._engine is not None:
            self._engine.stop()
            self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _running(self) -> _Engine:
        with self._starting:
            if self._is_closed:
                raise RuntimeError("these leases are closed")
            # A forked child has no copy of the thread: it starts one of its own.
            if self._engine is None or self._engine.pid != os.getpid():
                self._engine = _Engine(self._make)
            return self._engine


class _Engine:
    """A thread with an event loop and its ``Leases``."""

    def __init__(self, make: Callable[[], Leases]) -> None:
        self.pid = os.getpid()
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, Leases]] = Future()
        # A daemon, so that a program that ends without closing does not hang. Its leases expire.
        self._thread = threading.Thread(
            target=self._run, args=(make,), name="stanchion-leases", daemon=True
        )
        self._thread.start()
        self._loop, self._stopping, self.leases = self._started.result()

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        if self.pid == os.getpid():
            self.call(self._stopping.set)
            self._thread.join(_CLOSE_S_MAX)

    def _run(self, make: Callable[[], Leases]) -> None:
        try:
            asyncio.run(self._live(make))
        except BaseException as error:
            if self._started.done():
                raise
            # No event loop could be opened, perhaps for want of files: the caller must not wait.
            self._started.set_exception(error)

    async def _live(self, make: Callable[[], Leases]) -> None:
        stopping = asyncio.Event()
        async with make() as leases:
            self._started.set_result((asyncio.get_running_loop(), stopping, leases))
            await stopping.wait()


class _Hold(AbstractContextManager[Lease]):
    """One hold, shared between the body's thread and the event loop.

    Not a generator: at the end of a program generators are closed, and this one would wait for a
    dead thread.
    """

    def __init__(
        self, engine: _Engine, name: str, options: HoldOptions, on_lost: OnLost | None
    ) -> None:
        self._engine = engine
        self._name = name
        self._options = options
        self._on_lost = on_lost
        self._granted: Future[Lease] = Future()
        self._body_ended = asyncio.Event()
        self._ended = threading.Event()
        self._kept: Future[None] | None = None

    def __enter__(self) -> Lease:
        if self._kept is not None:
            raise RuntimeError("a hold can be entered only once: call hold again")
        self._kept = self._engine.begin(self._keep())
        self._kept.add_done_callback(lambda _: self._granted.cancel())
        try:
            while True:
                with suppress(TimeoutError):
                    return self._granted.result(_SIGNAL_S_MAX)
        except CancelledError:
            self._kept.result()  # raises why nothing was granted
            raise
        except BaseException:
            # Interrupted, perhaps from the keyboard: the wait on the event loop must end too.
            self._kept.cancel()
            self._ended.wait(_END_S_MAX)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._kept is not None
        self._engine.call(self._body_ended.set)
        try:
            self._kept.result(_END_S_MAX)
        except LeaseLost:
            # An exception of the body takes precedence.
            if error is None:
                raise

    async def _keep(self) -> None:
        """Hold the name while the thread's body runs. Runs on the event loop."""
        try:
            async with self._engine.leases.hold(self._name, **self._options) as lease:
                self._granted.set_result(lease)
                await self._body_ended.wait()
        except LeaseLost as lost:
            if self._on_lost is not None:
                # Not on the event loop, which must go on renewing other leases.
                loop = asyncio.get_running_loop()
                self._calling = loop.run_in_executor(None, _call_back, self._on_lost, lost)
            raise
        finally:
            self._ended.set()


def _call_back(on_lost: OnLost, lost: LeaseLost) -> None:
    try:
        on_lost(lost)
    except Exception:  # noqa: BLE001 - it is the caller's code
        _log.exception("lease_hook_failed")
