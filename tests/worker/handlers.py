"""A worker of its own process, for tests that kill, signal and reload it."""

from __future__ import annotations

import os
import signal
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


@app.task("compute", executor="process")
def compute(job: Job) -> dict[str, object]:
    job.heartbeat({"half": True})
    return {"pid": os.getpid(), "double": 2 * int(str(job.input))}


@app.task("compute.fail", executor="process")
def fail(_job: Job) -> None:
    raise FinalError("cannot", code="no_way")


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
