"""Retry: what three fleets of callers sent, got and waited for."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from itertools import pairwise
from typing import Final

import msgspec

from stanchion.charts import Chart, Limit, LineChart, Series, Window
from stanchion.core.json_value import JsonValue
from stanchion.core.retry import BUDGETS, Budget, RetryClass
from stanchion.drills.observe import cumulative, rate_series
from stanchion.drills.verdict import Promise, percentile, ratio, seconds

SINGLE, SPLIT, BUDGETED = "one policy", "split", "split, budgets"
GATE_BACK_S: Final = 3.0
"""So long after the cut a replica may take to notice that the lock store answers again."""
EARLY_MS: Final = 5
"""What the clocks of the client and of the drill may differ by in one wait."""
_LAST_S: Final = 60.0
"""From this limit on the last caller is judged as well."""
MOST: Final = 0.9
SPREAD_S: Final = 0.5
GATE_CODES: Final = frozenset({"gate_unavailable", "limit_check_failed"})
_RETRIED: Final = {429: RetryClass.QUOTA, 503: RetryClass.UNAVAILABLE}


class Try(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a fleet. Times are seconds since the drill's load began."""

    key: str
    at: float
    answered_at: float
    status: int
    code: str | None = None
    retry_after_ms: int = 0
    """What the server asked for."""
    run_id: str | None = None

    @property
    def may_have_run(self) -> bool:
        """Whether the store may have admitted it, though no success was answered."""
        return self.status in {0, HTTPStatus.SERVICE_UNAVAILABLE}


