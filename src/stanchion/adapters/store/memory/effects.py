"""Effects: what a transition asks for, made true on the shelf."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from stanchion.adapters.store.memory.shelf import JobFile, RunFile, Shelf
from stanchion.core.events import Timer
from stanchion.core.model import Job, JobId
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


def carry_out(shelf: Shelf, file: RunFile, effects: Iterable[Effect]) -> None:
    """Make effects true, in their order."""
    for effect in effects:
        match effect:
            case DispatchJob(job):
                _dispatch(shelf, file, job)
            case SetTimer(timer, due):
                file.timers[timer] = due
                shelf.timers.put((file.run.id, timer), due)
            case ClearTimer(timer):
                _clear(shelf, file, [timer])
            case StopStep(step_id):
                _revoke(shelf, [id_ for id_ in file.jobs if shelf.jobs[id_].job.step_id == step_id])
                _clear(shelf, file, [each for each in file.timers if each.step_id == step_id])
            case StopRun():
                _revoke(shelf, file.jobs)
                _clear(shelf, file, list(file.timers))
            case _:
                assert_never(effect)


def _dispatch(shelf: Shelf, file: RunFile, job: Job) -> None:
    known = shelf.jobs.get(job.id)
    if known is None:
        shelf.jobs[job.id] = JobFile(job)
        file.jobs.append(job.id)
    elif known.state is JobState.DEAD:
        # Sent out again by an operator. The fence stays: the next one must be above it.
        shelf.jobs[job.id] = JobFile(job, fence=known.fence)
    else:
        return
    shelf.ready.add(job)


def _revoke(shelf: Shelf, job_ids: Iterable[JobId]) -> None:
    for job_id in job_ids:
        file = shelf.jobs[job_id]
        if file.state in {JobState.READY, JobState.LEASED}:
            shelf.ready.remove(file.job)
            shelf.leases.remove(job_id)
            file.state = JobState.REVOKED
            file.worker_id = file.expires_at = file.progress = None


def _clear(shelf: Shelf, file: RunFile, timers: Iterable[Timer]) -> None:
    for timer in timers:
        file.timers.pop(timer, None)
        shelf.timers.remove((file.run.id, timer))
