"""A replica that is promoted although writes did not reach it: the lost history does no harm.

The primary acknowledged a grant, a commit, a lease and an admission that the replica never saw. On
the replica, none of their fences and no (version, nonce) is given out again, and whoever belongs to
the lost history is recognised.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest

from stanchion.adapters.locks.redis import RedisLocks
from stanchion.adapters.store.redis import RedisStore
from stanchion.core.admission import Admitted
from stanchion.core.model import RunId, Stamp
from stanchion.drills.proxy import Proxy, proxied
from stanchion.ports.locks import Granted, Held, Locks, NotOwned
from stanchion.ports.records import (
    Accepted,
    Commit,
    CommitConflict,
    Committed,
    LeasedJob,
    RejectedCode,
    ResultRefused,
    StaleFence,
)
from tests.contract.builders import (
    ONE_JOB,
    WITHIN_MS,
    admission,
    commit_of,
    lease_one,
    loaded,
    nothing,
    result_of,
    start,
)
from tests.servers import Server, running_server

LONG_MS = 60_000
NAME = "run/one"
NAMESPACE = "failover"
CATCH_UP_S_MAX = 10.0


class Duo(NamedTuple):
    """A primary, its replica, and the wire between them."""

    primary: Server
    replica: Server
    wire: Proxy

    async def catch_up(self) -> None:
        """Come back when the replica has everything."""
        until = time.monotonic() + CATCH_UP_S_MAX
        while not await asyncio.to_thread(self._is_level):
            assert time.monotonic() < until, "the replica does not catch up"
            await asyncio.sleep(0.01)

    def _is_level(self) -> bool:
        with self.primary.client() as primary, self.replica.client() as replica:
            there, here = primary.info("replication"), replica.info("replication")
        is_linked: bool = here["master_link_status"] == "up"
        has_all: bool = here["slave_repl_offset"] >= there["master_repl_offset"]
        return is_linked and has_all

    async def fail_over(self) -> None:
        """The primary is gone, and the replica is the primary."""

        def promote() -> None:
            self.primary.kill()
            with self.replica.client() as client:
                client.replicaof("NO", "ONE")

        await asyncio.to_thread(promote)


@asynccontextmanager
async def duo() -> AsyncIterator[Duo]:
    with running_server(None, "--repl-diskless-sync-delay", "0") as primary:
        async with proxied(primary.port) as wire:
            options = ("--replicaof", "127.0.0.1", str(wire.port))
            with running_server(None, *options) as replica:
                yield Duo(primary, replica, wire)


class Lost(NamedTuple):
    """What the old primary acknowledged and the replica never saw."""

    grant: int
    commit: Commit
    leased: LeasedJob
    run_id: RunId


@pytest.mark.parametrize("_round", range(2))
async def test_nothing_of_a_lost_history_comes_again(_round: int) -> None:
    await _fail_over_once()


@pytest.mark.chaos
@pytest.mark.parametrize("_round", range(20))
async def test_nothing_of_a_lost_history_comes_again_in_many_failovers(_round: int) -> None:
    await _fail_over_once()


async def _fail_over_once() -> None:
    async with duo() as servers:
        store, locks = await _open(servers.primary)
        run_id = await start(store, ONE_JOB)
        first = await _acquire(locks, "first")
        found = await loaded(store, run_id)
        await store.commit(commit_of(found, nothing(found), fence=first))
        await servers.catch_up()
        servers.wire.cut()
        lost = await _write_what_will_be_lost(store, locks, run_id)
        await store.close()
        await locks.close()
        await servers.fail_over()

        store, locks = await _open(servers.replica)
        assert (await loaded(store, run_id)).run.stamp.version == 2, "nothing was lost"
        grant = await _check_locks(locks, lost)
        await _check_commits(store, run_id, lost, grant)
        await _check_jobs(store, lost)
        assert await store.load(lost.run_id) is None
        await store.close()
        await locks.close()


async def _write_what_will_be_lost(store: RedisStore, locks: Locks, run_id: RunId) -> Lost:
    await locks.release(NAME, "first", within_ms=WITHIN_MS)
    grant = await _acquire(locks, "second")
    found = await loaded(store, run_id)
    commit = commit_of(found, nothing(found, say="lost"), fence=grant, chosen="lost")
    assert await store.commit(commit) == Committed(Stamp(3, "lost"))
    leased = await lease_one(store)
    admitted = admission(await store.now())
    assert await store.admit(admitted, within_ms=WITHIN_MS) == Admitted(admitted.run.id)
    return Lost(grant, commit, leased, admitted.run.id)


async def _check_locks(locks: Locks, lost: Lost) -> int:
    """The lost holder has nothing, and the next grant is above its."""
    assert await locks.renew(NAME, "second", ttl_ms=LONG_MS, within_ms=WITHIN_MS) == NotOwned()
    held = await locks.acquire(NAME, "third", ttl_ms=LONG_MS, within_ms=WITHIN_MS)
    assert isinstance(held, Held), "the release was lost as well"
    assert await locks.force_release(NAME)
    grant = await _acquire(locks, "third")
    assert grant > lost.grant
    return grant


async def _check_commits(store: RedisStore, run_id: RunId, lost: Lost, grant: int) -> None:
    found = await loaded(store, run_id)
    # A writer that goes on from what it read in the lost history, before and after the new one has
    # come to the same version.
    goes_on = Commit(
        run_id=run_id,
        transition=nothing(found, say="goes on"),
        read=Stamp(3, "lost"),
        nonce="goes on",
        fence=None,
    )
    assert await store.commit(goes_on) == CommitConflict()
    new = commit_of(found, nothing(found, say="new"), fence=grant, chosen="new")
    assert await store.commit(new) == Committed(Stamp(3, "new"))
    assert await store.commit(goes_on) == CommitConflict()
    # The lost commit itself, sent again by a writer that never got its answer.
    assert await store.commit(lost.commit) == StaleFence(grant)
    lines = [line.what for line in (await store.timeline(run_id)).items]
    assert lines[-1] == "new"
    assert not {"lost", "goes on"} & set(lines)


async def _check_jobs(store: RedisStore, lost: Lost) -> None:
    again = await lease_one(store)
    assert again.job.id == lost.leased.job.id
    assert again.fence > lost.leased.fence
    late, good = await store.accept([result_of(lost.leased), result_of(again)])
    assert late == ResultRefused(again.job.id, RejectedCode.STALE_FENCE)
    assert good == Accepted(again.job.id, again.job.run_id)


async def _open(server: Server) -> tuple[RedisStore, RedisLocks]:
    return (
        await RedisStore.open(server.url, namespace=NAMESPACE),
        await RedisLocks.open(server.url, namespace=NAMESPACE),
    )


async def _acquire(locks: Locks, token: str) -> int:
    granted = await locks.acquire(NAME, token, ttl_ms=LONG_MS, within_ms=WITHIN_MS)
    assert isinstance(granted, Granted)
    return granted.fence
