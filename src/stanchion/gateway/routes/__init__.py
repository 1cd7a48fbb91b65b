"""The table of all routes."""

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
    *runs.ROUTES,
    *worker.ROUTES,
    *jobs.ROUTES,
    *workflows.ROUTES,
    *schedules.ROUTES,
    *events.ROUTES,
    *admin.ROUTES,
    *limits.ROUTES,
    *leases.ROUTES,
    *dead_letters.ROUTES,
    *deployment.ROUTES,
    *audit.ROUTES,
    *bulk.ROUTES,
    *health.ROUTES,
)
