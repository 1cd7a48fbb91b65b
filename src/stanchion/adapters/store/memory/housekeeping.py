"""Housekeeping in memory: dead letters, audit, retention, health."""

from __future__ import annotations

from bisect import bisect_left

from stanchion.adapters.cursor import read_cursor, write_cursor
from stanchion.adapters.letters import event_letter_id, reborn, step_of
from stanchion.adapters.store.memory.shelf import RunFile, Shelved
from stanchion.core.model import Instant, RunId, TenantId
from stanchion.ports.records import DeadLetter, DeadLetterKind, Drift, Page

__all__ = ["MemoryHousekeeping"]


class MemoryHousekeeping(Shelved):
    """See ``ports.store.Housekeeping``."""

    async def bury(self, run_id: RunId, entry_id: str, *, cause: str) -> DeadLetter | None:
        file = self._shelf.runs.get(run_id)
        if file is None or entry_id not in file.inbox:
            return None
        event = file.inbox[entry_id]
        self._shelf.remove_entries(file, entry_id)
        letter = DeadLetter(
            id=event_letter_id(run_id, entry_id),
            kind=DeadLetterKind.EVENT,
            tenant=file.run.tenant,
            run_id=run_id,
            step_id=step_of(event),
            cause=cause,
            at=self._shelf.now(),
            event=event,
        )
        self._shelf.add_letter(file, letter)
        return letter

    async def count_failure(self, run_id: RunId, entry_id: str) -> int:
        file = self._shelf.runs.get(run_id)
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
            for order, letter in self._shelf.letters.values()
            if order > after and tenant in {None, letter.tenant}
        ]
        page = found[:limit]
        more = len(found) > limit
        return Page(
            tuple(letter for _, letter in page),
            write_cursor("dead-letters", page[-1][0]) if more else None,
        )

    async def replay_dead_letter(self, letter_id: str, *, actor: str) -> DeadLetter | None:
        _, letter = self._shelf.letters.get(letter_id, (None, None))
        if letter is None:
            return None
        file = self._shelf.runs[letter.run_id]
        self._shelf.remove_letter(file, letter_id)
        if not file.run.status.is_finished:
            self._shelf.deliver(file, *reborn(letter, actor), self._shelf.now())
        return letter

    async def audit_slots(self, *, limit: int) -> tuple[Drift, ...]:
        tenants = sorted(self._shelf.accounts)
        audited = self._shelf.audited
        start = 0 if audited is None else bisect_left(tenants, audited + "\0")
        chosen = (tenants[start:] + tenants[:start])[:limit]
        drifts: list[Drift] = []
        for tenant in chosen:
            self._shelf.audited = tenant
            account = self._shelf.accounts[tenant]
            if account.active != len(account.holders):
                drifts.append(Drift(tenant, account.active, len(account.holders)))
                account.active = len(account.holders)
        return tuple(drifts)

    async def purge(self, *, finished_before: Instant, limit: int) -> int:
        end = min(bisect_left(self._shelf.finished, (finished_before, RunId(""))), limit)
        for _, run_id in self._shelf.finished[:end]:
            self._remove(self._shelf.runs.pop(run_id))
        del self._shelf.finished[:end]
        return end

    async def now(self) -> Instant:
        return self._shelf.now()

    async def ping(self) -> None:
        """There is nobody to be out of reach."""

    async def close(self) -> None:
        """There is nothing to let go of."""

    def _remove(self, file: RunFile) -> None:
        run = file.run
        account = self._shelf.account(run.tenant)
        del account.runs[bisect_left(account.runs, (run.created_at, run.id))]
        for job_id in file.jobs:
            del self._shelf.jobs[job_id]
        for letter_id in list(file.letters):
            self._shelf.remove_letter(file, letter_id)
        # The key may have aged and stand for a later run by now.
        key = None if file.key is None else account.keys.get(file.key)
        if file.key is not None and key is not None and key.record.run_id == run.id:
            del account.keys[file.key]
