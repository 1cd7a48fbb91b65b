"""Reads that callers share."""

from __future__ import annotations

import asyncio

import pytest

from stanchion.ports.errors import BackendUnavailable
from stanchion.services.limiter import SingleFlight


class Source:
    """Counts reads. Each ends when it is told to."""

    def __init__(self) -> None:
        self.begun = 0
        self.gate = asyncio.Event()
        self.flights = SingleFlight()

    async def read(self) -> int:
        self.begun += 1
        number = self.begun
        await self.gate.wait()
        return number

    def ask(self, key: str = "key") -> asyncio.Task[int]:
        return asyncio.create_task(self.flights.read(key, self.read))


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_callers_that_ask_together_share_a_read() -> None:
    source = Source()
    asked = [source.ask() for _ in range(10)]
    source.gate.set()
    assert await asyncio.gather(*asked) == [1] * 10


async def test_a_caller_never_gets_a_read_that_began_before_it_asked() -> None:
    source = Source()
    first = source.ask()
    await turns()
    later = [source.ask() for _ in range(10)]
    await turns()
    assert source.begun == 1, "the next begins when this one has ended"
    source.gate.set()
    assert await first == 1
    assert await asyncio.gather(*later) == [2] * 10


async def test_other_keys_do_not_wait() -> None:
    source = Source()
    asked = [source.ask("a"), source.ask("b")]
    await turns()
    assert source.begun == 2
    source.gate.set()
    assert sorted(await asyncio.gather(*asked)) == [1, 2]


async def test_a_caller_that_leaves_does_not_take_the_read_along() -> None:
    source = Source()
    leaving, staying = source.ask(), source.ask()
    await turns()
    leaving.cancel()
    await turns()
    source.gate.set()
    assert await staying == 1


async def test_a_failure_is_everybodys_and_the_next_read_is_a_new_one() -> None:
    source = Source()

    async def fail() -> int:
        raise BackendUnavailable("connection refused")

    asked = [asyncio.create_task(source.flights.read("key", fail)) for _ in range(3)]
    for each in asked:
        with pytest.raises(BackendUnavailable):
            await each
    source.gate.set()
    assert await source.ask() == 1
