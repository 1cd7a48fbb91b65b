"""Outbox: publishes runs with a non-empty inbox on the bus, until they are advanced.

The relay takes due rows and publishes them as calls; the replica that receives a call advances the
run and returns a disposition. A row stays in the store until the commit that empties the run's
inbox. So a lost message, a crashed replica or an unavailable bus delays an event and never loses
it: the row becomes due again.

While the bus is unavailable the relay handles the rows itself: runs finish without the bus.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, assert_never

from stanchion.core.retry import Backoff, Exponential, backoff_ms
from stanchion.ports.bus import Ack, Dead, Disposition, Retry
from stanchion.ports.errors import BackendError
from stanchion.ports.records import OutboxRow
from stanchion.ports.store import Outbox
from stanchion.services.advance import (
    Advanced,
    AdvanceFailed,
    Advancer,
    DeadLettered,
    PutOff,
    RunBusy,
    RunMissing,
)
from stanchion.services.context import ReplicaContext, Rules
from stanchion.services.log import OutageLogger

ROWS_MAX: Final = 500
TIMERS_MAX: Final = 500
HOLD_MS: Final = 5_000
"""A published row that was not confirmed becomes due again after this."""
POLL_S: Final = 0.2
AT_ONCE_MAX: Final = 64
BUS_AWAY_S: Final = 1.0
"""How long after a failure of the bus rows are handled here without trying it."""
_FAILED_RETRY: Final = Exponential(base_ms=200, cap_ms=10_000, jitter="full")


class Calls:
    """Handles calls to advance a run."""

    def __init__(self, context: ReplicaContext, *, advancer: Advancer, rules: Rules) -> None:
        self._outbox: Outbox = context.store
        self._entropy = context.entropy
        self._signals = context.signals
        self._advancer = advancer
        self._rules = rules

    async def handle(self, row: OutboxRow) -> Disposition:
        """Advance the run; return what the bus should do with the call."""
        outcome = await self._advancer.advance(row.run_id)
        match outcome:
            case Advanced() | RunMissing():
                return await self._confirm(row)
            case RunBusy():
                self._signals.lock_busy()
                return Retry(self._delay_ms(self._rules.lock_busy()))
            case PutOff():
                self._signals.put_off()
                return Retry(self._delay_ms(self._rules.backend_error()))
            case AdvanceFailed(_, failures):
                return Retry(1 + backoff_ms(_FAILED_RETRY, failures, self._entropy.unit()))
            case DeadLettered(cause):
                return Dead(cause)
            case _:
                assert_never(outcome)

    async def _confirm(self, row: OutboxRow) -> Disposition:
        try:
            await self._outbox.confirm_outbox([row])
        except BackendError:
            # The commit has nearly always removed the row; a row that is left becomes due again,
            # and its call finds an empty inbox.
            self._signals.put_off()
        return Ack()

    def _delay_ms(self, policy: Backoff) -> int:
        return backoff_ms(policy, 1, self._entropy.unit())


class Relay:
    """Fires due timers, and publishes due rows on the bus."""

    def __init__(self, context: ReplicaContext, *, calls: Calls) -> None:
        self._outbox: Outbox = context.store
        self._bus = context.bus
        self._clock = context.clock
        self._signals = context.signals
        self._calls = calls
        self._bus_away_until = 0
        self._outage = OutageLogger("relay_failed", "relay_recovered")
        self._bus_outage = OutageLogger("bus_away", "bus_back")
        self._here: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Relay due rows until cancelled."""
        try:
            while True:
                try:
                    more = await self.relay()
                except BackendError as error:
                    self._outage.failed(error)
                    more = False
                else:
                    self._outage.worked()
                if not more:
                    await self._clock.sleep(POLL_S)
        finally:
            for task in self._here:
                task.cancel()

    async def relay(self) -> bool:
        """Relay what is due now; return whether there may be more."""
        fired = await self._outbox.fire_timers(limit=TIMERS_MAX)
        free = ROWS_MAX - len(self._here)
        rows = await self._outbox.take_outbox(limit=free, hold_ms=HOLD_MS) if free > 0 else ()
        if rows:
            await self._publish(rows)
        return len(fired) == TIMERS_MAX or len(rows) == free > 0

    async def _publish(self, rows: Sequence[OutboxRow]) -> None:
        if self._clock.moment() >= self._bus_away_until:
            try:
                new = await self._bus.publish(rows)
            except BackendError as error:
                self._bus_outage.failed(error)
                self._bus_away_until = self._clock.moment() + round(BUS_AWAY_S * 1000)
            else:
                self._bus_outage.worked()
                self._signals.duplicate_publishes(len(rows) - new)
                return
        for row in rows:
            task = asyncio.create_task(self._handle_here(row), name=f"call {row.run_id}")
            self._here.add(task)
            task.add_done_callback(self._here.discard)

    async def _handle_here(self, row: OutboxRow) -> None:
        disposition = await self._calls.handle(row)
        if isinstance(disposition, Retry):
            try:
                await self._outbox.defer_outbox(row, delay_ms=disposition.delay_ms)
            except BackendError:
                return  # the row becomes due again after HOLD_MS
