"""Effects: what a transition asks for, made true in the file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import assert_never

from stanchion.adapters.sqlite.database import Database, Row
from stanchion.adapters.sqlite.statements import read_statements
from stanchion.adapters.store.sqlite import about, ready
from stanchion.adapters.store.sqlite.codec import encode
from stanchion.core.events import Timer
from stanchion.core.model import Instant, Job, TenantId, Topic
from stanchion.core.transition import (
    ClearTimer,
    DispatchJob,
    Effect,
    SetTimer,
    StopRun,
    StopStep,
)
from stanchion.ports.records import JobState

__all__ = ["carry_out"]

_SQL = read_statements(__package__, "sql", "effects.sql")


def carry_out(db: Database, run: int, effects: Iterable[Effect]) -> None:
    """Make effects true, in their order."""
    for effect in effects:
        match effect:
            case DispatchJob(job):
                _dispatch(db, run, job)
            case SetTimer(timer, due):
                _set_timer(db, run, timer, due)
            case ClearTimer(timer):
                _set_timer(db, run, timer, None)
            case StopStep(step_id):
                _revoke(db, db.every(_SQL["open_jobs_of_step"], run=run, step_id=step_id))
                db.run(_SQL["clear_timers_of_step"], run=run, step_id=step_id)
            case StopRun():
                _revoke(db, db.every(_SQL["open_jobs_of_run"], run=run))
                db.run(_SQL["clear_timers_of_run"], run=run)
            case _:
                assert_never(effect)


def _set_timer(db: Database, run: int, timer: Timer, due: Instant | None) -> None:
    db.later(
        _SQL["set_timer"],
        run=run,
        step_id=timer.step_id or "",
        key=timer.key,
        due=due,
        timer=encode(timer),
    )


def _dispatch(db: Database, run: int, job: Job) -> None:
    db.later(
        _SQL["dispatch_job"],
        id=job.id,
        run=run,
        tenant=job.tenant,
        topic=job.topic,
        step_id=job.step_id,
        item=job.item,
        attempt=job.attempt,
        dispatch=job.dispatch,
        ticket=db.ticket(),
        input=encode(job.input),
    )
    db.pending.touch(about.job(job.id))


def _revoke(db: Database, jobs: Sequence[Row]) -> None:
    leaving: Counter[tuple[Topic, TenantId]] = Counter()
    for job, topic, tenant, state in jobs:
        db.run(_SQL["revoke_job"], job=job)
        leaving[topic, tenant] += state == JobState.READY
    for (topic, tenant), count in leaving.items():
        ready.leave(db, topic, tenant, count)
