"""Signals: the metrics and log lines of admission and of the engine.

``AdmissionSignals`` counts the gate's answers, ``EngineSignals`` everything after admission.
``TenantLabels`` bounds the label values of both: the first 50 tenants, and 20 workflows of each,
have labels of their own; the rest are counted as ``other``.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter as Counts
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import accumulate
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Exemplar, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from stanchion import telemetry
from stanchion.core.budget import BudgetStanding
from stanchion.core.json_value import JsonValue
from stanchion.core.lease import Moment
from stanchion.core.model import Instant, Risk, Run, RunStatus, TenantId, WorkflowId
from stanchion.core.pressure import (
    MINUTE_WINDOWS,
    WAIT_BOUNDS_MS,
    WINDOW_MS,
    GateFigures,
    GateWindow,
    last_minute,
)
from stanchion.core.schedule import TickOutcome
from stanchion.ports.clock import Clock
from stanchion.ports.records import RejectedCode, SettleMiss, TenantStanding
from stanchion.services.lease_signals import LeaseErrors
from stanchion.services.log import log_event

OTHER: Final = "other"
"""The label of all tenants without one of their own, and of a tenant with this name."""
NAMED_MAX: Final = 50
UNNAMED_MAX: Final = 200
TENANTS_MEASURED_MAX: Final = NAMED_MAX + UNNAMED_MAX


class TenantLabels:
    """The label values of tenants and workflows. One for all metrics of a process."""

    def __init__(self, limit: int = NAMED_MAX, *, workflows_max: int = 20) -> None:
        self._limit = limit
        self._workflows_max = workflows_max
        self._workflows: dict[str, set[str]] = {}
        self._unnamed: OrderedDict[str, None] = OrderedDict()

    def tenant(self, tenant: str) -> str:
        """The label of a tenant."""
        if tenant in self._workflows:
            return tenant
        if len(self._workflows) >= self._limit or tenant == OTHER:
            self._unnamed[tenant] = None
            self._unnamed.move_to_end(tenant)
            if len(self._unnamed) > UNNAMED_MAX:
                self._unnamed.popitem(last=False)
            return OTHER
        self._workflows[tenant] = set()
        return tenant

    @property
    def seen(self) -> tuple[str, ...]:
        """The tenants that have labels of their own, and the last few hundred of the others."""
        return (*self._workflows, *self._unnamed)

    def workflow(self, tenant: str, workflow: str, *, exists: bool = True) -> str:
        """The label of a tenant's workflow.

        A workflow that is not known to exist gets no label of its own: callers can invent names.
        """
        if self.tenant(tenant) == OTHER:
            return OTHER
        named = self._workflows[tenant]
        if workflow in named:
            return workflow
        if not exists or len(named) >= self._workflows_max or workflow == OTHER:
            return OTHER
        named.add(workflow)
        return workflow


class LoopHistogram(Collector):
    """A histogram that only the thread of the event loop observes: each start does, or each run.

    The client library's takes a lock for the sum and for the bucket, and looks for the bucket in
    Python. What is scraped is the same.
    """

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._text = text
        self._labelnames = tuple(labels)  # as the library has it: the reference is made from it
        self._bounds = (*buckets, float("inf"))
        self._bound_labels = [str(floatToGoString(each)) for each in self._bounds]  # type: ignore[no-untyped-call] # theirs has no annotations
        self._series: dict[tuple[str, ...], HistogramSeries] = {}
        if not labels:
            self.series()
        registry.register(self)

    def series(self, *labels: str) -> HistogramSeries:
        """The observations with these values of the labels, in their order."""
        return self._series.setdefault(labels, HistogramSeries(self._bounds))

    def describe(self) -> Iterable[Metric]:
        """The metric without its values."""
        return [HistogramMetricFamily(self._name, self._text, labels=self._labelnames)]

    def collect(self) -> Iterable[Metric]:
        """The metric as it is scraped."""
        found = HistogramMetricFamily(self._name, self._text, labels=self._labelnames)
        # Scraped in another thread, perhaps, while a request adds a series.
        for labels, series in list(self._series.items()):
            buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
            pairs = zip(self._bound_labels, accumulate(series.counts), strict=True)
            for place, (bound, count) in enumerate(pairs):
                exemplar = series.exemplars.get(place)
                buckets.append((bound, count) if exemplar is None else (bound, count, exemplar))
            found.add_metric(labels, buckets, series.sum)
        return [found]


class HistogramSeries:
    """The observations with the same labels."""

    __slots__ = ("_bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * len(bounds)
        """By bucket, not added up."""
        self.sum = 0.0
        self.exemplars: dict[int, Exemplar] = {}
        """The last one of each bucket that has one."""

    def observe(self, value: float, exemplar: dict[str, str] | None = None) -> None:
        """Count a value. ``exemplar`` names the trace of this one."""
        place = bisect_left(self._bounds, value)
        self.counts[place] += 1
        self.sum += value
        if exemplar is not None:
            self.exemplars[place] = Exemplar(exemplar, value, time.time())


# From a decision in memory to the longest wait budget that can be set.
_WAIT_BUCKETS_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2, 2.5, 5, 10, 30, 60),
)


class AdmissionEndpoint(StrEnum):
    """The three ways to request a run."""

    START = "start"
    RERUN = "rerun"
    SUBMIT = "submit"


_AT_A_LIMIT: Final = frozenset({"full", "queue_full", "budget_exhausted"})


class AdmissionFigures:
    """What this replica's gate answered each tenant in the last minute."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._windows: OrderedDict[TenantId, deque[GateWindow]] = OrderedDict()
        self._told: dict[TenantId, tuple[int, Instant]] = {}

    def record(
        self,
        tenant: TenantId,
        outcome: str,
        waited_s: float,
        retry_after_ms: int | None,
        *,
        count: int = 1,
    ) -> None:
        """Count an answer, how long it took, and when the caller was told to retry.

        ``count``: the number of equal answers.
        """
        now = self._clock.now()
        window = self._window(tenant, now)
        if outcome == "admitted":
            window.admitted += count
        elif outcome in _AT_A_LIMIT:
            window.full += count
        elif outcome not in _DECIDED:
            window.unavailable += count
        if retry_after_ms is not None:
            self._told[tenant] = retry_after_ms, now
        window.waits[min(bisect_left(WAIT_BOUNDS_MS, waited_s * 1000), _LAST_BUCKET)] += count

    def read(self) -> dict[TenantId, GateFigures]:
        """The figures of the tenants with an answer in the last minute."""
        number = self._clock.now() // WINDOW_MS
        found: dict[TenantId, GateFigures] = {}
        for tenant, windows in [*self._windows.items()]:
            if not windows or windows[-1].number <= number - MINUTE_WINDOWS:
                del self._windows[tenant]
                self._told.pop(tenant, None)
                continue
            found[tenant] = last_minute(windows, number, told=self._told.get(tenant))
        return found

    def report(self) -> JsonValue:
        """The figures of the busiest tenants, for the summary of this replica."""
        found = self.read()
        names = sorted(found, key=lambda each: (-_answers(found[each]), each))[
            :_TENANTS_REPORTED_MAX
        ]
        figures: JsonValue = msgspec.to_builtins({name: found[name] for name in names})
        return figures

    def promoted(self, tenant: TenantId) -> None:
        """Count a queued run that got its slot as admitted. Its caller was answered before."""
        self._window(tenant, self._clock.now()).admitted += 1

    def _window(self, tenant: TenantId, now: Instant) -> GateWindow:
        number = now // WINDOW_MS
        windows = self._windows.get(tenant)
        if windows is None:
            windows = self._begin(tenant)
        if not windows or windows[-1].number != number:
            windows.append(GateWindow(number, 0, 0, 0, [0] * len(WAIT_BOUNDS_MS)))
        return windows[-1]

    def _begin(self, tenant: TenantId) -> deque[GateWindow]:
        if len(self._windows) >= _TENANTS_COUNTED_MAX:
            gone, _ = self._windows.popitem(last=False)
            self._told.pop(gone, None)
        windows = self._windows[tenant] = deque(maxlen=MINUTE_WINDOWS)
        return windows


