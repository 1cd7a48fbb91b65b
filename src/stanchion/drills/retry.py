"""Retry drill (D2): a fleet of callers against a full tenant whose gate then fails.

Three fleets run at the same time on the same servers, each with a tenant of its own: one retry
policy for all codes, without regard to ``Retry-After``; the SDK's separate policies for 429 and
503; and these with the SDK's retry budgets. The tenants admit under the ``lock`` strategy. While
the fleets wait for slots, the lock store is cut: the gate answers 503. Every request is recorded.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from http import HTTPStatus
from itertools import pairwise
from random import Random
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from stanchion.client.async_client import AsyncClient
from stanchion.client.engine import Pace, RetryBudgets
from stanchion.client.errors import CallFailed
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.retry import BUDGETS, RETRIES, Budget, Exponential, RetryClass, RetryPolicy
from stanchion.drills.callers import DrillTenant, delayed, drill_tenant, until
from stanchion.drills.charts import Chart, LineChart, Window
from stanchion.drills.observe import cumulative, rate_series
from stanchion.drills.options import DrillOptions, Progress
from stanchion.drills.processes import Deployment, started
from stanchion.drills.verdict import DrillResult, Promise, percentile, ratio, seconds
from stanchion.transport.event_loop import LoopTransport
from stanchion.transport.messages import AsyncByteStream, HttpReply, NoReply, Request, parse_address

__all__ = [
    "BUDGETED",
    "SINGLE",
    "SPLIT",
    "FleetSeen",
    "RetrySeen",
    "Try",
    "judge_retry",
    "retry_drill",
]

SINGLE, SPLIT, BUDGETED = "one policy", "split", "split, budgets"
GATE_BACK_S: Final = 3.0
"""So long after the cut a replica may take to notice that the lock store answers again."""
CUT_GRACE_S: Final = 0.5
"""What had the lock when it was cut is still admitted."""
EARLY_MS: Final = 30
SPREAD_S: Final = 0.5
UNLIMITED: Final = Budget(1_000_000, 1_000_000.0)
GATE_CODES: Final = frozenset({"gate_unavailable", "limit_check_failed"})
_RETRIED: Final = {429: RetryClass.QUOTA, 503: RetryClass.UNAVAILABLE}

_FOR_ALL: Final = RetryPolicy(
    attempts_max=60,
    total_ms_max=120_000,
    retry_after_ms_max=30_000,
    backoff=Exponential(base_ms=200, cap_ms=10_000, jitter="none"),
    spread=0.0,
)
"""What is often written first: whatever the refusal, wait twice as long as before."""
_SPLIT: Final = {
    # As patient as the other fleet, so that both can get everybody in; all else is the SDK's own.
    retry_class: replace(policy, attempts_max=60)
    for retry_class, policy in RETRIES.items()
}


# ── What was seen, and what it means ─────────────────────────────────────────────────────────────


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


class FleetSeen(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one fleet sent and got."""

    name: str
    callers: int
    tries: tuple[Try, ...]
    runs: int
    """How many runs its tenant has in the end."""
    wrong_replays: int = 0
    """Keys that, sent again at the end, did not give their own run again."""

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
    budgets: Mapping[RetryClass, Budget] = BUDGETS

    def fleet(self, name: str) -> FleetSeen:
        return next(fleet for fleet in self.fleets if fleet.name == name)


def judge_retry(seen: RetrySeen) -> tuple[Promise, ...]:
    """What was promised, compared with what was seen."""
    single, split, budgeted = (seen.fleet(name) for name in (SINGLE, SPLIT, BUDGETED))
    promises = [
        _no_second_run(seen.fleets),
        Promise(
            id="all_admitted",
            says="with split policies every caller is admitted in the end",
            measured=f"{len(split.admitted)} of {split.callers}",
            holds=len(split.admitted) == split.callers,
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
            f" {seconds(single.average_wait_s(seen.limit_s))};"
            f" the last one {_by(split, 1.0)} against {_by(single, 1.0)}",
            holds=split.average_wait_s(seen.limit_s) < single.average_wait_s(seen.limit_s),
        ),
        _within_budget(budgeted, seen.budgets),
        _honoured([split, budgeted]),
        _spread([split, budgeted]),
    ]
    if seen.cut is not None:
        promises += _gate(seen.fleets, *seen.cut)
    return tuple(promises)


