"""Retries: how long to wait before trying again, and whether to try at all.

All retries in Stanchion are decided here: of a contended lock, a failed step, a call that was
answered with 429 or 503. The functions are pure:

* ``backoff_ms`` computes the delay from a policy; ``honour_retry_after`` adds the server's
  ``Retry-After``.
* ``next_try`` decides whether to retry, by attempts, time and ``Retry-After`` of a retry class.
* ``spend`` takes a token from the retry budget that all callers of one process share.

Randomness is the argument ``sample`` in [0, 1). Inside a run it is ``sample_from(run, step,
attempt)``, so that deciding twice gives the same delay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Final, Literal, TypeAlias, assert_never

import msgspec
from msgspec import Meta

from stanchion.core.faults import Fault, Faults, fault_unless
from stanchion.core.limits import ATTEMPTS_MAX, BACKOFF_MS_MAX
from stanchion.core.model import Instant
from stanchion.core.ranges import range_faults

FACTOR_MAX: Final = 10
BackoffMs: TypeAlias = Annotated[int, Meta(ge=0, le=BACKOFF_MS_MAX)]
BackoffMsFrom1: TypeAlias = Annotated[int, Meta(ge=1, le=BACKOFF_MS_MAX)]


def backoff_ms(policy: Backoff, attempt: int, sample: float) -> int:
    """The delay after attempt number ``attempt``, counted from 1."""
    match policy:
        case Fixed():
            return policy.delay_ms
        case BoundedJitter():
            return within(
                policy.delay_ms - policy.jitter_ms, policy.delay_ms + policy.jitter_ms, sample
            )
        case Exponential(jitter="none"):
            return _ceiling_ms(policy, attempt)
        case Exponential():
            # Full jitter, from zero to the ceiling: spreads callers that failed together over the
            # whole interval.
            return within(0, _ceiling_ms(policy, attempt), sample)
        case _:
            assert_never(policy)


def within(low: int, high: int, sample: float) -> int:
    """An integer from ``low`` to ``high``, both included, chosen by ``sample``."""
    width = high - low
    # A product above 2**53 may be rounded up to width + 1, so the result is clamped.
    return low + min(width, int(sample * (width + 1)))


def sample_from(*parts: str | int) -> float:
    """A sample in [0, 1) that depends only on the parts, not on process, seed or version.

    The hash covers type and length of each part: ("ab", "c"), ("a", "bc") and (1, "1") all differ.
    """
    digest = hashlib.sha256()
    for part in parts:
        kind, text = ("s", part) if isinstance(part, str) else ("i", f"{part:d}")
        # The JSON of a client may hold a lone surrogate, which must not make the decision fail.
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(f"{kind}{len(encoded)}:".encode() + encoded)
    # A float holds 53 bits exactly: one more could round up to 1.0.
    return (int.from_bytes(digest.digest()[:8], "big") >> 11) / 2**53


def honour_retry_after(retry_after_ms: int, backoff_ms: int, sample: float, spread: float) -> int:
    """The delay for a backoff and the server's ``Retry-After``: never shorter than the latter.

    ``spread`` is the share of ``Retry-After`` that may be added. Without it, all callers with the
    same ``Retry-After`` would retry at the same time.
    """
    latest_ms = retry_after_ms + int(retry_after_ms * spread)
    return max(backoff_ms, within(retry_after_ms, latest_ms, sample))


# ── Backoff policies ─────────────────────────────────────────────────────────────────────────────


class _Backoff(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    pass


class Fixed(_Backoff, frozen=True, tag="fixed", omit_defaults=True):
    """A constant delay. Callers that collide once will collide again."""

    delay_ms: BackoffMs
    jitter_ms: BackoffMs = 0
    """Not used. Kept so that a change of ``kind`` alone switches to ``fixed`` and back."""


class BoundedJitter(_Backoff, frozen=True, tag="jitter"):
    """A delay in [delay_ms − jitter_ms, delay_ms + jitter_ms]."""

    delay_ms: BackoffMs
    jitter_ms: BackoffMs


class Exponential(_Backoff, frozen=True, kw_only=True, tag="exponential", omit_defaults=True):
    """A delay that grows by ``factor`` up to ``cap_ms``; with full jitter, at most that delay."""

    base_ms: BackoffMsFrom1
    cap_ms: BackoffMsFrom1
    factor: Annotated[float, Meta(ge=1, le=FACTOR_MAX)] = 2.0
    jitter: Literal["full", "none"] = "full"


Backoff: TypeAlias = Fixed | BoundedJitter | Exponential


def _ceiling_ms(policy: Exponential, attempt: int) -> int:
    try:
        grown_ms = policy.base_ms * float(policy.factor) ** (attempt - 1)
    except OverflowError:
        return policy.cap_ms
    return int(min(policy.cap_ms, grown_ms))


# ── Whether to try again ─────────────────────────────────────────────────────────────────────────


class RetryClass(StrEnum):
    """Why the server refused. The classes have separate policies and counts."""

    QUOTA = "quota"
    """429: the tenant of the caller is at its limit. Retrying sooner frees no slot."""
    UNAVAILABLE = "unavailable"
    """503 or no answer: the server is unavailable, and likely to recover soon."""


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often and how long a caller retries answers of one class."""

    attempts_max: Annotated[int, Meta(ge=1, le=ATTEMPTS_MAX)]
    """Attempts that may end in this class, the first one included."""
    total_ms_max: BackoffMs
    """From the start of the first attempt to the start of the last."""
    retry_after_ms_max: BackoffMs
    """A caller gives up if ``Retry-After`` is longer than this."""
    backoff: Backoff
    spread: Annotated[float, Meta(ge=0, le=1)] = 0.25


