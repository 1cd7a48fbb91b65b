"""Tenants: what each may do, kept at hand for the gate.

A cap is read by the store inside its own step, always fresh. What is kept here is how a tenant's
starts are gated, which every start has to know before it gets there. It is believed for a quarter
of a second. Whoever changes it waits for as long before answering, so by then no replica believes
in what was before: no message has to arrive for that.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

from stanchion.core.json_value import JsonObject
from stanchion.core.lease import Moment
from stanchion.core.model import TenantId
from stanchion.ports.clock import Clock
from stanchion.ports.errors import BackendError
from stanchion.ports.records import Tenant
from stanchion.ports.store import Tenants as Stored

__all__ = ["Tenants"]

BELIEVED_MS: Final = 250
KEPT_MAX: Final = 10_000


class Tenants:
    """Tenants' configurations, as this replica knows them."""

    def __init__(self, stored: Stored, *, clock: Clock) -> None:
        self._stored = stored
        self._clock = clock
        self._known: OrderedDict[TenantId, tuple[JsonObject | None, Moment]] = OrderedDict()
        self._reading: dict[TenantId, list[asyncio.Future[None]]] = {}
        """Who is being read, and who waits for that."""
        self._changed: OrderedDict[TenantId, Moment] = OrderedDict()
        """When a gate was last changed from here."""
        self._forgotten = 0

    async def admission(self, tenant: TenantId) -> JsonObject | None:
        """What the tenant wants different about its gate. Raises ``BackendError``."""
        while True:
            known = self._known.get(tenant)
            now = self._clock.moment()
            if known is not None and now - known[1] < BELIEVED_MS:
                return known[0]
            others = self._reading.get(tenant)
            if others is None:
                return await self._read(tenant, now)
            # A thousand callers need not read the same: what another finds is believed as well.
            waiting = asyncio.get_running_loop().create_future()
            others.append(waiting)
            await waiting

    async def _read(self, tenant: TenantId, now: Moment) -> JsonObject | None:
        others = self._reading[tenant] = []
        forgotten = self._forgotten
        try:
            found = (await self._stored.tenant(tenant)).admission
        except BackendError as error:
            for each in others:
                if not each.done():
                    each.set_exception(error)
            raise
        finally:
            del self._reading[tenant]
            for each in others:
                if not each.done():
                    each.set_result(None)
        # An answer that was under way when somebody wrote may be the older one.
        if forgotten == self._forgotten:
            self._known[tenant] = (found, now)
            if len(self._known) > KEPT_MAX:
                self._known.popitem(last=False)
        return found

    async def put(self, tenant: TenantId, config: Tenant) -> None:
        """Replace a tenant's configuration: in force on every replica when this returns."""
        before = await self._stored.tenant(tenant)
        await self._stored.put_tenant(tenant, config)
        now = self._clock.moment()
        self._known.pop(tenant, None)
        self._forgotten += 1
        # Also what changes nothing may follow on a change that is not in force everywhere yet.
        changed_at = self._changed.get(tenant)
        is_recent = changed_at is not None and now - changed_at < BELIEVED_MS
        if config.admission is None and before.admission is None and not is_recent:
            return
        self._changed[tenant] = now
        self._changed.move_to_end(tenant)
        if len(self._changed) > KEPT_MAX:
            self._changed.popitem(last=False)
        await self._clock.sleep(BELIEVED_MS / 1_000)
