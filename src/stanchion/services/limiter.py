"""Limits before the store: a limiter per tenant, and shared reads.

``TenantLimiter`` lets at most N calls of a tenant reach the store at the same time; the others wait
in the order of their arrival. ``SharedChecks`` coalesces the starts of a full tenant: one step of
the store finds the runs of their idempotency keys, and why the others are refused.

``Gathering`` sends calls of the same kind together that come while another one is under way.

``CoalescedRead`` lets callers join a read that is under way. ``SingleFlight`` is stricter: a caller
gets the result of a read that began after its call.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

from stanchion.core.admission import KeyRecord, Refused
from stanchion.core.lease import Moment
from stanchion.core.model import TenantId
from stanchion.ports.errors import BackendError
from stanchion.ports.records import StartsChecked, StartTerms

AT_ONCE: Final = 64
"""Chosen, not tuned: the number of callers of one hot tenant in the benchmarks."""


class TenantLimiter:
    """Limits how many calls of each tenant run at the same time."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._queues: dict[TenantId, _Queue] = {}

    async def enter(self, tenant: TenantId, *, may_share: bool) -> bool:
        """Wait for a place, to be returned with ``leave``. ``False``: there is no place for it.

        ``False`` is only returned with ``may_share``, after ``send_away``: then the caller can
        share another caller's answer.
        """
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = _Queue()
        if queue.inside < self._at_once:
            queue.inside += 1
            return True
        waiting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        queue.waiting.append((waiting, may_share))
        try:
            return await waiting
        except asyncio.CancelledError:
            # It may have been given a place in the same iteration in which it was cancelled.
            if waiting.done() and not waiting.cancelled() and waiting.result():
                self.leave(tenant)
            raise

    def is_busy(self, tenant: TenantId) -> bool:
        """Whether calls of the tenant are running."""
        return tenant in self._queues

    def leave(self, tenant: TenantId) -> None:
        """Give the place to the first caller that waits."""
        queue = self._queues[tenant]
        while queue.waiting:
            first, _ = queue.waiting.popleft()
            if not first.done():
                first.set_result(True)
                return
        queue.inside -= 1
        if not queue.inside:
            del self._queues[tenant]

    def send_away(self, tenant: TenantId) -> None:
        """End the waits of callers that may share an answer: ``enter`` returns ``False``."""
        queue = self._queues.get(tenant)
        if queue is None:
            return
        staying: deque[tuple[asyncio.Future[bool], bool]] = deque()
        for waiting, may_share in queue.waiting:
            if not may_share:
                staying.append((waiting, may_share))
            elif not waiting.done():
                waiting.set_result(False)
        queue.waiting = staying


class TenantTurns:
    """Lets one call of each tenant run at a time, in the order of their arrival."""

    def __init__(self) -> None:
        self._limiter = TenantLimiter(at_once=1)

    @asynccontextmanager
    async def turn(self, tenant: TenantId) -> AsyncIterator[None]:
        """Wait for the others of the tenant that came before."""
        await self._limiter.enter(tenant, may_share=False)
        try:
            yield
        finally:
            self._limiter.leave(tenant)


class _Queue:
    __slots__ = ("inside", "waiting")

    def __init__(self) -> None:
        self.inside = 0
        self.waiting: deque[tuple[asyncio.Future[bool], bool]] = deque()
        """Waiting callers, each with whether it may share an answer."""


FULL_TENANTS_MAX: Final = 4_096
CHECKED_MAX: Final = 1_000
"""Callers whose starts are checked in one step of the store."""

_Check: TypeAlias = Callable[
    [TenantId, Sequence[StartTerms], Collection[str]], Awaitable[StartsChecked | None]
]


class StartFound(NamedTuple):
    """What a check found for one caller: the run of its key, or why its start is refused."""

    known: KeyRecord | None
    refused: Refused | None


