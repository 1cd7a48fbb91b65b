"""Callers of a full tenant share an answer, but never one that was asked for before they came."""

from __future__ import annotations

import asyncio

import pytest

from stanchion.core.admission import Full
from stanchion.core.model import TenantId
from stanchion.core.queue import ANY_PLACE, OnFull, QueueRequest
from stanchion.services.gate_answers import GateFailed, GateFull, QueueOff, RunStarted
from stanchion.services.limiter import FULL_TENANTS_MAX, RefusalQuery, SharedRefusals
from tests.services.faulty_locks import Fault
from tests.services.gatehouse import ACME, Gatehouse, House, tally, virtual

FULL = Full(2, 2)


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
    # The first is asked for itself, the second for all who came meanwhile.
    assert house.store.calls["admit"] == 2
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
async def test_a_key_is_asked_for_by_whoever_has_it(gates: Gatehouse) -> None:
    await gates.define(2)
    house = gates.add()
    mine = await house.started(key="mine")
    await house.started()
    await house.start()
    asking = asyncio.gather(*(house.start() for _ in range(10)))
    replay = await house.start(key="mine")
    assert isinstance(replay, RunStarted)
    assert (replay.run_id, replay.replayed) == (mine, True)
    assert tally(await asking) == {"full": 10}


@virtual
async def test_under_the_lock_everybody_asks(gates: Gatehouse) -> None:
    house = await full_house(gates, "lock")
    assert tally([await house.start() for _ in range(3)]) == {"full": 3}
    assert house.store.calls["admit"] == 3


@virtual
async def test_an_answer_that_fails_is_not_shared(gates: Gatehouse) -> None:
    house = await full_house(gates)
    house.store.script("admit", Fault.NONE, Fault.ERROR)
    answers = await asyncio.gather(*(house.start() for _ in range(10)))
    failed = [answer for answer in answers if isinstance(answer, GateFailed)]
    assert len(failed) == 1
    assert sum(isinstance(answer, GateFull) for answer in answers) == 9
    assert house.store.calls["admit"] == 3


@virtual
async def test_one_who_asks_for_all_and_leaves_takes_nobody_along(gates: Gatehouse) -> None:
    house = await full_house(gates)
    callers = [asyncio.create_task(house.start()) for _ in range(10)]
    await asyncio.sleep(0.0025)  # the first was answered, the second asks for the others
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


# ── The room before a tenant ─────────────────────────────────────────────────────────────────────


async def test_nobody_waits_before_a_tenant_that_is_not_known_to_be_full() -> None:
    fullness = SharedRefusals()
    assert await fullness.enter(ACME) is None
    fullness.heard(ACME, FULL)
    assert fullness.is_full(ACME)
    fullness.heard(ACME, None)
    assert await fullness.enter(ACME) is None


async def test_those_who_come_while_it_is_asked_wait_for_the_next_question() -> None:
    fullness = SharedRefusals()
    fullness.heard(ACME, FULL)
    first = await fullness.enter(ACME)
    assert isinstance(first, RefusalQuery)
    late = [asyncio.create_task(fullness.enter(ACME)) for _ in range(3)]
    await asyncio.sleep(0)
    fullness.close(first, FULL)
    second = await late[0]
    assert isinstance(second, RefusalQuery)
    later = asyncio.create_task(fullness.enter(ACME))
    await asyncio.sleep(0)
    assert not any(task.done() for task in (*late[1:], later))
    fullness.close(second, Full(2, 3))
    assert await late[1] == await late[2] == Full(2, 3)
    assert isinstance(await later, RefusalQuery)


async def test_one_that_leaves_as_it_is_to_ask_leaves_the_question_to_the_next() -> None:
    fullness = SharedRefusals()
    fullness.heard(ACME, FULL)
    first = await fullness.enter(ACME)
    assert isinstance(first, RefusalQuery)
    leaving, other = (asyncio.create_task(fullness.enter(ACME)) for _ in range(2))
    await asyncio.sleep(0)
    fullness.close(first, FULL)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert isinstance(await other, RefusalQuery)


async def test_only_so_many_tenants_are_remembered_and_whoever_waits_is_not_forgotten() -> None:
    fullness = SharedRefusals()
    fullness.heard(ACME, FULL)
    assert isinstance(await fullness.enter(ACME), RefusalQuery)
    waiting = asyncio.create_task(fullness.enter(ACME))
    await asyncio.sleep(0)
    for number in range(FULL_TENANTS_MAX):
        fullness.heard(TenantId(f"t{number}"), FULL)
    assert await waiting is None
    assert not fullness.is_full(ACME)
