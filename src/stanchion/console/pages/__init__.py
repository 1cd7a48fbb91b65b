"""The table of all pages and actions, in the order of the navigation."""

from __future__ import annotations

from typing import Final

from stanchion.console.page import Action, Page
from stanchion.console.pages import (
    admission,
    approvals,
    fleet,
    keys,
    locks,
    overview,
    repair,
    runs,
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
    locks,
    repair,
    fleet,
    settings,
    keys,
)

PAGES: Final[tuple[Page, ...]] = tuple(page for module in _MODULES for page in module.PAGES)
ACTIONS: Final[tuple[Action, ...]] = tuple(
    action for module in _MODULES for action in module.ACTIONS
)
