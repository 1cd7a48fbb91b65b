"""Answers: how many bytes of large answers are held until their readers have taken them."""

from __future__ import annotations

from typing import Final

from stanchion.core.model import TenantId

__all__ = ["Answers"]

TENANT_SHARE: Final = 4
"""One tenant's readers may hold this fraction of all that is held: a quarter."""


class Answers:
    """Large answers that are being sent: all together, and those of each tenant."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held_bytes = 0
        self._by_tenant: dict[TenantId | None, int] = {}

    def is_tenant_full(self, size: int, tenant: TenantId | None) -> bool:
        """Whether the tenant has no room for one more. One alone always fits."""
        held_bytes = self._by_tenant.get(tenant, 0)
        return held_bytes > 0 and held_bytes + size > self._bytes_max // TENANT_SHARE

    def take(self, size: int, tenant: TenantId | None) -> bool:
        """Make room for one; whether there was. One alone always fits."""
        if self._held_bytes and self._held_bytes + size > self._bytes_max:
            return False
        self._held_bytes += size
        self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + size
        return True

    def give(self, size: int, tenant: TenantId | None) -> None:
        """One was sent, or its reader has hung up."""
        self._held_bytes -= size
        left = self._by_tenant[tenant] - size
        if left:
            self._by_tenant[tenant] = left
        else:
            del self._by_tenant[tenant]
