"""Housekeeping in Redis: audit, retention, health."""

from __future__ import annotations

from typing import Final

from stanchion.adapters.redis.client import RedisRequest
from stanchion.adapters.store.redis.keys import RUN_ID_CHARS
from stanchion.adapters.store.redis.shards import ALL_SHARDS, Sharded, Shards
from stanchion.core.model import Instant, RunId, TenantId
from stanchion.core.run_id import SHARDS
from stanchion.ports.records import Drift

__all__ = ["RedisHousekeeping"]

_KEYS_FORGOTTEN_MAX: Final = 1_000
"""How many keys of a shard one purge forgets. Admissions forget a few of them as well."""


class RedisHousekeeping(Sharded):
    """See ``ports.store.Housekeeping``; dead letters are in ``letters``."""

    def __init__(self, shards: Shards) -> None:
        super().__init__(shards)
        self._audited: tuple[int, TenantId | None] = (0, None)
        """The shard and the tenant at which the last audit stopped."""

    async def audit_slots(self, *, limit: int) -> tuple[Drift, ...]:
        deadline = self._shards.client.deadline()
        chosen = (await self._tenants_in_turn(limit, deadline))[:limit]
        replies = await self._shards.ask_all(
            [self._shards.step("audit", shard, tenant) for shard, tenant in chosen], deadline
        )
        if chosen:
            self._audited = chosen[-1]
        return tuple(
            Drift(tenant, counted, actual)
            for (_, tenant), (counted, actual) in zip(chosen, replies, strict=True)
            if counted != actual
        )

    async def purge(self, *, finished_before: Instant, limit: int) -> int:
        deadline = self._shards.client.deadline()
        words = ("-inf", f"({finished_before}", "WITHSCORES", "LIMIT", 0, limit)
        replies = await self._shards.read_all(
            "ZRANGEBYSCORE", "finished", *words, deadline=deadline
        )
        found = sorted(
            (int(ended_at), name.decode(), shard)
            for shard, reply in enumerate(replies)
            for name, ended_at in zip(reply[::2], reply[1::2], strict=True)
        )
        removed = await self._shards.ask_all(
            [self._purge(shard, name) for _, name, shard in found[:limit]], deadline
        )
        await self._shards.run_on_all(
            "forget", ["keys", "aging"], _KEYS_FORGOTTEN_MAX, deadline=deadline
        )
        return sum(removed)

    async def now(self) -> Instant:
        client = self._shards.client
        return await client.read_clock(self._shards.keys.slots[0], deadline=client.deadline())

    async def ping(self) -> None:
        keys = self._shards.keys
        await self._shards.client.ping(
            {keys.slots[shard]: keys.of_shard(shard, "mark") for shard in ALL_SHARDS}
        )

    async def close(self) -> None:
        await self._shards.client.close()

    def _purge(self, shard: int, name: str) -> RedisRequest:
        run_id, tenant = RunId(name[:RUN_ID_CHARS]), name[RUN_ID_CHARS:]
        return self._shards.step("purge", shard, run_id, tenant, run_id=run_id, tenant=tenant)

    async def _tenants_in_turn(self, limit: int, deadline: float) -> list[tuple[int, TenantId]]:
        """Tenants behind the one that was audited last, at least ``limit`` of them or all."""
        last_shard, last_tenant = self._audited
        keys = self._shards.keys
        sizes = await self._shards.read_all("ZCARD", "known", deadline=deadline)
        after = "-" if last_tenant is None else f"({last_tenant}"
        spans = [(last_shard, after, "+")]
        count = 0
        for shard in (*range(last_shard + 1, SHARDS), *range(last_shard)):
            if count < limit and sizes[shard]:
                spans.append((shard, "-", "+"))
                count += sizes[shard]
        if count < limit and last_tenant is not None:
            spans.append((last_shard, "-", f"[{last_tenant}"))
        replies = await self._shards.ask_all(
            [
                self._shards.command(
                    shard,
                    *("ZRANGEBYLEX", keys.of_shard(shard, "known"), low, high, "LIMIT", 0, limit),
                )
                for shard, low, high in spans
            ],
            deadline,
        )
        return [
            (shard, TenantId(name.decode()))
            for (shard, _, _), reply in zip(spans, replies, strict=True)
            for name in reply
        ]
