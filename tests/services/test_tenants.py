"""What a tenant wants different about its gate: at hand, and the new one once that was answered."""

from __future__ import annotations

import asyncio

from stanchion.adapters.store.memory import MemoryStore
from stanchion.core.json_value import JsonObject
from stanchion.core.model import TenantId
from stanchion.ports.errors import BackendUnavailable
from stanchion.ports.records import Document, Page, Tenant
from stanchion.services.settings import BELIEVED_MS, LISTED_MAX, TenantConfigs
from stanchion.sim import loop
from tests.services.virtual import in_virtual_time

ACME, OTHER = TenantId("acme"), TenantId("other")
LOCK: JsonObject = {"strategy": "lock"}


class Counted(MemoryStore):
    reads = 0
    lists = 0
    broken = False
    takes_s = 0.001

    async def tenant(self, tenant: TenantId) -> Tenant:
        self.reads += 1
        await self._travel()
        return await super().tenant(tenant)

    async def list_documents(
        self, kind: str, *, cursor: str | None = None, limit: int = 100
    ) -> Page[tuple[str, Document]]:
        self.lists += 1
        await self._travel()
        return await super().list_documents(kind, cursor=cursor, limit=limit)

    async def _travel(self) -> None:
        await asyncio.sleep(self.takes_s)
        if self.broken:
            raise BackendUnavailable("away")


class Stage:
    """Two replicas with one store."""

    def __init__(self) -> None:
        self.clock = loop.LoopClock()
        self.store = Counted(self.clock)
        self.here, self.there = (TenantConfigs(self.store, clock=self.clock) for _ in range(2))


virtual = in_virtual_time(Stage)


@virtual
async def test_tenants_that_want_nothing_cost_one_read_for_all_of_them(stage: Stage) -> None:
    for number in range(1_000):
        assert await stage.here.admission(TenantId(f"tenant-{number}")) is None
    assert (stage.store.lists, stage.store.reads) == (1, 0)


@virtual
async def test_a_tenant_has_no_override_without_a_read_only_while_that_is_believed(
    stage: Stage,
) -> None:
    assert not stage.here.has_none(ACME)  # nothing was read yet
    assert await stage.here.admission(ACME) is None
    assert stage.here.has_none(ACME)
    await stage.clock.sleep(BELIEVED_MS / 1_000)
    assert not stage.here.has_none(ACME)
    await stage.there.put(ACME, Tenant(admission=LOCK))
    assert await stage.here.admission(OTHER) is None
    assert (stage.here.has_none(ACME), stage.here.has_none(OTHER)) == (False, True)


@virtual
async def test_many_starts_at_once_read_once(stage: Stage) -> None:
    await stage.there.put(ACME, Tenant(admission=LOCK))
    stage.store.reads = stage.store.lists = 0
    found = await asyncio.gather(*(stage.here.admission(ACME) for _ in range(100)))
    assert found == [LOCK] * 100
    assert (stage.store.lists, stage.store.reads) == (1, 1)


@virtual
async def test_many_starts_at_once_share_reads_also_if_the_store_is_slow(stage: Stage) -> None:
    stage.store.takes_s = 2 * BELIEVED_MS / 1_000
    began = stage.clock.moment()
    tenants = [TenantId(f"tenant-{number}") for number in range(100)]
    first = [asyncio.create_task(stage.here.admission(each)) for each in tenants]
    await asyncio.sleep(0.01)
    later = [asyncio.create_task(stage.here.admission(each)) for each in tenants]
    assert await asyncio.gather(*first, *later) == [None] * 200
    # Who comes while a read is under way waits for one that begins after it.
    assert (stage.store.lists, stage.clock.moment() - began) == (2, 4 * BELIEVED_MS)


@virtual
async def test_many_starts_in_a_row_read_once(stage: Stage) -> None:
    await stage.there.put(ACME, Tenant(admission=LOCK))
    stage.store.reads = stage.store.lists = 0
    for _ in range(100):
        assert await stage.here.admission(ACME) == LOCK
        assert await stage.here.admission(OTHER) is None
    assert (stage.store.lists, stage.store.reads) == (1, 1)


@virtual
async def test_if_very_many_want_something_different_each_is_asked_for(stage: Stage) -> None:
    for number in range(LISTED_MAX):
        await stage.store.put_document("gates", f"tenant-{number}", {}, read=None)
    await stage.there.put(ACME, Tenant(admission=LOCK))
    assert await stage.here.admission(ACME) == LOCK
    assert await stage.here.admission(OTHER) is None


@virtual
async def test_a_read_that_fails_fails_for_all_who_waited_and_the_next_one_reads(
    stage: Stage,
) -> None:
    stage.store.broken = True
    found = await asyncio.gather(
        *(stage.here.admission(ACME) for _ in range(3)), return_exceptions=True
    )
    assert [type(each) for each in found] == [BackendUnavailable] * 3
    stage.store.broken = False
    assert await stage.here.admission(ACME) is None
    assert stage.store.lists == 2


@virtual
async def test_one_who_reads_for_others_and_leaves_takes_nobody_along(stage: Stage) -> None:
    reading, other = (asyncio.create_task(stage.here.admission(ACME)) for _ in range(2))
    await asyncio.sleep(0)
    reading.cancel()
    assert await other is None


@virtual
async def test_a_change_is_known_at_once_where_it_was_made(stage: Stage) -> None:
    await stage.here.admission(ACME)
    await stage.here.put(ACME, Tenant(admission=LOCK))
    assert await stage.here.admission(ACME) == LOCK


@virtual
async def test_a_change_is_in_force_elsewhere_when_it_was_answered(stage: Stage) -> None:
    wanted: JsonObject | None
    for wanted in (LOCK, None, LOCK):
        putting = asyncio.create_task(stage.here.put(ACME, Tenant(admission=wanted)))
        while not putting.done():
            await stage.there.admission(ACME)
            await asyncio.sleep(0.001)
        assert await stage.there.admission(ACME) == wanted


@virtual
async def test_the_same_change_again_is_in_force_when_it_was_answered(stage: Stage) -> None:
    wanted: JsonObject | None
    for wanted in (LOCK, None):
        await stage.there.admission(ACME)
        first = asyncio.create_task(stage.here.put(ACME, Tenant(admission=wanted)))
        await asyncio.sleep(0.02)
        await stage.here.put(ACME, Tenant(admission=wanted))
        assert await stage.there.admission(ACME) == wanted
        await first


@virtual
async def test_a_change_of_the_cap_alone_is_answered_at_once(stage: Stage) -> None:
    began = stage.clock.moment()
    await stage.here.put(ACME, Tenant(max_concurrent_runs=3))
    assert stage.clock.moment() - began < 10


@virtual
async def test_an_answer_that_was_under_way_when_somebody_wrote_is_not_kept(stage: Stage) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    class Slow(MemoryStore):
        async def list_documents(
            self, kind: str, *, cursor: str | None = None, limit: int = 100
        ) -> Page[tuple[str, Document]]:
            before = await super().list_documents(kind, cursor=cursor, limit=limit)
            if not asked.is_set():
                asked.set()
                await go_on.wait()
            return before

    slow = Slow(stage.clock)
    tenants = TenantConfigs(slow, clock=stage.clock)
    old = asyncio.create_task(tenants.admission(ACME))
    await asked.wait()
    await tenants.put(ACME, Tenant(admission=LOCK))
    go_on.set()
    assert await old is None
    assert await tenants.admission(ACME) == LOCK
