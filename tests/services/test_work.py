"""A tenant's processor time is charged to it, and a tenant over its share is refused."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from stanchion.adapters.system import ManualClock
from stanchion.core.events import Started
from stanchion.core.model import Instant, Run, RunId, StepId, TenantId, Topic, WorkflowId
from stanchion.core.plan import Plan
from stanchion.core.run import decide
from stanchion.core.workflow import ForEachSpec, JobSpec, Workflow
from stanchion.services import work as module
from stanchion.services.signals import TenantLabels
from stanchion.services.work import (
    Deadlines,
    Decider,
    Stopwatch,
    TenantExecutor,
    TenantOverloaded,
    TenantWorkBudget,
)
from tests.core.world import planned
from tests.services.seeded import SeededEntropy

ACME = TenantId("acme")
GLOBEX = TenantId("globex")


class Bench:
    """A budget whose time and processor are set by hand."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.registry = CollectorRegistry()
        self.processor_s = 0.0
        self.budget = TenantWorkBudget(
            self.registry,
            clock=self.clock,
            entropy=SeededEntropy(1),
            labels=TenantLabels(limit=1),
            stopwatch=Stopwatch(
                processor_s=lambda: self.processor_s, wall_s=lambda: self.processor_s
            ),
        )

    def metric(self, name: str, tenant: str) -> float | None:
        return self.registry.get_sample_value(
            f"stanchion_tenant_work_{name}_total", {"tenant": tenant}
        )


def test_a_tenant_over_its_share_is_refused_until_it_has_recovered() -> None:
    bench = Bench()
    bench.budget.check(ACME)
    bench.budget.charge(ACME, 1.0)
    bench.budget.check(ACME)
    bench.budget.charge(ACME, 0.5)
    with pytest.raises(TenantOverloaded) as refused:
        bench.budget.check(ACME)
    assert 2_000 <= refused.value.retry_after_ms <= 2_500
    bench.budget.check(GLOBEX)
    bench.clock.advance(refused.value.retry_after_ms)
    bench.budget.check(ACME)


def test_short_pieces_of_work_are_added_up_and_none_is_lost() -> None:
    bench = Bench()
    for _ in range(10_000):
        bench.budget.charge(ACME, 0.000_3)
    assert bench.metric("seconds", "acme") == pytest.approx(3.0, abs=0.001)
    with pytest.raises(TenantOverloaded):
        bench.budget.check(ACME)
    bench.budget.charge(ACME, 0.000_1)  # over its share, at once
    assert bench.metric("seconds", "acme") == pytest.approx(3.0001, abs=0.000_01)


@pytest.fixture
def _usual_turns() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.002)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.usefixtures("_usual_turns")
def test_threads_take_short_turns_until_a_while_after_the_last_refusal() -> None:
    bench = Bench()
    bench.budget.charge(ACME, 10.0)
    for _ in range(2):
        with pytest.raises(TenantOverloaded):
            bench.budget.check(ACME)
        assert sys.getswitchinterval() == pytest.approx(0.0001)
        bench.clock.advance(200)
        bench.budget.charge(GLOBEX, 0.001)
        assert sys.getswitchinterval() == pytest.approx(0.0001)
    bench.clock.advance(100)
    bench.budget.charge(GLOBEX, 0.001)
    assert sys.getswitchinterval() == pytest.approx(0.002)


@pytest.mark.usefixtures("_usual_turns")
async def test_threads_take_short_turns_while_long_work_is_done() -> None:
    bench = Bench()
    executor = TenantExecutor(bench.budget)
    try:
        turns_s = await executor.run(ACME, sys.getswitchinterval)
    finally:
        executor.close()
    assert turns_s == pytest.approx(0.0001)


