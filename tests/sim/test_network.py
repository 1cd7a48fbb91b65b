"""Links: each fault does to a call what it says."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest

from stanchion.ports.errors import BackendTimeout, BackendUnavailable
from stanchion.ports.locks import AcquireTooLate, Granted
from stanchion.sim.history import History
from stanchion.sim.lock_ledger import LockLedger
from stanchion.sim.loop import LoopClock, Process, VirtualLoop
from stanchion.sim.network import CLEAR, Network, SimLink, Weather
from stanchion.sim.servers import LockPort, LockServer
from stanchion.sim.subscribers import StreamTransport
from stanchion.transport.messages import Request

SURE = 1.0


class _Bench:
    """One caller, one lock server, one link between them."""

    def __init__(self, weather: Weather = CLEAR) -> None:
        self.caller = Process("caller")
        self.server = LockServer(LoopClock())
        self.faults: Counter[str] = Counter()
        self.link = SimLink(self.caller, self.server, Random(1), self.faults, weather)
        self.history = History()
        ledger = LockLedger(self.history, self.server, defaultdict(Counter))
        self.locks = LockPort(self.link, self.server, ledger)
        self.executed = 0

    def execute(self) -> str:
        self.executed += 1
        return "done"

    async def ask(self) -> str:
        return await self.link.ask("verb", self.execute)


def played(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.dissolve()


def test_in_clear_weather_a_call_is_executed_and_answered() -> None:
    async def main() -> None:
        bench = _Bench()
        assert await bench.ask() == "done"
        assert bench.executed == 1
        assert asyncio.get_running_loop().time() < 0.01

    played(main)


def test_most_polls_are_executed_in_one_piece_and_some_take_their_time() -> None:
    async def main() -> None:
        bench = _Bench()
        quick = sum(bench.link.is_quick("take_outbox") for _ in range(1_000))
        assert 750 < quick < 850
        assert not any(bench.link.is_quick("commit") for _ in range(100))

    played(main)


def test_polls_meet_as_many_faults_as_other_calls() -> None:
    async def main() -> None:
        bench = _Bench(Weather(refused=0.05, lost_reply=0.1, late=0.1, late_s=1.0))

        async def poll() -> None:
            if bench.link.is_quick("take_outbox"):
                bench.execute()
            else:
                await bench.link.ask("take_outbox", bench.execute)

        await asyncio.gather(*(poll() for _ in range(2_000)), return_exceptions=True)
        assert 70 < bench.faults["refused"] < 130
        assert 150 < bench.faults["reply lost"] < 250
        assert 150 < bench.faults["late"] < 250
        assert bench.executed == 2_000 - bench.faults["refused"]

    played(main)


@pytest.mark.parametrize("fault", ["down", "paused", "cut", "slow"])
def test_no_poll_is_quick_during_a_fault(fault: str) -> None:
    async def main() -> None:
        bench = _Bench()
        bench.server.is_down = fault == "down"
        bench.link.cut_back = fault == "cut"
        bench.link.slow_s = 0.1 if fault == "slow" else 0.0
        if fault == "paused":
            bench.server.process.pause()
        assert not any(bench.link.is_quick("take_outbox") for _ in range(100))

    played(main)


def test_a_refused_call_changes_nothing() -> None:
    async def main() -> None:
        bench = _Bench(Weather(refused=SURE))
        with pytest.raises(BackendUnavailable, match="refused"):
            await bench.ask()
        assert bench.executed == 0

    played(main)


def test_a_lost_reply_is_a_time_out_for_what_was_done() -> None:
    async def main() -> None:
        bench = _Bench(Weather(lost_reply=SURE))
        with pytest.raises(BackendTimeout):
            await bench.ask()
        assert bench.executed == 1
        assert asyncio.get_running_loop().time() == pytest.approx(2.0)

    played(main)


def test_a_call_that_timed_out_is_executed_all_the_same() -> None:
    async def main() -> None:
        bench = _Bench()
        bench.link.slow_s = 5
        with pytest.raises(BackendTimeout):
            await bench.ask()
        assert bench.executed == 0
        await asyncio.sleep(5)
        assert bench.executed == 1

    played(main)


@pytest.mark.parametrize(("there", "executed"), [(True, 0), (False, 1)])
def test_a_cut_is_one_way(there: bool, executed: int) -> None:
    async def main() -> None:
        bench = _Bench()
        bench.link.cut_there, bench.link.cut_back = there, not there
        with pytest.raises(BackendTimeout):
            await bench.ask()
        assert bench.executed == executed

    played(main)


def test_a_server_that_stands_still_executes_when_it_goes_on() -> None:
    async def main() -> None:
        bench = _Bench()
        asking = asyncio.create_task(bench.ask())
        await asyncio.sleep(0)
        bench.server.process.pause()
        bench.link.server_stands_still()
        with pytest.raises(BackendTimeout):
            await asking
        assert bench.executed == 0
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.resume(bench.server.process)
        await asyncio.sleep(0.1)
        assert bench.executed == 1

    played(main)


def test_a_server_that_is_down_refuses() -> None:
    async def main() -> None:
        bench = _Bench()
        bench.server.is_down = True
        with pytest.raises(BackendUnavailable):
            await bench.ask()

    played(main)


def test_a_late_acquire_takes_nothing() -> None:
    async def main() -> None:
        bench = _Bench()
        bench.link.slow_s = 1
        with pytest.raises(BackendTimeout):
            await bench.locks.acquire("run/1", "one", ttl_ms=1_000, within_ms=200)
        await asyncio.sleep(3)
        assert bench.server.real.names() == []
        bench.link.slow_s = 0
        answer = await bench.locks.acquire("run/1", "two", ttl_ms=1_000, within_ms=200)
        assert isinstance(answer, Granted)
        assert not isinstance(answer, AcquireTooLate)
        assert bench.history.broken == []

    played(main)


def test_a_subscriber_that_ends_while_its_stream_is_opened_hangs_up() -> None:
    async def main() -> None:
        seen: list[str] = []

        async def app(_scope: object, receive: Callable[[], Any], _send: object) -> None:
            await receive()
            seen.append((await receive())["type"])

        caller, replica = Process("subscriber"), Mock(process=Process("replica"), app=app)
        replica.inflight = {}
        network = Network(caller, lambda: [replica], Random(1), Counter(), CLEAR)
        world = Mock(up=lambda: [replica])
        transport = StreamTransport(network, world, Random(1), lambda: None)
        opening = asyncio.create_task(
            transport.send(
                Request(
                    name="events",
                    method="GET",
                    path="/v1/events",
                    timeout_s=5.0,
                    is_repeatable=True,
                    is_stream=True,
                )
            )
        )
        await asyncio.sleep(0.1)
        opening.cancel()
        await asyncio.wait([opening])
        await asyncio.sleep(0.1)
        assert seen == ["http.disconnect"]

    played(main)
