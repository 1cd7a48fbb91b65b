"""Errors of the client SDK, split by who acts.

    CallFailed
    ├── TryLater               the caller waits, and retries: nothing is wrong
    │   ├── TenantFull           429: the tenant has as many active runs as its cap
    │   ├── BudgetExhausted      429: the run would reserve more than is left of a budget
    │   └── Throttled            429: more than the tenant's rate
    ├── ServerUnavailable      the operator looks: 5xx, no connection, no answer in time
    ├── CallRefused            the programmer changes the call: any other 4xx
    │   ├── InvalidRequest       400, 413, 415, 422: ``errors`` names the places
    │   ├── IdempotencyMismatch  422: this key was used for something else
    │   ├── NotFound             404: it does not exist, or belongs to another tenant
    │   └── Conflict             409: an earlier decision conflicts, or not in this state
    ├── AccessDenied           the operator, who creates keys
    │   ├── Unauthenticated      401: no key, or not a valid one
    │   └── Forbidden            403: the key's role may not do this
    ├── UnexpectedAnswer       the operator or the programmer: that is no Stanchion server, or
    │                          one of another version
    └── WaitTimeout            the caller chose the time: the run goes on (also a TimeoutError)

``TryLater`` and ``ServerUnavailable`` come after retries, as far as there were any: ``gave_up``
says why they ended. Invalid arguments (an empty id, a key with a line break) raise ``ValueError``,
and nothing is sent.

``answer_of`` classifies a response for the retry policy, ``failure`` makes the error. The status
decides the class, not the body: a proxy in front of the server answers 502 or 429 with a page of
its own. Only an exhausted budget may be final, if the body says so. ``retry_after_ms`` in the body
is preferred to the header, which has whole seconds only.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from http import HTTPStatus
from typing import Final, assert_never

import msgspec

from stanchion.core.model import Instant
from stanchion.core.retry import Answer, GiveUpReason, RetryClass
from stanchion.transport.messages import HttpReply, NoReply, Request, Silence
from stanchion.wire.problems import Code, FieldError
from stanchion.wire.runs import RunView


class GaveUpBecause(StrEnum):
    """Why a call was not tried again."""

    NOT_RETRYABLE = GiveUpReason.NOT_RETRYABLE.value
    """A retry would get the same response."""
    NOT_REPEATABLE = "not_repeatable"
    """The server may have executed it, and it is not repeatable."""
    ATTEMPTS_SPENT = GiveUpReason.ATTEMPTS_SPENT.value
    RETRY_AFTER_TOO_LONG = GiveUpReason.RETRY_AFTER_TOO_LONG.value
    """The server asks for a longer wait than the policy allows."""
    TIME_SPENT = GiveUpReason.TIME_SPENT.value
    BUDGET_SPENT = "budget_spent"
    """The retry budget of the process is spent."""


class CallFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a call that failed."""

    call: str
    attempts: int = 1
    gave_up: GaveUpBecause = GaveUpBecause.NOT_RETRYABLE
    status: int | None = None
    """``None``: there was no answer."""
    code: str | None = None
    """The problem's ``code``. A program branches on this, or on the type of the error."""
    request_id: str | None = None
    """The id of this request in the server's log."""
    retry_after_ms: int = 0
    errors: tuple[FieldError, ...] = ()
    limit: int | None = None
    active: int | None = None
    budget: str | None = None
    used: int | None = None
    reserved: int | None = None
    resets_at: datetime | None = None
    may_have_run: bool = False
    """The server may have executed it. With the same key, a retry does not execute it twice."""
    idempotency_key: str | None = None


class CallFailed(Exception):
    """A call did not succeed. ``facts`` says all that is known, the class says who acts."""

    def __init__(self, message: str, facts: CallFacts) -> None:
        super().__init__(message, facts)  # Both: so that it can be pickled.
        self.message = message
        self.facts = facts

    def __str__(self) -> str:
        return self.message

    @property
    def code(self) -> str | None:
        """The problem's code, if there was an answer that had one."""
        return self.facts.code

    @property
    def gave_up(self) -> GaveUpBecause:
        """Why it was not tried again."""
        return self.facts.gave_up

    @property
    def retry_after_s(self) -> float:
        """The server's ``Retry-After``; 0 if it sent none."""
        return self.facts.retry_after_ms / 1000

    @property
    def idempotency_key(self) -> str | None:
        """Start again with this key: if the run was started after all, you get that one."""
        return self.facts.idempotency_key


