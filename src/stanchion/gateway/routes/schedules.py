"""Schedule routes: runs that start by the clock."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import msgspec

from stanchion.core.limits import INPUT_BYTES_MAX
from stanchion.core.model import RunId, TenantId, WorkflowId
from stanchion.core.schedule import RUNS_MAX, DueTicks, Schedule, ScheduleSpec, waiting_tick
from stanchion.gateway.body import check_value, checked_labels
from stanchion.gateway.problems import Refusal, invalid, not_found
from stanchion.gateway.route import (
    RUNNERS,
    Call,
    NoBody,
    NoQuery,
    Paging,
    Reply,
    RouteScope,
    RouteTable,
    Takes,
)
from stanchion.gateway.routes.starts import START_CODES, start_answer
from stanchion.gateway.views import when, wire_view
from stanchion.ports.errors import BackendError
from stanchion.services.gate_answers import RunStarted
from stanchion.services.schedules import ScheduleConflict, TooManySchedules
from stanchion.wire.problems import Code
from stanchion.wire.runs import QueuedAnswer, StartAnswer
from stanchion.wire.schedules import (
    DueTicksView,
    MissedTickRow,
    PutSchedule,
    ScheduleList,
    ScheduleRunRow,
    ScheduleView,
    TriggerSchedule,
)

ROUTES: Final = RouteTable()

_NEXT: Final = 5


@ROUTES.add(
    "PUT /v1/schedules/{schedule_id}",
    RUNNERS,
    RouteScope.TENANT,
    ScheduleView,
    codes=(Code.CONFLICT,),
    audits="schedule.put",
)
async def put_schedule(call: Call[PutSchedule, NoQuery]) -> Reply | Refusal:
    """Store a schedule: runs of a workflow by a cron expression or at a fixed interval.

    Its next tick comes after now.
    """
    body, schedule_id = call.body, call.params["schedule_id"]
    check_value(call, "input", body.input, bytes_max=INPUT_BYTES_MAX)
    spec = ScheduleSpec(
        workflow_id=WorkflowId(body.workflow_id),
        cron=body.cron,
        every_s=body.every_s,
        timezone=body.timezone,
        input=body.input,
        labels=checked_labels(body.labels),
        overlap=body.overlap,
        catch_up=body.catch_up,
        jitter_s=body.jitter_s,
        paused=body.paused,
    )
    faults = await call.services.schedules.faults(call.tenant, spec)
    if faults:
        return invalid(faults, str(faults[0]))
    entry = call.audit(f"schedule/{schedule_id}", tenant=call.tenant)
    try:
        stored = await call.services.schedules.put(call.tenant, schedule_id, spec, entry)
    except ScheduleConflict:
        return Refusal(code=Code.CONFLICT, detail="the schedule is being changed by others")
    except TooManySchedules as error:
        return Refusal(code=Code.CONFLICT, detail=str(error))
    return Reply(await _one(call, schedule_id, stored))


@ROUTES.add(
    "GET /v1/schedules/{schedule_id}",
    RUNNERS,
    RouteScope.TENANT,
    ScheduleView,
    codes=(Code.NOT_FOUND,),
)
async def get_schedule(call: Call[NoBody, NoQuery]) -> Reply | Refusal:
    """One schedule, with its next ticks, last runs and their statuses, and missed ticks."""
    schedule_id = call.params["schedule_id"]
    stored = await call.services.schedules.get(call.tenant, schedule_id)
    if stored is None:
        return not_found("schedule")
    return Reply(await _one(call, schedule_id, stored))


@ROUTES.add(
    "DELETE /v1/schedules/{schedule_id}",
    RUNNERS,
    RouteScope.TENANT,
    ScheduleView,
    codes=(Code.NOT_FOUND,),
    audits="schedule.delete",
)
async def delete_schedule(call: Call[NoBody, NoQuery]) -> Reply | Refusal:
    """Delete a schedule. Its runs go on."""
    schedule_id = call.params["schedule_id"]
    stored = await call.services.schedules.get(call.tenant, schedule_id)
    entry = call.audit(f"schedule/{schedule_id}", tenant=call.tenant)
    if stored is None or not await call.services.schedules.delete(call.tenant, schedule_id, entry):
        return not_found("schedule")
    return Reply(await _one(call, schedule_id, stored))


@ROUTES.add(
    "GET /v1/schedules",
    RUNNERS,
    RouteScope.TENANT_OR_ALL,
    ScheduleList,
    is_heavy=lambda _call: True,
)
async def list_schedules(call: Call[NoBody, Paging]) -> Reply:
    """List schedules, by tenant and id."""
    cursor, limit = call.query.cursor, call.query.limit
    after: tuple[TenantId, str] | None = None
    if cursor is not None:
        # Names are compared in the order of the list: "a/x" comes before "a-b/x".
        tenant, _, schedule_id = cursor.partition("/")
        after = TenantId(tenant), schedule_id
    rows = await call.services.schedules.list(call.only, after=after, limit=limit + 1)
    page = rows[:limit]
    # The next ticks of one schedule take up to six milliseconds to find.
    work = call.state.work
    views = await work.done_each(call.tenant, lambda row: _view(call, *row[0], row[1]), page)
    return Reply(
        ScheduleList(tuple(views), "/".join(page[-1][0]) if len(rows) > len(page) else None)
    )


@ROUTES.add(
    "POST /v1/schedules/{schedule_id}/trigger",
    RUNNERS,
    RouteScope.TENANT,
    StartAnswer,
    takes=Takes.JSON_OR_NOTHING,
    queued_answer=QueuedAnswer,
    codes=START_CODES,
    takes_key=True,
    admits=True,
)
async def trigger_schedule(call: Call[TriggerSchedule, NoQuery]) -> Reply | Refusal:
    """Start a run of a schedule now, beside its ticks."""
    schedule_id = call.params["schedule_id"]
    stored = await call.services.schedules.get(call.tenant, schedule_id)
    if stored is None:
        return not_found("schedule")
    answer = await call.services.gate.start(
        call.tenant,
        stored.spec.workflow_id,
        stored.spec.input,
        labels=stored.spec.labels,
        key=call.idempotency_key,
        actor=call.actor,
        traceparent=call.traceparent,
    )
    if isinstance(answer, RunStarted):
        # The run is started: that it cannot be listed must not be answered as a failure.
        with suppress(BackendError):
            await call.services.schedules.list_triggered(call.tenant, schedule_id, answer.run_id)
    told = start_answer(answer)
    if isinstance(told, Refusal):
        return msgspec.structs.replace(told, workflow_id=stored.spec.workflow_id)
    return told


async def _one(call: Call[Any, Any], schedule_id: str, stored: Schedule) -> ScheduleView:
    """A schedule with the statuses of its runs."""
    with call.state.work.measured(call.tenant):
        due = call.services.schedules.due((call.tenant, schedule_id), stored)
        view = _view(call, call.tenant, schedule_id, stored, due)
    rows = []
    for row in view.runs:  # one after the other: the outputs of all of them may be large
        loaded = await call.services.store.load(RunId(row.run_id))
        status = None if loaded is None else loaded.run.status
        rows.append(msgspec.structs.replace(row, status=status))
    return msgspec.structs.replace(view, runs=tuple(rows))


def _view(
    call: Call[Any, Any],
    tenant: TenantId,
    schedule_id: str,
    stored: Schedule,
    due: DueTicks | None = None,
) -> ScheduleView:
    following = call.services.schedules.next_starts((tenant, schedule_id), stored, _NEXT)
    waiting = waiting_tick(stored)
    return _shown(
        stored.spec,
        id=schedule_id,
        tenant=tenant,
        generation=stored.generation,
        next=tuple(map(when, following)),
        waiting=None if waiting is None else MissedTickRow(when(waiting.tick), waiting.reason),
        due=None if due is None else DueTicksView(due.count, when(due.oldest)),
        runs=_runs(stored),
        missed=tuple(MissedTickRow(when(each.tick), each.reason) for each in stored.missed),
        missed_total=stored.missed_total,
    )


def _runs(stored: Schedule) -> tuple[ScheduleRunRow, ...]:
    rows = [ScheduleRunRow(when(each.tick), each.run_id) for each in stored.runs]
    rows += [
        ScheduleRunRow(when(each.at), each.run_id, triggered=True) for each in stored.triggered
    ]
    return tuple(sorted(rows, key=lambda row: row.tick, reverse=True)[:RUNS_MAX])


_shown = wire_view(
    ScheduleSpec,
    ScheduleView,
    *("id", "tenant", "generation", "next", "waiting", "due", "runs", "missed", "missed_total"),
)
