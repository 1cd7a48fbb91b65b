"""Worker routes: lease jobs, renew leases, send results, and count ready jobs by topic.

A worker with a key for one tenant gets that tenant's jobs only. Calls about another tenant's job
are answered as if there were no such job.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final, Literal, TypeAlias, TypeVar, assert_never

import msgspec

from stanchion import telemetry
from stanchion.core.limits import ERROR_MESSAGE_CHARS_MAX, PROGRESS_BYTES_MAX, RESULT_BYTES_MAX
from stanchion.core.model import Failure, JobId, Topic
from stanchion.gateway.body import check_value, fault_among
from stanchion.gateway.problems import RequestRefused, invalid_member
from stanchion.gateway.route import (
    OPERATORS,
    WORKERS,
    Call,
    NoBody,
    NoQuery,
    Reply,
    RouteScope,
    RouteTable,
)
from stanchion.gateway.views import leased_job
from stanchion.ports.records import Accepted, JobLease, LostReason, Result, ResultRefused
from stanchion.wire.problems import Code
from stanchion.wire.runs import JobList
from stanchion.wire.worker import (
    JobError,
    JobResult,
    LeaseAnswer,
    LeaseRequest,
    RejectedResult,
    RenewAnswer,
    RenewRequest,
    ResultsAnswer,
    ResultsRequest,
)

ROUTES: Final = RouteTable()

_Value = TypeVar("_Value")
_Reason: TypeAlias = Literal["cancelled", "timed_out", "stale_fence", "expired", "unknown_job"]


@ROUTES.add(
    "POST /v1/worker/lease",
    WORKERS,
    RouteScope.ONE_OR_ALL,
    LeaseAnswer,
    names_all=False,
    codes=(Code.DRAINING,),
    waits=lambda call: call.body.wait_s,
    admits=True,
)
async def lease_jobs(call: Call[LeaseRequest, NoQuery]) -> Reply:
    """Lease jobs of these topics; if none is ready, wait for the first."""
    scheduler = call.services.scheduler
    asked = call.body
    handed = await scheduler.lease(
        asked.worker_id,
        tuple(map(Topic, dict.fromkeys(asked.topics))),
        max_jobs=asked.max_jobs,
        wait_s=asked.wait_s,
        tenant=call.only,
        version=_sdk_version(call.headers),
    )
    jobs = tuple(leased_job(each, scheduler.ttl_ms) for each in handed.jobs)
    return Reply(LeaseAnswer(jobs, handed.waited_ms))


def _sdk_version(headers: Mapping[bytes, bytes]) -> str | None:
    """The version of the worker's SDK, from a header like ``User-Agent: stanchion/1.2``."""
    found = _AGENT.fullmatch(headers.get(b"user-agent", b""))
    return None if found is None else found[1].decode("ascii")


_AGENT: Final = re.compile(rb"stanchion/([0-9A-Za-z.+!-]{1,40})")


@ROUTES.add("GET /v1/worker/topics", WORKERS | OPERATORS, RouteScope.DEPLOYMENT, JobList)
async def ready_topics(call: Call[NoBody, NoQuery]) -> Reply:
    """How many jobs of all tenants wait for a worker, by topic."""
    ready = await call.services.store.ready_topics()
    return Reply(JobList({str(topic): ready[topic] for topic in sorted(ready)}))


@ROUTES.add(
    "POST /v1/worker/renew",
    WORKERS,
    RouteScope.ONE_OR_ALL,
    RenewAnswer,
    names_all=False,
    waits=lambda call: call.body.wait_s,
)
async def renew_leases(call: Call[RenewRequest, NoQuery]) -> Reply:
    """Extend leases, report progress, and find or wait for lost leases."""
    scheduler, clock = call.services.scheduler, call.services.clock
    began = clock.moment()
    leases = [
        JobLease(JobId(each.job_id), each.fence, each.progress, each.usage)
        for each in call.body.leases
    ]
    for place, lease in enumerate(leases):
        if lease.progress is not None:
            path = f"leases[{place}].progress"
            check_value(call, path, lease.progress, bytes_max=PROGRESS_BYTES_MAX)
    renewed: list[JobId] = []
    reasons: dict[JobId, LostReason] = {}
    lost: list[JobId] = []
    async for some in _in_parts(leases):
        renewals = await scheduler.renew(call.body.worker_id, some, tenant=call.only)
        renewed += renewals.renewed
        if renewals.lost:
            lost += renewals.lost
            reasons |= await scheduler.lost(some, tenant=call.only)
    wait_ms = min(call.body.wait_s * 1000, scheduler.ttl_ms / 3) - (clock.moment() - began)
    if renewed and not lost and wait_ms > 0:
        reasons = await scheduler.revoked(
            call.body.worker_id, leases, within_s=wait_ms / 1000, tenant=call.only
        )
        lost = list(reasons)
        renewed = [job_id for job_id in renewed if job_id not in reasons]
    return Reply(
        RenewAnswer(
            tuple(renewed),
            tuple(lost),
            {job_id: _REASONS[reasons[job_id]] for job_id in lost if job_id in reasons},
        )
    )


