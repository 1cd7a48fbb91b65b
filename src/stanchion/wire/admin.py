"""What operators and administrators see and change."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.model import Risk
from stanchion.wire.identifiers import Comment, KeyLabel, LockName, TenantOrAll

__all__ = [
    "CreateKey",
    "DeadLetterList",
    "DeadLetterRow",
    "EscalationView",
    "Health",
    "HoldLease",
    "KeyCreated",
    "KeyList",
    "KeyRow",
    "LeaseList",
    "LeaseRow",
    "ReplayAnswer",
    "ReplayLetter",
    "Role",
    "SetEscalation",
    "TenantConfig",
    "TenantList",
    "TenantRow",
]


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Role(StrEnum):
    """What a key may do."""

    APPROVER = "approver"
    """Read runs of its tenant and decide approvals, nothing else."""
    RUNNER = "runner"
    """Workflows, runs, jobs and events of its tenant."""
    WORKER = "worker"
    """Lease, renew, results; of its tenant, or of all."""
    OPERATOR = "operator"
    """What a runner may, and leases, dead letters, escalation, and reading settings."""
    ADMIN = "admin"
    """Everything, also keys, tenants and settings."""


class TenantConfig(_Request, frozen=True, kw_only=True):
    """What a tenant may do."""

    max_concurrent_runs: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = 10
    job_rate_per_s: Annotated[float, Meta(ge=0.000_001, le=1_000_000)] | None = None
    admission: JsonObject | None = None
    """``strategy`` and ``lock_retry``, instead of what the settings say."""


class TenantRow(msgspec.Struct, frozen=True, kw_only=True):
    """One configured tenant in a list."""

    tenant: str
    max_concurrent_runs: int | None
    job_rate_per_s: float | None
    admission: JsonObject | None


class TenantList(msgspec.Struct, frozen=True):
    """A page of configured tenants, by name."""

    tenants: tuple[TenantRow, ...]
    cursor: str | None = None


class HoldLease(_Request, frozen=True, kw_only=True):
    """Hold a lock by hand, for a while."""

    name: LockName
    ttl_s: Annotated[float, Meta(ge=0.1, le=3600)]


class LeaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """One lock that is held."""

    name: str
    fence: int
    expires_in_ms: int


class LeaseList(msgspec.Struct, frozen=True):
    """Locks that are held, by name."""

    leases: tuple[LeaseRow, ...]


class DeadLetterRow(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was tried as often as is allowed."""

    id: str
    kind: Literal["job", "event"]
    tenant: str
    run_id: str
    step_id: str | None
    cause: str
    at: datetime
    job_id: str | None = None
    topic: str | None = None
    event: JsonValue = None


class DeadLetterList(msgspec.Struct, frozen=True):
    """A page of dead letters, oldest first."""

    dead_letters: tuple[DeadLetterRow, ...]
    cursor: str | None = None


class ReplayAnswer(msgspec.Struct, frozen=True):
    """The letter that was put back to work."""

    id: str
    run_id: str
    replayed: bool


class DiscardAnswer(msgspec.Struct, frozen=True):
    """The letter that was given up."""

    id: str
    run_id: str
    discarded: bool


class DiscardLetter(_Request, frozen=True, kw_only=True):
    """Give a dead letter up. The body has no members."""


class ReplayLetter(_Request, frozen=True, kw_only=True):
    """Put a dead letter back to work. There is nothing to say about it."""


class CreateKey(_Request, frozen=True, kw_only=True):
    """Make an API key. ``*`` as a worker's tenant means all of them."""

    role: Role
    tenant: TenantOrAll
    name: KeyLabel | None = None
    """Shown as the actor of what is done with the key; without one, the key's id is."""
    note: Comment | None = None
    expires_at: Annotated[datetime, Meta(tz=True)] | None = None
    """From then on the key does not work."""


class KeyCreated(msgspec.Struct, frozen=True, kw_only=True):
    """A new key. Its secret is shown this once."""

    id: str
    key: str
    role: Role
    tenant: str
    name: str | None
    note: str | None
    created_at: datetime
    expires_at: datetime | None


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A key, without its secret."""

    id: str
    role: Role
    tenant: str
    name: str | None
    note: str | None
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None
    """Exact to a minute: it is written once a minute at most."""
    revoked_at: datetime | None


class KeyList(msgspec.Struct, frozen=True):
    """A page of keys."""

    keys: tuple[KeyRow, ...]
    cursor: str | None = None


class SetEscalation(_Request, frozen=True, kw_only=True):
    """An operator's word: force open or closed, or clear the latch and every order."""

    order: Literal["force_open", "force_closed", "clear"]


class EscalationView(msgspec.Struct, frozen=True, kw_only=True):
    """Whether failing open is allowed at the moment."""

    level: Literal["normal", "escalated", "latched"]
    forced: Literal["force_open", "force_closed"] | None
    closes: tuple[Risk, ...]
    closed_now: tuple[Risk, ...]
    trips_today: int


class Health(msgspec.Struct, frozen=True):
    """Whether the server is ready, check by check."""

    status: Literal["ok", "degraded", "unavailable", "draining"]
    """``degraded``: runs go on without what is missing, as policy says. Only the store is vital."""
    checks: dict[str, str]
    """``ok``, or what is wrong, for ``store``, ``locks`` and ``bus``."""
