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
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from random import Random
from statistics import median
from typing import Final

import msgspec
from msgspec.structs import replace

from stanchion.client.async_client import AsyncClient
from stanchion.client.engine import Pace, RetryBudgets
from stanchion.client.errors import CallFailed
from stanchion.client.signals import Answered, CallSignal
from stanchion.core.retry import Budget, Exponential, RetryClass, RetryPolicy
from stanchion.drills.callers import DrillTenant, Sample, drill_tenant, waiting_run
from stanchion.drills.observe import (
    METRICS_OLD_S,
    LockCommands,
    Metrics,
    late_timers,
    monitored,
    read_metrics,
    read_whole_metrics,
)
from stanchion.drills.options import DrillOptions, Progress
from stanchion.drills.processes import (
    CouldNotRun,
    Deployment,
    start_program,
    started,
    starvation,
)
from stanchion.drills.promises.admission import (
    CAP,
    FEW_FLOOR_S,
    FIXED,
    FIXED_10,
    JITTER,
    JITTER_10,
    OWN_STARVATION,
    QUIET_FLOOR_S,
    STRATEGIES,
    WAIT_BUDGET_S,
    AdmissionSeen,
    Burst,
    Cell,
    Isolation,
    charts_of,
    figures_of,
    judge_admission,
)
from stanchion.drills.verdict import DrillResult, percentile, ratio