@pytest.mark.usefixtures("_usual_turns")
def test_threads_take_short_turns_during_a_batch_and_no_longer() -> None:
    bench = Bench()
    with bench.budget.short_turns():
        with bench.budget.short_turns():
            bench.clock.advance(5_000)
            bench.budget.charge(GLOBEX, 0.001)
        assert sys.getswitchinterval() == pytest.approx(0.0001)
    assert sys.getswitchinterval() == pytest.approx(0.002)
    bench.budget.charge(ACME, 10.0)
    with bench.budget.short_turns(), pytest.raises(TenantOverloaded):
        bench.budget.check(ACME)
    assert sys.getswitchinterval() == pytest.approx(0.0001)
    bench.clock.advance(300)
    bench.budget.charge(GLOBEX, 0.001)
    assert sys.getswitchinterval() == pytest.approx(0.002)


@pytest.mark.usefixtures("_usual_turns")
async def test_turns_stay_short_until_the_last_long_call_has_ended() -> None:
    bench = Bench()
    executor = TenantExecutor(bench.budget)
    is_over = threading.Event()
    try:
        calls = [asyncio.ensure_future(executor.run(each, is_over.wait)) for each in (ACME, GLOBEX)]
        await asyncio.sleep(0)
        bench.clock.advance(5_000)
        bench.budget.charge(GLOBEX, 0.001)
        assert sys.getswitchinterval() == pytest.approx(0.0001)
        is_over.set()
        await asyncio.gather(*calls)
    finally:
        is_over.set()
        executor.close()
    bench.clock.advance(1_100)
    bench.budget.charge(GLOBEX, 0.001)
    assert sys.getswitchinterval() == pytest.approx(0.002)


def test_work_is_measured_and_charged_also_when_it_fails() -> None:
    bench = Bench()

    def work() -> None:
        with bench.budget.measured(ACME):
            bench.processor_s += 3
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert bench.metric("seconds", "acme") == 3
    with pytest.raises(TenantOverloaded):
        bench.budget.check(ACME)
    assert bench.metric("refusals", "acme") == 1


@pytest.mark.parametrize(("seconds", "order"), [(0.001, "work other"), (0.1, "other work")])
async def test_after_a_long_piece_of_work_others_have_their_turn(
    seconds: float, order: str
) -> None:
    bench = Bench()
    heard: list[str] = []

    def work() -> int:
        asyncio.get_running_loop().call_soon(heard.append, "other")
        bench.processor_s += seconds
        return 7

    assert await bench.budget.done(ACME, work) == 7
    heard.append("work")
    await asyncio.sleep(0)
    assert heard == order.split()
    assert bench.metric("seconds", "acme") == pytest.approx(seconds)


async def test_work_on_many_items_is_done_in_pieces_and_charged() -> None:
    bench = Bench()
    bench.processor_s = 100.0
    heard: list[str] = []

    def work(item: int) -> int:
        heard.append(f"item {item}")
        asyncio.get_running_loop().call_soon(heard.append, f"other {item}")
        bench.processor_s += 0.000_4
        return -item

    assert await bench.budget.done_each(ACME, work, range(5)) == [0, -1, -2, -3, -4]
    # Others have their turn after a millisecond of work.
    assert heard == [
        *("item 0", "item 1", "item 2", "other 0", "other 1", "other 2"),
        *("item 3", "item 4"),
    ]
    charged = bench.budget.charge
    charged(ACME, 1.0)  # what is too short to be counted alone is counted with the next piece
    assert bench.metric("seconds", "acme") == pytest.approx(1.0 + 5 * 0.000_4)


class Times:
    """A stopwatch whose two clocks are set by hand."""

    def __init__(self) -> None:
        self.wall_s, self.processor_s, self.readings = 100.0, 50.0, 0
        self.watch = Stopwatch(processor_s=self._read, wall_s=lambda: self.wall_s)

    def _read(self) -> float:
        self.readings += 1
        return self.processor_s

    def piece(self, wall_s: float, processor_s: float) -> float:
        begun_s = self.wall_s
        self.wall_s += wall_s
        self.processor_s += processor_s
        return self.watch.since(begun_s)


def test_short_pieces_of_work_are_measured_without_a_system_call_each() -> None:
    times = Times()
    spent = [times.piece(0.000_1, 0.000_1) for _ in range(1_000)]
    assert sum(spent) == pytest.approx(0.1)
    assert times.readings <= 0.1 / 0.005 + 1


