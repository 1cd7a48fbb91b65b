"""Deliberate defects, one at a time, for every Python process that a drill starts.

Python imports a module of this name when it starts, if it finds one. A test that puts this folder
on ``PYTHONPATH`` and names a defect in ``DRILL_DEFECT`` gets a drill, servers, workers and holders
that have it. Nothing of this is in the wheel.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import msgspec

from stanchion.client.engine import RetryBudgets
from stanchion.core import admission, lease, retry
from stanchion.core.lease import (
    AcquireOutcome,
    LeasePolicy,
    LeaseTerms,
    ProceedLocal,
    Unavailable,
)

__all__ = ["DEFECTS"]


def cap_off_by_one() -> None:
    """One run more than the cap is admitted."""
    judge = admission.judge

    def defective(facts: admission.Facts) -> admission.Verdict:
        limit = None if facts.limit is None else facts.limit + 1
        return judge(msgspec.structs.replace(facts, limit=limit))

    admission.judge = defective


def budgets_ignored() -> None:
    """Every retry finds a token in its budget."""
    setattr(RetryBudgets, "take", lambda *_arguments: True)  # noqa: B010 - mypy has a say otherwise


def fail_open_for_all() -> None:
    """A lock store that cannot be asked stops no class."""
    on_acquire = lease.on_acquire

    def defective(
        outcome: AcquireOutcome, policy: LeasePolicy, *, escalated: bool
    ) -> lease.AcquireDecision:
        if isinstance(outcome, Unavailable):
            return ProceedLocal(outcome.error)
        return on_acquire(outcome, policy, escalated=escalated)

    lease.on_acquire = defective


def fencing_by_count_only() -> None:
    """Three failures a third of the term apart, and no deadline."""
    LeaseTerms.trusted_ms = property(lambda _self: 3_600_000)  # type: ignore[assignment, method-assign]
    LeaseTerms.retry_window_ms = property(  # type: ignore[assignment, method-assign]
        lambda self: (self.renew_every_ms, self.renew_every_ms)
    )


def no_jitter() -> None:
    """A bounded jitter is taken for a fixed delay."""
    backoff_ms = retry.backoff_ms

    def defective(policy: retry.Backoff, attempt: int, sample: float) -> int:
        if isinstance(policy, retry.BoundedJitter):
            return policy.delay_ms
        return backoff_ms(policy, attempt, sample)

    retry.backoff_ms = defective


DEFECTS: Final[dict[str, Callable[[], None]]] = {
    each.__name__: each
    for each in (
        cap_off_by_one,
        budgets_ignored,
        fail_open_for_all,
        fencing_by_count_only,
        no_jitter,
    )
}

_chosen = os.environ.get("DRILL_DEFECT")
if _chosen:
    DEFECTS[_chosen]()
