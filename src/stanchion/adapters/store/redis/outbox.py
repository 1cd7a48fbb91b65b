"""The outbox in Redis: the runs that must be advanced, and timers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stanchion.adapters.store.redis.encode import RUN_ID_CHARS
from stanchion.adapters.store.redis.shards import Due, Sharded, act_on_due
from stanchion.core.model import RunId, TenantId, shard_of_run
from stanchion.ports.errors import BackendError
from stanchion.ports.records import OutboxRow


class RedisOutbox(Sharded):
    """See ``ports.store.Outbox``."""

    async def fire_timers(self, *, limit: int) -> tuple[RunId, ...]:
        deadline = self._shards.client.deadline()

        async def fire(due: Sequence[Due]) -> list[RunId]:
            return await self._fire(due, deadline)

        return await act_on_due(self._shards, "timers", fire, limit, deadline)

    async def take_outbox(self, *, limit: int, hold_ms: int) -> tuple[OutboxRow, ...]:
        deadline = self._shards.client.deadline()

        async def take(due: Sequence[Due]) -> list[tuple[int, OutboxRow]]:
            return await self._take(due, hold_ms, deadline)

        taken = await act_on_due(self._shards, "outbox", take, limit, deadline)
        return tuple(row for _, row in sorted(taken, key=lambda each: each[0]))

    async def confirm_outbox(self, rows: Sequence[OutboxRow]) -> None:
        await self._shards.ask_all(
            [
                self._shards.step(
                    "confirm", shard, row.run_id, f"{row.number} {row.tenant}", run_id=row.run_id
                )
                for row in rows
                if (shard := shard_of_run(row.run_id)) is not None
            ]
        )

    async def defer_outbox(self, row: OutboxRow, *, delay_ms: int) -> None:
        shard = shard_of_run(row.run_id)
        if shard is not None:
            words = (row.run_id, f"{row.number} {row.tenant}", delay_ms)
            await self._shards.ask(self._shards.step("defer", shard, *words))

    async def outbox_size(self) -> int:
        deadline = self._shards.client.deadline()
        return sum(await self._shards.read_all("ZCARD", "outbox", deadline=deadline))

    async def _fire(self, due: Sequence[Due], deadline: float) -> list[RunId]:
        timers = [(RunId(each.name[:RUN_ID_CHARS]), each.name[RUN_ID_CHARS:]) for each in due]
        fired = await self._shards.ask_all(
            [
                self._shards.step(
                    *("fire", each.shard, run_id, timer, each.at, each.tenant), run_id=run_id
                )
                for each, (run_id, timer) in zip(due, timers, strict=True)
            ],
            deadline,
        )
        return [run_id for (run_id, _), is_fired in zip(timers, fired, strict=True) if is_fired]

    async def _take(
        self, due: Sequence[Due], hold_ms: int, deadline: float
    ) -> list[tuple[int, OutboxRow]]:
        shares = Counter(each.shard for each in due)
        replies = await self._shards.ask_some(
            [
                # Not repeatable: a repeat would take other rows. Rows of a lost reply become due
                # again.
                self._shards.step("take", shard, count, hold_ms, is_repeatable=False)
                for shard, count in shares.items()
            ],
            deadline,
        )
        return [
            (int(was_due), _row(run_id, row))
            for reply in replies
            if not isinstance(reply, BackendError)
            for run_id, row, was_due in zip(reply[::3], reply[1::3], reply[2::3], strict=True)
        ]


def _row(run_id: bytes, row: bytes) -> OutboxRow:
    number, _, tenant = row.decode().partition(" ")
    return OutboxRow(RunId(run_id.decode()), TenantId(tenant), int(number))
