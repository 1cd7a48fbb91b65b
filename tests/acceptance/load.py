"""Load: callers and workers that go on through whatever happens to the servers.

Callers send a start with the same key until it is answered with a run. Workers send a result until
it is accepted or rejected. What was answered is written down, and held against the truth at the
end: every admitted run has finished, each step of it once.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import Any, Final

import httpx2

from tests.acceptance.caller import Answer, Caller
from tests.acceptance.signals import read_signals
from tests.acceptance.waiting import until
from tests.acceptance.worker import Job, success
from tests.acceptance.workflows import four_jobs

__all__ = ["JOBS_PER_RUN", "Load", "patiently"]

JOBS_PER_RUN: Final = 4
_PAUSE_S: Final = 0.05
_GAUGE_S: Final = 1.5
_PATIENCE_S: Final = 60.0
_TRY_AGAIN: Final = frozenset({429, 503})


async def patiently(
    caller: Caller,
    method: str,
    path: str,
    body: object,
    *,
    key: str | None = None,
    within_s: float = _PATIENCE_S,
) -> Answer:
    """Ask until there is an answer that is one."""
    until = time.monotonic() + within_s
    headers = {} if key is None else {"Idempotency-Key": key}
    last: object = None
    while time.monotonic() < until:
        try:
            answer = await caller.call(method, path, body, headers=headers, timeout_s=10)
        except httpx2.TransportError as error:
            last = repr(error)
        else:
            if answer.status not in _TRY_AGAIN:
                return answer
            last = answer.verdict
        await asyncio.sleep(_PAUSE_S)
    raise AssertionError(f"no answer to {method} {path} within {within_s} s; the last one: {last}")


class Load:
    """So many callers and workers of one tenant."""

    def __init__(self, caller: Caller, *, callers: int = 8, workers: int = 3) -> None:
        self.caller = caller
        self.topic = f"{caller.tenant}.load"
        self.runs: dict[str, str] = {}
        """What each key was answered with."""
        self.accepted: dict[str, set[int]] = defaultdict(set)
        """Under which fences each job was finished, as far as workers heard."""
        self._callers = callers
        self._workers = workers
        self._tasks: list[asyncio.Task[None]] = []
        self._is_starting = True

    async def begin(self, *, cap: int = 20) -> None:
        """Set it going."""
        await self.caller.configure(max_concurrent_runs=cap)
        await self.caller.apply("load", four_jobs(self.topic))
        for number in range(self._callers):
            self._tasks.append(asyncio.create_task(self._call(number)))
        for number in range(self._workers):
            self._tasks.append(asyncio.create_task(self._work(number)))

    async def reaches(self, runs: int, *, within_s: float = 30.0) -> None:
        """Wait until so many runs have been started in all."""
        async with asyncio.timeout(within_s):
            while len(self.runs) < runs:
                await self._look()

    async def more(self, runs: int, *, within_s: float = 30.0) -> None:
        """Wait until so many more runs have been started."""
        await self.reaches(len(self.runs) + runs, within_s=within_s)

    async def end(self, *, within_s: float = 30.0) -> None:
        """Start no more, and wait until all that was started has finished."""
        self._is_starting = False
        try:
            async with asyncio.timeout(within_s):
                await asyncio.gather(*self._tasks[: self._callers])
                while await self.caller.unfinished():
                    await self._look()
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Leave everything as it is."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def check(self) -> None:
        """Every run finished, each step once; nothing is left anywhere."""
        listed = {run["run_id"]: run["status"] for run in await self.caller.runs()}
        assert len(set(self.runs.values())) == len(self.runs), "two keys, one run"
        assert set(self.runs.values()) <= set(listed), "an admitted run is gone"
        # Whoever was cut off while asking may have made a run, but asked again with its key.
        assert len(listed) == len(self.runs), "a key made two runs"
        assert set(listed.values()) == {"succeeded"}
        for fences in self.accepted.values():
            assert len(fences) == 1, "a job was finished twice"
        for run_id in listed:
            lines = await self.caller.timeline(run_id)
            assert _ends(lines) == _EXPECTED, (run_id, lines)
        assert await self.caller.dead_letters() == []
        await until(self._is_quiet)
        # Gauges are a look behind: what were left over would show in the next one.
        await asyncio.sleep(_GAUGE_S)
        assert await self._is_quiet()
        await self._every_slot_is_back()

    async def _is_quiet(self) -> bool:
        signals = await read_signals(self.caller)
        assert signals.sum("stanchion_slot_drift_total") == 0
        pending = signals.sum("stanchion_bus_pending_messages")
        active = signals.sum("stanchion_runs_active", tenant=self.caller.tenant)
        return pending == 0 and active == 0

    async def _every_slot_is_back(self) -> None:
        """With a cap of one, one is let in only if none is counted."""
        await self.caller.configure(max_concurrent_runs=1)
        run_id = (await self.caller.start("load")).run_id
        await self.caller.cancel(run_id)

    async def _call(self, number: int) -> None:
        count = 0
        while self._is_starting:
            key = f"{number}-{count}"
            body = {"input": {"n": count}}
            answer = await patiently(self.caller, "POST", "/v1/workflows/load/runs", body, key=key)
            self.runs[key] = answer.run_id
            count += 1

    async def _work(self, number: int) -> None:
        worker_id = f"worker-{number}"
        body = {"worker_id": worker_id, "topics": [self.topic], "max_jobs": 8, "wait_s": 1.0}
        while True:
            answer = await patiently(self.caller, "POST", "/v1/worker/lease", body)
            assert answer.status == 200, answer.text
            jobs: list[Job] = answer.body["jobs"]
            if jobs:
                await self._finish(worker_id, jobs)

    async def _finish(self, worker_id: str, jobs: list[Job]) -> None:
        fences = {job["job_id"]: job["fence"] for job in jobs}
        results = [success(job, {"by": worker_id}) for job in jobs]
        body = {"worker_id": worker_id, "results": results}
        answer = await patiently(self.caller, "POST", "/v1/worker/results", body)
        assert answer.status == 200, answer.text
        for job_id in answer.body["accepted"]:
            self.accepted[job_id].add(fences[job_id])
        assert {each["code"] for each in answer.body["rejected"]} <= _LOST_A_RACE

    async def _look(self) -> None:
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()
        await asyncio.sleep(_PAUSE_S)


_LOST_A_RACE: Final = {"stale_fence", "already_finished"}
"""Its lease ran out while the servers were away, and another worker had the job since."""
_EXPECTED: Final = {
    ("run_started", None): 1,
    ("step_succeeded", "first"): 1,
    ("delay_started", "pause"): 1,
    ("step_succeeded", "pause"): 1,
    ("item_succeeded", "each"): 3,
    ("step_succeeded", "each"): 1,
    ("run_succeeded", None): 1,
}


def _ends(lines: list[dict[str, Any]]) -> dict[tuple[str, str | None], int]:
    counted: dict[tuple[str, str | None], int] = defaultdict(int)
    for line in lines:
        if line["what"].endswith(("_succeeded", "_failed", "_started")):
            counted[line["what"], line["step"]] += 1
    counted.pop(("items_started", "each"), None)
    return dict(counted)
