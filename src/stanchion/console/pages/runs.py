"""Runs: the list with its filters, and one run with its graph, timeline and actions."""

from __future__ import annotations

import secrets
from collections.abc import Container, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from stanchion.console.gantt import gantt, spans_of, with_ends, with_waits
from stanchion.console.page import (
    DONE,
    Data,
    Elsewhere,
    Form,
    Nav,
    PageTable,
    Redirect,
    Shown,
    View,
    label_of,
)
from stanchion.console.pages.approvals import DecisionForm, approvals_of, decide
from stanchion.console.step_graph import GraphStep, StepKind, zoomable_graph
from stanchion.core.model import Instant, RunStatus, StepStatus, WorkflowSource
from stanchion.core.why import WhyCode, remedy_for
from stanchion.gateway.problems import RequestRefused, invalid_member
from stanchion.wire.problems import Code
from stanchion.wire.runs import (
    QueuedAnswer,
    RunList,
    RunView,
    StartAnswer,
    StepView,
    TimelineLine,
    WhyAnswer,
)

PAGES: Final = PageTable()

_LIMIT: Final = 50
_TIMELINE_MAX: Final = 1_000
_SUBWORKFLOWS_MAX: Final = 10
_GRAPH_STEPS_MAX: Final = 300
_STEPS_SHOWN: Final = 500
_OUTPUTS_BYTES_MAX: Final = 512 * 1024
"""Outputs of all steps together that a page shows."""
AGES: Final = {"15 min": 15 * 60, "hour": 3_600, "day": 86_400, "week": 7 * 86_400}
"""Choices of the filter by age, in seconds."""


GROUPS: Final = {
    "active": tuple(each.value for each in RunStatus if not each.is_finished),
    "unsuccessful": ("failed", "timed_out", "cancelled"),
}
"""Choices of the filter by status that stand for several."""


def wanted_runs(query: Form, now: Instant) -> dict[str, Any]:
    """The filters of a list of runs, as ``GET /v1/runs`` and a bulk action take them."""
    wanted: dict[str, Any] = {
        "status": [found for each in query.all("status") for found in GROUPS.get(each, (each,))],
        "workflow_id": query.get("workflow_id").strip(),
        "label": [*map(label_of, query.get("label").split())],
        "rerun_of": query.get("rerun_of").strip(),
    }
    age_s = AGES.get(query.get("age"))
    if age_s is not None:
        since = datetime.fromtimestamp(now / 1000 - age_s, UTC)
        wanted["since"] = since.isoformat(timespec="seconds").replace("+00:00", "Z")
    return wanted | {name: query.get(name).strip() for name in _BOUNDS if query.get(name).strip()}


_BOUNDS: Final = ("since", "until")


@PAGES.page("/runs", "Runs", "runs.html", "GET /v1/runs", Nav("Work", "Runs", "r"))
async def list_runs(view: View) -> Data:
    """The runs that fit the filters."""
    api, query = view.api, view.query
    wanted = wanted_runs(query, view.now)
    cursor = query.get("cursor")
    page = await view.filtered("/v1/runs", RunList(()), limit=_LIMIT, cursor=cursor, **wanted)
    return {
        "runs": page.runs,
        "cursor": page.cursor,
        "statuses": list(RunStatus),
        "ages": AGES,
        "bulk": _bulk(view, wanted) if api.allows("POST /v1/bulk") else None,
        "may_act": api.allows("POST /v1/runs/{run_id}/cancel"),
        "chosen": set(view.form.all("run")),
        "is_filtered": any(wanted.values()),
        "key": view.form.get("key") or secrets.token_hex(16),
    }


def _bulk(view: View, wanted: dict[str, Any]) -> str | None:
    """The page that acts on all runs that fit the filters; ``None`` without filters."""
    if not any(wanted.values()):
        return None
    tenant = view.tenant if view.visitor.sees_all else None
    fields = {**wanted, "label": " ".join(wanted["label"]), "tenant": tenant}
    query = urlencode([(name, value) for name, value in fields.items() if value], doseq=True)
    return f"/console/bulk?{query}"


