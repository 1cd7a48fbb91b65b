"""A side: one of the two stores that are compared, seen through names that both have in common.

Fences, instants and cursors are each store's own. A fence is named after its grant (the job, its
dispatch and its delivery), which both stores must agree on; an inbox entry that carries a fence in
its id is named after the grant too; an instant of the store's clock is only there or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from stanchion.core.model import Instant, Job, JobId, RunId
from stanchion.ports.records import (
    DeadLetter,
    DeadLetterKind,
    InboxEntry,
    JobView,
    LeasedJob,
    Loaded,
    OutboxRow,
    StoredWorkflow,
)
from stanchion.ports.store import Store

__all__ = ["BOGUS", "Grant", "Side"]

_RESULT = "result:"
_THERE = Instant(1)


class Grant(NamedTuple):
    """One hand-out of one job."""

    job_id: JobId
    dispatch: int
    delivery: int

    def __str__(self) -> str:
        return f"{self.dispatch}.{self.delivery}"


BOGUS = Grant(JobId(""), 0, 0)
"""Stands for a fence that nobody ever had, and for that of a job which was never handed out."""


class Side:
    """A store and its own words for what both stores know."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.rows: list[OutboxRow] = []
        """All that were ever taken."""
        self._fences: dict[Grant, int] = {BOGUS: 1}
        self._grants: dict[tuple[JobId, int], Grant] = {}

    @property
    def grants(self) -> list[Grant]:
        """All that were ever given, the oldest first."""
        return list(self._fences)

    def fence(self, grant: Grant) -> int:
        """What this store calls the grant."""
        return self._fences[grant]

    def leased(self, leased: LeasedJob) -> tuple[Job, Grant]:
        """Learn what this store calls the grant. Later grants of a job have higher fences."""
        job_id = leased.job.id
        grant = Grant(job_id, leased.job.dispatch, leased.deliveries)
        assert leased.fence > max(self._fences_of(job_id), default=0), f"{grant}: fence fell"
        self._fences[grant] = leased.fence
        self._grants[job_id, leased.fence] = grant
        return leased.job, grant

    def loaded(self, found: Loaded | None) -> Loaded | None:
        if found is None:
            return None
        named = (InboxEntry(self.name(entry.id), entry.event) for entry in found.inbox)
        return Loaded(found.run, tuple(named))

    def job(self, view: JobView | None) -> tuple[object, ...] | None:
        if view is None:
            return None
        grant = self._grants.get((view.job.id, view.fence), BOGUS)
        return view.job, view.state, grant, view.deliveries, view.worker_id, view.expires_at is None

    def letter(self, letter: DeadLetter | None) -> DeadLetter | None:
        if letter is None:
            return None
        prefix = f"event:{letter.run_id}:"
        if letter.id.startswith(prefix):
            letter = replace(letter, id=prefix + self.name(letter.id.removeprefix(prefix)))
        # Why a job died is prose, and each store's own.
        cause = "" if letter.kind is DeadLetterKind.JOB else letter.cause
        return replace(letter, at=_THERE, cause=cause)

    def letter_id(self, run_id: RunId, name: str) -> str:
        """What this store calls the letter that both know by this name."""
        prefix = f"event:{run_id}:"
        if name.startswith(prefix):
            return prefix + self.entry_id(name.removeprefix(prefix))
        return name

    def taken(self, rows: Sequence[OutboxRow]) -> list[OutboxRow]:
        """Remember the rows. Which of several that are due comes first is left open."""
        self.rows += rows
        return sorted(rows, key=lambda row: row.run_id)

    def workflow(self, stored: StoredWorkflow) -> StoredWorkflow:
        return replace(stored, created_at=_THERE)

    def name(self, entry_id: str) -> str:
        """The common name of an inbox entry."""
        if not entry_id.startswith(_RESULT):
            return entry_id
        job_id, _, fence = entry_id.removeprefix(_RESULT).rpartition("#")
        return f"{_RESULT}{job_id}#{self._grants[JobId(job_id), int(fence)]}"

    def entry_id(self, name: str) -> str:
        """What this store calls the entry that both know by this name."""
        if not name.startswith(_RESULT):
            return name
        job_id, _, grant = name.removeprefix(_RESULT).rpartition("#")
        dispatch, _, delivery = grant.partition(".")
        fence = self.fence(Grant(JobId(job_id), int(dispatch), int(delivery)))
        return f"{_RESULT}{job_id}#{fence}"

    def _fences_of(self, job_id: JobId) -> list[int]:
        return [fence for grant, fence in self._fences.items() if grant.job_id == job_id]
