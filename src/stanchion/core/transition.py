"""Transitions: the changes that a decision makes to a run.

A transition is a delta. It holds the steps and items that changed, the effects that are written in
the same commit, and the new timeline entries; never the whole run. ``evolve`` applies it to the run
that it was decided on.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

from stanchion.core.events import Timer
from stanchion.core.json_value import JsonValue
from stanchion.core.model import (
    Failure,
    Instant,
    Item,
    ItemKey,
    Job,
    JobId,
    PendingApproval,
    RunStatus,
    Step,
    StepId,
)


class DispatchJob(msgspec.Struct, frozen=True, tag="dispatch_job"):
    """Make the job ready for workers."""

    job: Job


class SetTimer(msgspec.Struct, frozen=True, tag="set_timer"):
    """Post ``TimerFired(timer)`` at ``due``."""

    timer: Timer
    due: Instant


class ClearTimer(msgspec.Struct, frozen=True, tag="clear_timer"):
    """Remove the timer."""

    timer: Timer


class OpenApproval(msgspec.Struct, frozen=True, tag="open_approval"):
    """Add the approval to the list of those that wait for a decision."""

    approval: PendingApproval


class CloseApproval(msgspec.Struct, frozen=True, tag="close_approval"):
    """Remove the approval of the step from that list."""

    step_id: StepId


class StopStep(msgspec.Struct, frozen=True, tag="stop_step"):
    """Revoke every open job of the step, of its items and of the steps inside it.

    Their timers and approvals are removed.
    """

    step_id: StepId

    @property
    def inside(self) -> str:
        """What the ids of the steps inside it begin with."""
        return f"{self.step_id}."


class RevokeJob(msgspec.Struct, frozen=True, tag="revoke_job"):
    """Revoke one job, if it is open."""

    job_id: JobId


class StopRun(msgspec.Struct, frozen=True, tag="stop_run"):
    """Revoke every open job of the run and remove all its timers and approvals."""


Effect: TypeAlias = (
    DispatchJob
    | SetTimer
    | ClearTimer
    | OpenApproval
    | CloseApproval
    | RevokeJob
    | StopStep
    | StopRun
)


class TimelineEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of a run's timeline, for people."""

    at: Instant
    what: str
    """``step_succeeded``, ``job_dispatched``, …: the noun that changed, and how."""
    actor: str
    step: StepId | None = None
    item: int | None = None
    attempt: int | None = None
    detail: str | None = None


class Ignored(StrEnum):
    """Why an event changed nothing. None of these is an error of the sender."""

    RUN_FINISHED = "run_finished"
    ALREADY_STARTED = "already_started"
    NOT_WAITING_FOR_IT = "not_waiting_for_it"
    UNKNOWN_STEP = "unknown_step"


class Transition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The changes of one or several events to a run."""

    status: RunStatus
    output: JsonValue = None
    error: Failure | None = None
    finished_at: Instant | None = None
    steps: dict[StepId, Step] = {}
    items: dict[ItemKey, Item] = {}
    effects: tuple[Effect, ...] = ()
    timeline: tuple[TimelineEntry, ...] = ()
    ignored: tuple[Ignored | None, ...] = ()
    """One entry for each handled event, in order: why it changed nothing, or ``None``."""

    @property
    def changes_nothing(self) -> bool:
        """Whether there is nothing to commit: every event was late, repeated or misdirected."""
        return None not in self.ignored
