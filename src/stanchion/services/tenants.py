"""Tenants: what each may do, kept at hand for the gate.

A cap is read by the store inside its own step, always fresh. What is kept here is how a tenant's
starts are gated, which every start has to know before it gets there. It is believed for a second;
a change is known at once where it was made, and elsewhere as soon as the bell is heard.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from stanchion.core.json_value import JsonObject
from stanchion.core.lease import Moment
from stanchion.core.model import TenantId
from stanchion.ports.bus import Bell, Bus
from stanchion.ports.clock import Clock
from stanchion.ports.records import Tenant
from stanchion.ports.store import Tenants as Stored

__all__ = ["Tenants"]

BELIEVED_MS: Final = 1_000
KEPT_MAX: Final = 10_000


class Tenants:
    """Tenants' configurations, as this replica knows them."""

    def __init__(self, stored: Stored, *, bus: Bus, clock: Clock) -> None:
        self._stored = stored
        self._bus = bus
        self._clock = clock
        self._known: OrderedDict[TenantId, tuple[JsonObject | None, Moment]] = OrderedDict()
        self._forgotten = 0
        self._stop = bus.listen(Bell.SETTINGS, self._hear)

    async def admission(self, tenant: TenantId) -> JsonObject | None:
        """What the tenant wants different about its gate. Raises ``BackendError``."""
        known = self._known.get(tenant)
        now = self._clock.moment()
        if known is not None and now - known[1] < BELIEVED_MS:
            return known[0]
        forgotten = self._forgotten
        found = (await self._stored.tenant(tenant)).admission
        # An answer that was under way when somebody wrote may be the older one.
        if forgotten == self._forgotten:
            self._known[tenant] = (found, now)
            if len(self._known) > KEPT_MAX:
                self._known.popitem(last=False)
        return found

    async def put(self, tenant: TenantId, config: Tenant) -> None:
        """Replace a tenant's configuration, and tell the other replicas."""
        await self._stored.put_tenant(tenant, config)
        self._forget(tenant)
        self._bus.ring(Bell.SETTINGS, tenant)

    def close(self) -> None:
        """Listen no more."""
        self._stop()

    def _hear(self, note: str) -> None:
        if note:
            self._forget(TenantId(note))

    def _forget(self, tenant: TenantId) -> None:
        self._known.pop(tenant, None)
        self._forgotten += 1
