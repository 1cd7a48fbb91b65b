"""A worker that writes down everything it was handed, did and was told, as it happens.

    python -m tests.chaos.worker careful|stubborn NAME FILE URL URL…

A *careful* one is the SDK's own worker: it drops what it has no lease for any more. A *stubborn*
one knows nothing of leases: it never renews, and sends every result until it is answered, however
late. What passes between them and the servers is written to the file, a line of JSON each, in one
piece and not buffered, and a server that fails is left for the next one, as a load balancer would.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec

from stanchion.transport.messages import HttpReply
from stanchion.wire.worker import (
    JobResult,
    LeaseAnswer,
    LeasedJob,
    LeaseRequest,
    ResultsAnswer,
    ResultsRequest,
)
from stanchion.worker import Job, Worker
from stanchion.worker.server import HttpTransport, TransportFailed

__all__ = ["TOPIC", "Handed", "Line", "Told", "read_lines"]

TOPIC: Final = "chaos.work"
_Verdict: TypeAlias = Literal["accepted", "stale_fence", "unknown_job", "already_finished"]
_OK: Final = 200
_CONCURRENCY: Final = 16
_WAIT_S: Final = 2.0
_ANSWER_S_MAX: Final = 3.0
_STUBBORN_S: Final = 20.0
"""Longer than it is made to stand still: jobs that came meanwhile are found, and done, late."""
_PAUSE_S: Final = 0.2


class Handed(msgspec.Struct, frozen=True, tag="handed"):
    """A job came in."""

    at: float
    job_id: str
    run_id: str
    step_id: str
    item: int | None
    attempt: int
    delivery: int
    fence: int


class Told(msgspec.Struct, frozen=True, tag="told"):
    """What a server said to a result."""

    at: float
    """By the time of day: the same for every process on this machine."""
    job_id: str
    fence: int
    status: str
    verdict: _Verdict


Line = Handed | Told


def read_lines(file: Path) -> list[Line]:
    """What a worker wrote. A line that was cut off by its death is not one."""
    whole = file.read_bytes().rpartition(b"\n")[0]
    return [msgspec.json.decode(line, type=Line) for line in whole.splitlines()]


class _Recording:
    """The way to the servers."""

    def __init__(self, urls: Sequence[str], file: int) -> None:
        self._ways = [HttpTransport(url) for url in urls]
        self._file = file

    async def post(self, path: str, body: bytes) -> HttpReply:
        way = self._ways[0]
        is_good = False
        try:
            answer = await way.post(path, body)
            is_good = answer.status == _OK
        finally:
            # Also when its time was over: whoever waits in vain goes elsewhere next time.
            if not is_good and way is self._ways[0]:
                self._ways.append(self._ways.pop(0))
        if is_good and path.endswith("/lease"):
            self._write_handed(msgspec.json.decode(answer.body, type=LeaseAnswer))
        elif is_good and path.endswith("/results"):
            asked = msgspec.json.decode(body, type=ResultsRequest)
            self._write_told(asked, msgspec.json.decode(answer.body, type=ResultsAnswer))
        return answer

    async def close(self) -> None:
        for way in self._ways:
            await way.close()

    def _write_handed(self, answer: LeaseAnswer) -> None:
        for job in answer.jobs:
            self._write(
                Handed(
                    at=time.time(),
                    job_id=job.job_id,
                    run_id=job.run_id,
                    step_id=job.step_id,
                    item=job.item,
                    attempt=job.attempt,
                    delivery=job.delivery,
                    fence=job.fence,
                )
            )

    def _write_told(self, asked: ResultsRequest, answer: ResultsAnswer) -> None:
        codes: dict[str, _Verdict] = {each.job_id: each.code for each in answer.rejected}
        for result in asked.results:
            verdict = codes.get(result.job_id, "accepted")
            self._write(
                Told(time.time(), result.job_id, result.fence, result.status, verdict=verdict)
            )

    def _write(self, line: Line) -> None:
        os.write(self._file, msgspec.json.encode(line) + b"\n")


async def _work(wish: dict[str, Any], attempt: int) -> bool:
    """What a job asks for, and whether it ends well."""
    await asyncio.sleep(wish["ms"] / 1000)
    return attempt > int(wish.get("fails", 0))


async def _be_careful(name: str, way: _Recording) -> None:
    app = Worker()

    @app.task(TOPIC)
    async def work(job: Job) -> int:
        if not await _work(job.input, job.attempt):
            raise RuntimeError("it is meant to fail at first")
        return job.attempt

    await app.run_over(way, worker_id=name, concurrency=_CONCURRENCY, wait_s=_WAIT_S)


async def _be_stubborn(name: str, way: _Recording) -> None:
    question = msgspec.json.encode(
        LeaseRequest(worker_id=name, topics=(TOPIC,), max_jobs=_CONCURRENCY, wait_s=_WAIT_S)
    )
    hands: set[asyncio.Task[None]] = set()
    while True:
        answer = await _asked(way, "/v1/worker/lease", question, _STUBBORN_S)
        if answer is None:
            await asyncio.sleep(_PAUSE_S)
            continue
        for job in msgspec.json.decode(answer.body, type=LeaseAnswer).jobs:
            hand = asyncio.create_task(_finish(name, way, job))
            hands.add(hand)
            hand.add_done_callback(hands.discard)


async def _finish(name: str, way: _Recording, job: LeasedJob) -> None:
    wish = msgspec.convert(job.input, dict[str, Any])
    result = JobResult(
        job_id=job.job_id,
        fence=job.fence,
        status="succeeded" if await _work(wish, job.attempt) else "failed",
    )
    body = msgspec.json.encode(ResultsRequest(worker_id=name, results=(result,)))
    while True:
        if await _asked(way, "/v1/worker/results", body, _ANSWER_S_MAX) is not None:
            return
        await asyncio.sleep(_PAUSE_S)


async def _asked(way: _Recording, path: str, body: bytes, within_s: float) -> HttpReply | None:
    try:
        async with asyncio.timeout(within_s):
            answer = await way.post(path, body)
    except (TransportFailed, TimeoutError):
        return None
    return answer if answer.status == _OK else None


async def _run(kind: str, name: str, path: Path, urls: Sequence[str]) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        way = _Recording(urls, file)
        await (_be_stubborn if kind == "stubborn" else _be_careful)(name, way)
    finally:
        os.close(file)


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:]))
