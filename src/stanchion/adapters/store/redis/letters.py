"""Dead letters in Redis: what was tried as often as is allowed."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from stanchion.adapters.cursor import read_cursor, write_cursor
from stanchion.adapters.outcomes import event_letter_id, replay_entry, step_of
from stanchion.adapters.store.redis import asks, codec
from stanchion.adapters.store.redis.keys import sized
from stanchion.adapters.store.redis.shards import ALL_SHARDS, Sharded
from stanchion.core.model import Instant, RunId, TenantId
from stanchion.core.run_id import shard_of_run, shard_of_tenant
from stanchion.ports.records import DeadLetter, DeadLetterKind, Page

__all__ = ["RedisLetters"]

_PLACE_CHARS: Final = 32
"""A letter's place in the order of death, in front of its id."""


class RedisLetters(Sharded):
    """See ``ports.store.Housekeeping``."""

    async def bury(self, run_id: RunId, entry_id: str, *, cause: str) -> DeadLetter | None:
        deadline = self._shards.client.deadline()
        shard = shard_of_run(run_id)
        tenant = await self._shards.owner_of(run_id, deadline)
        if shard is None or tenant is None:
            return None
        inbox = self._shards.keys.of_run(run_id, "inbox")
        packed = await self._shards.ask(
            self._shards.command(shard, "HGET", inbox, entry_id), deadline
        )
        if packed is None:
            return None
        _, event = codec.read_number_and_event(packed)
        letter = DeadLetter(
            id=event_letter_id(run_id, entry_id),
            kind=DeadLetterKind.EVENT,
            tenant=tenant,
            run_id=run_id,
            step_id=step_of(event),
            cause=cause,
            at=Instant(0),  # The server's clock will tell.
            event=event,
        )
        words = (run_id, tenant, entry_id, packed, letter.id, asks.json(letter))
        step = self._shards.step("bury", shard, *words, run_id=run_id, is_repeatable=False)
        died_at = await self._shards.ask(step, deadline)
        return None if died_at is None else replace(letter, at=Instant(died_at))

    async def count_failure(self, run_id: RunId, entry_id: str) -> int:
        shard = shard_of_run(run_id)
        if shard is None:
            return 0
        step = self._shards.step(
            "count_failure", shard, entry_id, run_id=run_id, is_repeatable=False
        )
        count: int = await self._shards.ask(step)
        return count

    async def list_dead_letters(
        self, tenant: TenantId | None, *, cursor: str | None = None, limit: int = 100
    ) -> Page[DeadLetter]:
        deadline = self._shards.client.deadline()
        after = "" if cursor is None else read_cursor("dead-letters", cursor, tuple[str])[0]
        prefix = "" if tenant is None else sized(tenant)
        low = f"({prefix}{after}" if after else f"[{prefix}"
        high = b"(" + prefix.encode() + b"\xff"
        index = "dead" if tenant is None else "dead_of"
        shards = ALL_SHARDS if tenant is None else [shard_of_tenant(tenant)]
        replies = await self._shards.ask_each(
            lambda shard: self._shards.command(
                shard,
                *("ZRANGEBYLEX", self._shards.keys.of_shard(shard, index), low, high),
                *("LIMIT", 0, limit + 1),
            ),
            deadline,
            shards=shards,
        )
        found = sorted(
            (entry.decode().removeprefix(prefix), shard)
            for shard, reply in zip(shards, replies, strict=True)
            for entry in reply
        )
        page = found[:limit]
        packed = await self._shards.ask_all(
            [
                self._shards.command(
                    shard,
                    *("HGET", self._shards.keys.of_shard(shard, "letters"), entry[_PLACE_CHARS:]),
                )
                for entry, shard in page
            ],
            deadline,
        )
        # One may have been replayed since its place was read.
        letters = tuple(codec.read_letter(each) for each in packed if each is not None)
        more = len(found) > limit
        return Page(letters, write_cursor("dead-letters", page[-1][0]) if more else None)

    async def replay_dead_letter(self, letter_id: str, *, actor: str) -> DeadLetter | None:
        deadline = self._shards.client.deadline()
        # The id of a letter is its kind, the run, and what of the run: ``job:<run>:plan@1#1``.
        run_id = RunId([*letter_id.split(":", 2), ""][1])
        shard = shard_of_run(run_id)
        if shard is None:
            return None
        letters = self._shards.keys.of_shard(shard, "letters")
        packed = await self._shards.ask(
            self._shards.command(shard, "HGET", letters, letter_id), deadline
        )
        if packed is None:
            return None
        letter = codec.read_letter(packed)
        entry_id, event = replay_entry(letter, actor)
        words = (run_id, letter.tenant, letter_id, entry_id, asks.json(event))
        step = self._shards.step("replay", shard, *words, run_id=run_id, is_repeatable=False)
        return letter if await self._shards.ask(step, deadline) else None
