"""Tampering: making a tenant's count of slots wrong, and looking, behind the adapter's back.

Each function touches what one backend keeps, directly: production code needs no door for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import apsw
import msgspec
import redis

from stanchion.adapters.store.memory import MemoryStore
from stanchion.core.model import JobId, RunId, TenantId, shard_of_run, shard_of_tenant

__all__ = [
    "job_size_memory",
    "job_size_redis",
    "job_size_sqlite",
    "tamper_memory",
    "tamper_redis",
    "tamper_sqlite",
]


def tamper_memory(store: MemoryStore, tenant: TenantId, delta: int) -> None:
    store._state.account(tenant).active += delta  # noqa: SLF001 - tampering is the point


def tamper_sqlite(file: Path, tenant: TenantId, delta: int) -> None:
    with closing(apsw.Connection(str(file))) as connection:
        connection.execute(
            "INSERT INTO accounts (tenant, active) VALUES (?1, ?2)"
            " ON CONFLICT (tenant) DO UPDATE SET active = active + excluded.active",
            (tenant, delta),
        )


def tamper_redis(nodes: Sequence[str], namespace: str, tenant: TenantId, delta: int) -> None:
    from stanchion.adapters.store.redis.encode import StoreKeys  # noqa: PLC0415 - may be broken meanwhile

    key = StoreKeys(namespace).of_shard(shard_of_tenant(tenant), "active")
    for url in nodes:
        with redis.Redis.from_url(url) as client:
            try:
                client.hincrby(key, tenant, delta)
            except redis.exceptions.MovedError:
                continue  # In a cluster one node has the key, and the others say so.
            return
    raise AssertionError("no node has the key")


def job_size_memory(store: MemoryStore, job_id: JobId) -> int:
    return len(msgspec.json.encode(store._state.jobs[job_id].usage))  # noqa: SLF001 - likewise


def job_size_sqlite(file: Path, job_id: JobId) -> int:
    with closing(apsw.Connection(str(file))) as connection:
        rows = connection.execute(
            "SELECT ifnull(length(usage), 0) FROM jobs WHERE id = ?", (job_id,)
        )
        size = rows.fetchall()[0][0]
        assert isinstance(size, int)
        return size


def job_size_redis(nodes: Sequence[str], namespace: str, job_id: JobId) -> int:
    from stanchion.adapters.store.redis.encode import StoreKeys  # noqa: PLC0415 - may be broken meanwhile

    shard = shard_of_run(RunId(job_id.partition(":")[0]))
    assert shard is not None
    key = StoreKeys(namespace).of_shard(shard, "open")
    for url in nodes:
        with redis.Redis.from_url(url) as client:
            try:
                return int(client.hstrlen(key, f"s:{job_id}"))
            except redis.exceptions.MovedError:
                continue
    raise AssertionError("no node has the key")
