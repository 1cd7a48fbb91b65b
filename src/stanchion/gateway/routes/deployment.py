"""Deployment routes: replicas, the workers that call them, upgrades, the audit of slots, drills.

The lists come from the summaries that the replicas report, so they are the same on every replica
and at most a few seconds old.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec

from stanchion.core.json_value import JsonObject
from stanchion.core.model import TenantId, Topic
from stanchion.core.upgrade import LEVEL, UpgradeUnfinished
from stanchion.gateway.problems import Refusal, upgrade_unfinished
from stanchion.gateway.route import (
    ADMINS,
    OPERATORS,
    Call,
    NoBody,
    NoQuery,
    Paging,
    Reply,
    RouteScope,
    RouteTable,
    Takes,
)
from stanchion.gateway.views import when, wire_view
from stanchion.services.reconciler import SlotReport
from stanchion.services.replicas import ReplicaView, SeenReplica, SeenWorker
from stanchion.services.upgrade import UpgradeState, remedy
from stanchion.wire.admin import (
    AuditSlots,
    DriftAnswer,
    DriftRow,
    DrillList,
    DrillRow,
    FinishUpgrade,
    OlderReplica,
    ReplicaList,
    ReplicaRow,
    UpgradeView,
    WorkerList,
    WorkerRow,
)
from stanchion.wire.identifiers import ALL_TENANTS
from stanchion.wire.problems import Code

ROUTES: Final = RouteTable()

_UNKNOWN: Final = "unknown"
_Row = TypeVar("_Row")


class DryRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether to change nothing."""

    dry_run: bool = False


@ROUTES.add("GET /v1/admin/drift", OPERATORS, RouteScope.DEPLOYMENT, DriftAnswer)
async def get_drift(call: Call[NoBody, NoQuery]) -> Reply:
    """The last audit of slots: counts that differed from the unfinished runs."""
    report = call.services.slots.newest(await call.services.replicas.read())
    return Reply(_drift(report))


@ROUTES.add(
    "POST /v1/admin/drift",
    OPERATORS,
    RouteScope.DEPLOYMENT,
    DriftAnswer,
    takes=Takes.JSON_OR_NOTHING,
    audits="drift.repair",
)
async def audit_drift(call: Call[AuditSlots, DryRun]) -> Reply:
    """Audit the slots of all tenants now and repair them; with `dry_run` only look."""
    # The store sets the subject and the tenant of each entry.
    entry = call.audit("", tenant=None)
    report = await call.services.slots.audit_all(repair=not call.query.dry_run, audit=entry)
    return Reply(_drift(report))


def _drift(report: SlotReport | None) -> DriftAnswer:
    if report is None:
        return DriftAnswer(at=None, checked=0, drifted=0, repaired=())
    return DriftAnswer(
        at=when(report.at),
        checked=report.checked,
        drifted=len(report.drifts) if report.drifted is None else report.drifted,
        repaired=tuple(
            DriftRow(tenant=each.tenant, counted=each.counted, true=each.actual)
            for each in report.drifts
        ),
    )


@ROUTES.add("GET /v1/admin/replicas", OPERATORS, RouteScope.DEPLOYMENT, ReplicaList)
async def list_replicas(call: Call[NoBody, Paging]) -> Reply:
    """List the replicas, with version, health and clock, by name."""
    view = await call.services.replicas.read()
    named = [(each.replica, _replica_row(each)) for each in view.replicas]
    return Reply(ReplicaList(*_page(named, call.query)))


@ROUTES.add("GET /v1/admin/workers", OPERATORS, RouteScope.ONE_OR_ALL, WorkerList)
async def list_workers(call: Call[NoBody, Paging]) -> Reply:
    """List the workers that called in the last ten minutes, by tenant and name."""
    seen = _merged(await call.services.replicas.read())
    # Workers for all tenants serve the one that was named, but are shown to keys for all only.
    shown = {call.only, None} if call.is_for_all else {call.only}
    named = [
        (f"{worker.tenant or ALL_TENANTS} {worker.worker_id}", _worker_row(worker))
        for worker in seen
        if call.only is None or worker.tenant in shown
    ]
    return Reply(WorkerList(*_page(sorted(named, key=lambda each: each[0]), call.query)))


@ROUTES.add("GET /v1/admin/upgrade", OPERATORS, RouteScope.DEPLOYMENT, UpgradeView)
async def get_upgrade(call: Call[NoBody, NoQuery]) -> Reply:
    """Whether every process has this version, and what to do until then."""
    return Reply(_upgrade_view(await call.services.upgrades.state()))


