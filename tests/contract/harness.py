"""Harnesses: what a case may do to an adapter besides calling it.

Time passes on demand: by hand where the adapter takes a clock, by a bounded wait where the clock is
a server's. ``tamper_slots`` reaches around the adapter into what it keeps.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import redis.asyncio

from stanchion.adapters.locks.memory import MemoryLocks
from stanchion.adapters.store.memory import MemoryStore
from stanchion.adapters.system import ManualClock
from stanchion.core.model import JobId, TenantId
from stanchion.ports.locks import Locks
from stanchion.ports.store import Store
from tests.contract import tampering
from tests.servers import redis_binary

__all__ = [
    "DURABLE",
    "LONG_MS",
    "Harness",
    "MemoryHarness",
    "ServerHarness",
    "SqliteHarness",
    "adapters_with",
]

LONG_MS: Final = 60_000
"""A term that does not end during a case."""
_DAY_MS: Final = 86_400_000
_TIMEOUT_S: Final = 10.0
"""Generous: what is tested here is what happens, not how fast, on a machine that may be busy."""

_BACKENDS: Final = {
    "memory": "memory",
    "sqlite": "sqlite",
    "valkey": "redis",
    "cluster": "redis",
    "redis": "redis",
}
DURABLE: Final = frozenset({"sqlite", "valkey", "cluster", "redis"})
"""Those that keep what they have when they are closed. Memory does not, by its nature."""


def adapters_with(port: str) -> list[str]:
    """The adapters that have this port (``store`` or ``locks``) and were asked for."""
    wanted = os.environ.get("STANCHION_CONTRACT", ",".join(_BACKENDS)).split(",")
    found = [name for name, module in _BACKENDS.items() if name in wanted and _exists(port, module)]
    if redis_binary() is None and "redis" in found:
        found.remove("redis")
    return found


def _exists(port: str, module: str) -> bool:
    return importlib.util.find_spec(f"stanchion.adapters.{port}.{module}") is not None


class Harness(ABC):
    """One adapter, fresh for one case."""

    name: str
    short_ms: int
    """A term that a case can wait for, and in which it can still do a few things."""

    def __init__(self) -> None:
        self._stores: list[Store] = []
        self._locks: list[Locks] = []

    @property
    def store(self) -> Store:
        return self._stores[-1]

    @property
    def locks(self) -> Locks:
        return self._locks[-1]

    async def open_store(self, *, key_ttl_ms: int = _DAY_MS, audit_ttl_ms: int = _DAY_MS) -> Store:
        self._stores.append(await self._open_store(key_ttl_ms, audit_ttl_ms))
        return self.store

    async def open_locks(self) -> Locks:
        self._locks.append(await self._open_locks())
        return self.locks

    async def reopen(self) -> Store:
        """Close the store and open it again: what was acknowledged is still there."""
        await self.store.close()
        return await self.open_store()

    async def reopen_locks(self) -> Locks:
        await self.locks.close()
        return await self.open_locks()

    async def close(self) -> None:
        for locks in self._locks:
            await locks.close()
        for store in self._stores:
            await store.close()

    @abstractmethod
    async def pass_time(self, by_ms: int) -> None:
        """Come back when the adapter's clock shows at least so much more."""

    @abstractmethod
    async def tamper_slots(self, tenant: TenantId, delta: int) -> None:
        """Make the tenant's count of slots wrong."""

    @abstractmethod
    async def job_size(self, job_id: JobId) -> int:
        """About how many bytes the store keeps of the lease of an open job, without its input."""

    @abstractmethod
    async def _open_store(self, key_ttl_ms: int, audit_ttl_ms: int) -> Store: ...

    @abstractmethod
    async def _open_locks(self) -> Locks: ...