class _Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything, on one stack."""

    strategies: tuple[str, ...]
    sizes: tuple[int, ...]
    rounds: int = 1
    """How often the largest size is repeated."""
    oversized: int | None = None
    quiet_s: float = 0.0
    quiet_rounds: int = 1
    """How often another tenant is compared with itself alone, in turns."""
    quiet_floor_s: float = QUIET_FLOOR_S
    sweep_waits_s: tuple[float, ...] = ()
    """Beginning with the default, which needs no change of the settings."""
    sweep_retries: tuple[int, ...] = ()
    sweep_callers: int = 50
    compares_clients: bool = True
    """Whether the last cell is repeated with callers whose retries have no jitter."""

    @property
    def about_s(self) -> float:
        """How long the bursts take, roughly."""
        bursts = len(self.strategies) * (len(self.sizes) + self.rounds - 1)
        return 3.0 + 0.8 * bursts + (25.0 if self.oversized else 0.0)


_QUICK: Final = {
    "SQLite": _Plan(strategies=("atomic", JITTER_10), sizes=(10, 100)),
    "two replicas": _Plan(
        strategies=("atomic", FIXED, JITTER),
        sizes=(100,),
        rounds=2,
        quiet_s=1.2,
        quiet_floor_s=FEW_FLOOR_S,
        sweep_waits_s=(WAIT_BUDGET_S, 0.1),
        sweep_retries=(0, 50),
        sweep_callers=20,
        compares_clients=False,
    ),
}
_WHOLE: Final = {
    "SQLite": _Plan(
        strategies=tuple(STRATEGIES),
        sizes=(10, 50, 100),
        oversized=1_000,
        quiet_s=3.0,
        quiet_rounds=3,
    ),
    "two replicas": _Plan(
        strategies=tuple(STRATEGIES),
        sizes=(10, 50, 100),
        rounds=3,
        oversized=1_000,
        quiet_s=3.0,
        quiet_rounds=3,
        sweep_waits_s=(WAIT_BUDGET_S, 0.5, 0.1),
        sweep_retries=(0, 25, 100),
    ),
}
_DRIFT: Final = "stanchion_slot_drift_total"
_AGAINST: Final = _Plan(strategies=("atomic", FIXED, JITTER), sizes=(10, 50, 100))
_AGAINST_QUICK: Final = _Plan(strategies=("atomic", JITTER), sizes=(10, 50))


async def admission_drill(options: DrillOptions, progress: Progress) -> DrillResult:
    """Run it."""
    if options.against is not None:
        return await _against(options, progress)
    plans = _QUICK if options.quick else _WHOLE
    phases = []
    for stack, plan in plans.items():
        phases.append((f"bursts on {stack}", plan.about_s))
        if plan.quiet_s:
            about_s = plan.quiet_rounds * (2 + 6 * plan.quiet_s)
            phases.append((f"another tenant beside them on {stack}", 5 + about_s))
        if plan.sweep_waits_s:
            cells = len(plan.sweep_waits_s) * len(plan.sweep_retries) + plan.compares_clients
            phases.append(("wait budget × retry budget", 4.0 * cells))
    progress.plan(phases)
    seen = AdmissionSeen(bursts=())
    for stack, plan in plans.items():
        seen = await _on_stack(options, plan, progress, stack, seen)
    return _result(seen)


async def _on_stack(
    options: DrillOptions, plan: _Plan, progress: Progress, stack: str, seen: AdmissionSeen
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
            isolation = [
                replace(row, floor_s=plan.quiet_floor_s)
                for row in await _isolation(stack, deployment, plan, chance)
            ]
        cells: list[Cell] = []
        if plan.sweep_waits_s:
            progress.next()
            cells = await _sweep(tenant, plan, chance)
        metrics = await read_whole_metrics(tenant)
        return AdmissionSeen(
            bursts=(*seen.bursts, *bursts),
            isolation=(*seen.isolation, *isolation),
            cells=tuple(cells),
            drift=(seen.drift or 0.0) + metrics.sum(_DRIFT),
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
    told = float(sum(burst.answers.get("200", 0) for burst in bursts))
    counted = -1.0
    for _ in range(3):  # a busy server may take longer to render its metrics
        await asyncio.sleep(METRICS_OLD_S)
        metrics = await read_metrics(tenant)
        name = "stanchion_admission_decisions_total"
        counted = metrics.sum(name, tenant=tenant.name, outcome="admitted")
        if counted == told:
            break
    return counted, told


async def _isolation(
    stack: str, deployment: Deployment, plan: _Plan, chance: Random
) -> list[Isolation]:
    """The start times of a tenant with room, beside another that has none or whose lock is held."""
    async with (
        drill_tenant(deployment.urls, "quiet") as quiet,
        drill_tenant(deployment.urls, "noisy") as noisy,
    ):
        for tenant in (quiet, noisy):
            await tenant.apply("hold", waiting_run())
        await quiet.configure(max_concurrent_runs=None, admission=STRATEGIES["atomic"])
        await noisy.configure(max_concurrent_runs=CAP, admission=STRATEGIES["atomic"])
        beside = partial(_beside, quiet, noisy, chance, deployment, plan.quiet_s)
        rows = []
        for strategy in ("atomic", JITTER):
            await noisy.configure(max_concurrent_runs=CAP, admission=STRATEGIES[strategy])
            alone, seen = [], []
            for _ in range(plan.quiet_rounds):
                alone.append(await beside(None))
                seen.append(await beside("hold"))
                await noisy.cancel_all()
            bursts = f"bursts of {_BURST_CALLERS}, {strategy}"
            rows.append(_compared(stack, bursts, _pooled(alone), _pooled(seen)))
        # Under `lock` its own lock is a tenant's only one: the other one's is held, and it does
        # not wait.
        await quiet.configure(max_concurrent_runs=None, admission=STRATEGIES[JITTER_10])
        alone, seen = [], []
        for _ in range(plan.quiet_rounds):
            alone.append(await beside(None))
            held = {"name": f"admission/{noisy.name}", "ttl_s": plan.quiet_s + 5}
            await noisy.expect("POST", "/v1/admin/leases", held)
            seen.append(await beside(None))
            await noisy.call("DELETE", f"/v1/admin/leases/admission/{noisy.name}")
        rows.append(_compared(stack, "a held lock", _pooled(alone), _pooled(seen)))
    return rows


def _compared(stack: str, beside: str, alone: _Starts, seen: _Starts) -> Isolation:
    return Isolation(
        stack=stack,
        beside=beside,
        alone_s=tuple(sample.took_s for sample in alone.samples),
        beside_s=tuple(sample.took_s for sample in seen.samples),
        refused=sum(sample.status != 200 for sample in seen.samples),  # noqa: PLR2004 - HTTP's OK
        starvation=max(1.0, ratio(seen.starvation, min(OWN_STARVATION, alone.starvation))),
        lag_s=max(0.0, seen.lag_s - alone.lag_s),
    )


class _Starts(msgspec.Struct, frozen=True):
    """Starts of one tenant, and how busy the machine was meanwhile."""

    samples: list[Sample]
    starvation: float
    lag_s: float


def _pooled(rounds: Sequence[_Starts]) -> _Starts:
    """All starts of several rounds, and how busy the machine was in the middle one of them."""
    return _Starts(
        [sample for each in rounds for sample in each.samples],
        median(each.starvation for each in rounds),
        median(each.lag_s for each in rounds),
    )


_BURST_CALLERS, _BURST_EVERY_S, _QUIET_PER_S = 100, 1.0, 40.0
_LOG_CHARS_MAX: Final = 2_000
_NOISE_STARTS_S: Final = 0.7
"""A process needs so long before its first request."""


async def _beside(
    quiet: DrillTenant,
    noisy: DrillTenant,
    chance: Random,
    deployment: Deployment,
    quiet_s: float,
    workflow: str | None,
) -> _Starts:
    noise, log = None, deployment.directory / "burst.log"
    if workflow is not None:
        noise = start_program(
            "stanchion.drills.programs",
            *("burst", ",".join(noisy.urls), noisy.name, workflow),
            *(str(_BURST_CALLERS), str(_BURST_EVERY_S), str(quiet_s + _NOISE_STARTS_S), "1"),
            log=log,
            cwd=deployment.directory,
        )
        await asyncio.sleep(_NOISE_STARTS_S)
    try:
        start = partial(quiet.start, "hold")
        before = [replica.processor_ns() for replica in deployment.replicas]
        async with late_timers() as lags_s:
            samples = await quiet.paced(start, per_s=_QUIET_PER_S, seconds=quiet_s, chance=chance)
        after = [replica.processor_ns() for replica in deployment.replicas]
        if noise is not None and noise.process.poll():
            why = log.read_text(errors="replace")[-_LOG_CHARS_MAX:]
            raise CouldNotRun(f"the process that sends the bursts failed:\n{why}")
        return _Starts(samples, max(map(starvation, before, after)), percentile(lags_s, 0.95))
    finally:
        if noise is not None:
            await asyncio.to_thread(noise.stop)


async def _sweep(tenant: DrillTenant, plan: _Plan, chance: Random) -> list[Cell]:
    """Callers that all have room, so that the tenant's lock alone makes them wait."""
    cells = []
    await tenant.configure(max_concurrent_runs=None, admission=STRATEGIES[FIXED_10])
    for wait_s in plan.sweep_waits_s:
        if wait_s != WAIT_BUDGET_S:
            await tenant.settings({"admission": {"lock_wait_s": wait_s}})
            await asyncio.sleep(2.0)  # in force on every replica
        for retries in plan.sweep_retries:
            cells.append(await _cell(tenant, chance, plan.sweep_callers, wait_s, retries))
            await tenant.cancel_all()
    if plan.compares_clients:
        last = (plan.sweep_callers, plan.sweep_waits_s[-1], plan.sweep_retries[-1])
        cells.append(await _cell(tenant, chance, *last, is_jittered=False))
        await tenant.cancel_all()
    await tenant.settings({"admission": {"lock_wait_s": WAIT_BUDGET_S}})
    return cells


