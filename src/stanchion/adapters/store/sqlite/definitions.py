"""Definitions: workflows by version, tenants, and documents."""

from __future__ import annotations

from typing import Final

from stanchion.adapters.cursor import read_cursor, write_cursor
from stanchion.adapters.sqlite.database import Database, Row
from stanchion.adapters.store.sqlite.codec import SQL, TENANT, VALUE, WORKFLOW, encode
from stanchion.core.json_value import JsonValue
from stanchion.core.model import TenantId, WorkflowId
from stanchion.core.workflow import Workflow
from stanchion.ports.records import Document, Page, StoredWorkflow, Tenant

__all__ = [
    "delete_document",
    "document",
    "list_documents",
    "list_tenants",
    "list_workflows",
    "put_document",
    "put_tenant",
    "put_workflow",
    "tenant_of",
    "workflow_of",
]

_WORKFLOWS: Final = "workflows"
_TENANTS: Final = "tenants"
_DOCUMENTS: Final = "documents"


def put_workflow(db: Database, tenant: TenantId, workflow: Workflow) -> int:
    """See ``ports.store.Definitions.put_workflow``."""
    newest = workflow_of(db, tenant, workflow.id)
    if newest is not None and _is_same(newest.workflow, workflow):
        return newest.version
    version = 1 if newest is None else newest.version + 1
    names = {"tenant": tenant, "workflow_id": workflow.id, "version": version}
    db.run(SQL["add_workflow"], **names, created_at=db.now(), workflow=encode(workflow))
    db.run(SQL["point_at_newest"], **names)
    return version


def workflow_of(
    db: Database, tenant: TenantId, workflow_id: WorkflowId, *, version: int | None = None
) -> StoredWorkflow | None:
    """See ``ports.store.Definitions.workflow``."""
    if version is None:
        row = db.first(SQL["newest_workflow"], tenant=tenant, workflow_id=workflow_id)
    else:
        row = db.first(
            SQL["workflow_version"], tenant=tenant, workflow_id=workflow_id, version=version
        )
    return None if row is None else _stored(row)


def list_workflows(
    db: Database, tenant: TenantId, *, cursor: str | None = None, limit: int = 100
) -> Page[StoredWorkflow]:
    """See ``ports.store.Definitions.list_workflows``."""
    after = _after(_WORKFLOWS, cursor)
    rows = db.every(SQL["list_workflows"], tenant=tenant, after=after, limit=limit + 1)
    found = tuple(_stored(row[1:]) for row in rows[:limit])
    return Page(found, _next(_WORKFLOWS, rows, limit))


def put_tenant(db: Database, tenant: TenantId, config: Tenant) -> None:
    """See ``ports.store.Tenants.put_tenant``."""
    db.run(SQL["put_tenant"], tenant=tenant, config=encode(config))


def delete_tenant(db: Database, tenant: TenantId) -> bool:
    """See ``ports.store.Tenants.delete_tenant``."""
    return db.first(SQL["delete_tenant"], tenant=tenant) is not None


def tenant_of(db: Database, tenant: TenantId) -> Tenant:
    """See ``ports.store.Tenants.tenant``."""
    row = db.first(SQL["read_tenant"], tenant=tenant)
    return Tenant() if row is None else TENANT.decode(row[0])


def list_tenants(
    db: Database, *, cursor: str | None = None, limit: int = 100
) -> Page[tuple[TenantId, Tenant]]:
    """See ``ports.store.Tenants.list_tenants``."""
    rows = db.every(SQL["list_tenants"], after=_after(_TENANTS, cursor), limit=limit + 1)
    found = tuple((TenantId(name), TENANT.decode(config)) for name, config in rows[:limit])
    return Page(found, _next(_TENANTS, rows, limit))


def document(db: Database, kind: str, name: str) -> Document | None:
    """See ``ports.store.Documents.document``."""
    row = db.first(SQL["read_document"], kind=kind, name=name)
    return None if row is None else Document(VALUE.decode(row[0]), row[1])


def put_document(
    db: Database, kind: str, name: str, value: JsonValue, *, read: int | None
) -> Document | None:
    """See ``ports.store.Documents.put_document``."""
    row = db.first(SQL["read_document"], kind=kind, name=name)
    present = 0 if row is None else row[1]
    if read is not None and read != present:
        return None
    revision = present + 1
    db.run(SQL["put_document"], kind=kind, name=name, revision=revision, value=encode(value))
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


def delete_document(db: Database, kind: str, name: str) -> bool:
    """See ``ports.store.Documents.delete_document``."""
    return bool(db.changed(SQL["delete_document"], kind=kind, name=name))


def _is_same(one: Workflow, other: Workflow) -> bool:
    # The order of steps counts: the first failure in file order becomes the error of a run.
    return one == other and list(one.steps) == list(other.steps)


def _stored(row: Row) -> StoredWorkflow:
    workflow, version, created_at = row
    return StoredWorkflow(WORKFLOW.decode(workflow), version, created_at)


def _after(kind: str, cursor: str | None) -> str:
    """The name after which a page begins; an empty string for the first page."""
    (after,) = ("",) if cursor is None else read_cursor(kind, cursor, tuple[str])
    return after


def _next(kind: str, rows: list[Row], limit: int) -> str | None:
    return write_cursor(kind, rows[limit - 1][0]) if len(rows) > limit else None
