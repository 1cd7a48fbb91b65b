"""Outcomes: what several stores have in common.

Every store writes the same events and dead letters when a job or an event ends. The stores encode
them differently; their content is defined here. ``SummaryBoard`` keeps the summaries of replicas
for the stores that live in the process of their only server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import assert_never

import msgspec
from msgspec.structs import asdict, replace

from stanchion.core.audit import AuditEntry
from stanchion.core.events import (
    AttemptFailed,
    CancelRequested,
    Event,
    JobDied,
    JobDiscarded,
    JobReplayed,
    Promoted,
    Started,
    TimerFired,
)
from stanchion.core.json_value import JsonValue
from stanchion.core.model import (
    Failure,
    Instant,
    Job,
    JobId,
    Risk,
    RunId,
    RunStatus,
    StepId,
    TenantId,
    WorkflowSource,
)
from stanchion.core.run import queued_run
from stanchion.core.transition import DispatchJob, SetTimer
from stanchion.core.why import DeadWork, OpenJob
from stanchion.ports.records import (
    Admission,
    AlikeStart,
    AlikeStarts,
    DeadLetter,
    DeadLetterKind,
    Drift,
    JobState,
    LostReason,
    StoredSummaries,
    StoredSummary,
    Tenant,
)


def is_last_delivery(deliveries: int, own: int | None, usual: int) -> bool:
    """Whether a job that was delivered so often is a dead letter when its lease expires.

    ``own`` is the job's limit, from its workflow; ``usual`` holds for jobs without one.
    """
    return deliveries >= (usual if own is None else own)


def job_dead_letter(job: Job, deliveries: int, at: Instant) -> DeadLetter:
    """The dead letter of a job that reached its limit of deliveries."""
    often = "once" if deliveries == 1 else f"{deliveries} times"
    return DeadLetter(
        id=f"job:{job.id}#{job.dispatch}",
        kind=DeadLetterKind.JOB,
        tenant=job.tenant,
        run_id=job.run_id,
        step_id=job.step_id,
        cause=f"delivered {often}, and no worker finished it",
        at=at,
        job=job,
    )


def job_died_entry(job: Job, deliveries: int) -> tuple[str, JobDied]:
    """The inbox entry for the run of a job that became a dead letter."""
    died = JobDied(
        job_id=job.id,
        step_id=job.step_id,
        item=job.item,
        dispatch=job.dispatch,
        deliveries=deliveries,
    )
    return f"died:{job.id}#{job.dispatch}", died


def timed_out_entry(job: Job) -> tuple[str, AttemptFailed]:
    """The inbox entry for the run of a job whose attempt has taken too long."""
    assert job.attempt_timeout_ms is not None
    message = f"not finished within {job.attempt_timeout_ms / 1000:g} s of its first lease"
    failed = AttemptFailed(
        job_id=job.id, step_id=job.step_id, item=job.item, error=Failure("attempt_timeout", message)
    )
    return f"timed_out:{job.id}#{job.dispatch}", failed


def why_lost(state: JobState, run: RunStatus, *, has_fence: bool) -> LostReason:
    """Why a lease is lost, from the state of its job and run.

    ``has_fence``: whether the lease's fence is the last one that the job had.
    """
    if not has_fence:
        return LostReason.STALE_FENCE
    match state:
        case JobState.REVOKED:
            # Jobs are revoked by a cancel, or when an attempt, a step or the run takes too long.
            return LostReason.CANCELLED if run is RunStatus.CANCELLED else LostReason.TIMED_OUT
        case JobState.FINISHED:
            return LostReason.FINISHED
        case JobState.READY | JobState.LEASED | JobState.DEAD:
            return LostReason.EXPIRED
        case _:
            assert_never(state)


def _event_letter_id(run_id: RunId, entry_id: str) -> str:
    """The id of the dead letter of an inbox entry."""
    return f"event:{run_id}:{entry_id}"


def event_dead_letter(
    tenant: TenantId, run_id: RunId, entry_id: str, event: Event, *, cause: str, at: Instant
) -> DeadLetter:
    """The dead letter of an inbox entry that could not be applied."""
    return DeadLetter(
        id=_event_letter_id(run_id, entry_id),
        kind=DeadLetterKind.EVENT,
        tenant=tenant,
        run_id=run_id,
        step_id=_step_of(event),
        cause=cause,
        at=at,
        event=event,
    )


def replay_entry(letter: DeadLetter, actor: str) -> tuple[str, Event]:
    """The inbox entry for the replay of a dead letter."""
    match letter.kind:
        case DeadLetterKind.JOB:
            job = letter.job
            assert job is not None
            replayed = JobReplayed(
                job_id=job.id,
                step_id=job.step_id,
                item=job.item,
                dispatch=job.dispatch,
                actor=actor,
            )
            return f"replayed:{job.id}#{job.dispatch}", replayed
        case DeadLetterKind.EVENT:
            assert letter.event is not None
            return letter.id.removeprefix(_event_letter_id(letter.run_id, "")), letter.event
        case _:
            assert_never(letter.kind)


def discard_entry(letter: DeadLetter, actor: str) -> tuple[str, Event] | None:
    """The inbox entry for the run of a dead letter that was discarded.

    ``None`` for the letter of an event: the event is dropped.
    """
    job = letter.job
    if job is None:
        return None
    discarded = JobDiscarded(
        job_id=job.id, step_id=job.step_id, item=job.item, dispatch=job.dispatch, actor=actor
    )
    return f"discarded:{job.id}#{job.dispatch}", discarded


def _step_of(event: Event) -> StepId | None:
    """The step that an event names, if any."""
    match event:
        case Started() | Promoted() | CancelRequested():
            return None
        case TimerFired(timer=timer):
            return timer.step_id
        case _:
            return event.step_id


def dead_work(letter: DeadLetter) -> DeadWork:
    """A dead letter, as a fact about its run."""
    about = letter.job if letter.job is not None else letter.event
    item = getattr(about, "item", None)
    return DeadWork(
        id=letter.id, step_id=letter.step_id, item=item, cause=letter.cause, at=letter.at
    )


def by_place(jobs: Iterable[OpenJob]) -> tuple[OpenJob, ...]:
    """Open jobs, sorted by step and item."""
    return tuple(sorted(jobs, key=lambda job: (job.step_id, job.item or 0, job.id)))


def first_of_steps(places: Mapping[JobId, int], jobs: Iterable[OpenJob]) -> list[OpenJob]:
    """The ready job of each step that has the lowest place in its queue."""
    first: dict[StepId, OpenJob] = {}
    for job in jobs:
        if job.id in places:
            known = first.setdefault(job.step_id, job)
            if places[job.id] < places[known.id]:
                first[job.step_id] = job
    return list(first.values())


class SummaryBoard:
    """The summaries of replicas in the memory of a process. See ``ports.store.Replicas``."""

    def __init__(self) -> None:
        self._summaries: dict[str, StoredSummary] = {}

    def report(self, replica: str, summary: JsonValue, *, keep_ms: int, now: Instant) -> Instant:
        """Replace a summary, and remove those that are too old."""
        self._summaries = {
            name: known for name, known in self._summaries.items() if known.seen_at > now - keep_ms
        }
        self._summaries[replica] = StoredSummary(replica, now, summary)
        return now

    def read(self, now: Instant) -> StoredSummaries:
        """All summaries, sorted by replica."""
        found = (self._summaries[name] for name in sorted(self._summaries))
        return StoredSummaries(now, tuple(found))

    def remove(self, replica: str) -> bool:
        """Remove a summary; ``False`` if there was none."""
        return self._summaries.pop(replica, None) is not None


def audit_of_version(entry: AuditEntry, version: int) -> AuditEntry:
    """The audit entry for a new version of a workflow."""
    before = {"version": version - 1} if version > 1 else None
    return replace(entry, before=before, after={"version": version})


def audit_of_config(entry: AuditEntry, before: Tenant | None, after: Tenant | None) -> AuditEntry:
    """The audit entry for a tenant's configuration, with the members at their defaults."""
    return replace(
        entry,
        before=None if before is None else msgspec.to_builtins(asdict(before)),
        after=None if after is None else msgspec.to_builtins(asdict(after)),
    )


