"""Health: the store's clock, its pulse, and its end; and that nobody is left out of the suite."""

from __future__ import annotations

import pytest

from stanchion.ports.store import Store
from tests.contract.harness import Harness, adapters_with


async def test_a_store_answers_a_ping(store: Store) -> None:
    await store.ping()


async def test_a_stores_clock_goes_on(store: Store, harness: Harness) -> None:
    before = await store.now()
    await harness.pass_time(30)
    assert await store.now() >= before + 30


async def test_a_store_may_be_closed_twice(store: Store) -> None:
    await store.close()
    await store.close()


@pytest.mark.parametrize("port", ["store", "locks"])
def test_every_adapter_is_under_the_contract(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STANCHION_CONTRACT", raising=False)
    assert {"memory", "sqlite", "valkey", "cluster"} <= set(adapters_with(port))