class TryLater(CallFailed):
    """The tenant is at a limit: retry later."""


class TenantFull(TryLater):
    """The tenant has as many active runs as its cap allows."""

    @property
    def limit(self) -> int | None:
        """How many runs may be active at once."""
        return self.facts.limit

    @property
    def active(self) -> int | None:
        """How many runs are active."""
        return self.facts.active


class BudgetExhausted(TryLater):
    """The run would reserve more than is left of a budget of the tenant.

    It was retried only if that could help within 30 s.
    """

    @property
    def budget(self) -> str | None:
        """The name of the budget."""
        return self.facts.budget

    @property
    def limit(self) -> int | None:
        """How much may be used in a window of time."""
        return self.facts.limit

    @property
    def used(self) -> int | None:
        """How much is used."""
        return self.facts.used

    @property
    def reserved(self) -> int | None:
        """How much unfinished runs have reserved and not used."""
        return self.facts.reserved

    @property
    def resets_at(self) -> datetime | None:
        """When the window ends; ``None`` if never."""
        return self.facts.resets_at


class Throttled(TryLater):
    """The tenant is over its rate."""


class ServerUnavailable(CallFailed):
    """The server cannot serve the call, or cannot be reached."""

    @property
    def may_have_run(self) -> bool:
        """Whether the server may have executed the call."""
        return self.facts.may_have_run


class CallRefused(CallFailed):
    """The call cannot succeed as it is."""


class InvalidRequest(CallRefused):
    """The server does not accept what was sent."""

    @property
    def errors(self) -> tuple[FieldError, ...]:
        """Every fault, with its place."""
        return self.facts.errors


class IdempotencyMismatch(CallRefused):
    """The key was used before, for another workflow or another input."""


class NotFound(CallRefused):
    """It does not exist, or belongs to another tenant."""


class Conflict(CallRefused):
    """An earlier decision conflicts, or it cannot be done in this state."""


class AccessDenied(CallFailed):
    """The API key does not allow the call."""


class Unauthenticated(AccessDenied):
    """There was no valid API key."""


class Forbidden(AccessDenied):
    """The key is valid, and its role may not do this."""


class UnexpectedAnswer(CallFailed):
    """An answer that a Stanchion server of this version does not give."""


class WaitTimeout(CallFailed, TimeoutError):
    """The run was not finished within the time. It goes on."""

    def __init__(self, message: str, facts: CallFacts, run: RunView) -> None:
        super().__init__(message, facts)
        self.args = (message, facts, run)
        self.run = run
        """The run as it was seen last."""


_UNAVAILABLE: Final = frozenset({500, 502, 503, 504})
_MAY_HAVE_RUN: Final = frozenset({500, 502, 504})
"""503 and 429 are refusals: nothing was begun."""
_RETRY_AFTER_MS_MAX: Final = 10**12
"""Far above every policy, and small enough to calculate with."""


def answer_of(outcome: HttpReply | NoReply, wall: Instant) -> Answer:
    """The retry class of an outcome, and the server's ``Retry-After``."""
    match outcome:
        case NoReply(silence=Silence.UNTRUSTED):
            return Answer(None)
        case NoReply():
            return Answer(RetryClass.UNAVAILABLE)
        case HttpReply(status=HTTPStatus.TOO_MANY_REQUESTS):
            problem = _problem(outcome)
            if problem.code == Code.BUDGET_EXHAUSTED and problem.retry_class is None:
                return Answer(None)
            return Answer(RetryClass.QUOTA, retry_after_ms(outcome, wall))
        case HttpReply(status=status) if status in _UNAVAILABLE:
            return Answer(RetryClass.UNAVAILABLE, retry_after_ms(outcome, wall))
        case HttpReply():
            return Answer(None)
        case _:
            assert_never(outcome)


def may_have_run(outcome: HttpReply | NoReply) -> bool:
    """Whether the server may have executed the request, although it did not confirm it."""
    if isinstance(outcome, NoReply):
        return outcome.may_have_run
    return outcome.status in _MAY_HAVE_RUN


def retry_after_ms(reply: HttpReply, wall: Instant) -> int:
    """The server's ``Retry-After``: exact from the body, else from the header, else 0."""
    exact_ms = _problem(reply).retry_after_ms
    if exact_ms is not None:
        return min(_RETRY_AFTER_MS_MAX, max(0, exact_ms))
    text = reply.headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return min(_RETRY_AFTER_MS_MAX, int(text[:12]) * 1000)
    until = _date_ms(text)
    if until is None:
        return 0
    # Both times by the server's clock, if it sends one: ours may be minutes off.
    since = _date_ms(reply.headers.get("date", ""))
    return min(_RETRY_AFTER_MS_MAX, max(0, until - (wall if since is None else since)))


