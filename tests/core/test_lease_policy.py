"""What a lock's failure means is a table, and the table is the documented one."""

from __future__ import annotations

import msgspec
import pytest

from stanchion.core.faults import Fault
from stanchion.core.lease import (
    DEFAULT_POLICIES,
    JOB_POLICY,
    AcquireDecision,
    AcquireOutcome,
    LeaseOverride,
    LeasePolicy,
    LockAcquired,
    LockContended,
    OnLockError,
    OnRenewalLost,
    ProceedLeased,
    ProceedLocal,
    Refuse,
    Skip,
    Unavailable,
    on_acquire,
    policy_faults,
    policy_for,
)
from stanchion.core.model import Risk

OPEN, CLOSED = OnLockError.FAIL_OPEN, OnLockError.FAIL_CLOSED
FENCE, CONTINUE = OnRenewalLost.FENCE, OnRenewalLost.CONTINUE


@pytest.mark.parametrize(
    ("risk", "on_lock_error", "on_renewal_lost", "renewal_failures_max"),
    [
        ("low", "fail_open", "continue", 3),
        ("standard", "fail_open", "continue", 3),
        ("high", "fail_closed", "fence", 3),
        ("critical", "fail_closed", "fence", 1),
    ],
)
def test_the_default_matrix_is_the_documented_one(
    risk: str, on_lock_error: str, on_renewal_lost: str, renewal_failures_max: int
) -> None:
    policy = policy_for(Risk(risk))
    assert msgspec.to_builtins(policy) == {
        "on_lock_error": on_lock_error,
        "on_renewal_lost": on_renewal_lost,
        "renewal_failures_max": renewal_failures_max,
    }
    assert policy == DEFAULT_POLICIES[Risk(risk)]


def test_the_matrix_covers_every_class() -> None:
    assert set(DEFAULT_POLICIES) == set(Risk)


def test_job_leases_always_fence() -> None:
    assert LeasePolicy(CLOSED, FENCE, 3) == JOB_POLICY


def test_settings_replace_the_default_matrix() -> None:
    mine = {Risk.LOW: LeasePolicy(CLOSED, FENCE, 2)}
    assert policy_for(Risk.LOW, mine) == LeasePolicy(CLOSED, FENCE, 2)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (LeaseOverride(), LeasePolicy(OPEN, CONTINUE, 3)),
        (LeaseOverride(on_lock_error=CLOSED), LeasePolicy(CLOSED, CONTINUE, 3)),
        (LeaseOverride(on_renewal_lost=FENCE), LeasePolicy(OPEN, FENCE, 3)),
        (LeaseOverride(renewal_failures_max=1), LeasePolicy(OPEN, CONTINUE, 1)),
        (LeaseOverride(CLOSED, FENCE, 2), LeasePolicy(CLOSED, FENCE, 2)),
    ],
)
def test_a_workflow_overrides_only_what_it_names(
    override: LeaseOverride, expected: LeasePolicy
) -> None:
    assert policy_for(Risk.STANDARD, DEFAULT_POLICIES, override) == expected


def test_an_override_reads_as_in_a_workflow_file() -> None:
    text = b'{"on_renewal_lost":"fence"}'
    override = msgspec.json.decode(text, type=LeaseOverride)
    assert override == LeaseOverride(on_renewal_lost=FENCE)
    assert msgspec.json.encode(override) == text


@pytest.mark.parametrize("kind", [LeasePolicy, LeaseOverride])
def test_a_policy_with_an_unknown_member_is_refused(
    kind: type[LeasePolicy | LeaseOverride],
) -> None:
    known = {"on_lock_error": "fail_open", "on_renewal_lost": "fence"}
    assert msgspec.convert(known, kind).on_lock_error is OPEN
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(known | {"renewals": 3}, kind)


@pytest.mark.parametrize("limit", [1, 100])
def test_counts_within_range_are_good(limit: int) -> None:
    assert policy_faults(LeasePolicy(OPEN, FENCE, limit)) == ()
    assert policy_faults(LeaseOverride(renewal_failures_max=limit)) == ()


@pytest.mark.parametrize("limit", [-1, 0, 101])
def test_counts_out_of_range_are_faults(limit: int) -> None:
    expected = (Fault("renewal_failures_max", "must be from 1 to 100"),)
    assert policy_faults(LeasePolicy(OPEN, FENCE, limit)) == expected
    assert policy_faults(LeaseOverride(renewal_failures_max=limit)) == expected


def test_an_override_that_names_no_count_is_good() -> None:
    assert policy_faults(LeaseOverride()) == ()


# ── Acquiring ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("outcome", "on_lock_error", "escalated", "decision"),
    [
        (LockAcquired(7), OPEN, False, ProceedLeased(7)),
        (LockAcquired(7), OPEN, True, ProceedLeased(7)),
        (LockAcquired(7), CLOSED, False, ProceedLeased(7)),
        (LockAcquired(7), CLOSED, True, ProceedLeased(7)),
        (LockContended(900), OPEN, False, Skip(900)),
        (LockContended(900), OPEN, True, Skip(900)),
        (LockContended(900), CLOSED, False, Skip(900)),
        (LockContended(900), CLOSED, True, Skip(900)),
        (Unavailable("cut"), OPEN, False, ProceedLocal("cut")),
        (Unavailable("cut"), OPEN, True, Refuse("cut", escalated=True)),
        (Unavailable("cut"), CLOSED, False, Refuse("cut", escalated=False)),
        (Unavailable("cut"), CLOSED, True, Refuse("cut", escalated=False)),
    ],
)
def test_every_answer_to_an_acquire_has_its_decision(
    outcome: AcquireOutcome,
    on_lock_error: OnLockError,
    escalated: bool,
    decision: AcquireDecision,
) -> None:
    policy = LeasePolicy(on_lock_error, FENCE, 3)
    assert on_acquire(outcome, policy, escalated=escalated) == decision
