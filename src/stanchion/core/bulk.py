"""Bulk actions: one action on every run that a filter matched, at a limited rate.

The runs are fixed when the bulk action is created, in a numbered list that never changes. The
record says how far it is: numbers below ``next`` were taken, those in ``open`` are not settled yet.
A number is taken in the store before its run is acted on, and settled afterwards, so that another
replica knows after a crash which runs may have been acted on: it acts on the open ones again, and
each action has the effect of one.

The replica that carries it out holds the record for a short time, which every write extends. Each
write names the revision that it read: a holder that was replaced cannot write any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from stanchion.core.json_value import JsonObject
from stanchion.core.model import Instant, RunId, TenantId

BULK_RUNS_MAX: Final = 100_000
"""Runs of one bulk action: their list is written when it is created."""
BULKS_MAX: Final = 10
"""Bulk actions of one tenant that a replica carries out at a time."""
BULK_ERRORS_MAX: Final = 100
"""Failures that are kept with the record, the first ones."""
BulkRatePerS: TypeAlias = Annotated[float, Meta(ge=0.1, le=1000)]
"""Runs that a bulk action acts on each second."""
OPEN_MAX: Final = 1_000
"""Runs that are taken and not settled, most of which wait for a slot of their tenant."""


class BulkAction(StrEnum):
    """What is done with each run. Each is also a request of its own about one run."""

    CANCEL = "cancel"
    RERUN = "rerun"
    REPLAY = "replay"
    """Replay the dead letters of the run."""
    DISCARD = "discard"
    """Discard the dead letters of the run."""
    APPROVE = "approve"
    """Approve every step of the run that waits for a decision."""
    REJECT = "reject"


class BulkStatus(StrEnum):
    """The status of a bulk action. The last two are final."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"


class BulkDone(msgspec.Struct, frozen=True):
    """The action on a run has its effect."""

    is_skipped: bool = False
    """Whether there was nothing to do: a run to be cancelled had ended."""


class BulkFailed(msgspec.Struct, frozen=True):
    """The action on a run was refused for good."""

    run_id: RunId
    code: str
    detail: str


class BulkLater(msgspec.Struct, frozen=True):
    """The run cannot be acted on now, for example because its tenant is full."""

    delay_ms: int


BulkOutcome: TypeAlias = BulkDone | BulkFailed | BulkLater


class Bulk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record of a bulk action."""

    id: str
    action: BulkAction
    tenant: TenantId | None
    """``None``: it is about the runs of all tenants."""
    filter: JsonObject
    """As it was given."""
    actor: str
    request_id: str
    created_at: Instant
    rate_per_s: float
    matched: int
    key_id: str | None = None
    """The key that began it: it ends with that key."""
    done: int = 0
    failed: int = 0
    skipped: int = 0
    """Of ``done``: runs for which there was nothing to do."""
    status: BulkStatus = BulkStatus.RUNNING
    errors: tuple[BulkFailed, ...] = ()
    finished_at: Instant | None = None
    next: int = 0
    open: tuple[int, ...] = ()
    holder: str = ""
    held_until: Instant = Instant(0)

    def is_free_for(self, replica: str, now: Instant) -> bool:
        """Whether the replica may carry it on: no replica does, or its holder is gone."""
        return self.status is BulkStatus.RUNNING and (
            self.holder == replica or now >= self.held_until
        )


def begin(bulk: Bulk, count: int) -> tuple[Bulk, range]:
    """Take the next ``count`` runs, or fewer; returns the record and their numbers."""
    room = max(0, OPEN_MAX - len(bulk.open))
    taken = range(bulk.next, min(bulk.matched, bulk.next + min(count, room)))
    if not taken:
        return bulk, taken
    return replace(bulk, next=taken.stop, open=(*bulk.open, *taken)), taken


def settle(bulk: Bulk, outcomes: Mapping[int, BulkDone | BulkFailed], now: Instant) -> Bulk:
    """Count what became of open runs. The last one finishes the bulk action."""
    new = {number: outcomes[number] for number in bulk.open if number in outcomes}
    failures = tuple(each for each in new.values() if isinstance(each, BulkFailed))
    failed = bulk.failed + len(failures)
    skipped = sum(isinstance(each, BulkDone) and each.is_skipped for each in new.values())
    done = bulk.done + len(new) - len(failures)
    is_last = bulk.status is BulkStatus.RUNNING and done + failed >= bulk.matched
    return replace(
        bulk,
        done=done,
        failed=failed,
        skipped=bulk.skipped + skipped,
        errors=(*bulk.errors, *failures)[:BULK_ERRORS_MAX],
        open=tuple(number for number in bulk.open if number not in new),
        status=BulkStatus.FINISHED if is_last else bulk.status,
        finished_at=now if is_last else bulk.finished_at,
    )


def fail_rest(bulk: Bulk, failures: Sequence[BulkFailed], now: Instant) -> Bulk:
    """Finish it: every run that is not settled has failed, of which some are named."""
    return replace(
        bulk,
        failed=bulk.matched - bulk.done,
        errors=(*bulk.errors, *failures)[:BULK_ERRORS_MAX],
        next=bulk.matched,
        open=(),
        status=BulkStatus.FINISHED,
        finished_at=now,
    )


def stop(bulk: Bulk, now: Instant) -> Bulk:
    """Stop it: no further run is taken. One that has ended stays as it is."""
    if bulk.status is not BulkStatus.RUNNING:
        return bulk
    return replace(bulk, status=BulkStatus.STOPPED, finished_at=now)


class BulkPace:
    """How many runs may be taken now, so that their rate is kept."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._earned = 1.0

    def wait(self, seconds: float) -> None:
        """Earn what the time allows; what is not used within half a second is lost."""
        most = max(1.0, self._per_s / 2)
        self._earned = min(most, self._earned + seconds * self._per_s)

    @property
    def count(self) -> int:
        """The runs that may be taken now."""
        return int(self._earned)

    def take(self, count: int) -> None:
        """Use up what was taken."""
        self._earned -= count
