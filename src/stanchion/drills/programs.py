"""Programs that a drill runs as processes of their own.

    python -m stanchion.drills.programs burst URLS TENANT WORKFLOW CALLERS EVERY_S SECONDS SEED
    python -m stanchion.drills.programs hold FILE REDIS_URL TTL_S WORK_S NAME=POLICY…
    python -m stanchion.drills.programs work FILE URL WORKER_ID TOPIC…

``burst`` sends bursts of starts on behalf of one tenant, so that the processor time of its callers
is not taken from those that the drill measures.

``hold`` waits for leases with the public API, works under each and writes down what it does and
believes, a line of JSON each. ``work`` does the same as a worker that handles jobs with the SDK. A
policy is ``fence`` or ``continue``.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from stanchion.core.retry import BoundedJitter
from stanchion.drills.callers import DrillTenant
from stanchion.leases import LeaseLost, LeasePolicy, Leases, OnLockError, OnRenewalLost, events
from stanchion.worker import Job, Worker
from stanchion.worker.events import RenewalFailed, WorkerEvent

TICK_S: Final = 0.01
_WAIT_S: Final = 300.0
_RETRY: Final = BoundedJitter(delay_ms=30, jitter_ms=15)
_FAILURES_MAX: Final = 3


class HolderLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a holder did or believed at one moment."""

    at: float
    """The time of day, which is the same for every process of this machine."""
    what: str
    """``waiting``, ``granted``, ``tick``, ``renew_failed``, ``stopped``, ``done``."""
    name: str = ""
    """The lease, or the job."""
    fence: int = 0
    trusting: bool = False
    """Whether it believed, at that moment, that it alone may act."""
    count: int = 0


def read_holder_lines(path: Path) -> list[HolderLine]:
    """What a program has written so far."""
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [msgspec.json.decode(line, type=HolderLine) for line in whole.splitlines()]


class _Diary:
    """A file that lines are added to, each in one piece and at once."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, what: str, name: str = "", **fields: int) -> None:
        line = HolderLine(
            at=time.time(),
            what=what,
            name=name,
            fence=fields.get("fence", 0),
            trusting=bool(fields.get("trusting", 0)),
            count=fields.get("count", 0),
        )
        os.write(self._file, msgspec.json.encode(line) + b"\n")

    async def work(self, name: str, work_s: float, trusts: Callable[[], bool]) -> None:
        """Act for so long, and write down all the while whether that is still believed in."""
        until = time.monotonic() + work_s
        try:
            while time.monotonic() < until:
                self.write("tick", name, trusting=trusts())
                await asyncio.sleep(TICK_S)
        except asyncio.CancelledError:
            self.write("stopped", name)
            raise
        self.write("done", name, trusting=trusts())


async def _burst(urls: str, tenant: str, workflow: str, *numbers: str) -> None:
    callers, every_s, seconds, seed = int(numbers[0]), *map(float, numbers[1:])
    chance = Random(seed)  # noqa: S311 - repeatable on purpose
    target = DrillTenant(urls.split(","), tenant)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.monotonic()
        await target.burst(workflow, callers, chance)
        await asyncio.sleep(max(0.0, began + every_s - time.monotonic()))
    await target.close()


async def _hold(path: str, url: str, ttl_s: str, work_s: str, *names: str) -> None:
    diary = _Diary(path)

    def note(event: object) -> None:
        if isinstance(event, events.RenewFailed):
            diary.write("renew_failed", event.name, count=event.failures or 0)

    async with Leases(url, ttl_s=float(ttl_s), retry=_RETRY, on_event=note) as leases:

        async def one(name: str, policy: LeasePolicy) -> None:
            diary.write("waiting", name)
            held = leases.hold(name, policy=policy, wait_s=_WAIT_S, order="jitter")
            try:
                async with held as lease:
                    diary.write("granted", name, fence=lease.fence or 0)
                    await diary.work(name, float(work_s), lambda: lease.lost is None)
            except LeaseLost:
                diary.write("lost", name)

        pairs = [name.split("=") for name in names]
        await asyncio.gather(*(one(name, _policy(how)) for name, how in pairs))


def _policy(on_renewal_lost: str) -> LeasePolicy:
    return LeasePolicy(OnLockError.FAIL_CLOSED, OnRenewalLost(on_renewal_lost), _FAILURES_MAX)


async def _work(path: str, url: str, worker_id: str, *topics: str) -> None:
    diary = _Diary(path)

    def note(event: WorkerEvent) -> None:
        if isinstance(event, RenewalFailed):
            diary.write("renew_failed", count=event.leases)

    app = Worker(on_event=note)

    async def handle(job: Job) -> int:
        diary.write("granted", job.job_id, fence=job.fence, count=job.delivery)
        await diary.work(job.job_id, float(job.input["work_s"]), lambda: job.lost is None)
        return job.delivery

    for topic in topics:
        app.task(topic)(handle)
    diary.write("waiting")
    await app.run(url, worker_id=worker_id, wait_s=1.0, drain_s=0.0)


if __name__ == "__main__":
    _programs: dict[str, Callable[..., Coroutine[Any, Any, None]]]
    _programs = {"burst": _burst, "hold": _hold, "work": _work}
    asyncio.run(_programs[sys.argv[1]](*sys.argv[2:]))
