"""Topic limits in force: stored as documents, kept in memory by every replica, and applied.

A limit that was written is in force on this replica at once; the others are woken by a bell, and
read all limits once a second. A replica that has not read them for two seconds reads them before it
leases jobs; if it cannot, the last ones stay in force.

A lease of jobs with limited topics has four steps: see which tenants have ready jobs, take tokens
for them, lease as many jobs as there are tokens, and give the tokens the names of the jobs. Tokens
that were not used are given back. A replica that dies in between leaves tokens that expire with
their term.

A pool that had no token is not asked again until it has room: a bell says that a token was
released, or the time of its rate has come, or a second has passed (a token may have expired). So
workers that wait for a limited topic cost the store nothing, however many jobs are ready.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter as Counts
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import compress
from typing import Final

import msgspec
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, Gauge

from stanchion.core.audit import AuditEntry
from stanchion.core.json_value import JsonValue
from stanchion.core.lease import Moment
from stanchion.core.model import Instant, JobId, TenantId, Topic
from stanchion.core.topic_limits import (
    LIMITS_MAX,
    LimitScope,
    PoolUse,
    TokenGrant,
    TokenPool,
    TopicLimit,
    TopicLimits,
    not_after,
    token_name,
    token_ttl_ms,
)
from stanchion.core.why import ReachedLimit
from stanchion.ports.bus import Bell
from stanchion.ports.errors import BackendError, BackendUnavailable
from stanchion.ports.records import Document, JobLease, JobState, LeasedJob, Page, Renewals
from stanchion.services.context import ReplicaContext
from stanchion.services.log import OutageLogger, log_event

POLL_S: Final = 1.0
_STALE_MS: Final = 2_000
_CLOSED_MS: Final = 900
"""How long a full pool is not asked: less than the time between two polls of ready jobs."""
_BELL: Final = "limits"
_KIND: Final = "limit"
_TRIES_MAX: Final = 10
"""Lost compare-and-set races in a row before ``put`` fails."""
_SAMPLE_MS: Final = 3_000
_SAMPLED_MAX: Final = 100
_RETRY_MS: Final = 1_000
"""After a failed read of the limits, the last ones are used for this long."""
_JOBS_KEPT: Final = 50_000
_POOLS_KEPT: Final = 1_000
_TENANTS_AT_ONCE: Final = 200
_ROUNDS_MAX: Final = 5


class TooManyLimits(Exception):
    """The deployment has as many limits as a replica keeps in memory."""


class LeaseCall(msgspec.Struct, frozen=True):
    """A worker's request for jobs."""

    worker_id: str
    topics: Collection[Topic]
    max_jobs: int
    tenant: TenantId | None


class _Held(msgspec.Struct, frozen=True):
    """A job that this replica leased."""

    topic: Topic
    tenant: TenantId
    fence: int = 0
    token: str | None = None
    """The name under which the tokens of this lease were taken, until they have that of the job."""

    def token_of(self, lease: JobLease) -> str:
        """The present name of the tokens of a lease."""
        if self.token is not None and self.fence == lease.fence:
            return self.token
        return token_name(lease.job_id, lease.fence)


