"""Fallback drill (D3): the lock store is cut under load with runs of all four risk classes.

Two replicas keep their run leases in a lock store that they reach through proxies. While runs of
every class are started and worked on, all links to the lock store are cut. Low and standard fail
open and go on; high and critical fail closed and wait. In the whole drill a second, longer cut
follows, in which workers begin to send results twice: then escalation must trip, and later recover.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import msgspec

from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.model import Risk
from stanchion.drills.callers import DrillTenant, RawWorker, drill_tenant, one_job
from stanchion.drills.charts import Chart, LineChart, Series, Window
from stanchion.drills.observe import (
    METRICS_OLD_S,
    Sampler,
    cumulative,
    log_lines,
    rate_series,
    sampled,
    time_of,
)
from stanchion.drills.options import DrillOptions, Progress
from stanchion.drills.processes import Deployment, started
from stanchion.drills.verdict import DrillResult, Promise, ratio, seconds

__all__ = ["EscalationSeen", "FallbackSeen", "RunSeen", "fallback_drill", "judge_fallback"]

OPEN, CLOSED = (Risk.LOW, Risk.STANDARD), (Risk.HIGH, Risk.CRITICAL)
TOPIC: Final = "drill.fallback"
FALLBACK_ENDS_S: Final = 5.0
CATCH_UP_S: Final = 15.0
"""By then every run that waited has finished: put-off runs are tried again every second."""
CUT_GRACE_S: Final = 1.5
"""What held its lease when the store was cut may still finish."""
KEEP_UP: Final = 0.4
"""Of its rate before, what an open class must keep up during the cut."""
TRIPS_WITHIN_S: Final = 40.0
RECOVERS_WITHIN_S: Final = 75.0
FALLBACKS: Final = "stanchion_workflow_lock_fallback_total"
DUPLICATES: Final = ("stanchion_commit_conflicts_total", "stanchion_duplicate_completions_total")


# ── What was seen, and what it means ─────────────────────────────────────────────────────────────


class RunSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times are seconds since the load began."""

    risk: Risk
    status: str
    created_at: float
    finished_at: float | None
    changed_twice: bool = False
    """Whether a step of it, or the run itself, ended more than once."""


class EscalationSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the escalation in a cut with duplicates."""

    provoked_at: float
    """From when on results were sent twice."""
    cut_until: float
    first_duplicate_at: float | None
    tripped_at: float | None
    recovered_at: float | None
    standard_finished_while_escalated: int
    low_finished_while_escalated: int


class FallbackSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What the drill observed."""

    cuts: tuple[tuple[float, float], ...]
    runs: tuple[RunSeen, ...]
    fallbacks: Mapping[str, tuple[float, ...]]
    """When each class went on without a lock, from the log."""
    counted: Mapping[str, float]
    """The same, as the metric counted it."""
    metric_rises_until: float | None
    """When the metric was last seen to rise."""
    double_accepts: int = 0
    """Jobs that were accepted under two fences."""
    duplicates: float = 0.0
    escalation: EscalationSeen | None = None

    def finished(self, classes: Sequence[Risk], since: float, until: float) -> int:
        """How many runs of these classes finished in a stretch of time."""
        return sum(
            run.risk in classes and run.finished_at is not None and since <= run.finished_at < until
            for run in self.runs
        )


def judge_fallback(seen: FallbackSeen) -> tuple[Promise, ...]:
    """What was promised, compared with what was seen."""
    promises = [
        _rises_and_ends(seen),
        _open_go_on(seen),
        _closed_stop(seen),
        _closed_finish(seen),
        _only_open_fall_back(seen),
        _changed_once(seen),
    ]
    if seen.escalation is not None:
        promises += _escalation(seen.escalation)
    return tuple(promises)


