"""Administration routes: tenants, keys and settings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from stanchion.core.budget import BudgetLimit, BudgetStanding, BudgetWindow
from stanchion.core.faults import Fault
from stanchion.core.json_value import JsonObject
from stanchion.core.model import Instant, TenantId, WorkflowId
from stanchion.core.queue import OnFull
from stanchion.core.settings import override_faults
from stanchion.core.upgrade import ADMISSION_QUEUE, BUDGETS, SHARED_WORKFLOWS
from stanchion.gateway.body import check_value
from stanchion.gateway.problems import (
    Refusal,
    invalid,
    invalid_member,
    not_found,
    upgrade_unfinished,
)
from stanchion.gateway.route import (
    ADMINS,
    EVERY_ROLE,
    OPERATORS,
    Call,
    NoBody,
    NoQuery,
    Paging,
    Reply,
    RouteScope,
    RouteTable,
)
from stanchion.gateway.views import LAST_INSTANT, key_row, to_instant, when, wire_view
from stanchion.ports.records import Tenant, TenantStanding
from stanchion.ports.store import Definitions
from stanchion.services.log import log_event
from stanchion.wire.admin import (
    BudgetConfig,
    CreateKey,
    KeyCreated,
    KeyList,
    KeyRow,
    Role,
    TenantBudget,
    TenantConfig,
    TenantList,
    TenantRow,
    TenantView,
)
from stanchion.wire.identifiers import ALL_TENANTS
from stanchion.wire.problems import Code

ROUTES: Final = RouteTable()


_OVERRIDE_BYTES_MAX: Final = 64 * 1024


@ROUTES.add(
    "PUT /v1/admin/tenants/{tenant}",
    ADMINS,
    RouteScope.DEPLOYMENT,
    TenantConfig,
    audits="tenant.put",
    codes=(Code.UPGRADE_UNFINISHED,),
)
async def put_tenant(call: Call[TenantConfig, NoQuery]) -> Reply | Refusal:
    """Replace a tenant's configuration. In force when answered."""
    config = call.body
    check_value(call, "admission", config.admission, bytes_max=_OVERRIDE_BYTES_MAX)
    faults = override_faults(call.services.settings.current, config.admission)
    if faults:
        return invalid(faults, str(faults[0]))
    if config.workflows:
        missing = await _missing_pins(call.services.store, config.workflows)
        if missing:
            return invalid(missing, str(missing[0]))
        unfinished = await call.services.upgrades.require(SHARED_WORKFLOWS)
        if unfinished is not None:
            return upgrade_unfinished("a pin of a shared workflow", unfinished)
    if config.budgets:
        unfinished = await call.services.upgrades.require(BUDGETS)
        if unfinished is not None:
            return upgrade_unfinished("a budget", unfinished)
    if config.on_full is OnFull.QUEUE:
        unfinished = await call.services.upgrades.require(ADMISSION_QUEUE)
        if unfinished is not None:
            return upgrade_unfinished("a tenant that queues", unfinished)
    tenant = TenantId(call.params["tenant"])
    await call.services.gate.tenants.put(
        tenant,
        Tenant(
            config.max_concurrent_runs,
            config.job_rate_per_s,
            config.admission,
            {WorkflowId(name): version for name, version in config.workflows.items()},
            {
                name: BudgetLimit(each.limit, BudgetWindow(each.window))
                for name, each in config.budgets.items()
            },
            config.on_full,
            config.queue_max,
            config.queue_wait_s,
        ),
        audit=call.audit(f"tenant/{tenant}", tenant=tenant),
    )
    log_event(logging.INFO, "tenant_changed", tenant=tenant, actor=call.actor)
    return Reply(config)


async def _missing_pins(definitions: Definitions, pins: Mapping[str, int]) -> list[Fault]:
    """A fault for each pin of a version that does not exist. Versions are never deleted."""
    found = await asyncio.gather(
        *(
            definitions.shared_workflow(WorkflowId(name), version=version)
            for name, version in pins.items()
        )
    )
    return [
        Fault(f"workflows.{name}", f"there is no version {version} of a shared workflow '{name}'")
        for (name, version), stored in zip(pins.items(), found, strict=True)
        if stored is None
    ]


