"""Programs that a drill runs as processes of their own.

    python -m stanchion.drills.programs burst URLS TENANT WORKFLOW CALLERS EVERY_S SECONDS SEED

``burst`` sends bursts of starts on behalf of one tenant, so that the processor time of its callers
is not taken from those that the drill measures. A workflow that does not exist makes
them requests that ask no gate: the control.
"""

from __future__ import annotations

import asyncio
import sys
import time
from random import Random

from stanchion.drills.callers import DrillTenant

__all__: list[str] = []


async def _burst(urls: str, tenant: str, workflow: str, *numbers: str) -> None:
    callers, every_s, seconds, seed = int(numbers[0]), *map(float, numbers[1:])
    chance = Random(seed)  # noqa: S311 - repeatable on purpose
    target = DrillTenant(urls.split(","), tenant)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.monotonic()
        await target.burst(workflow, callers, chance)
        await asyncio.sleep(max(0.0, began + every_s - time.monotonic()))
    await target.close()


if __name__ == "__main__":
    _name, *_arguments = sys.argv[1:]
    asyncio.run({"burst": _burst}[_name](*_arguments))
