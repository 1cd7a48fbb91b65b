"""Renewal drill (D4): holders that work while their renewals disappear.

Each fault hits a holder that is at work, while a rival waits for the same lease: leases of the
public API under the policies ``fence`` and ``continue``, run leases of a replica under both, job
leases of SDK workers, a worker and a replica that are paused with SIGSTOP, and a short outage that
must cost nothing. Every holder is a process that writes down what it does and whether it believes
to be alone (a replica does so in its log); the lock server's MONITOR tells when a lease was last
renewed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from stanchion.drills.callers import DrillTenant, RawWorker, drill_tenant, one_job, until
from stanchion.drills.observe import (
    METRICS_OLD_S,
    LockCommand,
    LockCommands,
    log_lines,
    monitored,
    read_whole_metrics,
    time_of,
)
from stanchion.drills.options import DrillOptions, Progress
from stanchion.drills.processes import ChildProcess, CouldNotRun, Deployment, start_program, started
from stanchion.drills.programs import HolderLine, read_holder_lines
from stanchion.drills.promises.renewal import (
    FAILURES_MAX,
    LEASES,
    REPLICA,
    HandOver,
    HolderPicture,
    RenewalSeen,
    charts_of,
    figures_of,
    judge_renewal,
)
from stanchion.drills.proxy import Flow, Proxy, proxied
from stanchion.drills.verdict import DrillResult

_PROGRAMS: Final = "stanchion.drills.programs"
_STARTS_S_MAX: Final = 20.0
_SHORT_OUTAGE: Final = 0.3
"""Of a job lease's term, how long the short outage lasts: less than its renewals survive."""
_REDELIVERED_S: Final = 5.0
"""An expired job is offered again so soon."""


class _Plan(msgspec.Struct, frozen=True, kw_only=True):
    ttl_s: float
    rounds: int
    pause_s: float
    replica_rounds: int = 1
    long_ttl_s: float = 0.0
    """Of one more round with leases of the default term."""


_QUICK: Final = _Plan(ttl_s=3.0, rounds=1, pause_s=4.5)
_WHOLE: Final = _Plan(ttl_s=6.0, rounds=4, pause_s=9.0, replica_rounds=3, long_ttl_s=30.0)
_POLICIES: Final = {"fence": "high", "continue": "standard"}
"""What a holder does that cannot renew, and a risk class whose run leases do so."""
_RUN_LEASE_TTL_S: Final = 2.4
"""A replica gives up a call to its store after two seconds: it must have lost its lease by then."""
_ASKS_S_MAX: Final = 1.0
_CATCHES_MAX: Final = 8
_GRANT_PASSES_S: Final = 0.2
"""By then the grant of a lease has passed the proxy. The first renewal comes later."""


async def renewal_drill(options: DrillOptions, progress: Progress) -> DrillResult:
    """Run it."""
    plan = _QUICK if options.quick else _WHOLE
    round_s = 2.5 * plan.ttl_s + 6
    phases = [("two replicas and the first holders", 4.0)]
    phases += [(f"renewals lost, round {n + 1}", round_s) for n in range(plan.rounds)]
    if plan.long_ttl_s:
        phases.append(("renewals lost, default term", 1.5 * plan.long_ttl_s))
    phases.append(("a replica that cannot renew", plan.replica_rounds * 8.0))
    phases.append(("a replica paused", plan.pause_s + 6))
    progress.plan(phases)
    progress.next()
    async with AsyncExitStack() as cleaning:
        enter = cleaning.enter_async_context
        ttl_s = plan.ttl_s
        deployment = await enter(
            started(replicas=2, run_lease_ttl_s=_RUN_LEASE_TTL_S, job_lease_ttl_s=ttl_s)
        )
        tenant = await enter(drill_tenant(deployment.urls, "renewal"))
        await tenant.configure(max_concurrent_runs=None)
        assert deployment.locks is not None
        commands = await enter(monitored(deployment.locks.port))
        stage = _Stage(deployment, tenant, commands, plan, options.chance("renewal"))
        for _ in range(plan.rounds):
            progress.next()
            await stage.round()
        if plan.long_ttl_s:
            progress.next()
            await stage.run_leases(plan.long_ttl_s)
        progress.next()
        for _ in range(plan.replica_rounds):
            for policy, risk in _POLICIES.items():
                await stage.replica_lease(policy, risk)
        progress.next()
        await stage.paused_replica()
        seen = await stage.seen()
        return DrillResult(
            promises=judge_renewal(seen),
            figures=figures_of(seen),
            charts=tuple(charts_of(seen, stage.pictures)),
            settings={
                "run_lease_ttl_s": _RUN_LEASE_TTL_S,
                "job_lease_ttl_s": ttl_s,
                "leases_ttl_s": ttl_s,
                "renewal_failures_max": FAILURES_MAX,
                "policies": list(_POLICIES),
            },
        )