async def _cell(
    tenant: DrillTenant,
    chance: Random,
    callers: int,
    wait_s: float,
    retries: int,
    *,
    is_jittered: bool = True,
) -> Cell:
    policy = RetryPolicy(
        attempts_max=8 if retries else 1,
        total_ms_max=20_000,
        retry_after_ms_max=10_000,
        backoff=Exponential(base_ms=100, cap_ms=1_000, jitter="full" if is_jittered else "none"),
        spread=_CLIENT_SPREAD if is_jittered else 0.0,
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

    asked = [clients[number % len(clients)] for number in range(callers)]
    admitted = sum(await asyncio.gather(*(call(client) for client in asked)))
    for client in clients:
        await client.close()
    return Cell(
        wait_s=wait_s,
        retries=retries,
        client="jittered" if is_jittered else "fixed",
        callers=callers,
        admitted=admitted,
        runs=len(await tenant.runs()) - before,
        requests=len(sent),
        refused=sum(status != 200 for status in sent),  # noqa: PLR2004 - HTTP's OK
        p95_s=percentile(took_s, 0.95),
        spread_s=percentile(took_s, 0.9) - percentile(took_s, 0.1),
    )


_CLIENT_SPREAD: Final = 0.25
"""By how much of ``Retry-After`` a caller comes later: the SDK's default."""


async def _against(options: DrillOptions, progress: Progress) -> DrillResult:
    """On a deployment in use: bursts with pauses between them, in a tenant of the drill's own."""
    assert options.against is not None
    plan = _AGAINST_QUICK if options.quick else _AGAINST
    progress.plan([("bursts", 2.0 * len(plan.strategies) * len(plan.sizes))])
    progress.next()
    urls, chance = options.against.split(","), options.chance("against")
    async with drill_tenant(urls, "admission", api_key=options.api_key, is_removed=True) as tenant:
        before = await read_metrics(tenant)
        bursts = await _bursts("deployment", tenant, plan, chance, None, pause_s=1.0)
        counted = await _counted(tenant, bursts)
        after = await read_metrics(tenant)
    # One address may stand for several replicas, whose metrics are not all seen then.
    is_whole = counted[0] == counted[1]
    drift = drift_between(before, after, is_whole=is_whole)
    return _result(
        AdmissionSeen(
            bursts=tuple(bursts), drift=drift, counted={"deployment": counted} if is_whole else {}
        )
    )


def drift_between(before: Metrics, after: Metrics, *, is_whole: bool) -> float | None:
    """Corrections of slots between two readings; ``None`` if not all replicas were read."""
    drift = after.sum(_DRIFT) - before.sum(_DRIFT)
    # Less than before: it was another replica, or one that was restarted.
    is_known = is_whole and not before.silent and not after.silent and drift >= 0
    return drift if is_known else None


def _result(seen: AdmissionSeen) -> DrillResult:
    used = {burst.strategy for burst in seen.bursts}
    return DrillResult(
        promises=judge_admission(seen),
        figures=figures_of(seen),
        charts=tuple(charts_of(seen)),
        settings={
            "max_concurrent_runs": CAP,
            "admission.lock_wait_s": WAIT_BUDGET_S,
            "strategies": {n: dict(value) for n, value in STRATEGIES.items() if n in used},
            "callers": [*sorted({burst.callers for burst in seen.bursts})],
        },
    )
