"""Renewal of a lease: renew it while the body runs, cancel the body when it is lost, release it.

``core.lease`` decides what each answer of the lock store means. This module waits, calls the lock
store and cancels the body. ``LockHealth`` keeps a failing lock store from being called by all.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Final, assert_never

import msgspec

from stanchion.core import lease as rules
from stanchion.core.lease import (
    Continuing,
    FenceCause,
    Fenced,
    Holding,
    LeaseLost,
    LeasePolicy,
    LeaseTerms,
    Trust,
)
from stanchion.core.model import Risk
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import sentence
from stanchion.ports.locks import Locks, NotOwned, Renewed
from stanchion.services import lease_events as events
from stanchion.services.lease_events import LeaseEvent, LeaseHook
from stanchion.services.log import LOGGER

RELEASE_MAX_S: Final = 1.0
RELEASE_TRIES: Final = 2

# Timers of the event loop do not run while a machine is suspended. A renewer that checks the clock
# every second notices the lost time within a second after resuming.
SLICE_S: Final = 1.0


class Lease:
    """The right to work on a name, valid as long as it is trusted."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        *,
        fence: int | None = None,
        trust: Trust | None = None,
        is_degraded: bool = False,
    ) -> None:
        self.name = name
        self.fence = fence
        """To be sent with every write; ``None`` if there is only the local mutex."""
        self.is_degraded = is_degraded
        """Whether the lock store failed and policy let the work go on: a race is possible."""
        self.trust = trust
        """As of the last renewal or check; ``None`` if there is only the local mutex."""
        self._clock = clock

    @property
    def lost(self) -> FenceCause | None:
        """Why the lease is not trusted now; ``None`` while it is trusted."""
        match None if self.trust is None else rules.tick(self.trust, self._clock.moment()):
            case None | Holding():
                return None
            case Continuing(cause=cause) | Fenced(cause=cause):
                return cause

    def check(self) -> None:
        """Raise ``LeaseLost`` if the lease is not trusted now."""
        cause = self.lost
        if cause is not None:
            raise LeaseLost(self.name, cause)


class LeaseSubject(msgspec.Struct, frozen=True):
    """What one hold is for: the name, its risk class and policy, and the token of the hold."""

    name: str
    risk: Risk
    policy: LeasePolicy
    token: str


