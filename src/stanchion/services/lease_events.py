"""Lease events: frozen values that leasing gives to a hook.

Metrics, log lines and traces of leases are made from these events. Leasing itself neither counts
nor logs, so the server, the public API and the simulator can all use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from stanchion.core.lease import FenceCause
from stanchion.core.model import Risk


class _Named(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    risk: Risk


class Acquired(_Named, frozen=True, kw_only=True):
    """A lease was granted."""

    fence: int
    waited_ms: int


class Contended(_Named, frozen=True, kw_only=True):
    """The name is held by another, in this process or elsewhere."""

    expires_in_ms: int | None
    """``None`` if it is held in this process."""


class Fallback(_Named, frozen=True, kw_only=True):
    """The lock store failed and the work continues under the local mutex: a race is possible."""

    error: str


class Refused(_Named, frozen=True, kw_only=True):
    """The lock store failed and policy fails closed: the work is not done now."""

    error: str
    escalated: bool


class RenewFailed(_Named, frozen=True, kw_only=True):
    """A renewal ended in an error or a time-out."""

    failures: int | None
    """Consecutive failures; ``None`` once the lease is not trusted any more."""
    error: str


class TrustLost(_Named, frozen=True, kw_only=True):
    """The lease is not trusted any more, and policy lets the work go on: the commit decides."""

    cause: FenceCause


class Abandoned(_Named, frozen=True, kw_only=True):
    """The holder was fenced: its work is cancelled and its lease not released."""

    cause: FenceCause


class Released(_Named, frozen=True, kw_only=True):
    """The work has ended and the lease was released."""

    held_ms: int


class ReleaseFailed(_Named, frozen=True, kw_only=True):
    """The release failed, and the lease will expire. Finished work stays finished."""

    error: str


class StaleWrite(_Named, frozen=True, kw_only=True):
    """The store refused a write, because a later holder has written with a higher fence."""

    fence: int
    highest: int


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
    | StaleWrite
)
LeaseHook: TypeAlias = Callable[[LeaseEvent], None]
