"""Plans are kept, and forgotten when what they were made from has changed."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from typing import Any
from weakref import ref

from stanchion.adapters.store.memory import MemoryStore
from stanchion.adapters.system import ManualClock
from stanchion.core.faults import WorkflowFaults
from stanchion.core.lease import Moment
from stanchion.core.model import (
    Instant,
    Run,
    StepId,
    TenantId,
    Topic,
    WorkflowId,
    WorkflowSource,
    make_run_id,
    shared_name,
)
from stanchion.core.plan import Plan
from stanchion.core.workflow import JobSpec, SubworkflowSpec, Workflow
from stanchion.ports.errors import BackendUnavailable
from stanchion.ports.records import StoredWorkflow, Tenant
from stanchion.services.plans import (
    IDLE_TEXT_BYTES_MAX,
    PLAN_KEPT_MS,
    PLANS_TEXT_BYTES_MAX,
    TENANT_TEXT_BYTES_MAX,
    Linked,
    Plans,
    UnknownWorkflow,
    link_here,
)

ACME, OTHER = TenantId("acme"), TenantId("other")
INNER, OUTER = WorkflowId("inner"), WorkflowId("outer")


def inner(topic: str) -> Workflow:
    return Workflow(id=INNER, steps={StepId("work"): JobSpec(topic=Topic(topic))})


async def linked(plans: Plans, workflow_id: WorkflowId, tenant: TenantId = ACME) -> Linked:
    found = await plans.newest(tenant, workflow_id)
    assert isinstance(found, Linked)
    return found


async def test_what_was_written_here_is_used_at_once_also_by_those_that_contain_it() -> None:
    store = MemoryStore(ManualClock())
    plans = Plans(store)
    outer = Workflow(id=OUTER, steps={StepId("sub"): SubworkflowSpec(workflow=INNER)})
    for tenant in (ACME, OTHER):
        await store.put_workflow(tenant, inner("first"))
        await store.put_workflow(tenant, outer)
        assert (await linked(plans, OUTER, tenant)).definitions == {OUTER: 1, INNER: 1}
    await store.put_workflow(ACME, inner("second"))
    await store.put_workflow(OTHER, inner("second"))
    assert (await linked(plans, INNER)).version == 2
    assert (await linked(plans, OUTER)).definitions[INNER] == 1  # not told yet
    plans.forget(ACME, INNER)
    assert (await linked(plans, OUTER)).definitions[INNER] == 2
    assert (await linked(plans, OUTER, OTHER)).definitions[INNER] == 1


async def test_tenants_with_the_same_workflow_share_its_plan() -> None:
    store = MemoryStore(ManualClock())
    plans = Plans(store)
    for tenant in (ACME, OTHER):
        await store.put_workflow(tenant, inner("work"))
    assert (await linked(plans, INNER, ACME)).plan is (await linked(plans, INNER, OTHER)).plan
    await store.put_workflow(OTHER, inner("other work"))
    plans.forget(OTHER, INNER)
    changed = await linked(plans, INNER, OTHER)
    assert changed.plan is not (await linked(plans, INNER, ACME)).plan


class SlowReads(MemoryStore):
    """A store whose answers stay on their way until they are let go."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.reads = 0
        self.gate = asyncio.Event()

    async def workflow(
        self,
        tenant: TenantId,
        workflow_id: WorkflowId,
        *,
        version: int | None = None,
        source: WorkflowSource | None = None,
    ) -> StoredWorkflow | None:
        self.reads += 1
        found = await super().workflow(tenant, workflow_id, version=version, source=source)
        await self.gate.wait()
        await asyncio.sleep(0)
        return found


async def test_a_thousand_callers_read_a_workflow_once() -> None:
    store = SlowReads()
    await store.put_workflow(ACME, inner("work"))
    plans = Plans(store)
    asking = [asyncio.create_task(linked(plans, INNER)) for _ in range(1_000)]
    await asyncio.sleep(0)
    store.gate.set()
    assert {found.version for found in await asyncio.gather(*asking)} == {1}
    assert store.reads == 1


async def test_when_the_one_who_reads_leaves_the_next_one_reads() -> None:
    store = SlowReads()
    await store.put_workflow(ACME, inner("work"))
    plans = Plans(store)
    asking = [asyncio.create_task(linked(plans, INNER)) for _ in range(10)]
    await asyncio.sleep(0.001)
    for each in asking[:2]:
        each.cancel()  # the first reads, the second waits
    await asyncio.sleep(0.001)
    store.gate.set()
    assert {found.version for found in await asyncio.gather(*asking[2:])} == {1}
    assert store.reads == 2


