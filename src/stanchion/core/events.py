"""Events: what can happen to a run.

Every event names exactly what it is about, so that a repeated, late or misdirected one can be told
from a fresh one by comparing it with what the step is waiting for. Events are what lies in a run's
inbox, so they are values with a stable JSON form.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

from stanchion.core.json_value import JsonValue
from stanchion.core.model import Failure, JobId, StepId

__all__ = [
    "Approved",
    "AttemptFailed",
    "AttemptSucceeded",
    "CancelRequested",
    "Event",
    "JobDied",
    "JobReplayed",
    "JobReturned",
    "Rejected",
    "Started",
    "Timer",
    "TimerFired",
    "TimerKind",
]


class TimerKind(StrEnum):
    """What a timer is for."""

    RUN_TIMEOUT = "run_timeout"
    STEP_TIMEOUT = "step_timeout"
    DELAY = "delay"
    RETRY = "retry"


class Timer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Names one timer of a run. The attempt makes a retry's timer differ from the one before."""

    kind: TimerKind
    step_id: StepId | None = None
    item: int | None = None
    attempt: int = 0

    @property
    def key(self) -> str:
        """The timer's name within its run, unique and stable."""
        item = "" if self.item is None else f"[{self.item}]"
        return f"{self.kind}:{self.step_id or ''}{item}@{self.attempt}"


class _Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"):
    actor: str = "system"
    """Who caused it: a worker, a person, or the system itself."""


class Started(_Event, frozen=True, kw_only=True, tag="started"):
    """The run was admitted."""


class AttemptSucceeded(_Event, frozen=True, kw_only=True, tag="job_succeeded"):
    """A worker's result was accepted."""

    job_id: JobId
    step_id: StepId
    item: int | None = None
    output: JsonValue = None


class AttemptFailed(_Event, frozen=True, kw_only=True, tag="job_failed"):
    """A worker reported a failure. A final one is not tried again, whatever attempts are left."""

    job_id: JobId
    step_id: StepId
    error: Failure
    item: int | None = None
    final: bool = False


class JobDied(_Event, frozen=True, kw_only=True, tag="job_died"):
    """A job was handed out as often as is allowed and nobody finished it: it is a dead letter.

    ``dispatch`` tells this death from an earlier one that a replay has undone.
    """

    job_id: JobId
    step_id: StepId
    dispatch: int
    deliveries: int
    item: int | None = None


class JobReturned(_Event, frozen=True, kw_only=True, tag="job_returned"):
    """A worker's lease on a job ran out, and the job is offered again. For the timeline alone."""

    job_id: JobId
    step_id: StepId
    deliveries: int
    item: int | None = None


class JobReplayed(_Event, frozen=True, kw_only=True, tag="job_replayed"):
    """An operator sends a dead letter out again: the one of this ``dispatch``."""

    job_id: JobId
    step_id: StepId
    dispatch: int
    item: int | None = None


class TimerFired(_Event, frozen=True, kw_only=True, tag="timer_fired"):
    """The store says that this timer is due. Its word counts: replicas' clocks may differ."""

    timer: Timer


class Approved(_Event, frozen=True, kw_only=True, tag="approved"):
    """A person said yes."""

    step_id: StepId
    comment: str | None = None


class Rejected(_Event, frozen=True, kw_only=True, tag="rejected"):
    """A person said no."""

    step_id: StepId
    comment: str | None = None


class CancelRequested(_Event, frozen=True, kw_only=True, tag="cancel_requested"):
    """Somebody wants the run to end now."""

    reason: str | None = None


Event: TypeAlias = (
    Started
    | AttemptSucceeded
    | AttemptFailed
    | JobDied
    | JobReplayed
    | JobReturned
    | TimerFired
    | Approved
    | Rejected
    | CancelRequested
)
