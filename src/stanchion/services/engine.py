"""Engine: builds the services of one replica and runs their loops.

It is given its backends and does not know which adapters they are: the server, the simulator and
the tests build an engine in the same way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec
from prometheus_client import CollectorRegistry

from stanchion.core import lease
from stanchion.core.escalation import Announcement
from stanchion.core.model import Instant, Run, RunStatus
from stanchion.core.retry import WorkAllowance
from stanchion.ports.bus import Bell
from stanchion.services.advance import Advancer
from stanchion.services.bulk import BulkService
from stanchion.services.context import Backends, ReplicaContext
from stanchion.services.escalation import EscalationService
from stanchion.services.gate import Gate
from stanchion.services.gate_answers import Pacing
from stanchion.services.inbox import Inbox
from stanchion.services.lease_signals import UNLOCKED_PART, LeaseHistory, RunLeaseSignals
from stanchion.services.leasing import Leasing
from stanchion.services.lock_audit import LockAudit
from stanchion.services.log import log_event
from stanchion.services.outbox import AT_ONCE_MAX, Calls, Relay
from stanchion.services.plans import Linker, Plans, link_here
from stanchion.services.pressure import OverviewService
from stanchion.services.receipts import ReceiptService
from stanchion.services.reconciler import SLOTS_PART, Reconciler, SlotAuditor
from stanchion.services.replicas import ReplicaReporter
from stanchion.services.scheduler import Scheduler
from stanchion.services.schedules import ScheduleService
from stanchion.services.settings import RulesInForce, SettingsService
from stanchion.services.signals import AdmissionSignals, EngineSignals, TenantLabels
from stanchion.services.topic_limits import TopicLimitService
from stanchion.services.upgrade import Upgrades
from stanchion.services.waiters import RunWaiters
from stanchion.services.why import RunExplainer
from stanchion.services.work import (
    DEFAULT_ALLOWANCE,
    Decider,
    Stopwatch,
    TenantExecutor,
    TenantWorkBudget,
)

__all__ = ["DEFAULT_TERMS", "Backends", "Engine", "Services", "Terms"]

SETTLE_S: Final = 1.5
RESTART_S: Final = 1.0
"""The pause before a loop that failed is started again."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a deployment that does not change while it runs."""

    run_lease_ttl_ms: int = 30_000
    job_lease_ttl_ms: int = 60_000
    max_deliveries: int = 5
    poison_failures_max: int = 5
    retention_ms: int = 30 * 24 * 60 * 60 * 1000
    tenant_work: WorkAllowance = DEFAULT_ALLOWANCE
    """Processor time that one tenant may use on one replica."""


DEFAULT_TERMS: Final = Terms()
Loop: TypeAlias = Callable[[], Coroutine[None, None, None]]


