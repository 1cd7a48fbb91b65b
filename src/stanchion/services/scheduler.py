"""Scheduler: jobs to workers, and workers that wait for jobs.

Who gets which job is the store's doing: tenants take turns, within a tenant and topic the oldest
goes first. What is added here is waiting. A worker that finds nothing waits until a bell says that
a job of one of its topics is ready. One bell wakes one worker: the first in line that has not
looked since. Whoever was handed all it asked for, or nothing, passes the bell on, and so does
whoever leaves with it. A bell for which a worker of one tenant found nothing goes to no other
worker of that tenant: hundreds of them would otherwise be asked before another tenant's.

Behind the bells is a poll of the ready topics, once a second for all waiting workers together.

The other thing a worker waits for is bad news: that a job was taken from it, because its run was
cancelled or took too long. ``revoked`` holds such a call until a bell names one of its runs and the
store confirms it. Behind this bell is a poll as well, of all watched leases once a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from stanchion.core.model import JobId, RunId, TenantId, Topic
from stanchion.ports.bus import Bell
from stanchion.ports.errors import BackendError
from stanchion.ports.records import JobLease, LeasedJob, LostReason, Renewals
from stanchion.ports.store import Jobs
from stanchion.services.context import ReplicaContext
from stanchion.services.log import OutageLogger

__all__ = ["Handed", "Scheduler"]

POLL_S: Final = 1.0
_POLLED_AT_ONCE: Final = 200
"""Leases in one call to the store, so that other callers get their turn."""


class Handed(msgspec.Struct, frozen=True):
    """Jobs, and how long the worker waited before they were asked for."""

    jobs: tuple[LeasedJob, ...]
    waited_ms: int


class _Heard(msgspec.Struct, frozen=True):
    """What a bell was rung for, and whom it has been to."""

    topics: frozenset[Topic] = frozenset()
    tried: frozenset[TenantId] = frozenset()
    """Tenants whose workers found nothing: their other workers would not either."""


_SILENCE: Final = _Heard()


class _Waiter(msgspec.Struct, eq=False):
    worker_id: str
    topics: Collection[Topic]
    tenant: TenantId | None
    max_jobs: int
    looked: int
    """The number of the newest bell when it last asked the store."""
    bell: asyncio.Event
    heard: _Heard = _SILENCE
    """The bell in its hand: it is passed on for what it was rung for, and for nothing else."""


class _Watch(msgspec.Struct, eq=False):
    """A worker's call that waits until one of its leases is lost."""

    leases: dict[RunId, list[JobLease]]
    woken: asyncio.Event
    suspects: set[RunId]
    """Runs of which a bell was heard since the store was last asked."""
    lost: dict[JobId, LostReason]


class Scheduler:
    """Hands out jobs."""

    def __init__(self, context: ReplicaContext, *, ttl_ms: int) -> None:
        self.ttl_ms = ttl_ms
        self._jobs: Jobs = context.store
        self._clock = context.clock
        self._waiting: dict[_Waiter, None] = {}
        self._rung = 0
        self._is_draining = False
        self._watches: dict[RunId, dict[_Watch, None]] = {}
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
    ) -> Handed:
        """Hand out jobs; with none there, wait for the first."""
        began = self._clock.moment()
        waiter = _Waiter(worker_id, topics, tenant, max_jobs, self._rung, asyncio.Event())
        self._waiting[waiter] = None
        try:
            while True:
                asked_at = self._clock.moment()
                jobs = await self._look(waiter)
                left_s = wait_s - (self._clock.moment() - began) / 1000
                if jobs or left_s <= 0 or self._is_draining:
                    return Handed(jobs, asked_at - began)
                await _rung(waiter, left_s)
        finally:
            del self._waiting[waiter]
            self._wake(waiter.heard)  # It rang for one who is leaving.

    async def renew(
        self, leases: Sequence[JobLease], *, tenant: TenantId | None = None
    ) -> Renewals:
        """Extend the leases that have not expired. ``tenant``: see the port."""
        return await self._jobs.renew_jobs(leases, ttl_ms=self.ttl_ms, tenant=tenant)

    async def lost(
        self, leases: Sequence[JobLease], *, tenant: TenantId | None = None
    ) -> dict[JobId, LostReason]:
        """Which of these leases are lost, and why."""
        return await self._jobs.lost_leases(leases, tenant=tenant)

    async def revoked(
        self, leases: Sequence[JobLease], *, within_s: float
    ) -> dict[JobId, LostReason]:
        """Wait until one of these leases, which all held a moment ago, is lost: which, and why.

        Empty if none was lost in time, or as soon as the server drains. A lease under which the
        result was accepted is not waited for any more.
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
        return watch.lost

    def drain(self) -> None:
        """End every wait now, and let no other begin."""
        self._is_draining = True
        for waiter in self._waiting:
            waiter.bell.set()
        for watches in self._watches.values():
            for watch in watches:
                watch.woken.set()

    async def run(self) -> None:
        """Look for ready jobs and lost leases that no bell was heard for, until cancelled."""
        ready_outage = OutageLogger("ready_poll_failed", "ready_poll_recovered")
        lease_outage = OutageLogger("lease_poll_failed", "lease_poll_recovered")
        while True:
            await self._clock.sleep(POLL_S)
            await _tried(self._poll_ready, ready_outage)
            await _tried(self._poll_leases, lease_outage)

    def close(self) -> None:
        """Listen no more."""
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
        with suppress(BackendError):  # The poll asks again.
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
        """Ask the store, with the bell in hand.

        It is passed on unless it has done its part. All that was asked for: there may be more.
        Nothing: it may be for what this one may not take. No answer: somebody else may get one.
        """
        heard, waiter.heard = waiter.heard, _SILENCE
        waiter.bell.clear()
        waiter.looked = self._rung
        is_spent = False
        try:
            jobs = await self._jobs.lease_jobs(
                waiter.worker_id,
                waiter.topics,
                max_jobs=waiter.max_jobs,
                ttl_ms=self.ttl_ms,
                tenant=waiter.tenant,
            )
            is_spent = 0 < len(jobs) < waiter.max_jobs
            if not jobs and waiter.tenant is not None and heard.topics.issubset(waiter.topics):
                heard = _Heard(heard.topics, heard.tried | {waiter.tenant})
            return jobs
        finally:
            if not is_spent:
                self._wake(heard)

    def _hear(self, note: str) -> None:
        self._rung += 1
        self._wake(_Heard(frozenset({Topic(note)})))

    def _wake(self, heard: _Heard) -> None:
        for each in self._waiting:
            is_due = each.looked < self._rung and not each.bell.is_set()
            if (
                is_due
                and each.tenant not in heard.tried
                and not heard.topics.isdisjoint(each.topics)
            ):
                each.heard = heard
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
