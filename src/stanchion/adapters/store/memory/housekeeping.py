"""Housekeeping in memory: timers, outbox, dead letters, audit, retention."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import islice

from msgspec.structs import replace

from stanchion.adapters.cursor import read_cursor, write_cursor
from stanchion.adapters.outcomes import (
    audit_of_drift,
    discard_entry,
    event_dead_letter,
    replay_entry,
)
from stanchion.adapters.store.memory.state import MemoryPart, MemoryReceipts, RunFile
from stanchion.core.audit import EVERY_ENTRY, LOOKED_AT_FACTOR, AuditEntry, AuditFilter
from stanchion.core.events import Event, TimerFired
from stanchion.core.model import Instant, RunId, TenantId
from stanchion.core.receipts import DAY_MS, Receipt, ReceiptBatch, newest_kept
from stanchion.ports.records import DeadLetter, Drift, OutboxRow, Page, SlotAudit


class MemoryHousekeeping(MemoryPart):
    """See ``ports.store.Housekeeping``."""

    async def write_dead_letter(
        self, run_id: RunId, entry_id: str, *, cause: str
    ) -> DeadLetter | None:
        file = self._state.runs.get(run_id)
        if file is None or entry_id not in file.inbox:
            return None
        event = file.inbox[entry_id]
        self._state.remove_entries(file, entry_id)
        letter = event_dead_letter(
            file.run.tenant, run_id, entry_id, event, cause=cause, at=self._state.now()
        )
        self._state.add_letter(file, letter)
        return letter

    async def count_failure(self, run_id: RunId, entry_id: str) -> int:
        file = self._state.runs.get(run_id)
        if file is None or entry_id not in file.inbox:
            return 0
        file.failures[entry_id] = file.failures.get(entry_id, 0) + 1
        return file.failures[entry_id]

    async def list_dead_letters(
        self, tenant: TenantId | None, *, cursor: str | None = None, limit: int = 100
    ) -> Page[DeadLetter]:
        after = -1 if cursor is None else read_cursor("dead-letters", cursor, tuple[int])[0]
        found = [
            (order, letter)
            for order, letter in self._state.letters.values()
            if order > after and tenant in {None, letter.tenant}
        ]
        page = found[:limit]
        more = len(found) > limit
        return Page(
            tuple(letter for _, letter in page),
            write_cursor("dead-letters", page[-1][0]) if more else None,
        )

    async def replay_dead_letter(
        self, letter_id: str, *, actor: str, audit: AuditEntry | None = None
    ) -> DeadLetter | None:
        return self._take_letter(letter_id, lambda letter: replay_entry(letter, actor), audit)

    async def discard_dead_letter(
        self, letter_id: str, *, actor: str, audit: AuditEntry | None = None
    ) -> DeadLetter | None:
        return self._take_letter(letter_id, lambda letter: discard_entry(letter, actor), audit)

    def _take_letter(
        self,
        letter_id: str,
        entry_of: Callable[[DeadLetter], tuple[str, Event] | None],
        audit: AuditEntry | None,
    ) -> DeadLetter | None:
        """Remove a letter and post an event to its run, unless the run has finished."""
        _, letter = self._state.letters.get(letter_id, (None, None))
        if letter is None:
            return None
        file = self._state.runs[letter.run_id]
        self._state.remove_letter(file, letter_id)
        entry = entry_of(letter)
        if entry is not None and not file.run.status.is_finished:
            self._state.deliver(file, *entry, self._state.now())
        if audit is not None:
            self._state.audit(replace(audit, tenant=letter.tenant))
        return letter

    async def audit_slots(
        self,
        *,
        limit: int,
        cursor: str | None = None,
        repair: bool = True,
        audit: AuditEntry | None = None,
    ) -> SlotAudit:
        after = "" if cursor is None else read_cursor("slots", cursor, tuple[str])[0]
        tenants = [each for each in sorted(self._state.accounts) if each > after]
        drifts: list[Drift] = []
        for tenant in tenants[:limit]:
            account = self._state.accounts[tenant]
            if account.active != len(account.holders):
                drift = Drift(tenant, account.active, len(account.holders))
                drifts.append(drift)
                if repair:
                    account.active = drift.actual
                if repair and audit is not None:
                    self._state.audit(audit_of_drift(audit, drift))
            if repair:
                self._state.promote(tenant)
        checked = tenants[:limit]
        onward = write_cursor("slots", checked[-1]) if len(tenants) > limit else None
        return SlotAudit(len(checked), tuple(drifts), onward)

    async def purge(self, *, finished_before: Instant, limit: int) -> int:
        end = min(bisect_left(self._state.finished, (finished_before, RunId(""))), limit)
        for _, run_id in self._state.finished[:end]:
            self._remove(self._state.runs.pop(run_id))
        del self._state.finished[:end]
        self._forget_audit()
        return end

    async def now(self) -> Instant:
        return self._state.now()

    async def ping(self) -> None:
        """Always answers: there is no server."""

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    def _forget_audit(self) -> None:
        log = self._state.audit_log
        old = bisect_left(log, self._state.now() - self._state.audit_ttl_ms, key=_written_at)
        self._state.audit_removed += old
        del log[:old]

    def _remove(self, file: RunFile) -> None:
        run = file.run
        account = self._state.account(run.tenant)
        self._state.places.remove(run)
        for job_id in file.jobs:
            del self._state.jobs[job_id]
        for letter_id in list(file.letters):
            self._state.remove_letter(file, letter_id)
        # The key may have expired and be bound to a later run.
        key = None if file.key is None else account.keys.get(file.key)
        if file.key is not None and key is not None and key.record.run_id == run.id:
            del account.keys[file.key]


class MemoryAuditLog(MemoryPart):
    """See ``ports.store.AuditLog``."""

    async def add_audit(self, entry: AuditEntry, *, once: str | None = None) -> bool:
        if once is not None and once in self._state.audited_once:
            return False
        if once is not None:
            self._state.audited_once.add(once)
        self._state.audit(entry)
        return True

    async def list_audit(
        self, only: AuditFilter = EVERY_ENTRY, *, cursor: str | None = None, limit: int = 100
    ) -> Page[AuditEntry]:
        log, removed = self._state.audit_log, self._state.audit_removed
        end = len(log)
        if cursor is not None:
            # A position counts all entries ever written: removed ones do not shift it.
            end = max(0, min(end, read_cursor("audit", cursor, tuple[int])[0] - removed))
        oldest_at = self._state.now() - self._state.audit_ttl_ms
        found: list[AuditEntry] = []
        place = end
        while place > 0 and len(found) < limit and end - place < LOOKED_AT_FACTOR * limit:
            place -= 1
            if log[place].at < oldest_at:
                place = 0
            elif only.fits(log[place]):
                found.append(log[place])
        return Page(tuple(found), write_cursor("audit", place + removed) if place else None)


class MemoryReceiptBatches(MemoryPart):
    """See ``ports.store.Receipts``."""

    async def put_receipts(
        self, tenant: TenantId, receipts: Sequence[Receipt], *, batch_id: str
    ) -> None:
        batches, now = self._state.receipts, self._state.now()
        if any(each.id == batch_id for each in batches):
            return
        number = next(self._state.receipt_order)
        batches.append(MemoryReceipts(number, batch_id, tenant, now, tuple(receipts)))
        own = [each for each in reversed(batches) if each.tenant == tenant]
        kept = newest_kept(len(each.receipts) for each in own)
        gone = {each.number for each in own[kept:]}
        batches[:] = [
            each for each in batches if each.number not in gone and each.at > now - DAY_MS
        ]

    async def receipt_batches(
        self, tenant: TenantId | None, *, at_most: str | None = None, limit: int = 20
    ) -> tuple[ReceiptBatch, ...]:
        last = None if at_most is None else read_cursor("receipts", at_most, tuple[int])[0]
        found = (
            ReceiptBatch(write_cursor("receipts", each.number), each.receipts)
            for each in reversed(self._state.receipts)
            if tenant in {None, each.tenant} and (last is None or each.number <= last)
        )
        return tuple(islice(found, limit))


def _written_at(entry: AuditEntry) -> int:
    return entry.at


class MemoryOutbox(MemoryPart):
    """See ``ports.store.Outbox``."""

    async def fire_timers(self, *, limit: int) -> tuple[RunId, ...]:
        now = self._state.now()
        fired = self._state.timers.take(now, limit)
        for run_id, timer in fired:
            file = self._state.runs[run_id]
            due = file.timers.pop(timer)
            entry_id = f"timer:{timer.key}#{due}"
            self._state.deliver(file, entry_id, TimerFired(timer=timer, due=due), now)
        return tuple(run_id for run_id, _ in fired)

    async def take_outbox(self, *, limit: int, hold_ms: int) -> tuple[OutboxRow, ...]:
        now = self._state.now()
        taken = self._state.outbox.take(now, limit)
        for run_id in taken:
            self._state.outbox.put(run_id, Instant(now + hold_ms))
        return tuple(self._row(run_id) for run_id in taken)

    async def confirm_outbox(self, rows: Sequence[OutboxRow]) -> None:
        for row in rows:
            if self._is_present(row) and not self._state.runs[row.run_id].inbox:
                self._state.outbox.remove(row.run_id)

    async def defer_outbox(self, row: OutboxRow, *, delay_ms: int) -> None:
        if self._is_present(row):
            self._state.outbox.put(row.run_id, Instant(self._state.now() + delay_ms))

    async def outbox_size(self) -> int:
        return len(self._state.outbox)

    def _row(self, run_id: RunId) -> OutboxRow:
        file = self._state.runs[run_id]
        return OutboxRow(run_id, file.run.tenant, file.arrivals)

    def _is_present(self, row: OutboxRow) -> bool:
        """Whether the row exists and has not changed since it was taken."""
        return self._state.outbox.due(row.run_id) is not None and self._row(row.run_id) == row
