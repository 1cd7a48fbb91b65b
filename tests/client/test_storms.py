"""Many callers at once: what one process sends to a server that cannot answer them.

The peak is counted per 100 ms, over retries alone: that everybody asks once is nobody's policy.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

import pytest

from stanchion.client.async_client import AsyncClient
from stanchion.client.engine import SHARED, Pace, RetryBudgets
from stanchion.client.errors import CallFailed, GaveUpBecause, ServerUnavailable, TenantFull
from stanchion.core.retry import (
    BUDGETS,
    RETRIES,
    Budget,
    Exponential,
    RetryClass,
    RetryPolicy,
)
from stanchion.sim.loop import run
from stanchion.transport.messages import HttpReply, NoReply, Request
from tests.client.scripted import DEAD, PLENTY, URL, Script, away, client, full, now, started


@pytest.mark.parametrize(
    ("answer", "retry_class"),
    [(DEAD, RetryClass.UNAVAILABLE), (away(), RetryClass.UNAVAILABLE), (full(), RetryClass.QUOTA)],
)
def test_a_thousand_callers_send_a_thousand_requests_and_the_budget(
    answer: HttpReply | NoReply, retry_class: RetryClass
) -> None:
    budget = BUDGETS[retry_class]
    script = Script([answer], latency_s=0.005)
    reasons = Counter[GaveUpBecause]()

    async def call(caller: AsyncClient) -> None:
        with pytest.raises((ServerUnavailable, TenantFull)) as caught:
            await caller.start("w")
        reasons[caught.value.gave_up] += 1

    async def main() -> None:
        budgets = RetryBudgets()
        callers = [client(script, seed=seed, budgets=budgets) for seed in range(10)]
        await asyncio.gather(*(call(callers[each % 10]) for each in range(1000)))

    run(main())
    refilled = budget.refill_per_s * (script.times_ms[-1] / 1000)
    assert 1000 + budget.tokens_max <= len(script.requests)
    assert len(script.requests) <= 1000 + budget.tokens_max + refilled
    # Whoever finds the budget spent is told at once, and so is the operator.
    assert reasons[GaveUpBecause.BUDGET_SPENT] > 900


def test_a_storm_of_one_class_leaves_the_other_its_budget() -> None:
    budgets = RetryBudgets({each: Budget(tokens_max=3, refill_per_s=0) for each in RetryClass})
    script = Script([full(), started()])

    async def main() -> None:
        for _ in range(5):
            with pytest.raises(ServerUnavailable):
                await client(Script([DEAD]), sample=0.0, budgets=budgets).start("w")
        assert (await client(script, sample=0.0, budgets=budgets).start("w")).run_id == "r1"

    run(main())
    assert len(script.requests) == 2


def test_a_spent_budget_comes_back_with_time() -> None:
    budgets = RetryBudgets({each: Budget(tokens_max=1, refill_per_s=0.1) for each in RetryClass})

    async def tries() -> int:
        script = Script([DEAD])
        with pytest.raises(ServerUnavailable):
            await client(script, sample=0.0, budgets=budgets).start("w")
        return len(script.requests)

    async def main() -> list[int]:
        made = [await tries(), await tries()]
        await asyncio.sleep(10)
        return [*made, await tries()]

    assert run(main()) == [2, 1, 2]


def test_all_clients_of_a_process_share_one_budget_unless_they_are_given_another() -> None:
    assert Pace().budgets is Pace().budgets is SHARED


# ── Two hundred callers, and a server that comes back ────────────────────────────────────────────

ONE_FOR_ALL = RetryPolicy(
    attempts_max=8,
    total_ms_max=120_000,
    retry_after_ms_max=30_000,
    backoff=Exponential(base_ms=200, cap_ms=10_000, jitter="none"),
    spread=0.0,
)
"""What is often written first: any refusal is tried again, at double the wait or as told."""

JITTERED_FOR_ALL = RetryPolicy(
    attempts_max=8,
    total_ms_max=120_000,
    retry_after_ms_max=30_000,
    backoff=Exponential(base_ms=200, cap_ms=10_000),
    spread=0.0,
)
"""The same with full jitter, but the server's word taken as it is."""


class Recovering:
    """Away for two seconds, then a tenant with a cap of 20 whose runs take a second each.

    It says when to come back in whole seconds, as most servers do: 2 s while it is away, 5 s to
    those it has no slot for.
    """

    def __init__(self) -> None:
        self.retries_at_ms: list[int] = []
        self.started = 0
        self._ends_ms: list[int] = []
        self._seen: set[str] = set()

    async def send(self, request: Request) -> HttpReply | NoReply:
        key = dict(request.headers)["Idempotency-Key"]
        if key in self._seen:
            self.retries_at_ms.append(now())
        self._seen.add(key)
        await asyncio.sleep(0.002)
        if now() < 2000:
            return away(2000)
        self._ends_ms = [end_ms for end_ms in self._ends_ms if end_ms > now()]
        if len(self._ends_ms) >= 20:
            return full(5000)
        self._ends_ms.append(now() + 1000)
        self.started += 1
        return started(key)

    @property
    def peak(self) -> int:
        """Most retries in a tenth of a second."""
        return max(Counter(at_ms // 100 for at_ms in self.retries_at_ms).values())


def storm(
    policies: Mapping[RetryClass, RetryPolicy], budgets: Mapping[RetryClass, Budget], seed: int
) -> Recovering:
    """Two hundred callers, all within the same tenth of a second."""
    server, chance = Recovering(), random.Random(seed)

    async def call(caller: AsyncClient, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        with suppress(CallFailed):
            await caller.start("w")

    async def main() -> None:
        pace = Pace(policies=policies, budgets=RetryBudgets(budgets), now=now, sample=chance.random)
        caller = AsyncClient(URL, pace=pace, transport=server)
        await asyncio.gather(*(call(caller, chance.random() / 10) for _ in range(200)))

    run(main())
    return server


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("habit", [ONE_FOR_ALL, JITTERED_FOR_ALL], ids=["doubling", "jittered"])
def test_split_classes_peak_at_a_third_of_one_policy_for_all(habit: RetryPolicy, seed: int) -> None:
    # Nobody has a budget here: it is the policies that are compared.
    theirs = storm(dict.fromkeys(RetryClass, habit), PLENTY, seed)
    ours = storm(RETRIES, PLENTY, seed)
    assert theirs.peak >= 3 * ours.peak
    assert len(theirs.retries_at_ms) > 1.5 * len(ours.retries_at_ms)


@pytest.mark.parametrize("seed", range(5))
def test_with_its_budgets_a_process_peaks_at_a_tenth(seed: int) -> None:
    theirs = storm(dict.fromkeys(RetryClass, ONE_FOR_ALL), PLENTY, seed)
    ours = storm(RETRIES, BUDGETS, seed)
    assert theirs.peak >= 10 * ours.peak
    assert len(ours.retries_at_ms) <= sum(each.tokens_max for each in BUDGETS.values()) + 2 * 10
