"""Bulk actions through the death of the replica that carries them out, at every point of it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from msgspec.structs import replace

from stanchion.adapters.bus.local import LocalBus
from stanchion.adapters.locks.memory import MemoryLocks
from stanchion.adapters.store.memory import MemoryStore
from stanchion.core.audit import AuditEntry
from stanchion.core.budget import BudgetLimit, BudgetWindow
from stanchion.core.bulk import BULKS_MAX, BulkAction, BulkStatus
from stanchion.core.model import RunId, RunStatus, StepId, TenantId, Topic, WorkflowId
from stanchion.core.workflow import ApprovalSpec, JobSpec, Workflow
from stanchion.ports.records import RunFilter, Tenant
from stanchion.ports.store import Store
from stanchion.services.bulk import BulkBegun, NewBulk
from stanchion.services.context import Backends
from stanchion.services.engine import Engine
from stanchion.services.work import TenantOverloaded
from stanchion.sim import loop
from stanchion.sim.loop import LoopClock
from tests.services.seeded import SeededEntropy

ACME = TenantId("acme")
RUNS = 7
WANTED = NewBulk(
    action=BulkAction.RERUN,
    tenant=ACME,
    only=RunFilter(workflow_id=WorkflowId("w")),
    filter={},
    rate_per_s=50,
    actor="kim",
    request_id="r",
)


class Mortal:
    """A store whose caller dies before or after one of its calls: from then on none returns."""

    def __init__(self, store: MemoryStore, lives: int) -> None:
        self._store = store
        self.lives = lives

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        verb = getattr(self._store, name)

        async def call(*args: object, **kwargs: object) -> object:
            await self._breathe()
            answer = await verb(*args, **kwargs)
            await self._breathe()
            return answer

        return call

    async def _breathe(self) -> None:
        self.lives -= 1
        if self.lives < 0:
            await asyncio.Event().wait()


class Pair:
    """Two replicas on one store, the first of which dies."""

    def __init__(self, lives: int) -> None:
        self.clock = LoopClock()
        self.store = MemoryStore(self.clock)
        self.locks = MemoryLocks(self.clock)
        self.mortal = Mortal(self.store, lives)
        self.first = self._engine("first", cast("Store", self.mortal), 1)
        self.second = self._engine("second", self.store, 2)

    def _engine(self, name: str, store: Store, seed: int) -> Engine:
        backends = Backends(
            store=store,
            locks=self.locks,
            bus=LocalBus(self.store, self.clock),
            clock=self.clock,
            entropy=SeededEntropy(seed),
        )
        return Engine(name, backends)

    async def ended_runs(self) -> list[RunId]:
        """Runs that have ended, to be run again."""
        await self.store.put_tenant(ACME, Tenant(max_concurrent_runs=None))
        steps = {"only": JobSpec(topic=Topic("t"))}
        await self.store.put_workflow(ACME, Workflow(id=WorkflowId("w"), steps=cast("Any", steps)))
        ended = []
        for _ in range(RUNS):
            services = self.second.services
            began = await services.gate.start(ACME, WorkflowId("w"), {}, key=None, actor="kim")
            run_id = cast("Any", began).run_id
            await services.inbox.cancel(run_id, reason=None, actor="kim")
            ended.append(run_id)
        return ended


async def _dies(lives: int, *, is_sent_again: bool = False) -> int:
    """Let the first replica die after so many breaths; how many it had left otherwise."""
    pair = Pair(10**9)
    run_ids = await pair.ended_runs()
    pair.mortal.lives = lives
    tasks = [asyncio.create_task(pair.first.services.bulk.run())]
    wanted = replace(WANTED, idempotency_key="k") if is_sent_again else WANTED
    creating = asyncio.create_task(pair.first.services.bulk.create(wanted))
    await asyncio.sleep(2)
    if is_sent_again:
        await pair.second.services.bulk.create(wanted)
    tasks.append(asyncio.create_task(pair.second.services.bulk.run()))
    await asyncio.sleep(20)
    for task in (*tasks, creating):
        task.cancel()
    await asyncio.gather(*tasks, creating, return_exceptions=True)
    page = await pair.second.services.bulk.page(ACME, cursor=None, limit=10)
    counts = []
    for run_id in run_ids:
        found = await pair.store.list_runs(ACME, only=RunFilter(rerun_of=run_id))
        counts.append(len(found.items))
    if page.items:
        (bulk,) = page.items
        assert (bulk.matched, bulk.done, bulk.failed) == (RUNS, RUNS, 0), lives
        assert bulk.status is BulkStatus.FINISHED
        assert counts == [1] * RUNS, lives
    else:
        assert not is_sent_again
        assert counts == [0] * RUNS, "it died before the bulk action existed"
    is_left = (await pair.store.list_documents("bulk_runs")).items != ()
    assert not is_left or is_sent_again or not page.items
    return pair.mortal.lives


def test_every_run_is_acted_on_once_wherever_the_replica_dies() -> None:
    alive = 10**6
    used = alive - loop.run(_dies(alive))
    # A prime step, so that every kind of call is the last one somewhere.
    for lives in range(0, min(used, 400), 7):
        loop.run(_dies(lives))


def test_a_request_that_is_sent_again_with_its_key_begins_one_bulk_action() -> None:
    # To the replica that lives, after the first one died at any point of creating it.
    for lives in range(30):
        loop.run(_dies(lives, is_sent_again=True))


async def _dies_while_creating(lives: int) -> None:
    pair = Pair(10**9)
    await pair.ended_runs()
    pair.mortal.lives = lives
    wanted = replace(WANTED, idempotency_key="k")
    creating = asyncio.create_task(pair.first.services.bulk.create(wanted))
    running = asyncio.create_task(pair.second.services.bulk.run())
    await asyncio.sleep(15 * 60)
    assert (await pair.store.list_documents("bulk_running")).items == (), lives
    await pair.second.services.bulk.create(wanted)
    await asyncio.sleep(20)
    (bulk,) = (await pair.second.services.bulk.page(ACME, cursor=None, limit=10)).items
    assert (bulk.done, bulk.status) == (RUNS, BulkStatus.FINISHED), lives
    for task in (creating, running):
        task.cancel()
    await asyncio.gather(creating, running, return_exceptions=True)


def test_the_name_of_one_whose_creation_failed_is_forgotten_and_its_key_still_works() -> None:
    for lives in range(2, 18):
        loop.run(_dies_while_creating(lives))


def test_a_decision_that_the_same_person_has_made_is_done_and_anothers_is_a_conflict() -> None:
    async def main() -> None:
        pair = Pair(10**9)
        steps = {"ask": ApprovalSpec(), "work": JobSpec(topic=Topic("t"), needs=(StepId("ask"),))}
        await pair.store.put_workflow(ACME, Workflow(id=WorkflowId("w"), steps=cast("Any", steps)))
        services = pair.second.services
        began = await services.gate.start(ACME, WorkflowId("w"), {}, key=None, actor="pat")
        entry = AuditEntry(action="step.approve", actor="kim", subject="step")
        await services.inbox.decide(
            cast("Any", began).run_id,
            StepId("ask"),
            approve=True,
            comment=None,
            actor="kim",
            audit=entry,
        )
        running = asyncio.create_task(services.bulk.run())
        for action, actor in (
            (BulkAction.APPROVE, "kim"),
            (BulkAction.APPROVE, "lee"),
            (BulkAction.REJECT, "kim"),
        ):
            await services.bulk.create(replace(WANTED, action=action, actor=actor))
            await asyncio.sleep(5)
            newest, *_ = (await services.bulk.page(ACME, cursor=None, limit=1)).items
            is_done = (action, actor) == (BulkAction.APPROVE, "kim")
            assert (newest.done, newest.failed) == ((1, 0) if is_done else (0, 1))
        running.cancel()

    loop.run(main())


def test_a_decision_without_the_data_that_its_step_asks_for_fails_with_the_first_fault() -> None:
    async def main() -> None:
        pair = Pair(10**9)
        ask = ApprovalSpec(data_schema={"type": "object", "required": ["amount"]})
        await pair.store.put_workflow(
            ACME, Workflow(id=WorkflowId("w"), steps={StepId("ask"): ask})
        )
        services = pair.second.services
        await services.gate.start(ACME, WorkflowId("w"), {}, key=None, actor="pat")
        running = asyncio.create_task(services.bulk.run())
        await services.bulk.create(replace(WANTED, action=BulkAction.APPROVE, actor="kim"))
        await asyncio.sleep(5)
        (ended,) = (await services.bulk.page(ACME, cursor=None, limit=1)).items
        running.cancel()
        (error,) = ended.errors
        assert (ended.failed, error.code) == (1, "invalid_input")
        assert "data" in error.detail

    loop.run(main())


def test_bulk_actions_that_others_have_carried_out_do_not_count_as_running() -> None:
    async def main() -> None:
        pair = Pair(10**9)
        await pair.ended_runs()
        first, second = pair.first.services.bulk, pair.second.services.bulk
        # The store fails when the first replica looks, until the second one has done the work.
        others = asyncio.create_task(second.run())
        for _ in range(BULKS_MAX):
            await first.create(replace(WANTED, action=BulkAction.CANCEL))
        with pytest.raises(TenantOverloaded):
            await first.create(replace(WANTED, action=BulkAction.CANCEL))
        await asyncio.sleep(10)
        own = asyncio.create_task(first.run())
        await asyncio.sleep(1)
        begun = await first.create(replace(WANTED, action=BulkAction.CANCEL))
        assert isinstance(begun, BulkBegun)
        for task in (others, own):
            task.cancel()
        await asyncio.gather(others, own, return_exceptions=True)

    loop.run(main())


def test_bulk_actions_are_removed_a_month_after_they_began() -> None:
    async def main() -> None:
        pair = Pair(10**9)
        await pair.ended_runs()
        bulk = pair.second.services.bulk
        await bulk.create(replace(WANTED, idempotency_key="k"))
        kinds = ("bulk", "bulk_keys", "bulk_running", "bulk_runs")
        # Its records are all of them until then, and none afterwards.
        pair.clock.step_ms += 30 * 24 * 3_600_000 - 1_000
        await bulk.tidy()
        begun = {kind: len((await pair.store.list_documents(kind)).items) for kind in kinds}
        assert min(begun.values()) > 0, begun
        pair.clock.step_ms += 2_000
        await bulk.tidy()
        left = {kind: len((await pair.store.list_documents(kind)).items) for kind in kinds}
        assert left == dict.fromkeys(kinds, 0)

    loop.run(main())


def test_bulk_actions_that_cannot_be_carried_out_hold_up_no_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        pair = Pair(10**9)
        await pair.ended_runs()
        services = pair.second.services
        first = await services.bulk.create(replace(WANTED, rate_per_s=1))
        assert isinstance(first, BulkBegun)
        found = await pair.store.document("bulk", first.bulk.id)
        assert found is not None
        newer = {**cast("Any", found.value), "id": "0" * 23, "action": "archive"}  # a later version
        await pair.store.put_document("bulk", newer["id"], newer, read=0)
        for name in (newer["id"], "of another scheme"):
            await pair.store.put_document("bulk_running", name, 0, read=0)
        running = asyncio.create_task(services.bulk.run())
        await asyncio.sleep(60)
        assert not running.done()
        ended = await services.bulk.get(first.bulk.id)
        assert ended is not None
        assert (ended.status, ended.done) == (BulkStatus.FINISHED, RUNS)
        listed = (await services.bulk.page(None, cursor=None, limit=10)).items
        assert [each.id for each in listed] == [first.bulk.id]
        assert await services.bulk.get(newer["id"]) is None
        names = [name for name, _ in (await pair.store.list_documents("bulk_running")).items]
        assert names == [newer["id"], "of another scheme"], "a newer replica carries them out"
        running.cancel()

    loop.run(main())
    lines = [line for line in caplog.records if line.getMessage() == "bulk_failed"]
    assert {line.fields["bulk"] for line in lines} == {"0" * 23, "of another scheme"}  # type: ignore[attr-defined] # what it says
    assert len(lines) == 2 * 2, "they are tried again now and then, not at every look"


def test_a_bulk_action_that_cannot_be_read_is_not_removed_and_keeps_no_other() -> None:
    async def main() -> None:
        pair = Pair(10**9)
        await pair.ended_runs()
        bulk = pair.second.services.bulk
        await pair.store.put_document("bulk_keys", "0", {"fingerprint": 1}, read=0)
        await pair.store.put_document("bulk", "of another scheme", {}, read=0)
        await bulk.create(replace(WANTED, idempotency_key="k"))
        pair.clock.step_ms += 31 * 24 * 3_600_000
        await bulk.tidy()
        kinds = ("bulk", "bulk_keys", "bulk_running", "bulk_runs")
        left = {kind: len((await pair.store.list_documents(kind)).items) for kind in kinds}
        assert left == {"bulk": 1, "bulk_keys": 1, "bulk_running": 0, "bulk_runs": 0}

    loop.run(main())


def test_the_dead_letters_of_a_tenant_are_read_once_for_all_runs_of_a_moment() -> None:
    async def main() -> None:
        pair = Pair(10**9)
        run_ids = await pair.ended_runs()
        reads, listed = list[TenantId | None](), pair.store.list_dead_letters

        async def list_dead_letters(tenant: TenantId | None, **page: Any) -> Any:  # noqa: ANN401 - as the store has them
            reads.append(tenant)
            await asyncio.sleep(2)  # a read of many letters
            return await listed(tenant, **page)

        pair.store.list_dead_letters = list_dead_letters  # type: ignore[method-assign] # a slow store
        services = pair.second.services
        running = asyncio.create_task(services.bulk.run())
        begun = await services.bulk.create(
            replace(WANTED, action=BulkAction.DISCARD, rate_per_s=1_000)
        )
        assert isinstance(begun, BulkBegun)
        await asyncio.sleep(20)
        ended = await services.bulk.get(begun.bulk.id)
        assert ended is not None
        assert (ended.status, ended.failed) == (BulkStatus.FINISHED, len(run_ids))
        assert len(reads) <= 3
        running.cancel()

    loop.run(main())


@pytest.mark.parametrize(
    ("limit", "window", "is_final"),
    [
        (0, BudgetWindow.TOTAL, True),  # nothing is given back, and no window begins
        (0, BudgetWindow.DAY, True),  # more than a whole window has
        (5, BudgetWindow.TOTAL, False),  # an unfinished run may give back what it holds
        (5, BudgetWindow.DAY, False),
    ],
)
def test_a_run_that_no_wait_makes_room_for_in_a_budget_fails(
    limit: int, window: BudgetWindow, is_final: bool
) -> None:
    async def main() -> None:
        pair = Pair(10**9)
        steps: Any = {"only": JobSpec(topic=Topic("t"))}
        flow = Workflow(id=WorkflowId("w"), steps=steps, budget={"tokens": 5})
        await pair.store.put_workflow(ACME, flow)
        services = pair.second.services
        began = await services.gate.start(ACME, WorkflowId("w"), {}, key=None, actor="kim")
        run_id = cast("Any", began).run_id
        await services.inbox.cancel(run_id, reason=None, actor="kim")
        budget = BudgetLimit(limit, window)
        await pair.store.put_tenant(
            ACME, Tenant(max_concurrent_runs=None, budgets={"tokens": budget})
        )
        if limit:
            await services.gate.start(ACME, WorkflowId("w"), {}, key=None, actor="kim")
        running = asyncio.create_task(services.bulk.run())
        only = RunFilter(statuses=(RunStatus.CANCELLED,))
        begun = await services.bulk.create(replace(WANTED, only=only))
        assert isinstance(begun, BulkBegun)
        await asyncio.sleep(120)
        bulk = await services.bulk.get(begun.bulk.id)
        assert bulk is not None
        told = [(each.run_id, each.code) for each in bulk.errors]
        if is_final:
            assert (bulk.status, told) == (BulkStatus.FINISHED, [(run_id, "budget_exhausted")])
        else:
            assert (bulk.status, told) == (BulkStatus.RUNNING, [])
        running.cancel()

    loop.run(main())


def test_a_replica_that_acts_for_long_keeps_its_hold(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        pair = Pair(10**9)
        run_ids = await pair.ended_runs()
        first, second = pair.first.services.bulk, pair.second.services.bulk
        reads, load = list[str](), pair.store.load

        async def slow(run_id: RunId) -> Any:  # noqa: ANN401 - as the store has it
            reads.append(run_id)
            await asyncio.sleep(10)
            return await load(run_id)

        pair.store.load = slow  # type: ignore[method-assign] # a slow store
        running = [asyncio.create_task(each.run()) for each in (first, second)]
        begun = await first.create(replace(WANTED, action=BulkAction.CANCEL, rate_per_s=1_000))
        assert isinstance(begun, BulkBegun)
        await asyncio.sleep(60)
        ended = await second.get(begun.bulk.id)
        assert ended is not None
        assert (ended.status, ended.done) == (BulkStatus.FINISHED, len(run_ids))
        assert sorted(reads) == sorted(run_ids)
        for task in running:
            task.cancel()

    loop.run(main())
    assert "bulk_taken_over" not in {line.getMessage() for line in caplog.records}


def test_a_replica_that_stops_leaves_no_act_behind() -> None:
    async def main() -> None:
        pair = Pair(10**9)
        await pair.ended_runs()
        bulk = pair.first.services.bulk
        begun, left = list[str](), list[str]()

        async def slow(run_id: RunId) -> None:
            begun.append(run_id)
            try:
                await asyncio.sleep(10)
            finally:
                left.append(run_id)

        pair.store.load = slow  # type: ignore[method-assign] # a slow store
        running = asyncio.create_task(bulk.run())
        await bulk.create(replace(WANTED, action=BulkAction.CANCEL, rate_per_s=1_000))
        await asyncio.sleep(5)
        errors = list[dict[str, Any]]()
        asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert left == begun != []
        gc.collect()
        assert errors == []

    loop.run(main())
