"""Retry drill (D2): a fleet of callers against a full tenant whose gate then fails.

Three fleets run at the same time on the same servers, each with a tenant of its own: one retry
policy for all codes, without regard to ``Retry-After``; the SDK's separate policies for 429 and
503; and these with the SDK's retry budgets. The tenants admit under the ``lock`` strategy. While
the fleets wait for slots, the lock store is cut: the gate answers 503. Every request is recorded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from http import HTTPStatus
from random import Random
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from stanchion.client.async_client import AsyncClient
from stanchion.client.engine import Pace, RetryBudgets
from stanchion.client.errors import CallFailed
from stanchion.core.json_value import JsonObject
from stanchion.core.retry import BUDGETS, RETRIES, Budget, Exponential, RetryClass, RetryPolicy
from stanchion.drills.callers import DrillTenant, delayed, drill_tenant, until
from stanchion.drills.options import DrillOptions, Progress
from stanchion.drills.processes import Deployment, started
from stanchion.drills.promises.retry import (
    BUDGETED,
    SINGLE,
    SPLIT,
    FleetSeen,
    RetrySeen,
    Try,
    charts_of,
    figures_of,
    judge_retry,
)
from stanchion.drills.verdict import DrillResult
from stanchion.transport.event_loop import LoopTransport
from stanchion.transport.messages import AsyncByteStream, HttpReply, NoReply, Request, parse_address

UNLIMITED: Final = Budget(1_000_000, 1_000_000.0)
_FOR_ALL: Final = RetryPolicy(
    attempts_max=60,
    total_ms_max=120_000,
    retry_after_ms_max=30_000,
    backoff=Exponential(base_ms=200, cap_ms=10_000, jitter="none"),
    spread=0.0,
)
"""A naive policy: the delay doubles after every refusal, of whatever class."""
_SPLIT: Final = {
    # As many attempts as the other fleet has, so that all callers can get in; else the SDK's own.
    retry_class: replace(policy, attempts_max=60)
    for retry_class, policy in RETRIES.items()
}


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
            fleets.append(_Fleet(name, tenant, options))
        since = time.monotonic()
        warmed = await asyncio.gather(*(fleet.warm_up(plan) for fleet in fleets))
        plan = _slowed(plan, time.monotonic() - since)
        began = time.time()
        chance = options.chance("arrivals")
        async with _counted(fleets, began) as active, _cut_later(deployment, plan, began) as cut:
            tries = await asyncio.gather(*(fleet.call(plan, began, chance) for fleet in fleets))
        seen = [
            await fleet.seen(plan, each, before)
            for fleet, each, before in zip(fleets, tries, warmed, strict=True)
        ]
    return RetrySeen(
        fleets=tuple(seen),
        cut=None if deployment is None else (cut[0], cut[1]),
        limit_s=plan.limit_s,
        active={name: tuple(points) for name, points in active.items()},
        cap=plan.cap,
    )


def _slowed(plan: _Plan, warmed_up_s: float) -> _Plan:
    """The plan with more time for all callers, if the machine was slow while it warmed up."""
    slowness = warmed_up_s / (_WARM_UPS * plan.run_s + _WARM_UP_CALLS_S)
    return replace(plan, limit_s=plan.limit_s * min(_SLOWNESS_MAX, max(1.0, slowness)))


@asynccontextmanager
async def _counted(
    fleets: Sequence[_Fleet], began: float
) -> AsyncIterator[dict[str, list[tuple[float, float]]]]:
    """Read again and again how many runs each fleet's tenant has, as the store counts them."""
    active: dict[str, list[tuple[float, float]]] = {fleet.name: [] for fleet in fleets}

    async def count(fleet: _Fleet) -> None:
        while True:
            seen = await fleet.tenant.call("GET", "/v1/tenant")
            if seen.status == HTTPStatus.OK:
                point = (max(0.0, seen.answered_at - began), float(seen.document["active"]))
                active[fleet.name].append(point)
            await asyncio.sleep(_COUNT_EVERY_S)

    tasks = [asyncio.create_task(count(fleet)) for fleet in fleets]
    try:
        yield active
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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


