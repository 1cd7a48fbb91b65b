"""What the simulator has found, each kept as the smallest test that shows it."""

from __future__ import annotations

from stanchion.adapters.locks.memory import MemoryLocks
from stanchion.adapters.store.memory.state import MemoryState
from stanchion.adapters.system import ManualClock
from stanchion.core.model import StepId, Topic, WorkflowId
from stanchion.core.workflow import ForEachSpec, Workflow
from stanchion.ports.locks import Granted
from stanchion.sim.scenario import draw
from stanchion.sim.servers import SimStore
from stanchion.sim.world import play
from tests.contract.builders import advance
from tests.core.world import World, died, planned, replayed
from tests.services.stage import World as Stage
from tests.services.stage import virtual

EACH = StepId("each")


def test_a_death_and_its_replay_decided_together_leave_no_step_without_a_change() -> None:
    # mixed 4097: nobody had applied the death when an operator replayed it.
    flow = Workflow(
        id=WorkflowId("wide"),
        steps={EACH: ForEachSpec(for_each='${["x", "y"]}', topic=Topic("quick"))},
    )
    world = World.started(planned(flow))
    job, before = world.job("each", 0), world.run.step(EACH)
    # The world checks every invariant of a transition after each.
    transition = world.feed(died(job), replayed(job))
    assert transition.steps == {}
    assert world.run.step(EACH) == before
    assert world.job("each", 0).dispatch == job.dispatch + 1


@virtual
async def test_items_of_a_lost_history_are_not_decided_on(world: Stage) -> None:
    # mixed 10090: one replica reads a run, another commits it, the first reads its items, the store
    # fails over to what it was. Every event looked late to the first, and its commit, decided on
    # nothing that ever was, took them all from the inbox.
    store = world.store = SimStore(world.clock)
    flow = Workflow(
        id=WorkflowId("wide"),
        steps={EACH: ForEachSpec(for_each='${["x", "y"]}', topic=Topic("quick"))},
    )
    await world.define(flow)
    one = world.add()
    run_id = await world.start(one, "wide")
    copies: list[MemoryState] = []

    async def another_commits() -> None:
        copies.append(store.copy())
        await advance(store, planned(flow), run_id)

    async def fails_over() -> None:
        store.become(copies[-1])

    one.store.script("items_at", another_commits)
    one.store.script("commit", fails_over)
    await world.report(one, *await world.lease(one, "quick", max_jobs=2))
    assert await world.ended(run_id) == "succeeded"


async def test_a_lock_server_without_memory_and_time_may_give_a_borrowed_fence_out_again() -> None:
    # mixed 75, and not mended: nothing but the run itself knows which fences there were. The commit
    # decides between two holders of the same fence, by what each of them has read.
    before, clock = MemoryLocks(ManualClock()), ManualClock()
    clock.step(-600_000)
    first = await before.acquire("run/1", "one", ttl_ms=1_000, within_ms=100)
    assert isinstance(first, Granted)
    borrowed = [
        await MemoryLocks(clock).acquire(
            "run/1", token, ttl_ms=1_000, within_ms=100, floor=first.fence
        )
        for token in ("two", "three")
    ]
    assert borrowed[0] == borrowed[1] == Granted(first.fence + 1)


def test_a_lease_of_a_removed_run_is_forgotten_with_it() -> None:
    # long 5: the ledger looked for a job whose cancelled run had been removed before the lease of
    # its worker ended.
    assert play(draw(5, "long")).broken == ()
