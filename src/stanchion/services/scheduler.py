"""Scheduler: jobs to workers, and workers that wait for jobs.

Who gets which job is the store's doing: tenants take turns, within a tenant and topic the oldest
goes first. What is added here is waiting. A worker that finds nothing waits until a bell says that
a job of one of its topics is ready. One bell wakes one worker: the first in line that has not
looked since. Whoever was handed all it asked for, or nothing, passes the bell on, and so does
whoever leaves with it. A bell for which a worker of one tenant found nothing goes to no other
worker of that tenant: hundreds of them would otherwise be asked before another tenant's.

Behind the bells is a poll of the ready topics, once a second for all waiting workers together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from stanchion.core.model import TenantId, Topic
from stanchion.ports.bus import Bell
from stanchion.ports.errors import BackendError
from stanchion.ports.records import JobLease, LeasedJob, Renewals
from stanchion.ports.store import Jobs
from stanchion.services.context import ReplicaContext
from stanchion.services.log import OutageLogger

__all__ = ["Handed", "Scheduler"]

POLL_S: Final = 1.0


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


class Scheduler:
    """Hands out jobs."""

    def __init__(self, context: ReplicaContext, *, ttl_ms: int) -> None:
        self.ttl_ms = ttl_ms
        self._jobs: Jobs = context.store
        self._clock = context.clock
        self._waiting: dict[_Waiter, None] = {}
        self._rung = 0
        self._is_draining = False
        self._stop_listening = context.bus.listen(Bell.READY, self._hear)

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

    def drain(self) -> None:
        """End every wait now, and let no other begin."""
        self._is_draining = True
        for waiter in self._waiting:
            waiter.bell.set()

    async def run(self) -> None:
        """Look for ready jobs that no bell was heard for, until cancelled."""
        outage = OutageLogger("ready_poll_failed", "ready_poll_recovered")
        while True:
            await self._clock.sleep(POLL_S)
            if not self._waiting:
                continue
            try:
                ready = await self._jobs.ready_topics()
            except BackendError as error:
                outage.failed(error)
                continue
            outage.worked()
            for topic in ready:
                self._hear(topic)

    def close(self) -> None:
        """Listen no more."""
        self._stop_listening()

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


async def _rung(waiter: _Waiter, within_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await waiter.bell.wait()
