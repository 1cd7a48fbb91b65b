"""Clusters: slots that move, and servers that die, while the store is in use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from stanchion.adapters.redis.topology import slot_of
from stanchion.adapters.store.redis import RedisStore
from stanchion.core.admission import Admitted
from stanchion.core.model import TenantId, shard_of_tenant
from stanchion.ports.errors import BackendRefused, BackendUnavailable
from stanchion.ports.records import Tenant
from tests.contract.builders import ACME, TOPIC, WITHIN_MS, admission, cancel, start
from tests.servers import Cluster, Server, running_cluster, running_server

_SLOT = slot_of(f"{shard_of_tenant(ACME):02x}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
async def store(cluster: Cluster) -> AsyncIterator[RedisStore]:
    store = await RedisStore.open(cluster.url, timeout_s=5.0)
    yield store
    await store.close()


async def test_a_server_that_hangs_does_not_use_up_the_time_of_the_others(
    cluster: Cluster,
) -> None:
    with running_server() as hung:
        hung.pause()
        url = cluster.url.replace("://", f"://{hung.address},", 1)
        store = await RedisStore.open(url, timeout_s=3.0)
        await store.ping()
        await store.close()


class _Move:
    """ACME's slot, on its way from its server to the next one."""

    def __init__(self, cluster: Cluster) -> None:
        self.source = next(each for each in cluster.servers if _has_slot(each))
        place = cluster.servers.index(self.source)
        self.target = cluster.servers[(place + 1) % len(cluster.servers)]
        self._others = [each for each in cluster.servers if each is not self.target]

    def begin(self) -> None:
        _setslot(self.target, "IMPORTING", _id(self.source))
        _setslot(self.source, "MIGRATING", _id(self.target))

    def move_keys(self) -> None:
        with self.source.client() as client:
            while keys := client.execute_command("CLUSTER", "GETKEYSINSLOT", _SLOT, 100):
                client.execute_command(
                    *("MIGRATE", "127.0.0.1", self.target.port, "", 0, 5000, "KEYS", *keys)
                )

    def end(self) -> None:
        for server in (self.target, *self._others):
            _setslot(server, "NODE", _id(self.target))


def _has_slot(server: Server) -> bool:
    with server.client() as client:
        try:
            client.execute_command("GET", f"x:{{{shard_of_tenant(ACME):02x}}}")
        except redis.exceptions.MovedError:
            return False
    return True


def _id(server: Server) -> str:
    with server.client() as client:
        return str(client.execute_command("CLUSTER", "MYID"))


def _setslot(server: Server, *words: str) -> None:
    with server.client() as client:
        client.execute_command("CLUSTER", "SETSLOT", _SLOT, *words)


async def test_a_slot_that_has_moved_is_followed(cluster: Cluster, store: RedisStore) -> None:
    run_id = await start(store)
    move = _Move(cluster)
    move.begin()
    move.move_keys()
    move.end()
    found = await store.load(run_id)
    assert found is not None
    await cancel(store, run_id)
    again = admission(await store.now())
    assert await store.admit(again, within_ms=WITHIN_MS) == Admitted(again.run.id)
    assert _has_slot(move.target)


async def test_many_callers_at_once_follow_a_slot(cluster: Cluster, store: RedisStore) -> None:
    tenant = TenantId("acme")
    await store.put_tenant(tenant, Tenant(max_concurrent_runs=None))
    wanted = [admission(await store.now()) for _ in range(300)]
    move = _Move(cluster)
    admitting = [
        asyncio.create_task(store.admit(each, within_ms=WITHIN_MS)) for each in wanted[:150]
    ]
    await asyncio.sleep(0)
    await asyncio.to_thread(_move_all, move)
    admitting += [
        asyncio.create_task(store.admit(each, within_ms=WITHIN_MS)) for each in wanted[150:]
    ]
    assert await asyncio.gather(*admitting) == [Admitted(each.run.id) for each in wanted]


def _move_all(move: _Move) -> None:
    move.begin()
    move.move_keys()
    move.end()


async def test_what_is_asked_while_a_slot_moves_waits_until_it_has_moved(
    cluster: Cluster, store: RedisStore
) -> None:
    await start(store)
    move = _Move(cluster)
    move.begin()
    wanted = admission(await store.now())
    admitting = asyncio.create_task(store.admit(wanted, within_ms=WITHIN_MS))
    # Single keys may be asked for throughout: those that have gone already, at their new place.
    await asyncio.to_thread(move.move_keys)
    assert await store.active_runs(ACME) > 0
    assert not admitting.done()
    await asyncio.to_thread(move.end)
    assert await admitting == Admitted(wanted.run.id)


async def test_a_store_that_knows_one_server_finds_them_all(cluster: Cluster) -> None:
    store = await RedisStore.open(f"redis+cluster://{cluster.servers[2].address}", timeout_s=5.0)
    wanted = [
        admission(await store.now(), tenant=TenantId(f"tenant-{number}")) for number in range(60)
    ]
    verdicts = await asyncio.gather(*(store.admit(each, within_ms=WITHIN_MS) for each in wanted))
    assert verdicts == [Admitted(each.run.id) for each in wanted]
    await store.close()


async def test_a_cluster_is_no_single_server(cluster: Cluster) -> None:
    with pytest.raises(BackendRefused, match=r"use redis\+cluster://"):
        await RedisStore.open(cluster.servers[0].url)


async def test_one_dead_server_does_not_stop_the_others() -> None:
    with running_cluster() as cluster:
        store = await RedisStore.open(cluster.url, timeout_s=5.0)
        tenants = [TenantId(f"tenant-{number}") for number in range(30)]
        runs = {tenant: await start(store, tenant=tenant) for tenant in tenants}
        move = _Move(cluster)
        move.source.kill()
        with pytest.raises(BackendUnavailable):
            await start(store)
        async with asyncio.timeout(4.0):
            leased = await store.lease_jobs("worker", [TOPIC], max_jobs=100, ttl_ms=60_000)
            assert 0 < len(leased) < len(runs)
            assert await store.take_outbox(limit=10, hold_ms=0) == ()
            assert await store.expire_jobs(limit=10, max_deliveries=5) == ()
            assert await store.fire_timers(limit=10) == ()
        await store.close()
