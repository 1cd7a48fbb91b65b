"""Admission: bursts on a tenant with two slots, and what each caller got."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Final

import msgspec

from stanchion.charts import BarChart, Bars, Chart, Limit, LineChart
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.drills.observe import counts_per, rate_series
from stanchion.drills.verdict import Promise, percentile, ratio, seconds

CAP: Final = 2
WAIT_BUDGET_S: Final = 2.0
"""``admission.lock_wait_s``, the default."""
LATE_S: Final = 1.5
"""Half a second by contract, and what a hundred callers on a busy machine add to it."""
FLATTER: Final = 0.85
"""How much smoother jittered requests must be than fixed ones."""
QUIET_RATIO_MAX: Final = 2.0
QUIET_FLOOR_S: Final = 0.01
"""Below this the machine's own noise is larger than what is measured."""
FEW_FLOOR_S: Final = 0.05
"""The same for a quick drill, whose p95 is the third worst of fifty starts."""
OWN_STARVATION: Final = 1.5
"""What the drill's own processes cause on two cores: more is the work of others."""
STARVATION_MAX: Final = 8.0
"""By how much at most the bound is stretched on a busy machine."""
_STARVED: Final = 1.2
"""From here on the report says so."""
FULL: Final = "429 max_concurrent_runs_reached"
BUSY: Final = "503 gate_busy"
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
    alone_s: tuple[float, ...]
    """Just before, while the first tenant did nothing."""
    beside_s: tuple[float, ...]
    refused: int
    starvation: float = 1.0
    """How much longer than alone the servers' work took because other processes had the cores."""
    lag_s: float = 0.0
    """How much later than alone the drill itself woke up, p95: its own wait for a core."""
    floor_s: float = QUIET_FLOOR_S

    @property
    def bound_s(self) -> float:
        """The highest p95 allowed, stretched if the processes waited longer for a core."""
        least = max(QUIET_RATIO_MAX * percentile(self.alone_s, 0.95), self.floor_s)
        return least * min(STARVATION_MAX, self.starvation) + 2 * self.lag_s


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of the lock's wait budget and the callers' retry budget."""

    wait_s: float
    retries: int
    client: str
    """How the callers' own retries are spread: ``jittered`` or ``fixed``."""
    callers: int
    admitted: int
    runs: int
    requests: int
    refused: int
    p95_s: float
    spread_s: float
    """Between the first and the last tenth of the admissions: how they are spread over time."""


class AdmissionSeen(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the drill observed."""

    bursts: tuple[Burst, ...]
    isolation: tuple[Isolation, ...] = ()
    cells: tuple[Cell, ...] = ()
    drift: float | None = 0.0
    """Corrections of slots; ``None`` if the metrics of some replicas were not read."""
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
    if seen.drift is not None:
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
        alone, beside = percentile(row.alone_s, 0.95), percentile(row.beside_s, 0.95)
        holds = holds and beside <= row.bound_s and not row.refused
        text = f"{row.stack}, {row.beside}: {seconds(beside)} against {seconds(alone)}"
        if row.starvation >= _STARVED or row.lag_s > QUIET_FLOOR_S / 2:
            text += f" (the machine was busier: up to {seconds(row.bound_s)} allowed)"
        said.append(text + (f", {row.refused} refused" if row.refused else ""))
    return Promise(
        id="other_tenant",
        says="another tenant's p95 start stays within 2 × of what it is alone, or"
        f" {seconds(rows[0].floor_s)}, and what servers and drill waited longer for a core;"
        " none is refused",
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
        holds=admitted > 0 and not wrong,
    )


def figures_of(seen: AdmissionSeen) -> dict[str, JsonValue]:
    """The tables of the page, and ``figures`` in the report."""
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
                "p95_alone_ms": _ms(row.alone_s, 0.95),
                "p95_beside_ms": _ms(row.beside_s, 0.95),
                "refused": row.refused,
                "starvation": round(row.starvation, 2),
                "drill_late_ms": round(row.lag_s * 1000, 1),
            }
            for row in seen.isolation
        ]
    if seen.cells:
        figures["wait_budget_and_retry_budget"] = [msgspec.to_builtins(cell) for cell in seen.cells]
    return figures


def _ms(values: Sequence[float], share: float) -> float:
    return round(percentile(values, share) * 1000, 1)


def charts_of(seen: AdmissionSeen) -> list[Chart]:
    """The pictures of the page, the most telling one first."""
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
                    rate_series(name, burst.lock_requests, BUCKET_S, since=0.0, until=until)
                    for name, burst in requested.items()
                ),
            )
        )
    # A picture for each stack: ten groups of bars in one have no room for their labels.
    by_stack: dict[str, list[Burst]] = {}
    for burst in largest:
        by_stack.setdefault(burst.stack, []).append(burst)
    charts += [_waits_chart(stack, bursts, size) for stack, bursts in by_stack.items()]
    charts += [_answers_chart(stack, bursts, size) for stack, bursts in by_stack.items()]
    if seen.cells:
        budgets = sorted({cell.retries for cell in seen.cells})
        charts.append(
            BarChart(
                title=f"Admitted of {seen.cells[0].callers} callers, by wait and retry budget",
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
                            if cell.retries == budget and cell.client == "jittered"
                        ),
                    )
                    for budget in budgets
                ),
            )
        )
    return charts


def _waits_chart(stack: str, bursts: Sequence[Burst], size: int) -> Chart:
    """How long callers of the largest bursts waited, by strategy."""
    strategies = _by_strategy(bursts)

    def waits(share: float) -> tuple[float, ...]:
        return tuple(
            median(percentile(burst.waits_s, share) * 1000 for burst in rows)
            for rows in strategies.values()
        )

    return BarChart(
        title=f"How long {size} callers at once waited for their answer, {stack}",
        unit="milliseconds",
        groups=tuple(strategies),
        series=(Bars("p50", waits(0.5)), Bars("p95", waits(0.95)), Bars("p99", waits(0.99))),
    )


def _answers_chart(stack: str, bursts: Sequence[Burst], size: int) -> Chart:
    """What callers of the largest bursts were answered, by status, on average."""
    strategies = _by_strategy(bursts)

    def answered(status: str) -> tuple[float, ...]:
        return tuple(
            sum(
                count
                for burst in rows
                for name, count in burst.answers.items()
                if name.startswith(status)
            )
            / len(rows)
            for rows in strategies.values()
        )

    return BarChart(
        title=f"Answers to {size} callers at once, by status, {stack}",
        unit="callers",
        groups=tuple(strategies),
        series=tuple(Bars(status, answered(status)) for status in ("200", "429", "503")),
        limits=(Limit(float(CAP), "the cap"),),
    )


def _by_strategy(bursts: Sequence[Burst]) -> dict[str, list[Burst]]:
    found: dict[str, list[Burst]] = {}
    for burst in bursts:
        found.setdefault(burst.strategy, []).append(burst)
    return found
