"""Leasing in Redis: jobs are handed out in turn, whichever shards they lie in."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Final

from stanchion.adapters.store.redis import codec
from stanchion.adapters.store.redis.rounds import Shares, Waiting
from stanchion.adapters.store.redis.shards import Sharded
from stanchion.core.model import Instant, TenantId, Topic
from stanchion.core.run_id import shard_of_tenant
from stanchion.ports.errors import BackendError
from stanchion.ports.records import LeasedJob

__all__ = ["RedisLeasing"]

_LOOKS_MAX: Final = 3
"""How often one call looks at the shards, when others were quicker than it."""


class RedisLeasing(Sharded):
    """See ``ports.store.Jobs``."""

    async def lease_jobs(
        self,
        worker_id: str,
        topics: Collection[Topic],
        *,
        max_jobs: int,
        ttl_ms: int,
        tenant: TenantId | None = None,
    ) -> tuple[LeasedJob, ...]:
        deadline = self._shards.client.deadline()
        wanted = tuple(dict.fromkeys(topics))
        terms = (worker_id, ttl_ms)
        if tenant is not None:
            ordered = self._shards.rounds.in_turn(wanted)
            shares: Shares = {shard_of_tenant(tenant): dict.fromkeys(ordered, max_jobs)}
            found = await self._lease(shares, terms, tenant, max_jobs, deadline)
            for each in found:
                self._shards.rounds.served(each.job.topic)
            return tuple(found)
        leased: list[LeasedJob] = []
        for _ in range(_LOOKS_MAX):
            left = max_jobs - len(leased)
            if not self._shards.rounds.knows(wanted, left, asyncio.get_running_loop().time()):
                await self._look(wanted, deadline)
            taken = self._shards.rounds.take(wanted, left)
            if not taken:
                break
            leased += await self._lease(taken, terms, None, left, deadline)
        return tuple(leased)

    async def _look(self, topics: Sequence[Topic], deadline: float) -> None:
        """See what waits where, and begin a round with it."""
        sizes = await self._shards.run_on_all("each", ["ready"], "ZCARD", deadline=deadline)
        shards = [
            shard
            for shard, size in enumerate(sizes)
            if not isinstance(size, BackendError) and size > 0
        ]
        replies = await self._shards.ask_all(
            [self._shards.step("ready", shard, *topics) for shard in shards], deadline
        )
        at = asyncio.get_running_loop().time()
        for place, topic in enumerate(topics):
            self._shards.rounds.learn(
                topic,
                {
                    shard: Waiting(*reply[2 * place : 2 * place + 2])
                    for shard, reply in zip(shards, replies, strict=True)
                },
                at,
            )

    async def _lease(
        self,
        shares: Shares,
        terms: tuple[str, int],
        tenant: TenantId | None,
        max_jobs: int,
        deadline: float,
    ) -> list[LeasedJob]:
        replies = await self._shards.ask_some(
            [
                self._shards.step(
                    "lease",
                    shard,
                    *terms,
                    tenant or "",
                    max_jobs,
                    *(word for share in of_shard.items() for word in share),
                    # Whoever did not hear the answer has not got the jobs: asked again, it would
                    # get others. Those leases run out.
                    is_repeatable=False,
                )
                for shard, of_shard in shares.items()
            ],
            deadline,
        )
        return [
            LeasedJob(codec.read_job(work), int(fence), deliveries, Instant(int(expires_at)))
            for reply in replies
            if not isinstance(reply, BackendError)
            for work, fence, deliveries, expires_at in zip(
                reply[::4], reply[1::4], reply[2::4], reply[3::4], strict=True
            )
        ]