def _rises_and_ends(seen: FallbackSeen) -> Promise:
    late, rates = [], []
    for since, until in seen.cuts:
        times = [at for each in seen.fallbacks.values() for at in each]
        within = [at for at in times if since <= at < until]
        rates.append(ratio(len(within), until - since))
        following = [cut for cut, _ in seen.cuts if cut > until]
        end = min(following, default=float("inf"))
        late += [at - until for at in times if until + FALLBACK_ENDS_S < at < end]
    last_cut = seen.cuts[-1][1]
    metric_late = (seen.metric_rises_until or 0.0) > last_cut + FALLBACK_ENDS_S + METRICS_OLD_S
    shown = ", ".join(f"{rate:.1f}/s" for rate in rates)
    return Promise(
        id="fallback_rate",
        says="fallbacks happen in every cut, and none more than"
        f" {FALLBACK_ENDS_S:g} s after its end",
        measured=f"{shown} during the cuts, {len(late)} later than that",
        holds=all(rate > 0 for rate in rates) and not late and not metric_late,
    )


def _open_go_on(seen: FallbackSeen) -> Promise:
    since, until = seen.cuts[0]
    shares = {}
    for risk in OPEN:
        before = ratio(seen.finished([risk], 0.0, since), since)
        shares[risk] = ratio(ratio(seen.finished([risk], since, until), until - since), before)
    return Promise(
        id="open_go_on",
        says="low and standard (fail open) keep finishing while the lock store is cut,"
        f" at {KEEP_UP:.0%} of their rate or more",
        measured=", ".join(f"{risk} {share:.0%}" for risk, share in shares.items()),
        holds=all(share >= KEEP_UP for share in shares.values()),
    )


def _closed_stop(seen: FallbackSeen) -> Promise:
    finished = sum(seen.finished(CLOSED, since + CUT_GRACE_S, until) for since, until in seen.cuts)
    return Promise(
        id="closed_stop",
        says="high and critical (fail closed) do not move while the lock store is cut",
        measured=f"{finished} finished",
        holds=finished == 0,
    )


def _closed_finish(seen: FallbackSeen) -> Promise:
    last = seen.cuts[-1][1]
    unfinished = sum(run.finished_at is None or run.status != "succeeded" for run in seen.runs)
    waited = [run for run in seen.runs if run.risk in CLOSED and run.created_at < last]
    slowest = max((run.finished_at or last for run in waited), default=last) - last
    return Promise(
        id="all_finish",
        says="every run of every class succeeds in the end, those that waited within"
        f" {CATCH_UP_S:g} s of the last cut",
        measured=f"{unfinished} of {len(seen.runs)} did not; the last of those that waited ended"
        f" {seconds(max(0.0, slowest))} after the cut",
        holds=bool(seen.runs) and unfinished == 0 and slowest <= CATCH_UP_S,
    )


def _only_open_fall_back(seen: FallbackSeen) -> Promise:
    closed = sum(len(seen.fallbacks.get(str(risk), ())) for risk in CLOSED)
    wrong = [
        risk for risk, times in seen.fallbacks.items() if len(times) != seen.counted.get(risk, 0)
    ]
    said = ", ".join(f"{risk} {len(times)}" for risk, times in seen.fallbacks.items() if times)
    return Promise(
        id="fallbacks_counted",
        says="only low and standard fall back, and each log line is counted by the metric",
        measured=said + (f"; metric and log differ for {', '.join(wrong)}" if wrong else ""),
        holds=closed == 0 and not wrong,
    )


def _changed_once(seen: FallbackSeen) -> Promise:
    twice = sum(run.changed_twice for run in seen.runs)
    return Promise(
        id="changed_once",
        says="no step and no run ends twice, and no job is accepted under two fences",
        measured=f"{twice} of {len(seen.runs)} runs, {seen.double_accepts} jobs;"
        f" {seen.duplicates:.0f} duplicates were refused and counted",
        holds=twice == 0 and seen.double_accepts == 0,
    )


