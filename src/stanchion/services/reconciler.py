"""Reconciler: finds stuck work and puts it back on its usual path.

Everything is found by an index of the store, never by a full scan. Any number of replicas may
reconcile at the same time.

| stuck | found by | goes to |
|---|---|---|
| a worker died | job leases in the order of their end | workers, or dead letters |
| an attempt took too long | the same index | revoked; its failure goes to the inbox |
| a bell was lost | ready jobs by topic (``scheduler``) | waiting workers |
| a timer is due | timers in the order of their time (``outbox``) | the inbox |
| an event was not applied | outbox rows in the order of their time (``outbox``) | advance |
| a slot has leaked | audit of tenants in turn | repaired, counted |
| a lock's audit entry was not moved | notes in the lock store (``lock_audit``) | the audit log |
| a run is past its retention | finished runs in the order of their end | removed |
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

from stanchion.core.audit import SYSTEM, AuditEntry
from stanchion.core.escalation import Level
from stanchion.core.events import JobReturned
from stanchion.core.json_value import JsonValue
from stanchion.core.model import Instant, place_of
from stanchion.core.retry import within
from stanchion.ports.bus import Bell
from stanchion.ports.clock import Clock
from stanchion.ports.errors import BackendError
from stanchion.ports.records import Drift, ExpiredJob
from stanchion.ports.store import Store
from stanchion.services.advance import Advancer
from stanchion.services.context import ReplicaContext
from stanchion.services.escalation import EscalationService
from stanchion.services.lock_audit import LockAudit
from stanchion.services.log import OutageLogger, log_event
from stanchion.services.pressure import SEEN_MS
from stanchion.services.replicas import ReplicaView
from stanchion.services.signals import EngineSignals

EVERY_MS: Final = 1_000
JOBS_MAX: Final = 500
AUDIT_MAX: Final = 50
PURGE_MAX: Final = 200
_AUDIT_EVERY: Final = 5
_PURGE_EVERY: Final = 10
_PURGES_MAX: Final = 100
_NOTES_EVERY: Final = 10
_GAUGE_EVERY: Final = 5
_LEARN_EVERY: Final = 80
"""In rounds: about once a minute."""
LEARNED_MAX: Final = 1_000


SLOTS_PART: Final = "slots"
"""The part of a summary with the last audit."""
_REPAIR: Final = AuditEntry(action="drift.repair", actor=SYSTEM, subject="")
"""The audit entry of a corrected count. The store sets its subject."""


class Reconciler:
    """The reconciler of one replica."""

    def __init__(
        self,
        context: ReplicaContext,
        *,
        advancer: Advancer,
        escalating: EscalationService,
        max_deliveries: int,
        retention_ms: int,
        lock_audit: LockAudit | None = None,
    ) -> None:
        self._store = context.store
        self._locks = context.locks
        self._bus = context.bus
        self._clock = context.clock
        self._entropy = context.entropy
        self._signals = context.signals
        self._advancer = advancer
        self._escalating = escalating
        self._max_deliveries = max_deliveries
        self._retention_ms = retention_ms
        self.slots = SlotAuditor(context.store, clock=context.clock, signals=context.signals)
        self._lock_audit = lock_audit
        self._round = 0
        self._learn_in = 1
        """The round in which tenants are learned next, and after which of them."""
        self._learned_to: str | None = None
        self._outage = OutageLogger("reconcile_failed", "reconcile_recovered")

    async def run(self) -> None:
        """Reconcile every half to whole second, until cancelled."""
        while True:
            try:
                await self.reconcile()
            except BackendError as error:
                self._outage.failed(error)
            except Exception as error:  # noqa: BLE001 - one bad row must not stop the next rounds
                self._outage.failed(repr(error))
            else:
                self._outage.worked()
            # Jittered, so that replicas that started together do not reconcile together.
            pause_ms = within(EVERY_MS // 2, EVERY_MS, self._entropy.unit())
            await self._clock.sleep(pause_ms / 1000)

    async def reconcile(self) -> None:
        """One round. A part that fails stops no other; its error is raised afterwards."""
        self._round += 1
        self._signals.close_bucket()
        parts = [self._expire_all]
        if self._round % _AUDIT_EVERY == 0:
            parts.append(self.audit)
        if self._round % _PURGE_EVERY == 0:
            parts.append(self.purge)
        parts += [self._probe_locks, self._gauge_work]
        if self._round >= self._learn_in:
            parts.append(self._learn)
        parts.append(self._gauge_tenants)
        if self._round % _NOTES_EVERY == 0:
            parts.append(self._move_notes)
        failed: Exception | None = None
        for part in parts:
            try:
                await part()
            except Exception as error:  # noqa: BLE001 - raised below
                failed = failed or error
        if failed is not None:
            raise failed

    async def _expire_all(self) -> None:
        while await self.expire_jobs() == JOBS_MAX:
            pass  # there may be more

    async def expire_jobs(self) -> int:
        """End expired job leases; return how many."""
        expired = await self._store.expire_jobs(limit=JOBS_MAX, max_deliveries=self._max_deliveries)
        returned = [job for job in expired if not (job.is_dead or job.is_timed_out)]
        for job in expired:
            if job.is_timed_out:
                self._bus.ring(Bell.REVOKED, job.run_id)
                self._advancer.nudge(job.run_id)
                continue
            self._signals.job_lease_expired()
            if job.is_dead:
                self._signals.dead_letter_written()
                log_event(
                    logging.ERROR,
                    "job_died",
                    job=job.job_id,
                    tenant=job.tenant,
                    deliveries=job.deliveries,
                )
                self._advancer.nudge(job.run_id)
        for topic in sorted({job.topic for job in returned}):
            self._bus.ring(Bell.READY, topic)
        for job in returned:
            await self._note_return(job)
        return len(expired)

    async def _note_return(self, job: ExpiredJob) -> None:
        """Record the return in the run's timeline. It is only information, so it may fail."""
        place = place_of(job.job_id)
        event = JobReturned(
            job_id=job.job_id, step_id=place.step_id, item=place.item, deliveries=job.deliveries
        )
        with suppress(BackendError):
            entry_id = f"returned:{job.job_id}#{job.deliveries}"
            await self._store.post(job.run_id, event, entry_id=entry_id)
            self._advancer.nudge(job.run_id)

    async def audit(self) -> None:
        """Compare slots with unfinished runs, for the next tenants in turn."""
        await self.slots.audit_some()

    async def purge(self) -> None:
        """Remove runs past their retention, in small batches so that other calls get a turn."""
        before = Instant(await self._store.now() - self._retention_ms)
        for _ in range(_PURGES_MAX):
            removed = await self._store.purge(finished_before=before, limit=PURGE_MAX)
            self._signals.purged(removed)
            if removed < PURGE_MAX:
                break

    async def _move_notes(self) -> None:
        """Move what operators did with locks into the audit log."""
        if self._lock_audit is not None:
            with suppress(BackendError):  # of the lock store; later
                await self._lock_audit.move()

    async def _probe_locks(self) -> None:
        """Probe the lock store during an escalation: classes that fail closed do not call it."""
        if self._locks is None or self._escalating.level is Level.NORMAL:
            return
        try:
            await self._locks.ping()
        except BackendError:
            self._escalating.count(probes_failed=1)
        else:
            self._escalating.count(probes_ok=1)

    async def _gauge_work(self) -> None:
        with suppress(BackendError):  # without a bus, the gauge keeps its last value
            self._signals.bus_pending(await self._bus.pending())
        self._signals.outbox_rows(await self._store.outbox_size())

    async def _gauge_tenants(self) -> None:
        is_full = self._round % _GAUGE_EVERY == 1
        tenants = self._signals.tenants() if is_full else self._signals.queueing()
        standings = await self._store.standings(tenants) if tenants else ()
        self._signals.queued({each.tenant: each.queued for each in standings})
        if is_full:
            self._signals.active({each.tenant: each.active for each in standings})
            limited = [each.tenant for each in standings if each.config and each.config.budgets]
            self._signals.budgets(
                {each: await self._store.budgets(each) for each in self._signals.named(limited)}
            )

    async def _learn(self) -> None:
        """Learn which tenants have runs or budgets, the next thousand tenants.

        This process may have begun after their last start, or other replicas may have served them.
        """
        since = Instant(self._clock.now() - SEEN_MS)
        page = await self._store.list_standings(
            seen_since=since, cursor=self._learned_to, limit=LEARNED_MAX
        )
        self._signals.learn(page.items)
        self._learned_to = page.cursor
        self._learn_in = self._round + (_LEARN_EVERY if page.cursor is None else 1)


