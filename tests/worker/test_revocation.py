"""A worker keeps one held call open, and stops a cancelled job at once."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

import stanchion
from stanchion.core.lease import FenceCause, LeaseLost
from stanchion.worker import Cancelled, Job, events
from tests.worker.ledger import Fault
from tests.worker.stage import Stage, on_stage

JOB = "run:1@1"


class Stoppable:
    """An async handler that works until it is stopped, and remembers how and when."""

    def __init__(self, stage: Stage) -> None:
        self.stopped = asyncio.Event()
        self.cause: object = None
        self.lost: FenceCause | None = None
        self.at_ms = 0
        self._stage = stage
        stage.app.task("t")(self)

    async def __call__(self, job: Job) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            if not self.stopped.is_set():
                [self.cause] = error.args or [None]
                self.lost, self.at_ms = job.lost, self._stage.clock.moment()
            self.stopped.set()
            raise


@pytest.mark.parametrize("after_ms", [0, 100, 300, 1_000, 5_000, 19_999, 20_000, 50_000])
@on_stage
async def test_a_cancelled_jobs_handler_is_stopped_within_a_second(
    stage: Stage, after_ms: int
) -> None:
    handler = Stoppable(stage)
    async with stage.working():
        stage.ledger.put(JOB)
        await stage.ledger.until(lambda: stage.ledger.leases[JOB] == 1)
        began = stage.clock.moment()
        await asyncio.sleep(after_ms / 1000)
        stage.ledger.revoke(JOB)
        await handler.stopped.wait()
        assert handler.at_ms - began - after_ms <= 300
        await asyncio.sleep(2)
    assert isinstance(handler.cause, Cancelled)
    assert not isinstance(handler.cause, LeaseLost)
    assert handler.cause.job_id == JOB
    assert handler.lost is FenceCause.CANCELLED
    assert stage.ledger.batches == []
    assert stage.told(events.JobCancelled) == [events.JobCancelled(job_id=JOB, topic="t")]
    assert stage.told(events.JobAbandoned) == []


@on_stage
async def test_a_held_call_that_is_full_is_not_ended_for_leases_that_do_not_fit(
    stage: Stage,
) -> None:
    Stoppable(stage)
    for number in range(1_001):
        stage.ledger.put(f"run:{number}@1")
    async with stage.working(concurrency=1_001):
        await stage.ledger.until(lambda: len(stage.ledger.leases) == 1_001)
        await asyncio.sleep(2)
        before = len(stage.ledger.asked["held"])
        await asyncio.sleep(10)
        assert len(stage.ledger.asked["held"]) - before <= 1


@on_stage
async def test_a_job_that_was_lost_and_leased_again_is_watched_anew(stage: Stage) -> None:
    stopped: list[int] = []

    @stage.app.task("t")
    async def work(_job: Job) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(stage.clock.moment())

    stage.ledger.script("held", Fault.HANG)  # it watches the first lease, and tells nothing
    async with stage.working():
        stage.ledger.put(JOB)
        await asyncio.sleep(1)
        stage.ledger.take_away(JOB)
        await asyncio.sleep(19.5)
        assert len(stopped) == 1  # a renewal told it
        stage.ledger.put(JOB)
        await stage.ledger.until(lambda: stage.ledger.leases[JOB] == 2)
        await asyncio.sleep(1)
        began = stage.clock.moment()
        stage.ledger.revoke(JOB)
        await asyncio.sleep(1)
        assert [at - began for at in stopped[1:]] == [pytest.approx(0, abs=300)]


@pytest.mark.parametrize(
    ("reason", "cause"), [("timed_out", FenceCause.TIMED_OUT), ("expired", FenceCause.TAKEN)]
)
@on_stage
async def test_a_job_that_is_lost_otherwise_has_a_lost_lease(
    stage: Stage, reason: str, cause: FenceCause
) -> None:
    handler = Stoppable(stage)
    async with stage.working():
        stage.ledger.put(JOB)
        await asyncio.sleep(3)
        stage.ledger.revoke(JOB, "timed_out" if reason == "timed_out" else "expired")
        await handler.stopped.wait()
    assert isinstance(handler.cause, LeaseLost)
    assert handler.cause.cause is handler.lost is cause


@on_stage
async def test_a_cancel_that_is_learned_of_with_a_renewal_is_a_cancel_too(stage: Stage) -> None:
    handler = Stoppable(stage)
    stage.ledger.always("held", Fault.HANG)
    async with stage.working():
        stage.ledger.put(JOB)
        await asyncio.sleep(3)
        stage.ledger.revoke(JOB)
        await handler.stopped.wait()
    assert handler.at_ms == 20_000
    assert isinstance(handler.cause, Cancelled)


class Lost:
    """A lease that is lost."""

    def __init__(self, cause: FenceCause) -> None:
        self.lost = cause

    def note(self, progress: object) -> None:
        raise AssertionError(progress)

    def use(self, usage: object) -> None:
        raise AssertionError(usage)


@pytest.mark.parametrize("cause", FenceCause)
def test_a_handler_that_asks_is_told_of_a_cancel_apart_from_a_lost_lease(cause: FenceCause) -> None:
    job = Job("t", job_id=JOB, hold=Lost(cause))
    for ask in (job.check, job.heartbeat):
        with pytest.raises(Cancelled if cause is FenceCause.CANCELLED else LeaseLost):
            ask()


@on_stage
async def test_there_is_one_held_call_and_short_jobs_need_none(stage: Stage) -> None:
    @stage.app.task("t")
    async def work(job: Job) -> None:
        await asyncio.sleep(job.input)

    for number in range(50):
        stage.ledger.put(f"run:{number}@1", input=0.1)
    async with stage.working(concurrency=5):
        await stage.ledger.all_done()
        assert stage.ledger.asked["held"] == []
        for number in range(50, 80):
            stage.ledger.put(f"run:{number}@1", input=30)
            await asyncio.sleep(0.05)
        await stage.ledger.all_done(within_s=300)
    assert stage.ledger.held_most == 1
    # Five jobs begin within a quarter of a second, six times: one call, replaced once, and another
    # after a third of the term.
    assert len(stage.ledger.asked["held"]) <= 6 * 3 + 2


@on_stage
async def test_new_leases_join_the_held_call_at_most_twice_a_second(stage: Stage) -> None:
    @stage.app.task("t")
    async def work(_job: Job) -> None:
        await asyncio.sleep(2)

    async with stage.working(concurrency=100):
        for number in range(100):
            stage.ledger.put(f"run:{number}@1")
            await asyncio.sleep(0.1)
        await stage.ledger.all_done()
    asked = stage.ledger.asked["held"]
    assert min(after - before for before, after in pairwise(asked)) >= 500
    assert stage.ledger.held_most == 1


@pytest.mark.parametrize("fault", [Fault.AWAY, Fault.CUT, Fault.HANG, Fault.INVALID])
@on_stage
async def test_a_broken_held_call_is_no_failed_renewal(stage: Stage, fault: Fault) -> None:
    @stage.app.task("t")
    async def work(_job: Job) -> str:
        await asyncio.sleep(300)
        return "done"

    stage.ledger.always("held", fault)
    stage.ledger.put(JOB)
    async with stage.working():
        await stage.ledger.all_done(within_s=400)
    assert stage.ledger.results[JOB].output == "done"
    assert len(stage.ledger.asked["renew"]) in {14, 15}, "every third of a minute, as ever"
    assert stage.app.counts["RenewalFailed"] == 0
    # It is tried again, after pauses that grow to five seconds, or a minute if it was refused.
    assert len(stage.ledger.asked["held"]) in range(5, 200)


@on_stage
async def test_a_server_that_answers_a_held_call_at_once_is_not_asked_in_a_loop(
    stage: Stage,
) -> None:
    @stage.app.task("t")
    async def work(_job: Job) -> None:
        await asyncio.sleep(60)

    stage.ledger.is_draining = True
    stage.ledger.put(JOB)
    async with stage.working():
        await stage.ledger.all_done(within_s=100)
    assert len(stage.ledger.asked["held"]) <= 40


@on_stage
async def test_pauses_begin_anew_after_a_held_call_that_was_not_answered_at_once(
    stage: Stage,
) -> None:
    @stage.app.task("t")
    async def work(_job: Job) -> None:
        await asyncio.sleep(300)

    async def pauses_ms(count: int) -> list[int]:
        stage.ledger.is_draining = True
        begin = len(stage.ledger.asked["held"])
        await stage.ledger.until(lambda: len(stage.ledger.asked["held"]) > begin + count)
        stage.ledger.is_draining = False
        asked = stage.ledger.asked["held"][begin:]
        return [after - before for before, after in pairwise(asked)]

    stage.ledger.put(JOB)
    async with stage.working():
        first = await pauses_ms(4)
        await asyncio.sleep(60)
        assert await pauses_ms(4) == first
        assert first[0] < first[3]
        await stage.ledger.all_done(within_s=400)


def test_cancelled_is_public_and_apart_from_lease_lost() -> None:
    assert stanchion.Cancelled is Cancelled
    assert "Cancelled" in stanchion.__all__
    assert not issubclass(Cancelled, LeaseLost)
    assert not issubclass(LeaseLost, Cancelled)
    assert str(Cancelled(JOB)) == "the run of the job 'run:1@1' was cancelled"
