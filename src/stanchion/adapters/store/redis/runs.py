"""Runs in Redis: admission, commits, the inbox, timelines, feeds and lists."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from stanchion.adapters.cursor import read_cursor, write_cursor
from stanchion.adapters.redis.client import RedisRequest, ask_in_time
from stanchion.adapters.redis.connection import Reply
from stanchion.adapters.store.redis import decode, encode
from stanchion.adapters.store.redis.shards import ALL_SHARDS, Sharded
from stanchion.core.admission import (
    Admitted,
    Full,
    Mismatch,
    RateExceeded,
    Replayed,
    StaleDefinition,
    TooLate,
    Verdict,
)
from stanchion.core.audit import AuditEntry
from stanchion.core.events import Event
from stanchion.core.model import (
    Instant,
    Item,
    ItemKey,
    PendingApproval,
    RunId,
    Stamp,
    StepId,
    TenantId,
    shard_of_run,
    shard_of_tenant,
)
from stanchion.core.transition import TimelineEntry
from stanchion.ports.errors import BackendCorrupt
from stanchion.ports.records import (
    EVERY_RUN,
    Admission,
    BadCursor,
    Commit,
    CommitAnswer,
    CommitConflict,
    Committed,
    FeedEntry,
    Gone,
    Loaded,
    Page,
    PostAnswer,
    RunFilter,
    RunSummary,
    StaleFence,
)

__all__ = ["RedisRuns"]


_CHUNK: Final = 1_000
"""Items or runs that one command reads."""
_STREAM_ID: Final = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")


class RedisRuns(Sharded):
    """See ``ports.store.Runs``."""

    async def admit(self, admission: Admission, *, within_ms: int) -> Verdict:
        run = admission.run
        shard = shard_of_tenant(run.tenant)
        assert shard == shard_of_run(run.id), "an id begins with its tenant's shard"

        def make(not_after: Instant) -> RedisRequest:
            asked = encode.encode_admission(
                admission,
                not_after=not_after,
                key_ttl_ms=self._shards.key_ttl_ms,
                audit_ttl_ms=self._shards.audit_ttl_ms,
            )
            return self._shards.step("admit", shard, asked, run_id=run.id, tenant=run.tenant)

        slot = self._shards.keys.slots[shard]
        reply = await ask_in_time(self._shards.client, slot, within_ms, make)
        verdict = _verdict(run.id, reply)
        if isinstance(verdict, Admitted):
            self._shards.remember(run.id, run.tenant)
            self._shards.expect_jobs(shard, admission.transition.effects)
        return verdict

    async def load(self, run_id: RunId) -> Loaded | None:
        shard = shard_of_run(run_id)
        if shard is None:
            return None
        fields, entries = await self._shards.ask(self._shards.step("load", shard, run_id=run_id))
        loaded = decode.read_loaded(fields, entries)
        if loaded is not None:
            self._shards.remember(run_id, loaded.run.tenant)
        return loaded

    async def load_items(
        self, run_id: RunId, wanted: Mapping[StepId, Sequence[int]]
    ) -> dict[ItemKey, Item]:
        shard = shard_of_run(run_id)
        keys = [ItemKey(step_id, index) for step_id, some in wanted.items() for index in some]
        if shard is None or not keys:
            return {}
        items = self._shards.keys.of_run(run_id, "items")
        replies = await self._shards.ask_all(
            [
                self._shards.command(
                    shard, "HMGET", items, *(encode.item_field(*key) for key in chunk)
                )
                for chunk in _chunks(keys)
            ]
        )
        found = (value for reply in replies for value in reply)
        return {
            key: decode.read_item(value)
            for key, value in zip(keys, found, strict=True)
            if value is not None
        }

    async def items_at(
        self, run_id: RunId, stamp: Stamp, wanted: Mapping[StepId, Sequence[int]]
    ) -> dict[ItemKey, Item] | None:
        shard = shard_of_run(run_id)
        keys = [ItemKey(step_id, index) for step_id, some in wanted.items() for index in some]
        if shard is None or not keys:
            return None if shard is None else {}
        items: dict[ItemKey, Item] = {}
        replies = await self._shards.ask_all(
            [
                self._shards.step(
                    "items", shard, *(encode.item_field(*key) for key in chunk), run_id=run_id
                )
                for chunk in _chunks(keys)
            ]
        )
        for chunk, (found, values) in zip(_chunks(keys), replies, strict=True):
            if found is None or decode.read_stamp(found) != stamp:
                return None
            read = zip(chunk, values, strict=True)
            items |= {key: decode.read_item(value) for key, value in read if value is not None}
        return items

    async def commit(self, commit: Commit) -> CommitAnswer:
        deadline = self._shards.client.deadline()
        shard = shard_of_run(commit.run_id)
        tenant = await self._shards.owner_of(commit.run_id, deadline)
        if shard is None or tenant is None:
            return Gone()
        asked = encode.encode_commit(commit, tenant, key_ttl_ms=self._shards.key_ttl_ms)
        step = self._shards.step("commit", shard, asked, run_id=commit.run_id, tenant=tenant)
        match await self._shards.ask(step, deadline):
            case [b"gone"]:
                return Gone()
            case [b"committed", version]:
                self._shards.expect_jobs(shard, commit.transition.effects)
                return Committed(Stamp(int(version), commit.nonce))
            case [b"stale_fence", highest]:
                return StaleFence(int(highest))
            case [b"conflict"]:
                return CommitConflict()
            case other:
                raise BackendCorrupt(f"commit answered {other!r}")

    async def post(
        self, run_id: RunId, event: Event, *, entry_id: str, audit: AuditEntry | None = None
    ) -> PostAnswer:
        shard = shard_of_run(run_id)
        if shard is None:
            return PostAnswer.UNKNOWN
        tenant = None if audit is None else audit.tenant
        packed = encode.pack_audit(audit, self._shards.audit_ttl_ms)
        words = (run_id, entry_id, encode.to_json(event), packed)
        step = self._shards.step("post", shard, *words, run_id=run_id, tenant=tenant or "")
        return PostAnswer((await self._shards.ask(step)).decode())

    async def timeline(
        self, run_id: RunId, *, cursor: str | None = None, limit: int = 100
    ) -> Page[TimelineEntry]:
        start = 0 if cursor is None else read_cursor("timeline", cursor, tuple[int])[0]
        shard = shard_of_run(run_id)
        if shard is None:
            return Page(())
        timeline = self._shards.keys.of_run(run_id, "timeline")
        # One more than requested shows whether there is another page.
        command = self._shards.command(shard, "LRANGE", timeline, start, start + limit)
        found = await self._shards.ask(command)
        entries = tuple(decode.read_timeline_entry(line) for line in found[:limit])
        more = len(found) > limit
        return Page(entries, write_cursor("timeline", start + limit) if more else None)

    async def list_runs(
        self,
        tenant: TenantId,
        *,
        only: RunFilter = EVERY_RUN,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[RunSummary]:
        deadline = self._shards.client.deadline()
        before = "+"
        if cursor is not None:
            created_at, run_id = read_cursor("runs", cursor, tuple[int, str])
            before = "(" + encode.created_place(Instant(created_at), run_id)
        # With a filter a page may be short: it reads a limited number of runs.
        looked_at = limit if only == EVERY_RUN else max(limit, _CHUNK)
        shard, runs = shard_of_tenant(tenant), self._shards.keys.of_tenant(tenant, "runs")
        places = await self._shards.ask(
            self._shards.command(
                shard, "ZREVRANGEBYLEX", runs, before, "-", "LIMIT", 0, looked_at + 1
            ),
            deadline,
        )
        found = await self._summaries(shard, places[:looked_at], deadline)
        fitting = [each for each in found if _fits(each, only)]
        if len(fitting) > limit:
            last = fitting[limit - 1]
            return Page(tuple(fitting[:limit]), write_cursor("runs", last.created_at, last.id))
        if len(places) > looked_at:
            place = places[looked_at - 1].decode()
            return Page(tuple(fitting), write_cursor("runs", int(place[:16]), place[16:]))
        return Page(tuple(fitting))

    async def list_approvals(
        self, tenant: TenantId | None, *, cursor: str | None = None, limit: int = 100
    ) -> Page[PendingApproval]:
        deadline = self._shards.client.deadline()
        after = "" if cursor is None else read_cursor("approvals", cursor, tuple[str])[0]
        prefix = "" if tenant is None else encode.sized(tenant)
        index = "asked" if tenant is None else "asked_of"
        shards = ALL_SHARDS if tenant is None else [shard_of_tenant(tenant)]
        found = await self._shards.read_places(index, prefix, after, limit + 1, shards, deadline)
        page = found[:limit]
        bodies = await self._shards.ask_all(
            [
                self._shards.command(
                    shard, "HGET", self._shards.keys.of_shard(shard, "approvals"), place
                )
                for place, shard in page
            ],
            deadline,
        )
        # One may have been decided since its place was read.
        approvals = tuple(decode.read_approval(each) for each in bodies if each is not None)
        more = len(found) > limit
        return Page(approvals, write_cursor("approvals", page[-1][0]) if more else None)

    async def feed(
        self, tenant: TenantId, *, after: str | None, limit: int = 100
    ) -> tuple[FeedEntry, ...]:
        start = "-" if after is None else f"({_stream_id(after)}"
        feed = self._shards.keys.of_tenant(tenant, "feed")
        found = await self._shards.ask(
            self._shards.command(
                shard_of_tenant(tenant), "XRANGE", feed, start, "+", "COUNT", limit
            )
        )
        return tuple(
            FeedEntry(
                write_cursor("feed", position.decode()),
                RunId(run_id.decode()),
                decode.read_lines(lines),
            )
            for position, (_, run_id, _, lines) in found
        )

    async def feed_position(self, tenant: TenantId) -> str:
        feed = self._shards.keys.of_tenant(tenant, "feed")
        newest = await self._shards.ask(
            self._shards.command(shard_of_tenant(tenant), "XREVRANGE", feed, "+", "-", "COUNT", 1)
        )
        return write_cursor("feed", newest[0][0].decode() if newest else "0-0")

    async def active_runs(self, tenant: TenantId) -> int:
        shard = shard_of_tenant(tenant)
        active = self._shards.keys.of_shard(shard, "active")
        return int(await self._shards.ask(self._shards.command(shard, "HGET", active, tenant)) or 0)

    async def _summaries(
        self, shard: int, places: Sequence[bytes], deadline: float
    ) -> list[RunSummary]:
        run_ids = [RunId(place[16:].decode()) for place in places]
        replies = await self._shards.ask_all(
            [
                self._shards.command(
                    shard, "HMGET", self._shards.keys.of_run(run_id, "run"), *decode.SUMMARY_FIELDS
                )
                for run_id in run_ids
            ],
            deadline,
        )
        found = (
            decode.read_summary(run_id, values)
            for run_id, values in zip(run_ids, replies, strict=True)
        )
        # A run may have been purged since its id was read.
        return [summary for summary in found if summary is not None]


def _chunks(keys: Sequence[ItemKey]) -> list[Sequence[ItemKey]]:
    return [keys[start : start + _CHUNK] for start in range(0, len(keys), _CHUNK)]


def _verdict(run_id: RunId, reply: Reply) -> Verdict:
    match reply:
        case [b"admitted"]:
            return Admitted(run_id)
        case [b"replayed", other]:
            return Replayed(RunId(other.decode()))
        case [b"full", limit, active]:
            return Full(limit, active)
        case [b"mismatch"]:
            return Mismatch()
        case [b"stale_definition"]:
            return StaleDefinition()
        case [b"throttled"]:
            return RateExceeded()
        case [b"too_late"]:
            return TooLate()
        case other:
            raise BackendCorrupt(f"admit answered {other!r}")


def _fits(summary: RunSummary, only: RunFilter) -> bool:
    return only.status in {None, summary.status} and only.workflow_id in {
        None,
        summary.workflow_id,
    }


def _stream_id(position: str) -> str:
    stream_id = read_cursor("feed", position, tuple[str])[0]
    found = _STREAM_ID.fullmatch(stream_id)
    if found is None or max(map(int, found.groups())) >= 2**64:
        raise BadCursor(position)
    return stream_id
