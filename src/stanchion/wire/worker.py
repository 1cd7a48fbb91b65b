"""Wire types of the worker protocol: lease, renew, results."""

from __future__ import annotations

import sys
from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import force_setattr

from stanchion.core.json_value import JsonValue
from stanchion.wire.identifiers import (
    ErrorCode,
    Fence,
    JobName,
    Limit,
    TopicName,
    Usage,
    WaitS,
    WorkerName,
)


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


_CAN_SHARE: Final = sys.version_info[:2] != (3, 12)
"""The first versions of Python 3.12 never free an interned text."""


class LeaseRequest(_Request, frozen=True, kw_only=True):
    """Lease jobs; wait up to ``wait_s`` if none is ready."""

    worker_id: WorkerName
    topics: Annotated[tuple[TopicName, ...], Meta(min_length=1, max_length=1000)]
    max_jobs: Limit = 1
    wait_s: WaitS = 0

    def __post_init__(self) -> None:
        if self.wait_s and _CAN_SHARE:
            # Hundreds of workers wait for the same topics: they share the texts.
            force_setattr(self, "topics", tuple(map(sys.intern, self.topics)))


class LeasedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job leased to a worker."""

    job_id: str
    tenant: str
    run_id: str
    step_id: str
    topic: str
    attempt: int
    input: JsonValue
    fence: int
    lease_ttl_ms: int
    item: int | None = None
    delivery: int = 1
    """How often this attempt has been delivered, including this time."""
    traceparent: str | UnsetType = UNSET
    """The W3C context for the handler's spans; absent if the run is not traced."""


class LeaseAnswer(msgspec.Struct, frozen=True):
    """The leased jobs; none if no job was ready in time."""

    jobs: tuple[LeasedJob, ...]
    waited_ms: int = 0
    """How long the server waited before it leased these jobs.

    The term of the leases begins no earlier than ``sent_at + waited_ms`` on the worker's clock, so
    a worker counts it from there.
    """


class LeaseRef(_Request, frozen=True, kw_only=True, omit_defaults=True):
    """A lease, with the progress of its job."""

    job_id: JobName
    fence: Fence
    progress: JsonValue = None
    """The handler's last progress report, at most 4 KiB. Shown while the job is leased."""
    usage: Usage = {}


class RenewRequest(_Request, frozen=True, kw_only=True, omit_defaults=True):
    """Renew leases, and optionally wait until one is lost."""

    worker_id: WorkerName
    leases: Annotated[tuple[LeaseRef, ...], Meta(max_length=1000)]
    wait_s: WaitS = 0
    """Renew, then wait until one of the leases is lost, for at most a third of the term.

    The new term begins when the request was sent, not when the answer arrives.
    """


class RenewAnswer(msgspec.Struct, frozen=True):
    """The leases that were renewed, and those that are lost."""

    renewed: tuple[str, ...]
    lost: tuple[str, ...]
    reasons: dict[
        str, Literal["cancelled", "timed_out", "stale_fence", "expired", "unknown_job"]
    ] = {}
    """Why each lost lease was lost, by job id."""


class JobError(_Request, frozen=True, kw_only=True):
    """Why a job failed."""

    message: str
    """Truncated if it is too long."""
    code: ErrorCode = "job_failed"
    retryable: bool = True
    """``False``: another attempt would fail as well."""


class JobResult(_Request, frozen=True, kw_only=True):
    """The result of one job."""

    job_id: JobName
    fence: Fence
    status: Literal["succeeded", "failed"]
    output: JsonValue = None
    error: JobError | str | None = None
    usage: Usage = {}
    traceparent: Annotated[str, Meta(max_length=100)] | UnsetType = UNSET
    """The W3C context of the handler's span, if the job had one."""


class ResultsRequest(_Request, frozen=True, kw_only=True):
    """The results of several jobs."""

    worker_id: WorkerName
    results: Annotated[tuple[JobResult, ...], Meta(max_length=1000)]


class RejectedResult(msgspec.Struct, frozen=True):
    """A result that was not accepted."""

    job_id: str
    code: Literal["stale_fence", "unknown_job", "already_finished"]


class ResultsAnswer(msgspec.Struct, frozen=True):
    """The results that are durable, and those that were rejected."""

    accepted: tuple[str, ...]
    rejected: tuple[RejectedResult, ...]
