"""What leasing tells about itself: frozen facts, given to a hook.

Whoever wants metrics, log lines or traces of leases listens to these. Leasing itself neither counts
nor logs, so it can serve the server, the public API and the simulator alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from stanchion.core.lease import FenceCause
from stanchion.core.model import Risk

__all__ = [
    "Abandoned",
    "Acquired",
    "Contended",
    "Fallback",
    "LeaseEvent",
    "LeaseHook",
    "Refused",
    "ReleaseFailed",
    "Released",
    "RenewFailed",
    "TrustLost",
]


class _About(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    risk: Risk


class Acquired(_About, frozen=True, kw_only=True):
    """A lease was granted."""

    fence: int
    waited_ms: int


class Contended(_About, frozen=True, kw_only=True):
    """Another has it, here or elsewhere: skipped."""

    expires_in_ms: int | None
    """``None`` if it is held in this very process."""


class Fallback(_About, frozen=True, kw_only=True):
    """The lock store failed and the work goes on under the local mutex: a race is possible."""

    error: str


class Refused(_About, frozen=True, kw_only=True):
    """The lock store failed and the work is not done now."""

    error: str
    escalated: bool


class RenewFailed(_About, frozen=True, kw_only=True):
    """A renewal ended in an error or a time-out."""

    failures: int | None
    """In a row; ``None`` once the lease is not trusted any more."""
    error: str


class TrustLost(_About, frozen=True, kw_only=True):
    """The lease is not trusted any more, and policy lets the work go on: the commit decides."""

    cause: FenceCause


class Abandoned(_About, frozen=True, kw_only=True):
    """The holder was fenced: its work is cancelled and its lease not released."""

    cause: FenceCause


class Released(_About, frozen=True, kw_only=True):
    """The work is done and the lease given back."""

    held_ms: int


class ReleaseFailed(_About, frozen=True, kw_only=True):
    """The lease could not be given back: it will expire. Finished work stays finished."""

    error: str


LeaseEvent: TypeAlias = (
    Acquired
    | Contended
    | Fallback
    | Refused
    | RenewFailed
    | TrustLost
    | Abandoned
    | Released
    | ReleaseFailed
)
LeaseHook: TypeAlias = Callable[[LeaseEvent], None]
