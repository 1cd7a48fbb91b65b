"""Workflow routes: store, list and get workflows, those of a tenant and shared ones."""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec

from stanchion.core.faults import WorkflowFaults
from stanchion.core.model import TenantId, WorkflowId, WorkflowSource, shared_name
from stanchion.core.plan import link, subworkflows
from stanchion.core.upgrade import ITEM_WORKFLOWS, SHARED_WORKFLOWS
from stanchion.core.workflow import ForEachWorkflowSpec, Workflow
from stanchion.core.workflow_file import Format, parse_workflow, with_lines
from stanchion.gateway.problems import Refusal, invalid, not_found, upgrade_unfinished
from stanchion.gateway.route import (
    ADMINS,
    OPERATORS,
    RUNNERS,
    Call,
    NoBody,
    NoQuery,
    Paging,
    Reply,
    RouteScope,
    RouteTable,
)
from stanchion.gateway.views import definition, wire_view
from stanchion.ports.records import StoredWorkflow, WorkflowUse
from stanchion.ports.store import Definitions
from stanchion.wire.identifiers import WorkflowVersion
from stanchion.wire.problems import Code
from stanchion.wire.runs import (
    ApplyAnswer,
    WorkflowList,
    WorkflowRow,
    WorkflowUseList,
    WorkflowUseRow,
    WorkflowView,
)

ROUTES: Final = RouteTable()

YAML_TYPES: Final = frozenset({b"application/yaml", b"text/yaml", b"application/x-yaml"})
_REACHED_MAX: Final = 500
"""Workflows that one may contain, directly or not; more do not fit into its steps."""


class AtVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One version, or the one in force."""

    version: WorkflowVersion | None = None


class OfSource(AtVersion, frozen=True, forbid_unknown_fields=True):
    """One version, or the one in force; of the tenant's own workflow or of the shared one."""

    source: WorkflowSource | None = None


@ROUTES.add(
    "PUT /v1/workflows/{workflow_id}",
    RUNNERS,
    RouteScope.TENANT,
    ApplyAnswer,
    audits="workflow.put",
    codes=(Code.INVALID_WORKFLOW, Code.UPGRADE_UNFINISHED),
)
async def put_workflow(call: Call[bytes, NoQuery]) -> Reply | Refusal:
    """Store a workflow file, JSON or YAML by its content type.

    The same workflow again keeps its version.
    """
    workflow = await _checked(call, WorkflowSource.OWN)
    if isinstance(workflow, Refusal):
        return workflow
    if any(isinstance(spec, ForEachWorkflowSpec) for spec in workflow.steps.values()):
        unfinished = await call.services.upgrades.require(ITEM_WORKFLOWS)
        if unfinished is not None:
            return upgrade_unfinished("a for_each with a workflow", unfinished)
    entry = call.audit(f"workflow/{workflow.id}", tenant=call.tenant)
    version = await call.services.store.put_workflow(call.tenant, workflow, audit=entry)
    call.services.plans.forget(call.tenant, workflow.id)
    return Reply(ApplyAnswer(workflow.id, version))


@ROUTES.add(
    "PUT /v1/shared/workflows/{workflow_id}",
    ADMINS,
    RouteScope.DEPLOYMENT,
    ApplyAnswer,
    audits="shared_workflow.put",
    codes=(Code.INVALID_WORKFLOW, Code.UPGRADE_UNFINISHED),
)
async def put_shared_workflow(call: Call[bytes, NoQuery]) -> Reply | Refusal:
    """Store a workflow file for every tenant without an own workflow of that id."""
    unfinished = await call.services.upgrades.require(SHARED_WORKFLOWS)
    if unfinished is not None:
        return upgrade_unfinished("a shared workflow", unfinished)
    workflow = await _checked(call, WorkflowSource.SHARED)
    if isinstance(workflow, Refusal):
        return workflow
    entry = call.audit(f"shared_workflow/{workflow.id}", tenant=None)
    version = await call.services.store.put_shared_workflow(workflow, audit=entry)
    return Reply(ApplyAnswer(workflow.id, version))


@ROUTES.add("GET /v1/workflows", RUNNERS, RouteScope.TENANT, WorkflowList)
async def list_workflows(call: Call[NoBody, Paging]) -> Reply:
    """List workflows, own and shared, each in the version in force, by id."""
    query = call.query
    page = await call.services.store.list_workflows(
        call.tenant, cursor=query.cursor, limit=query.limit
    )
    return Reply(WorkflowList(tuple(map(_row, page.items)), page.cursor))


@ROUTES.add("GET /v1/shared/workflows", OPERATORS, RouteScope.DEPLOYMENT, WorkflowList)
async def list_shared_workflows(call: Call[NoBody, Paging]) -> Reply:
    """List shared workflows, each in its newest version, by id."""
    query = call.query
    page = await call.services.store.list_shared_workflows(cursor=query.cursor, limit=query.limit)
    return Reply(WorkflowList(tuple(map(_row, page.items)), page.cursor))


@ROUTES.add(
    "GET /v1/workflows/{workflow_id}",
    RUNNERS,
    RouteScope.TENANT,
    WorkflowView,
    codes=(Code.NOT_FOUND,),
)
async def get_workflow(call: Call[NoBody, OfSource]) -> Reply | Refusal:
    """One workflow, own or shared, in the version in force or the one asked for."""
    query = call.query
    workflow_id = WorkflowId(call.params["workflow_id"])
    read = partial(call.services.store.workflow, call.tenant, workflow_id, source=query.source)
    stored = await read(version=query.version)
    if stored is None:
        in_force = None if query.version is None else await read()
        return _no_version("workflow", query.version, in_force)
    return Reply(_view(stored))


