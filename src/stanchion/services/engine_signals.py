"""Engine signals: what the engine does becomes metrics.

What hints at two writers (a commit that met another, a second completion, a second publish) is
counted here, and told to whoever weighs it: that is the evidence on which escalation acts.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from stanchion.core.lease import Moment
from stanchion.core.model import Instant, Run, RunStatus, TenantId
from stanchion.ports.clock import Clock
from stanchion.ports.records import RejectedCode
from stanchion.services.labels import TenantLabels

__all__ = ["BUCKET_MS", "EngineSignals"]

BUCKET_MS: Final = 500
_BURST_BUCKETS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_RUN_BUCKETS_S: Final = (0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 1800, 3600, 21600, 86400)


class EngineSignals:
    """The engine's counters. Children are bound once."""

    def __init__(
        self,
        registry: CollectorRegistry,
        clock: Clock,
        *,
        labels: TenantLabels,
        on_duplicate: Callable[[], None] = lambda: None,
        on_finished: Callable[[Run, Instant], None] = lambda _run, _at: None,
    ) -> None:
        self._clock = clock
        self._labels = labels
        self._on_duplicate = on_duplicate
        self._on_finished = on_finished

        def count(name: str, text: str) -> Counter:
            return Counter(f"stanchion_{name}", text, registry=registry)

        self._conflicts = count("commit_conflicts", "Commits that found the run changed.")
        self._completions = count(
            "duplicate_completions", "Results for work that had been completed before."
        )
        self._publishes = count(
            "duplicate_publishes", "Calls to advance a run that was called already."
        )
        self._busy = count("lock_busy_retries", "Calls put off because another had the run.")
        self._put_off = count("backend_error_retries", "Calls put off because a backend was away.")
        self._buried = count("dead_letters", "Jobs and events put aside after too many tries.")
        self._abandoned = count("scheduler_job_lock_abandoned", "Job leases that expired.")
        self._drift = count("slot_drift", "Tenants whose slots had to be corrected.")
        self._purged = count("runs_purged", "Finished runs removed after their time.")
        rejected = Counter(
            "stanchion_results_rejected",
            "Results not taken, by reason.",
            ["code"],
            registry=registry,
        )
        self._rejected = {code: rejected.labels(code=str(code)) for code in RejectedCode}
        finished = Counter(
            "stanchion_runs_finished", "Runs that ended, by how.", ["status"], registry=registry
        )
        self._finished = {
            status: finished.labels(status=str(status))
            for status in RunStatus
            if status.is_finished
        }
        self._duration = Histogram(
            "stanchion_run_duration_seconds",
            "From admission to the end.",
            buckets=_RUN_BUCKETS_S,
            registry=registry,
        )
        self._burst = Histogram(
            "stanchion_lock_busy_retry_burst",
            "Lock-busy retries in each 500 ms that had any.",
            buckets=_BURST_BUCKETS,
            registry=registry,
        )
        self._pending = Gauge(
            "stanchion_bus_pending_messages",
            "Calls the bus has not seen handled.",
            registry=registry,
        )
        self._outbox = Gauge(
            "stanchion_outbox_rows", "Runs with something in their inbox.", registry=registry
        )
        self._active = Gauge(
            "stanchion_runs_active",
            "Unfinished runs that hold a slot, of the tenants seen here.",
            ["tenant"],
            registry=registry,
        )
        self._bucket: Moment | None = None
        self._in_bucket = 0

    def conflict(self) -> None:
        self._conflicts.inc()
        self._on_duplicate()

    def duplicate_completion(self) -> None:
        self._completions.inc()
        self._on_duplicate()

    def duplicate_publishes(self, number: int) -> None:
        """The bus knew of these calls already.

        No evidence of two writers: a row comes again while its call waits to be retried.
        """
        self._publishes.inc(number)

    def rejected(self, code: RejectedCode) -> None:
        self._rejected[code].inc()

    def lock_busy(self) -> None:
        """Count a retry in its half second: a wave of them shows as one tall bucket."""
        self._busy.inc()
        bucket = Moment(self._clock.moment() // BUCKET_MS)
        if bucket != self._bucket:
            self.close_bucket()
            self._bucket = bucket
        self._in_bucket += 1

    def close_bucket(self) -> None:
        """Observe the half second that is over, if it is."""
        is_over = self._bucket is not None and self._clock.moment() // BUCKET_MS > self._bucket
        if is_over and self._in_bucket:
            self._burst.observe(self._in_bucket)
            self._in_bucket = 0

    def put_off(self) -> None:
        self._put_off.inc()

    def buried(self) -> None:
        self._buried.inc()

    def job_lease_expired(self) -> None:
        self._abandoned.inc()

    def drifted(self, number: int) -> None:
        self._drift.inc(number)

    def purged(self, number: int) -> None:
        self._purged.inc(number)

    def finished(self, run: Run, status: RunStatus) -> None:
        now = self._clock.now()
        self._finished[status].inc()
        self._duration.observe(max(0, now - run.created_at) / 1000)
        self._on_finished(run, now)

    def tenants(self) -> tuple[TenantId, ...]:
        """Whose active runs are shown: each by its name, or together with the others."""
        return tuple(TenantId(tenant) for tenant in self._labels.seen)

    def active(self, runs: Mapping[TenantId, int]) -> None:
        by_label: Counts[str] = Counts()
        for tenant, number in runs.items():
            by_label[self._labels.tenant(tenant)] += number
        for label, number in by_label.items():
            self._active.labels(label).set(number)

    def waiting(self, *, pending: int, rows: int) -> None:
        self._pending.set(pending)
        self._outbox.set(rows)