class SharedChecks:
    """Checks the starts of a full tenant together: many callers, one step of the store.

    A caller gets what a step finds that began after the caller asked. While one step is under way,
    the callers of the next one gather.
    """

    def __init__(self, check: _Check) -> None:
        """``check`` returns ``None`` if the store fails."""
        self._check = check
        self._full: OrderedDict[TenantId, _Waiting] = OrderedDict()

    def is_full(self, tenant: TenantId) -> bool:
        """Whether the store has refused a start of the tenant, and admitted none since."""
        return tenant in self._full

    def is_under_way(self, tenant: TenantId) -> bool:
        """Whether starts of the tenant are being checked now."""
        waiting = self._full.get(tenant)
        return waiting is not None and waiting.task is not None

    def note_fullness(self, tenant: TenantId, *, is_full: bool) -> None:
        """Note the store's verdict on a start: refused because no slot is free, or admitted.

        After an admission, callers that wait for the next check make their own queries.
        """
        if not is_full:
            waiting = self._full.pop(tenant, None)
            if waiting is not None:
                waiting.dismiss()
        elif tenant not in self._full:
            self._full[tenant] = _Waiting()
            if len(self._full) > FULL_TENANTS_MAX:
                self._full.popitem(last=False)[1].dismiss()

    async def check(
        self, tenant: TenantId, terms: StartTerms, key: str | None
    ) -> StartFound | None:
        """The store's answer to this start. ``None``: the caller must make its own query."""
        waiting = self._full.get(tenant)
        if waiting is None:
            return None
        asked: asyncio.Future[StartFound | None] = asyncio.get_running_loop().create_future()
        waiting.callers.append(_Asked(asked, terms, key))
        if waiting.task is None:
            # Begins in the next iteration of the event loop, with all callers of this one.
            waiting.task = asyncio.create_task(self._check_all(tenant, waiting))
        return await asked

    async def _check_all(self, tenant: TenantId, waiting: _Waiting) -> None:
        try:
            while waiting.callers:
                some, waiting.callers = (
                    waiting.callers[:CHECKED_MAX],
                    waiting.callers[CHECKED_MAX:],
                )
                await self._check_some(tenant, [each for each in some if not each.found.done()])
        finally:
            waiting.task = None
            waiting.dismiss()

    async def _check_some(self, tenant: TenantId, callers: Sequence[_Asked]) -> None:
        groups: dict[object, tuple[int, StartTerms]] = {}
        numbers = [
            groups.setdefault(_group(each.terms), (len(groups), each.terms))[0] for each in callers
        ]
        keys = dict.fromkeys(each.key for each in callers if each.key is not None)
        checked: StartsChecked | None = None
        try:
            if callers:
                terms = [terms for _, terms in groups.values()]
                checked = await self._check(tenant, terms, keys)
        finally:
            for caller, number in zip(callers, numbers, strict=True):
                if caller.found.done():
                    continue
                if checked is None:
                    caller.found.set_result(None)
                    continue
                known = None if caller.key is None else checked.known.get(caller.key)
                caller.found.set_result(StartFound(known, checked.refused[number]))


class _Asked(NamedTuple):
    """A caller that waits for a check."""

    found: asyncio.Future[StartFound | None]
    terms: StartTerms
    key: str | None


class _Waiting:
    """The callers that wait before one full tenant."""

    __slots__ = ("callers", "task")

    def __init__(self) -> None:
        self.callers: list[_Asked] = []
        """Callers that came after the current step began. They share the next one."""
        self.task: asyncio.Task[None] | None = None

    def dismiss(self) -> None:
        """Let every waiting caller make its own query."""
        callers, self.callers = self.callers, []
        for each in callers:
            if not each.found.done():
                each.found.set_result(None)


def _group(terms: StartTerms) -> object:
    """Equal for the starts of one workflow: their terms have the same members, not only equal."""
    return id(terms.definitions), id(terms.budget), terms.on_full


_Key = TypeVar("_Key")
_Found = TypeVar("_Found")
_Row = TypeVar("_Row")

TOGETHER_MAX: Final = 50
"""Calls that are sent together. More would not be cheaper: Redis takes so many in one script."""
ENOUGH: Final = 8
"""With so many that wait, they do not wait for the end of those under way."""
TOGETHER_MS: Final = 50
"""How far apart their time limits may be: the earliest one is that of all."""


