"""The admission lock: serializes the starts of one tenant, for the strategy ``lock``.

The lock only paces callers: with or without it, the store checks the cap. So it need not be
renewed, and a lock that expires early does no harm. It never fails open: a caller that does not
get the lock does not reach the store.

Busy and failed are different answers. A lock that another caller holds is requested again with the
tenant's backoff, until the caller's time is over. After an error of the lock store there is no
second try.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, Protocol, TypeAlias, assert_never

import msgspec

from stanchion.core.lease import Moment
from stanchion.core.model import Risk, TenantId
from stanchion.core.retry import backoff_ms
from stanchion.core.settings import AdmissionSettings
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import sentence
from stanchion.ports.locks import AcquireTooLate, Granted, Held, Locks, replica_token
from stanchion.services.renewal import RELEASE_MAX_S, LockHealth, release_lock
from stanchion.services.signals import AdmissionSignals

CALL_MS_MIN: Final = 250
"""For a try that begins when the time is nearly over: with less, a slow answer would time out."""
CALL_MS_MAX: Final = 2_000
_PROOF_MS: Final = 1_000
"""A shorter time-out may have local causes: a late event loop, a queue of callers."""


class GateLockTaken(msgspec.Struct, frozen=True):
    """The caller holds the lock during the body."""


class GateLockBusy(msgspec.Struct, frozen=True):
    """Other callers held the lock for the whole wait budget."""


class GateLockFailed(msgspec.Struct, frozen=True):
    """The lock store failed."""

    error: str


Outcome: TypeAlias = GateLockTaken | GateLockBusy | GateLockFailed


class AdmissionLock(Protocol):
    """One lock for each tenant."""

    def hold(
        self, tenant: TenantId, how: AdmissionSettings, *, risk: Risk, until: Moment
    ) -> AbstractAsyncContextManager[Outcome]:
        """Hold the tenant's lock for the body, or return why not. Tries begin before ``until``."""

    async def close(self) -> None:
        """Wait for pending releases."""


class SharedLock:
    """A lock that all replicas share, in the lock store."""

    def __init__(
        self,
        locks: Locks,
        *,
        clock: Clock,
        entropy: Entropy,
        signals: AdmissionSignals,
        replica: str = "",
    ) -> None:
        self._replica = replica
        self._locks = locks
        self._clock = clock
        self._entropy = entropy
        self._signals = signals
        self._health = LockHealth(locks, clock)
        self._releases: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def hold(
        self, tenant: TenantId, how: AdmissionSettings, *, risk: Risk, until: Moment
    ) -> AsyncIterator[Outcome]:
        name = f"admission/{tenant}"
        token = replica_token(self._replica, self._entropy.token())
        outcome = await self._take(name, token, how, until)
        try:
            yield outcome
        finally:
            if isinstance(outcome, GateLockTaken):
                self._release_soon(name, token, risk)

    async def close(self) -> None:
        await asyncio.gather(*self._releases, return_exceptions=True)
        await self._health.close()

    async def _take(self, name: str, token: str, how: AdmissionSettings, until: Moment) -> Outcome:
        tries = 0
        while True:
            outcome = await self._try(name, token, how, until, is_first=tries == 0)
            left_ms = until - self._clock.moment()
            if not isinstance(outcome, GateLockBusy) or left_ms <= 0:
                return outcome
            tries += 1
            # The jittered backoff may be 0, and retrying without a pause would be a busy loop.
            pause_ms = max(1, backoff_ms(how.lock_retry, tries, self._entropy.unit()))
            await self._clock.sleep(min(left_ms, pause_ms) / 1000)

    async def _try(
        self, name: str, token: str, how: AdmissionSettings, until: Moment, *, is_first: bool
    ) -> Outcome:
        if self._health.error is not None:
            # The outage was logged when it began.
            return GateLockFailed(self._health.error)
        within_ms = min(CALL_MS_MAX, max(CALL_MS_MIN, until - self._clock.moment()))
        try:
            async with asyncio.timeout(within_ms / 1000):
                answer = await self._locks.acquire(
                    name, token, ttl_ms=how.lock_ttl_ms, within_ms=within_ms
                )
        except asyncio.CancelledError:
            # The caller was cancelled, and the lock may have been granted.
            self._release_soon(name, token, None)
            raise
        except TimeoutError:
            if not is_first and within_ms < _PROOF_MS:
                # A short last try for a lock that others held does not prove an outage.
                self._health.orphaned(name, token)
                return GateLockBusy()
            return self._broken(name, token, f"no answer within {within_ms} ms")
        except Exception as error:  # noqa: BLE001 - after any error the lock may have been granted
            return self._broken(name, token, sentence(error))
        match answer:
            case Granted():
                return GateLockTaken()
            case Held():
                return GateLockBusy()
            case AcquireTooLate():
                self._signals.lock_failed(name, _TOO_LATE)
                return GateLockFailed(_TOO_LATE)
            case _:
                assert_never(answer)

    def _broken(self, name: str, token: str, error: str) -> GateLockFailed:
        # If only the reply was lost, the lock is taken and has no holder.
        self._health.orphaned(name, token)
        self._health.failed(error)
        self._signals.lock_failed(name, error)
        return GateLockFailed(error)

    def _release_soon(self, name: str, token: str, risk: Risk | None) -> None:
        """Release the lock in a background task: neither the answer nor a cancelled caller waits.

        Without ``risk`` it is unknown whether the lock was taken, so a failure is not reported.
        """
        task = asyncio.create_task(self._release(name, token, risk), name=f"release {name}")
        # The event loop keeps only a weak reference.
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, name: str, token: str, risk: Risk | None) -> None:
        error: str | None = None
        try:
            async with asyncio.timeout(RELEASE_MAX_S):
                error = await release_lock(self._locks, name, token)
        except TimeoutError:
            error = f"no answer within {RELEASE_MAX_S:g} s"
        if error is not None and risk is not None:
            self._signals.release_failed(name, risk, error)


_TOO_LATE: Final = "the lock store answered too late"


class SoleLock:
    """A lock within this process, first come, first served: for one server without a lock store."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._mutexes: dict[TenantId, asyncio.Lock] = {}
        self._callers: Counter[TenantId] = Counter()

    @asynccontextmanager
    async def hold(
        self,
        tenant: TenantId,
        how: AdmissionSettings,  # noqa: ARG002 - waiters are queued, so there is no retry
        *,
        risk: Risk,  # noqa: ARG002 - nothing can fail
        until: Moment,
    ) -> AsyncIterator[Outcome]:
        mutex = self._mutexes.setdefault(tenant, asyncio.Lock())
        self._callers[tenant] += 1
        is_taken = False
        try:
            is_taken = await self._take(mutex, until)
            yield GateLockTaken() if is_taken else GateLockBusy()
        finally:
            if is_taken:
                mutex.release()
            self._callers[tenant] -= 1
            if not self._callers[tenant]:
                del self._callers[tenant], self._mutexes[tenant]

    async def close(self) -> None:
        """Do nothing: releases are immediate."""

    async def _take(self, mutex: asyncio.Lock, until: Moment) -> bool:
        try:
            async with asyncio.timeout(max(0, until - self._clock.moment()) / 1000):
                return await mutex.acquire()
        except TimeoutError:
            return False
