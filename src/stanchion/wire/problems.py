"""Problems: the answer to a refused request (RFC 9457)."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

import msgspec

from stanchion.core.retry import RetryClass

PROBLEM_TYPE = "application/problem+json"


class Code(StrEnum):
    """Every ``code`` of a problem. Programs should branch on these, never on texts."""

    MALFORMED_JSON = "malformed_json"
    INVALID_REQUEST = "invalid_request"
    INVALID_WORKFLOW = "invalid_workflow"
    INVALID_INPUT = "invalid_input"
    IDEMPOTENCY_MISMATCH = "idempotency_mismatch"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    CONFLICT = "conflict"
    UPGRADE_UNFINISHED = "upgrade_unfinished"
    BODY_TOO_LARGE = "body_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    HEADERS_TOO_LARGE = "headers_too_large"
    URI_TOO_LONG = "uri_too_long"
    MALFORMED_REQUEST = "malformed_request"
    REQUEST_TIMEOUT = "request_timeout"
    MAX_CONCURRENT_RUNS_REACHED = "max_concurrent_runs_reached"
    BUDGET_EXHAUSTED = "budget_exhausted"
    QUEUE_FULL = "queue_full"
    JOB_THROTTLED = "job_throttled"
    TENANT_OVERLOADED = "tenant_overloaded"
    GATE_UNAVAILABLE = "gate_unavailable"
    GATE_BUSY = "gate_busy"
    LIMIT_CHECK_FAILED = "limit_check_failed"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    STORE_UNAVAILABLE = "store_unavailable"
    LOCKS_UNAVAILABLE = "locks_unavailable"
    INTERNAL = "internal"
    NOT_IMPLEMENTED = "not_implemented"


class FieldError(msgspec.Struct, frozen=True, omit_defaults=True):
    """One fault of a request, and its place."""

    path: str
    message: str
    line: int | None = None


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was refused, and whether and when to retry."""

    status: int
    code: str
    title: str
    detail: str
    type: str = "about:blank"
    retry_class: RetryClass | None = None
    retry_after_ms: int | None = None
    request_id: str = ""
    errors: tuple[FieldError, ...] | msgspec.UnsetType = msgspec.UNSET
    limit: int | msgspec.UnsetType = msgspec.UNSET
    active: int | msgspec.UnsetType = msgspec.UNSET
    budget: str | msgspec.UnsetType = msgspec.UNSET
    """The budget that has too little left."""
    used: int | msgspec.UnsetType = msgspec.UNSET
    reserved: int | msgspec.UnsetType = msgspec.UNSET
    """What unfinished runs have reserved and not used."""
    resets_at: datetime | msgspec.UnsetType | None = msgspec.UNSET
    """When the window of the budget ends; ``null`` if never."""
    remedy: str | msgspec.UnsetType = msgspec.UNSET
    """What an operator does about it."""
