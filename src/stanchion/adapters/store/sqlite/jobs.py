"""Jobs: leases renewed, results accepted, leases that ran out."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stanchion.adapters.letters import death_of, letter_of
from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.sqlite.statements import read_statements
from stanchion.adapters.store.sqlite import about, dead_letters, inbox, ready
from stanchion.adapters.store.sqlite.codec import VALUE, encode
from stanchion.core.events import JobFailed, JobSucceeded
from stanchion.core.json_value import JsonValue
from stanchion.core.model import Instant, Job, JobId, RunId, StepId, TenantId
from stanchion.ports.records import (
    Acceptance,
    Accepted,
    ExpiredJob,
    JobLease,
    JobState,
    JobView,
    Rejected,
    RejectedCode,
    Renewals,
    Result,
)

__all__ = ["accept", "expire", "progress", "renew", "show"]

_SQL = read_statements(__package__, "sql", "jobs.sql")


def renew(
    db: Database, leases: Sequence[JobLease], ttl_ms: int, tenant: TenantId | None = None
) -> Renewals:
    """See ``ports.store.Jobs.renew_jobs``."""
    now = db.now()
    renewed: list[JobId] = []
    lost: list[JobId] = []
    for lease in leases:
        stands = db.changed(
            _SQL["renew_job"],
            job_id=lease.job_id,
            fence=lease.fence,
            now=now,
            expires_at=now + ttl_ms,
            tenant=tenant,
            progress=None if lease.progress is None else encode(lease.progress),
        )
        (renewed if stands else lost).append(lease.job_id)
    return Renewals(tuple(renewed), tuple(lost))


def progress(db: Database, run_id: RunId, wanted: Collection[JobId]) -> dict[JobId, JsonValue]:
    """See ``ports.store.Jobs.progress``."""
    rows = (db.first(_SQL["show_progress"], job_id=each, run_id=run_id) for each in wanted)
    return {row[0]: VALUE.decode(row[1]) for row in rows if row is not None}


def accept(
    db: Database,
    results: Sequence[Result],
    row_due_in_ms: int,
    tenant: TenantId | None = None,
) -> tuple[Acceptance, ...]:
    """See ``ports.store.Jobs.accept``."""
    due = Instant(db.now() + row_due_in_ms)
    return tuple(_accept(db, result, due, tenant) for result in results)


def _accept(db: Database, result: Result, due: Instant, tenant: TenantId | None) -> Acceptance:
    db.settle(about.job(result.job_id), about.run(_run_of(result.job_id)))
    found = db.peek(_SQL["find_job"], job_id=result.job_id, tenant=tenant)
    if found is None:
        return Rejected(result.job_id, RejectedCode.UNKNOWN_JOB)
    job, run, run_id, ended_at, step_id, item, state, fence = found
    if state == JobState.FINISHED:
        if fence == result.fence:
            return Accepted(result.job_id, run_id, repeated=True)
        return Rejected(result.job_id, RejectedCode.ALREADY_FINISHED)
    # A lease that has run out is good for its result until the expiry is noticed: nobody else has
    # the job yet, and work that is done should not be done again.
    if state != JobState.LEASED or fence != result.fence or ended_at is not None:
        return Rejected(result.job_id, RejectedCode.STALE_FENCE)
    db.later(
        _SQL["accept_result"],
        job=job,
        worker_id=result.worker_id,
        run=run,
        ticket=db.ticket(),
        entry_id=f"result:{result.job_id}#{fence}",
        event=encode(_event(result, step_id, item)),
        due=due,
    )
    db.pending.touch(about.job(result.job_id))
    return Accepted(result.job_id, run_id)


def _run_of(job_id: JobId) -> RunId:
    """Whose job it would be. What is no job's id is nobody's, and nothing is pending for it."""
    return RunId(job_id.partition(":")[0])


def _event(result: Result, step_id: StepId, item: int | None) -> JobSucceeded | JobFailed:
    if result.error is None:
        return JobSucceeded(
            actor=result.worker_id,
            job_id=result.job_id,
            step_id=step_id,
            item=item,
            output=result.output,
        )
    return JobFailed(
        actor=result.worker_id,
        job_id=result.job_id,
        step_id=step_id,
        item=item,
        error=result.error,
        final=result.final,
    )


def show(db: Database, job_id: JobId) -> JobView | None:
    """See ``ports.store.Jobs.job``."""
    found = db.first(_SQL["show_job"], job_id=job_id)
    if found is None:
        return None
    id_, run_id, tenant, step_id, topic, attempt, item, dispatch, value, state, *rest, said = found
    job = Job(
        id=id_,
        run_id=run_id,
        tenant=tenant,
        step_id=step_id,
        topic=topic,
        attempt=attempt,
        input=VALUE.decode(value),
        item=item,
        dispatch=dispatch,
    )
    fence, deliveries, worker_id, expires_at = rest
    return JobView(
        job=job,
        state=JobState(state),
        fence=fence,
        deliveries=deliveries,
        worker_id=worker_id,
        expires_at=expires_at,
        progress=None if said is None else VALUE.decode(said),
    )


def expire(db: Database, limit: int, max_deliveries: int) -> tuple[ExpiredJob, ...]:
    """See ``ports.store.Jobs.expire_jobs``."""
    expired: list[ExpiredJob] = []
    for row in db.every(_SQL["expired_jobs"], now=db.now(), limit=limit):
        job, job_id, run, run_id, tenant, topic, deliveries = row
        is_dead = deliveries >= max_deliveries
        if is_dead:
            _let_die(db, job, run, job_id)
        else:
            db.run(_SQL["offer_again"], job=job, ticket=db.ticket())
            ready.enter(db, topic, tenant)
        expired.append(ExpiredJob(job_id, run_id, tenant, topic, deliveries, is_dead))
    return tuple(expired)


def _let_die(db: Database, row: int, run: int, job_id: JobId) -> None:
    """A job was handed out as often as is allowed: its run hears of it, and an operator may."""
    view = show(db, job_id)
    assert view is not None
    job, now = view.job, db.now()
    db.run(_SQL["let_die"], job=row)
    dead_letters.add(db, run, letter_of(job, view.deliveries, now))
    inbox.put(db, run, *death_of(job, view.deliveries), now)
