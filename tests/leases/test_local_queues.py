"""Doors: one at a time, in order, whoever leaves the line."""

from __future__ import annotations

import asyncio

import pytest

from stanchion.leases.holder import LocalQueues

NAME = "invoice:42"


async def _enter(doors: LocalQueues, wait_s: float = 60.0) -> asyncio.Task[bool]:
    task = asyncio.create_task(doors.enter(NAME, wait_s=wait_s))
    await asyncio.sleep(0)
    return task


async def test_whoever_is_let_in_at_the_moment_of_leaving_lets_the_next_one_in() -> None:
    doors = LocalQueues()
    assert await doors.enter(NAME, wait_s=0)
    second, third = await _enter(doors), await _enter(doors)
    doors.exit(NAME)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert await third
    doors.exit(NAME)
    assert await doors.enter(NAME, wait_s=0)


async def test_a_caller_that_is_cancelled_as_the_holder_leaves_is_told_so() -> None:
    doors = LocalQueues()
    assert await doors.enter(NAME, wait_s=0)
    second, third = await _enter(doors), await _enter(doors)
    second.cancel()
    doors.exit(NAME)
    with pytest.raises(asyncio.CancelledError):
        await second
    assert await third
    fourth = await _enter(doors)
    fourth.cancel()
    doors.exit(NAME)
    with pytest.raises(asyncio.CancelledError):
        await fourth
    assert await doors.enter(NAME, wait_s=0)


async def test_those_who_left_are_not_remembered() -> None:
    doors = LocalQueues()
    assert await doors.enter(NAME, wait_s=0)
    for _ in range(100):
        assert not await doors.enter(NAME, wait_s=0)
        assert not await doors.enter(NAME, wait_s=1e-6)
        (await _enter(doors)).cancel()
    await asyncio.sleep(0)
    lines = doors._queues  # noqa: SLF001 - what it holds on to is not seen outside
    assert len(lines[NAME]) == 0
    doors.exit(NAME)
    assert lines == {}


async def test_names_have_doors_of_their_own() -> None:
    doors = LocalQueues()
    assert await doors.enter("a", wait_s=0)
    assert await doors.enter("b", wait_s=0)
    assert not await doors.enter("a", wait_s=0)
