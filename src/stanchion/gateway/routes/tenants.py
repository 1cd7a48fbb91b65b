"""Tenants: what each may do."""

from __future__ import annotations

import logging
from typing import Final

from stanchion.core.model import TenantId
from stanchion.core.settings import override_faults
from stanchion.gateway.call import Call, NoBody, NoQuery, Reply
from stanchion.gateway.free_values import check_value
from stanchion.gateway.problems import Refusal, invalid
from stanchion.gateway.route import ADMINS, OPERATORS, Reach, Route, Takes
from stanchion.gateway.routes.workflows import PagedWorkflows
from stanchion.ports.records import Tenant
from stanchion.services.log import log_event
from stanchion.wire.admin import TenantConfig, TenantList, TenantRow

__all__ = ["ROUTES"]

_OVERRIDE_BYTES_MAX: Final = 64 * 1024


async def put_tenant(call: Call[TenantConfig, NoQuery]) -> Reply | Refusal:
    """Replace a tenant's configuration. In force when answered."""
    config = call.body
    check_value(call, "admission", config.admission, bytes_max=_OVERRIDE_BYTES_MAX)
    faults = override_faults(call.services.settings.current, config.admission)
    if faults:
        return invalid(faults, str(faults[0]))
    tenant = TenantId(call.params["tenant"])
    await call.services.gate.tenants.put(
        tenant,
        Tenant(config.max_concurrent_runs, config.job_rate_per_s, config.admission),
    )
    log_event(logging.INFO, "tenant_changed", tenant=tenant, actor=call.actor)
    return Reply(config)


async def get_tenant(call: Call[NoBody, NoQuery]) -> Reply:
    """A tenant's configuration; the defaults for one that nobody configured."""
    config = await call.services.store.tenant(TenantId(call.params["tenant"]))
    return Reply(
        TenantConfig(
            max_concurrent_runs=config.max_concurrent_runs,
            job_rate_per_s=config.job_rate_per_s,
            admission=config.admission,
        )
    )


async def list_tenants(call: Call[NoBody, PagedWorkflows]) -> Reply:
    """The tenants that were configured, by name."""
    page = await call.services.store.list_tenants(cursor=call.query.cursor, limit=call.query.limit)
    rows = tuple(
        TenantRow(
            tenant=name,
            max_concurrent_runs=config.max_concurrent_runs,
            job_rate_per_s=config.job_rate_per_s,
            admission=config.admission,
        )
        for name, config in page.items
    )
    return Reply(TenantList(rows, page.cursor))


ROUTES: Final = (
    Route(
        method="PUT",
        path="/v1/admin/tenants/{tenant}",
        handler=put_tenant,
        says="Replace what a tenant may do. In force when answered.",
        roles=ADMINS,
        reach=Reach.DEPLOYMENT,
        takes=Takes.JSON,
        body=TenantConfig,
        answer=TenantConfig,
    ),
    Route(
        method="GET",
        path="/v1/admin/tenants/{tenant}",
        handler=get_tenant,
        says="What a tenant may do; the defaults for one that nobody configured.",
        roles=OPERATORS,
        reach=Reach.DEPLOYMENT,
        answer=TenantConfig,
    ),
    Route(
        method="GET",
        path="/v1/admin/tenants",
        handler=list_tenants,
        says="List the tenants that were configured, by name.",
        roles=OPERATORS,
        reach=Reach.DEPLOYMENT,
        query=PagedWorkflows,
        answer=TenantList,
    ),
)