class Renewer:
    """Renews and releases leases that were granted."""

    def __init__(
        self,
        locks: Locks,
        health: LockHealth,
        clock: Clock,
        entropy: Entropy,
        terms: LeaseTerms,
        tell: LeaseHook,
    ) -> None:
        self._locks = locks
        self._health = health
        self._clock = clock
        self._entropy = entropy
        self._terms = terms
        self._tell = tell
        self.idle_ms = min(round(SLICE_S * 1000), terms.renew_every_ms) // 2
        """How long after a timely grant there is nothing to renew or check."""
        self._releases: set[asyncio.Task[None]] = set()

    async def keep(self, lease: Lease, subject: LeaseSubject) -> FenceCause:
        """Renew until the rules say that the holder must stop; return the cause.

        Any exception of a lock adapter counts as a failed renewal: if it ended this task, the
        holder would never be stopped.
        """
        while True:
            before = lease.trust
            assert before is not None
            now = self._clock.moment()
            trust = rules.tick(before, now)
            if not isinstance(trust, Fenced) and now >= trust.next_renewal_at:
                trust = await self._renew(subject, trust)
            lease.trust = trust
            if isinstance(trust, Fenced):
                return trust.cause
            if isinstance(trust, Continuing) and isinstance(before, Holding):
                self._tell(
                    events.TrustLost(name=subject.name, risk=subject.risk, cause=trust.cause)
                )
            await self._clock.sleep(self._pause_s(trust))

    def abandoned(self, subject: LeaseSubject, cause: FenceCause) -> None:
        """Emit the event that the holder was fenced."""
        self._tell(events.Abandoned(name=subject.name, risk=subject.risk, cause=cause))

    async def release(self, lease: Lease, subject: LeaseSubject, *, held_ms: int) -> None:
        """Release the lease, unless the holder was fenced. After one retry it is left to expire."""
        assert lease.trust is not None
        if not lease.trust.may_release:
            return
        error = self._health.error
        if error is None:
            error = await release_lock(self._locks, subject.name, subject.token)
        else:
            # The lock store is known to be unavailable: released in the background when it is back.
            self._health.orphaned(subject.name, subject.token)
        if error is None:
            self._tell(events.Released(name=subject.name, risk=subject.risk, held_ms=held_ms))
        else:
            self._tell(events.ReleaseFailed(name=subject.name, risk=subject.risk, error=error))

    def release_later(self, lease: Lease, subject: LeaseSubject, *, held_ms: int) -> None:
        """Release the lease in a background task: the holder was cancelled and cannot wait."""
        release = self.release(lease, subject, held_ms=held_ms)
        task = asyncio.create_task(release, name=f"release {subject.name}")
        # The event loop keeps only a weak reference.
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def close(self) -> None:
        """Wait for releases in the background. Each of them ends in time."""
        while self._releases:
            await asyncio.wait(tuple(self._releases))

    def _pause_s(self, trust: Holding | Continuing) -> float:
        wake = trust.next_renewal_at
        if isinstance(trust, Holding):
            wake = min(wake, trust.trusted_until)
        return min(SLICE_S, max(0, wake - self._clock.moment()) / 1000)

    async def _renew(self, subject: LeaseSubject, trust: Holding | Continuing) -> Trust:
        sent_at = self._clock.moment()
        patience_ms = self._terms.renew_timeout_ms
        if isinstance(trust, Holding):
            # The call must not take longer than the lease is trusted.
            patience_ms = max(1, min(patience_ms, trust.trusted_until - sent_at))
        try:
            async with asyncio.timeout(patience_ms / 1000):
                answer = await self._locks.renew(
                    subject.name, subject.token, ttl_ms=self._terms.ttl_ms, within_ms=patience_ms
                )
        except Exception as error:  # noqa: BLE001 - see keep
            self._health.failed(sentence(error))
            failures = trust.failures + 1 if isinstance(trust, Holding) else None
            self._tell(
                events.RenewFailed(
                    name=subject.name, risk=subject.risk, failures=failures, error=sentence(error)
                )
            )
            return rules.renewal_failed(trust, self._clock.moment(), self._entropy.unit())
        match answer:
            case Renewed():
                return rules.renewed(trust, sent_at, self._clock.moment())
            case NotOwned():
                return rules.not_owned(trust)
            case _:
                assert_never(answer)


async def release_lock(locks: Locks, name: str, token: str) -> str | None:
    """Release a lock, with one retry. Returns why it failed, or ``None``."""
    error = ""
    for _ in range(RELEASE_TRIES):
        try:
            async with asyncio.timeout(RELEASE_MAX_S):
                answer = await locks.release(name, token, within_ms=round(RELEASE_MAX_S * 1000))
        except Exception as failure:  # noqa: BLE001 - the holder's outcome must not depend on it
            error = sentence(failure)
        else:
            return "it was no longer ours" if isinstance(answer, NotOwned) else None
    return error


