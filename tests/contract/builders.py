"""Builders: runs as the core decides them, so that cases speak of stores and not of records."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from stanchion.core.admission import Admitted, fingerprint
from stanchion.core.events import CancelRequested, Event, Started
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.model import (
    Instant,
    Job,
    Risk,
    Run,
    RunId,
    Stamp,
    StepId,
    TenantId,
    Topic,
    WorkflowId,
    make_run_id,
)
from stanchion.core.plan import Plan, link
from stanchion.core.queue import QueueRequest
from stanchion.core.run import decide_all, evolve, items_to_read
from stanchion.core.transition import DispatchJob, TimelineEntry, Transition
from stanchion.core.workflow import (
    ApprovalSpec,
    DelaySpec,
    ForEachSpec,
    JobSpec,
    RetrySpec,
    StepSpec,
    Workflow,
)
from stanchion.ports.records import (
    Acceptance,
    Admission,
    Commit,
    CommitAnswer,
    Committed,
    JobLease,
    LeasedJob,
    Loaded,
    Result,
)
from stanchion.ports.store import Store
from tests.contract.harness import LONG_MS

__all__ = [
    "ACME",
    "APPROVAL",
    "BOUNDED",
    "DELAY",
    "FOR_EACH",
    "GLOBEX",
    "ONE_JOB",
    "SIDE_BY_SIDE",
    "STRANGE_VALUES",
    "TOPIC",
    "TWO_JOBS",
    "WITHIN_MS",
    "WORKER",
    "accept",
    "admission",
    "advance",
    "assert_same",
    "cancel",
    "commit_of",
    "finish",
    "held",
    "job_of",
    "jobs_of",
    "lease",
    "lease_one",
    "loaded",
    "nonce",
    "nothing",
    "planned",
    "result_of",
    "same_ids",
    "start",
    "workflow",
]

ACME: Final = TenantId("acme")
GLOBEX: Final = TenantId("globex")
TOPIC: Final = Topic("work")
WITHIN_MS: Final = 30_000
WORKER: Final = "worker-1"

_chance = random.Random(7)


def workflow(name: str, **steps: StepSpec) -> Workflow:
    return Workflow(id=WorkflowId(name), steps={StepId(each): steps[each] for each in steps})


def planned(definition: Workflow, others: Mapping[WorkflowId, Workflow] | None = None) -> Plan:
    plan = link(definition, others or {})
    assert isinstance(plan, Plan), plan
    return plan


def _job(topic: str = TOPIC, *needs: str, attempts: int = 1) -> JobSpec:
    return JobSpec(
        topic=Topic(topic),
        needs=tuple(map(StepId, needs)),
        retry=RetrySpec(max_attempts=attempts),
        input={"said": "${input.say}"},
    )


ONE_JOB: Final = planned(workflow("one-job", step=_job()))
TWO_JOBS: Final = planned(workflow("two-jobs", first=_job(), second=_job(TOPIC, "first")))
SIDE_BY_SIDE: Final = planned(workflow("side-by-side", left=_job("left"), right=_job("right")))
BOUNDED: Final = planned(
    replace(
        workflow("bounded", left=_job("left"), right=replace(_job("right"), attempt_timeout_s=9)),
        timeout_s=60,
        max_deliveries=4,
    )
)
"""Two jobs at the start, and time limits."""
DELAY: Final = planned(workflow("delay", pause=DelaySpec(delay_s=0.1)))
APPROVAL: Final = planned(workflow("approval", review=ApprovalSpec()))
FOR_EACH: Final = planned(
    workflow("for-each", each=ForEachSpec(for_each="${input.items}", topic=TOPIC, input="${item}"))
)


STRANGE_VALUES: Final[tuple[JsonValue, ...]] = (
    None,
    True,
    0,
    1.0,
    -0.5e-300,
    2**53 + 1,
    -(2**63),
    2**63 - 1,
    "",
    'Grüße \u0000 \u2028 \U0001f600 "\\\n',
    [],
    {},
    [[], {}, [None], None],
    {"": {"a": [1, None, 2.5, "x"], "1": {}, "ü.$[]": False}},
    "x" * 250_000,
)
"""What a store that takes values apart would bring back otherwise."""


def assert_same(found: JsonValue, expected: JsonValue) -> None:
    """Equal, and of the same kinds: to Python ``1 == 1.0 == True``."""
    assert repr(found) == repr(expected)


def same_ids(seed: int) -> None:
    """Make the ids and nonces that follow those of this seed."""
    _chance.seed(seed)


def nonce() -> str:
    return f"{_chance.getrandbits(64):016x}"


def admission(  # noqa: PLR0913 - each case varies one of them
    now: Instant,
    plan: Plan = ONE_JOB,
    *,
    tenant: TenantId = ACME,
    run_input: JsonObject | None = None,
    key: str | None = None,
    definitions: Mapping[WorkflowId, int] | None = None,
    holds_slot: bool = True,
    is_rate_limited: bool = False,
    created_at: Instant | None = None,
    labels: Mapping[str, str] | None = None,
    rerun_of: RunId | None = None,
    risk: Risk = Risk.STANDARD,
    traceparent: str | None = None,
    queue: QueueRequest | None = None,
) -> Admission:
    """A run of the plan that wants to begin, decided on at ``now``."""
    given: JsonObject = {"say": "hello"} if run_input is None else run_input
    pending = Run(
        id=make_run_id(tenant, now, _chance.getrandbits(60)),
        tenant=tenant,
        workflow_id=plan.workflow_id,
        workflow_version=1,
        input=given,
        created_at=now if created_at is None else created_at,
        holds_slot=holds_slot,
        starter="caller",
        labels=dict(labels or {}),
        rerun_of=rerun_of,
        risk=risk,
        traceparent=traceparent,
    )
    transition = decide_all(plan, pending, (Started(actor="caller"),), now)
    stamp = Stamp(1, nonce())
    return Admission(
        run=replace(evolve(pending, transition), stamp=stamp),
        before=None if queue is None else replace(pending, stamp=stamp),
        queue=queue or QueueRequest(),
        transition=transition,
        key=key,
        fingerprint=fingerprint(plan.workflow_id, given),
        definitions=dict(definitions or {}),
        is_rate_limited=is_rate_limited,
    )


async def start(
    store: Store,
    plan: Plan = ONE_JOB,
    *,
    tenant: TenantId = ACME,
    run_input: JsonObject | None = None,
    key: str | None = None,
    created_at: Instant | None = None,
) -> RunId:
    """Begin a run that nothing stands in the way of."""
    wanted = admission(
        await store.now(), plan, tenant=tenant, run_input=run_input, key=key, created_at=created_at
    )
    verdict = await store.admit(wanted, within_ms=WITHIN_MS)
    assert verdict == Admitted(wanted.run.id)
    return wanted.run.id


async def loaded(store: Store, run_id: RunId) -> Loaded:
    """The run, which is there."""
    found = await store.load(run_id)
    assert found is not None
    return found


def commit_of(
    found: Loaded,
    transition: Transition,
    *,
    fence: int | None = None,
    applied: Sequence[str] = (),
    chosen: str | None = None,
) -> Commit:
    """A commit by a writer that read the run as ``found``."""
    return Commit(
        run_id=found.run.id,
        transition=transition,
        read=found.run.stamp,
        nonce=nonce() if chosen is None else chosen,
        fence=fence,
        applied=tuple(applied),
    )


def nothing(found: Loaded, *, say: str | None = None) -> Transition:
    """A transition that leaves the run as it is, with a line for its timeline if one is given."""
    lines = () if say is None else (TimelineEntry(found.run.created_at, say, "test"),)
    return Transition(
        status=found.run.status,
        output=found.run.output,
        error=found.run.error,
        finished_at=found.run.finished_at,
        timeline=lines,
    )


async def advance(
    store: Store, plan: Plan, run_id: RunId, *also: Event, fence: int | None = None
) -> CommitAnswer:
    """Decide on all that is in the run's inbox (and more, if given), and commit it."""
    found = await loaded(store, run_id)
    events = [*(entry.event for entry in found.inbox), *also]
    items = await store.load_items(run_id, items_to_read(plan, found.run, events))
    transition = decide_all(plan, replace(found.run, items=items), events, await store.now())
    applied = [entry.id for entry in found.inbox]
    return await store.commit(commit_of(found, transition, fence=fence, applied=applied))


