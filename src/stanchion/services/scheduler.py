"""Scheduler: leases jobs to workers, with long polling.

The store decides which worker gets which job: tenants take turns, and within a tenant and topic the
oldest job is first. The scheduler adds waiting. A worker that finds no job waits until a bell says
that a job of one of its topics is ready.

One bell wakes one worker: the first in the queue that has not asked the store since. A worker that
got as many jobs as it asked for, or none, passes the bell on; so does one that disconnects. After a
worker of one tenant found nothing, the bell skips the other workers of that tenant: otherwise
hundreds of them would query the store before a worker of another tenant.

A poll of the ready topics, once a second for all waiting workers together, replaces lost bells.

``revoked`` waits until a worker loses one of its job leases, because the run was cancelled or took
too long: a bell names the run, and the store confirms the loss. Once a second all watched leases
are polled, for lost bells.

``SeenWorkers`` remembers which workers called this replica, and for which topics.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

from stanchion.core.lease import Moment
from stanchion.core.model import JobId, RunId, TenantId, Topic
from stanchion.core.topic_limits import TopicLimit
from stanchion.ports.bus import Bell
from stanchion.ports.clock import Clock
from stanchion.ports.errors import BackendError
from stanchion.ports.records import JobLease, LeasedJob, LostReason, Renewals
from stanchion.ports.store import Jobs
from stanchion.services.context import ReplicaContext
from stanchion.services.log import OutageLogger
from stanchion.services.topic_limits import LeaseCall, TopicLimitService

POLL_S: Final = 1.0
_POLLED_AT_ONCE: Final = 200
"""Leases in one call to the store, so that other callers get their turn."""


class JobBatch(msgspec.Struct, frozen=True):
    """Leased jobs, and how long the worker waited before the store was asked for them."""

    jobs: tuple[LeasedJob, ...]
    waited_ms: int


class _Waiter(msgspec.Struct, eq=False):
    worker_id: str
    topics: tuple[Topic, ...]
    wanted: frozenset[Topic]
    """The same, as a set: a bell must not cost more the more topics other workers wait for."""
    tenant: TenantId | None
    max_jobs: int
    looked: int
    """The number of the newest bell when the worker last asked the store."""
    bell: asyncio.Event
    limits: frozenset[str] = frozenset()
    """The topic limits that held for its topics when it last asked the store."""
    woken_by: _ReceivedBell | None = None
    """The bell that woke the worker. It is passed on as it was rung."""


class _ReceivedBell(msgspec.Struct, frozen=True):
    """A bell: what it was rung for, and the workers it has been tried for."""

    topic: Topic | None
    limit_id: str | None = None
    """A topic limit with room: the bell is for the workers that it holds back."""
    tried: frozenset[_Tried] = frozenset()
    """Workers like these would find nothing either."""

    def is_for(self, waiter: _Waiter) -> bool:
        if self.limit_id is None:
            return self.topic in waiter.wanted and waiter.tenant not in self.tried
        return self.limit_id in waiter.limits and (
            not self.tried or (waiter.tenant, waiter.wanted) not in self.tried
        )

    def without(self, waiter: _Waiter) -> _ReceivedBell:
        """The bell after this worker found nothing."""
        if waiter.tenant is None:
            return self
        like = waiter.tenant if self.limit_id is None else (waiter.tenant, waiter.wanted)
        return replace(self, tried=self.tried | {like})


_Tried: TypeAlias = TenantId | tuple[TenantId | None, frozenset[Topic]]
"""All workers of a tenant; or those of them that ask for the same topics."""


class _Watch(msgspec.Struct, eq=False):
    """A worker's call that waits until one of its leases is lost."""

    leases: dict[RunId, list[JobLease]]
    woken: asyncio.Event
    suspects: set[RunId]
    """Runs for which a bell rang since the store was last asked."""
    lost: dict[JobId, LostReason]


