"""The real thing: a worker over HTTP, with threads and processes, killed, signalled and wedged."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stanchion.adapters.system import ManualClock
from stanchion.config import OPTIONS
from stanchion.core.lease import FenceCause
from stanchion.wire.worker import JobError, JobResult
from stanchion.worker import Job, Worker, processes
from stanchion.worker.events import JobAbandoned, WorkerEvent
from stanchion.worker.processes import _ChildHold
from stanchion.worker.worker import SECRET_VARIABLES
from tests.worker.handlers import app as everything
from tests.worker.ledger import Fault, Ledger, serving

ROOT = Path(__file__).parents[2]


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


@asynccontextmanager
async def _working(app: Worker, url: str, concurrency: int = 10) -> AsyncIterator[None]:
    running = asyncio.create_task(app.run(url, concurrency=concurrency, drain_s=5))
    try:
        yield
    finally:
        app.stop()
        await running


@asynccontextmanager
async def _process(url: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys; from stanchion.worker.command import run_worker;"
        "sys.exit(run_worker(sys.argv[1], sys.argv[2], drain_s=float(sys.argv[3])))",
        "tests.worker.handlers:app",
        url,
        *arguments,
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_ten_thousand_jobs_a_hundred_at_a_time_none_lost_none_twice() -> None:
    app = Worker()

    @app.task("async")
    async def quick(job: Job) -> object:
        await asyncio.sleep(0)
        return job.input

    @app.task("blocking")
    def blocking(job: Job) -> object:
        return job.input

    ledger = Ledger(_now_ms)
    count = 10_000
    for number in range(count):
        ledger.put(f"run:{number}@1", "async" if number % 4 else "blocking", number)
    # And the network is not at its best.
    ledger.script("results", *[Fault.AWAY, Fault.NONE, Fault.LOST_REPLY, Fault.CUT] * 5)
    ledger.script("lease", *[Fault.NONE, Fault.AWAY, Fault.CUT] * 5)
    async with serving(ledger) as url, _working(app, url, concurrency=100):
        await ledger.all_done(within_s=60)
    assert len(ledger.accepted) == count
    assert set(ledger.accepted.values()) == {1}
    assert set(ledger.leases.values()) == {1}
    assert all(ledger.results[f"run:{each}@1"].output == each for each in range(count))
    assert ledger.rejected == []


async def test_a_blocking_handler_of_many_terms_keeps_its_lease() -> None:
    # Two minutes at the usual term of one: scaled, so that nobody waits for it.
    app = Worker()
    threads: list[str] = []

    @app.task("t")
    def blocking(job: Job) -> str:
        threads.append(threading.current_thread().name)
        for _ in range(20):
            time.sleep(0.15)
            job.check()
        return "done"

    ledger = Ledger(_now_ms, ttl_ms=1_500)
    ledger.put("run:step@1")
    async with serving(ledger) as url, _working(app, url):
        await ledger.all_done()
    assert ledger.leases["run:step@1"] == 1
    assert ledger.results["run:step@1"].output == "done"
    assert len(ledger.asked["renew"]) >= 5
    assert threads == ["stanchion-worker-0"]


async def test_a_blocking_handler_learns_that_its_lease_is_lost_and_reports_nothing() -> None:
    abandoned = asyncio.Event()

    def notice(event: WorkerEvent) -> None:
        if isinstance(event, JobAbandoned):
            abandoned.set()

    app = Worker(on_event=notice)
    loop = asyncio.get_running_loop()
    began = asyncio.Event()

    @app.task("t")
    def blocking(job: Job) -> str:
        loop.call_soon_threadsafe(began.set)
        while job.lost is None:
            time.sleep(0.01)
        return "too late"

    ledger = Ledger(_now_ms, ttl_ms=600)
    ledger.put("run:step@1")
    async with serving(ledger) as url, _working(app, url):
        await began.wait()
        ledger.take_away("run:step@1")
        async with asyncio.timeout(5):
            await abandoned.wait()
    assert ledger.batches == []


async def test_a_worker_killed_in_the_middle_of_a_job_loses_it_to_another() -> None:
    ledger = Ledger(_now_ms, ttl_ms=1_000)
    ledger.put("run:step@1", "blocking", 3600)
    async with serving(ledger) as url:
        async with _process(url, "5") as process:
            await ledger.until(lambda: ledger.leases["run:step@1"] == 1)
            process.send_signal(signal.SIGKILL)
            await process.wait()
        app = Worker()
        seen: list[int] = []
        app.task("blocking")(lambda job: seen.append(job.delivery))
        async with _working(app, url):
            await ledger.all_done()
    assert seen == [2]
    assert dict(ledger.accepted) == {"run:step@1": 1}


async def test_a_wedged_loop_loses_its_job_and_the_late_result_goes_nowhere() -> None:
    ledger = Ledger(_now_ms, ttl_ms=1_000)
    async with serving(ledger) as url, _process(url, "5"):
        ledger.put("run:step@1", "wedge", 1.5)
        await ledger.all_done()
    assert ledger.leases["run:step@1"] == 2
    assert ledger.results["run:step@1"].output == "delivery 2"
    assert ledger.rejected == []


async def test_a_computing_async_handler_loses_its_lease_and_says_why_and_a_thread_keeps_it(
    tmp_path: Path,
) -> None:
    ledger = Ledger(_now_ms, ttl_ms=1_000)
    async with serving(ledger) as url, _logged(tmp_path / "log", url, _HANDLERS):
        ledger.put("run:async@1", "burn.async", 1.5)
        await ledger.all_done()
        ledger.put("run:thread@1", "burn.thread", 1.5)
        await ledger.all_done()
    assert ledger.leases == {"run:async@1": 2, "run:thread@1": 1}
    assert ledger.results["run:async@1"].output == "delivery 2"
    assert ledger.results["run:thread@1"].output == "delivery 1"
    [line] = re.findall(".*job_lock_abandoned.*", (tmp_path / "log").read_text(encoding="utf-8"))
    said = json.loads(line)
    assert (said["job_id"], said["cause"]) == ("run:async@1", "deadline")
    assert said["stalled_ms"] > 500
    assert "and could not renew; put blocking code into a def handler" in said["hint"]


async def test_a_blocked_loop_is_named_for_the_lease_that_came_while_it_was_blocked(
    tmp_path: Path,
) -> None:
    # The request for more jobs is answered with the same job, and that lease expires unread.
    ledger = Ledger(_now_ms, ttl_ms=1_000)
    async with serving(ledger) as url, _logged(tmp_path / "log", url, _HANDLERS):
        ledger.put("run:step@1", "wedge.later", 3.5)
        await ledger.all_done()
    assert ledger.results["run:step@1"].output == "delivery 3"
    lines = re.findall(".*job_lock_abandoned.*", (tmp_path / "log").read_text(encoding="utf-8"))
    said = [json.loads(line) for line in lines]
    assert [each["cause"] for each in said] == ["deadline", "deadline"]
    assert all(each["stalled_ms"] > 2_000 for each in said), said
    assert all("put blocking code into a def handler" in each["hint"] for each in said), said


_PROGRAM = """
import sys
import stanchion

