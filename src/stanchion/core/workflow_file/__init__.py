"""Workflow files: parses YAML or JSON into a workflow, or returns all its faults.

There are three passes, each of which reports all its faults. ``source`` parses text into a tree,
``members`` defines the shape of each part of the tree, and ``rules`` checks references between
parts. Parsing takes bounded time for any input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from stanchion.core.faults import Fault, Findings, WorkflowFaults, quoted, shown
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.model import WorkflowId
from stanchion.core.plan import link_known
from stanchion.core.workflow import Workflow
from stanchion.core.workflow_file.members import WORKFLOW
from stanchion.core.workflow_file.rules import judge_workflow
from stanchion.core.workflow_file.shape import Unfit, fit
from stanchion.core.workflow_file.source import Format, read_source

__all__ = [
    "CheckedFile",
    "Format",
    "WorkflowFaults",
    "check_workflows",
    "parse_workflow",
    "with_lines",
    "workflow_json_schema",
]


def parse_workflow(
    text: bytes | str,
    *,
    format: Format,  # noqa: A002 - the word everyone uses for it
    workflow_id: str | None = None,
) -> Workflow | WorkflowFaults:
    """Parse a workflow file.

    ``workflow_id`` is the id from the request, if any. The file may then omit its id, and must not
    have a different one.
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


class CheckedFile(NamedTuple):
    """The faults of a file, and its sub-workflows that could not be checked."""

    workflow_id: WorkflowId | None
    faults: tuple[Fault, ...]
    unknown: frozenset[WorkflowId]


def check_workflows(
    files: Mapping[str, tuple[bytes, Format]], *, workflow_id: str | None = None
) -> dict[str, CheckedFile]:
    """Check files as a server does when they are sent, each with the others as its sub-workflows.

    A sub-workflow that is in no file, or in one with faults, is not a fault but ``unknown``.
    """
    read = {
        name: parse_workflow(text, format=notation, workflow_id=workflow_id)
        for name, (text, notation) in files.items()
    }
    sound = {each.id: each for each in read.values() if isinstance(each, Workflow)}
    checked: dict[str, CheckedFile] = {}
    for name, found in read.items():
        if isinstance(found, WorkflowFaults):
            checked[name] = CheckedFile(None, found.faults, frozenset())
        else:
            linked, unknown = link_known(found, sound)
            faults: tuple[Fault, ...] = ()
            if isinstance(linked, WorkflowFaults):
                faults = with_lines(linked, *files[name]).faults
            checked[name] = CheckedFile(found.id, faults, unknown)
    return checked


def with_lines(faults: WorkflowFaults, text: bytes | str, format: Format) -> WorkflowFaults:  # noqa: A002 - the word everyone uses for it
    """The faults that linking found, with their lines in the text of the file."""
    lines = {
        shown(path): line for path, line in read_source(text, format, Findings()).lines.items()
    }
    return WorkflowFaults(tuple(_with_line(fault, lines) for fault in faults.faults))


def _with_line(fault: Fault, lines: Mapping[str, int]) -> Fault:
    """The fault with the line of its path, or of the nearest part around it."""
    path = fault.path
    while path and path not in lines:
        path = path.rpartition(".")[0]
    return fault if path not in lines else Fault(fault.path, fault.message, lines[path])


def _named(tree: JsonValue, workflow_id: str | None, findings: Findings) -> JsonValue:
    if workflow_id is None or not isinstance(tree, dict):
        return tree
    given = tree.get("id", workflow_id)
    if isinstance(given, str) and given != workflow_id and findings.clean(("id",)):
        wrong = f"is {quoted(given)}, but the file was sent as {quoted(workflow_id)}"
        findings.note(("id",), wrong)
    return {"id": given, **tree}


def workflow_json_schema() -> JsonObject:
    """The JSON Schema of workflow files, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Stanchion workflow",
        "description": "A workflow file. Generated from the parser, which checks the same.",
        **WORKFLOW.schema(),
    }