_REASONS: Final[Mapping[LostReason, _Reason]] = {
    LostReason.CANCELLED: "cancelled",
    LostReason.TIMED_OUT: "timed_out",
    LostReason.STALE_FENCE: "stale_fence",
    # The result was accepted and ended the lease, so its fence is stale.
    LostReason.FINISHED: "stale_fence",
    LostReason.EXPIRED: "expired",
    LostReason.UNKNOWN_JOB: "unknown_job",
}


@ROUTES.add(
    "POST /v1/worker/results", WORKERS, RouteScope.ONE_OR_ALL, ResultsAnswer, names_all=False
)
async def take_results(call: Call[ResultsRequest, NoQuery]) -> Reply:
    """Send results. An accepted result is durable; a repeated one changes nothing."""
    began_ns = 0 if telemetry.tracing is None else telemetry.now_ns()
    given = call.body.results
    # All outputs of a batch together: one by one, these checks take longer than the decoding.
    is_walked = not (call.is_suspect and fault_among([each.output for each in given], "results"))
    results = [_result(call, place, each, is_walked=is_walked) for place, each in enumerate(given)]
    accepted: list[str] = []
    rejected: list[RejectedResult] = []
    contrary = _contrary(results) if len({each.job_id for each in results}) < len(results) else {}
    sent = results
    if contrary:
        sent = [each for place, each in enumerate(results) if place not in contrary]
    async for some in _in_parts(sent):
        for answer in await call.services.inbox.results(some, tenant=call.only):
            match answer:
                case Accepted():
                    accepted.append(answer.job_id)
                case ResultRefused():
                    rejected.append(RejectedResult(answer.job_id, answer.code.value))
                case _:
                    assert_never(answer)
    if contrary:
        codes = {each.job_id: each.code for each in rejected}
        codes.update(dict.fromkeys(accepted, "already_finished"))
        rejected.extend(RejectedResult(job_id, codes[job_id]) for job_id in contrary.values())
    if telemetry.tracing is not None:
        _trace_results(telemetry.tracing, call.body, began_ns, frozenset(accepted))
    ended = [JobLease(each.job_id, each.fence) for each in results]
    await call.services.scheduler.finished(call.body.worker_id, ended, tenant=call.only)
    return Reply(ResultsAnswer(tuple(accepted), tuple(rejected)))


def _contrary(results: Sequence[Result]) -> dict[int, JobId]:
    """The jobs of results that contradict an earlier one for the same job and fence, by place.

    The store takes any second result for an accepted one that was sent again.
    """
    first: dict[tuple[JobId, int], bytes] = {}
    found: dict[int, JobId] = {}
    for place, each in enumerate(results):
        said = msgspec.json.encode(each, order="sorted")
        if first.setdefault((each.job_id, each.fence), said) != said:
            found[place] = each.job_id
    return found


def _trace_results(
    tracing: telemetry.Tracing, sent: ResultsRequest, began_ns: int, accepted: frozenset[str]
) -> None:
    """Make a span for each result of a traced job, below its handler's."""
    for each in sent.results:
        parent = telemetry.checked(each.traceparent.encode()) if each.traceparent else None
        if parent is not None:
            attributes = {
                telemetry.JOB: each.job_id,
                telemetry.WORKER: sent.worker_id,
                telemetry.OUTCOME: "accepted" if each.job_id in accepted else "rejected",
            }
            tracing.record("result", attributes, parent=parent, kind="server", since_ns=began_ns)


_PART: Final = 200


async def _in_parts(values: Sequence[_Value]) -> AsyncIterator[Sequence[_Value]]:
    """Give a large batch to the store in parts, so that other calls get a turn between them."""
    for at in range(0, len(values), _PART):
        if at:
            await asyncio.sleep(0)  # the store may answer without yielding to the event loop
        yield values[at : at + _PART]


def _result(
    call: Call[ResultsRequest, NoQuery], place: int, given: JobResult, *, is_walked: bool
) -> Result:
    path = f"results[{place}]"
    job_id, worker_id = JobId(given.job_id), call.body.worker_id
    if given.status == "succeeded":
        if given.error is not None:
            raise RequestRefused(
                invalid_member(f"{path}.error", "a job that succeeded has no error")
            )
        check_value(
            call,
            f"{path}.output",
            given.output,
            bytes_max=RESULT_BYTES_MAX,
            is_walked=is_walked,
        )
        return Result(
            job_id=job_id,
            fence=given.fence,
            worker_id=worker_id,
            output=given.output,
            usage=given.usage,
        )
    error = given.error if isinstance(given.error, JobError) else _error(given.error)
    failure = Failure(error.code, _cut(error.message))
    return Result(
        job_id=job_id,
        fence=given.fence,
        worker_id=worker_id,
        error=failure,
        final=not error.retryable,
        usage=given.usage,
    )


def _error(message: str | None) -> JobError:
    return JobError(message="the worker gave no reason" if message is None else message)


def _cut(message: str) -> str:
    # Truncated, not refused: otherwise the worker could not report, and the job would run again.
    if len(message) <= ERROR_MESSAGE_CHARS_MAX:
        return message
    return f"{message[: ERROR_MESSAGE_CHARS_MAX - 1]}…"