RETRIES: Final[Mapping[RetryClass, RetryPolicy]] = MappingProxyType(
    {
        RetryClass.QUOTA: RetryPolicy(
            attempts_max=4,
            total_ms_max=60_000,
            retry_after_ms_max=30_000,
            backoff=Exponential(base_ms=1_000, cap_ms=15_000),
        ),
        RetryClass.UNAVAILABLE: RetryPolicy(
            attempts_max=8,
            total_ms_max=120_000,
            retry_after_ms_max=30_000,
            backoff=Exponential(base_ms=200, cap_ms=10_000),
        ),
    }
)
"""Quota retries are slower: a slot is freed when a run ends, not by asking more often."""


class Answer(msgspec.Struct, frozen=True):
    """The result of an attempt. Without a class it is not retried."""

    retry_class: RetryClass | None
    retry_after_ms: int = 0


class Tries(msgspec.Struct, frozen=True):
    """The attempts of one call so far: when the first began, and the class of each result."""

    started_at: Instant
    ended: tuple[RetryClass, ...] = ()


class Wait(msgspec.Struct, frozen=True):
    """Retry after the delay. If that fails, call ``next_try`` again with these ``tries``."""

    delay_ms: int
    tries: Tries


class GiveUpReason(StrEnum):
    """Why a caller stops retrying."""

    NOT_RETRYABLE = "not_retryable"
    ATTEMPTS_SPENT = "attempts_spent"
    RETRY_AFTER_TOO_LONG = "retry_after_too_long"
    TIME_SPENT = "time_spent"


class GiveUp(msgspec.Struct, frozen=True):
    """Stop retrying and report the failure."""

    reason: GiveUpReason


def next_try(
    policies: Mapping[RetryClass, RetryPolicy],
    tries: Tries,
    answer: Answer,
    now: Instant,
    sample: float,
) -> Wait | GiveUp:
    """Decide whether a call that got ``answer`` is retried, and when.

    Attempts are counted by class: those that ended with 429 do not count against an outage. Time
    is counted for the whole call.
    """
    if answer.retry_class is None:
        return GiveUp(GiveUpReason.NOT_RETRYABLE)
    policy = policies[answer.retry_class]
    tries = Tries(tries.started_at, (*tries.ended, answer.retry_class))
    made = tries.ended.count(answer.retry_class)
    if made >= policy.attempts_max:
        return GiveUp(GiveUpReason.ATTEMPTS_SPENT)
    if answer.retry_after_ms > policy.retry_after_ms_max:
        return GiveUp(GiveUpReason.RETRY_AFTER_TOO_LONG)
    own_ms = backoff_ms(policy.backoff, made, sample)
    delay_ms = honour_retry_after(answer.retry_after_ms, own_ms, sample, policy.spread)
    # If the wait would end after the time limit, report the failure now.
    if max(0, now - tries.started_at) + delay_ms > policy.total_ms_max:
        return GiveUp(GiveUpReason.TIME_SPENT)
    return Wait(delay_ms, tries)


# ── Retry budgets ────────────────────────────────────────────────────────────────────────────────

