"""Replicas escalate together, and what must outlive a process is in the store."""

from __future__ import annotations

import asyncio
import logging

import pytest
from prometheus_client import CollectorRegistry

from stanchion.adapters.store.memory import MemoryStore
from stanchion.core.audit import AuditEntry
from stanchion.core.escalation import Announcement, Escalation, Level, Order
from stanchion.core.json_value import JsonValue
from stanchion.core.model import Instant, Risk
from stanchion.ports.errors import BackendUnavailable
from stanchion.ports.records import Document
from stanchion.services.escalation import EscalationService
from stanchion.services.log import LOGGER
from stanchion.sim import loop
from tests.services.virtual import in_virtual_time

SETTINGS = Escalation(window_s=50, dwell_s=60)


class Fleet:
    """Replicas that share a store and hear each other."""

    def __init__(self) -> None:
        self.clock = loop.LoopClock()
        self.store = MemoryStore(self.clock)
        self.replicas: list[EscalationService] = []
        self.registries: list[CollectorRegistry] = []
        self.can_hear = True
        self.settings = SETTINGS

    def add(self) -> EscalationService:
        registry = CollectorRegistry()
        replica = EscalationService(
            f"replica-{len(self.replicas)}",
            settings=lambda: self.settings,
            documents=self.store,
            clock=self.clock,
            announce=self._announce,
            registry=registry,
        )
        self.replicas.append(replica)
        self.registries.append(registry)
        return replica

    async def _announce(self, said: Announcement) -> None:
        for replica in self.replicas if self.can_hear else []:
            replica.hear(said)

    async def seconds(self, count: int, **per_second: int) -> None:
        """Let time pass, in which the first replica counts so much every second."""
        for _ in range(count):
            self.replicas[0].count(**per_second)
            for replica in self.replicas:
                await replica.look()
            await asyncio.sleep(1)

    def levels(self) -> list[str]:
        return [replica.level.name.lower() for replica in self.replicas]

    async def trip(self) -> None:
        await self.seconds(70, fallbacks=1, duplicates=1, probes_failed=1)


virtual = in_virtual_time(Fleet)


@virtual
async def test_fallbacks_and_duplicates_close_the_classes(fleet: Fleet) -> None:
    replica = fleet.add()
    await fleet.seconds(60, fallbacks=1)
    assert not replica.closes(Risk.HIGH)
    await fleet.trip()
    assert replica.level is Level.ESCALATED
    assert [risk for risk in Risk if replica.closes(risk)] == [Risk.STANDARD, Risk.HIGH]
    assert fleet.registries[0].get_sample_value("stanchion_escalation_level") == 1


@virtual
async def test_the_stricter_view_wins_and_lapses_with_its_author(fleet: Fleet) -> None:
    fleet.add()
    fleet.add()
    await fleet.trip()
    assert fleet.levels() == ["escalated", "escalated"]
    fleet.can_hear = False
    await fleet.seconds(29, fallbacks=1, probes_failed=1)
    assert fleet.levels() == ["escalated", "escalated"]
    await fleet.seconds(3, fallbacks=1, probes_failed=1)
    assert fleet.levels() == ["escalated", "normal"]


@virtual
async def test_quiet_and_good_probes_lead_back(fleet: Fleet) -> None:
    fleet.add()
    await fleet.trip()
    await fleet.seconds(90)
    assert fleet.levels() == ["escalated"]  # quiet, but nobody has seen the lock store work
    await fleet.seconds(5, probes_ok=1)
    assert fleet.levels() == ["normal"]


@virtual
async def test_windows_shorter_than_the_looks_trip_and_lead_back(fleet: Fleet) -> None:
    for window_s in (1, 8, 10, 11):
        fleet.replicas.clear()
        fleet.settings = Escalation(window_s=window_s, dwell_s=5)
        replica = fleet.add()
        looking = asyncio.create_task(replica.run())
        for _ in range(20 * window_s + 40):
            replica.count(fallbacks=1, duplicates=1)
            await asyncio.sleep(0.1)
        assert fleet.levels() == ["escalated"]
        replica.count(probes_ok=3)
        await asyncio.sleep(5 + window_s / 5 + 4)
        replica.count(probes_ok=3)
        await asyncio.sleep(2)
        assert fleet.levels() == ["normal"]
        looking.cancel()


