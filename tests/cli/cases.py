"""Every command that asks a server: what it sends, what it is told, and what a person then reads.

Answers are made from the wire types, so that they are what a server sends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from stanchion.core.bulk import BulkAction, BulkStatus
from stanchion.core.json_value import JsonObject
from stanchion.core.model import Failure, Risk, RunStatus, StepId, StepStatus, WorkflowSource
from stanchion.core.queue import OnFull
from stanchion.core.schedule import CatchUp, Overlap
from stanchion.core.settings import Settings, settings_document, settings_json_schema
from stanchion.core.why import WhyCode
from stanchion.wire import admin, runs
from stanchion.wire.schedules import (
    DueTicksView,
    MissedTickRow,
    ScheduleList,
    ScheduleRunRow,
    ScheduleView,
)

__all__ = ["BATCH", "CASES", "DEFINITION", "RUN", "SETTINGS", "Case"]

AT: Final = datetime(2026, 11, 15, 19, 0, 0, 123_000, tzinfo=UTC)
LATER: Final = datetime(2026, 11, 15, 19, 0, 7, tzinfo=UTC)
DEFINITION: Final[JsonObject] = {"id": "research", "steps": {"plan": {"topic": "agent.plan"}}}

RUN: Final = runs.RunView(
    run_id="07-01h",
    workflow_id="research",
    workflow_version=3,
    tenant="acme",
    status=RunStatus.FAILED,
    risk=Risk.HIGH,
    input={"question": "why?"},
    output={"text": "half of it"},
    error=Failure("step_failed", "no answer", StepId("search")),
    steps={
        "plan": runs.StepView(
            status=StepStatus.SUCCEEDED, attempt=1, output={"queries": 3}, error=None
        ),
        "search": runs.StepView(
            status=StepStatus.FAILED,
            attempt=2,
            output=None,
            error=Failure("job_failed", "no answer"),
            items_total=3,
            items_succeeded=2,
            items_failed=1,
        ),
        "review": runs.StepView(
            status=StepStatus.WAITING,
            attempt=1,
            output=None,
            error=None,
            waiting_for="decision",
            question="Is it good?",
        ),
    },
    created_at=AT,
    finished_at=LATER,
)
ROW: Final = runs.RunRow(
    run_id="07-01h",
    workflow_id="research",
    workflow_version=3,
    status=RunStatus.RUNNING,
    created_at=AT,
    finished_at=None,
    error=None,
)
WHY: Final = runs.WhyAnswer(
    run_id="07-01h",
    status=RunStatus.RUNNING,
    as_of=AT,
    findings=(
        runs.WhyFinding(
            code=WhyCode.JOB_LEASED,
            detail="worker 'w-1' has the job of item 3 of step 'search' (fence 17)",
            step_id="search",
            since=AT,
            until=LATER,
            blocked_by=runs.WhyBlocker(
                kind="job",
                id="07-01h:search[3]@1",
                item=3,
                topic="agent.search",
                worker_id="w-1",
                fence=17,
                ahead=None,
                rule=None,
                seen_at=None,
            ),
            remedy="wait for its result; its progress: stanchion job show 07-01h:search[3]@1",
        ),
    ),
)
BULK: Final = runs.BulkView(
    bulk_id="b1",
    action=BulkAction.CANCEL,
    matched=5,
    done=4,
    failed=1,
    status=BulkStatus.FINISHED,
    errors=(runs.BulkError("07-01h", "conflict", "it has ended"),),
    tenant="*",
    filter={"label": ["team:red"]},
    rate_per_s=5,
    actor="kim",
    created_at=AT,
    finished_at=LATER,
)
SETTINGS: Final = settings_document(Settings())
CHANGE: Final = runs.Change("07-01h", RunStatus.CANCELLED, applied=True)
TENANT: Final = admin.TenantConfig(max_concurrent_runs=2)
LEASE: Final = admin.LeaseRow(
    name="admission/acme",
    fence=1_786_000,
    expires_in_ms=4_200,
    holder="kim",
    acquired_at=AT,
    renewals=2,
)
KEY: Final = admin.KeyRow(
    id="k1",
    role=admin.Role.WORKER,
    tenant="*",
    name="fleet-1",
    note="the fleet",
    created_at=AT,
    expires_at=None,
    last_used_at=LATER,
    revoked_at=None,
)
DRIFT: Final = admin.DriftAnswer(
    at=AT,
    checked=5,
    drifted=1,
    repaired=(admin.DriftRow(tenant="acme", counted=3, true=2),),
)
REPLICA: Final = admin.ReplicaRow(
    replica="a1b2",
    version="0.2.0",
    started_at=AT,
    seen_at=LATER,
    clock_offset_ms=-3,
    settings_revision=7,
    store="ok",
    locks="ok",
    bus="ok",
    runs_held=2,
)
ESCALATION: Final = admin.EscalationView(
    level="escalated",
    forced=None,
    closes=(Risk.HIGH, Risk.STANDARD),
    closed_now=(Risk.HIGH,),
    trips_today=1,
    counters=admin.EscalationCounters(
        replica="a1b2",
        window_s=300,
        fallbacks_per_s=0.25,
        fallbacks_per_s_max=0.1,
        fifths_at_threshold=5,
        duplicates=3,
        duplicates_before=1,
        fallbacks_running=2,
        duplicates_running=0,
        quiet_s=12.4,
        dwell_s=600,
        probes_ok=1,
        probes_min=3,
        trips_per_day_max=2,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of a command.

    ``shape``: the type of what ``-o json`` prints; ``None`` means the settings, which have none.
    """

    args: tuple[str, ...]
    asks: tuple[str, str]
    answer: object
    shape: Any
    says: tuple[str, ...]
    body: object = None
    query: dict[str, str] = field(default_factory=dict)
    before: object = None
    """What an earlier GET of the same path is answered with."""
    has_key: bool = False

    @property
    def command(self) -> str:
        return " ".join(self.args[:2])

    @property
    def schema(self) -> dict[str, Any]:
        """What the printed JSON must keep to."""
        if self.shape is None:
            return settings_json_schema()
        # Only Python knows the end ``\\Z`` of a pattern.
        text = msgspec.json.encode(msgspec.json.schema(self.shape)).replace(rb"\\Z", b"$")
        schema: dict[str, Any] = msgspec.json.decode(text)
        return schema

    @property
    def document(self) -> object:
        """The answer as JSON says it."""
        return msgspec.json.decode(msgspec.json.encode(self.answer))


