"""The audit of slots: the count that decides is the number of unfinished runs, or is made so."""

from __future__ import annotations

import asyncio

import pytest

from stanchion.core.admission import Admitted, Full
from stanchion.core.audit import AuditEntry
from stanchion.core.model import TenantId
from stanchion.ports.records import BadCursor, Drift, Tenant
from stanchion.ports.store import Store
from tests.contract.builders import (
    ACME,
    GLOBEX,
    ONE_JOB,
    WITHIN_MS,
    admission,
    cancel,
    finish,
    start,
)
from tests.contract.harness import Harness


async def test_an_audit_finds_nothing_where_nothing_is_wrong(store: Store) -> None:
    assert (await store.audit_slots(limit=1_000)).drifts == ()
    await start(store)
    await cancel(store, await start(store))
    await finish(store, ONE_JOB, await start(store, tenant=GLOBEX), tenant=GLOBEX)
    assert (await store.audit_slots(limit=1_000)).drifts == ()
    assert await store.active_runs(ACME) == 1


@pytest.mark.parametrize("delta", [3, -1, -5])
async def test_an_audit_finds_and_repairs_a_wrong_count(
    store: Store, harness: Harness, delta: int
) -> None:
    for _ in range(2):
        await start(store)
    await harness.tamper_slots(ACME, delta)
    assert await store.active_runs(ACME) == 2 + delta
    assert (await store.audit_slots(limit=1_000)).drifts == (
        Drift(ACME, counted=2 + delta, actual=2),
    )
    assert await store.active_runs(ACME) == 2
    assert (await store.audit_slots(limit=1_000)).drifts == ()


async def test_an_audit_finds_a_count_without_any_run(store: Store, harness: Harness) -> None:
    await cancel(store, await start(store))
    await harness.tamper_slots(ACME, 2)
    assert (await store.audit_slots(limit=1_000)).drifts == (Drift(ACME, counted=2, actual=0),)
    assert await store.active_runs(ACME) == 0


async def test_a_leaked_slot_comes_back_through_the_audit(store: Store, harness: Harness) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=1))
    await cancel(store, await start(store))
    await harness.tamper_slots(ACME, 1)
    wanted = admission(await store.now())
    assert await store.admit(wanted, within_ms=WITHIN_MS) == Full(1, 1)
    await store.audit_slots(limit=1_000)
    assert await store.admit(wanted, within_ms=WITHIN_MS) == Admitted(wanted.run.id)


async def test_an_audit_does_not_count_runs_without_a_slot(store: Store) -> None:
    slotless = admission(await store.now(), holds_slot=False)
    await store.admit(slotless, within_ms=WITHIN_MS)
    assert (await store.audit_slots(limit=1_000)).drifts == ()
    assert await store.active_runs(ACME) == 0


async def test_an_audit_of_a_few_tenants_at_a_time_reaches_all_of_them(
    store: Store, harness: Harness
) -> None:
    tenants = [TenantId(f"tenant-{number}") for number in range(6)]
    for tenant in tenants:
        await start(store, tenant=tenant)
        await harness.tamper_slots(tenant, 1)
    for repair in (False, True):
        found: list[TenantId] = []
        cursor: str | None = None
        checked = 0
        for _ in range(10):
            part = await store.audit_slots(limit=2, cursor=cursor, repair=repair)
            assert part.checked == len(part.drifts) <= 2
            checked += part.checked
            found += [drift.tenant for drift in part.drifts]
            cursor = part.cursor
            if cursor is None:
                break
        assert (sorted(found), checked) == (tenants, 6)
    assert (await store.audit_slots(limit=6)).cursor is None
    with pytest.raises(BadCursor):
        await store.audit_slots(limit=1, cursor="nonsense")


async def test_without_repair_nothing_changes_and_nothing_is_recorded(
    store: Store, harness: Harness
) -> None:
    await start(store)
    await harness.tamper_slots(ACME, 2)
    entry = AuditEntry(action="slots.repair", actor="kim", subject="")
    for _ in range(2):
        found = await store.audit_slots(limit=10, repair=False, audit=entry)
        assert found.drifts == (Drift(ACME, counted=3, actual=1),)
    assert await store.active_runs(ACME) == 3
    assert (await store.list_audit()).items == ()


async def test_an_audit_during_admissions_and_ends_finds_nothing(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=None))

    async def live() -> None:
        await cancel(store, await start(store))

    async def audit() -> None:
        for _ in range(5):
            assert (await store.audit_slots(limit=1_000)).drifts == ()

    await asyncio.gather(*(live() for _ in range(30)), *(audit() for _ in range(5)))
    assert await store.active_runs(ACME) == 0