@virtual
async def test_the_latch_outlives_the_process_until_an_operator_clears_it(fleet: Fleet) -> None:
    replica = fleet.add()
    for _ in range(3):
        await fleet.trip()
        await fleet.seconds(90, probes_ok=1)
    assert replica.level == Level.LATCHED
    fresh = fleet.add()
    await fresh.look()
    assert fresh.level == Level.LATCHED
    await fresh.order(Order.CLEAR, actor="reviewer")
    await fleet.seconds(2)
    assert [replica.level, fresh.level] == [Level.NORMAL] * 2
    later = fleet.add()
    await later.look()
    assert later.level == Level.NORMAL


@virtual
async def test_an_old_clear_does_not_undo_a_newer_latch(fleet: Fleet) -> None:
    replica = fleet.add()
    await replica.look()
    await replica.order(Order.CLEAR, actor="reviewer")
    for _ in range(3):
        await fleet.trip()
        await fleet.seconds(90, probes_ok=1)
    assert replica.level is Level.LATCHED
    fresh = fleet.add()
    await fresh.look()
    await replica.look()
    assert (replica.level, fresh.level) == (Level.LATCHED, Level.LATCHED)


async def _latch(fleet: Fleet) -> None:
    for _ in range(3):
        await fleet.trip()
        await fleet.seconds(90, probes_ok=1)


@virtual
async def test_a_clear_holds_whatever_fails_after_it_was_written(fleet: Fleet) -> None:
    class Failing(MemoryStore):
        """Reads what the real one has, and takes orders; nothing else can be written any more."""

        async def document(self, kind: str, name: str) -> Document | None:
            return await fleet.store.document(kind, name)

        async def put_document(
            self,
            kind: str,
            name: str,
            value: JsonValue,
            *,
            read: int | None,
            audit: AuditEntry | None = None,
        ) -> Document | None:
            if name != "order":
                raise BackendUnavailable("not now")
            return await fleet.store.put_document(kind, name, value, read=read, audit=audit)

        async def delete_document(
            self, kind: str, name: str, *, audit: AuditEntry | None = None
        ) -> bool:
            raise BackendUnavailable(f"not now: {kind} {name} {audit}")

    replica = fleet.add()
    await _latch(fleet)
    assert fleet.levels() == ["latched"]
    replica._documents = Failing(fleet.clock)  # noqa: SLF001 - the port fails under the service
    await replica.order(Order.CLEAR, actor="reviewer")
    assert fleet.levels() == ["normal"]
    await fleet.seconds(5)
    fresh = fleet.add()
    await fresh.look()
    assert (replica.level, fresh.level) == (Level.NORMAL, Level.NORMAL)


@virtual
async def test_a_clear_stays_carried_out_under_later_orders(fleet: Fleet) -> None:
    replica = fleet.add()
    await _latch(fleet)
    await replica.order(Order.CLEAR, actor="reviewer")
    await replica.order(Order.FORCE_OPEN, actor="reviewer")
    fresh = fleet.add()
    await fresh.look()
    assert fresh._state.level == Level.NORMAL  # noqa: SLF001 - what the order to open hides


@virtual
async def test_a_latch_after_a_clear_is_kept_though_another_replica_obeys_the_clear_later(
    fleet: Fleet,
) -> None:
    replica = fleet.add()
    await _latch(fleet)
    late = fleet.add()
    await late.look()
    fleet.replicas.remove(late)
    await replica.order(Order.CLEAR, actor="reviewer")
    await _latch(fleet)
    await late.look()
    fresh = fleet.add()
    await fresh.look()
    assert (replica.level, late.level, fresh.level) == (Level.LATCHED,) * 3


@virtual
@pytest.mark.parametrize("later", [Order.FORCE_OPEN, Order.FORCE_CLOSED])
async def test_a_clear_that_a_replica_did_not_see_before_the_next_order_is_obeyed_there_too(
    fleet: Fleet, later: Order
) -> None:
    replica, other = fleet.add(), fleet.add()
    await _latch(fleet)
    assert fleet.levels() == ["latched", "latched"]
    await replica.order(Order.CLEAR, actor="reviewer")
    # The second order, before the other replica has looked at the first one.
    ends_at = Instant(fleet.clock.now() + 10_000)
    await replica.order(later, actor="another", expires_at=ends_at)
    fleet.can_hear = False
    await other.look()
    assert other.forced is later
    await fleet.seconds(15)
    assert fleet.levels() == ["normal", "normal"]


