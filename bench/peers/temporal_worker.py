"""Temporal's worker process: ``python -m bench.peers.temporal_worker ADDRESS``."""

from __future__ import annotations

import asyncio
import sys

from temporalio.client import Client  # type: ignore[import-not-found] # in the peers' environment
from temporalio.worker import Worker  # type: ignore[import-not-found] # in the peers' environment

from bench.peers.temporal_app import QUEUE, ThreeSteps, step

__all__: list[str] = []


async def main(address: str) -> None:
    client = await Client.connect(address)
    await Worker(
        client,
        task_queue=QUEUE,
        workflows=[ThreeSteps],
        activities=[step],
        max_concurrent_activities=64,
        max_concurrent_workflow_tasks=64,
    ).run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
