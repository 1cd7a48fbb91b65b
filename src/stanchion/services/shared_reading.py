"""Shared reading: what many want to read at once is read once.

Whoever comes first reads, and whoever comes meanwhile waits for what is found. It was asked for
before they came: whether that is new enough is theirs to say, who can ask again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from stanchion.ports.errors import BackendError

__all__ = ["SharedReading"]

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
