"""Users of the public ``Leases``: long holds, each writing to a fenced register.

A user is a process with a drifting clock and a bad link to the lock server, and is paused now and
then. It holds a name for many renewal periods, and while it trusts its lease it writes to a
register that keeps the highest fence, as ``docs/how-to/guard-your-own-writes.md`` says. The history
of the registers is judged: the owner of a lease can write, and a fence has one writer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Final

from stanchion.core.lease import DEFAULT_POLICIES, LeaseLost, terms_for
from stanchion.core.model import Risk
from stanchion.leases import LeaseNotGranted, Leases
from stanchion.leases.backend import LazyLocks
from stanchion.leases.holder import LeaseHolder
from stanchion.leases.waiting import DEFAULT_RETRY
from stanchion.ports.locks import AcquireAnswer, Granted, LockReleased, LockView, NotOwned, Renewed
from stanchion.ports.turns import Place, Turns
from stanchion.services.renewal import Lease
from stanchion.sim import invariants as must
from stanchion.sim.lock_ledger import NEVER_S, ObservedHold
from stanchion.sim.loop import LoopClock, Process, VirtualLoop
from stanchion.sim.network import BOUND_S, SimLink
from stanchion.sim.replica import SeededEntropy
from stanchion.sim.servers import LockPort, LockServer, LockWatcher, at_once

if TYPE_CHECKING:
    from stanchion.sim.world import World

USERS: Final = 3
_NAMES: Final = ("ledger", "report")
_TTL_S: Final = 3.0
_PAUSE_S_MAX: Final = 8.0
_HEARD_S: Final = 5.0
"""After this time without a failed call a user knows that the lock server is available."""
_RISKS: Final = (Risk.HIGH, Risk.HIGH, Risk.CRITICAL, Risk.STANDARD)


class TurnsPort(LockPort):
    """The lock port of a user, with the queue. Bells are lost: a waiter looks again in time."""

    def __init__(self, link: SimLink, server: LockServer, watcher: LockWatcher) -> None:
        super().__init__(link, server, watcher)
        self.real = server.real
        self.releases = 0
        self.silent_at_s = NEVER_S
        """When a call was last not answered."""
        self.tickets: set[str] = set()
        """Tokens of waiters that have joined a queue, and not left it. A grant removes them."""
        self.on_join: Callable[[str, str, int], None] = lambda _name, _token, _ms: None

    async def acquire(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, floor: int = 0
    ) -> AcquireAnswer:
        with self._heard():
            answer = await super().acquire(
                name, token, ttl_ms=ttl_ms, within_ms=within_ms, floor=floor
            )
        if isinstance(answer, Granted):
            self.tickets.discard(token)
        return answer

    async def renew(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int
    ) -> Renewed | NotOwned:
        with self._heard():
            return await super().renew(name, token, ttl_ms=ttl_ms, within_ms=within_ms)

    async def inspect(self, name: str) -> LockView | None:
        with self._heard():
            return await super().inspect(name)

    @contextmanager
    def _heard(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.silent_at_s = asyncio.get_running_loop().time()
            raise

    async def release(self, name: str, token: str, *, within_ms: int) -> LockReleased | NotOwned:
        self.releases += 1
        return await super().release(name, token, within_ms=within_ms)

    async def join(self, name: str, token: str, *, ticket_ms: int, within_ms: int) -> Place:
        self.tickets.add(token)

        def execute() -> Place:
            self.on_join(name, token, ticket_ms)
            return at_once(self.real.join(name, token, ticket_ms=ticket_ms, within_ms=within_ms))

        return await self.link.ask("join", execute, bound_s=min(BOUND_S, within_ms / 1000))

    async def bell(self, name: str, token: str, *, at_most_ms: int) -> bool:
        del name, token
        await asyncio.sleep(at_most_ms / 1000)
        return False

    async def leave(self, name: str, token: str, *, within_ms: int) -> None:
        self.tickets.discard(token)
        await self.link.ask(
            "leave", lambda: at_once(self.real.leave(name, token, within_ms=within_ms))
        )


@dataclass(slots=True)
class Register:
    """A row of a user's database, which refuses a fence below the highest it has seen."""

    highest: int = 0
    writers: dict[int, str] = field(default_factory=dict)
    writes: int = 0

    def write(self, fence: int, hold: str) -> bool:
        """Write with a fence; ``False`` if a newer holder has written before."""
        if fence < self.highest:
            return False
        self.highest = fence
        self.writers.setdefault(fence, hold)
        self.writes += 1
        return True