@ROUTES.add(
    "POST /v1/admin/upgrade",
    ADMINS,
    RouteScope.DEPLOYMENT,
    UpgradeView,
    takes=Takes.JSON_OR_NOTHING,
    audits="upgrade.finish",
    codes=(Code.UPGRADE_UNFINISHED,),
)
async def finish_upgrade(call: Call[FinishUpgrade, NoQuery]) -> Reply | Refusal:
    """Declare that no older process is left: older versions cannot open the store."""
    before = await call.services.upgrades.state()
    entry = call.audit(
        "upgrade", tenant=None, before={"level": before.level}, after={"level": LEVEL}
    )
    state = await call.services.upgrades.finish(audit=entry)
    if isinstance(state.verdict, UpgradeUnfinished):
        return upgrade_unfinished("the new version", state.verdict)
    return Reply(_upgrade_view(state))


def _upgrade_view(state: UpgradeState) -> UpgradeView:
    verdict = state.verdict
    older = verdict.older if isinstance(verdict, UpgradeUnfinished) else ()
    return UpgradeView(
        finished=not isinstance(verdict, UpgradeUnfinished),
        level=state.level,
        newest_level=LEVEL,
        older=tuple(
            OlderReplica(
                replica=each.replica, version=each.version or _UNKNOWN, seen_at=when(each.seen_at)
            )
            for each in older
        ),
        remedy=remedy(verdict) if isinstance(verdict, UpgradeUnfinished) else None,
    )


def _page(named: Sequence[tuple[str, _Row]], query: Paging) -> tuple[tuple[_Row, ...], str | None]:
    """The rows after the cursor, which is the name of the last row before them."""
    rest = [each for each in named if query.cursor is None or each[0] > query.cursor]
    page = rest[: query.limit]
    return tuple(row for _, row in page), page[-1][0] if len(rest) > len(page) else None


def _merged(view: ReplicaView) -> Iterable[SeenWorker]:
    """Each worker once, as the replica knows it that it called last, with all its topics."""
    newest: dict[tuple[TenantId | None, str], SeenWorker] = {}
    topics: dict[tuple[TenantId | None, str], set[Topic]] = {}
    for replica in view.replicas:
        for worker in replica.summary.workers:
            place = (worker.tenant, worker.worker_id)
            known = newest.get(place)
            if known is None or known.last_seen_at < worker.last_seen_at:
                newest[place] = worker
            topics.setdefault(place, set()).update(worker.topics)
    return [
        msgspec.structs.replace(worker, topics=tuple(sorted(topics[place])))
        for place, worker in newest.items()
    ]


def _replica_row(seen: SeenReplica) -> ReplicaRow:
    summary = seen.summary
    return ReplicaRow(
        replica=seen.replica,
        version=summary.version or _UNKNOWN,
        started_at=when(summary.started_at),
        seen_at=when(seen.seen_at),
        clock_offset_ms=summary.clock_offset_ms,
        settings_revision=summary.settings_revision,
        store=_UNKNOWN if seen.is_missing else summary.store,
        locks=_UNKNOWN if seen.is_missing else summary.locks,
        bus=_UNKNOWN if seen.is_missing else summary.bus,
        runs_held=summary.runs_held,
    )


_worker_row = wire_view(SeenWorker, WorkerRow, tenant=lambda worker: worker.tenant or ALL_TENANTS)


_Document = TypeVar("_Document")
_REPORTS_MAX: Final = 50
_REPORT_BYTES_MAX: Final = 1024 * 1024


class OneDrill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The drill whose report is returned, with its charts."""

    drill: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] | None = None


@ROUTES.add("GET /v1/admin/drills", OPERATORS, RouteScope.DEPLOYMENT, DrillList)
async def list_drills(call: Call[NoBody, OneDrill]) -> Reply:
    """The reports of drills in this server's directory, newest first."""
    directory = call.state.options.drill_reports
    if directory is None:
        return Reply(DrillList((), ""))
    found = await asyncio.to_thread(_reports, Path(directory), call.query.drill)
    return Reply(DrillList(found, directory))


def _reports(directory: Path, only: str | None) -> tuple[DrillRow, ...]:
    """The reports that can be read. A file that is no report is left out."""
    rows = []
    for path in sorted(directory.glob("*/report.json"))[:_REPORTS_MAX]:
        row = _read(path, DrillRow)
        if row is not None and only in {None, row.drill}:
            charts = None
            if only is not None:
                charts = _read(path.with_name("charts.json"), tuple[JsonObject, ...])
            rows.append(msgspec.structs.replace(row, charts=charts or ()))
    return tuple(sorted(rows, key=lambda row: row.started_at, reverse=True))


def _read(path: Path, kind: type[_Document]) -> _Document | None:
    with suppress(OSError, UnicodeDecodeError, RecursionError, msgspec.MsgspecError):
        if path.stat().st_size <= _REPORT_BYTES_MAX:
            return msgspec.json.decode(path.read_bytes(), type=kind)
    return None
