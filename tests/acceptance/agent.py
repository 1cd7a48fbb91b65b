"""A worker process on our own SDK that never finishes anything.

    python -m tests.acceptance.agent URL TOPIC

It says which job it got, as a line of JSON, and goes on renewing it until it is killed.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

import stanchion

__all__: list[str] = []


async def main(url: str, topic: str) -> None:
    app = stanchion.Worker()

    @app.task(topic)
    async def stay(job: stanchion.Job) -> None:
        words = msgspec.json.encode({"job_id": job.job_id, "fence": job.fence})
        sys.stdout.buffer.write(words + b"\n")
        sys.stdout.flush()
        await asyncio.Event().wait()

    await app.run(url)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
