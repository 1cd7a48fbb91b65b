"""Readiness: whether what stands behind the gateway answers.

Each check is bounded, and its result is kept for half a second: any number of probes costs the
store two questions a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from stanchion.core.lease import Moment
from stanchion.ports.errors import BackendError
from stanchion.services.engine import Services
from stanchion.wire.admin import Health

__all__ = ["Readiness"]

CHECK_S: Final = 1.0
KEPT_MS: Final = 500
_VITAL: Final = "store"
"""Without it nothing goes on. Without locks or bus much does, and all replicas miss those at once:
were they not ready then, nobody would be."""


class Readiness:
    """Asks store, locks and bus, and remembers for a moment."""

    def __init__(self, services: Services) -> None:
        self._clock = services.clock
        self._pings: Mapping[str, Callable[[], Awaitable[None]]] = {
            "store": services.store.ping,
            # Without a lock backend the local mutex serves, and it is always there.
            "locks": _nothing if services.locks is None else services.locks.ping,
            "bus": services.bus.ping,
        }
        self._kept: dict[str, str] = {}
        self._kept_at = Moment(-KEPT_MS)
        self._asking: asyncio.Task[dict[str, str]] | None = None

    async def health(self, *, is_draining: bool) -> Health:
        """All checks, by name."""
        if self._clock.moment() - self._kept_at >= KEPT_MS:
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask())
            await asyncio.shield(self._asking)
        if is_draining:
            return Health("draining", self._kept)
        if self._kept[_VITAL] != "ok":
            return Health("unavailable", self._kept)
        is_ok = all(word == "ok" for word in self._kept.values())
        return Health("ok" if is_ok else "degraded", self._kept)

    async def _ask(self) -> dict[str, str]:
        try:
            words = await asyncio.gather(*(_check(ping) for ping in self._pings.values()))
            self._kept = dict(zip(self._pings, words, strict=True))
            self._kept_at = self._clock.moment()
            return self._kept
        finally:
            self._asking = None


async def _check(ping: Callable[[], Awaitable[None]]) -> str:
    try:
        async with asyncio.timeout(CHECK_S):
            await ping()
    except TimeoutError:
        return f"no answer within {CHECK_S:g} s"
    except BackendError:
        # Its text may name addresses; the log has it.
        return "unavailable"
    return "ok"


async def _nothing() -> None:
    pass
