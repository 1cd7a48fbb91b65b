"""Outbox: publishes runs with a non-empty inbox on the bus, until they are advanced.

The relay takes due rows and publishes them as calls; the replica that receives a call advances the
run and returns a disposition. A row stays in the store until the commit that empties the run's
inbox. So a lost message, a crashed replica or an unavailable bus delays an event and never loses
it: the row becomes due again.

While the bus is unavailable the relay handles the rows itself: runs finish without the bus. It does
so too while more rows are due than one look takes, unless tenants take turns at the bus: with
thousands of calls of one tenant on it, those of another would wait for minutes. The rows that are
left are in the store, which lets tenants take turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
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
TIMERS_MAX: Final = 256
"""Calls that may be under way: beyond that few timers are fired."""
HOLD_MS: Final = 5_000
"""A published row that was not confirmed becomes due again after this."""
POLL_S: Final = 0.2
_BEHIND_POLL_S: Final = 0.02
"""How soon a replica that is behind looks again for room."""
AT_ONCE_MAX: Final = 64
HERE_MAX: Final = 64
"""Rows that the relay handles itself at the same time, while many are due."""
_HERE_MIN: Final = 16
"""A look for fewer rows than this is not worth its call."""
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
        self._room = asyncio.Event()
        self._is_behind = False
        """Whether the last look found as many timers or rows as it could take."""

    async def run(self) -> None:
        """Relay due rows until cancelled."""
        try:
            while True:
                try:
                    more = await self.relay()
                except BackendError as error:
                    self._outage.failed(error)
                    more = self._is_behind = False
                except Exception as error:  # noqa: BLE001 - one bad row must not stop the next looks
                    self._outage.failed(repr(error))
                    more = self._is_behind = False
                else:
                    self._outage.worked()
                if not more and not (self._is_behind and await self._has_room()):
                    await self._clock.sleep(POLL_S)
        finally:
            for task in self._here:
                task.cancel()

    async def relay(self) -> bool:
        """Relay what is due now; return whether there may be more.

        If timers cannot be fired, rows are relayed nevertheless, and the error is raised then.
        """
        room = await self._room_for_timers()
        has_more = False
        failed: Exception | None = None
        try:
            has_more = await self._fire(room)
        except Exception as error:  # noqa: BLE001 - raised below
            failed = error
        has_more = await self._relay_rows(room, has_timers=has_more)
        if failed is not None:
            raise failed
        return has_more

    async def _fire(self, room: int) -> bool:
        """Fire due timers; whether there may be more."""
        if room >= _HERE_MIN:
            return len(await self._outbox.fire_timers(limit=room)) == room
        if self._bus.has_turns:
            # The calls may be of other tenants than the timers, and have no end.
            await self._outbox.fire_timers(limit=_HERE_MIN)
        return False

    async def _relay_rows(self, room: int, *, has_timers: bool) -> bool:
        """Relay due rows; whether there may be more of them, or of the timers, and room for them.

        ``has_timers``: whether more timers may be due.
        """
        is_here = (self._is_behind or has_timers) and not self._bus.has_turns
        free = (HERE_MAX if is_here else ROWS_MAX) - len(self._here)
        if free < (_HERE_MIN if is_here else 1):
            return False
        rows = await self._outbox.take_outbox(limit=free, hold_ms=HOLD_MS)
        self._is_behind = has_timers or len(rows) == free or room < _HERE_MIN
        if is_here:
            self._handle_all_here(rows)
        elif rows:
            await self._publish(rows)
        return has_timers or len(rows) == free

    async def _room_for_timers(self) -> int:
        """How many timers may fire now. The others stay in the store, where tenants take turns."""
        if not self._bus.has_turns:
            return HERE_MAX - len(self._here)
        with suppress(BackendError):
            return TIMERS_MAX - await self._bus.backlog() - len(self._here)
        return HERE_MAX - len(self._here)  # the bus is unavailable

    async def _has_room(self) -> bool:
        """Wait until what is under way has made room for a look; not for long."""
        if self._bus.has_turns:
            await self._clock.sleep(_BEHIND_POLL_S)
            return True
        self._room.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await self._room.wait()
                return True
        return False

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
        self._handle_all_here(rows)

    def _handle_all_here(self, rows: Sequence[OutboxRow]) -> None:
        for row in rows:
            task = asyncio.create_task(self._handle_here(row), name=f"call {row.run_id}")
            self._here.add(task)
            task.add_done_callback(self._ended_here)

    def _ended_here(self, task: asyncio.Task[None]) -> None:
        self._here.discard(task)
        if len(self._here) <= HERE_MAX - _HERE_MIN:
            self._room.set()

    async def _handle_here(self, row: OutboxRow) -> None:
        disposition = await self._calls.handle(row)
        if isinstance(disposition, Retry):
            try:
                await self._outbox.defer_outbox(row, delay_ms=disposition.delay_ms)
            except BackendError:
                return  # the row becomes due again after HOLD_MS