class _Stage:
    """The rounds of the drill, and what was observed in them."""

    def __init__(
        self,
        deployment: Deployment,
        tenant: DrillTenant,
        commands: LockCommands,
        plan: _Plan,
        chance: Random,
    ) -> None:
        self._deployment = deployment
        self._tenant = tenant
        self._commands = commands
        self._plan = plan
        self._chance = chance
        self._number = 0
        self._hand_overs: list[HandOver] = []
        self._deliveries: list[int] = []
        self._stale: list[str] = []
        self._paused: tuple[int, int, int] = (0, 0, 0)
        self._outage_s = _SHORT_OUTAGE * plan.ttl_s
        self.pictures: list[HolderPicture] = []
        """Of the first round, one for each policy."""

    async def round(self) -> None:
        """All faults at once, each on holders of its own."""
        await asyncio.gather(
            self.run_leases(self._plan.ttl_s),
            self._job_lease(),
            self._paused_worker(),
            self._short_outage(),
            self._stale_writer(),
        )

    async def seen(self) -> RenewalSeen:
        await asyncio.sleep(METRICS_OLD_S)
        metrics = await read_whole_metrics(self._tenant)
        runs, unfinished, twice = self._paused
        return RenewalSeen(
            hand_overs=tuple(self._hand_overs),
            outage_s=self._outage_s,
            outage_deliveries=tuple(self._deliveries),
            stale_verdicts=tuple(self._stale),
            stale_counted=metrics.sum("stanchion_results_rejected_total"),
            paused_runs=runs,
            paused_unfinished=unfinished,
            paused_changed_twice=twice,
        )

    # ── Leases of the public API ────────────────────────────────────────────────────────────────

    async def run_leases(self, ttl_s: float) -> None:
        """The first holder's link is black-holed while a rival waits for the same leases."""
        assert self._deployment.locks is not None
        number = self._next()
        names = {f"drill-{number}-{how}": how for how in _POLICIES}
        words = [f"{name}={how}" for name, how in names.items()]
        async with AsyncExitStack() as cleaning:
            link = await cleaning.enter_async_context(proxied(self._deployment.locks.port))
            first = self._program(
                cleaning, "hold", f"first-{number}", link.url, str(ttl_s), str(2.2 * ttl_s), *words
            )
            await _written(first, lambda lines: len(_granted(lines)) == len(names))
            second = self._program(
                cleaning,
                *("hold", f"second-{number}", self._deployment.locks.url),
                *(str(ttl_s), str(ttl_s / 2), *words),
            )
            await _written(second, lambda lines: len(lines) >= len(names))
            await asyncio.sleep(self._chance.uniform(0.1, ttl_s / 3))
            since = _black_hole(link)
            await _written(
                second, lambda lines: len(_granted(lines)) == len(names), within_s=2 * ttl_s + 5
            )
            await _written(
                first, lambda lines: len(_ended(lines)) == len(names), within_s=3 * ttl_s + 5
            )
            fault = (since, _mend(link))
        for name, how in names.items():
            lines = (_about(first, name), _about(second, name))
            renewed = [at for at in self._commands.renewals(name) if at <= fault[0] + ttl_s / 12]
            first_grant = _granted(lines[0])[0].at
            self._hand_overs.append(
                _hand_over(
                    LEASES,
                    how,
                    ttl_s,
                    lines,
                    fault,
                    expired_at=max([first_grant, *renewed]) + ttl_s,
                )
            )
            if len(self.pictures) < len(_POLICIES):
                self.pictures.append(HolderPicture(how, lines, fault))

    # ── Jobs ────────────────────────────────────────────────────────────────────────────────────

    async def _job_lease(self) -> None:
        """A worker's link to its server is black-holed; the job goes to another worker."""
        ttl_s = self._plan.ttl_s
        async with AsyncExitStack() as cleaning:
            topic = await self._topic("job")
            link = await cleaning.enter_async_context(proxied(self._deployment.replicas[0].port))
            first = self._worker(cleaning, f"http://127.0.0.1:{link.port}", topic)
            await self._start(topic, 2.5 * ttl_s)
            await _written(first, _granted)
            second = self._worker(cleaning, self._deployment.urls[1], topic)
            await _written(second, bool)
            await asyncio.sleep(self._chance.uniform(0.1, ttl_s / 3))
            since = _black_hole(link)
            await _written(second, _granted, within_s=2 * ttl_s + _REDELIVERED_S)
            fault = (since, _mend(link))
            lines = (_lines(first), _lines(second))
        self._hand_overs.append(_hand_over("job lease", "fence", ttl_s, lines, fault))

    async def _paused_worker(self) -> None:
        """A worker is paused, and resumed when another has its job."""
        ttl_s = self._plan.ttl_s
        async with AsyncExitStack() as cleaning:
            topic = await self._topic("paused")
            first, process = self._worker_process(cleaning, self._deployment.urls[0], topic)
            await self._start(topic, 2.5 * ttl_s)
            await _written(first, _granted)
            second = self._worker(cleaning, self._deployment.urls[1], topic)
            await _written(second, bool)
            since = time.time()
            process.pause()
            await _written(second, _granted, within_s=2 * ttl_s + _REDELIVERED_S)
            process.resume()
            fault = (since, time.time())
            await _written(first, _ended, within_s=5.0)
            lines = (_lines(first), _lines(second))
        self._hand_overs.append(_hand_over("paused worker", "fence", ttl_s, lines, fault))

    async def _short_outage(self) -> None:
        """A link is black-holed for a moment; the worker keeps its job."""
        ttl_s = self._plan.ttl_s
        async with AsyncExitStack() as cleaning:
            topic = await self._topic("outage")
            link = await cleaning.enter_async_context(proxied(self._deployment.replicas[0].port))
            worker = self._worker(cleaning, f"http://127.0.0.1:{link.port}", topic)
            await self._start(topic, 1.5 * ttl_s)
            await _written(worker, _granted)
            await asyncio.sleep(self._chance.uniform(0.1, 0.4) * ttl_s)
            _black_hole(link)
            await asyncio.sleep(self._outage_s)
            _mend(link)
            await _written(worker, lambda lines: _whats(lines)["done"], within_s=3 * ttl_s)
            self._deliveries.append(len(_granted(_lines(worker))))

    async def _stale_writer(self) -> None:
        """A worker that never renews sends its result after another has the job."""
        topic = await self._topic("stale")
        await self._start(topic, 0.0)
        first = await self._lease(topic, "stale-first", within_s=5.0)
        second = await self._lease(
            topic, "stale-second", within_s=self._plan.ttl_s + _REDELIVERED_S + 5
        )
        for worker_id, job in (("stale-first", first), ("stale-second", second)):
            result = {"job_id": job["job_id"], "fence": job["fence"], "status": "succeeded"}
            body = {"worker_id": worker_id, "results": [result]}
            answer = await self._tenant.expect("POST", "/v1/worker/results", body)
            rejected = [each["code"] for each in answer["rejected"]]
            if job is first:
                self._stale += rejected or ["accepted"]

    async def _lease(self, topic: str, worker_id: str, *, within_s: float) -> Mapping[str, Any]:
        found: list[Mapping[str, Any]] = []

        async def leased() -> bool:
            body = {"worker_id": worker_id, "topics": [topic], "max_jobs": 1, "wait_s": 1.0}
            answer = await self._tenant.call("POST", "/v1/worker/lease", body)
            if isinstance(answer.document, dict):
                found.extend(answer.document.get("jobs", ()))
            return bool(found)

        await until(leased, within_s=within_s, what=f"a job for {worker_id}")
        return found[0]

    # ── Replicas ────────────────────────────────────────────────────────────────────────────────

    async def replica_lease(self, policy: str, risk: str) -> None:
        """Black-hole a replica's links to store and lock store while it holds a run's lease."""
        replica = self._deployment.replicas[0]
        for _ in range(_CATCHES_MAX):
            found = await self._caught(policy, risk)
            await until(
                partial(asyncio.to_thread, replica.is_ready),
                within_s=20.0,
                what="the replica is ready again",
            )
            if found is not None:
                self._hand_overs.append(found)
                return
        raise CouldNotRun("the replica did not ask for a run's lease")

    async def _caught(self, policy: str, risk: str) -> HandOver | None:
        """What became of the lease; ``None`` if the replica did not ask for one.

        After an outage it asks the lock store again only when a probe has succeeded.
        """
        store_link, lock_link = self._deployment.store_links[0], self._deployment.lock_links[0]
        topic = f"drill-held-{self._next()}"
        first, second = (DrillTenant([url], self._tenant.name) for url in self._deployment.urls)
        await first.apply(topic, one_job(topic, risk=risk))
        run = await first.expect("POST", f"/v1/workflows/{topic}/runs", {"input": {}})
        job = await self._lease(topic, topic, within_s=5.0)
        name = f"run/{run['run_id']}"
        began = since = time.time()
        asked = asyncio.Event()

        def lose_store(chunk: bytes) -> None:
            # Before the request for the lease goes on its way: what follows is lost.
            if name.encode() in chunk:
                store_link.set_flow(requests=Flow.IS_LOST, replies=Flow.IS_LOST)
                asked.set()

        async def is_over() -> bool:
            found = await second.call("GET", f"/v1/runs/{run['run_id']}")
            return found.status == HTTPStatus.OK and found.document["status"] == "succeeded"

        lock_link.tap = lose_store
        try:
            result = {"job_id": job["job_id"], "fence": job["fence"], "status": "succeeded"}
            body = {"worker_id": topic, "results": [result]}
            await first.expect("POST", "/v1/worker/results", body)
            with suppress(TimeoutError):
                async with asyncio.timeout(_ASKS_S_MAX):
                    await asked.wait()
            if not asked.is_set():
                return None
            await asyncio.sleep(_GRANT_PASSES_S)
            since = _black_hole(lock_link)
            await until(is_over, within_s=20.0, what="the other replica ends the run")
        finally:
            lock_link.tap = None
            _mend(store_link)
            fault = (since, _mend(lock_link))
            for tenant in (first, second):
                await tenant.close()
        ours = [each for each in self._commands.seen if each.name == name and each.at >= began]
        log = self._deployment.replicas[0].log
        events = {what: _logged(log, what, name) for what in _LEASE_EVENTS}
        return _hand_over_of_replica(policy, ours, events, fault)

    async def paused_replica(self) -> None:
        """Pause one of two replicas under load; the other one moves its runs on meanwhile."""
        await self._tenant.cancel_all()
        healthy = DrillTenant([self._deployment.urls[1]], self._tenant.name)
        topic = "drill-replica"
        await self._tenant.apply("replica", one_job(topic, risk="high", steps=2))
        # Results go through both, so that the one that is about to be paused has runs in hand.
        both = asyncio.create_task(RawWorker(self._tenant, topic).run("both"))
        working = asyncio.create_task(RawWorker(healthy, topic).run("healthy"))
        replica = self._deployment.replicas[0]
        try:
            starting = [asyncio.create_task(self._tenant.start("replica")) for _ in range(60)]
            await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(self._chance.uniform(0.05, 0.15))
            replica.pause()
            both.cancel()
            try:
                await healthy.burst("replica", 20, self._chance)
                await asyncio.sleep(self._plan.pause_s)
            finally:
                replica.resume()
            await asyncio.gather(*starting)
            await healthy.wait_idle(3 * self._plan.ttl_s + 10)
            self._paused = await self._runs_of(healthy, "replica")
        finally:
            working.cancel()
            both.cancel()
            await asyncio.gather(working, both, return_exceptions=True)
            await healthy.close()

    async def _runs_of(self, tenant: DrillTenant, workflow_id: str) -> tuple[int, int, int]:
        rows = [row for row in await tenant.runs() if row["workflow_id"] == workflow_id]
        twice = [await tenant.is_changed_twice(str(row["run_id"])) for row in rows]
        return len(rows), sum(row["status"] != "succeeded" for row in rows), sum(twice)

    # ── Parts ───────────────────────────────────────────────────────────────────────────────────

    def _next(self) -> int:
        self._number += 1
        return self._number

    async def _topic(self, purpose: str) -> str:
        topic = f"drill-{purpose}-{self._next()}"
        await self._tenant.apply(topic, one_job(topic))
        return topic

    async def _start(self, topic: str, work_s: float) -> None:
        await self._tenant.expect(
            "POST", f"/v1/workflows/{topic}/runs", {"input": {"work_s": work_s}}
        )

    def _worker(self, cleaning: AsyncExitStack, url: str, topic: str) -> Path:
        return self._worker_process(cleaning, url, topic)[0]

    def _worker_process(
        self, cleaning: AsyncExitStack, url: str, topic: str
    ) -> tuple[Path, ChildProcess]:
        name = f"worker-{self._next()}"
        return self._started(cleaning, "work", name, url, name, topic)

    def _program(self, cleaning: AsyncExitStack, kind: str, name: str, *words: str) -> Path:
        return self._started(cleaning, kind, name, *words)[0]

    def _started(
        self, cleaning: AsyncExitStack, kind: str, name: str, *words: str
    ) -> tuple[Path, ChildProcess]:
        folder = self._deployment.directory
        file = folder / f"{name}.jsonl"
        process = start_program(
            _PROGRAMS, kind, str(file), *words, log=folder / f"{name}.log", cwd=folder
        )
        # Nothing of it is of use any more, and some of it cannot end by itself.
        cleaning.push_async_callback(asyncio.to_thread, _end, process)
        return file, process


