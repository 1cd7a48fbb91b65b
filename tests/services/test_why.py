"""Why: what the services of a deployment say about a run, and when they begin to say it."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from stanchion.core.audit import AuditEntry
from stanchion.core.escalation import Order
from stanchion.core.json_value import JsonObject
from stanchion.core.lease import LeaseOverride, OnLockError
from stanchion.core.model import Failure, Instant, Risk, RunId, RunStatus, StepId, Topic, WorkflowId
from stanchion.core.queue import OnFull
from stanchion.core.topic_limits import TopicLimit
from stanchion.core.why import Finding, WhyCode
from stanchion.core.workflow import (
    ApprovalSpec,
    DelaySpec,
    ForEachSpec,
    JobSpec,
    RetrySpec,
    SubworkflowSpec,
)
from stanchion.ports.locks import operator_token
from stanchion.ports.records import Tenant
from stanchion.services.engine import Terms
from stanchion.services.why import Explanation
from stanchion.services.work import TenantOverloaded
from tests.services.faulty_locks import Fault
from tests.services.stage import ACME, GLOBEX, Replica, World, job, under_lease, virtual, workflow

ONE = workflow("one", step=job("work"))
HIGH = replace(workflow("high", step=job("work")), risk=Risk.HIGH)
RETRIED = workflow("retried", step=JobSpec(topic=Topic("work"), retry=RetrySpec(max_attempts=2)))
WHOLE = workflow(
    "whole",
    review=ApprovalSpec(message="Is it good?"),
    pause=DelaySpec(delay_s=30),
    inner=SubworkflowSpec(workflow=WorkflowId("one")),
    each=ForEachSpec(for_each="${[1, 2]}", topic=Topic("items")),
)


async def explained(replica: Replica, run_id: RunId) -> Explanation:
    found = await replica.services.explainer.explain(run_id, ACME)
    assert found is not None
    return found


async def first(replica: Replica, run_id: RunId) -> Finding:
    return (await explained(replica, run_id)).findings[0]


async def codes(replica: Replica, run_id: RunId) -> list[str]:
    return [str(each.code) for each in (await explained(replica, run_id)).findings]


@virtual
async def test_a_topic_without_workers_is_known_after_a_minute_on_every_replica(
    world: World,
) -> None:
    one = world.add()
    await world.define(ONE)
    run_id = await world.start(one, "one")
    await asyncio.sleep(30)
    two = world.add()
    await asyncio.sleep(31)
    # The second replica has not run for a minute: its predecessor may have had workers.
    for replica in (one, two):
        assert await codes(replica, run_id) == ["job_ready"]
    await asyncio.sleep(30)
    for replica in (one, two):
        assert await codes(replica, run_id) == ["no_worker"]
    # A worker of another tenant does not help; one that waits at the other replica does.
    await one.scheduler.lease("g", [Topic("work")], max_jobs=1, wait_s=0, tenant=GLOBEX)
    assert await codes(two, run_id) == ["no_worker"]
    await world.lease(two, "other", wait_s=0)
    waiting = asyncio.create_task(world.lease(two, "work", wait_s=30))
    await asyncio.sleep(0.1)
    (leased,) = await waiting
    found = await first(one, run_id)
    assert found.code is WhyCode.JOB_LEASED
    assert found.blocked_by is not None
    assert (found.blocked_by.worker_id, found.blocked_by.fence) == ("work-worker", leased.fence)
    assert found.until == leased.expires_at
    another = await world.start(one, "one")
    await asyncio.sleep(3.1)
    assert await codes(one, another) == ["job_ready"]
    assert "0 jobs of this tenant ahead" in (await first(one, another)).detail
    await asyncio.sleep(60)
    assert await codes(one, another) == ["no_worker"]


@virtual
async def test_every_kind_of_step_is_named(world: World) -> None:
    one = world.add()
    await world.define(ONE, WHOLE)
    run_id = await world.start(one, "whole")
    found = (await explained(one, run_id)).findings
    assert [(str(each.code), each.step_id) for each in found] == [
        ("approval_pending", "review"),
        ("job_ready", "each"),
        ("job_ready", "inner.step"),
        ("delay_pending", "pause"),
    ]
    assert found[0].detail == "step 'review' waits for a decision: Is it good?"
    assert found[1].blocked_by is not None
    assert found[1].blocked_by.item == 0
    assert found[3].until is not None
    assert 29_000 < found[3].until - world.clock.now() <= 30_000


@virtual
async def test_retries_dead_letters_and_ends_are_told(world: World) -> None:
    one = world.add(terms=Terms(max_deliveries=1, job_lease_ttl_ms=1_000))
    await world.define(RETRIED)
    run_id = await world.start(one, "retried")
    (leased,) = await world.lease(one, "work")
    await world.report(one, leased, output=Failure("bad", "no answer"))
    await asyncio.sleep(0.1)
    found = await first(one, run_id)
    assert found.code is WhyCode.RETRY_PENDING
    assert "(no answer)" in found.detail
    assert found.until is not None
    assert found.until > world.clock.now()

    (leased,) = await world.lease(one, "work")
    await asyncio.sleep(3)
    found = await first(one, run_id)
    assert found.code is WhyCode.DEAD_LETTER
    (letter,) = (await world.store.list_dead_letters(None)).items
    assert letter.id in found.remedy
    await one.inbox.discard(letter.id, actor="operator")
    found = await first(one, run_id)
    assert (found.code, found.since is not None) == (WhyCode.FINISHED, True)
    assert (await explained(one, run_id)).status is RunStatus.FAILED


@virtual
async def test_a_held_lease_is_named_while_events_wait_for_it(world: World) -> None:
    one = world.add()
    await world.define(under_lease(ONE))
    run_id = await world.start(one, "one")
    (leased,) = await world.lease(one, "work")
    token = operator_token("kim", "secret")
    await world.locks.acquire(f"run/{run_id}", token, ttl_ms=10_000, within_ms=1_000)
    assert await codes(one, run_id) == ["job_leased", "run_locked"]
    await world.report(one, leased)
    await asyncio.sleep(0.1)
    found = await first(one, run_id)
    assert found.code is WhyCode.RUN_LOCKED
    assert found.detail.startswith("'kim' holds the run's lease; 1 accepted event")
    assert found.remedy == f"an operator can release it: stanchion lease release run/{run_id}"
    assert found.until is not None
    assert 9_000 < found.until - world.clock.now() < 10_000
    assert await world.ended(run_id) == "succeeded"
    assert await codes(one, run_id) == ["finished"]


@virtual
async def test_the_longest_waits_are_for_a_slot_a_lock_and_a_worker_on_any_replica(
    world: World,
) -> None:
    one, two = world.add(), world.add()
    await world.define(under_lease(ONE))
    await world.define(under_lease(ONE), tenant=GLOBEX)
    assert await one.services.explainer.longest_waits(None) == ()
    locked = await world.start(one, "one")
    (leased,) = await world.lease(one, "work")
    await asyncio.sleep(5)
    ready = await world.start(one, "one")
    await asyncio.sleep(5)
    await world.start(one, "one")
    await world.start(one, "one", tenant=GLOBEX)
    await world.store.put_tenant(ACME, Tenant(max_concurrent_runs=3, on_full=OnFull.QUEUE))
    queued = await world.start(one, "one")
    await asyncio.sleep(5)
    token = operator_token("kim", "secret")
    await world.locks.acquire(f"run/{locked}", token, ttl_ms=60_000, within_ms=1_000)
    await world.report(one, leased)
    began = world.clock.now()
    await asyncio.sleep(9)
    for replica in (one, two):
        found = await replica.services.explainer.longest_waits(None)
        waits = [(each.waits_for, each.run_id, str(each.finding.code)) for each in found]
        assert waits == [
            ("worker", ready, "job_ready"),
            ("slot", queued, "queued"),
            ("lock", locked, "run_locked"),
        ]
        assert {each.tenant for each in found} == {ACME}
        assert [round((world.clock.now() - each.since) / 1000) for each in found[:2]] == [19, 14]
        assert 0 <= found[2].since - began <= 100
        (other,) = await replica.services.explainer.longest_waits(GLOBEX)
        assert (other.waits_for, other.tenant) == ("worker", GLOBEX)


@virtual
async def test_a_job_that_a_topic_limit_holds_back_waits_for_the_limit(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    entry = AuditEntry(at=Instant(0), actor="admin", action="limit.put", subject="llm")
    await one.services.limits.put(TopicLimit(id="llm", topics=("work",), max_running=1), entry)
    await world.start(one, "one")
    held = await world.start(one, "one")
    await world.lease(one, "work")
    await asyncio.sleep(5)
    (found,) = await one.services.explainer.longest_waits(None)
    assert (found.waits_for, found.run_id, found.finding.code) == (
        "limit",
        held,
        WhyCode.TOPIC_LIMITED,
    )


@virtual
async def test_a_closed_class_says_by_which_rule_and_since_when(world: World) -> None:
    one = world.add()
    own = replace(
        workflow("own", step=job("work")),
        lock_policy=LeaseOverride(on_lock_error=OnLockError.FAIL_CLOSED),
    )
    await world.define(ONE, HIGH, own)
    runs = {name: await world.start(one, name) for name in ("one", "high", "own")}
    await asyncio.sleep(5)
    one.locks_away()
    began = world.clock.now()
    for each in await world.lease(one, "work", max_jobs=3):
        await world.report(one, each)
    await asyncio.sleep(5)
    assert await world.ended(runs["one"]) == "succeeded"
    (longest,) = await one.services.explainer.longest_waits(None)
    assert longest.run_id in {runs["high"], runs["own"]}
    assert (longest.waits_for, longest.finding.code) == ("lock", WhyCode.CLASS_CLOSED)
    high, mine = await first(one, runs["high"]), await first(one, runs["own"])
    assert high.code is mine.code is WhyCode.CLASS_CLOSED
    assert high.blocked_by is not None
    assert high.blocked_by.rule == "setting policies.high.on_lock_error = fail_closed"
    assert "stanchion settings set policies.high.on_lock_error=fail_open" in high.remedy
    assert mine.blocked_by is not None
    assert mine.blocked_by.rule == "lock_policy.on_lock_error of the workflow = fail_closed"
    assert high.since is not None
    assert 0 <= high.since - began <= 4_000

    another = await world.start(one, "one")
    assert await codes(one, another) == ["job_ready", "backend_unavailable"]
    change: JsonObject = {"escalation": {"closes": ["standard"]}}
    await one.services.settings.patch(change, actor="operator")
    await one.services.escalating.order(Order.FORCE_CLOSED, actor="operator")
    found = await first(one, another)
    assert found.code is WhyCode.CLASS_CLOSED
    assert found.blocked_by is not None
    assert found.blocked_by.rule == "escalation is escalated and closes standard"
    assert "stanchion escalation" in found.remedy

    one.locks_away(is_away=False)
    assert await world.ended(runs["high"]) == "succeeded"


@virtual
async def test_without_the_store_that_is_the_answer(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    run_id = await world.start(one, "one")
    one.store.away()
    await asyncio.sleep(4)
    told = await explained(one, run_id)
    assert told.status is None
    assert [each.code for each in told.findings] == [WhyCode.BACKEND_UNAVAILABLE]
    assert told.findings[0].since is not None
    assert 0 < world.clock.now() - told.findings[0].since <= 4_100
    one.store.back()
    one.store.always(Fault.ERROR, "replica_summaries")
    one.bus.is_away = True
    await asyncio.sleep(4)
    found = (await explained(one, run_id)).findings
    assert [str(each.code) for each in found] == ["job_ready", "backend_unavailable"]
    assert found[1].blocked_by is not None
    assert found[1].blocked_by.id == "bus"


@virtual
async def test_another_tenants_run_is_not_there(world: World) -> None:
    one = world.add()
    await world.define(ONE, tenant=GLOBEX)
    run_id = await world.start(one, "one", tenant=GLOBEX)
    assert await one.services.explainer.explain(run_id, ACME) is None
    assert await one.services.explainer.explain(RunId("nonsense"), ACME) is None
    assert StepId("step") in (await world.run(run_id)).steps


@virtual
async def test_explanations_of_large_runs_are_charged_to_their_tenant(world: World) -> None:
    one = world.add()
    many = workflow(
        "many", each=ForEachSpec(for_each="${input.items}", topic=Topic("items"), input="${item}")
    )
    await world.define(many)
    run_id = await world.start(one, "many", {"items": [0] * 1_000})
    for _ in range(20):
        await explained(one, run_id)
    while one.services.work.wait_ms(ACME) == 0:
        await explained(one, run_id)
    with pytest.raises(TenantOverloaded):
        await explained(one, run_id)
    assert one.services.work.wait_ms(GLOBEX) == 0


@virtual
async def test_an_approval_that_needs_data_is_told_with_the_option(world: World) -> None:
    one = world.add()
    needs: JsonObject = {"type": "object", "required": ["channel"]}
    approvals: dict[str, JsonObject] = {"free": {"type": ["object", "null"]}, "needs": needs}
    asked = {name: ApprovalSpec(data_schema=schema) for name, schema in approvals.items()}
    await world.define(workflow("asks", plain=ApprovalSpec(), **asked))
    run_id = await world.start(one, "asks")
    found = {each.step_id: each.remedy for each in (await explained(one, run_id)).findings}
    assert {step_id for step_id, remedy in found.items() if "--data" in remedy} == {"needs"}
