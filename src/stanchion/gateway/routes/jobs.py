"""Job routes: submit a job without a workflow, get a job."""

from __future__ import annotations

from typing import Final, assert_never

from stanchion.core.limits import INPUT_BYTES_MAX
from stanchion.core.model import Item, ItemKey, Job, JobId, Run, Step, Topic, for_each_of, job_id
from stanchion.gateway.body import check_value
from stanchion.gateway.problems import Refusal, not_found
from stanchion.gateway.route import RUNNERS, Call, NoBody, NoQuery, Reply, RouteScope, RouteTable
from stanchion.gateway.views import job_answer, refusal_of, started
from stanchion.ports.store import Runs
from stanchion.services.gate_answers import GateFailed, JobThrottled, KeyMismatch, RunStarted
from stanchion.services.plans import JOB_STEP
from stanchion.wire.problems import Code
from stanchion.wire.runs import JobAnswer, SubmitAnswer, SubmitJob

ROUTES: Final = RouteTable()


@ROUTES.add(
    "POST /v1/jobs",
    RUNNERS,
    RouteScope.TENANT,
    SubmitAnswer,
    codes=(
        Code.IDEMPOTENCY_MISMATCH,
        Code.JOB_THROTTLED,
        Code.GATE_UNAVAILABLE,
        Code.GATE_BUSY,
        Code.LIMIT_CHECK_FAILED,
        Code.DRAINING,
    ),
    takes_key=True,
    admits=True,
)
async def submit_job(call: Call[SubmitJob, NoQuery]) -> Reply | Refusal:
    """Submit one job without a workflow. It takes no slot and is limited by rate."""
    check_value(call, "input", call.body.input, bytes_max=INPUT_BYTES_MAX)
    answer = await call.services.gate.submit(
        call.tenant,
        Topic(call.body.topic),
        call.body.input,
        key=call.idempotency_key,
        actor=call.actor,
        traceparent=call.traceparent,
    )
    match answer:
        case RunStarted():
            name = job_id(answer.run_id, JOB_STEP, None, 1)
            return started(answer, SubmitAnswer(name, answer.run_id, answer.status))
        case KeyMismatch() | JobThrottled() | GateFailed():
            return refusal_of(answer)
        case _:
            assert_never(answer)


@ROUTES.add("GET /v1/jobs/{job_id}", RUNNERS, RouteScope.TENANT, JobAnswer, codes=(Code.NOT_FOUND,))
async def get_job(call: Call[NoBody, NoQuery]) -> Reply | Refusal:
    """One job, of a workflow's step or submitted alone."""
    store = call.services.store
    view = await store.job(JobId(call.params["job_id"]))
    if view is None or view.job.tenant != call.tenant:
        return not_found("job")
    loaded = await store.load(view.job.run_id)
    if loaded is None:
        return not_found("job")
    place = await _place(store, loaded.run, view.job)
    return Reply(job_answer(view, loaded.run, place, now=await store.now()))


async def _place(runs: Runs, run: Run, job: Job) -> Step | Item:
    if job.item is None:
        return run.step(job.step_id)
    for_each = for_each_of(run, job.step_id)
    items = await runs.load_items(run.id, {for_each: (job.item,)})
    item = items.get(ItemKey(for_each, job.item), Item())
    return item if for_each == job.step_id else item.steps.get(job.step_id, Step())
