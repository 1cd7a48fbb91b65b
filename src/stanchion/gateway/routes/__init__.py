"""The table of all routes."""

from __future__ import annotations

from typing import Final

from stanchion.gateway.route import Route
from stanchion.gateway.routes import (
    admin,
    approvals,
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
    starts,
    worker,
    workflows,
)

__all__ = ["ROUTES"]

ROUTES: Final[tuple[Route, ...]] = (
    *starts.ROUTES,
    *runs.ROUTES,
    *approvals.ROUTES,
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