def _end(process: ChildProcess) -> None:
    process.resume()
    process.kill()


def _black_hole(link: Proxy) -> float:
    link.set_flow(requests=Flow.IS_LOST, replies=Flow.IS_LOST)
    return time.time()


def _mend(link: Proxy) -> float:
    link.hang_up_gaps()
    link.mend()
    return time.time()


# ── What a replica's log and the lock server say ─────────────────────────────────────────────────

_LEASE_EVENTS: Final = (
    *("run_lock_renew_failed", "run_lock_abandoned", "run_lock_untrusted"),
    "lock_release_failed",
)


def _logged(log: Path, event: str, lease: str) -> list[float]:
    """When the replica logged this event about the lease."""
    return [time_of(line["ts"]) for line in log_lines(log, event) if line["lease"] == lease]


def _hand_over_of_replica(
    policy: str,
    commands: Sequence[LockCommand],
    events: Mapping[str, Sequence[float]],
    fault: tuple[float, float],
) -> HandOver:
    """``commands`` are those on the run's lease, by all replicas."""
    first = commands[0]
    began, ttl_s = first.at, _RUN_LEASE_TTL_S
    own = [each for each in commands if each.token == first.token]
    expired_at = max(each.at for each in own if each.verb != "release") + ttl_s
    # Until then the lock server refuses the lease to other replicas.
    rivals = [
        each.at
        for each in commands
        if each.verb == "acquire" and each.token != first.token and each.at >= expired_at
    ]
    lost = [*events["run_lock_abandoned"], *events["run_lock_untrusted"]]
    third = events["run_lock_renew_failed"][FAILURES_MAX - 1 : FAILURES_MAX]
    known = min([*third, *lost], default=None)
    ends = [*lost, *events["lock_release_failed"]]
    return HandOver(
        kind=REPLICA,
        policy=policy,
        ttl_s=ttl_s,
        fault=(fault[0] - began, fault[1] - began),
        # If it never said that it lost the lease, it trusted it to the end.
        trusting_until=min(lost, default=fault[1]) - began,
        acting_until=max(ends, default=fault[1]) - began,
        third_failure_at=None if known is None else known - began,
        expired_at=expired_at - began,
        rival_at=min(rivals) - began if rivals else None,
    )


