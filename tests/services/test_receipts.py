"""Receipts: one write a second and tenant, kept through an outage, bounded in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from stanchion.adapters.store.memory import MemoryStore
from stanchion.adapters.system import ManualClock, SystemEntropy
from stanchion.core.model import Instant, TenantId
from stanchion.core.receipts import KEPT_MAX, Receipt, ReceiptFilter
from stanchion.ports.errors import BackendUnavailable
from stanchion.ports.records import BadCursor
from stanchion.services import receipts as module
from stanchion.services.receipts import ReceiptService

ACME, GLOBEX = TenantId("acme"), TenantId("globex")
EVERY = ReceiptFilter()


class Store(MemoryStore):
    """Counts writes; fails, or loses the answer, when told to."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.writes: list[tuple[TenantId, int]] = []
        self.is_down = self.is_mute = False

    async def put_receipts(
        self, tenant: TenantId, receipts: Sequence[Receipt], *, batch_id: str
    ) -> None:
        if self.is_down:
            raise BackendUnavailable("connection refused")
        self.writes.append((tenant, len(receipts)))
        await super().put_receipts(tenant, receipts, batch_id=batch_id)
        if self.is_mute:
            raise BackendUnavailable("connection lost")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> Store:
    return Store(clock)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def service(store: Store, clock: ManualClock, registry: CollectorRegistry) -> ReceiptService:
    return ReceiptService(store, clock=clock, entropy=SystemEntropy(), registry=registry)


def refuse(
    service: ReceiptService, clock: ManualClock, *names: str, tenant: TenantId = ACME
) -> None:
    for name in names:
        outcome = "mismatch" if name.startswith("m") else "full"
        told = (outcome, 2, 2, 1_500, f"key-{name}", f"req-{name}", "kim", "here")
        service.note(Receipt(clock.now(), tenant, "flow", *told))


async def listed(
    service: ReceiptService,
    tenant: TenantId | None = ACME,
    only: ReceiptFilter = EVERY,
    limit: int = 100,
) -> list[str]:
    found: list[str] = []
    cursor: str | None = None
    while True:
        page = await service.list(tenant, only, cursor=cursor, limit=limit)
        assert len(page.items) <= limit
        found += [receipt.request_id.removeprefix("req-") for receipt in page.items]
        cursor = page.cursor
        if cursor is None:
            return found


async def test_a_storm_is_one_write_for_each_tenant_and_says_how_many_were_left_out(
    service: ReceiptService, clock: ManualClock, store: Store
) -> None:
    refuse(service, clock, *map(str, range(KEPT_MAX + 7)))
    refuse(service, clock, "other", tenant=GLOBEX)
    assert await service.write()
    assert store.writes == [(ACME, KEPT_MAX), (GLOBEX, 1)]
    found = (await service.list(ACME, EVERY, cursor=None, limit=1_000)).items
    assert [receipt.request_id for receipt in found[::-1]] == [f"req-{n}" for n in range(7, 1_007)]
    assert [receipt.left_out for receipt in found[::-1]] == [7, *[0] * (KEPT_MAX - 1)]
    assert await service.write()
    assert len(store.writes) == 2, "nothing was refused since"


async def test_receipts_wait_through_an_outage_and_are_written_once(
    service: ReceiptService, clock: ManualClock, store: Store
) -> None:
    store.is_down = True
    refuse(service, clock, "a")
    assert not await service.write()
    refuse(service, clock, "b")
    assert not await service.write()
    store.is_down, store.is_mute = False, True
    assert not await service.write(), "written, but the answer was lost"
    store.is_mute = False
    assert await service.write()
    assert await service.write()
    assert await listed(service) == ["b", "a"]
    assert service.waiting == 0


async def test_memory_is_bounded_over_all_tenants(
    service: ReceiptService, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 20)
    refuse(service, clock, *map(str, range(30)))
    for number in range(10):
        refuse(service, clock, "x", tenant=TenantId(f"t{number}"))
    assert service.waiting == 20
    assert await service.write()
    assert await listed(service) == [str(number) for number in range(29, 19, -1)]
    assert await listed(service, TenantId("t9")) == ["x"], "the largest tenant gave way"


