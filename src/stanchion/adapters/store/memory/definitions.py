"""Definitions in memory: workflows by version, tenants, documents, and replicas' summaries."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TypeVar

import msgspec

from stanchion.adapters.cursor import read_cursor, write_cursor
from stanchion.adapters.store.memory.state import MemoryPart
from stanchion.core.json_value import JsonValue
from stanchion.core.model import Instant, TenantId, WorkflowId
from stanchion.core.workflow import Workflow
from stanchion.ports.records import Document, Page, StoredSummaries, StoredWorkflow, Tenant

__all__ = ["MemoryDefinitions", "MemoryDocuments", "MemoryReplicas", "MemoryTenants"]

_Name = TypeVar("_Name", bound=str)
_Value = TypeVar("_Value")


class MemoryDefinitions(MemoryPart):
    """See ``ports.store.Definitions``."""

    async def put_workflow(self, tenant: TenantId, workflow: Workflow) -> int:
        versions = self._state.account(tenant).workflows.setdefault(workflow.id, [])
        # Compared as JSON: the order of steps decides which failure becomes the error of a run.
        text = msgspec.json.encode(workflow)
        if not versions or msgspec.json.encode(versions[-1].workflow) != text:
            stored = StoredWorkflow(workflow, len(versions) + 1, self._state.now())
            versions.append(stored)
        return len(versions)

    async def workflow(
        self, tenant: TenantId, workflow_id: WorkflowId, *, version: int | None = None
    ) -> StoredWorkflow | None:
        versions = self._state.peek(tenant).workflows.get(workflow_id, [])
        wanted = len(versions) if version is None else version
        return versions[wanted - 1] if 1 <= wanted <= len(versions) else None

    async def list_workflows(
        self, tenant: TenantId, *, cursor: str | None = None, limit: int = 100
    ) -> Page[StoredWorkflow]:
        newest = {
            workflow_id: versions[-1]
            for workflow_id, versions in self._state.peek(tenant).workflows.items()
        }
        page = _by_name("workflows", newest.items(), cursor, limit)
        return Page(tuple(stored for _, stored in page.items), page.cursor)


class MemoryTenants(MemoryPart):
    """See ``ports.store.Tenants``."""

    async def put_tenant(self, tenant: TenantId, config: Tenant) -> None:
        self._state.account(tenant).config = config

    async def delete_tenant(self, tenant: TenantId) -> bool:
        account = self._state.account(tenant)
        was_configured, account.config = account.config is not None, None
        return was_configured

    async def tenant(self, tenant: TenantId) -> Tenant:
        return self._state.peek(tenant).config or Tenant()

    async def list_tenants(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> Page[tuple[TenantId, Tenant]]:
        configured = (
            (tenant, account.config)
            for tenant, account in self._state.accounts.items()
            if account.config is not None
        )
        return _by_name("tenants", configured, cursor, limit)


class MemoryDocuments(MemoryPart):
    """See ``ports.store.Documents``."""

    async def document(self, kind: str, name: str) -> Document | None:
        return self._state.documents.get(kind, {}).get(name)

    async def put_document(
        self, kind: str, name: str, value: JsonValue, *, read: int | None
    ) -> Document | None:
        known = await self.document(kind, name)
        revision = 0 if known is None else known.revision
        if read not in {None, revision}:
            return None
        document = Document(value, revision + 1)
        self._state.documents.setdefault(kind, {})[name] = document
        return document

    async def list_documents(
        self, kind: str, *, cursor: str | None = None, limit: int = 100
    ) -> Page[tuple[str, Document]]:
        of_kind = self._state.documents.get(kind, {})
        return _by_name("documents", of_kind.items(), cursor, limit)

    async def delete_document(self, kind: str, name: str) -> bool:
        return self._state.documents.get(kind, {}).pop(name, None) is not None


class MemoryReplicas(MemoryPart):
    """See ``ports.store.Replicas``."""

    async def report_replica(self, replica: str, summary: JsonValue, *, keep_ms: int) -> Instant:
        now = self._state.now()
        return self._state.summaries.report(replica, summary, keep_ms=keep_ms, now=now)

    async def replica_summaries(self) -> StoredSummaries:
        return self._state.summaries.read(self._state.now())

    async def remove_replica(self, replica: str) -> bool:
        return self._state.summaries.remove(replica)


def _by_name(
    kind: str, entries: Iterable[tuple[_Name, _Value]], cursor: str | None, limit: int
) -> Page[tuple[_Name, _Value]]:
    """One page of named values, sorted by name."""
    after = None if cursor is None else read_cursor(kind, cursor, tuple[str])[0]
    ordered = sorted(entries, key=lambda entry: entry[0])
    rest = (entry for entry in ordered if after is None or entry[0] > after)
    page = tuple(islice(rest, limit))
    more = next(rest, None) is not None
    return Page(page, write_cursor(kind, page[-1][0]) if more else None)