_COUNT_EVERY_S: Final = 0.4
_WARM_UPS: Final = 3
_WARM_UP_CALLS_S: Final = 1.5
"""What the calls of a warm-up take on an idle machine, generously."""
_SLOWNESS_MAX: Final = 1.5
"""A quick drill must still end within its minute."""


class _Fleet:
    """Callers that share a tenant, a policy and a budget."""

    def __init__(self, name: str, tenant: DrillTenant, options: DrillOptions) -> None:
        self.name = name
        self.tenant = tenant
        self._api_key = options.api_key
        self._sample = options.chance(name).random

    def _pace(self, plan: _Plan) -> Pace:
        budgets = BUDGETS if self.name == BUDGETED else dict.fromkeys(RetryClass, UNLIMITED)
        policies = dict.fromkeys(RetryClass, _FOR_ALL) if self.name == SINGLE else _SPLIT
        # To see the last caller of the split fleets in, they may take longer.
        limit_ms = round(plan.limit_s * (1 if self.name == SINGLE else 1.5) * 1000)
        return Pace(
            policies={each: replace(how, total_ms_max=limit_ms) for each, how in policies.items()},
            budgets=RetryBudgets(budgets),
            sample=self._sample,
        )

    async def warm_up(self, plan: _Plan) -> int:
        """Let some runs end, so that the servers know how fast slots become free; how many."""
        for _ in range(_WARM_UPS):
            await asyncio.gather(*(self.tenant.start("short") for _ in range(plan.cap // 2)))
            await asyncio.sleep(plan.run_s)
        before = await self.tenant.runs()
        await until(self._is_idle, within_s=30.0, what="runs of the warm-up end")
        return len(before)

    async def _is_idle(self) -> bool:
        return not await self.tenant.unfinished()

    async def call(self, plan: _Plan, began: float, chance: Random) -> list[Try]:
        """Let every caller start one run; all requests that this took."""
        transports = [
            _RecordingTransport(url, began, hides_retry_after=self.name == SINGLE)
            for url in self.tenant.urls
        ]
        pace = self._pace(plan)
        clients = [
            AsyncClient(
                url, tenant=self.tenant.name, api_key=self._api_key, pace=pace, transport=transport
            )
            for url, transport in zip(self.tenant.urls, transports, strict=True)
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
            name=self.name,
            callers=plan.callers,
            tries=tuple(tries),
            runs=len(await self.tenant.runs()) - before,
        )
        wrong = 0
        for each in fleet.admitted:
            again = await self.tenant.start("short", key=each.key)
            wrong += not (again.is_replay and again.run_id == each.run_id)
        # An admission may be answered 503 if the store's reply is late: its key still has one run.
        await self.tenant.configure(max_concurrent_runs=None)
        told = {each.key for each in fleet.admitted}
        others = {each.key for each in fleet.tries if each.key not in told and each.may_have_run}
        again_for = [await self.tenant.start("short", key=key) for key in sorted(others)]
        return replace(fleet, wrong_replays=wrong, untold=sum(each.is_replay for each in again_for))


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
        document: Any = None
        with suppress(
            msgspec.DecodeError, UnicodeDecodeError
        ):  # not our server's, but that of a proxy before it
            document = msgspec.json.decode(outcome.body)
        told: dict[str, Any] = document if isinstance(document, dict) else {}
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
        body = msgspec.json.encode({**told, "retry_after_ms": None}) if told else outcome.body
        return replace(outcome, headers=headers, body=body)

    async def close(self) -> None:
        await self._inner.close()


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
        figures=figures_of(seen),
        charts=tuple(charts_of(seen)),
        settings=settings,
    )
