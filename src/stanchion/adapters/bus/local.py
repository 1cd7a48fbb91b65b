"""The local bus: the outbox table is the queue, and this hands out what the relay took from it.

For one process. A call is a row of the outbox, and the row stays in the store until a commit has
emptied the run's inbox. So nothing here needs to survive a crash: the next process finds the rows
due again and publishes them anew.

A retry is waited for here, because only that makes its delay exact; the relay looks now and then.
It is also written into the store, so that a process that starts meanwhile keeps to it, and so that
the relay does not bring the row again and again while it waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, assert_never

from stanchion.adapters.bus.delivery import BellListeners, handled
from stanchion.core.model import RunId
from stanchion.ports.bus import Ack, Bell, Dead, Handler, Retry
from stanchion.ports.clock import Clock
from stanchion.ports.errors import BackendUnavailable
from stanchion.ports.records import OutboxRow
from stanchion.ports.store import Outbox

__all__ = ["LocalBus"]

_MS_PER_S: Final = 1_000


class LocalBus:
    """Calls and bells within this process."""

    def __init__(self, outbox: Outbox, clock: Clock) -> None:
        self._outbox = outbox
        self._clock = clock
        self._listeners = BellListeners()
        self._queue: asyncio.Queue[OutboxRow] = asyncio.Queue()
        self._pending: set[RunId] = set()
        """Runs with a call that is queued, being handled, or waiting to be retried."""
        self._waits: dict[RunId, asyncio.Task[None]] = {}
        self._is_closed = False

    async def publish(self, calls: Sequence[OutboxRow]) -> int:
        await self.ping()
        fresh = 0
        for call in calls:
            if call.run_id not in self._pending:
                self._pending.add(call.run_id)
                self._queue.put_nowait(call)
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
                # Not answered: it is for whoever consumes next.
                self._queue.put_nowait(call)
                raise
            match disposition:
                case Ack() | Dead():
                    self._pending.discard(call.run_id)
                case Retry(delay_ms=0):
                    self._queue.put_nowait(call)
                case Retry(delay_ms=delay_ms):
                    wait = asyncio.create_task(self._retry(call, delay_ms), name="bus-retry")
                    self._waits[call.run_id] = wait
                case _:
                    assert_never(disposition)

    async def _retry(self, call: OutboxRow, delay_ms: int) -> None:
        # Side by side, so that a slow store does not add to the delay. If it fails, the row is due
        # again at the end of its hold: no harm is done.
        await asyncio.gather(
            self._clock.sleep(delay_ms / _MS_PER_S),
            self._outbox.defer_outbox(call, delay_ms=delay_ms),
            return_exceptions=True,
        )
        del self._waits[call.run_id]
        self._queue.put_nowait(call)
