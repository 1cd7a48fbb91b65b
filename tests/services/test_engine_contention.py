"""Many want one run: one at a time has it, the others come again, and nobody is lost or in step."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from stanchion import telemetry
from stanchion.core.model import RunId
from stanchion.ports.bus import Ack, Retry
from stanchion.ports.records import Committed, OutboxRow, Result
from tests.contract.builders import commit_of, loaded, nothing, result_of
from tests.services.faulty_locks import Fault
from tests.services.stage import ACME, GLOBEX, Replica, World, job, under_lease, virtual, workflow

ONE = workflow("one", step=job("work"))
HANDLERS = 20


async def _called(world: World, replicas: Sequence[Replica], held_s: float) -> list[list[float]]:
    """Call all replicas to one run while another has it; when each of them was told "busy".

    The first list is of those who came at the call, the second of those who came again.
    """
    await world.define(ONE)
    run_id = await world.start(replicas[0], "one")
    (leased,) = await world.lease(replicas[0], "work")
    # Not due for long: here the calls come from the test alone.
    await world.store.accept([result_of(leased)], row_due_in_ms=600_000)
    row = OutboxRow(run_id, ACME, 1)
    ttl_ms = round(held_s * 1000)
    await world.locks.acquire(f"run/{run_id}", "another's", ttl_ms=ttl_ms, within_ms=10)
    began_s = asyncio.get_running_loop().time()
    busy: list[list[float]] = [[], []]

    async def deliver(replica: Replica) -> None:
        for tries in range(1_000):
            disposition = await replica.bus.call(row)
            if isinstance(disposition, Ack):
                return
            assert isinstance(disposition, Retry)
            busy[min(1, tries)].append(asyncio.get_running_loop().time() - began_s)
            await asyncio.sleep(disposition.delay_ms / 1000)
        pytest.fail("never handled")

    await asyncio.gather(*map(deliver, replicas))
    assert await world.ended(run_id, within_s=0.1) == "succeeded"
    await world.assert_nothing_left()
    return busy


async def _fleet(world: World, *, is_fixed: bool) -> list[Replica]:
    replicas = [world.add() for _ in range(HANDLERS)]
    await asyncio.sleep(0.1)
    if is_fixed:
        await replicas[0].services.settings.patch({"lock_busy": {"kind": "fixed"}}, actor="test")
    await asyncio.sleep(2)
    return replicas


def _largest(moments_s: Sequence[float], bucket_s: float) -> int:
    return max(Counter(int(each / bucket_s) for each in moments_s).values(), default=0)


@virtual
async def test_with_jitter_the_largest_burst_of_retries_is_at_most_half(world: World) -> None:
    """Everybody comes at the call: that is the herd, and the same for both. Then it matters."""
    fixed = await _called(world, await _fleet(world, is_fixed=True), held_s=0.2)
    elsewhere = World()
    jittered = await _called(elsewhere, await _fleet(elsewhere, is_fixed=False), held_s=0.2)
    assert len(fixed[0]) == len(jittered[0]) == HANDLERS
    assert _largest(fixed[1], 0.5) >= HANDLERS - 2
    assert _largest(jittered[1], 0.5) <= _largest(fixed[1], 0.5) / 2
    assert len(jittered[1]) <= len(fixed[1]) / 4, "and far fewer come in vain"


@virtual
async def test_a_wait_for_a_busy_lock_has_a_span_that_failed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "tracing", telemetry.Tracing(provider, None))
    replica = world.add()
    logged: set[str | None] = set()

    def note(_verb: str, _is_done: bool) -> None:
        ids = telemetry.LOG_IDS.get()
        logged.add(None if ids is None or ids.run is None else ids.trace_id)

    replica.store.on_call = note
    await _called(world, [replica], held_s=0.2)
    waits = [each for each in exporter.get_finished_spans() if each.name == "lock wait"]
    failed = [each.status.description for each in waits if not each.status.is_ok]
    assert "another replica or task has the lease" in failed
    assert len(failed) < len(waits), "the last one got it"
    traces = {f"{each.context.trace_id:032x}" for each in waits}
    assert logged - {None} == traces, "log lines about the run name its trace"


@virtual
async def test_with_jitter_those_who_wait_long_do_not_stay_in_step(world: World) -> None:
    fixed = await _called(world, await _fleet(world, is_fixed=True), held_s=20)
    elsewhere = World()
    jittered = await _called(elsewhere, await _fleet(elsewhere, is_fixed=False), held_s=20)
    assert _largest(fixed[1], 0.05) == HANDLERS
    assert _largest(jittered[1], 0.05) <= HANDLERS / 2


@virtual
async def test_retries_are_counted_by_the_half_second(world: World) -> None:
    one = world.add()
    await world.define(under_lease(ONE))
    run_id = await world.start(one, "one")
    await world.locks.acquire(f"run/{run_id}", "another's", ttl_ms=20_000, within_ms=10)
    await world.report(one, *await world.lease(one, "work"))
    assert await world.ended(run_id, within_s=30) == "succeeded"
    await asyncio.sleep(2)
    busy = [each for each in one.bus.answers if isinstance(each.disposition, Retry)]
    assert one.metric("lock_busy_retries_total") == len(busy)
    assert 300 <= min(_delays(one, run_id)) < max(_delays(one, run_id)) <= 700
    buckets = Counter(int(each.at_s / 0.5) for each in busy)
    assert one.metric("lock_busy_retry_burst_count") == len(buckets)
    assert one.metric("lock_busy_retry_burst_sum") == len(busy)
    for most in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000):
        counted = one.metric("lock_busy_retry_burst_bucket", le=f"{most}.0")
        assert counted == sum(count <= most for count in buckets.values())
    assert one.metric("run_lock_contended_total") == len(busy) + 1, "and the one that took it"


def _delays(replica: Replica, run_id: RunId) -> list[int]:
    return [
        each.disposition.delay_ms
        for each in replica.bus.answers
        if isinstance(each.disposition, Retry) and each.run_id == run_id
    ]


@pytest.mark.parametrize("is_fixed", [False, True])
@virtual
async def test_two_hundred_busy_answers_lose_nothing_and_delay_nobody_else(
    world: World, is_fixed: bool
) -> None:
    one, two = world.add(), world.add()
    await world.define(under_lease(ONE))
    await world.define(under_lease(ONE), tenant=GLOBEX)
    await asyncio.sleep(0.1)
    if is_fixed:
        await one.services.settings.patch({"lock_busy": {"kind": "fixed"}}, actor="test")
        await asyncio.sleep(2)
    stuck = await world.start(one, "one")
    await world.locks.acquire(f"run/{stuck}", "another's", ttl_ms=110_000, within_ms=10)
    await world.report(one, *await world.lease(one, "work"))
    world.work(two, "work")
    for _ in range(20):
        await asyncio.sleep(5)
        began = world.clock.moment()
        other = await world.start(one, "one", tenant=GLOBEX)
        assert await world.ended(other, within_s=1) == "succeeded"
        assert world.clock.moment() - began <= 100
    assert await world.ended(stuck, within_s=12) == "succeeded"
    retries = sum(each.metric("lock_busy_retries_total") for each in (one, two))
    assert retries >= 200
    delays = _delays(one, stuck) + _delays(two, stuck)
    assert (set(delays) == {500}) is is_fixed
    # Neither the store's poison counter nor the dead letters ever heard of it.
    for replica in (one, two):
        assert replica.store.calls["count_failure"] == 0
        assert replica.metric("dead_letters_total") == 0
    await world.assert_nothing_left()


# ── Two writers ──────────────────────────────────────────────────────────────────────────────────


async def _written_by_another(world: World, run_id: RunId, fence: int | None = None) -> None:
    found = await loaded(world.store, run_id)
    other = commit_of(found, nothing(found, say="another was here"), fence=fence)
    assert isinstance(await world.store.commit(other), Committed)


@virtual
async def test_a_commit_that_met_another_decides_again_on_what_is_there_now(world: World) -> None:
    one = world.add()
    await world.define(under_lease(ONE))
    run_id = await world.start(one, "one")
    leased = await world.lease(one, "work")
    for _ in range(3):
        one.store.script("commit", lambda: _written_by_another(world, run_id))
    await world.report(one, *leased)
    assert await world.ended(run_id, within_s=0.2) == "succeeded"
    told = await world.told(run_id)
    assert told.count("another was here - test") == 3
    assert told.count("step_succeeded step work-worker") == 1
    assert one.metric("commit_conflicts_total") == 3
    assert one.store.calls["commit"] == 4
    assert one.locks.calls["acquire"] == 1
    await world.assert_nothing_left()


@virtual
async def test_each_conflict_is_one_duplicate_for_escalation(world: World) -> None:
    one = world.add()
    await world.define(under_lease(ONE))
    run_id = await world.start(one, "one")
    leased = await world.lease(one, "work")
    for _ in range(3):
        one.store.script("commit", lambda: _written_by_another(world, run_id))
    await world.report(one, *leased)
    assert await world.ended(run_id, within_s=0.2) == "succeeded"
    assert one.services.escalating.counts.duplicates_running == 3


@virtual
async def test_a_run_that_others_never_stop_writing_to_is_left_to_them_for_a_while(
    world: World,
) -> None:
    one = world.add()
    await world.define(under_lease(ONE))
    run_id = await world.start(one, "one")
    leased = await world.lease(one, "work")
    for _ in range(50):
        one.store.script("commit", lambda: _written_by_another(world, run_id))
    await world.report(one, *leased)
    assert await world.ended(run_id, within_s=0.2) == "running"
    assert one.metric("commit_conflicts_total") == 20
    assert await world.ended(run_id, within_s=5) == "succeeded"
    assert one.metric("commit_conflicts_total") == 50
    assert one.store.calls["count_failure"] == 0


@virtual
async def test_a_stale_fence_is_replaced_by_one_above_the_runs(world: World) -> None:
    """The lock store was replaced, and its clock is behind the old one's."""
    one = world.add()
    await world.define(under_lease(ONE))
    run_id = await world.start(one, "one")
    leased = await world.lease(one, "work")
    ahead = world.clock.now() * 1_000 + 3_600_000_000
    await _written_by_another(world, run_id, fence=ahead)
    await world.report(one, *leased)
    assert await world.ended(run_id, within_s=0.2) == "succeeded"
    assert (await world.run(run_id)).fence == ahead + 1
    assert one.locks.calls["acquire"] == 2
    assert one.store.calls["commit"] == 2
    await world.assert_nothing_left()


