"""Leasing: work that happens only while a name is held.

    async with leasing.hold("run/3f…", risk=run.risk, policy=policy) as outcome:
        match outcome:
            case Lease():      ...   # ours: work, and write with outcome.fence
            case LeaseContended():  ...   # held by another: skip
            case LeaseRefused():    ...   # the lock store is unavailable, and policy says wait

A hold takes two locks, in this order: a mutex in this process, then the lease. While the body runs
the lease is renewed in the background (``services.renewal``). When the rules say that the holder
must stop, the body is cancelled; once it has unwound, ``hold`` raises ``LeaseLost`` with the cause.
An exception of the body propagates unchanged.

``core.lease`` decides what an answer means. Every call to the lock store has a deadline, and while
the lock store is unavailable ``LockHealth`` answers at once instead of calling it.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final, TypeAlias, assert_never

import msgspec

from stanchion.core import lease
from stanchion.core.lease import (
    LeasePolicy,
    LeaseTerms,
    Moment,
)
from stanchion.core.model import Risk
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import sentence
from stanchion.ports.locks import AcquireTooLate, Granted, Held, Locks, replica_token
from stanchion.services import lease_events as events
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

PROVEN_MS: Final = 20
"""How long after an answer the lock store is taken to be available by work without a lease."""


class LeaseContended(msgspec.Struct, frozen=True):
    """The name is held by another, in this process or elsewhere."""

    expires_in_ms: int | None = None


class LeaseRefused(msgspec.Struct, frozen=True):
    """The lock store failed, and policy fails closed."""

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
        replica: str | None = None,
    ) -> None:
        """``replica`` is shown as the holder of its leases."""
        self.clock = clock
        self._token_begin = "" if replica is None else replica_token(replica, "")
        self._entropy = entropy
        self.tell = guarded(tell)
        self.held: set[str] = set()
        """The mutex: names held in this process. A caller that finds a name here does not wait."""
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
        """Hold ``name`` for the body, or return why not. The lease's fence is above ``floor``.

        ``token`` is given by a caller that waits in the lock store's queue under it; it must be
        unique to this hold.
        """
        token = token or self._token_begin + self._entropy.token()
        subject = LeaseSubject(name, risk, policy, token)
        return _Hold(self, subject, floor=floor, escalated=escalated)

    @property
    def answers_at_once(self) -> bool:
        """Whether a hold knows its outcome without waiting for the lock store.

        The locks are in this process, or policy decides because the lock store is unavailable.
        """
        remote = self.remote
        return remote is None or remote.is_local or remote.health.error is not None

    @property
    def is_proven(self) -> bool:
        """Whether the locks are in this process, or their store has answered a moment ago.

        Work that does not ask for its lease cannot find out that the lock store is unavailable.
        So some of it asks: on a busy replica, fifty times a second.
        """
        remote = self.remote
        if remote is None or remote.is_local:
            return True
        return (
            remote.answered_at is not None and self.clock.moment() - remote.answered_at < PROVEN_MS
        )

    async def close(self) -> None:
        """Stop probing, after leases of cancelled holders are released. Holds must have ended."""
        if self.remote is not None:
            await self.remote.renewer.close()
            await self.remote.health.close()


class _Hold(AbstractAsyncContextManager[Outcome]):
    """One hold. A class, because a generator would be slower: every change of a run has a hold."""

    def __init__(
        self, leasing: Leasing, subject: LeaseSubject, *, floor: int, escalated: bool
    ) -> None:
        self._leasing = leasing
        self._subject = subject
        self._floor = floor
        self._escalated = escalated
        self._has_mutex = False
        self._renewal: RenewalLoop | None = None

    async def __aenter__(self) -> Outcome:
        leasing, name = self._leasing, self._subject.name
        if name in leasing.held:
            leasing.tell(events.Contended(name=name, risk=self._subject.risk, expires_in_ms=None))
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
            if self._renewal is not None:
                await self._renewal.__aexit__(kind, error, trace)
        finally:
            if self._has_mutex:
                self._leasing.held.discard(self._subject.name)

    async def _acquire(self) -> Outcome:
        remote, clock = self._leasing.remote, self._leasing.clock
        if remote is None:
            return Lease(self._subject.name, clock)
        outcome = await remote.acquire(self._subject, floor=self._floor, escalated=self._escalated)
        if isinstance(outcome, Lease) and not outcome.is_degraded:
            self._renewal = RenewalLoop(remote.renewer, outcome, self._subject, clock)
            await self._renewal.__aenter__()
        return outcome


class _Remote:
    """Acquires leases from the lock store."""

    def __init__(
        self, locks: Locks, clock: Clock, entropy: Entropy, terms: LeaseTerms, tell: LeaseHook
    ) -> None:
        self._locks = locks
        self._clock = clock
        self._terms = terms
        self._tell = tell
        self.is_local = locks.is_local
        self.health = LockHealth(locks, clock)
        self.renewer = Renewer(locks, self.health, clock, entropy, terms, tell)
        self.answered_at: Moment | None = None
        """When the last request for a lease was sent that the lock store has answered."""

    async def acquire(self, subject: LeaseSubject, *, floor: int, escalated: bool) -> Outcome:
        """Ask the lock store for the name, and apply the policy to its answer."""
        name, risk = subject.name, subject.risk
        sent_at = self._clock.moment()
        answer = await self._ask(subject, floor)
        if not isinstance(answer, lease.Unavailable):
            self.answered_at = sent_at
        at = self._clock.moment()
        decision = lease.on_acquire(answer, subject.policy, escalated=escalated)
        match decision:
            case lease.ProceedLeased(fence):
                trust = lease.granted(self._terms, subject.policy, sent_at, at)
                waited_ms = at - sent_at
                self._tell(events.Acquired(name=name, risk=risk, fence=fence, waited_ms=waited_ms))
                return Lease(name, self._clock, fence=fence, trust=trust)
            case lease.Skip(expires_in_ms):
                self._tell(events.Contended(name=name, risk=risk, expires_in_ms=expires_in_ms))
                return LeaseContended(expires_in_ms)
            case lease.ProceedLocal(error):
                self._tell(events.Fallback(name=name, risk=risk, error=error))
                return Lease(name, self._clock, is_degraded=True)
            case lease.Refuse(error, was_open):
                self._tell(events.Refused(name=name, risk=risk, error=error, escalated=was_open))
                return LeaseRefused(error)
            case _:
                assert_never(decision)

    async def _ask(self, subject: LeaseSubject, floor: int) -> lease.AcquireOutcome:
        if self.health.error is not None:
            return lease.Unavailable(self.health.error)
        patience_ms = self._terms.renew_timeout_ms
        try:
            async with asyncio.timeout(patience_ms / 1000):
                answer = await self._locks.acquire(
                    subject.name,
                    subject.token,
                    ttl_ms=self._terms.ttl_ms,
                    within_ms=patience_ms,
                    floor=floor,
                )
        except asyncio.CancelledError:
            # The caller was cancelled, and the name may have been granted.
            self.health.orphaned(subject.name, subject.token)
            raise
        except Exception as error:  # noqa: BLE001 - after any error the name may have been granted
            # If only the reply was lost, the name is held under a token that has no holder.
            self.health.orphaned(subject.name, subject.token)
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
