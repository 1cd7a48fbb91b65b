"""Callers that wait for a run to end, or for anything to happen."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from stanchion.core.events import CancelRequested
from stanchion.core.model import RunId, RunStatus
from stanchion.core.run import decide_all
from stanchion.ports.bus import Bell
from stanchion.ports.records import Loaded
from stanchion.services.waiters import LARGE_BYTES
from tests.contract.builders import commit_of, planned
from tests.contract.builders import loaded as loaded_of
from tests.services.faulty_locks import Fault
from tests.services.stage import ACME, GLOBEX, Replica, World, job, under_lease, virtual, workflow

ONE = workflow("one", step=job("work"))


def watched(replica: Replica, run_id: RunId, within_s: float = 60) -> asyncio.Task[Loaded | None]:
    return asyncio.create_task(replica.waiters.finished(run_id, within_s=within_s))


@pytest.mark.parametrize("at", [0, 1])
@virtual
async def test_whoever_waits_for_a_run_is_told_at_once_on_every_replica(
    world: World, at: int
) -> None:
    replicas = [world.add(), world.add()]
    await world.define(ONE)
    run_id = await world.start(replicas[0], "one")
    watch = watched(replicas[at], run_id)
    await asyncio.sleep(7.3)
    assert not watch.done()
    await world.report(replicas[0], *await world.lease(replicas[0], "work"))
    began = world.clock.moment()
    loaded = await watch
    assert world.clock.moment() - began < 50
    assert loaded is not None
    assert loaded.run.status is RunStatus.SUCCEEDED


@virtual
async def test_what_whoever_waits_is_told_is_what_the_store_has(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    run_id = await world.start(one, "one")
    watches = [watched(one, run_id), watched(one, run_id)]
    await asyncio.sleep(0.1)
    await world.report(one, *await world.lease(one, "work"))
    told = [await watch for watch in watches]
    kept = await world.run(run_id)
    for each in told:
        assert each is not None
        # The stamp and the fence are the store's own business.
        assert replace(each.run, stamp=kept.stamp, fence=kept.fence) == kept
        assert each.inbox == ()


@virtual
async def test_whoever_waits_where_a_run_ends_does_not_read_it_again(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    run_id = await world.start(one, "one")
    watch = watched(one, run_id)
    await asyncio.sleep(0.1)
    await one.ask_locks()
    done: list[str] = []
    one.on_call(lambda verb, is_done: done.append(verb) if is_done else None)
    await world.report(one, *await world.lease(one, "work"))
    assert await watch is not None
    assert done.count("load") == 0
    # Nobody waits any more: the next one asks the store.
    assert await one.waiters.finished(run_id, within_s=0) is not None
    assert done.count("load") == 1


@virtual
async def test_a_wait_for_a_run_that_was_committed_here_does_not_read_it_first(
    world: World,
) -> None:
    one, two = world.add(), world.add()
    await world.define(ONE)
    run_id = await world.start(one, "one")
    read = one.store.calls["load"]
    watch = watched(one, run_id)
    await asyncio.sleep(0.1)
    assert one.store.calls["load"] == read
    # The time is over: the answer is read now, and is not what was known before the call.
    assert await one.waiters.finished(run_id, within_s=0.01) is not None
    assert one.store.calls["load"] == read + 1
    watch.cancel()
    # Another replica ends the run. Its bell makes this one forget what it knew.
    await world.report(two, *await world.lease(two, "work"))
    await asyncio.sleep(0.1)
    began = world.clock.moment()
    loaded = await watched(one, run_id)
    assert world.clock.moment() - began < 50
    assert loaded is not None
    assert loaded.run.status is RunStatus.SUCCEEDED


@virtual
async def test_a_lost_bell_delays_a_wait_for_a_run_that_was_committed_here_by_a_second(
    world: World,
) -> None:
    one, two = world.add(), world.add()
    await world.define(ONE)
    run_id = await world.start(one, "one")
    two.bus.is_mute = True
    await world.report(two, *await world.lease(two, "work"))
    await asyncio.sleep(0.1)
    began = world.clock.moment()
    loaded = await watched(one, run_id)
    assert loaded is not None
    assert loaded.run.status is RunStatus.SUCCEEDED
    assert world.clock.moment() - began <= 1_100


@virtual
async def test_an_end_is_announced_only_once_its_commit_was_accepted(world: World) -> None:
    one = world.add()
    await world.define(under_lease(ONE))
    run_id = await world.start(one, "one")
    rung: list[str] = []
    stop = one.bus.listen(Bell.FINISHED, rung.append)
    watch = watched(one, run_id)
    await asyncio.sleep(0.1)
    one.store.always(Fault.ERROR, "commit")
    await world.report(one, *await world.lease(one, "work"))
    await asyncio.sleep(5)
    assert one.store.calls["commit"] > 0
    assert (rung, watch.done()) == ([], False)
    one.store.always(Fault.NONE, "commit")
    loaded = await watch
    assert loaded is not None
    assert loaded.run.status is (await world.run(run_id)).status is RunStatus.SUCCEEDED
    assert rung == [run_id]
    stop()


@virtual
async def test_an_end_that_another_writer_forestalled_is_not_announced(world: World) -> None:
    one = world.add()
    await world.define(under_lease(ONE))
    run_id = await world.start(one, "one")

    async def cancelled() -> None:
        found, now = await loaded_of(world.store, run_id), await world.store.now()
        transition = decide_all(planned(ONE), found.run, [CancelRequested(actor="other")], now)
        await world.store.commit(commit_of(found, transition))

    watch = watched(one, run_id)
    await asyncio.sleep(0.1)
    one.store.script("commit", cancelled)
    await world.report(one, *await world.lease(one, "work"))
    loaded = await watch
    assert loaded is not None
    assert loaded.run.status is (await world.run(run_id)).status is RunStatus.CANCELLED


@virtual
async def test_a_lost_bell_costs_a_second_at_most(world: World) -> None:
    one, two = world.add(), world.add()
    one.bus.is_mute = True
    await world.define(ONE)
    for pause_s in (0.1, 0.5, 0.9):
        run_id = await world.start(one, "one")
        watch = watched(two, run_id)
        await asyncio.sleep(pause_s)
        await world.report(one, *await world.lease(one, "work"))
        began = world.clock.moment()
        loaded = await watch
        assert loaded is not None
        assert loaded.run.status is RunStatus.SUCCEEDED
        assert world.clock.moment() - began <= 1_050


@virtual
async def test_a_run_that_does_not_end_in_time_is_shown_as_it_is(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    run_id = await world.start(one, "one")
    began = world.clock.moment()
    loaded = await one.waiters.finished(run_id, within_s=2.5)
    assert loaded is not None
    assert loaded.run.status is RunStatus.RUNNING
    assert 2_500 <= world.clock.moment() - began <= 2_550
    began = world.clock.moment()
    assert await one.waiters.finished(run_id, within_s=0) is not None
    assert world.clock.moment() - began <= 10


@virtual
async def test_a_run_that_never_was_is_not_waited_for(world: World) -> None:
    one = world.add()
    began = world.clock.moment()
    assert await one.waiters.finished(RunId("00-missing"), within_s=60) is None
    assert world.clock.moment() - began <= 10


@virtual
async def test_draining_ends_every_watch(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    run_id = await world.start(one, "one")
    watch = watched(one, run_id)
    await asyncio.sleep(0.3)
    one.engine.drain()
    began = world.clock.moment()
    loaded = await watch
    assert loaded is not None
    assert world.clock.moment() - began < 50


@virtual
async def test_a_feed_is_woken_by_its_tenants_runs_and_by_nobody_elses(world: World) -> None:
    one, two = world.add(), world.add()
    await world.define(ONE)
    await world.define(ONE, tenant=GLOBEX)
    theirs = await world.start(one, "one", tenant=GLOBEX)
    await asyncio.sleep(1)
    with two.waiters.feed(ACME) as changed:
        began = world.clock.moment()
        waiting = asyncio.create_task(changed.wait(30))
        await asyncio.sleep(1)
        await one.inbox.cancel(theirs, reason=None, actor="caller")
        await asyncio.sleep(1)
        assert not waiting.done()
        run_id = await world.start(one, "one")
        await waiting
        assert world.clock.moment() - began <= 2_050
        waiting = asyncio.create_task(changed.wait(30))
        await asyncio.sleep(1)
        assert not waiting.done()
        await one.inbox.cancel(run_id, reason=None, actor="caller")
        await waiting
        assert world.clock.moment() - began <= 3_100
        began = world.clock.moment()
        await changed.wait(5)
        assert world.clock.moment() - began == 5_000


@virtual
async def test_a_run_is_read_once_a_second_however_many_wait_for_it(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    run_id = await world.start(one, "one")
    loads: list[str] = []
    one.on_call(lambda verb, is_done: loads.append(verb) if verb == "load" and is_done else None)
    watches = []
    for _ in range(50):
        watches.append(watched(one, run_id, within_s=5))
        await asyncio.sleep(0.013)
    await asyncio.sleep(3)
    assert len(loads) <= 6
    loaded = await asyncio.gather(*watches)
    assert {each.run.status for each in loaded if each is not None} == {RunStatus.RUNNING}
    assert len(loads) <= 9


@virtual
async def test_what_many_waited_for_is_rendered_once(world: World) -> None:
    one, two = world.add(), world.add()
    await world.define(ONE)
    run_id = await world.start(one, "one")
    rendered: list[RunStatus] = []

    async def render(loaded: Loaded) -> RunStatus:
        rendered.append(loaded.run.status)
        await asyncio.sleep(0)
        return loaded.run.status

    for replica in (one, two):
        watches = [
            asyncio.create_task(replica.waiters.rendered(run_id, render, within_s=60, of=each))
            for each in (ACME, ACME, ACME, GLOBEX)
        ]
        await asyncio.sleep(0.3)
        if replica is one:
            await world.report(one, *await world.lease(one, "work"))
        *own, foreign = await asyncio.gather(*watches)
        assert own == [RunStatus.SUCCEEDED] * 3
        assert foreign is None
        # On the second replica the run has ended before: what the first caller read is final.
        assert len(rendered) == (1 if replica is one else 2)


@virtual
async def test_a_finished_run_is_read_and_rendered_once_a_second_for_many_callers(
    world: World,
) -> None:
    one = world.add()
    await world.define(ONE)
    run_id = await world.start(one, "one")
    await world.report(one, *await world.lease(one, "work"))
    await asyncio.sleep(0.5)
    loads: list[str] = []
    one.on_call(lambda verb, is_done: loads.append(verb) if verb == "load" and is_done else None)
    rendered: list[RunStatus] = []

    async def render(loaded: Loaded) -> RunStatus:
        rendered.append(loaded.run.status)
        await asyncio.sleep(0.02)
        return loaded.run.status

    async def read(number: int) -> RunStatus | None:
        await asyncio.sleep(number // 2 * 0.01)  # two at a time
        return await one.waiters.rendered(run_id, render, within_s=0, of=ACME)

    assert await asyncio.gather(*map(read, range(60))) == [RunStatus.SUCCEEDED] * 60
    assert len(loads) <= 2
    assert len(rendered) <= 2
    assert await one.waiters.rendered(run_id, render, within_s=0, of=GLOBEX) is None
    await asyncio.sleep(1.1)
    assert await read(0) is RunStatus.SUCCEEDED
    assert len(loads) <= 3  # it is not kept for longer


@pytest.mark.parametrize(("output", "loads_max"), [("y" * LARGE_BYTES, 2), ("y", 30)])
@virtual
async def test_a_large_finished_run_is_read_once_a_second_for_callers_in_a_row(
    world: World, output: str, loads_max: int
) -> None:
    one = world.add()
    await world.define(ONE)
    run_id = await world.start(one, "one")
    await world.report(one, *await world.lease(one, "work"), output=output)
    await asyncio.sleep(0.5)
    loads: list[str] = []
    one.on_call(lambda verb, is_done: loads.append(verb) if verb == "load" and is_done else None)

    async def render(loaded: Loaded) -> RunStatus:
        return loaded.run.status

    for _ in range(30):
        read = await one.waiters.rendered(run_id, render, within_s=0, of=ACME)
        assert read is RunStatus.SUCCEEDED
        await asyncio.sleep(0.04)
    assert len(loads) <= loads_max


@virtual
async def test_four_large_finished_runs_are_kept_at_once(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    ended: list[RunId] = []
    for _ in range(5):
        ended.append(await world.start(one, "one"))
        await world.report(one, *await world.lease(one, "work"), output="y" * LARGE_BYTES)
    await asyncio.sleep(5)

    async def render(loaded: Loaded) -> RunStatus:
        return loaded.run.status

    for loads in (5, 1):
        before = one.store.calls["load"]
        for run_id in ended:
            assert await one.waiters.rendered(run_id, render, within_s=0, of=ACME) == "succeeded"
        assert one.store.calls["load"] - before == loads


@virtual
async def test_callers_that_come_during_the_first_read_of_an_ended_run_do_not_read_again(
    world: World,
) -> None:
    one = world.add()
    await world.define(ONE)
    run_id = await world.start(one, "one")
    await world.report(one, *await world.lease(one, "work"))
    await asyncio.sleep(0.5)
    loads: list[str] = []
    one.on_call(lambda verb, is_done: loads.append(verb) if verb == "load" and is_done else None)

    async def read(number: int) -> Loaded | None:
        await asyncio.sleep(number * 0.000_01)
        return await one.waiters.finished(run_id, within_s=0, of=ACME)

    found = await asyncio.gather(*map(read, range(5)))
    assert {each.run.status for each in found if each is not None} == {RunStatus.SUCCEEDED}
    assert len(found) == 5
    assert len(loads) == 1


@virtual
async def test_nobody_is_shown_what_was_read_before_they_asked(world: World) -> None:
    one, two = world.add(), world.add()
    one.bus.is_mute = True
    await world.define(ONE)
    for within_s in (0.0, 0.1):
        run_id = await world.start(one, "one")
        watch = watched(two, run_id)
        await asyncio.sleep(0.3)
        await one.inbox.cancel(run_id, reason=None, actor="caller")
        loaded = await two.waiters.finished(run_id, within_s=within_s)
        assert loaded is not None
        assert loaded.run.status is RunStatus.CANCELLED
        assert await watch is not None
