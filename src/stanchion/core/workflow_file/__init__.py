"""Workflow files: YAML or JSON in, a workflow or everything that is wrong with it out.

Three passes, each of which says all it can. ``source`` turns text into a tree, ``members``
says what each part of the tree must look like, ``rules`` what the parts demand of each
other. Whatever the bytes, the answer is one of two values, and it comes soon.
"""

from __future__ import annotations

from stanchion.core.faults import Findings, WorkflowFaults, quoted
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.workflow import Workflow
from stanchion.core.workflow_file.members import WORKFLOW
from stanchion.core.workflow_file.rules import judge_workflow
from stanchion.core.workflow_file.shape import Unfit, fit
from stanchion.core.workflow_file.source import Format, read_source

__all__ = ["Format", "WorkflowFaults", "parse_workflow", "workflow_json_schema"]


def parse_workflow(
    text: bytes | str,
    *,
    format: Format,  # noqa: A002 - the word everyone uses for it
    workflow_id: str | None = None,
) -> Workflow | WorkflowFaults:
    """Read a workflow file.

    ``workflow_id`` is the name under which the file was sent, if it was sent under one. The file
    may then leave its own out, and must not say another.
    """
    findings = Findings()
    source = read_source(text, format, findings)
    workflow: Workflow | Unfit = Unfit.UNFIT
    if source.complete:
        tree = _named(source.tree, workflow_id, findings)
        workflow = fit(WORKFLOW, tree, (), findings)
        judge_workflow(tree, findings)
    if findings.noted or isinstance(workflow, Unfit):
        return WorkflowFaults(findings.faults(source.lines))
    return workflow


def _named(tree: JsonValue, workflow_id: str | None, findings: Findings) -> JsonValue:
    if workflow_id is None or not isinstance(tree, dict):
        return tree
    given = tree.get("id", workflow_id)
    if isinstance(given, str) and given != workflow_id and findings.clean(("id",)):
        wrong = f"is {quoted(given)}, but the file was sent as {quoted(workflow_id)}"
        findings.note(("id",), wrong)
    return {"id": given, **tree}


def workflow_json_schema() -> JsonObject:
    """The shape of workflow files in JSON Schema, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Stanchion workflow",
        "description": "A workflow file. Generated from the parser: what it demands, this says.",
        **WORKFLOW.schema(),
    }
