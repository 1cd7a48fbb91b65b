"""Answers: large answers are sent by turns, and what their readers have not taken is bounded.

An answer that many callers share, such as a run that they waited for, is held once. Writing is
bounded for each iteration of the event loop, and tenants take turns at it: four hundred callers
that are answered at the same moment do not keep others waiting until all of them have been.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Final

from stanchion.core.model import TenantId

__all__ = ["TURN_BYTES", "Answers"]

TENANT_SHARE: Final = 4
"""One tenant's readers may hold this fraction of all that is held: a quarter."""
TURN_BYTES: Final = 512 * 1024
"""What large answers write in one iteration of the event loop. One alone is always written."""


class Answers:
    """Large answers that are being sent: all together, and those of each tenant."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held_bytes = 0
        self._by_tenant: dict[TenantId | None, int] = {}
        self._holders: dict[int, int] = {}
        """How many callers are being sent the same body, by its identity."""
        self._turn_bytes = 0
        """What the answers of this iteration write; zero if no iteration is being counted."""
        self._lines: OrderedDict[TenantId | None, deque[tuple[asyncio.Future[None], int]]] = (
            OrderedDict()
        )

    def is_tenant_full(self, body: bytes, tenant: TenantId | None) -> bool:
        """Whether the tenant has no room for one more. One alone always fits."""
        held_bytes = self._by_tenant.get(tenant, 0)
        is_new = id(body) not in self._holders
        return (
            is_new and held_bytes > 0 and held_bytes + len(body) > self._bytes_max // TENANT_SHARE
        )

    def take(self, body: bytes, tenant: TenantId | None) -> bool:
        """Make room for one; whether there was. One alone always fits."""
        holders = self._holders.get(id(body), 0)
        if holders == 0:
            size = len(body)
            if self._held_bytes and self._held_bytes + size > self._bytes_max:
                return False
            self._held_bytes += size
            self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + size
        self._holders[id(body)] = holders + 1
        return True

    def give(self, body: bytes, tenant: TenantId | None) -> None:
        """One was sent, or its reader has hung up."""
        holders = self._holders.pop(id(body)) - 1
        if holders:
            self._holders[id(body)] = holders
            return
        self._held_bytes -= len(body)
        left = self._by_tenant[tenant] - len(body)
        if left:
            self._by_tenant[tenant] = left
        else:
            del self._by_tenant[tenant]

    async def turn(self, size: int, tenant: TenantId | None) -> None:
        """Wait until an iteration of the event loop has room for so many bytes."""
        loop = asyncio.get_running_loop()
        if not self._lines and self._has_room(size):
            if not self._turn_bytes:
                loop.call_soon(self._next_turn)
            self._turn_bytes += size
            return
        waiting: asyncio.Future[None] = loop.create_future()
        self._lines.setdefault(tenant, deque()).append((waiting, size))
        await waiting

    def _has_room(self, size: int) -> bool:
        return not self._turn_bytes or self._turn_bytes + size <= TURN_BYTES

    def _next_turn(self) -> None:
        self._turn_bytes = 0
        while self._lines:
            tenant, line = next(iter(self._lines.items()))
            waiting, size = line[0]
            if not self._has_room(size):
                break
            line.popleft()
            if line:
                self._lines.move_to_end(tenant)
            else:
                del self._lines[tenant]
            if not waiting.done():
                waiting.set_result(None)
                self._turn_bytes += size
        if self._turn_bytes:
            asyncio.get_running_loop().call_soon(self._next_turn)
