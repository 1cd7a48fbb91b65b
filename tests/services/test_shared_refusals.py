"""Callers of a full tenant share an answer, but never one that was asked for before they came."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from stanchion.core.admission import Full, KeyRecord
from stanchion.core.model import RunId, RunStatus, TenantId, WorkflowId
from stanchion.core.queue import ANY_PLACE, OnFull, QueueRequest
from stanchion.ports.records import StartsChecked, StartTerms
from stanchion.services.batch import StartRow
from stanchion.services.gate_answers import GateFailed, GateFull, KeyMismatch, QueueOff, RunStarted
from stanchion.services.limiter import (
    CHECKED_MAX,
    FULL_TENANTS_MAX,
    SharedChecks,
    StartFound,
)
from stanchion.services.plans import UnknownWorkflow
from tests.services.faulty_locks import Fault
from tests.services.gatehouse import ACME, Gatehouse, House, tally, virtual

FULL = Full(2, 2)
TERMS = StartTerms({WorkflowId("plain"): 1})


async def full_house(gates: Gatehouse, strategy: str = "atomic") -> House:
    """A tenant that is full, and a replica that knows it."""
    await gates.define(2)
    house = gates.add(strategy=strategy)
    for _ in range(2):
        await house.started()
    assert isinstance(await house.start(), GateFull)
    house.store.calls.clear()
    return house


@virtual
async def test_a_thousand_callers_of_a_full_tenant_ask_a_few_questions(gates: Gatehouse) -> None:
    house = await full_house(gates)
    answers = await asyncio.gather(*(house.start() for _ in range(1_000)))
    assert all(isinstance(answer, GateFull) for answer in answers)
    assert {(full.limit, full.active) for full in answers if isinstance(full, GateFull)} == {(2, 2)}
    # The first asks for itself, and one question is asked for all who came meanwhile.
    assert house.store.calls["admit"] == 1
    assert house.store.calls["check_starts"] <= 3
    told = {full.retry_after_ms for full in answers if isinstance(full, GateFull)}
    assert len(told) > 100
    counted = house.metric(
        "admission_decisions_total", tenant="acme", workflow="plain", outcome="full"
    )
    assert counted == 1_001


@virtual
async def test_a_start_with_a_wish_of_its_own_gets_an_answer_of_its_own(gates: Gatehouse) -> None:
    house = await full_house(gates)
    wish = QueueRequest(on_full=OnFull.QUEUE)
    answers = await asyncio.gather(
        *(house.start(queue=wish if place % 2 else ANY_PLACE) for place in range(40))
    )
    assert all(isinstance(each, QueueOff) for each in answers[1::2])
    assert all(isinstance(each, GateFull) for each in answers[::2])


@virtual
async def test_whoever_comes_after_a_slot_was_given_back_gets_it(gates: Gatehouse) -> None:
    house = await full_house(gates)
    house.store.each_way_s = 0.010
    early = asyncio.create_task(house.start())
    await asyncio.sleep(0.015)  # the store has said no, and the answer is on its way
    await gates.cancel(house, house.admitted[0][0].id)
    late = await asyncio.gather(*(house.start() for _ in range(5)))
    assert isinstance(await early, GateFull)
    assert tally(late) == {"admitted": 1, "full": 4}


@virtual
async def test_a_known_key_is_replayed_among_a_thousand_new_ones(gates: Gatehouse) -> None:
    await gates.define(2)
    house = gates.add()
    mine = await house.started(key="mine")
    await house.started()
    await house.start()
    house.store.calls.clear()
    asking = asyncio.gather(*(house.start(key=f"new-{each}") for each in range(1_000)))
    replay, other = await asyncio.gather(
        house.start(key="mine"), house.start(key="mine", given={"n": "other"})
    )
    assert isinstance(replay, RunStarted)
    assert (replay.run_id, replay.replayed) == (mine, True)
    assert isinstance(other, KeyMismatch)
    assert tally(await asking) == {"full": 1_000}
    assert house.store.calls["admit"] == 1
    assert house.store.calls["check_starts"] <= 3


def rows_of(count: int, *, key: str = "new") -> list[StartRow]:
    return [StartRow({}, {}, f"{key}-{number}") for number in range(count)]


@virtual
async def test_a_batch_of_a_full_tenant_is_checked_in_one_step(gates: Gatehouse) -> None:
    await gates.define(2)
    house = gates.add()
    mine = await house.started(key="mine")
    await house.started()
    assert isinstance(await house.start(), GateFull)
    house.store.calls.clear()
    wish = QueueRequest(on_full=OnFull.QUEUE)
    rows = rows_of(996)
    rows[7:7] = [
        StartRow({}, {}, "mine"),
        StartRow({"n": 2}, {}, "mine"),
        StartRow({}, {}, "wish", wish),
    ]
    answers = await house.gate.batches.start_many(ACME, WorkflowId("plain"), rows, actor="caller")
    assert answers[7] == RunStarted(mine, RunStatus.RUNNING, replayed=True)
    assert answers[8:10] == [KeyMismatch(), QueueOff()]
    assert tally([*answers[:7], *answers[10:]]) == {"full": 996}
    assert house.store.calls["check_starts"] == 1
    assert house.store.calls["admit_many"] == 0
    counted = house.metric(
        "admission_decisions_total", tenant="acme", workflow="plain", outcome="full"
    )
    assert counted == 997


@virtual
async def test_the_rest_of_a_batch_that_fills_its_tenant_is_checked(gates: Gatehouse) -> None:
    await gates.define(3)
    house = gates.add()
    step = house.store.admissions_max
    answers = await house.gate.batches.start_many(
        ACME, WorkflowId("plain"), rows_of(5 * step)[:1_000], actor="caller"
    )
    assert tally(answers[:3]) == {"admitted": 3}
    assert tally(answers[3:]) == {"full": len(answers) - 3}
    assert house.store.calls["check_starts"] > 0


@virtual
async def test_a_batch_of_a_tenant_with_a_free_slot_again_is_admitted_in_order(
    gates: Gatehouse,
) -> None:
    house = await full_house(gates)
    await gates.cancel(house, house.admitted[0][0].id)
    answers = await house.gate.batches.start_many(
        ACME, WorkflowId("plain"), rows_of(3), actor="caller"
    )
    assert isinstance(answers[0], RunStarted)
    assert tally(answers[1:]) == {"full": 2}
    assert (
        await house.gate.batches.start_many(
            ACME, WorkflowId("gone"), rows_of(2, key="gone"), actor="caller"
        )
        == [UnknownWorkflow(WorkflowId("gone"))] * 2
    )


@virtual
async def test_a_batch_of_a_full_tenant_under_the_lock_is_judged_row_by_row(
    gates: Gatehouse,
) -> None:
    house = await full_house(gates, "lock")
    answers = await house.gate.batches.start_many(
        ACME, WorkflowId("plain"), rows_of(3), actor="caller"
    )
    assert tally(answers) == {"full": 3}
    assert (house.store.calls["check_starts"], house.store.calls["admit_many"]) == (0, 1)


@virtual
async def test_a_batch_whose_check_fails_is_judged_row_by_row(gates: Gatehouse) -> None:
    house = await full_house(gates)
    house.store.script("check_starts", Fault.ERROR)
    answers = await house.gate.batches.start_many(
        ACME, WorkflowId("plain"), rows_of(3), actor="caller"
    )
    assert tally(answers) == {"full": 3}
    assert house.store.calls["admit_many"] == 1


@virtual
async def test_under_the_lock_everybody_asks(gates: Gatehouse) -> None:
    house = await full_house(gates, "lock")
    assert tally([await house.start() for _ in range(3)]) == {"full": 3}
    assert house.store.calls["admit"] == 3


@virtual
async def test_an_answer_that_fails_is_not_shared(gates: Gatehouse) -> None:
    house = await full_house(gates)
    house.store.script("admit", Fault.ERROR)
    house.store.script("check_starts", Fault.ERROR)
    answers = await asyncio.gather(*(house.start() for _ in range(10)))
    failed = [answer for answer in answers if isinstance(answer, GateFailed)]
    assert len(failed) == 1
    assert sum(isinstance(answer, GateFull) for answer in answers) == 9


@virtual
async def test_one_who_asks_for_all_and_leaves_takes_nobody_along(gates: Gatehouse) -> None:
    house = await full_house(gates)
    callers = [asyncio.create_task(house.start()) for _ in range(10)]
    await asyncio.sleep(0.0015)  # the first asks for itself, and the others are asked for
    callers[1].cancel()
    answers = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(answers[1], asyncio.CancelledError)
    assert sum(isinstance(answer, GateFull) for answer in answers) == 9


@virtual
async def test_a_silent_store_holds_nobody_longer_than_the_budget(gates: Gatehouse) -> None:
    house = await full_house(gates)
    house.store.away(Fault.HANG)
    began = gates.clock.moment()
    answers = await asyncio.gather(*(house.start() for _ in range(20)))
    assert all(isinstance(answer, GateFailed) for answer in answers)
    assert gates.clock.moment() - began <= 2_500
    house.store.back()
    assert isinstance(await house.start(), GateFull)


# ── Checks of one tenant ─────────────────────────────────────────────────────────────────────────


class Checked:
    """A store that checks starts when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[StartTerms], list[str]]] = []
        self.answers: asyncio.Queue[StartsChecked | None] = asyncio.Queue()
        self.checks = SharedChecks(self.check)
        self.checks.note_fullness(ACME, is_full=True)

    async def check(
        self, _tenant: TenantId, terms: Sequence[StartTerms], keys: Collection[str]
    ) -> StartsChecked | None:
        self.asked.append(([*terms], [*keys]))
        return await self.answers.get()

    async def callers(self, *keys: str | None) -> list[asyncio.Task[StartFound | None]]:
        tasks = [asyncio.create_task(self.checks.check(ACME, TERMS, key)) for key in keys]
        await turns(3)
        return tasks


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_nobody_waits_before_a_tenant_that_is_not_known_to_be_full() -> None:
    store = Checked()
    assert store.checks.is_full(ACME)
    store.checks.note_fullness(ACME, is_full=False)
    assert not store.checks.is_full(ACME)
    assert await store.checks.check(ACME, TERMS, None) is None
    assert store.asked == []


