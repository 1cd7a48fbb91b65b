"""Processes of the simulated world: they stand still, and they die without a word."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from stanchion.sim.loop import NothingLeft, Process, VirtualLoop


def played(main: Coroutine[Any, Any, None]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(main)
    finally:
        loop.dissolve()


def resume(process: Process) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.resume(process)


def test_a_process_that_stands_still_runs_no_timer() -> None:
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            await asyncio.sleep(1)
            ticks.append(asyncio.get_running_loop().time())

    async def main() -> None:
        process = Process("one")
        process.begin(tick())
        await asyncio.sleep(2.5)
        process.pause()
        await asyncio.sleep(10)
        assert ticks == [1, 2]
        resume(process)
        await asyncio.sleep(1.5)
        assert ticks == [1, 2, 12.5, 13.5]

    played(main())


def test_what_a_paused_process_is_told_reaches_it_when_it_goes_on() -> None:
    heard: list[str] = []

    async def listen(news: asyncio.Future[str]) -> None:
        heard.append(await news)

    async def main() -> None:
        process = Process("one")
        news: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        process.begin(listen(news))
        await asyncio.sleep(1)
        process.pause()
        news.set_result("news")
        await asyncio.sleep(1)
        assert heard == []
        resume(process)
        await asyncio.sleep(0.1)
        assert heard == ["news"]

    played(main())


def test_a_timer_that_is_cancelled_by_what_came_first_does_not_run() -> None:
    ran: list[str] = []

    async def main() -> None:
        process = Process("one")
        timer = process.later(2, ran.append, "timer")
        process.later(1, timer.cancel)
        process.pause()
        await asyncio.sleep(3)
        resume(process)
        await asyncio.sleep(1)
        assert ran == []

    played(main())


def test_other_processes_go_on_meanwhile() -> None:
    ran: list[str] = []

    async def main() -> None:
        one, two = Process("one"), Process("two")
        one.pause()
        one.later(1, ran.append, "one")
        two.later(1, ran.append, "two")
        await asyncio.sleep(2)
        assert ran == ["two"]

    played(main())


def test_a_dead_process_says_no_last_word() -> None:
    said: list[str] = []

    async def speak() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            said.append("a last word")

    async def main() -> None:
        process = Process("one")
        process.begin(speak())
        await asyncio.sleep(1)
        process.kill()
        await asyncio.sleep(100)
        assert said == []

    played(main())


def test_what_goes_on_and_on_without_time_passing_is_found_out() -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110 - the mistake that is to be found
            await asyncio.sleep(0)

    loop = VirtualLoop()
    with pytest.raises(NothingLeft, match="no time passes"):
        loop.run_until_complete(main())
    loop.dissolve()
