"""A worker whose handlers do almost nothing: ``stanchion worker bench.worker_app:app``."""

from __future__ import annotations

from bench.workflows import TOPICS
from stanchion import Job, Worker

__all__ = ["app"]

app = Worker()


async def step(job: Job) -> dict[str, int]:
    """Add one, as every peer's steps do."""
    match job.input:
        case {"n": int(number)}:
            return {"n": number + 1}
        case other:
            raise ValueError(f"no number in {other!r}")


for topic in TOPICS:
    app.task(topic)(step)