class TopicLimitService:
    """The limits in force on this replica, and the tokens of the jobs that it leases."""

    def __init__(
        self, context: ReplicaContext, *, registry: CollectorRegistry, ttl_ms: int
    ) -> None:
        self.limits = TopicLimits()
        """The limits in force."""
        self.on_room: Callable[[TopicLimit], None] | None = None
        """Called when a limit may have room again."""
        self._store = context.store
        self._bus = context.bus
        self._clock = context.clock
        self._entropy = context.entropy
        self._ttl_ms = ttl_ms
        self._signals = _LimitSignals(registry)
        self._looked_at: Moment | None = None
        self._tried_at = self._sampled_at = Moment(-_STALE_MS - _SAMPLE_MS)
        self._looks = 0
        """Changes by this replica: a read that began before the last one is too old."""
        self._turn = 0
        self._bells = 0
        """Bells for room so far: a refusal that began before the last one is too old."""
        self._closed: OrderedDict[str, Moment] = OrderedDict()
        """Pools without a token, by name, and when to ask them again."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._jobs: OrderedDict[JobId, _Held] = OrderedDict()
        self._used: OrderedDict[str, TokenPool] = OrderedDict()
        """The pools that this replica used last, by name."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._stops = (
            self._bus.listen(Bell.SETTINGS, self._hear_change),
            self._bus.listen(Bell.ROOM, self._open),
        )

    # ── Limits ───────────────────────────────────────────────────────────────────────────────────

    async def put(self, limit: TopicLimit, audit: AuditEntry) -> None:
        """Store a limit. Raises ``BackendError`` and ``TooManyLimits``."""
        value = _value(limit)
        for _ in range(_TRIES_MAX):
            stored = await self._store.document(_KIND, limit.id)
            if stored is None and len(self.limits.by_id) >= LIMITS_MAX:
                raise TooManyLimits
            if stored is not None and stored.value == value:
                break
            entry = replace(audit, before=_shown(stored), after=value)
            revision = 0 if stored is None else stored.revision
            if await self._store.put_document(_KIND, limit.id, value, read=revision, audit=entry):
                break
        else:
            raise BackendUnavailable(f"others changed the limit {_TRIES_MAX} times in a row")
        self._take({**self.limits.by_id, limit.id: limit})
        self._bus.ring(Bell.SETTINGS, _BELL)
        log_event(logging.INFO, "limit_changed", limit=limit.id, actor=audit.actor)

    async def get(self, limit_id: str) -> TopicLimit | None:
        """One limit. Raises ``BackendError``."""
        stored = await self._store.document(_KIND, limit_id)
        return None if stored is None else _decoded(limit_id, stored)

    async def delete(self, limit_id: str, audit: AuditEntry) -> TopicLimit | None:
        """Delete a limit and return it; ``None`` if there is none. Raises ``BackendError``."""
        stored = await self._store.document(_KIND, limit_id)
        entry = replace(audit, before=_shown(stored))
        if stored is None or not await self._store.delete_document(_KIND, limit_id, audit=entry):
            return None
        self._take({name: each for name, each in self.limits.by_id.items() if name != limit_id})
        self._bus.ring(Bell.SETTINGS, _BELL)
        log_event(logging.INFO, "limit_deleted", limit=limit_id, actor=audit.actor)
        return _decoded(limit_id, stored)

    async def page(self, *, cursor: str | None, limit: int) -> Page[TopicLimit]:
        """The limits, by id. Raises ``BackendError``."""
        page = await self._store.list_documents(_KIND, cursor=cursor, limit=limit)
        decoded = (_decoded(name, stored) for name, stored in page.items)
        return Page(tuple(each for each in decoded if each is not None), page.cursor)

    async def uses(
        self, limits: Sequence[TopicLimit], tenant: TenantId | None
    ) -> list[PoolUse | None]:
        """How much of each limit is in use now; of those of each tenant, how much of this one's.

        ``None`` for a limit of each tenant if no tenant is named.
        """
        shown = [tenant is not None or each.per is LimitScope.DEPLOYMENT for each in limits]
        pools = [each.pool(tenant or _NOBODY) for each in compress(limits, shown)]
        uses = iter(await self._store.pool_uses(pools))
        return [next(uses) if is_shown else None for is_shown in shown]

    async def reached(
        self, topics: Collection[Topic], tenant: TenantId
    ) -> Mapping[Topic, ReachedLimit]:
        """Of these topics, those with a limit that is reached now. Raises ``BackendError``."""
        pools = {topic: self.limits.pools(topic, tenant) for topic in topics}
        asked = list(dict.fromkeys(pool for some in pools.values() for pool in some))
        uses = dict(zip(asked, await self._store.pool_uses(asked), strict=True))
        found: dict[Topic, ReachedLimit] = {}
        for topic, some in pools.items():
            for pool in reversed(some):
                is_full = pool.max_running is not None and uses[pool].running >= pool.max_running
                if is_full or uses[pool].retry_after_ms:
                    found[topic] = _reached(pool, uses[pool], is_full=is_full)
        return found

    async def run(self) -> None:
        """Read the limits at every change, and once a second, until cancelled."""
        outage = OutageLogger("limits_unreadable", "limits_readable")
        while True:
            self._changed.clear()
            try:
                await self.look()
                await self._sample()
            except BackendError as error:
                outage.failed(error)
            else:
                outage.worked()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait()

    async def look(self) -> None:
        """Read the limits, and put them in force. Raises ``BackendError``."""
        asked_at, looks = self._clock.moment(), self._looks
        page = await self._store.list_documents(_KIND, limit=LIMITS_MAX)
        # If this replica changed a limit meanwhile, this answer may be older.
        if looks == self._looks:
            decoded = (_decoded(name, stored) for name, stored in page.items)
            found = {each.id: each for each in decoded if each is not None}
            self._looked_at = asked_at
            if found != self.limits.by_id:
                self._take(found)

    async def refresh(self) -> None:
        """Read the limits if that was long ago. Raises ``BackendError`` if they were never read."""
        if self._looked_at is None:
            await self.look()
        elif self._is_stale() and self._clock.moment() - self._tried_at > _RETRY_MS:
            try:
                await self.look()
            except BackendError:
                self._tried_at = self._clock.moment()

    def _is_stale(self) -> bool:
        looked_at = self._looked_at
        return looked_at is None or self._clock.moment() - looked_at > _STALE_MS

    async def _is_in_force(self, limits: TopicLimits) -> bool:
        """Whether these are still the limits, after a call that may have taken long.

        A replica that was paused may have asked for tokens by limits that were lowered since.
        Raises ``BackendError`` if the limits cannot be read.
        """
        if self._is_stale():
            await self.look()
        return self.limits is limits

    async def close(self) -> None:
        """Stop listening, and wait for tokens that are being released."""
        for stop in self._stops:
            stop()
        for timer in self._timers.values():
            timer.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _take(self, limits: Mapping[str, TopicLimit]) -> None:
        gone = [each for each in self.limits.by_id if each not in limits]
        self.limits = TopicLimits(limits.values())
        self._looks += 1
        self._closed.clear()
        self._signals.set_limits(self.limits, gone)
        for limit in self.limits.by_id.values():
            self._tell_room(limit)

    def _hear_change(self, note: str) -> None:
        if note == _BELL:
            self._changed.set()

    async def _sample(self) -> None:
        """Show in the metrics how many tokens are in use."""
        pools = [
            each.pool(_NOBODY)
            for each in self.limits.by_id.values()
            if each.per is LimitScope.DEPLOYMENT
        ]
        now = self._clock.moment()
        if not self.limits or now - self._sampled_at < _SAMPLE_MS:
            return
        self._sampled_at = now
        used = [*self._used.values()][-_SAMPLED_MAX:]
        pools += [each for each in used if each.tenant and each.limit_id in self.limits.by_id]
        self._signals.set_running(pools, await self._store.pool_uses(pools))

    # ── Leases ───────────────────────────────────────────────────────────────────────────────────

    async def lease(self, call: LeaseCall) -> tuple[LeasedJob, ...]:
        """Lease jobs within all limits. Raises ``BackendError`` if none could be leased.

        Topics with the same limits are asked for together; these groups take turns to be first.
        """
        known = self.limits
        ordered = known.grouped(tuple(call.topics)).topics
        self._turn += 1
        first = self._turn % max(1, len(ordered))
        leased: list[LeasedJob] = []
        failed: BackendError | None = None
        for limits, topics in (*ordered[first:], *ordered[:first]):
            left = call.max_jobs - len(leased)
            if not left:
                break
            part = LeaseCall(call.worker_id, topics, left, call.tenant)
            try:
                leased += await (
                    self._lease_limited(part, limits, known) if limits else self._all(part)
                )
            except BackendError as error:
                failed = failed or error  # the shard of a limit; other topics do not depend on it
        if failed is not None and not leased:
            raise failed
        for each in leased:
            if each.job.id not in self._jobs:
                self._remember(each.job.id, _Held(each.job.topic, each.job.tenant))
        return tuple(leased)

    async def _all(self, call: LeaseCall) -> tuple[LeasedJob, ...]:
        return await self._store.lease_jobs(
            call.worker_id,
            call.topics,
            max_jobs=call.max_jobs,
            ttl_ms=self._ttl_ms,
            tenant=call.tenant,
        )

    async def _lease_limited(
        self, call: LeaseCall, limits: Sequence[TopicLimit], known: TopicLimits
    ) -> Sequence[LeasedJob]:
        """Lease jobs of topics that all have the same limits, which are of those ``known``."""
        per_tenant = [limit for limit in limits if limit.per is LimitScope.TENANT]
        shared = [limit.pool(_NOBODY) for limit in limits if limit.per is LimitScope.DEPLOYMENT]
        if any(self._is_closed(pool) for pool in shared):
            return ()
        if not per_tenant:
            ready = await self._store.ready_tenants(
                call.topics, limit=call.max_jobs, tenant=call.tenant
            )
            wanted = min(call.max_jobs, sum(ready.values()))
            if not wanted:
                return ()
            return await self._lease_with(replace(call, max_jobs=wanted), shared, known)
        leased: list[LeasedJob] = []
        for _ in range(_ROUNDS_MAX):
            left = call.max_jobs - len(leased)
            found = await self._tenants_with_room(call, per_tenant)
            if not found or not left:
                break
            shares = _shared_out(found, left)
            parts = [
                self._lease_with(
                    LeaseCall(call.worker_id, call.topics, count, tenant),
                    [limit.pool(tenant) for limit in limits],
                    known,
                )
                for tenant, count in shares.items()
            ]
            failed: list[BaseException] = []
            for answer in await asyncio.gather(*parts, return_exceptions=True):
                if isinstance(answer, BaseException):
                    failed.append(answer)
                else:
                    leased += answer
            if failed and not leased:  # jobs of other tenants that were leased must be handed out
                raise failed[0]
            if leased or any(self._is_closed(pool) for pool in shared):
                break
        return leased

    async def _tenants_with_room(
        self, call: LeaseCall, limits: Sequence[TopicLimit]
    ) -> dict[TenantId, int]:
        """Tenants with ready jobs and room in their own pools, and how many jobs are ready."""
        found: dict[TenantId, int] = {}
        for _ in range(_ROUNDS_MAX):
            ready = await self._store.ready_tenants(
                call.topics,
                limit=_TENANTS_AT_ONCE,
                tenant=call.tenant,
                but_not=self._closed_tenants(limits),
            )
            pools = [limit.pool(tenant) for tenant in ready for limit in limits]
            bells = self._bells
            for pool, use in zip(pools, await self._store.pool_uses(pools), strict=True):
                is_full = pool.max_running is not None and use.running >= pool.max_running
                if is_full or use.retry_after_ms:
                    self._close(pool, 0 if is_full else use.retry_after_ms, bells)
            closed = self._closed_tenants(limits)
            found = {tenant: jobs for tenant, jobs in ready.items() if tenant not in closed}
            if found or len(ready) < _TENANTS_AT_ONCE:
                break
        return found

    async def _lease_with(
        self, call: LeaseCall, pools: Sequence[TokenPool], known: TopicLimits
    ) -> Sequence[LeasedJob]:
        """Take tokens of every pool, and lease as many jobs as there are tokens.

        The pools are of the limits ``known`` when the call began: the call may have lasted long.
        """
        nonce = self._entropy.token()
        tokens: tuple[str, ...] = tuple(f"{nonce}/{place}" for place in range(call.max_jobs))
        taken: list[TokenPool] = []
        until = None
        try:
            for pool in pools:
                taken.append(pool)
                grant = await self._grant(pool, tokens)
                left_out = [each for each in tokens if each not in grant.tokens]
                await self._release(dict.fromkeys(taken[:-1], left_out), is_unused=True)
                tokens = grant.tokens
                until = min(not_after(grant.at), until or not_after(grant.at))
                if not tokens:
                    return ()
            if not await self._is_in_force(known):
                await self._release(dict.fromkeys(taken, tokens), is_unused=True)
                return ()
        except BaseException:
            self._later(self._release(dict.fromkeys(taken, tokens), is_unused=True))
            raise
        # If this is interrupted, jobs may have been leased: then the tokens must not be released.
        leased = await self._store.lease_jobs(
            call.worker_id,
            call.topics,
            max_jobs=len(tokens),
            ttl_ms=self._ttl_ms,
            tenant=call.tenant,
            not_after=until,
        )
        await self._bind(pools, tokens, leased)
        return leased

    async def _grant(self, pool: TokenPool, tokens: Sequence[str]) -> TokenGrant:
        bells = self._bells
        grant = await self._store.take_tokens(pool, tokens, ttl_ms=token_ttl_ms(self._ttl_ms))
        self._used[pool.name] = pool
        self._used.move_to_end(pool.name)
        if len(self._used) > _POOLS_KEPT:
            self._used.popitem(last=False)
        if len(grant.tokens) < len(tokens):
            self._close(pool, grant.retry_after_ms if grant.is_rate_spent else 0, bells)
        self._signals.granted(pool, grant, wanted=len(tokens))
        return grant

    async def _bind(
        self, pools: Sequence[TokenPool], tokens: Sequence[str], leased: Sequence[LeasedJob]
    ) -> None:
        """Give the tokens the names of the jobs, and give back those that were not used."""
        names = {
            token: token_name(each.job.id, each.fence)
            for token, each in zip(tokens, leased, strict=False)
        }
        for token, each in zip(tokens, leased, strict=False):
            held = _Held(each.job.topic, each.job.tenant, each.fence, token)
            self._remember(each.job.id, held)
        # After an error the tokens have their first names, and are renamed with the first renewal.
        with suppress(BackendError):
            ttl_ms = token_ttl_ms(self._ttl_ms)
            if names:
                for pool in pools:
                    await self._store.renew_tokens(pool, names, ttl_ms=ttl_ms)
            unused = tokens[len(leased) :]
            if unused:
                await self._release(dict.fromkeys(pools, unused), is_unused=True)
            for each in leased:
                self._remember(each.job.id, _Held(each.job.topic, each.job.tenant))

    # ── Renewals and results ─────────────────────────────────────────────────────────────────────

    async def renew(self, leases: Sequence[JobLease], *, tenant: TenantId | None) -> Renewals:
        """Extend leases, each after its tokens. Raises ``BackendError``.

        A lease for which a pool has no token is in neither list while it lasts: the worker tries
        again. Leases of the same job, or the same lease twice, are extended one after the other:
        the answers name jobs, and each lease needs its own.
        """
        renewed = Renewals((), ())
        for some in _of_different_jobs(leases):
            more = await self._renew(some, tenant)
            renewed = Renewals((*renewed.renewed, *more.renewed), (*renewed.lost, *more.lost))
        return renewed

    async def _renew(self, leases: Sequence[JobLease], tenant: TenantId | None) -> Renewals:
        """Extend leases of different jobs."""
        found, limits = await self._find(leases, tenant, is_held=True), self.limits
        by_pool: dict[TokenPool, dict[str, str]] = {}
        limited: dict[str, JobLease] = {}
        for lease, held in found:
            name = token_name(lease.job_id, lease.fence)
            for pool in limits.pools(held.topic, held.tenant):
                by_pool.setdefault(pool, {})[held.token_of(lease)] = name
                limited[name] = lease
        refused: set[str] = set()
        until: Instant | None = None
        for pool, names in by_pool.items():
            renewal = await self._store.renew_tokens(pool, names, ttl_ms=token_ttl_ms(self._ttl_ms))
            refused |= {*names.values()} - renewal.tokens
            until = min(not_after(renewal.at), until or not_after(renewal.at))
        if limited and not await self._is_in_force(limits):
            refused |= {*limited}  # the worker tries again
        rest = {id(lease) for lease in limited.values()}
        free = [lease for lease in leases if id(lease) not in rest]
        kept = [lease for name, lease in limited.items() if name not in refused]
        renewed = Renewals((), ())
        if free:
            renewed = await self._store.renew_jobs(free, ttl_ms=self._ttl_ms, tenant=tenant)
        if kept:
            more = await self._store.renew_jobs(
                kept, ttl_ms=self._ttl_ms, tenant=tenant, not_after=until
            )
            renewed = Renewals((*renewed.renewed, *more.renewed), (*renewed.lost, *more.lost))
        denied = [lease for name, lease in limited.items() if name in refused]
        if denied:
            # It may have been cancelled, or have expired after earlier refusals.
            ended = await self._store.lost_leases(denied, tenant=tenant)
            renewed = Renewals(renewed.renewed, (*renewed.lost, *ended))
        if renewed.lost:
            gone = {*renewed.lost}
            await self.release([each for each in leases if each.job_id in gone], tenant=tenant)
        return renewed

    async def release(self, leases: Sequence[JobLease], *, tenant: TenantId | None) -> None:
        """Release the tokens of leases that have ended. After an error they expire."""
        if not self.limits:
            return
        with suppress(BackendError):
            by_pool: dict[TokenPool, list[str]] = {}
            for lease, held in await self._find(leases, tenant, is_held=False):
                names = {token_name(lease.job_id, lease.fence), held.token_of(lease)}
                for pool in self.limits.pools(held.topic, held.tenant):
                    by_pool.setdefault(pool, []).extend(names)
            await self._release(by_pool)
        for lease in leases:
            known = self._jobs.get(lease.job_id)
            if known is not None and (known.token is None or known.fence == lease.fence):
                del self._jobs[lease.job_id]

    async def _find(
        self, leases: Sequence[JobLease], tenant: TenantId | None, *, is_held: bool
    ) -> list[tuple[JobLease, _Held]]:
        """Topic and tenant of each lease of the tenant's jobs; with ``is_held``, of current ones.

        Jobs that another replica leased are read from the store.
        """
        unknown = [lease for lease in leases if lease.job_id not in self._jobs]
        views = await asyncio.gather(*(self._store.job(lease.job_id) for lease in unknown))
        for lease, view in zip(unknown, views, strict=True):
            is_current = view is not None and view.state is JobState.LEASED
            if view is not None and (not is_held or (is_current and view.fence == lease.fence)):
                self._remember(lease.job_id, _Held(view.job.topic, view.job.tenant))
        found = ((lease, self._jobs.get(lease.job_id)) for lease in leases)
        return [
            (lease, held)
            for lease, held in found
            if held is not None and tenant in {None, held.tenant}
        ]

    async def _release(
        self, tokens: Mapping[TokenPool, Collection[str]], *, is_unused: bool = False
    ) -> None:
        for pool, some in tokens.items():
            if some and await self._store.release_tokens(pool, some, is_unused=is_unused):
                self._bus.ring(Bell.ROOM, pool.name)

    def _later(self, release: Coroutine[None, None, None]) -> None:
        """Release tokens in a separate task: the caller was cancelled or raises an error."""

        async def tried() -> None:
            with suppress(BackendError):
                await release

        task = asyncio.create_task(tried(), name="release tokens")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _remember(self, job_id: JobId, held: _Held) -> None:
        self._jobs[job_id] = held
        self._jobs.move_to_end(job_id)
        if len(self._jobs) > _JOBS_KEPT:
            self._jobs.popitem(last=False)

    # ── Room ─────────────────────────────────────────────────────────────────────────────────────

    def _close(self, pool: TokenPool, retry_after_ms: int, bells: int) -> None:
        """Do not ask the pool for a while, unless a token was released since the bell ``bells``."""
        if bells != self._bells:
            return
        name, wait_ms = pool.name, retry_after_ms or _CLOSED_MS
        self._closed[name] = Moment(self._clock.moment() + wait_ms)
        self._closed.move_to_end(name)
        if len(self._closed) > _POOLS_KEPT * 10:
            self._closed.popitem(last=False)
        if retry_after_ms and name not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[name] = loop.call_later(retry_after_ms / 1000, self._open, name)

    def _is_closed(self, pool: TokenPool) -> bool:
        until = self._closed.get(pool.name)
        return until is not None and self._clock.moment() < until

    def _closed_tenants(self, limits: Iterable[TopicLimit]) -> set[TenantId]:
        now, ids = self._clock.moment(), {limit.id for limit in limits}
        found: set[TenantId] = set()
        for name, until in [*self._closed.items()]:
            limit_id, _, tenant = name.partition("/")
            if now >= until:
                del self._closed[name]
            elif limit_id in ids:
                found.add(TenantId(tenant))
        return found

    def _open(self, name: str) -> None:
        """A pool may have room again: a token was released, or the time of its rate has come."""
        self._bells += 1
        self._closed.pop(name, None)
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        limit = self.limits.by_id.get(name.partition("/")[0])
        if limit is not None:
            self._tell_room(limit)

    def _tell_room(self, limit: TopicLimit) -> None:
        if self.on_room is not None:
            self.on_room(limit)


