"""Lease signals: metrics, log lines and a short history made from lease events.

Every log event has a metric, and ``docs/how-to/lock-incidents.md`` has a row for each pair.
``LeaseHistory`` keeps what people ask for during an incident: what ran without a lock, when locks
were found busy, and which fences a lock has had. It is this replica's own, bounded, in memory.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Final, Literal, TypeAlias, assert_never

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram

from stanchion.core.model import Instant, Risk
from stanchion.services import lease_events as events
from stanchion.services.lease_events import LeaseEvent
from stanchion.services.log import log_event

# A wait is a round trip to the lock store, a hold is a few of them and one commit.
_WAIT_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2)
_HELD_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 10, 30)


class LeaseErrors:
    """Counts failed renewals and releases of all kinds of leases. One for each registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._renew = Counter(
            "stanchion_lease_renew_errors",
            "Renewals that ended in an error or a time-out.",
            ["kind", "risk"],
            registry=registry,
        )
        self._release = Counter(
            "stanchion_lease_release_errors",
            "Leases that could not be released and were left to expire.",
            ["kind", "risk"],
            registry=registry,
        )

    def renew_of(self, kind: str) -> Mapping[Risk, Counter]:
        """Failed renewals of one kind of lease, by risk class."""
        return {risk: self._renew.labels(kind=kind, risk=str(risk)) for risk in Risk}

    def release_of(self, kind: str) -> Mapping[Risk, Counter]:
        """Failed releases of one kind of lease, by risk class."""
        return {risk: self._release.labels(kind=kind, risk=str(risk)) for risk in Risk}


MarkKind: TypeAlias = Literal["acquired", "released", "abandoned", "stale_write"]


class LeaseMark(msgspec.Struct, frozen=True):
    """A moment in the life of a lock."""

    at: Instant
    what: MarkKind
    fence: int | None


class Unlocked(msgspec.Struct, frozen=True):
    """Work that was done without a lock, because the lock store failed."""

    at: Instant
    name: str
    risk: Risk
    error: str


class LockWait(msgspec.Struct, frozen=True):
    """A run of this replica that did not get its lock, busy or unavailable, and tries again."""

    name: str
    since: Instant
    tried_at: Instant
    tries: int


UNLOCKED_PART: Final = "unlocked"
"""The part of a replica's summary that counts its work without a lock."""
UNLOCKED_MAX: Final = 1_000
BUSY_MAX: Final = 10_000
_NAMES_MAX: Final = 500
_WAIT_MS: Final = 15_000
"""Work that has not tried again for this long was done by another replica, or is no longer due."""
_MARKS_MAX: Final = 50


class LeaseHistory:
    """What this replica has lately done with run leases."""

    def __init__(self, now: Callable[[], Instant]) -> None:
        self._now = now
        self.since = now()
        self.unlocked: deque[Unlocked] = deque(maxlen=UNLOCKED_MAX)
        """Work without a lock, oldest first."""
        self.unlocked_count = 0
        """How often in all; the first ones may have been forgotten."""
        self.busy: deque[Instant] = deque(maxlen=BUSY_MAX)
        """When a run's lock was found busy, oldest first."""
        self._marks: OrderedDict[str, deque[LeaseMark]] = OrderedDict()
        self._waits: OrderedDict[str, LockWait] = OrderedDict()

    def of_lock(self, name: str) -> tuple[LeaseMark, ...]:
        """The last moments of one lock, oldest first."""
        return tuple(self._marks.get(name, ()))

    def fell_back(self, event: events.Fallback) -> None:
        """Note work without a lock."""
        self.unlocked_count += 1
        self.unlocked.append(Unlocked(self._now(), event.name, event.risk, event.error))

    @property
    def waits(self) -> tuple[LockWait, ...]:
        """Recent waits for locks, in the order of their last try."""
        oldest = self._now() - _WAIT_MS
        return tuple(wait for wait in self._waits.values() if wait.tried_at >= oldest)

    def was_busy(self, name: str) -> None:
        """Note that a run's lock was busy."""
        now = self._now()
        self.busy.append(now)
        self._put_off(name, now)

    def was_put_off(self, name: str) -> None:
        """Note that a run did not get its lock, and tries again."""
        self._put_off(name, self._now())

    def _put_off(self, name: str, now: Instant) -> None:
        wait = self._waits.pop(name, None)
        if wait is None or now - wait.tried_at > _WAIT_MS:
            wait = LockWait(name, now, now, 0)
            if len(self._waits) >= _NAMES_MAX:
                self._waits.popitem(last=False)
        self._waits[name] = LockWait(name, wait.since, now, wait.tries + 1)

    def mark(self, name: str, what: MarkKind, fence: int | None = None) -> None:
        """Note a moment of one lock. Of many locks the ones that moved last are kept."""
        if what == "acquired" and self._waits:
            self._waits.pop(name, None)
        marks = self._marks.get(name)
        if marks is None:
            marks = self._marks[name] = deque(maxlen=_MARKS_MAX)
            if len(self._marks) > _NAMES_MAX:
                self._marks.popitem(last=False)
        else:
            self._marks.move_to_end(name)
        marks.append(LeaseMark(self._now(), what, fence))


