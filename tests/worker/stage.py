"""A worker and its server in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar, Unpack

from stanchion.sim.loop import LoopClock
from stanchion.worker import Worker
from stanchion.worker.events import WorkerEvent
from stanchion.worker.worker import RunOptions
from tests.services.virtual import in_virtual_time
from tests.worker.ledger import Ledger, Wire

__all__ = ["Stage", "on_stage"]

_Event = TypeVar("_Event", bound=WorkerEvent)


class Stage:
    """Chance is the middle of every range, unless a test says otherwise."""

    def __init__(self) -> None:
        self.clock = LoopClock()
        self.ledger = Ledger(self.clock.moment)
        self.events: list[WorkerEvent] = []
        self.app = Worker(on_event=self.events.append)
        self.wire = Wire(self.ledger)
        self.chance = 0.5
        self.draw: Callable[[], float] = lambda: self.chance

    @asynccontextmanager
    async def working(self, **options: Unpack[RunOptions]) -> AsyncIterator[asyncio.Task[None]]:
        """The worker runs beside the body; at its end it is stopped and must leave."""
        running = asyncio.create_task(
            self.app.run_over(self.wire, clock=self.clock, chance=self.draw, **options)
        )
        try:
            yield running
        finally:
            if not running.done():
                self.app.stop()
                await running

    def told(self, kind: type[_Event]) -> list[_Event]:
        return [event for event in self.events if isinstance(event, kind)]


on_stage = in_virtual_time(Stage)
