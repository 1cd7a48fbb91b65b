"""A tenant's callers come to the store so many at a time, and nobody's line is another's."""

from __future__ import annotations

import asyncio

import pytest

from stanchion.core.json_value import JsonObject
from stanchion.core.model import Topic
from stanchion.services.gate_answers import GateFull, RunStarted
from stanchion.services.limiter import AT_ONCE, TenantLimiter
from tests.services.gatehouse import ACME, GLOBEX, Gatehouse, tally, virtual


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def in_line(turnstile: TenantLimiter, *, may_share: bool = True) -> asyncio.Task[bool]:
    task = asyncio.create_task(turnstile.enter(ACME, may_share=may_share))
    await turns(2)
    return task


async def test_so_many_are_inside_and_the_next_waits_for_a_place() -> None:
    turnstile = TenantLimiter(2)
    for _ in range(2):
        assert await turnstile.enter(ACME, may_share=True)
    third = await in_line(turnstile)
    assert not third.done()
    turnstile.leave(ACME)
    assert await third


async def test_whoever_came_first_is_next() -> None:
    turnstile = TenantLimiter(1)
    assert await turnstile.enter(ACME, may_share=True)
    waiting = [await in_line(turnstile) for _ in range(3)]
    for number in range(3):
        turnstile.leave(ACME)
        await turns(2)
        assert [task.done() for task in waiting] == [each <= number for each in range(3)]


async def test_another_tenant_does_not_wait() -> None:
    turnstile = TenantLimiter(1)
    assert await turnstile.enter(ACME, may_share=True)
    assert await asyncio.wait_for(turnstile.enter(GLOBEX, may_share=True), 1)


async def test_only_those_who_may_share_are_sent_away() -> None:
    turnstile = TenantLimiter(1)
    assert await turnstile.enter(ACME, may_share=True)
    keyless = await in_line(turnstile)
    keyed = await in_line(turnstile, may_share=False)
    turnstile.send_away(ACME)
    assert not await keyless
    assert not keyed.done()
    turnstile.leave(ACME)
    assert await keyed


async def test_to_send_away_nobody_is_nothing() -> None:
    TenantLimiter().send_away(ACME)


@pytest.mark.parametrize("let_through", [False, True])
async def test_a_caller_who_leaves_takes_no_place_along(let_through: bool) -> None:
    turnstile = TenantLimiter(1)
    assert await turnstile.enter(ACME, may_share=True)
    leaving = await in_line(turnstile)
    staying = await in_line(turnstile)
    if let_through:
        turnstile.leave(ACME)
    leaving.cancel()
    await turns(2)
    assert leaving.cancelled()
    if not let_through:
        turnstile.leave(ACME)
    assert await asyncio.wait_for(staying, 1)


@virtual
async def test_a_thousand_callers_of_a_tenant_nobody_knows_ask_a_few_questions(
    gates: Gatehouse,
) -> None:
    await gates.define(2)
    house = gates.add()
    house.store.each_way_s = 0.010
    answers = await asyncio.gather(*(house.start() for _ in range(1_000)))
    assert tally(answers) == {"admitted": 2, "full": 998}
    # Those who are let through ask for themselves, the rest shares.
    assert house.store.calls["admit"] < 100


@virtual
async def test_a_thousand_callers_with_keys_ask_a_few_questions(gates: Gatehouse) -> None:
    await gates.define(2)
    house = gates.add()
    house.store.each_way_s = 0.001
    answers = await asyncio.gather(*(house.start(key=f"key-{each}") for each in range(1_000)))
    assert tally(answers) == {"admitted": 2, "full": 998}
    assert house.store.calls["admit"] < 2 * AT_ONCE
    assert house.store.calls["check_starts"] <= 3


@virtual
async def test_a_quiet_tenant_finds_a_few_of_the_loud_one_before_it(gates: Gatehouse) -> None:
    await gates.define(None)
    await gates.define(None, tenant=GLOBEX)
    house = gates.add()
    house.are_short = False
    for tenant in (ACME, GLOBEX):
        await house.started(tenant=tenant)  # what is asked from now on is asked by starts
    house.store.calls.clear()
    house.store.each_way_s = 0.010
    crowd = [asyncio.create_task(house.start()) for _ in range(1_000)]
    await turns(20)
    assert house.store.calls["admit"] == AT_ONCE
    assert isinstance(await house.start(tenant=GLOBEX), RunStarted)
    assert house.store.calls["admit"] <= 2 * AT_ONCE + 1
    assert tally(await asyncio.gather(*crowd)) == {"admitted": 1_000}