class RenewalLoop:
    """Renews the lease during the body of an ``async with``, and cancels the body when it is lost.

    Like ``asyncio.timeout``, it tells its own cancellation from others: its own becomes
    ``LeaseLost``, another one propagates.
    """

    def __init__(self, renewer: Renewer, lease: Lease, subject: LeaseSubject, clock: Clock) -> None:
        self._renewer = renewer
        self._lease = lease
        self._subject = subject
        self._clock = clock
        self._cause: FenceCause | None = None

    async def __aenter__(self) -> None:
        body = asyncio.current_task()
        assert body is not None
        self._body = body
        self._cancelling_before = body.cancelling()
        self._began = self._clock.moment()
        self._task: asyncio.Task[None] | None = None
        self._starting: asyncio.TimerHandle | None = None
        trust, idle_ms = self._lease.trust, self._renewer.idle_ms
        if isinstance(trust, Holding) and self._began + idle_ms < trust.next_renewal_at:
            # Most holds end before there is anything to renew: they need no task.
            loop = asyncio.get_running_loop()
            self._starting = loop.call_later(idle_ms / 1000, self._start)
        else:
            self._start()

    def _start(self) -> None:
        self._task = asyncio.create_task(self._watch(), name=f"keep {self._subject.name}")

    def _stop(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        try:
            cause = await self._renewer.keep(self._lease, self._subject)
        except Exception:  # noqa: BLE001 - the lease is not renewed any more: the holder must stop
            cause = FenceCause.DEADLINE
        # The body is cancelled before the hook runs.
        self._cause = cause
        self._body.cancel(f"lease lost: {cause}")
        self._renewer.abandoned(self._subject, cause)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        if self._cause is None and self._is_too_late():
            self._end_late(error)
            return
        if self._cause is None:
            held_ms = self._clock.moment() - self._began
            await self._release(held_ms)
            return
        is_ours = self._body.uncancel() <= self._cancelling_before
        if not isinstance(error, asyncio.CancelledError):
            # The body ended before the cancellation reached it. Consume it here, or it would be
            # raised at the caller's next await.
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                if not is_ours:
                    raise
        if error is None or (is_ours and isinstance(error, asyncio.CancelledError)):
            raise LeaseLost(self._subject.name, self._cause) from error

    async def _release(self, held_ms: int) -> None:
        try:
            await self._renewer.release(self._lease, self._subject, held_ms=held_ms)
        except asyncio.CancelledError:
            # A caller that is cancelled again must still release the lease. A task is created only
            # in this case: it costs as much as the rest of a hold.
            self._renewer.release_later(self._lease, self._subject, held_ms=held_ms)
            raise

    def _is_too_late(self) -> bool:
        """Whether the body blocked the loop past the deadline, so that the renewer never ran."""
        assert self._lease.trust is not None
        self._lease.trust = rules.tick(self._lease.trust, self._clock.moment())
        return isinstance(self._lease.trust, Fenced)

    def _end_late(self, error: BaseException | None) -> None:
        self._renewer.abandoned(self._subject, FenceCause.DEADLINE)
        if error is None:
            raise LeaseLost(self._subject.name, FenceCause.DEADLINE)


PROBE_EVERY_S: Final = 1.0
CALL_MAX_S: Final = 1.0
ORPHANS_MAX: Final = 1_000


class LockHealth:
    """Knows whether the lock store is available, and releases orphaned leases when it is again."""

    def __init__(self, locks: Locks, clock: Clock) -> None:
        self._locks = locks
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._orphans: dict[str, str] = {}
        self.error: str | None = None
        """Why the lock store is not called now; ``None`` while it is."""

    def failed(self, error: str) -> None:
        """Note a failed call: the lock store is not called again until a probe succeeds."""
        self.error = error
        self._work()

    def orphaned(self, name: str, token: str) -> None:
        """Release a lease that may have been granted without a holder, once the store answers.

        It would expire by itself; releasing it spares the next holder the wait.
        """
        if len(self._orphans) < ORPHANS_MAX:
            # By token: several callers may have asked for the name, and one of them holds it.
            self._orphans[token] = name
            self._work()

    async def close(self) -> None:
        """Stop the background task. If the store is available, it may finish within one call."""
        if self._task is not None:
            if self.error is None:
                await asyncio.wait({self._task}, timeout=CALL_MAX_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _work(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._recover(), name="lock-health")

    async def _recover(self) -> None:
        """Probe until the store answers, then release orphaned leases."""
        while self.error is not None or self._orphans:
            if self.error is None:
                await self._release_orphan()
            else:
                await self._clock.sleep(PROBE_EVERY_S)
                await self._probe()

    async def _probe(self) -> None:
        try:
            async with asyncio.timeout(CALL_MAX_S):
                await self._locks.ping()
        except Exception as error:  # noqa: BLE001 - a probe that died would refuse for ever
            self.error = sentence(error)
        else:
            self.error = None

    async def _release_orphan(self) -> None:
        """Try once to release a lease. A failure is ignored: the lease expires."""
        token, name = self._orphans.popitem()
        with suppress(Exception):
            async with asyncio.timeout(CALL_MAX_S):
                await self._locks.release(name, token, within_ms=round(CALL_MAX_S * 1000))


def guarded(hook: LeaseHook) -> LeaseHook:
    """Wrap a hook so that its errors are logged: a broken metric must not break a hold."""

    def tell(event: LeaseEvent) -> None:
        try:
            hook(event)
        except Exception:  # noqa: BLE001 - see above
            LOGGER.exception("lease_hook_failed")

    return tell
