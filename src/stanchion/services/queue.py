"""The admission queue's figures: positions, and how long a run will probably wait for a slot."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final, NamedTuple

from stanchion.core.lease import Moment
from stanchion.core.model import Instant, RunId, RunStatus, TenantId
from stanchion.core.queue import (
    ENDS_MAX,
    ENDS_MIN,
    QUEUE_TIMEOUT,
    SlotUse,
    estimate_s,
    has_begun,
)
from stanchion.ports.errors import BackendError, BackendTimeout
from stanchion.ports.records import RunFilter, RunSummary
from stanchion.ports.store import Runs
from stanchion.services.context import ReplicaContext
from stanchion.services.plans import is_single_job

BELIEVED_MS: Final = 1_000
TENANTS_MAX: Final = 1_000
_RUNS_MAX: Final = 10_000
_JOBS_PASSED: Final = 200
"""How many more runs are looked at if the newest are single jobs, which hold no slot."""
_WORKED: Final = RunFilter(statuses=(RunStatus.SUCCEEDED, RunStatus.FAILED))
_STOPPED: Final = RunFilter(statuses=(RunStatus.CANCELLED, RunStatus.TIMED_OUT))
"""Read separately: while a tenant is full, the newest of these mostly ended in the queue."""
_UNDER_WAY: Final = RunFilter(statuses=(RunStatus.PENDING, RunStatus.RUNNING, RunStatus.WAITING))
_HELD_MAX: Final = 100
"""With more runs under way, an estimate does not look at each of them."""


class _SlotsSeen(NamedTuple):
    """How the tenant's slots were used, as it was read."""

    read_at: Moment
    ended: tuple[SlotUse, ...]
    held: tuple[Instant, ...]
    """When the runs that hold a slot were created."""
    slots: int


class QueueFigures:
    """What a caller is told about its run in the queue.

    Estimates are made from the tenant's last runs, read once a second at most.
    """

    def __init__(self, context: ReplicaContext) -> None:
        self._runs: Runs = context.store
        self._clock = context.clock
        self._signals = context.signals
        self._known: OrderedDict[TenantId, _SlotsSeen] = OrderedDict()
        self._began: OrderedDict[RunId, bool] = OrderedDict()
        """Of cancelled runs: whether they had begun."""

    async def position(self, run_id: RunId, *, within_ms: int) -> int | None:
        """The place of a run; ``None`` if it has left the queue. Raises ``BackendError``."""
        try:
            async with asyncio.timeout(within_ms / 1000):
                place = await self._runs.queue_place(run_id)
        except TimeoutError as error:
            raise BackendTimeout("the store did not say the run's position in time") from error
        return None if place is None else place.position

    async def estimate_s(self, tenant: TenantId, position: int, *, within_ms: int) -> float | None:
        """How long the run at this position will probably wait; ``None`` if that is not known.

        Also sets the metric of the queue's length.
        """
        try:
            async with asyncio.timeout(within_ms / 1000):
                self._signals.queued({tenant: await self._runs.queued_runs(tenant)})
                seen = await self._slots(tenant)
        except (BackendError, TimeoutError):
            return None
        if seen is None:
            return None
        return estimate_s(
            seen.ended, seen.held, slots=seen.slots, position=position, now=self._clock.now()
        )

    async def _slots(self, tenant: TenantId) -> _SlotsSeen | None:
        now = self._clock.moment()
        known = self._known.get(tenant)
        if known is not None and now - known.read_at < BELIEVED_MS:
            return known
        ended, is_all = await self._read_ended(tenant)
        if is_all and len(ended) < ENDS_MIN:
            return None  # read again next time: the second end makes a difference
        page = await self._runs.list_runs(tenant, only=_UNDER_WAY, limit=_HELD_MAX)
        held = tuple(run.created_at for run in page.items if not is_single_job(run))
        slots = len(held) if page.cursor is None else await self._runs.active_runs(tenant)
        known = self._known[tenant] = _SlotsSeen(now, ended, held, max(slots, len(held)))
        self._known.move_to_end(tenant)
        if len(self._known) > TENANTS_MAX:
            self._known.popitem(last=False)
        return known

    async def _read_ended(self, tenant: TenantId) -> tuple[tuple[SlotUse, ...], bool]:
        """The last runs that freed their slots, and whether no older one worked to its end."""
        worked = await self._runs.list_runs(tenant, only=_WORKED, limit=ENDS_MAX)
        stopped = await self._runs.list_runs(tenant, only=_STOPPED, limit=ENDS_MAX)
        runs = [run for run in worked.items if not is_single_job(run)]
        if len(runs) < ENDS_MIN and worked.cursor is not None:
            worked = await self._runs.list_runs(
                tenant, only=_WORKED, cursor=worked.cursor, limit=_JOBS_PASSED
            )
            runs += [run for run in worked.items if not is_single_job(run)]
        runs += [run for run in stopped.items if await self._had_slot(run)]
        ended = tuple(
            SlotUse(run.created_at, run.finished_at) for run in runs if run.finished_at is not None
        )
        return ended, worked.cursor is None

    async def _had_slot(self, run: RunSummary) -> bool:
        """Whether a run that was cancelled or timed out had begun before."""
        if is_single_job(run):
            return False
        if run.status is not RunStatus.CANCELLED:
            return run.error is None or run.error.code != QUEUE_TIMEOUT
        if run.id not in self._began:
            loaded = await self._runs.load(run.id)
            self._began[run.id] = loaded is not None and has_begun(loaded.run)
            if len(self._began) > _RUNS_MAX:
                self._began.popitem(last=False)
        return self._began[run.id]
