"""Lanes: callers queue for a thread, wait only so long, and always get an answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from stanchion.adapters.sqlite.thread import ThreadCall, WorkerThread
from stanchion.ports.errors import BackendTimeout, BackendUnavailable

_LONG_S = 10.0


async def test_callers_who_wait_are_served_together() -> None:
    async with _thread() as (thread, book):
        gate = await _occupy(thread)
        calls = [_start(thread, number) for number in range(5)]
        await asyncio.sleep(0)  # they queue up
        gate.set()
        assert await asyncio.gather(*calls) == [0, 1, 2, 3, 4]
    assert book.batches == [1, 5]


async def test_an_idle_thread_is_woken_once_for_all_callers_of_an_iteration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _thread() as (thread, book):
        wakes: list[int] = []
        wake = thread._wake  # noqa: SLF001 - nothing else tells how often

        def count() -> None:
            wakes.append(len(book.batches))
            wake()

        monkeypatch.setattr(thread, "_wake", count)
        for _ in range(3):
            await asyncio.gather(*(_start(thread, number) for number in range(50)))
        assert wakes == [0, 1, 2]
    assert book.batches == [50, 50, 50]


async def test_a_batch_has_a_bound() -> None:
    async with _thread() as (thread, book):
        gate = await _occupy(thread)
        calls = [_start(thread, number) for number in range(1_200)]
        await asyncio.sleep(0)  # they queue up
        gate.set()
        await asyncio.gather(*calls)
    assert book.batches == [1, 512, 512, 176]


async def test_a_caller_waits_no_longer_than_it_said() -> None:
    async with _thread() as (thread, book):
        gate = await _occupy(thread)
        with pytest.raises(BackendTimeout, match=r"book: no answer within 0\.01 s"):
            await thread.call(lambda book: book.write(1), wait_s=0.01)
        gate.set()
    assert book.lines == []


async def test_each_caller_waits_as_long_as_it_said_though_they_share_a_timer() -> None:
    async with _thread() as (thread, book):
        gate = await _occupy(thread)
        waits_s = {"second": 0.02, "first": 0.01, "third": 0.03}
        ended: list[str] = []

        async def wait(name: str, wait_s: float) -> None:
            with pytest.raises(BackendTimeout, match=rf"no answer within {wait_s} s"):
                await thread.call(lambda book: book.write(1), wait_s=wait_s)
            ended.append(name)

        await asyncio.gather(*(wait(name, wait_s) for name, wait_s in waits_s.items()))
        assert ended == ["first", "second", "third"]
        gate.set()
        assert await thread.call(lambda book: book.write(2), wait_s=_LONG_S) == 2
    assert book.lines == [2]


async def test_a_caller_who_was_cancelled_before_its_turn_is_passed_over() -> None:
    async with _thread() as (thread, book):
        gate = await _occupy(thread)
        calls = [_start(thread, number) for number in range(3)]
        await asyncio.sleep(0)  # they queue up
        calls[1].cancel()
        await asyncio.wait([calls[1]])
        gate.set()
        assert await calls[0] == 0
        assert await calls[2] == 2
    assert book.lines == [0, 2]


async def test_a_caller_who_is_cancelled_during_its_turn_does_not_disturb_the_others() -> None:
    async with _thread() as (thread, book):
        first = _start(thread, 1)
        gate = threading.Event()
        begun = threading.Event()

        def slow(book: _Book) -> None:
            begun.set()
            gate.wait(_LONG_S)
            book.write(2)

        cancelled = asyncio.ensure_future(thread.call(slow, wait_s=_LONG_S))
        await asyncio.to_thread(begun.wait, _LONG_S)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        gate.set()
        assert await first == 1
        assert await thread.call(lambda book: book.write(3), wait_s=_LONG_S) == 3
    assert book.lines == [1, 2, 3]


async def test_a_queue_that_is_too_long_turns_new_callers_away() -> None:
    async with _thread(queue_max=2) as (thread, _):
        gate = await _occupy(thread)
        waiting = [_start(thread, number) for number in range(2)]
        await asyncio.sleep(0)  # they queue up
        with pytest.raises(BackendUnavailable, match="book: 2 calls wait already"):
            await thread.call(lambda book: book.write(9), wait_s=_LONG_S)
        gate.set()
        assert await asyncio.gather(*waiting) == [0, 1]
        assert await thread.call(lambda book: book.write(3), wait_s=_LONG_S) == 3


async def test_whoever_breaks_the_serving_breaks_it_for_one_batch() -> None:
    async with _thread() as (thread, book):
        book.is_broken = True
        with pytest.raises(ZeroDivisionError):
            await thread.call(lambda book: book.write(1), wait_s=_LONG_S)
        book.is_broken = False
        assert await thread.call(lambda book: book.write(2), wait_s=_LONG_S) == 2


async def test_closing_serves_all_who_wait_and_then_ends() -> None:
    async with _thread() as (thread, book):
        gate = await _occupy(thread)
        calls = [_start(thread, number) for number in range(3)]
        await asyncio.sleep(0)  # they queue up
        closing = asyncio.ensure_future(thread.close())
        await asyncio.sleep(0)
        with pytest.raises(BackendUnavailable, match="closed"):
            await thread.call(lambda book: book.write(9), wait_s=_LONG_S)
        gate.set()
        await closing
        assert await asyncio.gather(*calls) == [0, 1, 2]
        assert book.is_closed
        await thread.close()


async def test_a_closed_lane_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    async with _thread() as (thread, _):
        assert set(threading.enumerate()) - before
        await thread.close()
        assert not set(threading.enumerate()) - before


async def test_what_cannot_be_made_is_told_to_the_one_who_opens() -> None:
    before = set(threading.enumerate())

    def fail() -> _Book:
        raise BackendUnavailable("no paper")

    with pytest.raises(BackendUnavailable, match="no paper"):
        await WorkerThread.open("book", fail, _serve, _Book.close, queue_max=1)
    assert not [each for each in set(threading.enumerate()) - before if each.is_alive()]


def test_callers_of_a_loop_that_is_gone_do_not_stop_the_lane() -> None:
    """Its answers go nowhere, and the next loop's callers get theirs."""
    book = _Book()
    gate = threading.Event()

    async def leave() -> WorkerThread[_Book]:
        thread = await WorkerThread.open("book", lambda: book, _serve, _Book.close, queue_max=10)
        begun = threading.Event()

        def slow(_: _Book) -> None:
            begun.set()
            gate.wait(_LONG_S)

        call = asyncio.ensure_future(thread.call(slow, wait_s=_LONG_S))
        await asyncio.to_thread(begun.wait, _LONG_S)
        call.cancel()
        return thread

    async def come(thread: WorkerThread[_Book]) -> int:
        gate.set()
        answer = await thread.call(lambda book: book.write(7), wait_s=_LONG_S)
        await thread.close()
        return answer

    assert asyncio.run(come(asyncio.run(leave()))) == 7


