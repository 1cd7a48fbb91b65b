"""Simulated servers: one store and one lock server, each behind links, with their faults.

Both are the memory adapters, the simplest implementations of the ports. Their faults are deadlines
that have passed when a command arrives, crashes, restarts that lose data that was not on disk, and
replacements whose clock is behind.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeVar, cast

from stanchion.adapters.locks.memory import MemoryTurns
from stanchion.adapters.store.memory import MemoryStore
from stanchion.adapters.store.memory.state import MemoryState
from stanchion.core.model import Instant, RunId, TenantId
from stanchion.ports.clock import Clock
from stanchion.ports.locks import AcquireAnswer, LockNote, LockReleased, LockView, NotOwned, Renewed
from stanchion.ports.records import Admission
from stanchion.ports.store import Store
from stanchion.sim.loop import LoopClock, Process
from stanchion.sim.network import BOUND_S, LOOKS, SimLink

TOO_LATE: Final = -1
"""A value of ``within_ms``: the deadline passed before the command was executed."""
_WAITED: Final = "a method of a memory adapter waited"
_Answer = TypeVar("_Answer")


def at_once(work: Coroutine[Any, Any, _Answer]) -> _Answer:
    """The result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as done:
        answer: _Answer = done.value
        return answer
    work.close()
    raise AssertionError(_WAITED)


class StoreWatcher(Protocol):
    """Observes every command of the store, in the step that executes it."""

    sent_verbs: frozenset[str]
    """Commands of which ``sends`` is called."""
    brought_verbs: frozenset[str]
    """Commands of which ``brought`` is called."""

    def sends(self, link: SimLink, verb: str, arguments: tuple[Any, ...]) -> None:
        """A replica is about to send a command."""

    def stored(
        self,
        link: SimLink,
        verb: str,
        arguments: tuple[Any, ...],
        answer: object,
        *,
        is_late: bool,
    ) -> None:
        """The store has executed a command. ``is_late``: after its deadline."""

    def brought(self, link: SimLink, verb: str, arguments: tuple[Any, ...], answer: object) -> None:
        """The answer has reached the replica."""


class LockWatcher(Protocol):
    """Observes every command of the lock server."""

    def locked(
        self, verb: str, name: str, token: str, answer: object, *, is_late: bool, ttl_ms: int
    ) -> None:
        """The lock server has executed a command."""

    def sends(self, process: Process, verb: str, name: str, token: str) -> None:
        """A process is about to ask for a lock, to renew it or to release it."""

    def answered(
        self, process: Process, name: str, token: str, answer: object, ttl_ms: int
    ) -> None:
        """The answer has reached the process; ``None``: it has given up."""

    def told_not_owned(self, name: str, token: str) -> None:
        """The lock server has answered a holder that it does not own the lock."""


FIRED_AT_ONCE: Final = 3


class SimStore(MemoryStore):
    """A memory store whose state can be seen, copied and replaced.

    One step promotes one run: with the few runs of a scenario, a raised cap takes several steps.
    Likewise timers fire three at a time, so that tenants must take turns.
    """

    fired: Sequence[tuple[Counter[TenantId], frozenset[TenantId]]] = ()
    """Of each time that three timers fired in the last call: of whom, and who has more."""

    async def fire_timers(self, *, limit: int) -> tuple[RunId, ...]:
        fired: list[RunId] = []
        seen = []
        count = FIRED_AT_ONCE
        while count == FIRED_AT_ONCE and len(fired) < limit:
            count = min(FIRED_AT_ONCE, limit - len(fired))
            some = await super().fire_timers(limit=count)
            fired += some
            count = len(some)
            if count == FIRED_AT_ONCE:
                seen.append((Counter(self._tenants(some)), self._tenants_with_due_timers()))
        self.fired = seen
        return tuple(fired)

    def _tenants(self, run_ids: Iterable[RunId]) -> Iterator[TenantId]:
        return (self._state.runs[run_id].run.tenant for run_id in run_ids)

    def _tenants_with_due_timers(self) -> frozenset[TenantId]:
        now, files = self._state.now(), self._state.runs
        due = (
            id_ for id_, file in files.items() if min(file.timers.values(), default=now + 1) <= now
        )
        return frozenset(self._tenants(due))

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._state.promoted_at_once_max = 1

    @property
    def state(self) -> MemoryState:
        """The state of the store."""
        return self._state

    def copy(self) -> MemoryState:
        """A copy of the current state."""
        state = self._state
        ready, schedules = vars(state.ready), (state.leases, state.timers, state.outbox)
        shared = [vars(state)["_clock"], state.letter_order, ready["_turns"]]
        shared += [vars(each)["_order"] for each in schedules]
        # The clock is shared, and counters may go on counting.
        return copy.deepcopy(state, {id(each): each for each in shared})

    def become(self, state: MemoryState) -> None:
        """Replace the state by a copy: later changes are lost."""
        self._state = state


