"""Doors: those of one process who want the same name go in one after the other.

A process asks the store for a name once, however many of its tasks want it. The others wait here,
in the order in which they came, and cost the store nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Doors"]


class Doors:
    """One door for every name that somebody has or wants."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}
        """Those who wait, at every door that somebody is behind."""

    async def enter(self, name: str, *, wait_s: float) -> bool:
        """Go in alone, in turn. ``False``: not within ``wait_s``. Whoever is in must ``exit``."""
        line = self._lines.get(name)
        if line is None:
            self._lines[name] = deque()
            return True
        if wait_s <= 0:
            return False
        turn = asyncio.get_running_loop().create_future()
        line.append(turn)
        try:
            async with asyncio.timeout(wait_s):
                await turn
        except BaseException as error:
            if turn.cancelled():
                line.remove(turn)
            else:
                self.exit(name)  # Let in at the very moment of leaving: the next one goes.
            if isinstance(error, TimeoutError):
                return False
            raise
        return True

    def exit(self, name: str) -> None:
        """Let the next one in."""
        line = self._lines[name]
        while line:
            turn = line.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._lines[name]
