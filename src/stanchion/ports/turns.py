"""The turns port: locks with a queue of waiters (first in, first out).

    acquire  ->  Held       another holder has the lock, or others wait for it
    join     ->  Place      a ticket in the queue, and when to check again without a bell
    bell     ->  True       the lock was released, and this token is first in the queue
    acquire  ->  Granted    the ticket is removed
    leave                   gives up the ticket

The queue only orders the waiters; only ``acquire`` grants a lock. So a lost queue or a lost bell
costs order and time, but not mutual exclusion.

A ticket expires unless it is renewed by joining again, so a crashed waiter blocks the others for
that long at most. A token waits for one name at a time.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from stanchion.ports.locks import Locks


class Place(msgspec.Struct, frozen=True):
    """A place in the queue for a lock."""

    ahead: int
    """The number of waiters before this one."""
    look_again_in_ms: int
    """When to check again without a bell: a term or a ticket ends then. 0: at once."""


class Turns(Locks, Protocol):
    """Locks whose ``acquire`` grants a lock with waiters only to the first of them.

    The current holder gets the same answer as from ``Locks``. ``release`` rings the bell of the
    first waiter.
    """

    async def join(self, name: str, token: str, *, ticket_ms: int, within_ms: int) -> Place:
        """Join the queue at its end; if the token is in the queue, renew its ticket."""

    async def bell(self, name: str, token: str, *, at_most_ms: int) -> bool:
        """Wait for the bell of this token, which has joined. ``False`` if it did not ring in time.

        A bell that rang since the token joined or last waited is not missed. Does not raise if the
        store is unavailable: the next call that needs an answer will.
        """

    async def leave(self, name: str, token: str, *, within_ms: int) -> None:
        """Leave the queue. If the lock is free, the bell of the first waiter rings."""