class Scheduler:
    """Leases jobs to workers and renews the leases."""

    def __init__(self, context: ReplicaContext, *, ttl_ms: int, limits: TopicLimitService) -> None:
        self.ttl_ms = ttl_ms
        self._limits = limits
        limits.on_room = self._hear_room
        self._jobs: Jobs = context.store
        self._clock = context.clock
        self._waiting: dict[_Waiter, None] = {}
        self._rung = 0
        self._is_draining = False
        self._watches: dict[RunId, dict[_Watch, None]] = {}
        self._seen = SeenWorkers(context.clock, ttl_ms=ttl_ms)
        self._stops = (
            context.bus.listen(Bell.READY, self._hear),
            context.bus.listen(Bell.REVOKED, lambda note: self._suspect(RunId(note))),
        )

    async def lease(
        self,
        worker_id: str,
        topics: Collection[Topic],
        *,
        max_jobs: int,
        wait_s: float,
        tenant: TenantId | None = None,
        version: str | None = None,
    ) -> JobBatch:
        """Lease jobs; if none is ready, wait up to ``wait_s`` for the first.

        ``version`` is that of the worker's SDK, if it sent one.
        """
        began = self._clock.moment()
        topics = tuple(topics)
        self._seen.asked(worker_id, tenant, topics, version)
        waiter = _Waiter(
            worker_id, topics, frozenset(topics), tenant, max_jobs, self._rung, asyncio.Event()
        )
        self._waiting[waiter] = None
        try:
            while True:
                asked_at = self._clock.moment()
                jobs = await self._look(waiter)
                left_s = wait_s - (self._clock.moment() - began) / 1000
                if jobs or left_s <= 0 or self._is_draining:
                    self._seen.has(worker_id, tenant, [each.job.id for each in jobs])
                    return JobBatch(jobs, asked_at - began)
                await _rung(waiter, left_s)
        finally:
            del self._waiting[waiter]
            self._seen.asked(worker_id, tenant, topics, version)
            if waiter.woken_by is not None:
                self._wake(waiter.woken_by)  # a bell that this worker does not use any more

    async def renew(
        self, worker_id: str, leases: Sequence[JobLease], *, tenant: TenantId | None = None
    ) -> Renewals:
        """Extend the leases that have not expired; with ``tenant``, only those of its jobs."""
        if self._limits.limits.by_id:
            renewals = await self._limits.renew(leases, tenant=tenant)
        else:
            renewals = await self._jobs.renew_jobs(leases, ttl_ms=self.ttl_ms, tenant=tenant)
        self._seen.has(worker_id, tenant, renewals.renewed)
        self._seen.let_go(worker_id, tenant, renewals.lost)
        return renewals

    async def finished(
        self, worker_id: str, leases: Sequence[JobLease], *, tenant: TenantId | None = None
    ) -> None:
        """Note that a worker has sent the results of these jobs, and release their tokens."""
        self._seen.let_go(worker_id, tenant, [lease.job_id for lease in leases])
        if self._limits.limits.by_id:
            await self._limits.release(leases, tenant=tenant)

    def workers(self) -> tuple[WorkerSighting, ...]:
        """The workers that called this replica lately, those that wait for jobs included."""
        for waiter in self._waiting:
            self._seen.waits(waiter.worker_id, waiter.tenant, waiter.topics)
        return self._seen.all()

    async def lost(
        self, leases: Sequence[JobLease], *, tenant: TenantId | None = None
    ) -> dict[JobId, LostReason]:
        """Which of these leases are lost, and why."""
        return await self._jobs.lost_leases(leases, tenant=tenant)

    async def revoked(
        self,
        worker_id: str,
        leases: Sequence[JobLease],
        *,
        within_s: float,
        tenant: TenantId | None = None,
    ) -> dict[JobId, LostReason]:
        """Wait until one of these leases is lost; return the lost ones with the reason.

        Empty if none was lost in time, or as soon as the server drains. A lease under which the
        result was accepted is not watched any more. All leases must be valid at the call.
        """
        watch = _Watch({}, asyncio.Event(), set(), {})
        for lease in leases:
            run_id = RunId(lease.job_id.partition(":")[0])
            watch.leases.setdefault(run_id, []).append(lease)
        for run_id in watch.leases:
            self._watches.setdefault(run_id, {})[watch] = None
        try:
            async with asyncio.timeout(within_s):
                while not watch.lost and not self._is_draining:
                    await watch.woken.wait()
                    watch.woken.clear()
                    await self._ask_about_suspects(watch)
        except TimeoutError:
            pass
        finally:
            for run_id in watch.leases:
                watches = self._watches[run_id]
                del watches[watch]
                if not watches:
                    del self._watches[run_id]
        if watch.lost:
            ended = [lease for lease in leases if lease.job_id in watch.lost]
            await self._limits.release(ended, tenant=None)
            self._seen.let_go(worker_id, tenant, watch.lost)
        return watch.lost

    def drain(self) -> None:
        """End all waits now, and answer later calls without waiting."""
        self._is_draining = True
        for waiter in self._waiting:
            waiter.bell.set()
        for watches in self._watches.values():
            for watch in watches:
                watch.woken.set()

    async def run(self) -> None:
        """Poll for ready jobs and lost leases whose bell was lost, until cancelled."""
        ready_outage = OutageLogger("ready_poll_failed", "ready_poll_recovered")
        lease_outage = OutageLogger("lease_poll_failed", "lease_poll_recovered")
        while True:
            await self._clock.sleep(POLL_S)
            await _tried(self._poll_ready, ready_outage)
            await _tried(self._poll_leases, lease_outage)

    def close(self) -> None:
        """Stop listening to bells."""
        for stop in self._stops:
            stop()

    async def _poll_ready(self) -> None:
        if self._waiting:
            for topic in await self._jobs.ready_topics():
                self._hear(topic)

    async def _poll_leases(self) -> None:
        watches = {watch: None for some in self._watches.values() for watch in some}
        leases = {
            (lease.job_id, lease.fence): lease
            for watch in watches
            for some in watch.leases.values()
            for lease in some
        }
        asked = tuple(leases.values())
        for at in range(0, len(asked), _POLLED_AT_ONCE):
            lost = await self._jobs.lost_leases(asked[at : at + _POLLED_AT_ONCE])
            for job_id in lost:
                self._suspect(RunId(job_id.partition(":")[0]))

    async def _ask_about_suspects(self, watch: _Watch) -> None:
        suspects, watch.suspects = watch.suspects, set()
        leases = [lease for run_id in suspects for lease in watch.leases[run_id]]
        if not leases:
            return
        with suppress(BackendError):  # the poll asks again
            lost = await self._jobs.lost_leases(leases)
            finished = {job_id for job_id in lost if lost[job_id] is LostReason.FINISHED}
            for run_id in suspects:
                some = watch.leases[run_id]
                watch.leases[run_id] = [each for each in some if each.job_id not in finished]
            watch.lost |= {job_id: lost[job_id] for job_id in lost if job_id not in finished}

    def _suspect(self, run_id: RunId) -> None:
        for watch in self._watches.get(run_id, ()):
            watch.suspects.add(run_id)
            watch.woken.set()

    async def _look(self, waiter: _Waiter) -> tuple[LeasedJob, ...]:
        """Lease jobs from the store, and pass the bell on to the next worker if need be.

        The bell is passed on if the worker got as many jobs as it asked for (there may be more),
        none (the job may be of a tenant that this worker may not serve), or an error.
        """
        received, waiter.woken_by = waiter.woken_by, None
        waiter.bell.clear()
        waiter.looked = self._rung
        is_spent = False
        try:
            jobs = await self._lease(waiter)
            is_spent = 0 < len(jobs) < waiter.max_jobs
            if not jobs and received is not None:
                received = received.without(waiter)
            return jobs
        finally:
            if received is not None and not is_spent:
                self._wake(received)

    async def _lease(self, waiter: _Waiter) -> tuple[LeasedJob, ...]:
        await self._limits.refresh()
        limits = self._limits.limits
        if limits.by_id:
            waiter.limits = limits.grouped(waiter.topics).limit_ids
            call = LeaseCall(waiter.worker_id, waiter.topics, waiter.max_jobs, waiter.tenant)
            return await self._limits.lease(call)
        return await self._jobs.lease_jobs(
            waiter.worker_id,
            waiter.topics,
            max_jobs=waiter.max_jobs,
            ttl_ms=self.ttl_ms,
            tenant=waiter.tenant,
        )

    def _hear_room(self, limit: TopicLimit) -> None:
        """A topic limit may have room again: wake a worker that waits for its topics."""
        self._rung += 1
        self._wake(_ReceivedBell(None, limit.id))

    def _hear(self, note: str) -> None:
        self._rung += 1
        self._wake(_ReceivedBell(Topic(note)))

    def _wake(self, received: _ReceivedBell) -> None:
        for each in self._waiting:
            is_due = each.looked < self._rung and not each.bell.is_set()
            if is_due and received.is_for(each):
                each.woken_by = received
                each.bell.set()
                return


