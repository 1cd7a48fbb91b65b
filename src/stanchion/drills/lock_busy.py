"""Lock-busy drill (D5): results for runs that another holder has, again and again.

Two replicas handle results of many runs at once, while a rival takes every run's lock for 300 ms of
each 500 ms, as a replica would whose own retries have the same rhythm. With a fixed delay
of 500 ms a retry that met the rival once meets it again and again; with 500 ± 200 ms it does not.
A tap between the replicas and NATS reads the delay of every retry, and the lock server's MONITOR
shows when each run's lock was asked for.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Any, Final

import msgspec

from stanchion.core.json_value import JsonObject
from stanchion.drills.callers import DrillTenant, drill_tenant, one_job, until
from stanchion.drills.observe import (
    METRICS_OLD_S,
    LockCommands,
    Metrics,
    monitored,
    read_whole_metrics,
    time_of,
)
from stanchion.drills.options import DrillOptions, Progress
from stanchion.drills.processes import Deployment, started
from stanchion.drills.promises.lock_busy import (
    DELAY_MS,
    FIXED,
    JITTER,
    JITTER_MS,
    ArmSeen,
    LockBusySeen,
    charts_of,
    figures_of,
    judge_lock_busy,
)
from stanchion.drills.proxy import Proxy
from stanchion.drills.verdict import DrillResult

CYCLE_S: Final = 0.508
"""The rhythm of a replica that retries every 500 ms: each retry takes a few milliseconds itself."""
_KINDS: Final = {FIXED: "fixed", JITTER: "jitter"}
_NAK: Final = re.compile(rb'-NAK \{"delay": ?(\d+)\}')
_NAK_BYTES_MAX: Final = 64


class _Plan(msgspec.Struct, frozen=True, kw_only=True):
    runs: int
    rounds: int
    rival_s: float
    """How long the rival keeps coming back."""


_QUICK: Final = _Plan(runs=24, rounds=1, rival_s=7.0)
_WHOLE: Final = _Plan(runs=40, rounds=3, rival_s=20.0)
_HOLD_S: Final = 0.3
_FIRST_CYCLES: Final = 4
_AHEAD_S: Final = 0.03
_TRIES_BEFORE_RETRIES: Final = 2
_IN_FORCE_S: Final = 2.0
"""By then a change of the settings is in force on every replica."""


async def lock_busy_drill(options: DrillOptions, progress: Progress) -> DrillResult:
    """Run it."""
    plan = _QUICK if options.quick else _WHOLE
    progress.plan(
        [
            ("two replicas", 3.0),
            *(
                (f"{name}, round {number + 1}", plan.rival_s + 4)
                for number in range(plan.rounds)
                for name in _KINDS
            ),
        ]
    )
    progress.next()
    rounds: dict[str, list[ArmSeen]] = {name: [] for name in _KINDS}
    async with AsyncExitStack() as cleaning:
        enter = cleaning.enter_async_context
        deployment = await enter(started(replicas=2))
        tenant = await enter(drill_tenant(deployment.urls, "lock-busy"))
        await tenant.configure(max_concurrent_runs=None)
        assert deployment.locks is not None
        commands = await enter(monitored(deployment.locks.port))
        stage = _Stage(deployment, tenant, commands, plan)
        for number in range(plan.rounds):
            for name in _KINDS:
                progress.next()
                rounds[name].append(await stage.arm(name, number))
        metrics = await read_whole_metrics(tenant)
        failures = sum(
            replica.log.read_bytes().count(b'"inbox_entry_failed"')
            for replica in deployment.replicas
        )
    seen = LockBusySeen(
        arms=tuple(_merged(arms) for arms in rounds.values()),
        dead_letters=metrics.sum("stanchion_dead_letters_total"),
        poison_failures=failures,
    )
    return DrillResult(
        promises=judge_lock_busy(seen),
        figures=figures_of(seen),
        charts=tuple(charts_of(seen, {name: arms[0] for name, arms in rounds.items()})),
        settings={
            "lock_busy": {name: _setting(kind) for name, kind in _KINDS.items()},
            "rival": f"holds every run's lock for {_HOLD_S * 1000:.0f} ms of each 500 ms",
            "runs": plan.runs,
        },
    )


def _setting(kind: str) -> JsonObject:
    return {"kind": kind, "delay_ms": DELAY_MS, "jitter_ms": JITTER_MS}


class _Stage:
    """Where the arms take turns."""

    def __init__(
        self, deployment: Deployment, tenant: DrillTenant, commands: LockCommands, plan: _Plan
    ) -> None:
        self._links: Sequence[Proxy] = deployment.bus_links
        self._tenant = tenant
        self._commands = commands
        self._plan = plan
        self._last: Metrics | None = None
        """What was counted when the last arm ended."""

    async def arm(self, name: str, number: int) -> ArmSeen:
        """Many results at once for runs whose locks a rival takes again and again."""
        await self._tenant.settings({"lock_busy": _setting(_KINDS[name])})
        topic = f"drill-{_KINDS[name]}-{number}"
        await self._tenant.apply(topic, one_job(topic))
        jobs = await self._leased(topic)
        before = self._last or await read_whole_metrics(self._tenant)
        await asyncio.sleep(_IN_FORCE_S)
        with _tapped(self._links) as delays_ms:
            async with self._rival([str(job["run_id"]) for job in jobs]):
                began = time.time()
                await asyncio.gather(*(self._send(job) for job in jobs))
                await self._wait(topic, self._plan.rival_s)
            await self._wait(topic, 10.0)
        await asyncio.sleep(METRICS_OLD_S)
        self._last = after = await read_whole_metrics(self._tenant)
        rows = [row for row in await self._tenant.runs() if row["workflow_id"] == topic]
        ended = [time_of(str(row["finished_at"])) - began for row in rows if row["finished_at"]]
        burst = "stanchion_lock_busy_retry_burst"
        return ArmSeen(
            name=name,
            runs=len(rows),
            waits_s=tuple(ended),
            delays_ms=tuple(delays_ms),
            attempts_s=tuple(self._attempts([str(row["run_id"]) for row in rows], began)),
            retries=after.sum(f"{burst}_sum") - before.sum(f"{burst}_sum"),
            buckets=after.sum(f"{burst}_count") - before.sum(f"{burst}_count"),
            unfinished=len(rows) - len(ended),
        )

    async def _leased(self, topic: str) -> list[Mapping[str, Any]]:
        """Start the runs, and lease the job of each."""
        for _ in range(self._plan.runs):
            await self._tenant.expect("POST", f"/v1/workflows/{topic}/runs", {"input": {}})
        jobs: list[Mapping[str, Any]] = []

        async def all_leased() -> bool:
            wish = {"worker_id": "drill", "topics": [topic], "max_jobs": 100, "wait_s": 1.0}
            answer = await self._tenant.call("POST", "/v1/worker/lease", wish)
            if isinstance(answer.document, dict):
                jobs.extend(answer.document.get("jobs", ()))
            return len(jobs) >= self._plan.runs

        await until(all_leased, within_s=20.0, what="a job of every run")
        return jobs

    async def _send(self, job: Mapping[str, Any]) -> None:
        result = {"job_id": job["job_id"], "fence": job["fence"], "status": "succeeded"}
        body = {"worker_id": "drill", "results": [result]}
        await self._tenant.expect("POST", "/v1/worker/results", body)

    async def _wait(self, topic: str, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            rows = [row for row in await self._tenant.runs() if row["workflow_id"] == topic]
            if all(row["finished_at"] for row in rows):
                return
            await asyncio.sleep(0.25)

    @asynccontextmanager
    async def _rival(self, run_ids: Sequence[str]) -> AsyncIterator[None]:
        """Hold every run's lock when the block begins, and in each cycle while it lasts."""

        async def take(ttl_s: float) -> None:
            locks = [{"name": f"run/{run_id}", "ttl_s": ttl_s} for run_id in run_ids]
            await asyncio.gather(
                *(self._tenant.call("POST", "/v1/admin/leases", lock) for lock in locks)
            )

        async def cycle(began: float) -> None:
            for number in count(_FIRST_CYCLES):
                # Each is due when a retry is that was refused at the beginning.
                due = began + number * CYCLE_S - _AHEAD_S
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                await take(_HOLD_S + _AHEAD_S)

        # The first hold is long, so that every run is busy although the machine may be slow.
        await take(_FIRST_CYCLES * CYCLE_S - 2 * _AHEAD_S)
        task = asyncio.create_task(cycle(time.monotonic()), name="rival")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _attempts(self, run_ids: Sequence[str], began: float) -> list[float]:
        """When the replicas asked again because the bus brought a call back.

        Of each run the first two are left out: the try at once, and the one when the relay, which
        looks every 200 ms, first hands the call to the bus.
        """
        names = {f"run/{run_id}" for run_id in run_ids}
        tries: Counter[str] = Counter()
        found = []
        for each in self._commands.seen:
            is_ours = each.verb == "acquire" and each.name in names and each.at >= began
            if is_ours and not each.token.startswith("operator:"):
                tries[each.name] += 1
                if tries[each.name] > _TRIES_BEFORE_RETRIES:
                    found.append(each.at - began)
        return found