def _by(fleet: FleetSeen, share: float) -> str:
    time_s = fleet.admitted_by(share)
    return seconds(time_s) if math.isfinite(time_s) else "never"


def _no_second_run(fleets: Sequence[FleetSeen]) -> Promise:
    wrong = [
        fleet.name
        for fleet in fleets
        if fleet.wrong_replays
        or fleet.runs != len(fleet.admitted)
        or len({each.run_id for each in fleet.admitted}) != fleet.runs
    ]
    runs, keys = sum(each.runs for each in fleets), sum(len(each.admitted) for each in fleets)
    tries = sum(len(fleet.tries) for fleet in fleets)
    return Promise(
        id="no_second_run",
        says="no key has two runs, however often it was sent, and a key sent again gives its run",
        measured=f"{runs} runs for {keys} keys in {tries:,} requests"
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
        says="the SDK never comes back before Retry-After",
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
        says=f"callers of a full tenant are told different times, over {SPREAD_S:g} s and more",
        measured=f"{len(set(told))} different values in {len(told)} refusals, p10 to p90"
        f" {seconds(width_s)} apart",
        holds=width_s >= SPREAD_S and len(set(told)) >= len(told) / 2,
    )


def _gate(fleets: Sequence[FleetSeen], since: float, until: float) -> list[Promise]:
    tries = [each for fleet in fleets for each in fleet.tries]
    failed = [each.answered_at for each in tries if each.code in GATE_CODES]
    outside = [at for at in failed if not since <= at <= until + GATE_BACK_S]
    within = [
        each
        for fleet in fleets
        for each in fleet.admitted
        if since + CUT_GRACE_S < each.answered_at < until
    ]
    return [
        Promise(
            id="gate_503",
            says="503 gate_unavailable comes while the gate is cut, and only then"
            f" (and at most {GATE_BACK_S:g} s after)",
            measured=f"{len(failed)} times, {len(outside)} of them outside",
            holds=bool(failed) and not outside,
        ),
        Promise(
            id="never_open",
            says="nothing is admitted while the gate is cut: it never fails open",
            measured=f"{len(within)} admitted",
            holds=not within,
        ),
    ]


# ── The drill ────────────────────────────────────────────────────────────────────────────────────


class _Plan(msgspec.Struct, frozen=True, kw_only=True):
    callers: int
    cap: int
    run_s: float
    arrive_s: float
    cut_after_s: float
    cut_s: float
    limit_s: float
    """Callers of the fleet with one policy that are not admitted by then give up."""


_QUICK: Final = _Plan(
    callers=60, cap=6, run_s=0.4, arrive_s=0.2, cut_after_s=1.0, cut_s=3.0, limit_s=15.0
)
_WHOLE: Final = _Plan(
    callers=200, cap=10, run_s=0.5, arrive_s=0.5, cut_after_s=3.0, cut_s=10.0, limit_s=100.0
)
_AGAINST: Final = _Plan(
    callers=100, cap=10, run_s=0.5, arrive_s=0.2, cut_after_s=0, cut_s=0, limit_s=60.0
)
_AGAINST_QUICK: Final = replace(_AGAINST, callers=40, cap=5, limit_s=20.0)


async def retry_drill(options: DrillOptions, progress: Progress) -> DrillResult:
    """Run it."""
    if options.against is not None:
        plan = _AGAINST_QUICK if options.quick else _AGAINST
        progress.plan([("three fleets against a full tenant each", plan.limit_s)])
        progress.next()
        urls = options.against.split(",")
        seen = await _load(options, plan, urls, None, is_removed=True)
        return _result(seen, plan)
    plan = _QUICK if options.quick else _WHOLE
    about_s = plan.limit_s / 2 if plan is _WHOLE else plan.limit_s
    progress.plan(
        [
            ("two replicas", 3.0),
            (f"three fleets of {plan.callers} callers, gate cut for {plan.cut_s:g} s", about_s),
        ]
    )
    progress.next()
    async with started(replicas=2) as deployment:
        progress.next()
        seen = await _load(options, plan, deployment.urls, deployment, is_removed=False)
    return _result(seen, plan)


