"""The table of all routes, the most frequent ones first."""

from __future__ import annotations

from typing import Final

from stanchion.gateway.route import Route
from stanchion.gateway.routes import (
    admin,
    audit,
    bulk,
    dead_letters,
    deployment,
    events,
    health,
    jobs,
    leases,
    limits,
    runs,
    schedules,
    worker,
    workflows,
)

__all__ = ["ROUTES"]

ROUTES: Final[tuple[Route, ...]] = (
    *runs.ROUTES[:1],
    *worker.ROUTES,
    *runs.ROUTES[1:],
    *jobs.ROUTES,
    *workflows.ROUTES,
    *schedules.ROUTES,
    *events.ROUTES,
    *admin.TENANTS_ROUTES,
    *admin.SETTINGS_ROUTES,
    *limits.ROUTES,
    *leases.ROUTES,
    *leases.HISTORY_ROUTES,
    *dead_letters.ROUTES,
    *admin.KEYS_ROUTES,
    *leases.ESCALATION_ROUTES,
    *deployment.ROUTES,
    *audit.ROUTES,
    *bulk.ROUTES,
    *health.ROUTES,
)
