"""Leases: how long a holder may trust its lease, and what to do when a lock fails."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, ClassVar, Final, NewType, TypeAlias, assert_never

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from stanchion.core.faults import Faults, fault_unless
from stanchion.core.model import Risk
from stanchion.core.ranges import range_faults
from stanchion.core.retry import within

# A lease is a lock that expires. The store that grants it counts down its term (the TTL) and then
# grants the name to the next caller, without a message to the former holder. So a holder must
# compute when to stop trusting its lease, and rather too early than too late:
#
#     trusted until  =  sent_at(last success)  +  0.99 · ttl  −  margin
#
# ``sent_at``: the store's countdown began between the sending of the request and the receipt of the
# answer. Only the former is safe: a slow answer must not extend the term.
# ``0.99``: the clocks of holder and store may differ in speed by one per cent.
# ``margin``: stopping takes time. The cancellation must reach the work, and clock readings are
# truncated to milliseconds.
#
# Counting renewal failures is not enough. Three failures a third of the term apart are known only
# after the term has ended and the third call has timed out: another holder may have worked for
# seconds by then. So there are two more rules. After a failure the next attempt comes sooner, so
# that three failures are known before the lease expires:
#
#     0        1/3        5/12        7/12        9/12               0.99
#     ├─────────┼──────────┼───────────┼───────────┼───────────────────┤
#     success   renew      1st         2nd         3rd failure known   trust ends
#
# (each call takes up to ttl/12, each pause after it up to ttl/12). Independent of the count, the
# deadline fences the holder, and so does an answer of the store that the lease is not the holder's.
#
# That is the schedule of run leases, which are given up soon in an outage of the lock store. Job
# leases have another. A job may have taken minutes, and three failures within nine seconds do not
# prove that its lease is lost: the store keeps it for the whole term. So job leases spread the same
# three attempts over the whole time in which an answer is useful (for a term of 60 s):
#
#     0          20          22             38.5 ± 0.3      54.9 … 55.9      57.9        58.9
#     ├───────────┼───────────┼───────────────┼───────────────┼───────────────┼───────────┤
#     success     1st sent    1st known       2nd, midway     3rd sent        3rd known   trust ends
#
# An outage costs the lease only if it covers all three attempts, the first and the third included:
# it must last 34.9 s for a term of 60 s, and longer for a longer term (``outage_survived_ms``).
#
# A fenced holder cancels its work with a cause, and does *not* release the lease, which another
# holder may have by now. Fencing is final: no late answer undoes it.
#
# Under the policy ``CONTINUE`` work may go on without a trusted lease: a commit is accepted only if
# the writer's read is current, so a lost lease costs work but not consistency. The holder keeps
# trying to renew, for two reasons. An answer "not yours" must fence it all the same; and a success
# proves that the lease never expired, since an expired one cannot be renewed: trust returns.
#
# This module is values and functions. ``services/leasing`` sleeps, calls the store and cancels the
# work of runs; ``worker/renewal`` does the same for jobs.


Moment = NewType("Moment", int)
"""Milliseconds on a monotonic clock that also counts while the machine is suspended."""

FAILURES_KNOWN_IN_TIME: Final = 3
"""This many consecutive failures are known before the lease can expire, for any jitter."""

_TRUSTED_PERCENT: Final = 99
_TTL_MS_MIN: Final = 100
_TTL_MS_MAX: Final = 60 * 60 * 1_000
TermS: TypeAlias = Annotated[float, Meta(ge=_TTL_MS_MIN / 1_000, le=_TTL_MS_MAX // 1_000)]
"""The term of a lock or lease in a document or request, in seconds."""
_MARGIN_MS_MAX: Final = 500
_RENEW_TIMEOUT_MS_MAX: Final = 2_000
_LAST_SLACK_MS_MAX: Final = 1_000


# ── Trust: what a holder knows, and what follows ─────────────────────────────────────────────────


def granted(terms: LeaseTerms, policy: LeasePolicy, sent_at: Moment, at: Moment) -> Trust:
    """The trust after a grant: the request was sent at ``sent_at``, the answer came at ``at``."""
    return tick(_holding(terms, policy, min(sent_at, at)), at)


def renewed(trust: Trust, sent_at: Moment, at: Moment) -> Trust:
    """The trust after a renewal: the request was sent at ``sent_at``, the answer came at ``at``."""
    current = tick(trust, at)
    # A ``sent_at`` after ``at`` would extend the trust.
    sent_at = min(sent_at, at)
    # An answer to an older request (repeated or overtaken) does not extend the trust.
    if isinstance(current, Fenced) or sent_at <= current.sent_at:
        return current
    holding = _holding(current.terms, current.policy, sent_at)
    return holding if at < holding.trusted_until else current


def renewal_failed(trust: Trust, at: Moment, sample: float) -> Trust:
    """The trust after a renewal that ended at ``at`` with an error or a timeout."""
    current = tick(trust, at)
    if isinstance(current, Fenced):
        return current
    failures = 0 if isinstance(current, Continuing) else current.failures + 1
    retry_at = current.terms.retry_at(current.sent_at, failures, at, sample)
    current = replace(current, next_renewal_at=retry_at)
    if isinstance(current, Continuing):
        return current
    current = replace(current, failures=failures)
    if current.failures >= current.policy.renewal_failures_max:
        return _lost(current, FenceCause.RENEWAL_FAILURES)
    return current


def may_renew_early(holding: Holding, now: Moment) -> bool:
    """Whether a renewal that is not due yet may share a call with one that is.

    The last attempt of a spread schedule is never sent before its window: it must outlast outages.
    """
    terms, left_ms = holding.terms, holding.next_renewal_at - now
    if holding.failures == 0:
        return left_ms <= terms.retry_window_ms[0]
    if terms.schedule is not RetrySchedule.SPREAD or left_ms > terms.ttl_ms // 120:
        return False
    return (
        holding.failures < FAILURES_KNOWN_IN_TIME - 1
        or now >= holding.sent_at + terms.last_attempt_window_ms[0]
    )


def not_owned(trust: Trust, cause: FenceCause | None = None) -> Fenced:
    """The store answered that the lease is not the holder's: fenced under every policy."""
    return trust if isinstance(trust, Fenced) else Fenced(cause or FenceCause.TAKEN)