class Engine:
    """All services of one replica. ``run`` runs their loops until it is cancelled."""

    def __init__(
        self,
        replica: str,
        backends: Backends,
        *,
        terms: Terms = DEFAULT_TERMS,
        linker: Linker = link_here,
        works_off_loop: bool = False,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        """``works_off_loop``: long work is done in a thread, where tenants take turns."""
        registry = CollectorRegistry()
        store, bus, clock = backends.store, backends.bus, backends.clock
        settings = SettingsService(
            store,
            clock=clock,
            bells=bus,
            registry=registry,
            run_lease_ttl_ms=terms.run_lease_ttl_ms,
        )
        rules = RulesInForce(settings)
        self._escalating = EscalationService(
            replica,
            settings=lambda: settings.current.escalation,
            documents=store,
            clock=clock,
            announce=self._announce,
            registry=registry,
            on_level=rules.on_level,
        )
        labels = TenantLabels()
        work = TenantWorkBudget(
            registry,
            clock=clock,
            entropy=backends.entropy,
            labels=labels,
            allowance=terms.tenant_work,
            stopwatch=stopwatch,
        )
        self._pacing = Pacing(clock=clock, entropy=backends.entropy)
        self._bus = bus
        self._lease_signals = RunLeaseSignals(registry, now=clock.now, on_fallback=self._fallback)
        self.leasing = Leasing(
            backends.locks,
            clock=clock,
            entropy=backends.entropy,
            terms=lease.terms_for(terms.run_lease_ttl_ms),
            tell=self._lease_signals,
            replica=replica,
        )
        admission_signals = AdmissionSignals(
            registry, labels=labels, errors=self._lease_signals.errors, clock=clock
        )
        context = ReplicaContext(
            replica=replica,
            store=store,
            locks=backends.locks,
            bus=bus,
            clock=clock,
            entropy=backends.entropy,
            signals=EngineSignals(
                registry,
                clock,
                labels=labels,
                on_duplicate=self._duplicate,
                on_promoted=admission_signals.figures.promoted,
                on_finished=self._finished,
            ),
        )
        self._executor = TenantExecutor(work)
        executor = self._executor if works_off_loop else None
        decider = Decider(work, executor)
        plans = Plans(store, linker=linker, executor=executor)
        self._advancer = Advancer(
            context,
            plans=plans,
            leasing=self.leasing,
            rules=rules,
            decider=decider,
            on_ended=self._ended,
            poison_failures_max=terms.poison_failures_max,
        )
        waiters = RunWaiters(context, self._advancer.cache)
        self._calls = Calls(context, advancer=self._advancer, rules=rules)
        self._relay = Relay(context, calls=self._calls)
        locks = backends.locks
        self._lock_audit = None if locks is None else LockAudit(locks, store, backends.entropy)
        self._reconciler = Reconciler(
            context,
            advancer=self._advancer,
            escalating=self._escalating,
            max_deliveries=terms.max_deliveries,
            retention_ms=terms.retention_ms,
            lock_audit=self._lock_audit,
        )
        limits = TopicLimitService(context, registry=registry, ttl_ms=terms.job_lease_ttl_ms)
        scheduler = Scheduler(context, ttl_ms=terms.job_lease_ttl_ms, limits=limits)
        replicas = ReplicaReporter(
            replica,
            backends,
            runs_held=lambda: len(self.leasing.held),
            settings_revision=lambda: settings.revision,
            workers=scheduler.workers,
            lock_error=self._lock_error,
        )
        replicas.contribute(SLOTS_PART, self._reconciler.slots.summary)
        history = self._lease_signals.history
        replicas.contribute(UNLOCKED_PART, lambda: history.unlocked_count)
        self._clock = clock
        self._stop_hearing = bus.listen(Bell.ESCALATION, self._hear)
        gate = Gate(
            context,
            plans=plans,
            settings=settings.get,
            pacing=self._pacing,
            signals=admission_signals,
            decider=decider,
            on_admitted=self._advancer.remember,
            on_alike_admitted=self._advancer.remember_alike,
        )
        inbox = Inbox(context, plans=plans, advancer=self._advancer, rules=rules, work=work)
        self.services = Services(
            store=store,
            locks=backends.locks,
            bus=bus,
            clock=clock,
            entropy=backends.entropy,
            plans=plans,
            gate=gate,
            inbox=inbox,
            bulk=BulkService(replica, backends, reruns=gate.reruns, inbox=inbox),
            scheduler=scheduler,
            limits=limits,
            waiters=waiters,
            settings=settings,
            escalating=self._escalating,
            lease_history=history,
            registry=registry,
            work=work,
            executor=self._executor,
            receipts=ReceiptService(
                store, clock=clock, entropy=backends.entropy, registry=registry
            ),
            replicas=replicas,
            slots=self._reconciler.slots,
            explainer=RunExplainer(
                backends,
                plans=plans,
                rules=rules,
                escalating=self._escalating,
                replicas=replicas,
                limits=limits,
                lock_error=self._lock_error,
                lease_history=history,
                work=work,
            ),
            lock_audit=self._lock_audit,
            overview=OverviewService(
                store, clock=clock, figures=admission_signals.figures, replicas=replicas
            ),
            upgrades=Upgrades(store, replicas),
            schedules=ScheduleService(context, gate=gate, plans=plans, budget=work),
        )

    async def run(self) -> None:
        """Run all loops until cancelled."""
        async with asyncio.TaskGroup() as loops:
            for name, loop in self._loops().items():
                loops.create_task(self._endless(name, loop), name=name)

    def forget_idle(self) -> None:
        """Free what is kept in memory to save time, and was not used for a minute."""
        self._advancer.forget_idle()
        self.services.plans.forget_idle(self.services.clock.moment())

    def drain(self) -> None:
        """End all long waits of callers and workers now."""
        self.services.scheduler.drain()
        self.services.waiters.drain()

    async def close(self) -> None:
        """Wait a bounded time for work under way, then cancel it; release leases and locks."""
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._advancer.idle()
        except TimeoutError:
            await self._advancer.close()
        self._stop_hearing()
        await self.services.gate.close()
        self.services.scheduler.close()
        await self.services.limits.close()
        self.services.waiters.close()
        await self.leasing.close()
        self.services.schedules.close()
        await self.services.receipts.close()
        await self.services.replicas.withdraw()
        self._executor.close()

    def _loops(self) -> dict[str, Loop]:
        services = self.services
        return {
            "settings": services.settings.run,
            "escalation": self._escalating.run,
            "relay": self._relay.run,
            "calls": lambda: self._bus.consume(self._calls.handle, at_once_max=AT_ONCE_MAX),
            "ready": services.scheduler.run,
            "limits": services.limits.run,
            "reconcile": self._reconciler.run,
            "replicas": services.replicas.run,
            "receipts": services.receipts.run,
            "schedules": services.schedules.run,
            "bulk": services.bulk.run,
        }

    async def _endless(self, name: str, loop: Loop) -> None:
        """Run a loop, and start it again if it fails: one bug must not stop it for good."""
        while True:
            try:
                await loop()
            except Exception as error:  # noqa: BLE001 - see above
                log_event(logging.ERROR, "loop_failed", loop=name, error=repr(error))
            await self._clock.sleep(RESTART_S)

    # ── Callbacks between services ────────────────────────────────────────────────────────────────

    def _fallback(self) -> None:
        self._escalating.count(fallbacks=1)

    def _duplicate(self) -> None:
        self._escalating.count(duplicates=1)

    def _lock_error(self) -> str | None:
        remote = self.leasing.remote
        return None if remote is None else remote.health.error

    def _ended(self, run: Run) -> None:
        self.services.waiters.has_ended(run)

    def _finished(self, run: Run, at: Instant) -> None:
        if run.holds_slot and run.status is not RunStatus.QUEUED:
            self._pacing.finished(run.tenant, at)

    async def _announce(self, said: Announcement) -> None:
        self._bus.ring(Bell.ESCALATION, msgspec.json.encode(said).decode())

    def _hear(self, note: str) -> None:
        try:
            said = msgspec.json.decode(note, type=Announcement)
        except msgspec.MsgspecError:
            return  # Not from a replica of this version.
        self._escalating.hear(said)


@dataclass(frozen=True, kw_only=True)
class Services(Backends):
    """A replica's backends and services, as the gateway uses them."""

    plans: Plans
    gate: Gate
    inbox: Inbox
    scheduler: Scheduler
    limits: TopicLimitService
    waiters: RunWaiters
    settings: SettingsService
    escalating: EscalationService
    lease_history: LeaseHistory
    registry: CollectorRegistry
    work: TenantWorkBudget
    executor: TenantExecutor
    replicas: ReplicaReporter
    receipts: ReceiptService
    explainer: RunExplainer
    slots: SlotAuditor
    schedules: ScheduleService
    overview: OverviewService
    lock_audit: LockAudit | None
    """``None`` without a lock backend."""
    upgrades: Upgrades
    bulk: BulkService
