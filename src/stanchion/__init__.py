"""Stanchion: a control plane for AI-agent workflow runs that acts by written policy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
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

__all__ = [
    "FenceCause",
    "Lease",
    "LeaseBusy",
    "LeaseLost",
    "LeaseNotGranted",
    "LeasePolicy",
    "LeaseUnavailable",
    "Leases",
    "OnLockError",
    "OnRenewalLost",
    "Risk",
    "SyncLeases",
]

# Where each name lives. It is imported when somebody asks for it: whoever wants a client does not
# pay for lock stores, and needs none of their packages.
_HOMES: Final = {
    "stanchion.leases": frozenset(__all__),
}

if not TYPE_CHECKING:  # To a type checker, every name above is there and no other is.

    def __getattr__(name: str) -> object:
        for home, names in _HOMES.items():
            if name in names:
                return getattr(import_module(home), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
