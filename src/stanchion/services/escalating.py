"""Escalating: the shell around ``core.escalation``.

It gathers what the replica counts, looks every few seconds, tells the other replicas, and keeps in
the store what must outlive a process: the latch, and an operator's order. Whoever holds leases asks
it whether a class is closed; the answer is in memory, so that asking costs nothing and works while
the store is away.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, Gauge

from stanchion.core import escalation as rules
from stanchion.core.escalation import Announcement, Escalation, Level, Observation, Order
from stanchion.core.json_value import JsonObject
from stanchion.core.model import Instant, Risk
from stanchion.ports.clock import Clock
from stanchion.ports.errors import BackendError
from stanchion.ports.store import Documents
from stanchion.services.log import log_event

__all__ = ["Escalating", "Standing"]

LOOK_EVERY_S: Final = 2.0
_KIND: Final = "escalation"
_LATCH: Final = "latch"
_ORDER: Final = "order"


class Standing(msgspec.Struct, frozen=True):
    """An operator's order, as the store keeps it. A higher number is a new order."""

    order: Order
    actor: str
    at: Instant
    number: int


class Escalating:
    """One replica's view of the escalation, and its part in everybody's."""

    def __init__(
        self,
        replica: str,
        *,
        settings: Callable[[], Escalation],
        documents: Documents,
        clock: Clock,
        announce: Callable[[Announcement], Awaitable[None]],
        registry: CollectorRegistry,
    ) -> None:
        self._settings = settings
        self._documents = documents
        self._clock = clock
        self._announce = announce
        self._state = rules.begin(replica, clock.now())
        self._seen = Observation()
        self._obeyed: int | None = None
        """The number of the last order; ``None`` before the store was first read."""
        self._level = Level.NORMAL
        self._gauge = Gauge(
            "stanchion_escalation_level",
            "0 normal, 1 escalated, 2 latched: above 0 the closed classes fail closed.",
            registry=registry,
        )

    @property
    def level(self) -> Level:
        """The level in force, as of the last look."""
        return self._level

    @property
    def forced(self) -> Order | None:
        """What an operator ordered, if it still stands."""
        return self._state.forced

    @property
    def trips_today(self) -> int:
        """How often this replica tripped in the last day."""
        return len(self._state.trips)

    def closes(self, risk: Risk) -> bool:
        """Whether runs of this class must not go on without the lock store now."""
        return self._level is not Level.NORMAL and risk in self._settings().closes

    def count(
        self,
        *,
        fallbacks: int = 0,
        duplicates: int = 0,
        probes_ok: int = 0,
        probes_failed: int = 0,
    ) -> None:
        """Take note of what happened since the last look."""
        self._seen = Observation(
            self._seen.fallbacks + fallbacks,
            self._seen.duplicates + duplicates,
            self._seen.probes_ok + probes_ok,
            self._seen.probes_failed + probes_failed,
        )

    def hear(self, said: Announcement) -> None:
        """Another replica told us its view."""
        self._state = rules.hear(self._state, said, self._clock.now())
        self._show()

    async def order(self, order: Order, *, actor: str) -> None:
        """An operator decides. In force here at once, elsewhere at the next look."""
        known = await self._documents.document(_KIND, _ORDER)
        last = 0 if known is None else msgspec.convert(known.value, Standing).number
        standing = Standing(order, actor, self._clock.now(), last + 1)
        await self._documents.put_document(_KIND, _ORDER, msgspec.to_builtins(standing), read=None)
        await self.look()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self.look()
            await self._clock.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Weigh what was counted, do what the store says for all, and tell the others."""
        seen, self._seen = self._seen, Observation()
        self._state = rules.observe(self._settings(), self._state, seen, self._clock.now())
        with suppress(BackendError):  # the last word holds, and the next look asks again
            await self._share()
        self._show()
        own = rules.announcement(self._state, self._clock.now())
        if own.level is not Level.NORMAL:
            await self._announce(own)

    async def _share(self) -> None:
        """Take the operator's order from the store, and keep the latch there."""
        known = await self._documents.document(_KIND, _ORDER)
        if known is None:
            self._obeyed = 0
        else:
            await self._obey(msgspec.convert(known.value, Standing))
        latch = await self._documents.document(_KIND, _LATCH)
        if latch is not None:
            self._state = rules.obey(self._state, Order.LATCH, self._clock.now())
        elif self._state.level is Level.LATCHED:
            value: JsonObject = {"replica": self._state.replica, "at": self._clock.now()}
            await self._documents.put_document(_KIND, _LATCH, value, read=0)

    async def _obey(self, standing: Standing) -> None:
        if self._obeyed is not None and standing.number <= self._obeyed:
            return
        is_old = self._obeyed is None
        self._obeyed = standing.number
        if standing.order is not Order.CLEAR:
            self._state = rules.obey(self._state, standing.order, self._clock.now())
        elif not is_old:
            # Found at the start it was carried out before us, and a latch that is there is newer.
            self._state = rules.obey(self._state, Order.CLEAR, self._clock.now())
            await self._documents.delete_document(_KIND, _LATCH)

    def _show(self) -> None:
        level = rules.level_at(self._state, self._clock.now())
        if level is not self._level:
            log_event(
                logging.WARNING,
                "escalation_changed",
                before=self._level.name.lower(),
                now=level.name.lower(),
                closes=[str(risk) for risk in self._settings().closes],
            )
        self._level = level
        self._gauge.set(level)
