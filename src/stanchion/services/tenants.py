"""Tenants: what each may do, kept at hand for the gate.

A cap is read by the store inside its own step, always fresh. What is kept here is how a tenant's
starts are gated, which every start has to know before it gets there. It is believed for a quarter
of a second. Whoever changes it waits for as long before answering, so by then no replica believes
in what was before: no message has to arrive for that.

Hardly any tenant wants anything different, so those that ever did are listed, and the list is read
once for all: ten thousand tenants that want nothing cost one read, not one each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar, cast

from stanchion.core.json_value import JsonObject
from stanchion.core.lease import Moment
from stanchion.core.model import TenantId
from stanchion.ports.clock import Clock
from stanchion.ports.records import Tenant
from stanchion.ports.store import Documents
from stanchion.ports.store import Tenants as StoredTenants
from stanchion.services.shared_reading import SharedReading

__all__ = ["Tenants"]

BELIEVED_MS: Final = 250
KEPT_MAX: Final = 10_000
LISTED_MAX: Final = 1_000
"""If more tenants than that want something different, each is asked for."""
_KIND: Final = "gates"
_LIST: Final = TenantId("")
_Value = TypeVar("_Value")


class Stored(StoredTenants, Documents, Protocol):
    """The parts of a store that know about tenants."""


class Tenants:
    """Tenants' configurations, as this replica knows them."""

    def __init__(self, stored: Stored, *, clock: Clock) -> None:
        self._stored = stored
        self._clock = clock
        self._known: OrderedDict[TenantId, tuple[object, Moment]] = OrderedDict()
        self._reading: SharedReading[TenantId, object] = SharedReading()
        self._changed: OrderedDict[TenantId, Moment] = OrderedDict()
        """When a gate was last changed from here."""
        self._forgotten = 0

    async def admission(self, tenant: TenantId) -> JsonObject | None:
        """What the tenant wants different about its gate. Raises ``BackendError``."""
        listed = await self._believed(_LIST, self._read_list)
        if listed is not None and tenant not in listed:
            return None
        return await self._believed(tenant, lambda: self._read_tenant(tenant))

    async def _read_list(self) -> frozenset[str] | None:
        """The tenants that may want something different; ``None``: too many to be listed."""
        page = await self._stored.list_documents(_KIND, limit=LISTED_MAX)
        return frozenset(name for name, _ in page.items) if page.cursor is None else None

    async def _read_tenant(self, tenant: TenantId) -> JsonObject | None:
        return (await self._stored.tenant(tenant)).admission

    async def _believed(self, key: TenantId, read: Callable[[], Awaitable[_Value]]) -> _Value:
        while True:
            known = self._known.get(key)
            now = self._clock.moment()
            if known is not None and now - known[1] < BELIEVED_MS:
                return cast("_Value", known[0])  # each key has its own kind of value
            if not self._reading.is_under_way(key):
                return await self._read(key, read, now)
            await self._reading.found(key)

    async def _read(
        self, key: TenantId, read: Callable[[], Awaitable[_Value]], now: Moment
    ) -> _Value:
        forgotten = self._forgotten
        found = cast("_Value", await self._reading.read(key, read))
        # An answer that was under way when somebody wrote may be the older one.
        if forgotten == self._forgotten:
            self._known[key] = (found, now)
            if len(self._known) > KEPT_MAX:
                self._known.popitem(last=False)
        return found

    async def put(self, tenant: TenantId, config: Tenant) -> None:
        """Replace a tenant's configuration: in force on every replica when this returns."""
        before = await self._stored.tenant(tenant)
        if config.admission is not None:
            # Listed first, and never struck off: whoever finds it listed looks at it.
            await self._stored.put_document(_KIND, tenant, {}, read=None)
        await self._stored.put_tenant(tenant, config)
        now = self._clock.moment()
        self._known.pop(tenant, None)
        self._known.pop(_LIST, None)
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
