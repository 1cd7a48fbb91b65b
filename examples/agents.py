"""A research agent's workers, with models that always say the same.

Plan, search and write are what an agent does; here each is a function that takes a moment and gives
a fixed answer, so that everybody sees the same run. Start them with

    stanchion worker examples.agents:app --url http://127.0.0.1:8420

A job's input is what the step of the workflow says: see research.yaml and publish-report.yaml.
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
    """Find something for one of them. The first try at a third of them fails, as searches do."""
    await asyncio.sleep(0.1)
    luck = zlib.crc32(job.input["q"].encode())
    if job.attempt == 1 and luck % 3 == 0:
        raise RuntimeError("the search engine did not answer")
    return {"query": job.input["q"], "found": 1 + luck % 9}


@app.task("agent.write")
def write(job: stanchion.Job) -> dict[str, Any]:
    """Write it down. A blocking function: it runs in a thread, and its lease is kept meanwhile."""
    lines = [f"- {each['query']}: {each['found']} sources" for each in job.input["text"]]
    return {"text": "\n".join([job.input["title"], *lines])}


@app.task("agent.check")
async def check(job: stanchion.Job) -> dict[str, Any]:
    """Look it over."""
    return {"ok": bool(job.input["text"])}
