"""The local bus, for one process: the outbox table is the queue.

A call is a row of the outbox, and the row stays in the store until a commit has emptied the inbox
of the run. So nothing here needs to survive a crash: the next process finds the rows due and
publishes them again.

The delay of a retry is waited for here, which makes it exact; the relay only polls. The row is also
deferred in the store, so that a new process respects the delay and the relay does not publish the
row again while it waits.

Tenants take turns: the calls of one that has thousands, because all its timers are due at the same
moment, do not go before those of another.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias, assert_never

from stanchion.core.model import RunId, TenantId
from stanchion.ports.bus import Ack, Bell, Dead, Disposition, Handler, Retry
from stanchion.ports.clock import Clock
from stanchion.ports.errors import BackendUnavailable, sentence
from stanchion.ports.records import OutboxRow
from stanchion.ports.store import Outbox

_MS_PER_S: Final = 1_000


class LocalBus:
    """Calls and bells within this process."""

    has_turns = True

    def __init__(self, outbox: Outbox, clock: Clock) -> None:
        self._outbox = outbox
        self._clock = clock
        self._listeners = BellListeners()
        self._queue = _Turns()
        self._pending: set[RunId] = set()
        """Runs with a call that is queued, being handled, or waiting for its retry."""
        self._waits: dict[RunId, asyncio.Task[None]] = {}
        self._is_closed = False

    async def publish(self, calls: Sequence[OutboxRow]) -> int:
        await self.ping()
        fresh = 0
        for call in calls:
            if call.run_id not in self._pending:
                self._pending.add(call.run_id)
                self._queue.put(call)
                fresh += 1
        return fresh

    async def consume(self, handle: Handler, *, at_once_max: int) -> None:
        async with asyncio.TaskGroup() as hands:
            for _ in range(at_once_max):
                hands.create_task(self._serve(handle), name="bus-hand")

    def ring(self, bell: Bell, note: str = "") -> None:
        self._listeners.hear(bell, note)

    def listen(self, bell: Bell, hear: Callable[[str], None]) -> Callable[[], None]:
        return self._listeners.listen(bell, hear)

    async def pending(self) -> int:
        return len(self._pending)

    async def backlog(self) -> int:
        return len(self._pending) - len(self._waits)

    async def ping(self) -> None:
        if self._is_closed:
            raise BackendUnavailable("the bus is closed")

    async def close(self) -> None:
        self._is_closed = True
        waits = list(self._waits.values())
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    async def _serve(self, handle: Handler) -> None:
        while True:
            call = await self._queue.get()
            try:
                disposition = await handled(handle, call)
            except asyncio.CancelledError:
                # Not answered: the next consumer gets it.
                self._queue.put(call)
                raise
            match disposition:
                case Ack() | Dead():
                    self._pending.discard(call.run_id)
                case Retry(delay_ms=0):
                    self._queue.put(call)
                case Retry(delay_ms=delay_ms):
                    wait = asyncio.create_task(self._retry(call, delay_ms), name="bus-retry")
                    self._waits[call.run_id] = wait
                case _:
                    assert_never(disposition)

    async def _retry(self, call: OutboxRow, delay_ms: int) -> None:
        # Concurrent, so that a slow store does not add to the delay. If deferring fails, the row is
        # due again at the end of its hold.
        await asyncio.gather(
            self._clock.sleep(delay_ms / _MS_PER_S),
            self._outbox.defer_outbox(call, delay_ms=delay_ms),
            return_exceptions=True,
        )
        del self._waits[call.run_id]
        self._queue.put(call)


class _Turns:
    """Calls that wait to be handled. Tenants take turns, and the calls of each keep their order."""

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[TenantId, deque[OutboxRow]] = OrderedDict()
        self._waiting = asyncio.Semaphore(0)

    def put(self, call: OutboxRow) -> None:
        """Add a call."""
        self._by_tenant.setdefault(call.tenant, deque()).append(call)
        self._waiting.release()

    async def get(self) -> OutboxRow:
        """Remove and return the next call; wait for one."""
        await self._waiting.acquire()
        tenant, calls = next(iter(self._by_tenant.items()))
        call = calls.popleft()
        if calls:
            self._by_tenant.move_to_end(tenant)
        else:
            del self._by_tenant[tenant]
        return call


_log: Final = logging.getLogger("stanchion")

_Hear: TypeAlias = Callable[[str], None]


class BellListeners:
    """The listeners of one process, by bell."""

    def __init__(self) -> None:
        # Keyed by number, since the same function may be registered twice.
        self._hooks: dict[Bell, dict[int, _Hear]] = {}
        self._listened = 0

    def listen(self, bell: Bell, hear: _Hear) -> Callable[[], None]:
        """Call ``hear`` with the note of every such bell. Returns a function that stops it."""
        self._listened += 1
        number, hooks = self._listened, self._hooks.setdefault(bell, {})
        hooks[number] = hear

        def stop() -> None:
            hooks.pop(number, None)

        return stop

    def hear(self, bell: Bell, note: str) -> None:
        """Notify all current listeners in the next iteration of the event loop."""
        hooks = self._hooks.get(bell)
        if not hooks:
            return
        loop = asyncio.get_running_loop()
        for number in hooks:
            loop.call_soon(self._tell, bell, number, note)

    def _tell(self, bell: Bell, number: int, note: str) -> None:
        hear = self._hooks[bell].get(number)
        if hear is None:
            return
        try:
            hear(note)
        except Exception as error:  # noqa: BLE001 - an error of a listener must not reach the sender
            fields = {"bell": bell.value, "error": sentence(error)}
            _log.error("bell_unheard", extra={"fields": fields}, exc_info=error)


_AFTER_A_FAULT: Final = Retry(1_000)
_GRACE_S: Final = 5.0
"""How long a cancelled handler may take to end."""


async def handled(
    handle: Handler,
    call: OutboxRow,
    *,
    still: Callable[[], Awaitable[None]] | None = None,
    every_s: float | None = None,
) -> Disposition:
    """The disposition of the handler; ``still`` is called regularly while it works.

    If the handler raises, the call is retried.
    """
    work = asyncio.ensure_future(handle(call))
    try:
        while not work.done():
            await asyncio.wait({work}, timeout=every_s)
            if still is not None and not work.done():
                await still()
    except asyncio.CancelledError:
        work.cancel()
        await asyncio.wait({work}, timeout=_GRACE_S)
        raise
    if work.cancelled():
        return _failed(call, asyncio.CancelledError("the handler was cancelled"))
    error = work.exception()
    return work.result() if error is None else _failed(call, error)


def _failed(call: OutboxRow, error: BaseException) -> Disposition:
    fields = {"run_id": call.run_id, "tenant": call.tenant, "error": sentence(error)}
    _log.error("bus_handler_failed", extra={"fields": fields}, exc_info=error)
    return _AFTER_A_FAULT
