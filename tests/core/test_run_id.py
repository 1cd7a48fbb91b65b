"""Run ids: the shard in front, then the time, then chance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stanchion.core.model import (
    SHARDS,
    Instant,
    RunId,
    TenantId,
    make_run_id,
    shard_of_run,
    shard_of_tenant,
)

TENANTS = st.text().map(TenantId)
TIMES = st.integers(0, 2**44).map(Instant)


@given(TENANTS, TIMES, st.integers(0, 2**64))
def test_an_id_says_where_its_run_lives(tenant: TenantId, at: Instant, chance: int) -> None:
    run_id = make_run_id(tenant, at, chance)
    assert shard_of_run(run_id) == shard_of_tenant(tenant)
    assert len(run_id) == 23
    assert run_id.isalnum()
    assert run_id == run_id.lower()


@given(TENANTS, TIMES, TIMES, st.integers(0, 2**60 - 1))
def test_ids_of_a_tenant_sort_by_age(
    tenant: TenantId, one: Instant, other: Instant, chance: int
) -> None:
    ids = make_run_id(tenant, one, chance), make_run_id(tenant, other, chance)
    assert (ids[0] < ids[1]) == (one < other)


@given(TENANTS, TIMES, st.integers(0, 2**60 - 1), st.integers(0, 2**60 - 1))
def test_all_sixty_bits_of_chance_count(
    tenant: TenantId, at: Instant, one: int, other: int
) -> None:
    assert (make_run_id(tenant, at, one) == make_run_id(tenant, at, other)) == (one == other)


def test_shards_are_stable_and_all_used() -> None:
    # Stored keys depend on these: a change would lose every run.
    assert [shard_of_tenant(TenantId(name)) for name in ("default", "acme", "é")] == [57, 5, 2]
    assert {shard_of_tenant(TenantId(f"t{n}")) for n in range(2_000)} == set(range(SHARDS))


@pytest.mark.parametrize("stranger", ["", "zz", "40aaaaaaaaabbbbbbbbbbbb", "00short", "r1", "0"])
def test_what_cannot_be_an_id_has_no_place(stranger: str) -> None:
    assert shard_of_run(RunId(stranger)) is None
