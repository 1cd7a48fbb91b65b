"""Locks in memory: for one process, its tests and the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stanchion.core.lease import next_fence
from stanchion.core.model import Instant
from stanchion.ports.clock import Clock
from stanchion.ports.locks import (
    AcquireAnswer,
    Granted,
    Held,
    LockView,
    NotOwned,
    Released,
    Renewed,
    TooLate,
)

__all__ = ["MemoryLocks"]


@dataclass(slots=True)
class _Holder:
    token: str
    fence: int
    expires_at: Instant


class MemoryLocks:
    """See ``ports.locks.Locks``."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._holders: dict[str, _Holder] = {}
        self._fences: dict[str, int] = {}
        """The last fence of every name, whoever has it now."""

    async def acquire(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, floor: int = 0
    ) -> AcquireAnswer:
        if within_ms < 0:
            return TooLate()
        now = self._clock.now()
        holder = self._present(name)
        if holder is not None and holder.token != token:
            return Held(holder.expires_at - now)
        if holder is not None and holder.fence > floor:
            fence = holder.fence
        else:
            fence = next_fence(self._fences.get(name, 0), floor, now * 1_000)
        self._fences[name] = fence
        self._holders[name] = _Holder(token, fence, Instant(now + ttl_ms))
        return Granted(fence)

    async def renew(
        self,
        name: str,
        token: str,
        *,
        ttl_ms: int,
        within_ms: int,  # noqa: ARG002 - there is nobody to wait for
    ) -> Renewed | NotOwned:
        holder = self._present(name)
        if holder is None or holder.token != token:
            return NotOwned()
        holder.expires_at = Instant(self._clock.now() + ttl_ms)
        return Renewed()

    async def release(
        self,
        name: str,
        token: str,
        *,
        within_ms: int,  # noqa: ARG002 - there is nobody to wait for
    ) -> Released | NotOwned:
        holder = self._present(name)
        if holder is None or holder.token != token:
            return NotOwned()
        del self._holders[name]
        return Released()

    async def inspect(self, name: str) -> LockView | None:
        holder = self._present(name)
        if holder is None:
            return None
        return LockView(name, holder.fence, holder.expires_at - self._clock.now())

    async def list(self, prefix: str = "", *, limit: int = 1000) -> Sequence[LockView]:
        views = [
            await self.inspect(name) for name in sorted(self._holders) if name.startswith(prefix)
        ]
        return [view for view in views if view is not None][:limit]

    async def force_release(self, name: str) -> bool:
        return self._present(name) is not None and self._holders.pop(name, None) is not None

    async def ping(self) -> None:
        """There is nobody to be out of reach."""

    async def close(self) -> None:
        """There is nothing to let go of."""

    def _present(self, name: str) -> _Holder | None:
        """Who has the name now. A term that has run out is as if it had never been."""
        holder = self._holders.get(name)
        if holder is not None and holder.expires_at <= self._clock.now():
            del self._holders[name]
            return None
        return holder
