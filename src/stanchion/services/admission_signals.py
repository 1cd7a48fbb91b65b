"""Admission signals: what the gate decides becomes metrics and log lines."""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from stanchion.core.model import Risk, TenantId, WorkflowId
from stanchion.services.labels import TenantLabels
from stanchion.services.lease_signals import LeaseErrors
from stanchion.services.log import log_event

__all__ = ["AdmissionSignals", "Endpoint"]

# From a step in memory to the longest wait for the gate that can be set.
_WAIT_BUCKETS_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2, 2.5, 5, 10, 30, 60),
)


class Endpoint(StrEnum):
    """How a run can be asked for."""

    START = "start"
    RERUN = "rerun"
    SUBMIT = "submit"


class AdmissionSignals:
    """The gate's counters. Children are bound when they are first used, and kept."""

    def __init__(
        self, registry: CollectorRegistry, *, labels: TenantLabels, errors: LeaseErrors
    ) -> None:
        self._labels = labels
        self._release_errors = errors.release_of("admission")
        self._decisions = Counter(
            "stanchion_admission_decisions",
            "Answers of the gate, by outcome.",
            ["tenant", "workflow", "outcome"],
            registry=registry,
        )
        self._wait = Histogram(
            "stanchion_admission_wait_seconds",
            "Time that callers spent in the gate, whatever the answer.",
            ["tenant", "endpoint"],
            buckets=_WAIT_BUCKETS_S,
            registry=registry,
        )
        self._decided: dict[tuple[str, str, str], Counter] = {}
        self._waited: dict[tuple[str, Endpoint], Histogram] = {}

    def decided(
        self, tenant: TenantId, workflow_id: WorkflowId, outcome: str, *, exists: bool
    ) -> None:
        """Count an answer. ``exists``: the workflow is known to be one."""
        label = self._labels.tenant(tenant)
        key = (label, self._labels.workflow(tenant, workflow_id, exists=exists), outcome)
        child = self._decided.get(key)
        if child is None:
            child = self._decided[key] = self._decisions.labels(*key)
        child.inc()

    def waited(self, tenant: TenantId, endpoint: Endpoint, waited_s: float) -> None:
        """Observe how long an answer took."""
        key = (self._labels.tenant(tenant), endpoint)
        child = self._waited.get(key)
        if child is None:
            child = self._waited[key] = self._wait.labels(*key)
        child.observe(waited_s)

    def lock_failed(self, name: str, error: str) -> None:
        """The lock store could not be asked for an admission lock; counted with the decision."""
        log_event(logging.ERROR, "admission_lock_failed", lease=name, error=error)

    def release_failed(self, name: str, risk: Risk, error: str) -> None:
        """An admission lock could not be given back: it will expire."""
        self._release_errors[risk].inc()
        log_event(logging.WARNING, "lock_release_failed", lease=name, risk=str(risk), error=error)
