"""Admission drill (D1): bursts of starts on a tenant with two slots.

Strategies ``atomic``, ``lock`` with fixed retries and ``lock`` with jittered retries, each on one
server with SQLite and on two replicas; bursts of 10, 50 and 100 callers, and of ten times as many.
On the replicas the lock server's MONITOR shows every request for the tenant's lock. A second tenant
starts runs beside the bursts. Last, the lock's wait budget and the callers' retry budget are swept
together.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Final

import msgspec

from stanchion.client.async_client import AsyncClient
from stanchion.client.engine import Pace, RetryBudgets
from stanchion.client.errors import CallFailed
from stanchion.client.signals import Answered, CallSignal
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.retry import Budget, Exponential, RetryClass, RetryPolicy
from stanchion.drills.callers import DrillTenant, Sample, drill_tenant, waiting_run
from stanchion.drills.charts import BarChart, Bars, Chart, LineChart
from stanchion.drills.observe import (
    METRICS_OLD_S,
    LockCommands,
    counts_per,
    monitored,
    rate_series,
    read_metrics,
)
from stanchion.drills.options import DrillOptions, Progress
from stanchion.drills.processes import start_program, started
from stanchion.drills.verdict import DrillResult, Promise, percentile, ratio, seconds

__all__ = ["AdmissionSeen", "Burst", "Cell", "Isolation", "admission_drill", "judge_admission"]

CAP: Final = 2
WAIT_BUDGET_S: Final = 2.0
"""``admission.lock_wait_s``, the default."""
LATE_S: Final = 1.5
"""Half a second by contract, and what a hundred callers on a busy machine add to it."""
FLATTER: Final = 0.85
"""How much smoother jittered requests must be than fixed ones."""
QUIET_RATIO_MAX: Final = 2.0
QUIET_FLOOR_S: Final = 0.15
"""Below this the machine's own noise is larger than what is measured."""
FULL: Final = "429 max_concurrent_runs_reached"
BUSY: Final = "503 gate_busy"
SHED: Final = frozenset({"503 overloaded", "429 tenant_overloaded"})
BUCKET_S: Final = 0.01

FIXED, JITTER = "lock 50 ms", "lock 50 ± 25 ms"
"""The pair whose burst shapes are compared: a delay well above the time that one try takes."""
FIXED_10, JITTER_10 = "lock 10 ms", "lock 10 ± 5 ms"


