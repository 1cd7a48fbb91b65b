"""Looking at a line from outside: how many wait for a name."""

from __future__ import annotations

import asyncio
import secrets

from stanchion.adapters.system import SystemClock
from stanchion.leases.backend import store_at

__all__ = ["until_waiting", "waiting"]

_WAIT_S_MAX = 30.0


async def until_waiting(url: str, namespace: str, name: str, count: int) -> None:
    """Come back when so many stand in line."""
    async with asyncio.timeout(_WAIT_S_MAX):
        while await waiting(url, namespace, name) != count:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.01)


async def waiting(url: str, namespace: str, name: str) -> int:
    """How many stand in line. Joins behind everybody, counts them, and leaves."""
    token = secrets.token_hex()
    store = store_at(url, namespace=namespace, clock=SystemClock())
    place = await store.join(name, token, ticket_ms=1_000, within_ms=2_000)
    await store.leave(name, token, within_ms=2_000)
    await store.close()
    return place.ahead
