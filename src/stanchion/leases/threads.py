"""Leases for threads: the same, without ``async``.

    leases = SyncLeases("sqlite:leases.db")
    with leases.hold("invoice:42", wait_s=10) as lease:
        ...
        lease.check()       # raises LeaseLost; a thread cannot be cancelled, so it has to ask

One event loop in a thread of its own serves all holds, so renewals go on while the body computes or
blocks. Nobody can stop a thread from outside: a body that does not ask finds out at its end, from
``LeaseLost``, or from whatever compares the fence. To be told at once there is ``on_lost``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, TypedDict, Unpack

from stanchion.core.lease import LeaseLost, LeasePolicy
from stanchion.core.model import Risk
from stanchion.core.retry import Backoff
from stanchion.leases.leases import Leases, RiskName
from stanchion.leases.waiting import Order
from stanchion.services.lease_events import LeaseHook
from stanchion.services.renewal import Lease

__all__ = ["HoldOptions", "LeasesOptions", "OnLost", "SyncLeases"]

OnLost: TypeAlias = Callable[[LeaseLost], None]
_CLOSE_S_MAX: Final = 10.0
_END_S_MAX: Final = 10.0
"""Far longer than giving a lease back may take: only a loop that is gone takes longer."""
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
        self._make()  # What is wrong with the options is said here, not by the first hold.
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
        """Let go of everything. Holds must have ended before. Safe to call twice."""
        self._is_closed = True
        if self._engine is not None:
            self._engine.stop()
            self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _running(self) -> _Engine:
        with self._starting:
            if self._is_closed:
                raise RuntimeError("these leases are closed")
            # A forked child has a copy of everything but the thread: it starts one of its own.
            if self._engine is None or self._engine.pid != os.getpid():
                self._engine = _Engine(self._make)
            return self._engine


class _Engine:
    """A thread with an event loop, and the leases that live on it."""

    def __init__(self, make: Callable[[], Leases]) -> None:
        self.pid = os.getpid()
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, Leases]] = Future()
        # A daemon: a program that ends without closing must not hang on it. Its leases expire.
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._live(make)), name="stanchion-leases", daemon=True
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

    async def _live(self, make: Callable[[], Leases]) -> None:
        stopping = asyncio.Event()
        async with make() as leases:
            self._started.set_result((asyncio.get_running_loop(), stopping, leases))
            await stopping.wait()


class _Hold(AbstractContextManager[Lease]):
    """One hold: what its thread and the loop tell each other.

    Not a generator: those are closed when a program ends, and it would wait for a thread that is
    gone.
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
            raise RuntimeError("a hold is entered once: ask for another")
        self._kept = self._engine.begin(self._keep())
        self._kept.add_done_callback(lambda _: self._granted.cancel())
        try:
            return self._granted.result()
        except CancelledError:
            self._kept.result()  # Raises why nothing was granted.
            raise
        except BaseException:
            # Interrupted, perhaps from the keyboard: nobody may go on waiting in our name.
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
            # The body's own error goes on its way, whatever became of the lease.
            if error is None:
                raise

    async def _keep(self) -> None:
        """Hold the name while the thread's body runs. On the loop."""
        try:
            async with self._engine.leases.hold(self._name, **self._options) as lease:
                self._granted.set_result(lease)
                await self._body_ended.wait()
        except LeaseLost as lost:
            if self._on_lost is not None:
                # Not on the loop: whatever it does, the renewals of other leases go on.
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
