"""Receipts of refusals: batches that are written once, the newest thousand of each tenant."""

from __future__ import annotations

import pytest

from stanchion.core.model import Instant, TenantId
from stanchion.core.receipts import Receipt
from stanchion.ports.records import BadCursor
from stanchion.ports.store import Store
from tests.contract.builders import ACME, GLOBEX
from tests.contract.harness import Harness


def _receipts(tenant: TenantId, first: int, count: int) -> tuple[Receipt, ...]:
    return tuple(
        Receipt(
            Instant(number),
            tenant,
            "flow",
            "full",
            2,
            2,
            1_500,
            f"é{number}",
            f"r{number}",
            "a",
            "b",
            budget="tokens" if number % 2 else None,
        )
        for number in range(first, first + count)
    )


async def _numbers(store: Store, tenant: TenantId | None) -> list[list[int]]:
    """The times of the receipts of each batch, newest batch first, read one batch at a time."""
    found: list[list[int]] = []
    place: str | None = None
    while True:
        batches = await store.receipt_batches(tenant, at_most=place, limit=2)
        if batches:
            found.append([receipt.at for receipt in batches[0].receipts])
        if len(batches) < 2:
            return found
        place = batches[1].place


async def test_a_batch_comes_back_as_it_was_and_once(store: Store) -> None:
    written = _receipts(ACME, 0, 3)
    for _ in range(2):  # the repeat of a write whose answer was lost
        await store.put_receipts(ACME, written, batch_id="a")
    (batch,) = await store.receipt_batches(ACME)
    assert batch.receipts == written
    assert await store.receipt_batches(GLOBEX) == ()


async def test_batches_are_listed_newest_first_of_one_tenant_or_of_all(store: Store) -> None:
    tenants = [ACME, GLOBEX, TenantId("initech"), ACME, GLOBEX]
    for number, tenant in enumerate(tenants):
        await store.put_receipts(tenant, _receipts(tenant, 10 * number, 2), batch_id=str(number))
    assert await _numbers(store, ACME) == [[30, 31], [0, 1]]
    assert await _numbers(store, GLOBEX) == [[40, 41], [10, 11]]
    assert await _numbers(store, TenantId("nobody")) == []
    everything = await _numbers(store, None)
    assert everything == [[40, 41], [30, 31], [20, 21], [10, 11], [0, 1]]


async def test_the_newest_thousand_of_each_tenant_are_kept(store: Store) -> None:
    await store.put_receipts(GLOBEX, _receipts(GLOBEX, 0, 1), batch_id="other")
    for number in range(5):
        await store.put_receipts(ACME, _receipts(ACME, number * 400, 400), batch_id=str(number))
    found = await _numbers(store, ACME)
    assert [batch[0] for batch in found] == [1600, 1200, 800]
    assert await _numbers(store, GLOBEX) == [[0]]
    await store.put_receipts(ACME, _receipts(ACME, 5000, 1000), batch_id="whole")
    assert [batch[0] for batch in await _numbers(store, ACME)] == [5000]


async def test_batches_are_gone_after_a_day(store: Store, harness: Harness) -> None:
    if harness.name not in {"memory", "sqlite"}:
        pytest.skip("a server's clock cannot be advanced by a day")
    await store.put_receipts(ACME, _receipts(ACME, 0, 1), batch_id="old")
    await harness.pass_time(86_400_001)
    await store.put_receipts(GLOBEX, _receipts(GLOBEX, 1, 1), batch_id="new")
    assert await _numbers(store, None) == [[1]]


async def test_another_place_is_refused(store: Store) -> None:
    with pytest.raises(BadCursor):
        await store.receipt_batches(None, at_most="x")
