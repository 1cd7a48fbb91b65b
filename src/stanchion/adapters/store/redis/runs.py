"""Runs in Redis: admission, commits, the inbox, timelines, feeds and lists."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, assert_never, overload

from msgspec.structs import replace

from stanchion.adapters.cursor import RunPage, read_cursor, write_cursor
from stanchion.adapters.outcomes import alike_starts
from stanchion.adapters.redis.client import RedisRequest, ask_all_in_time, ask_in_time
from stanchion.adapters.redis.connection import Reply
from stanchion.adapters.store.redis import decode, encode
from stanchion.adapters.store.redis.shards import ALL_SHARDS, Sharded, Shards
from stanchion.core.admission import (
    Admitted,
    Full,
    KeyRecord,
    Mismatch,
    NoQueue,
    Queued,
    QueueFull,
    RateExceeded,
    Refused,
    Replayed,
    StaleDefinition,
    TickTaken,
    TooLate,
    Verdict,
)
from stanchion.core.audit import AuditEntry
from stanchion.core.budget import OverBudget
from stanchion.core.events import Event
from stanchion.core.json_value import JsonValue
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
from stanchion.core.queue import QUEUE_TIMER
from stanchion.core.transition import SetTimer, TimelineEntry
from stanchion.core.why import (
    JOBS_LOOKED_AT_MAX,
    LETTERS_LOOKED_AT_MAX,
    TIMERS_LOOKED_AT_MAX,
    RunFacts,
)
from stanchion.ports.errors import BackendCorrupt, BackendError
from stanchion.ports.records import (
    EVERY_RUN,
    Admission,
    AlikeStarts,
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
    StartsChecked,
    StartTerms,
    index_for,
)

_CHUNK: Final = 1_000
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


_KEYS_OF_RUN: Final = ("run", "items", "out", "jobs", "inbox", "timeline")
"""The keys of a run that ``admit.lua`` takes, in its order."""
_KEYS_OF_ALIKE: Final = ("run", "out", "timeline")
"""Those that ``admit_alike.lua`` takes."""
_ALIKE_ROWS: Final = 50
"""Runs that ``admit_alike.lua`` admits at once. Valkey takes 55 µs for each of 50, 64 for each of
200: it keeps all words of a script until its end."""
_TOGETHER_MAX: Final = 32
"""Single admissions of a tenant that one script judges: it holds the server for about 1 ms."""
_EFFECTS_TOGETHER_MAX: Final = 8
"""A run that begins with more jobs and timers than this is admitted by a script of its own."""
_INPUT_TOGETHER_MAX: Final = 8 * 1024
"""So is one with a larger input, in bytes, roughly: the inputs of 32 are encoded in one go."""
_TOGETHER_S: Final = 0.05
"""How far apart their time limits may be: the earliest one is that of all."""
_MISSES: Final = {
    b"gone": SettleMiss.GONE,
    b"stale_fence": SettleMiss.STALE_FENCE,
    b"conflict": SettleMiss.CHANGED,
    b"inbox": SettleMiss.INBOX,
    b"job": SettleMiss.JOB,
}


class ReadyAdmissions(Sequence[Admission]):
    """Admissions of one tenant, encoded for the script that may admit them."""

    def __init__(self, admissions: Sequence[Admission]) -> None:
        self.admissions = admissions

    def __len__(self) -> int:
        return len(self.admissions)

    @overload
    def __getitem__(self, place: int) -> Admission: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Admission]: ...
    def __getitem__(self, place: int | slice) -> Admission | Sequence[Admission]:
        return self.admissions[place]

    @property
    def run_ids(self) -> list[RunId]:
        if isinstance(self.admissions, AlikeStarts):
            return [row.run_id for row in self.admissions.rows]
        return [each.run.id for each in self.admissions]

    alike: Sequence[Callable[[Instant], RedisRequest]] = ()
    """Requests for parts of them, in order, each by its time limit; empty if they differ."""
    apart: encode.EncodedAdmissions | None = None


class _WaitingAdmission(NamedTuple):
    """An admission that is sent at the end of this iteration of the event loop."""

    admission: Admission
    latest_s: float
    verdict: asyncio.Future[Verdict | None]
    """``None``: the caller sends it by itself."""


class RedisRuns(Sharded):
    """See ``ports.store.Runs``."""

    admissions_max = 100

    def __init__(self, shards: Shards) -> None:
        super().__init__(shards)
        self._waiting: dict[TenantId, list[_WaitingAdmission]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def admit(self, admission: Admission, *, within_ms: int) -> Verdict:
        """Admissions of a tenant that come in one iteration of the event loop share a script.

        For each of them alone the forty keys of the shard, which all have in common, are packed,
        sent and read once more.
        """
        run = admission.run
        is_wide = run.items or len(admission.transition.effects) > _EFFECTS_TOGETHER_MAX
        if is_wide or not _is_short(run.input):
            return await self._admit_alone(admission, within_ms)
        loop = asyncio.get_running_loop()
        latest_s = loop.time() + within_ms / 1000
        waiting = self._waiting.get(run.tenant)
        if waiting is None:
            waiting = self._waiting[run.tenant] = []
            loop.call_soon(self._send_waiting, run.tenant)
        found: asyncio.Future[Verdict | None] = loop.create_future()
        waiting.append(_WaitingAdmission(admission, latest_s, found))
        verdict = await found
        if verdict is not None:
            return verdict
        return await self._admit_alone(admission, round((latest_s - loop.time()) * 1000))

    def _send_waiting(self, tenant: TenantId) -> None:
        waiting = [each for each in self._waiting.pop(tenant) if not each.verdict.done()]
        until_s = min((each.latest_s for each in waiting), default=0.0) + _TOGETHER_S
        near = [each for each in waiting if each.latest_s <= until_s]
        _send_alone(each for each in waiting if each.latest_s > until_s)
        for first in range(0, len(near), _TOGETHER_MAX):
            some = near[first : first + _TOGETHER_MAX]
            if len(some) == 1:
                _send_alone(some)
                continue
            task = asyncio.create_task(self._admit_together(some), name="admit-together")
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _admit_together(self, waiting: Sequence[_WaitingAdmission]) -> None:
        left_s = min(each.latest_s for each in waiting) - asyncio.get_running_loop().time()
        together = ReadyAdmissions([each.admission for each in waiting])
        try:
            verdicts = await self._admit_apart(together, round(left_s * 1000))
        except BackendError as error:
            for each in waiting:
                if not each.verdict.done():
                    # An object for each caller: each collects its own traceback.
                    each.verdict.set_exception(type(error)(*error.args))
        except Exception:  # noqa: BLE001 - that of one admission must not be that of the others
            _send_alone(waiting)
        except BaseException:
            for each in waiting:
                each.verdict.cancel()
            raise
        else:
            for each, verdict in zip(waiting, verdicts, strict=True):
                if not each.verdict.done():
                    each.verdict.set_result(verdict)

    async def _admit_alone(self, admission: Admission, within_ms: int) -> Verdict:
        run = admission.run
        shard = shard_of_tenant(run.tenant)
        assert shard == shard_of_run(run.id), "an id begins with its tenant's shard"
        items: list[str] | None = None
        if len(run.items) > _CHUNK:
            begun_s = time.perf_counter()
            items = await self._encoded_in_pieces(run.items)
            within_ms -= round((time.perf_counter() - begun_s) * 1000)
        shards = self._shards
        words = encode.encode_admission(
            admission,
            items,
            key_ttl_ms=shards.key_ttl_ms,
            audit_ttl_ms=shards.audit_ttl_ms,
            in_blocks=shards.has_item_blocks,
        )

        def make(not_after: Instant) -> RedisRequest:
            limit = encode.encode_limit(not_after)
            return shards.step("admit", shard, limit, words, run_id=run.id, tenant=run.tenant)

        reply = await ask_in_time(shards.client, shards.keys.slots[shard], within_ms, make)
        return self._admitted(admission, reply[0])

    def prepare_admissions(self, admissions: Sequence[Admission]) -> ReadyAdmissions:
        if isinstance(admissions, ReadyAdmissions):
            return admissions
        prepared = ReadyAdmissions(admissions)
        if len(admissions) > 1:
            prepared.alike = self._alike(prepared)
        if admissions and not prepared.alike:
            admissions = prepared.admissions = tuple(admissions)
            if not any(len(each.run.items) > _CHUNK for each in admissions):
                prepared.apart = self._encoded(admissions, {})
        return prepared

    def _alike(self, prepared: ReadyAdmissions) -> list[Callable[[Instant], RedisRequest]]:
        """The requests that admit runs that begin alike, each by its time limit; or none."""
        starts = alike_starts(prepared.admissions)
        if starts is None:
            return []
        tenant, runs = starts.first.run.tenant, prepared.run_ids
        shard = shard_of_tenant(tenant)
        keys, requests = self._shards.keys, list[Callable[[Instant], RedisRequest]]()
        kinds = encode.encode_kinds(starts.first)
        if kinds is None:
            return []
        for first in range(0, len(starts), _ALIKE_ROWS):
            part = starts[first : first + _ALIKE_ROWS]
            words = encode.encode_alike(part, kinds, follows=first > 0)
            if words is None:
                return []
            more = keys.of_runs(_KEYS_OF_ALIKE, shard, runs[first : first + _ALIKE_ROWS])
            if first > 0:
                more.append(keys.of_run(runs[first - 1], "run"))
            requests.append(
                self._shards.step_in_time(
                    "admit_alike", shard, words, tenant=tenant, more_keys=more
                )
            )
        return requests

    def _encoded(
        self, admissions: Sequence[Admission], items: Mapping[RunId, list[str]]
    ) -> encode.EncodedAdmissions:
        return encode.encode_admissions(
            admissions,
            items,
            key_ttl_ms=self._shards.key_ttl_ms,
            audit_ttl_ms=self._shards.audit_ttl_ms,
            in_blocks=self._shards.has_item_blocks,
        )

    async def admit_many(
        self, admissions: Sequence[Admission], *, within_ms: int
    ) -> tuple[Verdict, ...]:
        if not admissions:
            return ()
        asked = self.prepare_admissions(admissions)
        if not asked.alike:
            return await self._admit_apart(asked, within_ms)
        begun_s = time.perf_counter()
        count = await self._admit_alike(asked, within_ms)
        admitted = tuple(map(Admitted, asked.run_ids[:count]))
        if count == len(asked):
            return admitted
        within_ms -= round((time.perf_counter() - begun_s) * 1000)
        rest = asked if count == 0 else ReadyAdmissions(asked[count:])
        return admitted + await self._admit_apart(rest, within_ms)

    async def _admit_alike(self, admissions: ReadyAdmissions, within_ms: int) -> int:
        """Admit runs that begin alike; returns how many, from the first on.

        The others must be judged one by one. All requests are sent at once: a script admits nothing
        unless the runs before its own were admitted.
        """
        tenant = admissions[0].run.tenant
        shard = shard_of_tenant(tenant)
        slot = self._shards.keys.slots[shard]
        replies = await ask_all_in_time(self._shards.client, slot, within_ms, admissions.alike)
        parts = next((n for n, each in enumerate(replies) if each != [b"admitted"]), len(replies))
        count = min(parts * _ALIKE_ROWS, len(admissions))
        for run_id in admissions.run_ids[:count]:
            self._shards.remember(run_id, tenant)
        if count:
            self._shards.expect_jobs(shard, admissions[0].transition.effects)
        return count

    async def _admit_apart(
        self, admissions: ReadyAdmissions, within_ms: int
    ) -> tuple[Verdict, ...]:
        first, *others = admissions.run_ids
        tenant = admissions[0].run.tenant
        shard = shard_of_tenant(tenant)
        assert shard == shard_of_run(first), "an id begins with its tenant's shard"
        more = self._shards.keys.of_runs(_KEYS_OF_RUN, shard, others)
        encoded = admissions.apart
        if encoded is None:
            begun_s = time.perf_counter()
            items = {
                each.run.id: await self._encoded_in_pieces(each.run.items)
                for each in admissions
                if len(each.run.items) > _CHUNK
            }
            encoded = self._encoded(admissions, items)
            if items:
                within_ms -= round((time.perf_counter() - begun_s) * 1000)
        words = encoded.arguments

        def make(not_after: Instant) -> RedisRequest:
            return self._shards.step(
                "admit", shard, *words(not_after), run_id=first, tenant=tenant, more_keys=more
            )

        slot = self._shards.keys.slots[shard]
        replies = await ask_in_time(self._shards.client, slot, within_ms, make)
        return tuple(map(self._admitted, admissions, replies))

    def _admitted(self, admission: Admission, reply: Reply) -> Verdict:
        """The verdict in a reply; notes what the store has now."""
        run = admission.run
        verdict = _verdict(run.id, reply)
        shard = shard_of_tenant(run.tenant)
        if isinstance(verdict, Admitted):
            self._shards.remember(run.id, run.tenant)
            self._shards.expect_jobs(shard, admission.transition.effects)
        elif isinstance(verdict, Queued):
            self._shards.remember(run.id, run.tenant)
            due = Instant(reply[2] if len(reply) > 2 else run.created_at)  # noqa: PLR2004 - see admit.lua
            self._shards.expect_jobs(shard, (SetTimer(QUEUE_TIMER, due),))
        return verdict

    async def _encoded_in_pieces(self, items: Mapping[ItemKey, Item]) -> list[str]:
        """Encode many items. The event loop is left to others after each thousand."""
        words: list[str] = []
        if self._shards.has_item_blocks:
            for number, piece in enumerate(encode.encode_blocks(items)):
                words += piece
                if number % (_CHUNK // encode.BLOCK_ITEMS) == 0:
                    await asyncio.sleep(0)
            return words
        for keys in _chunks([*items]):
            words += encode.encode_items({key: items[key] for key in keys})
            await asyncio.sleep(0)
        return words

    def _encoded_commit(self, commit: Commit, tenant: TenantId) -> bytes:
        return encode.encode_commit(
            commit,
            tenant,
            key_ttl_ms=self._shards.key_ttl_ms,
            in_blocks=self._shards.has_item_blocks,
        )

    async def check_starts(
        self, tenant: TenantId, terms: Sequence[StartTerms], keys: Collection[str]
    ) -> StartsChecked:
        asked, whose = [*keys], encode.sized(tenant)
        step = self._shards.step(
            "check_starts",
            shard_of_tenant(tenant),
            tenant,
            encode.encode_terms(tenant, terms),
            *(whose + key for key in asked),
            tenant=tenant,
        )
        refused, known = await self._shards.ask(step)
        return StartsChecked(
            tuple(map(_refusal, refused)),
            {
                asked[number]: KeyRecord(fingerprint.decode(), RunId(run_id.decode()))
                for number, fingerprint, run_id in zip(*[iter(known)] * 3, strict=True)
            },
        )

    async def load(self, run_id: RunId) -> Loaded | None:
        shard = shard_of_run(run_id)
        if shard is None:
            return None
        fields, entries = await self._shards.ask(
            self._shards.step("load", shard, run_id, run_id=run_id)
        )
        loaded = decode.read_loaded(fields, entries)
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
        shard, chunks = shard_of_run(run_id), _chunks(keys)
        if shard is None:
            return []
        replies = await self._shards.ask_all(
            [
                self._shards.step(
                    "items", shard, *(encode.item_field(*key) for key in chunk), run_id=run_id
                )
                for chunk in chunks
            ]
        )
        return [*zip(chunks, replies, strict=True)]

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
        timeline = self._shards.keys.of_run(run_id, "timeline")
        # One more than requested shows whether there is another page.
        command = self._shards.command(shard, "LRANGE", timeline, start, start + limit)
        found = await self._shards.ask(command)
        entries = tuple(decode.read_timeline_entry(line) for line in found[:limit])
        more = len(found) > limit
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

    async def queue_position(self, run_id: RunId) -> int | None:
        deadline = self._shards.client.deadline()
        shard, tenant = shard_of_run(run_id), await self._shards.owner_of(run_id, deadline)
        if shard is None or tenant is None:
            return None
        found = await self._shards.ask(
            self._shards.step("position", shard, run_id, tenant), deadline
        )
        return None if found is None else int(found)

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


def _chunks(keys: Sequence[ItemKey]) -> list[Sequence[ItemKey]]:
    return [keys[start : start + _CHUNK] for start in range(0, len(keys), _CHUNK)]


_REFUSED: Final[Mapping[bytes, Verdict]] = {
    b"mismatch": Mismatch(),
    b"no_queue": NoQueue(),
    b"stale_definition": StaleDefinition(),
    b"throttled": RateExceeded(),
    b"tick_taken": TickTaken(),
    b"too_late": TooLate(),
}


def _is_short(value: JsonValue) -> bool:
    """Whether an input is short enough to be encoded with others."""
    size, left = 0, [value]
    while left and size <= _INPUT_TOGETHER_MAX:
        each = left.pop()
        size += 16
        if type(each) is str:
            size += len(each)
        elif type(each) is list:
            left += each
        elif type(each) is dict:
            size += sum(map(len, each))
            left += each.values()
    return size <= _INPUT_TOGETHER_MAX


def _send_alone(waiting: Iterable[_WaitingAdmission]) -> None:
    """Let the callers send their admissions by themselves."""
    for each in waiting:
        if not each.verdict.done():
            each.verdict.set_result(None)


def _verdict(run_id: RunId, reply: Reply) -> Verdict:
    match reply:
        case [b"admitted"]:
            return Admitted(run_id)
        case [b"replayed", other]:
            return Replayed(RunId(other.decode()))
        case [b"queued", position, *_]:
            return Queued(run_id, position)
        case [b"full", limit, active]:
            return Full(limit, active)
        case [b"over_budget", name, limit, used, reserved, ends, asked]:
            resets_at = None if ends < 0 else Instant(ends)
            return OverBudget(name.decode(), limit, used, reserved, resets_at, asked)
        case [b"queue_full", limit, active, queue_max]:
            return QueueFull(limit, active, queue_max)
        case [word] if word in _REFUSED:
            return _REFUSED[word]
        case other:
            raise BackendCorrupt(f"admit answered {other!r}")


def _refusal(reply: Reply) -> Refused | None:
    if reply == [b"free"]:
        return None
    verdict = _verdict(RunId(""), reply)
    assert not isinstance(verdict, Admitted | Queued | Replayed), "nothing is created"
    return verdict


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
