"""Renewing job leases, all of a worker together, and stopping work whose lease is lost.

``core.lease`` decides what each answer means; this module waits, calls and stops.

Renewals run on the event loop and not in a thread of their own, on purpose. A worker whose loop
hangs makes no progress and reports no result; if a thread went on renewing its leases, no other
worker would ever get its jobs. Blocking handlers run off the loop, so they cannot make it hang.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Final, Protocol, assert_never

from stanchion.core import lease as rules
from stanchion.core.json_value import JsonValue
from stanchion.core.lease import JOB_POLICY, FenceCause, Holding, Moment, Trust, job_terms_for
from stanchion.wire.worker import LeasedJob, LeaseRef, RenewAnswer
from stanchion.worker import events
from stanchion.worker.events import Hook
from stanchion.worker.server import ServerAnswered, ServerRefused, ServerUnreachable, WorkerApi

_NS_PER_MS: Final = 1_000_000

# CLOCK_MONOTONIC stops while a Linux machine is suspended: after resuming, a worker would trust
# expired leases. CLOCK_BOOTTIME goes on; on other systems the monotonic clock does so too.
_RISING: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class WorkerClock(Protocol):
    """The clock that lease terms are measured with."""

    def moment(self) -> Moment:
        """Milliseconds that never step back, and go on while the machine is suspended."""

    async def sleep(self, seconds: float) -> None: ...


class BootClock:
    """This machine's clock. All of its processes read the same time."""

    def moment(self) -> Moment:
        return Moment(time.clock_gettime_ns(_RISING) // _NS_PER_MS)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


RENEWALS_MAX: Final = 250
"""Leases in one call: with the longest names and notes half the server's limit."""
_SLICE_MS: Final = 1_000
"""Timers stop while a machine is suspended: an expired lease is noticed this soon after."""
_STALL_MS: Final = 1_000
"""A loop that was blocked for longer is reported."""
_LATE_MS: Final = 100
"""A loop that was blocked for longer may be why a lease was not renewed in time."""
PROGRESS_EVERY_MS: Final = 1_000
"""A handler may report progress in a loop: it is sent no more often than this."""
_GIVE_UP_TERMS: Final = 2
"""For this many terms after a lease expired its result is still sent: the server decides."""


class SharedDeadline(Protocol):
    """A number that another process reads: until when the lease is trusted."""

    value: int


class HeldJob:
    """A job lease that the worker holds. The renewer writes, any thread may read."""

    def __init__(
        self, leased: LeasedJob, trust: Trust, asked_at: Moment, clock: WorkerClock
    ) -> None:
        self.leased = leased
        self.trust = trust
        self.on_lost: Callable[[FenceCause], None] | None = None
        """Stops the work. Called once, on the loop."""
        self.deadline: SharedDeadline | None = None
        self.progress: JsonValue = None
        self.usage: dict[str, int] = {}
        """What the handler has used of budgets, in all."""
        self.usage_sent: dict[str, int] = {}
        """What the server knows of it, or refused."""
        self.usage_waits = False
        """Whether the last attempt to send it failed: the next renewal that is due has it."""
        self.on_progress: Callable[[], None] | None = None
        """Has progress and usage sent soon. Called by any thread."""
        self.is_renewing = False
        self.asked_at = asked_at
        """When the first term of its lease began."""
        self.since = clock.moment()
        """When the worker got it."""
        self._good_at = asked_at
        self._clock = clock

    @property
    def lost(self) -> FenceCause | None:
        return self.look()

    def look(self) -> FenceCause | None:
        """Why the lease is not trusted now; ``None`` while it is trusted."""
        trust = rules.tick(self.trust, self._clock.moment())
        return None if isinstance(trust, Holding) else trust.cause

    @property
    def trusted_for_ms(self) -> int:
        """How long the lease is still trusted, without another renewal."""
        now = self._clock.moment()
        trust = rules.tick(self.trust, now)
        return trust.trusted_until - now if isinstance(trust, Holding) else 0

    def note(self, progress: JsonValue) -> None:
        self.progress = progress
        if self.on_progress is not None:
            self.on_progress()

    def use(self, usage: dict[str, int]) -> None:
        self.usage = usage
        if self.on_progress is not None:
            self.on_progress()

    @property
    def give_up_at(self) -> Moment:
        """When the result is dropped if the server has not accepted it."""
        return Moment(self._good_at + (1 + _GIVE_UP_TERMS) * self.leased.lease_ttl_ms)

    def become(self, trust: Trust) -> None:
        """Set the trust, and extend the deadline that a child process reads."""
        self.trust = trust
        if isinstance(trust, Holding):
            self._good_at = trust.sent_at
            deadline = self.deadline  # read once: the thread of a process sets it too
            if deadline is not None:
                deadline.value = trust.trusted_until


class LeaseRenewer:
    """Renews all leases of a worker."""

    def __init__(
        self, server: WorkerApi, clock: WorkerClock, chance: Callable[[], float], tell: Hook
    ) -> None:
        self._server = server
        self._clock = clock
        self._chance = chance
        self._tell = tell
        self._held: dict[str, HeldJob] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at = Moment(0)
        self._calls: set[asyncio.Task[None]] = set()
        self._progress_sent_at = Moment(-PROGRESS_EVERY_MS)
        self._stalled_ms = 0
        self._stall_ended_at = Moment(0)

    def hold(self, leased: LeasedJob, asked_at: Moment) -> HeldJob:
        """Renew a lease that was requested at ``asked_at``, from now on."""
        now = self._clock.moment()
        terms = job_terms_for(leased.lease_ttl_ms)
        trust = rules.granted(terms, JOB_POLICY, asked_at, now)
        held = HeldJob(leased, trust, asked_at, self._clock)
        before = self._held.pop(leased.job_id, None)
        if before is not None:
            # The server delivered the job again to this worker: the older lease had expired there.
            self._end(before, before.look() or FenceCause.TAKEN)
        if isinstance(trust, Holding):
            self._held[leased.job_id] = held
            self._wake_by(trust.next_renewal_at, now)
            loop = asyncio.get_running_loop()
            held.on_progress = partial(_call_soon, loop, self._plan)
        return held

    @property
    def held(self) -> Mapping[str, HeldJob]:
        """The leases that are renewed now, by job, oldest first."""
        return self._held

    def lost(self, held: HeldJob, reason: str | None) -> None:
        """Stop the work of a lease that the server reports as lost."""
        cause = _cause_of(reason)
        trust = rules.tick(held.trust, self._clock.moment())
        if isinstance(trust, Holding) or cause is not FenceCause.TAKEN:
            trust = rules.not_owned(held.trust, cause)
        self._settle(held, trust)

    def stalled_ms(self, since: Moment) -> int:
        """For how long the event loop was last blocked, if that was after ``since``; else 0."""
        now = self._clock.moment()
        overdue_ms = 0 if self._timer is None else now - self._wake_at
        before_ms = self._stalled_ms if self._stall_ended_at >= since else 0
        longest_ms = max(overdue_ms, before_ms)
        return longest_ms if longest_ms >= _LATE_MS else 0

    def let_go(self, held: HeldJob) -> None:
        """Stop renewing: the job has ended or was abandoned."""
        if self._held.get(held.leased.job_id) is held:
            del self._held[held.leased.job_id]

    async def close(self) -> None:
        """Stop renewing all leases."""
        self._held.clear()
        if self._timer is not None:
            self._timer.cancel()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _look(self) -> None:
        now = self._clock.moment()
        self._timer = None
        if now - self._wake_at >= _LATE_MS:
            self._stalled_ms, self._stall_ended_at = now - self._wake_at, now
        if now - self._wake_at > _STALL_MS:
            self._tell(events.LoopStalled(stalled_ms=now - self._wake_at))
        due: list[HeldJob] = []
        near: list[HeldJob] = []
        news: list[HeldJob] = []
        for held in tuple(self._held.values()):
            trust = rules.tick(held.trust, now)
            if not isinstance(trust, Holding):
                self._lose(held, trust)
            elif not held.is_renewing:
                left_ms = trust.next_renewal_at - now
                if left_ms <= 0:
                    due.append(held)
                elif _has_news(held, trust):
                    # Before ``near``: that is renewed only if another lease is due.
                    news.append(held)
                elif rules.may_renew_early(trust, now):
                    near.append(held)
        if due:
            # Leases that are due soon are renewed in the same call.
            self._renew_all([*due, *near])
        if news and now - self._progress_sent_at >= PROGRESS_EVERY_MS:
            self._progress_sent_at = now
            self._renew_all(news, is_due=False)
        self._plan()

    def _plan(self) -> None:
        """Wake up when the next thing is due."""
        now = self._clock.moment()
        for held in self._held.values():
            trust = held.trust
            if isinstance(trust, Holding):
                wake_at = trust.trusted_until if held.is_renewing else trust.next_renewal_at
                if _has_news(held, trust) and not held.is_renewing:
                    soon = Moment(self._progress_sent_at + PROGRESS_EVERY_MS)
                    wake_at = min(wake_at, max(now, soon))
                self._wake_by(min(wake_at, trust.trusted_until), now)

    def _wake_by(self, moment: Moment, now: Moment) -> None:
        moment = min(moment, Moment(now + _SLICE_MS))
        if self._timer is not None:
            if self._wake_at <= moment:
                return
            self._timer.cancel()
        self._wake_at = moment
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0, moment - now) / 1000, self._look)

    def _renew_all(self, leases: list[HeldJob], *, is_due: bool = True) -> None:
        for batch in _batches(leases):
            for held in batch:
                held.is_renewing = True
            renewal = self._renew(batch, is_due=is_due)
            call = asyncio.get_running_loop().create_task(renewal, name="renew")
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _renew(self, batch: list[HeldJob], *, is_due: bool) -> None:
        sent_at = self._clock.moment()
        terms = [job_terms_for(held.leased.lease_ttl_ms) for held in batch]
        refs = tuple(
            LeaseRef(
                job_id=held.leased.job_id,
                fence=held.leased.fence,
                progress=held.progress,
                usage={} if held.usage == held.usage_sent else held.usage,
            )
            for held in batch
        )
        patience_ms = min(each.renew_timeout_ms for each in terms)
        try:
            answer = await self._server.renew(refs, timeout_s=patience_ms / 1000)
        except Exception as bug:  # noqa: BLE001 - the other leases are still renewed
            answer = ServerUnreachable(repr(bug))
        finally:
            for held in batch:
                held.is_renewing = False
        match answer:
            case ServerAnswered(value):
                for held, ref in zip(batch, refs, strict=True):
                    if held.progress is ref.progress:
                        held.progress = None
                    held.usage_sent = ref.usage or held.usage_sent
                    held.usage_waits = False
                self._answered(batch, sent_at, value)
            case ServerUnreachable(error) | ServerRefused(detail=error):
                # One sample for all of them, so that they are retried in one call too.
                sample = self._chance()
                for held, ref in zip(batch, refs, strict=True):
                    # Without the progress, in case that is what the server refuses.
                    if held.progress is ref.progress:
                        held.progress = None
                    # Usage that was not refused is sent again: it is the sum of all.
                    if isinstance(answer, ServerRefused):
                        held.usage_sent = ref.usage or held.usage_sent
                    held.usage_waits = True
                    # Progress is sent before a renewal is due, so this is no failed renewal.
                    if is_due:
                        self._failed(held, sample)
                left_ms = min(held.trusted_for_ms for held in batch)
                self._tell(events.RenewalFailed(leases=len(batch), error=error, left_ms=left_ms))
            case _:
                assert_never(answer)
        self._plan()

    def _answered(self, batch: list[HeldJob], sent_at: Moment, answer: RenewAnswer) -> None:
        lost, renewed = frozenset(answer.lost), frozenset(answer.renewed)
        for held in batch:
            job_id = held.leased.job_id
            if job_id in lost:
                self.lost(held, answer.reasons.get(job_id))
            elif job_id in renewed:
                self._settle(held, rules.renewed(held.trust, sent_at, self._clock.moment()))
            else:
                self._failed(held, self._chance())

    def _failed(self, held: HeldJob, sample: float) -> None:
        now = self._clock.moment()
        self._settle(held, rules.renewal_failed(held.trust, now, sample))

    def _settle(self, held: HeldJob, trust: Trust) -> None:
        if isinstance(trust, Holding):
            held.become(trust)
        else:
            self._lose(held, trust)

    def _lose(self, held: HeldJob, trust: Trust) -> None:
        """Stop the work. The lease is not released: another worker may hold it by now."""
        if self._held.get(held.leased.job_id) is not held:
            return
        del self._held[held.leased.job_id]
        assert not isinstance(trust, Holding)
        self._end(held, trust.cause)

    def _end(self, held: HeldJob, cause: FenceCause) -> None:
        held.become(rules.Fenced(cause))
        on_lost = held.on_lost  # read once: the thread of a process sets it too
        if on_lost is not None:
            on_lost(cause)


def _cause_of(reason: str | None) -> FenceCause:
    match reason:
        case "cancelled":
            return FenceCause.CANCELLED
        case "timed_out":
            return FenceCause.TIMED_OUT
        case _:
            return FenceCause.TAKEN


def _has_news(held: HeldJob, trust: Holding) -> bool:
    """Whether progress or usage is to be sent before the lease is due.

    While renewals fail, it waits.
    """
    has_usage = held.usage != held.usage_sent and not held.usage_waits
    return (held.progress is not None or has_usage) and trust.failures == 0


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # The loop is closed: nothing is renewed any more.
        loop.call_soon_threadsafe(function)


def _batches(leases: list[HeldJob]) -> Iterator[list[HeldJob]]:
    for start in range(0, len(leases), RENEWALS_MAX):
        yield leases[start : start + RENEWALS_MAX]
