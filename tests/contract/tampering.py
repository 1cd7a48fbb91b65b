"""Tampering: making a tenant's count of slots wrong, behind the adapter's back.

Each function touches what one backend keeps, directly: production code needs no door for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import apsw
import redis

from stanchion.adapters.store.memory import MemoryStore
from stanchion.core.model import TenantId, shard_of_tenant

__all__ = ["tamper_memory", "tamper_redis", "tamper_sqlite"]


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
