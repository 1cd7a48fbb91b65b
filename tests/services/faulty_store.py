"""A store seen over a bad line: every verb can be slow, fail, lose its answer, or end the caller.

Each replica has a line of its own to the one store behind it. Every call takes a moment each way,
so that replicas meet between their calls as real ones do.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias, cast

from stanchion.ports.errors import BackendTimeout, BackendUnavailable
from stanchion.ports.records import Admission
from stanchion.ports.store import Store
from tests.services.faulty_locks import Fault

__all__ = ["FaultyStore", "Meanwhile", "OnCall"]

EACH_WAY_S: Final = 0.001
TIMEOUT_S: Final = 2.0
SLOW_S: Final = 1.0
"""Longer than a busy machine stands still."""
"""What an adapter waits at most: the port promises that every call ends within a bound."""

_Call: TypeAlias = Callable[..., Awaitable[object]]
OnCall: TypeAlias = Callable[[str, bool], None]
Meanwhile: TypeAlias = Callable[[], Awaitable[object]]
"""Something that happens while a call is under way, before the store sees it."""


class FaultyStore:
    """The store port, with a script of faults for each verb; when it runs out, all is well."""

    def __init__(self, real: Store) -> None:
        self.real = real
        self.calls: Counter[str] = Counter()
        self.each_way_s = EACH_WAY_S
        self.on_call: OnCall = lambda _verb, _is_done: None
        """Told of each call, before the store sees it and once it is done."""
        self.chokes_on: Callable[[object], bool] = lambda _argument: False
        """What makes a verb that is given it fail with a bug of the adapter's, each time."""
        self._scripts: defaultdict[str, deque[Fault | Meanwhile]] = defaultdict(deque)
        self._always: dict[str, Fault] = {}
        self._away: Fault = Fault.NONE
        self._is_cut = False

    @property
    def port(self) -> Store:
        """Itself, as whoever needs a store sees it."""
        return cast("Store", self)

    def script(self, verb: str, *faults: Fault | Meanwhile) -> None:
        """The next calls of a verb end like this, or meet this on their way."""
        self._scripts[verb].extend(faults)

    def always(self, fault: Fault, *verbs: str) -> None:
        """From now on all calls of these verbs end like this."""
        for verb in verbs:
            self._always[verb] = fault

    def away(self, how: Fault = Fault.ERROR) -> None:
        """From now on every call of every verb ends like this."""
        self._away = how

    def back(self) -> None:
        """All is well again."""
        self._away = Fault.NONE

    def cut(self) -> None:
        """Whoever is at this end is dead: nothing it sends arrives, nothing comes back."""
        self._is_cut = True

    @property
    def admissions_max(self) -> int:
        """A constant of the adapter."""
        return self.real.admissions_max

    def prepare_admissions(self, admissions: Sequence[Admission]) -> Sequence[Admission]:
        """Done by the caller itself: no fault can happen to it."""
        return self.real.prepare_admissions(admissions)

    def __getattr__(self, verb: str) -> _Call:
        really: _Call = getattr(self.real, verb)

        async def call(*arguments: object, **named: object) -> object:
            if any(map(self.chokes_on, arguments)):
                self.calls[verb] += 1
                raise ValueError("cannot be written")
            return await self._call(verb, lambda: really(*arguments, **named))

        return call

    async def _call(self, verb: str, really: Callable[[], Awaitable[object]]) -> object:
        self.calls[verb] += 1
        self.on_call(verb, False)
        await self._travel()
        script = self._scripts[verb]
        next_one = script.popleft() if script else self._always.get(verb, self._away)
        if isinstance(next_one, Fault):
            fault = next_one
        else:
            fault = Fault.NONE
            await next_one()
        answer = await self._meet(fault, really)
        self.on_call(verb, True)
        await self._travel()
        return answer

    async def _travel(self) -> None:
        if self._is_cut:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(self.each_way_s)

    async def _meet(self, fault: Fault, really: Callable[[], Awaitable[object]]) -> object:
        match fault:
            case Fault.NONE:
                return await really()
            case Fault.BUG:
                raise ValueError("a bug in the adapter")
            case Fault.ERROR:
                raise BackendUnavailable("connection refused")
            case Fault.HANG:
                await asyncio.sleep(TIMEOUT_S)
                raise BackendTimeout("no answer")
            case Fault.LOST_REPLY:
                await really()
                await asyncio.sleep(TIMEOUT_S)
                raise BackendTimeout("no answer")
            case Fault.SLOW:
                await asyncio.sleep(SLOW_S)
                return await really()
            case Fault.LATE | Fault.NOT_OWNED:
                raise AssertionError("a store does not answer like this")