async def cancel(store: Store, run_id: RunId, plan: Plan = ONE_JOB) -> None:
    """End the run now."""
    answer = await advance(store, plan, run_id, CancelRequested(actor="test"))
    assert isinstance(answer, Committed)


async def lease(
    store: Store,
    *topics: str,
    max_jobs: int = 1,
    ttl_ms: int = LONG_MS,
    worker_id: str = WORKER,
    tenant: TenantId | None = None,
) -> tuple[LeasedJob, ...]:
    """Lease jobs of the topics, of the usual one if none is given."""
    wanted = [Topic(topic) for topic in topics] or [TOPIC]
    return await store.lease_jobs(
        worker_id, wanted, max_jobs=max_jobs, ttl_ms=ttl_ms, tenant=tenant
    )


async def lease_one(store: Store, *topics: str, ttl_ms: int = LONG_MS) -> LeasedJob:
    """Lease a job that is there."""
    (leased,) = await lease(store, *topics, ttl_ms=ttl_ms)
    return leased


def held(leased: LeasedJob) -> JobLease:
    """What the worker holds."""
    return JobLease(leased.job.id, leased.fence)


def result_of(leased: LeasedJob, output: JsonValue = "done") -> Result:
    """A good result, under the lease's fence."""
    return Result(job_id=leased.job.id, fence=leased.fence, worker_id=WORKER, output=output)


async def accept(store: Store, leased: LeasedJob, output: JsonValue = "done") -> Acceptance:
    """Hand in a good result."""
    (answer,) = await store.accept([result_of(leased, output)])
    return answer


async def finish(
    store: Store, plan: Plan, run_id: RunId, *, tenant: TenantId | None = None
) -> None:
    """Do every job of the run, one after the other, until it has ended."""
    while not (await loaded(store, run_id)).run.status.is_finished:
        (job,) = await lease(store, tenant=tenant)
        assert job.job.run_id == run_id
        await accept(store, job)
        await advance(store, plan, run_id)


def job_of(admitted: Admission) -> Job:
    """The one job that the admission sends out."""
    (job,) = jobs_of(admitted)
    return job


def jobs_of(admitted: Admission) -> list[Job]:
    """The jobs that the admission sends out."""
    return [effect.job for effect in admitted.transition.effects if isinstance(effect, DispatchJob)]
