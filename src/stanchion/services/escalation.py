"""Escalation: applies ``core.escalation`` to what this replica and the others observe.

The service collects counts, evaluates them every two seconds, announces its level to the other
replicas, and stores what must outlive a process: the latch and the operator's order. ``closes`` is
answered from memory, so it costs nothing and works while the store is down.

What a newer version wrote and this one cannot read does not stop it: the last order that could be
read stays in force, a latch closes, and an order replaces what cannot be read.

Orders are numbered, and written by compare-and-set, so no two have the same number. A latch carries
the number of the last order before it: a ``clear`` voids every latch with a lower number. No
document has to be deleted, so a clear cannot be half done.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, Gauge

from stanchion.core import escalation as rules
from stanchion.core.audit import AuditEntry, time_text
from stanchion.core.escalation import (
    Announcement,
    Escalation,
    EscalationCounts,
    Level,
    Observation,
    Order,
)
from stanchion.core.json_value import JsonValue
from stanchion.core.model import Instant, Risk
from stanchion.ports.clock import Clock
from stanchion.ports.errors import BackendError, BackendUnavailable
from stanchion.ports.store import Documents
from stanchion.services.log import OutageLogger, log_event

LOOK_EVERY_S: Final = 2.0
_KIND: Final = "escalation"
_LATCH: Final = "latch"
_ORDER: Final = "order"
_WRITES_MAX: Final = 20
"""Tries to write an order while other orders are written at the same time."""


class StoredOrder(msgspec.Struct, frozen=True):
    """An operator's order, as the store keeps it. A higher number is a new order."""

    order: Order
    actor: str
    at: Instant
    number: int
    cleared: int = 0
    """The number of the last ``clear``. Later orders keep it."""
    reason: str | None = None
    expires_at: Instant | None = None
    """When a forced level ends by itself."""


_NO_ORDER: Final = StoredOrder(Order.CLEAR, "", Instant(0), 0)


class _Latch(msgspec.Struct, frozen=True):
    replica: str
    at: Instant
    after: int | None = None
    """The number of the last order before it. Older versions did not write it."""


