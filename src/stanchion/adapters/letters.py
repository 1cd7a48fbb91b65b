"""Dead letters: what every store writes when something dies, and what a replay brings back."""

from __future__ import annotations

from typing import assert_never

from stanchion.core.events import (
    CancelRequested,
    Event,
    JobDied,
    JobReplayed,
    Started,
    TimerFired,
)
from stanchion.core.model import Instant, Job, RunId, StepId
from stanchion.ports.records import DeadLetter, DeadLetterKind

__all__ = ["death_of", "event_letter_id", "letter_of", "reborn", "step_of"]


def letter_of(job: Job, deliveries: int, at: Instant) -> DeadLetter:
    """The letter of a job that was handed out as often as is allowed."""
    return DeadLetter(
        id=f"job:{job.id}#{job.dispatch}",
        kind=DeadLetterKind.JOB,
        tenant=job.tenant,
        run_id=job.run_id,
        step_id=job.step_id,
        cause=f"delivered {deliveries} times, and no worker finished it",
        at=at,
        job=job,
    )


def death_of(job: Job, deliveries: int) -> tuple[str, JobDied]:
    """The inbox entry by which the job's run hears of it."""
    died = JobDied(
        job_id=job.id,
        step_id=job.step_id,
        item=job.item,
        dispatch=job.dispatch,
        deliveries=deliveries,
    )
    return f"died:{job.id}#{job.dispatch}", died


def event_letter_id(run_id: RunId, entry_id: str) -> str:
    """The id of the letter that an inbox entry becomes when it is buried."""
    return f"event:{run_id}:{entry_id}"


def reborn(letter: DeadLetter, actor: str) -> tuple[str, Event]:
    """The inbox entry that a letter becomes when it is replayed."""
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
            return letter.id.removeprefix(event_letter_id(letter.run_id, "")), letter.event
        case _:
            assert_never(letter.kind)


def step_of(event: Event) -> StepId | None:
    """The step that an event is about, if it is about one."""
    match event:
        case Started() | CancelRequested():
            return None
        case TimerFired(timer=timer):
            return timer.step_id
        case _:
            return event.step_id