@PAGES.page("/runs/{run_id}", "Run", "run.html", "GET /v1/runs/{run_id}", is_of_tenant=True)
async def show_run(view: View) -> Data:
    """One run."""
    api = view.api
    run = await _run(view)
    whose = run.tenant if view.visitor.sees_all else None
    timeline = await api.get("/v1/runs/{run_id}/timeline", view.params, limit=_TIMELINE_MAX)
    entries: tuple[TimelineLine, ...] = timeline.entries
    now = datetime.fromtimestamp(view.now / 1000, UTC)
    needs, kinds = await _structure(view, run)
    hrefs = {step_id: f"#step-{step_id}" for step_id in run.steps}
    why = await _why(view, run)
    unleased = _unleased(why)
    spans = with_waits(spans_of(entries), unleased)
    chart = await view.made(
        lambda: gantt(
            with_ends(spans, run.steps, begin=run.created_at),
            list(run.steps),
            begin=run.created_at,
            end=run.finished_at or now,
            hrefs=hrefs,
        )
    )
    return {
        "title": f"Run {run.run_id}",
        "run": run,
        "now_at": now,
        **_durations(run, entries, now),
        "entries": entries,
        "has_more_entries": timeline.cursor is not None,
        "gantt": chart,
        "graph": await view.made(lambda: _graph(run, needs, kinds, hrefs, unleased)),
        "why": why,
        "remedy_for": lambda remedy: remedy_for(remedy, whose),
        "decisions": await _decisions(view, run),
        "steps": list(run.steps.items())[:_STEPS_SHOWN],
        "large": await view.made(lambda: _too_large(run)),
        "may_cancel": api.allows("POST /v1/runs/{run_id}/cancel") and run.finished_at is None,
        "may_rerun": api.allows("POST /v1/runs/{run_id}/rerun") and run.finished_at is not None,
        "may_replay": api.allows("POST /v1/admin/dead-letters/{letter_id}/replay"),
        "may_see_workflow": api.allows("GET /v1/workflows/{workflow_id}"),
        "plan": None,
        "key": view.form.get("key") or secrets.token_hex(16),
    }


async def _run(view: View) -> RunView:
    """The run; if no tenant was chosen, ``Elsewhere`` is raised with that of the run."""
    try:
        found: RunView = await view.api.get("/v1/runs/{run_id}", view.params)
    except RequestRefused as refused:
        run_id = view.params["run_id"]
        is_missing = refused.refusal.code is Code.NOT_FOUND
        if is_missing and not view.query.get("tenant"):
            tenant = await view.api.tenant_of_run(run_id)
            if tenant not in {None, view.tenant}:
                raise Elsewhere(view.at("runs", run_id, tenant=tenant)) from None
        raise
    return found


def _durations(run: RunView, entries: Sequence[TimelineLine], now: datetime) -> Data:
    """How long the run waited for a slot and how long it has run, in milliseconds.

    ``queued_ms`` is ``None`` if it did not wait, ``ran_ms`` if it never began.
    """
    end = run.finished_at or now
    if not any(each.what == "run_queued" for each in entries):
        return {"queued_ms": None, "ran_ms": _ms(run.created_at, end)}
    begun = next((each.at for each in entries if each.what == "run_started"), None)
    return {
        "queued_ms": _ms(run.created_at, begun or end),
        "ran_ms": None if begun is None else _ms(begun, end),
    }


def _ms(begin: datetime, end: datetime) -> float:
    return (end - begin).total_seconds() * 1_000


def _too_large(run: RunView) -> set[str]:
    """The steps whose outputs are left out, because those before them fill the page."""
    left_bytes = _OUTPUTS_BYTES_MAX
    found: set[str] = set()
    for step_id, step in run.steps.items():
        if left_bytes >= 0:
            left_bytes -= len(msgspec.json.encode(step.output))
        if left_bytes < 0:
            found.add(step_id)
    return found


async def _why(view: View, run: RunView) -> WhyAnswer | None:
    """Why the run is not further, if this version can say it and there is something to say."""
    path = "/v1/runs/{run_id}/why"
    if run.finished_at is not None or not view.api.allows(f"GET {path}"):
        return None
    found: WhyAnswer = await view.api.get(path, view.params)
    return found


def _unleased(why: WhyAnswer | None) -> set[str]:
    """The steps with ready jobs of which no worker has any."""
    findings = () if why is None else why.findings
    leased = {each.step_id for each in findings if each.code is WhyCode.JOB_LEASED}
    ready = {each.step_id for each in findings if each.code in _READY and each.step_id is not None}
    return ready - leased


_READY: Final = frozenset({WhyCode.JOB_READY, WhyCode.NO_WORKER, WhyCode.TOPIC_LIMITED})


async def _decisions(view: View, run: RunView) -> list[DecisionForm]:
    """The decisions that the run waits for, with a form for each."""
    waiting = {name for name, step in run.steps.items() if step.waiting_for == "decision"}
    if not waiting:
        return []
    return [DecisionForm.of(view, row) for row in await approvals_of(view, run.run_id, waiting)]


