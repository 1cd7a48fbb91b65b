"""The engine: one call and its retries, as a generator without input or output.

It yields commands (``Send``, ``Sleep``, for streams also ``Read`` and ``Emit``) and receives their
results. A client executes the commands; the engine has the rules:

* 429 is the class ``quota``; 500, 502, 503, 504, no connection and no response are ``unavailable``.
  Each class has its own attempts, time and delays (``core.retry.RETRIES``); those of the quota are
  stricter.
* ``Retry-After`` is honoured, then spread upward. A wait that would end after the deadline is not
  begun.
* Every retry takes a token from a bucket that all clients of the process share, one bucket a class.
  Otherwise the retries of many callers would be the next outage. When a bucket is empty, calls fail
  at once.
* A request that may have been executed is sent again only if it is repeatable.
* No other response is retried.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from http import HTTPStatus
from typing import Any, Final, Generic, TypeAlias, TypeVar, assert_never

import msgspec

from stanchion.client.errors import (
    CallFacts,
    GaveUpBecause,
    UnexpectedAnswer,
    answer_of,
    failure,
    key_of,
    may_have_run,
)
from stanchion.client.signals import Answered, CallHook, GaveUp, Retrying
from stanchion.core.model import Instant
from stanchion.core.retry import (
    BUDGETS,
    RETRIES,
    Answer,
    Budget,
    BudgetState,
    RetryClass,
    RetryPolicy,
    Tries,
    Wait,
    full_budget,
    next_try,
    spend,
)
from stanchion.core.retry import GiveUp as NoMore
from stanchion.transport.messages import HttpReply, NoReply, Opened, Outcome, Request


class RetryBudgets:
    """A bucket for each class. Used by many threads at once."""

    def __init__(self, budgets: Mapping[RetryClass, Budget] = BUDGETS) -> None:
        self._budgets = dict(budgets)
        self._states: dict[RetryClass, BudgetState] = {}
        self._turn = threading.Lock()

    def take(self, retry_class: RetryClass, now: Instant) -> bool:
        """Take one token, or say that there is none."""
        budget = self._budgets[retry_class]
        with self._turn:
            state = self._states.get(retry_class) or full_budget(budget, now)
            self._states[retry_class], taken = spend(budget, state, now)
        return taken


SHARED: Final = RetryBudgets()
"""The budgets of the process, shared by all clients that are not given others."""


T = TypeVar("T")

_WELL: Final = range(200, 300)


# ── Commands ─────────────────────────────────────────────────────────────────────────────────────


class Send(msgspec.Struct, frozen=True):
    """Send the request once. Answered with the outcome."""

    request: Request


class Sleep(msgspec.Struct, frozen=True):
    """Wait."""

    delay_ms: int


class Read(msgspec.Struct, frozen=True):
    """Read on in the stream that was opened last. Answered with ``bytes`` or ``NoReply``."""


class Emit(msgspec.Struct, Generic[T], frozen=True):
    """Yield this value to the caller's iterator."""

    value: T


Command: TypeAlias = Send | Sleep | Read
# What is sent in depends on the command, which no type can say: the functions below are the only
# ones that yield a command, and each knows what its own is answered with.
Op: TypeAlias = Generator[Command, Any, T]
"""A generator of commands that returns a value."""
Feed: TypeAlias = Generator[Command | Emit[T], Any, None]
"""A generator of commands that also emits values."""


# ── Calls ────────────────────────────────────────────────────────────────────────────────────────


class ApiCall(msgspec.Struct, Generic[T], frozen=True):
    """A request, and how its answer is read."""

    request: Request
    read: Callable[[HttpReply], T]


def _chance() -> float:
    # Not `random`: processes with the same seed would retry at the same instant.
    return (int.from_bytes(os.urandom(7), "big") >> 3) / 2**53


