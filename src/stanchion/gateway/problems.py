"""Problems: why a request was not fulfilled, and the document that says so (RFC 9457).

A handler returns a ``Refusal`` or raises ``RequestRefused`` with one; nothing else becomes an error
answer. The status follows from the code, and so does the retry class: 429 is the caller's quota,
503 is ours. ``Retry-After`` is the ceiling of ``retry_after_ms`` in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Final, TypeAlias

import msgspec

from stanchion.core.faults import Fault
from stanchion.core.retry import RetryClass
from stanchion.services.work import TenantOverloaded
from stanchion.wire.problems import PROBLEM_TYPE, Code, FieldError, Problem

__all__ = [
    "GATE_UNAVAILABLE",
    "LIMIT_CHECK_FAILED",
    "STATUS",
    "TENANT_FULL",
    "Headers",
    "Refusal",
    "RequestRefused",
    "answer_parts",
    "invalid",
    "invalid_member",
    "not_found",
    "overdrawn",
    "retry_after_s",
    "unavailable_after_ms",
]

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
        Code.BODY_TOO_LARGE: 413,
        Code.URI_TOO_LONG: 414,
        Code.UNSUPPORTED_MEDIA_TYPE: 415,
        Code.INVALID_REQUEST: 422,
        Code.INVALID_WORKFLOW: 422,
        Code.INVALID_INPUT: 422,
        Code.IDEMPOTENCY_MISMATCH: 422,
        Code.MAX_CONCURRENT_RUNS_REACHED: 429,
        Code.JOB_THROTTLED: 429,
        Code.TENANT_OVERLOADED: 429,
        Code.HEADERS_TOO_LARGE: 431,
        Code.INTERNAL: 500,
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


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why not, in words for people and a code for programs."""

    code: Code
    detail: str
    retry_after_ms: int | None = None
    errors: tuple[FieldError, ...] = ()
    limit: int | None = None
    active: int | None = None
    headers: Headers = ()

    @property
    def status(self) -> int:
        """The HTTP status that goes with the code."""
        return STATUS[self.code]


class RequestRefused(Exception):
    """Raised where a request turns out not to be one that can be fulfilled."""

    def __init__(self, refusal: Refusal) -> None:
        """Carry the refusal to whoever answers."""
        super().__init__(refusal.detail)
        self.refusal = refusal


def invalid(faults: Iterable[Fault], detail: str, *, code: Code = Code.INVALID_REQUEST) -> Refusal:
    """The request says something that cannot be: each fault with its place."""
    errors = tuple(FieldError(each.path, each.message, each.line) for each in faults)
    return Refusal(code=code, detail=detail, errors=errors)


def invalid_member(path: str, message: str) -> Refusal:
    """One member of the request cannot be what it is."""
    return invalid((Fault(path, message),), f"{path}: {message}" if path else message)


def not_found(what: str) -> Refusal:
    """There is no such thing, or it is another tenant's: the answer does not tell which."""
    return Refusal(code=Code.NOT_FOUND, detail=f"there is no such {what}")


def overdrawn(over: TenantOverloaded) -> Refusal:
    """The tenant uses more of the server than its share."""
    return Refusal(
        code=Code.TENANT_OVERLOADED, detail=over.detail, retry_after_ms=over.retry_after_ms
    )


def unavailable_after_ms(sample: float) -> int:
    """When to ask again after a 503 that nobody measured. Spread, so that not all come at once."""
    return _UNAVAILABLE_FROM_MS + int(sample * _UNAVAILABLE_SPREAD_MS)


def retry_after_s(retry_after_ms: int) -> int:
    """The header's whole seconds: never sooner than the milliseconds say."""
    return -(-retry_after_ms // 1000)


def answer_parts(refusal: Refusal, request_id: str) -> tuple[int, bytes, list[tuple[bytes, bytes]]]:
    """Status, body and headers of the answer."""
    status = refusal.status
    unset = msgspec.UNSET
    problem = Problem(
        status=status,
        code=refusal.code,
        title=_TITLE[status],
        detail=refusal.detail,
        retry_class=_RETRY_CLASS.get(status),
        retry_after_ms=refusal.retry_after_ms,
        request_id=request_id,
        errors=refusal.errors or unset,
        limit=unset if refusal.limit is None else refusal.limit,
        active=unset if refusal.active is None else refusal.active,
    )
    headers = [(b"content-type", _CONTENT_TYPE), *refusal.headers]
    if refusal.retry_after_ms is not None:
        headers.append((b"retry-after", str(retry_after_s(refusal.retry_after_ms)).encode()))
    return status, _encode(problem), headers


_CONTENT_TYPE: Final = PROBLEM_TYPE.encode()
_encode: Final = msgspec.json.Encoder().encode