def test_a_piece_that_was_interrupted_counts_what_the_thread_used() -> None:
    times = Times()
    times.piece(0.000_1, 0.000_1)
    assert times.piece(0.400, 0.020) == pytest.approx(0.020)
    times.wall_s += 60  # idle
    assert times.piece(0.400, 0.030) == pytest.approx(0.030)
    assert times.piece(0.010, 0.010) == pytest.approx(0.010)


def test_the_first_piece_that_was_interrupted_counts_what_the_thread_used() -> None:
    assert Times().piece(1.500, 0.020) == pytest.approx(0.020)


def test_nobody_is_told_to_wait_longer_than_half_a_minute() -> None:
    bench = Bench()
    bench.budget.charge(ACME, 1e9)
    with pytest.raises(TenantOverloaded) as refused:
        bench.budget.check(ACME)
    assert refused.value.retry_after_ms == 30_000
    bench.clock.advance(30_001)
    bench.budget.check(ACME)


def test_only_so_many_tenants_are_remembered_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TENANTS_MAX", 2)
    bench = Bench()
    for name in ("one", "two", "one", "three"):
        bench.budget.charge(TenantId(name), 10)
    bench.budget.check(TenantId("two"))  # the one that was charged longest ago
    for name in ("one", "three"):
        with pytest.raises(TenantOverloaded):
            bench.budget.check(TenantId(name))
    assert bench.metric("seconds", "one") == 20
    assert bench.metric("seconds", "other") == 20


# ── Turns at the worker thread ───────────────────────────────────────────────────────────────────