class FleetSeen(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one fleet sent and got."""

    name: str
    callers: int
    tries: tuple[Try, ...]
    runs: int
    """How many runs its tenant has in the end."""
    wrong_replays: int = 0
    """Keys that, sent again at the end, did not give their own run again."""
    untold: int = 0
    """Keys that have a run, though their callers gave up after a 503 or no answer."""

    @property
    def admitted(self) -> list[Try]:
        """The first success of each key."""
        found: dict[str, Try] = {}
        for each in self.tries:
            if each.status == HTTPStatus.OK:
                found.setdefault(each.key, each)
        return list(found.values())

    def by_key(self) -> list[list[Try]]:
        keyed: dict[str, list[Try]] = defaultdict(list)
        for each in sorted(self.tries, key=lambda one: one.at):
            keyed[each.key].append(each)
        return list(keyed.values())

    @property
    def requests_per_run(self) -> float:
        return ratio(len(self.tries), len(self.admitted))

    def admitted_by(self, share: float) -> float:
        """When this share of the callers had been admitted; infinite if they never were."""
        times = sorted(each.answered_at for each in self.admitted)
        wanted = math.ceil(share * self.callers)
        return times[wanted - 1] if 0 < wanted <= len(times) else math.inf

    def average_wait_s(self, limit_s: float) -> float:
        """From the beginning to the admission of a caller, counting at most ``limit_s``."""
        waits = [min(limit_s, each.answered_at) for each in self.admitted]
        waits += [limit_s] * (self.callers - len(waits))
        return sum(waits) / len(waits)

    def retries(self) -> Counter[RetryClass]:
        """Requests that followed a refusal, by the class of the refusal."""
        counted: Counter[RetryClass] = Counter()
        for tries in self.by_key():
            for before, _ in pairwise(tries):
                counted[_RETRIED.get(before.status, RetryClass.UNAVAILABLE)] += 1
        return counted


class RetrySeen(msgspec.Struct, frozen=True, kw_only=True):
    """What the drill observed."""

    fleets: tuple[FleetSeen, ...]
    cut: tuple[float, float] | None = None
    """From when to when the gate was cut; ``None`` on a deployment that must not be cut."""
    limit_s: float = 120.0
    """How long the fleet with one policy had."""
    active: Mapping[str, tuple[tuple[float, float], ...]] = {}
    """Of each fleet's tenant: unfinished runs over time, as the servers count them."""
    cap: int = 0
    budgets: Mapping[RetryClass, Budget] = BUDGETS

    def fleet(self, name: str) -> FleetSeen:
        return next(fleet for fleet in self.fleets if fleet.name == name)


def judge_retry(seen: RetrySeen) -> tuple[Promise, ...]:
    """What was promised, compared with what was seen."""
    single, split, budgeted = (seen.fleet(name) for name in (SINGLE, SPLIT, BUDGETED))
    promises = [
        _no_second_run(seen.fleets),
        Promise(
            id="admitted",
            says="with split policies nine of ten callers and more are admitted in time; the others"
            " were told to retry after the drill's end",
            measured=f"{len(split.admitted)} of {split.callers}",
            holds=len(split.admitted) >= MOST * split.callers,
        ),
        Promise(
            id="fewer_requests",
            says="split policies need fewer requests for an admitted run than one for all codes",
            measured=f"{split.requests_per_run:.2f} against {single.requests_per_run:.2f}",
            holds=0 < split.requests_per_run < single.requests_per_run,
        ),
        Promise(
            id="sooner_admitted",
            says="with split policies callers are admitted sooner, on average, than with one policy"
            " for all codes",
            measured=f"{seconds(split.average_wait_s(seen.limit_s))} against"
            f" {seconds(single.average_wait_s(seen.limit_s))}",
            holds=split.average_wait_s(seen.limit_s) < single.average_wait_s(seen.limit_s),
        ),
        _sooner_done(split, single, seen.limit_s),
        _within_budget(budgeted, seen.budgets),
        _honoured([split, budgeted]),
        _spread([split, budgeted]),
    ]
    if seen.active:
        promises.append(_cap_held(seen))
    if seen.cut is not None:
        promises += _gate(seen.fleets, *seen.cut)
    return tuple(promises)


def _cap_held(seen: RetrySeen) -> Promise:
    most = {
        name: max((count for _, count in points), default=0.0)
        for name, points in seen.active.items()
    }
    shown = ", ".join(f"{name} {count:.0f}" for name, count in most.items())
    return Promise(
        id="cap_held",
        says=f"no tenant ever has more than its {seen.cap} runs active",
        measured=f"at the most {shown}",
        holds=all(0 < count <= seen.cap for count in most.values()),
    )


def _sooner_done(split: FleetSeen, single: FleetSeen, limit_s: float) -> Promise:
    # A quick drill may end before the last caller is admitted.
    shares = (MOST, 1.0) if limit_s >= _LAST_S else (MOST,)
    return Promise(
        id="sooner_done",
        says="nine of ten callers, and in a whole drill the last one, are admitted sooner with"
        " split policies",
        measured=f"{_by(split, MOST)} against {_by(single, MOST)}, the last one"
        f" {_by(split, 1.0)} against {_by(single, 1.0)}",
        holds=all(split.admitted_by(share) < single.admitted_by(share) for share in shares),
    )


def _by(fleet: FleetSeen, share: float) -> str:
    time_s = fleet.admitted_by(share)
    return seconds(time_s) if math.isfinite(time_s) else "never"


def _no_second_run(fleets: Sequence[FleetSeen]) -> Promise:
    wrong = [
        fleet.name
        for fleet in fleets
        if fleet.wrong_replays
        or fleet.runs != len(fleet.admitted) + fleet.untold
        or len({each.run_id for each in fleet.admitted}) != len(fleet.admitted)
    ]
    runs = sum(each.runs for each in fleets)
    keys = sum(len(each.admitted) + each.untold for each in fleets)
    untold = sum(each.untold for each in fleets)
    tries = sum(len(fleet.tries) for fleet in fleets)
    return Promise(
        id="no_second_run",
        says="no key has two runs, however often it was sent, and a key sent again gives its run",
        measured=f"{runs} runs for {keys} keys in {tries:,} requests"
        + (f"; {untold} of them answered 503 and found by its key" if untold else "")
        + (f"; not so: {', '.join(wrong)}" if wrong else ""),
        holds=not wrong,
    )


def _within_budget(fleet: FleetSeen, budgets: Mapping[RetryClass, Budget]) -> Promise:
    span_s = max((each.answered_at for each in fleet.tries), default=0.0)
    retries = fleet.retries()
    said, holds = [], True
    for retry_class, budget in budgets.items():
        most = budget.tokens_max + budget.refill_per_s * span_s + 1
        said.append(f"{retry_class} {retries[retry_class]} of at most {most:.0f}")
        holds = holds and retries[retry_class] <= most
    return Promise(
        id="within_budget",
        says="a fleet with budgets retries no more than they allow",
        measured=f"{', '.join(said)} in {seconds(span_s)}",
        holds=holds,
    )


def _honoured(fleets: Sequence[FleetSeen]) -> Promise:
    early, pairs = 0, 0
    for fleet in fleets:
        for tries in fleet.by_key():
            for before, after in pairwise(tries):
                pairs += 1
                waited_ms = (after.at - before.answered_at) * 1000
                early += waited_ms < before.retry_after_ms - EARLY_MS
    return Promise(
        id="retry_after_honoured",
        says="the SDK never retries before Retry-After",
        measured=f"{early} of {pairs} retries came early",
        holds=not early and pairs > 0,
    )


def _spread(fleets: Sequence[FleetSeen]) -> Promise:
    told = [
        each.retry_after_ms / 1000
        for fleet in fleets
        for each in fleet.tries
        if each.status == HTTPStatus.TOO_MANY_REQUESTS
    ]
    width_s = percentile(told, 0.9) - percentile(told, 0.1)
    return Promise(
        id="retry_after_spread",
        says=f"callers of a full tenant get different retry times, over {SPREAD_S:g} s and more",
        measured=f"{len(set(told))} different values in {len(told)} refusals, p10 to p90"
        f" {seconds(width_s)} apart",
        holds=width_s >= SPREAD_S and len(set(told)) >= len(told) / 2,
    )


def _gate(fleets: Sequence[FleetSeen], since: float, until: float) -> list[Promise]:
    # From when to when a request was under way, because a busy machine is late with its answer.
    tries = [each for fleet in fleets for each in fleet.tries]
    failed = [each for each in tries if each.code in GATE_CODES]
    outside = [each for each in failed if each.answered_at < since or each.at > until + GATE_BACK_S]
    # What had the lock when it was cut is still admitted.
    within = [
        each
        for fleet in fleets
        for each in fleet.admitted
        if since < each.at and each.answered_at < until
    ]
    sent = sum(since < each.at and each.answered_at < until for each in tries)
    return [
        Promise(
            id="gate_503",
            says="503 gate_unavailable answers requests that meet a gate that is cut, and no others"
            f" (nor later than {GATE_BACK_S:g} s after the cut)",
            measured=f"{len(failed)} times, {len(outside)} of them outside",
            holds=bool(failed) and not outside,
        ),
        Promise(
            id="never_open",
            says="no request that is sent while the gate is cut is admitted before the cut ends:"
            " it never fails open",
            measured=f"{len(within)} of {sent} admitted",
            holds=sent > 0 and not within,
        ),
    ]


# ── The report ───────────────────────────────────────────────────────────────────────────────────


def figures_of(seen: RetrySeen) -> dict[str, JsonValue]:
    """The tables of the page, and ``figures`` in the report."""
    rows: list[JsonValue] = []
    for fleet in seen.fleets:
        statuses = Counter(str(each.status or "none") for each in fleet.tries)
        retries = fleet.retries()
        rows.append(
            {
                "fleet": fleet.name,
                "callers": fleet.callers,
                "admitted": len(fleet.admitted),
                "requests": len(fleet.tries),
                "requests_per_run": round(fleet.requests_per_run, 2),
                "retries_after_429": retries[RetryClass.QUOTA],
                "retries_after_503": retries[RetryClass.UNAVAILABLE],
                "average_wait_s": round(fleet.average_wait_s(seen.limit_s), 2),
                "last_admitted": _by(fleet, 1.0),
                "answers": dict(sorted(statuses.items())),
            }
        )
    return {
        "gate_cut_s": None if seen.cut is None else [round(at, 1) for at in seen.cut],
        "fleets": rows,
    }


def charts_of(seen: RetrySeen) -> list[Chart]:
    """The pictures of the page, the most telling one first."""
    until = max(each.answered_at for fleet in seen.fleets for each in fleet.tries)
    windows = () if seen.cut is None else (Window(*seen.cut, "gate cut"),)
    requests = tuple(
        rate_series(fleet.name, (each.at for each in fleet.tries), 0.5, since=0.0, until=until)
        for fleet in seen.fleets
    )
    admitted = tuple(
        cumulative(fleet.name, (each.answered_at for each in fleet.admitted), until=until)
        for fleet in seen.fleets
    )
    split = seen.fleet(SPLIT)
    answers = tuple(
        rate_series(
            label,
            (each.answered_at for each in split.tries if each.status == status),
            0.5,
            since=0.0,
            until=until,
        )
        for status, label in ((200, "200"), (429, "429"), (503, "503"))
    )
    charts: list[Chart] = [
        LineChart(
            title="Requests of each fleet", unit="per 500 ms", series=requests, windows=windows
        ),
        LineChart(
            title="Callers admitted so far", unit="callers", series=admitted, windows=windows
        ),
        LineChart(
            title="Answers to the fleet with split policies",
            unit="per 500 ms",
            series=answers,
            windows=windows,
        ),
    ]
    if seen.active:
        active = tuple(Series(name, points) for name, points in seen.active.items())
        charts.append(
            LineChart(
                title="Active runs of each fleet's tenant, against its cap",
                unit="runs",
                series=active,
                windows=windows,
                limits=(Limit(float(seen.cap), "max_concurrent_runs"),),
            )
        )
    return charts
