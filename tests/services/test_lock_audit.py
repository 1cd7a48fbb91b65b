"""The notes of locks that were held by hand, on their way into the audit log."""

from __future__ import annotations

from typing import Any

import pytest

from stanchion.adapters.locks.memory import MemoryLocks
from stanchion.adapters.store.memory import MemoryStore
from stanchion.adapters.system import ManualClock, SystemEntropy
from stanchion.core.audit import EVERY_ENTRY, AuditEntry
from stanchion.core.model import RunId
from stanchion.ports.errors import BackendUnavailable
from stanchion.ports.locks import Granted, LockNote
from stanchion.services.lock_audit import LockAudit

HOLD = AuditEntry(action="lease.hold", actor="kim", subject="")


class Case:
    """A lock store with notes, and a store."""

    def __init__(self) -> None:
        clock = ManualClock()
        self.locks, self.store = MemoryLocks(clock), MemoryStore(clock)
        self.audit = LockAudit(self.locks, self.store, SystemEntropy())

    async def note(self, name: str, text: str) -> None:
        """Hold a lock, with this text as the note."""
        note = LockNote(f"note-{name}", name, text)
        await self.locks.hold(name, f"kim {name}", ttl_ms=10_000, within_ms=1_000, note=note)

    async def subjects(self) -> list[str]:
        """The subjects in the audit log."""
        page = await self.store.list_audit(EVERY_ENTRY, cursor=None, limit=100)
        return sorted(each.subject for each in page.items)


async def test_a_note_that_cannot_be_read_holds_up_no_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    case = Case()
    await case.note("admission/a", '{"action": 7}')
    for _ in range(2):
        answer = await case.audit.hold("admission/b", ttl_ms=5_000, audit=HOLD)
        assert isinstance(answer, Granted)
        await case.locks.force_release("admission/b")
    assert await case.subjects() == ["lease/admission/b"] * 2
    assert [note.name for note in await case.locks.notes()] == ["admission/a"]
    lines = [line for line in caplog.records if line.getMessage() == "lock_note_unreadable"]
    assert len(lines) == 1
    assert lines[0].fields["lease"] == "admission/a"  # type: ignore[attr-defined] # what it says


async def test_a_run_that_cannot_be_marked_holds_up_no_notes_of_other_locks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case()
    entry = '{"action": "lease.hold", "actor": "kim", "subject": "lease/%s"}'
    await case.note("run/away", entry % "run/away")
    await case.note("admission/b", entry % "admission/b")
    load, away = case.store.load, {"away"}

    async def loaded(run_id: RunId) -> Any:  # noqa: ANN401 - as the store has it
        if run_id in away:
            raise BackendUnavailable("its shard is down")
        return await load(run_id)

    monkeypatch.setattr(case.store, "load", loaded)
    with pytest.raises(BackendUnavailable):
        await case.audit.move()
    assert await case.subjects() == ["lease/admission/b"]
    assert [note.name for note in await case.locks.notes()] == ["run/away"]
    away.clear()
    await case.audit.move()
    assert await case.subjects() == ["lease/admission/b", "lease/run/away"]
    assert not await case.locks.notes()
