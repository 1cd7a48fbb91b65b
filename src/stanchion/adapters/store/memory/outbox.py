"""The outbox in memory: who must be advanced, and when to ask again."""

from __future__ import annotations

from collections.abc import Sequence

from stanchion.adapters.store.memory.shelf import Shelved
from stanchion.core.events import TimerFired
from stanchion.core.model import Instant, RunId
from stanchion.ports.records import OutboxRow

__all__ = ["MemoryOutbox"]


class MemoryOutbox(Shelved):
    """See ``ports.store.Outbox``."""

    async def fire_timers(self, *, limit: int) -> tuple[RunId, ...]:
        now = self._shelf.now()
        fired = self._shelf.timers.take(now, limit)
        for run_id, timer in fired:
            file = self._shelf.runs[run_id]
            due = file.timers.pop(timer)
            entry_id = f"timer:{timer.key}#{due}"
            self._shelf.deliver(file, entry_id, TimerFired(timer=timer), now)
        return tuple(run_id for run_id, _ in fired)

    async def take_outbox(self, *, limit: int, hold_ms: int) -> tuple[OutboxRow, ...]:
        now = self._shelf.now()
        taken = self._shelf.outbox.take(now, limit)
        for run_id in taken:
            self._shelf.outbox.put(run_id, Instant(now + hold_ms))
        return tuple(self._row(run_id) for run_id in taken)

    async def confirm_outbox(self, rows: Sequence[OutboxRow]) -> None:
        for row in rows:
            if self._is_present(row) and not self._shelf.runs[row.run_id].inbox:
                self._shelf.outbox.remove(row.run_id)

    async def defer_outbox(self, row: OutboxRow, *, delay_ms: int) -> None:
        if self._is_present(row):
            self._shelf.outbox.put(row.run_id, Instant(self._shelf.now() + delay_ms))

    async def outbox_size(self) -> int:
        return len(self._shelf.outbox)

    def _row(self, run_id: RunId) -> OutboxRow:
        file = self._shelf.runs[run_id]
        return OutboxRow(run_id, file.run.tenant, file.arrivals)

    def _is_present(self, row: OutboxRow) -> bool:
        """Whether the row is there, and still the one that was taken."""
        return self._shelf.outbox.due(row.run_id) is not None and self._row(row.run_id) == row