_NOBODY: Final = TenantId("")
"""In place of a tenant, for pools of the deployment."""


def _of_different_jobs(leases: Sequence[JobLease]) -> Sequence[Sequence[JobLease]]:
    """The leases in their order, in parts with one of each job at most: nearly always one part."""
    if len({lease.job_id for lease in leases}) == len(leases):
        return [leases]
    parts: list[list[JobLease]] = []
    seen: Counts[JobId] = Counts()
    for lease in leases:
        if seen[lease.job_id] == len(parts):
            parts.append([])
        parts[seen[lease.job_id]].append(lease)
        seen[lease.job_id] += 1
    return parts


def _shared_out(ready: Mapping[TenantId, int], wanted: int) -> dict[TenantId, int]:
    """How many jobs to lease of each tenant: one each in turn, up to the wanted number."""
    shares: dict[TenantId, int] = {}
    while wanted and any(shares.get(each, 0) < ready[each] for each in ready):
        for tenant, jobs in ready.items():
            if wanted and shares.get(tenant, 0) < jobs:
                shares[tenant] = shares.get(tenant, 0) + 1
                wanted -= 1
    return shares


def _reached(pool: TokenPool, use: PoolUse, *, is_full: bool) -> ReachedLimit:
    whose = "" if pool.tenant is None else f" of tenant '{pool.tenant}'"
    name, tenant, until = pool.limit_id, pool.tenant, None
    if pool.max_running == 0:
        rule, frees = "max_running is 0", "a higher max_running"
    elif is_full:
        rule = f"{use.running} of max_running {pool.max_running} jobs{whose} are leased"
        frees = "a result of one of them, or the end of its lease"
    else:
        rule, frees = (
            f"rate_per_s {pool.rate_per_s:g}{whose} is used up",
            "the next moment of its rate",
        )
        until = Instant(use.at + use.retry_after_ms)
    return ReachedLimit(name, rule, frees, use.at, until, tenant)


