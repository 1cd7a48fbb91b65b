"""Events: what can happen to a run.

Every event names the job, timer or step that it concerns. Comparing that with what the step waits
for identifies repeated, late and misdirected events. Events are stored in the inbox of a run, so
their JSON form is stable.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

from stanchion.core.json_value import JsonValue
from stanchion.core.model import Failure, Instant, JobId, StepId


class TimerKind(StrEnum):
    """What a timer is for."""

    RUN_TIMEOUT = "run_timeout"
    STEP_TIMEOUT = "step_timeout"
    DELAY = "delay"
    RETRY = "retry"
    DECISION = "decision"
    ITEMS = "items"
    """More items of a for-each with a workflow may begin."""
    QUEUE = "queue"
    """The run has waited for a slot as long as its tenant allows."""


class Timer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The name of one timer of a run. The attempt distinguishes the timers of several retries."""

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
    """The cause: a worker, a person, or ``system``."""


class Started(_Event, frozen=True, kw_only=True, tag="started"):
    """The run was admitted."""


class Promoted(_Event, frozen=True, kw_only=True, tag="promoted"):
    """The run left its tenant's queue with a slot."""


class AttemptSucceeded(_Event, frozen=True, kw_only=True, tag="job_succeeded"):
    """A worker's result was accepted."""

    job_id: JobId
    step_id: StepId
    item: int | None = None
    output: JsonValue = None


class AttemptFailed(_Event, frozen=True, kw_only=True, tag="job_failed"):
    """A worker reported a failure. A final one is not retried, even if attempts are left."""

    job_id: JobId
    step_id: StepId
    error: Failure
    item: int | None = None
    final: bool = False


class JobDied(_Event, frozen=True, kw_only=True, tag="job_died"):
    """A job was delivered as often as is allowed without a result: it is a dead letter.

    ``dispatch`` distinguishes this dead letter from an earlier one of the job that was replayed.
    """

    job_id: JobId
    step_id: StepId
    dispatch: int
    deliveries: int
    item: int | None = None


class JobReturned(_Event, frozen=True, kw_only=True, tag="job_returned"):
    """The lease of a worker on a job expired and the job is ready again. For the timeline only."""

    job_id: JobId
    step_id: StepId
    deliveries: int
    item: int | None = None


class JobReplayed(_Event, frozen=True, kw_only=True, tag="job_replayed"):
    """An operator replays a dead letter: the one of this ``dispatch``."""

    job_id: JobId
    step_id: StepId
    dispatch: int
    item: int | None = None


class JobDiscarded(_Event, frozen=True, kw_only=True, tag="job_discarded"):
    """An operator discards a dead letter, the one of this ``dispatch``: its step or item fails."""

    job_id: JobId
    step_id: StepId
    dispatch: int
    item: int | None = None


class TimerFired(_Event, frozen=True, kw_only=True, tag="timer_fired"):
    """This timer is due, by the clock of the store: the clocks of replicas may differ."""

    timer: Timer
    due: Instant | None = None
    """When it was due; ``None`` if an older version fired it."""


class Approved(_Event, frozen=True, kw_only=True, tag="approved"):
    """A person approved the step."""

    step_id: StepId
    comment: str | None = None
    data: JsonValue = None


class Rejected(_Event, frozen=True, kw_only=True, tag="rejected"):
    """A person rejected the step."""

    step_id: StepId
    comment: str | None = None
    data: JsonValue = None


class CancelRequested(_Event, frozen=True, kw_only=True, tag="cancel_requested"):
    """A user requests that the run end now."""

    reason: str | None = None


Event: TypeAlias = (
    Started
    | Promoted
    | AttemptSucceeded
    | AttemptFailed
    | JobDied
    | JobDiscarded
    | JobReplayed
    | JobReturned
    | TimerFired
    | Approved
    | Rejected
    | CancelRequested
)
