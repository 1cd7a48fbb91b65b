"""Limits before the store: a limiter per tenant, and shared reads.

``TenantLimiter`` lets at most N calls of a tenant reach the store at the same time; the others wait
in the order of their arrival. ``SharedRefusals`` coalesces the checks of a full tenant: one caller
queries the store, and the callers that waited before the query began get its refusal.

``CoalescedRead`` lets callers join a read that is under way. ``SingleFlight`` is stricter: a caller
gets what a read finds that began after it asked.
"""

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
    "RefusalQuery",
    "SharedRefusals",
    "SingleFlight",
    "TenantLimiter",
    "retrieve",
]


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


class _Queue:
    __slots__ = ("inside", "waiting")

    def __init__(self) -> None:
        self.inside = 0
        self.waiting: deque[tuple[asyncio.Future[bool], bool]] = deque()
        """Waiting callers, each with whether it may share an answer."""


FULL_TENANTS_MAX: Final = 4_096


class RefusalQuery:
    """The right and duty to query the store for all callers that share the answer."""

    __slots__ = ("shared",)

    def __init__(self, shared: _Shared) -> None:
        self.shared = shared


class SharedRefusals:
    """Coalesces the admission checks of tenants that were full at the last check."""

    def __init__(self) -> None:
        self._full: OrderedDict[TenantId, _Shared] = OrderedDict()

    def is_full(self, tenant: TenantId) -> bool:
        """Whether the tenant was full at the last check."""
        return tenant in self._full

    async def enter(self, tenant: TenantId) -> Full | RefusalQuery | None:
        """Return a shared refusal, or a query that this caller must make and then ``close``.

        ``None``: the tenant is not known to be full; the caller queries the store for itself.
        """
        shared = self._full.get(tenant)
        if shared is None:
            return None
        if not shared.is_asked:
            shared.is_asked = True
            return RefusalQuery(shared)
        waiting: asyncio.Future[Full | RefusalQuery | None] = (
            asyncio.get_running_loop().create_future()
        )
        shared.waiting.append(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            # It may have been given the query in the same iteration in which it was cancelled.
            if waiting.done() and not waiting.cancelled():
                asks = waiting.result()
                if isinstance(asks, RefusalQuery):
                    self.close(asks, None)
            raise

    def heard(self, tenant: TenantId, full: Full | None) -> None:
        """Note the store's verdict on a start: ``Full``, or ``None`` after an admission.

        After an admission, every waiting caller queries the store for itself.
        """
        if full is None:
            shared = self._full.pop(tenant, None)
            if shared is not None:
                shared.dismiss()
        elif tenant not in self._full:
            self._full[tenant] = _Shared()
            if len(self._full) > FULL_TENANTS_MAX:
                self._full.popitem(last=False)[1].dismiss()

    def close(self, query: RefusalQuery, full: Full | None) -> None:
        """End a query: pass its refusal to the callers that share it, and start the next query.

        ``None``: the query found nothing to share.
        """
        shared = query.shared
        if full is not None:
            for each in shared.sharing:
                _tell(each, full)
            shared.sharing = []
        left = [each for each in (*shared.sharing, *shared.waiting) if not each.done()]
        shared.sharing, shared.waiting = left[1:], []
        shared.is_asked = bool(left)
        if left:
            _tell(left[0], RefusalQuery(shared))


class _Shared:
    """The callers that wait before one full tenant."""

    __slots__ = ("is_asked", "sharing", "waiting")

    def __init__(self) -> None:
        self.is_asked = False
        self.sharing: list[asyncio.Future[Full | RefusalQuery | None]] = []
        """They share the answer of the query under way."""
        self.waiting: list[asyncio.Future[Full | RefusalQuery | None]] = []
        """They arrived after it began, and share the next one's."""

    def dismiss(self) -> None:
        """Let every waiting caller query the store for itself."""
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
    """Retrieve the exception of a shared task, so that asyncio does not log it as never awaited."""
    if not flight.cancelled():
        flight.exception()
