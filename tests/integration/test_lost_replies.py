"""An answer that is lost on its way: whoever asks again must not be locked out by itself.

The request reaches the server and is executed. Then either the connection breaks, and the adapter
asks again by itself; or nothing comes, the caller gets a time-out, and asks again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from stanchion.adapters.locks.redis import RedisLocks
from stanchion.adapters.store.redis import RedisStore
from stanchion.core.admission import Admitted, Full
from stanchion.core.model import Stamp
from stanchion.drills.proxy import Loss, Proxy, proxied
from stanchion.ports.errors import BackendTimeout
from stanchion.ports.locks import Granted, Held, LockReleased
from stanchion.ports.records import Accepted, Committed, Tenant
from tests.contract.builders import (
    ACME,
    admission,
    commit_of,
    lease_one,
    loaded,
    nothing,
    result_of,
    start,
)
from tests.servers import Server

PATIENCE_MS = 1_000
"""How long callers wait: long enough for an answer on a busy machine, short enough to be lost."""
LONG_MS = 60_000


@pytest.fixture
async def proxy(valkey: Server) -> AsyncIterator[Proxy]:
    async with proxied(valkey.port) as proxy:
        yield proxy


@pytest.fixture
async def locks(proxy: Proxy, namespace: str) -> AsyncIterator[RedisLocks]:
    locks = await RedisLocks.open(proxy.url, namespace=namespace)
    # The server knows the script then: what is lost must be the answer to an acquire.
    await locks.acquire("other", "me", ttl_ms=1, within_ms=LONG_MS)
    yield locks
    await locks.close()


@pytest.fixture
async def store(proxy: Proxy, namespace: str) -> AsyncIterator[RedisStore]:
    store = await RedisStore.open(proxy.url, namespace=namespace, timeout_s=PATIENCE_MS / 1000)
    found = await loaded(store, await start(store))
    await store.commit(commit_of(found, nothing(found)))
    (await store.accept([result_of(await lease_one(store))]))
    yield store
    await store.close()


# ── Acquire ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_connection_that_breaks_after_an_acquire_does_not_lock_the_caller_out(
    proxy: Proxy, locks: RedisLocks
) -> None:
    trap = proxy.trap(b"name", Loss.CUT)
    granted = await locks.acquire("name", "me", ttl_ms=LONG_MS, within_ms=5_000)
    assert trap.is_sprung
    assert isinstance(granted, Granted)
    view = await locks.inspect("name")
    assert view is not None
    assert view.fence == granted.fence
    other = await locks.acquire("name", "other", ttl_ms=LONG_MS, within_ms=5_000)
    assert isinstance(other, Held)


async def test_an_acquire_without_an_answer_can_be_asked_again(
    proxy: Proxy, locks: RedisLocks
) -> None:
    trap = proxy.trap(b"name", Loss.SILENCE)
    with pytest.raises(BackendTimeout):
        await locks.acquire("name", "me", ttl_ms=LONG_MS, within_ms=PATIENCE_MS)
    assert trap.is_sprung
    view = await locks.inspect("name")
    assert view is not None, "it was executed: the lock is the caller's, who does not know"
    again = await locks.acquire("name", "me", ttl_ms=LONG_MS, within_ms=5_000)
    assert again == Granted(view.fence)
    assert await locks.release("name", "me", within_ms=5_000) == LockReleased()


# ── Commit ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_connection_that_breaks_after_a_commit_is_no_conflict(
    proxy: Proxy, store: RedisStore
) -> None:
    found = await loaded(store, await start(store))
    trap = proxy.trap(b"chosen-by-me", Loss.CUT)
    commit = commit_of(found, nothing(found, say="once"), chosen="chosen-by-me", fence=7)
    assert await store.commit(commit) == Committed(Stamp(2, "chosen-by-me"))
    assert trap.is_sprung
    lines = [line.what for line in (await store.timeline(found.run.id)).items]
    assert lines.count("once") == 1


async def test_a_commit_without_an_answer_can_be_sent_again(
    proxy: Proxy, store: RedisStore
) -> None:
    found = await loaded(store, await start(store))
    trap = proxy.trap(b"chosen-by-me", Loss.SILENCE)
    commit = commit_of(found, nothing(found, say="once"), chosen="chosen-by-me", fence=7)
    with pytest.raises(BackendTimeout):
        await store.commit(commit)
    assert trap.is_sprung
    assert (await loaded(store, found.run.id)).run.stamp == Stamp(2, "chosen-by-me")
    assert await store.commit(commit) == Committed(Stamp(2, "chosen-by-me"))
    lines = [line.what for line in (await store.timeline(found.run.id)).items]
    assert lines.count("once") == 1


# ── Admit and accept ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("loss", Loss)
async def test_an_admission_whose_answer_is_lost_makes_one_run_and_takes_one_slot(
    proxy: Proxy, store: RedisStore, loss: Loss
) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=2))
    wanted = admission(await store.now())
    trap = proxy.trap(wanted.run.id.encode(), loss)
    if loss is Loss.SILENCE:
        with pytest.raises(BackendTimeout):
            await store.admit(wanted, within_ms=PATIENCE_MS)
    assert await store.admit(wanted, within_ms=PATIENCE_MS) == Admitted(wanted.run.id)
    assert trap.is_sprung
    assert await store.active_runs(ACME) == 2
    refused = await store.admit(admission(await store.now()), within_ms=PATIENCE_MS)
    assert refused == Full(2, 2)


@pytest.mark.parametrize("loss", Loss)
async def test_a_result_whose_answer_is_lost_is_accepted_once(
    proxy: Proxy, store: RedisStore, loss: Loss
) -> None:
    run_id = await start(store)
    leased = await lease_one(store)
    result = result_of(leased, "the answer to this")
    trap = proxy.trap(b"the answer to this", loss)
    if loss is Loss.SILENCE:
        with pytest.raises(BackendTimeout):
            await store.accept([result])
    answers = await store.accept([result])
    assert trap.is_sprung
    assert answers == (Accepted(leased.job.id, run_id, repeated=True),)
    assert len((await loaded(store, run_id)).inbox) == 1
