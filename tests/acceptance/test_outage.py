"""Servers behind the server that go away for three seconds under load, and come back.

Nothing is lost, nothing becomes a dead letter, and ten seconds after the return all is well.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Final

import pytest

from tests.acceptance.caller import Caller, calling
from tests.acceptance.load import Load
from tests.acceptance.stack import Kind, Stack, running_stack
from tests.servers import NatsServer, Server

AWAY_S = 3.0
AWAY_LONG_S = 30.0
RECOVERED_S = 10.0


@pytest.fixture(scope="module")
def shaken() -> Iterator[Stack]:
    with running_stack(Kind.REPLICAS, has_own_locks=True) as stack:
        yield stack


@pytest.fixture
async def tenant(shaken: Stack) -> AsyncIterator[Caller]:
    async with calling(shaken.urls) as caller:
        yield caller


@contextlib.asynccontextmanager
async def _paused(server: Server | NatsServer) -> AsyncIterator[None]:
    """It takes what is sent and says nothing."""
    server.pause()
    try:
        yield
    finally:
        server.resume()


@contextlib.asynccontextmanager
async def _gone(stack: Stack) -> AsyncIterator[None]:
    """Nobody is there, and what comes back has its data."""
    stack.nats.kill()
    try:
        yield
    finally:
        await asyncio.to_thread(stack.nats.start)


OUTAGES: Final[Mapping[str, Callable[[Stack], AbstractAsyncContextManager[None]]]] = {
    "bus": lambda stack: _paused(stack.nats),
    "bus-gone": _gone,
    "store": lambda stack: _paused(stack.valkey),
    "locks": lambda stack: _paused(stack.locks),
}
EVERY_ONE = pytest.mark.parametrize("outage", list(OUTAGES))


@EVERY_ONE
async def test_an_outage_loses_nothing(shaken: Stack, tenant: Caller, outage: str) -> None:
    await _away(shaken, tenant, outage, AWAY_S)


@pytest.mark.chaos
@EVERY_ONE
async def test_a_long_outage_loses_nothing(shaken: Stack, tenant: Caller, outage: str) -> None:
    await _away(shaken, tenant, outage, AWAY_LONG_S)


async def _away(stack: Stack, caller: Caller, outage: str, away_s: float) -> None:
    load = Load(caller)
    await load.begin()
    try:
        await load.more(20)
        async with OUTAGES[outage](stack):
            began = time.monotonic()
            if outage != "store":
                # Neither the bell nor the locks are needed for runs of standard risk to finish.
                await load.more(20)
                latest = list(load.runs.values())[-1]
                assert (await caller.finished(latest))["status"] == "succeeded"
            await asyncio.sleep(max(0.0, began + away_s - time.monotonic()))
        returned = time.monotonic()
        await load.more(20, within_s=RECOVERED_S)
        await load.end(within_s=RECOVERED_S)
        assert time.monotonic() - returned < RECOVERED_S
    finally:
        await load.stop()
    await load.check()
