"""Settings: what an operator may change while everything runs.

One value for the whole deployment. A tenant may override two things for itself: how its starts are
gated, and how they wait for the gate. How settings are written down and read is in
``settings_document``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

from stanchion.core.escalation import Escalation
from stanchion.core.lease_policy import DEFAULT_POLICIES, LeasePolicy
from stanchion.core.model import Risk
from stanchion.core.retry import BoundedJitter, Fixed

__all__ = [
    "DEFAULTS",
    "AdmissionOverride",
    "AdmissionSettings",
    "LockBusy",
    "Rhythm",
    "Settings",
    "Strategy",
]

Rhythm: TypeAlias = Fixed | BoundedJitter
"""How long to wait before asking again for a lock that another has."""


class Strategy(StrEnum):
    """How starts of one tenant are kept from each other."""

    ATOMIC = "atomic"
    """The store's one step alone decides. No lock, no herd."""
    LOCK = "lock"
    """A lock per tenant paces the callers; the decision behind it is the same."""


class AdmissionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the gate works."""

    strategy: Strategy = Strategy.ATOMIC
    lock_ttl_s: float = 10
    lock_wait_s: float = 2
    """What a start may wait in all; it is answered half a second later at the latest."""
    lock_retry: Rhythm = BoundedJitter(delay_ms=10, jitter_ms=5)

    @property
    def lock_ttl_ms(self) -> int:
        return round(self.lock_ttl_s * 1_000)

    @property
    def lock_wait_ms(self) -> int:
        return round(self.lock_wait_s * 1_000)


class AdmissionOverride(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant wants different; ``None`` is as the deployment has it."""

    strategy: Strategy | None = None
    lock_retry: Rhythm | None = None

    def over(self, admission: AdmissionSettings) -> AdmissionSettings:
        """The deployment's settings with what this tenant wants different."""
        return replace(
            admission,
            strategy=self.strategy or admission.strategy,
            lock_retry=self.lock_retry or admission.lock_retry,
        )


class LockBusy(msgspec.Struct, frozen=True, kw_only=True):
    """When to look again at a run that another replica has, or whose lock cannot be asked for."""

    retry: Rhythm = BoundedJitter(delay_ms=500, jitter_ms=200)
    backend_error_delay_ms: int = 1_000


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    admission: AdmissionSettings = AdmissionSettings()
    lock_busy: LockBusy = LockBusy()
    policies: Mapping[Risk, LeasePolicy] = DEFAULT_POLICIES
    escalation: Escalation = Escalation()


DEFAULTS: Final = Settings()
