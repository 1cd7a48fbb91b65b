"""Leasing: work that happens only while a name is held.

    async with leasing.hold("run/3f…", risk=run.risk, policy=policy) as outcome:
        match outcome:
            case Lease():      ...   # ours: work, and write with outcome.fence
            case LeaseContended():  ...   # another's: skip
            case LeaseRefused():    ...   # the lock store is away, and policy says wait

A hold takes two locks, in this order: a mutex in this process, then the lease. While the body runs
the lease is renewed in the background (``keeping``). When the rules say that the holder must stop,
the body is cancelled; once it has unwound, ``hold`` raises ``LeaseLost`` with the cause. An error
of the body's own passes through untouched, whatever else happened.

Nothing here decides: what an answer means is said by ``core.lease``. Nothing here waits without a
bound: every call to the lock store has a deadline, and ``LockHealth`` sees to it that only one
caller pays for a store that is away.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TypeAlias, assert_never

import msgspec

from stanchion.core import lease
from stanchion.core.lease import (
    LeasePolicy,
    LeaseTerms,
)
from stanchion.core.model import Risk
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import sentence
from stanchion.ports.locks import AcquireTooLate, Granted, Held, Locks
from stanchion.services import lease_events as told
from stanchion.services.lease_events import LeaseHook
from stanchion.services.renewal import (
    Lease,
    LeaseSubject,
    LockHealth,
    RenewalLoop,
    Renewer,
    guarded,
)

__all__ = ["Lease", "LeaseContended", "LeaseRefused", "Leasing", "LockHealth", "Outcome"]


class LeaseContended(msgspec.Struct, frozen=True):
    """Another has the name, in this process or elsewhere."""

    expires_in_ms: int | None = None


class LeaseRefused(msgspec.Struct, frozen=True):
    """The lock store could not be asked, and policy says not to go on without it."""

    error: str


Outcome: TypeAlias = Lease | LeaseContended | LeaseRefused


class Leasing:
    """Holds leases of one kind, all with the same terms."""

    def __init__(
        self,
        locks: Locks | None,
        *,
        clock: Clock,
        entropy: Entropy,
        terms: LeaseTerms = lease.RUN_TERMS,
        tell: LeaseHook = lambda _: None,
    ) -> None:
        self.clock = clock
        self._entropy = entropy
        self.tell = guarded(tell)
        self.held: set[str] = set()
        """The mutex: names that somebody in this process has. Nobody waits for one."""
        self.remote = None if locks is None else _Remote(locks, clock, entropy, terms, self.tell)

    def hold(
        self,
        name: str,
        *,
        risk: Risk,
        policy: LeasePolicy,
        escalated: bool = False,
        floor: int = 0,
        token: str | None = None,
    ) -> AbstractAsyncContextManager[Outcome]:
        """Hold ``name`` for the body, or say why not. The lease's fence is above ``floor``.

        ``policy`` and ``escalated`` are read by the caller, who knows how old its settings are.
        ``token`` is for a caller that waits in line under it; it is used for one hold only.
        """
        about = LeaseSubject(name, risk, policy, token or self._entropy.token())
        return _Hold(self, about, floor=floor, escalated=escalated)

    async def close(self) -> None:
        """Stop probing. Holds must have ended before."""
        if self.remote is not None:
            await self.remote.health.close()


class _Hold(AbstractAsyncContextManager[Outcome]):
    """One hold. Written out, where a generator would read better: every change of a run has one."""

    def __init__(
        self, leasing: Leasing, about: LeaseSubject, *, floor: int, escalated: bool
    ) -> None:
        self._leasing = leasing
        self._about = about
        self._floor = floor
        self._escalated = escalated
        self._has_mutex = False
        self._keeping: RenewalLoop | None = None

    async def __aenter__(self) -> Outcome:
        leasing, name = self._leasing, self._about.name
        if name in leasing.held:
            leasing.tell(told.Contended(name=name, risk=self._about.risk, expires_in_ms=None))
            return LeaseContended()
        leasing.held.add(name)
        self._has_mutex = True
        try:
            return await self._acquire()
        except BaseException:
            leasing.held.discard(name)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._keeping is not None:
                await self._keeping.__aexit__(kind, error, trace)
        finally:
            if self._has_mutex:
                self._leasing.held.discard(self._about.name)

    async def _acquire(self) -> Outcome:
        remote, clock = self._leasing.remote, self._leasing.clock
        if remote is None:
            return Lease(self._about.name, clock)
        outcome = await remote.acquire(self._about, floor=self._floor, escalated=self._escalated)
        if isinstance(outcome, Lease) and not outcome.is_degraded:
            self._keeping = RenewalLoop(remote.keeper, outcome, self._about, clock)
            await self._keeping.__aenter__()
        return outcome


class _Remote:
    """The half of a hold that asks the lock store."""

    def __init__(
        self, locks: Locks, clock: Clock, entropy: Entropy, terms: LeaseTerms, tell: LeaseHook
    ) -> None:
        self._locks = locks
        self._clock = clock
        self._terms = terms
        self._tell = tell
        self.health = LockHealth(locks, clock)
        self.keeper = Renewer(locks, self.health, clock, entropy, terms, tell)

    async def acquire(self, about: LeaseSubject, *, floor: int, escalated: bool) -> Outcome:
        """Ask for the name, and do what policy says about the answer."""
        name, risk = about.name, about.risk
        sent_at = self._clock.moment()
        answer = await self._ask(about, floor)
        at = self._clock.moment()
        decision = lease.on_acquire(answer, about.policy, escalated=escalated)
        match decision:
            case lease.ProceedLeased(fence):
                trust = lease.granted(self._terms, about.policy, sent_at, at)
                waited_ms = at - sent_at
                self._tell(told.Acquired(name=name, risk=risk, fence=fence, waited_ms=waited_ms))
                return Lease(name, self._clock, fence=fence, trust=trust)
            case lease.Skip(expires_in_ms):
                self._tell(told.Contended(name=name, risk=risk, expires_in_ms=expires_in_ms))
                return LeaseContended(expires_in_ms)
            case lease.ProceedLocal(error):
                self._tell(told.Fallback(name=name, risk=risk, error=error))
                return Lease(name, self._clock, is_degraded=True)
            case lease.Refuse(error, was_open):
                self._tell(told.Refused(name=name, risk=risk, error=error, escalated=was_open))
                return LeaseRefused(error)
            case _:
                assert_never(decision)

    async def _ask(self, about: LeaseSubject, floor: int) -> lease.AcquireOutcome:
        if self.health.error is not None:
            return lease.Unavailable(self.health.error)
        patience_ms = self._terms.renew_timeout_ms
        try:
            async with asyncio.timeout(patience_ms / 1000):
                answer = await self._locks.acquire(
                    about.name,
                    about.token,
                    ttl_ms=self._terms.ttl_ms,
                    within_ms=patience_ms,
                    floor=floor,
                )
        except asyncio.CancelledError:
            # The caller has left. Whether the name was granted, nobody will ever know.
            self.health.orphaned(about.name, about.token)
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was, nobody knows what the store has
            # The reply may be what was lost: then the name is taken, by a token that nobody uses.
            self.health.orphaned(about.name, about.token)
            self.health.failed(sentence(error))
            return lease.Unavailable(sentence(error))
        match answer:
            case Granted(fence):
                return lease.LockAcquired(fence)
            case Held(expires_in_ms):
                return lease.LockContended(expires_in_ms)
            case AcquireTooLate():
                return lease.Unavailable("the lock store answered too late")
            case _:
                assert_never(answer)
