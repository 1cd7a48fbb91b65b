"""Labels: who is named in the metrics, and who is one of the others.

Every label value is a series for ever, and tenants and workflows come from outside. So the first
tenants that are seen have labels of their own, as many as is allowed, and likewise the first
workflows of each; all the rest share one. What is counted under it is still counted.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

__all__ = ["OTHER", "TenantLabels"]

OTHER: Final = "other"
"""Also what a tenant of that name is counted as."""
UNNAMED_MAX: Final = 200


class TenantLabels:
    """Shared by all metrics of a process, so that a tenant has the same label in each of them."""

    def __init__(self, limit: int = 50, *, workflows_max: int = 20) -> None:
        self._limit = limit
        self._workflows_max = workflows_max
        self._workflows: dict[str, set[str]] = {}
        self._unnamed: OrderedDict[str, None] = OrderedDict()

    def tenant(self, tenant: str) -> str:
        """The label of a tenant."""
        if tenant in self._workflows:
            return tenant
        if len(self._workflows) >= self._limit or tenant == OTHER:
            self._unnamed[tenant] = None
            self._unnamed.move_to_end(tenant)
            if len(self._unnamed) > UNNAMED_MAX:
                self._unnamed.popitem(last=False)
            return OTHER
        self._workflows[tenant] = set()
        return tenant

    @property
    def seen(self) -> tuple[str, ...]:
        """The tenants that have labels of their own, and the last few hundred of the others."""
        return (*self._workflows, *self._unnamed)

    def workflow(self, tenant: str, workflow: str, *, exists: bool = True) -> str:
        """The label of a tenant's workflow.

        One that is not known to exist gets no label of its own: names can be made up for nothing.
        """
        if self.tenant(tenant) == OTHER:
            return OTHER
        named = self._workflows[tenant]
        if workflow in named:
            return workflow
        if not exists or len(named) >= self._workflows_max or workflow == OTHER:
            return OTHER
        named.add(workflow)
        return workflow
