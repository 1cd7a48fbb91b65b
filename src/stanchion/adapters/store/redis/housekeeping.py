"""Housekeeping in Redis: audit, retention, health, and dead letters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from stanchion.adapters.cursor import read_cursor, write_cursor
from stanchion.adapters.outcomes import (
    audit_of_drift,
    discard_entry,
    event_dead_letter,
    replay_entry,
)
from stanchion.adapters.redis.client import RedisRequest
from stanchion.adapters.store.redis import decode, encode
from stanchion.adapters.store.redis.encode import RUN_ID_CHARS, sized
from stanchion.adapters.store.redis.shards import ALL_SHARDS, Sharded, Shards
from stanchion.core.audit import AuditEntry
from stanchion.core.events import Event
from stanchion.core.model import SHARDS, Instant, RunId, TenantId, shard_of_run, shard_of_tenant
from stanchion.ports.records import DeadLetter, Drift, Page, SlotAudit

_KEYS_FORGOTTEN_MAX: Final = 100
"""Expired keys of a shard that one script removes: the scripts of 64 shards block the server for
some milliseconds."""
_FORGETS_MAX: Final = 10
"""Such scripts in one purge. Admissions remove a few keys as well."""


class RedisHousekeeping(Sharded):
    """See ``ports.store.Housekeeping``; dead letters are in ``letters``."""

    async def audit_slots(
        self,
        *,
        limit: int,
        cursor: str | None = None,
        repair: bool = True,
        audit: AuditEntry | None = None,
    ) -> SlotAudit:
        deadline = self._shards.client.deadline()
        found = await self._tenants_after(cursor, limit + 1, deadline)
        chosen = found[:limit]
        replies = await self._shards.ask_all(
            [self._audit(shard, tenant, audit, repair=repair) for shard, tenant in chosen], deadline
        )
        drifts = tuple(
            Drift(tenant, counted, actual)
            for (_, tenant), (counted, actual) in zip(chosen, replies, strict=True)
            if counted != actual
        )
        if drifts:
            self._shards.expect_due()  # a corrected count may have promoted queued runs
        onward = write_cursor("slots", *chosen[-1]) if len(found) > limit else None
        return SlotAudit(len(chosen), drifts, onward)

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
        await self._forget_keys(deadline)
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

    async def _forget_keys(self, deadline: float) -> None:
        """Remove expired idempotency keys."""
        for _ in range(_FORGETS_MAX):
            answers = await self._shards.run_on_all(
                "forget", ["keys", "aging"], _KEYS_FORGOTTEN_MAX, deadline=deadline
            )
            if _KEYS_FORGOTTEN_MAX not in answers:
                return

    def _audit(
        self, shard: int, tenant: TenantId, audit: AuditEntry | None, *, repair: bool
    ) -> RedisRequest:
        # The script adds the two counts.
        entry = None if audit is None else audit_of_drift(audit, Drift(tenant, 0, 0))
        packed = encode.pack_audit(entry, self._shards.audit_ttl_ms)
        words = (tenant, packed, int(repair), encode.DEFAULT_CAP)
        return self._shards.step("audit", shard, *words, tenant=tenant)

    def _purge(self, shard: int, name: str) -> RedisRequest:
        run_id, tenant = RunId(name[:RUN_ID_CHARS]), name[RUN_ID_CHARS:]
        return self._shards.step("purge", shard, run_id, tenant, run_id=run_id, tenant=tenant)

    async def _tenants_after(
        self, cursor: str | None, limit: int, deadline: float
    ) -> list[tuple[int, TenantId]]:
        """The next tenants that ever had a run, by shard and name."""
        first, after = (0, "") if cursor is None else read_cursor("slots", cursor, tuple[int, str])
        keys = self._shards.keys
        sizes = await self._shards.read_all("ZCARD", "known", deadline=deadline)
        found: list[tuple[int, TenantId]] = []
        for shard in range(first, SHARDS):
            if len(found) >= limit or not sizes[shard]:
                continue
            low = f"({after}" if shard == first and after else "-"
            words = (low, "+", "LIMIT", 0, limit - len(found))
            known = keys.of_shard(shard, "known")
            names = await self._shards.ask(
                self._shards.command(shard, "ZRANGEBYLEX", known, *words), deadline
            )
            found += [(shard, TenantId(name.decode())) for name in names]
        return found


_ADOPTED: Final = "adopted"
"""The counter of a shard that is 1 once all its runs are in the lists."""
_SCANNED_AT_ONCE: Final = 500


async def adopt_runs(shards: Shards) -> int:
    """Add the runs that a version without filtered lists has written to the lists, once.

    Returns how many. Another replica may do the same at the same time, without harm.
    """
    marks = await shards.read_all("HGET", "counters", _ADOPTED, deadline=shards.client.deadline())
    count = 0
    for shard in (shard for shard, mark in enumerate(marks) if mark is None):
        for index, run_id_at in (
            ("finished", slice(0, RUN_ID_CHARS)),
            ("unfinished", slice(-RUN_ID_CHARS, None)),
        ):
            count += await _adopt_all_of(shards, shard, index, run_id_at)
        key = shards.keys.of_shard(shard, "counters")
        await shards.ask(shards.command(shard, "HSET", key, _ADOPTED, 1))
    return count


async def _adopt_all_of(shards: Shards, shard: int, index: str, run_id_at: slice) -> int:
    """Add the runs that are named in an index of a shard to the lists."""
    key, position, count = shards.keys.of_shard(shard, index), "0", 0
    while True:
        scan = ("ZSCAN", key, position, "COUNT", _SCANNED_AT_ONCE)
        found, names = await shards.ask(shards.command(shard, *scan))
        run_ids = [RunId(name.decode()[run_id_at]) for name in names[::2]]
        bases = await shards.ask_all(
            [
                shards.command(shard, "HGET", shards.keys.of_run(run_id, "run"), "base")
                for run_id in run_ids
            ]
        )
        runs = [decode.read_base(base) for base in bases if base is not None]
        added = await shards.ask_all(
            [
                shards.step(
                    "adopt", shard, encode.pack_listed(run), encode.about(run), run_id=run.id
                )
                for run in runs
            ]
        )
        count += sum(added)
        position = found.decode()
        if position == "0":
            return count


_PLACE_CHARS: Final = 32
"""The position of a letter in the order of dead letters, which precedes its id."""


class RedisLetters(Sharded):
    """See ``ports.store.Housekeeping``."""

    async def write_dead_letter(
        self, run_id: RunId, entry_id: str, *, cause: str
    ) -> DeadLetter | None:
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
        _, event = decode.read_number_and_event(packed)
        unset = Instant(0)  # the time is set below, from the clock of the server
        letter = event_dead_letter(tenant, run_id, entry_id, event, cause=cause, at=unset)
        words = (run_id, tenant, entry_id, packed, letter.id, encode.to_json(letter))
        step = self._shards.step(
            "write_dead_letter", shard, *words, run_id=run_id, is_repeatable=False
        )
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
        index = "dead" if tenant is None else "dead_of"
        shards = ALL_SHARDS if tenant is None else [shard_of_tenant(tenant)]
        found = await self._shards.read_places(index, prefix, after, limit + 1, shards, deadline)
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
        # A letter may have been replayed since its id was read.
        letters = tuple(decode.read_letter(each) for each in packed if each is not None)
        more = len(found) > limit
        return Page(letters, write_cursor("dead-letters", page[-1][0]) if more else None)

    async def replay_dead_letter(
        self, letter_id: str, *, actor: str, audit: AuditEntry | None = None
    ) -> DeadLetter | None:
        return await self._take_letter(letter_id, lambda letter: replay_entry(letter, actor), audit)

    async def discard_dead_letter(
        self, letter_id: str, *, actor: str, audit: AuditEntry | None = None
    ) -> DeadLetter | None:
        return await self._take_letter(
            letter_id, lambda letter: discard_entry(letter, actor), audit
        )

    async def _take_letter(
        self,
        letter_id: str,
        entry_of: Callable[[DeadLetter], tuple[str, Event] | None],
        audit: AuditEntry | None,
    ) -> DeadLetter | None:
        """Remove a letter and post an event to its run."""
        deadline = self._shards.client.deadline()
        # The id of a letter is its kind, run, and job or entry: ``job:<run>:plan@1#1``.
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
        letter = decode.read_letter(packed)
        entry = entry_of(letter)
        posted = ("", "") if entry is None else (entry[0], encode.to_json(entry[1]))
        logged = None if audit is None else replace(audit, tenant=letter.tenant)
        packed = encode.pack_audit(logged, self._shards.audit_ttl_ms)
        words = (run_id, letter.tenant, letter_id, *posted, packed)
        step = self._shards.step(
            "replay", shard, *words, run_id=run_id, tenant=letter.tenant, is_repeatable=False
        )
        return letter if await self._shards.ask(step, deadline) else None
