"""Calls: every call of the API, written once for both clients.

Each returns a generator of the engine's commands; ``client`` and ``async_client`` execute it. Calls
that start a run carry an idempotency key, a random one if none is given: a retry after a lost
answer starts no second run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from stanchion.client.engine import ApiCall, CallEngine, Emit, Feed, Op, Sleep
from stanchion.client.errors import CallFacts, CallFailed, WaitTimeout
from stanchion.client.requests import (
    JSON,
    any_json,
    decoder_of,
    encoded,
    get_call,
    key_or_random,
    post_request,
    query_of,
    quoted_segment,
    request_to,
    run_path,
    with_body,
    with_key,
)
from stanchion.core.bulk import BulkAction
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.model import Instant, RunStatus, StepStatus
from stanchion.core.queue import OnFull
from stanchion.core.rerun import RerunOnly, RerunVersion
from stanchion.core.retry import BoundedJitter, backoff_ms
from stanchion.transport.messages import HttpReply
from stanchion.wire.admin import LimitList, LimitView
from stanchion.wire.runs import (
    ApplyAnswer,
    ApprovalList,
    ApprovalRow,
    BatchAnswer,
    BatchResult,
    BulkList,
    BulkPreview,
    BulkView,
    Change,
    ItemList,
    ItemRow,
    JobAnswer,
    RerunPlan,
    RunList,
    RunRow,
    RunView,
    SubmitAnswer,
    TimelineAnswer,
    WhyAnswer,
    WorkflowList,
    WorkflowUseList,
    WorkflowView,
)

WAIT_SLICE_S: Final = 25.0
"""How long one request of a wait is held open: shorter than the time-outs of proxies."""
_GRACE_S: Final = 5.0
"""How much later than requested the end of a slice may come."""
_LOOK_AGAIN: Final = BoundedJitter(delay_ms=500, jitter_ms=250)
"""The pause between requests to a server that answers without waiting, as while it drains."""
_YAML: Final = "application/yaml"
_ID_LINE: Final = re.compile(r"""(?m)^id:[ \t]+(["']?)([A-Za-z0-9._-]+)\1[ \t]*(?:#.*)?\r?$""")


class StartedRun(msgspec.Struct, frozen=True):
    """The run that was started, or that the same key started before."""

    run_id: str
    status: RunStatus
    is_replay: bool = False
    """The key was known: this run was started by an earlier call."""
    position: int | None = None
    """Its place in the queue, if its tenant is full and queues; 1 is the next one."""
    estimate_s: float | None = None
    """How long it will probably wait there, if the server can tell."""


# ── Runs ─────────────────────────────────────────────────────────────────────────────────────────


def start(  # noqa: PLR0913 - what a start may carry, by keyword
    engine: CallEngine,
    workflow_id: str,
    input: Mapping[str, Any] | None = None,  # noqa: A002 - what it is called on the wire
    *,
    labels: Mapping[str, str] | None = None,
    idempotency_key: str | None = None,
    priority: int | None = None,
    fairness_key: str | None = None,
    on_full: OnFull | str | None = None,
    wait: bool = False,
) -> Op[StartedRun]:
    """Start a run of the newest version of a workflow, with any mapping that is a JSON object.

    ``labels`` mark the run, so that ``list`` finds it by them. Pass a key of your own (an order's
    number) if another process may send the same start, or after this process has died. Without
    one, the call makes its own.

    If the tenant is full and queues, the run waits for a slot: those with a higher ``priority``
    (0 to 9, 5 if none is given) first, and of one priority the ``fairness_key``s in turn. With
    ``on_full="reject"`` this start does not wait. With ``wait=True`` the call returns when the run
    has left the queue: it has a slot then, or has ended as ``timed_out``.
    """
    path = f"/v1/workflows/{quoted_segment(workflow_id, 'workflow_id')}/runs"
    body: JsonObject = {"input": {} if input is None else dict(input)}
    if labels:
        body["labels"] = dict(labels)
    wishes = {"priority": priority, "fairness_key": fairness_key, "on_full": on_full}
    body |= {name: wish for name, wish in wishes.items() if wish is not None}
    sent = post_request(engine, "start", path, body)
    key = key_or_random(idempotency_key)
    begun = yield from engine.ask(ApiCall(with_key(sent, key), _started))
    while wait and begun.status is RunStatus.QUEUED:
        yield Sleep(backoff_ms(_LOOK_AGAIN, 1, engine.pace.sample()))
        try:
            run = yield from engine.ask(get_call(engine, "start", run_path(begun.run_id), RunView))
        except CallFailed as failed:
            # The start itself was accepted: without its key the caller would start a second run.
            facts = replace(failed.facts, may_have_run=True, idempotency_key=key)
            message = f"{failed.message}; run {begun.run_id} was queued before"
            raise type(failed)(message, facts) from failed
        begun = replace(begun, status=run.status, position=run.position, estimate_s=None)
    return begun


def start_many(
    engine: CallEngine,
    workflow_id: str,
    runs: Iterable[Mapping[str, Any]],
    *,
    idempotency_key: str | None = None,
) -> Op[list[BatchResult]]:
    """Start many runs of a workflow. Each is a mapping with ``input``, ``labels`` and ``key``.

    Every run is judged by itself, in the order given, and has a result at the same place: a
    ``run_id``, or a ``problem`` that says why it was not started. A run without a key gets
    ``idempotency_key``, a slash and its place as its key, so that the whole call can be repeated.
    """
    path = f"/v1/workflows/{quoted_segment(workflow_id, 'workflow_id')}/runs/batch"
    shared = key_or_random(idempotency_key)
    rows = [
        {**row, "key": f"{shared}/{place}" if row.get("key") is None else row["key"]}
        for place, row in enumerate(runs)
    ]
    results: list[BatchResult] = []
    while len(results) < len(rows):
        some = _portion(rows[len(results) : len(results) + _BATCH_MAX])
        sent = with_key(post_request(engine, "start_many", path, {"runs": some}), shared)
        answer = yield from engine.ask(ApiCall(sent, decoder_of(BatchAnswer)))
        results += answer.results
    return results


def _portion(rows: list[JsonObject]) -> list[JsonValue]:
    """The first rows, as many as one request may carry."""
    size, some = 0, list[JsonValue]()
    for row in rows:
        size += len(encoded(row)) + 1
        if some and size > _BATCH_BYTES_MAX:
            break
        some.append(row)
    return some


_BATCH_MAX: Final = 1_000
_BATCH_BYTES_MAX: Final = 1_000_000


def get(engine: CallEngine, run_id: str) -> Op[RunView]:
    """A run as it is now."""
    return engine.ask(get_call(engine, "get", run_path(run_id), RunView))


def wait(engine: CallEngine, run_id: str, *, timeout_s: float | None = None) -> Op[RunView]:
    """Wait until a run has ended, and return it; its ``status`` says how it ended.

    After ``timeout_s`` raises ``WaitTimeout``, which has the run as it was seen last. Without a
    time, waits as long as the run takes.
    """
    now = engine.pace.now
    until = None
    if timeout_s is not None and timeout_s != math.inf:
        until = Instant(now() + max(0, round(timeout_s * 1000)))
    while True:
        left_s = WAIT_SLICE_S if until is None else max(0.0, (until - now()) / 1000)
        slice_s = min(WAIT_SLICE_S, left_s)
        sent = request_to(engine, "wait", "GET", f"{run_path(run_id)}?wait={slice_s:.3f}")
        sent = replace(sent, timeout_s=slice_s + _GRACE_S)
        asked_at = now()
        run = yield from engine.ask(ApiCall(sent, decoder_of(RunView)), until=until)
        if run.status.is_finished:
            return run
        if until is not None and now() >= until:
            message = f"wait: run {run_id} is still {run.status} after {timeout_s} s"
            raise WaitTimeout(message, CallFacts(call="wait"), run)
        early_ms = round(slice_s * 1000) - (now() - asked_at)
        if early_ms > 0:
            yield Sleep(min(early_ms, backoff_ms(_LOOK_AGAIN, 1, engine.pace.sample())))


def list_runs(  # noqa: PLR0913 - one for each filter
    engine: CallEngine,
    *,
    workflow_id: str | None = None,
    status: RunStatus | str | Sequence[RunStatus | str] | None = None,
    labels: Mapping[str, str] | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    rerun_of: str | None = None,
    limit: int = 100,
    cursor: str | None = None,
) -> Op[RunList]:
    """One page of the tenant's runs, newest first. Pass its ``cursor`` to get the next one.

    Runs fit all that is given: one of the statuses, every label, created from ``since`` on and
    before ``until``. Without a ``cursor`` in the answer the page is the last, however short.
    """
    chosen = _selection(workflow_id, status, labels, since, until, rerun_of)
    query = {**chosen, "limit": limit, "cursor": cursor}
    return engine.ask(get_call(engine, "list", "/v1/runs" + query_of(query), RunList))


def _selection(
    workflow_id: str | None,
    status: RunStatus | str | Sequence[RunStatus | str] | None,
    labels: Mapping[str, str] | None,
    since: datetime | None,
    until: datetime | None,
    rerun_of: str | None,
) -> dict[str, str | int | Sequence[str] | None]:
    """The filters, as the query of a list or the ``filter`` of a bulk action names them."""
    return {
        "workflow_id": workflow_id,
        "status": (status,) if isinstance(status, str) else tuple(status or ()),
        "label": tuple(f"{name}:{value}" for name, value in (labels or {}).items()),
        "since": _time(since),
        "until": _time(until),
        "rerun_of": rerun_of,
    }


def _time(given: datetime | None) -> str | None:
    if given is None:
        return None
    if given.tzinfo is None:
        raise ValueError("since and until need a time zone: datetime.now(UTC)")
    return given.isoformat()


def runs(
    engine: CallEngine,
    *,
    workflow_id: str | None = None,
    status: RunStatus | str | Sequence[RunStatus | str] | None = None,
    labels: Mapping[str, str] | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    rerun_of: str | None = None,
) -> Feed[RunRow]:
    """All of the tenant's runs that fit, newest first, page after page as they are needed."""
    chosen = _selection(workflow_id, status, labels, since, until, rerun_of)
    query = {**chosen, "limit": 100}
    return _rows(engine, "list", "/v1/runs", query, RunList, lambda page: page.runs)


class _Page(Protocol):
    """A page of a list."""

    @property
    def cursor(self) -> str | None: ...


_PageT = TypeVar("_PageT", bound=_Page)
_Row = TypeVar("_Row")


def _rows(
    engine: CallEngine,
    name: str,
    path: str,
    query: Mapping[str, str | int | Sequence[str] | None],
    kind: type[_PageT],
    rows: Callable[[_PageT], Iterable[_Row]],
) -> Feed[_Row]:
    """The rows of a list, page after page."""
    cursor = None
    while True:
        asked = path + query_of({**query, "cursor": cursor})
        page = yield from engine.ask(get_call(engine, name, asked, kind))
        for row in rows(page):
            yield Emit(row)
        cursor = page.cursor
        if cursor is None:
            return


def timeline(
    engine: CallEngine, run_id: str, *, limit: int = 1000, cursor: str | None = None
) -> Op[TimelineAnswer]:
    """One page of a run's history, oldest first."""
    path = f"{run_path(run_id)}/timeline" + query_of({"limit": limit, "cursor": cursor})
    return engine.ask(get_call(engine, "timeline", path, TimelineAnswer))


def why(engine: CallEngine, run_id: str) -> Op[WhyAnswer]:
    """Why a run does not go on, and what to do, the most important cause first."""
    path = f"{run_path(run_id)}/why"
    return engine.ask(get_call(engine, "why", path, WhyAnswer))


def cancel(engine: CallEngine, run_id: str, *, reason: str | None = None) -> Op[Change]:
    """Cancel a run now. ``applied`` is false if the run is busy: then it is cancelled later."""
    # Repeatable without a key: cancelling twice has the effect of once.
    sent = post_request(engine, "cancel", f"{run_path(run_id)}/cancel", {"reason": reason})
    return engine.ask(ApiCall(replace(sent, is_repeatable=True), decoder_of(Change)))


def rerun(
    engine: CallEngine,
    run_id: str,
    *,
    from_step: str | None = None,
    version: RerunVersion | str | None = None,
    input: Mapping[str, Any] | None = None,  # noqa: A002 - as the API calls it
    only: RerunOnly | str | None = None,
    idempotency_key: str | None = None,
) -> Op[StartedRun]:
    """Start a new run from a finished one: all of it, from a step on, or only failed items.

    ``version="newest"`` takes the newest versions, ``input`` replaces the input; neither goes with
    ``from_step`` or ``only="failed_items"``, which keep results.
    """
    body = _rerun_body(from_step, version, input, only)
    sent = post_request(engine, "rerun", f"{run_path(run_id)}/rerun", body)
    return engine.ask(ApiCall(with_key(sent, key_or_random(idempotency_key)), _started))


def plan_rerun(
    engine: CallEngine,
    run_id: str,
    *,
    from_step: str | None = None,
    version: RerunVersion | str | None = None,
    input: Mapping[str, Any] | None = None,  # noqa: A002 - as the API calls it
    only: RerunOnly | str | None = None,
) -> Op[RerunPlan]:
    """What the same ``rerun`` would reuse and what it would run again. Nothing is started."""
    body = {**_rerun_body(from_step, version, input, only), "dry_run": True}
    sent = post_request(engine, "plan_rerun", f"{run_path(run_id)}/rerun", body)
    return engine.ask(ApiCall(replace(sent, is_repeatable=True), decoder_of(RerunPlan)))


def _rerun_body(
    from_step: str | None,
    version: RerunVersion | str | None,
    given: Mapping[str, Any] | None,
    only: RerunOnly | str | None,
) -> JsonObject:
    """Only members that are given, so that a server without the others accepts the rest."""
    body: JsonObject = {"from_step": from_step}
    if version is not None:
        body["version"] = str(version)
    if given is not None:
        body["input"] = dict(given)
    if only is not None:
        body["only"] = str(only)
    return body


def items(
    engine: CallEngine, run_id: str, step_id: str, *, status: StepStatus | str | None = None
) -> Feed[ItemRow]:
    """The items of a for-each step in the order of its list, page after page as they are needed."""
    path = f"{run_path(run_id)}/steps/{quoted_segment(step_id, 'step_id')}/items"
    query = {"status": status, "limit": 1000}
    return _rows(engine, "items", path, query, ItemList, lambda page: page.items)


def approvals(engine: CallEngine) -> Feed[ApprovalRow]:
    """The approvals that wait for a decision, oldest first, page after page."""
    path, query = "/v1/approvals", {"limit": 100}
    return _rows(engine, "approvals", path, query, ApprovalList, lambda page: page.approvals)


def approve(
    engine: CallEngine,
    run_id: str,
    step_id: str,
    *,
    comment: str | None = None,
    data: Any = None,  # noqa: ANN401 - any JSON value
) -> Op[Change]:
    """Approve a step that waits for a decision. Raises ``Conflict`` if it was rejected before."""
    return _decide(engine, "approve", run_id, step_id, comment, data)


def reject(
    engine: CallEngine,
    run_id: str,
    step_id: str,
    *,
    comment: str | None = None,
    data: Any = None,  # noqa: ANN401 - any JSON value
) -> Op[Change]:
    """Reject a step that waits for a decision. Raises ``Conflict`` if it was approved before."""
    return _decide(engine, "reject", run_id, step_id, comment, data)


def _decide(
    engine: CallEngine,
    verb: str,
    run_id: str,
    step_id: str,
    comment: str | None,
    data: Any,  # noqa: ANN401 - any JSON value
) -> Op[Change]:
    path = f"{run_path(run_id)}/steps/{quoted_segment(step_id, 'step_id')}/{verb}"
    # Repeatable without a key: the same decision a second time changes nothing.
    body: JsonObject = {"comment": comment}
    if data is not None:
        body["data"] = data
    sent = post_request(engine, verb, path, body)
    return engine.ask(ApiCall(replace(sent, is_repeatable=True), decoder_of(Change)))


# ── Bulk actions ─────────────────────────────────────────────────────────────────────────────────


def start_bulk(  # noqa: PLR0913 - one for each filter
    engine: CallEngine,
    action: BulkAction | str,
    *,
    workflow_id: str | None = None,
    status: RunStatus | str | Sequence[RunStatus | str] | None = None,
    labels: Mapping[str, str] | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    rerun_of: str | None = None,
    rate_per_s: float = 50,
    idempotency_key: str | None = None,
) -> Op[BulkView]:
    """Cancel, rerun, replay, discard, approve or reject all runs that fit and exist now.

    The server goes on by itself: ``get_bulk`` shows the progress. Without any filter it is about
    every run of the tenant.
    """
    chosen = _selection(workflow_id, status, labels, since, until, rerun_of)
    body: JsonObject = {"action": action, "filter": _given(chosen), "rate_per_s": rate_per_s}
    sent = with_key(
        post_request(engine, "start_bulk", "/v1/bulk", body), key_or_random(idempotency_key)
    )
    return engine.ask(ApiCall(sent, decoder_of(BulkView)))


def plan_bulk(  # noqa: PLR0913 - one for each filter
    engine: CallEngine,
    action: BulkAction | str,
    *,
    workflow_id: str | None = None,
    status: RunStatus | str | Sequence[RunStatus | str] | None = None,
    labels: Mapping[str, str] | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    rerun_of: str | None = None,
) -> Op[BulkPreview]:
    """How many runs of each tenant ``start_bulk`` would act on. Changes nothing."""
    chosen = _selection(workflow_id, status, labels, since, until, rerun_of)
    body: JsonObject = {"action": action, "filter": _given(chosen), "dry_run": True}
    sent = replace(post_request(engine, "plan_bulk", "/v1/bulk", body), is_repeatable=True)
    return engine.ask(ApiCall(sent, decoder_of(BulkPreview)))


def _given(chosen: Mapping[str, Any]) -> JsonObject:
    return {name: value for name, value in chosen.items() if value is not None and value != ()}


def get_bulk(engine: CallEngine, bulk_id: str) -> Op[BulkView]:
    """A bulk action and its progress."""
    return engine.ask(get_call(engine, "get_bulk", _bulk_path(bulk_id), BulkView))


def stop_bulk(engine: CallEngine, bulk_id: str) -> Op[BulkView]:
    """Stop a bulk action: no further run is acted on. Stopping it twice changes nothing."""
    sent = request_to(engine, "stop_bulk", "DELETE", _bulk_path(bulk_id))
    return engine.ask(ApiCall(replace(sent, is_repeatable=True), decoder_of(BulkView)))


def bulks(engine: CallEngine) -> Feed[BulkView]:
    """All bulk actions, newest first."""
    return _rows(engine, "bulks", "/v1/bulk", {}, BulkList, lambda page: page.bulks)


def _bulk_path(bulk_id: str) -> str:
    return f"/v1/bulk/{quoted_segment(bulk_id, 'bulk_id')}"


# ── Topic limits ─────────────────────────────────────────────────────────────────────────────────


def set_limit(
    engine: CallEngine,
    limit_id: str,
    topics: Sequence[str],
    *,
    per: str | None = None,
    max_running: int | None = None,
    rate_per_s: float | None = None,
) -> Op[LimitView]:
    """Store a topic limit, or replace it: ``max_running``, ``rate_per_s``, or both."""
    given = {"per": per, "max_running": max_running, "rate_per_s": rate_per_s}
    body = encoded({"topics": [*topics], **_given(given)})
    sent = with_body(request_to(engine, "set_limit", "PUT", _limit_path(limit_id)), body)
    return engine.ask(ApiCall(sent, decoder_of(LimitView)))


def get_limit(engine: CallEngine, limit_id: str) -> Op[LimitView]:
    """A topic limit, and how much of it is in use."""
    return engine.ask(get_call(engine, "get_limit", _limit_path(limit_id), LimitView))


def delete_limit(engine: CallEngine, limit_id: str) -> Op[LimitView]:
    """Delete a topic limit: jobs that it held back can be leased at once."""
    sent = request_to(engine, "delete_limit", "DELETE", _limit_path(limit_id))
    return engine.ask(ApiCall(sent, decoder_of(LimitView)))


def limits(engine: CallEngine) -> Feed[LimitView]:
    """All topic limits, by id."""
    return _rows(engine, "limits", "/v1/admin/limits", {}, LimitList, lambda page: page.limits)


def _limit_path(limit_id: str) -> str:
    return f"/v1/admin/limits/{quoted_segment(limit_id, 'limit_id')}"


# ── Jobs without a workflow ──────────────────────────────────────────────────────────────────────


def submit_job(
    engine: CallEngine,
    topic: str,
    input: Any = msgspec.UNSET,  # noqa: A002, ANN401 - as on the wire; any JSON value
    *,
    idempotency_key: str | None = None,
) -> Op[SubmitAnswer]:
    """Submit one job without a workflow. It is a run of one step: wait for its ``run_id``."""
    body: JsonObject = {"topic": topic, "input": {} if input is msgspec.UNSET else input}
    sent = with_key(
        post_request(engine, "submit_job", "/v1/jobs", body), key_or_random(idempotency_key)
    )
    return engine.ask(ApiCall(sent, decoder_of(SubmitAnswer)))


def get_job(engine: CallEngine, job_id: str) -> Op[JobAnswer]:
    """A job as it is now, of a workflow's step or submitted without a workflow."""
    path = f"/v1/jobs/{quoted_segment(job_id, 'job_id')}"
    return engine.ask(get_call(engine, "job", path, JobAnswer))


# ── Workflows ────────────────────────────────────────────────────────────────────────────────────


def apply_workflow(
    engine: CallEngine,
    definition: str | JsonObject,
    *,
    workflow_id: str | None = None,
    shared: bool = False,
) -> Op[ApplyAnswer]:
    """Store a workflow or its next version: the text of a workflow file, or its parsed content.

    ``shared``: for every tenant without an own workflow of that id; needs an admin key for ``*``.
    """
    if isinstance(definition, str):
        body, (media, named) = definition.encode(), _media_and_id(definition)
    else:
        body, media, named = encoded(definition), JSON, str(definition.get("id") or "")
    name = named if workflow_id is None else workflow_id
    if not name:
        raise ValueError("the definition has no id: give it one, or pass workflow_id=")
    path = _workflow_path(name, shared=shared)
    sent = with_body(request_to(engine, "apply_workflow", "PUT", path), body, media)
    return engine.ask(ApiCall(sent, decoder_of(ApplyAnswer)))


def get_workflow(
    engine: CallEngine, workflow_id: str, *, version: int | None = None, shared: bool = False
) -> Op[WorkflowView]:
    """A workflow, own or shared, in the version in force if none is named.

    ``shared``: the shared workflow, also if the tenant has its own; the newest, if none is named.
    """
    path = _workflow_path(workflow_id, shared=shared) + query_of({"version": version})
    return engine.ask(get_call(engine, "workflow", path, WorkflowView))


def list_workflows(
    engine: CallEngine, *, limit: int = 100, cursor: str | None = None, shared: bool = False
) -> Op[WorkflowList]:
    """One page of the tenant's workflows, own and shared, or of all shared ones, by id."""
    path = _workflows_path(shared=shared) + query_of({"limit": limit, "cursor": cursor})
    return engine.ask(get_call(engine, "workflows", path, WorkflowList))


def workflow_usage(
    engine: CallEngine, workflow_id: str, *, limit: int = 100, cursor: str | None = None
) -> Op[WorkflowUseList]:
    """One page of what each tenant runs under the id of a shared workflow, by tenant."""
    query = query_of({"limit": limit, "cursor": cursor})
    path = f"{_workflow_path(workflow_id, shared=True)}/usage{query}"
    return engine.ask(get_call(engine, "workflow_usage", path, WorkflowUseList))


def _workflows_path(*, shared: bool) -> str:
    return "/v1/shared/workflows" if shared else "/v1/workflows"


def _workflow_path(workflow_id: str, *, shared: bool) -> str:
    return f"{_workflows_path(shared=shared)}/{quoted_segment(workflow_id, 'workflow_id')}"


# ── Anything else ────────────────────────────────────────────────────────────────────────────────


def request(
    engine: CallEngine,
    method: str,
    path: str,
    body: JsonValue = None,
    *,
    query: Mapping[str, str | int | None] | None = None,
    idempotency_key: str | None = None,
) -> Op[JsonValue]:
    """Any other route (``/v1/admin/…``), with the same retries; the response's JSON, unchecked.

    A POST or PATCH without a key is not sent again once the server may have done it.
    """
    sent = request_to(engine, f"{method} {path}", method, path + query_of(query or {}))
    if body is not None:
        sent = with_body(sent, encoded(body))
    if idempotency_key is not None:
        sent = with_key(sent, key_or_random(idempotency_key))
    return engine.ask(ApiCall(sent, any_json))


def _media_and_id(text: str) -> tuple[str, str]:
    """What the text of a workflow file is written in, and the id it gives itself, as far as seen.

    The SDK has no YAML parser, and needs only this to know where to send the file.
    """
    try:
        members = msgspec.json.decode(text)
    except msgspec.DecodeError:
        found = _ID_LINE.search(text)
        return _YAML, found[2] if found else ""
    return JSON, str(members.get("id") or "") if isinstance(members, dict) else ""


_START: Final = msgspec.json.Decoder(StartedRun)


def _started(reply: HttpReply) -> StartedRun:
    is_replay = reply.headers.get("idempotency-replayed") == "true"
    return replace(_START.decode(reply.body), is_replay=is_replay)
