"""Linking, once in a process: it is pure, and a thousand days have the same workflows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from stanchion.adapters.store.memory.shelf import Shelf
from stanchion.core.faults import WorkflowFaults
from stanchion.core.model import Run, WorkflowId
from stanchion.core.plan import Plan, link
from stanchion.core.workflow import Workflow

__all__ = ["linked_once", "plan_of"]

_LINKED: dict[tuple[bytes, ...], Plan | WorkflowFaults] = {}
_ENCODE: Final = msgspec.json.Encoder().encode


async def linked_once(
    workflow: Workflow, others: Mapping[WorkflowId, Workflow]
) -> Plan | WorkflowFaults:
    """The plan of a workflow and those it contains."""
    return _linked(workflow, others)


def plan_of(shelf: Shelf, run: Run) -> Plan | None:
    """The plan that a run began with, as far as the store has it."""
    if run.workflow_id.startswith("job/"):
        return None
    versions = {**run.uses, run.workflow_id: run.workflow_version}
    workflows = shelf.peek(run.tenant).workflows
    try:
        found = {each: workflows[each][number - 1].workflow for each, number in versions.items()}
    except (KeyError, IndexError):
        return None  # Lost in a failover.
    plan = _linked(found[run.workflow_id], found)
    return plan if isinstance(plan, Plan) else None


def _linked(workflow: Workflow, others: Mapping[WorkflowId, Workflow]) -> Plan | WorkflowFaults:
    key = (_ENCODE(workflow), *(_ENCODE(others[each]) for each in sorted(others)))
    if key not in _LINKED:
        _LINKED[key] = link(workflow, others)
    return _LINKED[key]
