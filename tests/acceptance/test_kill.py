"""Replicas that are killed, or sleep, under load: every admitted run finishes, once.

Embedded, the one server is started again on the same file. With replicas, the other one goes on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.acceptance.caller import Caller, calling
from tests.acceptance.load import Load
from tests.acceptance.stack import RUN_TTL_S, Kind, Stack, running_stack
from tests.acceptance.waiting import until

ROUNDS = 3
ROUNDS_OF_CHAOS = 30
RECOVERED_S = 15.0
"""The dead one's leases run out within three seconds; the rest is for looking."""
ON_TWO = pytest.mark.parametrize("killed", [Kind.SQLITE, Kind.REPLICAS], indirect=True, ids=str)


@pytest.fixture(scope="module")
def killed(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with running_stack(request.param) as stack:
        yield stack


@pytest.fixture
async def tenant(killed: Stack) -> AsyncIterator[Caller]:
    async with calling(killed.urls) as caller:
        yield caller


@ON_TWO
async def test_every_admitted_run_finishes_exactly_once(killed: Stack, tenant: Caller) -> None:
    await _rounds(killed, tenant, ROUNDS, random.Random(7))


@pytest.mark.chaos
@ON_TWO
async def test_every_admitted_run_finishes_exactly_once_in_many_rounds(
    killed: Stack, tenant: Caller
) -> None:
    await _rounds(killed, tenant, ROUNDS_OF_CHAOS, random.Random(8))


@pytest.mark.parametrize("killed", [Kind.REPLICAS], indirect=True, ids=str)
async def test_c4_a_replica_that_sleeps_past_its_leases_changes_nothing_when_it_wakes(
    killed: Stack, tenant: Caller
) -> None:
    load = Load(tenant, callers=12)
    await load.begin(cap=40)
    try:
        for number in (0, 1):
            await load.more(30)
            sleeper = killed.replicas[number]
            sleeper.pause()
            try:
                # By the end of this its leases are others', and their work is done.
                await asyncio.sleep(RUN_TTL_S * 1.3)
            finally:
                sleeper.resume()
        await load.more(10)
        await load.end()
    finally:
        await load.stop()
    await load.check()


async def _rounds(stack: Stack, caller: Caller, rounds: int, chance: random.Random) -> None:
    load = Load(caller, callers=12)
    await load.begin(cap=40)
    try:
        for number in range(rounds):
            await load.more(chance.randint(20, 40))
            await asyncio.sleep(chance.uniform(0.0, 0.1))
            killed = number % len(stack.replicas)
            stack.replicas[killed].kill()
            if len(stack.replicas) > 1:
                # The other one goes on by itself, also with what the dead one had in its hands.
                await _recovers(caller.at(killed - 1))
            await asyncio.to_thread(stack.replicas[killed].start)
        await load.more(10)
        await load.end()
    finally:
        await load.stop()
    await load.check()


async def _recovers(caller: Caller) -> None:
    left = {run["run_id"] for run in await caller.unfinished()}

    async def all_have_ended() -> bool:
        left.intersection_update(run["run_id"] for run in await caller.unfinished())
        return not left

    await until(all_have_ended, within_s=RECOVERED_S)
