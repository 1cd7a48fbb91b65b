"""Batches: runs that begin alike, encoded ahead and written by two statements.

The rows of a batch start mostly differ in ids and inputs only. Such rows are encoded on the thread
of their caller while the writer is busy with others. The writer then reads once what is judged,
puts all rows into the temporary table ``staged``, and has a trigger distribute them: with each
statement the writer gives the GIL away and waits to get it back.

Rows that are not alike, or of which one is known, refused or queued, are admitted one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Final, NamedTuple, overload

from msgspec.structs import replace

from stanchion.adapters.outcomes import alike_starts
from stanchion.adapters.store.sqlite.codec import Origin, encode, encode_text
from stanchion.core.admission import Admitted, Verdict
from stanchion.core.model import Job
from stanchion.core.transition import DispatchJob, SetTimer
from stanchion.ports.records import Admission, AlikeStart

__all__ = ["AlikeRows", "PreparedAdmissions", "prepare_admissions"]


class AlikeRows(NamedTuple):
    """Runs that begin alike, as ``stage_row`` and ``begin_batch`` take them."""

    first: Admission
    number: int
    """How many they are."""
    runs: str
    """The ids of the runs, as JSON."""
    keys: str
    """Their idempotency keys."""
    staged: list[tuple[object, ...]]
    """A row for each job, with the values of the statement ``stage_row``."""
    kinds: str
    """What the jobs of each run have in common, as JSON."""
    timers: str | None
    """What each run sets: step, key, time and timer, as JSON."""
    verdicts: tuple[Verdict, ...]
    """The answer if all are admitted."""


class PreparedAdmissions(Sequence[Admission]):
    """Admissions, and their encoded rows if they are alike."""

    def __init__(self, admissions: Sequence[Admission]) -> None:
        self._admissions = admissions
        self.alike = _alike_rows(admissions)

    def __len__(self) -> int:
        return len(self._admissions)

    @overload
    def __getitem__(self, place: int) -> Admission: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Admission]: ...
    def __getitem__(self, place: int | slice) -> Admission | Sequence[Admission]:
        return self._admissions[place]


def prepare_admissions(admissions: Sequence[Admission]) -> PreparedAdmissions:
    """See ``ports.store.Runs.prepare_admissions``."""
    if isinstance(admissions, PreparedAdmissions):
        return admissions
    return PreparedAdmissions(admissions)


_EMPTY_INPUT: Final = b'{"input":{}'


def _alike_rows(admissions: Sequence[Admission]) -> AlikeRows | None:
    starts = alike_starts(admissions)
    if starts is None:
        return None
    first, rows = starts.first, starts.rows
    keys = [row.key for row in rows if row.key is not None]
    runs = [row.run_id for row in rows]
    origin = encode(Origin.of(replace(first.run, input={})))
    assert origin.startswith(_EMPTY_INPUT), origin
    timers = [
        (each.timer.step_id or "", each.timer.key, each.due, encode_text(each.timer))
        for each in first.transition.effects
        if isinstance(each, SetTimer)
    ]
    return AlikeRows(
        first,
        len(rows),
        encode_text(runs),
        encode_text(keys),
        _staged(rows, origin[len(_EMPTY_INPUT) :]),
        encode_text([*map(_kind, _jobs(first), repeat(first))]),
        encode_text(timers) if timers else None,
        tuple(map(Admitted, runs)),
    )


def _jobs(admission: Admission) -> list[Job]:
    return [each.job for each in admission.transition.effects if isinstance(each, DispatchJob)]


def _kind(job: Job, first: Admission) -> tuple[object, ...]:
    return (
        job.id.removeprefix(first.run.id),
        job.topic,
        job.step_id,
        job.attempt,
        job.dispatch,
        job.max_deliveries,
        job.attempt_timeout_ms,
        None if job.trace is None else encode_text(job.trace),
        encode_text(first.run.steps[job.step_id]),
    )


def _staged(rows: Sequence[AlikeStart], rest: bytes) -> list[tuple[object, ...]]:
    """A row for each job. That of the first job of a run has the columns of the run as well."""
    staged: list[tuple[object, ...]] = []
    for number, (run_id, key, fingerprint, given, works) in enumerate(rows):
        first, *others = works
        origin = b'{"input":' + encode(given) + rest
        place = len(staged)
        staged.append((place, number, 0, run_id, key, fingerprint, origin, encode(first)))
        for kind, work in enumerate(others, 1):
            staged.append((place + kind, number, kind, run_id, None, None, None, encode(work)))
    return staged
