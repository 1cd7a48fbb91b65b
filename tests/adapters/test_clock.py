"""The machine's clock and the one that is moved by hand."""

from __future__ import annotations

import asyncio
import time

import pytest

from stanchion.adapters.system import ManualClock, SystemClock
from stanchion.core.model import Instant
from stanchion.ports.clock import Clock


def test_the_machines_time_is_in_milliseconds_since_the_epoch() -> None:
    before = time.time() * 1000
    now = SystemClock().now()
    assert before - 1 <= now <= time.time() * 1000


def test_the_machines_moments_count_while_it_sleeps() -> None:
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    before = time.clock_gettime(clock) * 1000
    moment = SystemClock().moment()
    assert before - 1 <= moment <= time.clock_gettime(clock) * 1000


async def test_the_machines_clock_sleeps() -> None:
    clock: Clock = SystemClock()
    before = clock.moment()
    await clock.sleep(0.02)
    assert clock.moment() - before >= 19


async def test_time_by_hand_stands_still_until_it_is_advanced() -> None:
    clock: ManualClock = ManualClock(Instant(5_000))
    assert (clock.now(), clock.moment()) == (5_000, 0)
    await asyncio.sleep(0)
    assert (clock.now(), clock.moment()) == (5_000, 0)
    clock.advance(250)
    assert (clock.now(), clock.moment()) == (5_250, 250)


def test_time_by_hand_does_not_run_backwards() -> None:
    clock = ManualClock()
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)


def test_a_clock_that_is_set_moves_no_moment() -> None:
    clock = ManualClock(Instant(5_000))
    clock.step(-1_000)
    assert (clock.now(), clock.moment()) == (4_000, 0)
    clock.step(3_000)
    assert (clock.now(), clock.moment()) == (7_000, 0)


async def test_sleepers_wake_when_their_time_has_come_and_in_its_order() -> None:
    clock = ManualClock()
    woken: list[float] = []

    async def sleeper(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(seconds)

    tasks = [asyncio.create_task(sleeper(seconds)) for seconds in (0.3, 0.1, 0.2)]
    await asyncio.sleep(0)
    assert clock.sleepers == 3
    clock.advance(99)
    await asyncio.sleep(0)
    assert woken == []
    clock.advance(101)
    await asyncio.sleep(0)
    assert woken == [0.1, 0.2]
    assert clock.sleepers == 1
    clock.advance(100)
    await asyncio.gather(*tasks)
    assert woken == [0.1, 0.2, 0.3]


async def test_setting_the_clock_wakes_nobody() -> None:
    clock = ManualClock()
    task = asyncio.create_task(clock.sleep(0.1))
    await asyncio.sleep(0)
    clock.step(1_000_000)
    await asyncio.sleep(0)
    assert not task.done()
    clock.advance(100)
    await task


async def test_to_sleep_for_no_time_lets_others_run() -> None:
    clock = ManualClock()
    ran: list[str] = []

    async def other() -> None:
        ran.append("other")

    task = asyncio.create_task(other())
    await clock.sleep(0)
    assert ran == ["other"]
    await task
    await clock.sleep(-1)


async def test_a_sleeper_that_was_cancelled_is_not_waited_for() -> None:
    clock = ManualClock()
    task = asyncio.create_task(clock.sleep(1))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert clock.sleepers == 0
    clock.advance(2_000)