async def test_more_tenants_than_receipts_that_may_wait_do_not_stop_the_writes(
    service: ReceiptService,
    clock: ManualClock,
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 20)
    for number in range(50):  # each has one receipt: the one that gives way has none left
        refuse(service, clock, "x", tenant=TenantId(f"t{number}"))
    assert service.waiting == 20
    assert await service.write()
    assert service.waiting == 0
    assert await listed(service, None) == ["x"] * 20
    assert registry.get_sample_value("stanchion_receipts_left_out_total") == 30
    refuse(service, clock, "y", tenant=TenantId("t0"))
    assert await service.write()
    assert "y" in await listed(service, TenantId("t0"))


@pytest.mark.parametrize("limit", [1, 3, 7, 100])
async def test_pages_neither_skip_nor_repeat_while_others_write(
    service: ReceiptService, clock: ManualClock, limit: int
) -> None:
    for batch in range(30):
        refuse(service, clock, f"{batch}a", f"{batch}b", tenant=ACME if batch % 3 else GLOBEX)
        await service.write()
    newest_first = [f"{batch}{each}" for batch in range(29, -1, -1) for each in "ba"]
    assert await listed(service, None, limit=limit) == newest_first
    first = await service.list(None, EVERY, cursor=None, limit=limit)
    refuse(service, clock, "late")
    await service.write()
    if first.cursor is not None:
        second = await service.list(None, EVERY, cursor=first.cursor, limit=1_000)
        both = [receipt.request_id.removeprefix("req-") for receipt in first.items + second.items]
        assert both == newest_first


async def test_filters_select_by_outcome_key_request_and_time(
    service: ReceiptService, clock: ManualClock
) -> None:
    refuse(service, clock, "a", "m1")
    clock.advance(10)
    between = clock.now()
    refuse(service, clock, "b")
    await service.write()

    async def only(**members: str | Instant) -> list[str]:
        return await listed(service, only=ReceiptFilter(**members))  # type: ignore[arg-type] # by name

    assert await only(outcome="mismatch") == ["m1"]
    assert await only(key="key-a") == ["a"]
    assert await only(request_id="req-b") == ["b"]
    assert await only(request_id="req-b", outcome="mismatch") == []
    assert await only(since=between) == ["b"]
    assert await only(until=between) == ["m1", "a"]


async def test_the_newest_thousand_of_a_day_are_listed(
    service: ReceiptService, clock: ManualClock
) -> None:
    for first in range(0, 1_500, 600):
        refuse(service, clock, *map(str, range(first, min(1_500, first + 600))))
        await service.write()
    for limit in (1, 400, 1_000):
        assert await listed(service, limit=limit) == [str(n) for n in range(1_499, 499, -1)]
    clock.advance(86_400_001)
    assert await listed(service) == []


async def test_a_cursor_of_another_list_is_refused(service: ReceiptService) -> None:
    for cursor in ("x", "x~1", "x~1~1", "~~", "a~-1~0"):
        with pytest.raises(BadCursor):
            await service.list(None, EVERY, cursor=cursor, limit=1)


async def test_a_tenant_whose_receipts_cannot_be_written_holds_up_no_others(
    service: ReceiptService,
    clock: ManualClock,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    away = {TenantId(f"away-{number}") for number in range(20)}
    refused: BaseException = BackendUnavailable("its shard is down")
    put = store.put_receipts

    async def put_receipts(tenant: TenantId, receipts: Sequence[Receipt], *, batch_id: str) -> None:
        if tenant in away:
            raise refused
        await asyncio.sleep(0)  # while it waits, another write of the same group fails
        await put(tenant, receipts, batch_id=batch_id)

    monkeypatch.setattr(store, "put_receipts", put_receipts)
    for tenant in sorted(away):
        refuse(service, clock, "a", tenant=tenant)
    others = [TenantId(f"other-{number}") for number in range(20)]
    for tenant in others:
        refuse(service, clock, "a", tenant=tenant)
    for _ in range(4):
        assert not await service.write()
    assert {tenant for tenant, _ in store.writes} == {*others}
    refused = RuntimeError("a defect")
    refuse(service, clock, "b", tenant=ACME)
    for _ in range(4):
        assert not await service.write()
    assert await listed(service) == ["b"]
    away.clear()
    for _ in range(2):
        await service.write()
    assert len(await listed(service, None)) == 41
    lines = [line.getMessage() for line in caplog.records]
    assert lines.count("receipts_write_failed") == 1