async def _structure(
    view: View, run: RunView
) -> tuple[dict[str, tuple[str, ...]], dict[str, StepKind]]:
    """What each step needs and of which kind it is, from the workflow and its sub-workflows."""
    needs: dict[str, tuple[str, ...]] = {}
    kinds: dict[str, StepKind] = {}
    if not view.api.allows("GET /v1/workflows/{workflow_id}"):
        return needs, kinds
    used = {(each.source, each.id): each.version for each in run.uses}
    root = (run.workflow_source, run.workflow_id, run.workflow_version)
    wanted: list[tuple[str, WorkflowSource, str, int | None]] = [("", *root)]
    for _ in range(_SUBWORKFLOWS_MAX):
        if not wanted:
            break
        prefix, source, workflow_id, version = wanted.pop()
        params = {"workflow_id": workflow_id}
        try:
            found = await view.api.get(
                "/v1/workflows/{workflow_id}", params, version=version, source=source
            )
        except RequestRefused:
            continue  # one that is no longer there
        for name, step in found.definition["steps"].items():
            step_id = f"{prefix}{name}"
            needs[step_id] = tuple(f"{prefix}{each}" for each in step.get("needs", ()))
            kinds[step_id] = step_kind(step)
            if "workflow" in step and "for_each" not in step:
                inner = step["workflow"]
                of = source if (source, inner) in used else WorkflowSource.SHARED
                wanted.append((f"{step_id}.", of, inner, used.get((of, inner))))
    return needs, kinds


def step_kind(step: Mapping[str, Any]) -> StepKind:
    """The kind of a step in a workflow file."""
    if "for_each" in step:
        return "for_each"
    if "approval" in step:
        return "approval"
    if "delay_s" in step:
        return "delay"
    return "subworkflow" if "workflow" in step else "job"


def graph_steps(definition: Mapping[str, Any]) -> list[GraphStep]:
    """The steps of a workflow file, to be drawn."""
    return [
        GraphStep(
            id=name,
            kind=step_kind(step),
            needs=tuple(step.get("needs", ())),
            note=str(step.get("topic") or step.get("workflow") or ""),
        )
        for name, step in definition["steps"].items()
    ]


def _graph(
    run: RunView,
    needs: Mapping[str, tuple[str, ...]],
    kinds: Mapping[str, StepKind],
    hrefs: Mapping[str, str],
    unleased: Container[str],
) -> str:
    steps = [
        GraphStep(
            id=step_id,
            kind=kinds.get(step_id, "job" if step.items_total is None else "for_each"),
            needs=tuple(each for each in needs.get(step_id, ()) if each in run.steps),
            parent=_parent(step_id, run.steps),
            status=step.status,
            note=_note(step, is_unleased=step_id in unleased),
            items=_items(step),
            href=hrefs[step_id],
        )
        for step_id, step in list(run.steps.items())[:_GRAPH_STEPS_MAX]
    ]
    return zoomable_graph(steps, f"The {len(steps)} steps of the run and their states")


def _note(step: StepView, *, is_unleased: bool) -> str:
    """What the step waits for, in few words."""
    if step.waiting_for is None:
        return ""
    return "no worker yet" if is_unleased else _WAITS[step.waiting_for]


_WAITS: Final = {
    "job": "at a worker",
    "retry": "for the retry",
    "replay": "for an operator",
    "decision": "for a decision",
    "delay": "for its delay",
    "items": "its items",
    "children": "its steps",
}


def _parent(step_id: str, steps: Mapping[str, StepView]) -> str | None:
    parent = step_id.rpartition(".")[0]
    return parent if parent in steps else None


def _items(step: StepView) -> tuple[int, int, int] | None:
    if step.items_total is None:
        return None
    return step.items_total, step.items_succeeded or 0, step.items_failed or 0


@PAGES.page(
    "/runs/{run_id}/steps/{step_id}",
    "Items",
    "items.html",
    "GET /v1/runs/{run_id}/steps/{step_id}/items",
    is_of_tenant=True,
)
async def list_items(view: View) -> Data:
    """The items of a for-each step."""
    api, status = view.api, view.query.get("status")
    run: RunView = await api.get("/v1/runs/{run_id}", {"run_id": view.params["run_id"]})
    page = await api.get(
        "/v1/runs/{run_id}/steps/{step_id}/items",
        view.params,
        status=status,
        limit=_LIMIT,
        cursor=view.query.get("cursor"),
    )
    step = run.steps.get(view.params["step_id"])
    return {
        "title": f"Items of {view.params['step_id']}",
        "run": run,
        "step_id": view.params["step_id"],
        "step": step,
        "items": page.items,
        "cursor": page.cursor,
        "statuses": list(StepStatus),
    }


