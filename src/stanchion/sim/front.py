"""The front of a replica: requests of callers and workers, answered by its services.

It stands where the HTTP gateway does, with the same paths, wire types, statuses and problems, and
without sockets. What the gateway adds (keys, quotas of connections, deadlines) is tested elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec

from stanchion.client.exchange import Reply
from stanchion.core.model import (
    Failure,
    JobId,
    RunId,
    RunStatus,
    StepId,
    TenantId,
    Topic,
    WorkflowId,
    job_id,
)
from stanchion.core.rerun import RerunRefused
from stanchion.gateway.gate_answers import refusal_of
from stanchion.gateway.problems import Refusal, answer_parts, not_found, unavailable_after_ms
from stanchion.gateway.views import leased_job, run_view
from stanchion.ports.errors import BackendError, sentence
from stanchion.ports.records import Accepted, JobLease, Result
from stanchion.services.gate_answers import (
    GateFailed,
    JobThrottled,
    KeyMismatch,
    Started,
    TenantFull,
)
from stanchion.services.inbox import Changed, Conflicting, Unknown
from stanchion.services.plans import JOB_STEP
from stanchion.services.services import Services
from stanchion.wire.problems import Code
from stanchion.wire.runs import Change, RerunRun, StartAnswer, StartRun, SubmitAnswer, SubmitJob
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

__all__ = ["Front"]

_ENCODE: Final = msgspec.json.Encoder().encode
_ACTOR: Final = "caller"
_Body = TypeVar("_Body")


class Front:
    """Answers requests with one replica's services."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def answer(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Reply:
        """Answer a request, as the gateway would."""
        path, _, query = path.partition("?")
        try:
            done = await self._route(method, path.strip("/").split("/"), query, headers, body)
        except BackendError as error:
            wait_ms = unavailable_after_ms(self._services.entropy.unit())
            done = Refusal(
                code=Code.STORE_UNAVAILABLE, detail=sentence(error), retry_after_ms=wait_ms
            )
        if not isinstance(done, Refusal):
            return done
        status, text, pairs = answer_parts(done, "")
        return Reply(status, {name.decode(): value.decode() for name, value in pairs}, text)

    async def _route(
        self, method: str, parts: list[str], query: str, headers: Mapping[str, str], body: bytes
    ) -> Reply | Refusal:
        tenant = TenantId(headers.get("X-Stanchion-Tenant", "default"))
        key = headers.get("Idempotency-Key")
        match method, parts:
            case "POST", ["v1", "workflows", workflow_id, "runs"]:
                return await self._start(tenant, WorkflowId(workflow_id), key, body)
            case "POST", ["v1", "jobs"]:
                return await self._submit(tenant, key, body)
            case "GET", ["v1", "runs", run_id]:
                return await self._get(tenant, RunId(run_id), query)
            case "POST", ["v1", "runs", run_id, "rerun"]:
                return await self._rerun(tenant, RunId(run_id), key, body)
            case "POST", ["v1", "runs", run_id, "cancel"]:
                inbox = self._services.inbox
                return _change(await inbox.cancel(RunId(run_id), reason=None, actor=_ACTOR))
            case "POST", ["v1", "runs", run_id, "steps", step_id, verb]:
                return _change(
                    await self._services.inbox.decide(
                        RunId(run_id),
                        StepId(step_id),
                        approve=verb == "approve",
                        comment=None,
                        actor=_ACTOR,
                    )
                )
            case "POST", ["v1", "worker", "lease"]:
                return await self._lease(_read(body, LeaseRequest))
            case "POST", ["v1", "worker", "renew"]:
                return await self._renew(_read(body, RenewRequest))
            case "POST", ["v1", "worker", "results"]:
                return await self._results(_read(body, ResultsRequest))
            case _:
                return not_found("route")

    # ── Runs ─────────────────────────────────────────────────────────────────────────────────────

    async def _start(
        self, tenant: TenantId, workflow_id: WorkflowId, key: str | None, body: bytes
    ) -> Reply | Refusal:
        asked = _read(body, StartRun)
        answer = await self._services.gate.start(
            tenant, workflow_id, asked.input, key=key, actor=_ACTOR
        )
        return _started(answer)

    async def _rerun(
        self, tenant: TenantId, run_id: RunId, key: str | None, body: bytes
    ) -> Reply | Refusal:
        asked = _read(body, RerunRun)
        from_step = None if asked.from_step is None else StepId(asked.from_step)
        answer = await self._services.gate.rerun(
            tenant, run_id, from_step=from_step, key=key, actor=_ACTOR
        )
        return _started(answer)

    async def _submit(self, tenant: TenantId, key: str | None, body: bytes) -> Reply | Refusal:
        asked = _read(body, SubmitJob)
        answer = await self._services.gate.submit(
            tenant, Topic(asked.topic), asked.input, key=key, actor=_ACTOR
        )
        return _started(answer, is_job=True)

    async def _get(self, tenant: TenantId, run_id: RunId, query: str) -> Reply | Refusal:
        wait_s = float(query.removeprefix("wait=") or 0)
        loaded = await self._services.watching.finished(run_id, within_s=wait_s)
        if loaded is None or loaded.run.tenant != tenant:
            return not_found("run")
        plan = await self._services.plans.of_run(loaded.run)
        return _reply(run_view(loaded.run, plan))

    # ── Workers ──────────────────────────────────────────────────────────────────────────────────

    async def _lease(self, asked: LeaseRequest) -> Reply:
        scheduler = self._services.scheduler
        handed = await scheduler.lease(
            asked.worker_id,
            tuple(map(Topic, asked.topics)),
            max_jobs=asked.max_jobs,
            wait_s=asked.wait_s,
        )
        jobs = tuple(leased_job(each, scheduler.ttl_ms) for each in handed.jobs)
        return _reply(LeaseAnswer(jobs, handed.waited_ms))

    async def _renew(self, asked: RenewRequest) -> Reply:
        leases = [JobLease(JobId(each.job_id), each.fence) for each in asked.leases]
        renewals = await self._services.scheduler.renew(leases)
        return _reply(RenewAnswer(renewals.renewed, renewals.lost))

    async def _results(self, asked: ResultsRequest) -> Reply:
        results = [_result(asked.worker_id, each) for each in asked.results]
        answers = await self._services.inbox.results(results)
        return _reply(
            ResultsAnswer(
                tuple(each.job_id for each in answers if isinstance(each, Accepted)),
                tuple(
                    RejectedResult(each.job_id, each.code.value)
                    for each in answers
                    if not isinstance(each, Accepted)
                ),
            )
        )


