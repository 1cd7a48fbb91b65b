"""The workers of a research agent, with models that return fixed answers.

Plan, search, write and check are steps of an agent. Here each is a function that waits briefly and
returns a fixed answer, so that every run is the same. Start them with

    stanchion worker examples.agents:app --url http://127.0.0.1:8420

The steps of research.yaml and publish-report.yaml define the inputs of the jobs.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

import stanchion

app = stanchion.Worker()


@app.task("agent.plan")
async def plan(job: stanchion.Job) -> dict[str, Any]:
    """Split a question into searches."""
    await asyncio.sleep(0.05)
    question = job.input["question"].rstrip("?")
    return {"queries": [f"{question}: {part}" for part in ("materials", "history", "failures")]}


@app.task("agent.search")
async def search(job: stanchion.Job) -> dict[str, Any]:
    """Run one search. For a third of the searches the first attempt fails."""
    await asyncio.sleep(0.1)
    luck = zlib.crc32(job.input["q"].encode())
    if job.attempt == 1 and luck % 3 == 0:
        raise RuntimeError("the search engine did not answer")
    return {"query": job.input["q"], "found": 1 + luck % 9}


@app.task("agent.write")
def write(job: stanchion.Job) -> dict[str, Any]:
    """Write the report. A blocking function runs in a thread while its lease is renewed."""
    lines = [f"- {each['query']}: {each['found']} sources" for each in job.input["text"]]
    return {"text": "\n".join([job.input["title"], *lines])}


@app.task("agent.check")
async def check(job: stanchion.Job) -> dict[str, Any]:
    """Check the report."""
    return {"ok": bool(job.input["text"])}