@virtual
async def test_a_clear_is_not_undone_by_the_announcement_of_a_look_under_way(fleet: Fleet) -> None:
    cleared_by, other = fleet.add(), fleet.add()
    await _latch(fleet)

    class Slow:
        """Another replica's operator clears while this one looks."""

        async def document(self, kind: str, name: str) -> Document | None:
            found = await fleet.store.document(kind, name)
            if name == "latch":
                other._documents = fleet.store  # noqa: SLF001 - the port is slow once
                await cleared_by.order(Order.CLEAR, actor="reviewer")
            return found

    other._documents = Slow()  # type: ignore[assignment]  # noqa: SLF001 - all that it calls
    await other.look()
    await fleet.seconds(3)
    assert fleet.levels() == ["normal", "normal"]


@virtual
async def test_a_latch_of_an_older_version_is_taken_over_and_can_be_cleared(fleet: Fleet) -> None:
    await fleet.store.put_document("escalation", "latch", {"replica": "old", "at": 1}, read=0)
    order: JsonValue = {"order": "clear", "actor": "reviewer", "at": 0, "number": 4}
    await fleet.store.put_document("escalation", "order", order, read=0)
    replica = fleet.add()
    await replica.look()
    assert fleet.levels() == ["latched"]
    await replica.order(Order.CLEAR, actor="reviewer")
    await replica.look()
    assert fleet.levels() == ["normal"]


@virtual
async def test_orders_at_the_same_time_get_numbers_of_their_own(fleet: Fleet) -> None:
    class Slow(MemoryStore):
        """Between a read and the write after it others have time to read the same."""

        async def document(self, kind: str, name: str) -> Document | None:
            found = await fleet.store.document(kind, name)
            await asyncio.sleep(0.01)
            return found

        async def put_document(
            self,
            kind: str,
            name: str,
            value: JsonValue,
            *,
            read: int | None,
            audit: AuditEntry | None = None,
        ) -> Document | None:
            written = await fleet.store.put_document(kind, name, value, read=read, audit=audit)
            if written is not None and name == "order":
                numbers.append(value)
            return written

    numbers: list[JsonValue] = []
    replicas = [fleet.add() for _ in range(3)]
    for replica in replicas:
        replica._documents = Slow(fleet.clock)  # noqa: SLF001 - the port is slow under the service
    orders = (Order.FORCE_CLOSED, Order.FORCE_OPEN, Order.CLEAR)
    await asyncio.gather(
        *(
            replica.order(order, actor=str(order))
            for replica, order in zip(replicas, orders, strict=True)
        )
    )
    assert len({each["number"] for each in numbers if isinstance(each, dict)}) == 3
    await fleet.seconds(2)
    (last,) = {replica.forced for replica in replicas}
    known = await fleet.store.document("escalation", "order")
    assert known is not None
    assert isinstance(known.value, dict)
    assert (last or Order.CLEAR) == known.value["order"]


@pytest.mark.parametrize(
    ("order", "level"), [(Order.FORCE_CLOSED, Level.ESCALATED), (Order.FORCE_OPEN, Level.NORMAL)]
)
@virtual
async def test_an_operators_order_holds_on_every_replica_also_on_later_ones(
    fleet: Fleet, order: Order, level: Level
) -> None:
    one, two = fleet.add(), fleet.add()
    if order is Order.FORCE_OPEN:
        await fleet.trip()
    await one.order(order, actor="reviewer")
    await two.look()
    three = fleet.add()
    await three.look()
    assert [one.level, two.level, three.level] == [level] * 3


@virtual
async def test_while_the_store_is_away_the_last_word_holds(fleet: Fleet) -> None:
    class Away(MemoryStore):
        async def document(self, kind: str, name: str) -> None:
            raise BackendUnavailable(f"no {kind}/{name}")

    replica = fleet.add()
    await replica.order(Order.FORCE_CLOSED, actor="reviewer")
    replica._documents = Away(fleet.clock)  # noqa: SLF001 - the port goes away under the service
    await fleet.seconds(5)
    assert replica.level is Level.ESCALATED


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@virtual
async def test_a_change_is_logged_once(fleet: Fleet) -> None:
    replica, lines = fleet.add(), Lines()
    LOGGER.addHandler(lines)
    try:
        await replica.order(Order.FORCE_CLOSED, actor="reviewer")
        await fleet.seconds(3)
    finally:
        LOGGER.removeHandler(lines)
    assert [line.getMessage() for line in lines.records] == ["escalation_changed"]
    assert vars(lines.records[0])["fields"] == {
        "before": "normal",
        "now": "escalated",
        "closes": ["high", "standard"],
    }


