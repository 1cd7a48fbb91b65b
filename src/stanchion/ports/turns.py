"""The turns port: locks that can be waited for in line.

    acquire  ->  Held       another has the name, or others have waited for it longer
    join     ->  Place      a ticket, and when to look again if nobody rings
    bell     ->  True       somebody let go, and it is our turn
    acquire  ->  Granted    the ticket is gone
    leave                   for whoever does not wait any longer

The line orders those who wait; it grants nothing. Who has a name is decided by ``acquire`` alone.
So a line that was lost, or a bell that nobody heard, costs order and time, never exclusion.

A ticket runs out unless it is renewed by joining again: whoever crashed while waiting holds the
others up for that long and no longer. A token waits for one name at a time.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from stanchion.ports.locks import Locks

__all__ = ["Place", "Turns"]


class Place(msgspec.Struct, frozen=True):
    """A place in the line for a name."""

    ahead: int
    """How many were there before."""
    look_again_in_ms: int
    """When things may change without a bell, because a term or a ticket ends. 0: your turn."""


class Turns(Locks, Protocol):
    """Locks whose ``acquire`` grants a name that others wait for to the first in line only.

    Whoever has the name already gets the same answer as ever. ``release`` rings the bell of the
    first in line.
    """

    async def join(self, name: str, token: str, *, ticket_ms: int, within_ms: int) -> Place:
        """Stand in line, at its end; or, if the token stands there already, stay for longer."""

    async def bell(self, name: str, token: str, *, at_most_ms: int) -> bool:
        """Wait until the bell rings for this token, which has joined. ``False``: it did not.

        A bell that rang since the token joined, or last waited, is not missed. Never raises for a
        store that is away: the next call that needs an answer will.
        """

    async def leave(self, name: str, token: str, *, within_ms: int) -> None:
        """Give the place up. If the name is free, the bell rings for whoever is first now."""
