"""Run routes: get, wait, list, explain, cancel."""

from __future__ import annotations

from functools import partial
from typing import Any, Final, assert_never

import msgspec

from stanchion.core.model import ItemKey, Run, RunId, RunStatus, StepId, StepStatus
from stanchion.core.plan import Plan
from stanchion.gateway.problems import Refusal, RequestRefused, not_found
from stanchion.gateway.route import (
    APPROVERS,
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
from stanchion.gateway.views import (
    encoded_run,
    filter_of,
    has_small_outputs,
    item_row,
    jobs_out,
    run_row,
    run_view,
    timeline_line,
    wait_row,
    when,
    why_answer,
)
from stanchion.ports.records import BadCursor, Loaded
from stanchion.services.inbox import Conflicting, RunChange, UnknownTarget
from stanchion.services.plans import DefinitionMissing
from stanchion.wire.identifiers import Cursor, Limit, WaitS
from stanchion.wire.problems import Code
from stanchion.wire.runs import (
    CancelRun,
    Change,
    ItemList,
    ItemRow,
    RunList,
    RunSelection,
    RunView,
    TimelineAnswer,
    WaitsAnswer,
    WhyAnswer,
)

ROUTES: Final = RouteTable()


class Waiting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long to wait for the end of the run."""

    wait: WaitS = 0


class Listed(RunSelection, frozen=True, forbid_unknown_fields=True):
    """Which runs, page by page."""

    cursor: Cursor | None = None
    limit: Limit = 100


class ListedItems(Paging, frozen=True, forbid_unknown_fields=True):
    """Which items, page by page."""

    status: StepStatus | None = None


@ROUTES.add(
    "GET /v1/runs/{run_id}",
    APPROVERS,
    RouteScope.TENANT,
    RunView,
    codes=(Code.NOT_FOUND,),
    waits=lambda call: call.query.wait,
)
async def get_run(call: Call[NoBody, Waiting]) -> Reply:
    """One run; with `wait`, once it has ended or the seconds have passed."""
    body = await call.services.waiters.rendered(
        RunId(call.params["run_id"]),
        partial(_rendered, call),
        of=call.tenant,
        within_s=call.query.wait,
    )
    if body is None:
        raise RequestRefused(not_found("run"))
    return Reply(body)


async def _rendered(call: Call[NoBody, Waiting], loaded: Loaded) -> bytes:
    """The encoded answer for all callers that get this reading of the run."""
    run, out = loaded.run, jobs_out(loaded.run)
    progress = await call.services.store.progress(run.id, out) if out else {}
    plan, place = await _plan(call, run), None
    if run.status is RunStatus.QUEUED:
        place = await call.services.store.queue_place(run.id)
    view = run_view(run, plan, progress, place=place)
    return await encoded_run(view, is_small=has_small_outputs(run, plan))


async def _plan(call: Call[Any, Any], run: Run) -> Plan | None:
    try:
        return await call.services.plans.of_run(run)
    except DefinitionMissing:
        return None  # the run is shown without the steps that have not begun


@ROUTES.add("GET /v1/runs", APPROVERS, RouteScope.TENANT_OR_ALL, RunList)
async def list_runs(call: Call[NoBody, Listed]) -> Reply:
    """List runs, newest first, by status, workflow, labels and time."""
    query = call.query
    page = await call.services.store.list_runs(
        call.only, only=filter_of(query), cursor=query.cursor, limit=query.limit
    )
    return Reply(RunList(tuple(map(run_row, page.items)), page.cursor))


@ROUTES.add(
    "GET /v1/runs/{run_id}/timeline",
    APPROVERS,
    RouteScope.TENANT,
    TimelineAnswer,
    codes=(Code.NOT_FOUND,),
)
async def get_timeline(call: Call[NoBody, Paging]) -> Reply:
    """A run's history, oldest first."""
    loaded = await own_run(call)
    page = await call.services.store.timeline(
        loaded.run.id, cursor=call.query.cursor, limit=call.query.limit
    )
    entries = tuple(map(timeline_line, page.items))
    return Reply(TimelineAnswer(loaded.run.id, entries, page.cursor))


@ROUTES.add(
    "GET /v1/runs/{run_id}/why", APPROVERS, RouteScope.TENANT, WhyAnswer, codes=(Code.NOT_FOUND,)
)
async def explain_run(call: Call[NoBody, NoQuery]) -> Reply | Refusal:
    """Why a run does not go on, and what to do, the most important cause first.

    Answered also while the store or the lock store is down.
    """
    found = await call.services.explainer.explain(RunId(call.params["run_id"]), call.tenant)
    return not_found("run") if found is None else Reply(why_answer(found))


@ROUTES.add(
    "GET /v1/runs/{run_id}/steps/{step_id}/items",
    APPROVERS,
    RouteScope.TENANT,
    ItemList,
    codes=(Code.NOT_FOUND,),
)
async def list_items(call: Call[NoBody, ListedItems]) -> Reply:
    """The items of a for-each step, in the order of the list.

    A page with a filter may be short.
    """
    run, step_id = (await own_run(call)).run, StepId(call.params["step_id"])
    plan = await _plan(call, run)
    if step_id not in run.steps and (plan is None or step_id not in plan.steps):
        raise RequestRefused(not_found("step"))
    counts, query = run.step(step_id).items, call.query
    total = 0 if counts is None else counts.total
    first = _index(query.cursor)
    looked_at_max = query.limit if query.status is None else max(query.limit, _ITEMS_LOOKED_AT_MAX)
    indexes = range(first, min(total, first + looked_at_max))
    # The store is asked for a few hundred at a time, so that a large page does not hold it up.
    rows: list[ItemRow] = []
    following = first
    while following < indexes.stop and len(rows) < query.limit:
        some = range(following, min(indexes.stop, following + _ITEMS_AT_ONCE))
        found = await call.services.store.load_items(run.id, {step_id: some})
        for following in some:
            key = ItemKey(step_id, following)
            row = item_row(run, key, found[key]) if key in found else None
            if row is not None and query.status in {None, row.status}:
                rows.append(row)
                if len(rows) == query.limit:
                    break
        following += 1
    return Reply(ItemList(tuple(rows), str(following) if following < total else None))


def _index(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not cursor.isdecimal():
        raise BadCursor(cursor)
    return int(cursor)


_ITEMS_AT_ONCE: Final = 200
"""Items that are read from the store with one call."""
_ITEMS_LOOKED_AT_MAX: Final = 1_000
"""Items that one page with a filter looks at."""


@ROUTES.add("GET /v1/waits", APPROVERS, RouteScope.TENANT_OR_ALL, WaitsAnswer)
async def list_waits(call: Call[NoBody, NoQuery]) -> Reply:
    """The runs that have waited longest: for a slot, a lock, a worker or a topic limit."""
    now = call.services.clock.now()
    waits = await call.services.explainer.longest_waits(call.only)
    return Reply(WaitsAnswer(when(now), tuple(map(wait_row, waits))))


@ROUTES.add(
    "POST /v1/runs/{run_id}/cancel",
    RUNNERS,
    RouteScope.TENANT,
    Change,
    takes=Takes.JSON_OR_NOTHING,
    statuses=(200, 202),
    codes=(Code.NOT_FOUND, Code.CONFLICT),
    audits="run.cancel",
)
async def cancel_run(call: Call[CancelRun, NoQuery]) -> Reply | Refusal:
    """Cancel a run now."""
    run = call.services.inbox.remembered(RunId(call.params["run_id"]))
    if run is None or run.tenant != call.tenant:
        run = (await own_run(call)).run
    changed = await call.services.inbox.cancel(
        run.id,
        reason=call.body.reason,
        actor=call.actor,
        audit=call.audit(
            f"run/{run.id}",
            tenant=call.tenant,
            before={"status": run.status},
            after={"status": RunStatus.CANCELLED, "reason": call.body.reason},
        ),
    )
    return change_answer(changed)


def change_answer(changed: RunChange | UnknownTarget | Conflicting) -> Reply | Refusal:
    """The response to a change of a run."""
    match changed:
        case RunChange():
            value = Change(changed.run_id, changed.status, changed.applied)
            return Reply(value, status=200 if changed.applied else 202)
        case UnknownTarget():
            return Refusal(code=Code.NOT_FOUND, detail=f"there is no {changed.what}")
        case Conflicting():
            return Refusal(code=Code.CONFLICT, detail=changed.message)
        case _:
            assert_never(changed)


async def own_run(call: Call[Any, Any]) -> Loaded:
    """The run that the path names. Raises ``RequestRefused`` if the tenant has no such run."""
    loaded = await call.services.store.load(RunId(call.params["run_id"]))
    if loaded is None or loaded.run.tenant != call.tenant:
        raise RequestRefused(not_found("run"))
    return loaded