@ROUTES.add(
    "GET /v1/shared/workflows/{workflow_id}",
    OPERATORS,
    RouteScope.DEPLOYMENT,
    WorkflowView,
    codes=(Code.NOT_FOUND,),
)
async def get_shared_workflow(call: Call[NoBody, AtVersion]) -> Reply | Refusal:
    """One shared workflow, in its newest version or the one asked for."""
    workflow_id, version = WorkflowId(call.params["workflow_id"]), call.query.version
    stored = await call.services.store.shared_workflow(workflow_id, version=version)
    if stored is None:
        newest = None
        if version is not None:
            newest = await call.services.store.shared_workflow(workflow_id)
        return _no_version("shared workflow", version, newest)
    return Reply(_view(stored))


def _no_version(what: str, version: int | None, in_force: StoredWorkflow | None) -> Refusal:
    """404 for the workflow, or for its version if the workflow has others."""
    if in_force is None:
        return not_found(what)
    there = f"version {in_force.version} is in force"
    detail = f"there is no version {version} of {what} '{in_force.workflow.id}': {there}"
    return Refusal(code=Code.NOT_FOUND, detail=detail)


@ROUTES.add(
    "GET /v1/shared/workflows/{workflow_id}/usage",
    OPERATORS,
    RouteScope.DEPLOYMENT,
    WorkflowUseList,
    codes=(Code.NOT_FOUND,),
)
async def list_workflow_uses(call: Call[NoBody, Paging]) -> Reply | Refusal:
    """List what each tenant runs under the id of a shared workflow, by tenant."""
    store, workflow_id = call.services.store, WorkflowId(call.params["workflow_id"])
    if await store.shared_workflow(workflow_id) is None:
        return not_found("shared workflow")
    page = await store.list_workflow_uses(
        workflow_id, cursor=call.query.cursor, limit=call.query.limit
    )
    return Reply(WorkflowUseList(tuple(map(_use_row, page.items)), page.cursor))


_use_row = wire_view(WorkflowUse, WorkflowUseRow)
_row = wire_view(
    StoredWorkflow, WorkflowRow, id="workflow.id", risk="workflow.risk", pinned="is_pinned"
)
_view = wire_view(
    StoredWorkflow,
    WorkflowView,
    id="workflow.id",
    risk="workflow.risk",
    pinned="is_pinned",
    definition=lambda stored: definition(stored.workflow),
)


async def _checked(call: Call[bytes, NoQuery], source: WorkflowSource) -> Workflow | Refusal:
    """The workflow in the body, if it can be linked with the workflows that it contains."""
    name = call.params["workflow_id"]
    notation = _notation(call.headers.get(b"content-type", b""))
    executor = call.services.executor
    workflow = await executor.run(
        call.tenant, lambda: parse_workflow(call.body, format=notation, workflow_id=name)
    )
    if isinstance(workflow, WorkflowFaults):
        is_other_notation = notation == "json" and not call.body.lstrip().startswith(b"{")
        return _faulty(workflow, _YAML_HINT if call.body and is_other_notation else "")
    tenant = call.tenant if source is WorkflowSource.OWN else None
    others = await _contained(call.services.store, tenant, workflow)
    plan = await executor.run(
        call.tenant, lambda: link(workflow, others, source=source), may_refuse=False
    )
    if isinstance(plan, WorkflowFaults):
        return _faulty(
            await executor.run(call.tenant, lambda: with_lines(plan, call.body, notation))
        )
    return workflow


def _notation(content_type: bytes) -> Format:
    kind = content_type.partition(b";")[0].strip().lower()
    return "yaml" if kind in YAML_TYPES else "json"


_YAML_HINT: Final = "; send YAML with Content-Type: application/yaml"


def _faulty(faults: WorkflowFaults, hint: str = "") -> Refusal:
    count = len(faults.faults)
    detail = f"the workflow has {count} fault{'' if count == 1 else 's'}: {faults.faults[0]}{hint}"
    return invalid(faults.faults, detail, code=Code.INVALID_WORKFLOW)


async def _contained(
    definitions: Definitions, tenant: TenantId | None, workflow: Workflow
) -> dict[WorkflowId, Workflow]:
    """All workflows that this one contains, in force for the tenant; ``None``: newest shared ones.

    Below a shared workflow all are shared.
    """
    found: dict[WorkflowId, Workflow] = {}
    wanted = {(sub, tenant is None) for sub in subworkflows(workflow)}
    asked: set[tuple[WorkflowId, bool]] = set()
    while wanted and len(asked) < _REACHED_MAX:
        name, only_shared = each = wanted.pop()
        asked.add(each)
        if tenant is None:
            stored = await definitions.shared_workflow(name)
        else:
            source = WorkflowSource.SHARED if only_shared else None
            stored = await definitions.workflow(tenant, name, source=source)
        if stored is not None:
            is_shared = stored.source is WorkflowSource.SHARED
            found[shared_name(name) if is_shared else name] = stored.workflow
            wanted |= {(sub, is_shared) for sub in subworkflows(stored.workflow)} - asked
    return found
