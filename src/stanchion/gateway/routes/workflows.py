"""Workflow routes: store, list and get workflows."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from stanchion.core.faults import WorkflowFaults
from stanchion.core.model import TenantId, WorkflowId
from stanchion.core.plan import link, subworkflows
from stanchion.core.workflow import Workflow
from stanchion.core.workflow_file import Format, parse_workflow
from stanchion.gateway.problems import Refusal, invalid, not_found
from stanchion.gateway.route import RUNNERS, Call, NoBody, NoQuery, Reply, Route, RouteScope, Takes
from stanchion.gateway.views import definition, when
from stanchion.ports.store import Definitions
from stanchion.wire.identifiers import Cursor, Limit
from stanchion.wire.problems import Code
from stanchion.wire.runs import ApplyAnswer, WorkflowList, WorkflowRow, WorkflowView

__all__ = ["ROUTES", "YAML_TYPES"]

YAML_TYPES: Final = frozenset({b"application/yaml", b"text/yaml", b"application/x-yaml"})
_REACHED_MAX: Final = 500
"""Workflows that one may contain, directly or not; more do not fit into its steps."""


class PagedWorkflows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A list, page by page."""

    cursor: Cursor | None = None
    limit: Limit = 100


class AtVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One version, or the newest."""

    version: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


async def put_workflow(call: Call[bytes, NoQuery]) -> Reply | Refusal:
    """Store a workflow. The same workflow again keeps its version."""
    name = call.params["workflow_id"]
    notation = _notation(call.headers.get(b"content-type", b""))
    executor = call.services.executor
    workflow = await executor.run(
        call.tenant, lambda: parse_workflow(call.body, format=notation, workflow_id=name)
    )
    if isinstance(workflow, WorkflowFaults):
        return _faulty(workflow)
    store = call.services.store
    others = await _contained(store, call.tenant, workflow)
    plan = await executor.run(call.tenant, lambda: link(workflow, others), may_refuse=False)
    if isinstance(plan, WorkflowFaults):
        return _faulty(plan)
    entry = call.audit(f"workflow/{workflow.id}", tenant=call.tenant)
    version = await store.put_workflow(call.tenant, workflow, audit=entry)
    call.services.plans.forget(call.tenant, workflow.id)
    return Reply(ApplyAnswer(workflow.id, version))


async def list_workflows(call: Call[NoBody, PagedWorkflows]) -> Reply:
    """The tenant's workflows, each in its newest version, by id."""
    page = await call.services.store.list_workflows(
        call.tenant, cursor=call.query.cursor, limit=call.query.limit
    )
    rows = tuple(
        WorkflowRow(
            id=each.workflow.id,
            version=each.version,
            risk=each.workflow.risk,
            created_at=when(each.created_at),
        )
        for each in page.items
    )
    return Reply(WorkflowList(rows, page.cursor))


async def get_workflow(call: Call[NoBody, AtVersion]) -> Reply | Refusal:
    """One workflow, in its newest version or the one asked for."""
    stored = await call.services.store.workflow(
        call.tenant, WorkflowId(call.params["workflow_id"]), version=call.query.version
    )
    if stored is None:
        return not_found("workflow")
    return Reply(
        WorkflowView(
            id=stored.workflow.id,
            version=stored.version,
            risk=stored.workflow.risk,
            created_at=when(stored.created_at),
            definition=definition(stored.workflow),
        )
    )


def _notation(content_type: bytes) -> Format:
    kind = content_type.partition(b";")[0].strip().lower()
    return "yaml" if kind in YAML_TYPES else "json"


def _faulty(faults: WorkflowFaults) -> Refusal:
    count = len(faults.faults)
    detail = f"the workflow has {count} fault{'' if count == 1 else 's'}: {faults.faults[0]}"
    return invalid(faults.faults, detail, code=Code.INVALID_WORKFLOW)


async def _contained(
    definitions: Definitions, tenant: TenantId, workflow: Workflow
) -> dict[WorkflowId, Workflow]:
    """The newest versions of all workflows that this one contains."""
    found: dict[WorkflowId, Workflow] = {}
    wanted = set(subworkflows(workflow))
    asked: set[WorkflowId] = set()
    while wanted and len(asked) < _REACHED_MAX:
        name = wanted.pop()
        asked.add(name)
        stored = await definitions.workflow(tenant, name)
        if stored is not None:
            found[name] = stored.workflow
            wanted |= subworkflows(stored.workflow) - asked
    return found


ROUTES: Final = (
    Route(
        method="PUT",
        path="/v1/workflows/{workflow_id}",
        handler=put_workflow,
        audits="workflow.put",
        summary="Store a workflow file, JSON or YAML by its content type.",
        roles=RUNNERS,
        scope=RouteScope.TENANT,
        takes=Takes.TEXT,
        answer=ApplyAnswer,
        codes=(Code.INVALID_WORKFLOW,),
    ),
    Route(
        method="GET",
        path="/v1/workflows",
        handler=list_workflows,
        summary="List workflows, each in its newest version, by id.",
        roles=RUNNERS,
        scope=RouteScope.TENANT,
        query=PagedWorkflows,
        answer=WorkflowList,
    ),
    Route(
        method="GET",
        path="/v1/workflows/{workflow_id}",
        handler=get_workflow,
        summary="One workflow, in its newest version or the one asked for.",
        roles=RUNNERS,
        scope=RouteScope.TENANT,
        query=AtVersion,
        answer=WorkflowView,
        codes=(Code.NOT_FOUND,),
    ),
)