class LeaseUsers:
    """The users of one day, and their registers."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.registers = {name: Register() for name in _NAMES}
        self._is_over = False
        self._open: list[Leases] = []
        self._ports: dict[str, TurnsPort] = {}

    def begin(self) -> None:
        """Start all users."""
        for number in range(USERS):
            process = Process(f"user-{number}")
            process.begin(self._use(process), name="user")
            self._plan_pauses(process, number)

    def end(self) -> None:
        """Let every user end its hold."""
        self._is_over = True

    def left(self) -> list[str]:
        """What is left in the users' processes after they have ended."""
        return [
            f"a user's leases have {name}: {value}"
            for leases in self._open
            for name, value in _entries(vars(leases)["_holder"])
            if value
        ]

    def _plan_pauses(self, process: Process, number: int) -> None:
        chance = Random(f"user {self._world.scenario.seed}/{number}")  # noqa: S311 - to be foreseen
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        day_s = self._world.scenario.profile.day_s
        for _ in range(2):
            at_s, lasts_s = chance.uniform(0, day_s), _PAUSE_S_MAX * chance.random()
            loop.call_at(at_s, process.pause)
            loop.call_at(at_s + lasts_s, loop.resume, process)

    async def _use(self, process: Process) -> None:
        world = self._world
        chance = Random(f"{world.scenario.seed}/{process.name}")  # noqa: S311 - to be foreseen
        clock = LoopClock(drift=chance.uniform(-0.01, 0.01))
        link = SimLink(
            process,
            world.locks,
            Random(chance.random()),  # noqa: S311 - likewise
            world.history.faults,
            world.weather,
        )
        world.user_links.append(link)
        port = self._ports[process.name] = TurnsPort(link, world.locks, world.ledger.locks)
        port.on_join = world.ledger.locks.joined
        leases = _leases(port, clock, process.name)
        self._open.append(leases)
        hold_number = 0
        while not self._is_over:
            hold_number += 1
            name = chance.choice(_NAMES)
            try:
                await self._hold(process, clock, leases, name, chance, hold_number)
            except (LeaseNotGranted, LeaseLost) as error:
                world.history.tell(f"{process.name} {type(error).__name__}: {error}")
                is_kept = isinstance(error, LeaseNotGranted) and port.tickets
                said = [f"{process.name} waits no more for {name}, and keeps its ticket"]
                world.history.check("what is held is given back", said if is_kept else [])
            # Those of holds that went on without a lease expire.
            port.tickets.clear()
            await asyncio.sleep(chance.random())
        await leases.close()

    async def _hold(
        self,
        process: Process,
        clock: LoopClock,
        leases: Leases,
        name: str,
        chance: Random,
        number: int,
    ) -> None:
        world, register = self._world, self.registers[name]
        risk, since_s = chance.choice(_RISKS), asyncio.get_running_loop().time()
        hold = leases.hold(
            name,
            risk=risk,
            wait_s=chance.choice((0.0, 2.0, 6.0)),
            order=chance.choice(("fifo", "fifo", "jitter")),
            floor=register.highest,
        )
        port = self._ports[process.name]
        before, is_owned = port.releases, False
        async with hold as lease:
            held = ObservedHold(
                process, lease, DEFAULT_POLICIES[risk], since_s, is_closed=False, clock=clock
            )
            world.ledger.locks.holding(held)
            world.history.tell(f"{process.name} holds {name} with fence {lease.fence}")
            try:
                await self._work(lease, held, register, chance, f"{process.name}/{number}")
            finally:
                # While the lock server does not answer, releases wait until it does.
                is_heard = asyncio.get_running_loop().time() > port.silent_at_s + _HEARD_S
                is_owned = is_heard and world.ledger.locks.is_owner(held)
                world.ledger.locks.let_go(held)
        is_kept = is_owned and lease.lost is None and port.releases == before
        said = [f"{process.name} has ended its hold of {name}, and did not release it"]
        world.history.check("what is held is given back", said if is_kept else [])

    async def _work(
        self, lease: Lease, held: ObservedHold, register: Register, chance: Random, who: str
    ) -> None:
        """Write for many renewal periods."""
        world = self._world
        for _ in range(chance.randint(5, 40)):
            if self._is_over:
                return
            await asyncio.sleep(0.1 + chance.random())
            if lease.fence is None or lease.lost is not None:
                continue
            world.ledger.locks.trusts(held)
            writer = register.writers.get(lease.fence)
            is_written = register.write(lease.fence, who)
            is_known_owner = world.ledger.locks.is_owner(held)
            world.history.check(
                "an owner can write",
                must.owner_can_write(
                    lease.name, lease.fence, is_written=is_written or not is_known_owner
                ),
            )
            if is_written and not world.ledger.locks.is_borrowed(lease.fence):
                said = must.one_writer_per_fence(lease.name, lease.fence, writer or who, who)
                world.history.check("one writer per fence", said)


def _entries(holder: LeaseHolder) -> list[tuple[str, Any]]:
    """The waiting tasks and names of a lease holder."""
    return [
        ("queues", vars(holder.queues)["_queues"]),
        ("names", holder.asked_at),
    ]


def _leases(port: Turns, clock: LoopClock, seed: str) -> Leases:
    """The public class, on the simulated lock server and clock."""

    async def opened() -> Turns:
        return port

    leases = Leases("memory:", ttl_s=_TTL_S)
    parts = vars(leases)
    parts["_store"] = LazyLocks(opened)
    parts["_holder"] = LeaseHolder(
        parts["_store"],
        clock=clock,
        entropy=SeededEntropy(f"{seed}/leases"),
        terms=terms_for(round(_TTL_S * 1000)),
        retry=DEFAULT_RETRY,
        tell=None,
        prepare=leases._prepare,  # noqa: SLF001 - as the class does
    )
    return leases
