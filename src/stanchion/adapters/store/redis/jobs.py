"""Jobs in Redis: leases from all shards in turn, results, expiry."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Final, NamedTuple

from stanchion.adapters.outcomes import (
    is_last_delivery,
    job_dead_letter,
    job_died_entry,
    timed_out_entry,
)
from stanchion.adapters.redis.client import RedisRequest
from stanchion.adapters.redis.connection import Reply
from stanchion.adapters.store.redis import decode, encode
from stanchion.adapters.store.redis.encode import run_of_job
from stanchion.adapters.store.redis.shards import (
    ALL_SHARDS,
    Due,
    ReadyCount,
    Sharded,
    Shares,
    act_on_due,
)
from stanchion.core.json_value import LARGE_BYTES, JsonValue
from stanchion.core.model import (
    Instant,
    JobId,
    RunId,
    TenantId,
    Topic,
    shard_of_run,
    shard_of_tenant,
)
from stanchion.core.topic_limits import PoolUse, TokenGrant, TokenPool, TokenRenewal
from stanchion.ports.errors import BackendError
from stanchion.ports.records import (
    Acceptance,
    Accepted,
    ExpiredJob,
    JobLease,
    JobView,
    LeasedJob,
    LostReason,
    RejectedCode,
    Renewals,
    Result,
    ResultRefused,
)

_TIMED_OUT: Final = 2
"""The answer of ``expire.lua`` for a job whose attempt has taken too long."""
_EXPIRED_AT_ONCE: Final = 50
"""Jobs that are read together to be ended. Each may have 256 KiB of input."""
_LOOKS_MAX: Final = 3
"""How often one call reads the shards, if other callers took the jobs first."""


class _LeaseTerms(NamedTuple):
    """The arguments of ``lease.lua`` that are the same for all shards."""

    worker_id: str
    ttl_ms: int
    tenant: str
    not_after: int | str


class RedisJobs(Sharded):
    """See ``ports.store.Jobs``."""

    async def lease_jobs(
        self,
        worker_id: str,
        topics: Collection[Topic],
        *,
        max_jobs: int,
        ttl_ms: int,
        tenant: TenantId | None = None,
        not_after: Instant | None = None,
    ) -> tuple[LeasedJob, ...]:
        deadline = self._shards.client.deadline()
        wanted = tuple(dict.fromkeys(topics))
        terms = _LeaseTerms(worker_id, ttl_ms, tenant or "", "" if not_after is None else not_after)
        if tenant is not None:
            ordered = self._shards.rounds.in_turn(wanted)
            shares: Shares = {shard_of_tenant(tenant): dict.fromkeys(ordered, max_jobs)}
            found = await self._lease(shares, terms, max_jobs, deadline)
            for each in found:
                self._shards.rounds.served(each.job.topic)
            return tuple(found)
        leased: list[LeasedJob] = []
        for _ in range(_LOOKS_MAX):
            left = max_jobs - len(leased)
            looks = not self._shards.rounds.knows(wanted, left, asyncio.get_running_loop().time())
            if looks:
                await self._look(wanted, deadline)
            taken = self._shards.rounds.take(wanted, left)
            if not taken:
                break
            found = await self._lease(taken, terms, left, deadline)
            leased += found
            expected = sum(sum(of_shard.values()) for of_shard in taken.values())
            if looks and len(found) == expected:
                break  # all that was ready, or all that is wanted
        return tuple(leased)

    async def _look(self, topics: Sequence[Topic], deadline: float) -> None:
        """Count the ready jobs of all shards, and begin a round with them."""
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
                    shard: ReadyCount(*reply[2 * place : 2 * place + 2])
                    for shard, reply in zip(shards, replies, strict=True)
                },
                at,
            )

    async def _lease(
        self, shares: Shares, terms: _LeaseTerms, max_jobs: int, deadline: float
    ) -> list[LeasedJob]:
        replies = await self._shards.ask_some(
            [
                self._shards.step(
                    "lease",
                    shard,
                    *(terms.worker_id, terms.ttl_ms, terms.tenant, max_jobs, terms.not_after),
                    *(word for share in of_shard.items() for word in share),
                    # Not repeatable: the jobs of a lost reply are leased, and a repeat would
                    # lease others. Leases of a lost reply expire.
                    is_repeatable=False,
                )
                for shard, of_shard in shares.items()
            ],
            deadline,
        )
        words = [word for reply in replies if not isinstance(reply, BackendError) for word in reply]
        if sum(map(len, words[::4])) < LARGE_BYTES:
            return _leased(words)
        # An input of 250 KB may take 20 ms, and there may be a hundred.
        return await asyncio.to_thread(_leased, words)

    async def ready_tenants(
        self,
        topics: Collection[Topic],
        *,
        limit: int,
        tenant: TenantId | None = None,
        but_not: Collection[TenantId] = (),
    ) -> Mapping[TenantId, int]:
        deadline = self._shards.client.deadline()
        if tenant is not None:
            shards = [shard_of_tenant(tenant)]
        else:
            sizes = await self._shards.run_on_all("each", ["ready"], "ZCARD", deadline=deadline)
            shards = [shard for shard in ALL_SHARDS if _is_filled(sizes[shard])]
        names = tuple(dict.fromkeys(topics))
        words = (tenant or "", limit, len(names), *names)
        others: dict[int, list[TenantId]] = {}
        for each in but_not:
            others.setdefault(shard_of_tenant(each), []).append(each)
        # One from each shard in turn: the order of tenants is known within a shard only. Each call
        # begins with another shard.
        shards = self._shards.rounds.turned(shards)
        found = await self._shards.ask_some(
            [
                self._shards.step("ready_tenants", shard, *words, *others.get(shard, ()))
                for shard in shards
            ],
            deadline,
        )
        ready: dict[TenantId, int] = {}
        pairs = [
            zip(reply[::2], reply[1::2], strict=True)
            for reply in found
            if not isinstance(reply, BackendError)
        ]
        for row in zip_longest(*pairs):
            for pair in row:
                if pair is not None:
                    whose = TenantId(pair[0].decode())
                    ready[whose] = ready.get(whose, 0) + pair[1]
        return dict(islice(ready.items(), limit))

    async def renew_jobs(
        self,
        leases: Sequence[JobLease],
        *,
        ttl_ms: int,
        tenant: TenantId | None = None,
        not_after: Instant | None = None,
    ) -> Renewals:
        by_shard: dict[int, list[int]] = {}
        for place, lease in enumerate(leases):
            run_id = run_of_job(lease.job_id)
            shard = None if run_id is None else shard_of_run(run_id)
            # An id that no job can have is looked up too: while the store is down, none is lost.
            by_shard.setdefault(shard or 0, []).append(place)
        replies = await self._shards.ask_all(
            [
                self._shards.step(
                    "renew",
                    shard,
                    ttl_ms,
                    tenant or "",
                    "" if not_after is None else not_after,
                    *(word for place in some for word in _renewal(leases[place])),
                )
                for shard, some in by_shard.items()
            ]
        )
        answers = dict.fromkeys(range(len(leases)), 0)
        for some, reply in zip(by_shard.values(), replies, strict=True):
            # A step that came too late answers nothing about its leases.
            answers |= dict(zip(some, reply or [None] * len(some), strict=True))
        return Renewals(
            tuple(lease.job_id for place, lease in enumerate(leases) if answers[place] == 1),
            tuple(lease.job_id for place, lease in enumerate(leases) if answers[place] == 0),
        )

    async def lost_leases(
        self, leases: Sequence[JobLease], *, tenant: TenantId | None = None
    ) -> dict[JobId, LostReason]:
        lost: dict[JobId, LostReason] = {}
        by_shard: dict[int, list[JobLease]] = {}
        for lease in leases:
            run_id = run_of_job(lease.job_id)
            if run_id is None:
                lost[lease.job_id] = LostReason.UNKNOWN_JOB
            else:
                by_shard.setdefault(_shard_of(run_id), []).append(lease)
        replies = await self._shards.ask_all(
            [
                self._shards.step("lost", shard, tenant or "", *_names(some))
                for shard, some in by_shard.items()
            ]
        )
        retired: dict[RunId, list[JobLease]] = {}
        for some, reply in zip(by_shard.values(), replies, strict=True):
            for lease, answer in zip(some, reply, strict=True):
                match answer:
                    case b"held":
                        continue
                    case b"retired":
                        retired.setdefault(_run_of(lease.job_id), []).append(lease)
                    case _:
                        lost[lease.job_id] = LostReason(answer.decode())
        return lost | await self._retired(retired, tenant)

    async def _retired(
        self, by_run: Mapping[RunId, Sequence[JobLease]], tenant: TenantId | None
    ) -> dict[JobId, LostReason]:
        """The reasons for lost leases of jobs that are no longer open."""
        replies = await self._shards.ask_all(
            [
                self._shards.step(
                    "retired", _shard_of(run_id), tenant or "", *_names(some), run_id=run_id
                )
                for run_id, some in by_run.items()
            ]
        )
        return {
            lease.job_id: decode.read_lost_reason(answer)
            for some, reply in zip(by_run.values(), replies, strict=True)
            for lease, answer in zip(some, reply, strict=True)
        }

    async def accept(
        self, results: Sequence[Result], *, row_due_in_ms: int = 0, tenant: TenantId | None = None
    ) -> tuple[Acceptance, ...]:
        terms = (row_due_in_ms, tenant or "")
        by_run: dict[RunId, list[Result]] = {}
        for result in results:
            run_id = run_of_job(result.job_id)
            if run_id is not None:
                by_run.setdefault(run_id, []).append(result)
        replies = await self._shards.ask_all(
            [self._acceptance(run_id, some, terms) for run_id, some in by_run.items()]
        )
        answers = {run_id: iter(reply) for run_id, reply in zip(by_run, replies, strict=True)}
        return tuple(_acceptance(result.job_id, answers) for result in results)

    async def job(self, job_id: JobId) -> JobView | None:
        run_id = run_of_job(job_id)
        shard = None if run_id is None else shard_of_run(run_id)
        if run_id is None or shard is None:
            return None
        match await self._shards.ask(self._shards.step("job", shard, job_id, run_id=run_id)):
            case [state, work]:
                return decode.read_open_job(state, work)
            case [retired]:
                return decode.read_retired_job(retired)
            case _:
                return None

    async def progress(self, run_id: RunId, jobs: Collection[JobId]) -> dict[JobId, JsonValue]:
        shard = shard_of_run(run_id)
        wanted = [job_id for job_id in jobs if run_of_job(job_id) == run_id]
        if shard is None or not wanted:
            return {}
        replies = await self._shards.ask(self._shards.step("progress", shard, *wanted))
        return {
            job_id: decode.read_progress(said)
            for job_id, said in zip(wanted, replies, strict=True)
            if said
        }

    async def expire_jobs(self, *, limit: int, max_deliveries: int) -> tuple[ExpiredJob, ...]:
        deadline = self._shards.client.deadline()

        async def expire(due: Sequence[Due]) -> list[ExpiredJob]:
            return await self._expire(due, max_deliveries, deadline)

        return await act_on_due(
            self._shards, "deadlines", expire, limit, deadline, at_once=_EXPIRED_AT_ONCE
        )

    async def ready_topics(self) -> Mapping[Topic, int]:
        deadline = self._shards.client.deadline()
        queues = await self._shards.read_all("HKEYS", "turns", deadline=deadline)
        topics = [tuple({_topic_of(queue) for queue in some}) for some in queues]
        shards = [shard for shard in ALL_SHARDS if topics[shard]]
        replies = await self._shards.ask_each(
            lambda shard: self._shards.step("ready", shard, *topics[shard]), deadline, shards=shards
        )
        counts: dict[Topic, int] = {}
        for shard, reply in zip(shards, replies, strict=True):
            for topic, jobs in zip(topics[shard], reply[1::2], strict=True):
                if jobs:
                    counts[topic] = counts.get(topic, 0) + jobs
        return counts

    # ── Expiry ───────────────────────────────────────────────────────────────────────────────────

    async def _expire(
        self, due: Sequence[Due], max_deliveries: int, deadline: float
    ) -> list[ExpiredJob]:
        found = await self._shards.ask_all(
            [
                self._shards.step("job", each.shard, each.name, run_id=_run_of(JobId(each.name)))
                for each in due
            ],
            deadline,
        )
        # Two values are an open job: the others were finished or revoked since.
        views = [decode.read_unread_job(*reply) for reply in found if len(reply) == 2]  # noqa: PLR2004
        done = await self._shards.ask_all(
            [self._expiry(view, max_deliveries) for view in views], deadline
        )
        return [
            ExpiredJob(
                job_id=view.job.id,
                run_id=view.job.run_id,
                tenant=view.job.tenant,
                topic=view.job.topic,
                deliveries=view.deliveries,
                is_dead=_is_last_delivery(view, max_deliveries) and answer != _TIMED_OUT,
                is_timed_out=answer == _TIMED_OUT,
            )
            for view, answer in zip(views, done, strict=True)
            if answer
        ]

    # ── Steps ────────────────────────────────────────────────────────────────────────────────────

    def _acceptance(
        self, run_id: RunId, results: Sequence[Result], terms: tuple[int, str]
    ) -> RedisRequest:
        words: list[str | bytes | int] = []
        for result in results:
            event = encode.to_json(encode.event_of(result))
            usage = encode.pack_usage(result.usage)
            words += [result.job_id, result.fence, result.worker_id, event, usage]
        return self._shards.step("accept", _shard_of(run_id), run_id, *terms, *words, run_id=run_id)

    def _expiry(self, view: JobView, max_deliveries: int) -> RedisRequest:
        job, last_words = view.job, ["", ""]
        if job.attempt_timeout_ms is not None:
            entry_id, failed = timed_out_entry(job)
            last_words = [entry_id, encode.to_json(failed)]
        if _is_last_delivery(view, max_deliveries):
            # The script sets the time, from the clock of the server.
            letter = job_dead_letter(job, view.deliveries, Instant(0))
            entry_id, died = job_died_entry(job, view.deliveries)
            last_words += [letter.id, encode.to_json(letter), entry_id, encode.to_json(died)]
        return self._shards.step(
            "expire",
            _shard_of(job.run_id),
            *(job.run_id, job.tenant, job.id, view.fence),
            *last_words,
            run_id=job.run_id,
        )


class RedisTokens(Sharded):
    """See ``ports.store.Tokens``."""

    async def take_tokens(
        self, pool: TokenPool, tokens: Sequence[str], *, ttl_ms: int
    ) -> TokenGrant:
        words = (ttl_ms, _or_empty(pool.max_running), _or_empty(pool.rate_per_s))
        reply = await self._ask_pool("take_tokens", pool, *words, *tokens)
        at, running, is_rate_spent, retry_after_ms, *granted = reply
        names = tuple(name.decode() for name in granted)
        return TokenGrant(names, Instant(at), running, bool(is_rate_spent), retry_after_ms)

    async def renew_tokens(
        self, pool: TokenPool, tokens: Mapping[str, str], *, ttl_ms: int
    ) -> TokenRenewal:
        names = [name for pair in tokens.items() for name in pair]
        terms = (ttl_ms, _or_empty(pool.max_running))
        at, *renewed = await self._ask_pool("renew_tokens", pool, *terms, *names)
        return TokenRenewal(frozenset(name.decode() for name in renewed), Instant(at))

    async def release_tokens(
        self, pool: TokenPool, tokens: Collection[str], *, is_unused: bool = False
    ) -> int:
        rate = _or_empty(pool.rate_per_s) if is_unused else ""
        released: int = await self._ask_pool("release_tokens", pool, rate, *tokens)
        return released

    async def pool_uses(self, pools: Sequence[TokenPool]) -> tuple[PoolUse, ...]:
        replies = await self._shards.ask_all(
            [self._pool_step("pool_use", pool, _or_empty(pool.rate_per_s)) for pool in pools]
        )
        return tuple(
            PoolUse(running, retry_after_ms, Instant(at)) for running, retry_after_ms, at in replies
        )

    async def _ask_pool(self, name: str, pool: TokenPool, *words: str | int) -> Reply:
        return await self._shards.ask(self._pool_step(name, pool, *words))

    def _pool_step(self, name: str, pool: TokenPool, *words: str | int) -> RedisRequest:
        """A step on the keys of the pool: those of a tenant are in its shard."""
        shard = shard_of_tenant(pool.tenant or TenantId(pool.limit_id))
        keys = self._shards.keys
        return self._shards.step_at(name, keys.slots[shard], keys.of_pool(shard, pool.name), *words)


def _leased(words: Reply) -> list[LeasedJob]:
    """Decode the replies of ``lease.lua``."""
    return [
        LeasedJob(decode.read_job(work), int(fence), deliveries, Instant(int(expires_at)))
        for work, fence, deliveries, expires_at in zip(
            words[::4], words[1::4], words[2::4], words[3::4], strict=True
        )
    ]


def _or_empty(number: float | None) -> str:
    return "" if number is None else repr(number)


def _is_filled(size: Reply | BackendError) -> bool:
    return not isinstance(size, BackendError) and size > 0


def _renewal(lease: JobLease) -> tuple[str | bytes | int, ...]:
    progress = "" if lease.progress is None else encode.to_json(lease.progress)
    return lease.job_id, lease.fence, progress, encode.pack_usage(lease.usage)


def _names(leases: Sequence[JobLease]) -> list[str | int]:
    return [word for lease in leases for word in (lease.job_id, lease.fence)]


def _acceptance(job_id: JobId, answers: Mapping[RunId, Reply]) -> Acceptance:
    run_id = run_of_job(job_id)
    if run_id is None:
        return ResultRefused(job_id, RejectedCode.UNKNOWN_JOB)
    match next(answers[run_id]):
        case b"accepted":
            return Accepted(job_id, run_id)
        case b"repeated":
            return Accepted(job_id, run_id, repeated=True)
        case code:
            return ResultRefused(job_id, RejectedCode(code.decode()))


def _run_of(job_id: JobId) -> RunId:
    run_id = run_of_job(job_id)
    assert run_id is not None, "it has been stored"
    return run_id


def _shard_of(run_id: RunId) -> int:
    shard = shard_of_run(run_id)
    assert shard is not None, "it is the id of a run"
    return shard


def _topic_of(queue: bytes) -> Topic:
    """The topic in the name of a queue: length, colon, topic, and the same of the tenant."""
    length, _, rest = queue.partition(b":")
    return Topic(rest[: int(length)].decode())


def _is_last_delivery(view: JobView, max_deliveries: int) -> bool:
    return is_last_delivery(view.deliveries, view.job.max_deliveries, max_deliveries)