_MICRO: Final = 1_000_000


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token bucket: every retry of the process takes one token; tokens return with time."""

    tokens_max: Annotated[int, Meta(ge=1, le=_MICRO)]
    refill_per_s: Annotated[float, Meta(ge=0, le=_MICRO)]


BUDGETS: Final[Mapping[RetryClass, Budget]] = MappingProxyType(
    {
        RetryClass.QUOTA: Budget(tokens_max=10, refill_per_s=1.0),
        RetryClass.UNAVAILABLE: Budget(tokens_max=20, refill_per_s=2.0),
    }
)


class BudgetState(msgspec.Struct, frozen=True):
    """The tokens at ``as_of``, as an integer of millionths to avoid float errors."""

    micro_tokens: int
    as_of: Instant


def full_budget(budget: Budget, now: Instant) -> BudgetState:
    """A full bucket."""
    return BudgetState(budget.tokens_max * _MICRO, now)


def spend(budget: Budget, state: BudgetState, now: Instant) -> tuple[BudgetState, bool]:
    """Take one token. Returns the new state, and whether there was one.

    A clock that steps back adds no tokens and removes none; the bucket continues from the new
    time. So no more than ``tokens_max`` and the refill of the elapsed time is ever spent.
    """
    elapsed_ms = max(0, now - state.as_of)
    refill = round(elapsed_ms * budget.refill_per_s * (_MICRO / 1_000))
    level = min(budget.tokens_max * _MICRO, state.micro_tokens + refill)
    if level >= _MICRO:
        return BudgetState(level - _MICRO, now), True
    # Refused: keep ``as_of``, so that frequent calls do not lose the refill to rounding.
    return BudgetState(state.micro_tokens, min(now, state.as_of)), False


# ── Validation ───────────────────────────────────────────────────────────────────────────────────


def faults(policy: Backoff | RetryPolicy | Budget, *, lock_ttl_ms: int | None = None) -> Faults:
    """All faults of a policy; empty if it is valid.

    ``lock_ttl_ms`` is the term of the lock that the policy waits for, if any.
    """
    return (*range_faults(policy), *_disagreements(policy, lock_ttl_ms))


def _disagreements(policy: Backoff | RetryPolicy | Budget, lock_ttl_ms: int | None) -> Faults:
    """Faults of members that do not fit together."""
    match policy:
        case Fixed() | BoundedJitter():
            # Also checked for ``fixed``, which ignores it: else switching back could fail.
            return (
                *fault_unless(policy.jitter_ms <= policy.delay_ms, "jitter_ms", "exceeds delay_ms"),
                *fault_unless(
                    lock_ttl_ms is None or policy.jitter_ms < lock_ttl_ms,
                    "jitter_ms",
                    f"must be below the lock's term of {lock_ttl_ms} ms",
                ),
            )
        case Exponential():
            return fault_unless(policy.base_ms <= policy.cap_ms, "cap_ms", "is below base_ms")
        case RetryPolicy():
            found = faults(policy.backoff)
            return tuple(Fault(f"backoff.{each.path}", each.message) for each in found)
        case Budget():
            return ()
        case _:
            assert_never(policy)


class WorkAllowance(msgspec.Struct, frozen=True, kw_only=True):
    """A token bucket for processor time: a sustained share of one core, and a burst.

    The state of a bucket is one number, the time in milliseconds at which it will be full again. A
    time in the past means a full bucket, which need not be stored.
    """

    share: float
    """Processor seconds that are refilled per second."""
    burst_s: float
    """Processor seconds that a full bucket holds."""
    wait_ms_max: float = 30_000
    """The longest wait. Debt beyond it is dropped."""

    @property
    def refill_ms(self) -> float:
        """The time in which an empty bucket is refilled."""
        return self.burst_s / self.share * 1000

    def after(self, full_at_ms: float, spent_s: float, *, now_ms: float) -> float:
        """The new state after work that took ``spent_s`` processor seconds."""
        full_at_ms = max(full_at_ms, now_ms) + spent_s / self.share * 1000
        return min(full_at_ms, now_ms + self.refill_ms + self.wait_ms_max)

    def wait_ms(self, full_at_ms: float, *, now_ms: float) -> float:
        """How long until the bucket is no longer overdrawn; zero if work may begin now."""
        return max(0.0, full_at_ms - self.refill_ms - now_ms)
