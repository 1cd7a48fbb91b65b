"""The overview: what an operator must know first."""

from __future__ import annotations

from typing import Final

from stanchion.console.page import Action, Data, Nav, Page, View

__all__ = ["ACTIONS", "PAGES"]


async def overview(view: View) -> Data:
    """What is going on."""
    runs = ()
    if view.api.allows("GET /v1/runs"):
        runs = (await view.api.get("/v1/runs", limit=10)).runs
    return {"runs": runs}


PAGES: Final = (
    Page(
        path="/console",
        title="Overview",
        template="overview.html",
        load=overview,
        nav=Nav(group="Now", label="Overview", letter="o"),
    ),
)
ACTIONS: Final[tuple[Action, ...]] = ()