def tick(trust: Trust, now: Moment) -> Trust:
    """The trust at ``now``. Called before every action of the holder, and at ``trusted_until``."""
    if isinstance(trust, Holding) and now >= trust.trusted_until:
        return _lost(trust, FenceCause.DEADLINE)
    return trust


def _holding(terms: LeaseTerms, policy: LeasePolicy, sent_at: Moment) -> Holding:
    return Holding(terms, policy, sent_at, Moment(sent_at + terms.renew_every_ms))


def _lost(holding: Holding, cause: FenceCause) -> Continuing | Fenced:
    match holding.policy.on_renewal_lost:
        case OnRenewalLost.FENCE:
            return Fenced(cause)
        case OnRenewalLost.CONTINUE:
            return Continuing(
                holding.terms, holding.policy, holding.sent_at, holding.next_renewal_at, cause
            )
        case _:
            assert_never(holding.policy.on_renewal_lost)


class FenceCause(StrEnum):
    """Why a lease is no longer trusted: part of the cancellation, the log and the metrics."""

    RENEWAL_FAILURES = "renewal_failures"
    DEADLINE = "deadline"
    TAKEN = "taken"
    CANCELLED = "cancelled"
    """Of a job only: its run was cancelled."""
    TIMED_OUT = "timed_out"
    """Of a job only: its run, step or attempt took too long."""


class Holding(msgspec.Struct, frozen=True):
    """The lease is trusted until ``trusted_until``, and to be renewed at ``next_renewal_at``."""

    terms: LeaseTerms
    policy: LeasePolicy
    sent_at: Moment
    """When the last successful request was sent."""
    next_renewal_at: Moment
    failures: int = 0
    """Renewals that failed since then."""
    may_release: ClassVar[bool] = True

    @property
    def trusted_until(self) -> Moment:
        """The first moment at which the lease is no longer trusted."""
        return Moment(self.sent_at + self.terms.trusted_ms)


class Continuing(msgspec.Struct, frozen=True):
    """The lease is not trusted; the work continues, and the store judges its commit."""

    terms: LeaseTerms
    policy: LeasePolicy
    sent_at: Moment
    next_renewal_at: Moment
    cause: FenceCause
    may_release: ClassVar[bool] = False


class Fenced(msgspec.Struct, frozen=True):
    """The work must stop. This state is final."""

    cause: FenceCause
    may_release: ClassVar[bool] = False


Trust: TypeAlias = Holding | Continuing | Fenced
"""At the end of the work, ``tick(trust, now).may_release`` tells whether to release the lease."""


# ── Terms: how long everything takes ─────────────────────────────────────────────────────────────


class RetrySchedule(StrEnum):
    """When to try again after a failed renewal."""

    SOON = "soon"
    """After a short pause: three failures are known at three quarters of the term."""
    SPREAD = "spread"
    """Spread the attempts over the time in which the lease is trusted, to survive an outage."""


