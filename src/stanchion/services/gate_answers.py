"""The gate's answers, and when a refused caller should retry.

A full tenant (429) has room again when one of its runs ends. So the delay is computed from how far
apart its runs have been ending, and from how many callers were refused since the last end: with one
slot free every two seconds, the tenth caller need not retry within two. An outage (503) is mostly
short: callers retry soon at first, and later the longer it lasts.

Both delays are jittered. Callers that were refused together and told the same delay would come back
together, and be refused together.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

from stanchion.core.faults import Fault, WorkflowFaults
from stanchion.core.lease import Moment
from stanchion.core.model import Instant, RunId, RunStatus, TenantId
from stanchion.core.rerun import RerunRefused
from stanchion.core.retry import within
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.services.plans import UnknownWorkflow

__all__ = [
    "Backend",
    "GateCode",
    "GateFailed",
    "GateFull",
    "InvalidInput",
    "JobThrottled",
    "KeyMismatch",
    "Pacing",
    "Passed",
    "RerunAnswer",
    "RunStarted",
    "StartAnswer",
    "SubmitAnswer",
    "UnknownRun",
    "full_window_ms",
    "outage_window_ms",
]

FULL_MS_MIN: Final = 1_000
FULL_MS_MAX: Final = 30_000
OUTAGE_MS_MIN: Final = 1_000
OUTAGE_MS_MAX: Final = 10_000
BUSY_MS: Final = (1_000, 3_000)
"""A lock that others have been taking turns at: no outage, so this does not grow."""

SPREAD_MS_MIN: Final = 1_000
"""The narrowest window. Within it a hundred callers still get as many different answers."""
GAP_MS_UNKNOWN: Final = 2_000
"""How far apart runs end, as long as nobody has seen two of them do so."""
GAP_MS_MAX: Final = FULL_MS_MAX
"""A longer one says that nothing was running, not how fast runs end."""
GAP_WEIGHT: Final = 0.3
"""Of the newest gap in the average: the last few ends matter, a single odd one does not."""
OUTAGE_FORGOTTEN_MS: Final = 30_000
"""A failure so long after the last one is a new outage."""
TENANTS_MAX: Final = 4_096


def full_window_ms(*, gap_ms: float, since_end_ms: int, ahead: int) -> tuple[int, int]:
    """From when to when a refused caller may be asked to come again.

    ``gap_ms`` is how far apart the tenant's runs have been ending, ``since_end_ms`` how long ago
    the last one did, ``ahead`` how many callers were refused since then.
    """
    # Nothing has ended for longer than usual: then usual is over.
    gap_ms = max(gap_ms, since_end_ms)
    latest_ms = _bounded(gap_ms * (1 + ahead), FULL_MS_MIN + SPREAD_MS_MIN, FULL_MS_MAX)
    earliest_ms = _bounded(gap_ms / 2, FULL_MS_MIN, latest_ms // 2)
    return earliest_ms, latest_ms


def outage_window_ms(*, lasted_ms: int) -> tuple[int, int]:
    """The same for an outage: from the first second or two up to ten, half of it chance."""
    latest_ms = _bounded(OUTAGE_MS_MIN + SPREAD_MS_MIN + lasted_ms / 2, 0, OUTAGE_MS_MAX)
    return max(OUTAGE_MS_MIN, latest_ms // 2), latest_ms


def _bounded(number: float, low: int, high: int) -> int:
    return int(max(low, min(high, number)))


class Backend(StrEnum):
    """What can be away. Each has outages of its own."""

    STORE = "store"
    LOCKS = "locks"


class _Ends(msgspec.Struct, frozen=True):
    """How one tenant's runs have been ending, as this replica saw it."""

    last_at: Instant
    gap_ms: float | None = None
    refused: int = 0
    """Callers since the last end."""


class _Outage(msgspec.Struct, frozen=True):
    began_at: Moment
    failed_at: Moment


