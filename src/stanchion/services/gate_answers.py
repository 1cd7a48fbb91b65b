"""The gate's answers, and when a refused caller should retry.

A full tenant (429) has a free slot when one of its runs ends. So the delay is computed from the
interval between the ends of its runs, and from the number of callers refused since the last end:
with one slot free every two seconds, the tenth caller need not retry within two. Most outages (503)
are short: the delay is small at first, and grows with the outage.

Both delays are jittered. Callers that were refused together and told the same delay would retry
together, and be refused together.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

from stanchion.core.budget import OverBudget
from stanchion.core.faults import Fault, WorkflowFaults
from stanchion.core.lease import Moment
from stanchion.core.model import Instant, RunId, RunStatus, TenantId
from stanchion.core.rerun import RerunRefused
from stanchion.core.retry import within
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.services.plans import UnknownWorkflow

FULL_MS_MIN: Final = 1_000
FULL_MS_MAX: Final = 30_000
OUTAGE_MS_MIN: Final = 1_000
OUTAGE_MS_MAX: Final = 10_000
BUSY_MS: Final = (1_000, 3_000)
"""For a lock that other callers held: this is no outage, so the delay does not grow."""

SPREAD_MS_MIN: Final = 1_000
"""The narrowest window: wide enough for a hundred callers to get different delays."""
GAP_MS_UNKNOWN: Final = 2_000
"""The assumed interval between the ends of two runs, until two ends were seen."""
GAP_MS_MAX: Final = FULL_MS_MAX
"""A longer interval means that nothing was running, not that runs end slowly."""
GAP_WEIGHT: Final = 0.3
"""The weight of the newest interval in the moving average."""
OUTAGE_FORGOTTEN_MS: Final = 30_000
"""A failure that follows the last one by more than this begins a new outage."""
TENANTS_MAX: Final = 4_096


def full_window_ms(*, gap_ms: float, since_end_ms: int, ahead: int) -> tuple[int, int]:
    """The earliest and latest delay of a caller that a full tenant refused.

    ``gap_ms`` is the average interval between the ends of the tenant's runs, ``since_end_ms`` the
    time since the last end, ``ahead`` the number of callers refused since then.
    """
    # If nothing has ended for longer than the average, the average is out of date.
    gap_ms = max(gap_ms, since_end_ms)
    latest_ms = _bounded(gap_ms * (1 + ahead), FULL_MS_MIN + SPREAD_MS_MIN, FULL_MS_MAX)
    earliest_ms = _bounded(gap_ms / 2, FULL_MS_MIN, latest_ms // 2)
    return earliest_ms, latest_ms


def outage_window_ms(*, lasted_ms: int) -> tuple[int, int]:
    """The same for an outage: one to two seconds at first, up to ten; half of it is jitter."""
    latest_ms = _bounded(OUTAGE_MS_MIN + SPREAD_MS_MIN + lasted_ms / 2, 0, OUTAGE_MS_MAX)
    return max(OUTAGE_MS_MIN, latest_ms // 2), latest_ms


def _bounded(number: float, low: int, high: int) -> int:
    return int(max(low, min(high, number)))


class Backend(StrEnum):
    """A backend that can be unavailable. Outages are tracked for each."""

    STORE = "store"
    LOCKS = "locks"


class _Ends(msgspec.Struct, frozen=True):
    """When one tenant's runs ended, as seen by this replica."""

    last_at: Instant
    gap_ms: float | None = None
    refused: int = 0
    """Callers refused since the last end."""


class _Outage(msgspec.Struct, frozen=True):
    began_at: Moment
    failed_at: Moment