class LeaseTerms(msgspec.Struct, frozen=True):
    """The times of a lease, derived from its term. Fractions are truncated: too early is safe."""

    ttl_ms: Annotated[int, Meta(ge=_TTL_MS_MIN, le=_TTL_MS_MAX)]
    margin_ms: int
    schedule: RetrySchedule = RetrySchedule.SOON

    @property
    def trusted_ms(self) -> int:
        """How long a lease is trusted, from the sending of the request."""
        return self.ttl_ms * _TRUSTED_PERCENT // 100 - self.margin_ms

    @property
    def renew_every_ms(self) -> int:
        return self.ttl_ms // 3

    @property
    def renew_timeout_ms(self) -> int:
        """The timeout of one renewal."""
        return min(_RENEW_TIMEOUT_MS_MAX, self.ttl_ms // 12)

    @property
    def retry_window_ms(self) -> tuple[int, int]:
        """The shortest and the longest pause after a failed renewal."""
        return self.ttl_ms // 24, self.ttl_ms // 12

    @property
    def last_attempt_window_ms(self) -> tuple[int, int]:
        """When the last attempt of ``SPREAD`` is sent, counted from the success.

        If it is sent at the end of the window and times out, that is known a second (for short
        terms: a twentieth of the term) before trust ends.
        """
        slack_ms = min(_LAST_SLACK_MS_MAX, self.ttl_ms // 20)
        latest_ms = self.trusted_ms - self.renew_timeout_ms - slack_ms
        return latest_ms - slack_ms, latest_ms

    @property
    def outage_survived_ms(self) -> int:
        """An outage that lasts less than this, whenever it begins, does not cost the lease.

        It cannot cover both the first and the last attempt after a success.
        """
        match self.schedule:
            case RetrySchedule.SPREAD:
                return self.last_attempt_window_ms[0] - self.renew_every_ms
            case RetrySchedule.SOON:
                return 2 * self.retry_window_ms[0]
            case _:
                assert_never(self.schedule)

    def retry_at(self, sent_at: Moment, failures: int, at: Moment, sample: float) -> Moment:
        """When to renew again: ``failures`` attempts since ``sent_at`` failed, the last at ``at``.

        It is never before ``at``.
        """
        if self.schedule is RetrySchedule.SPREAD and 0 < failures < FAILURES_KNOWN_IN_TIME:
            last_at = max(at, sent_at + within(*self.last_attempt_window_ms, sample))
            # Divide the time that is left equally among the attempts that are left.
            return Moment(at + (last_at - at) // (FAILURES_KNOWN_IN_TIME - failures))
        return Moment(at + within(*self.retry_window_ms, sample))

    def known_after_ms(self, failures: int) -> int:
        """The latest time, from the success, at which this many consecutive failures are known."""
        known_ms = self.renew_every_ms + self.renew_timeout_ms
        for count in range(1, failures):
            retry_at_ms = self.retry_at(Moment(0), count, Moment(known_ms), _ALMOST_ONE)
            known_ms = retry_at_ms + self.renew_timeout_ms
        return known_ms


_ALMOST_ONE: Final = math.nextafter(1.0, 0.0)


def terms_for(ttl_ms: int) -> LeaseTerms:
    """The default terms: a margin of a twentieth of the term, at most half a second."""
    return LeaseTerms(ttl_ms, min(_MARGIN_MS_MAX, ttl_ms // 20))


def job_terms_for(ttl_ms: int) -> LeaseTerms:
    """The default terms of a job lease: renewal attempts are spread, to survive an outage."""
    return replace(terms_for(ttl_ms), schedule=RetrySchedule.SPREAD)


RUN_TERMS: Final = terms_for(30_000)
JOB_TERMS: Final = job_terms_for(60_000)


def faults(terms: LeaseTerms) -> Faults:
    """All faults of the terms; empty if they are valid."""
    return (
        *range_faults(terms),
        *fault_unless(
            1 <= terms.margin_ms <= terms.ttl_ms, "margin_ms", f"must be from 1 to {terms.ttl_ms}"
        ),
    ) or fault_unless(
        terms.known_after_ms(FAILURES_KNOWN_IN_TIME) < terms.trusted_ms,
        "margin_ms",
        f"leaves no time for {FAILURES_KNOWN_IN_TIME} failed renewals before trust ends",
    )


def next_fence(previous: int, floor: int, server_time_us: int) -> int:
    """The fence of the next grant: above every earlier one, even if the store lost them.

    ``floor`` is the highest fence that the caller has seen. The server time keeps the order after
    a failover that lost the last grants; the other two keep it if the server clock is behind.
    """
    return max(previous + 1, floor + 1, server_time_us)


# ── The error ────────────────────────────────────────────────────────────────────────────────────


class LeaseLost(Exception):
    """Raised in work that was stopped because its lease is no longer trusted."""

    def __init__(self, name: str, cause: FenceCause) -> None:
        super().__init__(f"the lease on '{name}' was lost: {_REASONS[cause]}")
        self.name = name
        self.cause = cause


_REASONS: Final = {
    FenceCause.RENEWAL_FAILURES: "too many renewals failed in a row",
    FenceCause.DEADLINE: "it could not be renewed in time",
    FenceCause.CANCELLED: "its run was cancelled",
    FenceCause.TIMED_OUT: "its run or step took too long",
    FenceCause.TAKEN: "according to the lock store, another holder has it or it has expired",
}


# ── Policies: what to do when a lock fails, by risk class ────────────────────────────────────────
# Two cases need a policy. The lock store is unavailable: proceed without it, or wait? A lease can
# no longer be trusted: stop the work, or go on and let the commit decide? The answers are a table
# by risk class, which an operator may change at run time and a workflow may override. A contended
# lock is not a failure: a name that another holder has is skipped in every class.

RENEWAL_FAILURES_MAX: Final = 100
RenewalFailures: TypeAlias = Annotated[int, Meta(ge=1, le=RENEWAL_FAILURES_MAX)]


class OnLockError(StrEnum):
    """What to do when the lock store is unavailable."""

    FAIL_OPEN = "fail_open"
    """Proceed with the local mutex only: another replica may work on the same run."""
    FAIL_CLOSED = "fail_closed"
    """Do not work on the run; try again later."""


class OnRenewalLost(StrEnum):
    """What to do when a lease is no longer trusted while work continues under it."""

    FENCE = "fence"
    CONTINUE = "continue"


class LeasePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The lease policy of a risk class. The failure count or the deadline decides, if earlier."""

    on_lock_error: OnLockError
    on_renewal_lost: OnRenewalLost
    renewal_failures_max: RenewalFailures = 3


class LeaseOverride(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Members of the policy that a workflow overrides; ``None`` keeps the value of its class."""

    on_lock_error: OnLockError | None = None
    on_renewal_lost: OnRenewalLost | None = None
    renewal_failures_max: RenewalFailures | None = None


DEFAULT_POLICIES: Final[Mapping[Risk, LeasePolicy]] = MappingProxyType(
    {
        Risk.LOW: LeasePolicy(OnLockError.FAIL_OPEN, OnRenewalLost.CONTINUE, 3),
        Risk.STANDARD: LeasePolicy(OnLockError.FAIL_OPEN, OnRenewalLost.CONTINUE, 3),
        Risk.HIGH: LeasePolicy(OnLockError.FAIL_CLOSED, OnRenewalLost.FENCE, 3),
        Risk.CRITICAL: LeasePolicy(OnLockError.FAIL_CLOSED, OnRenewalLost.FENCE, 1),
    }
)

JOB_POLICY: Final = LeasePolicy(OnLockError.FAIL_CLOSED, OnRenewalLost.FENCE, 3)
"""Jobs have effects outside Stanchion, which no commit protects: fenced in every risk class."""


def policy_for(
    risk: Risk,
    policies: Mapping[Risk, LeasePolicy] = DEFAULT_POLICIES,
    override: LeaseOverride | None = None,
) -> LeasePolicy:
    """The policy of a run: that of its risk class, with the overrides of its workflow."""
    if override is None:
        return policies[risk]
    given = msgspec.structs.asdict(override).items()
    return replace(policies[risk], **{name: value for name, value in given if value is not None})


def policy_faults(policy: LeasePolicy | LeaseOverride) -> Faults:
    """All faults of the policy; empty if it is valid."""
    return range_faults(policy)


# ── Acquiring: what the store said, and what to do about it ──────────────────────────────────────


class LockAcquired(msgspec.Struct, frozen=True):
    """The lease was granted. Every write under it carries this fence."""

    fence: int


class LockContended(msgspec.Struct, frozen=True):
    """Another holder has the lease. This is not an error."""

    expires_in_ms: int


class Unavailable(msgspec.Struct, frozen=True):
    """The lock store could not be reached, or did not answer."""

    error: str


AcquireOutcome: TypeAlias = LockAcquired | LockContended | Unavailable


class ProceedLeased(msgspec.Struct, frozen=True):
    """Do the work under the lease."""

    fence: int


class Skip(msgspec.Struct, frozen=True):
    """Leave the run to its holder and check again later."""

    expires_in_ms: int


class ProceedLocal(msgspec.Struct, frozen=True):
    """Do the work under the local mutex only. Counted as a fallback: a race is possible."""

    error: str


class Refuse(msgspec.Struct, frozen=True):
    """Do not do the work now."""

    error: str
    escalated: bool
    """Whether the policy without escalation would have proceeded."""


AcquireDecision: TypeAlias = ProceedLeased | Skip | ProceedLocal | Refuse


def on_acquire(outcome: AcquireOutcome, policy: LeasePolicy, *, escalated: bool) -> AcquireDecision:
    """Decide by the answer of the lock store. ``escalated`` overrides a policy that fails open."""
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
