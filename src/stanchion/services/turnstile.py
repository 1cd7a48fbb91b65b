"""Turnstile: a tenant's callers come to the store so many at a time.

A store serves whoever asks in the order of asking. Without a turnstile a tenant with a thousand
callers would put a thousand questions before everybody else's; with it, whoever comes finds at most
a few of every tenant before him. And where the first few find the tenant full, the others in the
line need not ask at all: they are sent away to share an answer.

Each tenant has a line of its own, first come, first served. Nobody has to wait whose tenant has few
callers, so nobody pays for it but the crowd.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from stanchion.core.model import TenantId

__all__ = ["AT_ONCE", "Turnstile"]

AT_ONCE: Final = 64
"""Chosen, not tuned: what one hot tenant's callers are in the benchmarks, so none of them waits."""


class Turnstile:
    """Lets the callers of each tenant through."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._lines: dict[TenantId, _Line] = {}

    async def enter(self, tenant: TenantId, *, may_share: bool) -> bool:
        """Wait for a place, to be given back with ``leave``. ``False``: sent away without one.

        Sent away are only those who may share an answer.
        """
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line()
        if line.inside < self._at_once:
            line.inside += 1
            return True
        waiting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        line.waiting.append((waiting, may_share))
        try:
            return await waiting
        except asyncio.CancelledError:
            # It may have been let through in the moment in which it left.
            if waiting.done() and not waiting.cancelled() and waiting.result():
                self.leave(tenant)
            raise

    def leave(self, tenant: TenantId) -> None:
        """Give the place to whoever is next."""
        line = self._lines[tenant]
        while line.waiting:
            first, _ = line.waiting.popleft()
            if not first.done():
                first.set_result(True)
                return
        line.inside -= 1
        if not line.inside:
            del self._lines[tenant]

    def send_away(self, tenant: TenantId) -> None:
        """Tell everybody in the line who may share an answer that there is one to be shared."""
        line = self._lines.get(tenant)
        if line is None:
            return
        staying: deque[tuple[asyncio.Future[bool], bool]] = deque()
        for waiting, may_share in line.waiting:
            if not may_share:
                staying.append((waiting, may_share))
            elif not waiting.done():
                waiting.set_result(False)
        line.waiting = staying


class _Line:
    __slots__ = ("inside", "waiting")

    def __init__(self) -> None:
        self.inside = 0
        self.waiting: deque[tuple[asyncio.Future[bool], bool]] = deque()
        """Each with whether it may share an answer."""
