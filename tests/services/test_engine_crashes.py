"""A replica dies at any point of its work: what it had taken is finished by another, once."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

import pytest

from stanchion.core.model import StepId, Topic
from stanchion.core.workflow import ForEachSpec, Workflow
from stanchion.ports.records import LeasedJob
from stanchion.sim import loop
from tests.services.stage import Replica, World, job, under_lease, virtual, workflow

FLOW = workflow(
    "flow",
    first=job("work"),
    each=ForEachSpec(for_each="${input.items}", topic=Topic("work"), input="${item}"),
    last=job("work", "first", "each"),
)
RESENT_AFTER_S = 5.0


class _Crash:
    """Kills a replica at its so-many-th point after the first result was sent."""

    def __init__(self, replica: Replica, at: int) -> None:
        self._replica = replica
        self._left = at
        self._has_begun = False
        self.is_over = False
        self.happened_at: str | None = None
        replica.on_call(self)

    def __call__(self, verb: str, is_done: bool) -> None:
        self._has_begun = self._has_begun or verb in {"accept", "settle"}
        if not self._has_begun or self.is_over or self.happened_at is not None:
            return
        if self._left == 0:
            self.happened_at = f"{'after' if is_done else 'before'} {verb}"
            self._replica.kill()
        self._left -= 1


async def _report(world: World, replicas: list[Replica], jobs: tuple[LeasedJob, ...]) -> None:
    """Be a worker that sends its results until somebody says that they were taken."""
    for replica in replicas:
        with suppress(TimeoutError):
            async with asyncio.timeout(RESENT_AFTER_S):
                await world.report(replica, *jobs)
                return
    raise AssertionError("nobody took them")


async def _play(at: int, flow: Workflow) -> str | None:
    world = World()
    one, two = world.add(shares_calls=False), world.add(shares_calls=False)
    await world.define(flow)
    run_id = await world.start(one, "flow", {"items": [1, 2]})
    crash = _Crash(one, at)
    jobs = await world.lease(one, "work", max_jobs=2)
    await _report(world, [one, two], jobs)
    # From here on workers ask whoever lives, as a load balancer would have them do.
    done = 2
    while done < 4:
        jobs = await world.lease(two, "work", max_jobs=2, wait_s=60)
        assert jobs, crash.happened_at
        await _report(world, [one, two], jobs)
        done += len(jobs)
    # At worst the dead one's lease has to run out first.
    assert await world.ended(run_id, within_s=45) == "succeeded", crash.happened_at
    crash.is_over = True
    told = Counter(await world.told(run_id))
    once = ["step_succeeded first", "item_succeeded each[0]", "item_succeeded each[1]"]
    once += ["step_succeeded each", "step_succeeded last", "run_succeeded -"]
    assert [told[f"{what} work-worker"] for what in once] == [1] * len(once), crash.happened_at
    await asyncio.sleep(30)
    await world.assert_nothing_left()
    return crash.happened_at


@pytest.mark.parametrize(
    ("flow", "verbs"),
    [
        (FLOW, ["settle", "items_at"]),
        (under_lease(FLOW), ["accept", "load", "acquire", "commit", "release", "items_at"]),
    ],
)
def test_a_run_is_finished_once_wherever_the_replica_that_took_its_results_dies(
    flow: Workflow, verbs: list[str]
) -> None:
    seen: set[str] = set()
    for at in range(200):
        happened_at = loop.run(_play(at, flow))
        if happened_at is None:
            break
        seen.add(happened_at)
    else:
        pytest.fail("there is no end to its calls")
    assert {f"{when} {verb}" for when in ("before", "after") for verb in verbs} <= seen


# ── An end that was asked for ────────────────────────────────────────────────────────────────────


@virtual
async def test_a_replica_that_stops_finishes_what_it_has_begun(world: World) -> None:
    one = world.add()
    await world.define(FLOW)
    run_id = await world.start(one, "flow", {"items": []})
    one.store.each_way_s = 0.1
    await world.report(one, *await world.lease(one, "work"))
    one.task.cancel()
    await one.engine.close()
    assert (await world.run(run_id)).step(StepId("first")).status == "succeeded"
    assert await world.locks.list() == []
    assert await world.store.outbox_size() == 0


@virtual
async def test_a_replica_that_stops_does_not_wait_for_ever(world: World) -> None:
    one = world.add()
    await world.define(FLOW)
    run_id = await world.start(one, "flow", {"items": []})
    await world.report(one, *await world.lease(one, "work"))
    one.store.each_way_s = 3_600
    one.task.cancel()
    began = world.clock.moment()
    await one.engine.close()
    assert world.clock.moment() - began <= 6_000
    two = world.add()
    world.work(two, "work")
    assert await world.ended(run_id, within_s=40) == "succeeded"