async def _load(
    options: DrillOptions,
    plan: _Plan,
    urls: Sequence[str],
    deployment: Deployment | None,
    *,
    is_removed: bool,
) -> RetrySeen:
    async with AsyncExitStack() as cleaning:
        fleets = []
        for name in (SINGLE, SPLIT, BUDGETED):
            tenant = await cleaning.enter_async_context(
                drill_tenant(urls, "retry", api_key=options.api_key, is_removed=is_removed)
            )
            # Runs of low risk end also while the lock store is cut, so that slots become free.
            await tenant.apply("short", {"risk": "low", **delayed(plan.run_s)})
            await tenant.configure(max_concurrent_runs=plan.cap, admission={"strategy": "lock"})
            fleets.append(_Fleet(name, tenant, options, plan))
        warmed = await asyncio.gather(*(fleet.warm_up(plan) for fleet in fleets))
        began = time.time()
        chance = options.chance("arrivals")
        async with _cut_later(deployment, plan, began) as cut:
            tries = await asyncio.gather(*(fleet.call(plan, began, chance) for fleet in fleets))
        seen = [
            await fleet.seen(plan, each, before)
            for fleet, each, before in zip(fleets, tries, warmed, strict=True)
        ]
    return RetrySeen(
        fleets=tuple(seen),
        cut=None if deployment is None else (cut[0], cut[1]),
        limit_s=plan.limit_s,
    )


@asynccontextmanager
async def _cut_later(
    deployment: Deployment | None, plan: _Plan, began: float
) -> AsyncIterator[list[float]]:
    """Cut the lock store at its time; the times of the cut, once it has happened."""
    times: list[float] = []

    async def cut() -> None:
        assert deployment is not None
        await asyncio.sleep(plan.cut_after_s)
        times.append(time.time() - began)
        for link in deployment.lock_links:
            link.cut()
        await asyncio.sleep(plan.cut_s)
        for link in deployment.lock_links:
            link.mend()
        times.append(time.time() - began)

    task = None if deployment is None else asyncio.create_task(cut(), name="cut the lock store")
    try:
        yield times
        if task is not None:
            await task
    finally:
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