@ROUTES.add(
    "DELETE /v1/admin/tenants/{tenant}",
    ADMINS,
    RouteScope.DEPLOYMENT,
    TenantConfig,
    audits="tenant.delete",
    codes=(Code.NOT_FOUND,),
)
async def delete_tenant(call: Call[NoBody, NoQuery]) -> Reply | Refusal:
    """Delete a tenant's configuration: the defaults apply again. Its runs stay."""
    tenant = TenantId(call.params["tenant"])
    entry = call.audit(f"tenant/{tenant}", tenant=tenant)
    removed = await call.services.gate.tenants.delete(tenant, audit=entry)
    if removed is None:
        return not_found("tenant")
    log_event(logging.INFO, "tenant_deleted", tenant=tenant, actor=call.actor)
    return Reply(_config(removed))


@ROUTES.add("GET /v1/admin/tenants/{tenant}", OPERATORS, RouteScope.DEPLOYMENT, TenantConfig)
async def get_tenant(call: Call[NoBody, NoQuery]) -> Reply:
    """A tenant's configuration; the defaults if it has none."""
    return Reply(_config(await call.services.store.tenant(TenantId(call.params["tenant"]))))


def _budgets(tenant: Tenant) -> dict[str, BudgetConfig]:
    return {name: _budget_limit(each) for name, each in tenant.budgets.items()}


_budget_limit = wire_view(BudgetLimit, BudgetConfig)
_budget = wire_view(BudgetStanding, TenantBudget)
_config = wire_view(Tenant, TenantConfig, budgets=_budgets)
_row_of_config = wire_view(
    Tenant, TenantRow, "tenant", "active", "queued", "is_configured", "seen_at", budgets=_budgets
)
_own_view = wire_view(Tenant, TenantView, "tenant", "active", "queued", "budgets")


_SEEN_MS: Final = 30 * 24 * 60 * 60 * 1_000
"""A tenant without a configuration is listed as long after its last start."""


@ROUTES.add("GET /v1/admin/tenants", OPERATORS, RouteScope.DEPLOYMENT, TenantList)
async def list_tenants(call: Call[NoBody, Paging]) -> Reply:
    """List the tenants that are configured or started a run in the last 30 days."""
    page = await call.services.store.list_standings(
        seen_since=Instant(call.services.clock.now() - _SEEN_MS),
        cursor=call.query.cursor,
        limit=call.query.limit,
    )
    return Reply(TenantList(tuple(map(_tenant_row, page.items)), page.cursor))


def _tenant_row(standing: TenantStanding) -> TenantRow:
    return _row_of_config(
        standing.config or Tenant(),
        tenant=standing.tenant,
        active=standing.active,
        queued=standing.queued,
        is_configured=standing.config is not None,
        seen_at=when(standing.seen_at) if standing.seen_at else None,
    )


@ROUTES.add("GET /v1/tenant", EVERY_ROLE, RouteScope.TENANT, TenantView)
async def own_tenant(call: Call[NoBody, NoQuery]) -> Reply:
    """The caller's own tenant: its limits, and how much of them it uses."""
    store = call.services.store
    config, active, queued, budgets = await asyncio.gather(
        store.tenant(call.tenant),
        store.active_runs(call.tenant),
        store.queued_runs(call.tenant),
        store.budgets(call.tenant),
    )
    return Reply(
        _own_view(
            config,
            tenant=call.tenant,
            active=active,
            queued=queued,
            budgets={name: _budget(each) for name, each in budgets.items()},
        )
    )


_LOCKED_OUT: Final = (
    "this would be the first key, and from then on every request needs one: first make an admin key"
    " for '*' that does not expire, or start the server with STANCHION_ADMIN_KEY"
)
_OF_ONE_TENANT: Final = frozenset({Role.APPROVER, Role.RUNNER})
_RESERVED_NAMES: Final = frozenset({"admin", "anonymous", "system", "worker"})
"""Names of Stanchion's own actors: no key may have one of them."""


