"""Problems: refusals of requests, and their problem documents (RFC 9457).

A handler returns a ``Refusal`` or raises ``RequestRefused`` with one. The code determines the
status and the retry class: 429 means the caller's quota, 503 the server's state. ``Retry-After`` is
``retry_after_ms`` in seconds, rounded up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from http import HTTPStatus
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import msgspec

from stanchion.core.faults import Fault
from stanchion.core.retry import RetryClass
from stanchion.core.upgrade import UpgradeUnfinished
from stanchion.services.upgrade import remedy
from stanchion.services.work import TenantOverloaded
from stanchion.wire.problems import PROBLEM_TYPE, Code, FieldError, Problem

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]

TENANT_FULL: Final = "max concurrent runs reached"
GATE_UNAVAILABLE: Final = "workflow concurrency gate unavailable"
LIMIT_CHECK_FAILED: Final = "failed to enforce max concurrent runs"

STATUS: Final[Mapping[Code, int]] = MappingProxyType(
    {
        Code.MALFORMED_JSON: 400,
        Code.MALFORMED_REQUEST: 400,
        Code.UNAUTHENTICATED: 401,
        Code.FORBIDDEN: 403,
        Code.NOT_FOUND: 404,
        Code.METHOD_NOT_ALLOWED: 405,
        Code.REQUEST_TIMEOUT: 408,
        Code.CONFLICT: 409,
        Code.UPGRADE_UNFINISHED: 409,
        Code.BODY_TOO_LARGE: 413,
        Code.URI_TOO_LONG: 414,
        Code.UNSUPPORTED_MEDIA_TYPE: 415,
        Code.INVALID_REQUEST: 422,
        Code.INVALID_WORKFLOW: 422,
        Code.INVALID_INPUT: 422,
        Code.IDEMPOTENCY_MISMATCH: 422,
        Code.MAX_CONCURRENT_RUNS_REACHED: 429,
        Code.BUDGET_EXHAUSTED: 429,
        Code.QUEUE_FULL: 429,
        Code.JOB_THROTTLED: 429,
        Code.TENANT_OVERLOADED: 429,
        Code.HEADERS_TOO_LARGE: 431,
        Code.INTERNAL: 500,
        Code.NOT_IMPLEMENTED: 501,
        Code.GATE_UNAVAILABLE: 503,
        Code.GATE_BUSY: 503,
        Code.LIMIT_CHECK_FAILED: 503,
        Code.OVERLOADED: 503,
        Code.DRAINING: 503,
        Code.STORE_UNAVAILABLE: 503,
        Code.LOCKS_UNAVAILABLE: 503,
    }
)
_RETRY_CLASS: Final = {429: RetryClass.QUOTA, 503: RetryClass.UNAVAILABLE}
_TITLE: Final = {status: HTTPStatus(status).phrase for status in {*STATUS.values()}}
_UNAVAILABLE_FROM_MS: Final = 1_000
_UNAVAILABLE_SPREAD_MS: Final = 2_000


class BudgetFacts(NamedTuple):
    """A budget that has too little left."""

    budget: str
    used: int
    reserved: int
    resets_at: datetime | None


CLOSE: Final = (b"connection", b"close")
"""The header of an answer after which the server closes the connection."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was refused: a code for programs, and a sentence for people."""

    code: Code
    detail: str
    retry_after_ms: int | None = None
    errors: tuple[FieldError, ...] = ()
    limit: int | None = None
    active: int | None = None
    budget: BudgetFacts | None = None
    is_final: bool = False
    """Whether a retry cannot succeed for longer than any delay: it has no retry class."""
    remedy: str | None = None
    headers: Headers = ()
    workflow_id: str | None = None
    """For the receipt, if the path does not name the workflow. The caller is not told."""

    @property
    def status(self) -> int:
        """The HTTP status that goes with the code."""
        return STATUS[self.code]


class RequestRefused(Exception):
    """The request is refused. The endpoint sends ``refusal``."""

    def __init__(self, refusal: Refusal) -> None:
        """Carry the refusal to the endpoint."""
        super().__init__(refusal.detail)
        self.refusal = refusal


def invalid(faults: Iterable[Fault], detail: str, *, code: Code = Code.INVALID_REQUEST) -> Refusal:
    """The refusal of an invalid request, with each fault and its place."""
    errors = tuple(FieldError(each.path, each.message, each.line) for each in faults)
    return Refusal(code=code, detail=detail, errors=errors)


def invalid_member(path: str, message: str) -> Refusal:
    """The refusal of a request with one invalid member."""
    return invalid((Fault(path, message),), f"{path}: {message}" if path else message)


def not_found(what: str) -> Refusal:
    """The refusal for what does not exist or belongs to another tenant; it does not say which."""
    return Refusal(code=Code.NOT_FOUND, detail=f"there is no such {what}")


def overdrawn(over: TenantOverloaded) -> Refusal:
    """The refusal of a tenant that uses more processor time than its share."""
    return Refusal(
        code=Code.TENANT_OVERLOADED, detail=over.detail, retry_after_ms=over.retry_after_ms
    )


def upgrade_unfinished(what: str, unfinished: UpgradeUnfinished) -> Refusal:
    """The refusal of what an older replica would break."""
    detail = (
        f"{what} cannot be used before the upgrade is finished: an older replica would break it"
    )
    return Refusal(code=Code.UPGRADE_UNFINISHED, detail=detail, remedy=remedy(unfinished))


def unavailable_after_ms(sample: float) -> int:
    """When to retry after a 503 without a better estimate: jittered, from 1 to 3 s."""
    return _UNAVAILABLE_FROM_MS + int(sample * _UNAVAILABLE_SPREAD_MS)


def retry_after_s(retry_after_ms: int) -> int:
    """The whole seconds of ``Retry-After``, rounded up."""
    return -(-retry_after_ms // 1000)


def problem_of(refusal: Refusal, request_id: str) -> Problem:
    """The problem that tells a caller of the refusal."""
    status, budget = refusal.status, refusal.budget
    unset = msgspec.UNSET
    return Problem(
        status=status,
        code=refusal.code,
        title=_TITLE[status],
        detail=refusal.detail,
        retry_class=None if refusal.is_final else _RETRY_CLASS.get(status),
        retry_after_ms=refusal.retry_after_ms,
        request_id=request_id,
        errors=refusal.errors or unset,
        limit=unset if refusal.limit is None else refusal.limit,
        active=unset if refusal.active is None else refusal.active,
        budget=unset if budget is None else budget.budget,
        used=unset if budget is None else budget.used,
        reserved=unset if budget is None else budget.reserved,
        resets_at=unset if budget is None else budget.resets_at,
        remedy=unset if refusal.remedy is None else refusal.remedy,
    )


def answer_parts(refusal: Refusal, request_id: str) -> tuple[int, bytes, list[tuple[bytes, bytes]]]:
    """Status, body and headers of the answer."""
    headers = [(b"content-type", _CONTENT_TYPE), *refusal.headers]
    if refusal.retry_after_ms is not None:
        headers.append((b"retry-after", str(retry_after_s(refusal.retry_after_ms)).encode()))
    return refusal.status, _encode(problem_of(refusal, request_id)), headers


_CONTENT_TYPE: Final = PROBLEM_TYPE.encode()
_encode: Final = msgspec.json.Encoder().encode
