"""Workflows: the list, and one workflow with its graph, versions and a form to start a run."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any, Final

from stanchion.console.page import DONE, Data, Nav, PageTable, Redirect, View
from stanchion.console.pages.runs import graph_steps, started
from stanchion.console.schema_form import faults_by_field, form_fields, form_html, parse_form
from stanchion.console.step_graph import zoomable_graph
from stanchion.core.faults import Fault
from stanchion.gateway.problems import RequestRefused, invalid
from stanchion.wire.problems import Code
from stanchion.wire.runs import WorkflowView

PAGES: Final = PageTable()

_LIMIT: Final = 100
_RUNS: Final = 10
_VERSIONS_SHOWN: Final = 20
_PREFIX: Final = "input"


@PAGES.page(
    "/workflows",
    "Workflows",
    "workflows.html",
    "GET /v1/workflows",
    Nav("Work", "Workflows", "w"),
    is_of_tenant=True,
)
async def list_workflows(view: View) -> Data:
    """The tenant's workflows, by id."""
    page = await view.api.get("/v1/workflows", limit=_LIMIT, cursor=view.query.get("cursor"))
    shared = None
    if view.api.allows("GET /v1/shared/workflows") and "cursor" not in view.query:
        shared = (await view.api.get("/v1/shared/workflows", limit=_LIMIT)).workflows
    return {"workflows": page.workflows, "cursor": page.cursor, "shared": shared}


@PAGES.page(
    "/shared/{workflow_id}",
    "Shared workflow",
    "workflow.html",
    "GET /v1/shared/workflows/{workflow_id}",
)
async def show_shared(view: View) -> Data:
    """One version of a shared workflow, and the tenants that use it."""
    api, path = view.api, "/v1/shared/workflows/{workflow_id}"
    newest: WorkflowView = await api.get(path, view.params)
    version = view.query.get("version")
    shown = newest if not version else await api.get(path, view.params, version=version)
    cursor = view.query.get("cursor")
    uses = await api.get(f"{path}/usage", view.params, limit=_LIMIT, cursor=cursor)
    return {
        **await view.made(partial(_shown, newest, shown)),
        "title": f"Shared workflow {shown.id}",
        "runs": None,
        "uses": uses.tenants,
        "cursor": uses.cursor,
        "may_start": False,
    }


def _shown(newest: WorkflowView, shown: WorkflowView) -> Data:
    """What the pages of own and of shared workflows have in common."""
    steps = graph_steps(shown.definition)
    return {
        "workflow": shown,
        "newest": newest.version,
        "versions": range(newest.version, max(0, newest.version - _VERSIONS_SHOWN), -1),
        "graph": zoomable_graph(steps, f"The {len(steps)} steps of the workflow"),
    }


@PAGES.page(
    "/workflows/{workflow_id}",
    "Workflow",
    "workflow.html",
    "GET /v1/workflows/{workflow_id}",
    is_of_tenant=True,
)
async def show_workflow(view: View) -> Data:
    """One version of a workflow."""
    api = view.api
    path, name = "/v1/workflows/{workflow_id}", view.params["workflow_id"]
    newest: WorkflowView = await api.get(path, view.params)
    version = view.query.get("version")
    shown: WorkflowView = newest
    if version and version != str(newest.version):
        shown = await api.get(path, view.params, version=version)
    runs = await api.get("/v1/runs", workflow_id=name, limit=_RUNS)
    return {
        **await view.made(partial(_shown, newest, shown)),
        "title": f"Workflow {name}",
        "form": await view.made(partial(_form, view, newest.definition)),
        "key": view.form.get("key") or secrets.token_hex(16),
        "runs": runs.runs,
        "uses": None,
        "may_start": api.allows("POST /v1/workflows/{workflow_id}/runs"),
    }


def _form(view: View, definition: dict[str, Any]) -> str:
    """The fields of the input, with what was typed and what was wrong with it."""
    fields = form_fields(definition.get("input_schema"), _PREFIX)
    if view.problem is None:
        return form_html(fields, scope="start")
    faults = [Fault(each.path, each.message) for each in view.problem.errors]
    placed, _ = faults_by_field(fields, faults, _PREFIX)
    return form_html(fields, view.form.mapping(), placed, scope="start")


@PAGES.action(
    "/workflows/{workflow_id}/start", "POST /v1/workflows/{workflow_id}/runs", show_workflow
)
async def start(view: View) -> Redirect:
    """Start a run with the form's input. Sending the form again starts no second one."""
    params = {"workflow_id": view.params["workflow_id"]}
    workflow = await view.api.get("/v1/workflows/{workflow_id}", params)
    fields = form_fields(workflow.definition.get("input_schema"), _PREFIX)
    value, faults = parse_form(fields, view.form.mapping())
    if faults:
        found = [Fault(name, text) for name, text in faults.items()]
        raise RequestRefused(invalid(found, "the input cannot be read", code=Code.INVALID_INPUT))
    body: dict[str, Any] = {"input": value}
    labels = view.form.labels("labels")
    if labels:
        body["labels"] = labels
    answer = await view.api.send(
        "POST /v1/workflows/{workflow_id}/runs", params, body, key=view.form.get("key") or None
    )
    return Redirect(view.at("runs", answer.run_id), started(answer))


DONE["run_started"] = "The run was started."
