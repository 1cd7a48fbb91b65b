"""No schedule makes two workers believe in the same job at once.

Three real workers, one server, and a bad day for all of them: cuts between a worker and the server,
slow and lost replies, requests that the server executes long after the worker gave up, workers that
are paused for up to two minutes, and clocks that run up to one per cent too fast or too slow. All
of it comes from the seed. ``tests/services/two_holders`` is the same search for run leases.
"""

from __future__ import annotations

import asyncio
from contextvars import Context
from random import Random

import pytest

from stanchion.core.lease import LeaseTerms, RetrySchedule
from stanchion.sim import loop
from stanchion.transport.messages import HttpReply
from stanchion.worker import Job, Worker, renewal
from stanchion.worker.server import TransportFailed
from tests.conftest import SOAK
from tests.worker.ledger import Ledger

SCHEDULES = 2_000 if SOAK else 100
PARTS = 4
DAY_S = 300.0
TTL_MS = 30_000


@pytest.mark.parametrize("part", range(PARTS))
def test_there_are_never_two_believers_in_a_job_at_the_same_instant(part: int) -> None:
    looks = 0
    for seed in range(part, SCHEDULES, PARTS):
        play = Play(seed)
        assert loop.run(play.run()) == [], f"seed {seed}"
        looks += play.looks
    assert looks > 20 * SCHEDULES / PARTS


def test_the_search_finds_two_believers_in_a_lease_that_is_trusted_for_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Gullible(LeaseTerms, frozen=True):
        """Trusts a lease for an hour, and would need a hundred failures to stop."""

        @property
        def trusted_ms(self) -> int:
            return 3_600_000

    def gullible(ttl_ms: int) -> LeaseTerms:
        return Gullible(ttl_ms, 1, RetrySchedule.SPREAD)

    monkeypatch.setattr(renewal, "job_terms_for", gullible)
    bad = next(seed for seed in range(100) if loop.run(Play(seed).run()))
    assert loop.run(Play(bad).run()) == loop.run(Play(bad).run())


class Play:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.looks = 0
        self._violations: list[str] = []
        self._workers: list[OneWorker] = []

    async def run(self) -> list[str]:
        """Play it; every instant at which two workers believed in one job."""
        chance = Random(self._seed)
        server = Ledger(loop.LoopClock(drift=chance.uniform(-0.01, 0.01)).moment, TTL_MS)
        for number in range(2):
            server.put(f"run:{number}@1")
        self._workers = [OneWorker(self, server, f"{self._seed}/{each}") for each in range(3)]
        tasks = [task for each in self._workers for task in each.begin()]
        await asyncio.sleep(DAY_S)
        for task in tasks:
            task.cancel()
        for each in self._workers:
            each.resume()
        await asyncio.gather(*tasks, return_exceptions=True)
        return self._violations

    def look(self) -> None:
        self.looks += 1
        believed = [job_id for each in self._workers for job_id in each.believes_in()]
        for job_id in {each for each in believed if believed.count(each) > 1}:
            now_s = asyncio.get_running_loop().time()
            self._violations.append(f"two believe in {job_id} at {now_s:.3f} s")


class OneWorker:
    """A worker process: its clock, its line to the server, its handler, and what befalls it."""

    def __init__(self, play: Play, server: Ledger, seed: str) -> None:
        self._play = play
        self._server = server
        self._chance = Random(seed)
        self._process = loop.Process(seed)
        self._jobs: set[Job] = set()
        self._is_cut = False

    def begin(self) -> list[asyncio.Task[None]]:
        app = Worker()
        app.task("t")(self._handle)
        clock = loop.LoopClock(drift=self._chance.uniform(-0.01, 0.01))
        working = app.run_over(self, clock=clock, chance=self._chance.random, concurrency=1)
        return [self._process.spawn(working), asyncio.create_task(self._suffer())]

    def believes_in(self) -> list[str]:
        """The jobs whose handlers run now and believe that they hold the lease."""
        if self._process.is_paused:
            return []
        return [job.job_id for job in self._jobs if job.lost is None]

    def resume(self) -> None:
        running = asyncio.get_running_loop()
        assert isinstance(running, loop.VirtualLoop)
        running.resume(self._process)

    async def _handle(self, job: Job) -> None:
        self._jobs.add(job)
        try:
            while True:
                self._play.look()
                await asyncio.sleep(1)
        finally:
            self._jobs.remove(job)

    async def _suffer(self) -> None:
        while True:
            await asyncio.sleep(self._chance.expovariate(1 / 40))
            match self._chance.choice(["cut", "cut", "pause"]):
                case "cut":
                    self._is_cut = True
                    await asyncio.sleep(self._chance.uniform(5, 120))
                    self._is_cut = False
                case _:
                    self._process.pause()
                    await asyncio.sleep(self._chance.uniform(1, 120))
                    self.resume()

    # ── The transport ────────────────────────────────────────────────────────────────────────────

    async def post(self, path: str, body: bytes) -> HttpReply:
        """A request is executed whether or not the worker still waits: the server's context."""
        deliver = self._deliver(path, body)
        running = asyncio.get_running_loop()
        return await asyncio.shield(running.create_task(deliver, context=Context()))

    async def close(self) -> None: ...

    async def _deliver(self, path: str, body: bytes) -> HttpReply:
        if self._is_cut:
            await asyncio.sleep(3_600)
        await asyncio.sleep(self._delay_s())
        answer = await self._server.answer(path, body)
        if self._is_cut or self._chance.random() < 0.02:
            await asyncio.sleep(3_600)  # The reply is lost.
        await asyncio.sleep(self._delay_s())
        if answer is None:
            raise TransportFailed("cut")
        return answer

    def _delay_s(self) -> float:
        tail = self._chance.random()
        return self._chance.uniform(0, 0.02) if tail < 0.95 else self._chance.uniform(0.1, 8)
