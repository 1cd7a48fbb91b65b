"""Fallback: what runs of each risk class did while the lock store was cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from stanchion.charts import Chart, LineChart, Series, Window
from stanchion.core.json_value import JsonValue
from stanchion.core.model import Risk
from stanchion.drills.observe import METRICS_OLD_S, Sampler, cumulative, rate_series
from stanchion.drills.verdict import Promise, ratio, seconds

OPEN, CLOSED = (Risk.LOW, Risk.STANDARD), (Risk.HIGH, Risk.CRITICAL)
FALLBACK_ENDS_S: Final = 5.0
CATCH_UP_S: Final = 15.0
"""By then every run that waited has finished: put-off runs are tried again every second."""
CUT_GRACE_S: Final = 1.5
"""What held its lease when the store was cut may still finish."""
KEEP_UP: Final = 0.4
"""Of its rate before, what an open class must keep up during the cut."""
TRIPS_WITHIN_S_MIN: Final = 10.0
"""Whatever the window: replicas look at their counts every two seconds."""
RECOVERS_WITHIN_S: Final = 75.0
_NAMED_MAX: Final = 3
"""Runs that are described in the report if they did not succeed."""
DUPLICATES: Final = ("stanchion_commit_conflicts_total", "stanchion_duplicate_completions_total")


class RunSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times are seconds since the load began."""

    risk: Risk
    status: str
    created_at: float
    finished_at: float | None
    changed_twice: bool = False
    """Whether a step of it, or the run itself, ended more than once."""
    waits_for: str = ""
    """What an unfinished run waited for in the end."""


class EscalationSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the escalation in a cut with duplicates."""

    provoked_at: float
    """From when on results were sent twice."""
    window_s: float
    """``escalation.window_s``."""
    cut_until: float
    first_duplicate_at: float | None
    tripped_at: float | None
    recovered_at: float | None
    standard_finished_while_escalated: int
    low_finished_while_escalated: int
    sees_recovery: bool = True
    """Whether its end was awaited."""

    @property
    def trips_within_s(self) -> float:
        """By then it must have tripped: a window must be complete, and have duplicates."""
        return max(TRIPS_WITHIN_S_MIN, 2 * self.window_s)


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
    if seen.escalation is not None:  # which closes a class that is open otherwise
        until = min(until, seen.escalation.provoked_at)
    shares = {}
    for risk in OPEN:
        before = ratio(seen.finished([risk], 0.0, since), since)
        rate = ratio(seen.finished([risk], since, until), until - since)
        shares[risk] = rate / before if before else 0.0
    return Promise(
        id="open_go_on",
        says="low and standard (fail open) keep finishing while the lock store is cut,"
        f" at {KEEP_UP:.0%} of their rate or more",
        measured=", ".join(f"{risk} {share:.0%}" for risk, share in shares.items()),
        holds=all(share >= KEEP_UP for share in shares.values()),
    )


def _closed_stop(seen: FallbackSeen) -> Promise:
    finished = sum(seen.finished(CLOSED, since + CUT_GRACE_S, until) for since, until in seen.cuts)
    # Of each class, in each cut: without any there was nothing to stop.
    began = [
        sum(run.risk is risk and since <= run.created_at < until for run in seen.runs)
        for risk in CLOSED
        for since, until in seen.cuts
    ]
    return Promise(
        id="closed_stop",
        says="high and critical (fail closed) do not move while the lock store is cut",
        measured=f"{finished} finished; {sum(began)} were started meanwhile",
        holds=finished == 0 and all(began),
    )


def _closed_finish(seen: FallbackSeen) -> Promise:
    last = seen.cuts[-1][1]
    failed = [run for run in seen.runs if run.finished_at is None or run.status != "succeeded"]
    waited = [run for run in seen.runs if run.risk in CLOSED and run.created_at < last]
    slowest = max((run.finished_at or last for run in waited), default=last) - last
    return Promise(
        id="all_finish",
        says="every run of every class succeeds in the end, those that waited within"
        f" {CATCH_UP_S:g} s of the last cut",
        measured=f"{len(failed)} of {len(seen.runs)} did not; the last of those that waited ended"
        f" {seconds(max(0.0, slowest))} after the cut"
        + "".join(f"; one is {run.status}: {run.waits_for}" for run in failed[:_NAMED_MAX]),
        holds=bool(seen.runs) and not failed and slowest <= CATCH_UP_S,
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
        and first <= tripped <= seen.provoked_at + seen.trips_within_s
    )
    promises = [
        Promise(
            id="escalation_trips",
            says="fallbacks alone do not escalate; fallbacks and duplicates do, within"
            f" {seen.trips_within_s:g} s (window of {seen.window_s:g} s)",
            measured="never"
            if tripped is None
            else f"{seconds(tripped - seen.provoked_at)} after duplicates began",
            holds=is_by_rule,
        ),
        Promise(
            id="escalation_closes",
            says="while escalated, standard fails closed as well and low continues",
            measured=f"{seen.standard_finished_while_escalated} standard and"
            f" {seen.low_finished_while_escalated} low runs finished",
            holds=seen.standard_finished_while_escalated == 0
            and seen.low_finished_while_escalated > 0,
        ),
    ]
    if seen.sees_recovery:
        after = None if seen.recovered_at is None else seen.recovered_at - seen.cut_until
        promises.append(
            Promise(
                id="escalation_recovers",
                says=f"it ends by itself within {RECOVERS_WITHIN_S:g} s of the cut's end",
                measured="never" if after is None else seconds(after),
                holds=after is not None and after <= RECOVERS_WITHIN_S,
            )
        )
    return promises


# ── The report ───────────────────────────────────────────────────────────────────────────────────


def figures_of(seen: FallbackSeen) -> dict[str, JsonValue]:
    """The tables of the page, and ``figures`` in the report."""
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


def charts_of(seen: FallbackSeen, sampler: Sampler, began: float) -> list[Chart]:
    """The pictures of the page, the most telling one first."""
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
