"""The table of routes: everything that can be asked over HTTP, the busiest first."""

from __future__ import annotations

from typing import Final

from stanchion.gateway.route import Route
from stanchion.gateway.routes import (
    dead_letters,
    escalation,
    events,
    health,
    jobs,
    keys,
    leases,
    runs,
    settings,
    tenants,
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
    *events.ROUTES,
    *tenants.ROUTES,
    *settings.ROUTES,
    *leases.ROUTES,
    *dead_letters.ROUTES,
    *keys.ROUTES,
    *escalation.ROUTES,
    *health.ROUTES,
)
