"""Renewal of a lease: renew it while the body runs, stop the body when it is lost, give it back.

What each answer of the lock store means is said by ``core.lease``. This is the part that waits,
calls and cancels.
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
from stanchion.services import lease_events as told
from stanchion.services.lease_events import LeaseEvent, LeaseHook
from stanchion.services.log import LOGGER

__all__ = ["Lease", "LeaseSubject", "LockHealth", "RenewalLoop", "Renewer", "guarded"]

RELEASE_MAX_S: Final = 1.0
RELEASE_TRIES: Final = 2

# Timers of the event loop stand still while a machine is suspended. A keeper that looks at the
# clock every second notices the lost time within a second of waking up.
SLICE_S: Final = 1.0


class Lease:
    """The right to work on a name, as long as it is trusted."""

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
        """The lock store failed and policy let the work go on: a race with others is possible."""
        self.trust = trust
        """As the keeper last saw it; ``None`` if there is only the local mutex."""
        self._clock = clock

    @property
    def lost(self) -> FenceCause | None:
        """Why the lease is not trusted any more, at this very moment; ``None`` while it is."""
        match None if self.trust is None else rules.tick(self.trust, self._clock.moment()):
            case None | Holding():
                return None
            case Continuing(cause=cause) | Fenced(cause=cause):
                return cause

    def check(self) -> None:
        """Go on only if the lease is trusted at this very moment. Raises ``LeaseLost``."""
        cause = self.lost
        if cause is not None:
            raise LeaseLost(self.name, cause)


class LeaseSubject(msgspec.Struct, frozen=True):
    """One hold: what is held, how much it matters, and under which token."""

    name: str
    risk: Risk
    policy: LeasePolicy
    token: str


class Renewer:
    """Talks to the lock store about leases that were granted."""

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
        """For so long after a grant that came in time there is nothing to do."""
        self._releases: set[asyncio.Task[None]] = set()

    async def keep(self, lease: Lease, about: LeaseSubject) -> FenceCause:
        """Renew until the rules say that the holder must stop; then say why.

        Whatever a lock adapter raises counts as a failed renewal: a keeper that died of it would
        leave the holder believing.
        """
        while True:
            before = lease.trust
            assert before is not None
            now = self._clock.moment()
            trust = rules.tick(before, now)
            if not isinstance(trust, Fenced) and now >= trust.next_renewal_at:
                trust = await self._renew(about, trust)
            lease.trust = trust
            if isinstance(trust, Fenced):
                return trust.cause
            if isinstance(trust, Continuing) and isinstance(before, Holding):
                self._tell(told.TrustLost(name=about.name, risk=about.risk, cause=trust.cause))
            await self._clock.sleep(self._pause_s(trust))

    def abandoned(self, about: LeaseSubject, cause: FenceCause) -> None:
        """Tell that the holder was fenced."""
        self._tell(told.Abandoned(name=about.name, risk=about.risk, cause=cause))

    async def release(self, lease: Lease, about: LeaseSubject, *, held_ms: int) -> None:
        """Give the lease back, if it may be given back: one retry, then it expires by itself."""
        assert lease.trust is not None
        if not lease.trust.may_release:
            return
        error = self._health.error
        if error is None:
            error = await self._try_release(about)
        else:
            # Nobody waits for a store that is known to be away; it is tidied up when it is back.
            self._health.orphaned(about.name, about.token)
        if error is None:
            self._tell(told.Released(name=about.name, risk=about.risk, held_ms=held_ms))
        else:
            self._tell(told.ReleaseFailed(name=about.name, risk=about.risk, error=error))

    def release_later(self, lease: Lease, about: LeaseSubject, *, held_ms: int) -> None:
        """Give the lease back in a task of its own: whoever held it has no more time."""
        release = self.release(lease, about, held_ms=held_ms)
        task = asyncio.create_task(release, name=f"release {about.name}")
        # The loop alone would not keep it alive.
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _try_release(self, about: LeaseSubject) -> str | None:
        error = ""
        for _ in range(RELEASE_TRIES):
            try:
                async with asyncio.timeout(RELEASE_MAX_S):
                    answer = await self._locks.release(
                        about.name, about.token, within_ms=round(RELEASE_MAX_S * 1000)
                    )
            except Exception as failure:  # noqa: BLE001 - the body's outcome must not depend on it
                error = sentence(failure)
            else:
                return "it was no longer ours" if isinstance(answer, NotOwned) else None
        return error

    def _pause_s(self, trust: Holding | Continuing) -> float:
        wake = trust.next_renewal_at
        if isinstance(trust, Holding):
            wake = min(wake, trust.trusted_until)
        return min(SLICE_S, max(0, wake - self._clock.moment()) / 1000)

    async def _renew(self, about: LeaseSubject, trust: Holding | Continuing) -> Trust:
        sent_at = self._clock.moment()
        patience_ms = self._terms.renew_timeout_ms
        if isinstance(trust, Holding):
            # A call that is under way must not carry the holder past its deadline.
            patience_ms = max(1, min(patience_ms, trust.trusted_until - sent_at))
        try:
            async with asyncio.timeout(patience_ms / 1000):
                answer = await self._locks.renew(
                    about.name, about.token, ttl_ms=self._terms.ttl_ms, within_ms=patience_ms
                )
        except Exception as error:  # noqa: BLE001 - see keep
            self._health.failed(sentence(error))
            failures = trust.failures + 1 if isinstance(trust, Holding) else None
            self._tell(
                told.RenewFailed(
                    name=about.name, risk=about.risk, failures=failures, error=sentence(error)
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


class RenewalLoop:
    """An ``async with`` around the body: keeps the lease, and cancels the body when it is lost.

    Like ``asyncio.timeout``, it must tell its own cancellation from anybody else's: its own becomes
    ``LeaseLost``, another's goes on its way.
    """

    def __init__(self, keeper: Renewer, lease: Lease, about: LeaseSubject, clock: Clock) -> None:
        self._keeper = keeper
        self._lease = lease
        self._about = about
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
        trust, idle_ms = self._lease.trust, self._keeper.idle_ms
        if isinstance(trust, Holding) and self._began + idle_ms < trust.next_renewal_at:
            # Most holds are over before there is anything to keep: they do not pay for a task.
            loop = asyncio.get_running_loop()
            self._starting = loop.call_later(idle_ms / 1000, self._start)
        else:
            self._start()

    def _start(self) -> None:
        self._task = asyncio.create_task(self._watch(), name=f"keep {self._about.name}")

    def _stop(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        try:
            cause = await self._keeper.keep(self._lease, self._about)
        except Exception:  # noqa: BLE001 - nobody renews any more: the holder must not go on
            cause = FenceCause.DEADLINE
        # First the fence, then the news of it.
        self._cause = cause
        self._body.cancel(f"lease lost: {cause}")
        self._keeper.abandoned(self._about, cause)

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
            # The body ended before the cancellation reached it. It is taken here, or it would hit
            # whatever is awaited next.
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                if not is_ours:
                    raise
        if error is None or (is_ours and isinstance(error, asyncio.CancelledError)):
            raise LeaseLost(self._about.name, self._cause) from error

    async def _release(self, held_ms: int) -> None:
        try:
            await self._keeper.release(self._lease, self._about, held_ms=held_ms)
        except asyncio.CancelledError:
            # A caller that is cancelled once more must not leave the lease behind. Only then a task
            # is made for it: it costs as much as the rest of a hold.
            self._keeper.release_later(self._lease, self._about, held_ms=held_ms)
            raise

    def _is_too_late(self) -> bool:
        """Whether the body kept the loop busy past the deadline, so that the keeper never ran."""
        assert self._lease.trust is not None
        self._lease.trust = rules.tick(self._lease.trust, self._clock.moment())
        return isinstance(self._lease.trust, Fenced)

    def _end_late(self, error: BaseException | None) -> None:
        self._keeper.abandoned(self._about, FenceCause.DEADLINE)
        if error is None:
            raise LeaseLost(self._about.name, FenceCause.DEADLINE)


PROBE_EVERY_S: Final = 1.0
CALL_MAX_S: Final = 1.0
ORPHANS_MAX: Final = 1_000


class LockHealth:
    """Whether the lock store is worth asking, and what to tidy up once it is again."""

    def __init__(self, locks: Locks, clock: Clock) -> None:
        self._locks = locks
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._orphans: dict[str, str] = {}
        self.error: str | None = None
        """Why the lock store is not asked now; ``None`` if it is."""

    def failed(self, error: str) -> None:
        """A call failed: nobody asks any more until a probe succeeds."""
        self.error = error
        self._work()

    def orphaned(self, name: str, token: str) -> None:
        """A lease that nobody holds may be at the store: let go of it as soon as the store answers.

        It would expire by itself. This only spares the next one the wait.
        """
        if len(self._orphans) < ORPHANS_MAX:
            # By token: many callers may have been after one name, and one of them has it.
            self._orphans[token] = name
            self._work()

    async def close(self) -> None:
        """Stop working in the background."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _work(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._recover(), name="lock-health")

    async def _recover(self) -> None:
        """Probe until the store answers, and let go of what was left behind."""
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
        """One try: a lease that cannot be let go expires, and says nothing about health."""
        token, name = self._orphans.popitem()
        with suppress(Exception):
            async with asyncio.timeout(CALL_MAX_S):
                await self._locks.release(name, token, within_ms=round(CALL_MAX_S * 1000))


def guarded(hook: LeaseHook) -> LeaseHook:
    """A hook whose errors are logged: a broken metric must not decide who holds what."""

    def tell(event: LeaseEvent) -> None:
        try:
            hook(event)
        except Exception:  # noqa: BLE001 - see above
            LOGGER.exception("lease_hook_failed")

    return tell