def _escalation(seen: EscalationSeen) -> list[Promise]:
    tripped, first = seen.tripped_at, seen.first_duplicate_at
    is_by_rule = (
        tripped is not None
        and first is not None
        and first <= tripped <= seen.provoked_at + TRIPS_WITHIN_S
    )
    after = None if seen.recovered_at is None else seen.recovered_at - seen.cut_until
    return [
        Promise(
            id="escalation_trips",
            says="fallbacks alone do not escalate; fallbacks and duplicates do, within"
            f" {TRIPS_WITHIN_S:g} s (window of 20 s)",
            measured="never"
            if tripped is None
            else f"{seconds(tripped - seen.provoked_at)} after duplicates began",
            holds=is_by_rule,
        ),
        Promise(
            id="escalation_closes",
            says="while escalated, standard fails closed as well and low goes on",
            measured=f"{seen.standard_finished_while_escalated} standard and"
            f" {seen.low_finished_while_escalated} low runs finished",
            holds=seen.standard_finished_while_escalated == 0
            and seen.low_finished_while_escalated > 0,
        ),
        Promise(
            id="escalation_recovers",
            says=f"it ends by itself within {RECOVERS_WITHIN_S:g} s of the cut's end",
            measured="never" if after is None else seconds(after),
            holds=after is not None and after <= RECOVERS_WITHIN_S,
        ),
    ]


# ── The drill ────────────────────────────────────────────────────────────────────────────────────


class _Plan(msgspec.Struct, frozen=True, kw_only=True):
    before_s: float
    cut_s: float
    after_s: float
    per_s: float
    """Starts of each class."""
    long_cut_s: float = 0.0
    provoke_after_s: float = 0.0


_QUICK: Final = _Plan(before_s=3.0, cut_s=5.0, after_s=FALLBACK_ENDS_S + 1.5, per_s=4.0)
_WHOLE: Final = _Plan(
    before_s=8.0, cut_s=30.0, after_s=12.0, per_s=1.5, long_cut_s=120.0, provoke_after_s=45.0
)
_ESCALATION: Final[JsonObject] = {"window_s": 20, "dwell_s": 5}
"""The default window is five minutes; the rule is the same."""


