"""Tokens of topic limits: never more than there may be, at their rate, and never lost for long."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import islice
from typing import Final

from msgspec.structs import replace

from stanchion.core.model import Instant, TenantId, Topic, shard_of_tenant
from stanchion.core.topic_limits import TokenPool
from stanchion.ports.store import Store
from tests.contract.builders import (
    ACME,
    GLOBEX,
    TOPIC,
    WORKER,
    cancel,
    held,
    lease,
    lease_one,
    start,
)
from tests.contract.harness import LONG_MS, Harness

_POOL: Final = TokenPool("llm", None, 3, None)


async def _take(store: Store, *tokens: str, pool: TokenPool = _POOL, ttl_ms: int = LONG_MS) -> str:
    """The tokens that were granted, in one text."""
    grant = await store.take_tokens(pool, tokens, ttl_ms=ttl_ms)
    return " ".join(grant.tokens)


async def _renew(
    store: Store, *tokens: str, pool: TokenPool = _POOL, ttl_ms: int = LONG_MS
) -> set[str]:
    renewal = await store.renew_tokens(pool, {each: each for each in tokens}, ttl_ms=ttl_ms)
    return {*renewal.tokens}


async def _running(store: Store, pool: TokenPool = _POOL) -> int:
    (use,) = await store.pool_uses([pool])
    return use.running


async def test_a_pool_has_so_many_tokens_and_no_more(store: Store) -> None:
    first = await store.take_tokens(_POOL, ["a", "b"], ttl_ms=LONG_MS)
    assert (first.tokens, first.running, first.is_rate_spent) == (("a", "b"), 2, False)
    assert abs(first.at - await store.now()) < LONG_MS
    second = await store.take_tokens(_POOL, ["c", "d"], ttl_ms=LONG_MS)
    assert (second.tokens, second.running, second.retry_after_ms) == (("c",), 3, 0)
    assert await _take(store, "e") == ""
    assert await _running(store) == 3


async def test_a_token_that_is_taken_again_is_the_same_token(store: Store) -> None:
    pool = replace(_POOL, rate_per_s=1.0)
    assert await _take(store, "a", pool=pool) == "a"
    again = await store.take_tokens(pool, ["a", "b"], ttl_ms=LONG_MS)
    assert (again.tokens, again.running, again.is_rate_spent) == (("a",), 1, True)


async def test_callers_at_the_same_time_get_no_more_than_there_are(store: Store) -> None:
    grants = await asyncio.gather(*(_take(store, f"{i}a", f"{i}b") for i in range(10)))
    assert len(" ".join(grants).split()) == 3
    assert await _running(store) == 3


async def test_a_released_token_makes_room_once(store: Store) -> None:
    await _take(store, "a", "b", "c")
    assert await store.release_tokens(_POOL, ["a", "a", "unknown"]) == 1
    assert await store.release_tokens(_POOL, ["a"]) == 0
    assert await _take(store, "d", "e") == "d"


async def test_a_token_that_is_not_renewed_makes_room_again(store: Store, harness: Harness) -> None:
    await _take(store, "a", "b", ttl_ms=harness.short_ms)
    await _take(store, "c")
    await harness.pass_time(harness.short_ms)
    assert await _running(store) == 1
    assert await _take(store, "d", "e", "f") == "d e"
    # It is not there any more, and there is no room for it.
    assert await _renew(store, "a") == set()
    assert await store.release_tokens(_POOL, ["a"]) == 0


async def test_a_renewed_token_stays(store: Store, harness: Harness) -> None:
    await _take(store, "a", "b", "c", ttl_ms=harness.short_ms)
    assert await _renew(store, "a", "c") == {"a", "c"}
    await harness.pass_time(harness.short_ms)
    assert await _take(store, "d", "e") == "d"


async def test_a_token_takes_the_name_of_its_job_and_keeps_its_place(
    store: Store, harness: Harness
) -> None:
    await _take(store, "a", "b", "c", ttl_ms=harness.short_ms)
    renamed = await store.renew_tokens(_POOL, {"a": "job-1", "b": "job-2"}, ttl_ms=LONG_MS)
    assert renamed.tokens == {"job-1", "job-2"}
    # Sent again after a lost answer: the old name is gone, the new one is there.
    again = await store.renew_tokens(_POOL, {"a": "job-1"}, ttl_ms=LONG_MS)
    assert again.tokens == {"job-1"}
    await harness.pass_time(harness.short_ms)
    assert await _running(store) == 2
    assert await _take(store, "d") == "d"
    assert await store.release_tokens(_POOL, ["a"]) == 0
    assert await store.release_tokens(_POOL, ["job-1"]) == 1
    # It was taken second, and now is the first.
    assert await _renew(store, "job-2", "d", pool=replace(_POOL, max_running=1)) == {"job-2"}


async def test_a_token_under_both_of_its_names_becomes_one(store: Store) -> None:
    for tokens in (["later", "t", "job"], ["job", "t", "later"]):
        await store.release_tokens(_POOL, ["later", "t", "job"])
        await _take(store, *tokens)
        # One replica took it for the lease, and another, which renewed the lease, under its name.
        renewal = await store.renew_tokens(_POOL, {"t": "job"}, ttl_ms=LONG_MS)
        assert renewal.tokens == {"job"}
        assert await _running(store) == 2
        # It has the place of the first name.
        lowered = replace(_POOL, max_running=1)
        is_first = tokens[0] == "job"
        assert await _renew(store, "job", "later", pool=lowered) == {"job" if is_first else "later"}
    again = await store.take_tokens(_POOL, ["job", "job"], ttl_ms=LONG_MS)
    assert again.tokens == ("job",)


async def test_after_a_limit_is_lowered_the_first_ones_go_on(store: Store) -> None:
    await _take(store, "a", "b", "c")
    lowered = replace(_POOL, max_running=2)
    assert await _renew(store, "c", "b", "a", pool=lowered) == {"a", "b"}
    assert await _take(store, "d", pool=lowered) == ""
    await store.release_tokens(lowered, ["a"])
    assert await _renew(store, "b", "c", pool=lowered) == {"b", "c"}


async def test_a_lease_that_is_older_than_its_limit_gets_a_token_if_there_is_room(
    store: Store,
) -> None:
    await _take(store, "a", "b")
    assert await _renew(store, "old-1", "old-2") == {"old-1"}
    assert await _running(store) == 3


async def test_tokens_come_at_their_rate_after_a_burst(store: Store, harness: Harness) -> None:
    pool = TokenPool("quota", None, None, 20.0)
    grant = await store.take_tokens(pool, [f"a{i}" for i in range(30)], ttl_ms=LONG_MS)
    assert len(grant.tokens) in range(20, 23)  # a server's clock goes on meanwhile
    assert grant.is_rate_spent
    assert 0 < grant.retry_after_ms <= 50
    (use,) = await store.pool_uses([pool])
    assert use.retry_after_ms <= 50
    await harness.pass_time(250)
    later = await store.take_tokens(pool, [f"b{i}" for i in range(30)], ttl_ms=LONG_MS)
    assert len(later.tokens) in range(5, 21)


async def test_a_slow_rate_has_a_burst_of_one(store: Store) -> None:
    pool = TokenPool("slow", None, None, 0.01)
    grant = await store.take_tokens(pool, ["a", "b"], ttl_ms=LONG_MS)
    assert (grant.tokens, grant.is_rate_spent) == (("a",), True)
    assert 90_000 < grant.retry_after_ms <= 100_000


async def test_an_unused_token_is_given_back_to_the_rate(store: Store) -> None:
    pool = TokenPool("slow", None, None, 0.01)
    await _take(store, "a", pool=pool)
    assert await store.release_tokens(pool, ["a"], is_unused=True) == 1
    assert await store.release_tokens(pool, ["a"], is_unused=True) == 0
    assert await _take(store, "b", "c", pool=pool) == "b"
    assert await store.release_tokens(pool, ["b"]) == 1
    assert await _take(store, "d", pool=pool) == ""


async def test_pools_of_tenants_and_limits_are_separate(store: Store) -> None:
    pools = [TokenPool(name, tenant, 1, None) for name in "ab" for tenant in (None, ACME, GLOBEX)]
    for pool in pools:
        assert await _take(store, "x", "y", pool=pool) == "x"
    assert [use.running for use in await store.pool_uses(pools)] == [1] * 6
    assert await store.pool_uses([]) == ()


async def test_a_limit_of_nothing_stops_the_topic(store: Store) -> None:
    pool = TokenPool("stopped", None, 0, 5.0)
    grant = await store.take_tokens(pool, ["a"], ttl_ms=LONG_MS)
    assert (grant.tokens, grant.running, grant.is_rate_spent) == ((), 0, False)
    assert await _renew(store, "a", pool=pool) == set()


async def test_a_pool_keeps_its_tokens_when_the_store_is_opened_again(harness: Harness) -> None:
    store = await harness.open_store()
    await _take(store, "a", "b", "c")
    if harness.name != "memory":
        store = await harness.reopen()
    assert await _take(store, "d") == ""


# ── Leases with a deadline ───────────────────────────────────────────────────────────────────────


async def test_a_lease_that_comes_too_late_is_not_made(store: Store) -> None:
    await start(store)
    now = await store.now()
    late, soon = Instant(now - 1), Instant(now + LONG_MS)
    topics = [TOPIC]
    assert await store.lease_jobs(WORKER, topics, max_jobs=1, ttl_ms=5, not_after=late) == ()
    for tenant in (GLOBEX, None):
        found = await store.lease_jobs(
            WORKER, topics, max_jobs=2, ttl_ms=LONG_MS, not_after=soon, tenant=tenant
        )
        assert len(found) == (tenant is None)


async def test_a_renewal_that_comes_too_late_extends_nothing(
    store: Store, harness: Harness
) -> None:
    await start(store)
    leased = await lease_one(store, ttl_ms=harness.short_ms)
    now = await store.now()
    late = await store.renew_jobs([held(leased)], ttl_ms=LONG_MS, not_after=Instant(now - 1))
    assert (late.renewed, late.lost) == ((), ())
    soon = Instant(now + LONG_MS)
    again = await store.renew_jobs([held(leased)], ttl_ms=harness.short_ms, not_after=soon)
    assert again.renewed == (leased.job.id,)
    await harness.pass_time(harness.short_ms)
    assert {*await store.lost_leases([held(leased)])} == {leased.job.id}


# ── Tenants with ready jobs ──────────────────────────────────────────────────────────────────────


async def test_tenants_with_ready_jobs_are_found_and_counted(store: Store) -> None:
    neighbour = _neighbour(ACME)
    for tenant in (ACME, ACME, GLOBEX, neighbour):
        await start(store, tenant=tenant)
    ready = await store.ready_tenants([TOPIC, Topic("other")], limit=10)
    assert ready == {ACME: 2, GLOBEX: 1, neighbour: 1}
    assert len(await store.ready_tenants([TOPIC], limit=2)) == 2
    assert await store.ready_tenants([TOPIC], limit=10, tenant=ACME) == {ACME: 2}
    assert await store.ready_tenants([TOPIC], limit=1, but_not=[ACME, GLOBEX]) == {neighbour: 1}
    assert await store.ready_tenants([TOPIC], limit=9, tenant=ACME, but_not=[ACME]) == {}
    assert await store.ready_tenants([Topic("other")], limit=10) == {}
    assert len(await lease(store, tenant=ACME, max_jobs=5)) == 2
    assert await store.ready_tenants([TOPIC], limit=10) == {GLOBEX: 1, neighbour: 1}


async def test_tenants_without_ready_jobs_do_not_hide_others(store: Store) -> None:
    # All in one shard: their places in its order of turns are looked at first.
    *gone, last = (ACME, *_neighbours(ACME, 3))
    for tenant in gone:
        await cancel(store, await start(store, tenant=tenant))
    await start(store, tenant=last)
    assert await store.ready_tenants([TOPIC], limit=1) == {last: 1}
    assert len(await lease(store, tenant=last)) == 1
    await start(store, tenant=ACME)
    assert await store.ready_tenants([TOPIC], limit=1) == {ACME: 1}
    assert [each.job.tenant for each in await lease(store)] == [ACME]


def _neighbour(tenant: TenantId) -> TenantId:
    """A tenant in the same shard."""
    return _neighbours(tenant, 1)[0]


def _neighbours(tenant: TenantId, count: int) -> list[TenantId]:
    names = (TenantId(f"neighbour-{i}") for i in range(10_000))
    same = (each for each in names if shard_of_tenant(each) == shard_of_tenant(tenant))
    return [*islice(same, count)]


async def test_a_tenant_whose_jobs_were_leased_by_name_is_behind_the_others(store: Store) -> None:
    tenants = (ACME, *_neighbours(ACME, 2))
    for tenant in tenants * 3:
        await start(store, tenant=tenant)
    served: list[TenantId] = []
    for _ in range(9):
        (tenant,) = await store.ready_tenants([TOPIC], limit=1)
        assert len(await lease(store, tenant=tenant, max_jobs=1)) == 1
        served.append(tenant)
    for turn in range(3):
        assert {*served[3 * turn : 3 * turn + 3]} == {*tenants}


async def test_tenants_of_several_shards_take_turns_to_be_named_first(store: Store) -> None:
    others = {shard_of_tenant(each): each for each in (TenantId(f"t-{i}") for i in range(40))}
    tenants = (ACME, *[each for at, each in others.items() if at != shard_of_tenant(ACME)][:2])
    for tenant in tenants * 4:
        await start(store, tenant=tenant)
    served: Counter[TenantId] = Counter()
    for _ in range(9):
        tenant = next(iter(await store.ready_tenants([TOPIC], limit=10)))
        served[tenant] += len(await lease(store, tenant=tenant, max_jobs=1))
    assert min(served[tenant] for tenant in tenants) >= 2, served
