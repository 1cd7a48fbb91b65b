"""A lossy failover: a replica is promoted that never saw the last writes of its primary."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from stanchion.adapters.locks.redis import RedisLocks
from stanchion.adapters.store.redis import RedisStore
from stanchion.core.model import RunId
from stanchion.ports.locks import Granted
from stanchion.ports.records import Committed, Conflict, Loaded, Rejected, RejectedCode
from tests.contract.builders import (
    WITHIN_MS,
    commit_of,
    lease_one,
    loaded,
    nothing,
    result_of,
    start,
)
from tests.servers import Server, running_server

_TTL_MS = 60_000


class _Pair:
    """A primary and its replica. What comes after ``cut`` is lost when the replica is promoted."""

    def __init__(self, primary: Server, replica: Server) -> None:
        self.primary = primary
        self.replica = replica

    def cut(self) -> None:
        with self.primary.client() as client:
            client.set("marker", "1")  # WAIT is about what this very connection wrote.
            assert client.wait(1, 5_000) == 1
        with self.replica.client() as client:
            client.replicaof("NO", "ONE")


@pytest.fixture
async def pair() -> AsyncIterator[_Pair]:
    with running_server(None, "--repl-diskless-sync-delay", "0") as primary:
        replicates = ("--replicaof", f"127.0.0.1 {primary.port}")
        with running_server(None, *replicates) as replica:
            yield _Pair(primary, replica)


async def test_no_fence_of_a_lock_is_given_out_again(pair: _Pair) -> None:
    before = await RedisLocks.open(pair.primary.url, timeout_s=5.0)
    await before.acquire("run/1", "first", ttl_ms=_TTL_MS, within_ms=WITHIN_MS)
    await before.release("run/1", "first", within_ms=WITHIN_MS)
    pair.cut()
    fences: list[int] = []
    for turn in range(20):
        answer = await before.acquire("run/1", f"t{turn}", ttl_ms=_TTL_MS, within_ms=WITHIN_MS)
        assert isinstance(answer, Granted)
        fences.append(answer.fence)
        await before.release("run/1", f"t{turn}", within_ms=WITHIN_MS)
    after = await RedisLocks.open(pair.replica.url, timeout_s=5.0)
    answer = await after.acquire("run/1", "second", ttl_ms=_TTL_MS, within_ms=WITHIN_MS)
    assert isinstance(answer, Granted)
    assert answer.fence > max(fences)
    await before.close()
    await after.close()


async def test_no_fence_of_a_job_is_given_out_again(pair: _Pair) -> None:
    before = await RedisStore.open(pair.primary.url, timeout_s=5.0)
    await start(before)
    pair.cut()
    lost = await lease_one(before)
    after = await RedisStore.open(pair.replica.url, timeout_s=5.0)
    leased = await lease_one(after)
    assert leased.job == lost.job
    assert leased.fence > lost.fence
    (late,) = await after.accept([result_of(lost)])
    assert late == Rejected(lost.job.id, RejectedCode.STALE_FENCE)
    await before.close()
    await after.close()


async def test_a_writer_of_the_lost_history_cannot_write_into_the_other(pair: _Pair) -> None:
    before = await RedisStore.open(pair.primary.url, timeout_s=5.0)
    run_id = await start(before)
    pair.cut()
    lost = await _written(before, run_id)
    after = await RedisStore.open(pair.replica.url, timeout_s=5.0)
    other = await _written(after, run_id)
    # Both have the same version. It is the nonce that tells them apart.
    assert other.run.stamp.version == lost.run.stamp.version
    assert await after.commit(commit_of(lost, nothing(lost))) == Conflict()
    assert await after.commit(commit_of(other, nothing(other))) != Conflict()
    await before.close()
    await after.close()


async def _written(store: RedisStore, run_id: RunId) -> Loaded:
    """The run after one more commit."""
    found = await loaded(store, run_id)
    assert isinstance(await store.commit(commit_of(found, nothing(found))), Committed)
    return await loaded(store, run_id)
