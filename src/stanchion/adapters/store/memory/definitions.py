"""Definitions in memory: workflows by version, tenants, documents, and replicas' summaries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from stanchion.adapters.cursor import read_cursor, write_cursor
from stanchion.adapters.outcomes import audit_of_config, audit_of_version
from stanchion.adapters.store.memory.state import Account, MemoryPart
from stanchion.core.audit import AuditEntry
from stanchion.core.budget import BudgetStanding, standing_of
from stanchion.core.json_value import JsonValue
from stanchion.core.model import Instant, RunId, TenantId, WorkflowId, WorkflowSource, shared_name
from stanchion.core.workflow import Workflow
from stanchion.ports.records import (
    Document,
    Page,
    StoredSummaries,
    StoredWorkflow,
    Tenant,
    TenantStanding,
    WorkflowUse,
)

_Name = TypeVar("_Name", bound=str)
_Value = TypeVar("_Value")


class MemoryDefinitions(MemoryPart):
    """See ``ports.store.Definitions``."""

    async def put_workflow(
        self, tenant: TenantId, workflow: Workflow, *, audit: AuditEntry | None = None
    ) -> int:
        workflows = self._state.account(tenant).workflows
        return self._add(workflows, workflow, WorkflowSource.OWN, audit)

    async def put_shared_workflow(
        self, workflow: Workflow, *, audit: AuditEntry | None = None
    ) -> int:
        return self._add(self._state.shared, workflow, WorkflowSource.SHARED, audit)

    async def workflow(
        self,
        tenant: TenantId,
        workflow_id: WorkflowId,
        *,
        version: int | None = None,
        source: WorkflowSource | None = None,
    ) -> StoredWorkflow | None:
        account = self._state.peek(tenant)
        own = account.workflows.get(workflow_id, [])
        if source is WorkflowSource.OWN or (own and source is None):
            return _version(own, version)
        wanted = version
        if wanted is None:
            wanted = self._state.version_in_force(account, shared_name(workflow_id))
        found = _version(self._state.shared.get(workflow_id, []), wanted)
        is_pinned = account.config is not None and workflow_id in account.config.workflows
        return None if found is None else replace(found, is_pinned=is_pinned)

    async def shared_workflow(
        self, workflow_id: WorkflowId, *, version: int | None = None
    ) -> StoredWorkflow | None:
        return _version(self._state.shared.get(workflow_id, []), version)

    async def list_workflows(
        self, tenant: TenantId, *, cursor: str | None = None, limit: int = 100
    ) -> Page[StoredWorkflow]:
        names = {*self._state.peek(tenant).workflows, *self._state.shared}
        in_force = [(name, await self.workflow(tenant, name)) for name in names]
        page = _by_name("workflows", in_force, cursor, limit)
        return Page(tuple(each for _, each in page.items if each is not None), page.cursor)

    async def list_shared_workflows(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> Page[StoredWorkflow]:
        newest = {name: versions[-1] for name, versions in self._state.shared.items()}
        page = _by_name("shared_workflows", newest.items(), cursor, limit)
        return Page(tuple(stored for _, stored in page.items), page.cursor)

    async def list_workflow_uses(
        self, workflow_id: WorkflowId, *, cursor: str | None = None, limit: int = 100
    ) -> Page[WorkflowUse]:
        known = (
            (tenant, account)
            for tenant, account in self._state.accounts.items()
            if account.config is not None or account.workflows or account.seen_at
        )
        page = _by_name("workflow_uses", known, cursor, limit)
        return Page(
            tuple(self._use(tenant, account, workflow_id) for tenant, account in page.items),
            page.cursor,
        )

    def _use(self, tenant: TenantId, account: Account, workflow_id: WorkflowId) -> WorkflowUse:
        own = self._state.version_in_force(account, workflow_id)
        places = self._state.places.of_workflow(tenant, workflow_id)
        files = (self._state.runs[RunId(run_id)] for _, run_id in places)
        return WorkflowUse(
            tenant=tenant,
            source=WorkflowSource.OWN if own else WorkflowSource.SHARED,
            version=own or self._state.version_in_force(account, shared_name(workflow_id)),
            pin=None if account.config is None else account.config.workflows.get(workflow_id),
            active=sum(
                file.run.workflow_source is WorkflowSource.SHARED
                and not file.run.status.is_finished
                for file in files
            ),
        )

    def _add(
        self,
        workflows: dict[WorkflowId, list[StoredWorkflow]],
        workflow: Workflow,
        source: WorkflowSource,
        audit: AuditEntry | None,
    ) -> int:
        versions = workflows.setdefault(workflow.id, [])
        # Compared as JSON: the order of steps decides which failure becomes the error of a run.
        text = msgspec.json.encode(workflow)
        if not versions or msgspec.json.encode(versions[-1].workflow) != text:
            number = len(versions) + 1
            versions.append(StoredWorkflow(workflow, number, self._state.now(), source))
            if audit is not None:
                self._state.audit(audit_of_version(audit, number))
        return len(versions)


def _version(versions: Sequence[StoredWorkflow], version: int | None) -> StoredWorkflow | None:
    wanted = len(versions) if version is None else version
    return versions[wanted - 1] if 1 <= wanted <= len(versions) else None


class MemoryTenants(MemoryPart):
    """See ``ports.store.Tenants``."""

    async def put_tenant(
        self, tenant: TenantId, config: Tenant, *, audit: AuditEntry | None = None
    ) -> None:
        account = self._state.account(tenant)
        before, account.config = account.config, config
        self._state.promote(tenant)
        if audit is not None and before != config:
            self._state.audit(audit_of_config(audit, before, config))

    async def promote(self, tenant: TenantId) -> tuple[RunId, ...]:
        return self._state.promote(tenant)

    async def delete_tenant(self, tenant: TenantId, *, audit: AuditEntry | None = None) -> bool:
        account = self._state.account(tenant)
        before, account.config = account.config, None
        self._state.promote(tenant)
        if audit is not None and before is not None:
            self._state.audit(audit_of_config(audit, before, None))
        return before is not None

    async def tenant(self, tenant: TenantId) -> Tenant:
        return self._state.peek(tenant).config or Tenant()

    async def budgets(self, tenant: TenantId) -> dict[str, BudgetStanding]:
        account, now = self._state.peek(tenant), self._state.now()
        limits = {} if account.config is None else account.config.budgets
        return {name: standing_of(limits[name], account.budgets.get(name), now) for name in limits}

    async def list_tenants(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> Page[tuple[TenantId, Tenant]]:
        configured = (
            (tenant, account.config)
            for tenant, account in self._state.accounts.items()
            if account.config is not None
        )
        return _by_name("tenants", configured, cursor, limit)

    async def list_standings(
        self, *, seen_since: Instant, cursor: str | None = None, limit: int = 100
    ) -> Page[TenantStanding]:
        standings = map(self._standing, [*self._state.accounts])
        listed = ((each.tenant, each) for each in standings if each.is_listed(seen_since))
        page = _by_name("tenants", listed, cursor, limit)
        return Page(tuple(each for _, each in page.items), page.cursor)

    async def standings(self, tenants: Sequence[TenantId]) -> tuple[TenantStanding, ...]:
        return tuple(map(self._standing, tenants))

    def _standing(self, tenant: TenantId) -> TenantStanding:
        account = self._state.peek(tenant)
        return TenantStanding(
            tenant=tenant,
            config=account.config,
            active=account.active,
            queued=len(account.queue),
            seen_at=account.seen_at,
        )


class MemoryDocuments(MemoryPart):
    """See ``ports.store.Documents``."""

    async def document(self, kind: str, name: str) -> Document | None:
        return self._state.documents.get(kind, {}).get(name)

    async def put_document(
        self,
        kind: str,
        name: str,
        value: JsonValue,
        *,
        read: int | None,
        audit: AuditEntry | None = None,
    ) -> Document | None:
        known = await self.document(kind, name)
        revision = 0 if known is None else known.revision
        if read not in {None, revision}:
            return None
        document = Document(value, revision + 1)
        self._state.documents.setdefault(kind, {})[name] = document
        self._state.audit(audit)
        return document

    async def list_documents(
        self, kind: str, *, cursor: str | None = None, limit: int = 100
    ) -> Page[tuple[str, Document]]:
        of_kind = self._state.documents.get(kind, {})
        return _by_name("documents", of_kind.items(), cursor, limit)

    async def delete_document(
        self, kind: str, name: str, *, audit: AuditEntry | None = None
    ) -> bool:
        removed = self._state.documents.get(kind, {}).pop(name, None)
        if removed is not None:
            self._state.audit(audit)
        return removed is not None


class MemoryReplicas(MemoryPart):
    """See ``ports.store.Replicas``."""

    async def report_replica(self, replica: str, summary: JsonValue, *, keep_ms: int) -> Instant:
        now = self._state.now()
        return self._state.summaries.report(replica, summary, keep_ms=keep_ms, now=now)

    async def replica_summaries(self) -> StoredSummaries:
        return self._state.summaries.read(self._state.now())

    async def remove_replica(self, replica: str) -> bool:
        return self._state.summaries.remove(replica)

    async def level(self) -> int:
        return self._state.level

    async def raise_level(self, level: int, *, audit: AuditEntry | None = None) -> int:
        if level > self._state.level:
            self._state.level = level
            self._state.audit(audit)
        return self._state.level


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
