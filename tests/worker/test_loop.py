"""A worker asks for as much as it has room for, backs off, and leaves in good order."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from stanchion import telemetry
from stanchion.core.lease import FenceCause
from stanchion.wire.worker import JobError
from stanchion.worker import FinalError, Job, JobFailed, Worker, WorkerRefused, events
from stanchion.worker.worker import RunOptions
from tests.worker.ledger import Fault
from tests.worker.stage import Stage, on_stage


@on_stage
async def test_a_handler_gets_the_job_and_its_return_value_is_the_output(stage: Stage) -> None:
    seen: list[Job] = []

    @stage.app.task("agent.plan")
    async def plan(job: Job) -> dict[str, object]:
        seen.append(job)
        return {"queries": [1, 2], "of": job.input}

    stage.ledger.put("run:step@1", "agent.plan", {"question": "why"})
    async with stage.working():
        await stage.ledger.all_done()
    [job] = seen
    assert (job.topic, job.tenant, job.run_id, job.step_id) == ("agent.plan", "acme", "run", "step")
    assert (job.attempt, job.delivery, job.fence, job.item) == (1, 1, 1, None)
    result = stage.ledger.results["run:step@1"]
    assert result.status == "succeeded"
    assert result.output == {"queries": [1, 2], "of": {"question": "why"}}


@pytest.mark.parametrize("is_failure", [False, True])
@on_stage
async def test_the_end_of_a_job_is_an_event_with_its_duration(
    stage: Stage, is_failure: bool
) -> None:
    @stage.app.task("t")
    async def work(_job: Job) -> None:
        await asyncio.sleep(2)
        if is_failure:
            raise ValueError("bad")

    stage.ledger.put("run:step@1")
    async with stage.working():
        await stage.ledger.all_done()
    (ended,) = stage.told(events.JobEnded)
    assert (ended.job_id, ended.topic, ended.took_ms) == ("run:step@1", "t", 2_000)
    assert ended.status == stage.ledger.results["run:step@1"].status


@pytest.mark.parametrize("is_lost", [False, True])
@on_stage
async def test_the_span_of_a_job_says_how_it_ended(stage: Stage, is_lost: bool) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    began = asyncio.Event()

    @stage.app.task("t")
    async def work(_job: Job) -> None:
        began.set()
        await asyncio.sleep(100)

    stage.ledger.put("run:step@1", traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
    telemetry.tracing = telemetry.Tracing(provider, None)
    try:
        async with stage.working():
            await began.wait()
            await asyncio.sleep(1)
            if is_lost:
                stage.ledger.revoke("run:step@1", "expired")
                await asyncio.sleep(5)
            else:
                await stage.ledger.all_done(within_s=200)
    finally:
        telemetry.tracing = None
    [span] = exporter.get_finished_spans()
    outcome = (span.attributes or {})[telemetry.OUTCOME]
    assert outcome == (str(FenceCause.TAKEN) if is_lost else "succeeded")
    said = "the lease was lost: taken" if is_lost else None
    assert span.status.description == said


@on_stage
async def test_spans_go_to_the_tracer_provider_that_the_program_has_set(stage: Stage) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    @stage.app.task("t")
    async def work(_job: Job) -> None: ...

    stage.ledger.put("run:step@1", traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
        patched.setattr(trace, "get_tracer_provider", lambda: provider)
        patched.setattr(telemetry, "tracing", None)
        async with stage.working():
            await stage.ledger.all_done()
    assert [span.name for span in exporter.get_finished_spans()] == ["handle t"]


class _Odd(BaseException):
    """Not an ``Exception``, and still no reason to keep a job."""


class _ModelBusy(FinalError):
    """A failure with members of its own, and without ours."""

    def __init__(self, model: str) -> None:
        Exception.__init__(self, f"{model} is busy")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("bad"), JobError(message="ValueError: bad")),
        (SystemExit(3), JobError(message="SystemExit: 3")),
        (_Odd("as some libraries do"), JobError(message="_Odd: as some libraries do")),
        (JobFailed("busy", code="model_busy"), JobError(message="busy", code="model_busy")),
        (
            FinalError("no such page", code="gone"),
            JobError(message="no such page", code="gone", retryable=False),
        ),
        (JobFailed(KeyError("page")), JobError(message="'page'")),
        (JobFailed(TimeoutError(), code="slow"), JobError(message="TimeoutError", code="slow")),
        (_ModelBusy("m7"), JobError(message="_ModelBusy: m7 is busy", retryable=False)),
        (asyncio.CancelledError(), JobError(message="CancelledError")),
    ],
)
@on_stage
async def test_what_a_handler_raises_is_told(
    stage: Stage, error: BaseException, told: JobError
) -> None:
    @stage.app.task("t")
    async def fails(_job: Job) -> None:
        raise error

    stage.ledger.put("run:step@1")
    async with stage.working():
        await stage.ledger.all_done()
    result = stage.ledger.results["run:step@1"]
    assert (result.status, result.error) == ("failed", told)


@on_stage
async def test_no_more_jobs_are_taken_than_there_is_room_for(stage: Stage) -> None:
    at_once: list[int] = []
    running = 0

    @stage.app.task("t")
    async def slow(_job: Job) -> None:
        nonlocal running
        running += 1
        at_once.append(running)
        await asyncio.sleep(1)
        running -= 1

    for number in range(40):
        stage.ledger.put(f"run:{number}@1")
    async with stage.working(concurrency=7):
        await stage.ledger.all_done()
    assert max(at_once) == 7
    assert stage.ledger.largest_lease == 7


@on_stage
async def test_results_that_nobody_takes_leave_no_room_for_more(stage: Stage) -> None:
    handled = 0

    @stage.app.task("t")
    async def quick(_job: Job) -> None:
        nonlocal handled
        handled += 1

    for number in range(100):
        stage.ledger.put(f"run:{number}@1")
    stage.ledger.always("results", Fault.AWAY)
    async with stage.working(concurrency=10):
        await asyncio.sleep(15)
        assert handled in range(10, 21)
        stage.ledger.always("results", Fault.NONE)
        await stage.ledger.all_done()
    assert handled == 100


@on_stage
async def test_while_the_server_is_away_a_worker_asks_less_and_less_often(stage: Stage) -> None:
    @stage.app.task("t")
    async def quick(_job: Job) -> None: ...

    stage.chance = 0.999
    stage.ledger.always("lease", Fault.CUT)
    async with stage.working():
        await asyncio.sleep(60)
        asked = stage.ledger.asked["lease"]
        waits = [after - before for before, after in itertools.pairwise(asked)]
        assert waits[:6] == pytest.approx([200, 400, 800, 1_600, 3_200, 5_000], abs=10)
        assert all(wait in range(4_990, 5_001) for wait in waits[6:])
        stage.ledger.always("lease", Fault.NONE)
        stage.ledger.put("run:step@1")
        await stage.ledger.all_done()
    assert stage.app.counts["ServerAway"] == 1
    assert stage.app.counts["ServerBack"] == 1


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.AWAY])
@on_stage
async def test_even_the_unluckiest_worker_never_asks_in_a_tight_loop(
    stage: Stage, fault: Fault
) -> None:
    @stage.app.task("t")
    async def quick(_job: Job) -> None: ...

    stage.chance = 0.0
    stage.ledger.always("lease", fault)
    async with stage.working():
        await asyncio.sleep(10)
    assert len(stage.ledger.asked["lease"]) <= 10 * 20 + 1


@on_stage
async def test_a_server_that_says_nothing_at_once_is_not_asked_in_a_tight_loop(
    stage: Stage,
) -> None:
    @stage.app.task("t")
    async def quick(_job: Job) -> None: ...

    stage.chance = 0.999
    async with stage.working(wait_s=0):
        await asyncio.sleep(60)
        assert len(stage.ledger.asked["lease"]) in range(30, 40)
        stage.ledger.put("run:step@1")
        await stage.ledger.all_done()


@on_stage
async def test_an_idle_worker_asks_once_a_long_poll(stage: Stage) -> None:
    @stage.app.task("t")
    async def quick(_job: Job) -> None: ...

    async with stage.working(wait_s=20):
        await asyncio.sleep(119)
        assert len(stage.ledger.asked["lease"]) == 6


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.INVALID])
@on_stage
async def test_a_worker_that_is_not_wanted_says_so_and_leaves(stage: Stage, fault: Fault) -> None:
    @stage.app.task("t")
    async def quick(_job: Job) -> None: ...

    stage.ledger.always("lease", fault)
    async with stage.working() as running:
        with pytest.raises(WorkerRefused, match="said the script"):
            await running
    assert len(stage.ledger.asked["lease"]) == 1
    assert stage.wire.is_closed


# ── Leaving ──────────────────────────────────────────────────────────────────────────────────────


@on_stage
async def test_a_worker_that_is_stopped_finishes_what_it_has_and_takes_nothing_new(
    stage: Stage,
) -> None:
    @stage.app.task("t")
    async def slow(_job: Job) -> str:
        await asyncio.sleep(20)
        return "done"

    stage.ledger.put("run:1@1")
    async with stage.working(concurrency=5, drain_s=30) as running:
        await stage.ledger.until(lambda: len(stage.ledger.leases) == 1)
        stage.app.stop()
        await asyncio.sleep(1)
        stage.ledger.put("run:2@1")
        await running
    assert list(stage.ledger.results) == ["run:1@1"]
    assert stage.ledger.leases["run:2@1"] == 0
    assert stage.clock.moment() in range(20_000, 20_100)


@on_stage
async def test_jobs_that_are_on_their_way_when_a_worker_is_stopped_are_finished(
    stage: Stage,
) -> None:
    @stage.app.task("t")
    async def quick(_job: Job) -> str:
        return "done"

    async with stage.working() as running:
        await stage.ledger.until(lambda: bool(stage.ledger.asked["lease"]))
        stage.app.stop()
        await asyncio.sleep(0.1)
        stage.ledger.put("run:1@1")
        await running
    assert list(stage.ledger.results) == ["run:1@1"]
    assert len(stage.ledger.asked["lease"]) == 1


@on_stage
async def test_an_idle_worker_that_is_stopped_leaves_within_a_moment(stage: Stage) -> None:
    stage.app.task("t")(print)
    async with stage.working() as running:
        await stage.ledger.until(lambda: bool(stage.ledger.asked["lease"]))
        stage.app.stop()
        await running
    assert stage.clock.moment() <= 300


@on_stage
async def test_after_its_time_a_handler_is_cancelled_and_its_job_left_to_expire(
    stage: Stage,
) -> None:
    lost: list[object] = []

    @stage.app.task("t")
    async def endless(job: Job) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            lost.append(job.lost)

    stage.ledger.put("run:1@1")
    async with stage.working(drain_s=30) as running:
        await stage.ledger.until(lambda: len(stage.ledger.leases) == 1)
        stage.app.stop()
        await running
    assert lost == [None]
    assert stage.ledger.batches == []
    assert stage.clock.moment() in range(30_000, 30_100)
    [abandoned] = stage.told(events.JobAbandoned)
    assert isinstance(abandoned, events.JobAbandoned)
    assert abandoned.cause == "shutdown"


@on_stage
async def test_while_a_worker_drains_its_leases_are_renewed(stage: Stage) -> None:
    @stage.app.task("t")
    async def slow(_job: Job) -> None:
        await asyncio.sleep(95)

    stage.ledger.put("run:1@1")
    async with stage.working(drain_s=200) as running:
        await stage.ledger.until(lambda: len(stage.ledger.leases) == 1)
        stage.app.stop()
        await running
    assert len(stage.ledger.asked["renew"]) == 4
    assert stage.ledger.accepted["run:1@1"] == 1


@on_stage
async def test_told_twice_a_worker_leaves_at_once(stage: Stage) -> None:
    @stage.app.task("t")
    async def slow(_job: Job) -> None:
        await asyncio.sleep(100)

    stage.ledger.put("run:1@1")
    async with stage.working(drain_s=200) as running:
        await stage.ledger.until(lambda: len(stage.ledger.leases) == 1)
        stage.app.stop()
        await asyncio.sleep(1)
        stage.app.stop()
        await running
    assert stage.clock.moment() in range(1_000, 1_100)


@on_stage
async def test_a_handler_that_will_not_be_cancelled_does_not_hold_up_the_leaving(
    stage: Stage,
) -> None:
    freed = asyncio.Event()

    @stage.app.task("t")
    async def stubborn(_job: Job) -> None:
        while not freed.is_set():
            try:
                await freed.wait()
            except asyncio.CancelledError:
                continue

    stage.ledger.put("run:1@1")
    async with stage.working(drain_s=10) as running:
        await stage.ledger.until(lambda: len(stage.ledger.leases) == 1)
        stage.app.stop()
        await running
    assert stage.clock.moment() in range(10_000, 13_000)
    freed.set()
    await asyncio.sleep(1)


@on_stage
async def test_a_worker_whose_task_is_cancelled_leaves_nothing_running(stage: Stage) -> None:
    stopped = asyncio.Event()

    @stage.app.task("t")
    async def endless(_job: Job) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    stage.ledger.put("run:1@1")
    async with stage.working() as running:
        await stage.ledger.until(lambda: len(stage.ledger.leases) == 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert stopped.is_set()
    assert asyncio.all_tasks() == {asyncio.current_task()}


# ── What cannot work is said before anything is asked ────────────────────────────────────────────


def test_a_topic_has_one_handler() -> None:
    app = Worker()
    app.task("t")(print)
    with pytest.raises(ValueError, match="'t' has a handler already"):
        app.task("t")(print)


@pytest.mark.parametrize("topic", ["", "a b", ".a", "a..b", "a\n", "x" * 129])
def test_a_topic_that_no_workflow_can_name_is_refused(topic: str) -> None:
    with pytest.raises(ValueError, match="is no topic"):
        Worker().task(topic)(print)


def test_an_async_handler_has_no_executor() -> None:
    async def handler(_job: Job) -> None: ...

    with pytest.raises(ValueError, match="runs on the loop"):
        Worker().task("t", executor="thread")(handler)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency must be"),
        ({"wait_s": 61}, "wait_s must be"),
        ({"drain_s": -1}, "drain_s must not"),
    ],
)
@on_stage
async def test_options_out_of_range_are_refused(
    stage: Stage, options: RunOptions, message: str
) -> None:
    stage.app.task("t")(print)
    with pytest.raises(ValueError, match=message):
        await stage.app.run_over(stage.wire, **options)


@on_stage
async def test_a_worker_without_tasks_is_refused(stage: Stage) -> None:
    with pytest.raises(ValueError, match="has no tasks"):
        await stage.app.run_over(stage.wire)


@on_stage
async def test_a_handler_in_a_process_must_be_importable(stage: Stage) -> None:
    stage.app.task("t", executor="process")(lambda job: job)
    with pytest.raises(ValueError, match="at the top of a module"):
        await stage.app.run_over(stage.wire)


@pytest.mark.parametrize("code", ["", "Bad Code", "x" * 65, "é"])
def test_a_code_that_the_server_would_refuse_is_refused_where_it_is_written(code: str) -> None:
    with pytest.raises(ValueError, match="is no code"):
        FinalError("x", code=code)


def test_a_job_for_a_test_of_ones_own_needs_a_topic_only() -> None:
    job = Job("t", {"q": 1})
    job.check()
    job.heartbeat({"at": 1})
    assert (job.input, job.lost, threading.active_count() > 0) == ({"q": 1}, None, True)
    with pytest.raises(ValueError, match="progress of"):
        job.heartbeat("x" * 4_096)
    for wrong in (b"x", {"a": {1}}, float("nan"), object()):
        with pytest.raises(ValueError, match="progress is not JSON"):
            job.heartbeat(wrong)  # type: ignore[arg-type]  # the mistake that this is about


def test_usage_adds_up_and_refuses_what_the_server_would() -> None:
    job = Job("t")
    job.usage(tokens=2)
    job.usage(tokens=3, calls=0)
    assert job.used == {"tokens": 5, "calls": 0}
    wrong: list[dict[str, object]] = [
        {"tokens": -1},
        {"tokens": 1.5},
        {"tokens": True},
        {"tokens": 10**12},
        {"": 1},
        {"a b": 1},
        {"x" * 65: 1},
        {f"n{number}": 1 for number in range(15)},
    ]
    for amounts in wrong:
        with pytest.raises(ValueError, match=r"amount|name|at most"):
            job.usage(**amounts)  # type: ignore[arg-type]  # the mistakes that this is about
    assert job.used == {"tokens": 5, "calls": 0}