def _value(limit: TopicLimit) -> JsonValue:
    value: JsonValue = msgspec.to_builtins(limit)
    return value


def _shown(stored: Document | None) -> JsonValue:
    return None if stored is None else stored.value


def _decoded(limit_id: str, stored: Document) -> TopicLimit | None:
    """The limit, or ``None`` if it cannot be read: a newer version may have written it."""
    try:
        return msgspec.convert(stored.value, TopicLimit)
    except msgspec.ValidationError as error:
        log_event(logging.ERROR, "limit_invalid", limit=limit_id, error=str(error))
        return None


class _LimitSignals:
    """The metrics of topic limits."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._running = Gauge(
            "stanchion_topic_limit_running",
            "Leased jobs that count against a topic limit; of each tenant's, the highest.",
            ["limit"],
            registry=registry,
        )
        self._max = Gauge(
            "stanchion_topic_limit_max",
            "max_running of a topic limit.",
            ["limit"],
            registry=registry,
        )
        self._leases = Counter(
            "stanchion_topic_limit_leases",
            "Tokens that this replica took for leases of limited topics.",
            ["limit"],
            registry=registry,
        )
        self._refused = Counter(
            "stanchion_topic_limit_refused",
            "Requests for tokens that a topic limit granted not or only in part.",
            ["limit", "reason"],
            registry=registry,
        )

    def set_limits(self, limits: TopicLimits, gone: Iterable[str]) -> None:
        """Show the limits in force."""
        for limit_id in gone:
            for metric in (self._running, self._max, self._leases):
                with suppress(KeyError):
                    metric.remove(limit_id)
            for reason in ("running", "rate"):
                with suppress(KeyError):
                    self._refused.remove(limit_id, reason)
        for limit in limits.by_id.values():
            if limit.max_running is not None:
                self._max.labels(limit.id).set(limit.max_running)
                continue
            with suppress(KeyError):
                self._max.remove(limit.id)

    def set_running(self, pools: Sequence[TokenPool], uses: Sequence[PoolUse]) -> None:
        """Show how many tokens are in use."""
        highest: dict[str, int] = {}
        for pool, use in zip(pools, uses, strict=True):
            highest[pool.limit_id] = max(use.running, highest.get(pool.limit_id, 0))
        for limit_id, running in highest.items():
            self._running.labels(limit_id).set(running)

    def granted(self, pool: TokenPool, grant: TokenGrant, *, wanted: int) -> None:
        """Count the tokens that were taken."""
        if grant.tokens:
            self._leases.labels(pool.limit_id).inc(len(grant.tokens))
        if len(grant.tokens) < wanted:
            reason = "rate" if grant.is_rate_spent else "running"
            self._refused.labels(pool.limit_id, reason).inc()
