"""Definitions in Redis: workflows by version, tenants, documents, and replicas' summaries."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stanchion.adapters.cursor import read_cursor, write_cursor
from stanchion.adapters.redis.client import RedisRequest
from stanchion.adapters.redis.connection import Reply
from stanchion.adapters.redis.node import pack
from stanchion.adapters.store.redis import decode, encode
from stanchion.adapters.store.redis.shards import ALL_SHARDS, Sharded, Shards
from stanchion.core.json_value import JsonValue
from stanchion.core.model import Instant, TenantId, WorkflowId, shard_of_tenant
from stanchion.core.workflow import Workflow
from stanchion.ports.records import (
    Document,
    Page,
    StoredSummaries,
    StoredSummary,
    StoredWorkflow,
    Tenant,
)

__all__ = [
    "RedisDefinitions",
    "RedisDocuments",
    "RedisReplicas",
    "RedisTenants",
    "page_of_names",
]


class RedisDefinitions(Sharded):
    """See ``ports.store.Definitions``."""

    async def put_workflow(self, tenant: TenantId, workflow: Workflow) -> int:
        words = (workflow.id, encode.to_json(workflow))
        shard = shard_of_tenant(tenant)
        step = self._shards.step("put_workflow", shard, *words, tenant=tenant)
        version: int = await self._shards.ask(step)
        return version

    async def workflow(
        self, tenant: TenantId, workflow_id: WorkflowId, *, version: int | None = None
    ) -> StoredWorkflow | None:
        found = await self._versions(
            tenant, [(workflow_id, version)], self._shards.client.deadline()
        )
        return found[0]

    async def list_workflows(
        self, tenant: TenantId, *, cursor: str | None = None, limit: int = 100
    ) -> Page[StoredWorkflow]:
        deadline = self._shards.client.deadline()
        slot = self._shards.keys.slots[shard_of_tenant(tenant)]
        index = (slot, self._shards.keys.of_tenant(tenant, "names"))
        names, onward = await page_of_names(
            self._shards, "workflows", [index], cursor, limit, deadline
        )
        found = await self._versions(tenant, [(WorkflowId(name), None) for name in names], deadline)
        return Page(tuple(each for each in found if each is not None), onward)

    async def _versions(
        self,
        tenant: TenantId,
        wanted: list[tuple[WorkflowId, int | None]],
        deadline: float,
    ) -> list[StoredWorkflow | None]:
        replies = await self._shards.ask_all(
            [
                self._shards.step(
                    "workflow",
                    shard_of_tenant(tenant),
                    workflow_id,
                    "" if version is None else version,
                    tenant=tenant,
                )
                for workflow_id, version in wanted
            ],
            deadline,
        )
        return [
            None if reply is None else decode.read_workflow(reply[1], int(reply[0]))
            for reply in replies
        ]


class RedisTenants(Sharded):
    """See ``ports.store.Tenants``."""

    async def put_tenant(self, tenant: TenantId, config: Tenant) -> None:
        shard = shard_of_tenant(tenant)
        step = self._shards.step("put_tenant", shard, tenant, encode.pack_tenant(config))
        await self._shards.ask(step)

    async def delete_tenant(self, tenant: TenantId) -> bool:
        step = self._shards.step("delete_tenant", shard_of_tenant(tenant), tenant)
        return bool(await self._shards.ask(step))

    async def tenant(self, tenant: TenantId) -> Tenant:
        packed = await self._shards.ask(self._config(tenant))
        return Tenant() if packed is None else decode.read_tenant(packed)

    async def list_tenants(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> Page[tuple[TenantId, Tenant]]:
        deadline = self._shards.client.deadline()
        keys = self._shards.keys
        indexes = [(keys.slots[shard], keys.of_shard(shard, "configured")) for shard in ALL_SHARDS]
        names, onward = await page_of_names(
            self._shards, "tenants", indexes, cursor, limit, deadline
        )
        tenants = [TenantId(name) for name in names]
        replies = await self._shards.ask_all([self._config(each) for each in tenants], deadline)
        return Page(
            tuple(
                (tenant, decode.read_tenant(packed))
                for tenant, packed in zip(tenants, replies, strict=True)
            ),
            onward,
        )

    def _config(self, tenant: TenantId) -> RedisRequest:
        shard = shard_of_tenant(tenant)
        configs = self._shards.keys.of_shard(shard, "configs")
        return self._shards.command(shard, "HGET", configs, tenant)


class RedisDocuments(Sharded):
    """See ``ports.store.Documents``."""

    async def document(self, kind: str, name: str) -> Document | None:
        return (await self._documents(kind, [name], self._shards.client.deadline()))[0]

    async def put_document(
        self, kind: str, name: str, value: JsonValue, *, read: int | None
    ) -> Document | None:
        keys = self._shards.keys
        # Not repeatable: after a lost reply, the repeat would find the revision of the first try.
        step = self._shards.step_at(
            "put_document",
            keys.common_slot,
            keys.documents(kind),
            *(name, encode.to_json(value), "" if read is None else read),
            is_repeatable=False,
        )
        revision = await self._shards.ask(step)
        return None if revision is None else Document(value, revision)

    async def list_documents(
        self, kind: str, *, cursor: str | None = None, limit: int = 100
    ) -> Page[tuple[str, Document]]:
        deadline = self._shards.client.deadline()
        keys = self._shards.keys
        index = (keys.common_slot, keys.documents(kind)[1])
        names, onward = await page_of_names(
            self._shards, "documents", [index], cursor, limit, deadline
        )
        found = await self._documents(kind, names, deadline)
        # A document may have been deleted since its name was read.
        return Page(
            tuple(
                (name, document)
                for name, document in zip(names, found, strict=True)
                if document is not None
            ),
            onward,
        )

    async def delete_document(self, kind: str, name: str) -> bool:
        keys = self._shards.keys
        step = self._shards.step_at(
            "delete_document", keys.common_slot, keys.documents(kind), name, is_repeatable=False
        )
        return bool(await self._shards.ask(step))

    async def _documents(
        self, kind: str, names: list[str], deadline: float
    ) -> list[Document | None]:
        keys = self._shards.keys
        documents, _ = keys.documents(kind)
        replies = await self._shards.ask_all(
            [RedisRequest(keys.common_slot, pack("HGET", documents, name)) for name in names],
            deadline,
        )
        return [None if reply is None else decode.read_document(reply) for reply in replies]


class RedisReplicas(Sharded):
    """See ``ports.store.Replicas``."""

    async def report_replica(self, replica: str, summary: JsonValue, *, keep_ms: int) -> Instant:
        now: int = await self._ask("report_replica", replica, encode.to_json(summary), keep_ms)
        return Instant(now)

    async def replica_summaries(self) -> StoredSummaries:
        now, *rest = await self._ask("replica_summaries")
        found = [
            StoredSummary(name.decode(), Instant(int(seen_at)), msgspec.json.decode(summary))
            for name, seen_at, summary in zip(rest[::3], rest[1::3], rest[2::3], strict=True)
        ]
        return StoredSummaries(Instant(now), tuple(sorted(found, key=lambda each: each.replica)))

    async def remove_replica(self, replica: str) -> bool:
        return bool(await self._ask("remove_replica", replica, is_repeatable=False))

    async def _ask(self, name: str, *words: str | bytes | int, is_repeatable: bool = True) -> Reply:
        keys = self._shards.keys
        step = self._shards.step_at(
            name, keys.common_slot, keys.replicas(), *words, is_repeatable=is_repeatable
        )
        return await self._shards.ask(step)


async def page_of_names(
    shards: Shards,
    kind: str,
    indexes: Sequence[tuple[int, str]],
    cursor: str | None,
    limit: int,
    deadline: float,
) -> tuple[list[str], str | None]:
    """The next names of several indexes (slot and key), merged, and the cursor of the next page."""
    after = "-" if cursor is None else "(" + read_cursor(kind, cursor, tuple[str])[0]
    replies = await shards.ask_all(
        [
            # One more than requested shows whether there is another page.
            RedisRequest(slot, pack("ZRANGEBYLEX", key, after, "+", "LIMIT", 0, limit + 1))
            for slot, key in indexes
        ],
        deadline,
    )
    names = sorted(name for reply in replies for name in reply)
    page = [name.decode() for name in names[:limit]]
    return page, write_cursor(kind, page[-1]) if len(names) > limit else None