def _lock(kind: str, delay_ms: int) -> JsonObject:
    retry: JsonObject = {"kind": kind, "delay_ms": delay_ms, "jitter_ms": delay_ms // 2}
    return {"strategy": "lock", "lock_retry": retry}


STRATEGIES: Final[Mapping[str, JsonObject]] = {
    "atomic": {"strategy": "atomic"},
    FIXED_10: _lock("fixed", 10),
    JITTER_10: _lock("jitter", 10),
    FIXED: _lock("fixed", 50),
    JITTER: _lock("jitter", 50),
}


# ── What was seen, and what it means ─────────────────────────────────────────────────────────────


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """One burst and its answers."""

    stack: str
    strategy: str
    callers: int
    answers: Mapping[str, int]
    """How often each answer came: ``200``, ``429 max_concurrent_runs_reached``…"""
    waits_s: tuple[float, ...]
    active: int
    """The tenant's unfinished runs afterwards."""
    is_oversized: bool = False
    lock_requests: tuple[float, ...] = ()
    """When the tenant's lock was asked for, in seconds since the burst began."""


class Isolation(msgspec.Struct, frozen=True, kw_only=True):
    """What another tenant noticed."""

    stack: str
    beside: str
    """What happened to the first tenant meanwhile."""
    control_s: tuple[float, ...]
    """Beside as many requests that ask no gate."""
    beside_s: tuple[float, ...]
    refused: int


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of the lock's wait budget and the callers' retry budget."""

    wait_s: float
    retries: int
    callers: int
    admitted: int
    runs: int
    requests: int
    refused: int
    p95_s: float


class AdmissionSeen(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the drill observed."""

    bursts: tuple[Burst, ...]
    isolation: tuple[Isolation, ...] = ()
    cells: tuple[Cell, ...] = ()
    drift: float = 0.0
    counted: Mapping[str, tuple[float, float]] = {}
    """Admissions by stack: as the servers' metrics counted them, and as callers were told."""


def judge_admission(seen: AdmissionSeen) -> tuple[Promise, ...]:
    """What was promised, compared with what was seen."""
    promises = [
        _cap_exact(seen.bursts),
        _refusals(seen.bursts),
        _answered_in_time([burst for burst in seen.bursts if not burst.is_oversized]),
    ]
    shape = burst_shape(seen.bursts)
    if shape is not None:
        promises.append(_flatter(*shape))
    if seen.isolation:
        promises.append(_isolated(seen.isolation))
    if seen.cells:
        promises.append(_one_run_each(seen.cells))
    promises.append(
        Promise(
            id="drift",
            says="slots counted and runs unfinished never differ",
            measured=f"{seen.drift:.0f} corrections",
            holds=seen.drift == 0,
        )
    )
    if seen.counted:
        wrong = [stack for stack, (metric, told) in seen.counted.items() if metric != told]
        pairs = ", ".join(
            f"{stack} {metric:.0f} of {told:.0f}" for stack, (metric, told) in seen.counted.items()
        )
        promises.append(
            Promise(
                id="metrics_agree",
                says="the servers' metrics count the admissions that callers were told of",
                measured=pairs,
                holds=not wrong,
            )
        )
    return tuple(promises)


def _cap_exact(bursts: Sequence[Burst]) -> Promise:
    wrong = [
        f"{burst.stack}, {burst.strategy}, {burst.callers} callers: {burst.answers.get('200', 0)}"
        f" admitted, {burst.active} active"
        for burst in bursts
        if burst.answers.get("200", 0) != CAP or burst.active != CAP
    ]
    return Promise(
        id="cap_exact",
        says=f"every burst on an empty tenant admits exactly {CAP} runs",
        measured="; ".join(wrong[:3]) or f"{CAP} × 200 in {len(bursts)} of {len(bursts)} bursts",
        holds=not wrong,
    )


def _refusals(bursts: Sequence[Burst]) -> Promise:
    others: Counter[str] = Counter()
    for burst in bursts:
        allowed = {"200", FULL} | ({BUSY} if burst.strategy != "atomic" else set())
        allowed |= SHED if burst.is_oversized else set()
        others.update({name: n for name, n in burst.answers.items() if name not in allowed})
    told = sum((Counter(burst.answers) for burst in bursts), Counter[str]())
    return Promise(
        id="refusals",
        says="every other caller gets 429, under `lock` also 503 gate_busy past the wait budget",
        measured=", ".join(f"{n:,} × {name}" for name, n in sorted((others or told).items())),
        holds=not others,
    )


def _answered_in_time(bursts: Sequence[Burst]) -> Promise:
    slowest = max((max(burst.waits_s) for burst in bursts), default=0.0)
    return Promise(
        id="answered_in_time",
        says=f"every start is answered within the wait budget of {WAIT_BUDGET_S:g} s"
        f" and {LATE_S:g} s",
        measured=f"the slowest took {seconds(slowest)}",
        holds=slowest <= WAIT_BUDGET_S + LATE_S,
    )


def roughness(counts: Sequence[int]) -> float:
    """The average step between neighbouring stretches, compared with the average stretch.

    Synchronised callers alternate between full and empty stretches: about 1 and above. Spread
    callers change little from one to the next.
    """
    if len(counts) < 2 or not sum(counts):  # noqa: PLR2004 - a step needs two
        return 0.0
    steps = [abs(after - before) for before, after in pairwise(counts)]
    return ratio(sum(steps) / len(steps), sum(counts) / len(counts))


def burst_shape(bursts: Sequence[Burst]) -> tuple[float, float] | None:
    """The median roughness of requests on the lock key: fixed, and jittered."""
    found: list[float] = []
    for strategy in (FIXED, JITTER):
        rough = [
            roughness(
                counts_per(burst.lock_requests, BUCKET_S, since=0.0, until=burst.lock_requests[-1])
            )
            for burst in bursts
            if burst.strategy == strategy and len(burst.lock_requests) > burst.callers
        ]
        if not rough:
            return None
        found.append(median(rough))
    return found[0], found[1]


def _flatter(fixed: float, jittered: float) -> Promise:
    return Promise(
        id="jitter_flatter",
        says="requests on the lock key, per 10 ms, change less from one stretch to the next with"
        f" jitter than with fixed retries (at most {FLATTER:g} ×)",
        measured=f"average step {jittered:.2f} of the mean with jitter, {fixed:.2f} fixed",
        holds=jittered <= FLATTER * fixed,
    )


def _isolated(rows: Sequence[Isolation]) -> Promise:
    said, holds = [], True
    for row in rows:
        control, beside = percentile(row.control_s, 0.95), percentile(row.beside_s, 0.95)
        is_good = beside <= max(QUIET_RATIO_MAX * control, QUIET_FLOOR_S) and not row.refused
        holds = holds and is_good
        text = f"{row.stack}, {row.beside}: {seconds(beside)} against {seconds(control)}"
        said.append(text + (f", {row.refused} refused" if row.refused else ""))
    return Promise(
        id="other_tenant",
        says="another tenant's p95 start stays within 2 × of what it is without the first tenant"
        f" at the gate, or {seconds(QUIET_FLOOR_S)}; none is refused",
        measured="; ".join(said),
        holds=holds,
    )


def _one_run_each(cells: Sequence[Cell]) -> Promise:
    wrong = [cell for cell in cells if cell.runs != cell.admitted]
    admitted = sum(cell.admitted for cell in cells)
    runs = sum(cell.runs for cell in cells)
    return Promise(
        id="one_run_each",
        says="no combination of wait budget and retry budget makes a second run for a key",
        measured=f"{runs} runs for {admitted} admitted callers in {len(cells)} combinations",
        holds=not wrong,
    )


# ── The drill ────────────────────────────────────────────────────────────────────────────────────


class _Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything, on one stack."""

    strategies: tuple[str, ...]
    sizes: tuple[int, ...]
    rounds: int = 1
    """How often the largest size is repeated."""
    oversized: int | None = None
    quiet_s: float = 0.0
    sweep_waits_s: tuple[float, ...] = ()
    sweep_retries: tuple[int, ...] = ()

    @property
    def about_s(self) -> float:
        """How long the bursts take, roughly."""
        bursts = len(self.strategies) * (len(self.sizes) + self.rounds - 1)
        return 3.0 + 0.8 * bursts + (25.0 if self.oversized else 0.0)


_QUICK: Final = {
    "SQLite": _Plan(strategies=("atomic", JITTER_10), sizes=(10, 100)),
    "two replicas": _Plan(
        strategies=("atomic", FIXED, JITTER), sizes=(100,), rounds=2, quiet_s=1.0
    ),
}
_WHOLE: Final = {
    "SQLite": _Plan(
        strategies=tuple(STRATEGIES), sizes=(10, 50, 100), oversized=1_000, quiet_s=3.0
    ),
    "two replicas": _Plan(
        strategies=tuple(STRATEGIES),
        sizes=(10, 50, 100),
        rounds=3,
        oversized=1_000,
        quiet_s=3.0,
        sweep_waits_s=(0.1, 0.5, 2.0),
        sweep_retries=(0, 25, 100),
    ),
}
_AGAINST: Final = _Plan(strategies=("atomic", FIXED, JITTER), sizes=(10, 50, 100))
_AGAINST_QUICK: Final = _Plan(strategies=("atomic", JITTER), sizes=(10, 50))
_SWEEP_CALLERS: Final = 50


async def admission_drill(options: DrillOptions, progress: Progress) -> DrillResult:
    """Run it."""
    if options.against is not None:
        return await _against(options, progress)
    plans = _QUICK if options.quick else _WHOLE
    phases = []
    for stack, plan in plans.items():
        phases.append((f"bursts on {stack}", plan.about_s))
        if plan.quiet_s:
            phases.append((f"another tenant beside them on {stack}", 4 + 3 * plan.quiet_s))
        if plan.sweep_waits_s:
            phases.append(("wait budget × retry budget", 40.0))
    progress.plan(phases)
    seen = AdmissionSeen(bursts=())
    for stack, plan in plans.items():
        seen = await _on_stack(options, plan, progress, stack, seen)
    return _result(seen)


async def _on_stack(
    options: DrillOptions,
    plan: _Plan,
    progress: Progress,
    stack: str,
    seen: AdmissionSeen,
) -> AdmissionSeen:
    progress.next()
    chance = options.chance(stack)
    async with AsyncExitStack() as cleaning:
        enter = cleaning.enter_async_context
        deployment = await enter(started(replicas=0 if stack == "SQLite" else 2))
        tenant = await enter(drill_tenant(deployment.urls, "admission"))
        commands = None
        if deployment.locks is not None:
            commands = await enter(monitored(deployment.locks.port))
        bursts = await _bursts(stack, tenant, plan, chance, commands)
        counted = await _counted(tenant, bursts)
        isolation: list[Isolation] = []
        if plan.quiet_s:
            progress.next()
            isolation = await _isolation(stack, deployment.urls, plan, chance, deployment.directory)
        cells: list[Cell] = []
        if plan.sweep_waits_s:
            progress.next()
            cells = await _sweep(tenant, plan, chance)
        metrics = await read_metrics(tenant)
        return AdmissionSeen(
            bursts=(*seen.bursts, *bursts),
            isolation=(*seen.isolation, *isolation),
            cells=tuple(cells),
            drift=seen.drift + metrics.sum("stanchion_slot_drift_total"),
            counted={**seen.counted, stack: counted},
        )


async def _bursts(
    stack: str,
    tenant: DrillTenant,
    plan: _Plan,
    chance: Random,
    commands: LockCommands | None,
    *,
    pause_s: float = 0.0,
) -> list[Burst]:
    await tenant.apply("hold", waiting_run())
    sizes = [(size, False) for size in plan.sizes]
    # The largest again and again, taking turns, so that a busy moment meets every strategy.
    sizes += [(plan.sizes[-1], False)] * (plan.rounds - 1)
    if plan.oversized is not None:
        sizes.append((plan.oversized, True))
    bursts = []
    for size, is_oversized in sizes:
        for strategy in plan.strategies:
            await tenant.configure(max_concurrent_runs=CAP, admission=STRATEGIES[strategy])
            began = time.time()
            samples = await tenant.burst("hold", size, chance)
            await asyncio.sleep(pause_s)
            at = commands.attempts(f"admission/{tenant.name}", since=began) if commands else []
            bursts.append(
                Burst(
                    stack=stack,
                    strategy=strategy,
                    callers=size,
                    answers=answers_of(samples),
                    waits_s=tuple(sample.took_s for sample in samples),
                    active=len(await tenant.unfinished()),
                    is_oversized=is_oversized,
                    lock_requests=tuple(each - at[0] for each in at),
                )
            )
            await tenant.cancel_all()
    return bursts


def answers_of(samples: Iterable[Sample]) -> dict[str, int]:
    """How often each answer came, by status and code."""
    named = (
        "no answer" if not sample.status else f"{sample.status} {sample.code or ''}".strip()
        for sample in samples
    )
    return dict(Counter(named))


async def _counted(tenant: DrillTenant, bursts: Sequence[Burst]) -> tuple[float, float]:
    await asyncio.sleep(METRICS_OLD_S)
    metrics = await read_metrics(tenant)
    told = sum(burst.answers.get("200", 0) for burst in bursts)
    name = "stanchion_admission_decisions_total"
    return metrics.sum(name, tenant=tenant.name, outcome="admitted"), float(told)


async def _isolation(
    stack: str, urls: Sequence[str], plan: _Plan, chance: Random, directory: Path
) -> list[Isolation]:
    """The start times of a tenant with room, beside another that has none or whose lock is held."""
    async with drill_tenant(urls, "quiet") as quiet, drill_tenant(urls, "noisy") as noisy:
        for tenant in (quiet, noisy):
            await tenant.apply("hold", waiting_run())
        await quiet.configure(max_concurrent_runs=None, admission=STRATEGIES["atomic"])
        await noisy.configure(max_concurrent_runs=CAP, admission=STRATEGIES["atomic"])
        beside = partial(_beside, quiet, noisy, chance, directory, plan.quiet_s)
        rows = [_compared(stack, "bursts of 100", await beside("nothing"), await beside("hold"))]
        await noisy.cancel_all()
        # Under `lock`, bursts take processor time from every tenant. Whether the lock is the
        # tenant's own shows without them: the other one's is held, and this one does not wait.
        await quiet.configure(max_concurrent_runs=None, admission=STRATEGIES[JITTER_10])
        alone = await beside(None)
        held = {"name": f"admission/{noisy.name}", "ttl_s": plan.quiet_s + 5}
        await noisy.expect("POST", "/v1/admin/leases", held)
        rows.append(_compared(stack, "a held lock", alone, await beside(None)))
        await noisy.call("DELETE", f"/v1/admin/leases/admission/{noisy.name}")
    return rows


def _compared(
    stack: str, beside: str, control: Sequence[Sample], samples: Sequence[Sample]
) -> Isolation:
    return Isolation(
        stack=stack,
        beside=beside,
        control_s=tuple(sample.took_s for sample in control),
        beside_s=tuple(sample.took_s for sample in samples),
        refused=sum(sample.status != 200 for sample in samples),  # noqa: PLR2004 - HTTP's OK
    )


_BURST_CALLERS, _BURST_EVERY_S, _QUIET_PER_S = 100, 1.0, 40.0
_NOISE_STARTS_S: Final = 0.7
"""A process needs so long before its first request."""


async def _beside(
    quiet: DrillTenant,
    noisy: DrillTenant,
    chance: Random,
    directory: Path,
    quiet_s: float,
    workflow: str | None,
) -> list[Sample]:
    noise = None
    if workflow is not None:
        noise = start_program(
            "stanchion.drills.programs",
            *("burst", ",".join(noisy.urls), noisy.name, workflow),
            *(str(_BURST_CALLERS), str(_BURST_EVERY_S), str(quiet_s + _NOISE_STARTS_S), "1"),
            log=directory / "burst.log",
            cwd=directory,
        )
        await asyncio.sleep(_NOISE_STARTS_S)
    try:
        start = partial(quiet.start, "hold")
        return await quiet.paced(start, per_s=_QUIET_PER_S, seconds=quiet_s, chance=chance)
    finally:
        if noise is not None:
            await asyncio.to_thread(noise.stop)


async def _sweep(tenant: DrillTenant, plan: _Plan, chance: Random) -> list[Cell]:
    """Callers that all have room, so that the tenant's lock alone makes them wait."""
    cells = []
    await tenant.configure(max_concurrent_runs=None, admission=STRATEGIES[FIXED_10])
    for wait_s in plan.sweep_waits_s:
        await tenant.settings({"admission": {"lock_wait_s": wait_s}})
        await asyncio.sleep(2.0)  # in force on every replica
        for retries in plan.sweep_retries:
            cells.append(await _cell(tenant, chance, wait_s, retries))
            await tenant.cancel_all()
    await tenant.settings({"admission": {"lock_wait_s": WAIT_BUDGET_S}})
    return cells


async def _cell(tenant: DrillTenant, chance: Random, wait_s: float, retries: int) -> Cell:
    policy = RetryPolicy(
        attempts_max=8 if retries else 1,
        total_ms_max=20_000,
        retry_after_ms_max=10_000,
        backoff=Exponential(base_ms=100, cap_ms=1_000),
    )
    sent: list[int | None] = []

    def note(signal: CallSignal) -> None:
        if isinstance(signal, Answered):
            sent.append(signal.status)

    pace = Pace(
        policies=dict.fromkeys(RetryClass, policy),
        budgets=RetryBudgets(dict.fromkeys(RetryClass, Budget(max(1, retries), 0.0))),
        sample=chance.random,
    )
    before = len(await tenant.runs())
    clients = [
        AsyncClient(url, tenant=tenant.name, pace=pace, on_event=note) for url in tenant.urls
    ]
    took_s: list[float] = []

    async def call(client: AsyncClient) -> bool:
        since = time.monotonic()
        try:
            await client.start("hold")
        except CallFailed:
            return False
        took_s.append(time.monotonic() - since)
        return True

    callers = [clients[number % len(clients)] for number in range(_SWEEP_CALLERS)]
    admitted = sum(await asyncio.gather(*(call(client) for client in callers)))
    for client in clients:
        await client.close()
    return Cell(
        wait_s=wait_s,
        retries=retries,
        callers=_SWEEP_CALLERS,
        admitted=admitted,
        runs=len(await tenant.runs()) - before,
        requests=len(sent),
        refused=sum(status != 200 for status in sent),  # noqa: PLR2004 - HTTP's OK
        p95_s=percentile(took_s, 0.95),
    )


async def _against(options: DrillOptions, progress: Progress) -> DrillResult:
    """On a deployment of somebody else's: bursts with pauses, in a tenant of the drill's own."""
    assert options.against is not None
    plan = _AGAINST_QUICK if options.quick else _AGAINST
    progress.plan([("bursts", 2.0 * len(plan.strategies) * len(plan.sizes))])
    progress.next()
    urls, chance = options.against.split(","), options.chance("against")
    async with drill_tenant(urls, "admission", api_key=options.api_key, is_removed=True) as tenant:
        before = await read_metrics(tenant)
        bursts = await _bursts("deployment", tenant, plan, chance, None, pause_s=1.0)
        counted = await _counted(tenant, bursts)
        drift = (await read_metrics(tenant)).sum("stanchion_slot_drift_total")
        drift -= before.sum("stanchion_slot_drift_total")
    # One address may stand for several replicas, whose metrics are not all seen then.
    is_whole = counted[0] == counted[1]
    return _result(
        AdmissionSeen(
            bursts=tuple(bursts), drift=drift, counted={"deployment": counted} if is_whole else {}
        )
    )


def _result(seen: AdmissionSeen) -> DrillResult:
    used = {burst.strategy for burst in seen.bursts}
    return DrillResult(
        promises=judge_admission(seen),
        figures=_figures(seen),
        charts=tuple(_charts(seen)),
        settings={
            "max_concurrent_runs": CAP,
            "admission.lock_wait_s": WAIT_BUDGET_S,
            "strategies": {n: dict(value) for n, value in STRATEGIES.items() if n in used},
            "callers": [*sorted({burst.callers for burst in seen.bursts})],
        },
    )


def _figures(seen: AdmissionSeen) -> dict[str, JsonValue]:
    figures: dict[str, JsonValue] = {"drift": seen.drift}
    shape = burst_shape(seen.bursts)
    if shape is not None:
        figures["lock_requests_average_step_fixed"] = round(shape[0], 3)
        figures["lock_requests_average_step_jitter"] = round(shape[1], 3)
    figures["bursts"] = [
        {
            "stack": burst.stack,
            "strategy": burst.strategy,
            "callers": burst.callers,
            "answers": dict(burst.answers),
            "p50_ms": _ms(burst.waits_s, 0.5),
            "p95_ms": _ms(burst.waits_s, 0.95),
            "p99_ms": _ms(burst.waits_s, 0.99),
            "all_answered_ms": _ms(burst.waits_s, 1.0),
            "lock_requests": len(burst.lock_requests) or None,
        }
        for burst in seen.bursts
    ]
    if seen.isolation:
        figures["other_tenant"] = [
            {
                "stack": row.stack,
                "beside": row.beside,
                "p95_control_ms": _ms(row.control_s, 0.95),
                "p95_beside_ms": _ms(row.beside_s, 0.95),
                "refused": row.refused,
            }
            for row in seen.isolation
        ]
    if seen.cells:
        figures["wait_budget_and_retry_budget"] = [msgspec.to_builtins(cell) for cell in seen.cells]
    return figures


def _ms(values: Sequence[float], share: float) -> float:
    return round(percentile(values, share) * 1000, 1)


def _charts(seen: AdmissionSeen) -> list[Chart]:
    largest = [burst for burst in seen.bursts if not burst.is_oversized]
    size = max(burst.callers for burst in largest)
    largest = [burst for burst in largest if burst.callers == size]
    charts: list[Chart] = []
    requested = {
        burst.strategy: burst
        for burst in largest
        if burst.strategy in {FIXED, JITTER} and len(burst.lock_requests) > burst.callers
    }
    if requested:
        until = max(burst.lock_requests[-1] for burst in requested.values())
        charts.append(
            LineChart(
                title=f"Requests on the tenant's lock, {size} callers at once, two replicas",
                unit="requests per 10 ms",
                series=tuple(
                    rate_series(
                        name,
                        burst.lock_requests,
                        BUCKET_S,
                        since=0.0,
                        until=until,
                    )
                    for name, burst in requested.items()
                ),
            )
        )
    pairs = list(dict.fromkeys((burst.stack, burst.strategy) for burst in largest))

    def waits(share: float) -> tuple[float, ...]:
        return tuple(
            median(
                percentile(burst.waits_s, share) * 1000
                for burst in largest
                if (burst.stack, burst.strategy) == pair
            )
            for pair in pairs
        )

    charts.append(
        BarChart(
            title=f"How long {size} callers at once waited for their answer",
            unit="milliseconds",
            groups=tuple(f"{name}|{stack}" for stack, name in pairs),
            series=(Bars("p50", waits(0.5)), Bars("p95", waits(0.95)), Bars("p99", waits(0.99))),
        )
    )
    if seen.cells:
        budgets = sorted({cell.retries for cell in seen.cells})
        charts.append(
            BarChart(
                title=f"Admitted of {_SWEEP_CALLERS} callers, by wait budget and retry budget",
                unit="callers",
                groups=tuple(
                    f"wait {wait:g} s" for wait in sorted({cell.wait_s for cell in seen.cells})
                ),
                series=tuple(
                    Bars(
                        f"{budget} retries for all",
                        tuple(
                            float(cell.admitted)
                            for cell in sorted(seen.cells, key=lambda each: each.wait_s)
                            if cell.retries == budget
                        ),
                    )
                    for budget in budgets
                ),
            )
        )
    return charts
