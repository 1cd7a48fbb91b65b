"""Retries: how long to wait before trying again, and whether to try at all.

Everything that is tried twice in Stanchion asks here: a busy lock, a failed step, a caller who was
told 429 or 503. Three questions, each a pure function:

* how long?          ``backoff_ms`` reads a policy; ``honour_retry_after`` adds the server's word.
* at all?            ``next_try`` weighs attempts, time and the server's word, by retry class.
* at whose expense?  ``spend`` draws on a budget that all callers of one process share.

Chance comes in as ``sample`` in [0, 1). Inside a run it is ``sample_from(run, step, attempt)``, so
that deciding twice gives the same delay twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Literal, TypeAlias, assert_never

import msgspec

from stanchion.core.faults import Fault
from stanchion.core.limits import ATTEMPTS_MAX, BACKOFF_MS_MAX
from stanchion.core.model import Instant

__all__ = [
    "BUDGETS",
    "FACTOR_MAX",
    "RETRIES",
    "Answer",
    "Backoff",
    "BoundedJitter",
    "Budget",
    "BudgetState",
    "Exponential",
    "Faults",
    "Fixed",
    "GiveUp",
    "GiveUpReason",
    "RetryClass",
    "RetryPolicy",
    "Tries",
    "Wait",
    "WorkAllowance",
    "backoff_ms",
    "fault_unless",
    "faults",
    "full_budget",
    "honour_retry_after",
    "next_try",
    "out_of_range",
    "sample_from",
    "spend",
    "within",
]

FACTOR_MAX: Final = 10


def backoff_ms(policy: Backoff, attempt: int, sample: float) -> int:
    """How long to wait after try number ``attempt``, the first being 1."""
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
            # Full jitter: from nothing to the ceiling. Callers that failed together are spread over
            # the whole wait, which is what empties a herd fastest.
            return within(0, _ceiling_ms(policy, attempt), sample)
        case _:
            assert_never(policy)


def within(low: int, high: int, sample: float) -> int:
    """A whole number from ``low`` to ``high``, both included, chosen by ``sample``."""
    width = high - low
    # A product above 2**53 may be rounded up to width + 1. The bound holds all the same.
    return low + min(width, int(sample * (width + 1)))


def sample_from(*parts: str | int) -> float:
    """A sample in [0, 1) that depends on the parts alone: not on process, seed or version.

    Each part goes in with its kind and length, so ("ab", "c"), ("a", "bc") and (1, "1") all differ.
    """
    digest = hashlib.sha256()
    for part in parts:
        kind, text = ("s", part) if isinstance(part, str) else ("i", f"{part:d}")
        # A lone surrogate may come from a client's JSON; it must not make a run undecidable.
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(f"{kind}{len(encoded)}:".encode() + encoded)
    # 53 bits are what a float holds exactly: one more could round up to 1.0.
    return (int.from_bytes(digest.digest()[:8], "big") >> 11) / 2**53


def honour_retry_after(retry_after_ms: int, backoff_ms: int, sample: float, spread: float) -> int:
    """The server's word and our own backoff in one delay: never before the word, spread above it.

    ``spread`` is the share of the word that may be added. Without it, everyone who was told
    "30 seconds" would come back in the same one.
    """
    latest_ms = retry_after_ms + int(retry_after_ms * spread)
    return max(backoff_ms, within(retry_after_ms, latest_ms, sample))


# ── Backoff policies ─────────────────────────────────────────────────────────────────────────────


class _Backoff(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    pass


class Fixed(_Backoff, frozen=True, tag="fixed", omit_defaults=True):
    """Always the same delay. Easy to reason about; those who collide will collide again."""

    delay_ms: int
    jitter_ms: int = 0
    """Not used. It is kept so that ``kind`` alone switches a setting to fixed and back."""


class BoundedJitter(_Backoff, frozen=True, tag="jitter"):
    """A delay in [delay_ms − jitter_ms, delay_ms + jitter_ms]."""

    delay_ms: int
    jitter_ms: int


class Exponential(_Backoff, frozen=True, kw_only=True, tag="exponential", omit_defaults=True):
    """A ceiling that grows by ``factor`` up to ``cap_ms``; with full jitter, anything below it."""

    base_ms: int
    cap_ms: int
    factor: float = 2.0
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
    """Why the server did not do it. The two need different patience, so they are never mixed."""

    QUOTA = "quota"
    """429: the caller's own tenant is full. Asking more often frees no slot."""
    UNAVAILABLE = "unavailable"
    """503, or no answer: the server cannot, for now. It is likely to recover soon."""


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How patient a caller is with one class of answers."""

    attempts_max: int
    """Tries that may end in this class, the first one included."""
    total_ms_max: int
    """From the first try to the start of the last."""
    retry_after_ms_max: int
    """Asked to wait longer than this, the caller gives up rather than come too early."""
    backoff: Backoff
    spread: float = 0.25


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
"""The quota's caps are the stricter ones: a slot frees when a run ends, however often one asks."""


