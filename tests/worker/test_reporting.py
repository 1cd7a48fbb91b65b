"""Results travel together, again until they are settled, and one bad one harms no other."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from stanchion.wire.worker import JobError
from stanchion.worker import Job, WorkerRefused, events
from tests.worker.ledger import Fault
from tests.worker.stage import Stage, on_stage


def _quick(stage: Stage, count: int) -> None:
    @stage.app.task("t")
    async def quick(job: Job) -> object:
        return job.job_id

    for number in range(count):
        stage.ledger.put(f"run:{number}@1")


@on_stage
async def test_results_that_end_together_travel_together(stage: Stage) -> None:
    _quick(stage, 100)
    async with stage.working(concurrency=100):
        await stage.ledger.all_done()
    assert [len(batch) for batch in stage.ledger.batches] == [100]
    assert stage.ledger.asked["results"][0] <= 2


@pytest.mark.parametrize("fault", [Fault.AWAY, Fault.CUT, Fault.LOST_REPLY])
@on_stage
async def test_a_result_is_sent_until_it_is_settled_and_taken_once(
    stage: Stage, fault: Fault
) -> None:
    _quick(stage, 3)
    stage.ledger.script("results", *[fault] * 10)
    async with stage.working():
        await stage.ledger.until(lambda: len(stage.ledger.asked["results"]) == 11, within_s=60)
        await asyncio.sleep(1)
    assert len(stage.ledger.asked["results"]) == 11
    assert dict(stage.ledger.accepted) == {f"run:{number}@1": 1 for number in range(3)}
    assert stage.app.counts["ResultDropped"] == 0


@on_stage
async def test_the_pauses_between_tries_grow_to_two_seconds(stage: Stage) -> None:
    _quick(stage, 1)
    stage.chance = 0.999
    stage.ledger.script("results", *[Fault.AWAY] * 8)
    async with stage.working():
        await stage.ledger.all_done(within_s=60)
    asked = stage.ledger.asked["results"]
    waits = [after - before for before, after in itertools.pairwise(asked)]
    assert waits == pytest.approx([100, 200, 400, 800, 1_600, 2_000, 2_000, 2_000], abs=5)


@on_stage
async def test_what_ends_during_an_outage_goes_along_with_the_next_try(stage: Stage) -> None:
    @stage.app.task("t")
    async def staggered(job: Job) -> None:
        await asyncio.sleep(float(job.job_id.split(":")[1][0]) / 10)

    stage.chance = 0.999
    for number in range(5):
        stage.ledger.put(f"run:{number}@1")
    stage.ledger.script("results", *[Fault.AWAY] * 4)
    async with stage.working():
        await stage.ledger.all_done()
    assert [len(batch) for batch in stage.ledger.batches] == [5]


@on_stage
async def test_a_late_result_is_offered_for_two_terms_more_and_then_given_up(stage: Stage) -> None:
    _quick(stage, 1)
    stage.ledger.always("results", Fault.CUT)
    stage.ledger.always("renew", Fault.CUT)
    # Nobody else asks for work either: the server is gone.
    async with stage.working():
        await stage.ledger.until(lambda: bool(stage.ledger.asked["results"]))
        stage.ledger.always("lease", Fault.CUT)
        await stage.ledger.until(lambda: stage.app.counts["ResultDropped"] == 1, within_s=300)
        assert stage.clock.moment() in range(180_000, 183_000)


@pytest.mark.parametrize("fault", [Fault.AWAY, Fault.HANG])
@on_stage
async def test_a_result_that_was_not_taken_when_a_worker_leaves_is_told(
    stage: Stage, fault: Fault
) -> None:
    _quick(stage, 1)
    stage.ledger.always("results", fault)
    async with stage.working(drain_s=1) as running:
        await stage.ledger.until(lambda: bool(stage.ledger.asked["results"]))
        stage.app.stop()
        await running
    (dropped,) = stage.told(events.ResultDropped)
    assert dropped.reason == "the worker was stopped"


@on_stage
async def test_a_rejected_result_is_counted_and_not_sent_again(stage: Stage) -> None:
    @stage.app.task("t")
    async def slow(_job: Job) -> None:
        await asyncio.sleep(10)

    stage.ledger.put("run:0@1")
    stage.ledger.always("held", Fault.HANG)
    async with stage.working():
        await stage.ledger.until(lambda: bool(stage.ledger.leases))
        stage.ledger.take_away("run:0@1")
        await stage.ledger.until(lambda: bool(stage.ledger.batches))
        await asyncio.sleep(5)
    assert stage.ledger.rejected == [("run:0@1", "stale_fence")]
    assert stage.app.counts["ResultRejected"] == 1


@on_stage
async def test_one_result_that_the_server_refuses_harms_no_other(stage: Stage) -> None:
    _quick(stage, 20)
    stage.ledger.is_invalid = lambda result: (
        result.job_id == "run:7@1" and result.status == "succeeded"
    )
    async with stage.working(concurrency=20):
        await stage.ledger.all_done()
    bad = stage.ledger.results.pop("run:7@1")
    assert all(result.status == "succeeded" for result in stage.ledger.results.values())
    assert isinstance(bad.error, JobError)
    assert (bad.error.code, bad.error.retryable) == ("result_refused", False)
    assert set(stage.ledger.accepted.values()) == {1}


@on_stage
async def test_what_is_refused_in_every_form_is_dropped(stage: Stage) -> None:
    _quick(stage, 2)
    stage.ledger.is_invalid = lambda result: result.job_id == "run:1@1"
    async with stage.working():
        await stage.ledger.until(lambda: stage.app.counts["ResultDropped"] == 1)
    assert list(stage.ledger.results) == ["run:0@1"]


@on_stage
async def test_a_worker_whose_key_was_revoked_leaves(stage: Stage) -> None:
    _quick(stage, 2)
    stage.ledger.always("results", Fault.REFUSED)
    async with stage.working() as running:
        with pytest.raises(WorkerRefused, match="--role worker"):
            await running
    assert stage.app.counts["ResultDropped"] == 2


@on_stage
async def test_large_results_are_spread_over_requests_the_server_can_read(stage: Stage) -> None:
    @stage.app.task("t")
    async def large(_job: Job) -> str:
        return "x" * 250_000

    for number in range(10):
        stage.ledger.put(f"run:{number}@1")
    async with stage.working(concurrency=10):
        await stage.ledger.all_done()
    sizes = [sum(len(str(each.output)) for each in batch) for batch in stage.ledger.batches]
    assert max(sizes) <= 512 * 1024
    assert len(stage.ledger.results) == 10


@on_stage
async def test_results_in_hand_are_told_before_a_worker_leaves(stage: Stage) -> None:
    _quick(stage, 3)
    stage.ledger.script("results", *[Fault.AWAY] * 3)
    async with stage.working() as running:
        await stage.ledger.until(lambda: bool(stage.ledger.asked["results"]))
        stage.app.stop()
        await running
    assert len(stage.ledger.results) == 3


@on_stage
async def test_a_worker_does_not_wait_for_ever_to_tell_its_results(stage: Stage) -> None:
    _quick(stage, 3)
    stage.ledger.always("results", Fault.HANG)
    async with stage.working() as running:
        await stage.ledger.until(lambda: bool(stage.ledger.asked["results"]))
        stage.app.stop()
        await running
    assert stage.clock.moment() in range(5_000, 5_300)
