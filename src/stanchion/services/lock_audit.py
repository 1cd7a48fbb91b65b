"""Locks that operators hold and release, each with its audit entry.

The lock store may be another server than the store. So it keeps, in the step of the change, a note
with the audit entry; the note is then moved into the audit log, which takes it once. A replica that
dies in between leaves the note, and any replica moves it later. So does one that cannot reach the
store: the change is made, and its entry follows when the store is back. Only the lock of a run is
not held without the store: results would be settled as soon as it is back.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final

import msgspec
from msgspec.structs import replace

from stanchion.core.audit import AuditEntry
from stanchion.core.events import Timer, TimerFired, TimerKind
from stanchion.core.json_value import DECODE_ERRORS, JsonObject
from stanchion.core.model import BY_HAND, RunId, StepId, TenantId
from stanchion.core.transition import Transition
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import BackendError
from stanchion.ports.locks import (
    AcquireAnswer,
    Granted,
    LockNote,
    LockView,
    OperatorLocks,
    operator_token,
)
from stanchion.ports.records import Commit, CommitConflict, StaleFence
from stanchion.ports.store import Store
from stanchion.services.log import log_event

WITHIN_MS: Final = 2_000
_NOTES_MAX: Final = 100
_RUN: Final = "run/"
_MARK_TRIES: Final = 20
_FAILURES_MAX: Final = 3
"""Failures of the store after which the other notes are left to the next time."""
_NO_EFFECT: Final = TimerFired(timer=Timer(TimerKind.STEP_TIMEOUT, StepId("/")))
"""No step has such a name, and what is about an unknown step is ignored."""
_decode: Final = msgspec.json.Decoder(AuditEntry).decode


class RunNotMarked(msgspec.Struct, frozen=True):
    """The store did not take the mark of the hold, so the lock was given back."""


class LockAudit:
    """Changes locks by hand, and moves their notes into the audit log."""

    def __init__(self, locks: OperatorLocks, store: Store, entropy: Entropy) -> None:
        self._locks = locks
        self._store = store
        self._entropy = entropy
        self._unmoved: set[str] = set()
        """Notes that could not be moved: they are tried after the others."""

    async def hold(
        self, name: str, *, ttl_ms: int, audit: AuditEntry
    ) -> AcquireAnswer | RunNotMarked:
        """Hold a lock for the actor of the entry. Raises ``BackendError`` of the lock store."""
        note = await self._note(name, replace(audit, after={"ttl_ms": ttl_ms}))
        token = operator_token(audit.actor, self._entropy.token())
        answer = await self._locks.hold(name, token, ttl_ms=ttl_ms, within_ms=WITHIN_MS, note=note)
        if isinstance(answer, Granted) and not await self._is_marked(name, answer.fence):
            # If this fails as well, the lock ends with its term.
            with suppress(BackendError):
                await self._locks.release(name, token, within_ms=WITHIN_MS)
                await self._locks.drop_notes([note])
            return RunNotMarked()
        await self._move_soon()
        return answer

    async def _is_marked(self, name: str, fence: int) -> bool:
        """Mark the run if it is the lock of one; whether that is done."""
        if not name.startswith(_RUN):
            return True
        try:
            return await self._mark(RunId(name.removeprefix(_RUN)), fence)
        except BackendError:
            return False

    async def _mark(self, run_id: RunId, fence: int, *, is_late: bool = False) -> bool:
        """Write the fence to the run, so that no replica settles results without its lease.

        Results that settle one after the other could win against each try. So an entry is posted
        first: while it is in the inbox, none settles. It has no effect if it is applied.
        If it ``is_late``, the run may have the fence already, or that of a later lease.

        ``False``: others changed the run each time.
        """
        entry_id = f"hold:{fence}"
        for number in range(_MARK_TRIES):
            loaded = await self._store.load(run_id)
            if loaded is None or loaded.run.status.is_finished:
                return True
            if is_late and loaded.run.fence >= fence:
                return True
            if not number:
                await self._store.post(run_id, _NO_EFFECT, entry_id=entry_id)
                continue
            run = loaded.run
            unchanged = Transition(
                status=run.status, output=run.output, error=run.error, finished_at=run.finished_at
            )
            commit = Commit(
                run_id=run_id,
                transition=unchanged,
                read=run.stamp,
                nonce=BY_HAND + self._entropy.token(),
                # A lock store that was set up again may give lower fences than the one before.
                fence=max(fence, run.fence),
                applied=(entry_id,),
            )
            answer = await self._store.commit(commit)
            if not isinstance(answer, CommitConflict | StaleFence):
                return True
        return False

    async def release(self, name: str, *, audit: AuditEntry) -> LockView | None:
        """Release a lock of any holder; return it as it was, or ``None`` if it was free.

        Raises ``BackendError`` of the lock store.
        """
        view = await self._locks.inspect(name)
        if view is None:
            return None
        before: JsonObject = {"holder": view.holder.name, "expires_in_ms": view.expires_in_ms}
        note = await self._note(name, replace(audit, before=before))
        is_released = await self._locks.release_by_hand(name, note=note)
        await self._move_soon()
        return view if is_released else None

    async def move(self) -> None:
        """Move notes into the audit log, and see to it that runs have the fences of their holds.

        A note that cannot be moved holds up no others. Raises ``BackendError``, after it has moved
        what it could.
        """
        notes = await self._locks.notes(limit=_NOTES_MAX)
        self._unmoved &= {note.id for note in notes}
        moved: list[LockNote] = []
        failures: list[BackendError] = []
        for note in sorted(notes, key=lambda each: each.id in self._unmoved):
            try:
                if await self._move_one(note):
                    moved.append(note)
            except BackendError as error:
                self._unmoved.add(note.id)
                failures.append(error)
                if len(failures) == _FAILURES_MAX:
                    break
        if moved:
            await self._locks.drop_notes(moved)
        if failures:
            raise failures[0]

    async def _move_one(self, note: LockNote) -> bool:
        """Move a note; ``False`` if it cannot be read: a newer version may have written it."""
        try:
            entry = _entry(note)
        except DECODE_ERRORS as error:
            if note.id not in self._unmoved:
                log_event(logging.ERROR, "lock_note_unreadable", lease=note.name, error=str(error))
                self._unmoved.add(note.id)
            return False
        if entry.before is None and note.name.startswith(_RUN):
            await self._mark(RunId(note.name.removeprefix(_RUN)), note.fence, is_late=True)
        await self._store.add_audit(entry, once=note.id)
        return True

    async def _note(self, name: str, entry: AuditEntry) -> LockNote:
        entry = replace(entry, subject=f"lease/{name}", tenant=await self._tenant_of(name))
        return LockNote(self._entropy.token(), name, msgspec.json.encode(entry).decode())

    async def _move_soon(self) -> None:
        with suppress(BackendError):  # the reconciler moves it later
            await self.move()

    async def _tenant_of(self, name: str) -> TenantId | None:
        """The tenant that a lock belongs to; ``None`` also if that cannot be read."""
        kind, _, rest = name.partition("/")
        if kind == "admission":
            return TenantId(rest)
        with suppress(BackendError):
            loaded = await self._store.load(RunId(rest))
            return None if loaded is None else loaded.run.tenant
        return None


def _entry(note: LockNote) -> AuditEntry:
    """The audit entry in a note, with the fence that the lock store gave."""
    entry = _decode(note.text)
    if isinstance(entry.before, dict):
        return replace(entry, before={"fence": note.fence, **entry.before})
    after = entry.after if isinstance(entry.after, dict) else {}
    return replace(entry, after={"fence": note.fence, **after})
