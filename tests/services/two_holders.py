"""A search for two holders that believe at the same instant.

One lock server, three processes that want the same name, and a bad day for all of them: cuts
between a process and the server, slow and lost replies, commands that the server executes long
after their caller gave up, processes that stand still for up to two minutes, and clocks that run up
to one per cent too fast or too slow. Everything comes from the seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import TypeVar

from stanchion.adapters.locks.memory import MemoryLocks
from stanchion.core.lease import (
    LeaseLost,
    LeasePolicy,
    LeaseTerms,
    Moment,
    OnLockError,
    OnRenewalLost,
)
from stanchion.core.model import Instant, Risk
from stanchion.ports.locks import (
    AcquireAnswer,
    AcquireTooLate,
    LockReleased,
    LockView,
    NotOwned,
    Renewed,
)
from stanchion.services.leasing import Leasing
from stanchion.services.renewal import Lease
from stanchion.sim import loop
from tests.services.seeded import SeededEntropy

__all__ = ["search"]

NAME = "run/1"
DAY_S = 300.0
_Answer = TypeVar("_Answer")


def search(seed: int, terms: LeaseTerms) -> list[str]:
    """Play one schedule; every instant at which two believed."""
    return loop.run(_play(seed, terms))


async def _play(seed: int, terms: LeaseTerms) -> list[str]:
    chance = Random(seed)
    server = MemoryLocks(loop.LoopClock(drift=chance.uniform(-0.01, 0.01)))
    stage = _Stage()
    for number in range(3):
        stage.processes.append(_Process(stage, server, terms, Random(f"{seed}/{number}")))
    tasks = [
        asyncio.create_task(part)
        for process in stage.processes
        for part in (process.work(), process.suffer())
    ]
    await asyncio.sleep(DAY_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return stage.violations


class _Stage:
    def __init__(self) -> None:
        self.processes: list[_Process] = []
        self.violations: list[str] = []

    def look(self) -> None:
        believers = [number for number, process in enumerate(self.processes) if process.believes()]
        if len(believers) > 1:
            now = asyncio.get_running_loop().time()
            self.violations.append(f"{believers} believe at {now:.3f} s")


class _Process:
    """One process: its clock, its line to the server, its work, and what befalls it."""

    def __init__(
        self, stage: _Stage, server: MemoryLocks, terms: LeaseTerms, chance: Random
    ) -> None:
        self._stage = stage
        self._chance = chance
        self._lease: Lease | None = None
        self.stands_still_until_s = 0.0
        self.is_cut = False
        self._leasing = Leasing(
            _Line(self, server, chance),
            clock=_ProcessClock(self, drift=chance.uniform(-0.01, 0.01)),
            entropy=SeededEntropy(chance.getrandbits(32)),
            terms=terms,
        )

    def believes(self) -> bool:
        """Whether it would act now: it runs, it is inside, and its lease looks good to it."""
        stands_still = asyncio.get_running_loop().time() < self.stands_still_until_s
        return self._lease is not None and self._lease.lost is None and not stands_still

    async def awake(self) -> None:
        """Go on, as soon as the process does."""
        now_s = asyncio.get_running_loop().time
        while now_s() < self.stands_still_until_s:  # noqa: ASYNC110 - the end may move meanwhile
            await asyncio.sleep(self.stands_still_until_s - now_s())

    async def work(self) -> None:
        policy = LeasePolicy(OnLockError.FAIL_CLOSED, OnRenewalLost.FENCE, 3)
        while True:
            try:
                async with self._leasing.hold(NAME, risk=Risk.HIGH, policy=policy) as lease:
                    if isinstance(lease, Lease):
                        await self._inside(lease)
            except LeaseLost:
                pass
            await asyncio.sleep(self._chance.uniform(0.1, 2))
            await self.awake()

    async def _inside(self, lease: Lease) -> None:
        self._lease = lease
        try:
            for _ in range(self._chance.choice([1, 5, 120])):
                self._stage.look()
                await asyncio.sleep(1)
                await self.awake()
        finally:
            self._lease = None

    async def suffer(self) -> None:
        while True:
            await asyncio.sleep(self._chance.expovariate(1 / 40))
            match self._chance.choice(["cut", "cut", "pause"]):
                case "cut":
                    self.is_cut = True
                    await asyncio.sleep(self._chance.uniform(5, 120))
                    self.is_cut = False
                case _:
                    now = asyncio.get_running_loop().time()
                    self.stands_still_until_s = now + self._chance.uniform(1, 120)


class _ProcessClock:
    """A clock that drifts, in a process that may stand still: then whoever sleeps oversleeps."""

    def __init__(self, process: _Process, drift: float) -> None:
        self._process = process
        self._clock = loop.LoopClock(drift=drift)

    def now(self) -> Instant:
        return self._clock.now()

    def moment(self) -> Moment:
        return self._clock.moment()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        await self._process.awake()


class _Line:
    """The way from one process to the lock server, and back."""

    is_local = False

    def __init__(self, process: _Process, server: MemoryLocks, chance: Random) -> None:
        self._process = process
        self._server = server
        self._chance = chance

    async def acquire(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, floor: int = 0
    ) -> AcquireAnswer:
        deadline_s = asyncio.get_running_loop().time() + within_ms / 1000

        async def execute() -> AcquireAnswer:
            if asyncio.get_running_loop().time() > deadline_s:
                return AcquireTooLate()
            return await self._server.acquire(
                name, token, ttl_ms=ttl_ms, within_ms=within_ms, floor=floor
            )

        return await self._call(execute)

    async def renew(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int
    ) -> Renewed | NotOwned:
        return await self._call(
            lambda: self._server.renew(name, token, ttl_ms=ttl_ms, within_ms=within_ms)
        )

    async def release(self, name: str, token: str, *, within_ms: int) -> LockReleased | NotOwned:
        return await self._call(lambda: self._server.release(name, token, within_ms=within_ms))

    async def inspect(self, name: str) -> LockView | None:
        return await self._server.inspect(name)

    async def list(self, prefix: str = "", *, limit: int = 1000) -> Sequence[LockView]:
        return await self._server.list(prefix, limit=limit)

    async def force_release(self, name: str) -> bool:
        return await self._server.force_release(name)

    async def ping(self) -> None:
        await self._call(self._server.ping)

    async def close(self) -> None:
        await self._server.close()

    async def _call(self, execute: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Send, execute, answer. What was sent is executed whether or not anybody still waits."""
        if self._process.is_cut:
            await asyncio.sleep(3_600)
        answer = await asyncio.shield(asyncio.create_task(self._deliver(execute)))
        await self._process.awake()
        return answer

    async def _deliver(self, execute: Callable[[], Awaitable[_Answer]]) -> _Answer:
        await asyncio.sleep(self._delay_s())
        answer = await execute()
        if self._process.is_cut or self._chance.random() < 0.02:
            await asyncio.sleep(3_600)  # the reply is lost
        await asyncio.sleep(self._delay_s())
        return answer

    def _delay_s(self) -> float:
        tail = self._chance.random()
        return self._chance.uniform(0, 0.02) if tail < 0.95 else self._chance.uniform(0.1, 8)
