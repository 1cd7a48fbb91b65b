"""The worker protocol: lease, renew, results."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from stanchion.core.json_value import JsonValue
from stanchion.wire.identifiers import (
    ErrorCode,
    Fence,
    JobName,
    Limit,
    TopicName,
    WaitS,
    WorkerName,
)

__all__ = [
    "JobError",
    "JobResult",
    "LeaseAnswer",
    "LeaseRef",
    "LeaseRequest",
    "LeasedJob",
    "RejectedResult",
    "RenewAnswer",
    "RenewRequest",
    "ResultsAnswer",
    "ResultsRequest",
]


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class LeaseRequest(_Request, frozen=True, kw_only=True):
    """Ask for work, and wait for it if there is none."""

    worker_id: WorkerName
    topics: Annotated[tuple[TopicName, ...], Meta(min_length=1, max_length=1000)]
    max_jobs: Limit = 1
    wait_s: WaitS = 0


class LeasedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job handed to a worker for a while."""

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
    """How often this attempt has been handed out, this time included."""


class LeaseAnswer(msgspec.Struct, frozen=True):
    """Work, or none within the time."""

    jobs: tuple[LeasedJob, ...]
    waited_ms: int = 0
    """How long the server waited before it asked for these jobs.

    A term begins no earlier than ``sent_at + waited_ms`` on the worker's clock: that is where a
    worker counts it from.
    """


class LeaseRef(_Request, frozen=True, kw_only=True, omit_defaults=True):
    """Names a lease."""

    job_id: JobName
    fence: Fence
    progress: JsonValue = None
    """How far the work is, if the handler reported it: 4 KiB at most. Shown while it is leased."""


class RenewRequest(_Request, frozen=True, kw_only=True, omit_defaults=True):
    """Go on with these."""

    worker_id: WorkerName
    leases: Annotated[tuple[LeaseRef, ...], Meta(max_length=1000)]
    wait_s: WaitS = 0
    """Renew, and hold the answer back until one of the leases is lost; a third of the term at most.

    The term counts from when the request was sent, whenever the answer comes.
    """


class RenewAnswer(msgspec.Struct, frozen=True):
    """Which go on, and which are lost."""

    renewed: tuple[str, ...]
    lost: tuple[str, ...]
    reasons: dict[
        str, Literal["cancelled", "timed_out", "stale_fence", "expired", "unknown_job"]
    ] = {}
    """Why each of the lost ones is lost, by job id."""


class JobError(_Request, frozen=True, kw_only=True):
    """Why a job failed."""

    message: str
    """What is longer than a message may be is cut."""
    code: ErrorCode = "job_failed"
    retryable: bool = True
    """``False``: another attempt would not mend it."""


class JobResult(_Request, frozen=True, kw_only=True):
    """What became of one job."""

    job_id: JobName
    fence: Fence
    status: Literal["succeeded", "failed"]
    output: JsonValue = None
    error: JobError | str | None = None


class ResultsRequest(_Request, frozen=True, kw_only=True):
    """What became of several."""

    worker_id: WorkerName
    results: Annotated[tuple[JobResult, ...], Meta(max_length=1000)]


class RejectedResult(msgspec.Struct, frozen=True):
    """A result that was not taken."""

    job_id: str
    code: Literal["stale_fence", "unknown_job", "already_finished"]


class ResultsAnswer(msgspec.Struct, frozen=True):
    """Which results are durable, and which were not taken."""

    accepted: tuple[str, ...]
    rejected: tuple[RejectedResult, ...]
