"""Wire types for schedules."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from stanchion.core.json_value import JsonObject
from stanchion.core.model import RunStatus
from stanchion.core.schedule import CatchUp, IntervalS, JitterS, Overlap
from stanchion.wire.identifiers import Labels, Name


class PutSchedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When to start runs of a workflow: ``cron`` or ``every_s``."""

    workflow_id: Name
    cron: Annotated[str, Meta(max_length=200, examples=["0 9 * * MON-FRI"])] | None = None
    """Five fields: minute, hour, day of the month, month, day of the week."""
    every_s: IntervalS | None = None
    timezone: Annotated[str, Meta(max_length=64, examples=["Europe/Berlin"])] = "UTC"
    input: JsonObject = {}
    labels: Labels = {}
    overlap: Overlap = Overlap.SKIP
    """What happens to a tick while the run of an earlier one is unfinished."""
    catch_up: CatchUp = CatchUp.NONE
    """What happens to ticks that passed while no replica was running."""
    jitter_s: JitterS = 0
    """Every tick is delayed by the same random time, up to this many seconds."""
    paused: bool = False


class TriggerSchedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Start a run of a schedule now. The body has no members."""


class ScheduleRunRow(msgspec.Struct, frozen=True):
    """A run of a schedule: of a tick, or triggered."""

    tick: datetime
    """Of a triggered run: when it was triggered."""
    run_id: str
    triggered: bool = False
    status: RunStatus | None = None
    """``null`` in a list of schedules, and of a run that is no longer stored."""


class MissedTickRow(msgspec.Struct, frozen=True):
    """A tick without a run, and why."""

    tick: datetime
    reason: str


class DueTicksView(msgspec.Struct, frozen=True):
    """Ticks that are due and have no run yet. At most 1,000 are counted."""

    count: int
    oldest: datetime


class ScheduleView(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule, with what comes next and what happened."""

    id: str
    tenant: str
    workflow_id: str
    cron: str | None
    every_s: int | None
    timezone: str
    input: JsonObject
    labels: dict[str, str]
    overlap: Overlap
    catch_up: CatchUp
    jitter_s: int
    paused: bool
    generation: int
    """Rises with every change."""
    next: tuple[datetime, ...]
    """When its next five runs will start, with the jitter; none while it is paused."""
    waiting: MissedTickRow | None = None
    """A tick that is due and has no run yet: it is tried again, or held back."""
    due: DueTicksView | None = None
    """All ticks that are due and have no run yet, with the waiting one; `null` if there is none,
    and in a list of schedules. With `catch_up: all` they start one after the other."""
    runs: tuple[ScheduleRunRow, ...]
    """The last runs, of ticks and triggered ones, newest first."""
    missed: tuple[MissedTickRow, ...]
    """The last missed ticks, newest first."""
    missed_total: int


class ScheduleList(msgspec.Struct, frozen=True):
    """Schedules, by tenant and id."""

    schedules: tuple[ScheduleView, ...]
    cursor: str | None = None