class RunLeaseSignals:
    """The hook for run leases. Label children are bound once: a look-up costs more than a count."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        now: Callable[[], Instant],
        on_fallback: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_fallback = on_fallback
        self.history = LeaseHistory(now)
        self.errors = LeaseErrors(registry)
        """Shared with other kinds of leases in the same registry."""
        self._fallbacks = _by_risk(
            registry,
            "stanchion_workflow_lock_fallback",
            "Runs handled under the local mutex alone, because the lock store failed.",
        )
        self._refusals = _by_risk(
            registry,
            "stanchion_run_lock_refused",
            "Runs deferred because the lock store failed and policy fails closed.",
        )
        self._abandoned = _by_risk(
            registry,
            "stanchion_workflow_run_lock_abandoned",
            "Holders of a run lease that were fenced: their work was cancelled.",
        )
        self._untrusted = _by_risk(
            registry,
            "stanchion_run_lock_untrusted",
            "Holders of a run lease that went on after losing trust in it.",
        )
        self._renew_errors = self.errors.renew_of("run")
        self._release_errors = self.errors.release_of("run")
        self._contended = Counter(
            "stanchion_run_lock_contended",
            "Holds skipped because another held the run's lease.",
            registry=registry,
        )
        self._stale = Counter(
            "stanchion_run_stale_writes",
            "Commits that the store refused, because a later holder had written.",
            registry=registry,
        )
        self._wait = Histogram(
            "stanchion_run_lock_wait_seconds",
            "Time from the request for a run lease to its grant.",
            buckets=_WAIT_BUCKETS_S,
            registry=registry,
        )
        self._held = Histogram(
            "stanchion_run_lock_held_seconds",
            "Time for which run leases were held.",
            buckets=_HELD_BUCKETS_S,
            registry=registry,
        )

    def __call__(self, event: LeaseEvent) -> None:
        """Count the event, and log it if an operator may have to act on it."""
        match event:
            case events.Acquired():
                self._wait.observe(event.waited_ms / 1000)
                self.history.mark(event.name, "acquired", event.fence)
            case events.Contended():
                self._contended.inc()
                self.history.was_busy(event.name)
            case events.Released():
                self._held.observe(event.held_ms / 1000)
                self.history.mark(event.name, "released")
            case events.StaleWrite():
                self._stale.inc()
                self.history.mark(event.name, "stale_write", event.fence)
            case events.Fallback():
                self._fallbacks[event.risk].inc()
                self.history.fell_back(event)
                self._on_fallback()
                _log(logging.ERROR, "run_lock_fallback", event, error=event.error, race="possible")
            case events.Refused():
                self._refusals[event.risk].inc()
                self.history.was_put_off(event.name)
                escalated = "yes" if event.escalated else "no"
                _log(
                    logging.ERROR, "run_lock_refused", event, error=event.error, escalated=escalated
                )
            case events.RenewFailed():
                self._renew_errors[event.risk].inc()
                failures = "untrusted" if event.failures is None else str(event.failures)
                _log(
                    logging.WARNING,
                    "run_lock_renew_failed",
                    event,
                    error=event.error,
                    failures=failures,
                )
            case events.TrustLost():
                self._untrusted[event.risk].inc()
                _log(logging.WARNING, "run_lock_untrusted", event, cause=event.cause)
            case events.Abandoned():
                self._abandoned[event.risk].inc()
                self.history.mark(event.name, "abandoned")
                _log(logging.ERROR, "run_lock_abandoned", event, cause=event.cause)
            case events.ReleaseFailed():
                self._release_errors[event.risk].inc()
                _log(logging.WARNING, "lock_release_failed", event, error=event.error)
            case _:
                assert_never(event)


def _log(level: int, name: str, event: LeaseEvent, **fields: str) -> None:
    log_event(level, name, lease=event.name, risk=str(event.risk), **fields)


def _by_risk(registry: CollectorRegistry, name: str, text: str) -> Mapping[Risk, Counter]:
    counter = Counter(name, text, ["risk"], registry=registry)
    return {risk: counter.labels(risk=str(risk)) for risk in Risk}
