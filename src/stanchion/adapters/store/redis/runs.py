"""Runs in Redis: commits, the inbox, timelines, feeds and lists."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Final, assert_never

from msgspec.structs import replace

from stanchion.adapters.cursor import RunPage, read_cursor, write_cursor
from stanchion.adapters.redis.connection import Reply
from stanchion.adapters.store.redis import decode, encode
from stanchion.adapters.store.redis.shards import ALL_SHARDS, Sharded
from stanchion.core.audit import AuditEntry
from stanchion.core.events import Event
from stanchion.core.json_value import LARGE_BYTES
from stanchion.core.model import (
    Instant,
    Item,
    ItemKey,
    JobId,
    PendingApproval,
    RunId,
    RunStatus,
    Stamp,
    StepId,
    TenantId,
    WorkflowId,
    shard_of_run,
    shard_of_tenant,
)
from stanchion.core.queue import QueuePlace
from stanchion.core.transition import TimelineEntry
from stanchion.core.why import (
    JOBS_LOOKED_AT_MAX,
    LETTERS_LOOKED_AT_MAX,
    TIMERS_LOOKED_AT_MAX,
    RunFacts,
)
from stanchion.ports.errors import BackendCorrupt
from stanchion.ports.records import (
    EVERY_RUN,
    BadCursor,
    Commit,
    CommitAnswer,
    CommitConflict,
    Committed,
    FeedEntry,
    Gone,
    Loaded,
    OldestWaits,
    Page,
    PostAnswer,
    Result,
    RunFilter,
    RunIndex,
    RunSummary,
    SettleAnswer,
    SettleMiss,
    SettleMissed,
    StaleFence,
    index_for,
)

CHUNK: Final = 1_000
"""Items that one command reads, or that are encoded without a pause."""
_TIME_CHARS: Final = 16
"""The time of creation, with which a place begins."""
_NUMBER_CHARS: Final = 16
"""The number of a ready job, with which its entry in a queue ends, before its id."""
_OF_SHARD_MIN: Final = 16
_OF_SHARD_PART: Final = 8
"""A page of all tenants reads from each shard this part of what it may hold."""
FEED_ENTRIES_MIN: Final = 10_000
"""What the scripts keep of a feed (``MAXLEN``) at least."""
_STREAM_ID: Final = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")


_MISSES: Final = {
    b"gone": SettleMiss.GONE,
    b"stale_fence": SettleMiss.STALE_FENCE,
    b"conflict": SettleMiss.CHANGED,
    b"inbox": SettleMiss.INBOX,
    b"job": SettleMiss.JOB,
}


class RedisRuns(Sharded):
    """See ``ports.store.Runs``; admission is in ``admission``."""

    def _encoded_commit(self, commit: Commit, tenant: TenantId) -> bytes:
        return encode.encode_commit(
            commit,
            tenant,
            key_ttl_ms=self._shards.key_ttl_ms,
            in_blocks=self._shards.has_new_formats,
        )

    async def load(self, run_id: RunId) -> Loaded | None:
        shard = shard_of_run(run_id)
        if shard is None:
            return None
        fields, entries = await self._shards.ask(
            self._shards.step("load", shard, run_id, run_id=run_id)
        )
        if sum(map(len, fields)) < LARGE_BYTES:
            loaded = decode.read_loaded(fields, entries)
        else:  # many small values take 90 ms, in pieces of some milliseconds
            loaded = await asyncio.to_thread(decode.read_loaded, fields, entries)
        if loaded is not None:
            self._shards.remember(run_id, loaded.run.tenant)
        return loaded

    async def run_facts(self, run_id: RunId) -> RunFacts | None:
        shard = shard_of_run(run_id)
        if shard is None:
            return None
        bounds = (JOBS_LOOKED_AT_MAX, TIMERS_LOOKED_AT_MAX, LETTERS_LOOKED_AT_MAX)
        step = self._shards.step("run_facts", shard, run_id, *bounds, run_id=run_id)
        return decode.read_run_facts(await self._shards.ask(step))

    async def load_items(
        self, run_id: RunId, wanted: Mapping[StepId, Sequence[int]]
    ) -> dict[ItemKey, Item]:
        keys = [ItemKey(step_id, index) for step_id, some in wanted.items() for index in some]
        return {
            key: decode.read_item(value)
            for chunk, (_, values) in await self._read_items(run_id, keys)
            for key, value in zip(chunk, values, strict=True)
            if value is not None
        }

    async def _read_items(
        self, run_id: RunId, keys: Sequence[ItemKey]
    ) -> list[tuple[Sequence[ItemKey], Reply]]:
        """The replies of ``items.lua``, for as many items each as one script reads."""
        shard, parts = shard_of_run(run_id), chunks(keys)
        if shard is None:
            return []
        replies = await self._shards.ask_all(
            [
                self._shards.step(
                    "items", shard, *(encode.item_field(*key) for key in chunk), run_id=run_id
                )
                for chunk in parts
            ]
        )
        return [*zip(parts, replies, strict=True)]

    async def items_at(
        self, run_id: RunId, stamp: Stamp, wanted: Mapping[StepId, Sequence[int]]
    ) -> dict[ItemKey, Item] | None:
        keys = [ItemKey(step_id, index) for step_id, some in wanted.items() for index in some]
        if shard_of_run(run_id) is None:
            return None
        items: dict[ItemKey, Item] = {}
        for chunk, (found, values) in await self._read_items(run_id, keys):
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
        asked = self._encoded_commit(commit, tenant)
        step = self._shards.step("commit", shard, asked, run_id=commit.run_id, tenant=tenant)
        match await self._shards.ask(step, deadline):
            case [b"gone"]:
                return Gone()
            case [b"committed", version, *promoted]:
                return self._committed(shard, commit, version, promoted)
            case [b"stale_fence", highest]:
                return StaleFence(int(highest))
            case [b"conflict"]:
                return CommitConflict()
            case other:
                raise BackendCorrupt(f"commit answered {other!r}")

    async def settle(self, results: Sequence[Result], commit: Commit) -> SettleAnswer:
        run_id = commit.run_id
        if any(encode.run_of_job(each.job_id) != run_id for each in results):
            return SettleMissed(SettleMiss.JOB)
        deadline = self._shards.client.deadline()
        shard = shard_of_run(run_id)
        tenant = await self._shards.owner_of(run_id, deadline)
        if shard is None or tenant is None:
            return SettleMissed(SettleMiss.GONE)
        asked = self._encoded_commit(commit, tenant)
        words: list[str | bytes | int] = []
        for each in results:
            usage = encode.pack_usage(each.usage)
            words += [each.job_id, each.fence, each.worker_id, usage]
        # Not repeatable: if the run has changed since, the repeat would be a miss, and its caller
        # would take the results for duplicates.
        step = self._shards.step(
            "settle", shard, asked, *words, run_id=run_id, tenant=tenant, is_repeatable=False
        )
        match await self._shards.ask(step, deadline):
            case [b"committed", version, *promoted]:
                return self._committed(shard, commit, version, promoted)
            case [cause, *_] if cause in _MISSES:
                return SettleMissed(_MISSES[cause])
            case other:
                raise BackendCorrupt(f"settle answered {other!r}")

    def _committed(
        self, shard: int, commit: Commit, version: bytes, promoted: Sequence[bytes]
    ) -> Committed:
        self._shards.expect_jobs(shard, commit.transition.effects)
        run_ids = tuple(RunId(each.decode()) for each in promoted)
        return Committed(Stamp(int(version), commit.nonce), run_ids)

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
        # One more than requested shows whether there is another page.
        step = self._shards.step("timeline", shard, start, limit, run_id=run_id)
        opening, lines = await self._shards.ask(step)
        found = [] if opening is None else [*decode.read_opening(opening)[start:]]
        found += map(decode.read_timeline_entry, lines)
        more = len(found) > limit
        entries = tuple(found[:limit])
        return Page(entries, write_cursor("timeline", start + limit) if more else None)

    async def list_runs(
        self,
        tenant: TenantId | None,
        *,
        only: RunFilter = EVERY_RUN,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[RunSummary]:
        deadline = self._shards.client.deadline()
        page = RunPage(only, cursor, limit)
        while not page.is_full:
            asked = page.wanted
            places, is_end = await self._run_places(tenant, only, page, asked, deadline)
            runs = await self._summaries(places, deadline)
            rows = [
                (int(place[:_TIME_CHARS]), place[_TIME_CHARS:], _own(run, tenant))
                for place, run in zip(places, runs, strict=True)
            ]
            # Without the end there are more, however few these are.
            page.add(rows, asked if is_end else 0)
        return page.page()

    async def _run_places(
        self,
        tenant: TenantId | None,
        only: RunFilter,
        page: RunPage,
        limit: int,
        deadline: float,
    ) -> tuple[list[str], bool]:
        """The next places of an index, newest first, at most ``limit``, and whether it ends there.

        Of all tenants, each shard is asked for a part of ``limit``. Then only those places count
        that are not older than the last one of a shard that has more.
        """
        ranges = _ranges(tenant, only)
        words = (
            encode.created_place(Instant(page.before[0]), page.before[1]),
            f"{page.since:016d}",
        )
        keys, slots = self._shards.keys, self._shards.keys.slots
        if tenant is not None:
            shard, key = shard_of_tenant(tenant), keys.of_tenant(tenant, "runs")
            if ranges != [""]:
                key = keys.of_shard(shard, "listed")
            step = self._shards.step_at("page", slots[shard], [key], limit, *words, *ranges)
            (found,) = await self._shards.ask(step, deadline)
            return [place.decode() for place in found], len(found) < limit
        of_shard = min(limit, max(_OF_SHARD_MIN, limit // _OF_SHARD_PART))
        replies = await self._shards.ask_all(
            self._shards.steps_on_all("page", ["listed"], of_shard, *words, *ranges),
            deadline,
        )
        found = [places for reply in replies for places in reply]
        since = max((places[-1] for places in found if len(places) == of_shard), default=b"")
        places = sorted((each for some in found for each in some if each >= since), reverse=True)
        is_end = not since and len(places) < limit
        return [place.decode() for place in places[:limit]], is_end

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
        has_gap = bool(found) and after is not None and await self._is_dropped(tenant, after)
        return tuple(
            FeedEntry(
                write_cursor("feed", position.decode()),
                RunId(run_id.decode()),
                decode.read_lines(lines),
                has_gap and place == 0,
            )
            for place, (position, (_, run_id, _, lines)) in enumerate(found)
        )

    async def _is_dropped(self, tenant: TenantId, position: str) -> bool:
        """Whether the entry at a position of the feed is no longer kept."""
        shard, feed = shard_of_tenant(tenant), self._shards.keys.of_tenant(tenant, "feed")
        if await self._shards.ask(self._shards.command(shard, "XLEN", feed)) < FEED_ENTRIES_MIN:
            return False  # nothing was dropped yet, and the entry need not be read
        at = _stream_id(position)
        return not await self._shards.ask(self._shards.command(shard, "XRANGE", feed, at, at))

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

    async def queued_runs(self, tenant: TenantId) -> int:
        shard = shard_of_tenant(tenant)
        queued = self._shards.keys.of_shard(shard, "queued")
        return int(await self._shards.ask(self._shards.command(shard, "HGET", queued, tenant)) or 0)

    async def queue_place(self, run_id: RunId) -> QueuePlace | None:
        deadline = self._shards.client.deadline()
        shard, tenant = shard_of_run(run_id), await self._shards.owner_of(run_id, deadline)
        if shard is None or tenant is None:
            return None
        found = await self._shards.ask(self._shards.step("place", shard, run_id, tenant), deadline)
        return decode.read_place(found)

    async def oldest_waits(self, tenant: TenantId | None) -> OldestWaits:
        shards = ALL_SHARDS if tenant is None else [shard_of_tenant(tenant)]
        found = await self._shards.ask_each(
            lambda shard: self._shards.step("oldest", shard, tenant or ""), shards=shards
        )
        places = sorted(place.decode() for place, _ in found if place)
        jobs = [job.decode()[_NUMBER_CHARS:] for _, job in found if job]
        return OldestWaits(
            queued=RunId(places[0][_TIME_CHARS:]) if places else None,
            ready=tuple(map(JobId, jobs)),
        )

    async def _summaries(self, places: Sequence[str], deadline: float) -> list[RunSummary | None]:
        """The runs at these places; ``None`` for one that was purged since its place was read."""
        run_ids = [RunId(place[_TIME_CHARS:]) for place in places]
        replies = await self._shards.ask_all(
            [
                self._shards.command(
                    shard_of_run(run_id) or 0,
                    *("HMGET", self._shards.keys.of_run(run_id, "run"), *decode.SUMMARY_FIELDS),
                )
                for run_id in run_ids
            ],
            deadline,
        )
        runs = [
            decode.read_summary(run_id, values)
            for run_id, values in zip(run_ids, replies, strict=True)
        ]
        queued = {
            run.id: shard_of_run(run.id) or 0
            for run in runs
            if run is not None and run.status is RunStatus.QUEUED
        }
        if not queued:
            return runs
        # The record of a promoted run is written when a replica loads it.
        are_promoted = await self._shards.ask_all(
            [
                self._shards.command(
                    shard, "HEXISTS", self._shards.keys.of_shard(shard, "promoted"), run_id
                )
                for run_id, shard in queued.items()
            ],
            deadline,
        )
        promoted = {run_id for run_id, is_one in zip(queued, are_promoted, strict=True) if is_one}
        return [
            replace(run, status=RunStatus.PENDING)
            if run is not None and run.id in promoted
            else run
            for run in runs
        ]


def chunks(keys: Sequence[ItemKey]) -> list[Sequence[ItemKey]]:
    """Items in parts that one command reads."""
    return [keys[start : start + CHUNK] for start in range(0, len(keys), CHUNK)]


def _own(run: RunSummary | None, tenant: TenantId | None) -> RunSummary | None:
    """The run, unless it is another tenant's: the index of reruns has the runs of all."""
    return run if run is not None and tenant in {None, run.tenant} else None


def _ranges(tenant: TenantId | None, only: RunFilter) -> list[str]:
    """The prefixes of the ranges that are merged; empty for the list of all runs of a tenant."""
    index = index_for(only, tenant)
    match index:
        case RunIndex.RERUN:
            return [encode.rerun_range(only.rerun_of or RunId(""))]
        case RunIndex.LABEL:
            return [encode.label_range(tenant, only.labels[0])]
        case RunIndex.WORKFLOW:
            assert tenant is not None
            return [encode.workflow_range(tenant, only.workflow_id or WorkflowId(""))]
        case RunIndex.AGE if tenant is not None:
            return [""]
        case RunIndex.STATUS | RunIndex.AGE:
            return [encode.status_range(tenant, each) for each in {*only.statuses} or {*RunStatus}]
        case _:
            assert_never(index)


def _stream_id(position: str) -> str:
    stream_id = read_cursor("feed", position, tuple[str])[0]
    found = _STREAM_ID.fullmatch(stream_id)
    if found is None or max(map(int, found.groups())) >= 2**64:
        raise BadCursor(position)
    return stream_id