class _Book:
    """Something that a thread may own."""

    def __init__(self) -> None:
        self.lines: list[int] = []
        self.batches: list[int] = []
        self.is_broken = False
        self.is_closed = False

    def write(self, line: int) -> int:
        self.lines.append(line)
        return line

    def close(self) -> None:
        self.is_closed = True


def _serve(book: _Book, calls: Sequence[ThreadCall[_Book]]) -> None:
    book.batches.append(len(calls))
    if book.is_broken:
        raise ZeroDivisionError
    for call in calls:
        call.answer(call.act(book))


@asynccontextmanager
async def _thread(queue_max: int = 10_000) -> AsyncIterator[tuple[WorkerThread[_Book], _Book]]:
    book = _Book()
    thread = await WorkerThread.open("book", lambda: book, _serve, _Book.close, queue_max=queue_max)
    yield thread, book
    await thread.close()


async def _occupy(thread: WorkerThread[_Book]) -> threading.Event:
    """Keep the thread's thread busy until the event is set."""
    begun, gate = threading.Event(), threading.Event()

    def occupy(_: _Book) -> None:
        begun.set()
        gate.wait(_LONG_S)

    _occupants.append(asyncio.ensure_future(thread.call(occupy, wait_s=_LONG_S)))
    await asyncio.to_thread(begun.wait, _LONG_S)
    return gate


_occupants: list[asyncio.Task[None]] = []
"""Kept from the garbage collector while they wait."""


def _start(thread: WorkerThread[_Book], line: int) -> asyncio.Task[int]:
    return asyncio.ensure_future(thread.call(lambda book: book.write(line), wait_s=_LONG_S))
