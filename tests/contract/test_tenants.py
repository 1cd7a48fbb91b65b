"""Tenants: what each may do."""

from __future__ import annotations

import pytest

from stanchion.core.admission import Admitted, Full
from stanchion.core.model import Instant, TenantId
from stanchion.ports.records import (
    BadCursor,
    Tenant,
    TenantStanding,
)
from stanchion.ports.store import Store
from tests.contract.builders import (
    ACME,
    GLOBEX,
    ONE_JOB,
    WITHIN_MS,
    accept,
    admission,
    advance,
    cancel,
    lease,
    start,
)


async def test_a_tenant_that_nobody_configured_has_the_defaults(store: Store) -> None:
    assert await store.tenant(ACME) == Tenant(
        max_concurrent_runs=10, job_rate_per_s=None, admission=None
    )


async def test_a_tenants_configuration_comes_back_as_it_was(store: Store) -> None:
    config = Tenant(
        max_concurrent_runs=3, job_rate_per_s=2.5, admission={"strategy": "lock", "n": [1, None]}
    )
    await store.put_tenant(ACME, config)
    assert await store.tenant(ACME) == config
    assert await store.tenant(GLOBEX) == Tenant()


async def test_a_configuration_is_replaced_as_a_whole(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=None, job_rate_per_s=2.5))
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=3))
    assert await store.tenant(ACME) == Tenant(max_concurrent_runs=3, job_rate_per_s=None)


async def test_a_deleted_configuration_leaves_the_defaults(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=1))
    await store.put_tenant(GLOBEX, Tenant(max_concurrent_runs=1))
    run_id = await start(store)
    assert await store.delete_tenant(ACME)
    assert await store.tenant(ACME) == Tenant()
    assert [name for name, _ in (await store.list_tenants()).items] == [GLOBEX]
    assert not await store.delete_tenant(ACME), "it was there no more"
    await start(store)
    assert await store.load(run_id) is not None


async def test_no_cap_is_not_the_default_cap(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=None))
    assert (await store.tenant(ACME)).max_concurrent_runs is None


@pytest.mark.parametrize("name", ["a:b", "{x}", "ü€", "a b", "*", "a\\b'c\"d", "x" * 64, "%_"])
async def test_a_tenant_with_odd_characters_is_a_tenant_like_any_other(
    store: Store, name: str
) -> None:
    tenant = TenantId(name)
    await store.put_tenant(tenant, Tenant(max_concurrent_runs=1))
    run_id = await start(store, tenant=tenant, key="k")
    other = admission(await store.now(), tenant=tenant)
    assert await store.admit(other, within_ms=WITHIN_MS) == Full(1, 1)
    (leased,) = await lease(store, tenant=tenant)
    assert leased.job.tenant == tenant
    await accept(store, leased)
    (row,) = await store.take_outbox(limit=10, hold_ms=1_000)
    assert row.tenant == tenant
    await advance(store, ONE_JOB, run_id)
    assert [each.id for each in (await store.list_runs(tenant)).items] == [run_id]
    assert {entry.run_id for entry in await store.feed(tenant, after=None)} == {run_id}
    assert [each for each, _ in (await store.list_tenants()).items] == [tenant]
    assert await store.active_runs(tenant) == 0
    assert (await store.audit_slots(limit=1_000)).drifts == ()


async def test_configured_tenants_are_listed_by_name(store: Store) -> None:
    await start(store, tenant=TenantId("nobody-configured-me"))
    for name in ("b", "ä", "a", "B"):
        await store.put_tenant(TenantId(name), Tenant(max_concurrent_runs=len(name)))
    page = await store.list_tenants()
    assert page.items == tuple((TenantId(name), Tenant(1)) for name in ("B", "a", "b", "ä"))
    assert page.cursor is None


async def test_tenants_are_listed_in_pages(store: Store) -> None:
    names = [TenantId(f"tenant-{number}") for number in range(7)]
    for name in names:
        await store.put_tenant(name, Tenant())
    listed, cursor = [], None
    for expected in (3, 3, 1):
        page = await store.list_tenants(limit=3, cursor=cursor)
        assert len(page.items) == expected
        listed += [name for name, _ in page.items]
        cursor = page.cursor
    assert listed == names
    assert cursor is None


async def test_a_page_that_holds_all_tenants_is_the_last(store: Store) -> None:
    for name in ("a", "b"):
        await store.put_tenant(TenantId(name), Tenant())
    assert (await store.list_tenants(limit=2)).cursor is None


async def test_a_bad_cursor_is_said_to_be_bad(store: Store) -> None:
    with pytest.raises(BadCursor):
        await store.list_tenants(cursor="nonsense")


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf"), 1e-9])
def test_a_rate_that_means_nothing_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="job_rate_per_s must be from"):
        Tenant(job_rate_per_s=rate)


@pytest.mark.parametrize("cap", [-1, 2**31])
def test_a_cap_that_means_nothing_is_refused(cap: int) -> None:
    with pytest.raises(ValueError, match="max_concurrent_runs must be from"):
        Tenant(max_concurrent_runs=cap)


async def test_tenants_are_listed_that_are_configured_or_were_seen(store: Store) -> None:
    now = await store.now()
    runs = {}
    for name, age in (("busy", 900), ("idle", 100), ("long-ago", 900), ("lone-job", 100)):
        wanted = admission(Instant(now - age), tenant=TenantId(name), holds_slot=name != "lone-job")
        assert await store.admit(wanted, within_ms=WITHIN_MS) == Admitted(wanted.run.id)
        runs[name] = wanted.run.id
    for name in ("idle", "long-ago"):
        await cancel(store, runs[name])
    await store.put_tenant(TenantId("set"), Tenant(max_concurrent_runs=7))
    await store.put_tenant(TenantId("idle"), Tenant(max_concurrent_runs=8))
    await store.put_tenant(TenantId("gone"), Tenant())
    await store.delete_tenant(TenantId("gone"))
    found: list[TenantStanding] = []
    for limit in (1, 2, 100):
        found.clear()
        cursor = None
        while True:
            page = await store.list_standings(
                seen_since=Instant(now - 500), cursor=cursor, limit=limit
            )
            found += page.items
            cursor = page.cursor
            if cursor is None:
                break
        assert [
            (each.tenant, each.config and each.config.max_concurrent_runs, each.active)
            for each in found
        ] == [("busy", None, 1), ("idle", 8, 0), ("lone-job", None, 0), ("set", 7, 0)]
    assert [each.seen_at for each in found] == [now - 900, now - 100, now - 100, 0]
    with pytest.raises(BadCursor):
        await store.list_standings(seen_since=now, cursor="nonsense")


async def test_the_standings_of_some_tenants_come_in_the_order_that_was_asked(store: Store) -> None:
    config = Tenant(max_concurrent_runs=7)
    await store.put_tenant(GLOBEX, config)
    wanted = admission(await store.now())
    await store.admit(wanted, within_ms=WITHIN_MS)
    never = TenantId("never")
    assert await store.standings([GLOBEX, never, ACME]) == (
        TenantStanding(tenant=GLOBEX, config=config, active=0, seen_at=Instant(0)),
        TenantStanding(tenant=never, config=None, active=0, seen_at=Instant(0)),
        TenantStanding(tenant=ACME, config=None, active=1, seen_at=wanted.run.created_at),
    )
    assert await store.standings([]) == ()