async def test_those_who_come_while_it_is_asked_share_the_next_question() -> None:
    store = Checked()
    early = await store.callers("a", "a", None)
    assert store.asked == [([TERMS], ["a"])]
    late = await store.callers("b", "known")
    assert len(store.asked) == 1
    store.answers.put_nowait(StartsChecked((FULL,)))
    assert await asyncio.gather(*early) == [StartFound(None, FULL)] * 3
    await turns(3)
    assert store.asked[1:] == [([TERMS], ["b", "known"])]
    assert not any(task.done() for task in late)
    record = KeyRecord("mark", RunId("run"))
    store.answers.put_nowait(StartsChecked((Full(2, 3),), {"known": record}))
    assert await asyncio.gather(*late) == [
        StartFound(None, Full(2, 3)),
        StartFound(record, Full(2, 3)),
    ]
    assert not store.checks.is_under_way(ACME)


async def test_starts_of_different_terms_are_told_their_own_refusal() -> None:
    store = Checked()
    other = StartTerms({WorkflowId("other"): 1})
    asking = [
        asyncio.create_task(store.checks.check(ACME, each, None)) for each in (TERMS, other, TERMS)
    ]
    store.answers.put_nowait(StartsChecked((FULL, None)))
    found = await asyncio.gather(*asking)
    assert [each and each.refused for each in found] == [FULL, None, FULL]


