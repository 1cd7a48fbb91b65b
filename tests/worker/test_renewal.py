"""A worker renews its leases, and stops work whose lease it can no longer trust."""

from __future__ import annotations

import asyncio
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from stanchion.core.lease import JOB_TERMS, FenceCause, LeaseLost
from stanchion.transport.messages import HttpReply
from stanchion.wire.worker import LeasedJob
from stanchion.worker import Job, Worker, events, renewal
from stanchion.worker.renewal import HeldJob, LeaseRenewer
from stanchion.worker.server import RENEW_PATH, WorkerApi
from tests.worker.ledger import Fault, Wire
from tests.worker.stage import Stage, on_stage


class Endless:
    """An async handler that works until it is stopped, and remembers how it was."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.stopped = asyncio.Event()
        self.error: BaseException | None = None
        self.lost: FenceCause | None = None
        self.at_ms = 0
        self.stage: Stage | None = None

    async def __call__(self, job: Job) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            if self.error is None:
                self.error, self.lost = error, job.lost
            if self.stage is not None:
                self.at_ms = self.stage.clock.moment()
            raise
        finally:
            self.stopped.set()


def _endless(stage: Stage) -> Endless:
    handler = Endless()
    handler.stage = stage
    stage.app.task("t")(handler)
    stage.ledger.put("run:step@1")
    return handler


@pytest.mark.parametrize("fault", [Fault.AWAY, Fault.CUT, Fault.HANG, Fault.REFUSED])
@on_stage
async def test_after_exactly_three_failed_renewals_the_handler_is_cancelled_with_its_cause(
    stage: Stage, fault: Fault
) -> None:
    handler = _endless(stage)
    stage.ledger.always("renew", fault)
    async with stage.working():
        await handler.stopped.wait()
        await asyncio.sleep(2)
        assert len(stage.ledger.asked["renew"]) == 3
    assert handler.lost is FenceCause.RENEWAL_FAILURES
    assert isinstance(handler.error, asyncio.CancelledError)
    [cause] = handler.error.args
    assert isinstance(cause, LeaseLost)
    assert cause.cause is FenceCause.RENEWAL_FAILURES
    assert handler.at_ms < JOB_TERMS.trusted_ms
    # Nothing is sent about it: neither a result nor a release.
    assert stage.ledger.batches == []
    assert stage.app.counts["JobAbandoned"] >= 1


@on_stage
async def test_the_first_renewal_comes_at_a_third_and_each_call_may_take_two_seconds(
    stage: Stage,
) -> None:
    handler = _endless(stage)
    stage.ledger.always("renew", Fault.HANG)
    async with stage.working():
        await handler.stopped.wait()
    assert stage.ledger.asked["renew"] == [20_000, 38_700, 55_400]
    assert handler.at_ms in range(57_400, 57_403)
    assert [event.left_ms for event in stage.told(events.RenewalFailed)] == [36_900, 18_200, 0]


@pytest.mark.parametrize("phase_s", [1, 15, 19, 20, 21, 30, 37, 39, 50, 55, 59])
@pytest.mark.parametrize("fault", [Fault.AWAY, Fault.HANG, Fault.LOST_REPLY])
@on_stage
async def test_an_outage_of_half_a_minute_costs_no_job_and_no_delivery(
    stage: Stage, fault: Fault, phase_s: int
) -> None:
    @stage.app.task("t")
    async def long(_job: Job) -> str:
        await asyncio.sleep(600)
        return "done"

    for number in range(20):
        stage.ledger.put(f"run:{number}@1")
    async with stage.working(concurrency=20):
        await asyncio.sleep(phase_s)
        for verb in ("lease", "renew", "results"):
            stage.ledger.always(verb, fault)
        await asyncio.sleep(30)
        for verb in ("lease", "renew", "results"):
            stage.ledger.always(verb, Fault.NONE)
        await stage.ledger.all_done(within_s=1_000)
    assert set(stage.ledger.leases.values()) == {1}
    assert len(stage.ledger.results) == 20
    assert stage.app.counts["JobAbandoned"] == 0


@on_stage
async def test_in_an_outage_leases_are_still_renewed_in_few_calls(stage: Stage) -> None:
    @stage.app.task("t")
    async def long(_job: Job) -> None:
        await asyncio.sleep(100)

    stage.draw = Random(7).random
    async with stage.working(concurrency=100):
        for number in range(100):
            stage.ledger.put(f"run:{number}@1")
            await asyncio.sleep(0.004)
        stage.ledger.always("renew", Fault.AWAY)
        await asyncio.sleep(50)
        stage.ledger.always("renew", Fault.NONE)
        await stage.ledger.all_done(within_s=200)
    assert set(stage.ledger.leases.values()) == {1}
    first, *_ = asked = stage.ledger.asked["renew"]
    assert first == 20_000
    assert len([at for at in asked if at < 30_000]) == 1
    assert len([at for at in asked if 30_000 < at < 50_000]) <= 3
    assert len([at for at in asked if 50_000 < at < 60_000]) <= 20


@on_stage
async def test_leases_that_failed_in_one_call_are_retried_in_one_call(stage: Stage) -> None:
    @stage.app.task("t")
    async def long(_job: Job) -> None:
        await asyncio.sleep(70)

    stage.ledger.script("renew", Fault.AWAY, Fault.AWAY)
    for number in range(20):
        stage.ledger.put(f"run:{number}@1")
    samples = iter(range(1_000))
    stage.draw = lambda: next(samples) % 10 / 10
    async with stage.working(concurrency=20):
        await stage.ledger.until(lambda: bool(stage.ledger.renewed), within_s=100)
        [(_, renewed)] = stage.ledger.renewed
        assert len(renewed) == 20
        await stage.ledger.all_done(within_s=100)


@on_stage
async def test_a_success_in_between_starts_the_count_anew(stage: Stage) -> None:
    handler = _endless(stage)
    bad, good = Fault.AWAY, Fault.NONE
    stage.ledger.script("renew", bad, bad, good, bad, bad, good, bad, bad, bad)
    async with stage.working():
        await handler.stopped.wait()
        assert len(stage.ledger.asked["renew"]) == 9
    assert handler.lost is FenceCause.RENEWAL_FAILURES


@on_stage
async def test_when_a_renewal_says_lost_the_handler_is_cancelled_at_once(stage: Stage) -> None:
    handler = _endless(stage)
    stage.ledger.always("held", Fault.HANG)
    async with stage.working():
        await handler.began.wait()
        stage.ledger.take_away("run:step@1")
        await handler.stopped.wait()
        assert len(stage.ledger.asked["renew"]) == 1
    assert handler.at_ms == 20_000
    assert handler.lost is FenceCause.TAKEN


@on_stage
async def test_a_job_of_two_hours_keeps_its_lease(stage: Stage) -> None:
    @stage.app.task("t")
    async def long(job: Job) -> str:
        for hour in range(2):
            await asyncio.sleep(3_595)
            job.heartbeat({"hours": hour + 1})
        return "done"

    stage.ledger.put("run:step@1")
    async with stage.working():
        await stage.ledger.all_done(within_s=10_000)
    assert stage.ledger.leases["run:step@1"] == 1
    assert stage.ledger.results["run:step@1"].output == "done"
    # Every third of a minute, and not more often.
    assert len(stage.ledger.asked["renew"]) in range(355, 363)
    assert stage.ledger.progress == [{"hours": 1}, {"hours": 2}]


@on_stage
async def test_progress_is_sent_at_once_and_at_most_every_second(stage: Stage) -> None:
    @stage.app.task("t")
    async def report(job: Job) -> str:
        for page in range(30):
            job.heartbeat({"page": page})
            await asyncio.sleep(0.1)
        return "done"

    stage.ledger.put("run:step@1")
    async with stage.working():
        await stage.ledger.all_done()
    first, second, third, *_ = stage.ledger.asked["renew"]
    assert first <= 10
    assert {second - first, third - second} <= {1_000, 1_001}
    assert stage.ledger.progress[0] == {"page": 0}


class Late(Wire):
    """A second passes before each answer to a renewal arrives."""

    async def post(self, path: str, body: bytes) -> HttpReply:
        answer = await super().post(path, body)
        if path == RENEW_PATH:
            await asyncio.sleep(1)
        return answer


@on_stage
async def test_progress_is_sent_as_it_was_when_it_was_reported(stage: Stage) -> None:
    @stage.app.task("t")
    async def report(job: Job) -> str:
        seen: list[Any] = ["read"]
        job.heartbeat(seen)
        await asyncio.sleep(0.5)
        seen.append("written")
        job.heartbeat(seen)
        seen.append(job)
        await asyncio.sleep(10)
        return "done"

    stage.wire = Late(stage.ledger)
    stage.ledger.put("run:step@1")
    async with stage.working():
        await stage.ledger.all_done()
    assert stage.ledger.progress == [["read"], ["read", "written"]]


@on_stage
async def test_progress_that_cannot_be_sent_is_no_failed_renewal(stage: Stage) -> None:
    stage.ledger.always("renew", Fault.AWAY)

    @stage.app.task("t")
    async def report(job: Job) -> str:
        for page in range(15):
            job.heartbeat({"page": page})
            await asyncio.sleep(1)
        return "done"

    stage.ledger.put("run:step@1")
    async with stage.working():
        await stage.ledger.all_done()
    assert stage.ledger.results["run:step@1"].output == "done"
    assert len(stage.ledger.asked["renew"]) > 3


@on_stage
async def test_progress_is_sent_also_while_the_renewal_is_nearly_due(stage: Stage) -> None:
    @stage.app.task("t")
    async def report(job: Job) -> str:
        await asyncio.sleep(JOB_TERMS.ttl_ms / 3_000 - 0.5)
        job.heartbeat({"at": "nearly a third of the term"})
        await asyncio.sleep(0.1)
        return "done"

    stage.ledger.put("run:step@1")
    async with stage.working():
        await stage.ledger.all_done(within_s=100)
    assert len(stage.ledger.progress) == 1


@on_stage
async def test_usage_is_sent_in_sums_with_renewals_and_the_result(stage: Stage) -> None:
    @stage.app.task("t")
    async def spend(job: Job) -> str:
        for _ in range(30):
            job.usage(tokens=10, calls=1)
            await asyncio.sleep(0.1)
        job.usage(tokens=5)
        raise ValueError("it failed, and the tokens are gone")

    stage.ledger.put("run:step@1")
    async with stage.working():
        await stage.ledger.all_done()
    first, second, third, *_ = stage.ledger.asked["renew"]
    assert first <= 10
    assert {second - first, third - second} <= {1_000, 1_001}
    assert stage.ledger.usage[0] == {"tokens": 10, "calls": 1}
    assert stage.ledger.usage == sorted(stage.ledger.usage, key=lambda told: told["tokens"])
    result = stage.ledger.results["run:step@1"]
    assert (result.status, result.usage) == ("failed", {"tokens": 305, "calls": 30})


@on_stage
async def test_usage_that_cannot_be_sent_waits_for_the_renewal_that_is_due(stage: Stage) -> None:
    stage.ledger.always("renew", Fault.AWAY)

    @stage.app.task("t")
    async def spend(job: Job) -> str:
        for _ in range(15):
            job.usage(tokens=1)
            await asyncio.sleep(1)
        return "done"

    stage.ledger.put("run:step@1")
    async with stage.working():
        await stage.ledger.all_done()
    assert len(stage.ledger.asked["renew"]) == 1
    assert stage.ledger.results["run:step@1"].usage == {"tokens": 15}


@on_stage
async def test_a_loop_that_stood_still_past_the_deadline_loses_the_job(stage: Stage) -> None:
    @stage.app.task("t")
    async def wedged(_job: Job) -> str:
        # Blocking code in an async handler: time passes, and the loop does not run.
        stage.clock.jump_ms += JOB_TERMS.trusted_ms
        return "too late"

    stage.ledger.put("run:step@1")
    async with stage.working():
        await stage.ledger.until(lambda: stage.ledger.leases["run:step@1"] == 2, within_s=200)
    assert stage.ledger.batches == []
    first = stage.told(events.JobAbandoned)[0]
    assert first.cause is FenceCause.DEADLINE
    assert first.stalled_ms >= JOB_TERMS.trusted_ms - 1_000


@on_stage
async def test_a_loop_that_stood_still_loses_its_neighbours_too_and_says_so(stage: Stage) -> None:
    handler = _endless(stage)
    async with stage.working():
        await handler.began.wait()
        stage.clock.jump_ms += 61_000
        await handler.stopped.wait()
        # It is noticed within a second of waking up, without another renewal.
        assert stage.ledger.asked["renew"] == []
    assert handler.lost is FenceCause.DEADLINE
    [stalled] = stage.told(events.LoopStalled)
    assert isinstance(stalled, events.LoopStalled)
    assert stalled.stalled_ms >= 60_000


@on_stage
async def test_the_term_counts_from_when_the_server_looked_not_from_the_long_poll(
    stage: Stage,
) -> None:
    handler = Endless()
    stage.app.task("t")(handler)
    async with stage.working(wait_s=20):
        await asyncio.sleep(15)
        stage.ledger.put("run:step@1")
        await stage.ledger.until(lambda: bool(stage.ledger.asked["renew"]), within_s=60)
    assert stage.ledger.asked["renew"][0] == 35_000


@on_stage
async def test_a_hundred_leases_are_renewed_in_one_call(stage: Stage) -> None:
    @stage.app.task("t")
    async def slow(_job: Job) -> None:
        await asyncio.sleep(50)

    async with stage.working(concurrency=100):
        for number in range(100):
            stage.ledger.put(f"run:{number}@1")
            await asyncio.sleep(0.01)
        await stage.ledger.all_done(within_s=100)
    assert len(stage.ledger.asked["renew"]) == 2
    assert set(stage.ledger.leases.values()) == {1}


@on_stage
async def test_one_lost_lease_of_many_stops_one_handler_only(stage: Stage) -> None:
    stopped: list[str] = []

    @stage.app.task("t")
    async def slow(job: Job) -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            stopped.append(job.job_id)
            raise

    for number in range(5):
        stage.ledger.put(f"run:{number}@1")
    async with stage.working():
        await stage.ledger.until(lambda: len(stage.ledger.leases) == 5)
        stage.ledger.take_away("run:3@1")
        await stage.ledger.until(lambda: len(stage.ledger.results) == 4, within_s=60)
    assert stopped == ["run:3@1"]


@on_stage
async def test_a_handler_that_ignores_its_cancellation_reports_nothing(stage: Stage) -> None:
    ended = asyncio.Event()

    @stage.app.task("t")
    async def stubborn(job: Job) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            assert job.lost is FenceCause.TAKEN
        await asyncio.sleep(5)
        with pytest.raises(LeaseLost):
            job.check()
        with pytest.raises(LeaseLost):
            job.heartbeat()
        ended.set()
        return "all the same"

    stage.ledger.put("run:step@1")
    async with stage.working():
        await stage.ledger.until(lambda: bool(stage.ledger.leases))
        stage.ledger.take_away("run:step@1")
        await ended.wait()
        await asyncio.sleep(1)
    assert stage.ledger.batches == []


@on_stage
async def test_while_a_result_cannot_be_told_its_lease_is_kept(stage: Stage) -> None:
    @stage.app.task("t")
    async def quick(_job: Job) -> None: ...

    stage.ledger.put("run:step@1")
    stage.ledger.always("results", Fault.AWAY)
    async with stage.working():
        await asyncio.sleep(120)
        assert len(stage.ledger.asked["renew"]) in range(5, 7)
        stage.ledger.always("results", Fault.NONE)
        await stage.ledger.all_done()
        await asyncio.sleep(120)
        # And not one renewal more once it is told.
        assert len(stage.ledger.asked["renew"]) in range(5, 7)
    assert stage.ledger.leases["run:step@1"] == 1


@on_stage
async def test_a_job_given_to_us_again_ends_the_older_handler(stage: Stage) -> None:
    lost: list[FenceCause | None] = []
    fences: list[int] = []

    @stage.app.task("t")
    async def endless(job: Job) -> None:
        fences.append(job.fence)
        try:
            await asyncio.Event().wait()
        finally:
            lost.append(job.lost)

    stage.ledger.put("run:step@1")
    async with stage.working():
        await stage.ledger.until(lambda: stage.ledger.leases["run:step@1"] == 1)
        await asyncio.sleep(1)
        # An operator's doing, or a store that lost its memory: it is given out once more.
        stage.ledger.put("run:step@1")
        await stage.ledger.until(lambda: stage.ledger.leases["run:step@1"] == 2)
        await asyncio.sleep(1)
        assert lost == [FenceCause.TAKEN]
    assert fences == sorted(fences)


@on_stage
async def test_whoever_failed_keeps_its_pause_and_does_not_go_along_with_others(
    stage: Stage,
) -> None:
    @stage.app.task("t")
    async def slow(_job: Job) -> None:
        await asyncio.sleep(40)

    stage.ledger.script("renew", Fault.AWAY)
    stage.ledger.put("run:1@1")
    async with stage.working():
        await asyncio.sleep(3)
        stage.ledger.put("run:2@1")
        await stage.ledger.all_done(within_s=60)
    [(first, _), (second, _), *_] = stage.ledger.renewed
    assert stage.ledger.asked["renew"][0] == 20_000
    assert stage.ledger.renewed[:2] == [(first, ("run:2@1",)), (second, ("run:1@1",))]
    assert (first, second) == (23_000, 37_700)


@on_stage
async def test_a_hook_that_raises_does_not_stop_the_renewals(stage: Stage) -> None:
    def rude(_event: events.WorkerEvent) -> None:
        raise RuntimeError("hook")

    stage.app = Worker(on_event=rude)

    @stage.app.task("t")
    async def slow(_job: Job) -> str:
        stage.clock.jump_ms += 5_000  # The loop stalls, and the hook is called from the renewer.
        await asyncio.sleep(100)
        return "done"

    stage.ledger.put("run:1@1")
    async with stage.working():
        await stage.ledger.all_done(within_s=200)
    assert stage.ledger.results["run:1@1"].output == "done"
    assert stage.app.counts["LoopStalled"] == 1


class Fleeting(HeldJob):
    """Its thread takes back both callbacks between any two looks of the event loop."""

    def __getattribute__(self, name: str) -> object:
        value: object = super().__getattribute__(name)
        if name in {"on_lost", "deadline"}:
            setattr(self, name, None)
        return value


@on_stage
async def test_a_thread_that_ends_while_its_lease_is_judged_harms_no_renewal(stage: Stage) -> None:
    causes: list[FenceCause] = []
    leased = LeasedJob(
        job_id="j", tenant="t", run_id="r", step_id="s", topic="t", attempt=1, input=None,
        fence=1, lease_ttl_ms=60_000, delivery=1,
    )  # fmt: skip
    now = stage.clock.moment()
    renewer = LeaseRenewer(WorkerApi(stage.wire, "w"), stage.clock, lambda: 0.5, lambda _: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(renewal, "HeldJob", Fleeting)
        held = renewer.hold(leased, now)
    held.deadline = deadline = SimpleNamespace(value=0)
    held.become(held.trust)
    assert deadline.value > 0
    held.on_lost = causes.append
    renewer.lost(held, "cancelled")
    assert causes == [FenceCause.CANCELLED]
    await renewer.close()
