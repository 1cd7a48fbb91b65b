"""Fullness: callers of a full tenant share an answer.

When a tenant is full, a thousand callers would ask the store the same question and hear the same
word. So whoever comes while the question is under way waits for the next one, and one of those who
wait asks it, for all of them. They came before it was asked: what it finds was so while they were
there, and each of them could have been the one who asked.

Only "full" is shared. If somebody is admitted, everybody asks for himself; if a question fails, it
fails for the one who asked, and the next one asks it. Nobody waits who is the first to find a
tenant full, or has a key: a key may stand for a run that is there already.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

from stanchion.core.admission import Full
from stanchion.core.model import TenantId

__all__ = ["Fullness", "Question"]

ROOMS_MAX: Final = 4_096


class Question:
    """A place in the room before a full tenant: for one who asks, on behalf of all who share."""

    __slots__ = ("room",)

    def __init__(self, room: _Room) -> None:
        self.room = room


class Fullness:
    """The tenants that were full when last asked, and who waits before each of them."""

    def __init__(self) -> None:
        self._rooms: OrderedDict[TenantId, _Room] = OrderedDict()

    def is_full(self, tenant: TenantId) -> bool:
        """Whether it was when it was last asked for."""
        return tenant in self._rooms

    async def enter(self, tenant: TenantId) -> Full | Question | None:
        """What the tenant's callers are told now; or a question to ask, and to ``close``.

        ``None``: nothing is known, ask without being waited for.
        """
        room = self._rooms.get(tenant)
        if room is None:
            return None
        if not room.is_asked:
            room.is_asked = True
            return Question(room)
        waiting: asyncio.Future[Full | Question | None] = asyncio.get_running_loop().create_future()
        room.waiting.append(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            # It may have been made the one who asks in the moment in which it left.
            if waiting.done() and not waiting.cancelled():
                asks = waiting.result()
                if isinstance(asks, Question):
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

    def close(self, question: Question, full: Full | None) -> None:
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
            _tell(left[0], Question(room))


class _Room:
    __slots__ = ("is_asked", "sharing", "waiting")

    def __init__(self) -> None:
        self.is_asked = False
        self.sharing: list[asyncio.Future[Full | Question | None]] = []
        """They are told what the question under way finds."""
        self.waiting: list[asyncio.Future[Full | Question | None]] = []
        """They came after it was asked."""

    def dismiss(self) -> None:
        """Let everybody ask for himself. Whoever asks now has nobody to tell."""
        for each in (*self.sharing, *self.waiting):
            _tell(each, None)
        self.sharing, self.waiting = [], []
        self.is_asked = False


def _tell(one: asyncio.Future[Full | Question | None], word: Full | Question | None) -> None:
    if not one.done():
        one.set_result(word)