def failure(
    request: Request,
    outcome: HttpReply | NoReply,
    *,
    attempts: int,
    gave_up: GaveUpBecause,
    wall: Instant,
) -> CallFailed:
    """The error that the caller gets."""
    facts = CallFacts(
        call=request.name,
        attempts=attempts,
        gave_up=gave_up,
        may_have_run=may_have_run(outcome),
        idempotency_key=key_of(request),
    )
    tail = "" if attempts == 1 else f", after {attempts} tries"
    if gave_up not in {GaveUpBecause.NOT_RETRYABLE, GaveUpBecause.ATTEMPTS_SPENT}:
        tail += f" ({gave_up.value.replace('_', ' ')})"
    if isinstance(outcome, NoReply):
        return ServerUnavailable(f"{request.name}: {outcome.message}{tail}", facts)
    problem = _problem(outcome)
    facts = msgspec.structs.replace(
        facts,
        status=outcome.status,
        code=problem.code,
        request_id=problem.request_id or outcome.headers.get("x-request-id"),
        retry_after_ms=retry_after_ms(outcome, wall),
        errors=problem.errors,
        limit=problem.limit,
        active=problem.active,
        budget=problem.budget,
        used=problem.used,
        reserved=problem.reserved,
        resets_at=problem.resets_at,
    )
    return _kind(facts)(f"{request.name}: {_sentence(outcome, problem)}{tail}", facts)


def key_of(request: Request) -> str | None:
    """The idempotency key of a request that has one."""
    return next((value for name, value in request.headers if name == "Idempotency-Key"), None)


def _kind(facts: CallFacts) -> type[CallFailed]:
    match facts.status:
        case 401:
            return Unauthenticated
        case 403:
            return Forbidden
        case 404:
            return NotFound
        case 409:
            return Conflict
        case 422 if facts.code == Code.IDEMPOTENCY_MISMATCH:
            return IdempotencyMismatch
        case 400 | 413 | 414 | 415 | 422 | 431:
            return InvalidRequest
        case 429 if facts.code == Code.BUDGET_EXHAUSTED:
            return BudgetExhausted
        case 429:
            full = facts.code in {Code.MAX_CONCURRENT_RUNS_REACHED, Code.QUEUE_FULL}
            return TenantFull if full else Throttled
        case status if status is not None and 400 <= status < 500:  # noqa: PLR2004 - HTTP's classes
            return CallRefused
        case status if status is not None and 500 <= status < 600:  # noqa: PLR2004 - HTTP's classes
            return ServerUnavailable
        case _:
            return UnexpectedAnswer


class _Problem(msgspec.Struct, frozen=True):
    """The members of a problem document that are there. A proxy's page has none."""

    code: str | None = None
    detail: str | None = None
    retry_after_ms: int | None = None
    request_id: str | None = None
    errors: tuple[FieldError, ...] = ()
    limit: int | None = None
    active: int | None = None
    retry_class: str | None = None
    budget: str | None = None
    used: int | None = None
    reserved: int | None = None
    resets_at: datetime | None = None


_PROBLEM: Final = msgspec.json.Decoder(_Problem)
_ERRORS_SHOWN: Final = 3


def _problem(reply: HttpReply) -> _Problem:
    try:
        return _PROBLEM.decode(reply.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Problem()


def _sentence(reply: HttpReply, problem: _Problem) -> str:
    said = problem.detail or "an answer that is no problem document"
    # The detail of a workflow's faults is a list of them already.
    faults = [each for each in problem.errors if each.message not in said]
    places = "; ".join(f"{each.path}: {each.message}" for each in faults[:_ERRORS_SHOWN])
    more = len(faults) - _ERRORS_SHOWN
    places += f"; and {more} more" if more > 0 else ""
    mark = " ".join(part for part in (str(reply.status), problem.code) if part)
    return f"{said}{': ' if places else ''}{places} ({mark})"


def _date_ms(text: str) -> Instant | None:
    if not text:
        return None
    from email.utils import parsedate_to_datetime  # noqa: PLC0415 - 30 ms, for a rare form

    try:
        return Instant(int(parsedate_to_datetime(text).timestamp() * 1000))
    except (ValueError, OverflowError):
        return None
