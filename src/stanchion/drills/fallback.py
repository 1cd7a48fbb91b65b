"""Fallback drill (D3): the lock store is cut under load with runs of all four risk classes.

Two replicas keep their run leases in a lock store that they reach through proxies. While runs of
every class are started and worked on, all links to the lock store are cut. Low and standard fail
open and go on; high and critical fail closed and wait. In the last cut (a quick drill has only
one) workers begin to send results twice: then escalation must trip. Its end, which comes half a
minute later, is awaited in the whole drill.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec

from stanchion.core.json_value import JsonObject
from stanchion.core.model import Risk
from stanchion.drills.callers import DrillTenant, RawWorker, drill_tenant, one_job
from stanchion.drills.observe import (
    METRICS_OLD_S,
    Sampler,
    log_lines,
    read_whole_metrics,
    sampled,
    time_of,
)
from stanchion.drills.options import DrillOptions, Progress
from stanchion.drills.processes import Deployment, started
from stanchion.drills.promises.fallback import (
    CATCH_UP_S,
    CUT_GRACE_S,
    DUPLICATES,
    FALLBACK_ENDS_S,
    RECOVERS_WITHIN_S,
    EscalationSeen,
    FallbackSeen,
    RunSeen,
    charts_of,
    figures_of,
    judge_fallback,
)
from stanchion.drills.verdict import DrillResult

TOPIC: Final = "drill.fallback"
FALLBACKS: Final = "stanchion_workflow_lock_fallback_total"


class _Plan(msgspec.Struct, frozen=True, kw_only=True):
    before_s: float
    cuts_s: tuple[float, ...]
    provoke_after_s: float
    """So long after the beginning of the last cut, results are sent twice."""
    after_s: float
    per_s: float
    """Starts of each class."""
    window_s: float
    dwell_s: float
    sees_recovery: bool = True

    @property
    def escalation(self) -> JsonObject:
        """The default window is five minutes; the rule is the same."""
        return {"window_s": self.window_s, "dwell_s": self.dwell_s}


_QUICK: Final = _Plan(
    before_s=3.0,
    cuts_s=(5.0, 9.0),
    provoke_after_s=1.5,
    after_s=FALLBACK_ENDS_S + 1.5,
    per_s=4.0,
    window_s=4,
    dwell_s=1,
    sees_recovery=False,
)
_WHOLE: Final = _Plan(
    before_s=8.0,
    cuts_s=(30.0, 120.0),
    provoke_after_s=45.0,
    after_s=12.0,
    per_s=1.5,
    window_s=20,
    dwell_s=5,
)


async def fallback_drill(options: DrillOptions, progress: Progress) -> DrillResult:
    """Run it."""
    plan = _QUICK if options.quick else _WHOLE
    phases = [("two replicas, load before the cut", 2 + plan.before_s)]
    for number, cut_s in enumerate(plan.cuts_s, 1):
        is_last = number == len(plan.cuts_s)
        then = ", then duplicates" if is_last else ""
        phases.append((f"lock store cut{then}", cut_s))
        phases.append(("lock store back", plan.after_s))
    if plan.sees_recovery:
        phases.append(("recovery", 30.0))
    phases.append(("every run ends", 5.0))
    progress.plan(phases)
    progress.next()
    async with (
        started(replicas=2) as deployment,
        drill_tenant(deployment.urls, "fallback") as tenant,
    ):
        await tenant.configure(max_concurrent_runs=None)
        for risk in Risk:
            await tenant.apply(str(risk), one_job(TOPIC, risk=str(risk), steps=2))
        await tenant.settings({"escalation": plan.escalation})
        worker = RawWorker(tenant, TOPIC)
        return await _observed(options, plan, progress, deployment, tenant, worker)


async def _observed(
    options: DrillOptions,
    plan: _Plan,
    progress: Progress,
    deployment: Deployment,
    tenant: DrillTenant,
    worker: RawWorker,
) -> DrillResult:
    began = time.time()
    cuts: list[tuple[float, float]] = []
    # The workers go on after the load: a job that one of them has leased ends with its result only.
    async with sampled(tenant) as sampler, _working(worker):
        async with _loaded(options, plan, tenant):
            await asyncio.sleep(plan.before_s)
            for cut_s in plan.cuts_s[:-1]:
                progress.next()
                cuts.append(await _cut(deployment, began, cut_s))
                progress.next()
                await asyncio.sleep(plan.after_s)
            progress.next()
            provoking = asyncio.create_task(_provoke(worker, plan.provoke_after_s, began))
            cuts.append(await _cut(deployment, began, plan.cuts_s[-1]))
            provoked = await provoking
            worker.is_duplicating = False
            progress.next()
            await asyncio.sleep(plan.after_s)
            if plan.sees_recovery:
                progress.next()
                await _until_level(sampler, 0.0, RECOVERS_WITHIN_S)
        progress.next()
        await tenant.wait_idle(CATCH_UP_S)
        await asyncio.sleep(METRICS_OLD_S)
    seen = await _seen(deployment, tenant, worker, sampler, cuts, began)
    escalation = _escalated(seen, sampler, provoked, began, plan)
    seen = msgspec.structs.replace(seen, escalation=escalation)
    return DrillResult(
        promises=judge_fallback(seen),
        figures=figures_of(seen),
        charts=tuple(charts_of(seen, sampler, began)),
        settings={
            "policies": {"low, standard": "fail_open", "high, critical": "fail_closed"},
            "lock_busy.backend_error_delay_ms": 1000,
            "escalation": plan.escalation,
            "starts_per_s_and_class": plan.per_s,
            "cuts_s": list(plan.cuts_s),
        },
    )


@asynccontextmanager
async def _working(worker: RawWorker) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(worker.run(f"worker-{number}")) for number in range(2)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _loaded(options: DrillOptions, plan: _Plan, tenant: DrillTenant) -> AsyncIterator[None]:
    """Starts of every class at a steady rate while the block lasts."""

    async def start(risk: Risk) -> None:
        chance = options.chance(str(risk))
        while True:
            await asyncio.sleep(chance.uniform(0.5, 1.5) / plan.per_s)
            await tenant.start(str(risk))

    tasks = [asyncio.create_task(start(risk)) for risk in Risk]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _cut(deployment: Deployment, began: float, cut_s: float) -> tuple[float, float]:
    since = time.time() - began
    for link in deployment.lock_links:
        link.cut()
    await asyncio.sleep(cut_s)
    for link in deployment.lock_links:
        link.mend()
    return since, time.time() - began


async def _provoke(worker: RawWorker, after_s: float, began: float) -> float:
    await asyncio.sleep(after_s)
    worker.is_duplicating = True
    return time.time() - began


async def _until_level(sampler: Sampler, level: float, within_s: float) -> None:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if sampler.seen and sampler.seen[-1].highest("stanchion_escalation_level") == level:
            return
        await asyncio.sleep(0.5)


async def _seen(
    deployment: Deployment,
    tenant: DrillTenant,
    worker: RawWorker,
    sampler: Sampler,
    cuts: Sequence[tuple[float, float]],
    began: float,
) -> FallbackSeen:
    fallbacks: dict[str, list[float]] = {str(risk): [] for risk in Risk}
    for replica in deployment.replicas:
        for line in log_lines(replica.log, "run_lock_fallback"):
            fallbacks[line["risk"]].append(time_of(line["ts"]) - began)
    last = await read_whole_metrics(tenant)
    rises = sampler.last_rise(FALLBACKS)
    fences: dict[str, set[int]] = {}
    for finish in worker.finishes:
        if finish.verdict == "accepted":
            fences.setdefault(finish.job_id, set()).add(finish.fence)
    rows = await tenant.runs()
    return FallbackSeen(
        cuts=tuple(cuts),
        runs=tuple(await asyncio.gather(*(_run_seen(tenant, row, began) for row in rows))),
        fallbacks={risk: tuple(sorted(times)) for risk, times in fallbacks.items()},
        counted={str(risk): last.sum(FALLBACKS, risk=str(risk)) for risk in Risk},
        metric_rises_until=None if rises is None else rises - began,
        double_accepts=sum(len(each) > 1 for each in fences.values()),
        duplicates=sum(last.sum(name) for name in DUPLICATES),
    )


_LOOKUPS: Final = asyncio.Semaphore(16)


async def _run_seen(tenant: DrillTenant, row: Mapping[str, Any], began: float) -> RunSeen:
    finished = row["finished_at"]
    async with _LOOKUPS:
        changed_twice = await tenant.is_changed_twice(row["run_id"])
        waits_for = "" if finished else await tenant.waits_for(row["run_id"])
    return RunSeen(
        risk=Risk(row["workflow_id"]),
        status=row["status"],
        created_at=time_of(row["created_at"]) - began,
        finished_at=None if finished is None else time_of(finished) - began,
        changed_twice=changed_twice,
        waits_for=waits_for,
    )


def _escalated(
    seen: FallbackSeen, sampler: Sampler, provoked: float, began: float, plan: _Plan
) -> EscalationSeen:
    until = seen.cuts[-1][1]
    levels = [
        (each.at - began, each.highest("stanchion_escalation_level")) for each in sampler.seen
    ]
    tripped = next((at for at, level in levels if level > 0), None)
    recovered = None
    if tripped is not None:
        after = max(tripped, until)
        recovered = next((at for at, level in levels if level == 0 and at > after), None)
    doubled = [
        (each.at - began, sum(each.sum(name) for name in DUPLICATES)) for each in sampler.seen
    ]
    first = next((at for at, count in doubled if count > 0), None)
    # What was under way when it tripped may still finish.
    since = float("inf") if tripped is None else tripped + CUT_GRACE_S
    return EscalationSeen(
        provoked_at=provoked,
        window_s=plan.window_s,
        sees_recovery=plan.sees_recovery,
        cut_until=until,
        first_duplicate_at=first,
        tripped_at=tripped,
        recovered_at=recovered,
        standard_finished_while_escalated=seen.finished([Risk.STANDARD], since, until),
        low_finished_while_escalated=seen.finished([Risk.LOW], since, until),
    )
