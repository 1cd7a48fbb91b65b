"""Batches: runs that begin alike, encoded ahead and written by two statements.

The rows of a batch start mostly differ in ids and inputs only. Such rows are encoded on the thread
of their caller while the writer is busy with others. The writer then reads once what is judged,
puts all rows into the temporary table ``staged``, and has a trigger distribute them: with each
statement the writer gives the GIL away and waits to get it back.

Rows that are not alike, or of which one is known, refused or queued, are admitted one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from stanchion.adapters.outcomes import begin_alike
from stanchion.adapters.store.sqlite.codec import Origin, encode, encode_some, encode_text
from stanchion.core.admission import Admitted, Verdict
from stanchion.core.transition import DispatchJob, SetTimer
from stanchion.ports.records import Admission

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
    timers: str | None
    """What each run sets: step, key, time and timer, as JSON."""
    verdicts: tuple[Verdict, ...]
    """The answer if all are admitted."""


class PreparedAdmissions(tuple[Admission, ...]):  # noqa: SLOT001 - it has attributes
    """Admissions, and their encoded rows if they are alike."""

    alike: AlikeRows | None = None


def prepare_admissions(admissions: Sequence[Admission]) -> PreparedAdmissions:
    """See ``ports.store.Runs.prepare_admissions``."""
    if isinstance(admissions, PreparedAdmissions):
        return admissions
    prepared = PreparedAdmissions(admissions)
    prepared.alike = _alike_rows(admissions)
    return prepared


_EMPTY_INPUT: Final = b'{"input":{}'


def _alike_rows(admissions: Sequence[Admission]) -> AlikeRows | None:
    if not admissions:
        return None
    first = admissions[0]
    if not begin_alike(admissions):
        return None
    keys = [each.key for each in admissions if each.key is not None]
    runs = [each.run.id for each in admissions]
    origin = encode(Origin.of(replace(first.run, input={})))
    assert origin.startswith(_EMPTY_INPUT), origin
    rest = origin[len(_EMPTY_INPUT) :]
    staged: list[tuple[object, ...]] = []
    for number, each in enumerate(admissions):
        _stage(each, number, rest, staged)
    timers = [
        (each.timer.step_id or "", each.timer.key, each.due, encode_text(each.timer))
        for each in first.transition.effects
        if isinstance(each, SetTimer)
    ]
    return AlikeRows(
        first,
        len(admissions),
        encode_text(runs),
        encode_text(keys),
        staged,
        encode_text(timers) if timers else None,
        tuple(map(Admitted, runs)),
    )


def _stage(
    admission: Admission, number: int, rest: bytes, staged: list[tuple[object, ...]]
) -> None:
    """Add a row for each job of a run. That of its first job has the columns of the run as well."""
    run = admission.run
    whose: tuple[object, ...] = (
        run.id,
        admission.key,
        admission.fingerprint,
        run.stamp.nonce,
        b'{"input":' + encode(run.input) + rest,
    )
    for effect in admission.transition.effects:
        if isinstance(effect, DispatchJob):
            job = effect.job
            staged.append(
                (
                    len(staged),
                    number,
                    *whose,
                    job.id,
                    job.topic,
                    job.step_id,
                    job.attempt,
                    job.dispatch,
                    job.max_deliveries,
                    job.attempt_timeout_ms,
                    encode_some(job.trace),
                    encode(run.steps[job.step_id]),
                    encode(job.input),
                )
            )
            whose = _OF_ANOTHER_JOB


_OF_ANOTHER_JOB: Final = (None,) * 5
