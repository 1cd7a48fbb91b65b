"""Approvals: the inbox of decisions that runs wait for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from markupsafe import Markup

from stanchion.console.page import DONE, Data, Nav, PageTable, Redirect, View
from stanchion.console.schema_form import faults_by_field, form_fields, form_html, parse_form
from stanchion.core.faults import Fault
from stanchion.core.json_value import JsonValue
from stanchion.gateway.problems import RequestRefused, invalid, invalid_member
from stanchion.wire.problems import Code
from stanchion.wire.runs import ApprovalRow, RunView

PAGES: Final = PageTable()

_LIMIT: Final = 25
_SEARCHED: Final = 1_000
"""Approvals that are looked through at a time for those of one run."""
_RESULTS: Final = 3
"""Results of earlier steps that an approval of the inbox shows."""
_RUN_PATH: Final = "/v1/runs/{run_id}"


@dataclass(frozen=True, slots=True)
class DecisionForm:
    """An approval that waits, and the fields for its decision's data."""

    row: ApprovalRow
    place: str
    """Unique on its page, and safe in an id."""
    fields: Markup | None
    """``None`` if the approval takes no particular data."""
    comment: str
    is_refused: bool
    """Whether this is the form that the API has just refused."""
    four_eyes: Literal["barred", "unknown", "open"] | None
    """Whether the visitor may decide a step with ``not_by_starter``; ``None`` for other steps."""
    run: RunView | None = None
    """The run that asks, where its page does not show it anyway."""

    @property
    def results(self) -> list[tuple[str, JsonValue]]:
        """What the steps before have given, the last one first."""
        steps = {} if self.run is None else self.run.steps
        ended = [
            (step.finished_at, name, step.output)
            for name, step in steps.items()
            if step.finished_at is not None and step.output is not None
        ]
        ended.sort(key=lambda each: each[0], reverse=True)
        return [(name, output) for _, name, output in ended[:_RESULTS]]

    @staticmethod
    def of(view: View, row: ApprovalRow, run: RunView | None = None) -> DecisionForm:
        """The form, with what was typed into it if it was refused."""
        is_refused = view.problem is not None and (
            view.form.get("run_id") == row.run_id and view.form.get("step_id") == row.step_id
        )
        fields = None
        if row.data_schema is not None:
            made = form_fields(row.data_schema, "data")
            faults: dict[str, str] = {}
            if is_refused and view.problem is not None:
                given = [Fault(each.path, each.message) for each in view.problem.errors]
                faults = faults_by_field(made, given, "data")[0]
            place = _place(row)
            posted = view.form.mapping() if is_refused else None
            fields = form_html(made, posted, faults, scope=place)
        comment = view.form.get("comment") if is_refused else ""
        four_eyes = _four_eyes(view, row)
        return DecisionForm(row, _place(row), fields, comment, is_refused, four_eyes, run)


def _place(row: ApprovalRow) -> str:
    return f"decide-{row.run_id}-{row.step_id}".replace(".", "-")


def _four_eyes(view: View, row: ApprovalRow) -> Literal["barred", "unknown", "open"] | None:
    if not row.not_by_starter:
        return None
    if row.starter is None:
        return "unknown"
    actor = view.visitor.holder.actor
    return "barred" if row.starter.casefold() == actor.casefold() else "open"


async def decide(view: View, run_id: str, step_id: str, *, approve: bool) -> None:
    """Approve or reject a step with what the form has. Raises ``RequestRefused``."""
    form, params = view.form, {"run_id": run_id, "step_id": step_id}
    body: dict[str, object] = {"comment": form.get("comment") or None}
    row = await _row(view, run_id, step_id) if approve else None
    if row is not None and row.data_schema is not None:
        fields = form_fields(row.data_schema, "data")
        value, faults = parse_form(fields, form.mapping())
        if faults:
            found = [Fault(f"data.{name.partition('.')[2]}", text) for name, text in faults.items()]
            refusal = invalid(found, "the data cannot be read", code=Code.INVALID_INPUT)
            raise RequestRefused(refusal)
        body["data"] = value
    verb = "approve" if approve else "reject"
    await view.api.send(f"POST /v1/runs/{{run_id}}/steps/{{step_id}}/{verb}", params, body)


async def _row(view: View, run_id: str, step_id: str) -> ApprovalRow | None:
    found = await approvals_of(view, run_id, {step_id})
    return found[0] if found else None


async def approvals_of(view: View, run_id: str, step_ids: Collection[str]) -> list[ApprovalRow]:
    """Those of the steps of a run that wait for a decision; others may have been made meanwhile.

    The list is of all runs, oldest first: a run that has just asked is at its end.
    """
    found: list[ApprovalRow] = []
    cursor: str | None = None
    while True:
        page = await view.api.get("/v1/approvals", limit=_SEARCHED, cursor=cursor)
        found += [row for row in page.approvals if row.run_id == run_id and row.step_id in step_ids]
        cursor = page.cursor
        if cursor is None or len(found) == len(step_ids):
            return found


@PAGES.page(
    "/approvals", "Approvals", "approvals.html", "GET /v1/approvals", Nav("Work", "Approvals", "p")
)
async def inbox(view: View) -> Data:
    """The decisions that wait, oldest first, each with what it is about."""
    page = await view.api.get("/v1/approvals", limit=_LIMIT, cursor=view.query.get("cursor"))
    # One after the other: the outputs of all of them together may be large.
    forms = [
        await view.made(partial(DecisionForm.of, view, row, await _run(view, row)))
        for row in page.approvals
    ]
    may_see_workflows = view.api.allows("GET /v1/workflows/{workflow_id}")
    return {"decisions": forms, "cursor": page.cursor, "may_see_workflows": may_see_workflows}


async def _run(view: View, row: ApprovalRow) -> RunView | None:
    """The run that asks; ``None`` if it has gone meanwhile."""
    try:
        found: RunView = await view.api.of(row.tenant).get(_RUN_PATH, {"run_id": row.run_id})
    except RequestRefused:
        return None
    return found


@PAGES.action("/approvals/decide", "POST /v1/runs/{run_id}/steps/{step_id}/approve", inbox)
async def act(view: View) -> Redirect:
    """Decide one approval of the inbox."""
    verdict = view.form.get("verdict")
    if verdict not in {"approve", "reject"}:
        raise RequestRefused(invalid_member("verdict", "must be approve or reject"))
    is_approved = verdict == "approve"
    await decide(view, view.form.get("run_id"), view.form.get("step_id"), approve=is_approved)
    return Redirect(view.at("approvals"), "approved" if is_approved else "rejected")


DONE.update({"approved": "Approved: the run goes on.", "rejected": "Rejected."})