class SlotReport(msgspec.Struct, frozen=True):
    """The result of an audit of slots over all tenants."""

    at: Instant
    checked: int
    drifts: tuple[Drift, ...]
    drifted: int | None = None
    """The number of drifts, if not all of them are here."""

    def brief(self) -> SlotReport:
        """The report with its first drifts only, for the summary of a replica."""
        return SlotReport(self.at, self.checked, self.drifts[:_BRIEF], len(self.drifts))


_BRIEF: Final = 100


class SlotAuditor:
    """Audits the slots of all tenants, a few at a time or at once, and keeps the last result."""

    def __init__(self, store: Store, *, clock: Clock, signals: EngineSignals) -> None:
        self._store = store
        self._clock = clock
        self._signals = signals
        self._cursor: str | None = None
        self._checked = 0
        self._drifts: list[Drift] = []
        self._is_first = True
        self.last: SlotReport | None = None
        """The last audit of all tenants by this replica; during the first one, as far as it is."""

    def summary(self) -> JsonValue:
        """The last audit, as a part of the replica's summary."""
        return None if self.last is None else msgspec.to_builtins(self.last.brief())

    def newest(self, view: ReplicaView) -> SlotReport | None:
        """The last audit by any replica."""
        parts = [each.summary.parts.get(SLOTS_PART) for each in view.replicas]
        found = []
        for part in parts:
            with suppress(msgspec.ValidationError):  # none yet, or of another version
                found.append(msgspec.convert(part, SlotReport))
        if self.last is not None:
            found.append(self.last)
        return max(found, key=lambda report: (report.at, report.drifted is None), default=None)

    async def audit_some(self) -> None:
        """Audit the next tenants. After the last one it begins again with the first."""
        part = await self._store.audit_slots(limit=AUDIT_MAX, cursor=self._cursor, audit=_REPAIR)
        self._repaired(part.drifts)
        self._cursor = part.cursor
        self._checked += part.checked
        self._drifts += part.drifts
        if part.cursor is None or self._is_first:
            self.last = SlotReport(self._clock.now(), self._checked, tuple(self._drifts))
        if part.cursor is None:
            self._is_first, self._checked, self._drifts = False, 0, []

    async def audit_all(self, *, repair: bool, audit: AuditEntry) -> SlotReport:
        """Audit all tenants now; with ``repair``, correct and record what is found."""
        at, cursor, checked = await self._store.now(), None, 0
        drifts: list[Drift] = []
        while True:
            part = await self._store.audit_slots(
                limit=AUDIT_MAX, cursor=cursor, repair=repair, audit=audit
            )
            checked += part.checked
            drifts += part.drifts
            if repair:
                self._repaired(part.drifts)
            if part.cursor is None:
                break
            cursor = part.cursor
        report = SlotReport(at, checked, tuple(drifts))
        if repair:
            self.last = report
        return report

    def _repaired(self, drifts: Sequence[Drift]) -> None:
        for drift in drifts:
            self._signals.drifted(1)
            log_event(
                logging.ERROR,
                "slot_drift",
                tenant=drift.tenant,
                counted=drift.counted,
                actual=drift.actual,
            )