class _tapped:  # noqa: N801 - used like a function
    """Reads the delays that replicas give the bus, while the block lasts."""

    def __init__(self, links: Sequence[Proxy]) -> None:
        self._links = links
        self._delays_ms: list[int] = []
        self._tails: dict[int, bytes] = {}

    def __enter__(self) -> list[int]:
        for number, link in enumerate(self._links):
            link.tap = lambda chunk, number=number: self._read(number, chunk)
        return self._delays_ms

    def __exit__(self, *_error: object) -> None:
        for link in self._links:
            link.tap = None

    def _read(self, number: int, chunk: bytes) -> None:
        text = self._tails.get(number, b"") + chunk
        end = 0
        for found in _NAK.finditer(text):
            self._delays_ms.append(round(int(found[1]) / 1_000_000))
            end = found.end()
        # An answer may lie across two chunks, and is not to be counted twice.
        self._tails[number] = text[max(end, len(text) - _NAK_BYTES_MAX) :]


def _merged(arms: Sequence[ArmSeen]) -> ArmSeen:
    """Several rounds as one; attempts of one round do not overlap with those of the next."""
    offset, attempts = 0.0, []
    for arm in arms:
        attempts += [at + offset for at in arm.attempts_s]
        offset += max(arm.attempts_s, default=0.0) + 1.0
    return ArmSeen(
        name=arms[0].name,
        runs=sum(arm.runs for arm in arms),
        waits_s=tuple(wait for arm in arms for wait in arm.waits_s),
        delays_ms=tuple(delay for arm in arms for delay in arm.delays_ms),
        attempts_s=tuple(attempts),
        retries=sum(arm.retries for arm in arms),
        buckets=sum(arm.buckets for arm in arms),
        unfinished=sum(arm.unfinished for arm in arms),
    )
