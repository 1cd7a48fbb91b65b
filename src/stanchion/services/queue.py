"""The admission queue's estimates: how long a run will probably wait for a slot."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final, NamedTuple

from stanchion.core.lease import Moment
from stanchion.core.model import Instant, RunStatus, TenantId
from stanchion.core.queue import ENDS_MAX, ENDS_MIN, QUEUE_TIMEOUT, estimate_s
from stanchion.ports.clock import Clock
from stanchion.ports.errors import BackendError
from stanchion.ports.records import RunFilter, RunSummary
from stanchion.ports.store import Runs
from stanchion.services.plans import is_single_job

__all__ = ["QueueEstimates"]

BELIEVED_MS: Final = 1_000
TENANTS_MAX: Final = 1_000
_ENDED: Final = RunFilter(statuses=tuple(each for each in RunStatus if each.is_finished))


class _Ends(NamedTuple):
    read_at: Moment
    ends: tuple[Instant, ...]


class QueueEstimates:
    """Estimates from the last ends of a tenant's runs, which are read once a second at most."""

    def __init__(self, runs: Runs, clock: Clock) -> None:
        self._runs = runs
        self._clock = clock
        self._known: OrderedDict[TenantId, _Ends] = OrderedDict()

    async def of(self, tenant: TenantId, position: int, *, within_ms: int) -> float | None:
        """How long the run at this position will probably wait; ``None`` if that is not known."""
        try:
            async with asyncio.timeout(within_ms / 1000):
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
