"""A watch that looks at every tenant's runs all the time, through one replica and the other.

A list names runs that existed at one moment, and reads each of them afterwards. A run that is read
unfinished was unfinished at that moment, since a finished one never changes. So a list never shows
more unfinished runs than there were at once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import httpx2

from stanchion.sim.invariants import cap_holds
from tests.acceptance.caller import UNFINISHED
from tests.chaos.load import TENANTS, Load
from tests.chaos.tally import Tally

__all__ = ["CAP", "Watch", "watching"]

CAP: Final = "never more active runs than the cap, as listed"
_LOOK_EVERY_S: Final = 0.3
_LOOK_S_MAX: Final = 2.0
_NEWEST: Final = 60


class Watch:
    """What was seen."""

    def __init__(self) -> None:
        self.ended: dict[str, tuple[str, str]] = {}
        """How and when each run had ended, when it was first seen to have."""


@asynccontextmanager
async def watching(load: Load, tally: Tally) -> AsyncIterator[Watch]:
    """Look for as long as the block lasts."""
    watch = Watch()
    task = asyncio.create_task(_look_for_ever(load, tally, watch))
    try:
        yield watch
    finally:
        is_over = task.done()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert not is_over, "nobody watched"


async def _look_for_ever(load: Load, tally: Tally, watch: Watch) -> None:
    for number in itertools.count():
        for tenant in TENANTS:
            await _look(load, tally, watch, tenant, number)
        await asyncio.sleep(_LOOK_EVERY_S)


async def _look(load: Load, tally: Tally, watch: Watch, tenant: str, number: int) -> None:
    caller = load.caller(tenant)
    here = caller.at(number % len(caller.urls))
    try:
        answer = await here.call("GET", f"/v1/runs?limit={_NEWEST}", timeout_s=_LOOK_S_MAX)
    except httpx2.TransportError:
        return
    if answer.status != 200:
        return
    runs = answer.body["runs"]
    active = sum(run["status"] in UNFINISHED for run in runs)
    tally.look(CAP, cap_holds(tenant, active, TENANTS[tenant].cap))
    for run in runs:
        if run["finished_at"] is not None:
            watch.ended.setdefault(run["run_id"], (run["status"], run["finished_at"]))
