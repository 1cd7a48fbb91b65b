"""Shared reading: what many want to read at once is read once.

``SharedReading``: the first caller reads, and callers that come meanwhile wait for what it finds.
The read began before they came: whether that is new enough is theirs to say, who can ask again.

``SingleFlight``: callers share a read only if it begins after they have asked, so that what they
get is never older than their question. At most one read of a key is under way, and one follows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Generic, TypeVar

from stanchion.ports.errors import BackendError

__all__ = ["SharedReading", "SingleFlight", "retrieve"]

_Key = TypeVar("_Key")
_Found = TypeVar("_Found")


class SharedReading(Generic[_Key, _Found]):
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
