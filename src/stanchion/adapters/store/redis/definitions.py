"""Definitions in Redis: workflows by version, tenants, documents, and replicas' summaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from stanchion.adapters.cursor import read_cursor, write_cursor
from stanchion.adapters.outcomes import audit_of_config
from stanchion.adapters.redis.client import RedisRequest
from stanchion.adapters.redis.connection import Reply
from stanchion.adapters.redis.node import pack
from stanchion.adapters.store.redis import decode, encode
from stanchion.adapters.store.redis.shards import ALL_SHARDS, Sharded, Shards
from stanchion.core.audit import AuditEntry
from stanchion.core.budget import BudgetStanding
from stanchion.core.json_value import JsonValue
from stanchion.core.model import (
    Instant,
    RunId,
    TenantId,
    WorkflowId,
    WorkflowSource,
    shard_of_tenant,
)
from stanchion.core.workflow import Workflow
from stanchion.ports.errors import BackendCorrupt
from stanchion.ports.records import (
    Document,
    Page,
    StoredSummaries,
    StoredSummary,
    StoredWorkflow,
    Tenant,
    TenantStanding,
    WorkflowUse,
)

_SHARED: Final = ("shared_versions", "shared_workflows", "shared_names")
_SHARE_TRIES_MAX: Final = 3
"""More than one try is needed only after a failover that lost writes."""
_SHARED_AT_ONCE: Final = 100
"""Versions, the newest, that a shard is given at most if it lacks more."""


class RedisDefinitions(Sharded):
    """See ``ports.store.Definitions``."""

    async def put_workflow(
        self, tenant: TenantId, workflow: Workflow, *, audit: AuditEntry | None = None
    ) -> int:
        packed = encode.pack_audit(audit, self._shards.audit_ttl_ms)
        words = (workflow.id, encode.to_json(workflow), tenant, packed)
        shard = shard_of_tenant(tenant)
        step = self._shards.step("put_workflow", shard, *words, tenant=tenant)
        version: int = await self._shards.ask(step)
        return version

    async def put_shared_workflow(
        self, workflow: Workflow, *, audit: AuditEntry | None = None
    ) -> int:
        shards, deadline = self._shards, self._shards.client.deadline()
        newest = await shards.read_all("HGET", "shared_versions", workflow.id, deadline=deadline)
        highest = max(int(each or 0) for each in newest)
        keys, text = shards.keys, encode.to_json(workflow)
        for _ in range(_SHARE_TRIES_MAX):
            words = (workflow.id, text, highest, encode.pack_audit(audit, shards.audit_ttl_ms))
            places = (*keys.shared_workflows(), *keys.common_audit(None))
            step = shards.step_at("put_shared", keys.common_slot, places, *words)
            version = int(await shards.ask(step, deadline))
            # A call that failed halfway may have left out shards, and a pin may name its version.
            # Raises if one shard does not answer: then the caller repeats the call.
            lowest = min(int(each or 0) for each in newest)
            if await _share(shards, workflow.id, lowest, version, deadline):
                return version
            highest = version + 1
        raise BackendCorrupt(f"shared workflow '{workflow.id}': no version is free in all shards")

    async def workflow(
        self,
        tenant: TenantId,
        workflow_id: WorkflowId,
        *,
        version: int | None = None,
        source: WorkflowSource | None = None,
    ) -> StoredWorkflow | None:
        found = await self._versions(
            tenant, [(workflow_id, version, source)], self._shards.client.deadline()
        )
        return found[0]

    async def shared_workflow(
        self, workflow_id: WorkflowId, *, version: int | None = None
    ) -> StoredWorkflow | None:
        deadline = self._shards.client.deadline()
        wanted = [(workflow_id, version)]
        if version is None:
            newest = await self._newest_shared([workflow_id], deadline)
            wanted = [(workflow_id, newest[0])]
        return (await self._shared_versions(wanted, deadline))[0]

    async def list_workflows(
        self, tenant: TenantId, *, cursor: str | None = None, limit: int = 100
    ) -> Page[StoredWorkflow]:
        deadline = self._shards.client.deadline()
        keys, shard = self._shards.keys, shard_of_tenant(tenant)
        indexes = [
            (keys.slots[shard], keys.of_tenant(tenant, "names")),
            (keys.slots[shard], keys.of_shard(shard, "shared_names")),
        ]
        names, onward = await page_of_names(
            self._shards, "workflows", indexes, cursor, limit, deadline
        )
        wanted = [(WorkflowId(name), None, None) for name in names]
        found = await self._versions(tenant, wanted, deadline)
        return Page(tuple(each for each in found if each is not None), onward)

    async def list_shared_workflows(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> Page[StoredWorkflow]:
        deadline = self._shards.client.deadline()
        keys = self._shards.keys
        names, onward = await page_of_names(
            self._shards,
            "shared_workflows",
            [(keys.common_slot, keys.shared_workflows()[2])],
            cursor,
            limit,
            deadline,
        )
        ids = [WorkflowId(name) for name in names]
        newest = await self._newest_shared(ids, deadline)
        found = await self._shared_versions(list(zip(ids, newest, strict=True)), deadline)
        return Page(tuple(each for each in found if each is not None), onward)

    async def list_workflow_uses(
        self, workflow_id: WorkflowId, *, cursor: str | None = None, limit: int = 100
    ) -> Page[WorkflowUse]:
        deadline = self._shards.client.deadline()
        keys = self._shards.keys
        indexes = [
            (keys.slots[shard], keys.of_shard(shard, name))
            for shard in ALL_SHARDS
            for name in ("configured", "authors", "seen_names")
        ]
        names, onward = await page_of_names(
            self._shards, "workflow_uses", indexes, cursor, limit, deadline
        )
        tenants = [TenantId(name) for name in names]
        replies = await self._shards.ask_all(
            [
                self._shards.step(
                    "uses", shard_of_tenant(tenant), workflow_id, tenant, tenant=tenant
                )
                for tenant in tenants
            ],
            deadline,
        )
        return Page(
            tuple(
                WorkflowUse(
                    tenant=tenant,
                    source=WorkflowSource.OWN if own else WorkflowSource.SHARED,
                    version=own or pin or newest,
                    pin=pin or None,
                    active=active,
                )
                for tenant, (own, pin, newest, active) in zip(tenants, replies, strict=True)
            ),
            onward,
        )

    async def _versions(
        self,
        tenant: TenantId,
        wanted: Sequence[tuple[WorkflowId, int | None, WorkflowSource | None]],
        deadline: float,
    ) -> list[StoredWorkflow | None]:
        replies = await self._shards.ask_all(
            [
                self._shards.step(
                    "workflow",
                    shard_of_tenant(tenant),
                    workflow_id,
                    "" if version is None else version,
                    source or "",
                    tenant,
                    tenant=tenant,
                )
                for workflow_id, version, source in wanted
            ],
            deadline,
        )
        return [None if reply is None else _read(*reply) for reply in replies]

    async def _newest_shared(self, ids: Sequence[WorkflowId], deadline: float) -> list[int]:
        """The newest versions of shared workflows; 0 for one that does not exist."""
        keys = self._shards.keys
        if not ids:
            return []
        words = pack("HMGET", keys.shared_workflows()[0], *ids)
        found = await self._shards.ask(RedisRequest(keys.common_slot, words), deadline)
        return [int(each or 0) for each in found]

    async def _shared_versions(
        self, wanted: Sequence[tuple[WorkflowId, int | None]], deadline: float
    ) -> list[StoredWorkflow | None]:
        keys = self._shards.keys
        records = keys.shared_workflows()[1]
        replies = await self._shards.ask_all(
            [
                RedisRequest(keys.common_slot, pack("HGET", records, f"{version}:{workflow_id}"))
                for workflow_id, version in wanted
            ],
            deadline,
        )
        return [
            None
            if packed is None
            else decode.read_workflow(packed, version or 0, WorkflowSource.SHARED)
            for (_, version), packed in zip(wanted, replies, strict=True)
        ]


async def finish_sharing(shards: Shards) -> int:
    """Add shared workflows to the shards that lack their newest version; returns how many.

    A process that ended while it shared one, or a failover of one shard, leaves such shards.
    """
    deadline, keys = shards.client.deadline(), shards.keys
    versions, _, _ = keys.shared_workflows()
    newest = _counts(
        await shards.ask(RedisRequest(keys.common_slot, pack("HGETALL", versions)), deadline)
    )
    if not newest:
        return 0
    in_shards = [
        _counts(reply)
        for reply in await shards.read_all("HGETALL", "shared_versions", deadline=deadline)
    ]
    lacking = 0
    for name, version in newest.items():
        lowest = min(each.get(name, 0) for each in in_shards)
        if lowest < version:
            lacking += 1
            await _share(shards, name, lowest, version, deadline)
    return lacking


async def _share(shards: Shards, name: str, lowest: int, newest: int, deadline: float) -> bool:
    """Add the versions above ``lowest``, which all shards have, to every shard, in ascending order.

    Returns whether every shard has the newest one now: after a failover a shard may have another
    workflow under its number.
    """
    records = shards.keys.shared_workflows()[1]
    is_shared = False
    lowest = min(max(lowest, newest - _SHARED_AT_ONCE), newest - 1)
    for version in range(lowest + 1, newest + 1):
        words = pack("HGET", records, f"{version}:{name}")
        packed = await shards.ask(RedisRequest(shards.keys.common_slot, words), deadline)
        if packed is not None:  # the numbers that a failover has lost are not given out again
            steps = shards.steps_on_all("share", _SHARED, name, version, packed)
            added = await shards.ask_all(steps, deadline)
            is_shared = all(each for answer in added for each in answer)
    return is_shared


def _counts(reply: Sequence[bytes]) -> dict[str, int]:
    return {name.decode(): int(count) for name, count in zip(reply[::2], reply[1::2], strict=True)}


def _read(version: bytes, packed: bytes, source: bytes, pinned: int) -> StoredWorkflow:
    """Decode the reply of ``workflow.lua``."""
    return decode.read_workflow(
        packed, int(version), WorkflowSource(source.decode()), is_pinned=bool(pinned)
    )


class RedisTenants(Sharded):
    """See ``ports.store.Tenants``."""

    async def put_tenant(
        self, tenant: TenantId, config: Tenant, *, audit: AuditEntry | None = None
    ) -> None:
        # The script adds the configuration before.
        entry = None if audit is None else audit_of_config(audit, None, config)
        packed = encode.pack_audit(entry, self._shards.audit_ttl_ms)
        words = (tenant, encode.pack_tenant(config), packed)
        shard = shard_of_tenant(tenant)
        await self._shards.ask(self._shards.step("put_tenant", shard, *words, tenant=tenant))

    async def promote(self, tenant: TenantId) -> tuple[RunId, ...]:
        words = (tenant, encode.DEFAULT_CAP)
        step = self._shards.step("promote", shard_of_tenant(tenant), *words, tenant=tenant)
        return tuple(RunId(each.decode()) for each in await self._shards.ask(step))

    async def delete_tenant(self, tenant: TenantId, *, audit: AuditEntry | None = None) -> bool:
        packed = encode.pack_audit(audit, self._shards.audit_ttl_ms)
        shard = shard_of_tenant(tenant)
        words = (tenant, packed, encode.DEFAULT_CAP)
        # Not repeatable: after a lost reply, the repeat would not find the tenant any more.
        step = self._shards.step("delete_tenant", shard, *words, tenant=tenant, is_repeatable=False)
        return bool(await self._shards.ask(step))

    async def tenant(self, tenant: TenantId) -> Tenant:
        packed = await self._shards.ask(self._config(tenant))
        return Tenant() if packed is None else decode.read_tenant(packed)

    async def budgets(self, tenant: TenantId) -> dict[str, BudgetStanding]:
        step = self._shards.step("budgets", shard_of_tenant(tenant), tenant)
        return decode.read_budgets(*await self._shards.ask(step))

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
        # A configuration may have been deleted since its tenant's name was read.
        return Page(
            tuple(
                (tenant, decode.read_tenant(packed))
                for tenant, packed in zip(tenants, replies, strict=True)
                if packed is not None
            ),
            onward,
        )

    async def list_standings(
        self, *, seen_since: Instant, cursor: str | None = None, limit: int = 100
    ) -> Page[TenantStanding]:
        deadline = self._shards.client.deadline()
        keys = self._shards.keys
        indexes = [
            (keys.slots[shard], keys.of_shard(shard, index))
            for shard in ALL_SHARDS
            for index in ("configured", "seen_names")
        ]
        found: list[TenantStanding] = []
        while True:
            # Tenants in both indexes come twice, so a page of names may have half as many tenants.
            names, cursor = await page_of_names(
                self._shards, "tenants", indexes, cursor, 2 * limit, deadline
            )
            tenants = [TenantId(name) for name in dict.fromkeys(names)]
            for standing in await self._standings(tenants, deadline):
                if not standing.is_listed(seen_since):
                    continue
                if len(found) == limit:
                    return Page(tuple(found), write_cursor("tenants", found[-1].tenant))
                found.append(standing)
            if cursor is None:
                return Page(tuple(found))

    async def standings(self, tenants: Sequence[TenantId]) -> tuple[TenantStanding, ...]:
        return tuple(await self._standings(tenants, self._shards.client.deadline()))

    async def _standings(
        self, tenants: Sequence[TenantId], deadline: float
    ) -> list[TenantStanding]:
        parts = ("configs", "active", "queued", "seen")
        replies = await self._shards.ask_all(
            [
                self._shards.command(shard, "HGET", self._shards.keys.of_shard(shard, part), tenant)
                for tenant in tenants
                for shard in (shard_of_tenant(tenant),)
                for part in parts
            ],
            deadline,
        )
        return [
            TenantStanding(
                tenant=tenant,
                config=None if config is None else decode.read_tenant(config),
                active=int(active or 0),
                queued=int(queued or 0),
                seen_at=Instant(int(seen or 0)),
            )
            for tenant, config, active, queued, seen in zip(
                tenants, *(replies[part :: len(parts)] for part in range(len(parts))), strict=True
            )
        ]

    def _config(self, tenant: TenantId) -> RedisRequest:
        shard = shard_of_tenant(tenant)
        configs = self._shards.keys.of_shard(shard, "configs")
        return self._shards.command(shard, "HGET", configs, tenant)


class RedisDocuments(Sharded):
    """See ``ports.store.Documents``."""

    async def document(self, kind: str, name: str) -> Document | None:
        return (await self._documents(kind, [name], self._shards.client.deadline()))[0]

    async def put_document(
        self,
        kind: str,
        name: str,
        value: JsonValue,
        *,
        read: int | None,
        audit: AuditEntry | None = None,
    ) -> Document | None:
        keys = self._shards.keys
        # Not repeatable: after a lost reply, the repeat would find the revision of the first try.
        step = self._shards.step_at(
            "put_document",
            keys.common_slot,
            self._keys(kind, audit),
            *(name, encode.to_json(value), "" if read is None else read),
            encode.pack_audit(audit, self._shards.audit_ttl_ms),
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

    async def delete_document(
        self, kind: str, name: str, *, audit: AuditEntry | None = None
    ) -> bool:
        step = self._shards.step_at(
            "delete_document",
            self._shards.keys.common_slot,
            self._keys(kind, audit),
            name,
            encode.pack_audit(audit, self._shards.audit_ttl_ms),
            is_repeatable=False,
        )
        return bool(await self._shards.ask(step))

    def _keys(self, kind: str, audit: AuditEntry | None) -> tuple[str, ...]:
        keys = self._shards.keys
        tenant = None if audit is None else audit.tenant
        return (*keys.documents(kind), *keys.common_audit(tenant))

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

    async def level(self) -> int:
        keys = self._shards.keys
        found = await self._shards.ask(RedisRequest(keys.common_slot, pack("GET", keys.format)))
        return decode.read_level(found)

    async def raise_level(self, level: int, *, audit: AuditEntry | None = None) -> int:
        keys = self._shards.keys
        packed = encode.pack_audit(audit, self._shards.audit_ttl_ms)
        step = self._shards.step_at(
            "raise_level",
            keys.common_slot,
            (keys.format, *keys.common_audit(None)),
            *(level, encode.format_text(level), packed),
        )
        raised: int = await self._shards.ask(step)
        return raised

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
    """The next names of several indexes (slot and key), merged, and the cursor of the next page.

    A name in two indexes is returned once.
    """
    after = "-" if cursor is None else "(" + read_cursor(kind, cursor, tuple[str])[0]
    replies = await shards.ask_all(
        [
            # One more than requested shows whether there is another page.
            RedisRequest(slot, pack("ZRANGEBYLEX", key, after, "+", "LIMIT", 0, limit + 1))
            for slot, key in indexes
        ],
        deadline,
    )
    names = sorted({name for reply in replies for name in reply})
    page = [name.decode() for name in names[:limit]]
    return page, write_cursor(kind, page[-1]) if len(names) > limit else None