@virtual
async def test_it_looks_by_itself_until_it_is_cancelled(fleet: Fleet) -> None:
    replica = fleet.add()
    task = asyncio.create_task(replica.run())
    await fleet.store.put_document(
        "escalation",
        "order",
        {"order": "force_closed", "actor": "reviewer", "at": 0, "number": 1},
        read=None,
    )
    await asyncio.sleep(2.5)
    assert replica.level is Level.ESCALATED
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@virtual
async def test_a_forced_level_ends_on_every_replica_when_its_time_is_over(fleet: Fleet) -> None:
    first, second = fleet.add(), fleet.add()
    until = Instant(fleet.clock.now() + 60_000)
    await first.order(Order.FORCE_CLOSED, actor="kim", reason="maintenance", expires_at=until)
    await fleet.seconds(10)
    assert fleet.levels() == ["escalated", "escalated"]
    order = second.order_in_force
    assert order is not None
    assert (order.actor, order.reason, order.expires_at) == ("kim", "maintenance", until)
    await fleet.seconds(90)  # announcements of the other replica lapse after 30 s
    assert fleet.levels() == ["normal", "normal"]
    assert first.order_in_force is second.order_in_force is None
    late = fleet.add()  # it reads an order whose time is over
    await fleet.seconds(4)
    assert late.level is Level.NORMAL


_NEWER: JsonValue = {"order": "force_half", "actor": "kim", "at": 0, "number": 9, "cleared": 0}
"""An order of a later version."""


@virtual
async def test_an_order_that_cannot_be_read_does_not_stop_the_escalation(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER.name)
    one, two = fleet.add(), fleet.add()
    await fleet.store.put_document("escalation", "order", _NEWER, read=0)
    await fleet.trip()
    assert fleet.levels() == ["escalated", "escalated"]
    await fleet.seconds(90, probes_ok=1)
    assert fleet.levels() == ["normal", "normal"]
    await one.order(Order.FORCE_CLOSED, actor="kim")
    await fleet.seconds(4)
    assert fleet.levels() == ["escalated", "escalated"]
    assert two.order_in_force is not None
    assert two.order_in_force.number > 9
    lines = [line.getMessage() for line in caplog.records]
    assert lines.count("escalation_unreadable") == 2, "once on each replica"
    assert lines.count("escalation_readable") == 2


@virtual
async def test_the_last_order_stays_in_force_while_the_next_one_cannot_be_read(
    fleet: Fleet,
) -> None:
    one, two = fleet.add(), fleet.add()
    await one.order(Order.FORCE_CLOSED, actor="kim")
    await fleet.seconds(4)
    await fleet.store.put_document("escalation", "order", _NEWER, read=None)
    await fleet.seconds(4)
    assert fleet.levels() == ["escalated", "escalated"]
    await two.order(Order.CLEAR, actor="kim")
    await fleet.seconds(4)
    assert fleet.levels() == ["normal", "normal"]


@virtual
async def test_a_latch_that_cannot_be_read_closes_until_it_is_cleared(fleet: Fleet) -> None:
    one = fleet.add()
    await fleet.store.put_document("escalation", "latch", {"replica": 7}, read=0)
    await fleet.seconds(4)
    assert one.level is Level.LATCHED
    await one.order(Order.CLEAR, actor="kim")
    await fleet.seconds(4)
    two = fleet.add()
    await fleet.seconds(4)
    assert [one.level, two.level] == [Level.NORMAL] * 2


@virtual
async def test_a_trip_counts_for_a_day(fleet: Fleet) -> None:
    replica = fleet.add()
    await fleet.trip()
    assert replica.trips_today == 1
    await asyncio.sleep(23 * 3_600)
    await replica.look()
    assert replica.trips_today == 1
    await asyncio.sleep(3_600)
    await replica.look()
    assert replica.trips_today == 0
