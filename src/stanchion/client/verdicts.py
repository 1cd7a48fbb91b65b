"""Verdicts: what an unwelcome outcome means, and what the caller is told in the end.

The status decides about the class, not the body: a proxy in front of the server answers 502 or 429
with a page of its own. ``retry_after_ms`` in the body is preferred to the header, which is whole
seconds.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final, assert_never

import msgspec

from stanchion.client.errors import (
    CallFailed,
    CallRefused,
    Conflict,
    Facts,
    Forbidden,
    GaveUpBecause,
    IdempotencyMismatch,
    InvalidRequest,
    NotFound,
    ServerUnavailable,
    TenantFull,
    Throttled,
    Unauthenticated,
    UnexpectedAnswer,
)
from stanchion.core.model import Instant
from stanchion.core.retry import Answer, RetryClass
from stanchion.transport.messages import NoReply, Reply, Request, Silence
from stanchion.wire.problems import Code, FieldError

__all__ = ["answer_of", "failure", "may_have_run", "retry_after_ms"]

_UNAVAILABLE: Final = frozenset({500, 502, 503, 504})
_MAY_HAVE_RUN: Final = frozenset({500, 502, 504})
"""503 and 429 are refusals: nothing was begun."""
_RETRY_AFTER_MS_MAX: Final = 10**12
"""Far above every policy, and small enough to calculate with."""


def answer_of(outcome: Reply | NoReply, wall: Instant) -> Answer:
    """Which class of answers this is, and when the server would like to be asked again."""
    match outcome:
        case NoReply(silence=Silence.UNTRUSTED):
            return Answer(None)
        case NoReply():
            return Answer(RetryClass.UNAVAILABLE)
        case Reply(status=HTTPStatus.TOO_MANY_REQUESTS):
            return Answer(RetryClass.QUOTA, retry_after_ms(outcome, wall))
        case Reply(status=status) if status in _UNAVAILABLE:
            return Answer(RetryClass.UNAVAILABLE, retry_after_ms(outcome, wall))
        case Reply():
            return Answer(None)
        case _:
            assert_never(outcome)


def may_have_run(outcome: Reply | NoReply) -> bool:
    """Whether the server may have done what it was asked, although it did not say so."""
    if isinstance(outcome, NoReply):
        return outcome.may_have_run
    return outcome.status in _MAY_HAVE_RUN


def retry_after_ms(reply: Reply, wall: Instant) -> int:
    """The server's word: exact from the body, else from the header, else 0."""
    exact_ms = _problem(reply).retry_after_ms
    if exact_ms is not None:
        return min(_RETRY_AFTER_MS_MAX, max(0, exact_ms))
    text = reply.headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return min(_RETRY_AFTER_MS_MAX, int(text[:12]) * 1000)
    until = _date_ms(text)
    if until is None:
        return 0
    # Both by the server's clock, if it tells the time: ours may be minutes off.
    since = _date_ms(reply.headers.get("date", ""))
    return min(_RETRY_AFTER_MS_MAX, max(0, until - (wall if since is None else since)))


def failure(
    request: Request,
    outcome: Reply | NoReply,
    *,
    attempts: int,
    gave_up: GaveUpBecause,
    wall: Instant,
) -> CallFailed:
    """The error that the caller gets."""
    key = next((value for name, value in request.headers if name == "Idempotency-Key"), None)
    facts = Facts(
        call=request.name,
        attempts=attempts,
        gave_up=gave_up,
        may_have_run=may_have_run(outcome),
        idempotency_key=key,
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
    )
    return _kind(facts)(f"{request.name}: {_sentence(outcome, problem)}{tail}", facts)


def _kind(facts: Facts) -> type[CallFailed]:
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
        case 429:
            full = facts.code == Code.MAX_CONCURRENT_RUNS_REACHED
            return TenantFull if full else Throttled
        case status if status is not None and 400 <= status < 500:  # noqa: PLR2004 - HTTP's classes
            return CallRefused
        case status if status is not None and 500 <= status < 600:  # noqa: PLR2004 - HTTP's classes
            return ServerUnavailable
        case _:
            return UnexpectedAnswer


class _Problem(msgspec.Struct, frozen=True):
    """As much of a problem document as there is. A proxy's page has nothing of it."""

    code: str | None = None
    detail: str | None = None
    retry_after_ms: int | None = None
    request_id: str | None = None
    errors: tuple[FieldError, ...] = ()
    limit: int | None = None
    active: int | None = None


_PROBLEM: Final = msgspec.json.Decoder(_Problem)
_ERRORS_SHOWN: Final = 3


def _problem(reply: Reply) -> _Problem:
    try:
        return _PROBLEM.decode(reply.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Problem()


def _sentence(reply: Reply, problem: _Problem) -> str:
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
