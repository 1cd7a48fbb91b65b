"""The table of all pages and actions, in the order of the navigation."""

from __future__ import annotations

from typing import Final

from stanchion.console.api import route_named
from stanchion.console.page import Action, ConsolePage
from stanchion.console.pages import (
    admission,
    approvals,
    fleet,
    keys,
    limits,
    locks,
    overview,
    refusals,
    repair,
    runs,
    schedules,
    settings,
    workflows,
)

__all__ = ["ACTIONS", "PAGES"]

_MODULES: Final = (
    overview,
    admission,
    runs,
    approvals,
    workflows,
    schedules,
    limits,
    locks,
    refusals,
    repair,
    fleet,
    settings,
    keys,
)


def _exists(name: str | None) -> bool:
    """Whether this version has the route that a page or an action needs."""
    return name is None or route_named(name) is not None


PAGES: Final[tuple[ConsolePage, ...]] = tuple(
    page for module in _MODULES for page in module.PAGES.pages if _exists(page.needs)
)
ACTIONS: Final[tuple[Action, ...]] = tuple(
    action
    for module in _MODULES
    for action in module.PAGES.actions
    if _exists(action.needs) and _exists(action.page.needs)
)