async def _tried(poll: Callable[[], Awaitable[None]], outage: OutageLogger) -> None:
    try:
        await poll()
    except BackendError as error:
        outage.failed(error)
    else:
        outage.worked()


async def _rung(waiter: _Waiter, within_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await waiter.bell.wait()


WORKER_KEPT_MS: Final = 10 * 60 * 1000
"""How long a worker that does not call any more is remembered."""
_WORKERS_MAX: Final = 500
"""Workers of one tenant, so that a tenant cannot displace the workers of another."""
_TENANTS_MAX: Final = 1_000
_TOPICS_OF_WORKER_MAX: Final = 1_000
"""Topics for which one worker asked, or those of its last request."""
_TOPICS_OF_TENANT_MAX: Final = 10_000
_TOPICS_MAX: Final = 20_000
"""Topics of all workers together. They are all read every few seconds, for the summary."""


class WorkerSighting(msgspec.Struct, frozen=True):
    """A worker that called this replica."""

    worker_id: str
    tenant: TenantId | None
    """The one tenant whose jobs it asks for; ``None`` for all."""
    topics: dict[Topic, Moment]
    """When it last asked for each topic."""
    jobs: int
    """The leases that it holds, as far as this replica knows."""
    seen_at: Moment
    version: str | None


class _Sighting(msgspec.Struct):
    seen_at: Moment
    asked: OrderedDict[tuple[Topic, ...], Moment]
    """The topics of its requests, and when it last asked for them; the last one is the newest."""
    jobs: dict[JobId, Moment]
    """When the lease of each job ends, as far as this replica knows."""
    version: str | None = None

    @property
    def topics(self) -> int:
        return sum(map(len, self.asked))


class _SeenOfTenant(msgspec.Struct):
    workers: OrderedDict[str, _Sighting]
    """The one that called last is the last."""
    topics: int = 0
    """Of all its workers together."""

    def forget(self, worker_id: str) -> None:
        self.topics -= self.workers.pop(worker_id).topics

    def forget_topics(self, topics_max: int) -> None:
        """Forget the topics of the workers that called longest ago. The last one keeps them."""
        *others, _ = self.workers.values()
        for known in others:
            if self.topics <= topics_max:
                return
            self.topics -= known.topics
            known.asked.clear()


class SeenWorkers:
    """The workers that called this replica, with their topics and leases. Bounded per tenant."""

    def __init__(self, clock: Clock, *, ttl_ms: int) -> None:
        self._clock = clock
        self._ttl_ms = ttl_ms
        self._tenants: OrderedDict[TenantId | None, _SeenOfTenant] = OrderedDict()

    def asked(
        self,
        worker_id: str,
        tenant: TenantId | None,
        topics: tuple[Topic, ...],
        version: str | None = None,
    ) -> None:
        """A worker asks for jobs of these topics."""
        sighting = self._touch(worker_id, tenant)
        sighting.version = version or sighting.version
        is_new = topics not in sighting.asked
        sighting.asked[topics] = sighting.seen_at
        sighting.asked.move_to_end(topics)
        if is_new:
            self._bound(self._tenants[tenant], sighting, len(topics))

    def waits(self, worker_id: str, tenant: TenantId | None, topics: tuple[Topic, ...]) -> None:
        """A worker that asked for these topics still waits. What was forgotten stays so."""
        sighting = self._touch(worker_id, tenant)
        if topics in sighting.asked:
            sighting.asked[topics] = sighting.seen_at

    def has(self, worker_id: str, tenant: TenantId | None, jobs: Iterable[JobId]) -> None:
        """A worker holds the leases of these jobs."""
        sighting = self._touch(worker_id, tenant)
        sighting.jobs.update(dict.fromkeys(jobs, Moment(sighting.seen_at + self._ttl_ms)))

    def let_go(self, worker_id: str, tenant: TenantId | None, jobs: Iterable[JobId]) -> None:
        """A worker does not hold the leases of these jobs any more."""
        held = self._touch(worker_id, tenant).jobs
        for job_id in jobs:
            held.pop(job_id, None)

    def all(self) -> tuple[WorkerSighting, ...]:
        """The workers that called lately, of each tenant the last one first."""
        now = self._clock.moment()
        found: list[WorkerSighting] = []
        for tenant, seen in list(self._tenants.items()):
            for worker_id, known in list(seen.workers.items()):
                if now - known.seen_at > WORKER_KEPT_MS:
                    seen.forget(worker_id)
                    continue
                known.jobs = {job_id: end for job_id, end in known.jobs.items() if now <= end}
                topics = {
                    topic: asked_at
                    for asked, asked_at in known.asked.items()
                    if now - asked_at <= WORKER_KEPT_MS
                    for topic in asked
                }
                found.append(
                    WorkerSighting(
                        worker_id, tenant, topics, len(known.jobs), known.seen_at, known.version
                    )
                )
            if not seen.workers:
                del self._tenants[tenant]
        return tuple(reversed(found))

    def _touch(self, worker_id: str, tenant: TenantId | None) -> _Sighting:
        """The entry of a worker, which is now the last of its tenant."""
        seen = self._tenants.get(tenant)
        if seen is None:
            seen = self._tenants[tenant] = _SeenOfTenant(OrderedDict())
            if len(self._tenants) > _TENANTS_MAX:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        now = self._clock.moment()
        known = seen.workers.get(worker_id)
        if known is None:
            known = seen.workers[worker_id] = _Sighting(now, OrderedDict(), {})
            if len(seen.workers) > _WORKERS_MAX:
                seen.forget(next(iter(seen.workers)))
        seen.workers.move_to_end(worker_id)
        known.seen_at = now
        return known

    def _bound(self, seen: _SeenOfTenant, known: _Sighting, added: int) -> None:
        """Forget topics: of the worker, of its tenant, and of the tenant with most of them."""
        seen.topics += added
        while known.topics > _TOPICS_OF_WORKER_MAX and len(known.asked) > 1:
            topics, _ = known.asked.popitem(last=False)
            seen.topics -= len(topics)
        seen.forget_topics(_TOPICS_OF_TENANT_MAX)
        total = sum(each.topics for each in self._tenants.values())
        if total > _TOPICS_MAX:
            most = max(self._tenants.values(), key=lambda each: each.topics)
            most.forget_topics(most.topics - (total - _TOPICS_MAX))
