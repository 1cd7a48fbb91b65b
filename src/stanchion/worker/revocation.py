"""Revocation: stop cancelled jobs within a second, by one long renew call.

A worker renews its leases every third of their term. To notice a cancelled run within a second, it
also keeps one renew call with ``wait_s`` open for its leases. The server answers it when one of
them is lost. The usual renewals do not depend on it: a failed long call is no failed renewal, and
its answer is used for lost leases only.

A lease is watched once it is a quarter of a second old, so short jobs cost no call. The call is
replaced when there are more leases to watch, at most twice a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Final, assert_never

from stanchion.core.lease import Moment
from stanchion.core.ranges import range_of
from stanchion.core.retry import Exponential, backoff_ms, honour_retry_after
from stanchion.wire.identifiers import WaitS
from stanchion.wire.worker import LeaseRef, RenewAnswer
from stanchion.worker.renewal import HeldJob, LeaseRenewer, WorkerClock
from stanchion.worker.server import (
    Outcome,
    ServerAnswered,
    ServerRefused,
    ServerUnreachable,
    WorkerApi,
)

WATCHED_MAX: Final = 1_000
"""Leases in one call. The others learn that they are lost when they are renewed."""
_WATCH_AFTER_MS: Final = 250
_REPLACE_EVERY_MS: Final = 500
_WAIT_S_MAX: Final = range_of(WaitS).high
_GRACE_S: Final = 5.0
"""How much longer than the wait its answer may take."""
_BACKOFF: Final = Exponential(base_ms=500, cap_ms=5_000)
_PAUSE_MS_MIN: Final = 100
_SPREAD: Final = 0.5
_REFUSED_PAUSE_S: Final = 60.0
"""The server is older than this worker, or its key was revoked: renewals and polls report it."""


class RevocationWatch:
    """Keeps a held call open while the worker has leases."""

    def __init__(
        self,
        server: WorkerApi,
        clock: WorkerClock,
        chance: Callable[[], float],
        renewer: LeaseRenewer,
    ) -> None:
        self._server = server
        self._clock = clock
        self._chance = chance
        self._renewer = renewer
        self._added = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def lease_added(self) -> None:
        """Watch the new lease too, with the next held call."""
        self._added.set()
        if self._task is None:
            running = asyncio.get_running_loop()
            self._task = running.create_task(self._run(), name="watch leases")

    async def close(self) -> None:
        """Watch no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        fruitless = 0
        while True:
            await self._unwatched_lease({}, not_before=0)
            watched = dict(islice(self._renewer.held.items(), WATCHED_MAX))
            wait_ms = min(held.leased.lease_ttl_ms for held in watched.values()) // 3
            began = self._clock.moment()
            outcome = await self._hold(watched, min(wait_ms / 1000, _WAIT_S_MAX), began)
            match outcome:
                case None:
                    continue
                case ServerAnswered(answer):
                    for job_id in answer.lost:
                        if job_id in watched:
                            self._renewer.lost(watched[job_id], answer.reasons.get(job_id))
                    is_early = self._clock.moment() - began < wait_ms / 2 and not answer.lost
                    fruitless = fruitless + 1 if is_early else 0
                    if is_early:
                        await self._pause(fruitless, 0)
                case ServerUnreachable(retry_after_ms=retry_after_ms):
                    fruitless += 1
                    await self._pause(fruitless, retry_after_ms)
                case ServerRefused():
                    await self._clock.sleep(_REFUSED_PAUSE_S)
                case _:
                    assert_never(outcome)

    async def _hold(
        self, watched: Mapping[str, HeldJob], wait_s: float, began: Moment
    ) -> Outcome[RenewAnswer] | None:
        """The outcome of a held call; ``None`` if there are more leases to watch."""
        refs = tuple(
            LeaseRef(job_id=job_id, fence=held.leased.fence) for job_id, held in watched.items()
        )
        running = asyncio.get_running_loop()
        call = running.create_task(
            self._server.renew(refs, timeout_s=wait_s + _GRACE_S, wait_s=wait_s), name="held renew"
        )
        tasks: list[asyncio.Task[Any]] = [call]
        if len(watched) < WATCHED_MAX:
            more = self._unwatched_lease(watched, began + _REPLACE_EVERY_MS)
            tasks.append(running.create_task(more, name="unwatched lease"))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return call.result() if call.done() else None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _unwatched_lease(self, watched: Mapping[str, HeldJob], not_before: int) -> None:
        """Return when there is a lease to be watched that is not watched yet.

        A job that was lost and leased again has another lease.
        """
        while True:
            self._added.clear()
            leases = self._renewer.held.items()
            since = [held.since for job_id, held in leases if watched.get(job_id) is not held]
            if not since:
                await self._added.wait()
                continue
            due_at = max(min(since) + _WATCH_AFTER_MS, not_before)
            left_ms = due_at - self._clock.moment()
            if left_ms <= 0:
                return
            await self._clock.sleep(left_ms / 1000)

    async def _pause(self, count: int, retry_after_ms: int) -> None:
        sample = self._chance()
        own_ms = max(_PAUSE_MS_MIN, backoff_ms(_BACKOFF, count, sample))
        wait_ms = honour_retry_after(retry_after_ms, own_ms, sample, _SPREAD)
        await self._clock.sleep(wait_ms / 1000)