# ── Reading what holders wrote ───────────────────────────────────────────────────────────────────


def _lines(path: Path) -> list[HolderLine]:
    return read_holder_lines(path)


def _about(path: Path, name: str) -> list[HolderLine]:
    return [line for line in _lines(path) if line.name == name]


def _whats(lines: Sequence[HolderLine]) -> Counter[str]:
    return Counter(line.what for line in lines)


def _granted(lines: Sequence[HolderLine]) -> list[HolderLine]:
    return [line for line in lines if line.what == "granted"]


def _ended(lines: Sequence[HolderLine]) -> list[HolderLine]:
    return [line for line in lines if line.what in {"stopped", "done"}]


async def _written(
    path: Path, is_there: Callable[[list[HolderLine]], object], *, within_s: float = _STARTS_S_MAX
) -> None:
    async def look() -> bool:
        return bool(is_there(_lines(path)))

    await until(look, within_s=within_s, what=f"what {path.stem} writes", every_s=0.03)


def _hand_over(
    kind: str,
    policy: str,
    ttl_s: float,
    lines: tuple[list[HolderLine], list[HolderLine]],
    fault: tuple[float, float],
    *,
    expired_at: float | None = None,
) -> HandOver:
    first, second = lines
    granted, rival = _granted(first)[0], next(iter(_granted(second)), None)
    began = granted.at
    acting = [line.at for line in first if line.what in {"tick", "done", "stopped"}]
    trusting = [line.at for line in first if line.trusting]
    failed = [line.at for line in first if line.what == "renew_failed" and line.at >= fault[0]]
    stopped = [line.at for line in first if line.what == "stopped"]
    known = failed[FAILURES_MAX - 1 : FAILURES_MAX] + stopped
    return HandOver(
        kind=kind,
        policy=policy,
        ttl_s=ttl_s,
        fault=(fault[0] - began, fault[1] - began),
        trusting_until=max(trusting, default=began) - began,
        acting_until=max(acting, default=began) - began,
        third_failure_at=min(known) - began if known else None,
        expired_at=None if expired_at is None else expired_at - began,
        rival_at=None if rival is None else rival.at - began,
        rival_fence_is_higher=rival is None or rival.fence > granted.fence,
    )
