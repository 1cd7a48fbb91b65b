"""Sentinels: they know who the primary is, also when it is another one than before."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from stanchion.adapters.store.redis import RedisStore
from stanchion.core.model import RunId
from stanchion.ports.errors import BackendUnavailable
from stanchion.ports.records import Tenant
from tests.adapters.sentinels import SERVICE, running_sentinel, until
from tests.contract.builders import ACME, start
from tests.servers import Server, running_server

_SOON_S = 20.0


async def test_the_new_primary_is_found_after_a_failover(tmp_path: Path) -> None:
    with _replicated(tmp_path) as (primary, replica, sentinel):
        store = await RedisStore.open(
            f"redis+sentinel://127.0.0.1:1,{sentinel.address}/{SERVICE}", timeout_s=5.0
        )
        await store.put_tenant(ACME, Tenant(max_concurrent_runs=None))
        run_id = await start(store)
        with primary.client() as client:
            client.set("marker", "1")  # WAIT is about what this very connection wrote.
            assert client.wait(1, 5_000) == 1
        primary.kill()
        with pytest.raises(BackendUnavailable):
            await start(store)
        with pytest.raises(BackendUnavailable):
            await store.ping()
        await _started(store)
        await store.ping()
        with replica.client() as client:
            assert client.role()[0] == "master"
        assert await store.load(run_id) is not None
        assert await store.active_runs(ACME) == 2
        await store.close()


async def test_a_primary_that_hangs_is_left_when_it_has_been_replaced(tmp_path: Path) -> None:
    with _replicated(tmp_path) as (primary, replica, sentinel):
        store = await RedisStore.open(
            f"redis+sentinel://{sentinel.address}/{SERVICE}", timeout_s=1.0
        )
        await start(store)
        primary.pause()
        # Its sockets take what is sent, now and later: nothing but the silence tells. And nobody
        # looks at its clock, which would have been noticed.
        await _written(store)
        with replica.client() as client:
            assert client.role()[0] == "master"
        primary.resume()
        await start(store)
        await store.close()


async def test_a_primary_that_does_not_know_it_was_replaced_is_left(tmp_path: Path) -> None:
    with _replicated(tmp_path) as (primary, replica, sentinel):
        store = await RedisStore.open(
            f"redis+sentinel://{sentinel.address}/{SERVICE}", timeout_s=5.0
        )
        await start(store)
        with primary.client() as old, replica.client() as new, sentinel.client() as watcher:
            old.config_set("min-replicas-to-write", 1)
            # Told before it is promoted: the old one must not be made a replica by the sentinel.
            watcher.sentinel_remove(SERVICE)
            new.replicaof("NO", "ONE")
            watcher.sentinel_monitor(SERVICE, "127.0.0.1", replica.port, 1)
            until(lambda: old.info("replication")["connected_slaves"] == 0)
            assert old.role()[0] == "master"
        run_id = await _started(store)
        with replica.client() as new:
            assert new.keys(f"*{run_id}*")
        await store.close()


async def _written(store: RedisStore) -> None:
    """Something, once the failover is over."""
    async with asyncio.timeout(_SOON_S):
        while True:
            try:
                await store.put_tenant(ACME, Tenant(max_concurrent_runs=7))
            except BackendUnavailable:
                await asyncio.sleep(0.05)
            else:
                return


async def _started(store: RedisStore) -> RunId:
    """A run that begins once the failover is over: bad news is allowed until then."""
    async with asyncio.timeout(_SOON_S):
        while True:
            try:
                return await start(store)
            except BackendUnavailable:
                await asyncio.sleep(0.05)


async def test_a_sentinel_that_hangs_does_not_use_up_the_time_of_the_others(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        primary = stack.enter_context(running_server())
        stack.enter_context(running_server(None, "--replicaof", f"127.0.0.1 {primary.port}"))
        sentinel = stack.enter_context(running_sentinel(primary, tmp_path))
        hung = stack.enter_context(running_server())
        hung.pause()
        store = await RedisStore.open(
            f"redis+sentinel://{hung.address},{sentinel.address}/{SERVICE}", timeout_s=3.0
        )
        await store.ping()
        await store.close()


async def test_a_service_that_no_sentinel_knows_is_unavailable(tmp_path: Path) -> None:
    with ExitStack() as stack:
        primary = stack.enter_context(running_server())
        stack.enter_context(running_server(None, "--replicaof", f"127.0.0.1 {primary.port}"))
        sentinel = stack.enter_context(running_sentinel(primary, tmp_path))
        with pytest.raises(BackendUnavailable, match="knows no primary for 'other'"):
            await RedisStore.open(f"redis+sentinel://{sentinel.address}/other", timeout_s=5.0)


@contextmanager
def _replicated(tmp_path: Path) -> Iterator[tuple[Server, Server, Server]]:
    """A primary, its replica, and a Sentinel that watches them."""
    with ExitStack() as stack:
        primary = stack.enter_context(running_server(None, "--repl-diskless-sync-delay", "0"))
        replica = stack.enter_context(
            running_server(None, "--replicaof", f"127.0.0.1 {primary.port}")
        )
        sentinel = stack.enter_context(running_sentinel(primary, tmp_path))
        yield primary, replica, sentinel
