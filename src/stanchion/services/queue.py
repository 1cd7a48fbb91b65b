"""The admission queue's figures: positions, and how long a run will probably wait for a slot."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final, NamedTuple

from stanchion.core.lease import Moment
from stanchion.core.model import Instant, RunId, RunStatus, TenantId
from stanchion.core.queue import ENDS_MAX, ENDS_MIN, QUEUE_TIMEOUT, estimate_s
from stanchion.ports.errors import BackendError, BackendTimeout
from stanchion.ports.records import RunFilter, RunSummary
from stanchion.ports.store import Runs
from stanchion.services.context import ReplicaContext
from stanchion.services.plans import is_single_job

__all__ = ["QueueFigures"]

BELIEVED_MS: Final = 1_000
TENANTS_MAX: Final = 1_000
_ENDED: Final = RunFilter(statuses=tuple(each for each in RunStatus if each.is_finished))


class _Ends(NamedTuple):
    read_at: Moment
    ends: tuple[Instant, ...]


class QueueFigures:
    """What a caller is told about its run in the queue.

    Estimates are made from the last ends of the tenant's runs, read once a second at most.
    """

    def __init__(self, context: ReplicaContext) -> None:
        self._runs: Runs = context.store
        self._clock = context.clock
        self._signals = context.signals
        self._known: OrderedDict[TenantId, _Ends] = OrderedDict()

    async def position(self, run_id: RunId, *, within_ms: int) -> int | None:
        """The place of a run; ``None`` if it has left the queue. Raises ``BackendError``."""
        try:
            async with asyncio.timeout(within_ms / 1000):
                return await self._runs.queue_position(run_id)
        except TimeoutError as error:
            raise BackendTimeout("the store did not say the run's position in time") from error

    async def estimate_s(self, tenant: TenantId, position: int, *, within_ms: int) -> float | None:
        """How long the run at this position will probably wait; ``None`` if that is not known.

        Also sets the metric of the queue's length.
        """
        try:
            async with asyncio.timeout(within_ms / 1000):
                self._signals.queued({tenant: await self._runs.queued_runs(tenant)})
                ends = await self._ends(tenant)
        except (BackendError, TimeoutError):
            return None
        return estimate_s(ends, position=position, now=self._clock.now())

    async def _ends(self, tenant: TenantId) -> tuple[Instant, ...]:
        now = self._clock.moment()
        known = self._known.get(tenant)
        if known is not None and now - known.read_at < BELIEVED_MS:
            return known.ends
        page = await self._runs.list_runs(tenant, only=_ENDED, limit=ENDS_MAX)
        ends = tuple(
            run.finished_at
            for run in page.items
            if run.finished_at is not None and _freed_slot(run)
        )
        if len(ends) < ENDS_MIN:
            return ends  # read again next time: the second end makes a difference
        self._known[tenant] = _Ends(now, ends)
        self._known.move_to_end(tenant)
        if len(self._known) > TENANTS_MAX:
            self._known.popitem(last=False)
        return ends


def _freed_slot(run: RunSummary) -> bool:
    return not is_single_job(run) and (run.error is None or run.error.code != QUEUE_TIMEOUT)