class Answer(msgspec.Struct, frozen=True):
    """What a try came back with. No class means that trying again cannot help."""

    retry_class: RetryClass | None
    retry_after_ms: int = 0


class Tries(msgspec.Struct, frozen=True):
    """The tries of one call so far: when the first began, and how each of them ended."""

    started_at: Instant
    ended: tuple[RetryClass, ...] = ()


class Wait(msgspec.Struct, frozen=True):
    """Try again after the delay, and come back with these tries if that fails too."""

    delay_ms: int
    tries: Tries


class GiveUpReason(StrEnum):
    """Why a caller stops."""

    NOT_RETRYABLE = "not_retryable"
    ATTEMPTS_SPENT = "attempts_spent"
    RETRY_AFTER_TOO_LONG = "retry_after_too_long"
    TIME_SPENT = "time_spent"


class GiveUp(msgspec.Struct, frozen=True):
    """Stop, and tell the caller."""

    reason: GiveUpReason


def next_try(
    policies: Mapping[RetryClass, RetryPolicy],
    tries: Tries,
    answer: Answer,
    now: Instant,
    sample: float,
) -> Wait | GiveUp:
    """Whether a call that got ``answer`` is tried again, and when.

    Attempts are counted by class: a full tenant that becomes an outage meets fresh patience. Time
    is the whole call's.
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
    # A wait that would end too late is not begun: the caller learns of the failure now.
    if max(0, now - tries.started_at) + delay_ms > policy.total_ms_max:
        return GiveUp(GiveUpReason.TIME_SPENT)
    return Wait(delay_ms, tries)


# ── Retry budgets ────────────────────────────────────────────────────────────────────────────────

_MICRO: Final = 1_000_000


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token bucket: every retry of the process takes one token, time puts them back."""

    tokens_max: int
    refill_per_s: float


BUDGETS: Final[Mapping[RetryClass, Budget]] = MappingProxyType(
    {
        RetryClass.QUOTA: Budget(tokens_max=10, refill_per_s=1.0),
        RetryClass.UNAVAILABLE: Budget(tokens_max=20, refill_per_s=2.0),
    }
)


class BudgetState(msgspec.Struct, frozen=True):
    """What was in the bucket at ``as_of``. Whole millionths: no dust from adding floats."""

    micro_tokens: int
    as_of: Instant


def full_budget(budget: Budget, now: Instant) -> BudgetState:
    """The bucket of a process that has not retried anything yet."""
    return BudgetState(budget.tokens_max * _MICRO, now)


def spend(budget: Budget, state: BudgetState, now: Instant) -> tuple[BudgetState, bool]:
    """Take one token, or say that there is none.

    A clock that steps back puts nothing in and takes nothing out; the bucket counts on from the new
    reading. So what is spent never exceeds ``tokens_max`` and the refill of the time that passed.
    """
    elapsed_ms = max(0, now - state.as_of)
    refill = round(elapsed_ms * budget.refill_per_s * (_MICRO / 1_000))
    level = min(budget.tokens_max * _MICRO, state.micro_tokens + refill)
    if level >= _MICRO:
        return BudgetState(level - _MICRO, now), True
    # Refused: the older reading stays, so that asking often cannot round the refill away.
    return BudgetState(state.micro_tokens, min(now, state.as_of)), False