def _answers(figures: GateFigures) -> int:
    return sum(figures.waits) + figures.admitted


_DECIDED: Final = frozenset({"queued", "replayed", "mismatch", "throttled"})
"""Other outcomes that are no failure of the gate."""
_LAST_BUCKET: Final = len(WAIT_BOUNDS_MS) - 1
_TENANTS_COUNTED_MAX: Final = 10_000
_TENANTS_REPORTED_MAX: Final = 1_000


class AdmissionSignals:
    """The gate's metrics. Label children are bound at first use, and kept."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        labels: TenantLabels,
        errors: LeaseErrors,
        clock: Clock,
    ) -> None:
        self.figures = AdmissionFigures(clock)
        self._labels = labels
        self._release_errors = errors.release_of("admission")
        self._decisions = Counter(
            "stanchion_admission_decisions",
            "Answers of the gate, by outcome.",
            ["tenant", "workflow", "outcome"],
            registry=registry,
        )
        self._wait = LoopHistogram(
            "stanchion_admission_wait_seconds",
            "Time that calls spent in the gate, for all answers.",
            ["tenant", "endpoint"],
            buckets=_WAIT_BUCKETS_S,
            registry=registry,
        )
        self._decided: dict[tuple[str, str, str], Counter] = {}
        self._waited: dict[tuple[str, AdmissionEndpoint], HistogramSeries] = {}

    def decided(
        self,
        tenant: TenantId,
        workflow_id: WorkflowId,
        outcome: str,
        *,
        exists: bool,
        count: int = 1,
    ) -> None:
        """Count equal answers. ``exists``: whether the workflow is known to exist."""
        label = self._labels.tenant(tenant)
        key = (label, self._labels.workflow(tenant, workflow_id, exists=exists), outcome)
        child = self._decided.get(key)
        if child is None:
            child = self._decided[key] = self._decisions.labels(*key)
        child.inc(count)

    def waited(
        self,
        tenant: TenantId,
        endpoint: AdmissionEndpoint,
        waited_s: float,
        exemplar: dict[str, str] | None = None,
    ) -> None:
        """Observe how long an answer took. ``exemplar`` names the trace of this one."""
        key = (self._labels.tenant(tenant), endpoint)
        child = self._waited.get(key)
        if child is None:
            child = self._waited[key] = self._wait.series(key[0], str(endpoint))
        child.observe(waited_s, exemplar)

    def lock_failed(self, name: str, error: str) -> None:
        """Log that the lock store failed to grant an admission lock; ``decided`` counts it."""
        log_event(logging.ERROR, "admission_lock_failed", lease=name, error=error)

    def release_failed(self, name: str, risk: Risk, error: str) -> None:
        """Count and log an admission lock that was not released and will expire."""
        self._release_errors[risk].inc()
        log_event(logging.WARNING, "lock_release_failed", lease=name, risk=str(risk), error=error)


BUCKET_MS: Final = 500
_BURST_BUCKETS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_BUDGET_GAUGES: Final = {
    "used": "What is used of a budget in its present window.",
    "reserved": "What unfinished runs have reserved of a budget and not used.",
    "limit": "The limit of a budget.",
}
_QUEUEING_MAX: Final = 1_000
_QUEUE_BUCKETS_S: Final = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_RUN_BUCKETS_S: Final = (0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 1800, 3600, 21600, 86400)


class EngineSignals:
    """The engine's metrics. Label children are bound once."""

    def __init__(
        self,
        registry: CollectorRegistry,
        clock: Clock,
        *,
        labels: TenantLabels,
        on_duplicate: Callable[[], None] = lambda: None,
        on_promoted: Callable[[TenantId], None] = lambda _tenant: None,
        on_finished: Callable[[Run, Instant], None] = lambda _run, _at: None,
    ) -> None:
        self._clock = clock
        self._labels = labels
        self._on_duplicate = on_duplicate
        self._on_promoted = on_promoted
        self._on_finished = on_finished

        def count(name: str, text: str) -> Counter:
            return Counter(f"stanchion_{name}", text, registry=registry)

        self._conflicts = count(
            "commit_conflicts", "Commits refused because the run had changed since it was read."
        )
        self._completions = count(
            "duplicate_completions", "Results for work that had been completed before."
        )
        self._publishes = count(
            "duplicate_publishes", "Calls published for a run whose call was on the bus already."
        )
        self._busy = count(
            "lock_busy_retries", "Calls deferred because another replica held the run's lease."
        )
        self._put_off = count(
            "backend_error_retries", "Calls deferred because a backend was unavailable."
        )
        self._dead_letters = count("dead_letters", "Jobs and events that became dead letters.")
        self._abandoned = count("scheduler_job_lock_abandoned", "Job leases that expired.")
        self._drift = count("slot_drift", "Corrections of a tenant's slot counter.")
        self._purged = count("runs_purged", "Finished runs removed after their retention.")
        self._settled = count(
            "results_settled", "Results written in one step with the transition of their run."
        )
        missed = Counter(
            "stanchion_settle_misses",
            "Results that were accepted first because they could not be settled, by cause.",
            ["cause"],
            registry=registry,
        )
        self._settle_missed = {cause: missed.labels(cause=str(cause)) for cause in SettleMiss}
        rejected = Counter(
            "stanchion_results_rejected",
            "Results rejected, by reason.",
            ["code"],
            registry=registry,
        )
        self._rejected = {code: rejected.labels(code=str(code)) for code in RejectedCode}
        finished = Counter(
            "stanchion_runs_finished",
            "Runs that ended, by final status.",
            ["status"],
            registry=registry,
        )
        self._finished = {
            status: finished.labels(status=str(status))
            for status in RunStatus
            if status.is_finished
        }
        self._duration = LoopHistogram(
            "stanchion_run_duration_seconds",
            "From admission to the end.",
            buckets=_RUN_BUCKETS_S,
            registry=registry,
        ).series()
        self._burst = Histogram(
            "stanchion_lock_busy_retry_burst",
            "Lock-busy retries in each 500 ms that had any.",
            buckets=_BURST_BUCKETS,
            registry=registry,
        )
        self._pending = Gauge(
            "stanchion_bus_pending_messages",
            "Calls on the bus that are not acknowledged yet.",
            registry=registry,
        )
        self._outbox = Gauge(
            "stanchion_outbox_rows", "Runs with a non-empty inbox.", registry=registry
        )
        self._active = Gauge(
            "stanchion_runs_active",
            "Unfinished runs that hold a slot.",
            ["tenant"],
            registry=registry,
        )
        self._queue_length = Gauge(
            "stanchion_queue_length",
            "Runs that wait for a slot.",
            ["tenant"],
            registry=registry,
        )
        self._queueing: dict[TenantId, None] = {}
        self._queue_wait = Histogram(
            "stanchion_queue_wait_seconds",
            "Time that runs waited for a slot before they began.",
            ["tenant"],
            buckets=_QUEUE_BUCKETS_S,
            registry=registry,
        )
        self._budgets = {
            name: Gauge(f"stanchion_budget_{name}", says, ["tenant", "budget"], registry=registry)
            for name, says in _BUDGET_GAUGES.items()
        }
        self._ticks = Counter(
            "stanchion_schedule_ticks",
            "Ticks of schedules, by what became of them.",
            ["tenant", "outcome"],
            registry=registry,
        )
        self._bucket: Moment | None = None
        self._in_bucket = 0

    def settled(self, results: int) -> None:
        """Count results that were written together with their transition."""
        self._settled.inc(results)

    def settle_missed(self, cause: SettleMiss) -> None:
        """Count a settle that wrote nothing. It is no evidence of two writers."""
        self._settle_missed[cause].inc()

    def conflict(self) -> None:
        self._conflicts.inc()
        self._on_duplicate()

    def duplicate_completion(self) -> None:
        self._completions.inc()
        self._on_duplicate()

    def duplicate_publishes(self, number: int) -> None:
        """Count calls that the bus had already.

        They are no evidence of two writers: a row is published again while its call waits for a
        retry.
        """
        self._publishes.inc(number)

    def rejected(self, code: RejectedCode) -> None:
        self._rejected[code].inc()

    def lock_busy(self) -> None:
        """Count a retry in its half second, so that a burst of retries is visible."""
        self._busy.inc()
        bucket = Moment(self._clock.moment() // BUCKET_MS)
        if bucket != self._bucket:
            self.close_bucket()
            self._bucket = bucket
        self._in_bucket += 1

    def close_bucket(self) -> None:
        """Observe the number of retries of the last half second, if it is over."""
        is_over = self._bucket is not None and self._clock.moment() // BUCKET_MS > self._bucket
        if is_over and self._in_bucket:
            self._burst.observe(self._in_bucket)
            self._in_bucket = 0

    def put_off(self) -> None:
        self._put_off.inc()

    def dead_letter_written(self) -> None:
        self._dead_letters.inc()

    def job_lease_expired(self) -> None:
        self._abandoned.inc()

    def drifted(self, number: int) -> None:
        self._drift.inc(number)

    def purged(self, number: int) -> None:
        self._purged.inc(number)

    def finished(self, run: Run, status: RunStatus) -> None:
        now = self._clock.now()
        self._finished[status].inc()
        exemplar = None
        if run.traceparent is not None and telemetry.is_sampled(run.traceparent):
            exemplar = {"trace_id": run.traceparent[3:35]}
        self._duration.observe(max(0, now - run.created_at) / 1000, exemplar)
        self._on_finished(run, now)

    def tenants(self) -> tuple[TenantId, ...]:
        """The tenants whose active runs are measured, with labels of their own or as ``other``."""
        return tuple(TenantId(tenant) for tenant in self._labels.seen)

    def named(self, tenants: Iterable[TenantId]) -> list[TenantId]:
        """The tenants among these that have labels of their own."""
        return [each for each in tenants if self._labels.tenant(each) != OTHER]

    def learn(self, standings: Iterable[TenantStanding]) -> None:
        """Measure those of these tenants that have runs or budgets, as if they had been served.

        Those with the most queued runs come first: labels are few.
        """
        busy = [
            each
            for each in standings
            if each.queued or each.active or (each.config and each.config.budgets)
        ]
        busy.sort(key=lambda each: (-each.queued, -each.active, each.tenant))
        for each in busy[:TENANTS_MEASURED_MAX]:
            self._labels.tenant(each.tenant)

    def active(self, runs: Mapping[TenantId, int]) -> None:
        _set(self._active, self._labels, runs)

    def left_queue(self, run: Run) -> None:
        """Observe how long a promoted run has waited, as its first decision is committed."""
        self._on_promoted(run.tenant)
        waited_ms = max(0, self._clock.now() - run.created_at)
        self._queue_wait.labels(self._labels.tenant(run.tenant)).observe(waited_ms / 1000)

    def queued(self, runs: Mapping[TenantId, int]) -> None:
        """Set the lengths of the tenants' queues."""
        _set(self._queue_length, self._labels, runs)
        for tenant, number in runs.items():
            if number:
                # From 0 on, or the first run that gets its slot is no rise.
                self._queue_wait.labels(self._labels.tenant(tenant))
            if number and len(self._queueing) < _QUEUEING_MAX:
                self._queueing[tenant] = None
            elif not number:
                self._queueing.pop(tenant, None)

    def queueing(self) -> tuple[TenantId, ...]:
        """The tenants in whose queues this process has seen runs."""
        return tuple(self._queueing)

    def budgets(self, standings: Mapping[TenantId, Mapping[str, BudgetStanding]]) -> None:
        """Set what is used of budgets, for the tenants with labels of their own."""
        for gauge in self._budgets.values():
            gauge.clear()  # of budgets that are configured no longer
        for tenant, budgets in standings.items():
            label = self._labels.tenant(tenant)
            for name, each in budgets.items() if label != OTHER else ():
                self._budgets["used"].labels(label, name).set(each.used)
                self._budgets["reserved"].labels(label, name).set(each.reserved)
                self._budgets["limit"].labels(label, name).set(each.limit)

    def scheduled(self, tenants: Iterable[TenantId]) -> None:
        """Begin the counters of tenants with schedules, so that the first missed tick is a rise."""
        for tenant in tenants:
            for outcome in TickOutcome:
                self._ticks.labels(self._labels.tenant(tenant), str(outcome))

    def tick(self, tenant: TenantId, outcome: TickOutcome) -> None:
        """Count a tick of a schedule."""
        self._ticks.labels(self._labels.tenant(tenant), str(outcome)).inc()

    def bus_pending(self, calls: int) -> None:
        self._pending.set(calls)

    def outbox_rows(self, rows: int) -> None:
        self._outbox.set(rows)


def _set(gauge: Gauge, labels: TenantLabels, numbers: Mapping[TenantId, int]) -> None:
    """Set a gauge by tenant; those without a label of their own are added up."""
    by_label: Counts[str] = Counts()
    for tenant, number in numbers.items():
        by_label[labels.tenant(tenant)] += number
    for label, number in by_label.items():
        gauge.labels(label).set(number)