@PAGES.action("/runs/{run_id}/cancel", "POST /v1/runs/{run_id}/cancel", show_run)
async def cancel(view: View) -> Redirect:
    """Cancel a run."""
    body = {"reason": view.form.get("reason") or None}
    await view.api.send("POST /v1/runs/{run_id}/cancel", view.params, body)
    return Redirect(view.at("runs", view.params["run_id"]), "run_cancelled")


@PAGES.action("/runs/{run_id}/rerun", "POST /v1/runs/{run_id}/rerun", show_run)
async def rerun(view: View) -> Redirect | Shown:
    """Start a new run from a finished one, and go to it; or show what that would do."""
    form = view.form
    what, version, typed = form.get("what"), form.get("version"), form.get("input").strip()
    body: dict[str, Any] = {"dry_run": form.get("dry_run") == "yes"}
    if what == "failed_items":
        body["only"] = what
    elif what.startswith("from:"):
        body["from_step"] = what.removeprefix("from:")
    if version:
        body["version"] = version
    if typed:
        body["input"] = form.json("input")
    key = None if body["dry_run"] else form.get("key") or None
    answer = await view.api.send("POST /v1/runs/{run_id}/rerun", view.params, body, key=key)
    if body["dry_run"]:
        return Shown({"plan": answer})
    return Redirect(view.at("runs", answer.run_id), started(answer, "run_rerun"))


def started(answer: StartAnswer | QueuedAnswer, did: str = "run_started") -> str:
    """What a start or a rerun did, as a key of ``DONE``."""
    return "run_queued" if answer.status is RunStatus.QUEUED else did


@PAGES.action("/runs", "POST /v1/runs/{run_id}/cancel", list_runs)
async def act_on_chosen(view: View) -> Redirect:
    """Cancel or rerun the chosen runs, each by itself. Those that are refused are counted.

    Sending the form again starts no second rerun of any of them.
    """
    verb, chosen, once = view.form.get("verb"), view.form.all("run"), view.form.get("key")
    if verb not in _VERBS:
        raise RequestRefused(invalid_member("verb", "must be cancel or rerun"))
    if not 0 < len(chosen) <= _LIMIT:
        raise RequestRefused(invalid_member("run", f"choose 1 to {_LIMIT} runs"))
    refused: list[RequestRefused] = []
    for each in chosen:
        tenant, _, run_id = each.rpartition("/")
        try:
            name = f"POST /v1/runs/{{run_id}}/{verb}"
            key = f"{once}/{run_id}" if once else None
            await view.api.of(tenant).send(name, {"run_id": run_id}, {}, key=key)
        except RequestRefused as error:
            refused.append(error)
    if len(refused) == len(chosen):
        raise refused[0]
    done = len(chosen) - len(refused)
    url = f"/console/runs{view.query.with_(did=None, count=None, of=None)}"
    return Redirect(url, _VERBS[verb], done, len(chosen))


_VERBS: Final = {"cancel": "runs_cancelled", "rerun": "runs_rerun"}


@PAGES.action(
    "/runs/{run_id}/steps/{step_id}/approve",
    "POST /v1/runs/{run_id}/steps/{step_id}/approve",
    show_run,
)
async def approve(view: View) -> Redirect:
    """Approve a step of the run."""
    await decide(view, view.params["run_id"], view.params["step_id"], approve=True)
    return Redirect(view.at("runs", view.params["run_id"]), "approved")


@PAGES.action(
    "/runs/{run_id}/steps/{step_id}/reject",
    "POST /v1/runs/{run_id}/steps/{step_id}/reject",
    show_run,
)
async def reject(view: View) -> Redirect:
    """Reject a step of the run."""
    await decide(view, view.params["run_id"], view.params["step_id"], approve=False)
    return Redirect(view.at("runs", view.params["run_id"]), "rejected")


DONE.update(
    {
        "run_cancelled": "The run was cancelled.",
        "runs_cancelled": "{count} of {of} runs were cancelled.",
        "runs_rerun": "{count} of {of} runs were started again.",
        "run_rerun": "This is the new run.",
        "run_queued": "The tenant is full: the run waits in its queue until a slot is free.",
    }
)