async def test_one_that_leaves_is_not_asked_for_and_takes_nobody_along() -> None:
    store = Checked()
    first = await store.callers("a")
    leaving, staying = await store.callers("b", "c")
    leaving.cancel()
    store.answers.put_nowait(StartsChecked((FULL,)))
    store.answers.put_nowait(StartsChecked((FULL,)))
    assert await staying == StartFound(None, FULL)
    assert store.asked[1:] == [([TERMS], ["c"])]
    assert leaving.cancelled()
    assert first[0].done()


async def test_after_an_admission_or_a_failure_everybody_asks_for_himself() -> None:
    store = Checked()
    under_way = await store.callers("a")
    waiting = await store.callers("b")
    store.checks.note_fullness(ACME, is_full=False)
    assert await waiting[0] is None
    store.answers.put_nowait(None)
    assert await under_way[0] is None


async def test_so_many_are_asked_for_at_once_and_the_rest_after_them() -> None:
    store = Checked()
    callers = await store.callers(*(f"key-{each}" for each in range(CHECKED_MAX + 1)))
    store.answers.put_nowait(StartsChecked((FULL,)))
    store.answers.put_nowait(StartsChecked((FULL,)))
    await asyncio.gather(*callers)
    assert [len(keys) for _, keys in store.asked] == [CHECKED_MAX, 1]


async def test_only_so_many_tenants_are_remembered_and_whoever_waits_is_not_forgotten() -> None:
    store = Checked()
    await store.callers("a")
    waiting = await store.callers("b")
    for number in range(FULL_TENANTS_MAX):
        store.checks.note_fullness(TenantId(f"t{number}"), is_full=True)
    assert await waiting[0] is None
    assert not store.checks.is_full(ACME)
    store.answers.put_nowait(None)
