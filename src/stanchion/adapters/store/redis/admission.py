"""Admission in Redis: the scripts that admit runs, single, together and alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, overload

from stanchion.adapters.outcomes import alike_starts
from stanchion.adapters.redis.client import RedisRequest, ask_all_in_time, ask_in_time
from stanchion.adapters.redis.connection import Reply
from stanchion.adapters.store.redis import encode, encode_alike
from stanchion.adapters.store.redis.runs import CHUNK, chunks
from stanchion.adapters.store.redis.shards import Sharded, Shards
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
from stanchion.core.budget import OverBudget
from stanchion.core.json_value import JsonValue
from stanchion.core.model import (
    Instant,
    Item,
    ItemKey,
    RunId,
    TenantId,
    shard_of_run,
    shard_of_tenant,
)
from stanchion.core.queue import QUEUE_TIMER
from stanchion.core.transition import DispatchJob, SetTimer
from stanchion.ports.errors import BackendCorrupt, BackendError
from stanchion.ports.records import (
    Admission,
    AlikeStarts,
    StartsChecked,
    StartTerms,
)

_KEYS_OF_RUN: Final = ("run", "items", "out", "jobs", "inbox", "timeline")
"""The keys of a run that ``admit.lua`` takes, in its order."""
_KEYS_OF_ALIKE: Final = ("run", "out", "timeline")
"""Those that ``admit_alike.lua`` takes: the last one only if timelines are lists from the first
entry on."""
_ALIKE_ROWS: Final = 50
"""Runs that ``admit_alike.lua`` admits at once. Valkey takes 55 µs for each of 50, 64 for each of
200: it keeps all words of a script until its end."""
_APART_JOBS: Final = 100
"""First jobs of runs that ``admit.lua`` judges one by one: it holds the server for some 10 ms.
Those of a run with labels count twice."""
_ALIKE_JOBS: Final = 100
"""First jobs of the runs that ``admit_alike.lua`` admits at once."""
_TOGETHER_MAX: Final = 32
"""Single admissions of a tenant that one script judges: it holds the server for about 1 ms."""
_EFFECTS_TOGETHER_MAX: Final = 8
"""A run that begins with more jobs and timers than this is admitted by a script of its own."""
_INPUT_TOGETHER_MAX: Final = 8 * 1024
"""So is one with a larger input, in bytes, roughly: the inputs of 32 are encoded in one go."""
_TOGETHER_S: Final = 0.05
"""How far apart their time limits may be: the earliest one is that of all."""


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

    def divided(self) -> list[Sequence[Admission]]:
        """Parts of which each may be judged by one script; empty if all may."""
        parts: list[Sequence[Admission]] = []
        first = size = 0
        for place, each in enumerate(self):
            width = _jobs_of(each) * (2 if each.run.labels else 1)
            if size + width > _APART_JOBS and place > first:
                parts.append(self[first:place])
                first, size = place, 0
            size += width
        return [*parts, self[first:]] if parts else []

    alike: Sequence[Callable[[Instant], RedisRequest]] = ()
    """Requests for parts of them, in order, each by its time limit; empty if they differ."""
    at_once: int = _ALIKE_ROWS
    """How many each of these requests is about, but the last one."""
    apart: encode.EncodedAdmissions | None = None
    parts: Sequence[ReadyAdmissions] = ()
    """Those of them that one script may judge one by one, if they are too many for that."""


def _jobs_of(admission: Admission) -> int:
    """The first jobs of a run, at least one."""
    effects = admission.transition.effects
    return max(1, sum(isinstance(each, DispatchJob) for each in effects))


class _WaitingAdmission(NamedTuple):
    """An admission that is sent at the end of this iteration of the event loop."""

    admission: Admission
    latest_s: float
    verdict: asyncio.Future[Verdict | None]
    """``None``: the caller sends it by itself."""


class RedisAdmissions(Sharded):
    """See ``ports.store.Runs``: the methods that admit runs."""

    admissions_max = 250

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
        if len(run.items) > CHUNK:
            begun_s = time.perf_counter()
            items = await self._encoded_in_pieces(run.items)
            within_ms -= round((time.perf_counter() - begun_s) * 1000)
        shards = self._shards
        words = encode.encode_admission(
            admission,
            items,
            key_ttl_ms=shards.key_ttl_ms,
            audit_ttl_ms=shards.audit_ttl_ms,
            in_blocks=shards.has_new_formats,
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
            prepared.parts = [*map(self.prepare_admissions, prepared.divided())]
            if not prepared.parts and not any(len(each.run.items) > CHUNK for each in admissions):
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
        is_opened = self._shards.has_new_formats
        names = _KEYS_OF_ALIKE[:-1] if is_opened else _KEYS_OF_ALIKE
        kinds = encode_alike.encode_kinds(starts.first)
        if kinds is None:
            return []
        prepared.at_once = at_once = max(1, min(_ALIKE_ROWS, _ALIKE_JOBS // len(kinds)))
        for first in range(0, len(starts), at_once):
            part = starts[first : first + at_once]
            words = encode_alike.encode_alike(part, kinds, follows=first > 0, is_opened=is_opened)
            if words is None:
                return []
            more = keys.of_runs(names, shard, runs[first : first + at_once])
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
            in_blocks=self._shards.has_new_formats,
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
        count = min(parts * admissions.at_once, len(admissions))
        for run_id in admissions.run_ids[:count]:
            self._shards.remember(run_id, tenant)
        if count:
            self._shards.expect_jobs(shard, admissions[0].transition.effects)
        return count

    async def _admit_apart(
        self, admissions: ReadyAdmissions, within_ms: int
    ) -> tuple[Verdict, ...]:
        begun_s = time.perf_counter()
        parts = admissions.parts or [*map(ReadyAdmissions, admissions.divided())]
        if parts:
            verdicts = list[Verdict]()
            for part in parts:
                left_ms = within_ms - round((time.perf_counter() - begun_s) * 1000)
                verdicts += await self._admit_apart(part, left_ms)
            return tuple(verdicts)
        first, *others = admissions.run_ids
        tenant = admissions[0].run.tenant
        shard = shard_of_tenant(tenant)
        assert shard == shard_of_run(first), "an id begins with its tenant's shard"
        more = self._shards.keys.of_runs(_KEYS_OF_RUN, shard, others)
        encoded = admissions.apart
        if encoded is None:
            items = {
                each.run.id: await self._encoded_in_pieces(each.run.items)
                for each in admissions
                if len(each.run.items) > CHUNK
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
        if self._shards.has_new_formats:
            for number, piece in enumerate(encode.encode_blocks(items)):
                words += piece
                if number % (CHUNK // encode.BLOCK_ITEMS) == 0:
                    await asyncio.sleep(0)
            return words
        for keys in chunks([*items]):
            words += encode.encode_items({key: items[key] for key in keys})
            await asyncio.sleep(0)
        return words

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


_REFUSED: Final[Mapping[bytes, Verdict]] = {
    b"mismatch": Mismatch(),
    b"no_queue": NoQueue(),
    b"stale_definition": StaleDefinition(),
    b"throttled": RateExceeded(),
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
        case [b"tick_taken", mark]:
            return TickTaken(*map(int, mark.split(b":")))
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