class Held:
    """A call that keeps the thread until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.go_on.wait(10)
        return "done"


async def test_tenants_take_turns_at_the_worker_thread() -> None:
    executor = TenantExecutor(Bench().budget)
    held, order = Held(), list[str]()
    first = asyncio.create_task(executor.run(ACME, held))
    await asyncio.to_thread(held.begun.wait, 10)
    calls = [
        asyncio.create_task(executor.run(tenant, partial(order.append, name)))
        for tenant, name in [(ACME, "a1"), (ACME, "a2"), (ACME, "a3"), (GLOBEX, "g1")]
    ]
    await asyncio.sleep(0)
    held.go_on.set()
    assert await first == "done"
    await asyncio.gather(*calls)
    assert order == ["a1", "g1", "a2", "a3"]
    executor.close()


async def test_a_tenant_with_many_calls_is_refused_and_another_is_not() -> None:
    executor = TenantExecutor(Bench().budget, waiting_max=2)
    held = Held()
    first = asyncio.create_task(executor.run(ACME, held))
    await asyncio.to_thread(held.begun.wait, 10)
    waiting = [asyncio.create_task(executor.run(ACME, int)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(TenantOverloaded) as refused:
        await executor.run(ACME, int)
    assert 1_000 <= refused.value.retry_after_ms <= 1_250
    needed = asyncio.create_task(executor.run(ACME, int, may_refuse=False))
    other = asyncio.create_task(executor.run(GLOBEX, int))
    held.go_on.set()
    await asyncio.gather(first, needed, other, *waiting)
    executor.close()


async def test_work_in_the_thread_is_charged_also_when_it_fails_or_its_caller_left() -> None:
    bench = Bench()
    executor = TenantExecutor(bench.budget)

    def failing() -> None:
        bench.processor_s += 0.5
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await executor.run(ACME, failing)
    assert bench.metric("seconds", "acme") == 0.5
    held = Held()
    leaving = asyncio.create_task(executor.run(ACME, held))
    gone = asyncio.create_task(executor.run(ACME, failing))
    await asyncio.to_thread(held.begun.wait, 10)
    leaving.cancel()
    gone.cancel()
    bench.processor_s += 1
    held.go_on.set()
    assert await executor.run(GLOBEX, lambda: "next") == "next"
    assert bench.metric("seconds", "acme") == 1.5
    with pytest.raises(TenantOverloaded):
        await executor.run(ACME, int)
    assert await executor.run(ACME, int, may_refuse=False) == 0
    executor.close()


# ── Decisions ────────────────────────────────────────────────────────────────────────────────────

COSTLY = "input.a.exists(x, input.a.exists(y, x + y == -1))"


def started(items: int) -> tuple[Plan, Run]:
    """A run with a condition that compares every item with every other one."""
    spec = JobSpec(topic=Topic("work"), when=COSTLY)
    plan = planned(Workflow(id=WorkflowId("w"), steps={StepId("only"): spec}))
    run = Run(
        id=RunId("run"),
        tenant=ACME,
        workflow_id=plan.workflow_id,
        workflow_version=1,
        input={"a": [1] * items},
        created_at=Instant(0),
    )
    return plan, run


class SpyExecutor(TenantExecutor):
    """Counts what it is given."""

    calls = 0

    async def run(
        self, tenant: TenantId, work: Callable[[], Any], *, may_refuse: bool = True
    ) -> Any:  # noqa: ANN401 - whatever the work gives
        self.calls += 1
        return await super().run(tenant, work, may_refuse=may_refuse)


@pytest.mark.parametrize(("items", "off_loop"), [(10, 0), (100, 1)])
async def test_only_a_long_decision_leaves_the_event_loop_and_both_come_to_the_same(
    items: int, off_loop: int
) -> None:
    bench = Bench()
    executor = SpyExecutor(bench.budget)
    plan, run = started(items)
    event = Started(actor="caller")
    transition = await Decider(bench.budget, executor).decide(plan, run, [event], Instant(5))
    assert executor.calls == off_loop
    assert transition == decide(plan, run, event, Instant(5))
    assert transition == await Decider(bench.budget, None).decide(plan, run, [event], Instant(5))
    executor.close()


async def test_a_wide_for_each_begins_off_the_event_loop() -> None:
    bench = Bench()
    executor = SpyExecutor(bench.budget)
    spec = ForEachSpec(topic=Topic("work"), for_each="${input.a}", input="${item}")
    plan = planned(Workflow(id=WorkflowId("w"), steps={StepId("each"): spec}))
    _, run = started(10_000)
    event = Started(actor="caller")
    transition = await Decider(bench.budget, executor).decide(plan, run, [event], Instant(5))
    assert executor.calls == 1
    assert len(transition.items) == 10_000
    spent_s = bench.metric("seconds", "acme")
    assert spent_s == pytest.approx(len(transition.effects) * 15e-6)  # what the store has to write
    executor.close()


async def test_starts_of_a_plan_are_as_if_each_was_decided() -> None:
    decider = Decider(Bench().budget, None)
    spec = JobSpec(topic=Topic("work"), input={"n": "${input.n}"}, timeout_s=9.0)
    plan = planned(Workflow(id=WorkflowId("w"), steps={StepId("one"): spec}))
    _, model = started(1)
    for number, (tenant, actor) in enumerate([(ACME, "a"), (ACME, "a"), (GLOBEX, "b")]):
        run = replace(
            model,
            id=RunId(f"r{number}"),
            tenant=tenant,
            input={"n": number},
            created_at=Instant(5 + 3 * number),
        )
        began = Started(actor=actor)
        transition = await decider.decide_start(plan, run, began)
        assert transition == decide(plan, run, began, run.created_at)
    # What a rerun keeps is in its first transition as well.
    again = replace(model, rerun_of=RunId("r0"))
    transition = await decider.decide_start(plan, again, Started(actor="a"))
    assert transition == decide(plan, again, Started(actor="a"), again.created_at)


async def test_every_decision_of_a_tenant_over_its_share_leaves_the_event_loop() -> None:
    bench = Bench()
    executor = SpyExecutor(bench.budget)
    plan, run = started(1)
    decider = Decider(bench.budget, executor)
    await decider.decide(plan, run, [Started(actor="caller")], Instant(5))
    assert executor.calls == 0
    bench.budget.charge(ACME, 5)
    await decider.decide(plan, run, [Started(actor="caller")], Instant(5))
    assert executor.calls == 1
    executor.close()


async def test_deadlines_that_were_begun_end_also_after_the_close() -> None:
    deadlines = Deadlines(sweep_s=0.01)
    deadline = deadlines.begin(0.02)
    deadlines.close()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(5)
    assert deadline.is_why()