app = stanchion.Worker()

@app.task("double", executor="process")
def double(job):
    return 2 * job.input

{start}
"""


@pytest.mark.parametrize("is_guarded", [True, False])
async def test_a_program_with_handlers_in_processes_needs_a_guard_and_is_told_so(
    tmp_path: Path, is_guarded: bool
) -> None:
    start = "app.serve(sys.argv[1])"
    program, log = tmp_path / "program.py", tmp_path / "log"
    guarded = f'if __name__ == "__main__":\n    {start}'
    program.write_text(_PROGRAM.format(start=guarded if is_guarded else start), encoding="utf-8")
    ledger = Ledger(_now_ms)
    ledger.put("run:step@1", "double", 21)
    async with serving(ledger) as url, _logged(log, url, (str(program), url)):
        await ledger.all_done()
    result, said = ledger.results["run:step@1"], log.read_text(encoding="utf-8")
    if is_guarded:
        assert result.output == 42
    else:
        assert isinstance(result.error, JobError)
        assert result.error.code == "process_died"
    assert ('put it under if __name__ == "__main__":' in said) == (not is_guarded)


_HANDLERS = ("-m", "stanchion", "worker", "tests.worker.handlers:app")


@asynccontextmanager
async def _logged(log: Path, url: str, arguments: Sequence[str]) -> AsyncIterator[None]:
    """A worker in a process of its own that writes its log into a file."""
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            cwd=ROOT,
            env={"STANCHION_URL": url, "PYTHONPATH": str(ROOT)},
            stderr=file,
        )
        try:
            yield
        finally:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_drains(number: signal.Signals) -> None:
    ledger = Ledger(_now_ms)
    ledger.put("run:step@1", "blocking", 0.5)
    async with serving(ledger) as url, _process(url, "20") as process:
        await ledger.until(lambda: ledger.leases["run:step@1"] == 1)
        process.send_signal(number)
        assert await process.wait() == 0
    assert ledger.results["run:step@1"].output == "slept"


async def test_the_second_signal_forces_also_when_a_thread_will_not_end() -> None:
    ledger = Ledger(_now_ms)
    ledger.put("run:step@1", "blocking", 3600)
    async with serving(ledger) as url, _process(url, "60") as process:
        await ledger.until(lambda: ledger.leases["run:step@1"] == 1)
        # Two kinds: a second SIGTERM that comes before the first was handled is the same signal,
        # and a third one could end a process that is just leaving.
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(30):
            assert await process.wait() == 0
    assert ledger.results == {}


async def test_an_interrupt_that_a_thread_raises_fails_its_attempt_only() -> None:
    app = Worker()

    @app.task("t")
    def work(job: Job) -> str:
        if job.input == "raise":
            raise KeyboardInterrupt
        return "done"

    ledger = Ledger(_now_ms)
    ledger.put("run:0@1", "t", "raise")
    async with serving(ledger) as url, _working(app, url):
        await ledger.all_done()
        ledger.put("run:1@1", "t", "work")
        await ledger.all_done()
    told = JobError(message="RuntimeError: the handler raised KeyboardInterrupt")
    assert ledger.results["run:0@1"].error == told
    assert ledger.results["run:1@1"].output == "done"


async def test_a_handler_in_a_process_returns_notes_and_fails_like_any_other() -> None:
    ledger = Ledger(_now_ms, ttl_ms=2_000)
    ledger.put("run:0@1", "compute", 21)
    ledger.put("run:1@1", "compute.fail")
    ledger.put("run:2@1", "compute.die", "first")
    ledger.put("run:3@1", "compute.die", "second")
    ledger.put("run:4@1", "compute.raise")
    async with serving(ledger) as url, _working(everything, url):
        await ledger.all_done()
    computed = ledger.results["run:0@1"].output
    assert ledger.results["run:0@1"].usage == {"calls": 2}
    assert isinstance(computed, dict)
    assert computed["double"] == 42
    assert computed["pid"] != os.getpid()
    failed = ledger.results["run:1@1"].error
    assert failed == JobError(message="cannot", code="no_way", retryable=False)
    died = ledger.results["run:2@1"].error
    assert died == JobError(message="its process ended: signal 9", code="process_died")
    assert ledger.results["run:3@1"].output == "alive"
    raised = ledger.results["run:4@1"].error
    assert raised == JobError(message="CancelledError: of a task inside")


async def test_a_job_in_a_process_is_killed_when_its_lease_is_lost() -> None:
    ledger = Ledger(_now_ms, ttl_ms=2_000)
    ledger.put("run:step@1", "compute.hang")
    async with serving(ledger) as url, _working(everything, url):
        await ledger.until(lambda: ledger.leases["run:step@1"] == 1)
        before = everything.counts["JobAbandoned"]
        ledger.take_away("run:step@1")
        await ledger.until(lambda: everything.counts["JobAbandoned"] > before)
        await ledger.all_done()
    assert ledger.results["run:step@1"].output == "delivery 2"


async def test_no_handler_sees_keys_and_store_urls_in_its_environment(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("sk_from_a_file\n", encoding="utf-8")
    secrets = {name: "not for handlers" for name in SECRET_VARIABLES if "API_KEY" not in name}
    ledger = Ledger(_now_ms)
    ledger.put("run:0@1", "environment.thread")
    ledger.put("run:1@1", "environment.process")
    async with serving(ledger) as url:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "stanchion", "worker", "tests.worker.handlers:app"),
            cwd=ROOT,
            env={"STANCHION_URL": url, "STANCHION_API_KEY_FILE": str(key_file)} | secrets,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await ledger.all_done()
        finally:
            process.kill()
            await process.wait()
    assert ledger.keys == {"Bearer sk_from_a_file"}
    assert ledger.results["run:0@1"].output == ["STANCHION_URL"]
    assert ledger.results["run:1@1"].output == ["STANCHION_URL"]


def test_every_secret_option_of_a_server_is_hidden_from_handlers() -> None:
    options = {option.variable for option in OPTIONS if option.is_secret}
    assert options | {"STANCHION_API_KEY"} == set(SECRET_VARIABLES)


def test_threads_of_a_process_send_one_at_a_time_and_nothing_after_the_result() -> None:
    sent: list[str] = []
    is_sending, may_go_on = threading.Event(), threading.Event()

    def send(message: tuple[str, bytes]) -> None:
        if message[0] == "note":
            is_sending.set()
            may_go_on.wait(10)
        sent.append(message[0])

    hold = _ChildHold(cast("Any", SimpleNamespace(send=send)), cast("Any", None))
    noting = threading.Thread(target=hold.note, args=({"page": 1},))
    noting.start()
    assert is_sending.wait(10)
    using = threading.Thread(target=hold.use, args=({"tokens": 1},))
    using.start()
    using.join(0.05)
    assert sent == []
    may_go_on.set()
    noting.join(10)
    using.join(10)
    hold.end(JobResult(job_id="run:0@1", fence=1, status="succeeded"))
    hold.use({"tokens": 2})
    assert sent == ["note", "use", "result"]


def test_a_child_trusts_its_lease_until_the_deadline_and_not_at_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock()
    monkeypatch.setattr(processes, "BootClock", lambda: clock)
    hold = _ChildHold(cast("Any", None), cast("Any", SimpleNamespace(value=5)))
    causes: list[FenceCause | None] = []
    for passed_ms in (4, 1):
        clock.advance(passed_ms)
        causes.append(hold.lost)
    assert causes == [None, FenceCause.DEADLINE]