@virtual
async def test_admissions_that_write_much_come_to_the_store_one_at_a_time(
    gates: Gatehouse,
) -> None:
    for tenant in (ACME, GLOBEX):
        await gates.define(None, tenant=tenant)
    house = gates.add()
    house.are_short = False
    for tenant in (ACME, GLOBEX):
        await house.started(tenant=tenant)  # what is asked from now on is asked by starts
    house.store.calls.clear()
    house.store.each_way_s = 0.010
    large: JsonObject = {"doc": "x" * 200_000}
    crowd = [asyncio.create_task(house.start(given=large)) for _ in range(10)]
    await turns(20)
    assert house.store.calls["admit"] == 1
    # Neither a short one nor another tenant's waits for them.
    others = await asyncio.gather(house.start(), house.start(tenant=GLOBEX, given=large))
    assert tally(others) == {"admitted": 2}
    assert house.store.calls["admit"] <= 4
    assert tally(await asyncio.gather(*crowd)) == {"admitted": 10}


@virtual
async def test_jobs_that_are_submitted_take_their_turn_as_well(gates: Gatehouse) -> None:
    house = gates.add()
    house.store.each_way_s = 0.010
    crowd = [
        asyncio.create_task(
            house.gate.submit(ACME, Topic("work"), {"n": each}, key=None, actor="caller")
        )
        for each in range(3 * AT_ONCE)
    ]
    await turns(20)
    assert house.store.calls["admit"] == AT_ONCE
    assert all(isinstance(answer, RunStarted) for answer in await asyncio.gather(*crowd))


@virtual
async def test_a_caller_in_the_line_is_told_in_time_that_the_store_is_away(
    gates: Gatehouse,
) -> None:
    await gates.define(None)
    house = gates.add()
    house.store.each_way_s = 30.0
    answers = await asyncio.gather(*(house.start() for _ in range(3 * AT_ONCE)))
    assert set(tally(answers)) == {"gate_unavailable"}
    house.store.each_way_s = 0.0
    assert isinstance(await house.start(), RunStarted)


@virtual
async def test_callers_that_hang_up_while_they_gather_give_their_places_back(
    gates: Gatehouse,
) -> None:
    await gates.define(None)
    house = gates.add()
    await house.started()
    house.store.each_way_s = 1.0
    crowd = [asyncio.create_task(house.start()) for _ in range(2 * AT_ONCE)]
    await turns(20)
    for each in crowd:
        each.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    house.store.each_way_s = 0.001
    answers = await asyncio.gather(*(house.start() for _ in range(2 * AT_ONCE)))
    assert tally(answers) == {"admitted": 2 * AT_ONCE}


@pytest.mark.parametrize("key", [None, "key"])
@virtual
async def test_callers_that_hang_up_give_their_places_back(
    gates: Gatehouse, key: str | None
) -> None:
    await gates.define(None)
    house = gates.add()
    house.are_short = False
    await house.started()
    house.store.calls.clear()
    house.store.each_way_s = 1.0
    crowd = [
        asyncio.create_task(house.start(key=key and f"{key}-{each}")) for each in range(2 * AT_ONCE)
    ]
    await turns(20)
    assert house.store.calls["admit"] == AT_ONCE, "the others wait for a place"
    for caller in crowd:
        caller.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    house.store.each_way_s = 0.001
    again = await asyncio.gather(*(house.start() for _ in range(AT_ONCE)))
    assert tally(again) == {"admitted": AT_ONCE}


@virtual
async def test_a_full_tenant_whose_crowd_was_sent_away_fills_up_again(gates: Gatehouse) -> None:
    await gates.define(1)
    house = gates.add()
    house.store.each_way_s = 0.010
    first = await asyncio.gather(*(house.start() for _ in range(200)))
    assert tally(first) == {"admitted": 1, "full": 199}
    await gates.cancel(house, house.admitted[0][0].id)
    again = await asyncio.gather(*(house.start() for _ in range(200)))
    assert tally(again) == {"admitted": 1, "full": 199}
    assert isinstance(await house.start(), GateFull)
