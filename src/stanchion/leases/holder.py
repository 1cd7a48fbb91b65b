"""Holding a name: the local door first, then the store, and waiting where that is wanted.

Renewal, trust, fencing and release are ``services.leasing``'s. What is added here is patience: a
caller that finds a name taken may wait for it, and asks under the same token until it is granted or
its time is over.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import assert_never

import msgspec
from msgspec.structs import replace

from stanchion.core.lease import LeaseTerms, Moment
from stanchion.core.lease_policy import LeasePolicy
from stanchion.core.model import Risk
from stanchion.core.retry import Backoff
from stanchion.leases.doors import Doors
from stanchion.leases.errors import LeaseBusy, LeaseUnavailable
from stanchion.leases.waiting import InTurn, Order, Patience, WithPauses
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.ports.turns import Turns
from stanchion.services import lease_events as told
from stanchion.services.lease import Lease
from stanchion.services.lease_events import LeaseEvent, LeaseHook, guarded
from stanchion.services.leasing import Contended, Leasing, Outcome, Refused

__all__ = ["Hold", "Holder", "Wish"]


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller wants to hold, and how much it will do for it."""

    name: str
    risk: Risk
    policy: LeasePolicy
    wait_s: float
    order: Order
    floor: int


class Holder:
    """Holds names in one store, all with the same term."""

    def __init__(
        self,
        store: Turns,
        *,
        clock: Clock,
        entropy: Entropy,
        terms: LeaseTerms,
        retry: Backoff,
        tell: LeaseHook | None,
        prepare: Callable[[str], Awaitable[None]],
    ) -> None:
        """``prepare`` is awaited before every hold; what it raises, the hold raises."""
        self.store = store
        self.clock = clock
        self.entropy = entropy
        self.retry = retry
        self.leasing = Leasing(
            store,
            clock=clock,
            entropy=entropy,
            terms=terms,
            tell=_silently if tell is None else self._retell,
        )
        self.doors = Doors()
        self.asked_at: dict[str, Moment] = {}
        """When whoever is inside a door came to it."""
        self.prepare = prepare
        self.tell = _silently if tell is None else guarded(tell)

    def hold(self, wish: Wish) -> Hold:
        """Hold the name for a body. Raises ``LeaseNotGranted`` instead of running it."""
        return Hold(self, wish)

    async def close(self) -> None:
        """Stop working in the background. Holds must have ended before."""
        await self.leasing.close()

    def _retell(self, event: LeaseEvent) -> None:
        """What leasing tells about one question, as a fact about the whole wish."""
        match event:
            case told.Contended():
                """Told once, when the caller gives up."""
            case told.Acquired():
                waited_ms = self.clock.moment() - self.asked_at[event.name]
                self.tell(replace(event, waited_ms=waited_ms))
            case _:
                self.tell(event)


def _silently(_: LeaseEvent) -> None:
    """Nobody counts."""


class Hold(AbstractAsyncContextManager[Lease]):
    """One hold. Written out, where a generator would read better: it is on everybody's way."""

    def __init__(self, holder: Holder, wish: Wish) -> None:
        self._holder = holder
        self._wish = wish
        self._held: AbstractAsyncContextManager[Outcome]

    async def __aenter__(self) -> Lease:
        holder, wish = self._holder, self._wish
        await holder.prepare(wish.name)
        asked_at = holder.clock.moment()
        if not await holder.doors.enter(wish.name, wait_s=wish.wait_s):
            raise self._busy(asked_at, None)
        try:
            holder.asked_at[wish.name] = asked_at
            return await self._granted(asked_at)
        except BaseException:
            self._leave()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        try:
            return await self._held.__aexit__(kind, error, trace)
        finally:
            self._leave()

    def _leave(self) -> None:
        del self._holder.asked_at[self._wish.name]
        self._holder.doors.exit(self._wish.name)

    async def _granted(self, asked_at: Moment) -> Lease:
        """Ask until the lease is granted."""
        holder, wish = self._holder, self._wish
        token = holder.entropy.token()
        patience: Patience | None = None
        try:
            while True:
                self._held = holder.leasing.hold(
                    wish.name, risk=wish.risk, policy=wish.policy, floor=wish.floor, token=token
                )
                outcome = await self._held.__aenter__()
                if isinstance(outcome, Lease):
                    # Whoever is granted the name has left the line. Whoever goes on without it, for
                    # want of a store, has nobody to tell: the ticket runs out.
                    patience = None
                    return outcome
                await self._held.__aexit__(None, None, None)
                match outcome:
                    case Refused(error):
                        raise LeaseUnavailable(wish.name, error)
                    case Contended(expires_in_ms):
                        left_ms = math.ceil(asked_at + wish.wait_s * 1000 - holder.clock.moment())
                        if left_ms <= 0:
                            raise self._busy(asked_at, expires_in_ms)
                    case _:
                        assert_never(outcome)
                if patience is None:
                    patience = self._patience(token)
                await patience.pause(left_ms)
        finally:
            if patience is not None:
                await patience.end()

    def _patience(self, token: str) -> Patience:
        holder, wish = self._holder, self._wish
        match wish.order:
            case "fifo":
                return InTurn(
                    holder.store, wish.name, token, clock=holder.clock, entropy=holder.entropy
                )
            case "jitter":
                return WithPauses(holder.retry, holder.clock, holder.entropy)
            case _:
                assert_never(wish.order)

    def _busy(self, asked_at: Moment, expires_in_ms: int | None) -> LeaseBusy:
        holder, wish = self._holder, self._wish
        holder.tell(told.Contended(name=wish.name, risk=wish.risk, expires_in_ms=expires_in_ms))
        waited_s = (holder.clock.moment() - asked_at) / 1000
        return LeaseBusy(wish.name, waited_s=waited_s, expires_in_ms=expires_in_ms)
