"""Lease policies: what a lock's failure means, by how much a second writer would hurt.

Two questions have no right answer, only a chosen one. The lock store cannot be asked: go on alone,
or wait? A lease that was held can no longer be trusted: stop, or go on and let the commit decide?
The answers are a table by risk class, which an operator may change at run time and a workflow may
override for itself. Busy is not broken: a name that another holds is skipped in every class.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, TypeAlias, assert_never

import msgspec
from msgspec.structs import replace

from stanchion.core.model import Risk
from stanchion.core.retry import Faults, out_of_range

__all__ = [
    "DEFAULT_POLICIES",
    "JOB_POLICY",
    "RENEWAL_FAILURES_MAX",
    "AcquireDecision",
    "AcquireOutcome",
    "LeaseOverride",
    "LeasePolicy",
    "LockAcquired",
    "LockContended",
    "OnLockError",
    "OnRenewalLost",
    "ProceedLeased",
    "ProceedLocal",
    "Refuse",
    "Skip",
    "Unavailable",
    "faults",
    "on_acquire",
    "policy_for",
]

RENEWAL_FAILURES_MAX: Final = 100


class OnLockError(StrEnum):
    """What to do when the lock store cannot be asked."""

    FAIL_OPEN = "fail_open"
    """Go on with the local mutex alone: another replica may be at the same run."""
    FAIL_CLOSED = "fail_closed"
    """Do not touch the run; try again later."""


class OnRenewalLost(StrEnum):
    """What to do when a lease that was held is no longer trusted."""

    FENCE = "fence"
    CONTINUE = "continue"


class LeasePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one class wants done. Of the count and the deadline, the first to come decides."""

    on_lock_error: OnLockError
    on_renewal_lost: OnRenewalLost
    renewal_failures_max: int = 3


class LeaseOverride(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one workflow wants different from its class; what is not given stays as it is."""

    on_lock_error: OnLockError | None = None
    on_renewal_lost: OnRenewalLost | None = None
    renewal_failures_max: int | None = None


DEFAULT_POLICIES: Final[Mapping[Risk, LeasePolicy]] = MappingProxyType(
    {
        Risk.LOW: LeasePolicy(OnLockError.FAIL_OPEN, OnRenewalLost.CONTINUE, 3),
        Risk.STANDARD: LeasePolicy(OnLockError.FAIL_OPEN, OnRenewalLost.CONTINUE, 3),
        Risk.HIGH: LeasePolicy(OnLockError.FAIL_CLOSED, OnRenewalLost.FENCE, 3),
        Risk.CRITICAL: LeasePolicy(OnLockError.FAIL_CLOSED, OnRenewalLost.FENCE, 1),
    }
)

JOB_POLICY: Final = LeasePolicy(OnLockError.FAIL_CLOSED, OnRenewalLost.FENCE, 3)
"""A job's effects are outside, where no commit protects them: it is fenced in every class."""


def policy_for(
    risk: Risk,
    policies: Mapping[Risk, LeasePolicy] = DEFAULT_POLICIES,
    override: LeaseOverride | None = None,
) -> LeasePolicy:
    """The policy of a run: its class's, with what its workflow overrides."""
    if override is None:
        return policies[risk]
    given = msgspec.structs.asdict(override).items()
    return replace(policies[risk], **{name: value for name, value in given if value is not None})


def faults(policy: LeasePolicy | LeaseOverride) -> Faults:
    """Everything that is wrong with a policy; nothing, if it may be used."""
    if policy.renewal_failures_max is None:
        return ()
    return out_of_range(
        "renewal_failures_max", policy.renewal_failures_max, 1, RENEWAL_FAILURES_MAX
    )


# ── Acquiring: what the store said, and what to do about it ──────────────────────────────────────


class LockAcquired(msgspec.Struct, frozen=True):
    """The lease is ours, and every write under it carries this fence."""

    fence: int


class LockContended(msgspec.Struct, frozen=True):
    """Another has it. That is what locks are for, and no error."""

    expires_in_ms: int


class Unavailable(msgspec.Struct, frozen=True):
    """The lock store could not be asked, or did not answer."""

    error: str


AcquireOutcome: TypeAlias = LockAcquired | LockContended | Unavailable


class ProceedLeased(msgspec.Struct, frozen=True):
    """Do the work under the lease."""

    fence: int


class Skip(msgspec.Struct, frozen=True):
    """Leave the run to its holder, and look again later."""

    expires_in_ms: int


class ProceedLocal(msgspec.Struct, frozen=True):
    """Do the work under the local mutex alone. Counted as a fallback: a race is possible."""

    error: str


class Refuse(msgspec.Struct, frozen=True):
    """Do not do the work now."""

    error: str
    escalated: bool
    """Whether the policy alone would have gone on."""


AcquireDecision: TypeAlias = ProceedLeased | Skip | ProceedLocal | Refuse


def on_acquire(outcome: AcquireOutcome, policy: LeasePolicy, *, escalated: bool) -> AcquireDecision:
    """What to do with the store's answer. ``escalated`` closes what the policy would leave open."""
    match outcome:
        case LockAcquired(fence):
            return ProceedLeased(fence)
        case LockContended(expires_in_ms):
            return Skip(expires_in_ms)
        case Unavailable(error):
            if policy.on_lock_error is OnLockError.FAIL_CLOSED:
                return Refuse(error, escalated=False)
            return Refuse(error, escalated=True) if escalated else ProceedLocal(error)
        case _:
            assert_never(outcome)
