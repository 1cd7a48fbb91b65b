"""The admission lock: callers of one tenant, one after the other.

It paces, and decides nothing: whoever holds it asks the store the same question as everybody else.
So it never has to be renewed, and an expired one does no harm. It never fails open either: a caller
who cannot have it is not let through.

Busy and failed are different answers. A lock that another has is asked for again and again, at the
tenant's rhythm, until the caller's time is over. A lock store that errs is not asked a second time.
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
from stanchion.ports.locks import AcquireTooLate, Granted, Held, Locks, NotOwned
from stanchion.services.renewal import LockHealth
from stanchion.services.signals import AdmissionSignals

__all__ = [
    "AdmissionLock",
    "GateLockBusy",
    "GateLockFailed",
    "GateLockTaken",
    "Outcome",
    "SharedLock",
    "SoleLock",
]

CALL_MS_MIN: Final = 250
"""For a try that begins when the time is nearly over: less would take a slow answer for none."""
CALL_MS_MAX: Final = 2_000
_PROOF_MS: Final = 1_000
"""Silence for less than that may be our own: a loop that is late, a queue of callers."""
RELEASE_MAX_S: Final = 1.0
RELEASE_TRIES: Final = 2


class GateLockTaken(msgspec.Struct, frozen=True):
    """The gate is the caller's, for as long as the body lasts."""


class GateLockBusy(msgspec.Struct, frozen=True):
    """Others had it for all the time that the caller could wait."""


class GateLockFailed(msgspec.Struct, frozen=True):
    """The lock store could not be asked."""

    error: str


Outcome: TypeAlias = GateLockTaken | GateLockBusy | GateLockFailed


class AdmissionLock(Protocol):
    """One lock for each tenant."""

    def hold(
        self, tenant: TenantId, how: AdmissionSettings, *, risk: Risk, until: Moment
    ) -> AbstractAsyncContextManager[Outcome]:
        """Hold the tenant's lock for the body, or say why not. Tries begin before ``until``."""

    async def close(self) -> None:
        """Give back what is still to be given back."""


class SharedLock:
    """Shared by all replicas, through the lock store."""

    def __init__(
        self, locks: Locks, *, clock: Clock, entropy: Entropy, signals: AdmissionSignals
    ) -> None:
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
        # Everything that says who has which lock is built here.
        name = f"admission/{tenant}"
        token = self._entropy.token()
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
            # Chance may say nothing at all; asking without a pause would be a busy loop.
            pause_ms = max(1, backoff_ms(how.lock_retry, tries, self._entropy.unit()))
            await self._clock.sleep(min(left_ms, pause_ms) / 1000)

    async def _try(
        self, name: str, token: str, how: AdmissionSettings, until: Moment, *, is_first: bool
    ) -> Outcome:
        if self._health.error is not None:
            # It was logged when it was found out; each refusal is still counted as one.
            return GateLockFailed(self._health.error)
        within_ms = min(CALL_MS_MAX, max(CALL_MS_MIN, until - self._clock.moment()))
        try:
            async with asyncio.timeout(within_ms / 1000):
                answer = await self._locks.acquire(
                    name, token, ttl_ms=how.lock_ttl_ms, within_ms=within_ms
                )
        except asyncio.CancelledError:
            # The caller has left, and the lock may be on its way to it.
            self._release_soon(name, token, None)
            raise
        except TimeoutError:
            if not is_first and within_ms < _PROOF_MS:
                # The end of a long wait for a lock that others had: no proof that it is broken.
                self._health.orphaned(name, token)
                return GateLockBusy()
            return self._broken(name, token, f"no answer within {within_ms} ms")
        except Exception as error:  # noqa: BLE001 - whatever it was, nobody knows what the store has
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
        # The reply may be what was lost: then the lock is taken, and nobody would use it.
        self._health.orphaned(name, token)
        self._health.failed(error)
        self._signals.lock_failed(name, error)
        return GateLockFailed(error)

    def _release_soon(self, name: str, token: str, risk: Risk | None) -> None:
        """Give it back in a task of its own: neither the answer nor a cancelled caller waits.

        Without ``risk`` nobody knows whether it was taken, so a failure means nothing.
        """
        task = asyncio.create_task(self._release(name, token, risk), name=f"release {name}")
        # The loop alone would not keep it alive.
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, name: str, token: str, risk: Risk | None) -> None:
        error: str | None = None
        try:
            async with asyncio.timeout(RELEASE_MAX_S):
                error = await self._try_release(name, token)
        except TimeoutError:
            error = f"no answer within {RELEASE_MAX_S:g} s"
        if error is not None and risk is not None:
            self._signals.release_failed(name, risk, error)

    async def _try_release(self, name: str, token: str) -> str | None:
        error = ""
        for _ in range(RELEASE_TRIES):
            try:
                answer = await self._locks.release(
                    name, token, within_ms=round(RELEASE_MAX_S * 1000)
                )
            except Exception as failure:  # noqa: BLE001 - what was decided stays so; the lock expires
                error = sentence(failure)
            else:
                return "it was no longer ours" if isinstance(answer, NotOwned) else None
        return error


_TOO_LATE: Final = "the lock store answered too late"


class SoleLock:
    """For a deployment without a lock store: within this process, first come, first served."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._mutexes: dict[TenantId, asyncio.Lock] = {}
        self._callers: Counter[TenantId] = Counter()

    @asynccontextmanager
    async def hold(
        self,
        tenant: TenantId,
        how: AdmissionSettings,  # noqa: ARG002 - who is next is known, so nobody has to ask again
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
        """There is nothing to give back."""

    async def _take(self, mutex: asyncio.Lock, until: Moment) -> bool:
        try:
            async with asyncio.timeout(max(0, until - self._clock.moment()) / 1000):
                return await mutex.acquire()
        except TimeoutError:
            return False