# ── Validation ───────────────────────────────────────────────────────────────────────────────────


def faults(policy: Backoff | RetryPolicy | Budget, *, lock_ttl_ms: int | None = None) -> Faults:
    """Everything that is wrong with a policy; nothing, if it may be used.

    ``lock_ttl_ms`` is the term of the lock that the policy waits for, if it waits for one.
    """
    match policy:
        case Fixed() | BoundedJitter():
            # A fixed policy's idle jitter is held to the same rule, or the way back could fail.
            return (
                *out_of_range("delay_ms", policy.delay_ms, 0, BACKOFF_MS_MAX),
                *out_of_range("jitter_ms", policy.jitter_ms, 0, BACKOFF_MS_MAX),
                *fault_unless(policy.jitter_ms <= policy.delay_ms, "jitter_ms", "exceeds delay_ms"),
                *fault_unless(
                    lock_ttl_ms is None or policy.jitter_ms < lock_ttl_ms,
                    "jitter_ms",
                    f"must be below the lock's term of {lock_ttl_ms} ms",
                ),
            )
        case Exponential():
            return (
                *out_of_range("base_ms", policy.base_ms, 1, BACKOFF_MS_MAX),
                *out_of_range("cap_ms", policy.cap_ms, 1, BACKOFF_MS_MAX),
                *fault_unless(policy.base_ms <= policy.cap_ms, "cap_ms", "is below base_ms"),
                *out_of_range("factor", policy.factor, 1, FACTOR_MAX),
            )
        case RetryPolicy():
            return (
                *out_of_range("attempts_max", policy.attempts_max, 1, ATTEMPTS_MAX),
                *out_of_range("total_ms_max", policy.total_ms_max, 0, BACKOFF_MS_MAX),
                *out_of_range("retry_after_ms_max", policy.retry_after_ms_max, 0, BACKOFF_MS_MAX),
                *out_of_range("spread", policy.spread, 0, 1),
                *(Fault(f"backoff.{each.path}", each.message) for each in faults(policy.backoff)),
            )
        case Budget():
            return (
                *out_of_range("tokens_max", policy.tokens_max, 1, _MICRO),
                *out_of_range("refill_per_s", policy.refill_per_s, 0, _MICRO),
            )
        case _:
            assert_never(policy)


Faults: TypeAlias = tuple[Fault, ...]


def out_of_range(path: str, number: float, low: float, high: float) -> Faults:
    """A fault if the number is not from ``low`` to ``high``."""
    # Written so that NaN, which compares false with everything, is outside.
    return fault_unless(low <= number <= high, path, f"must be from {low} to {high}")


def fault_unless(good: bool, path: str, message: str) -> Faults:  # noqa: FBT001 - a condition, not a switch
    """A fault if the condition does not hold."""
    return () if good else (Fault(path, message),)


class WorkAllowance(msgspec.Struct, frozen=True, kw_only=True):
    """A token bucket for processor time: a sustained share of one core, and a burst.

    The state of a bucket is one number, the time in milliseconds at which it will be full again. A
    bucket that was never used, or not for long, has a time in the past: it need not be kept.
    """

    share: float
    """Processor seconds that the bucket regains in a second."""
    burst_s: float
    """Processor seconds that a full bucket holds."""
    wait_ms_max: float = 30_000
    """The longest wait that any debt leads to. What is over that is forgiven."""

    @property
    def refill_ms(self) -> float:
        """How long an empty bucket takes until it is full."""
        return self.burst_s / self.share * 1000

    def after(self, full_at_ms: float, spent_s: float, *, now_ms: float) -> float:
        """The new state after work that took so many processor seconds."""
        full_at_ms = max(full_at_ms, now_ms) + spent_s / self.share * 1000
        return min(full_at_ms, now_ms + self.refill_ms + self.wait_ms_max)

    def wait_ms(self, full_at_ms: float, *, now_ms: float) -> float:
        """How long until the bucket is no longer overdrawn; zero if work may begin now."""
        return max(0.0, full_at_ms - self.refill_ms - now_ms)