async def test_nobody_is_told_no_by_a_question_that_was_asked_before_it_came() -> None:
    store = SlowReads()
    plans = Plans(store)
    early = asyncio.create_task(plans.newest(ACME, INNER))
    await asyncio.sleep(0.001)
    await store.put_workflow(ACME, inner("work"))
    late = asyncio.create_task(plans.newest(ACME, INNER))
    await asyncio.sleep(0.001)
    store.gate.set()
    assert isinstance(await early, UnknownWorkflow)
    assert isinstance(await late, Linked)


async def test_a_thousand_callers_of_a_workflow_that_is_not_there_ask_twice() -> None:
    store = SlowReads()
    plans = Plans(store)
    asking = [asyncio.create_task(plans.newest(ACME, INNER)) for _ in range(1_000)]
    await asyncio.sleep(0.001)
    store.gate.set()
    assert all(isinstance(found, UnknownWorkflow) for found in await asyncio.gather(*asking))
    assert store.reads == 2


async def test_whoever_wants_the_newest_does_not_join_an_older_question() -> None:
    store = SlowReads()
    await store.put_workflow(ACME, inner("first"))
    plans = Plans(store)
    early = asyncio.create_task(plans.newest(ACME, INNER))
    await asyncio.sleep(0.001)
    await store.put_workflow(ACME, inner("second"))
    late = asyncio.create_task(plans.newest(ACME, INNER, refresh=True))
    await asyncio.sleep(0.001)
    store.gate.set()
    found = await asyncio.gather(early, late)
    assert [each.version for each in found if isinstance(each, Linked)] == [1, 2]


async def test_a_question_that_fails_fails_for_all_who_asked_it_and_the_next_asks_anew() -> None:
    store = SlowReads()
    await store.put_workflow(ACME, inner("work"))
    plans = Plans(store)

    async def away(*_: object, **__: object) -> None:
        await store.gate.wait()
        raise BackendUnavailable("away")

    really, store.workflow = store.workflow, away  # type: ignore[method-assign]
    asking = [asyncio.create_task(plans.newest(ACME, INNER)) for _ in range(3)]
    await asyncio.sleep(0.001)
    store.gate.set()
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(each, BackendUnavailable) for each in found)
    store.workflow = really  # type: ignore[method-assign]
    assert isinstance(await plans.newest(ACME, INNER), Linked)


async def test_all_tenants_share_the_plan_of_a_shared_workflow_and_it_is_linked_once() -> None:
    store, count = MemoryStore(ManualClock()), 0

    async def link_and_count(
        workflow: Workflow, others: Mapping[WorkflowId, Workflow], source: WorkflowSource
    ) -> Plan | WorkflowFaults:
        nonlocal count
        count += 1
        return await link_here(workflow, others, source)

    plans = Plans(store, linker=link_and_count)
    outer = Workflow(id=OUTER, steps={StepId("sub"): SubworkflowSpec(workflow=INNER)})
    for version in (inner("first"), inner("second")):
        await store.put_shared_workflow(version)
    await store.put_shared_workflow(outer)
    await store.put_workflow(OTHER, inner("own"))  # no sub-workflow of a shared one
    found = [await linked(plans, OUTER, tenant) for tenant in (ACME, OTHER)]
    shared_inner, shared_outer = shared_name(INNER), shared_name(OUTER)
    for each in found:
        assert each.plan is found[0].plan
        assert each.definitions == {OUTER: 0, shared_outer: 1, shared_inner: 2}
        assert (each.source, each.uses) == (WorkflowSource.SHARED, {shared_inner: 2})
    assert count == 1
    await store.put_tenant(ACME, Tenant(workflows={INNER: 1}))
    pinned = await plans.newest(ACME, OUTER, refresh=True)
    assert isinstance(pinned, Linked)
    assert pinned.uses == {shared_inner: 1}


async def test_a_run_is_planned_by_its_source_and_versions_for_ever() -> None:
    store, now = MemoryStore(ManualClock()), Instant(0)
    await store.put_shared_workflow(inner("shared"))
    found = await linked(Plans(store), INNER)
    run = Run(
        id=make_run_id(ACME, now, 1),
        tenant=ACME,
        workflow_id=INNER,
        workflow_version=found.version,
        workflow_source=found.source,
        input={},
        created_at=now,
    )
    await store.put_shared_workflow(inner("newer"))
    await store.put_workflow(ACME, inner("own"))
    spec = (await Plans(store).of_run(run)).steps[StepId("work")].spec
    assert isinstance(spec, JobSpec)
    assert spec.topic == "shared"


