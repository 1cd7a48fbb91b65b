"""The admission overview: every tenant's slots, and what all replicas answered its callers.

Slots come from the store. What was answered comes from the replicas' summaries, each at most three
seconds old; this replica's own figures are current. A replica that does not report is named, and
its figures are left out. The overview is made at most once a second, and shared by all who ask.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from stanchion.core.json_value import JsonValue
from stanchion.core.lease import Moment
from stanchion.core.model import Instant, TenantId
from stanchion.core.pressure import GateFigures, TenantPressure, pressure_order, together
from stanchion.ports.clock import Clock
from stanchion.ports.records import Page, Tenant, TenantStanding
from stanchion.ports.store import Tenants
from stanchion.services.replicas import ReplicaReporter
from stanchion.services.signals import AdmissionFigures

PART: Final = "admission"
"""The part of a replica's summary that has its figures."""
SEEN_MS: Final = 30 * 24 * 60 * 60 * 1000
"""Tenants that started a run this long ago are listed, and all that are configured."""
CACHED_MS: Final = 1_000
TENANTS_MAX: Final = 10_000
_PAGE: Final = 1_000
_DEFAULTS: Final = Tenant()


class AdmissionOverview(msgspec.Struct, frozen=True):
    """All tenants, the one under most pressure first."""

    tenants: tuple[TenantPressure, ...]
    replicas_missing: tuple[str, ...]
    """Replicas that have not reported for 15 s."""


class OverviewService:
    """Makes the overview, and reports this replica's figures."""

    def __init__(
        self,
        tenants: Tenants,
        *,
        clock: Clock,
        figures: AdmissionFigures,
        replicas: ReplicaReporter,
    ) -> None:
        self._tenants = tenants
        self._clock = clock
        self._figures = figures
        self._replicas = replicas
        self._made: tuple[AdmissionOverview, Moment] | None = None
        self._making: asyncio.Task[AdmissionOverview] | None = None
        replicas.contribute(PART, figures.report)

    async def read(self) -> AdmissionOverview:
        """The overview, at most a second old. Raises ``BackendError``."""
        if self._made is not None and self._clock.moment() - self._made[1] < CACHED_MS:
            return self._made[0]
        if self._making is None:
            self._making = asyncio.create_task(self._make())
            self._making.add_done_callback(self._end)
        # Shielded: a cancelled request must not cancel the shared read.
        return await asyncio.shield(self._making)

    async def _make(self) -> AdmissionOverview:
        began = self._clock.moment()
        view = await self._replicas.read()
        standings = await self._standings()
        figures = together(
            [
                self._figures.read(),
                *(
                    _reported(each.summary.parts.get(PART))
                    for each in view.replicas
                    if not each.is_missing and each.replica != self._replicas.replica
                ),
            ]
        )
        found = [
            TenantPressure(
                tenant=each.tenant,
                limit=(each.config or _DEFAULTS).max_concurrent_runs,
                active=each.active,
                queued=each.queued,
                figures=figures.pop(each.tenant, GateFigures()),
            )
            for each in standings
        ]
        # Tenants that never started a run, and were refused just now.
        found += [
            TenantPressure(
                tenant=tenant, limit=_DEFAULTS.max_concurrent_runs, active=0, figures=each
            )
            for tenant, each in figures.items()
        ]
        made = AdmissionOverview(tuple(sorted(found, key=pressure_order)), view.missing)
        self._made = made, began
        return made

    async def _standings(self) -> list[TenantStanding]:
        seen_since = Instant(self._clock.now() - SEEN_MS)
        found: list[TenantStanding] = []
        cursor: str | None = None
        while len(found) < TENANTS_MAX:
            page: Page[TenantStanding] = await self._tenants.list_standings(
                seen_since=seen_since, cursor=cursor, limit=_PAGE
            )
            found += page.items
            cursor = page.cursor
            if cursor is None:
                break
        return found

    def _end(self, making: asyncio.Task[AdmissionOverview]) -> None:
        self._making = None
        if not making.cancelled():
            making.exception()  # retrieved, so that asyncio does not log it as never awaited


def _reported(part: JsonValue) -> dict[TenantId, GateFigures]:
    try:
        return msgspec.convert(part or {}, dict[TenantId, GateFigures])
    except msgspec.ValidationError:
        return {}  # a replica of another version
