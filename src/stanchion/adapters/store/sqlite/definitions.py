"""Definitions: workflows by version, tenants, and documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stanchion.adapters.cursor import read_cursor, write_cursor
from stanchion.adapters.outcomes import audit_of_config, audit_of_version
from stanchion.adapters.sqlite.database import Database, Row
from stanchion.adapters.store.sqlite.audit import add_audit
from stanchion.adapters.store.sqlite.budgets import stored_tallies
from stanchion.adapters.store.sqlite.codec import SQL, TENANT, VALUE, WORKFLOW, encode, encode_text
from stanchion.adapters.store.sqlite.queue import promote
from stanchion.core.audit import AuditEntry
from stanchion.core.budget import BudgetStanding, standing_of
from stanchion.core.json_value import JsonValue
from stanchion.core.model import Instant, TenantId, WorkflowId, WorkflowSource
from stanchion.core.workflow import Workflow
from stanchion.ports.records import (
    Document,
    Page,
    StoredWorkflow,
    Tenant,
    TenantStanding,
    WorkflowUse,
)

_SHARED: Final = TenantId("*")
"""Stands for the tenant in the rows of shared workflows. No tenant has this name."""
_WORKFLOWS: Final = "workflows"
_SHARED_WORKFLOWS: Final = "shared_workflows"
_USES: Final = "workflow_uses"
_TENANTS: Final = "tenants"
_DOCUMENTS: Final = "documents"


def put_workflow(
    db: Database, tenant: TenantId, workflow: Workflow, *, audit: AuditEntry | None = None
) -> int:
    """See ``ports.store.Definitions.put_workflow``."""
    row = db.first(SQL["newest_workflow"], tenant=tenant, workflow_id=workflow.id)
    newest = None if row is None else _stored(row, tenant)
    if newest is not None and _is_same(newest.workflow, workflow):
        return newest.version
    version = 1 if newest is None else newest.version + 1
    names = {"tenant": tenant, "workflow_id": workflow.id, "version": version}
    db.run(SQL["add_workflow"], **names, created_at=db.now(), workflow=encode(workflow))
    db.run(SQL["point_at_newest"], **names)
    if audit is not None:
        add_audit(db, audit_of_version(audit, version))
    return version


def put_shared_workflow(
    db: Database, workflow: Workflow, *, audit: AuditEntry | None = None
) -> int:
    """See ``ports.store.Definitions.put_shared_workflow``."""
    return put_workflow(db, _SHARED, workflow, audit=audit)


def workflow_of(
    db: Database,
    tenant: TenantId,
    workflow_id: WorkflowId,
    *,
    version: int | None = None,
    source: WorkflowSource | None = None,
) -> StoredWorkflow | None:
    """See ``ports.store.Definitions.workflow``."""
    names = {"tenant": tenant, "workflow_id": workflow_id}
    found = db.first(SQL["workflow_in_force"], **names, source=source or "")
    if found is None:
        return None
    owner, in_force, is_pinned = found
    names = {"tenant": owner, "workflow_id": workflow_id}
    wanted = in_force if version is None else version
    row = db.first(SQL["workflow_version"], **names, version=wanted)
    return None if row is None else _stored(row, owner, is_pinned=bool(is_pinned))


def shared_workflow(
    db: Database, workflow_id: WorkflowId, *, version: int | None = None
) -> StoredWorkflow | None:
    """See ``ports.store.Definitions.shared_workflow``."""
    names = {"tenant": _SHARED, "workflow_id": workflow_id}
    if version is None:
        row = db.first(SQL["newest_workflow"], **names)
    else:
        row = db.first(SQL["workflow_version"], **names, version=version)
    return None if row is None else _stored(row, _SHARED)


def list_workflows(
    db: Database, tenant: TenantId, *, cursor: str | None = None, limit: int = 100
) -> Page[StoredWorkflow]:
    """See ``ports.store.Definitions.list_workflows``."""
    after = _after(_WORKFLOWS, cursor)
    rows = db.every(SQL["list_workflows_in_force"], tenant=tenant, after=after, limit=limit + 1)
    found = tuple(
        _stored((*stored,), owner, is_pinned=bool(is_pinned))
        for _, *stored, owner, is_pinned in rows[:limit]
    )
    return Page(found, _next(_WORKFLOWS, rows, limit))


def list_shared_workflows(
    db: Database, *, cursor: str | None = None, limit: int = 100
) -> Page[StoredWorkflow]:
    """See ``ports.store.Definitions.list_shared_workflows``."""
    after = _after(_SHARED_WORKFLOWS, cursor)
    rows = db.every(SQL["list_workflows"], tenant=_SHARED, after=after, limit=limit + 1)
    found = tuple(_stored(row[1:], _SHARED) for row in rows[:limit])
    return Page(found, _next(_SHARED_WORKFLOWS, rows, limit))


def list_workflow_uses(
    db: Database, workflow_id: WorkflowId, *, cursor: str | None = None, limit: int = 100
) -> Page[WorkflowUse]:
    """See ``ports.store.Definitions.list_workflow_uses``."""
    after = _after(_USES, cursor)
    rows = db.every(
        SQL["list_workflow_uses"], workflow_id=workflow_id, after=after, limit=limit + 1
    )
    found = tuple(
        WorkflowUse(
            tenant=tenant,
            source=WorkflowSource.OWN if own else WorkflowSource.SHARED,
            version=own or pin or newest or 0,
            pin=pin,
            active=active,
        )
        for tenant, own, pin, newest, active in rows[:limit]
    )
    return Page(found, _next(_USES, rows, limit))


def put_tenant(
    db: Database, tenant: TenantId, config: Tenant, *, audit: AuditEntry | None = None
) -> None:
    """See ``ports.store.Tenants.put_tenant``."""
    row = None if audit is None else db.first(SQL["read_tenant"], tenant=tenant)
    before = None if row is None else TENANT.decode(row[0])
    if audit is not None and before != config:
        add_audit(db, audit_of_config(audit, before, config))
    db.run(SQL["put_tenant"], tenant=tenant, config=encode(config))
    db.run(SQL["delete_pins"], tenant=tenant)
    for workflow_id, version in config.workflows.items():
        db.run(SQL["put_pin"], tenant=tenant, workflow_id=workflow_id, version=version)
    promote(db, tenant)


def delete_tenant(db: Database, tenant: TenantId, *, audit: AuditEntry | None = None) -> bool:
    """See ``ports.store.Tenants.delete_tenant``."""
    before = tenant_of(db, tenant)
    db.run(SQL["delete_pins"], tenant=tenant)
    is_removed = db.first(SQL["delete_tenant"], tenant=tenant) is not None
    if audit is not None and is_removed:
        add_audit(db, audit_of_config(audit, before, None))
    promote(db, tenant)
    return is_removed


def tenant_of(db: Database, tenant: TenantId) -> Tenant:
    """See ``ports.store.Tenants.tenant``."""
    row = db.first(SQL["read_tenant"], tenant=tenant)
    return Tenant() if row is None else TENANT.decode(row[0])


def budgets_of(db: Database, tenant: TenantId) -> dict[str, BudgetStanding]:
    """See ``ports.store.Tenants.budgets``."""
    limits, stored, now = tenant_of(db, tenant).budgets, stored_tallies(db, tenant), db.now()
    return {name: standing_of(limits[name], stored.get(name), now) for name in limits}


def list_tenants(
    db: Database, *, cursor: str | None = None, limit: int = 100
) -> Page[tuple[TenantId, Tenant]]:
    """See ``ports.store.Tenants.list_tenants``."""
    rows = db.every(SQL["list_tenants"], after=_after(_TENANTS, cursor), limit=limit + 1)
    found = tuple((TenantId(name), TENANT.decode(config)) for name, config in rows[:limit])
    return Page(found, _next(_TENANTS, rows, limit))


def list_standings(
    db: Database, *, seen_since: Instant, cursor: str | None = None, limit: int = 100
) -> Page[TenantStanding]:
    """See ``ports.store.Tenants.list_standings``."""
    after = _after(_TENANTS, cursor)
    rows = db.every(SQL["list_standings"], after=after, since=seen_since, limit=limit + 1)
    return Page(tuple(map(_standing, rows[:limit])), _next(_TENANTS, rows, limit))


def standings(db: Database, tenants: Sequence[TenantId]) -> tuple[TenantStanding, ...]:
    """See ``ports.store.Tenants.standings``."""
    rows = db.every(SQL["standings"], tenants=encode_text([*tenants]))
    found = {row[0]: _standing(row) for row in rows}
    return tuple(found[each] for each in tenants)


def _standing(row: Row) -> TenantStanding:
    name, config, active, queued, seen_at = row
    return TenantStanding(
        tenant=TenantId(name),
        config=None if config is None else TENANT.decode(config),
        active=active or 0,
        queued=queued or 0,
        seen_at=Instant(seen_at or 0),
    )


def document(db: Database, kind: str, name: str) -> Document | None:
    """See ``ports.store.Documents.document``."""
    row = db.first(SQL["read_document"], kind=kind, name=name)
    return None if row is None else Document(VALUE.decode(row[0]), row[1])


def put_document(
    db: Database,
    kind: str,
    name: str,
    value: JsonValue,
    *,
    read: int | None,
    audit: AuditEntry | None = None,
) -> Document | None:
    """See ``ports.store.Documents.put_document``."""
    row = db.first(SQL["read_document"], kind=kind, name=name)
    present = 0 if row is None else row[1]
    if read is not None and read != present:
        return None
    revision = present + 1
    db.run(SQL["put_document"], kind=kind, name=name, revision=revision, value=encode(value))
    if audit is not None:
        add_audit(db, audit)
    return Document(value, revision)


def list_documents(
    db: Database, kind: str, *, cursor: str | None = None, limit: int = 100
) -> Page[tuple[str, Document]]:
    """See ``ports.store.Documents.list_documents``."""
    after = _after(_DOCUMENTS, cursor)
    rows = db.every(SQL["list_documents"], kind=kind, after=after, limit=limit + 1)
    found = tuple(
        (name, Document(VALUE.decode(value), revision)) for name, value, revision in rows[:limit]
    )
    return Page(found, _next(_DOCUMENTS, rows, limit))


def delete_document(db: Database, kind: str, name: str, *, audit: AuditEntry | None = None) -> bool:
    """See ``ports.store.Documents.delete_document``."""
    is_removed = bool(db.changed(SQL["delete_document"], kind=kind, name=name))
    if audit is not None and is_removed:
        add_audit(db, audit)
    return is_removed


def _is_same(one: Workflow, other: Workflow) -> bool:
    # The order of steps counts: the first failure in file order becomes the error of a run.
    return one == other and list(one.steps) == list(other.steps)


def _stored(row: Row, owner: TenantId, *, is_pinned: bool = False) -> StoredWorkflow:
    workflow, version, created_at = row
    source = WorkflowSource.SHARED if owner == _SHARED else WorkflowSource.OWN
    return StoredWorkflow(WORKFLOW.decode(workflow), version, created_at, source, is_pinned)


def _after(kind: str, cursor: str | None) -> str:
    """The name after which a page begins; an empty string for the first page."""
    (after,) = ("",) if cursor is None else read_cursor(kind, cursor, tuple[str])
    return after


def _next(kind: str, rows: list[Row], limit: int) -> str | None:
    return write_cursor(kind, rows[limit - 1][0]) if len(rows) > limit else None