class MemoryHarness(Harness):
    name = "memory"
    short_ms = 100

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()

    async def pass_time(self, by_ms: int) -> None:
        self.clock.advance(by_ms)

    async def tamper_slots(self, tenant: TenantId, delta: int) -> None:
        assert isinstance(self.store, MemoryStore)
        tampering.tamper_memory(self.store, tenant, delta)

    async def job_size(self, job_id: JobId) -> int:
        assert isinstance(self.store, MemoryStore)
        return tampering.job_size_memory(self.store, job_id)

    async def _open_store(self, key_ttl_ms: int, audit_ttl_ms: int) -> Store:
        return MemoryStore(self.clock, key_ttl_ms=key_ttl_ms, audit_ttl_ms=audit_ttl_ms)

    async def _open_locks(self) -> Locks:
        return MemoryLocks(self.clock)


# The adapters below are imported when a case needs them: a broken one fails its own cases, and the
# others can still be tested.


class SqliteHarness(Harness):
    name = "sqlite"
    short_ms = 100

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.clock = ManualClock()
        self._file = directory / "store.db"
        self._locks_file = directory / "locks.db"

    async def pass_time(self, by_ms: int) -> None:
        self.clock.advance(by_ms)

    async def tamper_slots(self, tenant: TenantId, delta: int) -> None:
        tampering.tamper_sqlite(self._file, tenant, delta)

    async def job_size(self, job_id: JobId) -> int:
        return tampering.job_size_sqlite(self._file, job_id)

    async def _open_store(self, key_ttl_ms: int, audit_ttl_ms: int) -> Store:
        from stanchion.adapters.store.sqlite import SqliteStore  # noqa: PLC0415 - see above

        return await SqliteStore.open(
            self._file,
            clock=self.clock,
            key_ttl_ms=key_ttl_ms,
            audit_ttl_ms=audit_ttl_ms,
            timeout_s=_TIMEOUT_S,
        )

    async def _open_locks(self) -> Locks:
        from stanchion.adapters.locks.sqlite import SqliteLocks  # noqa: PLC0415 - see above

        return await SqliteLocks.open(self._locks_file, clock=self.clock, timeout_s=_TIMEOUT_S)


class ServerHarness(Harness):
    short_ms = 250

    def __init__(self, name: str, url: str, nodes: Sequence[str], namespace: str) -> None:
        super().__init__()
        self.name = name
        self._url = url
        self._nodes = nodes
        self._namespace = namespace
        self._client = redis.asyncio.Redis.from_url(nodes[0])

    async def pass_time(self, by_ms: int) -> None:
        # All nodes run on this machine, so one node's clock stands for all of them.
        began_us = await self._server_us()
        give_up = time.monotonic() + by_ms / 1000 + _TIMEOUT_S
        while (left_us := began_us + by_ms * 1000 + 1000 - await self._server_us()) > 0:
            assert time.monotonic() < give_up, "the server's clock stands still"
            await asyncio.sleep(left_us / 1_000_000)

    async def tamper_slots(self, tenant: TenantId, delta: int) -> None:
        tampering.tamper_redis(self._nodes, self._namespace, tenant, delta)

    async def job_size(self, job_id: JobId) -> int:
        return tampering.job_size_redis(self._nodes, self._namespace, job_id)

    async def close(self) -> None:
        await super().close()
        await self._client.aclose()

    async def _server_us(self) -> int:
        seconds, micros = await self._client.time()
        return int(seconds) * 1_000_000 + int(micros)

    async def _open_store(self, key_ttl_ms: int, audit_ttl_ms: int) -> Store:
        from stanchion.adapters.store.redis import RedisStore  # noqa: PLC0415 - see above

        return await RedisStore.open(
            self._url,
            namespace=self._namespace,
            key_ttl_ms=key_ttl_ms,
            audit_ttl_ms=audit_ttl_ms,
            timeout_s=_TIMEOUT_S,
        )

    async def _open_locks(self) -> Locks:
        from stanchion.adapters.locks.redis import RedisLocks  # noqa: PLC0415 - see above

        return await RedisLocks.open(self._url, namespace=self._namespace, timeout_s=_TIMEOUT_S)
