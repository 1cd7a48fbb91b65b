"""Failing open costs work, never truth: two replicas act on one run, and one of them commits."""

from __future__ import annotations

import asyncio

import pytest

from stanchion.adapters.store.memory import MemoryStore
from stanchion.core.events import CancelRequested
from stanchion.core.lease import DEFAULT_POLICIES
from stanchion.core.model import Risk, RunId
from stanchion.core.run import decide_all
from stanchion.ports.records import CommitAnswer, CommitConflict, Committed
from stanchion.services import lease_events as told
from stanchion.services.lease_events import LeaseEvent
from stanchion.services.leasing import Leasing
from stanchion.services.renewal import Lease
from stanchion.sim import loop
from tests.contract import builders
from tests.services.faulty_locks import Fault, FaultyLocks
from tests.services.seeded import SeededEntropy
from tests.services.virtual import in_virtual_time


class Outage:
    """Two replicas, one store that works, and a lock store that does not."""

    def __init__(self) -> None:
        self.clock = loop.LoopClock()
        self.store = MemoryStore(self.clock)
        self.locks = FaultyLocks(self.clock)
        self.told: list[LeaseEvent] = []
        self.replicas = [
            Leasing(
                self.locks, clock=self.clock, entropy=SeededEntropy(seed), tell=self.told.append
            )
            for seed in range(2)
        ]

    async def act(self, replica: Leasing, run_id: RunId, risk: Risk) -> CommitAnswer | None:
        """Handle the run as a replica does: hold, load, decide, commit. ``None``: put off."""
        async with replica.hold(f"run/{run_id}", risk=risk, policy=DEFAULT_POLICIES[risk]) as held:
            if not isinstance(held, Lease):
                return None
            found = await builders.loaded(self.store, run_id)
            await asyncio.sleep(1)  # both have read before either writes
            event = CancelRequested(actor="caller")
            transition = decide_all(builders.ONE_JOB, found.run, (event,), self.clock.now())
            commit = builders.commit_of(found, transition, fence=held.fence)
            return await self.store.commit(commit)


virtual = in_virtual_time(Outage)


@pytest.mark.parametrize("risk", [Risk.LOW, Risk.STANDARD])
@virtual
async def test_of_two_replicas_that_fail_open_one_commits(outage: Outage, risk: Risk) -> None:
    run_id = await builders.start(outage.store)
    outage.locks.always(Fault.ERROR, "acquire")
    answers = await asyncio.gather(*(outage.act(each, run_id, risk) for each in outage.replicas))
    assert [type(event) for event in outage.told] == [told.Fallback, told.Fallback]
    assert sorted(type(answer).__name__ for answer in answers) == ["CommitConflict", "Committed"]
    assert await outage.store.active_runs(builders.ACME) == 0


@pytest.mark.parametrize("risk", [Risk.HIGH, Risk.CRITICAL])
@virtual
async def test_replicas_that_fail_closed_do_not_touch_the_run(outage: Outage, risk: Risk) -> None:
    run_id = await builders.start(outage.store)
    outage.locks.always(Fault.ERROR, "acquire")
    answers = await asyncio.gather(*(outage.act(each, run_id, risk) for each in outage.replicas))
    assert answers == [None, None]
    assert await outage.store.active_runs(builders.ACME) == 1


@virtual
async def test_with_a_lock_store_the_second_replica_skips(outage: Outage) -> None:
    run_id = await builders.start(outage.store)
    answers = await asyncio.gather(
        *(outage.act(each, run_id, Risk.LOW) for each in outage.replicas)
    )
    assert [type(answer) for answer in answers] == [Committed, type(None)]
    assert CommitConflict not in [type(answer) for answer in answers]