class Pacing:
    """Computes the ``Retry-After`` of refused callers."""

    def __init__(self, clock: Clock, entropy: Entropy) -> None:
        self._clock = clock
        self._entropy = entropy
        self._ends: OrderedDict[TenantId, _Ends] = OrderedDict()
        self._outages: dict[Backend, _Outage] = {}

    def finished(self, tenant: TenantId, at: Instant) -> None:
        """Note that a run that held one of the tenant's slots has ended."""
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
        """When a caller that a full tenant refused should retry, in milliseconds."""
        now = self._clock.now()
        # Nothing is known: assume that a run has ended just now.
        known = self._ends.get(tenant, _Ends(now))
        window = full_window_ms(
            gap_ms=GAP_MS_UNKNOWN if known.gap_ms is None else known.gap_ms,
            since_end_ms=max(0, now - known.last_at),
            ahead=known.refused,
        )
        self._keep(tenant, replace(known, refused=known.refused + 1))
        return within(*window, self._entropy.unit())

    def over_budget(self, tenant: TenantId, over: OverBudget) -> GateOverBudget:
        """The answer to a caller for whom too little is left of a budget.

        It need not retry before the window ends, or, if unfinished runs hold what it needs, before
        one of them may have ended.
        """
        now = self._clock.now()
        can_wait = over.can_end_within(FULL_MS_MAX, now)
        ends_in_ms = FULL_MS_MAX if over.resets_at is None else over.resets_at - now
        earliest_ms = _bounded(ends_in_ms, FULL_MS_MIN, FULL_MS_MAX)
        latest_ms = min(earliest_ms + SPREAD_MS_MIN, FULL_MS_MAX)
        wait_ms = within(earliest_ms, latest_ms, self._entropy.unit())
        if over.is_held:
            wait_ms = min(wait_ms, self.full(tenant))
        return GateOverBudget(over, wait_ms, can_wait)

    def away(self, backend: Backend) -> int:
        """Note a failure of the backend; when the caller should retry, in milliseconds."""
        now = self._clock.moment()
        outage = self._outages.get(backend)
        if outage is None or now - outage.failed_at > OUTAGE_FORGOTTEN_MS:
            outage = _Outage(now, now)
        self._outages[backend] = replace(outage, failed_at=now)
        return within(*outage_window_ms(lasted_ms=now - outage.began_at), self._entropy.unit())

    def answered(self, backend: Backend) -> None:
        """Note a success of the backend: an outage is over."""
        if self._outages:  # almost never: every start asks
            self._outages.pop(backend, None)

    def busy(self) -> int:
        """When a caller that found the tenant's lock busy should retry, in milliseconds."""
        return within(*BUSY_MS, self._entropy.unit())

    def _keep(self, tenant: TenantId, ends: _Ends) -> None:
        self._ends[tenant] = ends
        self._ends.move_to_end(tenant)
        if len(self._ends) > TENANTS_MAX:
            self._ends.popitem(last=False)


class RunStarted(msgspec.Struct, frozen=True):
    """The run was created, by this request or by an earlier one with the same key."""

    run_id: RunId
    status: RunStatus
    replayed: bool
    """Whether an earlier request with the same key created it."""
    position: int | None = None
    """Its place in the queue, if it is queued; 1 is the next one."""
    estimate_s: float | None = None
    """How long it will probably wait; ``None`` if that is not known."""


class InvalidInput(msgspec.Struct, frozen=True):
    """The workflow does not accept this input."""

    faults: tuple[Fault, ...]


class UnknownRun(msgspec.Struct, frozen=True):
    """The tenant has no such run."""

    run_id: RunId


class GateFull(msgspec.Struct, frozen=True):
    """The tenant has as many unfinished runs as its cap allows."""

    limit: int
    active: int
    retry_after_ms: int
    queue_max: int | None = None
    """How many runs may wait, if as many do; ``None`` if the start was not to wait."""


class QueueOff(msgspec.Struct, frozen=True):
    """The start asks to be queued, and its tenant rejects starts while it is full."""


class GateOverBudget(msgspec.Struct, frozen=True):
    """The run would reserve more than is left of a budget of its tenant."""

    over: OverBudget
    retry_after_ms: int
    can_wait: bool
    """Whether a retry can succeed within the longest delay."""


class KeyMismatch(msgspec.Struct, frozen=True):
    """The idempotency key was used for another request."""

    mark: tuple[int, int] | None = None
    """Of a tick: the generation and tick that the schedule's newest run has, in the store."""


class JobThrottled(msgspec.Struct, frozen=True):
    """The tenant submits jobs faster than its rate limit allows."""

    retry_after_ms: int = 30_000


class GateCode(StrEnum):
    """Why the gate could not decide on a start."""

    GATE_UNAVAILABLE = "gate_unavailable"
    """The store or the lock store did not answer."""
    GATE_BUSY = "gate_busy"
    """Other callers held the tenant's lock for the whole wait budget."""
    LIMIT_CHECK_FAILED = "limit_check_failed"
    """The caller held the tenant's lock, and the store failed."""


class GateFailed(msgspec.Struct, frozen=True):
    """The gate could not decide. A retry with the same idempotency key is safe."""

    code: GateCode
    error: str
    retry_after_ms: int


_Refused: TypeAlias = KeyMismatch | GateFull | QueueOff | GateOverBudget | JobThrottled | GateFailed
Passed: TypeAlias = RunStarted | _Refused
"""The possible answers to a prepared start."""
NotStarted: TypeAlias = _Refused | UnknownWorkflow | WorkflowFaults | InvalidInput
"""Why a start made no run."""
StartAnswer: TypeAlias = RunStarted | NotStarted
NoRerun: TypeAlias = UnknownWorkflow | WorkflowFaults | InvalidInput | UnknownRun | RerunRefused
"""Why there can be no such rerun."""
RerunAnswer: TypeAlias = Passed | NoRerun
SubmitAnswer: TypeAlias = RunStarted | KeyMismatch | JobThrottled | GateFailed
