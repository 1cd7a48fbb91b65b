"""Patience: what must be executed while its caller waits, or not at all.

A server that was stopped executes what it was sent when it wakes up, whoever has gone meanwhile. So
such a request says, in the server's own time, until when it is wanted, and the script asks before
everything else. In a cluster a request may be sent on to a server with another clock: by how much
those differ, it may be late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from stanchion.adapters.redis.connection import Reply
from stanchion.adapters.redis.fleet import Fleet, Request
from stanchion.core.model import Instant

__all__ = ["TOO_LATE", "ask_in_time"]

TOO_LATE: Final = [b"too_late"]
"""What every such script answers when its time is over."""


async def ask_in_time(
    fleet: Fleet, slot: int, within_ms: int, make: Callable[[Instant], Request]
) -> Reply:
    """Ask for what has to be executed within ``within_ms``. ``make`` is given the time by which."""
    loop = asyncio.get_running_loop()
    latest = loop.time() + min(within_ms / 1000, fleet.timeout_s)
    # One that is late already is asked all the same: it may have been executed in time before.
    deadline = latest if within_ms > 0 else fleet.deadline()
    reply = await _ask(fleet, slot, make, latest, deadline)
    if reply == TOO_LATE and loop.time() < latest:
        # It was in time by our clock, so the server's has been set since we last looked.
        await fleet.read_clock(slot, deadline=deadline)
        reply = await _ask(fleet, slot, make, latest, deadline)
    return reply


async def _ask(
    fleet: Fleet, slot: int, make: Callable[[Instant], Request], latest: float, deadline: float
) -> Reply:
    # Scripts compare whole milliseconds. The one in which the caller leaves is too late already.
    not_after = await fleet.server_time(slot, latest, deadline=deadline) - 1
    return await fleet.ask(make(Instant(not_after)), deadline=deadline)
