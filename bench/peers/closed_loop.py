"""A closed loop over any coroutine, with a fixed number of concurrent calls.

Uses only the standard library, because it runs in the peers' environment.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable

__all__ = ["closed_loop"]

KEPT_MAX = 2_000


async def closed_loop(
    once: Callable[[], Awaitable[object]], *, at_once: int, seconds: float, warm_s: float
) -> None:
    """Run for this long, and print the results in the form of ``bench.callers.Ran``."""
    await _round(once, at_once, warm_s)
    began_s = time.perf_counter()
    times_ms = sorted(await _round(once, at_once, seconds))
    took_s = time.perf_counter() - began_s
    kept = min(len(times_ms), KEPT_MAX)
    thinned = [times_ms[(number * len(times_ms)) // kept] for number in range(kept)]
    print(json.dumps({"runs": len(times_ms), "seconds": took_s, "latencies_ms": thinned}))


async def _round(
    once: Callable[[], Awaitable[object]], at_once: int, seconds: float
) -> list[float]:
    times_ms: list[float] = []
    ends_s = time.perf_counter() + seconds

    async def caller() -> None:
        while time.perf_counter() < ends_s:
            since_s = time.perf_counter()
            await once()
            times_ms.append((time.perf_counter() - since_s) * 1000)

    await asyncio.gather(*(caller() for _ in range(at_once)))
    return times_ms
