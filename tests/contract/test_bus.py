"""What every bus promises. Calls: at most one a run, again until it is answered. Bells: at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from typing import NoReturn

import pytest

from stanchion.ports.bus import Ack, Bell, Bus, Dead, Retry
from stanchion.ports.errors import BackendError
from stanchion.ports.records import OutboxRow
from tests.contract.buses import (
    BusStage,
    Desk,
    LocalStage,
    NatsStage,
    consuming,
    row,
    rows,
    until_pending,
)
from tests.servers import NatsServer, running_nats


@pytest.fixture(scope="module")
def nats_server() -> Iterator[NatsServer]:
    with running_nats() as server:
        yield server


@pytest.fixture(params=["local", "nats"])
async def bus(request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    stage: BusStage
    if request.param == "local":
        stage = LocalStage()
    else:
        server: NatsServer = request.getfixturevalue("nats_server")
        stage = NatsStage(server.url)
    yield await stage.open()
    await stage.close()


# ── Calls ────────────────────────────────────────────────────────────────────────────────────────


async def test_what_is_published_is_handled_as_it_was_published(bus: Bus) -> None:
    desk, calls = Desk(), rows(50)
    async with consuming(bus, desk.handle):
        assert await bus.publish(calls) == 50
        came = await desk.next_few(50)
    assert sorted(came, key=_id) == sorted(calls, key=_id)


async def test_what_is_published_before_anybody_consumes_waits(bus: Bus) -> None:
    desk, calls = Desk(), rows(3)
    await bus.publish(calls)
    assert await bus.pending() == 3
    async with consuming(bus, desk.handle):
        await desk.next_few(3)


async def test_nothing_published_is_nothing_new(bus: Bus) -> None:
    assert await bus.publish([]) == 0
    assert await bus.pending() == 0


async def test_at_most_one_call_a_run_is_pending(bus: Bus) -> None:
    desk, first, second = Desk(), row(), row()
    assert await bus.publish([first]) == 1
    assert await bus.publish([first, second]) == 1
    assert await bus.publish([second, second]) == 0
    assert await bus.pending() == 2
    async with consuming(bus, desk.handle):
        await desk.next_few(2)
        await until_pending(bus, 0)
    assert sorted(desk.calls, key=_id) == sorted([first, second], key=_id)


async def test_a_call_that_is_being_handled_is_pending(bus: Bus) -> None:
    desk, call = Desk(), row()
    desk.open.clear()
    async with consuming(bus, desk.handle):
        await bus.publish([call])
        await desk.next()
        assert await bus.publish([call]) == 0
        assert await bus.pending() == await bus.backlog() == 1
        desk.open.set()
        await until_pending(bus, 0)
    assert desk.calls == [call]


async def test_a_call_that_waits_for_its_retry_is_pending(bus: Bus) -> None:
    desk, call = Desk(lambda _call, _time: Retry(60_000)), row()
    async with consuming(bus, desk.handle):
        await bus.publish([call])
        await desk.next()
        await desk.until(lambda: desk.busy == 0)
        assert await bus.publish([call]) == 0
        assert await bus.pending() == 1


async def test_after_its_ack_a_run_can_be_called_again(bus: Bus) -> None:
    desk, call = Desk(), row()
    async with consuming(bus, desk.handle):
        for _ in range(5):
            assert await bus.publish([call]) == 1
            await desk.next()
            await until_pending(bus, 0)
    assert desk.calls == [call] * 5


async def test_no_more_are_handled_at_once_than_was_asked_for(bus: Bus) -> None:
    desk = Desk()
    desk.open.clear()
    async with consuming(bus, desk.handle, at_once_max=3):
        await bus.publish(rows(10))
        await desk.next_few(3)
        # One that is finished lets one more in: the others were held back, not lost.
        desk.open.set()
        await desk.next_few(7)
    assert desk.busy_max == 3


# ── Dispositions ─────────────────────────────────────────────────────────────────────────────────


async def test_a_retry_comes_after_its_delay_and_not_before(bus: Bus) -> None:
    desk = Desk(lambda _call, time: Retry(300) if time == 1 else Ack())
    async with consuming(bus, desk.handle):
        await bus.publish([row()])
        await desk.next_few(2)
    first_s, second_s = desk.at_s
    # A clock in milliseconds may be one of them short.
    assert 0.299 <= second_s - first_s < 5.0


async def test_a_retry_without_delay_comes_at_once(bus: Bus) -> None:
    desk = Desk(lambda _call, time: Retry(0) if time <= 20 else Ack())
    async with consuming(bus, desk.handle):
        await bus.publish([row()])
        await desk.next_few(21)
        await until_pending(bus, 0)
    # Twenty of them together take far less than any delay of theirs would: none was put in.
    assert desk.at_s[-1] - desk.at_s[0] < 3.0
    assert all(first <= second for first, second in pairwise(desk.at_s))


async def test_two_hundred_retries_lose_nothing_and_delay_nobody(bus: Bus) -> None:
    busy = rows(8)
    desk = Desk(lambda call, time: Retry(5) if call in busy and time <= 200 else Ack())
    async with consuming(bus, desk.handle, at_once_max=5):
        await bus.publish(busy)
        await desk.until(lambda: len(desk.calls) > 100)
        await bus.publish([other := row()])
        await desk.until(lambda: other in desk.calls)
        # It came while the busy ones were far from done.
        assert len(desk.calls) < 1_600
        await until_pending(bus, 0)
    assert all(desk.calls.count(call) == 201 for call in busy)


async def test_calls_that_wait_long_hold_up_nobody(bus: Bus) -> None:
    busy = rows(1_500)
    desk = Desk(lambda call, _time: Retry(60_000) if call in waiting else Ack())
    waiting = set(busy)
    async with consuming(bus, desk.handle, at_once_max=50):
        await bus.publish(busy)
        await desk.until(lambda: len(desk.calls) == 1_500)
        await bus.publish([other := row()])
        await desk.until(lambda: other in desk.calls)
        await until_pending(bus, 1_500)


async def test_a_dead_call_never_comes_again(bus: Bus) -> None:
    desk, poison = Desk(lambda call, _time: Dead("poison") if call == poison else Ack()), row()
    async with consuming(bus, desk.handle):
        await bus.publish([poison])
        await desk.next()
        await until_pending(bus, 0)
        await bus.publish([other := row()])
        assert await desk.next() == other
    assert desk.calls == [poison, other]


async def test_a_handler_that_raises_is_asked_again_after_a_second(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(lambda _call, time: _raise(ValueError("boom")) if time == 1 else Ack())
    async with consuming(bus, desk.handle):
        await bus.publish([call := row()])
        await desk.next_few(2)
    assert 0.999 <= desk.at_s[1] - desk.at_s[0] < 6.0
    (record,) = [each for each in caplog.records if each.message == "bus_handler_failed"]
    assert record.__dict__["fields"] == {
        "run_id": call.run_id,
        "tenant": "acme",
        "error": "boom",
    }


async def test_a_handler_that_is_cancelled_from_within_ends_only_its_own_call(bus: Bus) -> None:
    desk = Desk(lambda _call, time: _raise(asyncio.CancelledError()) if time == 1 else Ack())
    async with consuming(bus, desk.handle, at_once_max=1):
        await bus.publish([row()])
        await desk.next_few(2)
        await until_pending(bus, 0)


async def test_what_a_consumer_leaves_unanswered_comes_to_the_next_one(bus: Bus) -> None:
    desk, calls = Desk(), rows(5)
    desk.open.clear()
    await bus.publish(calls)
    async with consuming(bus, desk.handle, at_once_max=3):
        await desk.next_few(3)
    desk.open.set()
    # Far below the time for which a server waits for a consumer that has died.
    async with asyncio.timeout(10), consuming(bus, desk.handle):
        await desk.next_few(5)
        await until_pending(bus, 0)


# ── Bells ────────────────────────────────────────────────────────────────────────────────────────


async def test_a_bell_is_heard_here_once_by_everybody_who_listens(bus: Bus) -> None:
    heard: list[tuple[int, str]] = []
    bus.listen(Bell.READY, lambda note: heard.append((1, note)))
    bus.listen(Bell.READY, lambda note: heard.append((2, note)))
    bus.listen(Bell.FINISHED, lambda note: heard.append((3, note)))
    bus.ring(Bell.READY, "agent.plan")
    bus.ring(Bell.SETTINGS)
    # Whoever rings is not held up by whoever listens.
    assert heard == []
    await _one_round(bus)
    assert heard == [(1, "agent.plan"), (2, "agent.plan")]


async def test_who_stopped_listening_hears_nothing_more(bus: Bus) -> None:
    heard: list[str] = []
    stop = bus.listen(Bell.CHANGED, heard.append)
    bus.listen(Bell.CHANGED, heard.append)
    bus.ring(Bell.CHANGED, "first")
    await _one_round(bus)
    bus.ring(Bell.CHANGED, "second")
    stop()
    stop()
    await _one_round(bus)
    assert heard == ["first", "first", "second"]


async def test_a_listener_that_fails_is_logged_and_disturbs_nobody(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []
    bus.listen(Bell.READY, lambda _note: _raise(ValueError("deaf")))
    bus.listen(Bell.READY, heard.append)
    bus.ring(Bell.READY, "agent.plan")
    await _one_round(bus)
    assert heard == ["agent.plan"]
    (record,) = [each for each in caplog.records if each.message == "bell_unheard"]
    assert record.__dict__["fields"] == {"bell": "ready", "error": "deaf"}


# ── Health ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_closed_bus_says_so_and_may_be_closed_again(bus: Bus) -> None:
    await bus.ping()
    await bus.close()
    with pytest.raises(BackendError):
        await bus.ping()
    with pytest.raises(BackendError):
        await bus.publish([row()])
    bus.ring(Bell.READY, "agent.plan")
    await bus.close()


async def test_a_bus_closed_while_calls_wait_leaves_nothing_behind(bus: Bus) -> None:
    desk = Desk(lambda _call, _time: Retry(60_000))
    async with consuming(bus, desk.handle):
        await bus.publish([row()])
        await desk.next()
        await _one_round(bus)
    await bus.close()
    # What was cancelled needs a turn of the loop to end.
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


def _id(call: OutboxRow) -> str:
    return call.run_id


def _raise(error: BaseException) -> NoReturn:
    raise error


async def _one_round(bus: Bus) -> None:
    """Long enough for a bell to go to a server and come back, if it did."""
    await bus.ping()
    await asyncio.sleep(0.05)
    await bus.ping()
