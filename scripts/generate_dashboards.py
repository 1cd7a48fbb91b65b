"""Write the Grafana dashboards of dashboards/ from one table of panels.

Run it after a metric or a panel changed (`make generate`); a test compares the files with its
output, and checks that every metric of a server is on a panel or in ``NOT_SHOWN``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["DASHBOARDS", "NOT_SHOWN", "Dashboard", "Panel", "Query", "dashboard_json", "file_of"]

FOLDER: Final = Path(__file__).parent.parent / "dashboards"
_COLUMNS: Final = 2
_WIDTH, _HEIGHT = 12, 8
_WINDOW: Final = "$__rate_interval"


class Query(NamedTuple):
    """One expression of a panel. The legend may name labels as ``{{label}}``."""

    legend: str
    expr: str


class Panel(NamedTuple):
    """One chart."""

    title: str
    unit: str
    """As Grafana names it."""
    queries: tuple[Query, ...]
    says: str = ""
    """What to make of it; shown at the title."""


class Dashboard(NamedTuple):
    """One page of panels."""

    uid: str
    title: str
    panels: tuple[Panel, ...]
    has_tenants: bool = False
    """Whether its panels can be limited to some tenants."""


def _rate(name: str, by: str = "", where: str = "") -> str:
    return f"sum{_by(by)} (rate(stanchion_{name}{_where(where)}[{_WINDOW}]))"


def _quantile(name: str, by: str = "", where: str = "", quantile: float = 0.95) -> str:
    labels = f"le, {by}" if by else "le"
    rates = f"sum by ({labels}) (rate(stanchion_{name}_bucket{_where(where)}[{_WINDOW}]))"
    return f"histogram_quantile({quantile}, {rates})"


def _ratio(where: str, by: str) -> str:
    name, tenants = "admission_decisions_total", 'tenant=~"$tenant"'
    return f"{_rate(name, by, f'{tenants},{where}')} / {_rate(name, by, tenants)}"


def _increase(name: str, window: str = "1h", by: str = "") -> str:
    return f"sum{_by(by)} (increase(stanchion_{name}[{window}]))"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""


def _where(matchers: str) -> str:
    return f"{{{matchers}}}" if matchers else ""


_REFUSED: Final = 'outcome=~"full|queue_full|budget_exhausted|throttled"'
_UNAVAILABLE: Final = 'outcome=~"gate_unavailable|gate_busy|limit_check_failed"'
_TENANT: Final = 'tenant=~"$tenant"'

_FALLBACK_RATE: Final = Panel(
    "Runs without a lock, by risk class",
    "ops",
    (Query("{{risk}}", _rate("workflow_lock_fallback_total", "risk")),),
    "Zero while the lock store answers. Above 0.1/s the alert StanchionLockFallback pages.",
)
_DECISIONS: Final = Panel(
    "Answers of the gate",
    "ops",
    (Query("{{outcome}}", _rate("admission_decisions_total", "outcome")),),
)
_BACKLOG: Final = Panel(
    "Backlog",
    "short",
    (
        Query("runs with unapplied events", "max(stanchion_outbox_rows)"),
        Query("calls on the bus", "max(stanchion_bus_pending_messages)"),
    ),
    "Rises during an outage and falls afterwards.",
)

OVERVIEW: Final = Dashboard(
    "stanchion-overview",
    "Stanchion / Overview",
    (
        _DECISIONS,
        Panel(
            "Requests, by answer",
            "ops",
            (Query("{{status}}", _rate("http_request_seconds_count", "status")),),
        ),
        Panel(
            "Active runs",
            "short",
            (Query("all tenants", "sum(max by (tenant) (stanchion_runs_active))"),),
            "Unfinished runs that hold a slot.",
        ),
        Panel(
            "Runs finished, by status",
            "ops",
            (Query("{{status}}", _rate("runs_finished_total", "status")),),
        ),
        _FALLBACK_RATE,
        Panel(
            "Must stay zero",
            "short",
            (
                Query("slot drift, 1 h", _increase("slot_drift_total")),
                Query("dead letters, 1 h", _increase("dead_letters_total")),
                Query("escalation level", "max(stanchion_escalation_level)"),
            ),
        ),
        _BACKLOG,
        Panel(
            "Request time, p99",
            "s",
            (
                Query(
                    "start",
                    _quantile("http_request_seconds", "", 'method="POST",route=~".*/runs"', 0.99),
                ),
                Query(
                    "all but worker calls",
                    _quantile("http_request_seconds", "", 'route!~"/v1/(worker|events).*"', 0.99),
                ),
            ),
        ),
        Panel(
            "Replicas, by version",
            "short",
            (Query("{{version}}", "count by (version) (stanchion_build_info)"),),
        ),
        Panel(
            "Uptime",
            "s",
            (Query("{{instance}}", "time() - process_start_time_seconds"),),
        ),
    ),
)

ADMISSION: Final = Dashboard(
    "stanchion-admission",
    "Stanchion / Admission",
    (
        Panel(
            "Refused (429), by tenant and workflow",
            "percentunit",
            (Query("{{tenant}} {{workflow}}", _ratio(_REFUSED, "tenant, workflow")),),
        ),
        Panel(
            "Unavailable (503), by tenant and workflow",
            "percentunit",
            (Query("{{tenant}} {{workflow}}", _ratio(_UNAVAILABLE, "tenant, workflow")),),
        ),
        _DECISIONS,
        Panel(
            "Unavailable, by reason",
            "ops",
            (Query("{{outcome}}", _rate("admission_decisions_total", "outcome", _UNAVAILABLE)),),
        ),
        Panel(
            "Time in the gate, p95 by tenant",
            "s",
            (Query("{{tenant}}", _quantile("admission_wait_seconds", "tenant", _TENANT)),),
        ),
        Panel(
            "Time in the gate, p95 by endpoint",
            "s",
            (Query("{{endpoint}}", _quantile("admission_wait_seconds", "endpoint", _TENANT)),),
        ),
        Panel(
            "Active runs, by tenant",
            "short",
            (Query("{{tenant}}", f"max by (tenant) (stanchion_runs_active{{{_TENANT}}})"),),
        ),
        Panel(
            "Runs that wait for a slot, by tenant",
            "short",
            (Query("{{tenant}}", f"max by (tenant) (stanchion_queue_length{{{_TENANT}}})"),),
            "Of tenants that queue starts while they are full.",
        ),
        Panel(
            "Wait for a slot, 95 of 100 runs",
            "s",
            (Query("{{tenant}}", _quantile("queue_wait_seconds", "tenant", _TENANT)),),
        ),
        Panel(
            "Budgets: part that is used or reserved",
            "percentunit",
            (
                Query(
                    "{{tenant}}: {{budget}}",
                    f"max by (tenant, budget) ((stanchion_budget_used{{{_TENANT}}}"
                    f" + stanchion_budget_reserved{{{_TENANT}}})"
                    f" / stanchion_budget_limit{{{_TENANT}}})",
                ),
            ),
            "Of the present window. At 1 the next start is refused; runs may use more.",
        ),
        Panel(
            "Ticks of schedules, by what became of them",
            "ops",
            (Query("{{outcome}}", _rate("schedule_ticks_total", "outcome", _TENANT)),),
            "Refused, unavailable and late ones should have had a run.",
        ),
        Panel(
            "Requests shed, by limit",
            "ops",
            (Query("{{reason}}", _rate("http_shed_total", "reason")),),
            "Refused before the gate: too much was under way, in total or of one tenant.",
        ),
        Panel(
            "Refusals without a receipt",
            "ops",
            (Query("left out", _rate("receipts_left_out_total")),),
            "A storm of refusals is counted, not listed one by one.",
        ),
        Panel(
            "Processor time, by tenant",
            "percentunit",
            (Query("{{tenant}}", _rate("tenant_work_seconds_total", "tenant", _TENANT)),),
            "Checks, expressions, files and pages of a tenant.",
        ),
        Panel(
            "Refused for using more than its share of processor time",
            "ops",
            (Query("{{tenant}}", _rate("tenant_work_refusals_total", "tenant", _TENANT)),),
        ),
    ),
    has_tenants=True,
)

LOCKS: Final = Dashboard(
    "stanchion-locks",
    "Stanchion / Locks and fallback",
    (
        _FALLBACK_RATE,
        Panel(
            "Part of runs without a lock",
            "percentunit",
            (
                Query("{{instance}}, 5 min", "stanchion:lock_fallback:ratio_rate5m"),
                Query("{{instance}}, 1 h", "stanchion:lock_fallback:ratio_rate1h"),
            ),
            "Recorded by alerts.yml. The objective is 0.1 %; 1.44 % in both windows pages.",
        ),
        Panel(
            "Runs put off because a class fails closed",
            "ops",
            (Query("{{risk}}", _rate("run_lock_refused_total", "risk")),),
        ),
        Panel(
            "Conflicting writers",
            "ops",
            (
                Query("commit conflicts", _rate("commit_conflicts_total")),
                Query("duplicate completions", _rate("duplicate_completions_total")),
                Query("duplicate publishes", _rate("duplicate_publishes_total")),
                Query("stale writes refused", _rate("run_stale_writes_total")),
            ),
            "Duplicate publishes are no evidence of two writers: calls are repeated on retry.",
        ),
        Panel(
            "Escalation level",
            "short",
            (Query("{{instance}}", "max by (instance) (stanchion_escalation_level)"),),
            "0 normal, 1 escalated, 2 latched.",
        ),
        Panel(
            "Failed renewals and releases",
            "ops",
            (
                Query("renew, {{kind}} {{risk}}", _rate("lease_renew_errors_total", "kind, risk")),
                Query(
                    "release, {{kind}} {{risk}}",
                    _rate("lease_release_errors_total", "kind, risk"),
                ),
            ),
        ),
        Panel(
            "Holders that lost trust in their lease",
            "ops",
            (
                Query("fenced, {{risk}}", _rate("workflow_run_lock_abandoned_total", "risk")),
                Query("went on, {{risk}}", _rate("run_lock_untrusted_total", "risk")),
            ),
        ),
        Panel(
            "Run locks: wait, p95",
            "s",
            (Query("wait", _quantile("run_lock_wait_seconds")),),
            "The first metric to rise when the lock store is slow.",
        ),
    ),
)

RETRIES: Final = Dashboard(
    "stanchion-retries",
    "Stanchion / Retries and rhythm",
    (
        Panel(
            "Lock-busy retries in one half second",
            "short",
            (
                Query("p50", _quantile("lock_busy_retry_burst", quantile=0.5)),
                Query("p95", _quantile("lock_busy_retry_burst")),
                Query("p99", _quantile("lock_busy_retry_burst", quantile=0.99)),
            ),
            "Synchronised waves are high here while the rate beside it is not.",
        ),
        Panel(
            "Retries, by cause",
            "ops",
            (
                Query("lock busy", _rate("lock_busy_retries_total")),
                Query("backend unavailable", _rate("backend_error_retries_total")),
            ),
        ),
        Panel(
            "Lock misses",
            "ops",
            (Query("contended", _rate("run_lock_contended_total")),),
            "Holds skipped because another replica held the lease.",
        ),
        Panel(
            "Time held against time waited, p95",
            "s",
            (
                Query("held", _quantile("run_lock_held_seconds")),
                Query("waited", _quantile("run_lock_wait_seconds")),
            ),
            "The retry delay, 500 ms by default, must be longer than the time held.",
        ),
        _BACKLOG,
        Panel(
            "Starts refused, by class",
            "ops",
            (
                Query("429", _rate("admission_decisions_total", "", _REFUSED)),
                Query("503", _rate("admission_decisions_total", "", _UNAVAILABLE)),
            ),
        ),
    ),
)

WORKERS: Final = Dashboard(
    "stanchion-workers",
    "Stanchion / Workers and topics",
    (
        Panel(
            "Topic limits: leased jobs and limit",
            "short",
            (
                Query("{{limit}}", "max by (limit) (stanchion_topic_limit_running)"),
                Query("{{limit}}, max", "max by (limit) (stanchion_topic_limit_max)"),
            ),
            "A limit that is reached holds back jobs of its topics.",
        ),
        Panel(
            "Topic limits: leases, and requests for more",
            "ops",
            (
                Query("{{limit}}, leased", _rate("topic_limit_leases_total", "limit")),
                Query("{{limit}}, {{reason}}", _rate("topic_limit_refused_total", "limit, reason")),
            ),
        ),
        Panel(
            "Calls of workers",
            "ops",
            (
                Query(
                    "{{route}}",
                    _rate("http_request_seconds_count", "route", 'route=~"/v1/worker/.*"'),
                ),
            ),
        ),
        Panel(
            "Results, p95 until answered",
            "s",
            (
                Query(
                    "results",
                    _quantile("http_request_seconds", "", 'route="/v1/worker/results"'),
                ),
            ),
        ),
        Panel(
            "Job leases that expired",
            "ops",
            (Query("expired", _rate("scheduler_job_lock_abandoned_total")),),
            "A worker crashed, stalled or was cut off; the job is delivered again.",
        ),
        Panel(
            "Results rejected, by reason",
            "ops",
            (Query("{{code}}", _rate("results_rejected_total", "code")),),
        ),
        Panel(
            "Results settled, and misses by cause",
            "ops",
            (
                Query("settled", _rate("results_settled_total")),
                Query("missed: {{cause}}", _rate("settle_misses_total", "cause")),
            ),
            "A settled result takes one store step. After a miss it is accepted first.",
        ),
        Panel(
            "Dead letters, 1 h",
            "short",
            (Query("dead letters", _increase("dead_letters_total")),),
        ),
        Panel(
            "Duration of runs",
            "s",
            (
                Query("p50", _quantile("run_duration_seconds", quantile=0.5)),
                Query("p95", _quantile("run_duration_seconds")),
            ),
        ),
    ),
)

STORES: Final = Dashboard(
    "stanchion-stores",
    "Stanchion / Stores and bus",
    (
        _BACKLOG,
        Panel(
            "Calls put off because a backend was unavailable",
            "ops",
            (Query("{{instance}}", _rate("backend_error_retries_total", "instance")),),
        ),
        Panel(
            "Settings",
            "short",
            (
                Query("stale, {{instance}}", "max by (instance) (stanchion_settings_stale)"),
                Query("changes, 1 h", _increase("settings_changes_total")),
                Query("unreadable, 1 h", _increase("settings_invalid_total")),
            ),
        ),
        Panel(
            "Finished runs removed",
            "ops",
            (Query("removed", _rate("runs_purged_total")),),
        ),
        Panel(
            "Event-loop lag, p99",
            "s",
            (Query("{{instance}}", _quantile("loop_lag_seconds", "instance", quantile=0.99)),),
            "Over 50 ms is a stall; the log line loop_stalled has the stack.",
        ),
        Panel(
            "Requests, waits and streams under way",
            "short",
            (Query("{{kind}}", "sum by (kind) (stanchion_http_under_way)"),),
        ),
        Panel(
            "Processor time",
            "percentunit",
            (Query("{{instance}}", f"rate(process_cpu_seconds_total[{_WINDOW}])"),),
        ),
        Panel(
            "Memory",
            "bytes",
            (Query("{{instance}}", "process_resident_memory_bytes"),),
        ),
        Panel(
            "Open files",
            "short",
            (
                Query("open, {{instance}}", "process_open_fds"),
                Query("limit, {{instance}}", "process_max_fds"),
            ),
        ),
    ),
)

DASHBOARDS: Final = (OVERVIEW, ADMISSION, LOCKS, RETRIES, WORKERS, STORES)

NOT_SHOWN: Final = {
    "stanchion_metrics_rendered_timestamp_seconds": "for the alert StanchionAbsent",
    "process_virtual_memory_bytes": "address space, not memory in use",
}
"""Metrics on no dashboard, and why."""


def file_of(dashboard: Dashboard) -> Path:
    """Where a dashboard is written."""
    return FOLDER / f"{dashboard.uid.removeprefix('stanchion-')}.json"


def dashboard_json(dashboard: Dashboard) -> str:
    """A dashboard as Grafana imports it."""
    panels = [_panel(number, panel) for number, panel in enumerate(dashboard.panels)]
    document = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["stanchion"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "links": [
            {
                "title": "Stanchion",
                "type": "dashboards",
                "tags": ["stanchion"],
                "asDropdown": False,
                "keepTime": True,
            }
        ],
        "templating": {"list": [_SOURCE, *([_TENANTS] if dashboard.has_tenants else [])]},
        "panels": panels,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


_SOURCE: Final = {"name": "datasource", "type": "datasource", "query": "prometheus"}
_TENANTS: Final = {
    "name": "tenant",
    "type": "query",
    "datasource": {"type": "prometheus", "uid": "${datasource}"},
    "query": "label_values(stanchion_admission_decisions_total, tenant)",
    "refresh": 2,
    "multi": True,
    "includeAll": True,
    "allValue": ".*",
    "current": {"text": "All", "value": "$__all"},
}


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, _COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        **({"description": panel.says} if panel.says else {}),
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "expr": query.expr,
                "legendFormat": query.legend,
                **({"exemplar": True} if "_bucket" in query.expr else {}),
            }
            for place, query in enumerate(panel.queries)
        ],
    }


if __name__ == "__main__":
    for each in DASHBOARDS:
        file_of(each).write_text(dashboard_json(each), encoding="utf-8")
    sys.stdout.write(f"wrote {', '.join(file_of(each).name for each in DASHBOARDS)}\n")