class StoreServer:
    """The store."""

    def __init__(self, clock: Clock, make: Callable[[Clock], SimStore] = SimStore) -> None:
        self.process = Process("store")
        self.clock = clock
        self.is_down = False
        self.real = make(clock)
        self._copy: MemoryState | None = None

    def replicate(self) -> None:
        """Copy the current state to the replica of the store."""
        self._copy = self.real.copy()

    def fail_over(self) -> bool:
        """Fail over to the replica, which lacks the latest changes."""
        state, self._copy = self._copy, None
        if state is not None:
            self.real.become(state)
        return state is not None


class StorePort:
    """The store port of one replica."""

    def __init__(self, link: SimLink, server: StoreServer, watcher: StoreWatcher) -> None:
        self.link = link
        self._server = server
        self._watcher = watcher

    @property
    def port(self) -> Store:
        """This object, typed as the store port."""
        return cast("Store", self)

    @property
    def admissions_max(self) -> int:
        """A constant of the adapter."""
        return self._server.real.admissions_max

    def prepare_admissions(self, admissions: Sequence[Admission]) -> Sequence[Admission]:
        """Done by the caller itself: nothing is sent."""
        return self._server.real.prepare_admissions(admissions)

    def __getattr__(self, verb: str) -> Callable[..., Awaitable[object]]:
        link, server, watcher = self.link, self._server, self._watcher
        # Looked up once a verb: most commands are polls, which cost little else.
        is_poll = verb in LOOKS
        is_sent_seen, is_answer_seen = verb in watcher.sent_verbs, verb in watcher.brought_verbs

        async def call(*arguments: Any, **named: Any) -> object:  # noqa: ANN401 - any verb's
            if is_sent_seen:
                watcher.sends(link, verb, arguments)
            bound_s, not_after = BOUND_S, None
            if "within_ms" in named:
                within_ms: int = named["within_ms"]
                bound_s = min(BOUND_S, within_ms / 1000)
                # In the time of the server, as in a real adapter.
                not_after = Instant(server.clock.now() + within_ms)

            def execute() -> object:
                is_late = not_after is not None and server.clock.now() > not_after
                if is_late:
                    named["within_ms"] = TOO_LATE
                try:
                    getattr(server.real, verb)(*arguments, **named).send(None)
                except StopIteration as done:  # as ``at_once``, without a call
                    answer = done.value
                else:
                    raise AssertionError(_WAITED)
                watcher.stored(link, verb, arguments, answer, is_late=is_late)
                return answer

            if is_poll and link.is_quick(verb):
                answer = execute()
            else:
                answer = await link.send(verb, execute, bound_s)
            if is_answer_seen:
                watcher.brought(link, verb, arguments, answer)
            return answer

        self.__dict__[verb] = call
        return call


class SimLocks(MemoryTurns):
    """Memory locks that can lose their data."""

    def forget(self) -> None:
        """Lose all data, like a lock server without a disk that restarts."""
        self._holders.clear()
        self._fences.clear()
        self._lines.clear()
        self._bells.clear()

    def fence_of(self, name: str) -> int | None:
        """The fence of the current holder."""
        holder = self._present(name)
        return None if holder is None else holder.fence

    def names(self) -> list[str]:
        """The names that are held."""
        return [name for name in sorted(self._holders) if self._present(name) is not None]


class LockServer:
    """The lock server."""

    def __init__(self, clock: LoopClock, make: Callable[[Clock], SimLocks] = SimLocks) -> None:
        self.process = Process("locks")
        self.clock = clock
        self.is_down = False
        self.real = make(clock)
        self.lost_at_s = -1e9
        """When it last lost its data."""

    def forget(self, *, behind_ms: int = 0) -> None:
        """Lose all data. The clock of the replacement may be behind."""
        self.real.forget()
        self.clock.step_ms -= behind_ms
        self.lost_at_s = asyncio.get_running_loop().time()