PAGE: Final = {"limit": "50"}
AUDIT: Final = admin.AuditRow(
    at=AT,
    actor="kim",
    action="tenant.put",
    subject="tenant/acme",
    tenant="acme",
    before=None,
    after={"max_concurrent_runs": 2},
    request_id="r1",
)

SCHEDULE: Final = ScheduleView(
    id="nightly",
    tenant="default",
    workflow_id="research",
    cron="0 2 * * *",
    every_s=None,
    timezone="Europe/Berlin",
    input={"n": 1},
    labels={"team": "red"},
    overlap=Overlap.SKIP,
    catch_up=CatchUp.NONE,
    jitter_s=0,
    paused=False,
    generation=7,
    next=tuple(AT.replace(day=day) for day in (16, 17, 18, 19, 20)),
    runs=(
        ScheduleRunRow(LATER, "07-02h", triggered=True, status=RunStatus.FAILED),
        ScheduleRunRow(AT, "07-01h", status=RunStatus.SUCCEEDED),
        ScheduleRunRow(AT, "07-00h"),
    ),
    waiting=MissedTickRow(LATER, "the run of an earlier tick is unfinished"),
    due=DueTicksView(19, AT),
    missed=(MissedTickRow(AT, "the tenant was full: 2 runs"),),
    missed_total=3,
)
LIMIT = admin.LimitView(
    id="llm",
    topics=("llm.*", "embed"),
    per="deployment",
    max_running=3,
    rate_per_s=None,
    running=2,
    retry_after_ms=None,
)
_SCHEDULE: Final = {
    "workflow_id": "research",
    "cron": "0 2 * * *",
    "timezone": "Europe/Berlin",
    "input": {"n": 1},
    "labels": {"team": "red"},
    "overlap": "queue",
    "catch_up": "none",
    "jitter_s": 0,
    "paused": True,
}

REJECTS: Final = {"on_full": "reject", "queue_max": 100, "queue_wait_s": 300}
"""The members of a tenant that does not queue."""
BATCH: Final = str(Path(__file__).parent / "batch.ndjson")

