"""The bus on NATS, where it is more than a queue: several replicas, and a server that goes away."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from stanchion.adapters.bus.nats.consumer import answer_to
from stanchion.drills.proxy import Loss, proxied
from stanchion.ports.bus import Ack, Bell, Bus, Dead, Retry
from stanchion.ports.errors import BackendError, BackendTimeout, BackendUnavailable
from stanchion.ports.records import OutboxRow
from tests.contract.buses import (
    LONG_S,
    Desk,
    NatsStage,
    consuming,
    plain_client,
    row,
    rows,
    staged,
    until_pending,
)
from tests.servers import NatsServer, running_nats


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    """A server that nobody harms."""
    with running_nats() as server:
        yield server


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[NatsServer]:
    """A server for one case, which may do to it what it likes."""
    with running_nats(directory=tmp_path) as server:
        yield server


@pytest.fixture
async def stage(server: NatsServer) -> AsyncIterator[NatsStage]:
    async with staged(NatsStage(server.url)) as stage:
        yield stage


@pytest.fixture
async def harmed(victim: NatsServer) -> AsyncIterator[NatsStage]:
    async with staged(NatsStage(victim.url, timeout_s=1.0)) as stage:
        yield stage


# ── Several replicas ─────────────────────────────────────────────────────────────────────────────


async def test_replicas_share_the_calls_and_each_is_handled_once(stage: NatsStage) -> None:
    first, second = await stage.open(), await stage.open()
    desk, other = Desk(), Desk()
    calls = rows(2_000)
    async with consuming(first, desk.handle), consuming(second, other.handle):
        assert await first.publish(calls) == 2_000
        await until_pending(first, 0)
    assert sorted(call.run_id for call in (*desk.calls, *other.calls)) == sorted(
        call.run_id for call in calls
    )
    assert desk.calls
    assert other.calls


async def test_a_call_of_one_replica_is_pending_for_all(stage: NatsStage) -> None:
    first, second = await stage.open(), await stage.open()
    assert await first.publish([call := row()]) == 1
    assert await second.publish([call]) == 0
    assert await second.pending() == 1


async def test_many_replicas_that_publish_the_same_call_make_one(stage: NatsStage) -> None:
    buses = [await stage.open() for _ in range(5)]
    calls = rows(20)
    fresh = await asyncio.gather(*(bus.publish(calls) for bus in buses for _ in range(3)))
    assert sum(fresh) == 20
    assert await buses[0].pending() == 20


async def test_when_a_consumer_dies_its_calls_go_to_another_replica(server: NatsServer) -> None:
    async with (
        staged(NatsStage(server.url, ack_wait_s=1.0, timeout_s=1.0)) as stage,
        proxied(server.port) as proxy,
    ):
        dying, living = await stage.open_at(f"nats://127.0.0.1:{proxy.port}"), await stage.open()
        lost, desk = Desk(), Desk()
        lost.open.clear()
        async with consuming(dying, lost.handle):
            await living.publish(calls := rows(3))
            await lost.next_few(3)
            # From here on the server hears nothing of it: as if it had been killed.
            proxy.cut()
            async with consuming(living, desk.handle):
                await desk.next_few(3)
                await until_pending(living, 0)
    assert sorted(call.run_id for call in desk.calls) == sorted(call.run_id for call in calls)


async def test_a_handler_that_takes_long_keeps_its_call(server: NatsServer) -> None:
    async with staged(NatsStage(server.url, ack_wait_s=0.5)) as stage:
        first, second = await stage.open(), await stage.open()
        slow, desk = Desk(), Desk()
        slow.open.clear()
        async with consuming(first, slow.handle):
            await first.publish([row()])
            await slow.next()
            async with consuming(second, desk.handle):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(desk.next(), 2.0)
                slow.open.set()
                await until_pending(first, 0)
        assert len(slow.calls) == 1
        assert desk.calls == []


async def test_an_answer_that_does_not_arrive_is_given_again(server: NatsServer) -> None:
    async with staged(NatsStage(server.url)) as stage, proxied(server.port) as proxy:
        bus, desk = await stage.open_at(f"nats://127.0.0.1:{proxy.port}"), Desk()
        desk.open.clear()
        async with consuming(bus, desk.handle):
            await bus.publish([call := row()])
            await desk.next()
            proxy.cut()
            await _until_down(bus)
            desk.open.set()
            await desk.until(lambda: desk.busy == 0)
            proxy.mend()
            await _until_works(bus)
            await until_pending(bus, 0)
        assert desk.calls == [call]


async def test_an_answer_whose_confirmation_is_lost_was_given_all_the_same(
    server: NatsServer,
) -> None:
    async with staged(NatsStage(server.url)) as stage, proxied(server.port) as proxy:
        bus, desk = await stage.open_at(f"nats://127.0.0.1:{proxy.port}"), Desk()
        desk.open.clear()
        async with consuming(bus, desk.handle):
            await bus.publish([call := row()])
            await desk.next()
            trap = proxy.trap(b"+ACK", Loss.CUT)
            desk.open.set()
            await asyncio.wait_for(trap.sprung.wait(), LONG_S)
            await _until_works(bus)
            await until_pending(bus, 0)
        assert desk.calls == [call]


@pytest.mark.parametrize(
    ("disposition", "sent"),
    [
        (Ack(), b"+ACK"),
        (Retry(0), b"-NAK"),
        (Retry(1), b'-NAK {"delay": 1000000}'),
        (Retry(523), b'-NAK {"delay": 523000000}'),
        (Dead("poison"), b"+TERM"),
    ],
)
def test_a_delay_travels_to_the_server_unchanged(
    disposition: Ack | Retry | Dead, sent: bytes
) -> None:
    assert answer_to(disposition) == sent


@pytest.mark.parametrize("message", [b"nonsense", b'{"run_id":"\xff"}'])
async def test_a_message_that_is_no_call_is_put_away(
    stage: NatsStage, caplog: pytest.LogCaptureFixture, message: bytes
) -> None:
    bus, desk = await stage.open(), Desk()
    async with plain_client(stage.url) as client:
        await client.request(f"{stage.namespace}.advance.00.x", message, timeout=5)
    async with consuming(bus, desk.handle):
        await until_pending(bus, 0)
    assert desk.calls == []
    assert "bus_call_unreadable" in caplog.messages


# ── Bells ────────────────────────────────────────────────────────────────────────────────────────


async def test_a_bell_reaches_every_replica_once(stage: NatsStage) -> None:
    buses = [await stage.open() for _ in range(3)]
    ears = [_Ear(bus, Bell.READY) for bus in buses]
    buses[0].ring(Bell.READY, "agent.plan")
    buses[0].ring(Bell.READY, "last")
    for ear in ears:
        await ear.heard("last")
    await asyncio.gather(*(bus.ping() for bus in buses))
    assert [ear.notes for ear in ears] == [["agent.plan", "last"]] * 3


async def test_the_same_bell_rung_many_times_goes_out_once(stage: NatsStage) -> None:
    first, second = await stage.open(), await stage.open()
    here, there = _Ear(first, Bell.CHANGED), _Ear(second, Bell.CHANGED)
    for _ in range(500):
        first.ring(Bell.CHANGED, "acme")
    first.ring(Bell.CHANGED, "last")
    await there.heard("last")
    assert there.notes == ["acme", "last"]
    assert here.notes == ["acme"] * 500 + ["last"]


async def test_more_bells_than_fit_into_one_message_all_arrive(stage: NatsStage) -> None:
    first, second = await stage.open(), await stage.open()
    there = _Ear(second, Bell.ESCALATION)
    notes = [f"{number:04}" + "x" * 1_000 for number in range(2_000)]
    for note in notes:
        first.ring(Bell.ESCALATION, note)
    await there.heard(notes[-1])
    assert there.notes == notes


async def test_bells_of_another_version_are_passed_over(stage: NatsStage) -> None:
    bus = await stage.open()
    ear = _Ear(bus, Bell.READY)
    async with plain_client(stage.url) as client:
        for message in (b"nonsense", b'[["gong", "x"], ["ready", "agent.plan"]]'):
            await client.publish(f"{stage.namespace}.bell", message)
        await ear.heard("agent.plan")
    assert ear.notes == ["agent.plan"]


async def test_ringing_without_a_server_is_silent_and_local_ears_still_hear(
    harmed: NatsStage, victim: NatsServer
) -> None:
    first, second = await harmed.open(), await harmed.open()
    here, there = _Ear(first, Bell.READY), _Ear(second, Bell.READY)
    victim.kill()
    await _until_down(first)
    for number in range(100):
        first.ring(Bell.READY, f"dropped {number}")
    await here.heard("dropped 99")
    victim.start()
    await asyncio.gather(_until_works(first), _until_works(second))
    first.ring(Bell.READY, "again")
    await there.heard("again")
    assert there.notes == ["again"]


# ── A server that goes away ──────────────────────────────────────────────────────────────────────


async def test_after_a_restart_everything_goes_on_without_reopening(
    harmed: NatsStage, victim: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "stanchion")
    bus, desk = await harmed.open(), Desk()
    async with consuming(bus, desk.handle):
        await bus.publish([first := row()])
        assert await desk.next() == first
        victim.kill()
        await _until_down(bus)
        with pytest.raises(BackendUnavailable):
            await bus.publish([row()])
        with pytest.raises(BackendUnavailable):
            await bus.pending()
        victim.start()
        await _until_works(bus)
        assert await bus.publish([second := row()]) == 1
        came = await desk.next()
        # What was acknowledged in the moment of the kill may come again: at least once is promised.
        assert (await desk.next() if came == first else came) == second
        await until_pending(bus, 0)
    assert [each for each in caplog.messages if each in {"bus_lost", "bus_regained"}] == [
        "bus_lost",
        "bus_regained",
    ]


async def test_what_is_pending_survives_a_killed_server(
    harmed: NatsStage, victim: NatsServer
) -> None:
    bus, desk, calls = await harmed.open(), Desk(), rows(100)
    await bus.publish(calls)
    victim.kill()
    victim.start()
    await _until_works(bus)
    assert await bus.pending() == 100
    assert await bus.publish(calls) == 0
    async with consuming(bus, desk.handle):
        await desk.next_few(100)
        await until_pending(bus, 0)


async def test_a_call_in_hand_while_the_server_restarts_is_answered_afterwards(
    harmed: NatsStage, victim: NatsServer
) -> None:
    bus, desk = await harmed.open(), Desk()
    desk.open.clear()
    async with consuming(bus, desk.handle):
        await bus.publish([call := row()])
        await desk.next()
        victim.kill()
        await _until_down(bus)
        desk.open.set()
        await desk.until(lambda: desk.busy == 0)
        victim.start()
        await _until_works(bus)
        await until_pending(bus, 0)
    assert set(desk.calls) == {call}


async def test_a_server_that_lost_its_data_gets_a_new_stream(
    harmed: NatsStage, victim: NatsServer, tmp_path: Path
) -> None:
    bus, desk = await harmed.open(), Desk()
    async with consuming(bus, desk.handle):
        victim.kill()
        shutil.rmtree(tmp_path / "jetstream")
        victim.start()
        await _until_works(bus)
        await bus.publish([call := row()])
        assert await desk.next() == call


@pytest.mark.parametrize("what", ["STREAM.DELETE.{stream}", "CONSUMER.DELETE.{stream}.replicas"])
async def test_what_somebody_removes_on_the_server_is_made_again(
    stage: NatsStage, what: str
) -> None:
    bus, desk = await stage.open(), Desk()
    async with consuming(bus, desk.handle):
        await bus.publish([first := row()])
        assert await desk.next() == first
        async with plain_client(stage.url) as client:
            verb = what.format(stream=f"{stage.namespace}_advance".upper())
            await client.request(f"$JS.API.{verb}", b"", timeout=5)
        await _until_published(bus, second := row())
        got = await desk.next()
        # The consumer may have been removed before the answer to the first was stored.
        assert (await desk.next() if got == first else got) == second


async def test_a_server_that_stands_still_is_an_error_in_time_and_then_none(
    harmed: NatsStage, victim: NatsServer
) -> None:
    bus, desk = await harmed.open(), Desk()
    async with consuming(bus, desk.handle):
        victim.pause()
        began = time.monotonic()
        with pytest.raises(BackendTimeout):
            await bus.publish(rows(500))
        assert time.monotonic() - began < 5.0
        await _until_down(bus)
        victim.resume()
        await _until_works(bus)
        await _until_published(bus, row())
        await until_pending(bus, 0)


# ── What the cases have in common ────────────────────────────────────────────────────────────────


class _Ear:
    """Listens, and tells when a note was heard."""

    def __init__(self, bus: Bus, bell: Bell) -> None:
        self.notes: list[str] = []
        self._changed = asyncio.Event()
        bus.listen(bell, self._hear)

    async def heard(self, note: str) -> None:
        async with asyncio.timeout(LONG_S):
            while note not in self.notes:
                self._changed.clear()
                await self._changed.wait()

    def _hear(self, note: str) -> None:
        self.notes.append(note)
        self._changed.set()


async def _until_works(bus: Bus) -> None:
    async with asyncio.timeout(LONG_S):
        while not await _works(bus):  # noqa: ASYNC110 - a server gives no sign of it
            await asyncio.sleep(0.02)


async def _until_down(bus: Bus) -> None:
    async with asyncio.timeout(LONG_S):
        while await _works(bus):  # noqa: ASYNC110 - likewise
            await asyncio.sleep(0.02)


async def _works(bus: Bus) -> bool:
    try:
        await bus.ping()
    except BackendError:
        return False
    return True


async def _until_published(bus: Bus, call: OutboxRow) -> None:
    async with asyncio.timeout(LONG_S):
        while True:
            with contextlib.suppress(BackendError):
                await bus.publish([call])
                return
            await asyncio.sleep(0.02)
