"""After the end of a simulated world, nothing happens any more, and nobody minds."""

from __future__ import annotations

import asyncio
import threading

import pytest

from stanchion.sim import loop


def test_whoever_is_thrown_away_after_the_end_wakes_nobody() -> None:
    woken: list[object] = []

    async def main() -> asyncio.Future[None]:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.add_done_callback(woken.append)
        return waiting

    loop.run(main()).set_result(None)
    assert woken == []


def test_callbacks_from_threads_run_like_others() -> None:
    ran: list[str] = []

    async def main() -> None:
        running = asyncio.get_running_loop()
        running.call_soon_threadsafe(ran.append, "from a thread")
        await asyncio.sleep(0)

    loop.run(main())
    assert ran == ["from a thread"]


def test_the_work_of_a_thread_ends_at_the_same_virtual_time_always() -> None:
    async def main() -> tuple[int, float]:
        thread = await asyncio.to_thread(threading.get_ident)
        return thread, asyncio.get_running_loop().time()

    first, second = loop.run(main()), loop.run(main())
    assert first == second
    assert first[0] == threading.get_ident()
    assert first[1] > 0


def test_the_work_of_a_thread_raises_its_error_to_its_caller() -> None:
    def fail() -> None:
        raise ValueError("of the work")

    with pytest.raises(ValueError, match="of the work"):
        loop.run(asyncio.to_thread(fail))