class Pacing:
    """What this replica tells those whom it refuses."""

    def __init__(self, clock: Clock, entropy: Entropy) -> None:
        self._clock = clock
        self._entropy = entropy
        self._ends: OrderedDict[TenantId, _Ends] = OrderedDict()
        self._outages: dict[Backend, _Outage] = {}

    def finished(self, tenant: TenantId, at: Instant) -> None:
        """A run that held one of the tenant's slots has ended."""
        known = self._ends.get(tenant)
        gap_ms = None
        if known is not None:
            # The time of day may have been set back.
            newest_ms = float(min(GAP_MS_MAX, max(0, at - known.last_at)))
            gap_ms = (
                newest_ms
                if known.gap_ms is None
                else known.gap_ms + GAP_WEIGHT * (newest_ms - known.gap_ms)
            )
        self._keep(tenant, _Ends(at, gap_ms))

    def full(self, tenant: TenantId) -> int:
        """When a caller whom a full tenant refused should come again, in milliseconds."""
        now = self._clock.now()
        # Nothing known: as if a run had ended just now, so that the wait for one begins.
        known = self._ends.get(tenant, _Ends(now))
        window = full_window_ms(
            gap_ms=GAP_MS_UNKNOWN if known.gap_ms is None else known.gap_ms,
            since_end_ms=max(0, now - known.last_at),
            ahead=known.refused,
        )
        self._keep(tenant, replace(known, refused=known.refused + 1))
        return within(*window, self._entropy.unit())

    def away(self, backend: Backend) -> int:
        """When a caller who met an outage should come again."""
        now = self._clock.moment()
        outage = self._outages.get(backend)
        if outage is None or now - outage.failed_at > OUTAGE_FORGOTTEN_MS:
            outage = _Outage(now, now)
        self._outages[backend] = replace(outage, failed_at=now)
        return within(*outage_window_ms(lasted_ms=now - outage.began_at), self._entropy.unit())

    def answered(self, backend: Backend) -> None:
        """It works: an outage is over."""
        self._outages.pop(backend, None)

    def busy(self) -> int:
        """When a caller who met a busy gate should come again."""
        return within(*BUSY_MS, self._entropy.unit())

    def _keep(self, tenant: TenantId, ends: _Ends) -> None:
        self._ends[tenant] = ends
        self._ends.move_to_end(tenant)
        if len(self._ends) > TENANTS_MAX:
            self._ends.popitem(last=False)


class RunStarted(msgspec.Struct, frozen=True):
    """The run is there."""

    run_id: RunId
    status: RunStatus
    replayed: bool
    """The same key made it before, and this request made nothing."""


class InvalidInput(msgspec.Struct, frozen=True):
    """The workflow does not accept this input."""

    faults: tuple[Fault, ...]


class UnknownRun(msgspec.Struct, frozen=True):
    """The tenant has no such run."""

    run_id: RunId


class GateFull(msgspec.Struct, frozen=True):
    """The tenant has as many unfinished runs as it may."""

    limit: int
    active: int
    retry_after_ms: int


class KeyMismatch(msgspec.Struct, frozen=True):
    """The idempotency key was used for another request."""


class JobThrottled(msgspec.Struct, frozen=True):
    """The tenant submits jobs faster than it may."""

    retry_after_ms: int = 30_000


class GateCode(StrEnum):
    """Why nobody could say whether the run may begin."""

    GATE_UNAVAILABLE = "gate_unavailable"
    """The store or the lock store is silent."""
    GATE_BUSY = "gate_busy"
    """Others had the tenant's lock for as long as the caller could wait."""
    LIMIT_CHECK_FAILED = "limit_check_failed"
    """The lock was ours, and the store behind it failed."""


class GateFailed(msgspec.Struct, frozen=True):
    """No run was made, as far as anybody knows; with the same key it is safe to ask again."""

    code: GateCode
    error: str
    retry_after_ms: int


Passed: TypeAlias = RunStarted | KeyMismatch | GateFull | JobThrottled | GateFailed
"""What can come of a run that was ready to begin."""
StartAnswer: TypeAlias = Passed | UnknownWorkflow | WorkflowFaults | InvalidInput
RerunAnswer: TypeAlias = Passed | UnknownRun | RerunRefused
SubmitAnswer: TypeAlias = RunStarted | KeyMismatch | JobThrottled | GateFailed
