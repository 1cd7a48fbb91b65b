"""DBOS, a library: workflow, steps and callers are one process on one SQLite file.

python -m bench.peers.dbos_runs FILE AT_ONCE SECONDS WARM_S
"""

from __future__ import annotations

import asyncio
import sys

from dbos import DBOS  # type: ignore[import-not-found] # installed in the peers' environment only

from bench.peers.closed_loop import closed_loop

__all__: list[str] = []


@DBOS.step()  # type: ignore[untyped-decorator] # dbos is not installed where types are checked
async def step(number: int) -> int:
    return number + 1


@DBOS.workflow()  # type: ignore[untyped-decorator] # as above
async def three_steps(number: int) -> int:
    for _ in range(3):
        number = await step(number)
    return number


async def main(file: str, at_once: int, seconds: float, warm_s: float) -> None:
    config = {
        "name": "bench",
        "system_database_url": f"sqlite:///{file}",
        "run_admin_server": False,
        "log_level": "ERROR",
    }
    DBOS(config=config)
    DBOS.launch()

    async def once() -> None:
        handle = await DBOS.start_workflow_async(three_steps, 7)
        result = await handle.get_result()
        assert result == 10, result

    await closed_loop(once, at_once=at_once, seconds=seconds, warm_s=warm_s)
    DBOS.destroy()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])))
