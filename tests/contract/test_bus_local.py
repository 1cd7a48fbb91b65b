"""The local bus, where it is more than a queue: delays to the millisecond, and rows that stay."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from stanchion.adapters.bus.local import LocalBus
from stanchion.adapters.store.memory import MemoryStore
from stanchion.core.events import CancelRequested
from stanchion.core.model import TenantId
from stanchion.ports.bus import Ack, Retry
from stanchion.ports.errors import BackendUnavailable
from stanchion.ports.records import OutboxRow
from stanchion.sim.loop import LoopClock
from tests.contract.builders import start
from tests.contract.buses import Desk, consuming, row, rows
from tests.services.virtual import in_virtual_time

_HOLD_MS = 30_000


class _Stage:
    """A bus over a store in memory, in virtual time."""

    def __init__(self) -> None:
        self.clock = LoopClock()
        self.store = MemoryStore(self.clock)
        self.bus = LocalBus(self.store, self.clock)

    async def taken(self) -> OutboxRow:
        """A row of a run that has something in its inbox, as the relay takes it."""
        run_id = await start(self.store)
        await self.store.post(run_id, CancelRequested(), entry_id="a")
        (taken,) = await self.store.take_outbox(limit=10, hold_ms=_HOLD_MS)
        return taken


@in_virtual_time(_Stage)
async def test_a_retry_comes_after_exactly_its_delay(stage: _Stage) -> None:
    delays_ms = [500, 1, 0, 1_000, 700]
    desk = Desk(lambda _call, time: Retry(delays_ms[time - 1]) if time <= 5 else Ack())
    async with consuming(stage.bus, desk.handle):
        await stage.bus.publish([await stage.taken()])
        await desk.next_few(6)
    expected_ms = [sum(delays_ms[:count]) for count in range(6)]
    assert [round((at_s - desk.at_s[0]) * 1_000, 3) for at_s in desk.at_s] == expected_ms


@in_virtual_time(_Stage)
async def test_what_waits_for_its_retry_is_no_backlog(stage: _Stage) -> None:
    desk = Desk(lambda _call, _time: Retry(500))
    async with consuming(stage.bus, desk.handle, at_once_max=1):
        await stage.bus.publish(rows(2))
        found = [await stage.bus.backlog()]
        await desk.next_few(2)
        await stage.clock.sleep(0.25)
        found.append(await stage.bus.backlog())
        assert await stage.bus.pending() == 2
        desk.open.clear()
        await stage.clock.sleep(0.3)
        found.append(await stage.bus.backlog())
    assert found == [2, 0, 2]


@in_virtual_time(_Stage)
async def test_a_retry_is_due_in_the_store_at_the_same_time(stage: _Stage) -> None:
    """So a process that starts meanwhile, after a crash, brings it neither too early nor late."""
    desk = Desk(lambda _call, _time: Retry(500))
    async with consuming(stage.bus, desk.handle):
        await stage.bus.publish([call := await stage.taken()])
        await desk.next()
        await stage.clock.sleep(0.499)
    await stage.bus.close()
    assert await stage.store.take_outbox(limit=10, hold_ms=0) == ()
    await stage.clock.sleep(0.001)
    assert await stage.store.take_outbox(limit=10, hold_ms=0) == (call,)


@in_virtual_time(_Stage)
async def test_the_relay_that_brings_a_waiting_row_again_changes_nothing(stage: _Stage) -> None:
    desk = Desk(lambda _call, time: Retry(500) if time <= 10 else Ack())
    async with consuming(stage.bus, desk.handle):
        await stage.bus.publish([await stage.taken()])
        while len(desk.calls) <= 10:
            rows = await stage.store.take_outbox(limit=10, hold_ms=_HOLD_MS)
            assert await stage.bus.publish(rows) == 0
            await stage.clock.sleep(0.05)
    assert len(desk.calls) == 11


@in_virtual_time(_Stage)
async def test_a_store_that_fails_delays_no_retry(stage: _Stage) -> None:
    class Failing(MemoryStore):
        async def defer_outbox(self, row: OutboxRow, *, delay_ms: int) -> None:
            raise BackendUnavailable(f"cannot defer {row} by {delay_ms} ms")

    bus = LocalBus(Failing(stage.clock), stage.clock)
    desk = Desk(lambda _call, time: Retry(500) if time == 1 else Ack())
    async with consuming(bus, desk.handle):
        await bus.publish([row()])
        await desk.next_few(2)
    assert round(desk.at_s[1] - desk.at_s[0], 6) == 0.5


@in_virtual_time(_Stage)
async def test_a_handler_that_ignores_its_cancellation_does_not_stop_the_bus(
    stage: _Stage,
) -> None:
    async def stubborn(_call: OutboxRow) -> Ack:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue
            return Ack()

    began_s = asyncio.get_running_loop().time()
    async with consuming(stage.bus, stubborn):
        await stage.bus.publish([row()])
        await stage.clock.sleep(1)
    assert asyncio.get_running_loop().time() - began_s < 10
    assert await stage.bus.pending() == 1


@in_virtual_time(_Stage)
async def test_tenants_take_turns_and_the_calls_of_each_keep_their_order(stage: _Stage) -> None:
    loud, quiet = rows(1_000), [replace(each, tenant=TenantId("quiet")) for each in rows(3)]
    desk = Desk()
    await stage.bus.publish(loud)
    await stage.bus.publish(quiet)
    async with consuming(stage.bus, desk.handle, at_once_max=1):
        handled = await desk.next_few(len(loud) + len(quiet))
    assert handled[:6] == [loud[0], quiet[0], loud[1], quiet[1], loud[2], quiet[2]]
    assert handled[6:] == loud[3:]
