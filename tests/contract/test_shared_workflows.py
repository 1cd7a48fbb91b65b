"""Shared workflows: one for every tenant without an own one, by pin or newest, in every shard."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import pytest
from msgspec.structs import replace

from stanchion.core.admission import Admitted, StaleDefinition, Verdict
from stanchion.core.model import (
    SHARDS,
    RunId,
    TenantId,
    WorkflowId,
    WorkflowSource,
    shard_of_tenant,
    shared_name,
)
from stanchion.core.workflow import Workflow
from stanchion.ports.records import BadCursor, StoredWorkflow, Tenant
from stanchion.ports.store import Store
from tests.contract.builders import (
    ACME,
    GLOBEX,
    ONE_JOB,
    WITHIN_MS,
    admission,
    cancel,
    loaded,
    workflow,
)
from tests.contract.harness import Harness

_FLOW: Final = WorkflowId("one-job")
_SHARED: Final = shared_name(_FLOW)
_OWN, _BOTH = WorkflowSource.OWN, WorkflowSource.SHARED


def _version(number: int) -> Workflow:
    return replace(workflow(_FLOW), timeout_s=float(number))


def _seen(stored: StoredWorkflow | None) -> tuple[WorkflowSource, int, bool] | None:
    if stored is None:
        return None
    assert stored.workflow == _version(stored.version)
    return stored.source, stored.version, stored.is_pinned


async def _admit(
    store: Store,
    definitions: Mapping[WorkflowId, int],
    *,
    tenant: TenantId = ACME,
    source: WorkflowSource = WorkflowSource.SHARED,
) -> tuple[RunId, Verdict]:
    wanted = admission(await store.now(), ONE_JOB, tenant=tenant, definitions=definitions)
    wanted = replace(wanted, run=replace(wanted.run, workflow_source=source))
    return wanted.run.id, await store.admit(wanted, within_ms=WITHIN_MS)


async def test_a_shared_workflow_has_versions_of_its_own(store: Store) -> None:
    await store.put_workflow(ACME, _version(7))
    puts = [await store.put_shared_workflow(_version(n)) for n in (1, 1, 2)]
    assert puts == [1, 1, 2]
    assert _seen(await store.shared_workflow(_FLOW)) == (_BOTH, 2, False)
    assert _seen(await store.shared_workflow(_FLOW, version=1)) == (_BOTH, 1, False)
    for version in (-1, 0, 3):
        assert await store.shared_workflow(_FLOW, version=version) is None
    assert await store.shared_workflow(WorkflowId("other")) is None


async def test_versions_that_are_put_at_once_differ(store: Store) -> None:
    puts = await asyncio.gather(*(store.put_shared_workflow(_version(n)) for n in range(1, 9)))
    assert sorted(puts) == list(range(1, 9))
    newest = await store.shared_workflow(_FLOW)
    assert newest is not None
    found = await store.workflow(ACME, _FLOW)
    assert found is not None
    assert (found.version, found.workflow) == (8, newest.workflow)


async def test_own_comes_before_pin_and_pin_before_newest(store: Store) -> None:
    for number in (1, 2, 3):
        await store.put_shared_workflow(_version(number))
    assert _seen(await store.workflow(ACME, _FLOW)) == (_BOTH, 3, False)
    await store.put_tenant(ACME, Tenant(workflows={_FLOW: 2}))
    assert _seen(await store.workflow(ACME, _FLOW)) == (_BOTH, 2, True)
    assert _seen(await store.workflow(GLOBEX, _FLOW)) == (_BOTH, 3, False)
    await store.put_workflow(ACME, _version(1))
    assert _seen(await store.workflow(ACME, _FLOW)) == (_OWN, 1, False)
    assert await store.workflow(ACME, _FLOW, version=3) is None
    assert _seen(await store.workflow(ACME, _FLOW, source=_BOTH)) == (_BOTH, 2, True)
    assert _seen(await store.workflow(ACME, _FLOW, source=_BOTH, version=3)) == (_BOTH, 3, True)
    assert await store.workflow(GLOBEX, _FLOW, source=_OWN) is None
    await store.delete_tenant(ACME)
    assert _seen(await store.workflow(ACME, _FLOW, source=_BOTH)) == (_BOTH, 3, False)


async def test_a_tenant_lists_what_is_in_force(store: Store) -> None:
    for name in ("a", "b", "c", "d"):
        await store.put_shared_workflow(workflow(name))
    await store.put_shared_workflow(replace(workflow("c"), timeout_s=1.0))
    await store.put_workflow(ACME, workflow("b"))
    await store.put_workflow(ACME, workflow("bb"))
    await store.put_tenant(ACME, Tenant(workflows={WorkflowId("c"): 1}))
    listed: list[tuple[str, str, int]] = []
    cursor: str | None = None
    for _ in range(3):
        page = await store.list_workflows(ACME, cursor=cursor, limit=2)
        listed += [(each.workflow.id, each.source, each.version) for each in page.items]
        cursor = page.cursor
    assert cursor is None
    assert listed == [
        ("a", "shared", 1),
        ("b", "own", 1),
        ("bb", "own", 1),
        ("c", "shared", 1),
        ("d", "shared", 1),
    ]


async def test_shared_workflows_are_listed_in_pages(store: Store) -> None:
    await store.put_workflow(ACME, workflow("own"))
    for name in ("c", "a", "b"):
        await store.put_shared_workflow(workflow(name))
    await store.put_shared_workflow(replace(workflow("b"), timeout_s=1.0))
    first = await store.list_shared_workflows(limit=2)
    last = await store.list_shared_workflows(cursor=first.cursor, limit=2)
    listed = [(each.workflow.id, each.version) for each in (*first.items, *last.items)]
    assert listed == [("a", 1), ("b", 2), ("c", 1)]
    assert last.cursor is None
    for listing in (store.list_shared_workflows, store.list_workflow_uses):
        with pytest.raises(BadCursor):
            await listing(*(() if listing == store.list_shared_workflows else (_FLOW,)), cursor="x")


async def test_an_admission_compares_own_version_pin_and_shared_version(store: Store) -> None:
    for number in (1, 2):
        await store.put_shared_workflow(_version(number))
    fits: dict[WorkflowId, int] = {_FLOW: 0, _SHARED: 2}
    assert isinstance((await _admit(store, fits))[1], Admitted)
    others: tuple[dict[WorkflowId, int], ...] = (
        {_FLOW: 0, _SHARED: 1},
        {_FLOW: 1},
        {_SHARED: 3},
        {shared_name(WorkflowId("none")): 1},
    )
    for other in others:
        assert (await _admit(store, other))[1] == StaleDefinition(), other
    await store.put_tenant(ACME, Tenant(workflows={_FLOW: 1}))
    assert (await _admit(store, fits))[1] == StaleDefinition()
    assert isinstance((await _admit(store, {_FLOW: 0, _SHARED: 1}))[1], Admitted)
    await store.put_workflow(ACME, _version(1))
    assert (await _admit(store, {_FLOW: 0, _SHARED: 1}))[1] == StaleDefinition()
    # A shared workflow that contains this one: its tenant's own one does not matter.
    assert isinstance((await _admit(store, {_SHARED: 1}))[1], Admitted)
    assert isinstance((await _admit(store, {_FLOW: 1}, source=_OWN))[1], Admitted)


async def test_a_shared_version_is_in_every_shard_when_it_is_answered(store: Store) -> None:
    names = (TenantId(f"tenant-{number}") for number in range(1_000))
    tenants = {shard_of_tenant(name): name for name in names}
    assert len(tenants) == SHARDS
    for number in (1, 2):
        await store.put_shared_workflow(_version(number))
        definitions = {_FLOW: 0, _SHARED: number}
        verdicts = await asyncio.gather(
            *(_admit(store, definitions, tenant=tenant) for tenant in tenants.values())
        )
        assert all(isinstance(verdict, Admitted) for _, verdict in verdicts)


async def test_a_run_keeps_its_source_and_the_versions_it_uses(
    harness: Harness, durable_store: Store
) -> None:
    store = durable_store
    await store.put_shared_workflow(_version(1))
    wanted = admission(await store.now(), ONE_JOB, definitions={_SHARED: 1})
    run = replace(wanted.run, workflow_source=_BOTH, uses={_SHARED: 1, _FLOW: 3})
    await store.admit(replace(wanted, run=run), within_ms=WITHIN_MS)
    again = await harness.reopen()
    found = (await loaded(again, run.id)).run
    assert (found.workflow_source, found.uses) == (_BOTH, run.uses)
    assert found == replace(run, items={})


async def test_uses_say_what_each_tenant_runs(store: Store) -> None:
    for number in (1, 2):
        await store.put_shared_workflow(_version(number))
    running, owner, pinner = TenantId("b-runs"), TenantId("c-owns"), TenantId("d-pins")
    await store.put_tenant(TenantId("a-idle"), Tenant())
    runs = [(await _admit(store, {_FLOW: 0, _SHARED: 2}, tenant=running))[0] for _ in range(3)]
    await cancel(store, runs[0])
    await store.put_workflow(owner, _version(1))
    await _admit(store, {_FLOW: 1}, tenant=owner, source=_OWN)
    await store.put_tenant(pinner, Tenant(workflows={_FLOW: 1}))
    first = await store.list_workflow_uses(_FLOW, limit=3)
    last = await store.list_workflow_uses(_FLOW, limit=3, cursor=first.cursor)
    rows = [
        (each.tenant, each.source, each.version, each.pin, each.active)
        for each in (*first.items, *last.items)
    ]
    assert rows == [
        ("a-idle", _BOTH, 2, None, 0),
        (running, _BOTH, 2, None, 2),
        (owner, _OWN, 1, None, 0),
        (pinner, _BOTH, 1, 1, 0),
    ]
    assert last.cursor is None
