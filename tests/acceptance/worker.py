"""A worker that speaks the protocol by hand: lease, renew, results."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from tests.acceptance.caller import Caller, fresh_name

__all__ = ["Job", "Worker", "failure", "success"]

Job = dict[str, Any]
_JOBS_MAX: Final = 1000


def success(job: Job, output: object = None) -> dict[str, object]:
    """The result that says: done."""
    return {
        "job_id": job["job_id"],
        "fence": job["fence"],
        "status": "succeeded",
        "output": output,
    }


def failure(job: Job, message: str = "it broke") -> dict[str, object]:
    """The result that says: try again."""
    return {
        "job_id": job["job_id"],
        "fence": job["fence"],
        "status": "failed",
        "error": message,
    }


class Worker:
    """Takes jobs of some topics, and does what the test says."""

    def __init__(self, caller: Caller, *topics: str, name: str | None = None) -> None:
        self.caller = caller
        self.topics = topics
        self.name = name or fresh_name("worker")

    async def lease(self, *, max_jobs: int = 1, wait_s: float = 0.0) -> list[Job]:
        body = {
            "worker_id": self.name,
            "topics": list(self.topics),
            "max_jobs": max_jobs,
            "wait_s": wait_s,
        }
        answer = await self.caller.call("POST", "/v1/worker/lease", body)
        assert answer.status == 200, answer.text
        jobs: list[Job] = answer.body["jobs"]
        assert len(jobs) <= max_jobs
        return jobs

    async def one(self, *, within_s: float = 10.0) -> Job:
        """The next job, which must come in time."""
        jobs = await self.lease(wait_s=within_s)
        assert jobs, f"no job for {self.topics} within {within_s} s"
        return jobs[0]

    async def renew(self, *jobs: Job) -> dict[str, Any]:
        leases = [{"job_id": job["job_id"], "fence": job["fence"]} for job in jobs]
        body = {"worker_id": self.name, "leases": leases}
        answer = await self.caller.call("POST", "/v1/worker/renew", body)
        assert answer.status == 200, answer.text
        return answer.body

    async def send(self, *results: dict[str, object]) -> dict[str, Any]:
        body = {"worker_id": self.name, "results": list(results)}
        answer = await self.caller.call("POST", "/v1/worker/results", body)
        assert answer.status == 200, answer.text
        return answer.body

    async def finish(self, job: Job, output: object = None) -> None:
        """Send a result that must be taken."""
        answer = await self.send(success(job, output))
        assert answer == {"accepted": [job["job_id"]], "rejected": []}, answer

    async def fail(self, job: Job, message: str = "it broke") -> None:
        answer = await self.send(failure(job, message))
        assert answer == {"accepted": [job["job_id"]], "rejected": []}, answer

    async def do_all(self, count: int, *, within_s: float = 30.0) -> list[Job]:
        """Do so many jobs, in batches, and say which they were."""
        done: list[Job] = []
        async with asyncio.timeout(within_s):
            while len(done) < count:
                jobs = await self.lease(max_jobs=min(_JOBS_MAX, count - len(done)), wait_s=1.0)
                if jobs:
                    await self._finish_all(jobs)
                    done += jobs
        return done

    async def _finish_all(self, jobs: Sequence[Job]) -> None:
        answer = await self.send(*(success(job) for job in jobs))
        assert answer["rejected"] == [], answer