async def test_a_shared_workflow_is_linked_once_for_all_tenants_that_start_it_at_once() -> None:
    store, gate, count = MemoryStore(ManualClock()), asyncio.Event(), 0

    async def link_slowly(
        workflow: Workflow, others: Mapping[WorkflowId, Workflow], source: WorkflowSource
    ) -> Plan | WorkflowFaults:
        nonlocal count
        count += 1
        await gate.wait()
        return await link_here(workflow, others, source)

    await store.put_shared_workflow(inner("work"))
    plans = Plans(store, linker=link_slowly)
    tenants = [TenantId(f"tenant-{number}") for number in range(100)]
    asking = [asyncio.create_task(linked(plans, INNER, tenant)) for tenant in tenants]
    await asyncio.sleep(0.001)
    asking[0].cancel()  # the one that links
    await asyncio.sleep(0.001)
    gate.set()
    found = await asyncio.gather(*asking[1:])
    assert len({id(each.plan) for each in found}) == 1
    assert count == 2


# ── How much is kept ─────────────────────────────────────────────────────────────────────────────

PART = TENANT_TEXT_BYTES_MAX // 8


def large(number: int) -> Workflow:
    """A workflow of about an eighth of what is kept for a tenant."""
    text = f"{number} " + "x" * (PART - 200)
    spec = JobSpec(topic=Topic("work"), input=text)
    return Workflow(id=WorkflowId(f"large-{number}"), steps={StepId("work"): spec})


async def large_plans(plans: Plans, store: MemoryStore, tenant: TenantId, count: int) -> list[Any]:
    """References to the plans of so many large workflows."""
    made = []
    for number in range(count):
        await store.put_workflow(tenant, large(number))
        made.append(ref((await linked(plans, large(number).id, tenant)).plan))
    gc.collect()
    return made


async def test_a_tenant_with_much_text_keeps_the_plans_used_last_and_no_others() -> None:
    store = MemoryStore(ManualClock())
    plans = Plans(store)
    await store.put_workflow(OTHER, inner("other"))
    others = (await linked(plans, INNER, OTHER)).plan
    made = await large_plans(plans, store, ACME, 20)
    assert [each() is not None for each in made] == [False] * 12 + [True] * 8
    assert (await linked(plans, INNER, OTHER)).plan is others
    # One that was dropped is made again, and a run that began with it finds it.
    assert (await linked(plans, large(0).id)).plan.steps.keys() == {"work"}


async def test_the_plan_used_last_is_kept_however_large_it_is() -> None:
    store = MemoryStore(ManualClock())
    plans = Plans(store)
    spec = JobSpec(topic=Topic("work"), input="x" * 2 * TENANT_TEXT_BYTES_MAX)
    await store.put_workflow(ACME, Workflow(id=OUTER, steps={StepId("work"): spec}))
    first = (await linked(plans, OUTER)).plan
    assert (await linked(plans, OUTER)).plan is first


async def test_all_tenants_together_keep_so_much_text_and_no_more() -> None:
    store = MemoryStore(ManualClock())
    plans = Plans(store)
    made = []
    for number in range(60):
        tenant = TenantId(f"tenant-{number}")
        await store.put_workflow(tenant, large(number))
        made.append(ref((await linked(plans, large(number).id, tenant)).plan))
    gc.collect()
    most = PLANS_TEXT_BYTES_MAX // PART
    assert [each() is not None for each in made] == [False] * (60 - most) + [True] * most


async def test_a_plan_that_is_used_stays_while_others_of_its_tenant_go() -> None:
    store = MemoryStore(ManualClock())
    plans = Plans(store)
    await store.put_workflow(ACME, inner("used"))
    used = (await linked(plans, INNER)).plan
    for number in range(20):
        await store.put_workflow(ACME, large(number))
        await linked(plans, large(number).id)
        assert (await linked(plans, INNER)).plan is used


async def test_much_text_of_plans_that_nobody_uses_is_dropped_after_a_minute() -> None:
    store, now = MemoryStore(ManualClock()), Moment(1_000)
    plans = Plans(store)
    made = await large_plans(plans, store, ACME, 6)
    for at in (now, Moment(now + PLAN_KEPT_MS - 1)):
        plans.forget_idle(at)
        await linked(plans, large(0).id)
    assert all(each() is not None for each in made)
    plans.forget_idle(Moment(now + PLAN_KEPT_MS))
    gc.collect()
    idle = IDLE_TEXT_BYTES_MAX // PART
    assert [each() is not None for each in made] == [True] + [False] * (5 - idle) + [True] * idle