class EscalationService:
    """One replica's escalation level, shared with the other replicas."""

    def __init__(
        self,
        replica: str,
        *,
        settings: Callable[[], Escalation],
        documents: Documents,
        clock: Clock,
        announce: Callable[[Announcement], Awaitable[None]],
        registry: CollectorRegistry,
        on_level: Callable[[Level], None] = lambda _: None,
    ) -> None:
        self._settings = settings
        self._on_level = on_level
        self._documents = documents
        self._clock = clock
        self._announce = announce
        self._state = rules.begin(replica, clock.now())
        self._probes_ok = 0
        """Since the last evaluation."""
        self._given: StoredOrder | None = None
        self._obeyed: int | None = None
        """The number of the last order; ``None`` before the store was first read."""
        self._errors: list[str] = []
        """Why the order or the latch could not be read at the last look."""
        self._unreadable = OutageLogger(
            "escalation_unreadable", "escalation_readable", level=logging.ERROR
        )
        self._level = Level.NORMAL
        self._announced = Level.NORMAL
        """The level that was announced last."""
        self.changed_at = clock.now()
        """When the level last changed here."""
        self._gauge = Gauge(
            "stanchion_escalation_level",
            "0 normal, 1 escalated, 2 latched: above 0 the closed classes fail closed.",
            registry=registry,
        )

    @property
    def level(self) -> Level:
        """The level in force, as of the last evaluation."""
        return self._level

    @property
    def forced(self) -> Order | None:
        """The operator's order, if it is in force."""
        return self._state.forced

    @property
    def order_in_force(self) -> StoredOrder | None:
        """Who forced the level, why, and until when; ``None`` if no order is in force."""
        return self._given if self._state.forced is not None else None

    @property
    def trips_today(self) -> int:
        """How often this replica tripped in the last day."""
        return len(rules.trips_of_day(self._state))

    @property
    def counts(self) -> EscalationCounts:
        """What this replica has counted until now, as the rules count it."""
        return rules.counts_of(
            self._settings(), self._state, Observation(probes_ok=self._probes_ok), self._clock.now()
        )

    def closes(self, risk: Risk) -> bool:
        """Whether runs of this class fail closed now."""
        return self._level is not Level.NORMAL and risk in self._settings().closes

    def count(
        self, *, fallbacks: int = 0, duplicates: int = 0, probes_ok: int = 0, probes_failed: int = 0
    ) -> None:
        """Add to the counts, in the slice of time in which it happened.

        Successful probes wait for the next evaluation: no slice counts them.
        """
        self._probes_ok += probes_ok
        if fallbacks or duplicates or probes_failed:
            self._observe(fallbacks, duplicates, probes_failed)
            self._show()

    def hear(self, said: Announcement) -> None:
        """Take another replica's announcement into account."""
        self._state = rules.hear(self._state, said, self._clock.now())
        self._show()

    async def order(
        self,
        order: Order,
        *,
        actor: str,
        reason: str | None = None,
        expires_at: Instant | None = None,
        audit: AuditEntry | None = None,
    ) -> None:
        """Write an operator's order: in force here at once, on other replicas within two seconds.

        A forced level ends at ``expires_at``, or when it is cleared. Raises ``BackendError``.
        """
        for _ in range(_WRITES_MAX):
            last, revision = await self._read_order()
            now = self._clock.now()
            # Not just last + 1: after a store lost an order, its number would be reused.
            number = max(last.number + 1, now)
            cleared = number if order is Order.CLEAR else last.cleared
            given = StoredOrder(order, actor, now, number, cleared, reason, expires_at)
            value = msgspec.to_builtins(given)
            entry = audit and msgspec.structs.replace(
                audit,
                before={"order": last.order} if revision else None,
                after={
                    "order": order,
                    **({"reason": reason} if reason else {}),
                    **({"expires_at": time_text(expires_at)} if expires_at else {}),
                },
            )
            written = await self._documents.put_document(
                _KIND, _ORDER, value, read=revision, audit=entry
            )
            if written is not None:
                break
        else:
            raise BackendUnavailable("too many orders at the same time")
        if self._obeyed is None:
            self._obeyed = last.number
        self._obey(given)
        await self.look()

    async def run(self) -> None:
        """Evaluate every two seconds, until cancelled."""
        while True:
            await self.look()
            await self._clock.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Evaluate the counts, apply the stored order and latch, and announce the level."""
        self._observe()
        self._end_order()
        with suppress(BackendError):  # the last order read stays in force; the next look retries
            await self._share()
        self._show()
        own = rules.announcement(self._state, self._clock.now())
        if own.level is not Level.NORMAL or self._announced is not Level.NORMAL:
            # Normal is announced once: otherwise what the others heard last would hold until it
            # lapses, also if a clear was ordered while that announcement was being sent.
            self._announced = own.level
            await self._announce(own)

    def _observe(self, fallbacks: int = 0, duplicates: int = 0, probes_failed: int = 0) -> None:
        probes_ok, self._probes_ok = self._probes_ok, 0
        seen = Observation(fallbacks, duplicates, probes_ok, probes_failed)
        self._state = rules.observe(self._settings(), self._state, seen, self._clock.now())

    async def _share(self) -> None:
        """Apply the operator's order from the store, and store the latch."""
        self._errors.clear()
        order, revision = await self._read_order()
        if not self._errors:
            if revision:
                self._obey(order)
            else:
                self._obeyed = 0
        known = await self._documents.document(_KIND, _LATCH)
        latch = None if known is None else self._latch(known.value)
        if self._errors:
            self._unreadable.failed(self._errors[0])
        else:
            self._unreadable.worked()
        after = None if latch is None else latch.after
        is_void = after is not None and after < order.cleared
        if latch is not None and not is_void:
            self._state = rules.obey(self._state, Order.LATCH, self._clock.now())
        if self._state.level is Level.LATCHED and (after is None or is_void):
            replica, now = self._state.replica, self._clock.now()
            await self._documents.put_document(
                _KIND,
                _LATCH,
                msgspec.to_builtins(_Latch(replica, now, order.number)),
                read=0 if known is None else known.revision,
            )

    async def _read_order(self) -> tuple[StoredOrder, int]:
        """The last order and its document's revision; revision 0 if there was no order yet.

        If it cannot be read, the last order that could be, with the numbers of the one in the
        store.
        """
        known = await self._documents.document(_KIND, _ORDER)
        if known is None:
            return _NO_ORDER, 0
        try:
            return msgspec.convert(known.value, StoredOrder), known.revision
        except msgspec.ValidationError as error:
            self._errors.append(str(error))
        last = self._given or _NO_ORDER
        number = _number(known.value, "number") or last.number
        cleared = _number(known.value, "cleared") or last.cleared
        return msgspec.structs.replace(last, number=number, cleared=cleared), known.revision

    def _latch(self, value: JsonValue) -> _Latch:
        try:
            return msgspec.convert(value, _Latch)
        except msgspec.ValidationError as error:
            self._errors.append(str(error))
        return _Latch("", Instant(0), _number(value, "after"))

    def _obey(self, order: StoredOrder) -> None:
        if self._obeyed is not None and order.number <= self._obeyed:
            return
        obeyed, self._obeyed = self._obeyed, order.number
        self._given = order
        if obeyed is not None and order.order is not Order.CLEAR and order.cleared > obeyed:
            # A clear was given and followed by this order before this replica looked.
            self._state = rules.obey(self._state, Order.CLEAR, self._clock.now())
        # A clear that is found at the start is older than all that this process has observed.
        if order.order is not Order.CLEAR or obeyed is not None:
            self._state = rules.obey(self._state, order.order, self._clock.now())
        self._end_order()

    def _end_order(self) -> None:
        """End a forced level whose time is over. What was counted meanwhile stays."""
        ends_at = None if self._given is None else self._given.expires_at
        if ends_at is not None and self._clock.now() >= ends_at:
            self._state = rules.end_order(self._state)

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
            self.changed_at = self._clock.now()
        self._level = level
        self._on_level(level)
        self._gauge.set(level)


def _number(value: JsonValue, name: str) -> int | None:
    """A member of a document that cannot be read as a whole, if it is a number."""
    number = value.get(name) if isinstance(value, dict) else None
    return number if isinstance(number, int) else None
