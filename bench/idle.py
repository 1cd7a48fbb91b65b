"""An idle system: the time from a start until a waiting worker has leased its job.

    python -m bench.idle SPEC        prints the times, as JSON

The worker's lease request waits at the server before the run is started. With two replicas the run
is started on one and the worker waits on the other, so a bell must be sent.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AbstractContextManager
from statistics import median

import msgspec
import uvloop

from bench.apart import apart, percentile
from bench.connection import as_bytes, connect
from bench.http import BODY, PATH
from bench.pace import Pace
from bench.row import Row, below
from bench.serving import Site, distributed, embedded
from bench.workflows import ONE_JOB

__all__ = ["rows"]

TIMES, TIMES_QUICK = 200, 20
PAUSE_S = 0.03
WORKER = "waiting"


class Visit(msgspec.Struct, frozen=True):
    """The servers to start on and to wait on, and the number of repetitions."""

    starts_at: str
    waits_at: str
    times: int


class _Leased(msgspec.Struct):
    job_id: str
    fence: int


class _Handed(msgspec.Struct):
    jobs: list[_Leased]


def rows(pace: Pace) -> list[Row]:
    """Measure both."""
    return [
        _row("embedded", embedded(), 10, pace),
        _row("on two replicas", distributed(2), 15, pace),
    ]


def _row(name: str, opening: AbstractContextManager[Site], ceiling_ms: float, pace: Pace) -> Row:
    times = TIMES_QUICK if pace.is_quick else TIMES
    with opening as site:
        site.prepare({"one-job": ONE_JOB})
        visit = Visit(site.urls[0], site.urls[-1], times)
        with apart("bench.idle", visit, list[float], times * 0.2) as waited:
            times_ms = sorted(waited())
    note = f"p99 {percentile(times_ms, 0.99):.1f} ms"
    label = f"start to first step leased, idle, {name}"
    return below(label, median(times_ms), "ms", ceiling_ms, note)


# ── In that process ──────────────────────────────────────────────────────────────────────────────


async def run(visit: Visit) -> list[float]:
    """Start a run and lease its job, repeatedly."""
    starting, waiting = await connect(visit.starts_at), await connect(visit.waits_at)
    start = as_bytes("POST", visit.starts_at + PATH, BODY)
    question = {"worker_id": WORKER, "topics": ["bench.nobody"], "max_jobs": 1, "wait_s": 20}
    ask = as_bytes("POST", f"{visit.waits_at}/v1/worker/lease", _text(question))
    times_ms = []
    for _ in range(visit.times):
        handing = asyncio.create_task(waiting.ask(ask))
        await asyncio.sleep(PAUSE_S)  # By then the lease request waits, and the system is idle.
        began_s = time.perf_counter()
        starting_answer = asyncio.create_task(starting.ask(start))
        handed = await handing
        times_ms.append((time.perf_counter() - began_s) * 1000)
        assert (await starting_answer).status == "200"
        (job,) = msgspec.json.decode(handed.body, type=_Handed).jobs
        result = {"job_id": job.job_id, "fence": job.fence, "status": "succeeded"}
        report = {"worker_id": WORKER, "results": [result]}
        url = f"{visit.waits_at}/v1/worker/results"
        assert (await waiting.ask(as_bytes("POST", url, _text(report)))).status == "200"
    return times_ms


def _text(body: object) -> str:
    return msgspec.json.encode(body).decode()


if __name__ == "__main__":
    print(
        msgspec.json.encode(uvloop.run(run(msgspec.json.decode(sys.argv[1], type=Visit)))).decode()
    )