@ROUTES.add(
    "POST /v1/admin/keys",
    ADMINS,
    RouteScope.ONE_OR_ALL,
    KeyCreated,
    audits="key.create",
    names_all=False,
    codes=(Code.CONFLICT,),
)
async def create_key(call: Call[CreateKey, NoQuery]) -> Reply | Refusal:
    """Create a key. Its secret is shown only in this answer."""
    wanted = call.body
    if call.only is not None and wanted.tenant != call.only:
        detail = (
            "a key for one tenant makes keys for that tenant only:"
            " this needs a key for all tenants ('*') with the role admin"
        )
        return Refusal(code=Code.FORBIDDEN, detail=detail)
    if wanted.role in _OF_ONE_TENANT and wanted.tenant == ALL_TENANTS:
        return invalid_member("tenant", f"a key with the role {wanted.role} is for one tenant")
    if wanted.name is not None and wanted.name.lower() in _RESERVED_NAMES:
        return invalid_member("name", f"'{wanted.name}' is reserved: name a person or a service")
    expires_at = None if wanted.expires_at is None else to_instant(wanted.expires_at)
    if expires_at is not None and expires_at <= call.services.clock.now():
        return invalid_member("expires_at", "must be in the future")
    if expires_at is not None and expires_at > LAST_INSTANT:
        return invalid_member("expires_at", "must be before the year 10000 in UTC")
    keys = call.state.keys
    if await keys.would_lock_out(
        role=wanted.role, tenant=wanted.tenant, expires=expires_at is not None
    ):
        return Refusal(code=Code.CONFLICT, detail=_LOCKED_OUT)
    made = await keys.create(
        role=wanted.role,
        tenant=wanted.tenant,
        name=wanted.name,
        note=wanted.note,
        expires_at=expires_at,
        actor=call.actor,
        audit=call.audit("key", tenant=None),
    )
    return Reply(
        KeyCreated(
            id=made.id,
            key=made.key,
            role=wanted.role,
            tenant=wanted.tenant,
            name=wanted.name,
            note=wanted.note,
            created_at=when(made.record.created_at),
            expires_at=None if expires_at is None else when(expires_at),
        )
    )


@ROUTES.add("GET /v1/admin/keys", ADMINS, RouteScope.ONE_OR_ALL, KeyList, names_all=False)
async def list_keys(call: Call[NoBody, Paging]) -> Reply:
    """List keys, by id, without their secrets."""
    query = call.query
    page = await call.state.keys.list(call.only, cursor=query.cursor, limit=query.limit)
    return Reply(
        KeyList(tuple(key_row(record, id=key_id) for key_id, record in page.items), page.cursor)
    )


@ROUTES.add(
    "DELETE /v1/admin/keys/{key_id}",
    ADMINS,
    RouteScope.ONE_OR_ALL,
    KeyRow,
    audits="key.revoke",
    names_all=False,
    codes=(Code.NOT_FOUND,),
)
async def revoke_key(call: Call[NoBody, NoQuery]) -> Reply | Refusal:
    """Revoke a key: on this replica at once, on others within 2 s."""
    key_id = call.params["key_id"]
    keys = call.state.keys
    found = await keys.record(key_id)
    if found is None or (call.only is not None and found.tenant != call.only):
        return not_found("key")
    entry = call.audit(f"key/{key_id}", tenant=None)
    revoked = await keys.revoke(key_id, actor=call.actor, audit=entry)
    return not_found("key") if revoked is None else Reply(key_row(revoked, id=key_id))


_PATCH_BYTES_MAX: Final = 64 * 1024


@ROUTES.add("GET /v1/admin/settings", OPERATORS, RouteScope.DEPLOYMENT, JsonObject)
async def get_settings(call: Call[NoBody, NoQuery]) -> Reply:
    """The settings in force, as one document."""
    return Reply(call.services.settings.document())


@ROUTES.add(
    "PATCH /v1/admin/settings", ADMINS, RouteScope.DEPLOYMENT, JsonObject, audits="settings.patch"
)
async def patch_settings(call: Call[JsonObject, NoQuery]) -> Reply | Refusal:
    """Change settings with a JSON merge patch. In force everywhere within 2 s."""
    check_value(call, "", call.body, bytes_max=_PATCH_BYTES_MAX)
    entry = call.audit("settings", tenant=None)
    outcome = await call.services.settings.patch(call.body, actor=call.actor, audit=entry)
    if isinstance(outcome, tuple):
        return invalid(outcome, str(outcome[0]))
    return Reply(call.services.settings.document())
