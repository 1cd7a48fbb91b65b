"""Plans are kept, and forgotten when what they were made from has changed."""

from __future__ import annotations

from stanchion.adapters.manual_clock import ManualClock
from stanchion.adapters.store.memory import MemoryStore
from stanchion.core.model import StepId, TenantId, Topic, WorkflowId
from stanchion.core.workflow import JobSpec, SubworkflowSpec, Workflow
from stanchion.services.plans import Linked, Plans

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
