"""A worker of its own process, for tests that kill, signal and reload it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

from stanchion import FinalError, Job, Worker

app = Worker()


@app.task("echo")
async def echo(job: Job) -> object:
    return job.input


@app.task("blocking")
def blocking(job: Job) -> str:
    time.sleep(float(str(job.input)))
    return "slept"


@app.task("wedge")
async def wedge(job: Job) -> str:
    if job.delivery == 1:
        time.sleep(float(str(job.input)))  # noqa: ASYNC251 - the mistake that this is about
    return f"delivery {job.delivery}"


@app.task("wedge.later")
async def wedge_while_asking(job: Job) -> str:
    if job.delivery == 1:
        await asyncio.sleep(0.2)  # Meanwhile the worker asks for more jobs.
        time.sleep(float(str(job.input)))  # noqa: ASYNC251 - the mistake that this is about
    return f"delivery {job.delivery}"


def _burn(job: Job) -> str:
    ends_at = time.perf_counter() + (float(str(job.input)) if job.delivery == 1 else 0)
    while time.perf_counter() < ends_at:
        pass
    return f"delivery {job.delivery}"


@app.task("burn.async")
async def burn_on_the_loop(job: Job) -> str:
    return _burn(job)


@app.task("burn.thread")
def burn_in_a_thread(job: Job) -> str:
    return _burn(job)


@app.task("compute", executor="process")
def compute(job: Job) -> dict[str, object]:
    job.heartbeat({"half": True})
    job.usage(calls=2)
    return {"pid": os.getpid(), "double": 2 * int(str(job.input))}


def _seen() -> list[str]:
    script = "import os; print(*sorted(n for n in os.environ if n.startswith('STANCHION_')))"
    command = [sys.executable, "-c", script]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    own = (name for name in os.environ if name.startswith("STANCHION_"))
    return sorted({*own, *child.stdout.split()})


@app.task("environment.thread")
def environment_in_a_thread(_job: Job) -> list[str]:
    return _seen()


@app.task("environment.process", executor="process")
def environment_in_a_process(_job: Job) -> list[str]:
    return _seen()


@app.task("compute.fail", executor="process")
def fail(_job: Job) -> None:
    raise FinalError("cannot", code="no_way")


@app.task("compute.raise", executor="process")
def raise_what_is_no_exception(_job: Job) -> None:
    raise asyncio.CancelledError("of a task inside")  # as asyncio.run raises it


@app.task("compute.die", executor="process")
def die(job: Job) -> str:
    if job.delivery == 1 and job.input == "first":
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


@app.task("compute.hang", executor="process")
def hang(job: Job) -> str:
    if job.delivery == 1:
        time.sleep(3_600)
    return f"delivery {job.delivery}"
