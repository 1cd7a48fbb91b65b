"""Two processes that want the same names, for tests.

python -m tests.leases.rivals URL NAMESPACE COUNT docile|stubborn     holders
python -m tests.leases.rivals URL NAMESPACE COUNT polite|eager        rivals

Holders take every name and work until they are stopped; stubborn ones go on for a while. Polite
rivals wait in line for every name, and come back when the store fails; eager ones ask the store all
the time and heed nothing. Everybody says when they are ready; then what happens, a line each:

    NAME held FENCE             NAME stopped MICROSECONDS CAUSE             NAME granted FENCE
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import stanchion
from stanchion.adapters.locks.redis import RedisLocks
from stanchion.ports.errors import BackendError
from stanchion.ports.locks import Granted

TTL_S = 1.5
_EAGER_S = 0.02
_WORK_S = 0.005
_REST_S = 0.05
_STUBBORN_S = 4.0


def say(*words: object) -> None:
    print(*words, flush=True)  # noqa: T201 - this process speaks by printing


async def work() -> None:
    await asyncio.sleep(_WORK_S)


async def hold(leases: stanchion.Leases, name: str, *, is_stubborn: bool) -> None:
    stopped_us = 0
    try:
        async with leases.hold(name) as lease:
            say(name, "held", lease.fence)
            try:
                while True:
                    await work()
            finally:
                if is_stubborn:
                    await asyncio.sleep(_STUBBORN_S)
                # As late as can be: what a body does last, it does here.
                stopped_us = time.time_ns() // 1_000
    except stanchion.LeaseLost as lost:
        say(name, "stopped", stopped_us, lost.cause)


async def wait(leases: stanchion.Leases, name: str) -> None:
    while True:
        try:
            async with leases.hold(name, wait_s=60) as lease:
                say(name, "granted", lease.fence)
                return
        except stanchion.LeaseUnavailable:
            await asyncio.sleep(_REST_S)


async def grab(locks: RedisLocks, name: str) -> None:
    while True:
        try:
            answer = await locks.acquire(name, "rival", ttl_ms=60_000, within_ms=100)
        except BackendError:
            await asyncio.sleep(_EAGER_S)
            continue
        if isinstance(answer, Granted):
            say(name, "granted", answer.fence)
            return
        await asyncio.sleep(_EAGER_S)


async def main(url: str, namespace: str, count: str, manner: str) -> None:
    names = [f"name-{number}" for number in range(int(count))]
    async with stanchion.Leases(url, namespace=namespace, ttl_s=TTL_S) as leases:
        locks = await RedisLocks.open(url, namespace=namespace)
        does: dict[str, Callable[[str], Coroutine[Any, Any, None]]] = {
            "docile": lambda name: hold(leases, name, is_stubborn=False),
            "stubborn": lambda name: hold(leases, name, is_stubborn=True),
            "polite": lambda name: wait(leases, name),
            "eager": lambda name: grab(locks, name),
        }
        say("ready")
        await asyncio.gather(*(does[manner](name) for name in names))
        await locks.close()


if __name__ == "__main__":
    logging.disable()
    asyncio.run(main(*sys.argv[1:]))