async def fallback_drill(options: DrillOptions, progress: Progress) -> DrillResult:
    """Run it."""
    plan = _QUICK if options.quick else _WHOLE
    phases = [
        ("two replicas, load before the cut", 2 + plan.before_s),
        ("lock store cut", plan.cut_s),
        ("lock store back", plan.after_s),
    ]
    if plan.long_cut_s:
        phases.append(("lock store cut again, then duplicates", plan.long_cut_s))
        phases.append(("recovery", 40.0))
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
        if plan.long_cut_s:
            await tenant.settings({"escalation": _ESCALATION})
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
    provoked: float | None = None
    async with sampled(tenant) as sampler:
        async with _loaded(options, plan, tenant, worker):
            await asyncio.sleep(plan.before_s)
            progress.next()
            cuts.append(await _cut(deployment, began, plan.cut_s))
            progress.next()
            await asyncio.sleep(plan.after_s)
            if plan.long_cut_s:
                progress.next()
                provoke = partial(_provoke, worker, plan.provoke_after_s, began)
                provoking = asyncio.create_task(provoke())
                cuts.append(await _cut(deployment, began, plan.long_cut_s))
                provoked = await provoking
                worker.is_duplicating = False
                progress.next()
                await _until_level(sampler, 0.0, RECOVERS_WITHIN_S)
        progress.next()
        async with _working(worker):
            await tenant.wait_idle(CATCH_UP_S)
        await asyncio.sleep(METRICS_OLD_S)
    seen = await _seen(deployment, tenant, worker, sampler, cuts, began)
    if provoked is not None:
        seen = msgspec.structs.replace(seen, escalation=_escalated(seen, sampler, provoked, began))
    return DrillResult(
        promises=judge_fallback(seen),
        figures=_figures(seen),
        charts=tuple(_charts(seen, sampler, began)),
        settings={
            "policies": {"low, standard": "fail_open", "high, critical": "fail_closed"},
            "lock_busy.backend_error_delay_ms": 1000,
            "escalation": _ESCALATION if plan.long_cut_s else "not provoked",
            "starts_per_s_and_class": plan.per_s,
            "cuts_s": [plan.cut_s, *([plan.long_cut_s] if plan.long_cut_s else [])],
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
async def _loaded(
    options: DrillOptions, plan: _Plan, tenant: DrillTenant, worker: RawWorker
) -> AsyncIterator[None]:
    """Starts of every class at a steady rate, and workers, while the block lasts."""

    async def start(risk: Risk) -> None:
        chance = options.chance(str(risk))
        while True:
            await asyncio.sleep(chance.uniform(0.5, 1.5) / plan.per_s)
            await tenant.start(str(risk))

    async with _working(worker):
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
    last = sampler.seen[-1]
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
    async with _LOOKUPS:
        changed_twice = await tenant.is_changed_twice(row["run_id"])
    finished = row["finished_at"]
    return RunSeen(
        risk=Risk(row["workflow_id"]),
        status=row["status"],
        created_at=time_of(row["created_at"]) - began,
        finished_at=None if finished is None else time_of(finished) - began,
        changed_twice=changed_twice,
    )


def _escalated(
    seen: FallbackSeen, sampler: Sampler, provoked: float, began: float
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
        cut_until=until,
        first_duplicate_at=first,
        tripped_at=tripped,
        recovered_at=recovered,
        standard_finished_while_escalated=seen.finished([Risk.STANDARD], since, until),
        low_finished_while_escalated=seen.finished([Risk.LOW], since, until),
    )


# ── The report ───────────────────────────────────────────────────────────────────────────────────


def _figures(seen: FallbackSeen) -> dict[str, JsonValue]:
    rows: list[JsonValue] = [
        {
            "class": str(risk),
            "runs": sum(run.risk == risk for run in seen.runs),
            "finished_in_cuts": sum(seen.finished([risk], *cut) for cut in seen.cuts),
            "fallbacks": len(seen.fallbacks.get(str(risk), ())),
        }
        for risk in Risk
    ]
    figures: dict[str, JsonValue] = {
        "cuts_s": [[round(at, 1) for at in cut] for cut in seen.cuts],
        "duplicates_counted": seen.duplicates,
        "classes": rows,
    }
    if seen.escalation is not None:
        figures["escalation"] = msgspec.to_builtins(seen.escalation)
    return figures


def _charts(seen: FallbackSeen, sampler: Sampler, began: float) -> list[Chart]:
    until = sampler.seen[-1].at - began
    windows = tuple(Window(*cut, "lock store cut") for cut in seen.cuts)
    width_s = 1.0 if until < 120 else 2.0  # noqa: PLR2004 - where a finer line is only noise
    finished = tuple(
        cumulative(
            str(risk),
            (run.finished_at or until for run in seen.runs if run.risk == risk),
            until=until,
        )
        for risk in Risk
    )
    fallbacks = tuple(
        rate_series(str(risk), seen.fallbacks.get(str(risk), ()), width_s, since=0.0, until=until)
        for risk in Risk
    )
    active = Series(
        "active",
        tuple((each.at - began, each.sum("stanchion_runs_active")) for each in sampler.seen),
    )
    unit = f"per {width_s:g} s"
    charts: list[Chart] = [
        LineChart(
            title="Runs finished so far, by risk class",
            unit="runs",
            series=finished,
            windows=windows,
        ),
        LineChart(
            title="Fallbacks: runs handled without a lock",
            unit=unit,
            series=fallbacks,
            windows=windows,
        ),
        LineChart(
            title="Unfinished runs, as each replica counts them",
            unit="runs",
            series=(active,),
            windows=windows,
        ),
    ]
    if seen.escalation is not None:
        level = tuple(
            (each.at - began, each.highest("stanchion_escalation_level")) for each in sampler.seen
        )
        doubled = tuple(
            (each.at - began, sum(each.sum(name) for name in DUPLICATES)) for each in sampler.seen
        )
        most = max((count for _, count in doubled), default=1.0) or 1.0
        charts.append(
            LineChart(
                title="Escalation level, and duplicates",
                unit="level",
                series=(
                    Series("escalation level", level),
                    Series(
                        "duplicates so far, as a share of all",
                        tuple((at, count / most) for at, count in doubled),
                    ),
                ),
                windows=windows,
            )
        )
    return charts
