"""Temporal's callers: ``python -m bench.peers.temporal_load ADDRESS AT_ONCE SECONDS WARM_S``."""

from __future__ import annotations

import asyncio
import sys
import uuid

from temporalio.client import Client  # type: ignore[import-not-found] # in the peers' environment

from bench.peers.closed_loop import closed_loop
from bench.peers.temporal_app import QUEUE, ThreeSteps

__all__: list[str] = []


async def main(address: str, at_once: int, seconds: float, warm_s: float) -> None:
    client = await Client.connect(address)

    async def once() -> None:
        name = uuid.uuid4().hex
        result = await client.execute_workflow(ThreeSteps.run, 7, id=name, task_queue=QUEUE)
        assert result == 10, result

    await closed_loop(once, at_once=at_once, seconds=seconds, warm_s=warm_s)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])))
