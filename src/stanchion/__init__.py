"""Stanchion: a control plane for AI-agent workflow runs that acts by written policy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from stanchion.core import __version__ as __version__

if TYPE_CHECKING:
    from stanchion.client.async_client import AsyncClient, AsyncRunHandle
    from stanchion.client.client import Client, RunHandle
    from stanchion.client.engine import Pace, RetryBudgets
    from stanchion.client.errors import (
        AccessDenied,
        BudgetExhausted,
        CallFailed,
        CallRefused,
        Conflict,
        Forbidden,
        IdempotencyMismatch,
        InvalidRequest,
        NotFound,
        ServerUnavailable,
        TenantFull,
        Throttled,
        TryLater,
        Unauthenticated,
        UnexpectedAnswer,
        WaitTimeout,
    )
    from stanchion.client.events import Event
    from stanchion.leases import (
        FenceCause,
        Lease,
        LeaseBusy,
        LeaseLost,
        LeaseNotGranted,
        LeasePolicy,
        Leases,
        LeaseUnavailable,
        OnLockError,
        OnRenewalLost,
        Risk,
        SyncLeases,
    )
    from stanchion.worker.errors import Cancelled, FinalError, JobFailed, WorkerRefused
    from stanchion.worker.job import Job
    from stanchion.worker.worker import Worker

__all__ = [
    "AccessDenied",
    "AsyncClient",
    "AsyncRunHandle",
    "BudgetExhausted",
    "CallFailed",
    "CallRefused",
    "Cancelled",
    "Client",
    "Conflict",
    "Event",
    "FenceCause",
    "FinalError",
    "Forbidden",
    "IdempotencyMismatch",
    "InvalidRequest",
    "Job",
    "JobFailed",
    "Lease",
    "LeaseBusy",
    "LeaseLost",
    "LeaseNotGranted",
    "LeasePolicy",
    "LeaseUnavailable",
    "Leases",
    "NotFound",
    "OnLockError",
    "OnRenewalLost",
    "Pace",
    "RetryBudgets",
    "Risk",
    "RunHandle",
    "ServerUnavailable",
    "SyncLeases",
    "TenantFull",
    "Throttled",
    "TryLater",
    "Unauthenticated",
    "UnexpectedAnswer",
    "WaitTimeout",
    "Worker",
    "WorkerRefused",
]

# The module of each name, imported at first use: a client then neither loads the lock stores nor
# needs their packages.
_HOMES: Final = {
    "stanchion.client.async_client": frozenset({"AsyncClient", "AsyncRunHandle"}),
    "stanchion.client.client": frozenset({"Client", "RunHandle"}),
    "stanchion.client.engine": frozenset({"Pace", "RetryBudgets"}),
    "stanchion.client.errors": frozenset(
        {
            "AccessDenied",
            "BudgetExhausted",
            "CallFailed",
            "CallRefused",
            "Conflict",
            "Forbidden",
            "IdempotencyMismatch",
            "InvalidRequest",
            "NotFound",
            "ServerUnavailable",
            "TenantFull",
            "Throttled",
            "TryLater",
            "Unauthenticated",
            "UnexpectedAnswer",
            "WaitTimeout",
        }
    ),
    "stanchion.client.events": frozenset({"Event"}),
    # Not from leases: workers use these too, without the packages of a lock store.
    "stanchion.core.lease": frozenset({"FenceCause", "LeaseLost"}),
    "stanchion.leases": frozenset(
        {
            "Lease",
            "LeaseBusy",
            "LeaseNotGranted",
            "LeasePolicy",
            "LeaseUnavailable",
            "Leases",
            "OnLockError",
            "OnRenewalLost",
            "Risk",
            "SyncLeases",
        }
    ),
    "stanchion.worker.errors": frozenset({"Cancelled", "FinalError", "JobFailed", "WorkerRefused"}),
    "stanchion.worker.job": frozenset({"Job"}),
    "stanchion.worker.worker": frozenset({"Worker"}),
}

if not TYPE_CHECKING:  # To a type checker, every name above is there and no other is.

    def __getattr__(name: str) -> object:
        for home, names in _HOMES.items():
            if name in names:
                return getattr(import_module(home), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
