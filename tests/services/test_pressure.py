"""The admission overview: the figures of all replicas together, and who is missing."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from stanchion.core.model import TenantId, WorkflowId
from stanchion.core.pressure import TenantPressure
from stanchion.core.queue_terms import OnFull
from stanchion.ports.records import Tenant
from stanchion.services import pressure as module
from stanchion.services.gate_answers import GateFailed, GateFull
from tests.services.stage import ACME, Replica, World, job, virtual, workflow

ONE = workflow("one", step=job("work"))
CALM = TenantId("calm")


async def _start(replica: Replica, tenant: TenantId = ACME) -> object:
    return await replica.services.gate.start(
        tenant, WorkflowId("one"), {}, key=None, actor="caller"
    )


async def _tenants(replica: Replica) -> dict[str, TenantPressure]:
    overview = await replica.services.overview.read()
    return {each.tenant: each for each in overview.tenants}


@virtual
async def test_figures_of_all_replicas_are_added_and_a_missing_one_is_named(world: World) -> None:
    one, two = world.add(), world.add()
    for tenant in (ACME, CALM):
        await world.store.put_workflow(tenant, ONE)
    await world.store.put_tenant(ACME, Tenant(max_concurrent_runs=2))
    for replica in (one, one, two):
        await _start(replica)
    refusals = [await _start(two) for _ in range(4)]
    refused = refusals[-1]
    assert isinstance(refused, GateFull)
    await _start(one, CALM)
    await asyncio.sleep(4)
    for replica in (one, two):
        overview = await replica.services.overview.read()
        assert overview.replicas_missing == ()
        acme, calm = overview.tenants
        assert (acme.tenant, acme.limit, acme.active, acme.queued) == (ACME, 2, 2, 0)
        figures = acme.figures
        assert (figures.admitted, figures.full, figures.unavailable) == (2, 5, 0)
        assert figures.retry_after_ms == refused.retry_after_ms
        assert sum(figures.waits) == 7
        assert (calm.tenant, calm.limit, calm.active) == (CALM, 10, 1)
        assert calm.figures.admitted == 1
    two.kill()
    await asyncio.sleep(17)
    overview = await one.services.overview.read()
    assert overview.replicas_missing == ("replica-2",)
    assert overview.tenants[0].figures.full == 0, "what it does not report is left out"
    await asyncio.sleep(60)
    (_, calm) = sorted((await _tenants(one)).values(), key=lambda each: each.tenant)
    assert calm.figures.admitted == 0, "more than a minute ago"


@virtual
async def test_a_queued_run_counts_as_admitted_when_it_gets_its_slot(world: World) -> None:
    one, two = world.add(), world.add()
    await world.store.put_workflow(ACME, ONE)
    await world.store.put_tenant(ACME, Tenant(max_concurrent_runs=1, on_full=OnFull.QUEUE))
    first = await world.start(one, "one")
    second = await world.start(two, "one")
    before = (await _tenants(one))[ACME].figures
    await asyncio.sleep(65)
    waiting = (await _tenants(one))[ACME]
    assert (before.admitted, waiting.figures.admitted, waiting.queued) == (1, 0, 1)
    await one.services.inbox.cancel(first, reason=None, actor="caller")
    await asyncio.sleep(5)
    assert (await world.run(second)).status == "running"
    for replica in (one, two):
        began = (await _tenants(replica))[ACME]
        assert (began.figures.admitted, began.queued) == (1, 0)
        assert sum(began.figures.waits) == 0, "no caller was answered"


@virtual
async def test_callers_of_a_store_that_is_away_are_counted(world: World) -> None:
    one = world.add()
    await world.store.put_workflow(ACME, ONE)
    await _start(one)
    one.store.away()
    assert isinstance(await _start(one), GateFailed)
    one.store.back()
    await asyncio.sleep(2)
    figures = (await _tenants(one))[ACME].figures
    assert (figures.admitted, figures.unavailable) == (1, 1)


@virtual
async def test_those_who_ask_together_share_one_reading(world: World) -> None:
    one = world.add()
    await world.store.put_tenant(ACME, Tenant())
    await asyncio.sleep(2)
    before = one.store.calls["list_standings"]  # the tenants to be measured
    await asyncio.gather(*(one.services.overview.read() for _ in range(20)))
    assert one.store.calls["list_standings"] == before + 1
    await asyncio.sleep(2)
    await one.services.overview.read()
    assert one.store.calls["list_standings"] == before + 2


@virtual
async def test_a_tenant_that_was_seen_long_ago_is_listed_only_if_it_is_configured(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = world.add()
    for tenant in (ACME, CALM):
        await world.store.put_workflow(tenant, ONE)
    run_id = await world.start(one, "one")
    await world.store.put_tenant(CALM, Tenant())
    await one.services.inbox.cancel(run_id, reason=None, actor="caller")
    assert set(await _tenants(one)) == {ACME, CALM}
    monkeypatch.setattr(module, "SEEN_MS", 20_000)
    await asyncio.sleep(65)
    assert set(await _tenants(one)) == {CALM}


def test_tenants_are_listed_for_thirty_days_after_their_last_start() -> None:
    assert timedelta(milliseconds=module.SEEN_MS) == timedelta(days=30)