class _Fleet:
    """Callers that share a tenant, a policy and a budget."""

    def __init__(self, name: str, tenant: DrillTenant, options: DrillOptions, plan: _Plan) -> None:
        self._name = name
        self._tenant = tenant
        self._api_key = options.api_key
        budgets = BUDGETS if name == BUDGETED else dict.fromkeys(RetryClass, UNLIMITED)
        policies = dict.fromkeys(RetryClass, _FOR_ALL) if name == SINGLE else _SPLIT
        # To see the last caller of the split fleets in, they may take longer.
        limit_ms = round(plan.limit_s * (1 if name == SINGLE else 2) * 1000)
        self._pace = Pace(
            policies={each: replace(how, total_ms_max=limit_ms) for each, how in policies.items()},
            budgets=RetryBudgets(budgets),
            sample=options.chance(name).random,
        )

    async def warm_up(self, plan: _Plan) -> int:
        """Let some runs end, so that the servers know how fast slots become free; how many."""
        for _ in range(3):
            await asyncio.gather(*(self._tenant.start("short") for _ in range(plan.cap // 2)))
            await asyncio.sleep(plan.run_s)
        before = await self._tenant.runs()
        await until(self._is_idle, within_s=30.0, what="runs of the warm-up end")
        return len(before)

    async def _is_idle(self) -> bool:
        return not await self._tenant.unfinished()

    async def call(self, plan: _Plan, began: float, chance: Random) -> list[Try]:
        """Let every caller start one run; all requests that this took."""
        transports = [
            _RecordingTransport(url, began, hides_retry_after=self._name == SINGLE)
            for url in self._tenant.urls
        ]
        clients = [
            AsyncClient(
                url,
                tenant=self._tenant.name,
                api_key=self._api_key,
                pace=self._pace,
                transport=transport,
            )
            for url, transport in zip(self._tenant.urls, transports, strict=True)
        ]
        arrivals = [chance.uniform(0, plan.arrive_s) for _ in range(plan.callers)]

        async def one(number: int) -> None:
            await asyncio.sleep(arrivals[number])
            with suppress(CallFailed):
                await clients[number % len(clients)].start(
                    "short", idempotency_key=f"caller-{number}"
                )

        await asyncio.gather(*(one(number) for number in range(plan.callers)))
        for transport in transports:
            await transport.close()
        return [each for transport in transports for each in transport.tries]

    async def seen(self, plan: _Plan, tries: Sequence[Try], before: int) -> FleetSeen:
        """What it all came to: runs are counted, and every key is sent once more."""
        fleet = FleetSeen(
            name=self._name,
            callers=plan.callers,
            tries=tuple(tries),
            runs=len(await self._tenant.runs()) - before,
        )
        wrong = 0
        for each in fleet.admitted:
            again = await self._tenant.start("short", key=each.key)
            wrong += not (again.is_replay and again.run_id == each.run_id)
        return replace(fleet, wrong_replays=wrong)


class _RecordingTransport:
    """Sends requests, and writes down each with its answer."""

    def __init__(self, url: str, began: float, *, hides_retry_after: bool) -> None:
        self._inner = LoopTransport(parse_address(url))
        self._began = began
        self._hides = hides_retry_after
        self.tries: list[Try] = []

    async def send(self, request: Request) -> HttpReply | NoReply | AsyncByteStream:
        at = time.time() - self._began
        outcome = await self._inner.send(request)
        answered_at = time.time() - self._began
        key = dict(request.headers).get("Idempotency-Key", "")
        if not isinstance(outcome, HttpReply):
            self.tries.append(Try(key=key, at=at, answered_at=answered_at, status=0))
            return outcome
        told: dict[str, Any] = msgspec.json.decode(outcome.body)
        self.tries.append(
            Try(
                key=key,
                at=at,
                answered_at=answered_at,
                status=outcome.status,
                code=told.get("code"),
                retry_after_ms=told.get("retry_after_ms") or 0,
                run_id=told.get("run_id"),
            )
        )
        if not self._hides:
            return outcome
        headers = {name: text for name, text in outcome.headers.items() if name != "retry-after"}
        body = msgspec.json.encode({**told, "retry_after_ms": None})
        return replace(outcome, headers=headers, body=body)

    async def close(self) -> None:
        await self._inner.close()


# ── The report ───────────────────────────────────────────────────────────────────────────────────


def _result(seen: RetrySeen, plan: _Plan) -> DrillResult:
    settings: JsonObject = {
        "callers": plan.callers,
        "max_concurrent_runs": plan.cap,
        "run_s": plan.run_s,
        "admission.strategy": "lock",
        SINGLE: {"all codes": msgspec.to_builtins(_FOR_ALL), "retry_after": "ignored"},
        SPLIT: {str(name): msgspec.to_builtins(policy) for name, policy in _SPLIT.items()},
        "budgets": {str(name): msgspec.to_builtins(each) for name, each in BUDGETS.items()},
    }
    return DrillResult(
        promises=judge_retry(seen),
        figures=_figures(seen),
        charts=tuple(_charts(seen)),
        settings=settings,
    )


def _figures(seen: RetrySeen) -> dict[str, JsonValue]:
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


def _charts(seen: RetrySeen) -> list[Chart]:
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
    return [
        LineChart(
            title="Requests of each fleet", unit="per 500 ms", series=requests, windows=windows
        ),
        LineChart(
            title="Callers that have been admitted",
            unit="callers",
            series=admitted,
            windows=windows,
        ),
        LineChart(
            title="Answers to the fleet with split policies",
            unit="per 500 ms",
            series=answers,
            windows=windows,
        ),
    ]