@virtual
async def test_a_lost_reply_to_a_commit_is_no_conflict_and_nothing_is_applied_twice(
    world: World,
) -> None:
    one = world.add()
    await world.define(workflow("two", first=job("work"), second=job("work", "first")))
    run_id = await world.start(one, "two")
    one.store.script("commit", Fault.LOST_REPLY)
    world.work(one, "work")
    assert await world.ended(run_id, within_s=10) == "succeeded"
    told = Counter(await world.told(run_id))
    assert told["step_succeeded first work-worker"] == 1
    assert told["job_dispatched second work-worker"] == 1
    assert one.metric("commit_conflicts_total") == 0
    await world.assert_nothing_left()


@virtual
async def test_a_replica_that_meets_a_run_for_the_first_time_reads_it_once(world: World) -> None:
    one, two = world.add(), world.add()
    await world.define(ONE)
    run_id = await world.start(one, "one")
    leased = await world.lease(two, "work")
    before = two.store.calls["load"]
    await world.report(two, *leased)
    assert await world.ended(run_id) == "succeeded"
    assert two.store.calls["load"] - before == 1


@virtual
async def test_what_was_read_before_the_hold_may_be_old_and_that_is_no_conflict(
    world: World,
) -> None:
    one, two = world.add(), world.add()
    await world.define(under_lease(ONE))
    run_id = await world.start(one, "one")
    (leased,) = await world.lease(two, "work")
    one.kill()
    two.store.script("commit", lambda: _written_by_another(world, run_id))
    result = Result(job_id=leased.job.id, fence=leased.fence, worker_id="worker")
    await world.store.accept([result])  # by a replica that died; this one does not know the run
    assert await world.ended(run_id) == "succeeded"
    assert (await world.told(run_id)).count("another was here - test") == 1
    assert two.metric("commit_conflicts_total") == 0
    await world.assert_nothing_left()