def _read(body: bytes, kind: type[_Body]) -> _Body:
    return msgspec.json.decode(body or b"{}", type=kind)


def _reply(value: object, status: int = 200, **headers: str) -> Reply:
    return Reply(status, headers, _ENCODE(value))


def _started(answer: object, *, is_job: bool = False) -> Reply | Refusal:
    match answer:
        case Started(run_id, status, replayed):
            headers = {"idempotency-replayed": "true"} if replayed else {}
            told = (
                SubmitAnswer(job_id(run_id, JOB_STEP, None, 1), run_id, status)
                if is_job
                else StartAnswer(run_id, status)
            )
            return Reply(200, headers, _ENCODE(told))
        case TenantFull() | KeyMismatch() | JobThrottled() | GateFailed():
            return refusal_of(answer)
        case RerunRefused():
            return Refusal(code=Code.CONFLICT, detail=answer.message)
        case _:
            return not_found("workflow")


def _change(changed: Changed | Unknown | Conflicting) -> Reply | Refusal:
    match changed:
        case Changed(run_id, status, applied):
            return _reply(Change(run_id, RunStatus(status), applied), 200 if applied else 202)
        case Unknown():
            return not_found("run")
        case Conflicting():
            return Refusal(code=Code.CONFLICT, detail=changed.message)


def _result(worker_id: str, given: JobResult) -> Result:
    job, fence = JobId(given.job_id), given.fence
    if given.status == "succeeded":
        return Result(job_id=job, fence=fence, worker_id=worker_id, output=given.output)
    assert isinstance(given.error, JobError)
    failure = Failure(given.error.code, given.error.message)
    return Result(
        job_id=job,
        fence=fence,
        worker_id=worker_id,
        error=failure,
        final=not given.error.retryable,
    )
