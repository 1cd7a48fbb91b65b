"""Limits and shared answers: how many callers of a tenant ask the store, and who shares a read."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Final, Generic, TypeVar

from stanchion.core.admission import Full
from stanchion.core.model import TenantId
from stanchion.ports.errors import BackendError

__all__ = [
    "AT_ONCE",
    "CoalescedRead",
    "Deadline",
    "Deadlines",
    "RefusalQuery",
    "SharedRefusals",
    "SingleFlight",
    "TenantLimiter",
    "retrieve",
]


AT_ONCE: Final = 64
"""Chosen, not tuned: what one hot tenant's callers are in the benchmarks, so none of them waits."""


class TenantLimiter:
    """Lets the callers of each tenant through."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._lines: dict[TenantId, _Line] = {}

    async def enter(self, tenant: TenantId, *, may_share: bool) -> bool:
        """Wait for a place, to be given back with ``leave``. ``False``: sent away without one.

        Sent away are only those who may share an answer.
        """
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line()
        if line.inside < self._at_once:
            line.inside += 1
            return True
        waiting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        line.waiting.append((waiting, may_share))
        try:
            return await waiting
        except asyncio.CancelledError:
            # It may have been let through in the moment in which it left.
            if waiting.done() and not waiting.cancelled() and waiting.result():
                self.leave(tenant)
            raise

    def leave(self, tenant: TenantId) -> None:
        """Give the place to whoever is next."""
        line = self._lines[tenant]
        while line.waiting:
            first, _ = line.waiting.popleft()
            if not first.done():
                first.set_result(True)
                return
        line.inside -= 1
        if not line.inside:
            del self._lines[tenant]

    def send_away(self, tenant: TenantId) -> None:
        """Tell everybody in the line who may share an answer that there is one to be shared."""
        line = self._lines.get(tenant)
        if line is None:
            return
        staying: deque[tuple[asyncio.Future[bool], bool]] = deque()
        for waiting, may_share in line.waiting:
            if not may_share:
                staying.append((waiting, may_share))
            elif not waiting.done():
                waiting.set_result(False)
        line.waiting = staying


class _Line:
    __slots__ = ("inside", "waiting")

    def __init__(self) -> None:
        self.inside = 0
        self.waiting: deque[tuple[asyncio.Future[bool], bool]] = deque()
        """Each with whether it may share an answer."""


ROOMS_MAX: Final = 4_096


class RefusalQuery:
    """A place in the room before a full tenant: for one who asks, on behalf of all who share."""

    __slots__ = ("room",)

    def __init__(self, room: _Room) -> None:
        self.room = room


class SharedRefusals:
    """The tenants that were full when last asked, and who waits before each of them."""

    def __init__(self) -> None:
        self._rooms: OrderedDict[TenantId, _Room] = OrderedDict()

    def is_full(self, tenant: TenantId) -> bool:
        """Whether it was when it was last asked for."""
        return tenant in self._rooms

    async def enter(self, tenant: TenantId) -> Full | RefusalQuery | None:
        """What the tenant's callers are told now; or a question to ask, and to ``close``.

        ``None``: nothing is known, ask without being waited for.
        """
        room = self._rooms.get(tenant)
        if room is None:
            return None
        if not room.is_asked:
            room.is_asked = True
            return RefusalQuery(room)
        waiting: asyncio.Future[Full | RefusalQuery | None] = (
            asyncio.get_running_loop().create_future()
        )
        room.waiting.append(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            # It may have been made the one who asks in the moment in which it left.
            if waiting.done() and not waiting.cancelled():
                asks = waiting.result()
                if isinstance(asks, RefusalQuery):
                    self.close(asks, None)
            raise

    def heard(self, tenant: TenantId, full: Full | None) -> None:
        """What the store said to anybody who wanted a slot."""
        if full is None:
            room = self._rooms.pop(tenant, None)
            if room is not None:
                room.dismiss()
        elif tenant not in self._rooms:
            self._rooms[tenant] = _Room()
            if len(self._rooms) > ROOMS_MAX:
                self._rooms.popitem(last=False)[1].dismiss()

    def close(self, question: RefusalQuery, full: Full | None) -> None:
        """What came of a question: the word for those who shared it, and the next one asks."""
        room = question.room
        if full is not None:
            for each in room.sharing:
                _tell(each, full)
            room.sharing = []
        left = [each for each in (*room.sharing, *room.waiting) if not each.done()]
        room.sharing, room.waiting = left[1:], []
        room.is_asked = bool(left)
        if left:
            _tell(left[0], RefusalQuery(room))


class _Room:
    __slots__ = ("is_asked", "sharing", "waiting")

    def __init__(self) -> None:
        self.is_asked = False
        self.sharing: list[asyncio.Future[Full | RefusalQuery | None]] = []
        """They are told what the question under way finds."""
        self.waiting: list[asyncio.Future[Full | RefusalQuery | None]] = []
        """They came after it was asked."""

    def dismiss(self) -> None:
        """Let everybody ask for himself. Whoever asks now has nobody to tell."""
        for each in (*self.sharing, *self.waiting):
            _tell(each, None)
        self.sharing, self.waiting = [], []
        self.is_asked = False


def _tell(
    one: asyncio.Future[Full | RefusalQuery | None], word: Full | RefusalQuery | None
) -> None:
    if not one.done():
        one.set_result(word)


_Key = TypeVar("_Key")
_Found = TypeVar("_Found")


class CoalescedRead(Generic[_Key, _Found]):
    """What is being read now, and who waits for that."""

    def __init__(self) -> None:
        self._waiting: dict[_Key, list[asyncio.Future[_Found | None]]] = {}

    def is_under_way(self, key: _Key) -> bool:
        """Whether somebody reads it now."""
        return key in self._waiting

    async def found(self, key: _Key) -> _Found | None:
        """What the one who reads it finds; ``None`` if that one leaves. Raises ``BackendError``."""
        waiting: asyncio.Future[_Found | None] = asyncio.get_running_loop().create_future()
        self._waiting[key].append(waiting)
        return await waiting

    async def read(self, key: _Key, read: Callable[[], Awaitable[_Found]]) -> _Found:
        """Read it, for all who come meanwhile."""
        assert key not in self._waiting, "there is one who reads it"
        others = self._waiting[key] = []
        found: _Found | None = None
        failure: BackendError | None = None
        try:
            found = await read()
        except BackendError as error:
            failure = error
            raise
        finally:
            del self._waiting[key]
            for each in others:
                if each.done():
                    continue
                if failure is None:
                    each.set_result(found)
                else:
                    each.set_exception(failure)
        return found


class SingleFlight:
    """Coalesces reads of the same key: callers that ask before a read begins share it."""

    def __init__(self) -> None:
        self._next: dict[Hashable, asyncio.Task[Any]] = {}
        self._under_way: dict[Hashable, asyncio.Task[Any]] = {}

    async def read(self, key: Hashable, read: Callable[[], Awaitable[_Found]]) -> _Found:
        """What a read that begins after this call finds. Raises what it raises.

        A caller that is cancelled does not take the read along: others may wait for it.
        """
        flight: asyncio.Task[_Found] | None = self._next.get(key)
        if flight is None:
            flight = asyncio.create_task(self._fly(key, self._under_way.get(key), read))
            self._next[key] = flight
            flight.add_done_callback(retrieve)
        return await asyncio.shield(flight)

    async def _fly(
        self,
        key: Hashable,
        before: asyncio.Task[Any] | None,
        read: Callable[[], Awaitable[_Found]],
    ) -> _Found:
        if before is not None:
            await asyncio.wait({before})
        flight = self._under_way[key] = self._next.pop(key)
        try:
            return await read()
        finally:
            if self._under_way.get(key) is flight:
                del self._under_way[key]


def retrieve(flight: asyncio.Future[Any]) -> None:
    """Look at a failure, so that one that nobody waits for is no warning."""
    if not flight.cancelled():
        flight.exception()


class Deadline:
    """Until when one task may go on. When the time is over, the task is cancelled."""

    __slots__ = ("_all", "_cancelling", "_task", "due_s", "is_abandoned", "is_over")

    def __init__(self, everyone: dict[Deadline, None], due_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._all = everyone
        self.due_s = due_s
        self.is_over = False
        self.is_abandoned = False
        everyone[self] = None

    def end(self) -> None:
        """The work is done, in time or not."""
        self._all.pop(self, None)

    def expire(self) -> None:
        """The time is over."""
        if self in self._all:
            self.is_over = True
            self._all.pop(self, None)
            self._task.cancel()

    def abandon(self) -> None:
        """The caller has left: there is nobody to go on for."""
        self.is_abandoned = True
        self.expire()

    def is_why(self) -> bool:
        """Whether the task was cancelled from here, and for nothing else."""
        return self.is_over and self._task.uncancel() <= self._cancelling


class Deadlines:
    """All deadlines of one place, kept to within so many seconds."""

    def __init__(self, *, sweep_s: float) -> None:
        self._sweep_s = sweep_s
        self._all: dict[Deadline, None] = {}
        """In the order of their beginning, so that the same history has the same end."""
        self._sweep: asyncio.TimerHandle | None = None

    def begin(self, within_s: float) -> Deadline:
        """A deadline for the task that asks."""
        loop = asyncio.get_running_loop()
        if self._sweep is None:
            self._sweep = loop.call_later(self._sweep_s, self._look)
        return Deadline(self._all, loop.time() + within_s)

    def extend(self, deadline: Deadline, within_s: float) -> None:
        """So long from now on, instead."""
        deadline.due_s = asyncio.get_running_loop().time() + within_s

    def close(self) -> None:
        """Look no more."""
        if self._sweep is not None:
            self._sweep.cancel()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for deadline in [each for each in self._all if each.due_s <= now_s]:
            deadline.expire()
        self._sweep = loop.call_later(self._sweep_s, self._look) if self._all else None