def audit_of_drift(entry: AuditEntry, drift: Drift) -> AuditEntry:
    """The audit entry for a corrected count of slots."""
    return replace(
        entry,
        subject=f"tenant/{drift.tenant}",
        tenant=drift.tenant,
        before={"active": drift.counted},
        after={"active": drift.actual},
    )


def queued_admission(admission: Admission, wait_ms: int) -> Admission:
    """The admission of a run that must wait for a slot."""
    assert admission.before is not None, "a run that is never queued"
    run, transition = queued_run(admission.before, wait_ms=wait_ms)
    return replace(admission, run=replace(run, stamp=admission.run.stamp), transition=transition)


def alike_starts(admissions: Sequence[Admission]) -> AlikeStarts | None:
    """New runs of one tenant that differ in ids, keys and inputs only, and begin with jobs.

    Nothing is to be written for them but the runs, their keys, jobs, timers and timelines, and each
    step that has begun has one job. No two have the same id or key. ``None`` for others.
    """
    if not admissions:
        return None
    if isinstance(admissions, AlikeStarts):
        starts = admissions
        if not _is_plain(starts.first):
            return None
    else:
        first = admissions[0]
        if first.before is None or not all(map(_is_plain, admissions)):
            return None
        starts = AlikeStarts(first, [*map(AlikeStart.of, admissions)])
        jobs = len(starts.rows[0].works)
        if any(len(row.works) != jobs for row in starts.rows) or [*starts] != [*admissions]:
            return None
    runs, keys = {row.run_id for row in starts.rows}, {row.key for row in starts.rows}
    unkeyed = sum(row.key is None for row in starts.rows)
    are_apart = len(runs) == len(starts) == len(keys - {None}) + unkeyed
    return starts if are_apart else None


def _is_plain(admission: Admission) -> bool:
    run, steps = admission.run, admission.run.steps
    if (
        run.status is not RunStatus.RUNNING
        or not run.holds_slot
        or run.items
        or run.labels
        or run.workflow_source is not WorkflowSource.OWN
        or run.risk is not Risk.STANDARD
        or run.rerun_of is not None
        or admission.is_rate_limited
        or admission.tick is not None
        or admission.audit is not None
        or not admission.transition.timeline
    ):
        return False
    jobs = 0
    for effect in admission.transition.effects:
        if isinstance(effect, DispatchJob):
            jobs += 1
            if effect.job.item is not None or effect.job.step_id not in steps:
                return False
        elif not isinstance(effect, SetTimer):
            return False
    return 0 < jobs == len(steps)
