"""Runs: the list, and one run."""

from __future__ import annotations

from typing import Final

from stanchion.console.page import DONE, Action, Data, Nav, Page, Redirect, View
from stanchion.core.model import RunStatus

__all__ = ["ACTIONS", "PAGES"]

_LIMIT: Final = 50


async def list_runs(view: View) -> Data:
    """The runs that fit the filters."""
    query = view.query
    page = await view.api.get(
        "/v1/runs",
        status=query.get("status"),
        workflow_id=query.get("workflow_id"),
        cursor=query.get("cursor"),
        limit=_LIMIT,
    )
    return {"runs": page.runs, "cursor": page.cursor, "statuses": list(RunStatus)}


async def show_run(view: View) -> Data:
    """One run."""
    run = await view.api.get("/v1/runs/{run_id}", view.params)
    return {"run": run, "title": f"Run {run.run_id}"}


async def cancel(view: View) -> Redirect:
    """Cancel a run."""
    body = {"reason": view.form.get("reason") or None}
    await view.api.send("POST /v1/runs/{run_id}/cancel", view.params, body)
    return Redirect(view.at("runs", view.params["run_id"]), "run_cancelled")


RUNS: Final = Page(
    path="/console/runs",
    title="Runs",
    template="runs.html",
    load=list_runs,
    needs="GET /v1/runs",
    nav=Nav(group="Work", label="Runs", letter="r"),
)
RUN: Final = Page(
    path="/console/runs/{run_id}",
    title="Run",
    template="run.html",
    load=show_run,
    needs="GET /v1/runs/{run_id}",
    is_of_tenant=True,
)
PAGES: Final = (RUNS, RUN)
ACTIONS: Final = (
    Action(
        path="/console/runs/{run_id}/cancel",
        act=cancel,
        needs="POST /v1/runs/{run_id}/cancel",
        page=RUN,
    ),
)
DONE["run_cancelled"] = "The run was cancelled."