CASES: Final = (
    Case(
        args=("workflow", "list"),
        asks=("GET", "/v1/workflows"),
        query=PAGE,
        answer=runs.WorkflowList(
            (runs.WorkflowRow(id="research", version=3, risk=Risk.HIGH, created_at=AT),), "next"
        ),
        shape=runs.WorkflowList,
        says=("research  3        own     high  2026-11-15 19:00:00Z", "add --cursor next"),
    ),
    Case(
        args=("workflow", "list", "--shared"),
        asks=("GET", "/v1/shared/workflows"),
        query=PAGE,
        answer=runs.WorkflowList(
            (
                runs.WorkflowRow(
                    id="research",
                    version=3,
                    source=WorkflowSource.SHARED,
                    risk=Risk.HIGH,
                    created_at=AT,
                ),
            )
        ),
        shape=runs.WorkflowList,
        says=("research  3        shared  high  2026-11-15 19:00:00Z",),
    ),
    Case(
        args=("workflow", "show", "research", "--shared"),
        asks=("GET", "/v1/shared/workflows/research"),
        answer=runs.WorkflowView(
            id="research",
            version=2,
            source=WorkflowSource.SHARED,
            risk=Risk.HIGH,
            created_at=AT,
            definition=DEFINITION,
        ),
        shape=runs.WorkflowView,
        says=("source    shared",),
    ),
    Case(
        args=("workflow", "usage", "research"),
        asks=("GET", "/v1/shared/workflows/research/usage"),
        query=PAGE,
        answer=runs.WorkflowUseList(
            (
                runs.WorkflowUseRow(
                    tenant="acme", source=WorkflowSource.SHARED, version=2, pin=2, active=5
                ),
                runs.WorkflowUseRow(
                    tenant="globex", source=WorkflowSource.OWN, version=1, pin=None, active=0
                ),
            )
        ),
        shape=runs.WorkflowUseList,
        says=("acme    shared  2        2    5", "globex  own     1        -    0"),
    ),
    Case(
        args=("workflow", "show", "research", "--version", "2"),
        asks=("GET", "/v1/workflows/research"),
        query={"version": "2"},
        answer=runs.WorkflowView(
            id="research", version=2, risk=Risk.HIGH, created_at=AT, definition=DEFINITION
        ),
        shape=runs.WorkflowView,
        says=("version   2", "source    own", '"topic": "agent.plan"'),
    ),
    Case(
        args=(
            *("run", "start", "research", "--input", '{"question": "why?"}'),
            *("--label", "team=red", "--label", "url=http://a"),
        ),
        asks=("POST", "/v1/workflows/research/runs"),
        body={"input": {"question": "why?"}, "labels": {"team": "red", "url": "http://a"}},
        answer=runs.StartAnswer("07-01h", RunStatus.RUNNING),
        shape=runs.StartAnswer,
        says=("07-01h  running",),
        has_key=True,
    ),
    Case(
        args=(
            *("run", "start", "research", "--priority", "7", "--fairness-key", "blue"),
            *("--on-full", "queue"),
        ),
        asks=("POST", "/v1/workflows/research/runs"),
        body={"input": {}, "priority": 7, "fairness_key": "blue", "on_full": "queue"},
        answer=runs.QueuedAnswer(
            run_id="07-01h", status=RunStatus.QUEUED, position=2, estimate_s=3.5
        ),
        shape=runs.QueuedAnswer,
        says=("07-01h  queued",),
        has_key=True,
    ),
    Case(
        args=("run", "batch", "research", BATCH, "--idempotency-key", "k"),
        asks=("POST", "/v1/workflows/research/runs/batch"),
        body={
            "runs": [
                {"input": {"n": 1}, "key": "k/0"},
                {"key": "own", "labels": {"team": "red"}},
            ]
        },
        answer=runs.BatchAnswer(
            (
                runs.BatchResult(status=200, run_id="07-01h"),
                runs.BatchResult(status=200, run_id="07-02h"),
            )
        ),
        shape=runs.BatchAnswer,
        says=("1     200     07-01h", "3     200     07-02h"),  # line 2 is empty
        has_key=True,
    ),
    Case(
        args=(
            *("schedule", "set", "nightly", "--workflow", "research", "--cron", "0 2 * * *"),
            *("--timezone", "Europe/Berlin", "--input", '{"n": 1}', "--label", "team=red"),
        ),
        asks=("PUT", "/v1/schedules/nightly"),
        body=_SCHEDULE,
        before=msgspec.structs.replace(
            SCHEDULE,
            cron=None,
            every_s=60,
            timezone="UTC",
            input={},
            labels={"team": "blue"},
            overlap=Overlap.QUEUE,
            paused=True,
        ),
        answer=SCHEDULE,
        shape=ScheduleView,
        says=(
            "when      0 2 * * * Europe/Berlin",
            "Z: the run of an earlier tick is unfinished",
            "the tenant was full: 2 runs",
        ),
    ),
    Case(
        args=("schedule", "list"),
        asks=("GET", "/v1/schedules"),
        query=PAGE,
        answer=ScheduleList((SCHEDULE,), "next"),
        shape=ScheduleList,
        says=("nightly  research  0 2 * * * Europe/Berlin", "add --cursor next"),
    ),
    Case(
        args=("schedule", "list", "--tenant", "*"),
        asks=("GET", "/v1/schedules"),
        query=PAGE,
        answer=ScheduleList((SCHEDULE,)),
        shape=ScheduleList,
        says=("ID       TENANT   WORKFLOW", "nightly  default  research"),
    ),
    Case(
        args=("schedule", "show", "nightly"),
        asks=("GET", "/v1/schedules/nightly"),
        answer=SCHEDULE,
        shape=ScheduleView,
        says=(
            "tenant    default",
            "catch up  none",
            "labels    team:red",
            'input     {"n": 1}',
            "due       19 ticks, the oldest 2026-11-15 19:00:00Z\n",
            "next      2026-11-16 19:00:00Z\n          2026-11-17 19:00:00Z\n",
            "          2026-11-20 19:00:00Z\n\n",
            "2026-11-15 19:00:07Z  trigger  failed      07-02h",
            "2026-11-15 19:00:00Z  tick     succeeded   07-01h",
            "2026-11-15 19:00:00Z  tick     not stored  07-00h",
            "(the newest 1 of 3 missed ticks)",
        ),
    ),
    Case(
        args=("schedule", "pause", "nightly"),
        asks=("PUT", "/v1/schedules/nightly"),
        before=SCHEDULE,
        body={
            **_SCHEDULE,
            "overlap": "skip",
            "catch_up": "none",
            "jitter_s": 0,
            "paused": True,
        },
        answer=msgspec.structs.replace(SCHEDULE, paused=True, next=()),
        shape=ScheduleView,
        says=("next      paused",),
    ),
    Case(
        args=("schedule", "resume", "nightly"),
        asks=("PUT", "/v1/schedules/nightly"),
        before=SCHEDULE,
        body={
            **_SCHEDULE,
            "overlap": "skip",
            "catch_up": "none",
            "jitter_s": 0,
            "paused": False,
        },
        answer=SCHEDULE,
        shape=ScheduleView,
        says=("workflow  research",),
    ),
    Case(
        args=("schedule", "trigger", "nightly"),
        asks=("POST", "/v1/schedules/nightly/trigger"),
        answer=runs.StartAnswer("07-01h", RunStatus.RUNNING),
        shape=runs.StartAnswer,
        says=("07-01h  running",),
        has_key=True,
    ),
    Case(
        args=("schedule", "delete", "nightly"),
        asks=("DELETE", "/v1/schedules/nightly"),
        answer=SCHEDULE,
        shape=ScheduleView,
        says=("deleted: nightly",),
    ),
    Case(
        args=("limit", "list"),
        asks=("GET", "/v1/admin/limits"),
        query=PAGE,
        answer=admin.LimitList((LIMIT,), "next"),
        shape=admin.LimitList,
        says=("llm  llm.* embed  deployment  2        3    -", "add --cursor next"),
    ),
    Case(
        args=("limit", "show", "llm"),
        asks=("GET", "/v1/admin/limits/llm"),
        answer=LIMIT,
        shape=admin.LimitView,
        says=("running      2", "max running  3"),
    ),
    Case(
        args=("limit", "show", "llm"),
        asks=("GET", "/v1/admin/limits/llm"),
        answer=msgspec.structs.replace(LIMIT, per="tenant", tenant="acme"),
        shape=admin.LimitView,
        says=("running      2 of tenant acme",),
    ),
    Case(
        args=("limit", "show", "llm"),
        asks=("GET", "/v1/admin/limits/llm"),
        answer=msgspec.structs.replace(LIMIT, per="tenant", running=None),
        shape=admin.LimitView,
        says=("running      of each tenant: name one with --tenant",),
    ),
    Case(
        args=("limit", "set", "llm", "--topic", "llm.*", "--topic", "embed", "--max-running", "3"),
        asks=("PUT", "/v1/admin/limits/llm"),
        body={"topics": ["llm.*", "embed"], "per": "tenant", "max_running": 3, "rate_per_s": 7.5},
        before=msgspec.structs.replace(LIMIT, topics=("old",), per="tenant", rate_per_s=7.5),
        answer=LIMIT,
        shape=admin.LimitView,
        says=("topics       llm.* embed",),
    ),
    Case(
        args=("limit", "delete", "llm"),
        asks=("DELETE", "/v1/admin/limits/llm"),
        answer=LIMIT,
        shape=admin.LimitView,
        says=("deleted: llm",),
    ),
    Case(
        args=("run", "rerun", "07-01h", "--from-step", "search"),
        asks=("POST", "/v1/runs/07-01h/rerun"),
        body={"from_step": "search"},
        answer=runs.StartAnswer("07-02h", RunStatus.PENDING),
        shape=runs.StartAnswer,
        says=("07-02h  pending",),
        has_key=True,
    ),
    Case(
        args=(
            "run",
            "rerun",
            "07-01h",
            "--version",
            "newest",
            "--input",
            '{"n": 1}',
        ),
        asks=("POST", "/v1/runs/07-01h/rerun"),
        body={"from_step": None, "version": "newest", "input": {"n": 1}},
        answer=runs.StartAnswer("07-02h", RunStatus.PENDING),
        shape=runs.StartAnswer,
        says=("07-02h  pending",),
        has_key=True,
    ),
    Case(
        args=(
            *("run", "list", "--status", "running", "--workflow", "research", "--limit", "7"),
            *("--label", "team=red", "--since", "2026-11-15T00:00:00Z", "--rerun-of", "07-00h"),
        ),
        asks=("GET", "/v1/runs"),
        query={
            "status": "running",
            "workflow_id": "research",
            "label": "team:red",
            "since": "2026-11-15T00:00:00+00:00",
            "rerun_of": "07-00h",
            "limit": "7",
        },
        answer=runs.RunList((ROW,)),
        shape=runs.RunList,
        says=("07-01h  research@3  running  2026-11-15 19:00:00Z  -         -",),
    ),
    Case(
        args=("run", "list", "--cursor", "here"),
        asks=("GET", "/v1/runs"),
        query={"limit": "50", "cursor": "here"},
        answer=runs.RunList(()),
        shape=runs.RunList,
        says=("no runs of tenant default (see --tenant)",),
    ),
    Case(
        args=("run", "show", "07-01h"),
        asks=("GET", "/v1/runs/07-01h"),
        answer=RUN,
        shape=runs.RunView,
        says=(
            "status    failed",
            "error     search: no answer (step_failed)",
            "search  failed     2        2/3 (1 failed)  -                      no answer",
            "review  waiting    1        -               decision: Is it good?  -",
            '"text": "half of it"',
        ),
    ),
    Case(
        args=("run", "show", "07-05h"),
        asks=("GET", "/v1/runs/07-05h"),
        answer=runs.RunView(
            run_id="07-05h",
            workflow_id="research",
            workflow_version=3,
            tenant="acme",
            status=RunStatus.RUNNING,
            risk=Risk.LOW,
            input={},
            output=None,
            error=None,
            steps={
                "plan": runs.StepView(
                    status=StepStatus.RUNNING,
                    attempt=1,
                    output=None,
                    error=None,
                    progress={"page": 3},
                )
            },
            created_at=AT,
            finished_at=None,
        ),
        shape=runs.RunView,
        says=('\nprogress\n  plan  {"page": 3}\n',),
    ),
    Case(
        args=("run", "items", "07-01h", "search", "--status", "failed"),
        asks=("GET", "/v1/runs/07-01h/steps/search/items"),
        query={"status": "failed", **PAGE},
        answer=runs.ItemList(
            (
                runs.ItemRow(
                    index=2,
                    status=StepStatus.FAILED,
                    attempt=2,
                    output=None,
                    error=Failure("no_answer", "no answer"),
                    job_id="07-01h:search[2]@2",
                ),
            ),
        ),
        shape=runs.ItemList,
        says=("2     failed  2        07-01h:search[2]@2  no answer (no_answer)",),
    ),
    Case(
        args=("run", "why", "07-01h"),
        asks=("GET", "/v1/runs/07-01h/why"),
        answer=WHY,
        shape=runs.WhyAnswer,
        says=(
            "worker 'w-1' has the job of item 3 of step 'search' (fence 17) (job_leased)",
            "to do: wait for its result",
            "job_leased  search[3]  2026-11-15 19:00:00Z  2026-11-15 19:00:07Z  worker 'w-1'",
        ),
    ),
    Case(
        args=("run", "show", "07-01h", "--timeline"),
        asks=("GET", "/v1/runs/07-01h/timeline"),
        query=PAGE,
        answer=runs.TimelineAnswer(
            "07-01h",
            (
                runs.TimelineLine(at=AT, what="run_started", actor="key k1"),
                runs.TimelineLine(
                    at=LATER, what="item_failed", actor="worker-1", step="search", item=2, attempt=2
                ),
            ),
        ),
        shape=runs.TimelineAnswer,
        says=(
            "2026-11-15 19:00:00.123Z  run_started",
            "2026-11-15 19:00:07.000Z  item_failed  search[2]  2        worker-1  -",
        ),
    ),
    Case(
        args=("run", "waits"),
        asks=("GET", "/v1/waits"),
        answer=runs.WaitsAnswer(
            LATER,
            (
                runs.WaitRow(
                    waits_for="slot",
                    run_id="07-01h",
                    tenant="acme",
                    workflow_id="research",
                    step_id=None,
                    since=AT,
                    until=LATER,
                    code=WhyCode.QUEUED,
                    detail="tenant 'acme' is full; position 1 in its queue, 0 runs ahead",
                    remedy="wait for a slot, or stanchion run cancel 07-01h",
                ),
            ),
        ),
        shape=runs.WaitsAnswer,
        says=(
            "WAITS FOR  SINCE                 TENANT  WORKFLOW  RUN",
            "slot       2026-11-15 19:00:00Z  acme    research  07-01h",
            "slot: tenant 'acme' is full; position 1 in its queue, 0 runs ahead (queued)",
            "to do: wait for a slot, or stanchion run cancel 07-01h --tenant acme",
        ),
    ),
    Case(
        args=("run", "cancel", "07-01h", "--reason", "too late"),
        asks=("POST", "/v1/runs/07-01h/cancel"),
        body={"reason": "too late"},
        answer=CHANGE,
        shape=runs.Change,
        says=("07-01h  cancelled\n",),
    ),
    Case(
        args=(
            *("run", "approve", "07-01h", "publish.review"),
            *("--comment", "good", "--data", '{"up_to": 5}'),
        ),
        asks=("POST", "/v1/runs/07-01h/steps/publish.review/approve"),
        body={"comment": "good", "data": {"up_to": 5}},
        answer=runs.Change("07-01h", RunStatus.WAITING, applied=False),
        shape=runs.Change,
        says=("07-01h  waiting  (recorded: the run is busy; it is applied afterwards)",),
    ),
    Case(
        args=("approval", "approve", "07-01h", "review"),
        asks=("POST", "/v1/runs/07-01h/steps/review/approve"),
        body={"comment": None},
        answer=CHANGE,
        shape=runs.Change,
        says=("07-01h  cancelled",),
    ),
    Case(
        args=("approval", "reject", "07-01h", "review", "--comment", "no"),
        asks=("POST", "/v1/runs/07-01h/steps/review/reject"),
        body={"comment": "no"},
        answer=CHANGE,
        shape=runs.Change,
        says=("07-01h  cancelled",),
    ),
    Case(
        args=("approval", "list"),
        asks=("GET", "/v1/approvals"),
        query=PAGE,
        answer=runs.ApprovalList(
            (
                runs.ApprovalRow(
                    run_id="07-01h",
                    step_id="review",
                    item=None,
                    ask=None,
                    tenant="acme",
                    workflow_id="research",
                    message="Is it good?",
                    data=None,
                    data_schema=None,
                    since=AT,
                    expires_at=None,
                    starter="kim",
                    labels={},
                ),
            )
        ),
        shape=runs.ApprovalList,
        says=("07-01h  review  acme    research  kim      2026-11-15 19:00:00Z", "Is it good?"),
    ),
    Case(
        args=("run", "reject", "07-01h", "review"),
        asks=("POST", "/v1/runs/07-01h/steps/review/reject"),
        body={"comment": None},
        answer=CHANGE,
        shape=runs.Change,
        says=("07-01h  cancelled",),
    ),
    Case(
        args=("job", "submit", "mail.send", "--input", "[1, null]"),
        asks=("POST", "/v1/jobs"),
        body={"topic": "mail.send", "input": [1, None]},
        answer=runs.SubmitAnswer("07-03h:job@1", "07-03h", RunStatus.RUNNING),
        shape=runs.SubmitAnswer,
        says=("07-03h:job@1  running",),
        has_key=True,
    ),
    Case(
        args=("job", "show", "07-03h:job@1"),
        asks=("GET", "/v1/jobs/07-03h:job@1"),
        answer=runs.JobAnswer(
            job_id="07-03h:job@1",
            run_id="07-03h",
            step_id="job",
            topic="mail.send",
            status="dead",
            run_status=RunStatus.WAITING,
            attempt=1,
            deliveries=5,
            output={"sent": 0},
            error=Failure("deliveries_spent", "handed out five times"),
        ),
        shape=runs.JobAnswer,
        says=(
            "status      dead",
            "error       handed out five times (deliveries_spent)",
            '  "sent": 0',
        ),
    ),
    Case(
        args=("job", "show", "07-03h:job@2"),
        asks=("GET", "/v1/jobs/07-03h:job@2"),
        answer=runs.JobAnswer(
            job_id="07-03h:job@2",
            run_id="07-03h",
            step_id="job",
            topic="mail.send",
            status="leased",
            run_status=RunStatus.RUNNING,
            attempt=2,
            deliveries=1,
            output=None,
            error=None,
            worker_id="worker-1",
            lease_ends_in_ms=42_000,
            progress={"page": 3},
        ),
        shape=runs.JobAnswer,
        says=(
            "worker         worker-1",
            "lease ends in  42.0 s",
            'progress       {"page": 3}',
        ),
    ),
    Case(
        args=("job", "topics"),
        asks=("GET", "/v1/worker/topics"),
        answer=runs.JobList({"agent.plan": 3, "mail.send": 12}),
        shape=runs.JobList,
        says=("TOPIC       READY", "agent.plan  3", "mail.send   12"),
    ),
    Case(
        args=("tenant", "set", "acme", "--max-concurrent-runs", "2"),
        asks=("PUT", "/v1/admin/tenants/acme"),
        before=admin.TenantConfig(max_concurrent_runs=10, job_rate_per_s=1.5),
        body={
            "max_concurrent_runs": 2,
            "job_rate_per_s": 1.5,
            "admission": None,
            "workflows": {},
            "budgets": {},
            **REJECTS,
        },
        answer=admin.TenantConfig(max_concurrent_runs=2, job_rate_per_s=1.5),
        shape=admin.TenantConfig,
        says=("max_concurrent_runs  2", "job_rate_per_s       1.5"),
    ),
    Case(
        args=(
            *("tenant", "set", "acme", "--on-full", "queue", "--queue-max", "7"),
            *("--queue-wait", "60"),
        ),
        asks=("PUT", "/v1/admin/tenants/acme"),
        before=admin.TenantConfig(),
        body={
            "max_concurrent_runs": 10,
            "job_rate_per_s": None,
            "admission": None,
            "workflows": {},
            "budgets": {},
            "on_full": "queue",
            "queue_max": 7,
            "queue_wait_s": 60.0,
        },
        answer=admin.TenantConfig(on_full=OnFull.QUEUE, queue_max=7, queue_wait_s=60),
        shape=admin.TenantConfig,
        says=("on_full              queue: at most 7 runs, 60 s each",),
    ),
    Case(
        args=("tenant", "set", "acme", "--pin", "a=2", "--pin", "b=1", "--unpin", "c"),
        asks=("PUT", "/v1/admin/tenants/acme"),
        before=admin.TenantConfig(max_concurrent_runs=10, workflows={"a": 1, "c": 1, "d": 4}),
        body={
            "max_concurrent_runs": 10,
            "job_rate_per_s": None,
            "admission": None,
            "workflows": {"a": 2, "b": 1, "d": 4},
            "budgets": {},
            **REJECTS,
        },
        answer=admin.TenantConfig(max_concurrent_runs=10, workflows={"a": 2, "b": 1, "d": 4}),
        shape=admin.TenantConfig,
        says=("workflows            a=2, b=1, d=4",),
    ),
    Case(
        args=(
            *("tenant", "set", "acme", "--no-cap", "--no-job-rate"),
            *("--admission", '{"strategy": "lock"}'),
        ),
        asks=("PUT", "/v1/admin/tenants/acme"),
        before=admin.TenantConfig(max_concurrent_runs=10, job_rate_per_s=1.5),
        body={
            "max_concurrent_runs": None,
            "job_rate_per_s": None,
            "admission": {"strategy": "lock"},
            "workflows": {},
            "budgets": {},
            **REJECTS,
        },
        answer=admin.TenantConfig(max_concurrent_runs=None, admission={"strategy": "lock"}),
        shape=admin.TenantConfig,
        says=(
            "max_concurrent_runs  no cap",
            "job_rate_per_s       no limit",
            '{"strategy": "lock"}',
        ),
    ),
    Case(
        args=(
            *("tenant", "set", "acme", "--budget", "tokens=5/day", "--budget", "c=d=7/total"),
            *("--no-budget", "calls"),
        ),
        asks=("PUT", "/v1/admin/tenants/acme"),
        before=admin.TenantConfig(
            budgets={
                "calls": admin.BudgetConfig(limit=1, window="hour"),
                "cents": admin.BudgetConfig(limit=2, window="month"),
            }
        ),
        body={
            "max_concurrent_runs": 10,
            "job_rate_per_s": None,
            "admission": None,
            "workflows": {},
            "budgets": {
                "cents": {"limit": 2, "window": "month"},
                "tokens": {"limit": 5, "window": "day"},
                "c=d": {"limit": 7, "window": "total"},
            },
            **REJECTS,
        },
        answer=admin.TenantConfig(
            budgets={
                "cents": admin.BudgetConfig(limit=2, window="month"),
                "tokens": admin.BudgetConfig(limit=5, window="day"),
            }
        ),
        shape=admin.TenantConfig,
        says=("budgets              cents=2/month, tokens=5/day",),
    ),
    Case(
        args=("tenant", "show", "acme"),
        asks=("GET", "/v1/admin/tenants/acme"),
        answer=TENANT,
        shape=admin.TenantConfig,
        says=("tenant               acme", "admission            as in the settings"),
    ),
    Case(
        args=("tenant", "delete", "acme"),
        asks=("DELETE", "/v1/admin/tenants/acme"),
        answer=TENANT,
        shape=admin.TenantConfig,
        says=("the configuration of tenant acme is deleted: the defaults apply",),
    ),
    Case(
        args=("tenant", "list"),
        asks=("GET", "/v1/admin/tenants"),
        query=PAGE,
        answer=admin.TenantList(
            (
                admin.TenantRow(
                    tenant="acme",
                    max_concurrent_runs=2,
                    job_rate_per_s=None,
                    admission=None,
                    active=1,
                ),
            )
        ),
        shape=admin.TenantList,
        says=("acme    1       0       2         no limit  -",),
    ),
    Case(
        args=(
            *("bulk", "start", "cancel", "--label", "team=red", "--status", "running"),
            *("--status", "waiting", "--rate", "5"),
        ),
        asks=("POST", "/v1/bulk"),
        body={
            "action": "cancel",
            "filter": {"status": ["running", "waiting"], "label": ["team:red"]},
            "dry_run": False,
            "rate_per_s": 5.0,
        },
        answer=BULK,
        has_key=True,
        shape=runs.BulkView,
        says=("bulk      b1", 'filter    {"label": ["team:red"]}', "conflict  it has ended"),
    ),
    Case(
        args=("bulk", "list"),
        asks=("GET", "/v1/bulk"),
        query=PAGE,
        answer=runs.BulkList((BULK,)),
        shape=runs.BulkList,
        says=("b1    cancel  *       finished  4     1       5 ",),
    ),
    Case(
        args=("bulk", "show", "b1", "--watch"),
        asks=("GET", "/v1/bulk/b1"),
        answer=msgspec.structs.replace(BULK, failed=0, errors=()),
        shape=runs.BulkView,
        says=("done      4",),
    ),
    Case(
        args=("bulk", "stop", "b1"),
        asks=("DELETE", "/v1/bulk/b1"),
        answer=BULK,
        shape=runs.BulkView,
        says=("status    finished",),
    ),
    Case(
        args=("tenant", "limits"),
        asks=("GET", "/v1/tenant"),
        answer=admin.TenantView(
            tenant="acme",
            max_concurrent_runs=2,
            active=1,
            queued=0,
            job_rate_per_s=None,
            budgets={
                "tokens": admin.TenantBudget(
                    limit=9,
                    window="day",
                    used=4,
                    reserved=3,
                    resets_at=datetime(2026, 11, 17, tzinfo=UTC),
                ),
                "cents": admin.TenantBudget(
                    limit=5, window="total", used=0, reserved=0, resets_at=None
                ),
            },
            on_full=OnFull.QUEUE,
            queue_max=9,
            queue_wait_s=30.0,
        ),
        shape=admin.TenantView,
        says=(
            "active runs     1 of 2",
            "on_full         queue: at most 9 runs, 30 s each",
            "job_rate_per_s  no limit",
            "budget tokens   4 used, 3 reserved of 9 per day, until 2026-11-17 00:00:00Z",
            "budget cents    0 used, 0 reserved of 5 in total",
        ),
    ),
    Case(
        args=("drift", "show"),
        asks=("GET", "/v1/admin/drift"),
        answer=admin.DriftAnswer(at=None, checked=0, drifted=0, repaired=()),
        shape=admin.DriftAnswer,
        says=("tenants  0",),
    ),
    Case(
        args=("drift", "run", "--dry-run"),
        asks=("POST", "/v1/admin/drift"),
        query={"dry_run": "true"},
        answer=DRIFT,
        shape=admin.DriftAnswer,
        says=("drifted  1", "acme    3        2", "run it again without --dry-run"),
    ),
    Case(
        args=("drift", "run"),
        asks=("POST", "/v1/admin/drift"),
        answer=DRIFT,
        shape=admin.DriftAnswer,
        says=("audited  2026-11-15 19:00:00Z",),
    ),
    Case(
        args=("replica", "list"),
        asks=("GET", "/v1/admin/replicas"),
        query=PAGE,
        answer=admin.ReplicaList(
            (REPLICA, msgspec.structs.replace(REPLICA, replica="b", locks="unavailable"))
        ),
        shape=admin.ReplicaList,
        says=("-3        7         2     ok\n", "2     locks: unavailable"),
    ),
    Case(
        args=("upgrade", "show"),
        asks=("GET", "/v1/admin/upgrade"),
        answer=admin.UpgradeView(
            finished=False,
            level=1,
            newest_level=2,
            older=(admin.OlderReplica(replica="a1b2", version="0.1", seen_at=AT),),
            remedy="upgrade or stop it",
        ),
        shape=admin.UpgradeView,
        says=("level     1 of 2", "fix       upgrade or stop it", "a1b2           0.1 "),
    ),
    Case(
        args=("upgrade", "finish"),
        asks=("POST", "/v1/admin/upgrade"),
        body={},
        answer=admin.UpgradeView(finished=True, level=2, newest_level=2, older=(), remedy=None),
        shape=admin.UpgradeView,
        says=("finished  yes",),
    ),
    Case(
        args=("worker", "list", "--limit", "3"),
        asks=("GET", "/v1/admin/workers"),
        query={"limit": "3"},
        answer=admin.WorkerList(
            (
                admin.WorkerRow(
                    worker_id="w-1",
                    tenant="*",
                    topics=("agent.plan", "mail.send"),
                    jobs=2,
                    last_seen_at=AT,
                    version=None,
                ),
            )
        ),
        shape=admin.WorkerList,
        says=("w-1     *       2     2026-11-15 19:00:00Z  -        agent.plan, mail.send",),
    ),
    Case(
        args=("settings", "show"),
        asks=("GET", "/v1/admin/settings"),
        answer=SETTINGS,
        shape=None,
        says=(
            "admission.lock_retry.kind               jitter",
            'escalation.closes                       ["high", "standard"]',
        ),
    ),
    Case(
        args=("settings", "set", "admission.strategy=lock", "lock_busy.jitter_ms=0"),
        asks=("PATCH", "/v1/admin/settings"),
        body={"admission": {"strategy": "lock"}, "lock_busy": {"jitter_ms": 0}},
        answer=SETTINGS,
        shape=None,
        says=("admission.strategy                      atomic",),
    ),
    Case(
        args=("settings", "set", "--patch", '{"escalation": null}'),
        asks=("PATCH", "/v1/admin/settings"),
        body={"escalation": None},
        answer=SETTINGS,
        shape=None,
        says=("admission.strategy",),
    ),
    Case(
        args=("lease", "list"),
        asks=("GET", "/v1/admin/leases"),
        query=PAGE,
        answer=admin.LeaseList((LEASE,)),
        shape=admin.LeaseList,
        says=("admission/acme  kim     2026-11-15 19:00:00Z  4.2 s    2         1786000",),
    ),
    Case(
        args=("lease", "show", "admission/acme"),
        asks=("GET", "/v1/admin/leases/admission/acme"),
        answer=LEASE,
        shape=admin.LeaseRow,
        says=("holder    kim", "ends in   4.2 s", "fence     1786000"),
    ),
    Case(
        args=("lease", "hold", "admission/acme", "--ttl-s", "4.2"),
        asks=("POST", "/v1/admin/leases"),
        body={"name": "admission/acme", "ttl_s": 4.2},
        answer=LEASE,
        shape=admin.LeaseRow,
        says=("admission/acme is held with fence 1786000; it ends in 4.2 s",),
    ),
    Case(
        args=("lease", "history", "run/r-1"),
        asks=("GET", "/v1/admin/lock-history"),
        query={"name": "run/r-1"},
        answer=admin.LockHistory(
            replica="a1b2",
            since=AT,
            unlocked_count=1,
            unlocked=(admin.UnlockedRow(at=AT, name="run/r-2", risk=Risk.LOW, error="no answer"),),
            until=AT,
            bucket_ms=500,
            busy=(0, 3),
            waits=(admin.LockWaitRow(name="run/r-3", since=AT, tried_at=AT, tries=4),),
            marks=(admin.LeaseMarkRow(at=AT, what="acquired", fence=7),),
        ),
        shape=admin.LockHistory,
        says=(
            "without a lock: 1",
            "run/r-2  low    no answer",
            "last minute: 3",
            "acquired  7",
            "run/r-3",
        ),
    ),
    Case(
        args=("lease", "release", "admission/acme", "--reason", "its holder is gone"),
        asks=("DELETE", "/v1/admin/leases/admission/acme"),
        query={"reason": "its holder is gone"},
        answer=LEASE,
        shape=admin.LeaseRow,
        says=("admission/acme is released",),
    ),
    Case(
        args=(
            *("key", "create", "--role", "worker", "--for", "*", "--note", "the fleet"),
            *("--name", "fleet-1", "--expires", "2027-01-31T12:00:00Z"),
        ),
        asks=("POST", "/v1/admin/keys"),
        body={
            "role": "worker",
            "tenant": "*",
            "note": "the fleet",
            "name": "fleet-1",
            "expires_at": "2027-01-31T12:00:00+00:00",
        },
        answer=admin.KeyCreated(
            id="k1",
            key="sk_k1_s",
            role=admin.Role.WORKER,
            tenant="*",
            name="fleet-1",
            note="the fleet",
            created_at=AT,
            expires_at=LATER,
        ),
        shape=admin.KeyCreated,
        says=("key      sk_k1_s", "expires  2026-11-15 19:00:07Z", "it is not shown again"),
    ),
    Case(
        args=("key", "list"),
        asks=("GET", "/v1/admin/keys"),
        query=PAGE,
        answer=admin.KeyList((KEY,)),
        shape=admin.KeyList,
        says=("k1  worker  *       fleet-1  2026-11-15 19:00:00Z  -  ", "Z  -        the fleet"),
    ),
    Case(
        args=("key", "revoke", "k1"),
        before=admin.KeyList((KEY,)),
        asks=("DELETE", "/v1/admin/keys/k1"),
        answer=KEY,
        shape=admin.KeyRow,
        says=("key k1 is revoked",),
    ),
    Case(
        args=("dead-letter", "list"),
        asks=("GET", "/v1/admin/dead-letters"),
        query=PAGE,
        answer=admin.DeadLetterList(
            (
                admin.DeadLetterRow(
                    id="07-01h:search[2]@1#1",
                    kind="job",
                    tenant="acme",
                    run_id="07-01h",
                    step_id="search",
                    cause="handed out five times",
                    at=AT,
                ),
            )
        ),
        shape=admin.DeadLetterList,
        says=(
            "07-01h:search[2]@1#1  job   2026-11-15 19:00:00Z  acme    07-01h  search  handed out",
        ),
    ),
    Case(
        args=("dead-letter", "replay", "07-01h:search[2]@1#1"),
        asks=("POST", "/v1/admin/dead-letters/07-01h:search[2]@1#1/replay"),
        answer=admin.ReplayAnswer("07-01h:search[2]@1#1", "07-01h", replayed=True),
        shape=admin.ReplayAnswer,
        says=("07-01h:search[2]@1#1 is replayed (run 07-01h)",),
    ),
    Case(
        args=("dead-letter", "discard", "07-01h:search[2]@1#1"),
        asks=("POST", "/v1/admin/dead-letters/07-01h:search[2]@1#1/discard"),
        answer=admin.DiscardAnswer("07-01h:search[2]@1#1", "07-01h", discarded=True),
        shape=admin.DiscardAnswer,
        says=("07-01h:search[2]@1#1 is discarded (run 07-01h)",),
    ),
    Case(
        args=(
            *("audit", "list", "--actor", "kim", "--action", "tenant.put"),
            *("--since", "2026-11-15T20:00:00+01:00", "--until", "2026-11-15T20:00:00Z"),
        ),
        asks=("GET", "/v1/admin/audit"),
        query={
            **PAGE,
            "actor": "kim",
            "action": "tenant.put",
            "since": "2026-11-15T19:00:00Z",
            "until": "2026-11-15T20:00:00Z",
        },
        answer=admin.AuditList((AUDIT,), "c2"),
        shape=admin.AuditList,
        says=("kim", "tenant.put", "tenant/acme", '{"max_concurrent_runs": 2}'),
    ),
    Case(
        args=(
            *("decision", "list", "--key", "order-2", "--request-id", "r-12", "--outcome", "full"),
            *("--since", "2026-11-15T19:00:00Z"),
        ),
        asks=("GET", "/v1/admin/decisions"),
        query={
            **PAGE,
            "key": "order-2",
            "request_id": "r-12",
            "outcome": "full",
            "since": "2026-11-15T19:00:00Z",
        },
        answer=admin.DecisionList(
            (
                admin.DecisionRow(
                    at=AT,
                    tenant="acme",
                    workflow_id="research",
                    outcome="full",
                    limit=2,
                    active=2,
                    retry_after_ms=3_400,
                    key="order-2",
                    request_id="r-12",
                    actor="kim",
                    replica="one",
                    left_out=7,
                    budget="tokens",
                ),
            )
        ),
        shape=admin.DecisionList,
        says=(
            "acme",
            "full",
            "tokens",
            "2/2",
            "3.4 s",
            "order-2",
            "7 refusals among these have no receipt",
        ),
    ),
    Case(
        args=("admission", "show"),
        asks=("GET", "/v1/admin/admission"),
        query={"sort": "pressure", **PAGE},
        answer=admin.AdmissionList(
            (
                admin.AdmissionRow(
                    tenant="acme",
                    limit=2,
                    active=2,
                    queued=0,
                    admitted_1m=12,
                    full_1m=998,
                    unavailable_1m=3,
                    wait_p95_ms=35,
                    retry_after_ms=3_400,
                ),
            ),
            ("two",),
        ),
        shape=admin.AdmissionList,
        says=("acme", "2/2", "998", "35 ms", "3.4 s", "servers that do not report: two"),
    ),
    Case(
        args=("escalation", "show"),
        asks=("GET", "/v1/admin/escalation"),
        answer=ESCALATION,
        shape=admin.EscalationView,
        says=(
            "level           escalated",
            "closed now      high",
            "without a lock  0.25/s over 300 s on a1b2; trips above 0.1/s",
        ),
    ),
    Case(
        args=("escalation", "set", "force_closed", "--reason", "maintenance"),
        asks=("POST", "/v1/admin/escalation"),
        body={"order": "force_closed", "reason": "maintenance"},
        answer=ESCALATION,
        shape=admin.EscalationView,
        says=("level           escalated",),
    ),
    Case(
        args=("escalation", "clear"),
        asks=("POST", "/v1/admin/escalation"),
        body={"order": "clear"},
        answer=ESCALATION,
        shape=admin.EscalationView,
        says=("level           escalated",),
    ),
)