def _monotonic() -> Instant:
    return Instant(time.monotonic_ns() // 1_000_000)


def _wall() -> Instant:
    return Instant(time.time_ns() // 1_000_000)


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Retry policies and budgets, with the clocks and the randomness that they use."""

    policies: Mapping[RetryClass, RetryPolicy] = RETRIES
    budgets: RetryBudgets = SHARED
    now: Callable[[], Instant] = _monotonic
    """Only differences count."""
    wall: Callable[[], Instant] = _wall
    """For servers that name a date and do not say which day it is there."""
    sample: Callable[[], float] = _chance


class CallEngine(msgspec.Struct, frozen=True, kw_only=True):
    """Makes calls with retries, and reports them to a hook."""

    pace: Pace
    tell: CallHook
    headers: tuple[tuple[str, str], ...] = ()
    """Sent with every request."""
    timeout_s: float

    def __repr__(self) -> str:
        return "<engine of a client>"  # its headers contain the caller's key

    def ask(self, call: ApiCall[T], *, until: Instant | None = None) -> Op[T]:
        """Make the call, with retries. No wait begins that would end after ``until``."""
        reply = yield from self._answered(call.request, until)
        assert isinstance(reply, HttpReply)  # streams are requested with `open`
        try:
            return call.read(reply)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnexpectedAnswer(
                f"{call.request.name}: the answer is not what was expected: {error}",
                CallFacts(
                    call=call.request.name,
                    status=reply.status,
                    may_have_run=True,
                    idempotency_key=key_of(call.request),
                ),
            ) from error

    def open(self, request: Request) -> Op[None]:
        """Open a stream, with the same retries."""
        reply = yield from self._answered(request, None)
        if not isinstance(reply, Opened):
            raise UnexpectedAnswer(
                f"{request.name}: a whole answer where a stream was expected",
                CallFacts(call=request.name, status=reply.status),
            )

    def again(
        self,
        request: Request,
        outcome: HttpReply | NoReply,
        tries: Tries,
        until: Instant | None = None,
    ) -> Wait:
        """The wait before the next attempt. Raises the failure if there is to be none."""
        answer = answer_of(outcome, self.pace.wall())
        verdict = self._verdict(request, outcome, answer, tries, until)
        name, attempt = request.name, len(tries.ended) + 1
        if isinstance(verdict, GaveUpBecause):
            self.tell(
                GaveUp(call=name, attempt=attempt, retry_class=answer.retry_class, reason=verdict)
            )
            raise failure(
                request, outcome, attempts=attempt, gave_up=verdict, wall=self.pace.wall()
            )
        self.tell(
            Retrying(
                call=name,
                attempt=attempt,
                retry_class=verdict.tries.ended[-1],
                delay_ms=verdict.delay_ms,
                retry_after_ms=answer.retry_after_ms,
            )
        )
        return verdict

    def _answered(self, request: Request, until: Instant | None) -> Op[HttpReply | Opened]:
        tries = Tries(self.pace.now())
        while True:
            sent_at = self.pace.now()
            outcome: Outcome = yield Send(request)
            self.tell(
                Answered(
                    call=request.name,
                    attempt=len(tries.ended) + 1,
                    status=_status(outcome),
                    silence=outcome.silence if isinstance(outcome, NoReply) else None,
                    elapsed_ms=self.pace.now() - sent_at,
                )
            )
            if isinstance(outcome, Opened):
                return outcome
            if isinstance(outcome, HttpReply) and outcome.status in _WELL:
                return outcome
            wait = self.again(request, outcome, tries, until)
            tries = wait.tries
            yield Sleep(wait.delay_ms)

    def _verdict(
        self,
        request: Request,
        outcome: HttpReply | NoReply,
        answer: Answer,
        tries: Tries,
        until: Instant | None,
    ) -> Wait | GaveUpBecause:
        now = self.pace.now()
        planned = next_try(self.pace.policies, tries, answer, now, self.pace.sample())
        if isinstance(planned, NoMore):
            return GaveUpBecause(planned.reason.value)
        if may_have_run(outcome) and not request.is_repeatable:
            return GaveUpBecause.NOT_REPEATABLE
        if until is not None and now + planned.delay_ms > until:
            return GaveUpBecause.TIME_SPENT
        # Last, so that only retries that are made take a token.
        if not self.pace.budgets.take(planned.tries.ended[-1], now):
            return GaveUpBecause.BUDGET_SPENT
        return planned


def _status(outcome: Outcome) -> int | None:
    match outcome:
        case HttpReply():
            return outcome.status
        case Opened():
            return HTTPStatus.OK
        case NoReply():
            return None
        case _:
            assert_never(outcome)