class LockPort:
    """The lock port of one replica."""

    is_local = False

    def __init__(self, link: SimLink, server: LockServer, watcher: LockWatcher) -> None:
        self.link = link
        self._server = server
        self._watcher = watcher

    async def acquire(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, floor: int = 0
    ) -> AcquireAnswer:
        clock = self._server.clock
        not_after = clock.now() + within_ms

        def execute() -> AcquireAnswer:
            is_late = clock.now() > not_after
            answer = at_once(
                self._server.real.acquire(
                    name,
                    token,
                    ttl_ms=ttl_ms,
                    within_ms=TOO_LATE if is_late else within_ms,
                    floor=floor,
                )
            )
            self._watcher.locked("acquire", name, token, answer, is_late=is_late, ttl_ms=ttl_ms)
            return answer

        self._watcher.sends(self.link.caller, "acquire", name, token)
        answer = await self.link.ask("acquire", execute, bound_s=min(BOUND_S, within_ms / 1000))
        self._watcher.answered(self.link.caller, name, token, answer, ttl_ms)
        return answer

    async def renew(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int
    ) -> Renewed | NotOwned:
        def execute() -> Renewed | NotOwned:
            answer = at_once(
                self._server.real.renew(name, token, ttl_ms=ttl_ms, within_ms=within_ms)
            )
            self._watcher.locked("renew", name, token, answer, is_late=False, ttl_ms=ttl_ms)
            return answer

        caller, watcher = self.link.caller, self._watcher
        watcher.sends(caller, "renew", name, token)
        try:
            answer = await self.link.ask("renew", execute, bound_s=min(BOUND_S, within_ms / 1000))
        except BaseException:
            watcher.answered(caller, name, token, None, ttl_ms)
            raise
        watcher.answered(caller, name, token, answer, ttl_ms)
        if isinstance(answer, NotOwned):
            self._watcher.told_not_owned(name, token)
        return answer

    async def release(self, name: str, token: str, *, within_ms: int) -> LockReleased | NotOwned:
        def execute() -> LockReleased | NotOwned:
            answer = at_once(self._server.real.release(name, token, within_ms=within_ms))
            self._watcher.locked("release", name, token, answer, is_late=False, ttl_ms=0)
            return answer

        self._watcher.sends(self.link.caller, "release", name, token)
        return await self.link.ask("release", execute, bound_s=min(BOUND_S, within_ms / 1000))

    async def inspect(self, name: str) -> LockView | None:
        return await self.link.ask("inspect", lambda: at_once(self._server.real.inspect(name)))

    async def list(self, prefix: str = "", *, limit: int = 1000) -> Sequence[LockView]:
        return await self.link.ask(
            "list", lambda: at_once(self._server.real.list(prefix, limit=limit))
        )

    async def hold(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, note: LockNote
    ) -> AcquireAnswer:
        def execute() -> AcquireAnswer:
            real = self._server.real
            return at_once(real.hold(name, token, ttl_ms=ttl_ms, within_ms=within_ms, note=note))

        return await self.link.ask("hold", execute, bound_s=min(BOUND_S, within_ms / 1000))

    async def notes(self, *, limit: int = 100) -> Sequence[LockNote]:
        return await self.link.ask("notes", lambda: at_once(self._server.real.notes(limit=limit)))

    async def drop_notes(self, notes: Sequence[LockNote]) -> None:
        await self.link.ask("drop_notes", lambda: at_once(self._server.real.drop_notes(notes)))

    async def release_by_hand(self, name: str, *, note: LockNote) -> bool:
        def execute() -> bool:
            was_held = at_once(self._server.real.release_by_hand(name, note=note))
            self._watcher.locked("force", name, "", was_held, is_late=False, ttl_ms=0)
            return was_held

        return await self.link.ask("release_by_hand", execute)

    async def force_release(self, name: str) -> bool:
        def execute() -> bool:
            was_held = at_once(self._server.real.force_release(name))
            self._watcher.locked("force", name, "", was_held, is_late=False, ttl_ms=0)
            return was_held

        return await self.link.ask("force_release", execute)

    async def ping(self) -> None:
        await self.link.ask("ping", lambda: None)

    async def close(self) -> None:
        """Do nothing: there is no connection."""
