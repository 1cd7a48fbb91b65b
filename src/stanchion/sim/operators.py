"""Operators and users of the console: schedules, bulk actions, orders about escalation.

They act through the services of a replica or the client SDK, as the routes and commands do, and
repeat what failed. What they were told is compared at the end of the day.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Final

from stanchion.client.errors import CallFailed
from stanchion.core.audit import AuditEntry
from stanchion.core.bulk import Bulk
from stanchion.core.escalation import Order
from stanchion.core.model import Instant, TenantId, WorkflowId
from stanchion.core.schedule import CatchUp, Overlap, ScheduleSpec
from stanchion.ports.errors import BackendError
from stanchion.services.schedules import ScheduleConflict
from stanchion.sim.scenario import PlannedBulk, PlannedSchedule
from stanchion.wire.runs import BulkView

if TYPE_CHECKING:
    from stanchion.sim.replica import Replica
    from stanchion.sim.world import World

_TRIES_MAX: Final = 20
_AGAIN_S: Final = 1.0
_ORDERS: Final = (Order.FORCE_OPEN, Order.FORCE_CLOSED, Order.FORCE_CLOSED, Order.CLEAR)


class Operators:
    """Those who schedule runs, begin bulk actions and give orders."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.told: dict[str, dict[str, None]] = {}
        """For every key of a bulk action, the ids that callers got."""

    def begin(self) -> None:
        """Plan the day."""
        world, loop = self._world, asyncio.get_running_loop()
        for schedule in world.scenario.schedules:
            loop.call_at(schedule.at_s, self._at_some_replica, self._put, schedule, 0)
            loop.call_at(schedule.changes_at_s, self._at_some_replica, self._change, schedule)
        for bulk in world.scenario.bulks:
            for copy in range(bulk.copies):
                loop.call_at(bulk.at_s, self._begin_bulk, bulk, copy)

    def end_schedules(self) -> None:
        """Pause all schedules, so that the day can end."""
        documents = self._world.store.real.state.documents.get("schedule", {})
        for schedule in self._world.scenario.schedules:
            if f"{schedule.tenant}/{schedule.schedule_id}" in documents:
                self._at_some_replica(self._put, schedule, 2)

    def stop_bulks(self) -> None:
        """Stop what is left of bulk actions: a tenant without budget holds them up for hours."""
        documents = self._world.store.real.state.documents
        for bulk_id in sorted(
            documents.get("bulk_running", {}).keys() & documents.get("bulk", {}).keys()
        ):
            self._at_some_replica(self._stop, bulk_id)

    async def _stop(self, replica: Replica, bulk_id: str) -> None:
        with suppress(BackendError):
            self._told_stopped(await replica.services.bulk.stop(bulk_id))

    def _told_stopped(self, bulk: Bulk | BulkView | None) -> None:
        """A bulk action that was told to stop is answered with its end."""
        is_wrong = bulk is not None and bulk.status not in {"stopped", "finished"}
        said = ["a bulk action was stopped, and is answered as running"] if is_wrong else []
        self._world.history.check("a stopped bulk action has stopped", said)

    def is_done(self) -> bool:
        """Whether no bulk action is under way and no schedule is left that starts runs."""
        documents = self._world.store.real.state.documents
        schedules = documents.get("schedule", {}).values()
        # A bulk action without a record was not begun: a part of its creation failed.
        running = documents.get("bulk_running", {}).keys() & documents.get("bulk", {}).keys()
        return not running and all(
            isinstance(each.value, dict)
            and isinstance(each.value["spec"], dict)
            and each.value["spec"].get("paused")
            for each in schedules
        )

    # ── Schedules ────────────────────────────────────────────────────────────────────────────────

    def _at_some_replica(self, act: object, *arguments: object) -> None:
        up = [each for each in self._world.replicas if each.is_up and not each.process.is_paused]
        if up:
            replica = up[len(self._world.history.lines) % len(up)]
            replica.process.begin(act(replica, *arguments))  # type: ignore[operator]  # a method of this class

    async def _put(self, replica: Replica, plan: PlannedSchedule, change: int) -> None:
        """Store a schedule. ``change``: 0 as planned, 1 changed, 2 paused."""
        spec = ScheduleSpec(
            workflow_id=WorkflowId(plan.workflow),
            every_s=plan.every_s + (change == 1),
            overlap=Overlap(plan.overlap),
            catch_up=CatchUp(plan.catch_up),
            jitter_s=plan.jitter_s,
            paused=change > 1,
        )
        entry = AuditEntry(action="schedule.put", actor="operator", subject=plan.schedule_id)
        for _ in range(_TRIES_MAX):
            try:
                tenant = TenantId(plan.tenant)
                await replica.services.schedules.put(tenant, plan.schedule_id, spec, entry)
            except (BackendError, ScheduleConflict):
                await asyncio.sleep(_AGAIN_S)
            else:
                self._world.history.tell(f"person schedules {plan.schedule_id}: {spec}")
                return

    async def _change(self, replica: Replica, plan: PlannedSchedule) -> None:
        if self._world.is_healing:
            return
        if plan.is_deleted_first:
            entry = AuditEntry(action="schedule.delete", actor="operator", subject=plan.schedule_id)
            try:
                await replica.services.schedules.delete(
                    TenantId(plan.tenant), plan.schedule_id, entry
                )
            except BackendError:
                return
            await asyncio.sleep(_AGAIN_S)
        await self._put(replica, plan, 1)

    # ── Bulk actions ─────────────────────────────────────────────────────────────────────────────

    def _begin_bulk(self, plan: PlannedBulk, copy: int) -> None:
        callers = self._world.callers[copy % len(self._world.callers)]
        callers.process.begin(self._bulk(plan, copy))

    async def _bulk(self, plan: PlannedBulk, copy: int) -> None:
        seed, history = self._world.scenario.seed, self._world.history
        callers = self._world.callers[copy % len(self._world.callers)]
        chance = Random(f"{seed}/{plan.key}/{copy}")  # noqa: S311 - to be foreseen is the point
        client = callers.client(plan.tenant, chance)
        for _ in range(3):
            try:
                bulk = await client.start_bulk(
                    plan.action,
                    workflow_id=plan.workflow,
                    rate_per_s=plan.rate_per_s,
                    idempotency_key=plan.key,
                )
                break
            except CallFailed as error:
                history.tell(f"caller {plan.key}/{copy}: {error}")
                if not error.facts.may_have_run:
                    return
            await asyncio.sleep(2 + chance.random())
        else:
            return
        history.tell(f"caller {plan.key}/{copy}: bulk {bulk.bulk_id} of {bulk.matched}")
        self.told.setdefault(plan.key, {})[bulk.bulk_id] = None
        if plan.stops_after_s is not None:
            await asyncio.sleep(plan.stops_after_s)
            try:
                stopped = await client.stop_bulk(bulk.bulk_id)
                self._told_stopped(stopped)
                history.tell(f"caller {plan.key}/{copy}: {stopped.status}")
            except CallFailed as error:
                history.tell(f"caller {plan.key}/{copy}: {error}")

    # ── Escalation ───────────────────────────────────────────────────────────────────────────────

    async def order(self, replica: Replica, number: int, lasts_s: float) -> None:
        """Force or clear the level, for a time."""
        order = _ORDERS[number % len(_ORDERS)]
        until = Instant(self._world.store.clock.now() + round(lasts_s * 1_000))
        try:
            await replica.services.escalating.order(
                order, actor="operator", expires_at=None if order is Order.CLEAR else until
            )
        except BackendError:
            return
        self._world.history.tell(f"person orders {order}")