class Gathering(Generic[_Row, _Found]):
    """Sends calls of the same kind to the store together.

    The first call is sent at once, alone. Calls that arrive while it is under way are collected
    and sent together when it has ended, or when there are ``ENOUGH`` of them.
    """

    def __init__(
        self, send: Callable[[Sequence[_Row]], Awaitable[Sequence[_Found] | None]]
    ) -> None:
        """``send`` returns an answer for each call; ``None``: each must be sent alone."""
        self._send = send
        self._kinds: dict[Hashable, _Gathered[_Row, _Found]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def ask(
        self,
        kind: Hashable,
        row: _Row,
        ends_at: Moment,
        alone: Callable[[], Awaitable[_Found]],
    ) -> _Found:
        """Send the call, alone or together with others, and return its answer."""
        gathered = self._kinds.get(kind)
        if gathered is not None:
            loop = asyncio.get_running_loop()
            answer: asyncio.Future[_Found | None] = loop.create_future()
            gathered.waiting.append(_GatheredCall(row, ends_at, answer))
            if len(gathered.waiting) >= ENOUGH and not gathered.is_due:
                gathered.is_due = True
                loop.call_soon(self._flush, kind, gathered)
            found = await answer
            return await alone() if found is None else found
        gathered = self._kinds[kind] = _Gathered()
        try:
            return await alone()
        finally:
            self._ended(kind, gathered)

    def _ended(self, kind: Hashable, gathered: _Gathered[_Row, _Found]) -> None:
        gathered.under_way -= 1
        if gathered.waiting:
            self._flush(kind, gathered)
        if not gathered.under_way and not gathered.waiting:
            del self._kinds[kind]

    def _flush(self, kind: Hashable, gathered: _Gathered[_Row, _Found]) -> None:
        gathered.is_due = False
        some: list[_GatheredCall[_Row, _Found]] = []
        waiting = gathered.waiting
        while waiting and len(some) < TOGETHER_MAX:
            if some and waiting[0].ends_at > some[0].ends_at + TOGETHER_MS:
                break
            call = waiting.popleft()
            if not call.answer.done():
                some.append(call)
        if some:
            gathered.under_way += 1
            sending = self._send_some(kind, gathered, some)
            # Not in the context of one of the callers: log lines would have its request's id.
            task = asyncio.create_task(sending, name="gathered", context=Context())
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send_some(
        self,
        kind: Hashable,
        gathered: _Gathered[_Row, _Found],
        some: Sequence[_GatheredCall[_Row, _Found]],
    ) -> None:
        try:
            found = await self._send([each.row for each in some])
            answers: Sequence[_Found | None] = [None] * len(some) if found is None else found
            for each, answer in zip(some, answers, strict=True):
                if not each.answer.done():
                    each.answer.set_result(answer)
        except BackendError as error:
            for each in some:
                if not each.answer.done():
                    # An object for each caller: each collects its own traceback.
                    each.answer.set_exception(type(error)(*error.args))
        except Exception as error:  # noqa: BLE001 - raised again for the callers
            for each in some:
                if not each.answer.done():
                    each.answer.set_exception(error)
        finally:
            for each in some:
                each.answer.cancel()  # of those without an answer
            self._ended(kind, gathered)


class _GatheredCall(NamedTuple, Generic[_Row, _Found]):
    row: _Row
    ends_at: Moment
    answer: asyncio.Future[_Found | None]
    """``None``: the call must be sent alone."""


class _Gathered(Generic[_Row, _Found]):
    """Calls of one kind."""

    __slots__ = ("is_due", "under_way", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[_GatheredCall[_Row, _Found]] = deque()
        self.under_way = 1
        """How often calls were sent that have not ended."""
        self.is_due = False


class CoalescedRead(Generic[_Key, _Found]):
    """Lets callers join a read of the same key that is under way."""

    def __init__(self) -> None:
        self._waiting: dict[_Key, list[asyncio.Future[_Found | None]]] = {}

    def is_under_way(self, key: _Key) -> bool:
        """Whether the key is being read now."""
        return key in self._waiting

    async def found(self, key: _Key) -> _Found | None:
        """The result of the read under way; ``None`` if its task is cancelled.

        Raises ``BackendError`` if the read does.
        """
        waiting: asyncio.Future[_Found | None] = asyncio.get_running_loop().create_future()
        self._waiting[key].append(waiting)
        return await waiting

    async def read(self, key: _Key, read: Callable[[], Awaitable[_Found]]) -> _Found:
        """Read, and give the result to all callers that join meanwhile."""
        assert key not in self._waiting, "the key is being read already"
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
        """The result, or the exception, of a read that begins after this call.

        A cancelled caller does not cancel the read: others may wait for it.
        """
        flight: asyncio.Task[_Found] | None = self._next.get(key)
        if flight is None:
            flight = asyncio.create_task(self._fly(key, self._under_way.get(key), read))
            self._next[key] = flight
            flight.add_done_callback(retrieve)
        return await asyncio.shield(flight)

    async def _fly(
        self, key: Hashable, before: asyncio.Task[Any] | None, read: Callable[[], Awaitable[_Found]]
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
    """Retrieve the exception of a shared task, so that asyncio does not log it as never awaited."""
    if not flight.cancelled():
        flight.exception()
